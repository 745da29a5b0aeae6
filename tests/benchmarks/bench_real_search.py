"""bstune's search against Optuna's TPE on the square-root rule as axis, in real training: seconds to the same answer.

Both propose trials as in ``bstune sweep search_benchmark``, with the same stopping rule for TPE (a trial ends once it
has cost twice the fastest so far), the same first budget, tau(B) known, and the same range of learning rates; trials
are trained in place of being read from a table. The searches take turns, seed by seed. Afterwards every point that was
an incumbent is trained on fresh seeds: its time is the geometric mean over them of steps to target times tau(B), the
median of all segments' seconds per step that were measured near that batch size by any search. A search has found the
answer when its incumbent first comes within 1.25 of the best such point of all searches, and is charged its own
training seconds up to then. A point of which a fresh run misses the target is no answer.

    python tests/benchmarks/bench_real_search.py [--workload digits] [--seeds 5] [--seconds 4] [--fresh 3] [--json FILE]

Run nothing else meanwhile: time to target is the machine's.
"""

import math
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import optuna
from common import machine, options_of, write

from bstune.core.files import Output
from bstune.core.records import TrialResult, TrialSpec
from bstune.study.prepare import PreparedStudy, compose_checked, prepare
from bstune.sweeps.baselines import FRONTIER, searches
from bstune.sweeps.search_problem import WITHIN, Problem, Search

RANGE = 5.0  # octaves of learning rate to either side of the reference
NEAR = 0.5  # octaves of batch size over which tau(B) is pooled
SEARCHES = (FRONTIER, "tpe/sqrt/pruned", "tpe/sqrt/bound")
Point = tuple[int, float]


@dataclass(frozen=True)
class Course:
    """The course of one search with one seed: after each trial its spending in seconds, and the incumbent's point."""

    search: str
    seed: int
    trials: int
    spent: tuple[float, ...]
    incumbent: tuple[Point | None, ...]


def problem_of(prepared: PreparedStudy) -> Problem:
    """Return what a search knows of the study's workload."""
    space, scaling = prepared.space, prepared.config.scaling
    octaves = math.ceil(math.log2(space.high / space.low))
    sizes = sorted({round(space.low * (space.high / space.low) ** (i / octaves)) for i in range(octaves + 1)})
    return Problem(
        batch_sizes=tuple(sizes),
        lr_low=scaling.lr * 2.0**-RANGE,
        lr_high=scaling.lr * 2.0**RANGE,
        target=prepared.protocol.target,
        objective="time",
        reference_batch_size=scaling.batch_size,
        reference_lr=scaling.lr,
        budget=prepared.protocol.budget,
        seconds_per_step=tuple(prepared.backend.step_time(size) for size in sizes),
        noise_scale=None,
    )


def search_for(
    prepared: PreparedStudy, name: str, search: Search, seed: int, seconds: float, folder: Path
) -> tuple[Course, list[TrialResult]]:
    """Let a search train until it has spent ``seconds`` of training."""
    output = Output(folder)
    output.checkpoints.mkdir(parents=True)
    finished: list[TrialResult] = []
    spent: list[float] = []
    incumbents: list[Point | None] = []
    total = 0.0
    while total < seconds:
        spec = search.propose(finished)
        parent = None if spec.resumed_from is None else finished[spec.resumed_from]
        result = prepared.backend.run(spec, output, parent)
        total += result.train_seconds
        finished.append(result)
        best = search.incumbent(finished)
        spent.append(total)
        incumbents.append(None if best is None else (best.batch_size, best.lr))
    return Course(name, seed, len(finished), tuple(spent), tuple(incumbents)), finished


def tau(batch_size: int, trials: Sequence[TrialResult]) -> float:
    """Return seconds per step at a batch size: the median over the trials at about that size."""
    near = [t for t in trials if t.seconds_per_step is not None and abs(math.log2(t.batch_size / batch_size)) < NEAR]
    return statistics.median(t.seconds_per_step for t in near if t.seconds_per_step is not None)


def fresh_times(
    prepared: PreparedStudy, points: Sequence[Point], fresh: int, trials: list[TrialResult]
) -> dict[Point, float]:
    """Return each point's seconds to target over fresh seeds; infinite where one of them misses it."""
    runs: dict[Point, list[TrialResult]] = {point: [] for point in points}
    for replicate in range(fresh):
        for number, (batch_size, lr) in enumerate(points):
            spec = TrialSpec(number, number, batch_size, lr, None, 1_000_000 + replicate)
            runs[batch_size, lr].append(prepared.backend.run(spec, None, None))
    trials += [run for own in runs.values() for run in own]
    found = {}
    for (batch_size, lr), own in runs.items():
        logs = [math.log(run.steps) if run.reached else math.inf for run in own]
        found[batch_size, lr] = math.exp(sum(logs) / len(logs)) * tau(batch_size, trials)
    return found


def spending(course: Course, times: dict[Point, float], best: float) -> float:
    """Return what a search had spent when its incumbent first came within the factor of the best."""
    for spent, point in zip(course.spent, course.incumbent, strict=True):
        if point is not None and times[point] <= WITHIN * best:
            return spent
    return math.inf


if __name__ == "__main__":
    options = options_of(
        __doc__,
        ("--workload", {"default": "digits"}),
        ("--seeds", {"type": int, "default": 5}),
        ("--seconds", {"type": float, "default": 4.0, "help": "of training that each search may spend"}),
        ("--fresh", {"type": int, "default": 3, "help": "seeds on which every incumbent is trained again"}),
    )
    about = machine(options.device, options.seeds)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    with tempfile.TemporaryDirectory() as folder:
        arguments = [f"workload={options.workload}", f"device={options.device}", f"output={folder}/o"]
        prepared = prepare(compose_checked([*arguments, "mlflow.enabled=false", "hardware.enabled=false"]))
        problem = problem_of(prepared)
        makers = {entry.key: entry.make for entry in searches() if entry.key in SEARCHES}
        courses, trials = [], []
        for seed in range(options.seeds):
            for name, make in makers.items():
                place = Path(folder) / f"{name.replace('/', '-')}-{seed}"
                course, ran = search_for(prepared, name, make(problem, seed), seed, options.seconds, place)
                courses.append(course)
                trials += ran
        points = sorted({point for course in courses for point in course.incumbent if point is not None})
        times = fresh_times(prepared, points, options.fresh, trials)
    best = min(times, key=lambda point: times[point])
    print(f"best: B {best[0]}, lr {best[1]:.4g}, {1e3 * times[best]:.1f} ms; {options.fresh} fresh seeds a point")
    rows = []
    for course in courses:
        spent, last = spending(course, times, times[best]), course.incumbent[-1]
        ratio = math.inf if last is None else times[last] / times[best]
        rows.append(
            {"search": course.search, "seed": course.seed, "trials": course.trials, "spent": spent, "last": ratio}
        )
        result = f"{spent:7.2f} s to within {WITHIN}; at the end {ratio:.2f} ({course.trials} trials)"
        print(f"{course.search:16s} seed {course.seed}: {result}")
    for name in makers:
        own = [row["spent"] for row in rows if row["search"] == name]
        middle = statistics.median(own)
        print(f"{name:16s} median {middle:.2f} s of training, {min(own):.2f} to {max(own):.2f}, n = {len(own)}")
    write(options.json, about, rows, best=times[best], point=best)
