"""The sweep command: every sweep composes, bad input writes nothing, and outputs are whole or not there."""

import json
import subprocess
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from rich.console import Console

from bstune import sweeps
from bstune.core.errors import BstuneError, ConfigError, StudyError
from bstune.sweeps import harness as sweep_command
from bstune.sweeps.harness import (
    Finding,
    SweepOutput,
    check_sweep,
    compose_sweep,
    draw_figure,
    show,
    sweep_names,
    write,
)

NAMES = sorted(path.stem for path in Path(sweeps.__file__).parent.glob("*.yaml"))
TINY = ("sweep.experiment.size=4", "sweep.experiment.block=2", "sweep.experiment.repeats=2")
TINY = (*TINY, "sweep.experiment.segment_seconds=1e-5", "sweep.experiment.device=cpu")
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture
def sweep(tmp_path, monkeypatch, capfd):
    """Run the command in an empty folder; return its exit status and what it printed."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["sweep", *arguments])
        try:
            status = sweep_command.main()
        except SystemExit as exit_:
            status = exit_.code
        printed = capfd.readouterr()
        return status, printed.out, printed.err

    return run


def entries(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def complete(name):
    """Return what a sweep needs beside its name: a workload, where its file leaves it open."""
    config = compose_sweep(name, ())
    return () if "protocol" not in config or "workload" in config else ("+workload=digits",)


@pytest.mark.parametrize("name", NAMES)
def test_every_sweep_composes_and_its_experiment_takes_its_parameters(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    checked = check_sweep(name, compose_sweep(name, complete(name)))
    assert checked.experiment.func.__module__ == f"bstune.sweeps.{name}"
    assert checked.output.root == Path("outputs/sweeps") / name
    assert "http" in checked.source
    assert set(checked.parameters) == set(checked.plain_parameters)
    assert OmegaConf.missing_keys(checked.config) == set()
    assert "sweep" not in checked.config


def test_there_are_sweeps():
    assert {"vectorization", "minibatch_sgd"} <= set(NAMES)
    assert sweep_names() == NAMES


def test_without_a_name_the_sweeps_are_listed(sweep, tmp_path):
    status, out, err = sweep()
    assert (status, err) == (0, "")
    assert [line for line in out.splitlines() if line in NAMES] == NAMES
    assert "https://d2l.ai/chapter_optimization/minibatch-sgd.html" in out
    assert "python -m bstune.sweeps.harness NAME" in out
    assert entries(tmp_path) == []


def test_help_lists_a_sweeps_options_as_they_are_set(sweep):
    status, out, _ = sweep("vectorization", "sweep.experiment.size=8", "--help")
    assert status == 0
    assert OmegaConf.create(out).sweep.experiment.size == 8
    assert "usage" in sweep("--help")[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nope",), f"there is no sweep 'nope'; sweeps: {', '.join(NAMES)}"),
        (("../conf/config",), "there is no sweep '../conf/config'"),
        (("vectorization", "sweep.nope=1"), "unknown option sweep.nope"),
        (("vectorization", "+sweep.nope=1"), "unknown option sweep.nope"),
        (("vectorization", "sweep.experiment.nope=1"), "unknown option sweep.experiment.nope"),
        (("vectorization", "+sweep.experiment.nope=1"), "unknown option sweep.experiment.nope"),
        (("vectorization", "+nope=1"), "unknown option nope"),
        (("vectorization", "+workload=digits"), "unknown option workload"),
        (("vectorization", "search.trials=3"), "unknown option search"),
        (("vectorization", "sweep=3"), "sweep must have the keys source, output and experiment, but got 3"),
        (("vectorization", "~sweep"), "sweep must have the keys source, output and experiment, but got None"),
        (("vectorization", "sweep.output=null"), "sweep: Incompatible value 'None'"),
        (("vectorization", "sweep.output=${nope}"), "sweep: Interpolation key 'nope' not found"),
        (("vectorization", "~sweep.experiment.size"), "no value is given for sweep.experiment.size"),
        (("vectorization", "sweep.experiment.size=abc"), "sweep.experiment.size: Value 'abc' of type 'str'"),
        (("vectorization", "sweep.experiment.size=2.5"), "sweep.experiment.size: Value '2.5' of type 'float'"),
        (("vectorization", "sweep.experiment._target_=no.Such"), "sweep.experiment cannot be built: Error locating"),
        (("vectorization", "sweep.experiment._partial_=false"), "sweep.experiment cannot be built"),
        (
            ("vectorization", "sweep.experiment._partial_=false", "sweep.experiment._target_=builtins.dict"),
            "sweep.experiment must have _partial_: true",
        ),
        (("vectorization", "sweep.experiment.size=[1"), "no viable alternative at input"),
        (("vectorization", "nonsense"), "Error parsing override 'nonsense'"),
        (("vectorization", "sweep.output=/dev/null/x"), "sweep.output=/dev/null/x: /dev/null is not a folder"),
        (
            ("minibatch_sgd", "workload=nope"),
            "Could not find 'workload/nope'\nAvailable options in",
        ),
        (("minibatch_sgd", "search.nope=1"), "unknown option search.nope"),
        (("minibatch_sgd", "+nope=1"), "unknown option nope"),
        (("minibatch_sgd", "protocol.near=abc"), "protocol.near: Value 'abc' of type 'str'"),
        (("minibatch_sgd", "sweep.experiment.runs=[3]"), "sweep.experiment.runs[0]: "),
        (
            ("minibatch_sgd", "sweep.experiment.runs=[{name: a}]"),
            "no value is given for sweep.experiment.runs[0].",
        ),
        (("vectorization", "--nope"), "unrecognized arguments: --nope"),
    ],
)
def test_bad_input_ends_in_plain_lines_and_writes_nothing(sweep, tmp_path, arguments, message):
    status, out, err = sweep(*arguments)
    assert status == 2
    assert "error: " in err
    assert message in err
    assert "Traceback" not in out + err
    assert entries(tmp_path) == []


def test_a_sweep_that_needs_a_workload_says_so():
    config = compose_sweep("minibatch_sgd", ("~workload",))
    with pytest.raises(ConfigError, match=r"needs a workload: add \+workload=NAME"):
        check_sweep("minibatch_sgd", config)


def test_a_run_leaves_its_result_and_its_figure_and_prints_the_sentence(sweep, tmp_path):
    status, out, err = sweep("vectorization", *TINY, "sweep.output=here/there")
    assert (status, err) == (0, "")
    assert entries(tmp_path) == ["here", "here/there", "here/there/figure.png", "here/there/result.json"]
    assert (tmp_path / "here/there/figure.png").read_bytes().startswith(PNG)
    text = (tmp_path / "here/there/result.json").read_text()
    result = json.loads(text, parse_constant=pytest.fail)
    assert result["sweep"] == "vectorization"
    assert result["source"] == compose_sweep("vectorization", ()).sweep.source
    assert result["sentence"] in out
    assert result["n"] == 2
    assert result["device"].startswith("cpu (")
    assert set(result["versions"]) >= {"bstune", "torch"}
    assert result["parameters"]["size"] == 4
    assert result["command"].startswith("python -m bstune.sweeps.harness vectorization sweep.experiment.size=4")
    assert [row["repeats"] for row in result["rows"]] == [2] * 4
    for row in result["rows"]:
        assert row["way"].split()[0] in out
    assert "here/there/result.json" in out
    assert "here/there/figure.png" in out
    assert result["source"] in out


def paint(figure):
    figure.subplots().plot([1.0, 2.0])


FINDING = Finding("So it is.", [{"a": 1.0, "b": float("nan")}], 3, "a device", partial(draw_figure, paint, (2.0, 1.0)))


@pytest.fixture
def checked(tmp_path):
    return check_sweep("vectorization", compose_sweep("vectorization", (f"sweep.output={tmp_path}/out/deep",)))


def fail(path, error):
    path.write_bytes(b"half a fig")
    raise error


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), RuntimeError("a bug")])
@pytest.mark.parametrize("earlier", [False, True])
def test_outputs_are_whole_or_as_they_were(checked, tmp_path, error, earlier):
    before = {}
    if earlier:
        write(checked, FINDING, ())
        before = {path.name: path.read_bytes() for path in checked.output.root.iterdir()}
        assert set(before) == {"result.json", "figure.png"}
    broken = Finding("Another.", [], 1, "a device", partial(fail, error=error))
    with pytest.raises((StudyError, RuntimeError), match=r"cannot be written: No space left|a bug"):
        write(checked, broken, ())
    if earlier:
        assert {path.name: path.read_bytes() for path in checked.output.root.iterdir()} == before
    else:
        assert entries(tmp_path) == []


def test_a_number_that_is_not_finite_is_null(checked):
    write(checked, FINDING, ())
    result = json.loads(checked.output.result.read_text(), parse_constant=pytest.fail)
    assert result["rows"] == [{"a": 1.0, "b": None}]


def test_a_password_in_an_option_is_not_written(checked):
    write(checked, FINDING, ("storage=mysql://me:secret@host/db",))
    assert "secret" not in checked.output.result.read_text()


def interrupted(config, console):
    raise SystemExit(1)


def refused(config, console):
    raise ConfigError("this cannot be")


@pytest.mark.parametrize(
    ("function", "status", "message"),
    [("interrupted", 130, "error: interrupted: the sweep has written nothing\n"), ("refused", 2, "this cannot be\n")],
)
def test_what_an_experiment_raises_ends_in_a_plain_line(sweep, tmp_path, function, status, message):
    own = set(compose_sweep("vectorization", ()).sweep.experiment) - {"_target_", "_partial_"}
    bare = [f"~sweep.experiment.{name}" for name in sorted(own)]
    found, _, err = sweep("vectorization", *bare, f"sweep.experiment._target_={__name__}.{function}")
    assert found == status
    assert err.endswith(message)
    assert entries(tmp_path) == []


@dataclass(frozen=True)
class Pair:
    low: int
    high: float


def typed(config, console, *, pairs: list[Pair], names: list[str], share: float, clock: object = None):
    return Finding(f"{pairs}, {names}, {share}", [], 1, "none", partial(draw_figure, paint, (2.0, 1.0)))


def typed_config(**changes):
    own = {"pairs": [{"low": 1, "high": 2}], "names": ["a"], "share": 1, **changes}
    experiment = {"_target_": f"{__name__}.typed", "_partial_": True, **own}
    return OmegaConf.create({"share": 0.5, "sweep": {"source": "s", "output": "o", "experiment": experiment}})


def test_parameters_are_of_their_annotated_types():
    config = typed_config()
    del config["share"]
    checked = check_sweep("typed", config)
    assert checked.parameters == {"pairs": [Pair(1, 2.0)], "names": ["a"], "share": 1.0}
    assert checked.plain_parameters == {"pairs": [{"low": 1, "high": 2.0}], "names": ["a"], "share": 1.0}
    finding = checked.experiment.func(checked.config, Console(), **checked.parameters)
    assert finding.sentence == "[Pair(low=1, high=2.0)], ['a'], 1.0"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pairs": [{"low": 1}]}, "no value is given for sweep.experiment.pairs[0].high"),
        ({"pairs": [{"low": 1.5, "high": 1}]}, "low: Value '1.5' of type 'float' could not be converted"),
        ({"names": "a"}, "sweep.experiment.names: "),
        ({"clock": 1}, "unknown option sweep.experiment.clock"),
    ],
)
def test_parameters_of_other_types_are_refused(changes, message):
    with pytest.raises(BstuneError) as caught:
        check_sweep("typed", typed_config(**changes))
    assert message in str(caught.value)


def test_brackets_are_printed_as_they_are(checked, capfd):
    row = {"what": "[bold]x", "interval": [1, 2], "value": None}
    finding = Finding("Within [red] of it, [/].", [row], 1, "a device", partial(draw_figure, paint, (2.0, 1.0)))
    show(checked, finding, Console(width=60))
    printed = capfd.readouterr().out
    assert "Within [red] of it, [/]." in printed
    assert "[bold]x" in printed
    assert "interval" not in printed  # a list is not for the table


def test_the_list_is_light():
    """Listing the sweeps imports neither torch nor matplotlib."""
    code = (
        "import sys; sys.argv = ['sweep']; from bstune.sweeps.harness import main; main();"
        "print([name for name in ('torch', 'lightning', 'matplotlib', 'mlflow') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_paths():
    output = SweepOutput(Path("x"))
    assert (output.result, output.figure) == (Path("x/result.json"), Path("x/figure.png"))
