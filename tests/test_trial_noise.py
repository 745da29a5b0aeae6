"""The noise scale beside a trial: when it is measured, and that its errors are none of the trial's."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from made_parts import make_trainer

from bstune.trial.parts.trial_noise import MIN_SPLIT, TrialNoiseScale

HOOKS = ("setup", "teardown", "on_train_batch_start", "on_after_backward")
MODULE = SimpleNamespace(automatic_optimization=True)


class Measure:
    """Stands for the noise scale's own call-back, whose ``failing`` hook raises an error."""

    def __init__(self, failing=None):
        self.failing = failing
        self.called = []
        self.measurements = ()

    def hook(self, name):
        def call(trainer, module, *arguments):
            self.called.append((name, *arguments))
            if name == self.failing:
                raise LookupError("no such layer")

        return call

    def on_exception(self, trainer, module, error):
        self.called.append(("on_exception", type(error).__name__))

    def state_dict(self):
        return {"measurements": [1]}

    def load_state_dict(self, state):
        self.called.append(("load_state_dict", state))


def noise_of(every=5, alone=True, failing=None):
    """The part with a stand-in for what measures, and that."""
    noise = TrialNoiseScale(every, nullcontext, alone)
    measure = Measure(failing)
    for name in HOOKS:
        setattr(measure, name, measure.hook(name))
    noise._noise_scale = measure
    return noise, measure


def run(noise, module=MODULE, batch_size=8, parts=1):
    """Call each of the part's hooks once."""
    trainer = make_trainer()
    noise.setup(trainer, module, "fit", batch_size, parts)
    noise.before_batch(trainer, module, "batch", 3)
    noise.after_backward(trainer, module)
    noise.teardown(trainer, module, "fit")


ALL = [
    ("setup", "fit"),
    ("on_train_batch_start", "batch", 3),
    ("on_after_backward",),
    ("teardown", "fit"),
]


@pytest.mark.parametrize(
    ("changes", "options", "called"),
    [
        ({}, {}, ALL),
        ({"every": None}, {}, []),
        # Each process would measure its own share.
        ({"alone": False}, {}, []),
        ({}, {"module": SimpleNamespace(automatic_optimization=False)}, []),
        ({}, {"batch_size": MIN_SPLIT}, ALL),
        ({}, {"batch_size": MIN_SPLIT - 1}, []),
        # Where there are micro-batches, none is split.
        ({}, {"batch_size": MIN_SPLIT - 1, "parts": 2}, ALL),
    ],
)
def test_it_is_measured_where_it_can_be(changes, options, called):
    noise, measure = noise_of(**changes)
    run(noise, **options)
    assert measure.called == called
    assert noise.missing is None


@pytest.mark.parametrize("hook", HOOKS)
def test_an_error_ends_the_measuring_and_is_told_once(hook, warned):
    noise, measure = noise_of(failing=hook)
    run(noise)
    number = [name for name, *_ in ALL].index(hook)
    assert measure.called == [*ALL[: number + 1], ("on_exception", "LookupError")]
    # The step takes whole batches, so that its code is not blamed for a part.
    why = "LookupError: no such layer"
    if hook == "on_train_batch_start":
        why = "batches cannot be split into parts by their first dimension (a part alone: Look"
    assert noise.missing.startswith(f"the noise scale is not measured: {why}")
    # An option in words such as "(...=null)" would look as if it were set.
    assert noise.missing.endswith("; protocol.noise_scale_every=null leaves it out")
    assert warned() == [noise.missing]


def test_an_interruption_is_no_error_of_the_measurement():
    noise, measure = noise_of()

    def interrupt(trainer, module):
        raise KeyboardInterrupt

    # Ctrl-C may come in the middle of a measurement.
    measure.on_after_backward = interrupt
    with pytest.raises(KeyboardInterrupt):
        run(noise)
    assert noise.missing is None


def test_measurements_go_on_where_they_are_asked_for():
    noise, measure = noise_of()
    assert noise.state_dict() == {"noise_scale": {"measurements": [1]}}
    # The trial before did not measure.
    noise.load_state_dict({})
    noise.load_state_dict({"noise_scale": {"measurements": [2]}})
    assert measure.called == [("load_state_dict", {"measurements": [2]})]
    noise, measure = noise_of(every=None)
    assert noise.state_dict() == {}
    noise.load_state_dict({"noise_scale": {"measurements": [2]}})
    assert measure.called == []
    assert noise.measurements == ()
