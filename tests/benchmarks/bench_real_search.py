"""bstune's search against Optuna's TPE on the square-root rule as axis, in real training: seconds to the same answer.

Both propose trials as in ``bstune sweep search_benchmark``, with the same stopping rule for TPE (a trial ends once it
has cost twice the fastest so far), the same first budget, tau(B) given, and the same range of learning rates; trials
are trained in place of being read from a table. The searches take turns, seed by seed. Afterwards every point that was
an incumbent is trained on fresh seeds: its time is the geometric mean over them of steps to target, infinite if missed,
times tau(B), the median over all trials near that batch size. A search has found the answer when its incumbent first
comes within 1.25 of the best such point of all searches, and is charged its own training seconds up to then.

    python tests/benchmarks/bench_real_search.py [--workload digits] [--seeds 5] [--seconds 4] [--fresh 3] [--json FILE]

Run nothing else meanwhile: time to target is the machine's.
"""

import math
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

import optuna
from common import machine, options_of, spread, write

from bstune.core.records import TrialResult, TrialSpec
from bstune.study.prepare import compose_checked, prepare
from bstune.study.prepared import PreparedStudy
from bstune.sweeps.baselines import FRONTIER, searches
from bstune.sweeps.search_problem import WITHIN, Problem, Search
from bstune.system.files import Output

# Octaves of learning rate to either side of the reference.
RANGE = 5.0
# Octaves of batch size over which tau(B) is pooled.
NEAR = 0.5
SEARCHES = (FRONTIER, "tpe/sqrt/pruned", "tpe/sqrt/bound")
Point = tuple[int, float]


@dataclass(frozen=True)
class Course:
    """One search with one seed: its trials, and after each its training seconds so far and the incumbent's point."""

    search: str
    seed: int
    trials: list[TrialResult] = field(default_factory=list)
    path: list[tuple[float, Point | None]] = field(default_factory=list)

    def spending(self, times: dict[Point, float], longest: float) -> float:
        """The spending at which the incumbent first took no longer than the longest time."""
        return next(
            (spent for spent, point in self.path if point and times[point] <= longest), math.inf
        )


def problem_of(prepared: PreparedStudy) -> Problem:
    """The study's workload as a search knows it."""
    space = prepared.space
    scaling = prepared.options.scaling
    # Batch sizes at most an octave apart.
    octaves = math.ceil(math.log2(space.high / space.low))
    sizes = sorted(
        {round(space.low * (space.high / space.low) ** (i / octaves)) for i in range(octaves + 1)}
    )
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
    prepared: PreparedStudy, course: Course, search: Search, seconds: float, output: Output
) -> None:
    """Let a search train until it has spent ``seconds`` of training."""
    output.checkpoints.mkdir(parents=True)
    total = 0.0
    while total < seconds:
        spec = search.propose(course.trials)
        # A trial that goes on needs the state of the one that stopped.
        parent = None if spec.resumed_from is None else course.trials[spec.resumed_from]
        course.trials.append(prepared.backend.run(spec, output, parent))
        total += course.trials[-1].train_seconds
        best = search.incumbent(course.trials)
        course.path.append((total, None if best is None else (best.batch_size, best.lr)))


def tau(batch_size: int, trials: Sequence[TrialResult]) -> float:
    """Seconds per step at a batch size: the median over the trials at about that size."""
    near = [t.seconds_per_step for t in trials if abs(math.log2(t.batch_size / batch_size)) < NEAR]
    return statistics.median(seconds for seconds in near if seconds is not None)


def fresh_times(
    prepared: PreparedStudy, points: Sequence[Point], fresh: int, trials: Sequence[TrialResult]
) -> dict[Point, float]:
    """Each point's seconds to target over fresh seeds; infinite where one of them misses it."""
    runs: dict[Point, list[TrialResult]] = {point: [] for point in points}
    # Points take turns, so that what else the machine does slows all of them.
    for replicate in range(fresh):
        for number, (batch_size, lr) in enumerate(points):
            # Seeds that no search has come to.
            spec = TrialSpec(number, number, batch_size, lr, None, 1_000_000 + replicate)
            runs[batch_size, lr].append(prepared.backend.run(spec, None, None))
    trials = [*trials, *chain(*runs.values())]
    return {
        point: statistics.geometric_mean(run.steps if run.reached else math.inf for run in again)
        * tau(point[0], trials)
        for point, again in runs.items()
    }


if __name__ == "__main__":
    options = options_of(
        __doc__,
        ("--workload", {"default": "digits"}),
        ("--seeds", {"type": int, "default": 5}),
        (
            "--seconds",
            {"type": float, "default": 4.0, "help": "of training that each search may spend"},
        ),
        (
            "--fresh",
            {"type": int, "default": 3, "help": "seeds on which every incumbent is trained again"},
        ),
    )
    about = machine(options.device, options.seeds)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    with tempfile.TemporaryDirectory() as folder:
        arguments = [
            f"workload={options.workload}",
            f"device={options.device}",
            f"output={folder}/o",
        ]
        # The searches train in this process.
        own = ("mlflow.enabled=false", "hardware.enabled=false", "search.workers=0")
        composed = compose_checked([*arguments, *own])
        prepared = prepare(composed.options, composed.recipe)
        problem = problem_of(prepared)
        makers = {entry.key: entry.make for entry in searches() if entry.key in SEARCHES}
        courses = []
        for seed in range(options.seeds):
            for name, make in makers.items():
                courses.append(Course(name, seed))
                output = Output(Path(folder) / f"{name.replace('/', '-')}-{seed}")
                search_for(prepared, courses[-1], make(problem, seed), options.seconds, output)
        points = sorted(
            {point for course in courses for _, point in course.path if point is not None}
        )
        times = fresh_times(
            prepared, points, options.fresh, [*chain(*(course.trials for course in courses))]
        )
    # Of all searches: each is measured against the same point.
    best = min(times, key=lambda point: times[point])
    print(
        f"best: B {best[0]}, lr {best[1]:.4g}, {1e3 * times[best]:.1f} ms; {options.fresh} "
        "fresh seeds a point"
    )
    rows = []
    for course in courses:
        spent = course.spending(times, WITHIN * times[best])
        last = course.path[-1][1]
        trials = len(course.path)
        ratio = math.inf if last is None else times[last] / times[best]
        rows.append(
            {
                "search": course.search,
                "seed": course.seed,
                "trials": trials,
                "spent": spent,
                "last": ratio,
            }
        )
        result = f"{spent:7.2f} s to within {WITHIN}; at the end {ratio:.2f} ({trials} trials)"
        print(f"{course.search:16s} seed {course.seed}: {result}")
    for name in makers:
        spent = [row["spent"] for row in rows if row["search"] == name]
        print(
            f"{name:16s} seconds of training: {spread(spent, 2)} (least, median, most), n = "
            f"{len(spent)}"
        )
    write(options.json, about, rows, best=times[best], point=best)
