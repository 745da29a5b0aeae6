"""The wall time that a search may take, and what it keeps for running its winner again."""

from dataclasses import replace

import optuna
import pytest
from toolbox import make_result

from bstune.core.clock import process_seconds, stopwatch
from bstune.core.records import TrialSpec
from bstune.study.plan import SearchBudget
from bstune.study.wall import BEGAN, REPORT_SECONDS, TAKEN, WallTime, chain_seconds, slowness

STOPPED = make_result(number=0, status="censored", steps=50, wall_seconds=2.0)
REACHED = make_result(number=1, resumed_from=0, steps=100, wall_seconds=3.0)
THIRD = make_result(number=2, steps=400, wall_seconds=5.5)
OWN = make_result(number=3, replicate_of=1, steps=100, wall_seconds=5.0)


BUDGET = SearchBudget("time", 20, None, 100.0, 0.5, 0, replicates=3)


def wall(elapsed, limit=100.0, replicates=3, objective="time", **changes):
    budget = replace(BUDGET, wall_seconds=limit, replicates=replicates, objective=objective)
    study = changes.pop("study", None) or optuna.create_study()
    return WallTime(
        study, budget, lambda: elapsed, **{"owner": True, "now": lambda: 1000.0, **changes}
    )


def spec(resumed_from=None):
    return TrialSpec(9, 9, 32, 0.1, 0.0, 1, resumed_from=resumed_from)


@pytest.mark.parametrize(
    ("elapsed", "done", "changes", "message"),
    [
        (1e9, [STOPPED], {"limit": None}, None),
        (96.0, [], {}, None),
        (97.0, [], {}, "stopped: search.wall_seconds=100 are spent (97.0 s)"),
        # Nothing has reached the target: the next trial, and its replicates.
        (88.9, [STOPPED], {}, None),
        (89.0, [STOPPED], {}, "stopped: search.wall_seconds=100 are spent (89.0 s)"),
        # The winner took 2 s and 3 s more: 3 x 5 s are kept; a trial of the search takes 3.5 s on average.
        (78.4, [STOPPED, REACHED, THIRD, OWN], {}, None),
        (78.5, [STOPPED, REACHED, THIRD, OWN], {}, "are spent, 15.0 s of them kept for running the winner again (78.5"),
        (78.5, [STOPPED, REACHED, THIRD], {"replicates": 0}, None),
        (65.0, [STOPPED, REACHED], {"objective": "both"}, "30.0 s of them kept"),
    ],
)  # fmt: skip
def test_a_search_ends_while_the_winner_can_still_be_run_again(elapsed, done, changes, message):
    spent = wall(elapsed, **changes).spent(done)
    assert spent is None if message is None else message in spent


@pytest.mark.parametrize(
    ("done", "resumed_from", "seconds"),
    [
        ([], None, 77.0 / 4),  # as long again for each of three replicates
        ([STOPPED], None, 77.0 / 4),
        ([STOPPED], 0, (77.0 - 3 * 2.0) / 4),  # which begin from the start
        ([STOPPED, REACHED], None, 77.0 - 3 * 5.0),
    ],
)
def test_a_trial_is_as_long_as_leaves_time_for_replicates(done, resumed_from, seconds):
    """A step takes 0.01 s by tau(B), and as much more as the trials before took."""
    step = 0.01 * slowness(done, lambda size: 0.01, share=0.25)
    first = 50 if resumed_from == 0 else 0
    assert wall(20.0).max_steps(done, spec(resumed_from), lambda size: 0.01, 0.25) == first + int(
        seconds / step
    )
    assert wall(1e6).max_steps(done, spec(resumed_from), lambda size: 0.01, 0.25) == first + 1, (
        "never less than a step"
    )


def test_what_is_done_between_trials_takes_time_too():
    """Each decision takes 0.4 s: the report as long as 40 of them, a replicate 10 of them longer."""
    times = iter([0.0, 7.0, 7.4, 14.0, 14.4, 20.0])
    one = WallTime(
        optuna.create_study(), BUDGET, lambda: next(times), owner=True, now=lambda: 1000.0
    )
    for _ in range(3):
        with one.trial():
            pass
    assert one.decision == pytest.approx(0.4)
    assert one.reserve([STOPPED, REACHED]) == pytest.approx(3 * (5.0 + 10 * 0.4))
    times = iter([70.0])
    assert one.left == pytest.approx(100.0 - 40 * 0.4 - 70.0)


def test_slowness_is_the_trials_own():
    assert slowness([], lambda size: 0.01, 0.25) == 1.25
    assert slowness([STOPPED, REACHED, OWN], lambda size: 0.01, 0.25) == pytest.approx(5.0 / 1.0)
    assert chain_seconds([STOPPED, REACHED], REACHED) == 5.0


def test_a_study_that_is_continued_has_what_is_left():
    study = optuna.create_study()
    first = wall(60.0, study=study)
    assert study.user_attrs[BEGAN] == 940.0
    first.keep()
    assert study.user_attrs[TAKEN] == 60.0
    assert wall(10.0, study=study).left == 100.0 - 60.0 - 10.0 - REPORT_SECONDS
    joined = wall(3.0, study=study, owner=False, now=lambda: 950.0)
    assert joined.left == 100.0 - (950.0 - 930.0) - REPORT_SECONDS, "it counts by the owner's start"


def test_a_command_is_as_old_as_its_process():
    age, watch = process_seconds(), stopwatch()
    assert 0.0 < age < 1e5
    assert process_seconds() - age <= watch() + 1.0, "clock ticks are coarse"
    ticks = iter([3.0, 7.5])
    assert stopwatch(lambda: next(ticks))() == 4.5
