"""The lean loop: nothing in a trial tells it from Lightning's own, and where something might, Lightning's own runs."""

from copy import deepcopy
from dataclasses import asdict
from functools import partial, wraps

import pytest
import pytorch_lightning
import torch
from builders import options_and_recipe, options_of
from fits import BATCH_SIZE, Regression, Sine, protocol_of, run
from learners import gradient_scaler, learning_protocol, same_weights, train
from lightning.pytorch import Callback, LightningDataModule
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.plugins.precision import MixedPrecision
from test_trainer import Dicts, TrainPlateau, TwoOptimizers, as_dict
from toolbox import TRAINER, make_spec
from torch.optim import lr_scheduler
from torch.optim.optimizer import register_optimizer_step_post_hook

from bstune.core.clock import Phase, TrialClock
from bstune.core.errors import ConfigError
from bstune.trial.backend import make_protocol
from bstune.trial.batches.image_batches import EvalBatches, Normalisation, TrainBatches
from bstune.trial.fast.reasons import CALLBACK_HOOKS, MODULE_HOOKS
from bstune.trial.lightning import internals as lightning_internals
from bstune.trial.lightning.trainer import BATCH_HOOKS
from bstune.trial.loop import Workload, run_trial
from bstune.trial.parts.checkpoint import Stopped
from bstune.trial.workload import build_module
from bstune.workloads.averaging import Lookahead, RunningWeightAverage

STEPS = 20
# What a clock measures, and the loop's own name.
MEASURED = (
    "train_seconds",
    "eval_seconds",
    "startup_seconds",
    "wall_seconds",
    "seconds_per_step",
    "training_loop",
)


def numbers_of(metrics):
    """Logged metrics as numbers, which do not change any more."""
    return {name: value.item() for name, value in metrics.items()}


def outcome(record):
    """The values of a record that depend neither on a clock nor on the loop."""
    values = asdict(record)
    for name in MEASURED:
        values.pop(name, None)
    return values


def compare(kind, expected, changes=(), **options):
    """Run a trial with the lean loop where it can, and with Lightning's; check that they are the same."""
    runs = []
    # As it comes, and as Lightning has it.
    for fast in ("auto", "off"):
        record, module = run(
            kind, protocol=protocol_of(**{"steps": STEPS, **dict(changes), "fast": fast}), **options
        )
        runs.append((record, module))
    (record, module), (reference, other) = runs
    assert outcome(record) == outcome(reference)
    assert same_weights(module, other)
    assert module.trainer.fit_loop.state_dict() == other.trainer.fit_loop.state_dict()
    assert getattr(module, "seen", None) == getattr(other, "seen", None)
    assert (record.training_loop, reference.training_loop) == (
        expected,
        "Lightning's: protocol.fast=off",
    )
    return module


# Where nobody can tell the difference


class Noting(torch.optim.SGD):
    """Tells the module of each call."""

    module: Sine

    def step(self, closure=None):
        self.module.note("before the step")
        loss = super().step(closure)
        self.module.note("after the step", None if loss is None else loss.item())
        return loss

    def zero_grad(self, set_to_none=True):
        self.module.note("zero_grad")
        super().zero_grad(set_to_none)


class Watching(Regression):
    """Notes all that a module can ask, wherever a step calls something of its own: two schedules among them."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def note(self, place, *more):
        # What Lightning counts for itself, and what a module may read there.
        trainer = self.trainer
        connector = trainer._logger_connector
        rates = [optimizer.param_groups[0]["lr"] for optimizer in trainer.optimizers]
        counted = (
            trainer.global_step,
            trainer.current_epoch,
            trainer.is_last_batch,
            trainer.fit_loop.batch_idx,
        )
        inside = (
            self._current_fx_name,
            # What a hook is told of where it is called.
            connector._first_loop_iter,
            connector._current_fx,
            trainer.training,
        )
        batch = trainer._results.batch_size, trainer._results.batch is None, torch.is_grad_enabled()
        self.seen.append(
            (place, *more, rates, counted, inside, batch, deepcopy(trainer.fit_loop.state_dict()))
        )

    def training_step(self, batch, batch_idx):
        self.note("training_step", batch_idx, type(batch), [part.tolist() for part in batch])
        loss = super().training_step(batch, batch_idx)
        loss.register_hook(lambda gradient: self.note("backward", gradient.item()))
        return loss

    def configure_optimizers(self):
        optimizer = Noting(self.parameters(), lr=0.05, momentum=0.9)
        optimizer.module = self

        def factor(name, share, step):
            self.note(name, step)
            return share**step

        by_step = lr_scheduler.LambdaLR(optimizer, partial(factor, "by step", 0.99))
        by_epoch = lr_scheduler.LambdaLR(optimizer, partial(factor, "by epoch", 0.9))
        # Every second step, and after each epoch.
        every = {"scheduler": by_step, "interval": "step", "frequency": 2}
        return [optimizer], [every, {"scheduler": by_epoch, "interval": "epoch"}]


for _name in (
    "on_train_start",
    "on_train_epoch_start",
    "on_train_epoch_end",
    "on_validation_start",
    "on_train_end",
):
    setattr(Watching, _name, lambda self, name=_name: self.note(name))


class Notes(DummyLogger):
    """Keeps what it is told, of all its copies."""

    told: list = []  # noqa: RUF012

    def log_metrics(self, metrics, step=None):
        self.told.append((step, metrics))

    def __deepcopy__(self, memo):
        return self


class Logs(Watching):
    """Logs in the step, some of it seldom, and in the backward pass; returns more than its loss, or nothing."""

    def training_step(self, batch, batch_idx):
        # A batch without a loss.
        if batch_idx == 4:
            return None
        loss = super().training_step(batch, batch_idx)
        # Each way of logging: by step, by epoch, reduced, and from within the backward pass.
        self.log("each", loss)
        self.log("mean", loss, on_step=True, on_epoch=True)
        if batch_idx % 3 == 2:
            self.log("seldom", float(batch_idx), prog_bar=True, on_epoch=True, reduce_fx="max")
        loss.register_hook(lambda gradient: self.log("gradient", gradient * 2.0))
        self.seen.append(numbers_of(self.trainer.callback_metrics))
        return {"loss": loss, "more": batch}

    def on_train_epoch_end(self):
        self.seen.append(numbers_of(self.trainer.logged_metrics))


class TakesBatch(Regression):
    """Takes no index, empties the list that it is given, and changes its step in the second epoch."""

    def training_step(self, batch):
        # It takes its list apart, which nobody else may need any more.
        y = batch.pop()
        x = batch.pop()
        return self.loss((x, y))

    def on_train_epoch_start(self):
        if self.current_epoch == 1:
            # A method may be replaced as training goes on.
            self.training_step = lambda batch, batch_idx: self.loss(batch) * (1.0 + batch_idx)


class Twice(torch.optim.SGD):
    """Calls its closure at two points, as sharpness-aware minimisation does, without gradients around it."""

    @torch.no_grad()
    def step(self, closure=None):
        first = closure()
        for group in self.param_groups:
            for weight in group["params"]:
                # A gradient is there at the first point, and another one at the second.
                weight.add_(weight.grad, alpha=0.01)
        closure()
        super().step()
        return first


class Closures(Regression):
    def configure_optimizers(self):
        optimizer = Twice(self.parameters(), lr=0.05)
        self.seen = []
        optimizer.register_step_pre_hook(lambda *_: self.seen.append(self.trainer.global_step))
        optimizer.register_step_post_hook(
            lambda *_: self.seen.append(self.net[0].weight.sum().item())
        )
        return optimizer


class Listens(Regression):
    """Has its optimizer's calls noted, in one of the ways in which that can be done, from the third step on."""

    def configure_optimizers(self):
        self.seen = []
        optimizer = self.make_optimizer(self.parameters(), lr=0.05)
        return [optimizer], [lr_scheduler.ExponentialLR(optimizer, 0.9)]

    # A step of torch's own, unless a case has another one.
    make_optimizer = torch.optim.SGD

    def training_step(self, batch, batch_idx):
        # Up to then nobody listens: the loop must notice that it begins.
        if batch_idx == 2 and self.current_epoch == 0:
            self.listen(self.optimizers(use_pl_optimizer=False))
        return super().training_step(batch, batch_idx)

    def note(self, *_, **__):
        self.seen.append((self.trainer.global_step, self.net[0].weight.sum().item()))

    def listen(self, optimizer):
        raise NotImplementedError


def listening(listen, kind=torch.optim.SGD):
    return type("Listening", (Listens,), {"listen": listen, "make_optimizer": staticmethod(kind)})


def noting(name):
    """A function that wraps an optimizer's function in one of its own, with all that marks it."""

    def listen(self, optimizer):
        function = getattr(optimizer, name)

        # wraps copies the marks by which torch's own are known.
        @wraps(function)
        def noted(*arguments, **options):
            self.note()
            return function(*arguments, **options)

        setattr(optimizer, name, noted)

    return listen


class Marked(torch.optim.SGD):
    """Has a step with the marks of torch's own, which does something else first."""

    @wraps(torch.optim.SGD(torch.nn.Linear(1, 1).parameters()).step.__func__)
    def step(self, closure=None):
        for group in self.param_groups:
            for weight in group["params"]:
                weight.data.mul_(0.99)
        return super().step(closure)


def hear_all(self, optimizer):
    # For all optimizers of the process, until the training ends.
    self.handle = register_optimizer_step_post_hook(self.note)
    self.on_train_end = self.handle.remove


class Averages(Regression):
    def configure_callbacks(self):
        return [Lookahead(STEPS, 3, 0.5, 2.0), RunningWeightAverage(0.5)]


class OfTheOtherPackage(Sine, pytorch_lightning.LightningModule):
    """Of pytorch_lightning."""


def with_gaps(examples):
    """A batch of tensors, or none for a training batch that begins with an early example."""
    inputs, targets = zip(*examples, strict=True)
    x = torch.stack(inputs)
    y = torch.stack(targets)
    # A training batch, not one to validate on: these have another size.
    return None if len(x) == BATCH_SIZE and x[0] < -0.5 else [x, y]


def clipped_by(algorithm):
    """The protocol's changes of a trial whose gradients are clipped, and whose noise scale is measured."""
    trainer = {**TRAINER, "gradient_clip_val": 0.02, "gradient_clip_algorithm": algorithm}
    return {"trainer": trainer, "noise_scale_every": 4}


# The kind of module, what the protocol changes, and what the trial gets besides.
LEAN = {
    "plain": (Regression, {}, {}),
    "watching": (Watching, {"noise_scale_every": 4}, {}),
    "logging": (Logs, {"trainer": {**TRAINER, "logger": Notes(), "log_every_n_steps": 2}}, {}),
    "batch alone": (TakesBatch, {}, {}),
    "closure called twice": (Closures, {}, {}),
    "averages": (Averages, {}, {}),
    "dictionaries": (Dicts, {}, {"collate": as_dict}),
    "batches left out": (Regression, {}, {"collate": with_gaps}),
    "a call-back that looks at epochs": (
        Regression,
        {"trainer": {**TRAINER, "callbacks": [EarlyStopping("val/error")]}},
        {},
    ),
    "bf16-mixed": (Regression, {"trainer": {**TRAINER, "precision": "bf16-mixed"}}, {}),
    "bf16-true": (Regression, {"trainer": {**TRAINER, "precision": "bf16-true"}}, {}),
    "64-true": (Regression, {"trainer": {**TRAINER, "precision": "64-true"}}, {}),
    "clipped by norm": (Regression, clipped_by("norm"), {}),
    "clipped by value": (Regression, clipped_by("value"), {}),
    "pytorch_lightning": (OfTheOtherPackage, {"noise_scale_every": 4}, {}),
    "a data module without hooks on batches": (Regression, {}, {"data": LightningDataModule()}),
}


# Where somebody listens to the optimizer, from a step on that goes by the batch's number, so that
# none is captured.
HEARD = {
    "a hook before an optimizer's steps": (
        listening(lambda self, optimizer: optimizer.register_step_pre_hook(self.note)),
        {},
        {},
    ),
    "a hook after an optimizer's steps": (
        listening(lambda self, optimizer: optimizer.register_step_post_hook(self.note)),
        {},
        {},
    ),
    "a hook after all optimizers' steps": (listening(hear_all), {}, {}),
    "an optimizer's step is replaced": (listening(noting("step")), {}, {}),
    "an optimizer's zero_grad is replaced": (listening(noting("zero_grad")), {}, {}),
    "a step with the marks of torch's": (listening(lambda self, optimizer: None, Marked), {}, {}),
}


# Lightning warns of a batch, or a loss, that is None.
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("case", [*LEAN, *HEARD])
def test_a_trial_is_what_it_is_under_lightnings_loop(case):
    kind, changes, options = (LEAN | HEARD)[case]
    if case == "logging":
        Notes.told.clear()
    module = compare(kind, "lean", changes, **options)
    # Both loops log to one logger, one after the other.
    if case == "logging":
        half = len(Notes.told) // 2
        assert str(Notes.told[:half]) == str(Notes.told[half:])
        logged = set().union(*(metrics for _, metrics in Notes.told))
        assert logged >= {"each", "mean_step", "seldom_epoch", "gradient"}
    if case == "watching":
        places = {place for place, *_ in module.seen}
        assert places >= {"backward", "by epoch", "on_validation_start"}


@pytest.mark.parametrize("fast", ["auto", "off"])
def test_what_lightning_does_after_an_evaluation_is_no_training(fast):
    clock = TrialClock()
    phases = {"training_step": [], "on_validation_model_train": []}

    def noting(name):
        def note(self, *arguments):
            phases[name].append(clock._phase)
            return getattr(Regression, name)(self, *arguments)

        return note

    hooks = {
        "training_step": noting("training_step"),
        "on_validation_model_train": noting("on_validation_model_train"),
    }
    kind = type("Noting", (Regression,), hooks)
    record, _ = run(kind, protocol=protocol_of(steps=STEPS, fast=fast), clock=clock)
    assert set(phases["training_step"]) == {Phase.TRAINING}
    # The start is an evaluation under both; later ones are followed by Lightning's own switch back.
    after = [
        Phase.EVALUATION,
        *[Phase.EVALUATION if fast == "auto" else Phase.TRAINING] * (len(record.history) - 1),
    ]
    assert phases["on_validation_model_train"] == [*after, Phase.CLOSING]


def test_torchs_profiler_sees_steps_under_their_labels():
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        record, _ = run(Regression, protocol=protocol_of(steps=STEPS, fast="auto"))
    seen = {event.key: event.count for event in profile.key_averages()}
    assert record.training_loop == "lean"
    assert seen["Optimizer.step#SGD.step"] == STEPS
    assert seen["Optimizer.zero_grad#SGD.zero_grad"] == STEPS


# Images of each workload's shape, at random: what is learnt does not matter.
SHAPES = {
    "digits": (1, 8, 8),
    "fashion_mlp": (1, 28, 28),
    "mnist_cnn": (1, 28, 28),
    "cifar_mlp": (3, 32, 32),
}
RECIPES = ("airbench_cifar", "airbench_muon", "speedrun_cifar")
SLOW = dict.fromkeys(("resnet_cifar", "resnet_cifar_fast", *RECIPES), (3, 32, 32))
SLOW |= {"fashion_cnn": (1, 28, 28), "mnist_mlp": (1, 28, 28), "cifar_resnet8": (3, 32, 32)}
# Networks of a few channels, so that eight steps take a second.
SMALL = {
    "resnet_cifar": ["width=2"],
    "resnet_cifar_fast": ["width=2", "whitening.images=64"],
    **{name: ["whitening.images=64", "widths=[8,8,8]"] for name in RECIPES},
}


# A perceptron and a convolution; the others differ in their data.
@pytest.mark.parametrize(
    "name",
    [
        *("digits", "mnist_cnn"),
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("fashion_mlp", "cifar_mlp")),
        *(pytest.param(name, marks=pytest.mark.soak) for name in SLOW),
    ],
)
def test_a_shipped_workload_is_trained_as_under_lightnings_loop(name):
    small = [f"workload.module.model.{option}" for option in SMALL.get(name, ())]
    # Eight steps at full precision.
    fixed = ("device=cpu", "precision=32-true", "budget.steps=8", "budget.examples=1")
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(256, (64, *(SHAPES | SLOW)[name]), generator=generator).to(torch.uint8)
    labels = torch.randint(10, (64,), generator=generator)
    mean = torch.full((1, 1, 1, 1), 1 / 64)
    standard_deviation = torch.full((1, 1, 1, 1), -2.0)
    normalise = Normalisation(mean, standard_deviation)

    def stream(spec):
        sizes = {"batch_size": spec.batch_size, "micro_batch_size": None}
        return TrainBatches(images, labels, **sizes, seed=spec.seed, normalise=normalise)

    runs = []
    for fast in ("auto", "off"):
        options, recipe = options_and_recipe(
            f"workload={name}", *fixed, *small, f"protocol.fast={fast}"
        )
        modules = []

        def build(spec, options=options, recipe=recipe, modules=modules):
            modules.append(build_module(options, recipe, spec))
            # Modules that start from images get some of these.
            if modules[-1].initial_images:
                modules[-1].initialise_from(normalise(images[: modules[-1].initial_images]))
            return modules[-1]

        protocol = make_protocol(options, recipe)
        protocol = protocol.for_steps_only()
        held_out = EvalBatches(images[:16], labels[:16], batch_size=8, normalise=normalise)
        workload = Workload(build, stream, held_out, 16)
        runs.append((run_trial(workload, make_spec(32, 0.001), protocol), modules[-1]))
    (record, module), (reference, other) = runs
    assert outcome(record) == outcome(reference)
    assert (record.training_loop, record.steps, record.message) == ("lean", 8, None)
    assert same_weights(module, other)


def test_endless_batches_are_trained_on_as_under_lightnings_loop():
    record, module = train(protocol=learning_protocol(fast="auto", noise_scale_every=8))
    reference, other = train(protocol=learning_protocol(fast="off", noise_scale_every=8))
    assert record.training_loop == "lean"
    assert reference.training_loop != "lean"
    assert outcome(record) == outcome(reference)
    assert same_weights(module, other)


@pytest.mark.parametrize("loops", [("auto", "off"), ("off", "auto")])
def test_a_trial_that_was_stopped_goes_on_under_either_loop(loops, tmp_path):
    whole, reference = run(Watching, protocol=protocol_of(fast="off"))
    first = protocol_of(fast=loops[0])
    second = protocol_of(fast=loops[1])
    stopped, _ = run(
        Watching,
        make_spec(BATCH_SIZE, seed=3, max_steps=15),
        first,
        state_file=tmp_path / "3.state",
    )
    spec = make_spec(BATCH_SIZE, seed=3, number=4, resumed_from=3)
    record, module = run(Watching, spec, second, resume=Stopped(stopped, tmp_path / "3.state"))
    assert same_weights(module, reference)
    assert record.steps == whole.steps
    assert module.seen[-40:] == reference.seen[-40:]


# Where Lightning's own loop runs


def overriding(base, hook):
    """A subclass whose hook does what Lightning's does."""

    # It overrides the hook and changes nothing: being overridden is what counts.
    def own(self, *arguments, **options):
        return getattr(base, hook)(self, *arguments, **options)

    return type("Own", (base,), {hook: own})


class ScaledByHand(MixedPrecision):
    """A plug-in of the user's own."""


class Limited(Regression):
    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters(), max_iter=2)


def plug_in():
    return {**TRAINER, "plugins": [ScaledByHand("bf16-mixed", "cpu")]}


# The reason that is given, and what gives it.
OWN = {
    **{f"Own has {hook}": (overriding(Regression, hook), {}, {}) for hook in MODULE_HOOKS},
    **{
        f"Own has {hook} (call-back)": (
            Regression,
            {"trainer": {**TRAINER, "callbacks": [overriding(Callback, hook)()]}},
            {},
        )
        for hook in CALLBACK_HOOKS
    },
    **{
        f"Own has {hook} (data)": (
            Regression,
            {},
            {"data": overriding(LightningDataModule, hook)()},
        )
        for hook in BATCH_HOOKS
    },
    "LearningRateMonitor has on_train_batch_start": (
        Regression,
        {"trainer": {**TRAINER, "callbacks": [LearningRateMonitor()]}},
        {},
    ),
    "manual optimization": (TwoOptimizers, {}, {}),
    "accumulation of micro-batches": (Regression, {"micro_batch_size": 3}, {}),
    "a gradient scaler": (Regression, {"trainer": gradient_scaler()}, {}),
    "the precision plug-in ScaledByHand": (Regression, {"trainer": plug_in()}, {}),
    "a schedule by metrics": (TrainPlateau, {}, {}),
    "the optimizer LBFGS": (Limited, {}, {}),
    "the profiler SimpleProfiler": (Regression, {"trainer": {**TRAINER, "profiler": "simple"}}, {}),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("reason", OWN)
def test_where_somebody_listens_or_a_step_is_of_another_kind_lightnings_loop_runs(reason):
    kind, changes, options = OWN[reason]
    # In brackets stands whose hook it is, which the reason leaves out.
    compare(kind, f"Lightning's: {reason.partition(' (')[0]}", {"steps": 7, **changes}, **options)


def test_another_version_of_lightning_runs_its_own_loop(monkeypatch):
    # As if only older ones had been compared.
    monkeypatch.setattr(lightning_internals, "TRIED", ("1.0", "1.1"))
    version = pytest.importorskip("lightning").__version__
    text = (
        f"lightning.pytorch {version} is not one of the versions that it was compared with, 1.0 "
        "and 1.1"
    )
    compare(Regression, f"Lightning's: {text}", {"steps": 7})


def test_an_optimizer_that_does_not_call_its_closure_is_named():
    class Deaf(torch.optim.SGD):
        def step(self, closure=None):
            # Without the closure there is no gradient.
            return None

    class Kind(Regression):
        def configure_optimizers(self):
            return Deaf(self.parameters(), lr=0.1)

    with pytest.raises(
        RuntimeError, match=r"Deaf\.step\(\) does not call the closure that it is given"
    ):
        run(Kind)


def test_the_option_is_the_workloads_and_off_as_yaml_reads_it():
    # The workload's file says so.
    assert options_of("workload=digits").protocol.fast == "graph"
    assert options_of("workload=replay", "workload.table=fashion_mlp").protocol.fast == "auto"
    assert options_of("workload=digits", "protocol.fast=off").protocol.fast == "off"
    # YAML reads off as false.
    assert options_of("workload=digits", "protocol.fast=false").protocol.fast == "off"
    with pytest.raises(
        ConfigError, match=r"protocol\.fast must be 'auto', 'off' or 'graph', but got 'quick'"
    ):
        options_of("workload=digits", "protocol.fast=quick")


def test_a_record_without_a_step_names_no_loop():
    class Breaks(Regression):
        def on_fit_start(self):
            # Before a step is taken.
            raise torch.OutOfMemoryError("too large")

    record, _ = run(Breaks)
    assert (record.status, record.training_loop) == ("out of memory", None)
