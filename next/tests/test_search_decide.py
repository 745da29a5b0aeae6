import math
from dataclasses import replace

import numpy as np
import pytest
from search_records import QUESTION, SPACE, Workload, record, step_time

from bstune.core.question import Question
from bstune.core.records import Budget
from bstune.core.space import Space
from bstune.search.choices import informed
from bstune.search.decide import propose
from bstune.search.findings import lr_exponent_quantiles, predictions
from bstune.search.fit import Ends
from bstune.search.law import NOISE
from bstune.search.limits import affordable_length, limit_after_hit
from bstune.search.posterior import BOUND, VALUE, Rows, sample_posterior


def search(workload, count, space=SPACE, question=QUESTION, **arguments):
    """Run a search of so many trials."""
    records = []
    for number in range(count):
        proposal = propose(question, space, step_time, records, 0, **arguments)
        records.append(workload.train(number, proposal, records))
    return records


def found_by(records, space=SPACE, question=QUESTION):
    """The best by a search's prediction, and its steps without noise."""
    posterior = sample_posterior(question, space, records, seed=0)
    found = min(predictions(posterior, question, step_time), key=lambda one: one.log_value)
    batch_size, lr = found.record.batch_size, found.record.lr
    return posterior, batch_size, Workload(b_crit=40.0).steps(batch_size, lr)


@pytest.mark.parametrize("rule", ["none", "saturating"])
def test_a_search_finds_the_fastest_configuration_under_each_rule(rule):
    """The best rate grows as the square root of B, through twice the anchor's rate."""
    workload = Workload(b_crit=40.0, noise=0.1)
    # S_min (1 + 40/B)(0.001 + 0.00001 B) is least at B = sqrt(4000).
    least = 100 * (1 + 40 / math.sqrt(4000)) * step_time(math.sqrt(4000))
    space = replace(SPACE, rule=rule)
    posterior, batch_size, steps = found_by(search(workload, 40, space), space)
    assert steps * step_time(batch_size) < 1.25 * least
    low, _, high = lr_exponent_quantiles(posterior)
    assert low - 0.1 < 0.5 < high + 0.1


def test_under_steps_a_search_goes_to_the_fewest_steps():
    """S falls with the batch size: the largest one takes the fewest steps, 1.08 S_min."""
    question = replace(QUESTION, objective="steps")
    records = search(Workload(b_crit=40.0, noise=0.1), 25, question=question)
    assert found_by(records, question=question)[2] < 1.2 * 107.8


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
        assert space.low <= one.batch_size <= space.high
        assert one.batch_size % space.multiple == 0
        assert space.lr_low <= one.lr <= space.lr_high
        assert 1 <= one.max_steps <= QUESTION.budget.last_step(one.batch_size)
    new = [(one.batch_size, one.lr) for one in records if one.resumed_from is None]
    assert len(set(new)) == len(new)
    resumed = [one for one in records if one.resumed_from is not None]
    assert resumed
    for one in resumed:
        parent = records[one.resumed_from]
        assert parent.status == "pruned"
        assert (one.batch_size, one.lr, one.seed) == (parent.batch_size, parent.lr, parent.seed)
        assert one.max_steps > parent.steps
    assert len({one.resumed_from for one in resumed}) == len(resumed)


def test_only_what_is_resumable_is_resumed():
    records = search(Workload(noise=0.1), 30, resumable=lambda number: number % 2 == 1)
    numbers = [one.resumed_from for one in records if one.resumed_from is not None]
    assert numbers
    assert all(number % 2 == 1 for number in numbers)


def test_a_trial_is_resumed_by_one_only():
    """One that is about to reach the target, beside a much slower best one."""
    history = tuple((step, 0.1 * (52 / step) ** 0.5) for step in range(20, 51))
    records = [
        record(0, steps=400, steps_low=390),
        record(1, "pruned", lr=0.1, steps=50, max_steps=50, history=history),
    ]
    proposal = propose(QUESTION, SPACE, step_time, records, 0)
    assert (proposal.resumed_from, proposal.batch_size, proposal.lr) == (1, 64, 0.1)
    # It may run on as long as it can still beat the best one, 1.2 times over.
    assert 52 < proposal.max_steps <= 1.2 * 400
    # A process that resumes it, or one that has failed to, keeps others away.
    running = [record(2, lr=0.1, resumed_from=1)]
    failed = record(2, "failed", lr=0.1, resumed_from=1, steps=50)
    assert propose(QUESTION, SPACE, step_time, records, 0, running).resumed_from is None
    assert propose(QUESTION, SPACE, step_time, [*records, failed], 0).resumed_from is None


@pytest.mark.parametrize(
    ("steps", "budget", "is_resumed"),
    [
        (94, 4000, True),
        # It has already taken longer than 1.2 times the best.
        (130, 4000, False),
        # Its budget is spent.
        (94, 94, False),
    ],
)
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


@pytest.mark.parametrize(
    ("best_steps", "predicted", "first_step", "limit"),
    [
        # A new one gets the lesser of 0.4 times 1.2 times the best's and 0.6 times its own steps.
        (100, 1000, 0, 48),
        (100, 50, 0, 30),
        # From 3/4 of that on it gets 1.2 times the best's; it runs on by 1.3.
        (100, 1000, 36, 120),
        (100, 70, 100, 130),
    ],
)
def test_the_limit_once_the_target_was_reached(best_steps, predicted, first_step, limit):
    assert limit_after_hit(best_steps, predicted, first_step) == pytest.approx(limit)


@pytest.mark.parametrize(
    ("best_steps", "length"),
    # All that was spent, so that costs double; then half of it, or 1.2 times the best's.
    [(None, 500), (100, 250), (400, 480)],
)
def test_the_longest_schedule_that_is_affordable(best_steps, length):
    assert affordable_length(500, 6400, best_steps) == pytest.approx(length)


@pytest.mark.parametrize(
    ("kind", "log_steps"),
    # As exactly as seeds differ; the least that it can be.
    [(VALUE, 5.5), (BOUND, 6.0)],
)
def test_what_a_history_says_of_its_own_trial(kind, log_steps):
    rows = Rows(*(np.array([one]) for one in (0.0, 0.0, 6.0, 0.2, kind)))
    theta = np.full(NOISE + 1, math.log(0.2))
    assert informed(np.array([5.0]), rows, [0], theta) == pytest.approx([log_steps])


@pytest.mark.parametrize(
    ("budget", "records", "low", "high"),
    [
        # A 64th of the budget.
        (6400, [], 100, 100),
        # A fifth of what was spent, in steps of the smallest or the largest size.
        (6400, [record(status="missed", steps=6400)], 342, 1944),
    ],
)
def test_how_far_a_new_trial_goes(budget, records, low, high):
    question = Question(QUESTION.target, Budget(steps=budget))
    for seed in range(10):
        proposal = propose(question, SPACE, step_time, records, seed)
        assert proposal.resumed_from is None
        assert low <= proposal.max_steps <= high


@pytest.mark.parametrize(
    "records",
    [
        [record(number, "failed", steps=0) for number in range(3)],
        [record(0, "pruned", history=[(0, None)], steps=0)],
        [record(0, role="baseline"), record(1, role="new seed")],
        [record(number, "missed", steps=4000) for number in range(8)],
        [record(number, "diverged") for number in range(8)],
        [record(number, "pruned", history=((40, 0.4), (100, 0.4))) for number in range(8)],
    ],
)
def test_odd_records_have_a_proposal(records):
    proposal = propose(QUESTION, SPACE, step_time, records, 0)
    assert SPACE.low <= proposal.batch_size <= SPACE.high
    assert proposal.max_steps >= 1


@pytest.mark.parametrize("objective", ["time", "steps", "curve"])
def test_sizes_that_do_not_fit_are_not_proposed(objective):
    question = replace(QUESTION, objective=objective)
    short = [record(0, steps=400), record(1, "out of memory", batch_size=256, steps=0)]
    refused = [*short, record(2, "refused", batch_size=36, steps=0)]
    for seed in range(4):
        # The geometric mean of 64 and 256.
        assert propose(question, SPACE, step_time, short, seed).batch_size <= 128
        # 64 is a multiple of 8, 36 of 4 only.
        assert propose(question, SPACE, step_time, refused, seed).batch_size % 8 == 0
        assert propose(question, SPACE, step_time, [], seed, fits=Ends(90, 100)).batch_size <= 94


def test_the_first_evaluation_comes_by_a_twentieth_of_the_predicted_steps():
    records = search(Workload(noise=0.1), 12)
    for seed in range(4):
        proposal = propose(QUESTION, SPACE, step_time, records, seed)
        steps = Workload().steps(proposal.batch_size, proposal.lr)
        if proposal.resumed_from is None:
            assert steps / 40 <= proposal.first_evaluation <= steps / 10
