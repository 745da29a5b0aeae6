"""What algorithm=... puts in the place of a workload's optimizer: of what ships, users' own, and where it cannot."""

import itertools
import re
import shlex
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from omegaconf import OmegaConf

from bstune.choices import with_choices_of
from bstune.config import compose
from bstune.core.errors import ConfigError
from bstune.options import flat_settings, option_at
from bstune.recipe import TrialValues
from bstune.trial.own_project.cli_file import Chosen, read_file
from bstune.trial.own_project.lightning_cli import workload_of
from bstune.workloads.optim import Muon

PROJECTS = Path(__file__).parent / "projects"
ALGORITHMS = {
    "sgd": (torch.optim.SGD, {"momentum": 0.0, "nesterov": False}),
    "heavy_ball": (torch.optim.SGD, {"momentum": 0.9, "nesterov": False}),
    "nesterov": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    "adam": (torch.optim.Adam, {"betas": (0.9, 0.999)}),
    "adamw": (torch.optim.AdamW, {"betas": (0.9, 0.999)}),
    "muon": (Muon, {"momentum": 0.95}),
}


def compose_workload(folder, workload, *arguments):
    """Compose a workload of the user's own, from a file in a folder."""
    path = folder / "workload" / "mine.yaml"
    path.parent.mkdir()
    path.write_text(yaml.safe_dump(workload))
    return compose(["--config-dir", str(folder), "workload=mine", *arguments])


def optimizer_of(composed):
    module = composed.trained_recipe.module(TrialValues(64, lr=0.25, seed=0, total_steps=100))
    # Lightning takes lists with schedules, a dict, a list or the optimizer itself.
    configured = module.configure_optimizers()
    configured = configured[0] if isinstance(configured, tuple) else configured
    found = configured["optimizer"] if isinstance(configured, dict) else configured
    return found[0] if isinstance(found, list) else found


@pytest.mark.parametrize(
    ("name", "workload"),
    [
        *itertools.product(ALGORITHMS, ("digits",)),
        ("sgd", "airfoil"),
        *(pytest.param(name, "cifar_mlp", marks=pytest.mark.slow) for name in ALGORITHMS),
    ],
)
def test_every_algorithm_takes_the_place_of_a_workloads_optimizer(name, workload):
    kind, options = ALGORITHMS[name]
    composed = compose([f"workload={workload}", f"algorithm={name}"])
    optimizer = optimizer_of(composed)
    assert type(optimizer) is kind
    group = optimizer.param_groups[0]
    assert {key: group[key] for key in options} == options
    # A schedule's first factor may have changed the rate itself.
    assert group.get("initial_lr", group["lr"]) == 0.25
    values = OmegaConf.create(dict(composed.trained_recipe.values))
    # What can be searched has a place in the config.
    for one in composed.options.workload.tunable.values():
        assert OmegaConf.select(values, one.key, default="nothing") != "nothing"


@pytest.mark.parametrize(
    ("arguments", "lr"),
    [
        (["workload=digits", "algorithm=sgd"], 0.4),
        # The step's size lr/(1 - m) is kept.
        (["workload=digits", "algorithm=nesterov"], 0.04),
        (["workload=fashion_mlp", "algorithm=sgd"], 0.3),
        (["workload=digits", "algorithm=nesterov", "algorithm.optimizer.momentum=0.5"], 0.2),
        (["workload=digits", "algorithm=nesterov", "algorithm.lr=0.3"], 0.3),
        # An algorithm of another class keeps its own rate.
        (["workload=digits", "algorithm=adam"], 0.001),
        (["workload=cifar_mlp", "algorithm=adam"], 0.001),
        (["workload=cifar_mlp", "algorithm=nesterov"], 0.01),
        (["workload=digits", "algorithm=adam", "workload.reference.lr=0.007"], 0.007),
        (["workload=digits", "algorithm=adam", "scaling.lr=0.007"], 0.007),
        (["workload=digits", "algorithm=null"], 0.4),
    ],
)
def test_the_reference_learning_rate_is_the_algorithms(arguments, lr):
    assert compose(arguments).options.scaling.lr == pytest.approx(lr, abs=1e-15)


def test_what_the_command_line_sets_in_the_place_holds():
    own = [
        "workload.module.optimizer.eps=1e-6",
        "workload.tunable.beta2.high=0.99",
        "search.tune=[beta2,average]",
    ]
    composed = compose(["workload=digits", "algorithm=adam", *own])
    assert optimizer_of(composed).param_groups[0]["eps"] == 1e-6
    tunable = composed.options.workload.tunable
    assert tunable["beta2"].high == 0.99
    # Of the optimizer that is gone.
    assert "momentum" not in tunable
    for name in ("linear", "decay"):
        set_end = ["workload.module.schedule.end=0.2", "search.tune=[decay_end,momentum]"]
        workload = compose(["workload=digits", f"schedule={name}", *set_end]).options.workload
        assert workload.module["schedule"]["end"] == 0.2
        assert workload.module["average"] is None
        assert workload.tunable["decay_end"].key == "workload.module.schedule.end"
        # It has no average any more.
        assert "average" not in workload.tunable


class Scheduled:
    """Takes a schedule and no average."""

    def __init__(self, lr, schedule=None):
        """Do nothing."""


class Anything:
    def __init__(self, **options):
        """Do nothing."""


@pytest.mark.parametrize(
    ("module", "chosen", "place", "given"),
    [
        ({"_target_": "test_choices.Scheduled"}, "linear", "workload.module", ["schedule"]),
        (
            {"class_path": "test_choices.Scheduled"},
            "linear",
            "workload.module.init_args",
            ["schedule"],
        ),
        (
            {"_target_": "test_choices.Anything"},
            "warmup",
            "workload.module",
            ["schedule", "average"],
        ),
        (
            {"_target_": "not_installed.Module"},
            "warmup",
            "workload.module",
            ["schedule", "average"],
        ),
    ],
)
def test_a_schedule_is_given_to_what_takes_it(module, chosen, place, given, tmp_path):
    workload = compose(["workload=digits"]).options.workload.model_dump() | {"module": module}
    options = compose_workload(tmp_path, workload, f"schedule={chosen}").options
    node = option_at(options, place)
    assert sorted(given) == sorted(set(node) & {"schedule", "average"})
    assert node["schedule"]["_target_"].startswith("bstune.workloads.schedules.")
    if chosen == "linear":
        assert options.workload.tunable["decay_end"].key == f"{place}.schedule.end"


@pytest.mark.parametrize(
    ("module", "chosen", "argument"),
    [
        ("bstune.workloads.airfoil.LinearRegression", "linear", "schedule"),
        ("test_choices.Scheduled", "warmup", "average"),
    ],
)
def test_a_module_that_takes_none_is_named(module, chosen, argument, tmp_path):
    workload = compose(["workload=digits"]).options.workload.model_dump()
    workload["module"] = {"_target_": module}
    said = (
        f"sets the argument {argument} of a workload's module, but that of digits, {module}, "
        "takes none"
    )
    with pytest.raises(ConfigError, match=re.escape(said)):
        compose_workload(tmp_path, workload, f"schedule={chosen}")


def test_a_weight_decay_stays_the_workloads_between_optimizers_of_one_class():
    decay_of = "workload.module.optimizer.weight_decay"
    for name, decay in (("heavy_ball", 5e-4), ("adamw", 0.01)):
        arguments = ["workload=resnet_cifar", f"algorithm={name}"]
        assert option_at(compose(arguments).options, decay_of) == decay
        # What the command line sets counts, also between optimizers of one class.
        arguments.append("algorithm.optimizer.weight_decay=0.25")
        assert option_at(compose(arguments).options, decay_of) == 0.25
    options = compose(["workload=resnet_cifar", "algorithm=heavy_ball"]).options
    assert option_at(options, "workload.module.optimizer.fused") is True


def test_half_lives_and_what_is_tuned_are_frozen():
    arguments = ["workload=digits", "algorithm=adam", "scaling.beta2_half_life=1e5"]
    assert flat_settings(compose(arguments).options)["scaling.beta2_half_life"] == 1e5
    arguments = ["workload=digits", "algorithm=nesterov", "search.tune=[momentum]"]
    assert flat_settings(compose(arguments).options)["workload.tunable.momentum.complement"]


def test_a_project_with_a_hydra_tree_of_its_own(monkeypatch):
    monkeypatch.syspath_prepend(PROJECTS)
    folder = str(PROJECTS / "hydra_tree" / "conf")
    # Its optimizer stands in a group of the project's own.
    composed = compose(["--config-dir", folder, "workload=wine", "algorithm=nesterov"])
    optimizer = optimizer_of(composed)
    assert type(optimizer) is torch.optim.SGD
    assert (optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["nesterov"]) == (0.25, True)


def test_a_file_of_lightning_cli(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(PROJECTS)
    file = read_file(PROJECTS / "lightning_cli" / "config.yaml", Chosen("val_loss=0.1"))
    workload, _ = workload_of(file)
    composed = compose_workload(tmp_path, workload, "algorithm=heavy_ball")
    momentum = composed.options.workload.tunable["momentum"]
    assert momentum.key == "workload.module.optimizer.init_args.momentum"
    group = optimizer_of(composed).param_groups[0]
    assert (group["initial_lr"], group["momentum"]) == (0.25, 0.9)


def test_a_module_that_stands_elsewhere_in_the_config_stays_whole():
    own = {
        "_target_": "torch.optim.SGD",
        "_partial_": True,
        "lr": "${trial.lr}",
        "weight_decay": 0.1,
    }
    config = OmegaConf.create(
        {
            "workload": {
                "name": "mine",
                "reference": {"batch_size": 64, "lr": 0.1},
                "module": "${model}",
            },
            "model": {"_target_": "my.Model", "optimizer": "${optimizer}"},
            "optimizer": own,
            "trial": {"lr": 1.0},
            "algorithm": {
                "lr": 0.01,
                "optimizer": own | {"weight_decay": 0.0, "momentum": 0.9},
                "tunable": {},
            },
        }
    )
    module = OmegaConf.to_container(
        with_choices_of(config, None, [], [])[0].workload, resolve=True
    )["module"]
    assert module == {"_target_": "my.Model", "optimizer": own | {"lr": 1.0, "momentum": 0.9}}


CANNOT = {
    "builds its own": (
        ["--config-dir", str(PROJECTS / "conf"), "workload=two_optimizers"],
        (
            "of the workload two_optimizers, two_optimizers.gan.GAN, is given none, so that it "
            "builds its own: let it take"
        ),
    ),
    "two": (
        ["workload=digits", "+workload.module.other={_target_: torch.optim.Adam, _partial_: true}"],
        "has workload.module.optimizer, workload.module.other: leave out algorithm=",
    ),
    "replayed": (
        ["workload=replay", "workload.table=fashion_mlp"],
        "so it has no algorithm: leave out algorithm=...",
    ),
    "a half-life of what is replayed": (
        [
            "workload=replay",
            "workload.table=fashion_mlp",
            "scaling.beta2_half_life=1e5",
            "algorithm=null",
        ],
        (
            "a replayed workload is not trained, so that scaling.beta2_half_life changes nothing: "
            "leave it out"
        ),
    ),
    "a choice of the user's own": (
        ["workload=digits", "+algorithm.rate=1"],
        "has the keys lr, optimizer and tunable",
    ),
}


@pytest.mark.parametrize(("arguments", "line"), CANNOT.values(), ids=CANNOT)
def test_where_it_cannot_it_says_so(arguments, line):
    with pytest.raises(ConfigError, match=re.escape(line)):
        compose(arguments if "algorithm=null" in arguments else [*arguments, "algorithm=sgd"])


@pytest.mark.slow
def test_momentum_and_half_lives_are_searched_in_a_study_of_a_users_own(
    bstune, tmp_path, monkeypatch
):
    """The command of a winner's record builds its optimizer: what was searched stands in the algorithm's place."""
    shutil.copytree(PROJECTS / "hydra_tree", tmp_path / "hydra_tree")
    monkeypatch.syspath_prepend(tmp_path)
    arguments = [
        "--config-dir",
        "hydra_tree/conf",
        "workload=wine",
        "algorithm=nesterov",
        "study=wine",
    ]
    arguments += [
        "search.tune=[momentum,weight_decay_half_life]",
        "sampler=each_batch_size",
        "search.trials=4",
    ]
    arguments += [
        "search.batch_size.low=16",
        "search.batch_size.high=32",
        "search.objective=steps",
        "search.workers=0",
        "mlflow.enabled=false",
    ]
    status, printed, errors = bstune(*arguments, "search.replicates=0", "workload.target.value=0.5")
    assert status == 0, errors
    assert "4 configurations, at each of 2 batch sizes in turn; each ends" in printed
    assert "searches momentum (0.1 to 0.99), weight_decay_half_life" in printed
    winner = yaml.safe_load((tmp_path / "outputs" / "wine" / "best.yaml").read_text())[
        "best_by_steps"
    ]
    # Past python -m bstune.
    command = shlex.split(winner["command"])
    composed = compose(command[command.index("bstune") + 1 :])
    values = winner["hyperparameters"]
    assert optimizer_of(composed).param_groups[0]["momentum"] == values["momentum"]
    assert composed.options.scaling.weight_decay_half_life == values["weight_decay_half_life"]
