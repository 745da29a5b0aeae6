"""The command line from end to end, in this process: bad input, and whole small studies on the embedded data."""

import json
import shlex
import sys
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

from bstune.command import compose_checked, main
from bstune.records import TrialResult

QUICK = ("+workload=digits", "search.trials=4", "search.batch_size.low=32", "search.batch_size.high=512")
# An easy target and a small budget: milliseconds a trial.
EASY = ("workload.target.value=0.2", "budget.steps=60", "budget.examples=6000")


@pytest.fixture
def bstune(tmp_path, monkeypatch, capfd):
    """Run the command in an empty folder; return its exit status and what it printed."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str):
        monkeypatch.setattr(sys, "argv", ["bstune", *arguments])
        try:
            status = main()
        except SystemExit as exit_:
            status = exit_.code
        printed = capfd.readouterr()
        return status, printed.out, printed.err

    return run


def entries(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "no workload was given\nworkloads: digits, fashion_cnn, resnet_cifar"),
        (("+workload=",), "there is no workload ''\nworkloads: digits, fashion_cnn, resnet_cifar"),
        (("+workload=nope",), "there is no workload 'nope'\nworkloads: digits, fashion_cnn, resnet_cifar"),
        (("workload=digits",), "write +workload=digits, with a plus"),
        (("+workload=digits", "sampler=nope"), "Could not find 'sampler/nope'\nAvailable options in 'sampler':\ngp"),
        (("+workload=digits", "scaling=cubic"), "'scaling':\nlinear\nnone\nsaturating\nsqrt\nsurge"),
        (("+workload=digits", "search.nope=3"), "unknown option search.nope"),
        (("+workload=digits", "+nope=3"), "unknown option nope"),
        (("+workload=digits", "+search.nope=3"), "unknown option search.nope"),
        (("+workload=digits", "search.trials=abc"), "search.trials: Value 'abc' of type 'str' could not be converted"),
        (("+workload=digits", "search.trials=0"), "search.trials must be at least 1, but got 0"),
        (("+workload=digits", "search.trials=[1"), "no viable alternative at input '[1'"),
        (("+workload=digits", "nonsense"), "Error parsing override 'nonsense'"),
        (("+workload=digits", "search.objective=speed"), "search.objective must be one of time, steps, both"),
        (("+workload=digits", "budget.steps=0"), "budget.steps and budget.examples must be at least 1, but got 0"),
        (
            ("+workload=digits", "search.batch_size.high=5000"),
            "batch size 5000 is larger than the training data (1200 examples): set search.batch_size.high to at most",
        ),
        (
            ("+workload=digits", "trial.batch_size=5000", "trial.lr=0.1"),
            "batch size 5000 is larger than the training data (1200 examples): set trial.batch_size to at most 1200",
        ),
        (("+workload=digits", "trial.batch_size=64"), "give both trial.batch_size (at least 1) and trial.lr"),
        (("+workload=digits", "protocol.micro_batch_size=0"), "micro-batch size must be a positive integer, but got 0"),
        (("+workload=digits", "protocol.evaluation_share=2"), "an evaluation rule needs ratio > 1"),
        (("+workload=digits", "workload.target.mode=max"), "the target val/error >= 0.03 is met before training"),
        (("+workload=digits", "workload.target.mode=down"), "target.mode must be min or max, but got 'down'"),
        (("+workload=digits", "workload.target.value=-0.1"), "the target val/error <= -0.1 cannot be reached"),
        (("+workload=digits", "workload.target.value=1"), "the target val/error <= 1 is met by every value in"),
        (("+workload=digits", "workload.target.value=nan"), "target.value must be a finite number, but got nan"),
        (("+workload=digits", "workload.target.metric=val/nope"), "but the module logs val/error, val/loss in"),
        (("+workload=digits", "precision=16-mixed", "device=cpu"), "precision=16-mixed needs a CUDA device"),
        (("+workload=digits", "precision=8"), "precision must be one of auto, 32-true, bf16-mixed, 16-mixed, but got"),
        (("+workload=digits", "device=tpu"), "device must be auto, cpu, cuda or cuda:N, but got 'tpu'"),
        (("+workload=digits", "device=cuda:99"), "CUDA devices: use auto or cpu"),
        (("+workload=digits", "scaling=surge"), "the scaling rule surge needs a noise scale"),
        (("+workload=digits", "scaling.lr=-1"), "a scaling rule needs a positive scaling.lr, but got -1"),
        (("+workload=digits", "scaling.sigma=0"), "scaling.sigma must be a positive number of octaves, but got 0"),
        (("+workload=digits", "output=/dev/null/x"), "/dev/null is not a folder"),
        (("+workload=digits", "storage=sqlite:////nowhere/x.db"), "the folder /nowhere does not exist"),
        (("+workload=digits", "storage=nonsense"), "storage=nonsense is no database URL"),
        (("+workload=digits", "storage=oracle9://h/n"), "the storage does not answer: storage=oracle9://h/n"),
        (("+workload=digits", "workload.module._target_=no.Such"), "workload.module cannot be built: Error locating"),
        (("+workload=digits", "+workload.module.nope=3"), "unexpected keyword argument 'nope'"),
        (("+workload=digits", "workload.data.validation=5000"), "leave nothing to train on"),
        (("+workload=digits", "sampler._target_=no.Such"), "sampler cannot be built: Error locating target 'no.Such'"),
        (("+workload=digits", "+trainer.nope=3"), "trainer: Trainer.__init__() got an unexpected keyword argument"),
        (("+workload=digits", "mlflow.uri=foo://x"), "such as sqlite:///mlflow.db, but got 'foo://x'"),
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
    from bstune.errors import ConfigError

    with pytest.raises(ConfigError, match=r"search\.trials"):
        bstune("+workload=digits", "search.trials=abc", "debug=true")


def test_a_study_from_end_to_end(bstune, tmp_path):
    status, out, err = bstune(*QUICK, *EASY, "mlflow.enabled=false", "study=small", "seed=5")
    assert (status, err) == (0, "")
    assert "study small: val/error <= 0.2, objective time" in out
    assert "4 trials, 50% of them spread evenly over log B" in out
    assert "\x1b[" not in out, "no terminal, no escape sequences"
    folder = tmp_path / "outputs" / "small"
    assert entries(tmp_path) == ["bstune.db", "outputs"]
    assert {"trials.jsonl", "curve.json", "curve.png", "config.yaml", "best.yaml"} <= set(entries(folder))

    trials = [TrialResult.from_json(line) for line in (folder / "trials.jsonl").read_text().splitlines()]
    assert [trial.number for trial in trials] == [0, 1, 2, 3]
    curve = json.loads((folder / "curve.json").read_text())
    best = yaml.safe_load((folder / "best.yaml").read_text())
    for name, key in (("best_by_time", "time_to_target"), ("best_by_steps", "steps")):
        values = [getattr(trial, key) for trial in trials if trial.reached]
        assert curve[name][key] == pytest.approx(min(values))
        assert best[name]["number"] == curve[name]["number"]
        assert Path(best[name]["checkpoint"]).exists()
    assert set(entries(folder / "checkpoints")) == {Path(best[name]["checkpoint"]).name for name in best}
    assert 0.0 < curve["test"]["best_by_time"]["test/error"] < 0.3
    assert OmegaConf.load(folder / "config.yaml").seed == 5

    # The command in best.yaml trains the winner again: the same history, bit for bit.
    status, _, _ = bstune(*shlex.split(best["best_by_steps"]["command"])[3:])
    assert status == 0
    (record,) = folder.glob("trial-B*/trial.json")
    again = TrialResult.from_json(record.read_text())
    winner = trials[best["best_by_steps"]["number"]]
    assert (again.history, again.steps, again.seed) == (winner.history, winner.steps, winner.seed)


def test_the_same_command_continues_and_changed_settings_are_refused(bstune, tmp_path):
    arguments = (*QUICK, *EASY, "mlflow.enabled=false", "search.objective=steps")
    trials = tmp_path / "outputs" / "digits" / "trials.jsonl"
    assert bstune(*arguments, "search.trials=2")[0] == 0
    first = trials.read_text()
    status, out, _ = bstune(*arguments)
    assert status == 0
    assert "continues after 2 trials" in out
    assert trials.read_text().startswith(first)
    assert len(trials.read_text().splitlines()) == 4

    before = {path: path.read_bytes() for path in trials.parent.rglob("*") if path.is_file()}
    for change, line in (
        ("seed=1", "seed: was 0, now 1"),
        ("workload.target.value=0.1", "workload.target.value: was 0.2, now 0.1"),
        ("search.objective=time", "search.objective: was 'steps', now 'time'"),
        ("search.batch_size.high=256", "search.batch_size.high: was 512, now 256"),
        ("scaling=linear", "scaling.rule._target_: was 'bstune.scaling.sqrt', now 'bstune.scaling.linear'"),
        ("precision=bf16-mixed", "precision: was '32-true', now 'bf16-mixed'"),
        ("workload.module.model.hidden=[64]", "workload.module.model.hidden: was [128], now [64]"),
    ):
        status, _, err = bstune(*arguments, change)
        assert status == 2
        assert line in err
    assert before == {path: path.read_bytes() for path in trials.parent.rglob("*") if path.is_file()}


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
    assert "never reached" in out


def test_both_objectives(bstune, tmp_path):
    assert bstune(*QUICK, *EASY, "mlflow.enabled=false", "search.objective=both")[0] == 0
    assert (tmp_path / "outputs" / "digits" / "curve.json").exists()


def test_seconds_end_a_study_between_trials(bstune, tmp_path):
    status, out, _ = bstune(*QUICK, *EASY, "mlflow.enabled=false", "search.seconds=0.000001")
    assert status == 0
    assert "stopped: search.seconds=1e-06 of training are spent" in out
    assert len((tmp_path / "outputs" / "digits" / "trials.jsonl").read_text().splitlines()) == 1


def test_an_interruption_keeps_what_is_finished(bstune, tmp_path, monkeypatch):
    import bstune.job as job

    train, calls = job.train, []

    def interrupt_the_third(*arguments: object):
        calls.append(1)
        if len(calls) == 3:
            raise SystemExit(1)  # what Lightning makes of Ctrl-C
        return train(*arguments)

    monkeypatch.setattr(job, "train", interrupt_the_third)
    arguments = (*QUICK, *EASY, "mlflow.enabled=false")
    status, _, err = bstune(*arguments)
    assert status == 130
    assert "the same command continues the study" in err
    trials = tmp_path / "outputs" / "digits" / "trials.jsonl"
    assert [json.loads(line)["status"] for line in trials.read_text().splitlines()][:2] == ["reached", "reached"]
    monkeypatch.setattr(job, "train", train)
    assert bstune(*arguments)[0] == 0
    finished = [json.loads(line) for line in trials.read_text().splitlines()]
    assert sorted(trial["slot"] for trial in finished if trial["status"] != "failed") == [0, 1, 2, 3]


def test_mlflow_holds_the_study(bstune, tmp_path):
    from mlflow import MlflowClient

    assert bstune(*QUICK, *EASY)[0] == 0
    client = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    experiment = client.get_experiment_by_name("bstune")
    runs = client.search_runs([experiment.experiment_id])
    assert len(runs) == 5
    parent = next(run for run in runs if "mlflow.parentRunId" not in run.data.tags)
    lines = (tmp_path / "outputs" / "digits" / "trials.jsonl").read_text().splitlines()
    trials = {json.loads(line)["batch_size"] for line in lines}
    steps = client.get_metric_history(parent.info.run_id, "curve/steps_to_target")
    assert {metric.step for metric in steps} <= trials
    assert steps


def test_mlflow_being_down_does_not_stop_a_study(bstune, tmp_path, caplog):
    status, _, _ = bstune(*QUICK, *EASY, "mlflow.uri=http://127.0.0.1:9")
    assert status == 0
    warnings = [record.getMessage() for record in caplog.records if record.name == "bstune.tracking"]
    assert len(warnings) == 1
    assert "The next run of the same command sends what is missing" in warnings[0]


@pytest.mark.parametrize("workload", ["digits", "fashion_cnn", "resnet_cifar"])
@pytest.mark.parametrize("sampler", ["tpe", "gp", "qmc", "random"])
@pytest.mark.parametrize("rule", ["none", "sqrt", "linear", "saturating", "surge"])
def test_every_config_composes(workload, sampler, rule):
    config = compose_checked([f"+workload={workload}", f"sampler={sampler}", f"scaling={rule}"])
    assert config.study == workload
    assert config.scaling.lr > 0


def test_a_users_own_workload_is_a_yaml_file(bstune, tmp_path):
    folder = tmp_path / "my" / "workload"
    folder.mkdir(parents=True)
    own = Path(sys.modules["bstune"].__path__[0])
    text = OmegaConf.to_yaml(compose_checked(["+workload=digits"]).workload).replace("name: digits", "name: mine")
    assert own.exists()
    (folder / "mine.yaml").write_text(text)
    status, out, err = bstune(
        "--config-dir", str(tmp_path / "my"), "+workload=mine", *QUICK[1:], *EASY, "mlflow.enabled=false"
    )
    assert (status, err) == (0, "")
    assert "study mine" in out
    status, _, err = bstune("--config-dir", str(tmp_path / "my"), "+workload=other")
    assert "workloads: digits, fashion_cnn, mine, resnet_cifar" in err
