from copy import deepcopy
from itertools import islice
from types import SimpleNamespace

import pytest
import torch
from builders import options_and_recipe
from learners import Stream
from lightning import LightningDataModule
from lightning.pytorch import LightningModule
from omegaconf import OmegaConf
from toolbox import make_protocol, make_spec
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, random_split

from bstune.config import compose, with_settings
from bstune.core.errors import ConfigError
from bstune.core.records import Target
from bstune.hydra_recipe import instantiate
from bstune.system.files import Output
from bstune.trial.batches.loader import endless
from bstune.trial.loop import run_trial
from bstune.trial.workload import (
    LightningBackend,
    build_module,
    build_workload,
    checked_protocol,
    on_device,
    train_examples,
)
from bstune.workloads.images import ImageData
from bstune.workloads.schedules import piecewise_linear

# No error is below 0: each trial runs to its budget.
NEVER = Target("val/error", 0.0, "min")
spec = make_spec


OWN = ("workload=digits", "device=cpu", "precision=32-true")


def composed(*overrides):
    return options_and_recipe(*OWN, *overrides)


def composed_with(settings, *overrides):
    """Compose with values and nodes in the places that dotted keys name."""
    changed = with_settings(compose([*OWN, *overrides]), settings)
    return changed.options, changed.trained_recipe


def first(stream, count):
    return list(islice(endless(stream), count))


def labels_of(batches):
    return torch.cat([labels for _, labels in batches])


@pytest.mark.parametrize(
    ("target", "text"),
    [
        (
            # There is no such package, no such part of bstune, no such name in it.
            {"_target_": "nowhere.Nothing"},
            "there is no module nowhere, for nowhere.Nothing: run bstune in the folder",
        ),
        (
            {"_target_": "bstune.nowhere.nothing"},
            "bstune has no nowhere, for bstune.nowhere.nothing$",
        ),
        ({"_target_": "bstune.workloads.images.blur"}, "bstune.workloads.images has no blur"),
        (
            # The user's own module exists, and what it imports does not.
            {"_target_": "tree.Leaf"},
            "importing tree.Leaf needs the module soil, which is not installed$",
        ),
        ({"_target_": "stump.Leaf"}, "importing stump.Leaf fails: ZeroDivisionError"),
        # What the target itself says of its arguments.
        ({"_target_": "builtins.int", "wrong": 1}, "builtins.int raised TypeError: 'wrong' is"),
        (
            {"_target_": "torch.nn.Linear", "_args_": [{"_target_": "math.sqrt", "_args_": [-1]}]},
            r"math.sqrt raised ValueError: .* \(at _args_0\)$",
        ),
        (
            {"_target_": "torch.nn.Linear", "in_featurs": 1, "out_features": 1},
            "Linear raised TypeError: .*'in_featurs': did you mean in_features.$",
        ),
        # What the target gives on by itself is no argument of the node's.
        ({"_target_": "branch.Leaf", "size": 1}, "Leaf raised TypeError: .*'in_featurs'$"),
        ({"_target_": "builtins.int", "x": "${no.such.key}"}, "no.such.key"),
    ],
)
def test_what_cannot_be_built_is_named(target, text, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    # It imports what is not there.
    (tmp_path / "tree.py").write_text("import soil.deep\n")
    (tmp_path / "stump.py").write_text("1 / 0\n")
    (tmp_path / "branch.py").write_text(
        "from torch.nn import Linear\n\n\ndef Leaf(size):\n    return Linear(in_featurs=size)\n"
    )
    with pytest.raises(ConfigError, match=f"^workload.data cannot be built.*{text}.*$"):
        instantiate(target, "workload.data")


def test_targets_may_be_written_as_lightning_cli_writes_them():
    # A key beside class_path makes it plain data.
    kept = {"class_path": "torch.nn.ReLU", "y": 1}
    linear = {
        "class_path": "torch.nn.Linear",
        "init_args": {"in_features": "${rate}", "out_features": 2},
    }
    options = {"class_path": "builtins.dict", "dict_kwargs": {"a": {"class_path": "torch.nn.ReLU"}}}
    own = {"_target_": "builtins.dict", "_recursive_": False, "a": {"class_path": "torch.nn.ReLU"}}
    node = {"_target_": "builtins.dict", "list": [linear, options], "kept": kept, "own": own}
    built = instantiate(OmegaConf.create({"rate": 3, "node": node}).node, "workload.module")
    assert built["list"][0].in_features == 3
    # Targets within lists and within keyword arguments are built, too.
    assert isinstance(built["list"][1]["a"], torch.nn.ReLU)
    assert built["kept"] == kept
    # _recursive_ is Hydra's own switch.
    assert built["own"] == {"a": {"class_path": "torch.nn.ReLU"}}


def test_the_workloads_trainer_arguments_go_to_the_trainer():
    monitor = {
        "class_path": "lightning.pytorch.callbacks.LearningRateMonitor",
        "init_args": {"logging_interval": "step"},
    }
    plugin = {"_target_": "lightning.pytorch.plugins.precision.DoublePrecision"}
    settings = {
        "+workload.trainer.callbacks": {"rates": monitor},
        "+workload.trainer.plugins": [plugin],
    }
    options, recipe = composed_with(
        settings,
        "+workload.trainer={gradient_clip_val: 0.5, benchmark: true}",
        "+trainer.gradient_clip_val=2",
    )
    trainer = checked_protocol(options, recipe).trainer
    # The workload's arguments go before the command's.
    assert trainer["gradient_clip_val"] == 0.5
    assert trainer["benchmark"] is True
    assert [one.logging_interval for one in trainer["callbacks"]] == ["step"]
    # The precision is the plug-in's.
    assert "precision" not in trainer


def test_an_error_of_bstunes_own_is_raised_as_it_is():
    target = {"_target_": "bstune.workloads.averaging.RunningWeightAverage", "fraction": 2.0}
    with pytest.raises(ConfigError, match=r"^the fraction of steps that is averaged must lie in"):
        instantiate(target, "workload.module")


@pytest.mark.parametrize(
    # 1,797 images: 1,500 for training and 297 to test on.
    ("validation", "sizes"),
    [("300", (1200, 300, 297)), ("test", (1500, 297, None))],
)
def test_bstunes_own_data_are_split_and_batched_as_configured(validation, sizes):
    workload = build_workload(
        *composed(f"workload.data.validation={validation}", "protocol.micro_batch_size=100")
    )
    tested = workload.test_batches and labels_of(workload.test_batches).numel()
    assert (workload.train_examples, workload.validation_examples, tested) == sizes
    assert workload.validates_on_test == (validation == "test")
    assert labels_of(workload.validation_batches).numel() == sizes[1]
    drawn = []
    for seed in (1, 1, 2):
        batches = first(workload.train_batches(spec(250, seed=seed)), 6)
        # 250 in groups of 100.
        assert [len(labels) for _, labels in batches] == [100, 100, 50] * 2
        drawn.append(labels_of(batches))
    one, again, other = drawn
    assert torch.equal(one, again)
    assert not torch.equal(one, other)


# Data of another project


class Foreign(LightningDataModule):
    """30 examples in batches of 7, 12 to validate; notes what is called."""

    def __init__(self, **options):
        super().__init__()
        self.calls = []
        self.options = options
        # A test looks at the last one that was built.
        Foreign.last = self

    def prepare_data(self):
        self.calls.append("prepare")

    def setup(self, stage):
        self.calls.append(stage)
        self.train = TensorDataset(torch.arange(30.0).view(30, 1), torch.arange(30))
        self.held_out = TensorDataset(torch.zeros(12, 1), torch.arange(12))

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=7, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.held_out, batch_size=5)


class SplitsAnew(Foreign):
    """Splits its data at random whatever the stage, as many do, and closes them in the end."""

    def setup(self, stage):
        self.calls.append(stage)
        examples = TensorDataset(torch.arange(42.0).view(42, 1), torch.arange(42))
        # By torch's own generator, whose state differs between processes.
        self.train, self.held_out = random_split(examples, [30, 12])

    def teardown(self, stage):
        self.calls.append("teardown")
        # As an open file does.
        self.train.dataset.tensors = ()


class Shifting(Foreign):
    """Shifts what it serves on the way to the device."""

    def on_after_batch_transfer(self, batch, dataloader_idx):
        images, labels = batch
        # Evaluated with the shift, too.
        return images + 1000.0, labels


class Seeing(LightningModule):
    """Notes the smallest value of each batch that it is given."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        Seeing.trained = []
        Seeing.evaluated = []

    def training_step(self, batch, batch_idx):
        self.trained.append((len(batch[1]), batch[0].min().item()))
        return self.weight

    def validation_step(self, batch, batch_idx):
        self.evaluated.append(batch[0].min().item())
        self.log("val/error", 0.9, batch_size=len(batch[1]))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class WithTest(Foreign):
    def test_dataloader(self):
        return DataLoader(self.held_out, batch_size=6)


class Streaming(Foreign):
    def train_dataloader(self):
        return DataLoader(Stream(), batch_size=7)


class Examples(IterableDataset):
    def __init__(self, examples):
        self.examples = examples

    def __iter__(self):
        return iter(self.examples)


class ValidatesOnStream(Foreign):
    def val_dataloader(self):
        return DataLoader(Examples(self.held_out), batch_size=5)


class ListOfLoaders(Foreign):
    def train_dataloader(self):
        return [super().train_dataloader()]


class ValidatesOnTwo(Foreign):
    def val_dataloader(self):
        return [super().val_dataloader()] * 2


class Buckets(Foreign):
    """Its batches, of its own sampler's making, have neighbours alone."""

    def train_dataloader(self):
        size = self.options["sizes"]["bs"]
        batches = [range(first, first + size) for first in range(0, 30 - size + 1, size)]
        return DataLoader(self.train, batch_sampler=batches)


def foreign(kind, *overrides, module=Seeing, **arguments):
    data = f"{__name__}.{kind.__name__}"
    # The names of this file are targets like those of a project.
    settings = {
        "workload.module": {"_target_": f"{__name__}.{module.__name__}"},
        "workload.data": {"_target_": data, **arguments},
    }
    return build_workload(*composed_with(settings, *overrides))


def test_a_node_that_refers_to_the_batch_size_builds_data_for_each_trial():
    workload = foreign(Buckets, sizes={"bs": "${trial.batch_size}"})
    # The data that are looked at first have the reference's batch size.
    assert Buckets.last.options == {"sizes": {"bs": 64}}
    for size in (5, 10):
        batches = first(workload.train_batches(spec(size)), 3)
        assert [labels.tolist() for _, labels in batches] == [
            list(range(start, start + size)) for start in (0, size, 2 * size)
        ]
    # A node that refers to something else in the config, or to nothing, is built once.
    for arguments in ({}, {"sizes": "${seed}"}):
        assert composed_recipe(Foreign, **arguments).data_at is None


def composed_recipe(kind, **arguments):
    node = {"_target_": f"{__name__}.{kind.__name__}", **arguments}
    return composed_with({"workload.data": node})[1]


# The module's own rate, and the trial's.
@pytest.mark.parametrize(("override", "lr"), [("false", 0.1), ("true", 0.025)])
def test_a_rate_may_be_set_in_the_optimizer_that_a_node_has_built(override, lr):
    settings = {"workload.module": {"_target_": f"{__name__}.Seeing"}}
    options, recipe = composed_with(settings, f"scaling.override_lr={override}")
    optimizer = build_module(options, recipe, spec(16, lr=0.025)).configure_optimizers()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(lr)


@pytest.mark.parametrize(("kind", "tested"), [(Foreign, False), (WithTest, True)])
def test_a_data_module_of_another_project_is_set_up_once(kind, tested):
    workload = foreign(kind)
    # prepare_data, and setup of each stage, once a process.
    assert Foreign.last.calls == ["prepare", "fit", "test"]
    assert (workload.train_examples, workload.validation_examples) == (30, 12)
    assert (workload.test_batches is not None) == tested
    assert not workload.validates_on_test
    assert [len(labels) for _, labels in workload.validation_batches] == [5, 5, 2]


def test_a_random_split_is_one_in_all_processes_and_is_not_split_again_for_the_test():
    parts = []
    for seed in (0, 1):
        # Another process would have drawn other numbers before.
        torch.manual_seed(seed)
        workload = foreign(SplitsAnew)
        # The split has drawn nothing from the generator.
        drawn = torch.rand(1)
        torch.manual_seed(seed)
        assert torch.equal(drawn, torch.rand(1))
        train = labels_of(first(workload.train_batches(spec(15)), 2))
        held_out = labels_of(workload.validation_batches)
        # No example is in both parts, and none in neither.
        assert sorted([*train.tolist(), *held_out.tolist()]) == list(range(42))
        parts.append(sorted(held_out.tolist()))
    assert parts[0] == parts[1]


def test_data_are_not_closed_after_a_trial():
    workload = foreign(SplitsAnew)
    for _ in range(2):
        assert run_trial(workload, spec(16), make_protocol(3, target=NEVER)).steps == 3
    assert "teardown" not in SplitsAnew.last.calls


def test_a_stream_is_evaluated_to_its_end_as_data_with_a_length_are():
    histories = []
    for kind in (Foreign, ValidatesOnStream):
        workload = foreign(kind)
        assert workload.validation_examples == 12
        result = run_trial(workload, spec(16), make_protocol(30, target=NEVER))
        histories.append((result.status, result.history, list(Seeing.evaluated)))
    assert histories[0] == histories[1]


@pytest.mark.parametrize(("micro", "groups"), [("null", [16]), ("6", [6, 6, 4])])
def test_its_batches_hold_exactly_b_examples(micro, groups):
    workload = foreign(Foreign, f"protocol.micro_batch_size={micro}")
    batches = list(first(workload.train_batches(spec(16)), 15 * len(groups)))
    # 16 are two micro-batches of 6 and one of 4.
    assert [len(labels) for _, labels in batches] == groups * 15
    # 240 examples are eight epochs.
    epochs = labels_of(batches).view(-1, 30)
    for epoch in epochs:
        assert sorted(epoch.tolist()) == list(range(30))
    again = labels_of(first(workload.train_batches(spec(16)), len(batches)))
    assert torch.equal(again, labels_of(batches))


@pytest.mark.parametrize(("kind", "least"), [(Foreign, 0.0), (Shifting, 1000.0)])
def test_its_hooks_on_batches_are_called_and_it_is_not_set_up_again(kind, least):
    workload = foreign(kind)
    for _ in range(2):
        result = run_trial(workload, spec(16), make_protocol(3, target=NEVER))
        assert (result.status, result.steps) == ("stopped", 3)
        for size, value in Seeing.trained:
            assert size == 16
            assert value >= least
        assert len(Seeing.trained) == 3
        assert set(Seeing.evaluated) == {least}
    assert Foreign.last.calls == ["prepare", "fit", "test"]
    # The project's own data module is as it was.
    assert len(next(iter(Foreign.last.train_dataloader()))[1]) == 7


def loaders(*_, **__):
    """The training and the validation loader, as many a project's function returns them."""
    training = TensorDataset(torch.zeros(8, 2), torch.zeros(8))
    return DataLoader(training), DataLoader(training)


def test_data_sets_are_data_as_the_message_says():
    made = LightningDataModule.from_datasets(
        TensorDataset(torch.zeros(64, 2), torch.zeros(64)),
        TensorDataset(torch.zeros(8, 2), torch.zeros(8)),
    )
    # The size of the data set, whatever the loader's batches.
    assert train_examples(made) == 64


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (loaders, r"workload\.data: must build a LightningDataModule, but builds tuple: .*data=\("),
        (Streaming, "its data set, Stream, is iterable"),
        (ListOfLoaders, "the training data must come from a torch DataLoader .* but got list"),
    ],
)
def test_data_that_cannot_be_used_are_refused_before_any_trial(kind, text):
    with pytest.raises(ConfigError, match=text):
        foreign(kind)


class NoTestSet(WithTest):
    def setup(self, stage):
        if stage == "test":
            # The file of the test data is not there.
            raise FileNotFoundError("no such file: test.csv")
        super().setup(stage)


class NoTestLoader(WithTest):
    def test_dataloader(self):
        return DataLoader(self.tested)


@pytest.mark.parametrize(
    ("kind", "cause"),
    [
        (NoTestSet, "FileNotFoundError: no such file: test.csv"),
        (NoTestLoader, "AttributeError: 'NoTestLoader' object has no attribute 'tested'"),
    ],
)
def test_without_a_test_set_there_are_no_test_metrics_but_a_note(kind, cause):
    workload = foreign(kind)
    (note,) = workload.notes
    assert note.startswith(
        f"no test metrics, as {kind.__name__}.setup('test') or test_dataloader() fails: {cause} "
        "(test_"
    )
    assert workload.test_batches is None
    # Neither a test set nor the lack of one is worth a note.
    assert foreign(WithTest).notes == foreign(Foreign).notes == ()


class SeeingTests(Seeing):
    def test_step(self, batch, batch_idx):
        self.log("test/loss", self.weight)


@pytest.mark.parametrize(
    ("module", "metrics"),
    # A module without a test_step has no metrics on the test set, and that is no error.
    [(Seeing, []), (SeeingTests, ["test/loss"])],
)
def test_a_module_is_tested_if_it_has_a_step_for_that(tmp_path, monkeypatch, module, metrics):
    workload = foreign(WithTest, module=module)
    assert workload.test_batches is not None
    logged = {"test/loss": torch.zeros(())}
    trainer = SimpleNamespace(callback_metrics=logged)
    monkeypatch.setattr("bstune.trial.workload.is_own", lambda path: True)
    monkeypatch.setattr("bstune.trial.workload.evaluate", lambda *given, test: trainer)
    backend = SimpleNamespace(workload=workload, protocol=None)
    assert list(LightningBackend.test(backend, spec(), Output(tmp_path))) == metrics


def test_validation_data_may_be_several():
    # Two loaders of 12.
    assert foreign(ValidatesOnTwo).validation_examples == 24


# Modules


class Noting(LightningModule):
    def __init__(self, **options):
        super().__init__()
        self.options = options


# 5 steps and 60 examples have both to be spent.
@pytest.mark.parametrize(("batch_size", "total"), [(1, 60), (10, 6), (4, 15), (60, 5)])
def test_a_module_gets_its_own_trials_values_and_leaves_the_recipe(batch_size, total):
    names = ("batch_size", "lr", "seed", "total_steps")
    nested = {
        "_target_": "bstune.workloads.schedules.piecewise_linear",
        "_partial_": True,
        "knots": [0.0, 1.0],
    }
    module = {
        "_target_": f"{__name__}.Noting",
        "schedule": {**nested, "total_steps": "${trial.total_steps}"},
        **{name: f"${{trial.{name}}}" for name in names},
    }
    options, recipe = composed_with({"workload.module": module}, "budget={steps: 5, examples: 60}")
    before = deepcopy((options, recipe))
    # Each reference has the value of this trial.
    given = build_module(options, recipe, spec(batch_size, lr=0.7, seed=11)).options
    assert [given[name] for name in names] == [batch_size, 0.7, 11, total]
    assert given["schedule"].func is piecewise_linear
    assert given["schedule"].keywords == {"total_steps": total, "knots": [0.0, 1.0]}
    assert build_module(options, recipe, spec(lr=0.2)).options["lr"] == 0.2
    # The next trial gets the recipe as it was.
    assert (options, recipe) == before


def test_what_is_no_module_is_refused():
    identity = composed_with({"workload.module": {"_target_": "torch.nn.Identity"}})
    with pytest.raises(
        ConfigError, match=r"workload\.module must build a LightningModule, but got Identity"
    ):
        build_module(*identity, spec())


# Modules that start from images

# 2 x 2 patches: 4 filters, and their negatives, at 7 x 7 places are 392 values.
WHITENED = (
    "~workload.module.model",
    (
        "+workload.module.model={_target_: torch.nn.Sequential, _args_: ["
        "{_target_: bstune.workloads.layers.Whitening, kernel_size: 2, eps: 0.01, images: 200, "
        "signed: true, "
        "bias: true, padding: 0, channels: 1}, "
        "{_target_: torch.nn.Flatten}, {_target_: torch.nn.Linear, in_features: 392, out_features: "
        "10}]}"
    ),
)


def test_a_module_starts_from_the_first_training_images_as_its_batches_have_them():
    workload = build_workload(*composed(*WHITENED))
    torch.manual_seed(0)
    layer = workload.build_module(spec()).model[0]
    drawn = torch.get_rng_state()
    torch.manual_seed(0)
    bare = build_module(*composed(*WHITENED), spec())
    # The images draw nothing.
    assert torch.equal(torch.get_rng_state(), drawn)
    with pytest.raises(ConfigError, match="no filters yet"):
        bare(torch.zeros(2, 1, 8, 8))
    # All training images are in one epoch of batches; their second moments, whitened, are those of
    # the closed form.
    images = torch.cat([images for images, _ in first(workload.train_batches(spec(1200)), 1)])
    # The second half are the negatives of the first.
    rows = layer(images)[:, :4].permute(0, 2, 3, 1).reshape(-1, 4)
    moments = (rows.T @ rows / len(rows)).detach()
    # They are of 1,200 images where the filters are of 200.
    assert (moments - torch.eye(4)).abs().max() < 0.25
    # Signed: eight channels.
    assert layer(images).shape == (1200, 8, 7, 7)


def test_a_study_takes_its_images_once(monkeypatch):
    asked = []
    give = ImageData.first_images
    monkeypatch.setattr(
        ImageData, "first_images", lambda data, count: asked.append(count) or give(data, count)
    )
    options, recipe = composed(*WHITENED)
    workload = build_workload(options, recipe)
    torch.manual_seed(0)
    one = workload.build_module(spec()).state_dict()
    torch.manual_seed(1)
    two = workload.build_module(spec(seed=1, batch_size=64)).state_dict()
    # The first 200 images were read once for both trials.
    assert asked == [200]
    assert torch.equal(one["model.0.weight"], two["model.0.weight"])
    # Each trial draws its own.
    assert not torch.equal(one["model.2.weight"], two["model.2.weight"])
    # What a trial does to its weights does not reach the next one.
    one["model.0.weight"].zero_()
    assert torch.equal(
        workload.build_module(spec()).state_dict()["model.0.weight"], two["model.0.weight"]
    )
    # Another study reads its own.
    build_workload(options, recipe).build_module(spec())
    assert asked == [200, 200]


class Wanting(Seeing):
    """Wants images of another project's data, which have none to give."""

    initial_images = 10

    def initialise_from(self, images):
        raise AssertionError


class Wantless(Wanting):
    initial_images = 0


def test_images_of_another_projects_data_are_not_to_be_had():
    workload = foreign(Foreign, module=Wanting)
    with pytest.raises(ConfigError, match=r"workload.data is Foreign, which has no first_images"):
        workload.build_module(spec())
    assert isinstance(foreign(Foreign, module=Wantless).build_module(spec()), Wantless)


class HookedData(LightningDataModule):
    """Notes what its hooks on batches get; the module's stand in for the one that it lacks."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def transfer_batch_to_device(self, batch, device, dataloader_idx):
        self.calls.append(("transfer", device, dataloader_idx))
        return [*batch, "moved"]

    def on_after_batch_transfer(self, batch, dataloader_idx):
        self.calls.append(("after", dataloader_idx))
        return [*batch, "after"]


class HookedModule(LightningModule):
    def on_before_batch_transfer(self, batch, dataloader_idx):
        return [*batch, f"before {dataloader_idx}"]


def test_a_batch_goes_through_the_hooks_as_a_trainer_calls_them():
    data = HookedData()
    workload = SimpleNamespace(data_module=data)
    device = torch.device("cpu")
    assert on_device(workload, HookedModule(), [], device) == ["before 0", "moved", "after"]
    assert data.calls == [("transfer", device, 0), ("after", 0)]
