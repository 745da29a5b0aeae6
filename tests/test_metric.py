"""The best metric in a budget: how runs are read, what seeds show, and whole studies."""

import math
import shlex

import numpy as np
import optuna
import pytest
from refusals import cases, text_cases
from scipy.stats import t as student
from search_records import SPACE, record, step_time
from test_own_loop import loss
from test_own_loop import study as loop_study
from test_run import REPLAY, places

import bstune
from bstune.__main__ import main
from bstune.core.question import Question
from bstune.core.records import Budget, Target
from bstune.search.decide import leading_probe, propose
from bstune.search.metric import CHANGE_DEVIATION, CHANGES, CURVE_DEVIATION, behind_best
from bstune.search.posterior import BOUND, DIVERGED, VALUE, rows_of_metric
from bstune.study.confirm import Run, improvement_of, pooled_deviation, verdict_of

STEPS = 800
LOSS = Target("val/loss", None, "min")
QUESTION = Question(LOSS, Budget(steps=STEPS), "metric")
# Shares of the budget at which runs are evaluated.
SHARES = (0.125, 0.25, 0.5, 1.0)


def run(number, values, status="finished", shares=SHARES, **fields):
    """A run with these metrics at these shares of the budget."""
    steps = [round(share * STEPS) for share in shares[: len(values)]]
    history = tuple(zip(steps, values, strict=True))
    return record(number, status, steps=history[-1][0], history=history, **fields)


FALLING = (0.8, 0.4, 0.2, 0.1)


# The metrics of runs, and how many times further the best is in its budget.
@cases("""
runs | expected
# The second one has at its end what the best had at half of the budget, or an eighth.
[[0.8, 0.4, 0.2, 0.1], [0.9, 0.8, 0.4, 0.2]] | [1, 2]
[[0.8, 0.4, 0.2, 0.1], [1.6, 1.2, 1.0, 0.8], [0.8, 0.4, 0.2, 0.11]] | [1, 8, 1.0717735]
# It falls by half of what the median run is off, an e-fold: the rest tells no slope. Best at the
# first evaluation, as in fine-tuning.
[[0.10, 0.2, 0.2, 0.3], [0.12, 0.2, 0.3, 0.3], [0.15, 0.3, 0.4, 0.5]] | [1, 7.3890561, 54.5981500]
# Equal values: nobody is behind.
[[0.1, 0.1], [0.1, 0.1]] | [1, 1]
""")
@pytest.mark.parametrize("mode, sign", [("min", 1.0), ("max", -1.0)])
def test_what_finished_runs_are_behind(runs, expected, mode, sign):
    question = Question(Target("m", None, mode), QUESTION.budget, "metric")
    chains = [run(number, [sign * one for one in values]) for number, values in enumerate(runs)]
    found = behind_best(chains, question)
    assert [math.exp(one.log_factor) for one in found] == pytest.approx(expected)


def test_a_pruned_run_is_read_as_finished_ones_were_at_its_share():
    best = run(0, FALLING)
    pruned = run(1, (0.9,), "pruned", batch_size=128)
    (_, alone) = behind_best([best, pruned], QUESTION)
    # The best one fell by 0.7 in its last decade, of which it goes on with 0.7.
    now = 0.1 / (0.7 * 0.7 / math.log(10))
    # An octave from the best, and so much behind; nothing has told of changes yet.
    deviation = math.hypot(CHANGE_DEVIATION, *(CHANGES * (1.0, 1.0, 0.0, now)))
    assert alone.log_factor == pytest.approx(now)
    assert alone.deviation == pytest.approx(deviation + 0.15 * alone.log_factor, rel=1e-6)
    # Six runs that were as far behind made it all up.
    others = [run(number, (0.9, 0.6, 0.3, 0.1001), batch_size=128) for number in range(2, 8)]
    (_, read, *_) = behind_best([best, pruned, *others], QUESTION)
    assert read.log_factor < 0.2 < alone.log_factor
    assert CURVE_DEVIATION < read.deviation < alone.deviation


def test_what_each_status_tells():
    runs = [
        run(0, FALLING),
        run(1, (0.9,), "pruned"),
        record(2, "pruned", steps=100),
        record(3, "diverged", steps=50),
        run(4, (0.9, 0.8, 0.4, 0.2)),
    ]
    rows = rows_of_metric(runs, QUESTION)
    assert rows.kind.tolist() == [VALUE, VALUE, BOUND, DIVERGED, VALUE]
    assert np.exp(rows.log_steps[[0, 2, 4]]) == pytest.approx([800, 100, 1600])
    # Until a run has finished, parts of budgets are bounds.
    assert rows_of_metric(runs[1:3], QUESTION).kind.tolist() == [BOUND, BOUND]


RUN, PROBE = run(0, FALLING), run(1, (0.9,), "pruned", lr=0.2)
UNEVALUATED = [run(0, (0.1,), shares=(1.0,)), record(1, "pruned", steps=100, lr=9.0)]
# A probe that cannot be resumed has shown that none can; probes without an evaluation tell nothing:
# the next ones run whole budgets.
RUNS = [([], 1.0), ([RUN], 0.125), ([RUN, PROBE], 1.0), (UNEVALUATED, 1.0)]


@pytest.mark.parametrize("runs, share", RUNS)
def test_a_trial_runs_to_an_eighth_or_to_its_end(runs, share):
    proposal = propose(QUESTION, SPACE, step_time, runs, 0, resumable=lambda number: False)
    assert (proposal.resumed_from, proposal.max_steps) == (None, share * STEPS)


@cases("""
value | more | resumed
0.3 | [] | 1
1.2 | [] | null
0.3 | [failed] | null
""")
def test_at_the_search_s_end_the_run_that_leads_is_finished(value, more, resumed):
    runs = [run(0, FALLING), run(1, (value,), "pruned", lr=0.1)]
    runs += [record(2, status, resumed_from=1, lr=0.1) for status in more]
    found = leading_probe(QUESTION, SPACE, step_time, runs, 0, [], lambda number: True)
    assert (found and found.resumed_from) == resumed


def of(*gaps):
    """Runs of these gaps; None: one that did not train to its end."""
    return [Run(math.inf if gap is None else gap, gap is not None) for gap in gaps]


def improvement(best, baseline):
    groups = [[run.value for run in runs if run.reached] for runs in (best, baseline)]
    return improvement_of(best, baseline, pooled_deviation(groups, 0.0, degrees=0))


def test_the_improvement_is_that_of_medians_with_the_seeds_own_deviation():
    found = improvement(of(0.5, 0.52, 0.51), of(0.6, 0.63, 0.61))
    squares = 2 * 0.01**2 + 0.01**2 * (1.3333**2 + 1.6667**2 + 0.3333**2)
    assert found.deviation == pytest.approx(math.sqrt(squares / 4), rel=1e-4)
    assert found.value == pytest.approx(0.10)
    # A median of three has 1.3459 times the variance of their mean.
    error = found.deviation * math.sqrt(2 * 1.3459 / 3)
    assert found.high - found.value == pytest.approx(student.ppf(0.95, 4) * error)


@cases("""
best | value | low
# A run that diverged is worse than any; where half did, there is no median.
[0.5, 0.7, null] | 0.2 | true
[0.5, null] | null | false
# One run each shows no deviation.
[0.5] | 0.4 | false
""")
def test_the_median_counts_runs_that_diverged(best, value, low):
    found = improvement(of(*best), of(*[0.9] * len(best)))
    assert (found and found.value) == (value and pytest.approx(value))
    if value and not low:
        assert found.low is None
        assert verdict_of(found, has_baseline=True, best_is_bound=False) == "not yet"


def test_a_study_of_the_metric_is_answered(tmp_path):
    asked = {"objective": "metric", "target": "max val/score", "budget": 100, "seeds": 3}
    # The baseline's rate is too low, by far.
    own = loop_study(tmp_path, **asked, baseline=(16, 0.01))
    for trial in own:
        seeds_own = 1.0 + 0.02 * math.sin(trial.seed)
        step, goes_on = trial.first_step, True
        while goes_on:
            step += 1
            goes_on = trial.report(step, -seeds_own * loss(trial, step), seconds=0.01 * step)
        if trial.worth_saving:
            trial.save_to.touch()
    result = own.result
    assert result.verdict == "switch"
    assert result.best.lr > 0.02
    assert result.improvement.value == pytest.approx(result.best.metric - result.baseline.metric)
    assert result.best.runs == result.baseline.runs == 3
    assert (result.best.steps, result.best.train_steps) == (100, 100)
    ran = {(one.role, one.status, one.steps) for one in result.records}
    assert {("new seed", "finished", 100), ("search", "pruned", 13)} < ran
    assert (tmp_path / "out" / "report.html").stat().st_size > 10_000
    assert bstune.load(tmp_path / "out").improvement == result.improvement
    # Optuna's values are metrics.
    study = optuna.load_study(study_name="own", storage=f"sqlite:///{tmp_path}/study.db")
    values = [trial.value for trial in study.trials if trial.value is not None]
    whole = [one for one in result.records if one.status == "finished"]
    assert values == [max(one.finite_values) for one in whole]


@text_cases("""
overrides
objective=metric target='val/error <= 0.1'
target='min val/error'
objective=metric schedule_ends=true
# The smallest batch takes nine steps.
objective=metric budget.steps=9 budget.examples=1
objective=metric budget.seconds=60 wall_seconds=100
""")
def test_what_no_best_metric_can_be_sought_in(overrides, tmp_path, capsys):
    assert main([*REPLAY, *places(tmp_path), *shlex.split(overrides)]) == 2
    assert "Traceback" not in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
