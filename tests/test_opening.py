"""A study goes on with the settings that it began with; torch's threads may be chosen later, once."""

import optuna
import pytest

from bstune.core.errors import StudyError
from bstune.study.storage.attributes import DEVICE_KIND, THREADS_ARE_OPEN
from bstune.study.storage.opening import (
    changed_settings,
    check_joined,
    find_study,
    open_study,
    settings_of,
    stored_settings,
)

SCALING = "scaling.batch_size"
REFERENCE = "workload.reference.batch_size"
VALUE = "workload.target.value"
TARGET = {"workload.target.metric": "val/f1", "workload.target.mode": "max", VALUE: 70.0}
OTHER_TARGET = {"workload.target.metric": "loss", "workload.target.mode": "min", VALUE: 0.1}
OPEN = {"seed": 0, "threads": 2, "device": "cpu (2 threads)", THREADS_ARE_OPEN: True}
CHOSEN = {"seed": 0, "threads": 1, "device": "cpu (1 thread)"}


@pytest.fixture(autouse=True)
def _quiet():
    optuna.logging.set_verbosity(optuna.logging.WARNING)


@pytest.fixture
def url(tmp_path):
    return f"sqlite:///{tmp_path}/study.db"


@pytest.fixture
def opened(tmp_path, url):
    """Open the study as an owner does whose settings are given; give its settings then."""

    def of(settings):
        kind = f"{settings['device']} of a processor"
        return settings_of(open_study("toy", url, "steps", settings, tmp_path, device=kind))

    return of


def test_threads_that_nobody_chose_are_chosen_later_once(opened, url):
    assert opened(OPEN) == OPEN
    # Without a survey they stay as they are, and open.
    assert opened(OPEN) == OPEN
    assert opened(CHOSEN) == CHOSEN
    # The seconds that count are those of one thread from now on.
    kind = find_study("toy", url).user_attrs[DEVICE_KIND]
    assert kind == "cpu (1 thread) of a processor"
    for others in (OPEN, {**CHOSEN, "threads": 2, "device": "cpu (2 threads)"}):
        with pytest.raises(StudyError, match="threads"):
            opened(others)
    assert opened(CHOSEN) == CHOSEN


@pytest.mark.parametrize(
    "others",
    [
        {"seed": 0, "threads": None, "device": "NVIDIA H100"},
        {"seed": 0, "threads": None, "device": "2 x cpu (1 thread)"},
        {**CHOSEN, "seed": 1},
    ],
)
def test_open_threads_open_nothing_else(opened, url, others):
    opened(OPEN)
    with pytest.raises(StudyError, match="other settings"):
        opened(others)
    assert stored_settings("toy", url) == OPEN


def test_a_worker_may_have_other_threads_as_long_as_they_are_open(opened, url):
    opened(OPEN)
    check_joined(find_study("toy", url), CHOSEN)
    assert stored_settings("toy", url) == OPEN
    opened(CHOSEN)
    with pytest.raises(StudyError, match="threads"):
        check_joined(find_study("toy", url), {**CHOSEN, "threads": 4})


def test_a_study_that_is_not_there_has_no_settings(tmp_path, url):
    assert stored_settings("toy", url) == {}
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("before", "now", "changed"),
    [
        # The scaling rule goes through the workload's reference unless it is set.
        ({SCALING: 32, REFERENCE: 32}, {SCALING: 64, REFERENCE: 64}, [REFERENCE]),
        ({SCALING: 32, REFERENCE: 32}, {SCALING: 64, REFERENCE: 32}, [SCALING]),
        ({SCALING: 32, REFERENCE: 32}, {SCALING: 64, REFERENCE: 16}, [SCALING, REFERENCE]),
        ({SCALING: 32}, {SCALING: 64}, [SCALING]),
        # One part of a target is told by its own name, several as the target.
        (TARGET, {**TARGET, VALUE: 0.1}, [VALUE]),
        ({**TARGET, "seed": 1}, {**OTHER_TARGET, "seed": 2}, ["target", "seed"]),
    ],
)
def test_a_changed_setting_is_listed_once(before, now, changed):
    lines = changed_settings(before, now).splitlines()
    assert [line.split(":")[0].strip() for line in lines] == changed


def test_a_changed_target_is_told_whole():
    (line,) = changed_settings(TARGET, OTHER_TARGET).splitlines()
    assert line == "  target: was val/f1 >= 70.0, now loss <= 0.1"
