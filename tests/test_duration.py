import pytest

from bstune.study.duration import FEWEST_TRIALS, LONG_SECONDS, advice_on_time, trials_that_fit


@pytest.mark.parametrize(
    ("seconds", "trials", "fitting"),
    [
        (2 * LONG_SECONDS, 30, 15),
        (LONG_SECONDS, 30, None),  # all of them fit
        (3 * LONG_SECONDS, 3 * FEWEST_TRIALS, FEWEST_TRIALS),
        (3 * LONG_SECONDS, 3 * FEWEST_TRIALS - 1, None),  # too few to show anything
    ],
)
def test_trials_that_fit_into_an_hour(seconds, trials, fitting):
    assert trials_that_fit(seconds, trials) == fitting


@pytest.mark.parametrize(
    ("seconds", "limited", "is_said"),
    [(LONG_SECONDS, False, False), (7200.0, False, True), (7200.0, True, False)],
)
def test_a_long_study_alone_is_told_what_would_make_it_fit(seconds, limited, is_said):
    assert (advice_on_time(seconds, 30, "cpu", limited) is not None) == is_said


def test_a_gpu_is_no_advice_where_there_is_one():
    of_cpu, of_cuda = (advice_on_time(7200.0, 30, device, False) for device in ("cpu", "cuda:0"))
    assert "GPU" in of_cpu
    assert "GPU" not in of_cuda
    assert "search.trials=15" in of_cuda
