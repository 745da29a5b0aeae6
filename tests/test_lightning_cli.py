"""Config files of LightningCLI as workloads."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from toolbox import entries

from bstune.core.errors import ConfigError
from bstune.core.metric_names import parse_target
from bstune.hydra_recipe import HydraRecipe
from bstune.recipe import TrialValues
from bstune.trial.own_project import cli_file, lightning_cli
from bstune.trial.own_project.cli_file import TRAINERS, Chosen, arguments_of, read_file
from bstune.trial.own_project.lightning_cli import with_value, workload_of

pytest.importorskip("jsonargparse")
PROJECTS = Path(__file__).parent / "projects"
FILE = PROJECTS / "lightning_cli" / "config.yaml"
LINEAR = {"class_path": "lightning_cli.main.LitLinear"}
ADAM = {"class_path": "torch.optim.Adam", "init_args": {"lr": 0.02}}


@pytest.fixture(autouse=True)
def _importable(monkeypatch):
    monkeypatch.syspath_prepend(str(PROJECTS))


def changed(folder, remove=(), **changes):
    """The project's file with other sections."""
    content = yaml.safe_load(FILE.read_text()) | changes
    path = folder / "changed.yaml"
    path.write_text(
        yaml.safe_dump({name: value for name, value in content.items() if name not in remove})
    )
    return path


def made_of(path, chosen):
    return workload_of(read_file(path, chosen))


def recipe_of(workload):
    return HydraRecipe({"trial": {}, "workload": workload}, {})


def module_of(workload):
    return recipe_of(workload).module(TrialValues(32, lr=0.25, seed=0, total_steps=10))


def test_a_value_at_a_dotted_key_is_put_into_a_copy():
    node = {"a": {"b": 1, "c": {"d": 2}}, "e": 3}
    assert with_value(node, "a.c.d", 4) == {"a": {"b": 1, "c": {"d": 4}}, "e": 3}
    assert with_value(node, "e", 5) == {"a": {"b": 1, "c": {"d": 2}}, "e": 5}
    assert node == {"a": {"b": 1, "c": {"d": 2}}, "e": 3}


def test_a_file_becomes_a_workload():
    workload, lines = made_of(FILE, Chosen("val_loss=0.2"))
    assert workload["name"] == "LitMLP"
    assert workload["target"] == {"metric": "val_loss", "value": 0.2, "mode": "min"}
    assert workload["reference"] == {"batch_size": 32, "lr": 0.003}
    # From an eighth of the file's 32 to sixteen times as many.
    assert workload["batch_size"] == {"low": 4, "high": 512}
    assert any(line.startswith("batch sizes 4 to 512: ") for line in lines)
    # The file's ten epochs have 1200 examples each: 46 steps at eight times its batch size.
    assert workload["budget"] == {"steps": 46, "examples": 12_000}
    assert workload["trainer"]["gradient_clip_val"] == 1.0
    assert [one["class_path"].rpartition(".")[2] for one in workload["trainer"]["callbacks"]] == [
        "LearningRateMonitor"
    ]
    assert lines[0] == "optimizer.init_args.lr is the learning rate: 0.003 at batch size 32"
    module = module_of(workload)
    assert [type(layer).__name__ for layer in module.model] == [
        "Linear",
        "GELU",
        "Linear",
        "GELU",
        "Linear",
    ]
    (optimizer,), (schedule,) = module.configure_optimizers()
    assert (optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["weight_decay"]) == (
        0.25,
        0.01,
    )
    assert (type(optimizer), schedule.gamma) == (torch.optim.AdamW, 0.97)
    assert recipe_of(workload).data().hparams.val_size == 300


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        (
            {"model": {**LINEAR, "init_args": {"optimizer": ADAM}}},
            "model.init_args.optimizer.init_args.lr",
        ),
        # Its class is given beside the file, which has the arguments alone.
        ({"model": {"optimizer": ADAM}}, "model.init_args.optimizer.init_args.lr"),
        ({"model": LINEAR | {"init_args": {}}, "optimizer": ADAM}, "optimizer.init_args.lr"),
    ],
)
def test_the_learning_rate_is_found(changes, key, tmp_path):
    path = changed(tmp_path, {"optimizer", "lr_scheduler"} - changes.keys(), **changes)
    workload, lines = made_of(path, Chosen("val_loss=0.2", model="lightning_cli.main.LitLinear"))
    assert lines[0] == f"{key} is the learning rate: 0.02 at batch size 32"
    optimizer = module_of(workload).configure_optimizers()
    assert (type(optimizer).__name__, optimizer.param_groups[0]["lr"]) == ("Adam", 0.25)


def test_a_rate_that_is_set_in_the_optimizer_needs_no_key():
    workload, lines = made_of(FILE, Chosen("val_loss=0.2", overrides_lr=True))
    assert workload["reference"] == {"batch_size": 32, "lr": 0.003}
    assert "${trial.lr}" not in yaml.safe_dump(workload)
    assert lines[0].startswith("the rate in configure_optimizers is the learning rate: 0.003 at")


# The default of the class, or a number of the file, is a rate under another name.
BASED = {"class_path": "lightning_cli.main.LitBased", "init_args": {"base_lr": 0.01}}
FINDER = {"class_path": "lightning.pytorch.callbacks.LearningRateFinder"}


def test_a_finder_is_refused_before_it_finds(tmp_path):
    path = changed(tmp_path, trainer={"max_epochs": 10, "callbacks": [FINDER]})
    with pytest.raises(ConfigError, match="LearningRateFinder sets the learning rate"):
        made_of(path, Chosen())


def test_what_defines_a_trial_is_left_to_bstune(tmp_path):
    trainer = {
        "max_steps": 100,
        "accumulate_grad_batches": 4,
        "precision": "bf16",
        "enable_progress_bar": False,
    }
    workload, lines = made_of(
        changed(tmp_path, trainer=trainer), Chosen("val_acc>=0.9", name="mine")
    )
    # 32 examples, accumulated four times.
    assert workload["reference"]["batch_size"] == 128
    # 100 steps of them.
    assert workload["budget"] == {"steps": 12, "examples": 12_800}
    assert (workload["name"], workload["precision"], workload["trainer"]) == (
        "mine",
        "bf16-mixed",
        {},
    )
    assert lines[0].endswith("at batch size 128 (32 x 4 accumulated)")
    assert lines[-2] == "trainer.max_steps became budget.examples=12800"
    left = {f"trainer.{name}" for name in trainer.keys() - {"max_steps"}} | {"seed_everything"}
    assert set(lines[-1].removeprefix("left to bstune: ").split(", ")) == left


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("callbacks", "chosen"),
    [
        ([], ("val_loss", "min")),
        (
            [
                {
                    "class_path": "lightning.pytorch.callbacks.EarlyStopping",
                    "init_args": {"monitor": "val_loss", "mode": "max"},
                }
            ],
            ("val_loss", "max"),
        ),
    ],
)
def test_without_a_target_the_file_is_to_come_to_its_own_result(callbacks, chosen, tmp_path):
    path = changed(tmp_path, trainer={"max_epochs": 10, "callbacks": callbacks})
    workload, lines = made_of(path, Chosen())
    metric, mode = chosen
    assert workload["target"] == {"metric": metric, "value": "auto", "mode": mode}
    assert any(line.startswith("target: ") for line in lines)


def test_the_studys_time_may_stand_for_the_length_of_a_trial(tmp_path):
    path = changed(tmp_path, trainer={"logger": False})
    workload, lines = made_of(path, Chosen("val_loss=0.2", is_timed=True))
    # 100 epochs.
    assert workload["budget"]["examples"] == 100 * 1200
    assert workload["budget"]["assumed_epoch"] == 1200
    assert any(line.startswith("budget: ") for line in lines)


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("val_loss=0.1", ("val_loss", 0.1, "min")),
        ("valid/Top1-Acc=0.9", ("valid/Top1-Acc", 0.9, "max")),
        ("val_loss >= 1e-3", ("val_loss", 1e-3, "max")),
        ("score<=2", ("score", 2.0, "min")),
    ],
)
def test_targets(text, parsed):
    assert parse_target(text) == parsed


def test_data_that_make_their_batches_are_built_for_each_batch_size(tmp_path):
    buckets = {"class_path": "lightning_cli.main.Buckets", "init_args": {"sizes": {"bs": 32}}}
    workload, lines = made_of(changed(tmp_path, data=buckets), Chosen("val_loss=0.2"))
    assert "data.init_args.sizes.bs is the batch size" in " ".join(lines)
    recipe = HydraRecipe({"trial": {"batch_size": None}, "workload": workload}, {})
    assert workload["reference"]["batch_size"] == recipe.data().sizes.bs == 32
    assert recipe.data_at(20).sizes.bs == 20
    # Another number that equals it is tried first, and data with twice that number fail.
    buckets["init_args"]["batches_kept"] = 32
    _, lines = made_of(changed(tmp_path, data=buckets), Chosen("val_loss=0.2"))
    assert "data.init_args.sizes.bs is the batch size" in " ".join(lines)
    # No number of these is the batch size.
    fixed = {"class_path": "lightning_cli.main.Buckets", "init_args": {"fixed": 32}}
    with pytest.raises(ConfigError, match=r"Buckets\..* makes the batches itself"):
        made_of(changed(tmp_path, data=fixed), Chosen("val_loss=0.2"))


def test_a_stream_takes_its_length_from_the_trainers_steps(tmp_path):
    stream = {"class_path": "lightning_cli.main.Stream", "init_args": {"batch_size": 32}}
    with pytest.raises(ConfigError, match=r"^give trainer\.max_steps, as no loader tells"):
        made_of(changed(tmp_path, data=stream), Chosen("val_loss=0.2"))
    length = {"max_steps": 600, "max_epochs": -1}
    workload, _ = made_of(changed(tmp_path, data=stream, trainer=length), Chosen("val_loss=0.2"))
    assert workload["budget"]["examples"] == 600 * 32
    assert workload["batch_size"] == {"low": 4, "high": 512}
    recipe = HydraRecipe({"trial": {"batch_size": None}, "workload": workload}, {})
    assert recipe.data_at(20).hparams.batch_size == 20


@pytest.mark.parametrize(
    ("changes", "given", "line"),
    [
        (
            {},
            {"target": "score=1"},
            "does not say which way is better: correct it, or write 'score<=1' or 'score>=1'",
        ),
        (
            {},
            {"target": "val_loss"},
            "--target must be a metric and a number, such as val_loss=0.1",
        ),
        ({}, {"target": "val_loss=low"}, "but got val_loss=low"),
        (
            {"model": 3},
            {},
            "model must hold arguments by name, but holds 3",
        ),
        (
            {"model": "no_project.Model"},
            {},
            "there is no module no_project, for no_project.Model: run bstune in",
        ),
        (
            {"model": {"class_path": "lightning_cli.main.LitMLP"}},
            {},
            "LightningCLI does not take this config",
        ),
        (
            {"model": {**LINEAR, "init_args": {"nope": 1}}},
            {},
            "model: nope is no argument of LitLinear; arguments: optimizer",
        ),
        (
            {"stopping": {"patience": 3}},
            {},
            "stopping is none of trainer, model, data, optimizer, lr_scheduler",
        ),
        # No step has so many examples.
        (
            {"trainer": {"max_steps": 10, "accumulate_grad_batches": 10_000}},
            {},
            "is larger than the training data",
        ),
        (
            {},
            {"lr": "optimizer.lr"},
            "there is no number optimizer.lr: bstune lightning ",
        ),
        (
            {"optimizer": None, "lr_scheduler": None},
            {},
            "which number is the learning rate? none is named lr or learning_rate (numbers: ",
        ),
        (
            {"optimizer": None, "lr_scheduler": None},
            {},
            (
                "where it stands in configure_optimizers, scaling.override_lr=true sets it in the "
                "optimizer"
            ),
        ),
        (
            {"optimizer": None, "lr_scheduler": None, "model": BASED},
            {"options": ("seed=3",)},
            (
                "none is named lr or learning_rate; model.init_args.base_lr looks like it: bstune "
                "lightning changed.yaml --target val_loss=0.2 --lr model.init_args.base_lr seed=3;"
            ),
        ),
    ],
)
def test_what_cannot_be_tuned_is_refused_in_a_line(changes, given, line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = changed(tmp_path, **changes).relative_to(tmp_path)
    with pytest.raises(ConfigError) as error:
        made_of(path, Chosen(**({"target": "val_loss=0.2"} | given)))
    assert line in str(error.value)
    assert "\n" not in str(error.value)


USUAL = {
    "trainer": {"max_steps": 400, "enable_progress_bar": False},
    "model": {"width": 7, "base_lr": 0.002, "encoder_scale": 0.1, "warmup": 100},
    "data": {"train_bs": 32},
}
RATE = "a number named lr or learning_rate (model.init_args.base_lr looks like it)"
CLASSES = "--model MODULE.CLASS --data MODULE.CLASS"


# A file of LightningCLI(Model, Data) names no classes.
@pytest.mark.parametrize(
    ("changes", "chosen", "lacks", "arguments"),
    [
        (
            {},
            Chosen("val_dice>=0.4"),
            f"the class of its model, the class of its data and {RATE}",
            f"--target 'val_dice>=0.4' {CLASSES} --lr model.init_args.base_lr",
        ),
        (
            {"trainer": {"max_epochs": -1}},
            Chosen(model="seg.Segmenter", name="mine", options=("search.trials=9",)),
            (
                f"the class of its data, the length of a trial (trainer.max_epochs or "
                "trainer.max_steps in the file, or the study's time, quick=true or "
                f"search.wall_seconds=SECONDS) and {RATE}"
            ),
            "--model seg.Segmenter --data MODULE.CLASS --lr model.init_args.base_lr --name mine "
            "search.trials=9 quick=true",
        ),
        # Where it has one number of the usual name, nothing else is offered.
        (
            {"model": {"lr": 0.1, "lr_backbone": 0.01}},
            Chosen(data="seg.Data"),
            "the class of its model",
            "--model MODULE.CLASS --data seg.Data",
        ),
        # Several that have it are asked for, and those that only look like it are all offered.
        (
            {"model": {"lr": 0.1, "head": {"learning_rate": 0.01}}},
            Chosen(),
            (
                "the class of its model, the class of its data and the choice of its learning "
                "rate, model.init_args.lr or model.init_args.head.learning_rate"
            ),
            f"{CLASSES} --lr model.init_args.lr",
        ),
        (
            {"model": {"lrHead": 0.1, "initialLearningRate": 0.2, "lru": 3, "dropout_rate": 0.5}},
            Chosen(data="seg.Data"),
            (
                "the class of its model and a number named lr or learning_rate "
                "(model.init_args.lrHead and model.init_args.initialLearningRate look like it)"
            ),
            "--model MODULE.CLASS --data seg.Data --lr model.init_args.lrHead",
        ),
        # No rate is offered where one is set in the optimizer.
        (
            {"trainer": None},
            Chosen(overrides_lr=True, is_timed=True, options=("scaling.override_lr=true",)),
            "the class of its model and the class of its data",
            f"{CLASSES} scaling.override_lr=true",
        ),
        # A class may stand alone; without a model there are no numbers.
        ({"model": "seg.Model"}, Chosen(), "the class of its data", "--data MODULE.CLASS"),
        (
            {"model": None, "data": None},
            Chosen(),
            "the class of its model and the class of its data",
            CLASSES,
        ),
    ],
)
def test_all_that_a_file_lacks_is_one_refusal_with_the_command(
    changes, chosen, lacks, arguments, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    path = Path("usual.yaml")
    path.write_text(yaml.safe_dump(USUAL | changes, sort_keys=False))
    with pytest.raises(ConfigError) as error:
        read_file(path, chosen)
    assert str(error.value) == f"usual.yaml lacks {lacks}: bstune lightning usual.yaml {arguments}"


BEFORE = """
import sys
from bstune.__main__ import lightning
from bstune.core.errors import ConfigError
sys.modules.update(dict.fromkeys(sys.argv[2:]))
try:
    lightning([sys.argv[1], "--target", "val_loss<=0.1"])
except ConfigError as error:
    print(error)
print({"torch", "lightning", "seg"} & sys.modules.keys())
"""


@pytest.mark.parametrize(
    ("model", "without", "line"),
    [
        ({"lr": 0.1}, (), "lacks the class of its model and the class of its data: "),
        ("seg.Segmenter", ("jsonargparse",), "pip install 'bstune[lightning-cli]'"),
    ],
)
def test_what_a_file_lacks_is_refused_before_the_libraries_are_loaded(
    model, without, line, tmp_path
):
    (tmp_path / "seg.py").write_text("import torch")
    path = tmp_path / "usual.yaml"
    path.write_text(yaml.safe_dump(USUAL | {"model": model}))
    command = [sys.executable, "-c", BEFORE, str(path), *without]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    refusal, loaded = ended.stdout.splitlines()
    assert line in refusal
    assert loaded == "set()"


def test_a_jsonargparse_without_signatures_is_one_line(monkeypatch):
    class Parser:
        def __init__(self, **options):
            raise ModuleNotFoundError("Requirement 'jsonargparse[signatures]>=4.27.7' not met")

    monkeypatch.setattr("lightning.pytorch.cli.LightningArgumentParser", Parser)
    with pytest.raises(ConfigError, match="pip install 'bstune\\[lightning-cli\\]' \\(Requirement"):
        lightning_cli._parser.__wrapped__("lightning.pytorch")


def test_a_workload_of_the_users_is_not_replaced(bstune, tmp_path):
    own = tmp_path / "bstune_conf" / "workload" / "mine.yaml"
    own.parent.mkdir(parents=True)
    own.write_text("name: mine\n")
    status, _, err = bstune("lightning", str(FILE), "--target", "val_loss=0.2", "--name", "mine")
    assert (status, own.read_text()) == (2, "name: mine\n")
    assert "--name" in err


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("nowhere.yaml", "--target", "val_loss=0.2"), "nowhere.yaml cannot be read"),
        ((str(FILE), "--target", "val_loss=0.2", "nope=1"), "unknown option nope"),
        (
            (str(FILE), "--target", "val_loss=0.2", "--name", "a/b"),
            "--name must be letters, digits, and - . _",
        ),
    ],
)
def test_the_command_writes_nothing_for_bad_input(arguments, line, bstune, tmp_path):
    status, out, err = bstune("lightning", *arguments)
    assert (status, entries(tmp_path)) == (2, [])
    assert line in err
    assert "Traceback" not in out + err


@pytest.mark.parametrize(
    ("trainer", "has_length"),
    [
        ({"max_epochs": 3}, True),
        ({"max_steps": "300"}, True),
        # jsonargparse reads the number in a text: -1 means without end.
        ({"max_epochs": "-1"}, False),
        ({"max_epochs": -1, "max_steps": None}, False),
        ({"max_steps": [1]}, False),
        ({"max_steps": "many"}, False),
        ({}, False),
        (None, False),
    ],
)
def test_a_files_length_is_a_number_over_zero(trainer, has_length):
    assert cli_file._has_length(trainer) == has_length


@pytest.mark.parametrize("length", [{"max_epochs": -3}, {"max_steps": 0}, {"max_epochs": "-2"}])
def test_a_length_below_zero_is_refused_also_where_time_ends_the_study(length, tmp_path):
    with pytest.raises(
        ConfigError, match=r"must be at least 1, or -1 for no limit, but got '?-?\d"
    ):
        read_file(changed(tmp_path, trainer=length), Chosen("val_loss=0.1", is_timed=True))
    for fine in (-1, None, 3, "${oc.env:EPOCHS}"):
        cli_file.check_lengths({"max_epochs": fine})


@pytest.mark.parametrize(
    ("section", "wrong", "meant"),
    [
        # Without the mistake the file would lack the length of a trial.
        ({"trainer": {"max_epoch": 3}}, "max_epoch", "max_epochs"),
        (
            {
                "model": {
                    "class_path": "lightning_cli.main.LitMLP",
                    "init_args": {"net": "torch.nn.Flatten", "hiden": [8], "lr": 0.1},
                }
            },
            "hiden",
            "hidden",
        ),
        (
            {
                "data": {
                    "class_path": "lightning_cli.main.SklearnDigits",
                    "init_args": {"batchsize": 4},
                }
            },
            "batchsize",
            "batch_size",
        ),
    ],
)
def test_an_unknown_argument_is_named_first_before_anything_is_imported(
    tmp_path, section, wrong, meant
):
    path = changed(tmp_path, **section)
    with pytest.raises(ConfigError, match=rf"{wrong} is no argument of .*mean {meant}\?"):
        read_file(path, Chosen())


def test_a_key_of_jsonargparse_that_appends_is_no_unknown_argument(tmp_path):
    path = changed(tmp_path, trainer={"max_epochs": 3, "callbacks+": []})
    read_file(path, Chosen())


def test_arguments_are_read_of_a_class_whose_source_tells_all_of_them():
    assert arguments_of("lightning_cli.main.LitMLP") == [
        "net",
        "hidden",
        "activation",
        "label_smoothing",
    ]
    assert "max_epochs" in arguments_of(f"{TRAINERS[0]}.Trainer")
    # Any arguments, and a class that another module has.
    unknown = ("torch.nn.Sequential", "lightning.pytorch.Trainer", "no.such.Class", "torch")
    for path in unknown:
        assert arguments_of(path) is None
