"""The sweep dawnbench: its rungs on top of one another, its trials, its rows and its sentence."""

import copy
import io
import json
import math
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml
from omegaconf import OmegaConf
from rich.console import Console
from toolbox import FakeTime, make_result, make_spec
from unit_logs import StoppedError, log_at, of_experiment, stopping_after, units_in, unkept

from bstune.core.errors import ConfigError, StudyError
from bstune.core.records import Target
from bstune.options import flatten
from bstune.recipe import TrialValues
from bstune.sweeps import dawnbench
from bstune.sweeps.dawnbench import (
    BuiltRung,
    Rung,
    build_rungs,
    data_note,
    make_rows,
    time_batches,
    with_rung_settings,
)
from bstune.sweeps.dawnbench_report import printed_row, sentence
from bstune.sweeps.harness import check_sweep, compose_sweep, write
from bstune.sweeps.unit_log import UnfinishedError
from bstune.trial.loop import run_trial
from bstune.trial.workload import load_data
from bstune.workloads.datasets import ImageDataset, Images

# Of a sweep: a change elsewhere seldom breaks it, and CI runs it.
pytestmark = pytest.mark.slow

DIGITS = {
    # digits' own schedule in the terms of a trial: % in place of $ until a trial is composed.
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
MOMENTUM = {"workload.module.optimizer.momentum": 0.9}
REDUCED = "sweep.experiment.reduced.enabled=true"


def rung(name, settings=(), **changes):
    values = {"seconds": None, "accuracy": None, "epochs": 1.0, "batch_size": 100, "lr": 0.4}
    return {"name": name, **values, **changes, "set": dict(settings)}


# Each rung sets one thing on top of those before it.
LADDER = [
    rung("start", DIGITS, seconds=70.0, accuracy=0.94),
    rung("smoothing", SMOOTH, epochs=2.0),
    rung("momentum", MOMENTUM, batch_size=50, lr=0.1),
]


@pytest.fixture(scope="module")
def composed():
    """Return the sweep's config on digits, without its rungs: composing it takes longer than most tests."""
    # Two seeds, so that pairs can be compared.
    options = ("workload=digits", "device=cpu", "sweep.experiment.seeds=[3,5]")
    config = compose_sweep("dawnbench", options)
    config.sweep.experiment.rungs = []
    return config


@pytest.fixture
def checked(composed, tmp_path, monkeypatch):
    """Return a function that checks the sweep on digits with rungs of its own."""
    monkeypatch.chdir(tmp_path)

    def check(*options, rungs=LADDER, lr=None, reduced=None, left_out=()):
        config = copy.deepcopy(composed)
        for option in options:
            key, _, value = option.partition("=")
            OmegaConf.update(config, key, yaml.safe_load(value))
        config.sweep.experiment.rungs = rungs
        config.sweep.experiment.reduced.lr = lr or {}
        config.sweep.experiment.reduced.set = reduced or {}
        config.sweep.experiment.reduced.left_out = list(left_out)
        return check_sweep("dawnbench", config)

    return check


def run(sweep, log=None, **arguments):
    """Return the finding and what was printed."""
    console = Console(record=True, width=200, file=io.StringIO())
    finding = sweep.find(console, log=log or unkept(), **arguments)
    return finding, console.export_text()


def climbed(sweep):
    """Return the rungs that were built, and which were left out."""
    never = Target("val/error", 0.0, "min").never_met
    return build_rungs(
        sweep.composed, sweep.parameters["rungs"], sweep.parameters["reduced"], never
    )


def untrained(sweep, **changes):
    """Run a sweep without training; return workload, spec and protocol of its trials, the finding and its lines."""
    seen = []

    def trainer(workload, spec, protocol):
        seen.append((workload, spec, protocol))
        return made_result(spec, protocol, **changes)

    return seen, *run(sweep, trainer=trainer)


def made_result(spec, protocol, **changes):
    """Return the result of a trial without training it; its error is its number's own."""
    steps = protocol.budget.steps
    values = {
        "status": "stopped",
        "steps": steps,
        # An error that depends on the number alone, so that rows are known beforehand.
        "history": ((steps, 0.1 + 0.001 * spec.number),),
        **changes,
    }
    return make_result(seed=spec.seed, batch_size=spec.batch_size, lr=spec.lr, **values)


def made(workload, spec, protocol):
    return made_result(spec, protocol)


# The trials


def test_a_ladder_that_is_stopped_goes_on(checked, tmp_path):
    path = tmp_path / "runs.jsonl"
    whole, _ = run(checked(), trainer=made)
    # Stopped after two units, then after three more; the last call does the sixth.
    for count in (2, 3):
        with pytest.raises(StoppedError):
            run(checked(), log_at(path), trainer=stopping_after(count, made))
    finding, _ = run(checked(), log_at(path), trainer=stopping_after(1, made))
    units = units_in(path)
    # A unit is one rung with one seed; the last one has the seconds of the first rung's batches.
    trials = [f"{rung['name']}/{seed}" for rung in LADDER for seed in (3, 5)]
    assert sorted(units) == sorted([*trials, "batches"])
    assert (finding.sentence, finding.rows) == (whole.sentence, whole.rows)
    # Nothing is measured again, the seconds in the note included.
    again, _ = run(checked(), log_at(path), trainer=None)
    assert (again.rows, again.notes) == (whole.rows, finding.notes)
    assert len(again.notes) == 1
    assert units_in(path) == units


def test_a_choice_of_rungs_trains_those_alone(checked, tmp_path):
    path = tmp_path / "runs.jsonl"
    # A whole rung, and one seed of another.
    with pytest.raises(UnfinishedError, match="3 of 7 units"):
        run(
            checked("sweep.experiment.only=[smoothing,start/5]"),
            log_at(path),
            trainer=stopping_after(3, made),
        )
    assert set(units_in(path)) == {"smoothing/3", "smoothing/5", "start/5"}
    with pytest.raises(ConfigError) as caught:
        run(checked("sweep.experiment.only=[muon]"), log_at(path), trainer=made)
    assert "only names muon, which is no unit" in str(caught.value)
    assert "momentum/5" in str(caught.value)


def test_a_ladder_goes_on_with_more_seeds_and_not_with_another_rate(checked, tmp_path):
    """The sweep's own log, with all of its options."""
    quiet = Console(quiet=True)
    sweep = checked("sweep.experiment.seeds=[3]")
    sweep.find(quiet, trainer=stopping_after(3, made))
    checked().find(quiet, trainer=stopping_after(3, made))
    # Whatever would change a trial is refused, and the file stays as it was.
    before = sweep.runs.read_text()
    # The same ladder but for one rate.
    other = [LADDER[0], {**LADDER[1], "lr": 0.5}, LADDER[2]]
    for changed, lines in (
        (checked(rungs=other), "sweep.experiment.rungs.1.lr: was 0.4, now 0.5"),
        (checked("protocol.warmup_steps=9"), "protocol.warmup_steps: was "),
        (checked("precision=bf16-mixed"), ", now 'bf16-mixed'"),
    ):
        with pytest.raises(StudyError) as caught:
            changed.find(quiet, trainer=made)
        assert lines in str(caught.value)
        assert sweep.runs.read_text() == before


# On a device that is not the CPU, moving batches is timed, too: meta stands for one.
@pytest.mark.parametrize(("device", "calls"), [("cpu", 1), ("meta", 3)])
def test_what_preparing_and_moving_batches_takes_of_a_step(checked, monkeypatch, device, calls):
    (first, *_), _ = climbed(checked())
    time = FakeTime()

    def batches():
        while True:
            # What preparing a batch takes.
            time.sleep(0.01)
            yield torch.ones(4, 1, 8, 8), torch.ones(4)

    drawn = batches()
    monkeypatch.setattr(dawnbench, "device_of", lambda trainer: torch.device(device))
    # Outside of the clock, but for one.
    monkeypatch.setattr(dawnbench, "synchronize", lambda place: time.sleep(0.1))
    first = replace(first, workload=replace(first.workload, train_batches=lambda spec: drawn))
    note = data_note(first, time_batches(first, time), 0.05)
    # 12 batches of 100 are an epoch of 1200 digits; 20 batches and a wait are timed: 0.3 s
    start = (
        "start: an epoch's 12 batches are drawn, augmented and normalised on the device in 180 ms, "
        "30% of its steps' "
    )
    assert note.startswith(start)
    assert note.count("ms") == calls
    assert note.endswith("(means of 20 batches)")


def test_each_rung_trains_once_a_seed_for_its_own_epochs(checked):
    seen, finding, _ = untrained(checked())
    asked = Counter(
        (spec.seed, spec.batch_size, spec.lr, protocol.budget.steps) for _, spec, protocol in seen
    )
    # 1200 digits are trained on: 12 steps of 100 an epoch, 24 of 50
    rungs = ((100, 0.4, 12), (100, 0.4, 24), (50, 0.1, 24))
    assert asked == Counter((seed, *rest) for seed in (3, 5) for rest in rungs)
    rows = [(row["rung"], row["epochs"], row["steps"]) for row in finding.rows]
    assert rows == [("start", 1.0, 12), ("smoothing", 2.0, 24), ("momentum", 1.0, 24)]
    # They count over all rungs.
    assert [spec.number for _, spec, _ in seen] == list(range(6))
    assert {protocol.trainer["num_sanity_val_steps"] for *_, protocol in seen} == {0}
    assert finding.n == 2


# Five rungs, whose order could agree by chance in 1 of 120 cases.
def test_the_order_is_shuffled_anew_for_each_seed(checked):
    rungs = [rung("first", DIGITS)]
    for place in range(1, 5):
        rungs.append(rung(f"rung {place}", lr=0.1 + place))

    def rates(order_seed):
        """Return the rates of the first seed's trials and of the second's, in order."""
        sweep = checked(f"sweep.experiment.order_seed={order_seed}", rungs=rungs)
        seen, _, _ = untrained(sweep)
        in_order = [spec.lr for _, spec, _ in seen]
        return in_order[:5], in_order[5:]

    first_seed, second_seed = rates(0)
    assert sorted(first_seed) == sorted(second_seed)
    orders = [first_seed, second_seed, sorted(first_seed), *rates(1)]
    # No two are equal, and none is in the order of the rungs.
    assert len(set(map(tuple, orders))) == len(orders)
    # The same number gives the same order again.
    assert rates(0) == (first_seed, second_seed)


def test_a_trial_is_evaluated_at_its_end_alone_and_its_schedule_ends_there(checked):
    finding, _ = run(checked("sweep.experiment.seeds=[3]"))
    for row, steps in zip(finding.rows, (12, 24, 24), strict=True):
        (trial,) = row["trials"]
        assert (trial["status"], row["steps"], row["n"]) == ("stopped", steps, 1)
        assert 0.05 < trial["accuracy"] <= 1.0
    rungs, left_out = climbed(checked())
    assert left_out == {}
    evaluations = []
    settings = []
    for built_rung in rungs:
        spec = make_spec(built_rung.batch_size, built_rung.lr, seed=3)
        result = run_trial(built_rung.workload, spec, built_rung.protocol)
        evaluations.append([step for step, _ in result.history])
        module = built_rung.workload.build_module(spec)
        configured = module.configure_optimizers()
        momentum = configured["optimizer"].defaults["momentum"]
        settings.append((module.loss.label_smoothing, module.average, momentum))
        factor = configured["lr_scheduler"]["scheduler"].lr_lambdas[0]
        # The last step has a rate of 0, and the one before it has none.
        assert factor(built_rung.steps - 1) == 0.0 < factor(built_rung.steps - 2)
    assert evaluations == [[12], [24], [24]]
    # Each rung stands on all rungs before.
    assert settings == [(0.0, None, 0.0), (0.2, None, 0.0), (0.2, None, 0.9)]


# The rungs


def test_rungs_of_the_same_data_share_them(checked, monkeypatch):
    loaded = []

    def load(options, recipe):
        loaded.append("augment" in options.workload.data)
        return load_data(options, recipe)

    monkeypatch.setattr("bstune.sweeps.dawnbench.load_data", load)
    mirror = {
        "_target_": "bstune.workloads.images.random_crop_flip",
        "_partial_": True,
        "padding": 1,
    }
    climbed(
        checked(
            rungs=[*LADDER, rung("augmentation", {"+workload.data.augment": mirror}), rung("last")]
        )
    )
    # Data are loaded once as they are, and once more for the rung that changes them.
    assert loaded == [False, True]


def test_settings_replace_what_stood_there(checked):
    composed = checked().composed
    before = composed.options.model_dump()
    settings = {
        **DIGITS,
        **SMOOTH,
        "+workload.module.optimizer.nesterov": True,
        "precision": "bf16-mixed",
    }
    own = with_rung_settings(composed, settings)
    assert composed.options.model_dump() == before
    # Merged with nothing.
    assert own.options.workload.module["schedule"] == {
        **DIGITS["workload.module.schedule"],
        "total_steps": "${trial.total_steps}",
    }
    assert own.options.workload.module["average"] is None
    assert own.options.workload.module["optimizer"] == {
        **before["workload"]["module"]["optimizer"],
        "nesterov": True,
    }
    assert own.options.precision == "bf16-mixed"
    momentum = with_rung_settings(own, {"workload.module.optimizer.momentum": 0.5})
    values = TrialValues(batch_size=64, lr=0.1, seed=0, total_steps=17)
    configured = momentum.trained_recipe.module(values).configure_optimizers()
    factor = configured["lr_scheduler"]["scheduler"].lr_lambdas[0]
    assert factor(16) == 0.0 < factor(15)


def test_a_rung_that_the_device_cannot_run_is_left_out_and_said(checked):
    # It has a setting that a CPU can have, too; the rung is left out as a whole.
    half = rung("half", {"precision": "16-mixed", **MOMENTUM}, lr=0.3)
    seen, finding, printed = untrained(checked(rungs=[*LADDER[:2], half, rung("last", lr=0.2)]))
    assert [row["rung"] for row in finding.rows] == ["start", "smoothing", "last"]
    reason = "half is left out, and the rungs after it go on without it: precision=16-mixed needs a CUDA device"
    assert reason in printed
    assert finding.sentence.endswith("; left out on this device: half.")
    by_lr = {spec.lr: (workload, spec) for workload, spec, _ in seen}
    workload, spec = by_lr[0.2]
    optimizer = workload.build_module(spec).configure_optimizers()["optimizer"]
    # The momentum of the rung that was left out is not there.
    assert optimizer.defaults["momentum"] == 0.0


def test_the_reduced_setting_takes_the_place_of_the_rungs_sizes(checked):
    options = (
        REDUCED,
        "sweep.experiment.reduced.steps=7",
        "sweep.experiment.reduced.batch_size=20",
    )
    smaller = {"smoothing": {"workload.module.model.hidden": [16]}}
    seen, finding, _ = untrained(checked(*options, lr={"momentum": 0.3}, reduced=smaller))
    measured = [row["measured"] for row in finding.rows]
    assert [(row["steps"], row["batch_size"], row["epochs"]) for row in measured] == [
        (7, 20, 7 * 20 / 1200)
    ] * 3
    found = set()
    for workload, spec, protocol in seen:
        # The first parameter's rows are the width of the hidden layer.
        width = len(next(workload.build_module(spec).model.parameters()))
        found.add((spec.batch_size, round(spec.lr, 9), protocol.budget.last_step(20), width))
    # 0.4 x 20/100 by the linear rule; the width is kept by the rung after it
    assert found == {(20, 0.08, 7, 128), (20, 0.08, 7, 16), (20, 0.3, 7, 16)}


def test_the_reduced_setting_leaves_rungs_out_whose_settings_stay(checked):
    seen, finding, printed = untrained(
        checked(REDUCED, "sweep.experiment.reduced.batch_size=100", left_out=["smoothing"])
    )
    assert [row["rung"] for row in finding.rows] == ["start", "momentum"]
    assert "left out" not in printed
    losses = {workload.build_module(spec).loss.label_smoothing for workload, spec, _ in seen}
    # The last rung stands on the one that is left out.
    assert losses == {0.0, 0.2}


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


@pytest.mark.soak
def test_every_rung_of_the_reduced_ladder_trains(shipped):
    small = of_experiment(
        "reduced.enabled=true", "reduced.steps=2", "reduced.batch_size=64", "seeds=[0]"
    )
    finding, printed = run(shipped(*small))
    # Two steps each, of one seed; two of the rungs need a GPU.
    assert [(row["steps"], row["n"]) for row in finding.rows] == [(2, 1)] * 20, printed
    assert finding.sentence.endswith(
        "; left out on this device: half-precision weights and compiled."
    )


def test_the_last_rungs_are_the_recipes_of_their_sources(shipped):
    """Whoever changes one of the two has to look at the other."""
    sweep = shipped()
    reached, by_rung = sweep.composed, {}
    rungs = {one.name: one for one in sweep.parameters["rungs"]}
    for name, one in rungs.items():
        reached = by_rung[name] = with_rung_settings(reached, one.set)

    def parts(composed):
        workload = composed.options.workload
        data = {key: value for key, value in workload.data.items() if key != "eval_batch_size"}
        return flatten({"data": data, "module": workload.module})

    def recipe_of(name):
        return check_sweep("dawnbench", compose_sweep("dawnbench", (f"workload={name}",))).composed

    for name, recipe in (("airbench94's network", "airbench_cifar"), ("Muon", "airbench_muon")):
        composed = recipe_of(recipe)
        assert parts(by_rung[name]) == parts(composed)
        reference = composed.options.workload.reference
        assert (reference.batch_size, reference.lr) == (rungs[name].batch_size, rungs[name].lr)
    # Page's has its scales frozen at 1 where the ladder has 1/4, which is 16 times the rate and a quarter of the rest.
    recipe = parts(recipe_of("resnet_cifar_fast"))
    found = parts(by_rung["flip at test time"])
    times = {}
    for name, value in found.items():
        if isinstance(value, float) and value != recipe[name]:
            times[name] = value / recipe[name]
    assert times == {
        "module.model.norm.scale": 0.25,
        "module.model.activation.alpha": 0.25,
        "module.model.logit_scale": 4.0,
        "module.groups.kinds.norm_bias.rate": 1 / 16,
    }
    # Page has 97 steps of 512 an epoch and leaves out the rest of its images; here an epoch has all of them.
    steps = {
        name: math.ceil(round(one.epochs * 50_000 / one.batch_size, 6))
        for name, one in rungs.items()
    }
    assert (steps["airbench94's network"], steps["Muon"]) == (476, 200)
    assert steps["start"] == math.ceil(24 * 50_000 / 512) <= 1.01 * 24 * 97
    times = [one.seconds for one in rungs.values() if one.seconds is not None]
    # As the source states them.
    assert times == [70, 67, 64, 59, 52, 46, 43, 39, 36, 34, 26, 3.83, 3.09, 2.59]


# Rows and statistics


def trial(seed, error, **changes):
    values = {
        "status": "stopped",
        "steps": 10,
        "history": ((10, error),),
        "seconds_per_step": 0.5,
        **changes,
    }
    return make_result(seed=seed, **values)


def trials(*errors):
    return {seed: trial(seed, error) for seed, error in enumerate(errors)}


def built(name, seconds_=None, accuracy_=None):
    workload = SimpleNamespace(train_examples=1000)
    # Ten steps of 50 examples of 1000: half an epoch.
    return BuiltRung(Rung(name, seconds_, accuracy_, 1.0, 50, 0.1, {}), workload, None, 10, 50, 0.1)


def test_rows():
    before = trials(0.08, 0.06, 0.04)
    # The second one's middle seed diverged.
    after = {**trials(0.07, 0.05, 0.02), 1: trial(1, 0.9, status="diverged", message="x")}
    # Accuracies are 1 - error.
    first, second = make_rows([built("a", 70.0, 0.941), built("b")], [before, after], 0.94)
    assert (first["accuracy"], first["accuracy_sd"]) == pytest.approx((0.94, 0.02))
    # A value at the level counts.
    assert (first["n"], first["at_level"]) == (3, pytest.approx(2 / 3))
    assert (first["seconds"], first["seconds_sd"]) == (5.0, 0.0)
    assert (first["source_seconds"], first["source_accuracy"], first["epochs"]) == (
        70.0,
        0.941,
        0.5,
    )
    # The first rung has none before it.
    for key in ("difference", "difference_low", "difference_high", "p"):
        assert first[key] is None
    # Of all seeds, the one that diverged included: it did not get there.
    assert (second["n"], second["at_level"]) == (2, pytest.approx(1 / 3))
    # Pairs are of seeds that both rungs got to the end with: 0.01 and 0.02.
    assert (second["pairs"]["n"], second["difference"]) == (2, pytest.approx(0.015))
    assert [one["status"] for one in second["trials"]] == ["stopped", "diverged", "stopped"]
    # Four seeds: small differences, and then a large one.
    errors = [
        [0.30, 0.32, 0.29, 0.33],
        [0.28, 0.31, 0.27, 0.31],
        [0.27, 0.31, 0.28, 0.30],
        [0.20, 0.21, 0.18, 0.22],
    ]
    trials_of_rungs = [trials(*of_rung) for of_rung in errors]
    rows = make_rows(list(map(built, "abcd")), trials_of_rungs, 0.94)
    raw = [row["pairs"]["p_uncorrected"] for row in rows[1:]]
    # p is corrected for the number of rungs.
    low, middle, high = sorted(raw)
    corrected = {
        low: 3 * low,
        middle: max(3 * low, 2 * middle),
        high: max(3 * low, 2 * middle, high),
    }
    for row, p in zip(rows[1:], raw, strict=True):
        assert row["p"] == pytest.approx(min(1.0, corrected[p]))


def test_rows_as_the_table_shows_them():
    # Without a value, without a history, and diverged.
    lost = [trial(0, None), trial(1, 0.1, history=()), trial(2, 0.1, status="diverged")]
    rungs = [trials(0.0595, 0.0625), trials(0.0495, 0.0425), dict(enumerate(lost))]
    rungs[1][0] = trial(0, 0.0495, seconds_per_step=None)
    steps = [built("a", 70.0, 0.941), built("b"), built("c", None, 0.941)]
    first, second, third = map(printed_row, make_rows(steps, rungs, 0.94))
    nested = ("measured", "trials")
    assert {key: value for key, value in first.items() if key not in nested} == {
        "rung": "a",
        "epochs": 0.5,
        "steps": 10,
        "n": 2,
        "seconds_(SD)": "5 (0)",
        "accuracy_(SD)": "93.90% (0.21%)",
        "at_level": "50%",
        "gain": None,
        "source": "70 s, 94.1%",
    }
    # half a point on either side, times t of 12.71
    assert (second["gain"], second["source"]) == ("+1.50 (-4.85 to +7.85)", None)
    assert second["measured"]["difference"] == pytest.approx(0.015)
    # The seconds of one of the two alone are known.
    assert (second["n"], second["seconds_(SD)"]) == (2, "5")
    assert (third["accuracy_(SD)"], third["seconds_(SD)"], third["source"], third["n"]) == (
        None,
        None,
        "94.1%",
        0,
    )


# An interval of a point on either side.
def line(name, mean, change=None, p=None, at_level=0.0, lost=0):
    low, high = (None, None) if change is None else (change - 0.01, change + 0.01)
    row = {"rung": name, "accuracy": mean, "at_level": at_level, "difference": change, "p": p}
    results = [{"accuracy": None}] * lost + [{"accuracy": mean}]
    return row | {"difference_low": low, "difference_high": high, "trials": results}


@pytest.mark.parametrize(
    ("rows", "n", "left_out", "text"),
    [
        (
            # Significant for the better, for the worse, and not at all.
            [line("b", 0.53, 0.03, 0.001), line("c", 0.5, -0.03, 0.002), line("d", 0.5, 0.0, 1.0)],
            5,
            [],
            "d accuracy goes from 50.00% to 50.00%: b (+3.00, +2.00 to +4.00) helps beyond the noise;"
            " c (-3.00, -4.00 to -2.00) hurts; 1 of 3 do not differ significantly from the rung before (points of"
            " accuracy with 95% intervals, paired by seed, n = 5 seeds, p corrected for 3 comparisons)",
        ),
        (
            [
                # One trial of c was lost.
                line("b", 0.53, 0.03, 0.04),
                line("c", 0.95, 0.42, 0.01, at_level=0.6, lost=1),
                line("d", 0.5, 0.03, 0.2),
            ],
            5,
            ["x", "y", "z"],
            "d accuracy goes from 50.00% to 50.00%: b (+3.00, +2.00 to +4.00) and c (+42.00, +41.00 to +43.00) help"
            " beyond the noise; d stands out only uncorrected (points of accuracy with 95% intervals, paired by seed,"
            " n = 5 seeds, p corrected for 3 comparisons); 1 trial did not get to the end;"
            " left out on this device: x, y and z",
        ),
        (
            # One seed has no scatter.
            [line("b", 0.95, at_level=0.6)],
            1,
            [],
            "b accuracy goes from 50.00% to 95.00%, 60% of the seeds at 94.0% or over (n = 1 seed: too few for a test)",
        ),
    ],
)
def test_the_sentence_is_computed(rows, n, left_out, text):
    assert sentence([line("a", 0.5), *rows], 0.94, n, left_out) == f"From a to {text}."


def test_the_files_are_written(checked):
    sweep = checked()
    _, finding, _ = untrained(sweep)
    sweep.output.mkdir(parents=True)
    write(sweep, finding, ())
    result = json.loads(sweep.result.read_text(), parse_constant=pytest.fail)
    assert [row["rung"] for row in result["rows"]] == ["start", "smoothing", "momentum"]
    assert result["parameters"]["rungs"][0]["set"]["workload.module.average"] is None
    # Trials that diverge have neither a value nor seconds.
    _, finding, _ = untrained(sweep, status="diverged", history=((3, None),), seconds_per_step=None)
    assert finding.sentence == "No trial of any rung got to its end (n = 2 seeds)."
    assert finding.rows[0]["trials"][0]["accuracy"] is None
    write(sweep, finding, ())


# Bad input

# The key is missing, which is different from null.
NO_EPOCHS = {key: value for key, value in rung("a").items() if key != "epochs"}


@pytest.mark.parametrize(
    ("option", "settings", "message"),
    [
        (
            "sweep.experiment.seeds=[]",
            {},
            "needs rungs, and seeds from 0, each once, but got 3 rungs and seeds []",
        ),
        ("sweep.experiment.seeds=[2,2]", {}, "but got 3 rungs and seeds [2, 2]"),
        (
            "sweep.experiment.level=nan",
            {},
            "sweep.experiment.level must lie between 0 and 1, but got nan",
        ),
        (
            "sweep.experiment.metric=val/nope",
            {},
            "metric is 'val/nope', but the module logs val/error",
        ),
        (
            "sweep.experiment.reduced.steps=0",
            {},
            "steps and a batch size from 1, but got steps=0 and batch_size=128",
        ),
        ("device=tpu", {}, "device must be auto, cpu, cuda or cuda:N, but got 'tpu'"),
        ("precision=16-mixed", {}, "precision=16-mixed needs a CUDA device"),
        (
            REDUCED,
            {"lr": {"nope": 1.0}},
            "names 'nope', which is no rung; rungs: 'start', 'smoothing', 'momentum'",
        ),
        (REDUCED, {"reduced": {"nope": {}}}, "names 'nope', which is no rung"),
        (REDUCED, {"left_out": ["nope"]}, "names 'nope', which is no rung"),
        (
            REDUCED,
            {"lr": {"start": 0.0}},
            "sweep.experiment.reduced.lr must be positive, but got 0.0 for 'start'",
        ),
        (
            REDUCED,
            {"reduced": {"start": {"seed.x": 1}}},
            "the rung 'start': the config has no option seed.x",
        ),
    ],
)
def test_bad_parameters_are_named(checked, option, settings, message):
    with pytest.raises(ConfigError) as caught:
        run(checked(option, **settings))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("rungs", "message"),
    [
        ([], "this sweep needs rungs"),
        ([rung("a", lr=0.0)], "a rung needs a batch size from 1, and a positive lr and epochs"),
        ([rung("a")] * 2, "every rung needs a name of its own, but 'a' stands twice"),
        # One more than the 1,200 training images.
        ([rung("a", batch_size=1201)], "1201 is larger than the training data (1200"),
        (
            [rung("a", {"workload.module.loss": {"_target_": "no.Such"}})],
            "the rung 'a': workload.module cannot be",
        ),
        # A rung of a list is named by its place.
        ([LADDER[0], NO_EPOCHS], "no value is given for sweep.experiment.rungs[1].epochs"),
        (
            [rung("a", {"precision": "16-mixed"})],
            "no rung is left: a is left out, and the rungs after it go on",
        ),
        (
            [rung("a", {"workload.module.nope": 1})],
            "no option workload.module.nope; an argument that is not there",
        ),
        # Its loss has no such argument: a + adds one.
        ([rung("a", {"workload.module.loss.weight": 0.1})], "by +workload.module.loss.weight"),
        ([rung("a", {"+nope.deeper": 1})], "the config has no option nope.deeper"),
        (
            [rung("a", {"workload.module.loss.a.b": 1})],
            "the config has no option workload.module.loss.a.b",
        ),
        ([rung("a", {"+protocol.nope": 1})], "unknown option protocol.nope"),
        ([rung("a", {"workload.precision": None})], "workload.precision"),
        ([rung("a", {"workload.module.lr": "%{trial.nope}"})], "trial.nope"),
        ([rung("a", {"workload.module.lr": "%{trial"})], "workload.module.lr"),
    ],
)
def test_bad_rungs_are_named(checked, rungs, message):
    with pytest.raises(ConfigError) as caught:
        run(checked(rungs=rungs))
    assert message in str(caught.value)
