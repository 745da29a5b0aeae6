"""What a project itself says of its training, and what a study assumes of it."""

import traceback
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule
from lightning.pytorch.callbacks import EarlyStopping
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    Sampler,
    TensorDataset,
)

import bstune
from bstune.core.errors import ConfigError, StudyError
from bstune.core.records import Budget, Target
from bstune.study.planning.plan import QUICK_SECONDS, wall_limit
from bstune.trial.own_project.own_values import (
    own_batches,
    own_examples,
    own_metric,
    own_rate,
)

X = torch.randn(96, 3, generator=torch.Generator().manual_seed(0))
ROWS = TensorDataset(X, X[:, :1])


class Net(LightningModule):
    """Logs what it is told in validation, and one metric in training."""

    logged = ("val_loss",)

    def __init__(self, lr=0.01, hidden=4):
        super().__init__()
        self.lr = lr
        self.net = nn.Linear(3, 1)

    def training_step(self, batch, batch_idx):
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        for name in self.logged:
            self.log(name, nn.functional.mse_loss(self.net(batch[0]), batch[1]))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr)


class Data(LightningDataModule):
    def train_dataloader(self):
        return DataLoader(ROWS, batch_size=24, shuffle=True)

    def val_dataloader(self):
        return DataLoader(ROWS, batch_size=32)


class NoDefault(Net):
    def __init__(self, lr):
        super().__init__(lr)


class Based(Net):
    def __init__(self, base_lr=0.02, use_lr_schedule=True):
        super().__init__(base_lr)


class OfTwo(Net):
    def __init__(self, lrHead=0.02, lr_body=0.01):
        super().__init__(lr_body)


class Renamed(Net):
    def __init__(self, learning_rate=0.2):
        super().__init__(learning_rate)


def logging(*names):
    net = Net()
    net.logged = names
    return net


def loader_data(loader):
    data = Data()
    data.train_dataloader = lambda: loader
    return data


def at_size(batch_size):
    return DataLoader(ROWS, batch_size, drop_last=True), DataLoader(ROWS, batch_size=32)


@pytest.mark.parametrize(
    ("module", "rate"),
    [
        (Net, 0.01),
        (Renamed, 0.2),
        (partial(Net, hidden=8), 0.01),
        (partial(Net, lr=0.3), 0.3),
        (NoDefault, None),
        (lambda trial: Net(trial.lr), None),
    ],
)
def test_the_rate_is_the_default_of_the_modules_class(module, rate):
    assert own_rate(module) == rate


@pytest.mark.parametrize(
    ("loader", "batch_size"),
    [
        (DataLoader(ROWS, batch_size=24), 24),
        # Such a loader's own batch_size is None.
        (DataLoader(ROWS, batch_sampler=BatchSampler(RandomSampler(ROWS), 12, False)), 12),
    ],
)
def test_the_batch_size_is_that_of_the_training_loader(loader, batch_size):
    found = own_batches(loader_data(loader), "Data")
    assert (found.batch_size, found.examples) == (batch_size, 96)


class Stream(IterableDataset):
    def __iter__(self):
        yield from X


class FourBatches:
    """Loads batches itself, and knows how many there are."""

    def __iter__(self):
        yield from [torch.ones(8)] * 4

    def __len__(self):
        return 4


class NeedsTrainer(Data):
    def train_dataloader(self):
        # Nothing is attached when it is asked.
        return DataLoader(ROWS, batch_size=8 * self.trainer.world_size)


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (loader_data([X]), "returns 1 loader in a list"),
        (
            loader_data(DataLoader(Stream(), batch_size=8)),
            r"Stream, is iterable .*data=lambda batch_size=8: Data\(\.\.\., batch_size=batch_size\)",
        ),
        (NeedsTrainer(), "failed with AttributeError"),
    ],
)
def test_other_kinds_of_loaders_are_named(data, problem):
    with pytest.raises(ConfigError, match=problem):
        bstune.Study(Net, data)


class Twice(Sampler):
    """Draws each of the 96 examples twice in an epoch."""

    def __iter__(self):
        return iter([*range(96), *range(96)])

    def __len__(self):
        return 192


class Unsized(Sampler):
    def __iter__(self):
        return iter(range(96))


class Buckets(Sampler):
    """Batches of the project's own, as one that sorts examples by length makes them."""

    def __init__(self, batch_size, batches):
        self.batch_size = batch_size
        self.batches = batches

    def __iter__(self):
        numbers = torch.randperm(96).tolist()
        for batch in range(self.batches):
            yield numbers[batch * self.batch_size : (batch + 1) * self.batch_size]

    def __len__(self):
        return self.batches


def in_buckets(batch_size, batches):
    return DataLoader(ROWS, batch_sampler=Buckets(batch_size, batches))


def with_sampler(sampler, batch_size):
    return DataLoader(ROWS, batch_size=batch_size, sampler=sampler)


@pytest.mark.parametrize(
    ("loader", "given_batch_size", "found"),
    [
        (with_sampler(Twice(), 16), None, (16, 192)),
        (with_sampler(Twice(), 16), 16, (16, 192)),
        (with_sampler(Unsized(), 16), None, (16, None)),
        (DataLoader(Stream(), batch_size=8), 8, (8, None)),
        # The last batch may have a single example.
        (FourBatches(), 8, (8, 24)),
        # 4 full batches are all 96 examples, and so are 6 with a smaller one at the end.
        (in_buckets(24, 4), None, (24, 96)),
        (in_buckets(24, 4), 24, (24, 96)),
        (in_buckets(17, 6), None, (17, 96)),
        # The smaller one is left out.
        (in_buckets(17, 5), None, (17, 85)),
        # Some of the data, in batches of which the last one may be small.
        (in_buckets(17, 4), None, (17, 51)),
        # Larger batches than the data fill.
        (in_buckets(100, 0), None, (100, None)),
        (FourBatches(), None, (None, None)),
    ],
)
def test_an_epoch_is_as_long_as_sampler_or_loader_say(loader, given_batch_size, found):
    batches = own_batches(loader_data(loader), "Data", given_batch_size)
    assert (batches.batch_size, batches.examples) == found
    assert batches.problem is not None


@pytest.mark.parametrize(
    ("sampler", "arguments", "reference", "asks_for_budget"),
    [
        # The batch size that is known is the default, and the class states the rate.
        (Twice(), {}, "data=lambda batch_size=16:", False),
        (Unsized(), {}, "data=lambda batch_size=16:", True),
        (Twice(), {"module": NoDefault}, "reference=(16, learning rate)", False),
        (
            Twice(),
            {"module": NoDefault, "trainer": {"accumulate_grad_batches": 2}},
            "reference=(32, learning rate)",
            False,
        ),
        (Unsized(), {"reference": (16, 0.1)}, "data=lambda batch_size:", True),
    ],
)
def test_one_error_names_all_that_a_custom_sampler_needs(
    sampler, arguments, reference, asks_for_budget
):
    given = {"module": Net, "data": loader_data(with_sampler(sampler, 16)), **arguments}
    with pytest.raises(ConfigError) as error:
        bstune.Study(**given)
    text = str(error.value)
    assert "data=lambda" in text
    assert reference in text
    assert ("budget" in text) == asks_for_budget


def test_a_function_of_the_batch_size_needs_no_more_than_a_reference():
    def loaders(batch_size):
        return with_sampler(Twice(), batch_size), DataLoader(ROWS, batch_size=32)

    with pytest.raises(ConfigError, match=r"reference=\(batch size, 0.01\)") as error:
        bstune.Study(Net, loaders)
    assert "budget" not in str(error.value)
    study = bstune.Study(Net, loaders, reference=(16, 0.01), target="val_loss<=0.2")
    assert study.options.search.batch_size.high == 192
    # As the refusal of a data module with such a sampler says it.
    stated = bstune.Study(Net, lambda batch_size=16: loaders(batch_size), target="val_loss<=0.2")
    assert (stated.options.scaling.batch_size, stated.options.scaling.lr) == (16, 0.01)
    assert study.options.budget.budget == Budget(examples=19200)


def test_a_function_whose_loaders_have_no_length_names_all_that_it_needs():
    def loaders(batch_size):
        return DataLoader(Stream(), batch_size=batch_size), DataLoader(ROWS, batch_size=32)

    with pytest.raises(ConfigError, match=r"reference=.*batch_sizes and budget"):
        bstune.Study(Net, loaders)
    with pytest.raises(ConfigError, match="give batch_sizes and budget") as error:
        bstune.Study(Net, loaders, reference=(16, 0.01))
    assert "reference" not in str(error.value)


@pytest.mark.parametrize(
    ("trainer", "examples"),
    [
        # 10 epochs of 96 examples, 7 steps of 24.
        ({"max_epochs": 10}, 960),
        ({"max_steps": 7}, 168),
        ({"max_epochs": 10, "max_steps": 7}, 168),
        # Lightning's way to set no limit.
        ({"max_epochs": -1, "max_steps": -1}, None),
        ({}, None),
    ],
)
def test_the_length_is_the_shorter_of_the_trainers(trainer, examples):
    assert own_examples(trainer, 24, 96) == examples


@pytest.mark.parametrize(
    ("names", "callbacks", "chosen"),
    [
        (("val_mse",), [], ("val_mse", "min", ())),
        (("val_acc", "val_loss"), [], ("val_loss", "min", ("val_acc",))),
        (("reward", "val_loss"), [EarlyStopping("reward", mode="max")], ("reward", "max", ("val_loss",))),
        # What is monitored is not logged in validation.
        (("val_loss",), [EarlyStopping("train_loss")], ("val_loss", "min", ())),
    ],
)  # fmt: skip
def test_the_metric_is_what_is_monitored_or_the_loss(names, callbacks, chosen):
    found = own_metric(logging(*names), Data(), {"callbacks": callbacks}, "cpu")
    assert (found.name, found.mode, found.others) == chosen


@pytest.mark.parametrize(
    ("names", "problem"),
    [
        ((), "logs no metric in validation"),
        (("val_acc", "val_f1"), "logs val_acc, val_f1 in validation, and none is a loss"),
        (("reward",), "does not say by its name which way is better"),
    ],
)
def test_metrics_that_do_not_tell_are_listed(names, problem):
    with pytest.raises(ConfigError, match=problem):
        own_metric(logging(*names), Data(), {}, "cpu")


class Broken(Net):
    def validation_step(self, batch, batch_idx):
        raise ZeroDivisionError("no")


class BrokenLater(Net):
    def on_train_epoch_end(self):
        raise ZeroDivisionError("no")


def test_an_error_of_the_users_code_asks_for_the_target():
    with pytest.raises(ConfigError, match=r"failed with ZeroDivisionError: no .*give target="):
        own_metric(Broken(), Data(), {}, "cpu")
    # What comes after the metrics does not matter.
    assert own_metric(BrokenLater(), Data(), {}, "cpu").name == "val_loss"


class SameName(Net):
    def training_step(self, batch, batch_idx):
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("loss", nn.functional.mse_loss(self.net(batch[0]), batch[1]))


def test_a_name_that_is_logged_in_training_too_is_a_metric():
    found = own_metric(SameName(), Data(), {"check_val_every_n_epoch": 5}, "cpu")
    assert found.name == "loss"


def test_a_budget_of_the_loss_is_assumed_in_seconds():
    study = bstune.Study(Net, Data(), objective="loss")
    assert assumed(study) == [
        "reference",
        "batch_sizes",
        "wall_seconds",
        "budget.seconds",
        "target",
    ]
    assert study.options.budget.seconds == 6.0
    given = bstune.Study(Net, Data(), options=["search.objective=loss", "budget.seconds=3"])
    assert assumed(given) == ["reference", "batch_sizes", "target"]
    with pytest.raises(ConfigError, match="leave one of them out"):
        bstune.Study(Net, Data(), target="val_loss<=0.1", options=["search.objective=loss"])


class LoggedByCallback(Callback):
    def on_validation_epoch_end(self, trainer, pl_module):
        self.log("macro_f1", 0.5)


def test_a_callback_of_the_trainer_may_log_the_metric():
    found = own_metric(logging(), Data(), {"callbacks": [LoggedByCallback()]}, "cpu")
    assert (found.name, found.mode) == ("macro_f1", "max")


def assumed(study):
    """The names of the arguments that a study assumed."""
    return [line.partition("=")[0] for line in study.assumptions]


def test_a_module_and_data_are_enough():
    study = bstune.Study(Net, Data())
    options = study.options
    assert assumed(study) == ["reference", "batch_sizes", "wall_seconds", "budget", "target"]
    assert (options.scaling.batch_size, options.scaling.lr) == (24, 0.01)
    assert (options.search.batch_size.low, options.search.batch_size.high) == (1, 96)
    assert (options.search.wall_seconds, options.quick) == (None, True)
    assert wall_limit(options) == QUICK_SECONDS
    assert options.budget.budget == Budget(examples=9600)
    assert options.workload.budget.assumed_epoch == 96
    assert options.workload.target.value == "auto"
    assert options.workload.target.metric == "val_loss"


def test_the_trainers_arguments_are_the_projects_own():
    trainer = {"max_epochs": 5, "accumulate_grad_batches": 2, "gradient_clip_val": 1.0}
    study = bstune.Study(Net, Data(), trainer=trainer)
    assert assumed(study) == ["reference", "batch_sizes", "budget", "target"]
    # 24 examples, accumulated twice.
    assert study.options.scaling.batch_size == 48
    # 5 epochs of 96.
    assert study.options.budget.budget == Budget(examples=480)
    assert study.options.workload.budget.assumed_epoch is None
    assert study.options.search.wall_seconds is None
    own = study.recipe.trainer()
    assert own["gradient_clip_val"] == 1.0
    assert not own.keys() & trainer.keys() - {"gradient_clip_val"}
    # They are the caller's.
    assert trainer == {"max_epochs": 5, "accumulate_grad_batches": 2, "gradient_clip_val": 1.0}


def test_what_is_given_is_not_assumed():
    loaders = DataLoader(ROWS, batch_size=16), DataLoader(ROWS, batch_size=96)
    study = bstune.Study(
        lambda trial: Net(trial.lr),
        loaders,
        target="val_loss<=0.2",
        budget=Budget(examples=960),
        batch_sizes=(2, 32),
    )
    assert assumed(study) == ["reference"]
    assert (study.options.scaling.batch_size, study.options.scaling.lr) == (16, 0.01)
    assert study.options.workload.target.target == Target("val_loss", 0.2, "min")
    timed = bstune.Study(Net, Data(), wall_seconds=30.0, target="val_loss")
    assert assumed(timed) == ["reference", "batch_sizes", "budget"]
    assert timed.options.search.wall_seconds == 30.0
    assert timed.options.workload.target.value == "auto"
    quick = bstune.Study(Net, Data(), options=["search.seconds=3"])
    assert quick.options.search.wall_seconds is None


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (
            {"module": NoDefault, "data": Data()},
            r"which learning rate do you run today\? .* or learning_rate: give reference=\(24, "
            r"learning rate\), or override_lr=True",
        ),
        # A default of another name is offered, that of a function's module as well.
        (
            {"module": Based, "data": Data()},
            r"lr or learning_rate; base_lr=0.02 looks like it: give reference=\(24, 0.02\), or",
        ),
        (
            {"module": lambda trial: Based(base_lr=trial.lr), "data": Data()},
            r"lr or learning_rate; base_lr=0.02 looks like it: give reference=\(24, 0.02\), or",
        ),
        (
            {"module": OfTwo, "data": Data()},
            r"; lrHead=0.02 and lr_body=0.01 look like it: give reference=\(24, 0.02\), or",
        ),
        (
            {"module": Based, "data": Data(), "reference": (16, 0.1), "target": "val_loss<=0.1"},
            r"give module=lambda trial: Based\(base_lr=trial.lr, ...\) instead, or override_lr=True",
        ),
        ({"module": Net, "data": lambda size: (ROWS, ROWS)}, "which batch size do you run today"),
        ({"module": Net, "data": Data(), "target": "reward"}, "does not say which way is better"),
        ({"module": Net, "data": Data(), "target": "val_loss<=x"}, "target must be a metric and"),
        ({"module": Net, "data": Data(), "trainer": [1]}, "trainer must be a dict"),
        # Whatever else is left out, the argument that Trainer does not have is named first.
        (
            {"module": Net, "data": Data(), "trainer": {"gradient_clip": 1, "callbacks": [1]}},
            r"^trainer.gradient_clip is no argument of Trainer; did you mean gradient_clip_val\?",
        ),
        (
            {"module": Net, "data": Data(), "trainer": {"max_epochs": -3}},
            r"trainer.max_epochs must be at least 1, or -1 for no limit, but got -3",
        ),
        (
            {"module": Net, "data": Data(), "trainer": {"max_steps": 0}},
            r"trainer.max_steps must be at least 1, or -1 for no limit, but got 0",
        ),
        (
            {"module": Net, "data": Data(), "trainer": {"max_epochs": "six"}},
            r"trainer.max_epochs must be .*int.*, but got 'six'",
        ),
        ({"target": "val_loss"}, "needs batch_sizes, reference, budget, such as"),
        ({}, "needs target, batch_sizes, reference, budget, such as"),
        # It is given, but not two numbers.
        (
            {
                "target": "val_loss<=0.1",
                "batch_sizes": (),
                "reference": (32, 0.01),
                "budget": Budget(steps=90),
            },
            r"batch_sizes must be two numbers .* but got \(\)",
        ),
        ({"module": Net}, "needs module and data"),
        ({"data": Data(), "target": "val_loss"}, "needs module and data"),
    ],
)
def test_what_the_project_does_not_tell_is_asked_for(arguments, problem):
    with pytest.raises(ConfigError, match=problem):
        bstune.Study(**arguments)


def test_what_a_loop_is_asked_to_give_makes_a_study():
    with pytest.raises(ConfigError) as refused:
        bstune.Study()
    # A target without a value is one, too: None alone names no metric.
    assert "a metric alone" in str(refused.value)
    examples = str(refused.value).partition("such as ")[2].partition(";")[0]
    study = eval(f"bstune.Study({examples})", {"bstune": bstune})  # noqa: S307 (bstune wrote it)
    assert study.options.workload.target.target == Target("val_loss", 0.1, "min")
    assert study.recipe is None


GOAL = {"target": "val_loss<=0.2"}
GIVEN_SIZE = {"reference": (97, 0.01)}


@pytest.mark.parametrize(
    ("data", "arguments", "is_refused"),
    [
        # What the data themselves have is no batch size that is trained.
        (loader_data(DataLoader(ROWS, batch_size=97, drop_last=True)), GOAL, True),
        (Data(), {**GOAL, "trainer": {"accumulate_grad_batches": 5}}, True),
        (Data(), {**GOAL, "trainer": {"accumulate_grad_batches": 4}}, False),
        # It would be compared with nothing, as it is not trained.
        (Data(), GIVEN_SIZE, True),
        (Data(), {**GIVEN_SIZE, "target": "val_loss"}, True),
        (Data(), {**GIVEN_SIZE, **GOAL, "trainer": {"max_steps": 7}}, True),
        (at_size, {**GIVEN_SIZE, **GOAL, "trainer": {"max_steps": 7}}, True),
        (Data(), {**GIVEN_SIZE, **GOAL, "trainer": {"max_epochs": 7}}, True),
        (Data(), {**GIVEN_SIZE, **GOAL, "budget": Budget(steps=100)}, True),
        (Data(), {"reference": (96, 0.01), **GOAL, "trainer": {"max_epochs": 7}}, False),
    ],
)
def test_more_examples_than_the_data_have_are_no_reference(data, arguments, is_refused):
    refused = pytest.raises(ConfigError, match=r"(97|120), is larger.*\b96 examples")
    with refused if is_refused else nullcontext():
        bstune.Study(Net, data, **arguments)


# That a module and data are enough is seen above; a study of them runs in test_readme.py.
@pytest.mark.slow
def test_a_study_that_assumes_all_is_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = bstune.tune(
        Net,
        Data(),
        trainer={"max_epochs": 4},
        trials=4,
        workers=0,
        survey=False,
        mlflow=False,
        objective="steps",
        options=["search.replicates=1"],
    )
    first = result.records[0]
    assert (first.batch_size, first.lr, first.status) == (24, 0.01, "reached")
    assert result.summary.target_value == pytest.approx(first.history[-1][1], abs=0.05)
    assert any("your own configuration came to" in note for note in result.summary.notes)


# A study that assumes its target is above; here it is met before the first step.
@pytest.mark.slow
def test_untrained_weights_may_meet_what_the_first_trial_came_to(tmp_path, monkeypatch):
    """A learning rate that trains little sets a target that other seeds begin below."""
    monkeypatch.chdir(tmp_path)
    result = bstune.tune(
        Net,
        Data(),
        reference=(24, 3e-3),
        trainer={"max_epochs": 2},
        trials=6,
        workers=0,
        survey=False,
        mlflow=False,
        objective="steps",
        options=["search.replicates=0"],
    )
    begun_below = [trial for trial in result.records if trial.reached and trial.steps_low == 0]
    assert begun_below
    assert "failed" not in {trial.status for trial in result.records}
    again = bstune.Study(Net, Data(), reference=(24, 3e-3), trainer={"max_epochs": 2}).result
    assert again.options.workload.target.value == result.summary.target_value
    module, _ = again.train(logger=False, enable_checkpointing=False)
    assert isinstance(module, Net)


def test_an_output_that_cannot_be_written_is_refused_before_data_are_set_up():
    data = Data()
    data.setup = lambda stage: pytest.fail("the data were set up")
    with pytest.raises(StudyError, match="output=/proc/x"):
        bstune.Study(Net, data, output="/proc/x")


def test_an_error_of_the_arguments_stands_below_one_frame_of_bstunes():
    with pytest.raises(ConfigError) as error:
        bstune.tune(NoDefault, Data())
    # Its own, as a part of the call, and that of this test.
    assert len(traceback.extract_tb(error.value.__traceback__)) == 2


def test_the_users_own_error_keeps_its_frames():
    with pytest.raises(ConfigError) as error:
        bstune.tune(Net, NeedsTrainer())
    frames = traceback.extract_tb(error.value.__cause__.__traceback__)
    assert any(frame.filename == __file__ for frame in frames)


def test_the_making_of_a_study_counts_as_wall_time_of_its_first_run():
    study = bstune.Study(Net, Data())
    assert study._seconds_before > 0.0
    study._seconds_before = 30.0
    seconds = iter([100.0, 104.0, 200.0, 203.0])
    assert study._started(seconds.__next__)() == 34.0
    assert study._started(seconds.__next__)() == 3.0


class Regularised(Net):
    """Has defaults of further hyper-parameters, one of them out of the range that is searched."""

    def __init__(self, lr=0.01, dropout=0.0, width=500):
        super().__init__(lr)


@pytest.mark.parametrize(
    ("module", "dropout", "width"),
    [
        # The default out of the range is nobody's value in it: the range's middle stands for it.
        (Regularised, 0.0, 20),
        (lambda trial: Regularised(trial.lr, trial.dropout, trial.width), 0.2, 20),
    ],
)
def test_the_users_own_values_are_the_defaults_of_the_modules_class(module, dropout, width):
    tunable = {"dropout": (0.0, 0.4), "width": (10, 30)}
    study = bstune.Study(module, Data(), **GOAL, trainer={"max_epochs": 7}, tunable=tunable)
    assert study.recipe.own_values == {"dropout": dropout, "width": width}
    lines = " ".join(study.assumptions)
    assert ("dropout=0.2" in lines) == (dropout == 0.2)
    assert "width=20" in lines
    stated = {**tunable, "dropout": {"low": 0.0, "high": 0.4, "own": 0.3}}
    study = bstune.Study(module, Data(), **GOAL, trainer={"max_epochs": 7}, tunable=stated)
    assert study.recipe.own_values["dropout"] == 0.3
