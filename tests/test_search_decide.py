"""Which batch sizes fit, by what has run and what has failed, and what is run next."""

import math
from dataclasses import replace

import numpy as np
import pytest
from refusals import cases
from search_records import BUDGET, QUESTION, SPACE, Workload, record, step_time

from bstune.core.question import Question
from bstune.core.records import Budget
from bstune.core.space import Space
from bstune.search.choices import Choices
from bstune.search.curve_decision import GIVE_UP, choose_for_curve
from bstune.search.decide import best_in_draw, propose
from bstune.search.findings import lr_exponent_quantiles, predictions
from bstune.search.fit import (
    SurveyedSizes,
    chance_to_fit,
    inferred_multiple,
    sizes_that_fit,
    sizes_to_try,
)
from bstune.search.law import B_CRIT, LEVEL, make_law
from bstune.search.limits import affordable_length, limit_after_hit
from bstune.search.posterior import Posterior, sample_posterior

STATUS = {"m": "out of memory", "r": "refused"}


def records_of(text):
    """Trials by their batch sizes: ``64`` ran, ``512m`` was out of memory, ``36r`` refused."""
    records = []
    for number, word in enumerate(text.split()):
        status = STATUS.get(word[-1], "reached")
        size = int(word.rstrip("mr"))
        steps = 100 if status == "reached" else 0
        records.append(record(number, status, batch_size=size, steps=steps))
    return records


@cases("""
trials | fits | low | high
null | {} | 8 | 512
# One example always fits.
512m | {} | 8 | 22
# Another process took the memory.
64m 128 | {} | 8 | 512
# Too small for the user's code: it is a multiple of all that divides 128.
32r 128 | {} | 64 | 512
# A survey's ends, and what a trial found beside them.
null | {largest_fit: 100, smallest_unfit: 400} | 8 | 200
64 90m | {largest_fit: 100, smallest_unfit: 400} | 8 | 75
# Sizes that the user's code refused in a survey: too small a multiple, and too large.
null | {largest_fit: 256, ran: [16, 64], refused: [8]} | 16 | 512
null | {largest_fit: 64, ran: [16, 64], refused: [256]} | 8 | 128
""")
def test_the_sizes_that_are_worth_a_trial(trials, fits, low, high):
    narrowed = sizes_to_try(SPACE, records_of(trials or ""), SurveyedSizes(**fits))
    assert (narrowed.low, narrowed.high) == (low, high)


@cases("""
trials | low | high
64 512m | 8 | 64
32r 64r 128 | 128 | 512
""")
def test_the_sizes_that_fit_as_far_as_is_known(trials, low, high):
    narrowed = sizes_that_fit(SPACE, records_of(trials), SurveyedSizes())
    assert (narrowed.low, narrowed.high) == (low, high)


@cases("""
trials | chances
64 512m 256m | {8: 1, 64: 1, 128: 0.5, 256: 0, 512: 0}
128 32r 64r | {32: 0, 64: 0, 91: 0.5077, 128: 1, 500: 1}
# What failed between sizes that ran is left out itself.
40 48r 56 50m | {40: 1, 47: 1, 48: 0, 50: 0, 52: 1}
""")
def test_the_chance_is_log_uniform_between_what_ran_and_what_failed(trials, chances):
    found = chance_to_fit(list(chances), records_of(trials))
    assert found == pytest.approx(list(chances.values()), abs=1e-4)


def test_of_two_equal_sizes_the_one_that_fits_is_chosen():
    same = np.ones(2)
    choices = Choices(same, same, 0 * same, same, same, same, 100 * same, np.array([0.1, 0.9]))
    assert best_in_draw(choices, schedule_ends=False, has_reached=True) == 1


def test_an_inferred_multiple_is_one_of_the_space_too():
    space = Space(6, 500, 0.001, 1.0, "sqrt", (48, 0.05), multiple=6)
    narrowed = sizes_to_try(space, records_of("48 30r"))
    assert (narrowed.low, narrowed.high, narrowed.multiple) == (12, 492, 12)


@cases("""
trained | refused | multiple
[64] | [42] | 4
[64, 24] | [42, 20] | 8
# BatchNorm at one example says nothing of multiples.
[64] | [1] | 1
# 7 divides both that ran, and what was refused; so does no other number up to 32.
[49, 98] | [70] | 1
""")
def test_a_multiple_explains_what_ran_and_what_was_refused(trained, refused, multiple):
    assert inferred_multiple(set(trained), set(refused)) == multiple


def search(workload, count, space=SPACE):
    """Run a search of so many trials."""
    records = []
    for number in range(count):
        proposal = propose(QUESTION, space, step_time, records, 0)
        records.append(workload.train(number, proposal, records))
    return records


@pytest.mark.parametrize("rule", ["none", "saturating"])
def test_a_search_finds_the_fastest_configuration_under_each_rule(rule):
    """The best rate grows as the square root of B, through twice the anchor's rate."""
    space = replace(SPACE, rule=rule)
    records = search(Workload(noise=0.1), 40, space)
    posterior = sample_posterior(QUESTION, space, records, seed=0)
    found = min(predictions(posterior, QUESTION, step_time), key=lambda one: one.log_value).record
    steps = Workload().steps(found.batch_size, found.lr)
    # S_min (1 + 40/B)(0.001 + 0.00001 B) is least at B = sqrt(4000).
    best = math.sqrt(4000)
    assert steps * step_time(found.batch_size) < 1.25 * 100 * (1 + 40 / best) * step_time(best)
    low, _, high = lr_exponent_quantiles(posterior)
    assert low - 0.1 < 0.5 < high + 0.1


@pytest.mark.parametrize(
    "space",
    [
        replace(SPACE, low=16, high=496, multiple=16),
        # The best rates lie at the edge of their range, to which many proposals are moved.
        Space(64, 64, 0.01, 0.02, "none", (64, 0.02)),
        # The rule leaves the range of rates.
        Space(8, 4096, 0.01, 0.02, "linear", (8, 0.01)),
    ],
)
def test_proposals_stay_inside_the_space_and_none_is_made_twice(space):
    records = search(Workload(noise=0.1), 30, space)
    for one in records:
        assert one.batch_size in range(space.low, space.high + 1, space.multiple)
        assert space.lr_low <= one.lr <= space.lr_high
        assert 1 <= one.max_steps <= QUESTION.budget.last_step(one.batch_size)
    new = [(one.batch_size, one.lr) for one in records if one.resumed_from is None]
    assert len(set(new)) == len(new)
    resumed = [one for one in records if one.resumed_from is not None]
    for one in resumed:
        parent = records[one.resumed_from]
        of_parent = ("pruned", parent.batch_size, parent.lr, parent.seed)
        assert (parent.status, one.batch_size, one.lr, one.seed) == of_parent
        assert one.max_steps > parent.steps
    assert len({one.resumed_from for one in resumed}) == len(resumed) > 0


def test_a_trial_is_resumed_by_one_only():
    """One that is about to reach the target, beside a much slower best one."""
    history = tuple((step, 0.1 * (52 / step) ** 0.5) for step in range(20, 51))
    pruned = record(1, "pruned", lr=0.1, steps=50, max_steps=50, history=history)
    records = [record(0, steps=400, steps_low=390), pruned]
    proposal = propose(QUESTION, SPACE, step_time, records, 0)
    assert (proposal.resumed_from, proposal.batch_size, proposal.lr) == (1, 64, 0.1)
    # It may run on as long as it can still beat the best one, 1.2 times over.
    assert 52 < proposal.max_steps <= 1.2 * 400
    # A process that resumes it, or one that has failed to, keeps others away.
    failed = record(2, "failed", lr=0.1, resumed_from=1, steps=50)
    for more, running in (([], [record(2, lr=0.1, resumed_from=1)]), ([failed], [])):
        beside = propose(QUESTION, SPACE, step_time, [*records, *more], 0, running)
        assert beside.resumed_from is None


@cases("""
steps | budget | is_resumed
94 | 4000 | true
# It has already taken longer than 1.2 times the best.
130 | 4000 | false
# Its budget is spent.
94 | 94 | false
""")
def test_what_is_worth_resuming(steps, budget, is_resumed):
    # The first promises nothing better than the best, but little is left of it.
    history = tuple((step, 0.1 * (1.05 * steps / step) ** 0.5) for step in range(40, steps + 1))
    records = [record(number, lr=0.05 + 0.001 * number) for number in range(8)]
    records.append(record(8, "pruned", batch_size=60, steps=steps, history=history))
    question = Question(QUESTION.target, Budget(steps=budget))
    got = [propose(question, SPACE, step_time, records, seed).resumed_from for seed in range(12)]
    assert (got.count(8) >= 7) == is_resumed
    assert (8 in got) == is_resumed


def test_the_same_arguments_give_the_same_proposal():
    records = search(Workload(), 3)
    first, again, of_other_seed = (
        propose(QUESTION, SPACE, step_time, records, seed) for seed in (5, 5, 6)
    )
    beside = propose(QUESTION, SPACE, step_time, records, 5, [record(len(records))])
    assert first == again
    assert first not in (of_other_seed, beside)


# A new one gets the lesser of 0.4 times 1.2 times the best's and 0.6 times its own steps. From 3/4
# of that on it gets 1.2 times the best's; it runs on by 1.3.
LIMITS = [[100, 1000, 0, 48], [100, 50, 0, 30], [100, 1000, 36, 120], [100, 70, 100, 130]]


@pytest.mark.parametrize("best_steps, predicted, first_step, limit", LIMITS)
def test_the_limit_once_the_target_was_reached(best_steps, predicted, first_step, limit):
    assert limit_after_hit(best_steps, predicted, first_step) == pytest.approx(limit)


# All that was spent, so that costs double; then half of it, or 1.2 times the best's.
@pytest.mark.parametrize("best_steps, length", [(None, 500), (100, 250), (400, 480)])
def test_the_longest_schedule_that_is_affordable(best_steps, length):
    assert affordable_length(500, 6400, best_steps) == pytest.approx(length)


@pytest.mark.parametrize(
    "records, low, high",
    [
        # A 64th of the budget.
        ([], 100, 100),
        # A fifth of what was spent, in steps of the smallest or the largest size.
        ([record(status="missed", steps=6400)], 342, 1944),
    ],
)
def test_how_far_a_new_trial_goes(records, low, high):
    question = Question(QUESTION.target, Budget(steps=6400))
    for seed in range(10):
        proposal = propose(question, SPACE, step_time, records, seed)
        assert proposal.resumed_from is None
        assert low <= proposal.max_steps <= high


@cases("""
status | fields
failed | {steps: 0}
pruned | {history: [[0, null]], steps: 0}
missed | {steps: 4000}
diverged | {}
pruned | {history: [[40, 0.4], [100, 0.4]]}
""")
def test_odd_records_have_a_proposal(status, fields):
    for count in (1, 8):
        records = [record(number, status, **fields) for number in range(count)]
        proposal = propose(QUESTION, SPACE, step_time, records, 0)
        assert SPACE.low <= proposal.batch_size <= SPACE.high
        assert proposal.max_steps >= 1


@pytest.mark.parametrize("objective", ["time", "curve"])
def test_sizes_that_do_not_fit_are_not_proposed(objective):
    question = replace(QUESTION, objective=objective)
    short = [record(0, steps=400), record(1, "out of memory", batch_size=256, steps=0)]
    refused = [*short, record(2, "refused", batch_size=36, steps=0)]

    def size(records, seed, **arguments):
        return propose(question, SPACE, step_time, records, seed, **arguments).batch_size

    for seed in range(4):
        # The geometric mean of 64 and 256.
        assert size(short, seed) <= 128
        # 64 is a multiple of 8, 36 of 4 only.
        assert size(refused, seed) % 8 == 0
        assert size([], seed, fits=SurveyedSizes(90, 100)) <= 94


def test_the_first_evaluation_comes_by_a_twentieth_of_the_predicted_steps():
    records = search(Workload(noise=0.1), 12)
    asked = [propose(QUESTION, SPACE, step_time, records, seed) for seed in range(4)]
    for new in [one for one in asked if one.resumed_from is None]:
        steps = Workload().steps(new.batch_size, new.lr)
        assert steps / 40 <= new.first_evaluation <= steps / 10


def test_a_trial_stops_at_a_multiple_of_its_expected_steps_and_is_not_resumed_from_there():
    """Draws at the prior's means, but for B_crit; what the middle batch size takes is known."""
    law = make_law(SPACE, BUDGET, misfit=False)
    theta = np.tile(law.mean, (4000, 1))
    theta[:, B_CRIT] = 0.3 * np.random.default_rng(0).standard_normal(4000)
    theta[:, LEVEL] = 4.0
    posterior = Posterior(law, theta, rows=None, chains=())

    def choose(sizes, ran):
        x = np.log2(sizes)
        z = law.best_rate(theta, x).mean(axis=0)
        return choose_for_curve(posterior, x, z, np.array(ran), np.ones(len(sizes)))

    # The middle one, 64, tells nothing of B_crit.
    chosen, last = choose([8, 64], [0.0, 0.0])
    expected = math.exp(np.median(law.curve(theta, np.array([3.0]))))
    assert chosen == 0
    assert last == pytest.approx(GIVE_UP * expected)
    assert choose([8, 8, 64], [math.ceil(last), 0.0, 0.0])[0] == 1
