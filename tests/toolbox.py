"""What several test modules work with: made records and protocols, a clock that a test moves, a folder's entries."""

import json
import math
import multiprocessing.process
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from multiprocessing import forkserver
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from bstune.core.evaluation_schedule import EvaluationSchedule
from bstune.core.records import Budget, Merit, Target, TrialProtocol, TrialResult, TrialSpec
from bstune.report.drawing import save_figure
from bstune.study.planning.replicates import Winner, winners
from bstune.system import interruption

# They import torch and Lightning, 5 s that a process that needs no survey saves.
if TYPE_CHECKING:
    from bstune.hardware.memory import ProbeOutcome, ProbeResult
    from bstune.hardware.survey import Survey

# With this cost no evaluation is ever too dear, and with this ratio every step is due.
EVERY_STEP = EvaluationSchedule(ratio=1.0001, share=1.0, cost=1e-9, near=1.5)
TRAINER = {"accelerator": "cpu", "devices": 1}
# A survey of few and short measurements.
FAST_SURVEY = (
    "hardware.step_time.rungs=3",
    "hardware.step_time.repeats=1",
    "hardware.step_time.visit_seconds=0.01",
    "hardware.ceilings.seconds=0.05",
    "hardware.ceilings.matrix_sizes=[64]",
    "hardware.ceilings.copy_bytes=[1000000]",
)


class FakeTime:
    """Seconds that pass only when a test says so; call it for the time."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def leave_blank(patch: pytest.MonkeyPatch) -> None:
    """Let studies paint nothing of their curve, and write files in its place."""

    def draw(trials: object, result: object, *paths: Path) -> None:
        save_figure(lambda figure: None, (1.0, 1.0), *paths)

    patch.setattr("bstune.study.report.draw_curve", draw)
    patch.setattr("bstune.study.report.draw_budget", draw)


def make_spec(batch_size: int = 4, lr: float = 0.1, seed: int = 0, **changes: Any) -> TrialSpec:
    """The spec of a trial, number 3 at index 2."""
    values: Mapping[str, Any] = {"number": 3, "trial_index": 2, "delta": None}
    return TrialSpec(**{**values, "batch_size": batch_size, "lr": lr, "seed": seed, **changes})


def make_protocol(steps: int = 20, examples: int = 1, **changes: Any) -> TrialProtocol:
    """A protocol that evaluates after every step, on a CPU."""
    values: Mapping[str, Any] = {
        "target": Target("val/error", 0.1, "min"),
        "budget": Budget(steps, examples),
        "evaluation_schedule": EVERY_STEP,
        "micro_batch_size": None,
        "warmup_steps": 2,
        "divergence": 2.0,
        "noise_scale_every": None,
        "compile": None,
        "trainer": TRAINER,
        "fast": "auto",
    }
    return TrialProtocol(**{**values, **changes})


def end_as_lightning() -> None:
    """Raise what Lightning makes of Ctrl-C: a SystemExit with a KeyboardInterrupt before it."""
    try:
        raise KeyboardInterrupt
    # Lightning exits while the interruption is handled, which makes it the exit's context.
    except KeyboardInterrupt:
        sys.exit(1)


def still_running(processes: Iterable[int]) -> list[int]:
    """Those of the processes, by number, that have not ended within 30 s."""
    left = []
    for process in processes:
        try:
            handle = os.pidfd_open(process)
        except ProcessLookupError:
            continue
        if not wait([handle], 30):
            left.append(process)
        os.close(handle)
    return left


def _own_nothing() -> None:
    """Let a fork, as it ends, leave its parent's processes, fork server and temporary folders alone."""
    multiprocessing.process._children.clear()
    multiprocessing.current_process()._config.pop("tempdir", None)
    forkserver._forkserver._forkserver_pid = None
    interruption._folders.clear()


def start_fork(call: Callable[[], object]) -> int:
    """Begin a call in a fork of this process, which has imported all; return the fork's number."""
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        status = 1
        _own_nothing()
        try:
            status = int(call() or 0)
        finally:
            # What was raised ends here: nothing of pytest's may go on in the fork.
            if sys.exception() is not None:
                traceback.print_exc()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    return child


def end_of_fork(child: int) -> int:
    """Wait for a fork to end; give its status as a shell does."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def forked(call: Callable[[], object]) -> int:
    """Call in a fork of this process; give its status as a shell does."""
    return end_of_fork(start_fork(call))


def forked_training(call: Callable[[], object]) -> int:
    """Call what trains in a fork of this process; skip the test where torch has threads of a GPU."""
    import torch

    if torch.cuda.is_available():
        pytest.skip("torch computes no gradients in a fork beside a GPU")
    return forked(call)


def entries(folder: Path) -> list[str]:
    """The names of what lies in a folder, sorted."""
    return sorted(path.name for path in folder.iterdir())


def made_table(folder: Path) -> Path:
    """The replay table t.jsonl of the made frontier, written into a folder."""
    return write_rows(folder / "t.jsonl", table_rows())


def tree(folder: Path) -> dict[str, Any]:
    """All below a folder, by its path there: a file's content, a link's target, False of a folder."""
    found: dict[str, Any] = {}
    for path in folder.rglob("*"):
        if path.is_symlink():
            entry: Any = os.readlink(path)
        else:
            entry = path.is_file() and path.read_bytes()
        found[str(path.relative_to(folder))] = entry
    return found


def contents(folder: Path) -> dict[Path, bytes]:
    """The content of each file below a folder."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


RESULT = TrialResult(
    number=0,
    trial_index=0,
    batch_size=32,
    lr=0.1,
    delta=0.0,
    seed=1,
    status="reached",
    steps=100,
    steps_low=95,
    examples=3200,
    train_seconds=1.0,
    eval_seconds=0.1,
    startup_seconds=0.2,
    wall_seconds=1.4,
    seconds_per_step=0.01,
    device="cpu (1 thread)",
    versions={"torch": "2.13.0"},
    history=((50, 0.3), (95, 0.11), (100, 0.09)),
)


def make_result(**changes: Any) -> TrialResult:
    """The record of a trial that reached the target."""
    return replace(RESULT, **changes)


def steps_to_target(batch_size: float, lr: float) -> int:
    """The steps of a made frontier: B_crit at 64, and a best learning rate that grows as B's root."""
    best = 0.16 * (batch_size / 128) ** 0.5
    # An octave off the best rate doubles the steps, two take five times as many.
    return round(200 * (1 + 64 / batch_size) * (1 + math.log2(lr / best) ** 2))


def table_rows(
    seeds: Iterable[int] = (0, 1), missed: Callable[[float], bool] = lambda lr: False
) -> list[dict]:
    """The rows of a replay table of that frontier, error 0.14 the target; ``missed`` says at which rates."""
    rows = []
    for batch_size, lr, seed in product((8, 32, 128, 512), (0.01, 0.04, 0.16, 0.64), seeds):
        hit = steps_to_target(batch_size, lr) + 5 * seed
        # Thirty evaluations 1.1 apart reach from the hit down to a twentieth of it.
        steps = sorted({max(1, round(hit * 1.1**-i)) for i in range(31)})
        # The metric is under 0.14 from the hit on, unless the rate is one that misses.
        metric = [
            0.13 + 0.5 * (1 - step / hit) ** 2 + 0.02 * (step < hit or missed(lr)) for step in steps
        ]
        point = {
            "batch_size": batch_size,
            "lr": lr,
            "seed": seed,
            "seconds_per_step": 0.01 + 0.0001 * batch_size,
        }
        rows.append(point | {"steps": steps, "metric": metric})
    return rows


def write_rows(path: Path, rows: Iterable[object]) -> Path:
    """Write rows as JSON lines; text as it is."""
    path.write_text(
        "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
    )
    return path


def json_rows(text: str) -> list[Any]:
    """The values of a text of JSON lines."""
    return [json.loads(line) for line in text.splitlines()]


def read_rows(path: Path) -> list[Any]:
    """The values of a file of JSON lines."""
    return json_rows(path.read_text())


def column(rows: Iterable[Mapping[str, Any]], name: str) -> list[Any]:
    """The value under a name in each row."""
    return [row[name] for row in rows]


def evaluated_steps(trial: TrialResult) -> list[int]:
    """The steps at which a trial was evaluated."""
    return [step for step, _ in trial.history]


def metric_values(trial: TrialResult) -> list[float]:
    """The metric at each evaluation of a trial."""
    return [value for _, value in trial.history]


def measured_steps(measurements: Iterable[tuple[int, float, float]]) -> list[int]:
    """The step of each measurement of the noise scale."""
    return [step for step, *_ in measurements]


def statuses(trials: Iterable[TrialResult]) -> list[str]:
    """The status of each trial."""
    return [trial.status for trial in trials]


def numbers(trials: Iterable[Any]) -> list[int]:
    """The number of each trial, or of each observation of one."""
    return [trial.number for trial in trials]


def trials_of(study: Path) -> list[TrialResult]:
    """The records in a study's output folder."""
    return [
        TrialResult.from_json(line) for line in (study / "trials.jsonl").read_text().splitlines()
    ]


def make_trial(
    number: int = 0, batch_size: int = 64, lr: float = 0.1, status: Any = "reached", steps: int = 400,
    steps_low: int = 390, tau: float | None = 0.01, **changes: Any,
) -> TrialResult:  # fmt: skip
    """The record of a trial with seeds, times and a history that fit its steps."""
    seconds = steps * (tau or 0.0)
    values: Mapping[str, Any] = {
        "number": number,
        "trial_index": number,
        "batch_size": batch_size,
        "lr": lr,
        "seed": 1000 + number,
        "status": status,
        "steps": steps,
        "steps_low": steps_low,
        "examples": steps * batch_size,
        "train_seconds": seconds,
        "wall_seconds": 2.0 + seconds,
        "seconds_per_step": tau,
        "device": "NVIDIA H200",
        "history": ((1, 0.9), (steps, 0.0995)),
    }
    return make_result(**{**values, **changes})


def best_of(trials: Sequence[TrialResult]) -> dict[Merit, Winner]:
    """The winners of a study for time with three replicates, each trial predicted to do what it did."""
    return winners(trials, {}, "time", 3, 2)


def data_root(folder: str) -> str:
    """BSTUNE_DATA if it holds real data in ``folder``; skip the test otherwise."""
    root = os.environ.get("BSTUNE_DATA", "")
    if not root or not (Path(root).expanduser() / folder).is_dir():
        pytest.skip(f"BSTUNE_DATA={root!r} is not a folder with {folder}/")
    return root


def make_probe_result(size: int, outcome: "ProbeOutcome" = "fits", mib: int = 100) -> "ProbeResult":
    """A probe that took so many MiB of 1,000."""
    from bstune.hardware.memory import ProbeResult

    return ProbeResult(size, outcome, 1000 * 2**20, mib * 2**20, mib * 2**20)


def make_survey(
    taus: Sequence[tuple[int, float]] = ((4, 1e-3), (64, 1.2e-3), (1000, 5e-3)),
    above: "ProbeResult | None" = None,
    bare: float | None = None,
    **changes: Any,
) -> "Survey":
    """A survey of a Linear with seconds per step ``taus``, ``bare`` of them without the framework."""
    from bstune.hardware.memory import Ceiling, MemoryModel
    from bstune.hardware.roofline import AffineCost, DeviceLimits, LayerCost, StepCost
    from bstune.hardware.survey import Survey
    from bstune.hardware.threads import ThreadChoice
    from bstune.hardware.timing import Measured, StepTiming

    timings = (
        StepTiming(size, tau, tau, tau, 0.0, 9, 3, None if bare is None else bare * tau)
        for size, tau in taus
    )
    at = make_probe_result(taus[-1][0])
    smallest = make_probe_result(taus[0][0])
    model = MemoryModel(90.0 * 2**20, 1024.0)
    moved = AffineCost(0, 100)
    layer = LayerCost("a", "Linear", AffineCost(0, 1e6), moved, moved, AffineCost(1e5, 0))
    values: Mapping[str, Any] = {
        "workload": "w",
        "device": "it",
        "device_type": "cpu",
        "precision": "32-true",
        "versions": {"torch": "2"},
        "high": 1000,
        "ceiling": Ceiling(at, above, taus[0][0], 3, 0.01, model, None, (smallest,)),
        "measured": Measured(tuple(timings), (), ()),
        "limits": DeviceLimits("fp32", 1e9, 1e6),
        "cost": StepCost((layer,), ()),
        "seconds": 2.0,
        "allowed": 2.0,
        "threads": ThreadChoice(1),
    }
    return Survey(**{**values, **changes})
