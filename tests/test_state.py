"""The state that the parts of a trial share, as a trial begins."""

import pytest
from toolbox import make_result

from bstune.trial.parts.state import TrialState, state_after

FRESH = {"first_step": 0, "last_step": 50, "steps": 0}


def test_a_fresh_trial_has_done_nothing():
    state = TrialState(**FRESH)
    assert (state.steps_low, state.skipped, state.history, state.loss) == (0, 0, [], None)
    assert (state.status, state.message, state.ended) == ("stopped", None, False)
    assert TrialState(**FRESH).history is not state.history


def test_a_trial_that_goes_on_counts_on():
    record = make_result(steps=20, steps_low=18, history=((10, 0.5), (18, None)), status="stopped")
    state = state_after(record, skipped=3, last_step=50)
    assert (state.first_step, state.last_step, state.steps) == (20, 50, 20)
    assert (state.steps_low, state.skipped) == (18, 3)
    assert (state.status, state.message, state.ended) == ("stopped", None, False)
    # It is the trial's own: the record stays as it is.
    state.history.append((25, 0.4))
    assert record.history == ((10, 0.5), (18, None))


def test_divergence_has_a_reason():
    state = TrialState(**FRESH)
    state.diverge("the training loss is nan at step 3")
    assert (state.status, state.message) == ("diverged", "the training loss is nan at step 3")


def test_it_has_no_other_attributes():
    with pytest.raises(AttributeError):
        TrialState(**FRESH).stpes = 3
