"""The sweep dawnbench: its rungs on top of one another, its trials, its rows and its sentence."""

import functools
import io
import json
import math
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from omegaconf import OmegaConf
from rich.console import Console
from toolbox import make_spec

from bstune.config import flatten, validate
from bstune.core.errors import ConfigError
from bstune.core.records import Target
from bstune.sweeps.dawnbench import BuiltRung, Rung, accuracy, applied, climb, make_rows, seconds
from bstune.sweeps.dawnbench_report import sentence, shown
from bstune.sweeps.harness import check_sweep, compose_sweep, write
from bstune.trial.loop import run_trial
from bstune.trial.workload import load_data
from bstune.workloads.datasets import ImageDataset, Images

DIGITS = {
    "workload.module.schedule": {
        "_target_": "bstune.workloads.schedules.piecewise_linear",
        "_partial_": True,
        "total_steps": "%{trial.total_steps}",
        "knots": [0.0, 0.2, 1.0],
        "factors": [0.0, 1.0, 0.0],
    },
    "workload.module.average": None,
}
SMOOTH = {"workload.module.loss": {"_target_": "torch.nn.CrossEntropyLoss", "label_smoothing": 0.2}}
NEVER = Target("val/error", 0.0, "min").never_met


def rung(name, settings, **changes):
    values = {"seconds": None, "accuracy": None, "epochs": 1.0, "batch_size": 100, "lr": 0.4}
    return {"name": name, **values, **changes, "set": settings}


LADDER = [
    rung("start", DIGITS, seconds=70.0, accuracy=0.94),
    rung("smoothing", SMOOTH, epochs=2.0),
    rung("momentum", {"workload.module.optimizer.momentum": 0.9}, batch_size=50, lr=0.1),
]


@pytest.fixture
def checked(tmp_path, monkeypatch):
    """Return a function that checks the sweep on digits with rungs of its own."""
    monkeypatch.chdir(tmp_path)

    def check(*options, rungs=LADDER, lr=None, reduced=None):
        own = ("workload=digits", "device=cpu", "sweep.experiment.seeds=[3,5]")
        config = compose_sweep("dawnbench", (*own, *options))
        config.sweep.experiment.rungs = rungs
        config.sweep.experiment.reduced.lr = lr or {}
        config.sweep.experiment.reduced.set = reduced or {}
        return check_sweep("dawnbench", config)

    return check


def run(sweep, **arguments):
    console = Console(record=True, width=200, file=io.StringIO())
    finding = sweep.experiment.func(sweep.config, console, **sweep.parameters, **arguments)
    return finding, console.export_text()


def climbed(sweep):
    """Return the rungs that were built, and which were left out."""
    return climb(sweep.config, sweep.parameters["rungs"], sweep.parameters["reduced"], NEVER)


@pytest.fixture
def trained(checked):
    """Return a function that runs a sweep without training: the specs and protocols of its trials, and the finding."""

    def go(make_result, *options, errors=lambda spec: 0.1, **settings):
        seen = []

        def trainer(workload, spec, protocol):
            seen.append((workload, spec, protocol))
            steps = protocol.budget.steps
            changes = {"seed": spec.seed, "status": "censored", "steps": steps, "seconds_per_step": 0.01}
            return make_result(**changes, batch_size=spec.batch_size, lr=spec.lr, history=((steps, errors(spec)),))

        finding, printed = run(checked(*options, **settings), trainer=trainer)
        return seen, finding, printed

    return go


# The trials


def test_each_rung_trains_once_a_seed_for_its_own_epochs(make_result, trained):
    seen, finding, _ = trained(make_result)
    asked = Counter((spec.seed, spec.batch_size, spec.lr, protocol.budget.steps) for _, spec, protocol in seen)
    # 1200 digits are trained on: 12 steps of 100 an epoch, 24 of 50
    rungs = ((100, 0.4, 12), (100, 0.4, 24), (50, 0.1, 24))
    assert asked == Counter((seed, *rest) for seed in (3, 5) for rest in rungs)
    rows = [(row["rung"], row["epochs"], row["steps"]) for row in finding.rows]
    assert rows == [("start", 1.0, 12), ("smoothing", 2.0, 24), ("momentum", 1.0, 24)]
    assert [spec.number for _, spec, _ in seen] == list(range(6))
    assert {protocol.trainer["num_sanity_val_steps"] for *_, protocol in seen} == {0}
    assert finding.n == 2


def test_the_order_is_shuffled_anew_for_each_seed(make_result, trained):
    many = [rung(f"rung {place}", DIGITS if not place else {}, lr=0.1 + place) for place in range(6)]

    def order(*options):
        seen, *_ = trained(make_result, *options, rungs=many)
        return [spec.lr for _, spec, _ in seen]

    first = order()
    assert sorted(first[:6]) == sorted(first[6:])
    assert first[:6] != first[6:] != sorted(first[6:]) != first[:6] != sorted(first[:6])
    assert order() == first != order("sweep.experiment.order_seed=1")


def test_a_trial_is_evaluated_at_its_end_alone_and_its_schedule_ends_there(checked):
    finding, printed = run(checked("sweep.experiment.seeds=[3]"))
    for row, steps in zip(finding.rows, (12, 24, 24), strict=True):
        (trial,) = row["trials"]
        assert (trial["status"], row["steps"], row["n"]) == ("censored", steps, 1)
        assert 0.05 < trial["accuracy"] <= 1.0
        assert f"{row['rung']}, seed 3: accuracy {trial['accuracy']:.4f}, censored" in printed
    steps, left_out = climbed(checked())
    assert left_out == {}
    evaluations, modules, momenta = [], [], []
    for step in steps:
        spec = make_spec(step.batch_size, step.lr, seed=3)
        evaluations.append([at for at, _ in run_trial(step.workload, spec, step.protocol).history])
        modules.append(step.workload.build_module(spec))
        optimizer = modules[-1].configure_optimizers()
        momenta.append(optimizer["optimizer"].defaults["momentum"])
        schedule = optimizer["lr_scheduler"]["scheduler"]
        assert schedule.lr_lambdas[0](step.steps - 1) == 0.0 < schedule.lr_lambdas[0](step.steps - 2)
    assert evaluations == [[12], [24], [24]]
    # each rung stands on all rungs before
    assert [module.loss.label_smoothing for module in modules] == [0.0, 0.2, 0.2]
    assert [module.average for module in modules] == [None] * 3
    assert momenta == [0.0, 0.0, 0.9]


# The rungs


def test_rungs_of_the_same_data_share_them(checked, monkeypatch):
    loaded = []

    def load(config):
        loaded.append("augment" in config.workload.data)
        return load_data(config)

    monkeypatch.setattr("bstune.sweeps.dawnbench.load_data", load)
    mirror = {"_target_": "bstune.workloads.images.random_crop_flip", "_partial_": True, "padding": 1}
    climbed(checked(rungs=[*LADDER, rung("augmentation", {"+workload.data.augment": mirror}), rung("last", {})]))
    assert loaded == [False, True]


@functools.cache
def digits():
    config = compose_sweep("dawnbench", ("workload=digits",))
    OmegaConf.set_struct(config, False)
    del config["sweep"]
    return validate(config)


def test_settings_replace_what_stood_there():
    config = digits()
    before = OmegaConf.to_container(config)
    own = applied(config, {**DIGITS, **SMOOTH, "+workload.module.optimizer.nesterov": True, "precision": "bf16-mixed"})
    assert OmegaConf.to_container(config) == before
    node = OmegaConf.to_container(own.workload.module.schedule)
    assert node == {**DIGITS["workload.module.schedule"], "total_steps": "${trial.total_steps}"}  # merged with nothing
    assert own.workload.module.average is None
    assert own.workload.module.optimizer == {**before["workload"]["module"]["optimizer"], "nesterov": True}
    assert own.precision == "bf16-mixed"
    own.trial.total_steps = 17
    assert own.workload.module.schedule.total_steps == 17


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"workload.module.nope": 1}, "the config has no option workload.module.nope; an argument that is not there"),
        ({"workload.module.loss.label_smoothing": 0.1}, "is added by +workload.module.loss.label_smoothing"),
        ({"+nope.deeper": 1}, "the config has no option nope.deeper"),
        ({"workload.module.loss.a.b": 1}, "the config has no option workload.module.loss.a.b"),
        ({"+protocol.nope": 1}, "unknown option protocol.nope"),
        ({"workload.precision": None}, "workload.precision"),
        ({"workload.module.lr": "%{trial.nope}"}, "trial.nope"),
        ({"workload.module.lr": "%{trial"}, "workload.module.lr"),
    ],
)
def test_settings_that_cannot_be_are_named(settings, message):
    with pytest.raises(ConfigError) as caught:
        applied(digits(), settings)
    assert message in str(caught.value)


def test_a_rung_that_the_device_cannot_run_is_left_out_and_said(make_result, trained):
    half = rung("half", {"precision": "16-mixed", "workload.module.optimizer.momentum": 0.9}, lr=0.3)
    seen, finding, printed = trained(make_result, rungs=[*LADDER[:2], half, rung("last", {}, lr=0.2)])
    assert [row["rung"] for row in finding.rows] == ["start", "smoothing", "last"]
    assert (
        "half is left out, and the rungs after it go on without it: precision=16-mixed needs a CUDA device" in printed
    )
    assert finding.sentence.endswith("; left out on this device: half.")
    (workload, spec, _) = next(entry for entry in seen if entry[1].lr == 0.2)
    assert workload.build_module(spec).configure_optimizers()["optimizer"].defaults["momentum"] == 0.0
    with pytest.raises(ConfigError, match=r"no rung is left: half is left out.*16-mixed needs a CUDA device"):
        trained(make_result, rungs=[half])


def test_the_reduced_setting_takes_the_place_of_the_rungs_sizes(make_result, trained):
    options = [f"sweep.experiment.reduced.{option}" for option in ("enabled=true", "steps=7", "batch_size=20")]
    smaller = {"smoothing": {"workload.module.model.hidden": [16]}}
    seen, finding, _ = trained(make_result, *options, lr={"momentum": 0.3}, reduced=smaller)
    found = {(spec.batch_size, round(spec.lr, 9), protocol.budget.steps) for _, spec, protocol in seen}
    assert found == {(20, 0.08, 7), (20, 0.3, 7)}  # 0.4 x 20/100 by the linear rule
    measured = [row["measured"] for row in finding.rows]
    assert [(row["steps"], row["batch_size"], row["epochs"]) for row in measured] == [(7, 20, 7 * 20 / 1200)] * 3
    widths = {}
    for workload, spec, protocol in seen:
        module = workload.build_module(spec)
        widths.setdefault(next(module.model.parameters()).shape[0], set()).add(round(spec.lr, 9))
        assert protocol.budget.last_step(spec.batch_size) == 7
    assert widths == {128: {0.08}, 16: {0.08, 0.3}}  # kept by the rung after it


# The ladder that ships


@pytest.fixture
def shipped(tmp_path, monkeypatch):
    """Return a function that checks the sweep as it ships, on random images in place of CIFAR-10."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)

    def images(n):
        return Images(rng.integers(0, 256, (n, 3, 32, 32), dtype=np.uint8), rng.integers(0, 10, n))

    dataset = ImageDataset("CIFAR-10", 255, images(1200), images(100))
    monkeypatch.setattr("bstune.workloads.datasets.load_cifar10", lambda root: dataset)

    def check(*options):
        config = compose_sweep("dawnbench", ("device=cpu", *options))
        config.sweep.experiment.reduced.set.start["workload.data.validation"] = 100
        return check_sweep("dawnbench", config)

    return check


@pytest.mark.slow
def test_every_rung_of_the_reduced_ladder_trains(shipped):
    small = [f"sweep.experiment.reduced.{option}" for option in ("enabled=true", "steps=2", "batch_size=64")]
    finding, printed = run(shipped(*small, "sweep.experiment.seeds=[0]"))
    assert [(row["steps"], row["n"]) for row in finding.rows] == [(2, 1)] * 16, printed
    assert finding.sentence.endswith("; left out on this device: half-precision weights and compiled.")


def test_the_last_rungs_are_the_recipes_of_their_sources(shipped):
    """Whoever changes one of the two has to look at the other."""
    sweep = shipped()
    reached, by_rung = sweep.config, {}
    for own in sweep.parameters["rungs"]:
        reached = by_rung[own.name] = applied(reached, own.set)
        reached.trial.lr, reached.trial.batch_size = own.lr, own.batch_size

    def parts(config):
        workload = OmegaConf.to_container(config.workload)
        del workload["data"]["eval_batch_size"]
        return flatten({"data": workload["data"], "module": workload["module"]})

    for name, recipe in (("airbench94's network", "airbench_cifar"), ("Muon", "airbench_muon")):
        config = compose_sweep("dawnbench", (f"workload={recipe}",))
        assert parts(by_rung[name]) == parts(config)
        reference = OmegaConf.to_container(config.workload.reference)
        assert reference == {"batch_size": by_rung[name].trial.batch_size, "lr": by_rung[name].trial.lr}
    # Page's has its scales frozen at 1 where the ladder has 1/4, which is 16 times the rate and a quarter of the rest.
    recipe = parts(compose_sweep("dawnbench", ("workload=resnet_cifar_fast",)))
    own = parts(by_rung["moving average"])
    times = {key: own[key] / recipe[key] for key in own if isinstance(own[key], float) and own[key] != recipe[key]}
    assert times == {
        "module.model.norm.scale": 0.25,
        "module.model.activation.alpha": 0.25,
        "module.model.logit_scale": 4.0,
        "module.groups.kinds.norm_bias.rate": 1 / 16,
    }
    # Page has 97 steps of 512 an epoch and leaves out the rest of its images; here an epoch has all of them.
    rungs = {own.name: own for own in sweep.parameters["rungs"]}
    steps = {name: math.ceil(round(own.epochs * 50_000 / own.batch_size, 6)) for name, own in rungs.items()}
    assert (steps["airbench94's network"], steps["Muon"]) == (476, 200)
    assert steps["start"] == math.ceil(24 * 50_000 / 512) <= 1.01 * 24 * 97
    assert all(own.accuracy is None or own.accuracy >= 0.94 for own in rungs.values())
    times = [own.seconds for own in rungs.values() if own.seconds is not None]
    assert times == [70, 64, 59, 52, 46, 43, 36, 34, 26, 3.83, 3.09, 2.59]


# Rows and statistics


def trial(make_result, seed, error, **changes):
    own = {"status": "censored", "steps": 10, "history": ((10, error),), "seconds_per_step": 0.5, **changes}
    return make_result(seed=seed, **own)


def trials(make_result, errors):
    return {seed: trial(make_result, seed, error) for seed, error in enumerate(errors)}


AT_THE_END = [
    ({"history": ((5, 0.5), (10, 0.06))}, 0.94),
    ({"history": ((10, 0.1),)}, 0.9),
    ({"history": ((10, None),)}, None),
    ({"history": ()}, None),
    ({"status": "diverged", "history": ((10, 0.9),)}, None),
    ({"status": "oom"}, None),
]


@pytest.mark.parametrize(("changes", "value"), AT_THE_END)
def test_accuracy_and_seconds_at_the_end(make_result, changes, value):
    own = trial(make_result, 0, 0.2, **changes)
    assert accuracy(own) == value
    assert seconds(own) == (None if value is None else 5.0)
    assert seconds(replace(own, seconds_per_step=None)) is None


def step(name, seconds_=None, accuracy_=None):
    own = Rung(name, seconds_, accuracy_, 1.0, 50, 0.1, {})
    return BuiltRung(own, SimpleNamespace(train_examples=1000), None, 10, 50, 0.1)


def test_rows(make_result):
    before = trials(make_result, [0.08, 0.06, 0.04])
    after = {**trials(make_result, [0.07, 0.05, 0.02]), 1: trial(make_result, 1, 0.9, status="diverged", message="x")}
    first, second = make_rows([step("a", 70.0, 0.941), step("b")], [before, after], 0.94)
    assert first["accuracy"] == pytest.approx(0.94)
    assert first["accuracy_sd"] == pytest.approx(0.02)
    assert (first["n"], first["at_level"]) == (3, pytest.approx(2 / 3))  # at the level counts
    assert (first["seconds"], first["seconds_sd"]) == (5.0, 0.0)
    assert (first["source_seconds"], first["source_accuracy"], first["epochs"]) == (70.0, 0.941, 0.5)
    assert [first[key] for key in ("difference", "difference_low", "difference_high", "p")] == [None] * 4
    assert (second["n"], second["at_level"]) == (2, pytest.approx(1 / 3))  # of all seeds: it did not get there
    assert second["difference"] == pytest.approx(0.015)
    assert second["pairs"]["n"] == 2
    assert [trial_["status"] for trial_ in second["trials"]] == ["censored", "diverged", "censored"]
    json.dumps([first, second], allow_nan=False)
    errors = [[0.30, 0.32, 0.29, 0.33], [0.28, 0.31, 0.27, 0.31], [0.27, 0.31, 0.28, 0.30], [0.20, 0.21, 0.18, 0.22]]
    rows = make_rows([step(name) for name in "abcd"], [trials(make_result, own) for own in errors], 0.94)
    raw = [row["pairs"]["p_uncorrected"] for row in rows[1:]]
    low, middle, high = sorted(raw)  # p is corrected for the number of rungs
    corrected = {low: 3 * low, middle: max(3 * low, 2 * middle), high: max(3 * low, 2 * middle, high)}
    assert [row["p"] for row in rows[1:]] == pytest.approx([min(1.0, corrected[p]) for p in raw])


def test_rows_as_the_table_shows_them(make_result):
    rungs = [trials(make_result, own) for own in ([0.0595, 0.0625], [0.0495, 0.0425])]
    first, second = (shown(row) for row in make_rows([step("a", 70.0, 0.941), step("b")], rungs, 0.94))
    assert [key for key, value in first.items() if not isinstance(value, list | dict)] == [
        *("rung", "epochs", "steps", "n", "seconds_(SD)", "accuracy_(SD)", "at_level", "gain", "source")
    ]
    assert (first["accuracy_(SD)"], first["at_level"], first["seconds_(SD)"]) == ("93.90% (0.21%)", "50%", "5 (0)")
    assert (first["gain"], first["source"], second["source"]) == (None, "70 s, 94.1%", None)
    assert second["gain"] == "+1.50 (-4.85 to +7.85)"  # half a point on either side, times t of 12.71
    assert second["measured"]["difference"] == pytest.approx(0.015)
    lost = {0: trial(make_result, 0, None)}
    (third,) = (shown(row) for row in make_rows([step("c", None, 0.941)], [lost], 0.94))
    assert (third["accuracy_(SD)"], third["seconds_(SD)"], third["source"]) == (None, None, "94.1%")


def line(name, mean, change=None, p=None, at_level=0.0, lost=0):
    low, high = (None, None) if change is None else (change - 0.01, change + 0.01)
    row = {"rung": name, "accuracy": mean, "at_level": at_level, "difference": change, "p": p}
    trials_ = [{"accuracy": None}] * lost + [{"accuracy": mean}]
    return row | {"difference_low": low, "difference_high": high, "trials": trials_}


def counted(n, comparisons):
    points = "points of accuracy with 95% intervals, paired by seed"
    return f"({points}, n = {n} seeds, p corrected for {comparisons} comparisons)"


A, GAIN = line("a", 0.5), "b (+3.00, +2.00 to +4.00)"


@pytest.mark.parametrize(
    ("rows", "n", "left_out", "text"),
    [
        (
            [A, line("b", 0.53, 0.03, 0.001), line("c", 0.5, -0.03, 0.002), line("d", 0.5, 0.0, 1.0)],
            5,
            [],
            f"From a to d accuracy goes from 50.00% to 50.00%: {GAIN} helps beyond the noise; c (-3.00, -4.00 to -2.00)"
            f" hurts; 1 of 3 do not differ significantly from the rung before {counted(5, 3)}.",
        ),
        (
            [A, line("b", 0.53, 0.03, 0.04), line("c", 0.95, 0.42, 0.01, at_level=0.6, lost=1)],
            5,
            ["x", "y", "z"],
            f"From a to c accuracy goes from 50.00% to 95.00%, 60% of the seeds at 94.0% or over: {GAIN} and c (+42.00,"
            f" +41.00 to +43.00) help beyond the noise {counted(5, 2)}; 1 trial did not get to the end; left out on"
            " this device: x, y and z.",
        ),
        (
            [A, line("b", 0.53, 0.03, 0.2)],
            2,
            [],
            "From a to b accuracy goes from 50.00% to 53.00%: no rung helps beyond the noise; b stands out only"
            f" uncorrected {counted(2, 1)}.",
        ),
        (
            [A, line("b", 0.53)],
            1,
            [],
            "From a to b accuracy goes from 50.00% to 53.00% (n = 1 seed: too few for a test).",
        ),
    ],
)
def test_the_sentence_is_computed(rows, n, left_out, text):
    assert sentence(rows, 0.94, n, left_out) == text


def test_the_files_are_written(make_result, trained, checked):
    _, finding, _ = trained(make_result, errors=lambda spec: 0.1 + 0.001 * spec.number)
    sweep = checked()
    write(sweep, finding, ())
    result = json.loads(sweep.result.read_text(), parse_constant=pytest.fail)
    assert [row["rung"] for row in result["rows"]] == ["start", "smoothing", "momentum"]
    assert result["parameters"]["rungs"][0]["set"]["workload.module.average"] is None

    def diverging(workload, spec, protocol):
        return make_result(seed=spec.seed, status="diverged", history=((3, None),), seconds_per_step=None)

    finding, _ = run(checked(), trainer=diverging)
    assert finding.sentence == "No trial of any rung got to its end (n = 2 seeds)."
    assert finding.rows[0]["trials"][0]["accuracy"] is None
    write(checked(), finding, ())


# Bad input

NO_SUCH = {"workload.module.loss": {"_target_": "no.Such"}}
NO_EPOCHS = {key: value for key, value in rung("a", {}).items() if key != "epochs"}
REDUCED = "sweep.experiment.reduced.enabled=true"


@pytest.mark.parametrize(
    ("option", "settings", "message"),
    [
        ("sweep.experiment.seeds=[]", {}, "needs rungs, and seeds from 0, each once, but got 3 rungs and seeds []"),
        ("sweep.experiment.seeds=[2,2]", {}, "but got 3 rungs and seeds [2, 2]"),
        ("sweep.experiment.level=nan", {}, "sweep.experiment.level must lie between 0 and 1, but got nan"),
        ("sweep.experiment.metric=val/nope", {}, "metric is 'val/nope', but the module logs val/error"),
        ("sweep.experiment.reduced.steps=0", {}, "steps and a batch size from 1, but got steps=0 and batch_size=128"),
        ("device=tpu", {}, "device must be auto, cpu, cuda or cuda:N, but got 'tpu'"),
        ("precision=16-mixed", {}, "precision=16-mixed needs a CUDA device"),
        (REDUCED, {"lr": {"nope": 1.0}}, "names 'nope', which is no rung; rungs: 'start', 'smoothing', 'momentum'"),
        (REDUCED, {"reduced": {"nope": {}}}, "names 'nope', which is no rung"),
        (REDUCED, {"lr": {"start": 0.0}}, "sweep.experiment.reduced.lr must be positive, but got 0.0 for 'start'"),
        (REDUCED, {"reduced": {"start": {"seed.x": 1}}}, "the rung 'start': the config has no option seed.x"),
        ("seed=0", {"rungs": []}, "this sweep needs rungs"),
        (
            "seed=0",
            {"rungs": [rung("a", {}, lr=0.0)]},
            "a rung needs a batch size from 1, and a positive lr and epochs",
        ),
        ("seed=0", {"rungs": [rung("a", {})] * 2}, "every rung needs a name of its own, but 'a' stands twice"),
        ("seed=0", {"rungs": [rung("a", {}, batch_size=1201)]}, "1201 is larger than the training data (1200"),
        ("seed=0", {"rungs": [rung("a", NO_SUCH)]}, "the rung 'a': workload.module cannot be built"),
        ("seed=0", {"rungs": [LADDER[0], NO_EPOCHS]}, "no value is given for sweep.experiment.rungs[1].epochs"),
    ],
)
def test_bad_parameters_are_named(checked, option, settings, message):
    with pytest.raises(ConfigError) as caught:
        run(checked(option, **settings))
    assert message in str(caught.value)
