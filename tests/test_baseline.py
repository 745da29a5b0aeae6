"""The user's own configuration: trial 0, its fresh seeds, and the gain over it with an interval that covers."""

import math
import re
from dataclasses import replace
from io import StringIO
from types import SimpleNamespace

import numpy as np
import pytest
from builders import make_baseline, options_of, prepared_study, result_of
from rich.console import Console
from toolbox import made_table, make_result

from bstune.core.errors import ConfigError
from bstune.core.records import Budget, Target
from bstune.core.search_space import SizeLimits, Tunable
from bstune.options import with_option
from bstune.report.answer import answer
from bstune.report.words import baseline_text
from bstune.study.planning.baseline import (
    Baseline,
    BaselineRuns,
    baseline_of,
    baseline_result,
    baseline_runs,
    count_fresh_seeds,
    due_seed,
    gain_of,
    steps_of_first_run,
    telling_target,
    text_on_excess,
)
from bstune.study.planning.plan import FIRST_REPLICATE, SearchBudget, count_points, reruns
from bstune.study.planning.replicates import Winner
from bstune.study.run import run_study
from bstune.trial.backend import TrialBackend

BUDGET = SearchBudget("time", 20, None, None, 0.5, 0, replicates=3, baseline=True)
OWN = Baseline(64, 0.1, {})
OPTIONS = ("workload=replay", "workload.table=t.jsonl", "workload.target.value=0.14")
OPTIONS += ("workload.name=replay", "mlflow.enabled=false", "scaling.batch_size=32")


def reached(number, steps, seconds_per_step=0.01, **changes):
    """A run that met the target at an evaluation right after one that missed it."""
    return make_result(
        number=number,
        trial_index=number,
        steps=steps,
        steps_low=steps - 1,
        seconds_per_step=seconds_per_step,
        **changes,
    )


def own_run(number=0, steps=300, **changes):
    """A run of the baseline's pair."""
    values = {"batch_size": OWN.batch_size, "lr": OWN.lr, **changes}
    return make_result(number=number, steps=steps, **{"steps_low": steps - 1, **values})


def at(batch_size, lr, *steps, first=0):
    """A point's trial and its runs on fresh seeds, of so many steps."""
    trial = reached(first, steps[0], batch_size=batch_size, lr=lr)
    runs = []
    for i, count in enumerate(steps[1:]):
        run = reached(first + 1 + i, count, batch_size=batch_size, lr=lr, seed=100 + i)
        runs.append(run)
    return trial, tuple(runs)


def steps_of(trials):
    return [trial.steps for trial in trials]


ERROR = Target("val/error", 0.1, "min")
REWARD = Target("val/reward", 10.0, "max")
# Its first evaluation, at step 36, met the target: when it was met is not known.
FIRST_LOOK = make_result(steps=36, steps_low=0, history=((36, 0.08),))


@pytest.mark.parametrize(
    ("trial", "target", "ideal", "value"),
    [
        # Half of 0.08, which lies between it and the ideal of 0.
        (FIRST_LOOK, ERROR, 0.0, 0.04),
        # An evaluation at step 0 is of untrained weights.
        (replace(FIRST_LOOK, history=((0, 2.3), (36, 0.08))), ERROR, 0.0, 0.04),
        # As far beyond 11 as 11 is beyond 10.
        (replace(FIRST_LOOK, history=((36, 11.0),)), REWARD, None, 12.0),
        # Half way from 11 to the ideal of 20.
        (replace(FIRST_LOOK, history=((36, 11.0),)), REWARD, 20.0, 15.5),
        # It missed the target once before.
        (replace(FIRST_LOOK, history=((18, 0.2), (36, 0.08))), ERROR, 0.0, None),
        (replace(FIRST_LOOK, status="stopped"), ERROR, 0.0, None),
        (replace(FIRST_LOOK, horizon=36), ERROR, 0.0, None),
    ],
)
def test_a_target_that_is_met_at_the_first_look_has_one_that_tells(trial, target, ideal, value):
    found = telling_target(trial, target, ideal)
    assert found == (value if value is None else pytest.approx(value))
    summary = result_of([FIRST_LOOK], baseline=make_baseline(telling_target=found))
    cautions = " ".join(dict(answer(summary).lines).get("CAUTION", ()))
    assert ("a harder target" in cautions) == (value is not None)


@pytest.mark.parametrize(
    ("in_python", "training_loops", "is_said"),
    [
        # bstune evaluates before training: it refuses a target that is met there.
        (False, {"trainer": 1}, False),
        (True, {"trainer": 1}, False),
        # Recorded runs that all meet it at once are refused, too.
        (False, {}, False),
        # Nobody knows what a loop's untrained weights come to.
        (True, {}, True),
    ],
)
def test_a_loops_target_may_be_the_wrong_way_round(in_python, training_loops, is_said):
    made = result_of([FIRST_LOOK], baseline=make_baseline(telling_target=0.05))
    own = {"in_python": in_python, "training_loops": training_loops}
    cautions = " ".join(dict(answer(made.model_copy(update=own)).lines)["CAUTION"])
    assert ("the wrong way round" in cautions) == is_said


@pytest.mark.parametrize(
    ("options", "batch_size"),
    [
        ((), 32),
        (("search.baseline=false",), None),
        # Outside of the range that is searched it is the user's own all the same.
        (("search.batch_size.low=64",), 32),
    ],
)
def test_the_baseline_is_the_reference(tmp_path, monkeypatch, options, batch_size):
    monkeypatch.chdir(tmp_path)
    made_table(tmp_path)
    found = prepared_study(*OPTIONS, *options).baseline
    assert (None if found is None else found.batch_size) == batch_size


def test_a_references_batch_size_is_the_next_whole_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made_table(tmp_path)
    own_options = options_of(*OPTIONS, "scaling.batch_size=64.6")
    assert baseline_of(own_options, SimpleNamespace(tunables=()), SizeLimits()).batch_size == 65


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        (SizeLimits(), ""),
        (SizeLimits(examples=32, in_memory=32), ""),
        (SizeLimits(examples=31), "training data"),
        (SizeLimits(examples=500, in_memory=31), "memory"),
        # The data are named where both are too small: more memory would not help.
        (SizeLimits(examples=31, in_memory=16), "training data"),
    ],
)
def test_one_that_is_too_large_is_said_with_the_reason(limits, reason, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made_table(tmp_path)
    own_options = options_of(*OPTIONS)
    space = SimpleNamespace(tunables=())
    why = text_on_excess(own_options, limits)
    found = baseline_of(own_options, space, limits)
    assert (found is None) == bool(reason)
    if not reason:
        assert why is None
        return
    assert reason in why
    for number in (32, 31):
        assert re.search(rf"\b{number}\b", why)
    # Nothing else sets a target that is left open.
    with pytest.raises(ConfigError, match=reason):
        text_on_excess(with_option(own_options, "workload.target.value", "auto"), limits)
    left_out = with_option(own_options, "search.baseline", False)
    assert text_on_excess(left_out, limits) is None


@pytest.mark.parametrize(
    ("tunable", "value"),
    [
        # The seed is the config's own.
        (Tunable("seed", "seed", 1, 100, False, True), 7),
        # sqrt(4 x 64).
        (Tunable("absent", "workload.module.absent", 4, 64, True, True), 16),
        # On a scale of 1 - x: sqrt(0.2 x 0.002) = 0.02.
        (Tunable("absent", "workload.module.absent", 0.8, 0.998, True, False, True), 0.98),
    ],
)
def test_what_else_is_searched_has_the_configs_own_value(tmp_path, monkeypatch, tunable, value):
    monkeypatch.chdir(tmp_path)
    made_table(tmp_path)
    own_options = options_of(*OPTIONS, "seed=7")
    found = baseline_of(own_options, SimpleNamespace(tunables=(tunable,)), SizeLimits())
    (own,) = found.hyperparameters.values()
    assert own == pytest.approx(value)
    assert type(own) is type(value)


@pytest.mark.parametrize(
    ("seconds", "wall_seconds", "steps"),
    # An eighth of 80 s are 10 s, of 0.01 s a step; of wall time a step takes 0.0125 s.
    [(None, None, 5000), (80.0, None, 1000), (None, 100.0, 1000), (80.0, 40.0, 400)],
)
def test_its_first_run_takes_an_eighth_of_the_means(seconds, wall_seconds, steps):
    """A step takes 0.01 s, and 1.25 times that of wall time."""
    budget = replace(BUDGET, seconds=seconds, wall_seconds=wall_seconds)
    assert steps_of_first_run(budget, Budget(5000, 1).last_step(64), 0.01, 1.25) == steps


def test_its_runs_are_found_among_the_trials():
    # Trial 0 was stopped and continued as trial 2.
    first = own_run(number=0, trial_index=0, status="stopped")
    continued = own_run(number=2, trial_index=2, resumed_from=0)
    # Beside a winner, and as the winner itself.
    beside = own_run(number=5, trial_index=FIRST_REPLICATE, seed=5, replicate_of=2)
    as_winner = own_run(number=4, trial_index=FIRST_REPLICATE + 2, seed=4, replicate_of=2)
    other = make_result(number=3, trial_index=FIRST_REPLICATE + 1, replicate_of=1)
    trials = [first, make_result(number=1, trial_index=1), continued, other, as_winner, beside]
    assert baseline_runs(trials, OWN) == BaselineRuns(continued, (as_winner, beside))
    assert baseline_runs(trials, replace(OWN, lr=0.2)) is None, "a study that began otherwise"
    assert baseline_runs(trials, None) is None


def test_a_first_run_that_began_anew_is_one_configuration_and_its_result_the_baselines():
    first = own_run(number=0, trial_index=0, steps=200, status="stopped")
    anew = own_run(number=1, trial_index=1, steps=375, steps_low=341)
    fresh = []
    for number, steps in enumerate((411, 411, 327), start=2):
        index = (number - 1) * FIRST_REPLICATE + 1
        fresh.append(own_run(number, steps, trial_index=index, seed=number, replicate_of=1))
    trials = [first, anew, *fresh]
    assert reruns(trials) == {1: 0}
    assert count_points(trials) == 1
    runs = baseline_runs(trials, OWN)
    assert runs == BaselineRuns(anew, tuple(fresh))
    # The winner has run on two of these seeds.
    trial, winners_runs = at(256, 0.3, 50, 46, 71, first=10)
    shared = [replace(run, seed=own.seed) for run, own in zip(winners_runs, fresh, strict=False)]
    gain = gain_of(runs, Winner(trial, 50.0, tuple(shared)), "steps", 0.1)
    assert (gain.seeds, gain.at_least) == (2, False)
    assert gain.low < gain.ratio < gain.high
    assert gain.ratio == pytest.approx(math.sqrt(411 / 46 * 411 / 71), rel=0.02)
    # Another seed at the same point is another trial of the search.
    elsewhere = own_run(number=9, trial_index=2, seed=99)
    assert count_points([first, anew, elsewhere]) == 2


def test_it_runs_on_each_of_the_winners_seeds_that_it_lacks():
    trial, runs = at(256, 0.3, 50, 52, 48, 50)
    own, again = at(64, 0.1, 400, 390, first=10)
    winner = Winner(trial, 50.0, runs)
    found = BaselineRuns(own, (replace(again[0], seed=runs[1].seed),))
    assert due_seed(found, winner, 5000, math.inf) == runs[0]
    # What is left is less than such a run would take.
    assert due_seed(found, winner, 5000, own.time_to_target - 0.1) is None
    assert due_seed(BaselineRuns(trial), winner, 5000, math.inf) is None, "it is the winner"


@pytest.mark.parametrize(
    ("status", "steps", "reached", "seeds"),
    [
        # What its budget's 500 steps were too few for may have been an unlucky seed.
        ("stopped", 500, [], 1),
        ("stopped", 500, [True], 2),
        ("stopped", 500, [True, True, True], 3),
        # A second run that missed the target bounds the gain.
        ("stopped", 500, [False], 1),
        # The study's means cut it short, and would again.
        ("stopped", 400, [], 0),
        ("diverged", 500, [], 0),
        ("reached", 300, [], 3),
        ("reached", 300, [False], 3),
    ],
)
def test_a_first_run_that_missed_the_target_is_repeated_until_a_second_one_does(
    status, steps, reached, seeds
):
    trial, fresh = at(256, 0.3, 50, 52, 48, 50)
    winner = Winner(trial, 50.0, fresh)
    own, again = at(64, 0.1, steps, *[300] * len(reached), first=10)
    of_seeds = []
    for run, of_winner, is_reached in zip(again, fresh, reached, strict=False):
        ended = "reached" if is_reached else "stopped"
        of_seeds.append(replace(run, seed=of_winner.seed, status=ended))
    runs = BaselineRuns(replace(own, status=status), tuple(of_seeds))
    assert count_fresh_seeds(runs, 500, 3) == seeds
    due = due_seed(runs, winner, 500, math.inf)
    assert (due is not None) == (seeds > len(reached))
    if due is not None:
        assert due == fresh[len(reached)]


def test_the_gain_is_the_mean_ratio_on_the_same_seeds():
    # 200/50, 240/60 and 280/70 are 4 each.
    trial, runs = at(256, 0.3, 40, 50, 60, 70)
    own, again = at(64, 0.1, 999, 200, 240, 280, first=10)
    gain = gain_of(BaselineRuns(own, again), Winner(trial, 50.0, runs), "time", 0.1)
    assert gain.ratio == pytest.approx(4.0, rel=0.02)
    assert gain.seeds == 3
    assert gain.low < 4.0 < gain.high
    # The interval is symmetric in logs.
    assert gain.high / gain.ratio == pytest.approx(gain.ratio / gain.low)
    slower = [replace(run, seconds_per_step=0.03) for run in runs]
    by_time = gain_of(BaselineRuns(own, again), Winner(trial, 50.0, tuple(slower)), "time", 0.1)
    assert by_time.ratio == pytest.approx(gain.ratio / 3.0)
    by_steps = gain_of(BaselineRuns(own, again), Winner(trial, 50.0, tuple(slower)), "steps", 0.1)
    assert by_steps.ratio == pytest.approx(gain.ratio)


def with_own_seconds(runs, measured):
    """As many of the runs as there are seconds, each with its own."""
    timed = []
    for run, seconds in zip(runs, measured, strict=False):
        timed.append(replace(run, measured_seconds_per_step=seconds))
    return tuple(timed)


@pytest.mark.parametrize(
    # The runs' own seconds of a step: of the winner's, and of the baseline's.
    ("of_winner", "of_baseline", "ratio"),
    [
        # A winner whose steps take twice what the law of all trials says has half the gain.
        ((0.02, 0.02, 0.02), (0.01, 0.01, 0.01), 2.0),
        # It is the geometric mean over seeds.
        ((0.02, 0.01, 0.005), (0.01, 0.01, 0.01), 4.0),
        ((0.02, 0.02), (0.01, 0.01), None),
        ((None, 0.02, 0.02), (0.01, 0.01, 0.01), None),
    ],
)
def test_the_gain_by_the_runs_own_seconds_stands_beside_it(of_winner, of_baseline, ratio):
    # 200/50, 240/60 and 280/70 are 4 each.
    trial, runs = at(256, 0.3, 40, 50, 60, 70)
    own, again = at(64, 0.1, 999, 200, 240, 280, first=10)
    runs = with_own_seconds(runs, of_winner)
    again = with_own_seconds(again, of_baseline)
    winner = Winner(trial, 50.0, runs)
    gain = gain_of(BaselineRuns(own, again), winner, "time", 0.1)
    assert gain.by_own_seconds == (ratio and pytest.approx(ratio, rel=0.02))
    assert gain.ratio == pytest.approx(4.0, rel=0.02)
    assert gain_of(BaselineRuns(own, again), winner, "steps", 0.1).by_own_seconds is None
    lucky = gain_of(BaselineRuns(own, again), winner, "time", 0.1, luck=math.log(1.2))
    assert lucky.by_own_seconds == (ratio and pytest.approx(gain.by_own_seconds / 1.2))


def test_a_gain_is_known_no_better_than_the_seconds_of_a_step_are():
    trial, runs = at(256, 0.3, 40, 50, 60, 70)
    own, again = at(64, 0.1, 999, 200, 240, 280, first=10)
    compared = BaselineRuns(own, again), Winner(trial, 50.0, runs)
    sure = gain_of(*compared, "time", 0.0)
    blurred = gain_of(*compared, "time", 0.0, timing_error=0.4)
    # Half of a 90% interval of 0.4 is 1.645 times as much, in log; seeds add next to nothing.
    assert math.log(blurred.high / blurred.ratio) == pytest.approx(1.645 * 0.4, rel=0.01)
    assert blurred.ratio == pytest.approx(sure.ratio)
    # Steps take no clock.
    by_steps = gain_of(*compared, "steps", 0.0, timing_error=0.4)
    assert by_steps.high == pytest.approx(sure.high)


def test_a_winners_luck_is_taken_off_its_gain():
    trial, runs = at(256, 0.3, 40, 50, 60, 70)
    own, again = at(64, 0.1, 999, 200, 240, 280, first=10)
    winner = Winner(trial, 50.0, runs)
    plain = gain_of(BaselineRuns(own, again), winner, "time", 0.1)
    corrected = gain_of(BaselineRuns(own, again), winner, "time", 0.1, luck=math.log(1.2))
    assert plain.ratio / corrected.ratio == pytest.approx(1.2)
    assert plain.low / corrected.low == pytest.approx(1.2)


@pytest.mark.parametrize(
    ("untold", "low", "high"),
    [
        # The winner met the target within 5 steps, the baseline between 26 and 30.
        ("winner", 26 / 5, 30 / 1),
        # And the other way round, where a winner is slower than what one has.
        ("baseline", 1 / 30, 5 / 26),
    ],
)
def test_where_the_first_evaluation_met_the_target_the_gain_holds_every_step_before(
    untold, low, high
):
    trial, quick = at(256, 0.3, 5, 5, 5, 5)
    own, slow = at(64, 0.1, 30, 30, 30, 30, first=10)
    quick = tuple(replace(run, steps_low=0) for run in quick)
    slow = tuple(replace(run, steps_low=26) for run in slow)
    if untold == "winner":
        gain = gain_of(BaselineRuns(own, slow), Winner(trial, 5.0, quick), "steps", 0.01)
    else:
        gain = gain_of(BaselineRuns(own, quick), Winner(trial, 30.0, slow), "steps", 0.01)
    assert gain.low <= 1.08 * low
    assert gain.high >= high / 1.08


def test_a_schedule_that_ends_with_its_run_leaves_no_doubt_when_the_target_was_met():
    # It is evaluated at its end alone, and takes all of its steps whatever happened before.
    trial, runs = at(256, 0.3, 300, 300, 300, 300)
    own, again = at(64, 0.1, 1200, 1200, 1200, 1200, first=10)
    ended = [replace(run, steps_low=0, horizon=run.steps) for run in (*runs, *again)]
    quick, slow = tuple(ended[:3]), tuple(ended[3:])
    gain = gain_of(BaselineRuns(own, slow), Winner(trial, 300.0, quick), "steps", 0.05)
    assert gain.ratio == pytest.approx(4.0)
    assert gain.high / gain.low < 1.5


def test_a_winner_that_stands_on_its_single_run_is_known_no_better_than_that():
    trial, _ = at(256, 0.3, 40)
    own, _ = at(64, 0.1, 400)
    first_met = replace(trial, steps_low=0)
    gain = gain_of(BaselineRuns(own), Winner(first_met, 40.0), "steps", 0.05)
    # It may have met the target at its first step.
    assert gain.high > 300.0


@pytest.mark.parametrize(
    ("own_again", "fresh", "ratio", "seeds"),
    [
        # The baseline's single search trial, and the winner's fresh seeds or what is predicted.
        ((), (50, 50, 50), 8.0, (0, 0, 3)),
        ((), (), 10.0, (0, 0, 0)),
        # Its runs on the seeds of an earlier winner tell more than that trial.
        ((200, 200), (50, 50, 50), 4.0, (0, 2, 3)),
        ((200, 200), (), 5.0, (0, 2, 0)),
    ],
)
def test_without_a_common_seed_a_gain_stands_on_the_runs_that_there_are(
    own_again, fresh, ratio, seeds
):
    trial, runs = at(256, 0.3, 45, *fresh)
    own, again = at(64, 0.1, 400, *own_again, first=10)
    elsewhere = tuple(replace(run, seed=500 + run.number) for run in again)
    gain = gain_of(BaselineRuns(own, elsewhere), Winner(trial, 40.0, runs), "time", 0.1)
    assert gain.ratio == pytest.approx(ratio, rel=0.02)
    assert (gain.seeds, gain.baseline_seeds, gain.winner_seeds) == seeds


@pytest.mark.parametrize(
    ("own", "ratio"),
    [
        # 500/50.
        ({"status": "stopped", "steps": 500}, 10.0),
        # It ran for fewer steps than the winner needs, which bounds nothing.
        ({"status": "stopped", "steps": 40}, None),
        ({"status": "diverged", "steps": 500}, None),
        ({"status": "out of memory", "steps": 500}, None),
    ],
)
def test_a_baseline_that_missed_the_target_bounds_the_gain(own, ratio):
    trial, runs = at(256, 0.3, 50, 50, 50)
    missed = replace(make_result(number=9, batch_size=64, lr=0.1, seconds_per_step=0.01), **own)
    gain = gain_of(BaselineRuns(missed), Winner(trial, 50.0, runs), "time", 0.1)
    if ratio is None:
        assert gain is None
    else:
        assert gain.ratio == pytest.approx(ratio, rel=0.02)
        assert gain.at_least


def test_a_baseline_whose_first_run_alone_missed_the_target_has_a_gain_with_an_interval():
    trial, fresh = at(256, 0.3, 50, 50, 50)
    own, again = at(64, 0.1, 900, 200, 200, first=10)
    missed = replace(own, status="stopped")
    runs = BaselineRuns(missed, again)
    gain = gain_of(runs, Winner(trial, 50.0, fresh), "steps", 0.1)
    assert gain.ratio == pytest.approx(4.0, rel=0.02)
    assert (gain.seeds, gain.at_least) == (2, False)
    # With no run that met it the bound stays.
    second = BaselineRuns(missed, (replace(again[0], status="stopped", steps=900),))
    bound = gain_of(second, Winner(trial, 50.0, fresh), "steps", 0.1)
    # 900/50.
    assert bound.ratio == pytest.approx(18.0, rel=0.02)
    assert (bound.seeds, bound.winner_seeds, bound.at_least) == (0, 2, True)


def test_there_is_no_gain_over_itself_nor_of_a_winner_that_mostly_misses():
    trial, runs = at(64, 0.1, 50, 50, 50)
    assert gain_of(BaselineRuns(trial), Winner(trial, 50.0, runs), "time", 0.1) is None
    other, fresh = at(256, 0.3, 40, 40, 40)
    missed = tuple(replace(run, status="stopped") for run in fresh)
    assert gain_of(BaselineRuns(trial), Winner(other, 40.0, missed), "time", 0.1) is None


@pytest.mark.parametrize("seeds", [1, 10])
@pytest.mark.parametrize(("true", "said"), [(0.2, 0.2), (0.2, 0.15), (0.1, 0.14)])
def test_its_interval_covers_as_often_as_it_says(seeds, true, said):
    """With the scatter that the posterior has, and one that is off by as much as it is after a dozen trials."""
    rng = np.random.default_rng(0)
    covered = 0
    count = 300
    for _ in range(count):
        steps = (
            np.exp(rng.normal(np.log(4000.0), true, seeds)),
            np.exp(rng.normal(np.log(1000.0), true, seeds)),
        )
        own, again = at(64, 0.1, 999, *steps[0].round().astype(int).tolist(), first=20)
        trial, runs = at(256, 0.3, 999, *steps[1].round().astype(int).tolist())
        gain = gain_of(BaselineRuns(own, again), Winner(trial, 1000.0, runs), "steps", said)
        covered += gain.low <= 4.0 <= gain.high
    # Of 300 intervals of 90% the share has a deviation of 0.017.
    assert covered / count > 0.8
    if true <= said:
        assert covered / count > 0.87


class Laws(TrialBackend):
    """Reaches the target once ``needed(B)`` steps are trained; a stopped trial can be continued."""

    stops = True
    device_kind = "made"

    def __init__(self, needed):
        self.needed = needed

    def step_time(self, batch_size):
        return 0.01

    def resumable(self, number, files):
        return True

    def run(self, spec, folder, resumed_from):
        needed = self.needed(spec.batch_size)
        end = min(needed, spec.max_steps)
        first = 0 if resumed_from is None else resumed_from.steps
        # Evaluations a tenth apart.
        grid = sorted({max(1, round(end * 1.1**-i)) for i in range(20)})
        history = tuple((step, 0.1 + needed / step / 10.0) for step in grid)
        is_reached = end >= needed
        return make_result(
            **spec.trial_fields(),
            status="reached" if is_reached else "stopped",
            steps=end,
            steps_low=end - 1 if is_reached else end,
            history=history,
            seconds_per_step=0.01,
            train_seconds=0.01 * (end - first),
            wall_seconds=0.01 * (end - first),
        )


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made_table(tmp_path)

    def study(backend, *options):
        more = ("workload.target.value=0.2", "budget.steps=5000", "budget.examples=1", *options)
        prepared = prepared_study(*OPTIONS, "sampler=frontier", *more, backend=backend)
        return run_study(prepared, list(OPTIONS), Console(width=200))

    return study


def test_a_study_begins_with_the_baseline_and_says_the_gain(run):
    # S = 200 (1 + 200/B).
    found = run(Laws(lambda size: round(200 + 40_000 / size)), "search.trials=5")
    first = found.trials[0]
    assert (first.batch_size, first.lr) == (32, found.prepared.options.scaling.lr)
    assert first.status == "reached"
    winner = found.result.best_by_time
    if winner.batch_size != 32:
        own = [trial for trial in found.trials if trial.replicate_of == 0]
        assert {trial.seed for trial in own} == set(winner.confirmed.seeds)
        # The ratio of S at the two batch sizes; a step takes equally long at both.
        truth = (200 + 40_000 / 32) / (200 + 40_000 / winner.batch_size)
        assert found.result.gain.ratio == pytest.approx(truth, rel=0.02)
    assert "GAIN" in dict(answer(found.result).lines)


class UnluckyOnce(Laws):
    """As its base, but on the first seed of all it never meets the target."""

    def __init__(self, needed):
        super().__init__(needed)
        self.unlucky_seed = None

    def run(self, spec, folder, resumed_from):
        if self.unlucky_seed is None:
            self.unlucky_seed = spec.seed
        if spec.seed != self.unlucky_seed:
            return super().run(spec, folder, resumed_from)
        return Laws(lambda size: 1_000_000).run(spec, folder, resumed_from)


@pytest.mark.slow
def test_an_unlucky_first_run_of_the_baseline_does_not_make_the_gain(run):
    found = run(UnluckyOnce(lambda size: round(200 + 40_000 / size)), "search.trials=5")
    assert found.trials[0].status == "stopped"
    winner = found.result.best_by_time
    truth = (200 + 40_000 / 32) / (200 + 40_000 / winner.batch_size)
    assert found.result.gain.ratio == pytest.approx(truth, rel=0.02)
    assert not found.result.gain.at_least


def test_a_baseline_that_the_seconds_cut_short_goes_on_in_those_that_are_left(run):
    """It takes 1,450 steps of 0.01 s to the target, and first gets an eighth of 60 s."""
    found = run(
        Laws(lambda size: round(200 + 40_000 / size)), "search.trials=3", "search.seconds=60"
    )
    first = found.trials[0]
    assert (first.status, first.steps) == ("stopped", 750)
    (continued,) = [trial for trial in found.trials if trial.resumed_from == 0]
    assert (continued.status, continued.steps) == ("reached", 1450)
    winner = found.result.best_by_time
    truth = 1450 / (200 + 40_000 / winner.batch_size)
    assert found.result.gain.ratio == pytest.approx(truth, rel=0.02)
    assert not found.result.gain.at_least
    assert sum(trial.train_seconds for trial in found.trials) <= 60.0


class FailsToGoOn(Laws):
    """The baseline raises an error where it goes on."""

    def run(self, spec, folder, resumed_from):
        if resumed_from is not None and spec.batch_size == 32:
            raise RuntimeError("its data are gone")
        return super().run(spec, folder, resumed_from)


def test_a_baseline_that_fails_to_go_on_leaves_the_answer(run):
    found = run(
        FailsToGoOn(lambda size: round(200 + 40_000 / size)), "search.trials=3", "search.seconds=60"
    )
    assert [trial.resumed_from for trial in found.trials if trial.status == "failed"] == [0]
    assert found.result.use is not None


@pytest.mark.slow
@pytest.mark.parametrize("baseline", [True, False])
def test_few_points_end_with_an_answer(run, baseline):
    """None of the points reaches the target by itself: the most promising one goes on until it does."""
    found = run(
        Laws(lambda size: 4500), "search.trials=3", f"search.baseline={str(baseline).lower()}"
    )
    assert found.result.use is not None
    assert max(steps_of(found.trials)) <= 5000


def test_a_budget_binds_and_the_search_ends_where_it_is_too_small(run):
    """The target lies beyond every trial's budget: no more than three are brought to its end."""
    found = run(Laws(lambda size: 50_000), "search.trials=4", "search.baseline=false")
    assert found.result.use is None
    assert max(steps_of(found.trials)) == 5000
    assert steps_of(found.trials).count(5000) == 3


class Whole(Laws):
    """Trials that cannot be continued."""

    stops = False

    def run(self, spec, folder, resumed_from):
        return super().run(replace(spec, max_steps=1000), folder, None)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "share"), [(Laws(lambda size: 50_000), 0.6), (Whole(lambda size: 50_000), 1.0)]
)
def test_seconds_are_kept_only_for_what_can_go_on(run, backend, share):
    """Each point takes up to 10 s of training; the target is out of reach."""
    options = ("search.trials=30", "search.seconds=60", "budget.steps=1000")
    found = run(backend, *options, "search.baseline=false")
    last = max(trial.trial_index for trial in found.trials if trial.resumed_from is None)
    before = 0.0
    seconds = 0.0
    for trial in found.trials:
        seconds += trial.train_seconds
        if trial.trial_index < last:
            before += trial.train_seconds
    # A share of the seconds is kept for continuing the best, where that is possible.
    assert before < share * 60.0
    assert seconds >= 60.0 * min(share + 0.2, 1.0)


@pytest.mark.soak
@pytest.mark.usefixtures("precise")
def test_it_runs_on_the_seeds_of_a_winner_that_came_after_another(tmp_path, monkeypatch):
    """On this table two of its runs on the first winner's seeds make another point the better one."""
    monkeypatch.chdir(tmp_path)
    prepared = prepared_study(
        "workload=replay",
        "workload.table=cifar_mlp",
        "search.trials=24",
        "search.candidates=2",
        "study=s",
        "output=out",
        "mlflow.enabled=false",
        "hardware.enabled=false",
    )
    found = run_study(prepared, [], Console(file=StringIO()))
    winner = found.result.winner
    own = {trial.seed for trial in found.trials if trial.replicate_of == 0}
    assert set(winner.confirmed.seeds) <= own


@pytest.mark.parametrize(
    ("first", "again", "horizon"), [(None, (), None), (938, (), 938), (938, (783, 783), 783)]
)
def test_a_gain_over_a_schedule_names_its_length(first, again, horizon):
    fresh = [reached(1 + i, 300, horizon=steps, replicate_of=0) for i, steps in enumerate(again)]
    runs = BaselineRuns(reached(0, 375, horizon=first), tuple(fresh))
    result = baseline_result(runs, Target("val/error", 0.1, "min"), ideal=0.0)
    assert result.horizon == horizon
    assert (f"{horizon} steps" in baseline_text(result)) == (horizon is not None)
