"""The order in which a trial's parts are called in each of Lightning's hooks."""

from dataclasses import fields
from types import SimpleNamespace

import pytest
from lightning.pytorch import Callback
from made_parts import make_state, make_trainer
from toolbox import make_spec

from bstune.core.records import Target
from bstune.trial.parts import trial_callback
from bstune.trial.parts.assemble import Parts
from bstune.trial.parts.trial_callback import TrialCallback

MODULE = SimpleNamespace()
BATCH = ("batch", 0)


class Noted:
    """Stands for a part: notes the calls of its methods, which answer with what was set, or None."""

    def __init__(self, name, calls, answers):
        self._name = name
        self._calls = calls
        self._answers = answers

    def __getattr__(self, method):
        def call(*arguments, **options):
            self._calls.append(f"{self._name}.{method}")
            return self._answers.get(f"{self._name}.{method}")

        return call


@pytest.fixture
def calls(monkeypatch):
    """Note what is called besides the parts, too."""
    noted = []
    monkeypatch.setattr(
        trial_callback, "order_callbacks", lambda *a, **k: noted.append("order_callbacks")
    )
    monkeypatch.setattr(
        trial_callback, "begin_evaluation", lambda *a: noted.append("begin_evaluation")
    )
    monkeypatch.setattr(
        trial_callback, "end_evaluation", lambda *a: noted.append(f"end_evaluation {a[-1]}")
    )
    return noted


def callback_of(calls, micro_batches=1, **answers):
    """A call-back whose parts are all stand-ins but for the state."""
    parts = {one.name: Noted(one.name, calls, answers) for one in fields(Parts)}
    parts |= {"spec": make_spec(), "state": make_state(), "micro_batch_sizes": (4,) * micro_batches}
    parts["protocol"] = SimpleNamespace(target=Target("val_loss", 0.1, "min"))
    parts["snapshot"].writer = None
    parts["epoch_ends"].epochs_end = True
    return TrialCallback(Parts(**parts))


@pytest.mark.parametrize(
    ("hook", "arguments", "expected"),
    [
        (
            "setup",
            ("fit",),
            [
                "order_callbacks",
                "last_step.bring_forward",
                "snapshot.prepare_if_last_step_is_next",
                "noise_scale.setup",
            ],
        ),
        ("teardown", ("fit",), ["noise_scale.teardown"]),
        ("on_sanity_check_start", (), ["phases.begin_sanity_check"]),
        ("on_sanity_check_end", (), ["phases.end_sanity_check"]),
        ("on_fit_start", (), ["resume.keep_weights"]),
        (
            "on_train_batch_start",
            BATCH,
            # What is measured is measured of a module as it was stopped, and of code that is
            # compiled.
            ["resume.before_batch", "compiling.before_training_step", "noise_scale.before_batch"],
        ),
        ("on_after_backward", (), ["noise_scale.after_backward"]),
        (
            "on_train_epoch_end",
            (),
            # Whether an epoch is added depends on who wants to stop.
            ["agreed_stop.hold", "resume.end_epoch", "epoch_ends.end"],
        ),
        ("on_validation_start", (), ["resume.put_back_stopped_state", "metric.before_evaluation"]),
        ("on_validation_batch_start", BATCH, ["compiling.before_validation_step"]),
        ("on_validation_end", (), ["one_process.exit_if_forked", "end_evaluation False"]),
    ],
)
def test_a_hook_calls_parts_in_this_order(hook, arguments, expected, calls):
    callback = callback_of(calls)
    getattr(callback, hook)(make_trainer(), MODULE, *arguments)
    assert calls == expected


START = ["step_count.begin", "generators.restore", "epoch_ends.begin", "phases.begin_training"]
START += ["resume.begin", "epoch_ends.evaluates", "resume.lacks_evaluation"]
AGAIN = ["generators.keep", "resume.evaluate_again", "phases.repeat_evaluation"]


@pytest.mark.parametrize("lacks", [True, False])
def test_a_training_starts_where_it_was_stopped(lacks, calls):
    callback = callback_of(calls, **{"resume.lacks_evaluation": lacks})
    callback.on_train_start(make_trainer(), MODULE)
    assert calls == (START + AGAIN if lacks else START)


PUT_OFF = ["one_process.exit_if_forked", "agreed_stop.hold"]
COUNTED = [
    *PUT_OFF,
    "step_count.end_step",
    "last_step.bring_forward",
    "snapshot.prepare_if_last_step_is_next",
]


@pytest.mark.parametrize(
    ("micro_batches", "batch_idx", "is_due", "expected", "validates_after"),
    [
        (1, 6, True, [*COUNTED, "begin_evaluation"], 7),
        # A later batch than the next one is Lightning's word for not yet.
        (1, 6, False, [*COUNTED, "phases.close_warmup_segment"], 8),
        # In the midst of a step nothing is counted.
        (3, 6, True, PUT_OFF, 8),
        (3, 8, True, [*COUNTED, "begin_evaluation"], 9),
    ],
)
def test_a_step_is_counted_before_anything_looks_at_it(
    micro_batches, batch_idx, is_due, expected, validates_after, calls, monkeypatch
):
    monkeypatch.setattr(trial_callback, "is_evaluation_due", lambda parts, trainer: is_due)
    callback = callback_of(calls, micro_batches)
    trainer = make_trainer()
    callback.on_train_batch_end(trainer, MODULE, {"loss": 0.5}, "batch", batch_idx)
    assert calls == expected
    assert trainer.val_check_batch == validates_after


@pytest.mark.parametrize(
    ("outputs", "loss"), [({"loss": 0.5}, 0.5), ({"other": 1}, None), (0.5, 0.5), (None, None)]
)
def test_the_loss_is_what_the_step_returned(outputs, loss, calls):
    callback = callback_of(calls, micro_batches=2)
    callback.on_train_batch_end(make_trainer(), MODULE, outputs, "batch", 0)
    assert callback.parts.state.loss == loss


def test_where_the_lean_loop_runs_it_starts_the_clock(calls):
    callback = callback_of(calls)
    callback.step_taker = SimpleNamespace(runs=True)
    callback.on_validation_end(make_trainer(), MODULE)
    assert calls[-1] == "end_evaluation True"


def test_it_is_lightnings_and_keeps_the_measurements(calls):
    callback = callback_of(calls, **{"noise_scale.state_dict": {"noise_scale": 1}})
    assert isinstance(callback, Callback)
    assert callback.state_dict() == {"noise_scale": 1}
    callback.load_state_dict({})
    assert calls[-1] == "noise_scale.load_state_dict"
