"""A trial that is stopped and goes on is the trial that was never stopped."""

import random
from contextlib import suppress
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from learners import (
    IMAGES,
    LABELS,
    NORMALISE,
    SCHEDULE,
    VALIDATION,
    Counting,
    gradient_scaler,
    learner,
    learning_protocol,
    momentum,
    same_weights,
    stream,
    tensors,
    train,
)
from lightning.pytorch import LightningDataModule
from toolbox import (
    EVERY_STEP,
    TRAINER,
    FakeTime,
    entries,
    evaluated_steps,
    make_spec,
    measured_steps,
)
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from bstune.core.clock import TrialClock
from bstune.core.errors import ConfigError, StateError
from bstune.core.evaluation_schedule import EvaluationSchedule
from bstune.core.records import Target, TrialResult
from bstune.trial.batches.image_batches import Normalisation, TrainBatches
from bstune.trial.batches.loader import rebatch
from bstune.trial.parts.checkpoint import Stopped, read_state
from bstune.workloads.averaging import ExponentialMovingAverage, Lookahead, RunningWeightAverage
from bstune.workloads.classifier import Classifier
from bstune.workloads.images import random_crop_flip
from bstune.workloads.optim import parameter_groups
from bstune.workloads.schedules import piecewise_linear

# Eight epochs of 60 images in batches of 8.
STEPS = 60
SPEC = make_spec(8, 0.05, 4, number=1)


# What is trained

# Every kind of state that a trial may have: schedules, random layers, running statistics, averages.
triangle = partial(
    piecewise_linear, total_steps=STEPS, knots=(0.0, 0.4, 1.0), factors=(0.0, 1.0, 0.0)
)
dropout = partial(nn.Dropout, 0.4)
batch_norm = partial(nn.BatchNorm1d, 16)
lookahead = partial(Lookahead, STEPS, every=4, decay=0.9, power=1.0)
groups = partial(
    parameter_groups,
    weight_decay=0.01,
    batch_size=8,
    kinds={
        "norm_bias": {"rate": 8.0},
        "head": {"examples": 200},
        "rest": {"examples": 300, "fade": True},
    },
)


class Plateau(Classifier):
    """Lowers its rate where the loss of the training batches does not fall."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("train/loss", loss)
        return loss

    def configure_optimizers(self):
        optimizer = momentum(self.parameters(), lr=self.lr)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.9, patience=1)
        return [optimizer], [{"scheduler": schedule, "interval": "step", "monitor": "train/loss"}]


class Overflows(Classifier):
    """Some batches' gradients overflow, so that a gradient scaler skips their steps."""

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * (
            # Two of nine steps are skipped.
            torch.inf if batch_idx % 9 in (3, 4) else 1.0
        )


class Unfreezing(Classifier):
    """Trains its last layer alone for two epochs."""

    def on_train_start(self):
        self.model[1].requires_grad_(False)

    def on_train_epoch_start(self):
        # The epochs are of the batches that it has seen.
        if self.current_epoch == 2:
            self.model[1].requires_grad_(True)


class SetsWeights(Classifier):
    """Sets weights as its training begins, which a trial that goes on has as they were."""

    def on_fit_start(self):
        self.model[1].bias.data.fill_(0.1)

    def on_train_start(self):
        self.model[3].bias.data.fill_(0.2)


class Saving(Classifier):
    """Its loss depends on a number that it keeps; its settings may hold any object, and are not in the file."""

    # Kept in the checkpoint by its own hooks.
    batches = 0

    def __init__(self, *args):
        super().__init__(*args)
        self.save_hyperparameters({"surprise": Noisy()})

    def training_step(self, batch, batch_idx):
        self.batches += 1
        return super().training_step(batch, batch_idx) / self.batches**0.5

    def on_save_checkpoint(self, checkpoint):
        checkpoint["batches"] = self.batches

    def on_load_checkpoint(self, checkpoint):
        self.batches = checkpoint["batches"]


# What it is trained on


class Noisy(Dataset):
    """Examples changed at random each time, by the generators of Python, numpy and torch."""

    def __len__(self):
        return len(IMAGES)

    def __getitem__(self, index):
        noise = random.gauss() + np.random.rand() + torch.rand(1, 3, 3)
        return NORMALISE(IMAGES[index : index + 1])[0] + noise, LABELS[index]


def noisy(spec, micro_batch_size):
    return rebatch(DataLoader(Noisy(), shuffle=True), spec.batch_size, micro_batch_size, spec.seed)


class Foreign(LightningDataModule):
    """A project's own data, with a state of its own."""

    seen = 0

    def on_after_batch_transfer(self, batch, dataloader_idx):
        if self.trainer.training:
            self.seen += 1
        return batch[0] + 0.01 * self.seen, batch[1]

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state_dict):
        self.seen = state_dict["seen"]


def shuffled_validation():
    """Evaluating it draws random numbers."""
    return DataLoader(
        TensorDataset(NORMALISE(VALIDATION[0]), VALIDATION[1]), batch_size=8, shuffle=True
    )


def chain(
    folder,
    limits,
    spec=SPEC,
    protocol=learning_protocol,
    clock=lambda: TrialClock(FakeTime()),
    **options,
):
    """Train in parts that end at ``limits``, the last one at the budget; return all records and the last module."""
    records = []
    stopped = None
    for part, limit in enumerate([*limits, None]):
        part_spec = replace(
            spec, number=part, max_steps=limit, resumed_from=part - 1 if part else None
        )
        # What was drawn before must not matter.
        torch.rand(part)
        files = {"state_file": folder / f"{part}.state", "resume": stopped}
        record, module = train(part_spec, protocol(), clock=clock(), **files, **options)
        records.append(record)
        # What has ended otherwise has no next part.
        if record.status != "stopped":
            break
        stopped = Stopped(record, files["state_file"])
    return records, module


def assert_same(continued, module, whole, reference, limits):
    """Forced evaluations aside, the last record of a chain is the uninterrupted trial's; so are the weights."""
    assert (continued.status, continued.steps, continued.examples) == (
        whole.status,
        whole.steps,
        whole.examples,
    )
    due = dict(whole.history)
    at_due = [pair for pair in continued.history if pair[0] in due]
    assert at_due == list(whole.history)
    steps = evaluated_steps(continued)
    # Where it was stopped it was evaluated, too.
    stopped_at = {step for step in limits if step < whole.steps}
    assert set(steps) == due.keys() | stopped_at
    assert steps == sorted(steps)
    assert same_weights(module, reference)


flip = partial(random_crop_flip, padding=1)
# Sizes that leave a smaller last group.
MICRO_BATCHES = {"alternating flip": 3, "loader, micro-batches": 5, "everything": 3}
CASES = {
    "plain": {},
    "plateau": {"build": partial(learner, kind=Plateau)},
    "average, sparse": {"build": partial(learner, average=partial(RunningWeightAverage, 1.0))},
    "groups": {"build": partial(learner, layers=[batch_norm], optimizer=momentum, groups=groups)},
    "lookahead": {
        "build": partial(
            learner,
            layers=[batch_norm],
            callbacks=[lookahead],
            average=partial(ExponentialMovingAverage, 0.9, 5),
        )
    },
    "alternating flip": {
        "batches": partial(stream, augment=partial(flip, cutout=1), alternating_flip=True)
    },
    "loader, micro-batches": {"batches": noisy, "build": partial(learner, layers=[dropout])},
    "scaler": {"build": partial(learner, kind=Overflows, optimizer=momentum)},
    "foreign project": {
        "batches": noisy,
        "build": partial(learner, kind=Saving, layers=[dropout]),
        "evaluated": shuffled_validation,
        "data": Foreign(),
    },
    "weights set at the start": {"build": partial(learner, kind=SetsWeights)},
    "unfrozen layers": {"batches": noisy, "build": partial(learner, kind=Unfreezing)},
    "everything": {
        "batches": partial(stream, augment=flip),
        "build": partial(
            learner,
            layers=[dropout, batch_norm],
            optimizer=torch.optim.AdamW,
            schedule=triangle,
            average=partial(RunningWeightAverage, 0.3),
        ),
    },
}


def protocol_of(case, every=None):
    """The protocol of one trial of a case: a gradient scaler has a state."""
    trainer = gradient_scaler(growth_interval=3, init_scale=64.0) if case == "scaler" else TRAINER
    return learning_protocol(
        micro_batch_size=MICRO_BATCHES.get(case), noise_scale_every=every, trainer=trainer
    )


# One case of each kind; the others are slow.
QUICK = (("plain", None), ("everything", 5), ("foreign project", 5), ("unfrozen layers", None))
QUICK += (("weights set at the start", None),)


@pytest.mark.parametrize(
    ("case", "every"),
    [
        *QUICK,
        *(
            pytest.param(case, 5, marks=pytest.mark.slow)
            for case in CASES
            if (case, 5) not in QUICK
        ),
    ],
)
def test_a_trial_that_goes_on_is_the_uninterrupted_one_bit_for_bit(case, every, tmp_path):
    """Nor does measuring the noise scale change it; the measurements go on as well."""
    # At step 30 an evaluation is due.
    options, limits = CASES[case], (1, 23, 30, 59)
    plain, untouched = train(SPEC, protocol_of(case), **options)
    assert (plain.status, plain.steps, plain.noise_scale) == ("stopped", STEPS, ())
    whole, reference = train(SPEC, protocol_of(case, every), **options)
    assert replace(whole, noise_scale=()) == plain
    assert same_weights(reference, untouched)
    records, module = chain(tmp_path, limits, protocol=partial(protocol_of, case, every), **options)
    assert [record.steps for record in records] == [*limits, STEPS]
    assert [record.resumed_from for record in records] == [None, *range(len(limits))]
    assert_same(records[-1], module, whole, reference, limits)
    for record in records:
        assert record.history[-1][0] == record.steps == record.steps_low
    assert records[-1].noise_scale == whole.noise_scale
    # Lightning counts the steps that a scaler skips, too.
    if every and case != "scaler":
        assert measured_steps(whole.noise_scale) == list(range(5, STEPS + 1, 5))
        assert [len(record.noise_scale) for record in records] == [0, 4, 6, 11, 12]


def test_a_state_without_measurements_is_taken_up(stopped):
    going_on, _ = resume(stopped, learning_protocol(noise_scale_every=5))
    # The first 20 steps had none.
    assert measured_steps(going_on.noise_scale) == list(range(25, STEPS + 1, 5))


# Close to each other and far apart.
@pytest.mark.parametrize("limits", [(37,), (3, 4, 5, 33, 34, 35, 42, 43)])
def test_steps_to_target_do_not_depend_on_where_a_trial_was_stopped(limits, tmp_path):
    protocol = learning_protocol(300, target=Target("val/loss", 0.45, "min"))
    spec = replace(SPEC, lr=0.01)
    build = partial(learner, optimizer=momentum)
    path = tmp_path / "weights.ckpt"
    whole, reference = train(spec, protocol, build)
    assert whole.status == "reached"
    # It was stopped before the target came into reach.
    assert max(limits) < whole.steps_low
    records, module = chain(
        tmp_path, limits, spec, protocol=lambda: protocol, build=build, checkpoint=path
    )
    assert_same(records[-1], module, whole, reference, limits)
    assert (records[-1].status, records[-1].steps_low) == ("reached", whole.steps_low)
    saved = torch.load(path, weights_only=True)["state_dict"].values()
    for tensor, expected in zip(saved, tensors(reference), strict=True):
        assert torch.equal(tensor, expected)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_on_cuda_its_generators_go_on_too(tmp_path):
    # The images lie on the GPU, where its own generator draws.
    def batches(spec, micro_batch_size):
        norm = Normalisation(NORMALISE.scale.cuda(), NORMALISE.shift.cuda())
        options = {
            "batch_size": 8,
            "micro_batch_size": micro_batch_size,
            "seed": spec.seed,
            "augment": flip,
        }
        return TrainBatches(IMAGES.cuda(), LABELS.cuda(), **options, normalise=norm)

    options = {"batches": batches, "build": CASES["everything"]["build"]}
    protocol = learning_protocol(trainer={"accelerator": "cuda", "devices": [0]})
    whole, reference = train(SPEC, protocol, **options)
    records, module = chain(tmp_path, (23,), protocol=lambda: protocol, **options)
    assert records[-1].steps == whole.steps
    torch.testing.assert_close(tensors(module), tensors(reference))


# Limits


# A larger budget than the protocol's may be asked for.
def test_a_limit_may_lie_past_the_budget():
    result, _ = train(replace(SPEC, max_steps=STEPS + 1))
    assert (result.status, result.steps, result.steps_low) == ("stopped", STEPS + 1, STEPS + 1)
    assert result.history[-1][0] == STEPS + 1


def test_a_trial_out_of_time_ends_with_its_next_step_and_can_go_on(tmp_path):
    whole, reference = train(SPEC)
    state = tmp_path / "0.state"
    # No second is left, and yet a step is trained: a trial needs one.
    stopped, _ = train(replace(SPEC, max_seconds=0.0), state_file=state)
    assert (stopped.status, stopped.steps, stopped.message) == ("stopped", 1, None)
    resume = Stopped(stopped, state)
    continued, module = train(replace(SPEC, number=2, resumed_from=1), resume=resume)
    assert_same(continued, module, whole, reference, [1])


def test_an_evaluation_at_the_limit_can_reach_the_target_and_leaves_no_state(tmp_path):
    protocol = learning_protocol(300, target=Target("val/loss", 0.5, "min"))
    spec = replace(SPEC, lr=0.01)
    build = partial(learner, optimizer=momentum)
    whole, _ = train(spec, protocol, build)
    # Evaluated at each step, the target is met earlier than the schedule looks.
    first = train(spec, replace(protocol, evaluation_schedule=EVERY_STEP), build)[0].steps
    assert whole.steps_low < first < whole.steps
    files = {"state_file": tmp_path / "1.state", "checkpoint": tmp_path / "1.ckpt"}
    result, _ = train(replace(spec, max_steps=first), protocol, build, **files)
    assert (result.status, result.steps, result.steps_low) == ("reached", first, whole.steps_low)
    # A trial that has reached is not continued.
    assert entries(tmp_path) == ["1.ckpt"]


def test_a_limit_leaves_at_least_a_step(stopped):
    # At least one step past the 20 that it has.
    for limit in (10, 20):
        with pytest.raises(
            ConfigError, match=f"a trial that has 20 steps cannot be trained until step {limit}"
        ):
            resume(stopped, max_steps=limit)


# What is left, and when


class Ends(Classifier):
    """Ends as ``how`` says: an error is raised in the evaluation at the limit, when the state is written already."""

    how = None

    def training_step(self, batch, batch_idx):
        # Lightning ends after six batches: an early end, not one by the limit.
        self.trainer.should_stop = self.how == "stops" and batch_idx >= 5
        # The loss at step 20, the limit.
        diverges = self.how == "diverges" and batch_idx == 19
        return super().training_step(batch, batch_idx) * (torch.nan if diverges else 1.0)

    def on_validation_end(self):
        if isinstance(self.how, BaseException) and not self.trainer.sanity_checking:
            raise self.how


@pytest.mark.parametrize(
    ("how", "status"),
    [
        (None, "stopped"),
        ("stops", "stopped"),
        ("diverges", "diverged"),
        (torch.OutOfMemoryError("CUDA out of memory"), "out of memory"),
        (KeyboardInterrupt(), None),
    ],
)
@pytest.mark.usefixtures("interruptible")
def test_only_a_trial_out_of_steps_leaves_a_state(how, status, tmp_path, monkeypatch):
    """The weights that reach the target are not there either."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Ends, "how", how)
    spec = replace(SPEC, max_steps=20)
    build = partial(learner, kind=Ends)
    files = {"state_file": tmp_path / "1.state", "checkpoint": tmp_path / "1.ckpt"}
    # An interruption has no record.
    if status is None:
        with pytest.raises((KeyboardInterrupt, SystemExit)):
            train(spec, build=build, **files)
    else:
        assert train(spec, build=build, **files)[0].status == status
    assert entries(tmp_path) == (["1.state"] if how is None else [])
    if how is None:  # only where it is asked for
        (tmp_path / "1.state").unlink()
        train(spec)
        assert entries(tmp_path) == []


def test_only_batches_that_know_their_place_can_be_stopped(tmp_path):
    state_file = tmp_path / "1.state"
    for blank in (DataLoader([1, 2]), []):
        with pytest.raises(
            ConfigError,
            match=f"batches from {type(blank).__name__} cannot be stopped to go on later",
        ):
            train(SPEC, batches=lambda spec, micro_batch_size: blank, state_file=state_file)  # noqa: B023


def test_evaluations_do_not_change_the_training():
    """However often it evaluates, and whatever random numbers that takes."""
    options = {"build": partial(learner, layers=[dropout]), "evaluated": shuffled_validation}
    # A ratio of 9: hardly ever.
    sparse = EvaluationSchedule(9, 1, 1, 1.5)
    _, module = train(SPEC, learning_protocol(evaluation_schedule=SCHEDULE), **options)
    _, other = train(SPEC, learning_protocol(evaluation_schedule=sparse), **options)
    assert same_weights(module, other)


# The record


class Timed(Classifier):
    """100 s to start, 10 s an evaluation, 7 s to write its state; two steps of 50 s, then 1 s a step."""

    now = FakeTime()

    def on_fit_start(self):
        self.now.now += 100.0
        self.done = 0

    def training_step(self, batch, batch_idx):
        self.now.now += 50.0 if self.done < 2 else 1.0
        self.done += 1
        return super().training_step(batch, batch_idx)

    def on_validation_start(self):
        self.now.now += 10.0

    def on_save_checkpoint(self, checkpoint):
        self.now.now += 7.0


def test_seconds_are_the_trials_own_and_steps_the_whole_chains(tmp_path):
    build = partial(learner, kind=Timed)

    def clock():
        return TrialClock(Timed.now)

    records, _ = chain(
        tmp_path, (30, 40), protocol=partial(learning_protocol, 41), build=build, clock=clock
    )
    first, second, third = records
    assert (first.steps, second.steps, third.steps) == (30, 40, 41)
    assert (first.examples, second.examples, third.examples) == (240, 320, 328)
    in_first = len(first.history)
    in_second = len(second.history) - in_first
    # One more at the start of training.
    assert first.eval_seconds == 10.0 * (in_first + 1)
    assert second.eval_seconds == 10.0 * in_second
    assert third.eval_seconds == 10.0
    # Two steps of 50 s and 28 of 1 s; the second part has ten steps, the third one.
    assert first.train_seconds == 100.0 + 28.0
    assert second.train_seconds == 100.0 + 8.0
    # A single step.
    assert third.train_seconds == 50.0
    for record in records:
        assert record.startup_seconds == 100.0
        took = record.train_seconds + record.eval_seconds + record.startup_seconds
        # Seven more seconds are those of the checkpoint.
        assert record.wall_seconds == took + 7.0
    # A trial of one step has nothing but that step, which is slow.
    assert (first.seconds_per_step, second.seconds_per_step) == (1.0, 1.0)
    assert third.seconds_per_step == 50.0
    assert TrialResult.from_json(third.to_json()) == third


def scripted(metric):
    return lambda spec: Counting(metric, name="val/loss")


def test_divergence_is_judged_from_the_first_start(tmp_path):
    # The start is 1.0; diverged is past 5 times the gap to a target of 0.
    build = scripted(lambda steps: 1.0 if steps == 0 else 2.0 if steps < 25 else 5.5)
    protocol = learning_protocol(divergence=5.0, evaluation_schedule=EVERY_STEP)
    whole, _ = train(SPEC, protocol, build)
    # Stopped at 20, where the metric is 2.0: from there 5.5 would not be far.
    records, _ = chain(tmp_path, (20,), protocol=lambda: protocol, build=build)
    assert (whole.status, whole.steps) == ("diverged", 25)
    assert (records[-1].status, records[-1].history) == ("diverged", whole.history)


@pytest.mark.parametrize(
    ("step", "value", "limits", "due"),
    [
        # At 0.2 the target of 0.1 is near.
        (20, 0.2, (), [10, 20, 21, 22, 25, 30, 35, 40]),
        # A trial that was near the target stays near.
        (20, 0.2, (23,), [10, 20, 21, 22, 25, 30, 35, 40]),
        # At step 15 it would be near, if anyone looked.
        (15, 0.2, (), [10, 20, 30, 40]),
        # That it looked near where it was stopped does not count.
        (
            15,
            0.2,
            (15,),
            [10, 20, 30, 40],
        ),
        # Nor does it count that it improved since.
        (15, 3.0, (15,), [10, 20, 30, 40]),
        (15, 0.2, (15, 17, 29), [10, 20, 30, 40]),
    ],
)
def test_later_evaluations_do_not_depend_on_where_it_was_stopped(
    step, value, limits, due, tmp_path
):
    """With k evaluations of 20 examples, 10 k steps have to lie behind far from the target, 5 k near it."""
    build = scripted(lambda steps: value if steps == step else 0.9)
    protocol = learning_protocol(40, target=Target("val/loss", 0.1, "min"))
    records, _ = chain(tmp_path, limits, protocol=lambda: protocol, build=build)
    found = []
    for step in evaluated_steps(records[-1]):
        # An evaluation at the limit counts only where one was due.
        if step not in limits or step in due:
            found.append(step)
    assert found == due


# Files that cannot be used


@pytest.fixture
def stopped(tmp_path):
    record, _ = train(replace(SPEC, max_steps=20), state_file=tmp_path / "1.state")
    return Stopped(record, tmp_path / "1.state")


def resume(stopped, protocol=None, **changes):
    return train(
        replace(SPEC, **{"number": 2, "resumed_from": 1} | changes), protocol, resume=stopped
    )


def changed(change):
    """A function that changes what a file holds."""

    def spoil(path):
        checkpoint = torch.load(path, weights_only=True)
        change(checkpoint)
        torch.save(checkpoint, path)

    return spoil


def zero(path):
    data = bytearray(path.read_bytes())
    data[200:260] = bytes(60)
    path.write_bytes(data)


# What a state is told apart by.
OTHERS = "its number, batch size, lr, seed and steps are (1, 8, 0.05, 4, 20), not (1, {}, 20)"


@pytest.mark.parametrize(
    ("spoil", "changes", "reason"),
    [
        (lambda path: path.unlink(), {}, "No such file or directory"),
        # A zip file's directory is at its end.
        (lambda path: path.write_bytes(path.read_bytes()[:-100]), {}, "File is not a zip file"),
        (changed(lambda checkpoint: checkpoint.pop("bstune")), {}, "'bstune'"),
        (changed(lambda checkpoint: checkpoint["bstune"].update(colour="red")), {}, "colour"),
        (
            # An object needs pickle, which is not trusted.
            changed(lambda checkpoint: checkpoint.update(callbacks={"own": Noisy()})),
            {},
            "it holds more than plain data: Unsupported global: GLOBAL test_checkpoint.Noisy",
        ),
        (zero, {}, "in it is damaged"),
        (lambda path: None, {"batch_size": 9}, OTHERS.format("9, 0.05, 4")),
        (lambda path: None, {"lr": 0.06}, OTHERS.format("8, 0.06, 4")),
        (lambda path: None, {"seed": 5}, OTHERS.format("8, 0.05, 5")),
    ],
)
def test_a_file_that_cannot_be_read_or_is_another_trials_is_named(stopped, spoil, changes, reason):
    spoil(stopped.state)
    with pytest.raises(StateError) as error:
        resume(stopped, **changes)
    text = str(error.value)
    assert text.startswith(f"the state of trial 1 at {stopped.state} cannot be read: ")
    assert reason in text
    assert text.endswith("; it starts afresh")
    assert "\n" not in text


def test_a_spoiled_byte_anywhere_is_an_error_or_does_no_harm(stopped):
    whole = stopped.state.read_bytes()
    # 150 places, each with all of its bits flipped.
    for place in np.random.default_rng(0).integers(len(whole), size=150):
        data = bytearray(whole)
        data[place] ^= 0xFF
        stopped.state.write_bytes(data)
        with suppress(StateError):
            read_state(stopped, SPEC, stopped.record.device, stopped.record.versions)


def test_a_state_of_other_versions_or_another_device_is_refused(stopped, monkeypatch):
    newer = {**stopped.record.versions, "torch": "99.0"}
    with monkeypatch.context() as patch:
        patch.setattr("bstune.trial.loop.versions", lambda: newer)
        with pytest.raises(StateError, match=r"it was written by .*, not .*99\.0"):
            resume(stopped)
    with pytest.raises(StateError, match=r"not .*NVIDIA H200"):
        read_state(stopped, SPEC, "NVIDIA H200", stopped.record.versions)
    with pytest.raises(StateError, match=r"not .*2 x cpu"):
        read_state(stopped, SPEC, "2 x cpu (1 thread)", stopped.record.versions)


def test_a_trial_goes_on_with_another_number_of_threads_and_says_so(stopped, monkeypatch, caplog):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    record, _ = resume(stopped)
    assert (record.resumed_from, record.device) == (1, "cpu (77 threads)")
    assert record.steps > stopped.record.steps
    assert [line.levelname for line in caplog.records].count("WARNING") == 1


def test_the_parent_is_the_trial_that_goes_on(stopped):
    # No parent, and another one than the file's.
    for parent in (None, 7):
        with pytest.raises(
            ValueError, match=f"a trial with resumed_from={parent} cannot go on from trial 1"
        ):
            resume(stopped, resumed_from=parent)
    with pytest.raises(
        ValueError, match="a trial with resumed_from=1 cannot go on from trial None"
    ):
        train(replace(SPEC, resumed_from=1))
