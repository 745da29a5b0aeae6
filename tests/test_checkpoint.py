"""A trial that is stopped and goes on is the trial that was never stopped."""

import random
from contextlib import suppress
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule
from lightning.pytorch.plugins.precision import MixedPrecision
from toolbox import EVERY_STEP, TRAINER, FakeTime, make_protocol, make_spec
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

from bstune.core.clock import TrialClock
from bstune.core.errors import ConfigError, StateError
from bstune.core.records import EvaluationSchedule, Target, TrialResult
from bstune.trial.batches import EvalBatches, Normalisation, TrainBatches, rebatch
from bstune.trial.checkpoint import Stopped, read_state
from bstune.trial.loop import Workload, run_trial
from bstune.workloads.averaging import ExponentialMovingAverage, Lookahead, RunningWeightAverage
from bstune.workloads.classifier import Classifier
from bstune.workloads.images import random_crop_flip
from bstune.workloads.optim import Muon, parameter_groups
from bstune.workloads.schedules import piecewise_linear

CADENCE = EvaluationSchedule(ratio=1.05, share=0.25, cost=0.5, near=1.5)
STEPS = 60


def spec(batch_size=8, lr=0.05, seed=4, **changes):
    return make_spec(batch_size, lr, seed, **({"number": 1} | changes))


def protocol(steps=STEPS, **changes):
    own = {"target": Target("val/loss", 0.0, "min"), "evaluation_schedule": CADENCE, "divergence": 5.0}
    return make_protocol(steps, **(own | changes))


def _images(n, seed):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(3, (n,), generator=generator)
    noise = torch.randint(-90, 91, (n, 1, 3, 3), generator=generator)
    images = (100 + 70 * F.one_hot(labels, 9).view(n, 1, 3, 3) + noise).clamp(0, 255)
    return images.to(torch.uint8), labels


IMAGES, LABELS = _images(50, 0)
VALIDATION = _images(20, 1)
NORMALISE = Normalisation(torch.full((1, 1, 1, 1), 1 / 50), torch.full((1, 1, 1, 1), -2.0))


# What is trained


def learner(
    own, kind=Classifier, optimizer=torch.optim.SGD, layers=(), schedule=None, average=None, callbacks=(), **options
):
    model = nn.Sequential(nn.Flatten(), nn.Linear(9, 16), nn.Tanh(), *(layer() for layer in layers), nn.Linear(16, 3))
    averaged = None if average is None else average()
    others = [callback() for callback in callbacks]
    if others:
        options["callbacks"] = others
    return kind(model, nn.CrossEntropyLoss(), optimizer, own.lr, schedule, averaged, **options)


momentum = partial(torch.optim.SGD, momentum=0.9, nesterov=True)
triangle = partial(piecewise_linear, total_steps=STEPS, knots=(0.0, 0.4, 1.0), factors=(0.0, 1.0, 0.0))
dropout = partial(nn.Dropout, 0.4)
muon = partial(Muon, momentum=0.9, nesterov=True, steps=5, normalise_weights=True)
lookahead = partial(Lookahead, STEPS, every=4, decay=0.9, power=1.0)


def matrices(module, lr):
    return [
        {"params": [p for p in module.parameters() if p.ndim == 2], "orthogonalise": True},
        {"params": [p for p in module.parameters() if p.ndim < 2], "lr": 2 * lr},
    ]


class SwapsItself(Classifier):
    """Evaluates an average that it keeps itself, updated after each batch and swapped in for each evaluation."""

    def on_fit_start(self):
        if not hasattr(self, "own_average"):
            self.own_average = [p.detach().clone() for p in self.model.parameters()]

    def on_train_batch_end(self, *args):
        for averaged, now in zip(self.own_average, self.model.parameters(), strict=True):
            averaged.lerp_(now.detach(), 0.1)

    def _swap(self):
        for averaged, now in zip(self.own_average, self.model.parameters(), strict=True):
            kept = averaged.clone()
            averaged.copy_(now.data)
            now.data.copy_(kept)

    def on_validation_start(self):
        self._swap()

    def on_validation_end(self):
        self._swap()

    def on_save_checkpoint(self, checkpoint):
        checkpoint["own_average"] = self.own_average

    def on_load_checkpoint(self, checkpoint):
        self.own_average = checkpoint["own_average"]


class Swapping(Callback):
    """A call-back that swaps other weights in at the very start of an evaluation, and counts training batches."""

    def __init__(self):
        self.batches = 0

    def state_dict(self):
        return {"batches": self.batches}

    def load_state_dict(self, state_dict):
        self.batches = state_dict["batches"]

    def on_train_batch_end(self, trainer, pl_module, *args):
        self.batches += 1
        with torch.no_grad():
            pl_module.model[1].bias.mul_(1.0 - 0.5 / self.batches)

    def on_validation_start(self, trainer, pl_module):
        self.kept = pl_module.model[1].bias.detach().clone()
        pl_module.model[1].bias.data.fill_(1.0)

    def on_validation_end(self, trainer, pl_module):
        pl_module.model[1].bias.data.copy_(self.kept)


class Manual(Classifier):
    """Steps two optimizers itself."""

    def __init__(self, *args):
        super().__init__(*args)
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizers = self.optimizers()
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss)
        for optimizer in optimizers:
            optimizer.step()
        return loss

    def configure_optimizers(self):
        return [momentum([p], lr=self.lr) for p in self.model.parameters()]


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
        return super().training_step(batch, batch_idx) * (torch.inf if batch_idx % 9 in (3, 4) else 1.0)


# What it is trained on


def stream(own, micro_batch_size=None, **options):
    sizes = {"batch_size": own.batch_size, "micro_batch_size": micro_batch_size}
    return TrainBatches(IMAGES, LABELS, **sizes, seed=own.seed, normalise=NORMALISE, **options)


class Noisy(Dataset):
    """Examples changed at random each time, by the generators of Python, numpy and torch."""

    def __len__(self):
        return len(IMAGES)

    def __getitem__(self, index):
        noise = random.gauss() + np.random.rand() + torch.rand(1, 3, 3)
        return NORMALISE(IMAGES[index : index + 1])[0] + noise, LABELS[index]


def noisy(own, micro_batch_size=None, **options):
    return rebatch(DataLoader(Noisy(), shuffle=True, **options), own.batch_size, micro_batch_size, own.seed)


def validation():
    return EvalBatches(*VALIDATION, batch_size=8, normalise=NORMALISE)


def shuffled_validation():
    """Evaluating it draws random numbers."""
    return DataLoader(TensorDataset(NORMALISE(VALIDATION[0]), VALIDATION[1]), batch_size=8, shuffle=True)


def run(own, rules=None, build=learner, batches=stream, evaluated=validation, **options):
    """Return the record and the module that it trained."""
    modules = []

    def kept(own):
        modules.append(build(own))
        return modules[0]

    options.setdefault("clock", TrialClock(lambda: 0.0))
    rules = rules() if callable(rules) else rules or protocol()
    return run_trial(Workload(kept, batches, evaluated(), 20), own, rules, **options), modules[0]


def chain(folder, limits, own=None, **options):
    """Train in parts that end at ``limits``, the last one at the budget; return all records and the last module."""
    own, records, stopped = own or spec(), [], None
    for part, limit in enumerate([*limits, None]):
        parent = None if stopped is None else stopped.record.number
        part_spec = replace(own, number=part, max_steps=limit, resumed_from=parent)
        torch.rand(part)  # what was drawn before does not matter
        record, module = run(part_spec, state=folder / f"{part}.state", resume=stopped, **options)
        records.append(record)
        if record.status != "censored":
            break
        stopped = Stopped(record, folder / f"{part}.state")
    return records, module


def tensors(module):
    return [tensor.detach() for tensor in module.state_dict().values()]


def assert_same(continued, module, whole, reference, limits):
    """Forced evaluations aside, the last record of a chain is the uninterrupted trial's; so are the weights."""
    assert (continued.status, continued.steps, continued.examples) == (whole.status, whole.steps, whole.examples)
    known = dict(whole.history)
    assert [pair for pair in continued.history if pair[0] in known] == list(whole.history)
    assert {step for step, _ in continued.history} == known.keys() | {n for n in limits if n < whole.steps}
    assert [step for step, _ in continued.history] == sorted(step for step, _ in continued.history)
    assert all(torch.equal(a, b) for a, b in zip(tensors(module), tensors(reference), strict=True))


def scaled(**options):
    """Return the options of one Trainer: a scaler has a state of its own."""
    scaler = torch.amp.GradScaler("cpu", **options)
    return {**TRAINER, "plugins": [MixedPrecision("16-mixed", "cpu", scaler=scaler)]}


CASES = {
    "plain": {},
    "momentum": {"build": partial(learner, optimizer=momentum)},
    "adam": {"build": partial(learner, optimizer=torch.optim.Adam)},
    "schedule": {"build": partial(learner, optimizer=momentum, schedule=triangle)},
    "plateau": {"build": partial(learner, kind=Plateau)},
    "average": {"build": partial(learner, average=partial(RunningWeightAverage, 0.5))},
    "average, sparse": {"build": partial(learner, average=partial(RunningWeightAverage, 1.0))},
    "moving average": {"build": partial(learner, average=partial(ExponentialMovingAverage, 0.9, 5))},
    "muon": {"build": partial(learner, optimizer=muon, schedule=triangle, groups=matrices)},
    "groups": {
        "build": partial(
            learner,
            layers=[partial(nn.BatchNorm1d, 16)],
            optimizer=momentum,
            groups=partial(
                parameter_groups,
                weight_decay=0.01,
                batch_size=8,
                kinds={"norm_bias": {"rate": 8.0}, "head": {"examples": 200}, "rest": {"examples": 300, "fade": True}},
            ),
        )
    },
    "lookahead": {"build": partial(learner, optimizer=momentum, callbacks=[lookahead])},
    "lookahead, averaged": {
        "build": partial(
            learner,
            layers=[partial(nn.BatchNorm1d, 16)],
            optimizer=momentum,
            callbacks=[lookahead],
            average=partial(ExponentialMovingAverage, 0.9, 5),
        )
    },
    "dropout": {"build": partial(learner, layers=[dropout])},
    "batch norm": {"build": partial(learner, layers=[partial(nn.BatchNorm1d, 16)])},
    "augmentation": {"batches": partial(stream, augment=partial(random_crop_flip, padding=1))},
    "alternating flip": {
        "batches": partial(
            stream, augment=partial(random_crop_flip, padding=1, cutout=1), alternating_flip=True, micro_batch_size=3
        ),
        "rules": protocol(micro_batch_size=3),
    },
    "micro-batches": {"batches": partial(stream, micro_batch_size=3), "rules": protocol(micro_batch_size=3)},
    "augmented micro-batches": {
        "batches": partial(stream, micro_batch_size=3, augment=partial(random_crop_flip, padding=1)),
        "rules": protocol(micro_batch_size=3),
        "build": partial(learner, layers=[dropout]),
    },
    "loader": {"batches": noisy, "build": partial(learner, layers=[dropout])},
    "loader, micro-batches": {
        "batches": partial(noisy, micro_batch_size=5),
        "rules": protocol(micro_batch_size=5),
        "build": partial(learner, layers=[dropout]),
    },
    "random evaluation": {
        "batches": noisy,
        "build": partial(learner, layers=[dropout]),
        "evaluated": shuffled_validation,
    },
    "average in the module": {"build": partial(learner, kind=SwapsItself)},
    "call-back": {"build": partial(learner, average=Swapping)},
    "two optimizers": {"build": partial(learner, kind=Manual)},
    "scaler": {
        "build": partial(learner, kind=Overflows, optimizer=momentum),
        "rules": lambda: protocol(trainer=scaled(growth_interval=3, init_scale=64.0)),
    },
    "everything": {
        "batches": partial(stream, micro_batch_size=3, augment=partial(random_crop_flip, padding=1)),
        "rules": protocol(micro_batch_size=3),
        "build": partial(
            learner,
            layers=[dropout, partial(nn.BatchNorm1d, 16)],
            optimizer=torch.optim.AdamW,
            schedule=triangle,
            average=partial(RunningWeightAverage, 0.3),
        ),
    },
}


QUICK = ("plain", "everything")
ALL_CASES = [pytest.param(case, marks=() if case in QUICK else pytest.mark.slow) for case in CASES]


@pytest.mark.parametrize("case", ALL_CASES)
def test_a_trial_that_goes_on_is_the_uninterrupted_one_bit_for_bit(case, tmp_path):
    options, limits = CASES[case], (1, 2, 23, 30, 59)  # at 30 an evaluation is due
    whole, reference = run(spec(), **options)
    assert (whole.status, whole.steps) == ("censored", STEPS)
    records, module = chain(tmp_path, limits, **options)
    assert [record.steps for record in records] == [*limits, STEPS]
    assert [record.resumed_from for record in records] == [None, *range(len(limits))]
    assert_same(records[-1], module, whole, reference, limits)
    assert all(record.history[-1][0] == record.steps == record.steps_low for record in records)


@pytest.mark.parametrize("case", ALL_CASES)
def test_measuring_the_noise_scale_changes_no_trial_and_goes_on_with_it(case, tmp_path):
    options, limits = CASES[case], (7, 23, 30)
    plain, untouched = run(spec(), **options)
    rules = options.get("rules", protocol)
    measuring = options | {"rules": lambda: replace(rules() if callable(rules) else rules, noise_scale_every=5)}
    whole, reference = run(spec(), **measuring)
    assert replace(whole, noise_scale=()) == plain
    assert all(torch.equal(a, b) for a, b in zip(tensors(reference), tensors(untouched), strict=True))
    assert plain.noise_scale == ()
    records, module = chain(tmp_path, limits, **measuring)
    assert_same(records[-1], module, whole, reference, limits)
    assert records[-1].noise_scale == whole.noise_scale
    steps = [step for step, _, _ in whole.noise_scale]
    if case not in ("two optimizers", "scaler"):  # not measured; Lightning counts skipped steps too
        assert steps == list(range(5, STEPS + 1, 5))
        assert [len(record.noise_scale) for record in records] == [1, 4, 6, 12]


def test_a_state_without_measurements_is_taken_up(tmp_path):
    first, _ = run(spec(max_steps=23), state=tmp_path / "1.state")
    own = replace(spec(), number=2, resumed_from=1)
    going_on, _ = run(own, protocol(noise_scale_every=5), resume=Stopped(first, tmp_path / "1.state"))
    assert [step for step, _, _ in going_on.noise_scale] == list(range(25, STEPS + 1, 5))


def test_the_cases_would_notice_what_is_forgotten(tmp_path, monkeypatch):
    """Without its generators, its average's step or its place in the stream, a trial goes another way."""

    def differs(case):
        whole, reference = run(spec(), **CASES[case])
        records, module = chain(tmp_path, (23,), **CASES[case])
        with pytest.raises(AssertionError):
            assert_same(records[-1], module, whole, reference, (23,))

    with monkeypatch.context() as patch:
        patch.setattr("bstune.trial.loop.set_random_state", lambda state: None)
        differs("dropout")
        differs("random evaluation")
    with monkeypatch.context() as patch:
        patch.setattr(RunningWeightAverage, "load_state_dict", lambda self, state: None)
        differs("average")
    with monkeypatch.context() as patch:
        patch.setattr(Lookahead, "load_state_dict", lambda self, state: None)
        differs("lookahead")
    with monkeypatch.context() as patch:
        patch.setattr("bstune.trial.batches.IndexStream.resume", lambda self, position: None)
        differs("plain")


@pytest.mark.parametrize("every", [False, True])
def test_a_limit_at_a_step_that_is_due_is_no_other_evaluation(every, tmp_path):
    rules = protocol(evaluation_schedule=EVERY_STEP if every else CADENCE)
    whole, reference = run(spec(), rules)
    due = [step for step, _ in whole.history]
    limits = (due[0], due[3], due[-2])
    records, module = chain(tmp_path, limits, rules=rules)
    assert records[-1].history == whole.history
    assert_same(records[-1], module, whole, reference, limits)


@pytest.mark.parametrize("limits", [(37,), (3, 4, 5, 33, 34, 35, 113, 114)])
def test_steps_to_target_do_not_depend_on_where_a_trial_was_stopped(limits, tmp_path):
    rules = protocol(300, target=Target("val/loss", 0.45, "min"))
    build = partial(learner, optimizer=momentum)
    whole, reference = run(spec(lr=0.01), rules, build)
    assert whole.status == "reached"
    assert max(limits) < whole.steps_low
    path = tmp_path / "weights.ckpt"
    records, module = chain(tmp_path, limits, spec(lr=0.01), rules=rules, build=build, checkpoint=path)
    assert_same(records[-1], module, whole, reference, limits)
    assert (records[-1].status, records[-1].steps_low) == ("reached", whole.steps_low)
    saved = torch.load(path, weights_only=True)["state_dict"].values()
    assert all(torch.equal(a, b) for a, b in zip(saved, tensors(reference), strict=True))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_on_cuda_its_generators_go_on_too(tmp_path):
    def batches(own):
        augment = partial(random_crop_flip, padding=1)
        images, labels = IMAGES.cuda(), LABELS.cuda()
        norm = Normalisation(NORMALISE.scale.cuda(), NORMALISE.shift.cuda())
        return TrainBatches(
            images, labels, batch_size=8, micro_batch_size=None, seed=own.seed, normalise=norm, augment=augment
        )

    options = {
        "batches": batches,
        "build": CASES["everything"]["build"],
        "rules": protocol(trainer={"accelerator": "cuda", "devices": [0]}),
    }
    whole, reference = run(spec(), **options)
    records, module = chain(tmp_path, (23,), **options)
    assert records[-1].steps == whole.steps
    torch.testing.assert_close(tensors(module), tensors(reference))


# Limits


@pytest.mark.parametrize(("limit", "steps"), [(1, 1), (13, 13), (STEPS, STEPS), (STEPS + 1, STEPS + 1)])
def test_a_limit_ends_the_trial_early(limit, steps):
    result, _ = run(spec(max_steps=limit))
    assert (result.status, result.steps, result.steps_low) == ("censored", steps, steps)
    assert result.history[-1][0] == steps
    whole, _ = run(spec())
    assert result.history[:-1] == tuple(pair for pair in whole.history if pair[0] < steps)


def test_an_evaluation_at_the_limit_can_reach_the_target_and_leaves_no_state(tmp_path):
    rules = protocol(300, target=Target("val/loss", 0.5, "min"))
    own, build = spec(lr=0.01), partial(learner, optimizer=momentum)
    whole, _ = run(own, rules, build)
    first = run(own, replace(rules, evaluation_schedule=EVERY_STEP), build)[0].steps
    assert whole.steps_low < first < whole.steps
    files = {"state": tmp_path / "1.state", "checkpoint": tmp_path / "1.ckpt"}
    result, _ = run(replace(own, max_steps=first), rules, build, **files)
    assert (result.status, result.steps, result.steps_low) == ("reached", first, whole.steps_low)
    assert [path.name for path in tmp_path.iterdir()] == ["1.ckpt"]


@pytest.mark.parametrize("limit", [0, 10, 20])
def test_a_limit_leaves_at_least_a_step(limit, tmp_path):
    record, _ = run(spec(max_steps=20), state=tmp_path / "1.state")
    with pytest.raises(ConfigError, match=f"a trial that has 20 steps cannot be trained until step {limit}"):
        run(spec(max_steps=limit, resumed_from=1), resume=Stopped(record, tmp_path / "1.state"))


# What is left, and when


class Diverges(Classifier):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * (torch.nan if batch_idx == 19 else 1.0)


class Fails(Classifier):
    """Raises in the evaluation at the limit, when the state is written already."""

    error = torch.OutOfMemoryError("CUDA out of memory")

    def on_validation_end(self):
        if not self.trainer.sanity_checking:
            raise self.error


class Interrupted(Fails):
    error = KeyboardInterrupt()


class StopsItself(Classifier):
    def on_before_zero_grad(self, optimizer):
        self.trainer.should_stop = self.trainer.fit_loop.batch_idx >= 5


@pytest.mark.parametrize(
    ("kind", "status"),
    [(Classifier, "censored"), (Diverges, "diverged"), (Fails, "oom"), (Interrupted, None), (StopsItself, "censored")],
)
def test_only_a_trial_out_of_steps_leaves_a_state(kind, status, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = {"build": partial(learner, kind=kind), "state": tmp_path / "1.state"}
    if status is None:
        with pytest.raises((KeyboardInterrupt, SystemExit)):
            run(spec(max_steps=20), **options)
    else:
        assert run(spec(max_steps=20), **options)[0].status == status
    assert [path.name for path in tmp_path.iterdir()] == (["1.state"] if kind is Classifier else [])
    if kind is Classifier:  # only where it is asked for
        (tmp_path / "1.state").unlink()
        run(spec(max_steps=20))
        assert list(tmp_path.iterdir()) == []


def test_leaving_a_state_changes_nothing(tmp_path):
    options = CASES["everything"]
    plain, module = run(spec(max_steps=23), **options)
    left, other = run(spec(max_steps=23), **options, state=tmp_path / "1.state")
    assert plain == left
    assert all(torch.equal(a, b) for a, b in zip(tensors(module), tensors(other), strict=True))


def test_only_batches_that_know_their_place_can_be_stopped(tmp_path):
    def blanks(own):
        return iter([])

    with pytest.raises(ConfigError, match=r"batches from list_iterator cannot be stopped to go on later"):
        run(spec(max_steps=20), batches=blanks, state=tmp_path / "1.state")


def test_evaluations_do_not_change_the_training():
    """However often it evaluates, and whatever random numbers that takes."""
    options = {"build": partial(learner, layers=[dropout]), "evaluated": shuffled_validation}
    modules = [
        run(spec(), protocol(evaluation_schedule=evaluation_schedule), **options)[1]
        for evaluation_schedule in (CADENCE, EvaluationSchedule(9, 1, 1, 1.5))
    ]
    assert all(torch.equal(a, b) for a, b in zip(*map(tensors, modules), strict=True))


def test_with_workers_the_order_goes_on(tmp_path):
    """What workers draw is not repeated, so this data set draws nothing."""

    def batches(own):
        source = TensorDataset(NORMALISE(IMAGES), LABELS)
        return rebatch(DataLoader(source, num_workers=1), own.batch_size, None, own.seed)

    whole, reference = run(spec(), protocol(20), batches=batches)
    records, module = chain(tmp_path, (7,), rules=protocol(20), batches=batches)
    assert_same(records[-1], module, whole, reference, (7,))


# The record


def test_seconds_are_the_trials_own_and_steps_the_whole_chains(tmp_path):
    class Timed(Classifier):
        """100 s to start, 10 s an evaluation, 7 s to write its state; two steps of 50 s, then 1 s a step."""

        def on_fit_start(self):
            fake.now += 100.0
            self.done = 0

        def training_step(self, batch, batch_idx):
            fake.now += 50.0 if self.done < 2 else 1.0
            self.done += 1
            return super().training_step(batch, batch_idx)

        def on_validation_start(self):
            fake.now += 10.0

        def on_save_checkpoint(self, checkpoint):
            fake.now += 7.0

    build, records, stopped = partial(learner, kind=Timed), [], None
    for number, limit in enumerate([30, 40, 41]):
        fake = FakeTime()
        own = replace(spec(), number=number, max_steps=limit, resumed_from=number - 1 if number else None)
        path = tmp_path / f"{number}.state"
        record, _ = run(own, build=build, state=path, resume=stopped, clock=TrialClock(fake))
        records.append(record)
        stopped = Stopped(record, path)
    first, second, third = records
    assert [(r.steps, r.examples) for r in records] == [(30, 240), (40, 320), (41, 328)]
    evaluations = [len(first.history), len(second.history) - len(first.history), 1]
    assert [r.eval_seconds for r in records] == [10.0 * (evaluations[0] + 1), 10.0 * evaluations[1], 10.0]
    assert [r.train_seconds for r in records] == [100.0 + 28.0, 100.0 + 8.0, 50.0]
    assert [r.startup_seconds for r in records] == [100.0] * 3
    assert all(r.wall_seconds == r.train_seconds + r.eval_seconds + r.startup_seconds + 7.0 for r in records)
    assert [r.seconds_per_step for r in records] == [1.0, 1.0, 50.0]  # a trial of one step has nothing else
    assert TrialResult.from_json(third.to_json()) == third


class Scripted(LightningModule):
    """Its weight is the number of steps, and its metric a function of it."""

    def __init__(self, metric):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))
        self.metric = metric

    def training_step(self, batch, batch_idx):
        return -self.weight

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", self.metric(round(self.weight.item())), batch_size=1)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)


def scripted(metric):
    return lambda own: Scripted(metric)


def test_divergence_is_judged_from_the_first_start(tmp_path):
    build = scripted(lambda steps: 1.0 if steps == 0 else 2.0 if steps < 25 else 5.5)
    rules = protocol(divergence=5.0, evaluation_schedule=EVERY_STEP)
    whole, _ = run(spec(), rules, build)
    records, _ = chain(tmp_path, (20,), rules=rules, build=build)
    assert (whole.status, whole.steps) == ("diverged", 25)
    assert (records[-1].status, records[-1].history) == ("diverged", whole.history)


@pytest.mark.parametrize(
    ("step", "value", "limits", "due"),
    [
        (20, 0.2, (), [10, 20, 21, 22, 25, 30, 35, 40]),
        (20, 0.2, (23,), [10, 20, 21, 22, 25, 30, 35, 40]),  # what was near stays near
        (15, 0.2, (), [10, 20, 30, 40]),
        (15, 0.2, (15,), [10, 20, 30, 40]),  # that it looked near where it was stopped does not count
        (15, 3.0, (15,), [10, 20, 30, 40]),  # nor that it improved since
        (15, 0.2, (15, 17, 29), [10, 20, 30, 40]),
    ],
)
def test_later_evaluations_do_not_depend_on_where_it_was_stopped(step, value, limits, due, tmp_path):
    """With k evaluations of 20 examples, 10 k steps have to lie behind far from the target, 5 k near it."""
    build = scripted(lambda steps: value if steps == step else 0.9)
    rules = protocol(40, target=Target("val/loss", 0.1, "min"))
    records, _ = chain(tmp_path, limits, rules=rules, build=build)
    assert [step for step, _ in records[-1].history if step not in limits or step in due] == due


# Files that cannot be used


@pytest.fixture
def stopped(tmp_path):
    record, _ = run(spec(max_steps=20), state=tmp_path / "1.state")
    return Stopped(record, tmp_path / "1.state")


def resumed(stopped, **changes):
    return run(replace(spec(), **{"number": 2, "resumed_from": 1} | changes), resume=stopped)


class Surprise:
    pass


def _changed(change):
    def spoil(path):
        checkpoint = torch.load(path, weights_only=True)
        change(checkpoint)
        torch.save(checkpoint, path)

    return spoil


def _spoil(path):
    data = bytearray(path.read_bytes())
    data[200:260] = bytes(60)
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda path: path.unlink(), "No such file or directory"),
        (lambda path: path.write_bytes(path.read_bytes()[:-100]), "File is not a zip file"),
        (_changed(lambda checkpoint: checkpoint.pop("bstune")), "'bstune'"),
        (_changed(lambda checkpoint: checkpoint["bstune"].update(colour="red")), "colour"),
        (
            _changed(lambda checkpoint: checkpoint.update(callbacks={"own": Surprise()})),
            "it holds more than plain data: Unsupported global: GLOBAL test_checkpoint.Surprise",
        ),
        (_spoil, "in it is damaged"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(stopped, spoil, reason):
    spoil(stopped.state)
    with pytest.raises(StateError) as error:
        resumed(stopped)
    text = str(error.value)
    assert text.startswith(f"the state of trial 1 at {stopped.state} cannot be read: ")
    assert reason in text
    assert text.endswith("; it starts afresh")
    assert "\n" not in text


def test_a_spoiled_byte_anywhere_is_an_error_or_does_no_harm(stopped):
    whole = stopped.state.read_bytes()
    rng = np.random.default_rng(0)
    for place in rng.integers(len(whole), size=150):
        data = bytearray(whole)
        data[place] ^= 0xFF
        stopped.state.write_bytes(data)
        with suppress(StateError):
            read_state(stopped, spec(), stopped.record.device, stopped.record.versions)


@pytest.mark.parametrize("changes", [{"batch_size": 9}, {"lr": 0.06}, {"seed": 5}])
def test_a_state_of_another_trial_is_refused(stopped, changes):
    with pytest.raises(StateError, match=r"its number, batch size, lr, seed and steps are \(1, 8, 0.05, 4, 20\), not"):
        resumed(stopped, **changes)


def test_a_state_of_other_versions_or_another_device_is_refused(stopped, monkeypatch):
    newer = {**stopped.record.versions, "torch": "99.0"}
    with monkeypatch.context() as patch:
        patch.setattr("bstune.trial.loop.versions", lambda: newer)
        with pytest.raises(StateError, match=r"it was written by .*, not .*99\.0"):
            resumed(stopped)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    with pytest.raises(StateError, match=r"not .*cpu \(77 threads\)"):
        resumed(stopped)


@pytest.mark.parametrize("parent", [None, 7])
def test_the_parent_is_the_trial_that_goes_on(stopped, parent):
    with pytest.raises(ValueError, match=f"a trial with resumed_from={parent} cannot go on from trial 1"):
        resumed(stopped, resumed_from=parent)
    with pytest.raises(ValueError, match="a trial with resumed_from=1 cannot go on from trial None"):
        run(spec(resumed_from=1))


def test_a_modules_own_settings_are_not_in_the_file(tmp_path):
    """They may hold any object, and the module is built anew."""

    class Saving(Classifier):
        def __init__(self, *args):
            super().__init__(*args)
            self.save_hyperparameters({"surprise": Surprise()})

    options = {"build": partial(learner, kind=Saving)}
    whole, reference = run(spec(), **options)
    records, module = chain(tmp_path, (20,), **options)
    assert_same(records[-1], module, whole, reference, (20,))


# Through a workload


class Foreign(LightningDataModule):
    """A project's own data, with a state of its own."""

    seen = 0

    def train_dataloader(self):
        return DataLoader(Noisy(), batch_size=3, shuffle=True)

    def on_after_batch_transfer(self, batch, dataloader_idx):
        if self.trainer.training:
            self.seen += 1
        return batch[0] + 0.01 * self.seen, batch[1]

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state_dict):
        self.seen = state_dict["seen"]


def test_a_foreign_data_module_goes_on(tmp_path):
    rules, results, modules = protocol(), [], []

    def one(own, **options):
        data = Foreign()
        loader = data.train_dataloader()

        def build(own):
            modules.append(learner(own, layers=[dropout]))
            return modules[-1]

        workload = Workload(
            build,
            lambda own: rebatch(loader, own.batch_size, None, own.seed),
            shuffled_validation(),
            20,
            data_module=data,
        )
        results.append(run_trial(workload, own, rules, **options))
        return results[-1]

    one(spec())
    first = one(spec(max_steps=23), state=tmp_path / "1.state")
    one(replace(spec(), number=2, resumed_from=1), resume=Stopped(first, tmp_path / "1.state"))
    assert_same(results[2], modules[2], results[0], modules[0], (23,))
