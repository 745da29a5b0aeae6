"""The command line from end to end, in this process: bad input, and whole small studies on the embedded data."""

import json
import shlex
import sys
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

from bstune import conf
from bstune.core.records import TrialResult
from bstune.study.prepare import compose_checked

QUICK = ("+workload=digits", "search.trials=4", "search.batch_size.low=32", "search.batch_size.high=512")
# An easy target and a small budget: milliseconds a trial. Of sixteen of bstune's own short ones some reach it.
EASY = ("workload.target.value=1.0", "budget.steps=60", "budget.examples=6000")
# Decided by counts of examples, never by the clock.
SIXTEEN = (*QUICK, *EASY, "search.trials=16", "search.objective=steps")
REPLAYED = ("search.trials=2", "search.replicates=0", "mlflow.enabled=false", "search.objective=steps")
WORKLOADS = sorted(path.stem for path in (Path(conf.__file__).parent / "workload").glob("*.yaml"))

# A convolution with normalisation in groups in place of the digits' perceptron.
GHOSTS = (
    "+workload=digits",
    "~workload.module.model",
    "+workload.module.model={_target_: torch.nn.Sequential, _args_: ["
    "{_target_: torch.nn.Conv2d, in_channels: 1, out_channels: 4, kernel_size: 3}, "
    "{_target_: bstune.workloads.layers.BatchNorm, channels: 4, ghost_size: 32}, "
    "{_target_: torch.nn.Flatten}, {_target_: torch.nn.Linear, in_features: 144, out_features: 10}]}",
)
GHOST_ADVICE = "lower workload.module.model.norm.ghost_size, or raise the batch size (search.batch_size.low of a study"
WHITENING = (
    "{_target_: bstune.workloads.layers.Whitening, kernel_size: 2, eps: 0.01, images: 100, signed: true, "
    "bias: true, padding: 1}"
)
RESNET9_ON_DIGITS = (
    "+workload=digits",
    "~workload.module.model",
    "+workload.module.model={_target_: bstune.workloads.resnet9.ResNet9, classes: 10, width: 4, logit_scale: 1.0, "
    "activation: {_target_: torch.nn.ReLU, _partial_: true}, norm: {_target_: torch.nn.BatchNorm2d, _partial_: true}, "
    f"whitening: {WHITENING}, identity_init: true}}",
)


def entries(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), f"no workload was given\nworkloads: {', '.join(WORKLOADS)}"),
        (("+workload=nope",), f"there is no workload 'nope'\nworkloads: {', '.join(WORKLOADS)}"),
        (
            ("+workload=digits", "sampler=nope"),
            "Could not find 'sampler/nope'\nAvailable options in 'sampler':\nfrontier",
        ),
        (("+workload=digits", "scaling=cubic"), "'scaling':\nlinear\nnone\nsaturating\nsqrt\nsurge"),
        (("+workload=digits", "search.trials=abc"), "search.trials must be a valid integer, but got 'abc'"),
        (("+workload=digits", "search.trials=[1"), "no viable alternative at input '[1'"),
        (("+workload=digits", "nonsense"), "Error parsing override 'nonsense'"),
        (
            ("+workload=digits", "search.batch_size.high=5000"),
            "batch size 5000 is larger than the training data (1200 examples): set search.batch_size.high to at most",
        ),
        (
            ("+workload=digits", "trial.batch_size=5000", "trial.lr=0.1"),
            "batch size 5000 is larger than the training data (1200 examples): set trial.batch_size to at most 1200",
        ),
        (("+workload=digits", "workload.target.mode=max"), "the target val/loss >= 0.1 is met before training"),
        (("+workload=digits", "workload.target.metric=val/nope"), "but the module logs val/error, val/loss in"),
        (("+workload=digits", "precision=16-mixed", "device=cpu"), "precision=16-mixed needs a CUDA device"),
        (("+workload=digits", "precision=16-true", "device=cpu"), "precision=16-true needs a CUDA device, but this is"),
        (("+workload=replay", "workload.table=fashion_mlp", "compile=default"), "does not apply to recorded runs"),
        (("+workload=digits", "device=tpu"), "device must be auto, cpu, cuda or cuda:N, but got 'tpu'"),
        (("+workload=digits", "device=cuda:99"), "CUDA devices: use auto or cpu"),
        (("+workload=digits", "scaling=surge"), "the scaling rule surge needs a noise scale"),
        (("+workload=digits", "output=/dev/null/x"), "/dev/null is not a folder"),
        (("+workload=digits", "storage=sqlite:////nowhere/x.db"), "the folder /nowhere does not exist"),
        (("+workload=digits", "storage=nonsense"), "storage=nonsense is no database URL"),
        (("+workload=digits", "storage=oracle9://h/n"), "the storage does not answer: storage=oracle9://h/n"),
        (("+workload=digits", "workload.module._target_=no.Such"), "workload.module cannot be built: Error locating"),
        (("+workload=digits", "+workload.module.nope=3"), "unexpected keyword argument 'nope'"),
        (("+workload=digits", "workload.data.validation=5000"), "leave nothing to train on"),
        (("+workload=digits", "sampler._target_=no.Such"), "sampler cannot be built: Error locating target 'no.Such'"),
        (("+workload=digits", "+trainer.max_steps=7"), "trainer.max_steps is bstune's own"),
        (("+workload=digits", "+trainer.nope=3"), "trainer: Trainer.__init__() got an unexpected keyword argument"),
        ((*GHOSTS, "trial.batch_size=16", "trial.lr=0.1"), f"ghost size 32 is over the batch size 16: {GHOST_ADVICE}"),
        ((*GHOSTS, "search.batch_size.low=8"), f"ghost size 32 is over the batch size 8: {GHOST_ADVICE}"),
        (
            (*GHOSTS, "search.batch_size.low=8", "hardware.seconds=1"),
            f"ghost size 32 is over the batch size 8: {GHOST_ADVICE}",
        ),
        (
            (*GHOSTS, "search.batch_size.low=32", "protocol.micro_batch_size=16"),
            "ghost size 32 is over the micro-batch size 16: lower workload.module.model.norm.ghost_size, or raise",
        ),
        (
            ("+workload=digits", "+workload.module.channels_last=true"),
            "channels_last is for convolutions, but the model, Sequential, has none: set workload.module.channels_last",
        ),
        (("+workload=digits", f"+workload.module.model.whitening={WHITENING}"), "unexpected keyword argument 'whiten"),
        ((*RESNET9_ON_DIGITS, "+workload.module.model.pool=first"), "the network's pool must be one of after_activati"),
        (
            (*RESNET9_ON_DIGITS, "+workload.module.model.pool=before_norm"),
            "whitening needs images of 3 channel(s) and at least 2 pixels a side, but got the shape (100, 1, 8, 8)",
        ),
        (
            (
                *RESNET9_ON_DIGITS,
                "+workload.module.model.pool=before_norm",
                "workload.module.model.whitening.images=5000",
                "+workload.module.model.whitening.channels=1",
            ),
            "whitening takes its statistics from 5000 images, but there are 1200: lower whitening.images",
        ),
        (("+workload=digits", "mlflow.uri=foo://x"), "such as sqlite:///mlflow.db, but got 'foo://x'"),
        (("+workload=digits", "search.nope=3"), "unknown option search.nope"),
        (("workload=digits", "search.trials=0"), "search.trials must be at least 1, but got 0"),
        (
            ("+workload=digits", "search.finalists=3"),
            "unknown option search.finalists: it is called search.candidates now",
        ),
        (
            ("+workload=digits", "seed=-1", "nope=1"),
            "unknown option nope; --help lists the options\nseed must be at least 0",
        ),
        (("+workload=digits", "trial.batch_size=64"), "give both trial.batch_size and trial.lr, but got batch_size=64"),
        (("+workload=digits", "--config-dir", "nowhere"), "--config-dir nowhere is not a folder"),
        (("--cfg", "job", "+workload=nope"), f"there is no workload 'nope'\nworkloads: {', '.join(WORKLOADS)}"),
        (("--cfg", "job"), "no workload was given"),
        (("survey",), "no workload was given"),
        (("survey", "workload=replay", "workload.table=fashion_mlp"), "there is no hardware to survey"),
        (("fit", "nowhere.csv"), "cannot read nowhere.csv"),
        (("record", "t.jsonl", "workload=digits"), "a grid needs --batch-sizes and --lrs"),
        (("sweep", "nope"), "there is no sweep 'nope'"),
    ],
)
def test_bad_input_ends_in_plain_lines_and_writes_nothing(bstune, tmp_path, arguments, message):
    status, out, err = bstune(*arguments)
    assert status == 2
    assert err.startswith("error: ")
    assert message in err
    assert "Traceback" not in out + err
    assert entries(tmp_path) == []


def test_missing_data_are_named(bstune, tmp_path, monkeypatch):
    import pooch

    def refuse(*_: object, **__: object) -> None:
        raise OSError("no network")

    monkeypatch.setattr(pooch.HTTPDownloader, "__call__", refuse)
    status, _, err = bstune("+workload=fashion_cnn", f"data.root={tmp_path / 'data'}")
    assert status == 2
    assert "train-images-idx3-ubyte" in err
    assert "BSTUNE_DATA" in err
    assert entries(tmp_path) == []


def test_a_debug_flag_shows_the_traceback(bstune):
    from bstune.core.errors import ConfigError

    with pytest.raises(ConfigError, match=r"search\.trials"):
        bstune("+workload=digits", "search.trials=abc", "debug=true")


def test_a_study_from_end_to_end(bstune, tmp_path):
    status, out, err = bstune(*SIXTEEN, "mlflow.enabled=false", "study=small", "seed=5")
    assert (status, err) == (0, "")
    assert "study small: val/loss <= 1, objective steps" in out
    assert "16 trials; each ends at the target or once it cannot matter, and may be continued; winners run again" in out
    assert "\x1b[" not in out, "no terminal, no escape sequences"
    folder = tmp_path / "outputs" / "small"
    assert entries(tmp_path) == ["bstune.db", "outputs"]
    assert {"trials.jsonl", "curve.json", "curve.png", "config.yaml", "best.yaml"} <= set(entries(folder))

    trials = [TrialResult.from_json(line) for line in (folder / "trials.jsonl").read_text().splitlines()]
    assert [trial.number for trial in trials] == list(range(len(trials)))
    searched = [trial for trial in trials if trial.replicate_of is None]
    assert [trial.trial_index for trial in searched] == list(range(16))
    curve = json.loads((folder / "curve.json").read_text())
    best = yaml.safe_load((folder / "best.yaml").read_text())
    for name, key in (("best_by_time", "time_to_target"), ("best_by_steps", "steps")):
        winner = searched[curve[name]["number"]]
        assert curve[name][key] == pytest.approx(getattr(winner, key))
        assert best[name]["number"] == winner.number
        assert Path(best[name]["checkpoint"]).exists()
    assert sum(trial.replicate_of == best["best_by_steps"]["number"] for trial in trials) >= 3
    kept = {int(path.stem.removeprefix("trial-")) for path in (folder / "checkpoints").iterdir()}
    assert {best[name]["number"] for name in best} <= kept
    assert all(trials[number].reached for number in kept)
    assert 0.0 < curve["test"]["best_by_time"]["test/error"] < 0.5
    assert OmegaConf.load(folder / "config.yaml").seed == 5

    # The command in best.yaml trains the winner again: the same values, bit for bit, but for those at earlier limits.
    status, _, _ = bstune(*shlex.split(best["best_by_steps"]["command"])[3:])
    assert status == 0
    (record,) = folder.glob("trial-B*/trial.json")
    again = TrialResult.from_json(record.read_text())
    winner = trials[best["best_by_steps"]["number"]]
    assert (again.history[-1], again.steps, again.seed) == (winner.history[-1], winner.steps, winner.seed)
    assert set(again.history) <= set(winner.history)


def test_a_study_with_one_of_optunas_samplers(bstune, tmp_path):
    status, out, err = bstune(*QUICK, *EASY, "sampler=tpe", "mlflow.enabled=false", "search.replicates=0")
    assert (status, err) == (0, "")
    assert "4 trials, 50% of them spread evenly over log B; each ends at the target or after 60 steps" in out
    assert len((tmp_path / "outputs" / "digits" / "trials.jsonl").read_text().splitlines()) == 4
    best = yaml.safe_load((tmp_path / "outputs" / "digits" / "best.yaml").read_text())
    checkpoints = {Path(best[name]["checkpoint"]).name for name in ("best_by_time", "best_by_steps")}
    assert checkpoints <= set(entries(tmp_path / "outputs" / "digits" / "checkpoints"))


@pytest.mark.slow
def test_the_same_command_continues_and_changed_settings_are_refused(bstune, tmp_path):
    arguments = (*QUICK, *EASY, "mlflow.enabled=false", "search.objective=steps", "search.replicates=0")
    trials = tmp_path / "outputs" / "digits" / "trials.jsonl"
    assert bstune(*arguments, "search.trials=2")[0] == 0
    first = trials.read_text()
    status, out, _ = bstune(*arguments)
    assert status == 0
    assert "continues after 2 trials" in out
    assert trials.read_text().startswith(first)
    assert len(trials.read_text().splitlines()) == 4

    status, _, err = bstune(*arguments, f"output={tmp_path / 'elsewhere'}")
    assert status == 2
    assert "continue it with output=" in err

    before = {path: path.read_bytes() for path in trials.parent.rglob("*") if path.is_file()}
    for change, line in (
        ("seed=1", "seed: was 0, now 1"),
        ("workload.target.value=0.5", "workload.target.value: was 1.0, now 0.5"),
        ("search.objective=time", "search.objective: was 'steps', now 'time'"),
        ("search.batch_size.high=256", "search.batch_size.high: was 512, now 256"),
        ("scaling=linear", "scaling.rule._target_: was 'bstune.core.scaling.sqrt', now 'bstune.core.scaling.linear'"),
        ("precision=bf16-mixed", "precision: was '32-true', now 'bf16-mixed'"),
        ("compile=default", "compile: was None, now 'default'"),
        ("workload.module.model.hidden=[64]", "workload.module.model.hidden: was [128], now [64]"),
    ):
        status, _, err = bstune(*arguments, change)
        assert status == 2
        assert line in err
    assert before == {path: path.read_bytes() for path in trials.parent.rglob("*") if path.is_file()}


@pytest.mark.slow
def test_two_runs_with_one_seed_give_the_same_history(bstune, tmp_path):
    histories = []
    for study in ("one", "two"):
        assert bstune(*QUICK, *EASY, "mlflow.enabled=false", "search.objective=steps", f"study={study}")[0] == 0
        lines = (tmp_path / "outputs" / study / "trials.jsonl").read_text().splitlines()
        trials = [TrialResult.from_json(line) for line in lines]
        histories.append([(t.batch_size, t.lr, t.seed, t.status, t.steps, t.history) for t in trials])
    assert histories[0] == histories[1]


def test_a_study_in_which_nothing_reaches_the_target_says_so(bstune):
    status, out, _ = bstune(
        *QUICK, "workload.target.value=0", "budget.steps=10", "budget.examples=1", "mlflow.enabled=false"
    )
    assert status == 0
    text = " ".join(out.split())
    assert "val/loss <= 0 was never reached in 4 trials; the closest value seen was" in text
    assert "try a larger budget (budget.steps, budget.examples), an easier target (workload.target.value) or" in text


@pytest.mark.slow
def test_both_objectives(bstune, tmp_path):
    assert bstune(*QUICK, *EASY, "mlflow.enabled=false", "search.objective=both")[0] == 0
    assert (tmp_path / "outputs" / "digits" / "curve.json").exists()


def test_seconds_end_a_study_between_trials(bstune, tmp_path):
    status, out, _ = bstune(*QUICK, *EASY, "mlflow.enabled=false", "search.seconds=0.000001", "search.replicates=0")
    assert status == 0
    assert "stopped: search.seconds=1e-06 of training are spent" in out
    assert len((tmp_path / "outputs" / "digits" / "trials.jsonl").read_text().splitlines()) == 1


def test_an_interruption_keeps_what_is_finished(bstune, tmp_path, monkeypatch):
    from bstune.trial import workload

    train, calls = workload.run_trial, []

    def interrupt_the_third(*arguments, **keywords):
        calls.append(len(arguments) > 3 and arguments[3])
        if len(list(filter(None, calls))) == 3:  # the probe's leave nothing
            raise SystemExit(1)  # what Lightning makes of Ctrl-C
        return train(*arguments, **keywords)

    monkeypatch.setattr(workload, "run_trial", interrupt_the_third)
    arguments = (*QUICK, *EASY, "mlflow.enabled=false", "search.replicates=0")
    status, _, err = bstune(*arguments)
    assert status == 130
    assert "the same command continues the study" in err
    trials = tmp_path / "outputs" / "digits" / "trials.jsonl"
    statuses = [json.loads(line)["status"] for line in trials.read_text().splitlines()]
    assert [status == "failed" for status in statuses] == [False, False, True]
    monkeypatch.setattr(workload, "run_trial", train)
    assert bstune(*arguments)[0] == 0
    finished = [json.loads(line) for line in trials.read_text().splitlines()]
    assert sorted(trial["trial_index"] for trial in finished if trial["status"] != "failed") == [0, 1, 2, 3]


def test_mlflow_holds_the_study(bstune, tmp_path):
    from mlflow import MlflowClient

    assert bstune(*SIXTEEN)[0] == 0
    client = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    experiment = client.get_experiment_by_name("bstune")
    runs = client.search_runs([experiment.experiment_id])
    lines = (tmp_path / "outputs" / "digits" / "trials.jsonl").read_text().splitlines()
    trials = {trial["number"]: trial for trial in map(json.loads, lines)}
    assert len(runs) == len(trials) + 1
    parent = next(run for run in runs if "mlflow.parentRunId" not in run.data.tags)
    steps = client.get_metric_history(parent.info.run_id, "curve/steps_to_target")
    assert {metric.step for metric in steps} <= {trial["batch_size"] for trial in trials.values()}
    assert steps
    assert parent.data.metrics["best_by_time/batch_size"] > 0
    for run in runs:
        trial = trials.get(int(run.data.tags.get("bstune.trial", -1)))
        for name in ("resumed_from", "replicate_of") if trial else ():
            assert run.data.params.get(name) == (None if trial[name] is None else str(trial[name]))
    assert {trial["replicate_of"] for trial in trials.values()} > {None}


def test_mlflow_being_down_does_not_stop_a_study(bstune, tmp_path, caplog):
    status, _, _ = bstune(*QUICK, *EASY, "mlflow.uri=http://127.0.0.1:9")
    assert status == 0
    warnings = [record.getMessage() for record in caplog.records if record.name == "bstune.study.tracking"]
    assert len(warnings) == 1
    assert "The next run of the same command sends what is missing" in warnings[0]


@pytest.mark.parametrize("verb", [(), ("survey",), ("fit",), ("record",), ("sweep",)])
def test_every_verb_explains_itself(bstune, verb):
    status, out, err = bstune(*verb, "--help")
    assert (status or 0, err) == (0, "")
    assert "workload=NAME" in out or "usage: " in out or "run one with" in out


def test_hydras_own_options(bstune, tmp_path):
    status, out, _ = bstune("--cfg", "job", "+workload=digits", "seed=3")
    assert status == 0
    assert OmegaConf.create(out).seed == 3
    status, out, err = bstune(
        "--multirun", "+workload=replay", "workload.table=cifar_mlp", *REPLAYED, "seed=0,1", "study=s${seed}"
    )
    assert (status, err) == (0, "")
    assert entries(tmp_path / "outputs") == ["s0", "s1"]
    status, _, err = bstune("--multirun", "workload=digits", "seed=-1,-2")
    assert status == 2
    assert "error: seed must be at least 0, but got -1" in err


def test_fit_prints_the_curve_of_a_file(bstune, tmp_path):
    points = [f"{size},{100 * (1 + 64 / size):.0f}" for size in (8, 16, 32, 64, 128, 256, 512)]
    (tmp_path / "points.csv").write_text("\n".join(["batch_size,steps", *points]))
    status, out, err = bstune("fit", "points.csv")
    assert (status, err) == (0, "")
    assert json.loads(out)["b_crit"] == pytest.approx(64, rel=0.1)


PROJECT = """
import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch.utils.data import DataLoader, TensorDataset


class Data(LightningDataModule):
    def setup(self, stage):
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(500, 4, generator=generator)
        y = (x.sum(dim=1) > 0).long()
        self.train, self.val = TensorDataset(x[:400], y[:400]), TensorDataset(x[400:], y[400:])

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=7, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.val, batch_size=50)

    def on_after_batch_transfer(self, batch, dataloader_idx):
        x, y = batch
        return torch.cat([x, torch.ones(len(x), 1)], dim=1), y  # the module needs the fifth column


class Module(LightningModule):
    def __init__(self, learning_rate):
        super().__init__()
        self.layer = torch.nn.Linear(5, 2)
        self.learning_rate = learning_rate

    def training_step(self, batch, batch_idx):
        x, y = batch
        return torch.nn.functional.cross_entropy(self.layer(x), y)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_accuracy", (self.layer(x).argmax(dim=1) == y).float().mean(), batch_size=len(y))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.learning_rate)
"""

MINE = """
name: mine
precision: 32-true
trials: 3
reference: {batch_size: 32, lr: 0.05}
batch_size: {low: 8, high: 128}
budget: {steps: 200, examples: 4000}
target: {metric: val_accuracy, value: 0.95, mode: max}
data: {_target_: my_project.Data}
module: {_target_: my_project.Module, learning_rate: "${trial.lr}"}
"""


@pytest.mark.slow
def test_a_users_own_project(bstune, tmp_path, monkeypatch):
    """Any module and data module that can be imported, named in one YAML file; the data module's hooks are called."""
    (tmp_path / "my_project.py").write_text(PROJECT)
    workloads = tmp_path / "conf" / "workload"
    workloads.mkdir(parents=True)
    (workloads / "mine.yaml").write_text(MINE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_project", raising=False)
    own = ("--config-dir", "conf", "mlflow.enabled=false")
    status, out, err = bstune(*own, "+workload=mine", "search.trials=12", "search.objective=steps")
    assert (status, err) == (0, "")
    assert "study mine: val_accuracy >= 0.95" in out
    folder = tmp_path / "outputs" / "mine"
    winner = yaml.safe_load((folder / "best.yaml").read_text())["best_by_steps"]
    status, _, err = bstune(*shlex.split(winner["command"])[3:])
    assert (status, err) == (0, "")
    (record,) = folder.glob("trial-B*/trial.json")
    assert json.loads(record.read_text())["steps"] == winner["steps"]
    status, _, err = bstune(*own, "+workload=other")
    assert status == 2
    assert f"workloads: {', '.join(sorted([*WORKLOADS, 'mine']))}" in err


OTHERS = """
name: others
precision: 32-true
trials: 3
reference: {batch_size: 32, lr: 0.05}
batch_size: {low: 8, high: 128}
budget: {steps: 20, examples: 400}
target: {metric: val/error, value: 0.05, mode: min}
data: {_target_: my_project.Data}
module:
  _target_: bstune.workloads.classifier.Classifier
  lr: ${trial.lr}
  loss: {_target_: torch.nn.CrossEntropyLoss}
  optimizer: {_target_: torch.optim.SGD, _partial_: true}
  model: {_target_: bstune.workloads.models.mlp, inputs: 5, hidden: [], classes: 2}
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            (
                "workload.module.model={_target_: bstune.workloads.models.mlp}",
                "+workload.module.test_time={_target_: bstune.workloads.layers.mirrored, _partial_: true}",
            ),
            "workload.module.test_time mirrors images (N, C, H, W), but got the shape (50, 5): set workload.module.te",
        ),
        (
            ("~workload.module.model", f"+workload.module.model={WHITENING}"),
            "but workload.data is Data, which has no first_images(count): set workload.module.model.whitening=null, or",
        ),
    ],
)
@pytest.mark.parametrize("of_one", [(), ("trial.batch_size=16", "trial.lr=0.1")])
def test_switches_that_do_not_apply_to_a_projects_own_data(bstune, tmp_path, monkeypatch, arguments, message, of_one):
    (tmp_path / "my_project.py").write_text(PROJECT)
    workloads = tmp_path / "conf" / "workload"
    workloads.mkdir(parents=True)
    (workloads / "others.yaml").write_text(OTHERS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_project", raising=False)
    before = entries(tmp_path)
    status, out, err = bstune("--config-dir", "conf", "+workload=others", "mlflow.enabled=false", *arguments, *of_one)
    assert status == 2
    assert message in err
    assert "Traceback" not in out + err
    assert [name for name in entries(tmp_path) if name != "__pycache__"] == before
    if not of_one:  # it is the switch that was refused
        assert bstune("--config-dir", "conf", "+workload=others", "mlflow.enabled=false")[0] == 0


def test_a_single_trial_may_have_a_ghost_size_over_the_smallest_of_the_range(bstune):
    own = ("trial.batch_size=64", "trial.lr=0.01", "budget.steps=3", "budget.examples=1", "mlflow.enabled=false")
    status, _, err = bstune(*GHOSTS, "search.batch_size.low=8", *own)
    assert (status, err) == (0, "")


@pytest.mark.slow
def test_passwords_stay_out_of_what_is_written(bstune, tmp_path):
    assert bstune(*QUICK, *EASY, "mlflow.uri=http://me:s3cret@127.0.0.1:9")[0] == 0
    for path in (tmp_path / "outputs").rglob("*"):
        assert path.is_dir() or b"s3cret" not in path.read_bytes(), path
    status, _, err = bstune(*QUICK, "storage=oracle9://me:s3cret@host/name")
    assert status == 2
    assert "s3cret" not in err
    assert "oracle9://me:***@host/name" in err


@pytest.mark.parametrize(
    ("workload", "refused"),
    [("digits", False), ("resnet_cifar", True)],
)
def test_a_budget_may_grow_unless_the_schedule_ends_with_it(workload, refused):
    from bstune.study.prepare import frozen_settings
    from bstune.trial.workload import has_horizon

    prints = []
    for examples in (1000, 2000):
        config = compose_checked([f"+workload={workload}", f"budget.examples={examples}", "device=cpu"])
        config.precision = "32-true"
        prints.append(frozen_settings(config))
    assert prints[0] == prints[1]  # the backend adds the budget where the schedule ends with it
    assert has_horizon(config) is refused
