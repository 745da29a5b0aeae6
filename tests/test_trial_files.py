"""The records of a study's trials in one file, and which of their other files are kept."""

import pytest
from toolbox import make_result, make_trial

from bstune.core.records import TrialResult
from bstune.study.searching.trial_files import (
    MAX_STATES,
    REWRITE_GROWTH,
    TrialFiles,
    worth_continuing,
)
from bstune.system.files import Output


@pytest.fixture
def files(tmp_path):
    return Output(tmp_path)


def written(files):
    return [TrialResult.from_json(line) for line in files.trials.read_text().splitlines()]


def nothing():
    return ()


def test_records_stand_in_order_and_what_was_written_stays(files):
    trials = [make_result(number=number) for number in (0, 1)]
    trial_files = TrialFiles(files)
    trial_files.update(trials, nothing, nothing)
    assert written(files) == trials
    # A process that leaves writes what has ended since.
    trials.append(make_result(number=2))
    trial_files.write(trials)
    assert written(files) == trials


def test_of_many_trials_the_file_is_not_written_again_for_each(files):
    few = round(1.0 / (REWRITE_GROWTH - 1.0))
    trials = [make_result(number=number) for number in range(few + 2)]
    trial_files = TrialFiles(files)
    for count in (few - 1, few, few + 1, few + 2):
        trial_files.update(trials[:count], nothing, nothing)
    # Of 100 lines each new trial is less than 1%: one of them waits.
    assert len(written(files)) == few + 1


def test_nothing_is_written_before_a_trial_has_ended(files):
    TrialFiles(files).update([], nothing, nothing)
    assert not files.trials.exists()


def stopped(number, steps=10, status="stopped", **changes):
    return make_trial(number, steps=steps, status=status, **changes)


BEST = stopped(0, 100, "reached")  # 1 s


@pytest.mark.parametrize(
    ("trials", "kept"),
    [
        # What is worth continuing, by number.
        ([], set()),
        # Without seconds nothing is known to be too slow.
        ([stopped(0, tau=None)], {0}),
        ([stopped(0, status="diverged"), stopped(1, status="out of memory")], set()),
        ([BEST, stopped(1, 119), stopped(2, 121)], {1, 2}),
        # A trial that was continued leaves its place to the one that did.
        ([stopped(0), stopped(1, 20, resumed_from=0)], {1}),
        ([stopped(0), stopped(1, 20, "reached", resumed_from=0)], set()),
        # The one that failed is asked again.
        ([stopped(0), stopped(1, 0, "failed", resumed_from=0)], {0}),
        # A replicate is run once.
        ([BEST, stopped(1, 20, replicate_of=0)], set()),
        ([BEST, stopped(1, 10, "reached", replicate_of=0), stopped(2, 50)], {2}),
    ],
)
def test_the_states_that_are_kept(trials, kept):
    assert worth_continuing(trials, "time") == kept


# Number 2 has taken too long to win, number 3 too many steps; number 1 is the oldest of those that may.
@pytest.mark.parametrize(
    ("objective", "dropped"), [("time", 2), ("steps", 3), ("both", 1), ("curve", 1)]
)
def test_where_there_are_many_those_that_cannot_win_go_first(objective, dropped):
    # One more than there is room for.
    trials = [BEST, stopped(1), stopped(2, tau=1.0), stopped(3, 200, tau=0.001)]
    trials += map(stopped, range(4, MAX_STATES + 2))
    assert worth_continuing(trials, objective) == set(range(1, MAX_STATES + 2)) - {dropped}
