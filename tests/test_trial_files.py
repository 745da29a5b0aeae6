"""The records of a study's trials in one file, and which of their other files are kept."""

import pytest
from toolbox import make_result

from bstune.core.records import TrialResult
from bstune.study.searching.trial_files import REWRITE_GROWTH, TrialFiles
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
