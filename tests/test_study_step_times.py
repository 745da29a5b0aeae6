"""The seconds of a step that a study's records get: its survey's of now, joined by the trials' own."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from builders import SizeTiming, resolved
from toolbox import make_trial

from bstune.core.step_time import StepTime
from bstune.core.step_time_law import fit_step_time_law, law_of_trials
from bstune.study.analysis.step_times import law_of, step_time_of, with_common_step_time
from bstune.study.planning.replicates import summary_of_runs
from bstune.trial.backend import Timed

LINE = StepTime(2e-3, 3e-5)


def surveyed(visits, sizes=(8, 32, 128, 512), scale=1.0):
    timings = []
    for size in sizes:
        seconds = scale * LINE(size)
        timings.append(SizeTiming(size, seconds, 0.99 * seconds, 1.01 * seconds, visits))
    return fit_step_time_law(timings)


def study(step_time, is_timed=True):
    timed = Timed("lean", 0.0, 1) if is_timed else None
    options, _ = resolved("workload=digits", "device=cpu")
    backend = SimpleNamespace(timed=timed, step_time=step_time, device="cpu (1 thread)")
    return SimpleNamespace(options=options, backend=backend)


def trial(number, batch_size, seconds_per_step, measured):
    made = make_trial(number=number, batch_size=batch_size, seconds_per_step=seconds_per_step)
    return replace(made, measured_seconds_per_step=measured)


def test_records_have_the_seconds_of_the_present_survey():
    """The first two ended under an earlier one, on a busy machine."""
    done = [trial(0, 16, 9e-3, 2.5e-3), trial(1, 64, 9e-3, 4e-3), trial(2, 128, LINE(128), 6e-3)]
    law = surveyed(visits=4)
    records = with_common_step_time(study(law), done)
    for record in records:
        assert record.seconds_per_step == pytest.approx(law(record.batch_size), rel=1e-4)
        assert record.measured_seconds_per_step == done[record.number].measured_seconds_per_step
    # One that ran on another kind of device gives steps alone.
    elsewhere = replace(done[0], seconds_per_step=None, measured_seconds_per_step=None)
    assert with_common_step_time(study(law), [elsewhere]) == [elsewhere]


@pytest.mark.parametrize(("visits", "expected"), [(4, 3.0), (1, 1.0)])
def test_trials_steps_outweigh_few_visits_and_no_others(visits, expected):
    """The survey has timed both ends, at three times what a step takes."""
    sizes = (8, 512) if visits == 1 else (8, 32, 128, 512)
    law = surveyed(visits, sizes, scale=3.0)
    done = [trial(i, size, law(size), LINE(size)) for i, size in enumerate((16, 64, 90, 128))]
    prepared = study(law)
    assert step_time_of(prepared, done)(64) == pytest.approx(expected * LINE(64), rel=0.15)
    assert law_of(prepared, done)(64) == step_time_of(prepared, done)(64)
    records = with_common_step_time(prepared, done)
    assert records[1].seconds_per_step == step_time_of(prepared, done)(64)


@pytest.mark.parametrize(
    ("device", "expected"), [("cpu (1 thread)", 1.0), ("cpu (2 threads)", 3.0)]
)
def test_steps_on_another_number_of_threads_do_not_join(device, expected):
    """The first survey may have come after them, and have chosen another number."""
    law = surveyed(1, (8, 512), scale=3.0)
    done = []
    for i, size in enumerate((16, 64, 90, 128)):
        done.append(replace(trial(i, size, law(size), LINE(size)), device=device))
    found = step_time_of(study(law), done)
    assert found(64) == pytest.approx(expected * LINE(64), rel=0.15)


def test_without_a_survey_the_trials_own_steps_are_all():
    done = [trial(i, size, LINE(size), None) for i, size in enumerate((16, 64, 128, 256))]
    prepared = study(LINE, is_timed=False)
    law = law_of_trials([(record.batch_size, record.seconds_per_step) for record in done])
    assert law_of(prepared, done)(100) == law(100)
    assert step_time_of(prepared, done) is LINE


@pytest.mark.parametrize(("trials", "scatter"), [(12, 0.4), (40, 0.05)])
def test_uses_seconds_hold_what_a_run_takes_at_another_time(scatter, trials):
    """The trials of a user's own loop time themselves, and each minute has a speed of its own.

    In 100 studies the interval of USE's seconds holds those of a further run in about 90%.
    """
    rng = np.random.default_rng(trials)
    prepared = study(LINE, is_timed=False)
    held = []
    ratio_held = []
    for _ in range(100):
        done = []
        for number, place in enumerate(rng.uniform(3.0, 9.0, trials).tolist()):
            size = (64, 256, round(2.0**place))[number % 3]
            speed = float(np.exp(rng.normal(0.0, scatter)))
            done.append(trial(number, size, speed * LINE(size), None))
        law = law_of(prepared, done)
        # Its steps are known to the step: the seconds alone are in doubt.
        run = replace(with_common_step_time(prepared, done)[0], steps_low=399)
        use = summary_of_runs([run], time_error=law.relative_error(64))
        further = 400 * LINE(64) * np.exp(rng.normal(0.0, scatter))
        held.append(use.time_low <= further <= use.time_high)
        error = np.log(law(64) / law(256) * LINE(256) / LINE(64))
        ratio_held.append(abs(error) <= 1.645 * law.ratio_error(64, 256))
    assert 0.8 <= np.mean(held) <= 0.99
    # GAIN compares two batch sizes at one speed.
    assert np.mean(ratio_held) >= 0.86


def test_trials_that_are_the_law_themselves_widen_it_once():
    """A study that is read again has the law of its trials in the survey's place."""
    done = [trial(i, 32 * 2 ** (i % 4), LINE(64) * (1 + i % 3), None) for i in range(12)]
    law = law_of(study(LINE, is_timed=False), done)
    again = law_of(study(law, is_timed=False), done)
    assert again.relative_error(64) == law.relative_error(64)
