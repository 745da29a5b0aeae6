"""The sweep powers_of_two, with a timer of its own in place of training, and once with real steps."""

import inspect
import json
import re
from io import StringIO
from types import SimpleNamespace

import numpy as np
import pytest
from rich.console import Console
from unit_logs import StoppedError, log_at, of_experiment, stopping_after, units_in, unkept

from bstune.core.errors import ConfigError, HardwareError
from bstune.core.records import dump_json
from bstune.hardware.memory import find_ceiling
from bstune.hardware.probe import measure_ceiling
from bstune.hardware.timing import visit_order
from bstune.report.drawing import save_figure
from bstune.sweeps.harness import check_sweep, compose_sweep, show
from bstune.sweeps.powers_of_two import run
from bstune.sweeps.unit_log import UnfinishedError
from bstune.system.console import format_number

# Of a sweep: a change elsewhere seldom breaks it, and CI runs it.
pytestmark = pytest.mark.slow

NEAR = [100, 119, 120, 121, 127, 128, 129, 156]


class Machine:
    """A machine whose steps take a line in B, times what is planted at some batch sizes, times noise of 1%."""

    def __init__(self, planted=None, kept_rounds=0):
        self.planted = planted or {}
        self.kept_rounds = kept_rounds
        self.visited = []

    def __call__(self, workload, protocol, batch_size, lr, steps):
        # The noise of a visit is its round's own, whether earlier rounds are timed or kept.
        earlier = self.kept_rounds + sum(size == batch_size for size, _, _ in self.visited)
        rng = np.random.default_rng([batch_size, earlier])
        self.visited.append((batch_size, lr, protocol.warmup_steps))
        seconds = (9e-3 + 4.4e-4 * batch_size) * self.planted.get(batch_size, 1.0)
        return tuple(seconds * np.exp(rng.normal(0.0, 0.01, steps)))


def half(workload, protocol, batch_size, lr, steps):
    """Return the seconds in which a device is at work that is so for half of each step, or all of it from 512 on."""
    return (9e-3 + 4.4e-4 * batch_size) * (0.5 if batch_size < 512 else 1.0)


def sweep(*options):
    options = [
        "workload=digits",
        "device=cpu",
        "sweep.experiment.repeats=8",
        "sweep.experiment.steps=5",
        *options,
    ]
    return check_sweep("powers_of_two", compose_sweep("powers_of_two", options))


def found(*options, machine=None, log=None, **changes):
    """Return the finding and what was printed."""
    checked = sweep(*options)
    out = StringIO()
    console = Console(file=out, width=200)
    parameters = {**checked.parameters, "timer": machine or Machine(), "busy": half, **changes}
    return run(checked.composed, console, log or unkept(), **parameters), out.getvalue()


def sizes_in(finding):
    """Return the batch sizes of a finding's rows; those of several together have none."""
    return [row["batch_size"] for row in finding.rows if "batch_size" in row]


def test_the_finding_names_what_is_planted_and_how_large():
    machine = Machine({128: 0.95})
    finding, _ = found(
        "sweep.experiment.ceiling=628", "seed=3", "protocol.warmup_steps=2", machine=machine
    )
    assert [size for size, _, _ in machine.visited] == visit_order(
        (*NEAR, 511, 512, 513, 628), 8, 3
    )
    # The reference rate of digits.
    assert {visit[1:] for visit in machine.visited} == {(0.4, 2)}
    rows = {row.get("batch_size") or row["what"]: row for row in finding.rows}
    assert list(rows) == [*NEAR, 511, 512, 513, 628, "2^k", "8 x k"]
    signs = ["", "", "8 x 15", "", "", "2^7", *[""] * 3, "2^9", "", "ceiling"]
    assert [row["what"] for row in finding.rows[:-2]] == signs
    contrast = rows[128]["contrast"]
    assert contrast["mean"] == pytest.approx(-0.05, abs=0.01)
    assert contrast["low"] < -0.05 + 0.005
    # The row says less than 0.001.
    assert contrast["corrected"] < rows[128]["p"] == 0.001
    first = "Over 8 rounds a step's time differs from the mean of its two neighbours' at 128 (power of two) "
    assert finding.sentence.startswith(f"{first}{rows[128]['percent']:+.2f}% (")
    assert "p < 0.001; powers of two together -2." in finding.sentence
    assert "120 (multiple" not in finding.sentence
    assert (rows[100]["contrast"], rows[100]["percent"], rows[100]["p"]) == ({}, None, None)
    seconds = np.array(rows[512]["seconds_of_rounds"])
    assert rows[512]["ms"] == pytest.approx(1e3 * seconds.mean())
    assert rows[512]["ms_sd"] == pytest.approx(1e3 * seconds.std(ddof=1), rel=0.01)
    assert rows[512]["examples_per_second"] == pytest.approx((512 / seconds).mean())
    assert rows[512]["seconds_of_steps"]["steps"] == 8 * 5


def test_the_finding_says_what_room_is_left_where_nothing_is():
    finding, _ = found("sweep.experiment.ceiling=628")
    room = 0.0
    least = 1.0
    for row in finding.rows:
        effect = row["contrast"]
        if effect:
            room = max(room, abs(effect["low"]), abs(effect["high"]))
            least = min(least, effect["corrected"])
    assert finding.sentence.startswith(
        "Over 8 rounds no power of two and no multiple of 8 differs significantly from the mean of its two neighbours"
        f" (least p = {least:.2g}, corrected for 5 tests); the 95% intervals leave room for"
        f" {format_number(100 * room, 2)}% at most. At the ceiling, B = 628, "
    )
    assert "the largest power of two below it: +" in finding.sentence
    (gain,) = [row["over_power_of_two"] for row in finding.rows if row["what"] == "ceiling"]
    expected = (628 / (9e-3 + 4.4e-4 * 628)) / (512 / (9e-3 + 4.4e-4 * 512)) - 1
    assert gain["mean"] == pytest.approx(expected, abs=0.01)
    assert gain["low"] < gain["mean"] < gain["high"]
    assert gain["centres"] == (628, 512)


@pytest.mark.parametrize("ceiling", [628, 200, 64])
@pytest.mark.usefixtures("rendered")
def test_rows_are_json_the_figure_is_written_and_the_table_fits_eighty_columns(ceiling, tmp_path):
    finding, printed = found(f"sweep.experiment.ceiling={ceiling}", "sweep.experiment.repeats=20")
    json.loads(dump_json(finding.rows))
    save_figure(finding.paint, finding.inches, tmp_path / "figure")
    assert ("left out, as they do not fit under 64: 100, 119" in printed) == (ceiling == 64)
    out = StringIO()
    show(sweep(), finding, Console(file=out, width=80))
    table = out.getvalue().partition("Over 20 rounds")[0]
    assert "ceiling" in table
    assert "…" not in table


def test_three_batch_sizes_are_stated_against_each_other_and_what_is_in_use():
    finding, _ = found("sweep.experiment.ceiling=628", machine=Machine({128: 1.05}))
    text = finding.sentence.partition("Against each other: ")[2]
    numbers = [float(number) for number in re.findall(r"([+-][\d.]+)% \(", text)]
    speed = {}
    for size in (100, 128, 156):
        planted = 1.05 if size == 128 else 1.0
        speed[size] = size / ((9e-3 + 4.4e-4 * size) * planted)
    ratios = np.array([speed[128] / speed[100], speed[156] / speed[128], 1.05])
    assert numbers == pytest.approx(100 * (ratios - 1), abs=1.5)
    assert text.startswith("B = 128 gives ")
    assert " over 100, 156 " in text
    assert "against the line through 100 and 156." in text
    assert re.search(
        r"The device's time is in use to (49|50|51)% at B = 100 and (99|100|101)% at B = 628\.$",
        text,
    )
    assert finding.rows[0]["in_use"] == {"share": pytest.approx(0.5, abs=0.01), "visits": 3}
    # Of the three 156 does not fit.
    finding, _ = found("sweep.experiment.ceiling=150")
    assert "Against each other" not in finding.sentence


def test_a_ceiling_that_is_not_given_is_measured():
    asked = []

    def measured(*arguments, **options):
        bound = inspect.signature(measure_ceiling).bind(*arguments, **options).arguments
        inspect.signature(find_ceiling).bind(
            "probe", bound["low"], bound["high"], **bound["search"]
        )
        asked.extend(bound[name] for name in ("low", "high", "limit"))
        return SimpleNamespace(
            batch_size=300, at=SimpleNamespace(limit=2**30), above="it fails", notes=["A note."]
        )

    finding, printed = found("sweep.experiment.probe.high=700", find_ceiling=measured)
    # 900 MiB, as the sweep's file has it.
    assert asked == [4, 700, 943_718_400]
    assert "ceiling 300, under 1,024 MiB\nA note.\n" in printed
    # 256 is the largest power of two below the ceiling.
    assert sizes_in(finding) == [*NEAR, 255, 256, 257, 300]


def test_a_sweep_that_is_stopped_goes_on_with_the_same_ceiling_and_rounds(tmp_path):
    """The ceiling is measured once, as a second one could be another; a round is timed once."""
    path = tmp_path / "runs.jsonl"
    ceilings = [SimpleNamespace(batch_size=300, above=None, notes=[])]

    def measured(*arguments, **options):
        return ceilings.pop()

    repeats = "sweep.experiment.repeats=3"
    whole, _ = found("sweep.experiment.ceiling=300", repeats)
    # So many visits are a round. Twice it is stopped at the next round's second visit.
    sizes = len(NEAR) + 4
    for kept_rounds in (0, 1):
        with pytest.raises(StoppedError):
            found(
                repeats,
                machine=stopping_after(sizes + 1, Machine(kept_rounds=kept_rounds)),
                log=log_at(path),
                find_ceiling=measured,
            )
    machine = Machine(kept_rounds=2)
    finding, _ = found(repeats, machine=machine, log=log_at(path), find_ceiling=measured)
    assert len(machine.visited) == sizes
    assert units_in(path) == ["ceiling", "round/1", "round/2", "round/3", "busy"]
    assert (finding.sentence, finding.rows) == (whole.sentence, whole.rows)
    again, _ = found(repeats, log=log_at(path), timer=None, busy=None, find_ceiling=measured)
    assert again.rows == whole.rows


def test_a_choice_of_units_measures_those_alone(tmp_path):
    path = tmp_path / "runs.jsonl"
    ceiling = "sweep.experiment.ceiling=300"
    with pytest.raises(UnfinishedError, match="2 of 9 units"):
        found(ceiling, "sweep.experiment.only=[round/3,busy]", log=log_at(path))
    assert units_in(path) == ["round/3", "busy"]
    with pytest.raises(ConfigError, match=r"only names round/9, .*units: round/1; .*; busy"):
        found(ceiling, "sweep.experiment.only=[round/9]", log=log_at(path))


def test_without_batch_sizes_of_its_own_the_ceilings_are_left():
    finding, _ = found(*of_experiment("ceiling=40", "centres=[]", "against_each_other=[]"))
    # 32 is the largest power of two below the ceiling.
    assert sizes_in(finding) == [31, 32, 33, 40]
    assert len(finding.rows) == 4
    assert "from the mean of its two neighbours" in finding.sentence


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        (["repeats=1"], ConfigError, "sweep.experiment.repeats must be at least 2, but got 1"),
        (["steps=0"], ConfigError, "sweep.experiment.steps must be at least 1, but got 0"),
        (
            ["level=1.5"],
            ConfigError,
            "level must lie between 0 and 1 and lr be positive, but got level=1.5",
        ),
        (
            ["against_each_other=[5,4,6]"],
            ConfigError,
            r"three rising batch sizes or none, but got \[5, 4, 6\]",
        ),
        (
            ["against_each_other=[5]"],
            ConfigError,
            r"three rising batch sizes or none, but got \[5\]",
        ),
        (["lr=0"], ConfigError, "lr be positive, but got level=0.95 and lr=0.0"),
        (
            ["centres=[12]"],
            ConfigError,
            "centres must be powers of two or multiples of 8, and at least 2, but got",
        ),
        (["batch_sizes=[-3]"], ConfigError, "batch_sizes must be positive"),
        (["ceiling=2"], HardwareError, "the ceiling is 2"),
        (
            ["ceiling=99999"],
            ConfigError,
            "sweep.experiment.ceiling=99999 is larger than the training data",
        ),
    ],
)
def test_refuses_before_anything_is_timed(options, error, text):
    machine = Machine()
    with pytest.raises(error, match=text):
        found(
            "sweep.experiment.ceiling=628",
            *of_experiment(*options),
            machine=machine,
        )
    assert machine.visited == []


def test_real_steps():
    options = (
        "ceiling=40",
        "centres=[24]",
        "batch_sizes=[20]",
        "repeats=2",
        "steps=2",
        "level=0.9",
    )
    checked = sweep(*of_experiment(*options))
    finding = checked.find(Console(file=StringIO()), log=unkept())
    assert sizes_in(finding) == [20, 23, 24, 25, 31, 32, 33, 40]
    for row in finding.rows:
        # Those of several batch sizes together have no seconds.
        if "batch_size" in row:
            assert len(row["seconds_of_rounds"]) == 2
            assert min(row["seconds_of_rounds"]) > 0
    assert finding.device.startswith("cpu")


@pytest.mark.soak
def test_steps_that_two_processes_share():
    """Raschka's 255, 256 and 257 under DDP, here two processes of a CPU and a few steps."""
    options = ("ceiling=260", "centres=[]", "against_each_other=[]", "repeats=2", "steps=2")
    checked = sweep("devices=2", *of_experiment(*options))
    finding = checked.find(Console(file=StringIO()), log=unkept())
    assert sizes_in(finding) == [255, 256, 257, 260]
    assert finding.device.startswith("2 x cpu")
    assert "in use" not in finding.sentence
