"""The best metric within a budget: what is read of trials, decisions, and whole searches on laws."""

import math
from dataclasses import replace

import numpy as np
import optuna
import pytest
from optuna.distributions import FloatDistribution, IntDistribution
from optuna.trial import TrialState
from synthetic import Law
from test_ruler import ERROR, LAST, SHARES, history, power
from toolbox import evaluated_steps, make_spec, statuses

from bstune.core.errors import ConfigError
from bstune.core.records import Target, TrialResult
from bstune.search.budget_decision import first_share_steps, fresh_seed_due, suggest_within_budget
from bstune.search.budget_findings import BUDGET_SHARES, findings_of, gain_left_of
from bstune.search.budget_runs import last_whole_step
from bstune.search.candidates import Domain
from bstune.search.fixed_budget import infer_at_budget, rank_full_trials, shortened
from bstune.search.frontier_law import LEVEL, make_prior
from bstune.search.ruler import make_ruler, running_best
from bstune.search.sampler import RESUMED_FROM, FrontierSampler, default_policy

optuna.logging.set_verbosity(optuna.logging.ERROR)

LOW = 8
HIGH = 4096
LR_LOW = 2.0**-11
LR_HIGH = 2.0**1.25
POLICY = replace(
    # Few particles and candidates for quick tests; nothing at random, and no trial that skips its
    # first share.
    default_policy(),
    particles=96,
    moves=2,
    candidates=80,
    random_fraction=0.0,
    loss_sure=0.0,
)
DOMAIN = Domain(
    # Rates in log2, from 2^-11 to 2^1.25.
    LOW,
    HIGH,
    round,
    lambda x: (np.full(x.shape, -11.0), np.full(x.shape, 1.25)),
    others=0,
)


def trial(number, metric, batch_size=64, lr=0.1, share=1.0, last_step=LAST, **changes):
    """The record of a trial that ran to a share of its budget."""
    spec = make_spec(batch_size, lr, number=number, seed=number)
    steps = round(share * last_step)
    record = TrialResult.unmeasured(
        spec, "stopped", steps=steps, history=history(metric, last_step, share)
    )
    return replace(record, **changes)


def prior(budget=LAST):
    return make_prior(
        low=LOW,
        high=HIGH,
        # sqrt through a rate of 0.1 at a batch size of 2^7.
        rule=lambda x: math.log2(0.1) + 0.5 * (x - 7.0),
        log_budget=math.log(4.0 * budget),
        sigma=1.0,
        exponent_sigma=0.3,
        noise_scale=None,
        others=0,
    )


def read(trials, budget=LAST, mode="min", ideal=0.0, policy=POLICY, seed=0):
    return infer_at_budget(
        trials,
        {},
        prior=prior(budget),
        budget=lambda batch_size: budget,
        mode=mode,
        ideal=ideal,
        policy=policy,
        rng=np.random.default_rng(seed),
    )


def behinds(posterior):
    return {run.number: run.behind for run in posterior.runs}


def ranked_numbers(posterior):
    return [one.run.number for one in rank_full_trials(posterior)]


def suggested(posterior, pending=(), resumable=lambda number: True, policy=POLICY, seed=0):
    return suggest_within_budget(
        posterior,
        pending,
        domain=DOMAIN,
        resumable=resumable,
        policy=policy,
        rng=np.random.default_rng(seed),
    )


# How far a trial is behind the ruler


@pytest.mark.parametrize("factor", [1.0, 1.5, 3.0])
@pytest.mark.parametrize("share", [0.125, 0.5, 1.0])
def test_a_trial_that_takes_c_times_the_steps_is_log_c_behind(factor, share):
    found = behinds(read([trial(0, power(1.0)), trial(1, power(factor), share=share)]))
    # The first one is the ruler: it is behind by nothing.
    assert found[0] == 0.0
    assert found[1] == pytest.approx(math.log(factor), abs=1e-3)


@pytest.mark.parametrize("factor", [0.5, 0.8])
def test_a_trial_that_is_ahead_of_all_that_the_ruler_had_is_read_by_its_slope(factor):
    # Its only evaluation is better than the ruler's end.
    ahead = trial(1, power(factor), share=0.7, history=((7000, power(factor)(0.7)),))
    found = behinds(read([trial(0, power(1.0)), ahead]))
    assert found[1] == pytest.approx(math.log(factor), abs=0.01)


def test_a_single_evaluation_at_the_end_still_ranks():
    ends = [
        trial(0, power(1.0), history=((LAST, 0.3),)),
        trial(1, power(1.0), history=((LAST, 0.2),)),
    ]
    posterior = read(ends)
    assert behinds(posterior) == {0: pytest.approx(1.0), 1: 0.0}


# Scales


FACTORS = (1.0, 1.2, 1.7, 2.5)
TRANSFORMED = {
    # On these scales all is straight over log s, and is read to six digits.
    "square root": (lambda metric: math.sqrt(metric), "min", 0.0, 1e-6),
    "accuracy": (lambda metric: 1.0 - 0.2 * metric, "max", 1.0, 1e-6),
    "log-likelihood of either sign": (lambda metric: 0.7 - math.log(metric), "max", None, 1e-6),
    # Without an ideal value the slope beyond the ruler's best is the metric's own, and less exact.
    "a loss below zero": (lambda metric: metric - 5.0, "min", None, 0.03),
    "accuracy without bounds": (lambda metric: 1.0 - 0.2 * metric, "max", None, 0.03),
}


def four(transform, last_step=LAST):
    """Two full and two stopped trials, seen through a transform of the metric."""
    trials = []
    for i, factor in enumerate(FACTORS):
        metric = power(factor)
        # Every other one is stopped.
        share = 1.0 if i % 2 == 0 else 0.3
        trials.append(
            trial(
                i,
                lambda share, metric=metric: transform(metric(share)),
                16 * 2**i,
                0.05 * 2**i,
                share,
                last_step,
            )
        )
    return trials


@pytest.mark.parametrize("name", TRANSFORMED)
def test_a_monotone_transform_of_the_metric_changes_hardly_anything(name):
    transform, mode, ideal, tolerance = TRANSFORMED[name]
    plain = read(four(lambda metric: metric))
    seen = read(four(transform), mode=mode, ideal=ideal)
    assert behinds(seen) == pytest.approx(behinds(plain), abs=tolerance)
    # The two full ones, the faster one first.
    assert ranked_numbers(seen) == [0, 2]
    # By the same draws, so that what differs is what was read.
    seen = replace(seen, theta=plain.theta)
    same = 0
    for seed in range(20):
        same += suggested(plain, seed=seed) == suggested(seen, seed=seed)
    # A candidate near a tie may be chosen otherwise.
    assert same >= 19


def test_beyond_its_best_the_ruler_goes_by_the_slope_of_any_metric():
    """A loss below zero, ahead on its own scale: dm/dlog s is the slope of s^-0.3 at the end."""
    ahead = trial(1, power(1.0), share=0.9, history=((9000, 0.98 - 5.0),))
    shifted = [trial(0, lambda share: power(1.0)(share) - 5.0), ahead]
    posterior = read(shifted, ideal=None)
    # Over the last third: ((1/3)^-0.3 - 1)/log 3 = 0.355.
    assert posterior.ruler.slope == pytest.approx(0.36, abs=0.02)
    # Its evaluation lies 0.02 below the ruler's best of 1 - 5.
    expected = math.log(0.9) - 0.02 / posterior.ruler.slope
    assert behinds(posterior)[1] == pytest.approx(expected, abs=1e-6)


def test_the_unit_of_time_does_not_matter():
    coarse = read(four(lambda metric: metric))
    # A hundred times the steps, as if they were counted in hundredths.
    fine = read(four(lambda metric: metric, 100 * LAST), budget=100 * LAST)
    assert behinds(fine) == pytest.approx(behinds(coarse), abs=1e-3)
    theta = coarse.theta.copy()
    # The law's level moves with the unit, and nothing else.
    theta[:, LEVEL] += math.log(100.0)
    fine = replace(fine, theta=theta)
    for seed in range(20):
        chosen = suggested(coarse, seed=seed)
        again = suggested(fine, seed=seed)
        assert (again.x, again.z) == (chosen.x, chosen.z)
        assert again.resumed_from == chosen.resumed_from
        assert again.max_steps == 100 * chosen.max_steps
    assert fine.spent == pytest.approx(coarse.spent)


# What is read of trials


def test_a_trial_that_diverged_says_only_that():
    # Before it diverged it was far ahead.
    broken = trial(1, power(0.1), lr=1.0, share=0.3, status="diverged")
    posterior = read([trial(0, power(1.0)), broken])
    assert posterior.data.diverged.tolist() == [False, True]
    assert not posterior.data.bound.any()
    assert ranked_numbers(posterior) == [0]


def test_a_full_trial_without_a_finite_metric_is_one_that_diverged():
    posterior = read([trial(0, power(1.0)), trial(1, power(1.0), history=((LAST, None),))])
    assert posterior.data.diverged.tolist() == [False, True]


def test_a_trial_without_an_evaluation_is_a_bound_at_its_steps():
    posterior = read([trial(0, power(1.0)), trial(1, power(1.0), share=0.1, history=())])
    assert posterior.data.bound.tolist() == [False, True]
    # A bound: it needs at least the steps that it has run.
    assert posterior.data.y[1] == pytest.approx(math.log(0.1 * LAST))


def test_the_less_of_its_budget_a_trial_has_run_the_less_sure_is_what_it_says():
    shares = (1.0, 0.5, 0.25, 0.125)
    trials = []
    for number, share in enumerate(shares):
        trials.append(trial(number, power(1.0), share=share))
    spread = read(trials).data.spread
    # FULL_SPREAD, of a trial that ran to the end.
    assert spread[0] == pytest.approx(0.02)
    # loss_spread and loss_drift: hypot(0.1, 0.3 sqrt(log 4)) for a quarter of the budget.
    assert spread[2] == pytest.approx(math.hypot(0.1, 0.3 * math.sqrt(math.log(4.0))), rel=0.05)
    assert (np.diff(spread) > 0).all()


def test_a_chain_is_read_as_one_and_paid_once():
    first = trial(1, power(2.0), share=0.125)
    rest = trial(2, power(2.0), resumed_from=1)
    after_first = tuple(pair for pair in rest.history if pair[0] > first.steps)
    rest = replace(rest, history=after_first)
    whole = read([trial(0, power(1.0)), trial(2, power(2.0))])
    chain = read([trial(0, power(1.0)), first, rest])
    assert behinds(chain) == behinds(whole)
    assert chain.runs[1].curve.heights.tolist() == whole.runs[1].curve.heights.tolist()
    # The ruler's trial and the chain, each once.
    assert chain.spent == pytest.approx(2.0)


# A rounding error below 3 is 3, and a budget below one step is one.
@pytest.mark.parametrize(("budget", "step"), [(0.4, 1), (1.0, 1), (2.9, 2), (3.0 - 1e-12, 3)])
def test_a_budget_of_few_steps_ends_at_its_last_whole_step(budget, step):
    assert last_whole_step(budget) == step


def test_a_trial_that_ran_to_the_last_whole_step_is_full():
    posterior = read([trial(0, power(1.0), last_step=2)], budget=2.9)
    # Two steps of 2.9.
    assert posterior.runs[0].full


def test_a_shorter_budget_reads_the_same_histories_up_to_its_end():
    trials = [trial(0, power(1.0)), trial(1, power(1.0), share=0.125)]
    late = trial(2, power(1.0), share=0.6, status="diverged")
    # Trial 1 has run an eighth, which lies within the quarter.
    cut = shortened([*trials, late], lambda batch_size: LAST, 0.25)
    assert [one.steps for one in cut] == [2500, 1250, 2500]
    # At a quarter of the budget nobody had diverged yet.
    assert statuses(cut) == ["stopped"] * 3
    assert max(evaluated_steps(cut[0])) <= 2500


# Decisions


def test_the_first_trial_is_the_middle_and_runs_to_the_end():
    chosen = suggested(read([]))
    # sqrt(8 x 4096) = 181.
    assert chosen.x == math.log2(round(math.sqrt(LOW * HIGH)))
    assert chosen.max_steps == LAST


def test_before_a_trial_is_full_all_run_to_the_end():
    broken = trial(0, power(1.0), 181, 1.0, share=0.2, status="diverged")
    chosen = suggested(read([broken]))
    assert chosen.max_steps == LAST
    assert chosen.resumed_from is None
    # A rate of 1 diverged, so the next one is lower.
    assert chosen.z < 0.0


def started(count=12, share=0.125):
    """A full trial and many that wait, of which the third is far ahead.

    It has the largest batch: with a budget of steps the prior expects that of it.
    """
    waiting = []
    for i in range(1, count):
        factor = 0.3 if i == 3 else 3.0
        waiting.append(trial(i, power(factor), 2 ** (12 - (i - 3) % 9), 0.1, share))
    return [trial(0, power(1.0), 2048), *waiting]


def test_a_new_trial_waits_at_the_first_share():
    chosen = suggested(read([trial(0, power(1.0))]))
    assert chosen.resumed_from is None
    # An eighth of 10,000 steps.
    assert chosen.max_steps == math.ceil(POLICY.loss_first_share * LAST)


@pytest.mark.parametrize(
    ("early", "sure", "share"),
    [(0.0, 50.0, 1.0), (0.0, 0.0, 0.125), (20.0, 50.0, 0.125)],
    ids=["sure", "unsure", "early"],
)
def test_one_that_the_law_is_surer_of_than_its_first_share_runs_to_the_end(early, sure, share):
    # Spending is 10 full trials: past an early phase of 0, and before one of 20.
    policy = replace(POLICY, loss_fresh_after=1e6, loss_early=early, loss_sure=sure)
    trials = []
    for number in range(3, 13):
        trials.append(trial(number, power(1.0 + 0.1 * number), 2**number))
    posterior = read(trials)
    assert posterior.spent == 10.0
    for seed in range(5):
        assert suggested(posterior, policy=policy, seed=seed).max_steps == share * LAST


# Before the ruler's first evaluation there is nothing to compare with.
@pytest.mark.parametrize(("first", "expected"), [(100, 1250), (3000, 3000), (LAST, LAST)])
def test_it_runs_at_least_to_where_the_ruler_was_first_evaluated(first, expected):
    seen = [(step, power(1.0)(step / LAST)) for step in sorted({first, LAST})]
    ruler = make_ruler([running_best(seen, LAST, ERROR)], 0.5)
    assert first_share_steps(LAST, ruler, POLICY) == expected
    # One step is the least.
    assert first_share_steps(1, ruler, POLICY) == 1


@pytest.mark.parametrize("early", [0.0, 100.0], ids=["Thompson", "expected improvement"])
def test_what_is_ahead_goes_on_to_the_end_and_no_further(early):
    # No fresh seed comes between.
    policy = replace(POLICY, loss_early=early, loss_fresh_after=1e6)
    posterior = read(started(), policy=policy)
    again = 0
    for seed in range(10):
        chosen = suggested(posterior, policy=policy, seed=seed)
        if chosen.resumed_from is not None:
            again += 1
            assert (chosen.resumed_from, chosen.max_steps) == (3, LAST)
    # In ten draws, as some prefer a new point.
    assert again >= 4


@pytest.mark.parametrize("resumable", [None, lambda number: number != 3], ids=["none", "not it"])
def test_only_what_can_be_continued_is(resumable):
    policy = replace(POLICY, loss_fresh_after=1e6)
    posterior = read(started(), policy=policy)
    for seed in range(10):
        chosen = suggested(posterior, resumable=resumable, policy=policy, seed=seed)
        assert chosen.resumed_from != 3
        # Where nothing can go on, a first share would be lost: all run to the end.
        if resumable is None:
            assert chosen.resumed_from is None
            assert chosen.max_steps == LAST


def test_what_runs_now_is_not_continued_again():
    policy = replace(POLICY, loss_fresh_after=1e6)
    posterior = read(started(), policy=policy)
    (ahead,) = (run for run in posterior.runs if run.number == 3)
    for seed in range(10):
        # Told of elsewhere, so that it is its number that counts.
        chosen = suggested(posterior, [(3.0, ahead.z, 3)], policy=policy, seed=seed)
        assert chosen.resumed_from != 3


# A fresh seed of the best


# Two full trials and four that wait at an eighth: 2.5 budgets.
def two_full():
    return [trial(0, power(1.5), 256), trial(1, power(1.0), 64), *started()[2:6]]


def test_a_fresh_seed_of_the_best_is_due_once_so_much_is_spent():
    posterior = read(two_full())
    assert posterior.spent == pytest.approx(2.5)
    assert fresh_seed_due(posterior, replace(POLICY, loss_fresh_after=2.6)) is None
    policy = replace(POLICY, loss_fresh_after=2.4)
    assert fresh_seed_due(posterior, policy).number == 1
    chosen = suggested(posterior, policy=policy)
    assert (chosen.repeats, chosen.resumed_from, chosen.max_steps) == (1, None, LAST)
    # log2 of its batch size, 64.
    assert (chosen.x, chosen.z) == (6.0, math.log2(0.1))


def test_it_is_not_due_while_it_runs_nor_when_it_has_run():
    policy = replace(POLICY, loss_fresh_after=1.0)
    posterior = read(two_full(), policy=policy)
    running = [(6.0, math.log2(0.1), None)]
    assert suggested(posterior, running, policy=policy).repeats is None
    again = read([*two_full(), trial(9, power(1.1), 64)], policy=policy)
    assert fresh_seed_due(again, policy) is None


def test_a_lucky_seed_falls_behind_by_what_its_fresh_ones_are():
    trials = [trial(0, power(1.3), 32), trial(1, power(1.0), 64)]
    # Trial 1 is ahead as long as one seed is all that is known.
    assert rank_full_trials(read(trials))[0].run.number == 1
    # A seed that diverged counts against its point, and so do two that take three times as long.
    broken = trial(9, power(1.0), 64, share=0.3, status="diverged")
    assert rank_full_trials(read([*trials, broken]))[0].run.number == 0
    unlucky = [trial(9, power(3.0), 64), trial(10, power(3.0), 64)]
    assert rank_full_trials(read([*trials, *unlucky]))[0].run.number == 0


# Whole searches on laws


def seconds_of(law, factor):
    sizes = np.exp2(np.arange(3.0, 12.01, 0.25))
    # The least seconds to an error of 0.1, times a factor.
    return factor * min(law.frontier(size) * law.tau(size) for size in sizes)


class Workload:
    """A law's trials with a budget of seconds.

    The error is f + (0.9 - f) (1 + step/s_0)^-0.7, 0.1 after S steps.
    """

    def __init__(self, law, seconds, floor=0.0):
        self.law = law
        self.seconds = seconds
        self.floor = floor

    def budget(self, batch_size):
        # The budget counts hundredths of a step.
        return 100.0 * self.seconds / self.law.tau(batch_size)

    def metric(self, batch_size, lr, share, luck=1.0):
        """The metric at a share of the budget; None where the run diverges."""
        steps = self.law.steps(batch_size, lr)
        if steps is None:
            return None
        # (0.9 - f) (1 + S/s_0)^-0.7 = 0.1 - f, solved for s_0.
        scale = steps * luck / (((0.9 - self.floor) / (0.1 - self.floor)) ** (1.0 / 0.7) - 1.0)
        at = share * self.seconds / self.law.tau(batch_size)
        return self.floor + (0.9 - self.floor) * (1.0 + at / scale) ** -0.7

    def best(self, share=1.0):
        """The least metric and its batch size."""
        # From 2^3 = 8 to 2^12 = 4096.
        sizes = np.exp2(np.arange(3.0, 12.01, 0.125))
        metrics = [self.metric(size, self.law.best_lr(size), share) for size in sizes]
        least = int(np.argmin(metrics))
        return metrics[least], sizes[least]

    def run(self, study, seed, mode="min"):
        """Run one trial as the sampler's docstring shows; return its cost in full trials."""
        sampler = study.sampler
        # A metric that rises is the error with another sign.
        sign = 1.0 if mode == "min" else -1.0
        trial = study.ask()
        batch_size = trial.suggest_int("batch_size", LOW, HIGH, log=True)
        lr = trial.suggest_float("lr", LR_LOW, LR_HIGH, log=True)
        last_step = last_whole_step(self.budget(batch_size))
        max_steps = sampler.max_steps(trial.number)
        parent = sampler.resumed_from(trial.number)
        before = 0
        if parent is not None:
            trial.set_user_attr(RESUMED_FROM, parent)
            before = study.trials[parent].user_attrs["steps"]
        # Luck is the seed's, which a continuation keeps.
        luck_seed = trial.number if parent is None else parent
        luck = math.exp(self.law.noise * np.random.default_rng([seed, luck_seed]).standard_normal())
        # Each trial goes further than its parent, and none past its budget.
        assert before < max_steps <= last_step
        trial.set_user_attr("steps", max_steps)
        if self.metric(batch_size, lr, 1.0) is None:
            trial.set_user_attr("status", "diverged")
            study.tell(trial, state=TrialState.PRUNED)
            return (max_steps - before) / last_step
        for share in [*SHARES[SHARES * last_step < max_steps], max_steps / last_step]:
            step = max(1, round(share * last_step))
            if step > before:
                trial.report(sign * self.metric(batch_size, lr, share, luck), step)
        if max_steps == last_step:
            study.tell(trial, sign * self.metric(batch_size, lr, 1.0, luck))
        else:
            study.tell(trial, state=TrialState.PRUNED)
        return (max_steps - before) / last_step


def search(workload, seed, spending, mode="min"):
    sampler = FrontierSampler(
        objective="loss",
        budget=workload.budget,
        resumable=lambda number: True,
        search_space={
            "batch_size": IntDistribution(LOW, HIGH, log=True),
            "lr": FloatDistribution(LR_LOW, LR_HIGH, log=True),
        },
        policy=POLICY,
        seed=seed,
    )
    direction = "minimize" if mode == "min" else "maximize"
    study = optuna.create_study(sampler=sampler, direction=direction)
    spent = 0.0
    while spent < spending:
        spent += workload.run(study, seed, mode)
    return study


# B_crit is 400, and a batch size of 128 has its best rate at 0.03.
LAW = Law(s_min=300.0, b_crit=400.0, lr=0.03, batch_size=128.0, noise=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["min", "max"])
def test_a_study_finds_the_best_point_of_a_law(mode):
    workload = Workload(LAW, seconds_of(LAW, 2.0))
    study = search(workload, 0, 12.0, mode)
    winner = study.trials[study.sampler.recommended(study)]
    found = workload.metric(winner.params["batch_size"], winner.params["lr"], 1.0)
    # 6% above the law's least error, within 12 full trials' cost.
    assert found < 1.06 * workload.best()[0]
    waited = []
    went_on = []
    again = []
    for record in study.trials:
        if record.state == TrialState.PRUNED:
            waited.append(record.number)
        if RESUMED_FROM in record.user_attrs:
            went_on.append(record.user_attrs[RESUMED_FROM])
        if study.sampler.repeats(record.number) is not None:
            again.append(record.number)
    # No trial goes on twice.
    assert len(went_on) == len(set(went_on)) >= 2
    assert set(went_on) <= set(waited)
    assert len(again) >= 1
    for number in again:
        original = study.trials[study.sampler.repeats(number)]
        assert study.trials[number].params == original.params


def findings(study, particles=400):
    posteriors = {}
    for share in BUDGET_SHARES:
        posteriors[share] = study.sampler.budget_posterior(
            study, share=share, particles=particles, moves=4, rng=np.random.default_rng(0)
        )
    return findings_of(posteriors)


# A power law and a knee are no sums of the model's terms.
KINDS = (("two_terms", 1.0), ("power", 0.7), ("power", 1.5), ("knee", 4.0), ("u_shape", 0.2))


def drawn_workload(seed):
    """A law of a kind, some outside of the model's own family, with a budget of its own."""
    rng = np.random.default_rng([seed, 3])
    kind, parameter = KINDS[seed % len(KINDS)]
    law = Law(
        s_min=math.exp(rng.uniform(math.log(50.0), math.log(500.0))),
        b_crit=math.exp(rng.uniform(math.log(64.0), math.log(1024.0))),
        lr=2.0 ** rng.uniform(-6.5, -4.5),
        batch_size=181.0,
        exponent=float(rng.choice((0.0, 0.5, 1.0))),
        left=rng.uniform(0.06, 0.2),
        right=rng.uniform(0.2, 0.6),
        noise=0.1,
        # A step's overhead, in examples: between 20 and 2,000.
        overhead=5e-6 * math.exp(rng.uniform(math.log(20.0), math.log(2000.0))),
        per_example=5e-6,
        kind=kind,
        parameter=parameter,
    )
    factor = math.exp(rng.uniform(math.log(0.5), math.log(4.0)))
    return Workload(law, seconds_of(law, factor), floor=rng.uniform(0.0, 0.05))


@pytest.mark.soak
def test_as_good_holds_the_best_batch_size_of_made_curves():
    held = 0
    widths = []
    growths = 0
    for seed in range(10):
        workload = drawn_workload(seed)
        found = findings(search(workload, seed, 15.0))
        best = workload.best()[1]
        good = found.as_good
        # Within a tenth of its ends.
        held += good.low <= 1.1 * best and best <= 1.1 * good.high
        widths.append(math.log2(good.high / good.low))
        shares = [size.share for size in found.growth.best_sizes]
        sizes = [workload.best(share)[1] for share in shares]
        exponent = np.polyfit(np.log(shares), np.log(sizes), 1)[0]
        growths += found.growth.low <= exponent <= found.growth.high
    assert held >= 8
    # A set that holds everything says nothing.
    assert np.median(widths) < 5.0
    # An interval of 90% holds nine of ten on average.
    assert growths >= 8


def test_what_is_found_of_a_law():
    workload = Workload(LAW, seconds_of(LAW, 2.0))
    study = search(workload, 1, 12.0)
    found = findings(study)
    metric, size = workload.best()
    assert found.ranked[0].number == study.sampler.recommended(study) or len(found.ranked) > 1
    behind = [one.behind for one in found.ranked]
    assert behind == sorted(behind)
    assert found.as_good.low <= size <= found.as_good.high
    at = min(found.curve, key=lambda one: abs(math.log(one.batch_size / size)))
    assert at.metric == pytest.approx(metric, rel=0.08)
    assert at.metric_low <= at.metric <= at.metric_high
    assert at.lr_low <= at.lr <= at.lr_high
    assert at.lr == pytest.approx(LAW.best_lr(size), rel=0.6)
    assert 0.0 <= found.gain_left.next_point <= found.gain_left.at_most < 0.1 * metric
    assert 0.0 < found.gain_left.seed_scatter < 0.2 * metric
    assert [size.share for size in found.growth.best_sizes] == list(BUDGET_SHARES)
    assert found.growth.low <= found.growth.exponent <= found.growth.high


@pytest.mark.slow
def test_a_further_hyperparameter_is_tuned_with_the_others():
    """The metric takes e^(4 (momentum - 0.8)^2) times the steps."""
    space = {
        "batch_size": IntDistribution(LOW, HIGH, log=True),
        "lr": FloatDistribution(LR_LOW, LR_HIGH, log=True),
        "momentum": FloatDistribution(0.0, 1.0),
    }
    sampler = FrontierSampler(
        objective="loss", budget=lambda size: 1000.0, search_space=space, policy=POLICY, seed=0
    )
    study = optuna.create_study(sampler=sampler)
    for _ in range(40):
        asked = study.ask(space)
        size = asked.params["batch_size"]
        lr = asked.params["lr"]
        momentum = asked.params["momentum"]
        steps = LAW.steps(size, lr)
        assert sampler.max_steps(asked.number) == 1000
        if steps is None:
            asked.set_user_attr("status", "diverged")
            study.tell(asked, state=TrialState.PRUNED)
            continue
        # The law's s_min is 300 steps, which are a factor of 1.
        metric = power(steps / 300.0 * math.exp(4.0 * (momentum - 0.8) ** 2))
        for step, value in history(metric, 1000):
            asked.report(value, step)
        study.tell(asked, metric(1.0))
    winner = study.trials[sampler.recommended(study)]
    # A quarter off costs e^(4 x 0.25^2) = 1.28 times the steps.
    assert winner.params["momentum"] == pytest.approx(0.8, abs=0.25)
    found = findings(study, particles=100)
    # A budget of steps favours the largest batch sizes.
    assert found.ranked[0].batch_size > 256
    assert found.as_good.high_open
    assert 0.0 <= found.gain_left.next_point <= found.gain_left.at_most


def test_nothing_is_found_before_a_trial_is_full():
    # Half of a budget is no full trial.
    posterior = read([trial(0, power(1.0), share=0.5)])
    assert findings_of({1.0: posterior}) is None
    assert gain_left_of(posterior) is None


# Options


def test_a_budget_is_needed():
    with pytest.raises(ConfigError, match="give budget, the steps over batch size"):
        FrontierSampler(objective="loss")


def test_the_mode_is_the_targets_or_the_directions():
    budget = {"objective": "loss", "budget": lambda batch_size: 100.0}
    space = {
        "batch_size": IntDistribution(LOW, HIGH, log=True),
        "lr": FloatDistribution(LR_LOW, LR_HIGH, log=True),
    }
    up = FrontierSampler(**budget, search_space=space, target=Target("accuracy", 0.9, "max"))
    assert up.budget_posterior([]).scale.mode == "max"
    plain = FrontierSampler(**budget, search_space=space)
    with pytest.raises(ConfigError, match="give mode"):
        plain.budget_posterior([])
    study = optuna.create_study(direction="maximize", sampler=plain)
    assert plain.budget_posterior(study).scale.mode == "max"
    with pytest.raises(ConfigError, match="of the objective loss, not time"):
        FrontierSampler(search_space=space).budget_posterior([])


@pytest.mark.parametrize("share", [0.0, 1.5])
def test_a_first_share_lies_within_the_budget(share):
    with pytest.raises(ConfigError, match="loss_first_share"):
        replace(POLICY, loss_first_share=share)
