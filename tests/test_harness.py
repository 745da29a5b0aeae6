"""``bstune sweep``: every sweep composes, bad input writes nothing, and outputs are whole or not there."""

import json
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from filelock import FileLock
from omegaconf import OmegaConf
from rich.console import Console
from toolbox import end_of_fork, entries, start_fork
from unit_logs import headers_in, of_experiment, units_in

from bstune.core.errors import BstuneError, ConfigError, Interrupted, StudyError
from bstune.options import TrainedOptions
from bstune.sweeps import vectorization
from bstune.sweeps.harness import (
    LOCK_NAME,
    Finding,
    check_sweep,
    compose_sweep,
    main,
    show,
    sweep_names,
    write,
)

SHALLUE = [
    f"shallue_{name}"
    for name in ("algorithms", "data", "optimizers", "regularisation", "widths", "workloads")
]
NAMES = [
    "alignment",
    "critical_batch",
    "dawnbench",
    "losses",
    "minibatch_sgd",
    "powers_of_two",
    "rule_cost",
    "search_benchmark",
    *SHALLUE,
    "shallue_error",
    "vectorization",
]
NAMES.sort()
# A sweep of a few seconds at sizes that measure nothing.
TINY = (
    "size=4",
    "block=2",
    "repeats=2",
    "segment_seconds=1e-5",
    "device=cpu",
    "working_sets=[16,64]",
    "gathered_kib=16",
)


@pytest.fixture
def sweep(tmp_path, monkeypatch, capfd):
    """Run the command in an empty folder; return what it printed."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        main(list(arguments))
        return capfd.readouterr().out

    return run


def files_in(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.mark.parametrize("name", NAMES)
def test_every_sweep_composes_and_its_experiment_takes_its_parameters(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    checked = check_sweep(name, compose_sweep(name, ()))
    module = "shallue" if name in (*SHALLUE, "losses") else name
    assert checked.experiment.func.__module__ == f"bstune.sweeps.{module}"
    assert checked.result == Path("outputs/sweeps") / name / "result.json"
    # Each sweep has a source to compare with.
    assert "http" in checked.source
    assert set(checked.parameters) == set(checked.plain_parameters)
    # The others time loops, or read recorded tables.
    trains = name in ("alignment", "dawnbench", "minibatch_sgd", "powers_of_two", "shallue_error")
    assert (checked.composed is not None) == trains
    # The options of a trained workload are composed and checked with the sweep's own.
    if trains:
        assert isinstance(checked.composed.options, TrainedOptions)
        assert "sweep" not in checked.composed.trained_recipe.values


def test_without_a_name_the_sweeps_are_listed(sweep, tmp_path):
    out = sweep()
    assert [line for line in out.splitlines() if line in NAMES] == NAMES == sweep_names()
    assert "https://d2l.ai/chapter_optimization/minibatch-sgd.html" in out
    assert "python -m bstune sweep NAME" in out
    assert "usage" in sweep("--help")
    assert (
        OmegaConf.create(
            sweep("vectorization", "sweep.experiment.size=8", "--help")
        ).sweep.experiment.size
        == 8
    )
    assert files_in(tmp_path) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nope",), f"there is no sweep 'nope'; sweeps: {', '.join(NAMES)}"),
        (("../conf/config",), "there is no sweep '../conf/config'"),
        (("vectorization", "sweep.nope=1"), "unknown option sweep.nope"),
        (("vectorization", "+sweep.experiment.nope=1"), "unknown option sweep.experiment.nope"),
        (("vectorization", "+nope=1"), "unknown option nope"),
        (("vectorization", "+workload=digits"), "unknown option workload"),
        # The keys that a sweep's file must have.
        (
            ("vectorization", "~sweep"),
            "sweep must have the keys source, output and experiment, but got None",
        ),
        (("vectorization", "sweep.output=null"), "sweep: Incompatible value 'None'"),
        (("vectorization", "sweep.output=${nope}"), "sweep: Interpolation key 'nope' not found"),
        (
            ("vectorization", "~sweep.experiment.size"),
            "no value is given for sweep.experiment.size",
        ),
        (
            ("vectorization", "sweep.experiment.size=abc"),
            "sweep.experiment.size: Value 'abc' of type 'str'",
        ),
        (
            ("vectorization", "sweep.experiment._target_=no.Such"),
            "there is no module no, for no.Such",
        ),
        (
            (
                "vectorization",
                "sweep.experiment._partial_=false",
                "sweep.experiment._target_=builtins.dict",
            ),
            "sweep.experiment must have _partial_: true",
        ),
        (("vectorization", "nonsense"), "Error parsing override 'nonsense'"),
        (
            ("vectorization", "sweep.output=/dev/null/x"),
            "sweep.output=/dev/null/x: /dev/null is not a folder",
        ),
        (("minibatch_sgd", "search.nope=1"), "unknown option search.nope"),
        (("minibatch_sgd", "protocol.warmup_steps=abc"), "protocol.warmup_steps"),
        (("minibatch_sgd", "sweep.experiment.runs=[3]"), "sweep.experiment.runs[0]: "),
        (
            ("minibatch_sgd", "sweep.experiment.runs=[{name: a}]"),
            "no value is given for sweep.experiment.runs[0].",
        ),
        (
            ("minibatch_sgd", "workload=replay", "workload.table=fashion_mlp"),
            "the sweep minibatch_sgd trains, and",
        ),
    ],
)
def test_bad_input_is_refused_and_writes_nothing(sweep, tmp_path, arguments, message):
    with pytest.raises(BstuneError) as caught:
        sweep(*arguments)
    assert message in str(caught.value)
    assert files_in(tmp_path) == []


@pytest.mark.usefixtures("rendered")
def test_a_run_leaves_its_result_and_its_figure_and_prints_the_sentence(sweep, tmp_path):
    out = sweep(
        "vectorization",
        *of_experiment(*TINY),
        "sweep.output=here/there",
    )
    assert files_in(tmp_path) == [
        "here",
        "here/there",
        "here/there/figure.png",
        "here/there/result.json",
        "here/there/runs.jsonl",
    ]
    # The first bytes of a PNG file.
    assert (tmp_path / "here/there/figure.png").read_bytes().startswith(b"\x89PNG")
    result = json.loads(
        (tmp_path / "here/there/result.json").read_text(), parse_constant=pytest.fail
    )
    assert result["source"] == compose_sweep("vectorization", ()).sweep.source
    assert (result["sweep"], result["n"], result["parameters"]["size"]) == ("vectorization", 2, 4)
    assert result["device"].startswith("cpu (")
    assert set(result["versions"]) >= {"bstune", "torch"}
    assert result["command"].startswith(
        "python -m bstune sweep vectorization sweep.experiment.size=4"
    )
    for text in (
        result["source"],
        result["sentence"],
        "here/there/result.json",
        "here/there/figure.png",
        "whole",
    ):
        assert text in out


def paint(figure):
    figure.subplots().plot([1.0, 2.0])


def found(sentence="So it is.", rows=(), paint=paint, notes=()):
    return Finding(sentence, rows, 3, "x", paint, (2, 1), notes)


@pytest.fixture
def checked(tmp_path):
    sweep = check_sweep(
        "vectorization", compose_sweep("vectorization", (f"sweep.output={tmp_path}/out/deep",))
    )
    sweep.output.mkdir(parents=True)
    return sweep


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), RuntimeError("a bug")])
@pytest.mark.parametrize("earlier", [False, True])
def test_outputs_are_whole_or_as_they_were(checked, error, earlier):
    def failing(figure):
        raise error

    if earlier:
        # Written before, so that there is something to lose.
        write(checked, found(), ("storage=mysql://me:secret@host/db",))
        assert "secret" not in checked.result.read_text()
    before = {path: path.read_bytes() for path in checked.output.glob("*")}
    assert len(before) == (2 if earlier else 0)
    with pytest.raises((StudyError, RuntimeError), match=r"cannot be written: No space left|a bug"):
        write(checked, found("Another.", paint=failing), ())
    assert {path: path.read_bytes() for path in checked.output.glob("*")} == before


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("figure.png", "mine"),
        ("result.json", "mine"),
        # JSON, and of another sweep.
        ("result.json", '{"sweep": "dawnbench"}'),
        ("result.json", "[]"),
    ],
)
def test_what_another_wrote_is_refused_and_stays(tmp_path, name, content):
    (tmp_path / name).write_text(content)
    with pytest.raises(
        StudyError,
        match=r"that is not of the sweep vectorization: choose another with sweep\.output=",
    ):
        check_sweep("vectorization", compose_sweep("vectorization", (f"sweep.output={tmp_path}",)))
    assert (files_in(tmp_path), (tmp_path / name).read_text()) == ([name], content)


def test_the_home_directory_is_expanded(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    found = check_sweep("losses", compose_sweep("losses", ("sweep.output=~/a",)))
    assert (found.output, found.experiment.keywords["folder"]) == (
        tmp_path / "a",
        str(tmp_path / "a"),
    )


def interrupted(*arguments):
    # Lightning ends so.
    raise SystemExit(1)


def test_an_interruption_says_that_nothing_is_written(sweep, tmp_path, monkeypatch):
    monkeypatch.setattr("bstune.sweeps.vectorization.measure", interrupted)
    with pytest.raises(Interrupted, match="interrupted: the sweep has written nothing"):
        sweep("vectorization")
    assert files_in(tmp_path / "outputs/sweeps/vectorization") == []


def test_an_interruption_after_a_unit_says_what_is_kept(sweep, tmp_path, monkeypatch):
    options = of_experiment(*TINY)
    measure = vectorization.measure

    def first_alone(log, plan, *rest):
        # The first part is measured, and the second one is where it stops.
        if plan.names[0].startswith("reading"):
            raise KeyboardInterrupt
        return measure(log, plan, *rest)

    monkeypatch.setattr(vectorization, "measure", first_alone)
    with pytest.raises(Interrupted, match=r"vectorization/runs\.jsonl keeps what has ended; the"):
        sweep("vectorization", *options)
    folder = tmp_path / "outputs/sweeps/vectorization"
    assert files_in(folder) == ["runs.jsonl"]
    (header,) = headers_in(folder / "runs.jsonl")
    assert header["sweep"] == "vectorization"
    assert header["device"].startswith("cpu (")
    assert set(header["versions"]) >= {"bstune", "torch"}
    assert header["settings"]["sweep.experiment.size"] == 4
    monkeypatch.setattr(vectorization, "measure", measure)
    # The same command goes on.
    sweep("vectorization", *options)
    result = json.loads((folder / "result.json").read_text())
    names = ("device", "versions", "commit")
    assert result["measured_with"] == [{name: header[name] for name in names}]


def test_an_interruption_of_the_figure_says_what_is_kept(sweep, tmp_path, monkeypatch):
    options = of_experiment(*TINY)
    monkeypatch.setattr("bstune.sweeps.harness.save_figure", interrupted)
    with pytest.raises(Interrupted, match=r"vectorization/runs\.jsonl keeps what has ended; the"):
        sweep("vectorization", *options)
    assert files_in(tmp_path / "outputs/sweeps/vectorization") == ["runs.jsonl"]


def test_a_choice_of_units_writes_no_result(sweep, tmp_path):
    options = of_experiment(*TINY)
    out = sweep("vectorization", *options, "sweep.experiment.only=[product/2]")
    assert "1 of 6 units are measured in outputs/sweeps/vectorization/runs.jsonl" in out
    assert files_in(tmp_path / "outputs/sweeps/vectorization") == ["runs.jsonl"]
    sweep("vectorization", *options)
    assert "result.json" in files_in(tmp_path / "outputs/sweeps/vectorization")


def start_sweep(folder, arguments):
    """Begin a sweep in a folder and in a fork of this process; return the fork's number."""

    def run():
        os.chdir(folder)
        main(arguments)

    return start_fork(run)


def killed_after(units, path, child):
    """Kill a sweep once its file has so many units; return its status."""
    # Polled more often than a unit ends.
    while not (path.exists() and path.read_text().count('"unit"') >= units):
        assert os.waitpid(child, os.WNOHANG) == (0, 0), "it ended before"
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    return end_of_fork(child)


# Both keep what they have done by the same lines of the harness.
@pytest.mark.parametrize(
    ("name", "options"),
    [
        pytest.param(
            "critical_batch",
            ("tables=[fashion_mlp]", "easier=[1.0,1.1,1.2,1.3]"),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "search_benchmark",
            ("tables=[fashion_mlp]", "searches=[random/lr,zeus]", "seeds=8"),
            marks=pytest.mark.soak,
        ),
    ],
)
def test_a_sweep_that_is_killed_twice_ends_as_one_that_was_not(tmp_path, name, options):
    arguments = [name, *of_experiment(*options)]
    results = []
    # After 1 and after 3 units.
    for folder, kills in ((tmp_path / "whole", ()), (tmp_path / "killed", (1, 3))):
        folder.mkdir()
        path = folder / "outputs/sweeps" / name / "runs.jsonl"
        for units in kills:
            killed = killed_after(units, path, start_sweep(folder, arguments))
            assert killed == -signal.SIGKILL
            # Between two appends, or within one: what is left of that is dropped.
            with path.open("a") as file:
                file.write('{"unit": "cut sho')
        assert end_of_fork(start_sweep(folder, arguments)) == 0
        names = units_in(path)
        # None was measured twice.
        assert len(set(names)) == len(names)
        result = json.loads(path.with_name("result.json").read_text())
        # No file was set aside and begun anew.
        results.append((result, sorted(names), entries(path.parent)))
    assert results[0] == results[1]


def test_a_second_sweep_in_a_folder_is_refused_and_writes_nothing(sweep, tmp_path):
    (tmp_path / "out").mkdir()
    with FileLock(tmp_path / "out" / LOCK_NAME):
        with pytest.raises(StudyError, match=r"out is in use by .*sweep\.output=DIR") as refused:
            sweep("vectorization", "sweep.output=out")
        assert files_in(tmp_path / "out") == [LOCK_NAME]
    assert refused.value.exit_status == 2


def test_a_sweep_of_other_options_ends_with_status_2(sweep, tmp_path):
    options = of_experiment(*TINY)
    sweep("vectorization", *options)
    folder = tmp_path / "outputs/sweeps/vectorization"
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(StudyError) as caught:
        sweep("vectorization", *options, "sweep.experiment.size=6")
    assert caught.value.exit_status == 2
    assert "sweep.experiment.size: was 4, now 6" in str(caught.value)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


@dataclass(frozen=True)
class Pair:
    low: int
    high: float


# console and clock are given by the harness, the others by the file.
def typed(console, *, pairs: list[Pair], names: list[str], share: float, clock: object = None):
    return found(f"{console}, {pairs}, {names}, {share}, {clock}")


def trained(composed, *, pairs: list[Pair]):
    return found()


def check_typed(**changes):
    parameters = {"pairs": [{"low": 1, "high": 2}], "names": ["a"], "share": 1, **changes}
    return check_experiment("typed", parameters)


def check_experiment(function, parameters):
    experiment = {"_target_": f"{__name__}.{function}", "_partial_": True, **parameters}
    return check_sweep(
        "typed",
        OmegaConf.create({"sweep": {"source": "s", "output": "o", "experiment": experiment}}),
    )


def test_parameters_are_of_their_annotated_types():
    checked = check_typed()
    assert checked.parameters == {"pairs": [Pair(1, 2.0)], "names": ["a"], "share": 1.0}
    assert checked.plain_parameters == {
        "pairs": [{"low": 1, "high": 2.0}],
        "names": ["a"],
        "share": 1.0,
    }
    for changes, message in (
        ({"pairs": [{"low": 1}]}, "no value is given for sweep.experiment.pairs[0].high"),
        ({"names": "a"}, "sweep.experiment.names: "),
        # A parameter with a default is the tests' alone.
        ({"clock": 1}, "unknown option sweep.experiment.clock"),
    ):
        with pytest.raises(ConfigError) as caught:
            check_typed(**changes)
        assert message in str(caught.value)


def test_an_experiment_gets_what_it_has_a_parameter_for():
    finding = check_typed().find("the console", clock="the clock")
    assert finding.sentence == "the console, [Pair(low=1, high=2.0)], ['a'], 1.0, the clock"
    with pytest.raises(ConfigError, match="the sweep typed trains: its file needs config among"):
        check_experiment("trained", {"pairs": []})


def test_brackets_are_printed_as_they_are(checked, capfd):
    row = {"what": "[bold]x", "interval": [1, 2], "value": None}
    show(checked, found("Within [red] of it, [/].", [row], notes=["[b]"]), Console(width=60))
    printed = capfd.readouterr().out
    for text in ("Within [red] of it, [/].", "[bold]x", "- [b]"):
        assert text in printed
    # A list is not for the table.
    assert "interval" not in printed
