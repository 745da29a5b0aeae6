"""Gate *schedule lengths*: searches that choose the length of schedules that end with trials.

    python tests/benchmarks/schedule_lengths.py [--seeds 10] [--problems ...]

Problems are two tables of recorded runs and 16 synthetic laws (one seed each), each without and
with the baseline first (with the whole budget as its schedule, and the square-root rule through it;
else it goes through the middle of both ranges). No clock goes in. A row has, after 10, 20 and 40
times the least cost of any batch size, rate and length, the search's choice: ``fresh``, what its
configuration and length take on new seeds until one reaches the target, runs that miss included,
and ``own``, its own trial; both over that least cost.

A law: a run of length h reaches the target if h is at least S(B, lr) exp(0.1 z), z drawn by its
seed, at step S^(1 - m) h^m; at its end the metric is f + (goal - f)(S/h)^p with noise. S is the
law of McCandlish et al. with a parabola in log2(lr/lr*(B)), and beyond an edge a run diverges.

The old rows are those of bstune 0.1 (38d319c7, ``bench_horizon.py``, code "now" of its
``horizon.jsonl``), of the same problems.
"""

import math
from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from operator import itemgetter

import numpy as np
import synthetic
from common import ENDS, RESAMPLES, ROWS, WORST, read_rows, run_gate
from scipy.special import ndtr

from bstune.core.question import Question
from bstune.core.records import Budget, Record, Spec
from bstune.core.space import Space
from bstune.search.decide import propose
from bstune.search.findings import predictions
from bstune.search.posterior import sample_posterior
from bstune.trial.recorded_run import Outcome
from bstune.trial.table import Table, find_table

# Spendings at which choices are judged, in least costs.
SPENDINGS = (10.0, 20.0, 40.0)
LAWS = tuple(f"law {number}" for number in range(16))
# What the recorded workloads use today.
BASELINES = {"digits_linear": (64, 0.4), "mnist_mlp_linear": (64, 0.2)}
MOST_TRIALS = 400
OLD = ROWS / "schedule_lengths_old.jsonl"
# The noise of a law's metric.
METRIC_NOISE = 0.03
# Lengths over S among which a law's least cost lies.
LENGTHS = np.exp(np.linspace(-0.3, 0.8, 45))
# A table's least cost is sought at twice as many places as were recorded, and at so many lengths.
TABLE_LENGTHS = 60


@dataclass(frozen=True)
class Law:
    """A synthetic law; see the module."""

    of: synthetic.Law
    power: float
    floor: float
    share: float
    budget_factor: float
    off: tuple[float, float]

    target = synthetic.TARGET
    range = (8, 4096)
    lrs = (2.0**-11, 2.0**1.25)

    @staticmethod
    def draw(number):
        """The law of a number, in the order of draws of 0.1's benchmark."""
        rng = np.random.default_rng([number, 5])
        return Law(
            of=synthetic.draw_law("noise 10%", number),
            power=math.exp(rng.uniform(math.log(0.3), math.log(1.2))),
            floor=rng.uniform(0.0, 0.08),
            share=(0.2, 0.5, 0.8, 1.0)[number % 4],
            budget_factor=math.exp(rng.uniform(0.0, math.log(4.0))),
            off=(rng.uniform(-2.0, 2.0), rng.uniform(-1.5, 1.5)),
        )

    def step_time(self, batch_size):
        """tau(B), in seconds."""
        return self.of.overhead + self.of.per_example * batch_size

    def outcome(self, batch_size, lr, seed, target, length):
        """How a run ends; the evaluation before was 5% of the steps earlier."""
        rng = np.random.default_rng([seed, 77])
        tau = self.step_time(batch_size)
        shortest = self.of.steps(batch_size, lr)
        if shortest is None:
            end = max(1, round(0.1 * min(length, self.of.curve(batch_size))))
            return Outcome(None, end, tau, (), diverged=True)
        shortest *= math.exp(self.of.noise * rng.standard_normal())
        height = (shortest / length) ** self.power * math.exp(METRIC_NOISE * rng.standard_normal())
        goal = target.goal
        value = min(self.floor + (goal - self.floor) * height, synthetic.START)
        if length < shortest:
            value = max(value, math.nextafter(goal, 1.0))
            return Outcome(None, length, tau, ((length, value),), diverged=False)
        steps = min(max(1, round(shortest ** (1.0 - self.share) * length**self.share)), length)
        value = min(value, goal) if steps == length else goal
        return Outcome(steps, steps, tau, ((steps, value),), diverged=False)

    def cost(self, batch_size, lr, length):
        """Seconds until a new seed reaches the target, those of misses included."""
        shortest = self.of.steps(batch_size, lr)
        if shortest is None:
            return math.inf
        reaches = float(ndtr(math.log(length / shortest) / self.of.noise))
        if reaches < 1e-6:
            return math.inf
        steps = min(shortest ** (1.0 - self.share) * length**self.share, length)
        return self.step_time(batch_size) * (steps + length * (1.0 - reaches) / reaches)

    @cached_property
    def best(self):
        """The least cost, its batch size and its length."""
        points = []
        for size in 2.0 ** np.arange(3.0, 12.0 + 1e-9, 0.125):
            rate = float(np.clip(self.of.best_lr(size), *self.lrs))
            steps = self.of.steps(size, rate)
            for length in [] if steps is None else steps * LENGTHS:
                points.append((self.cost(size, rate, length), size, length))
        return min(points)

    @property
    def baseline(self):
        """A batch size and rate up to two octaves and 1.5 from the best ones."""
        size = float(np.clip(self.best[1] * 2.0 ** self.off[0], *self.range))
        lr = self.of.best_lr(size) * 2.0 ** self.off[1]
        return round(size), float(np.clip(lr, *self.lrs))

    @property
    def budget(self):
        """1 to 4 times the examples of the best point."""
        _, size, length = self.best
        return Budget(steps=1, examples=max(1, math.ceil(self.budget_factor * size * length)))


@dataclass(frozen=True)
class Recorded(Table):
    """A table of recorded runs, and the baseline of the recorded workload."""

    baseline: tuple[int, float] = (0, 0.0)

    def cost(self, batch_size, lr, length):
        """Seconds until a seed reaches the target, over all recorded ones."""
        seeds = len({run.seed for run in self.runs})
        seconds = 0.0
        reached = 0
        for share in (np.arange(seeds) + 0.5) / seeds:
            outcome = self.lengths.outcome_at(batch_size, lr, length, share, self.target)
            seconds += outcome.end * outcome.seconds_per_step
            reached += outcome.steps is not None
        return seconds / reached if reached else math.inf

    @cached_property
    def best(self):
        """The least cost, its batch size, rate and length, between recorded places as well."""
        lengths = [run.horizon for run in self.runs]
        grid = product(
            _finer(self.batch_sizes),
            _finer(self.lrs),
            np.geomspace(min(lengths), max(lengths), TABLE_LENGTHS),
        )
        costs = []
        for size, lr, length in grid:
            point = round(size), lr, round(length)
            if point[2] <= self.budget.last_step(point[0]):
                costs.append((self.cost(*point), *point))
        return min(costs)


def _finer(values):
    """The values, and one between each two in the logarithm."""
    places = np.arange(0.0, len(values) - 1 + 1e-9, 0.5)
    return np.exp(np.interp(places, np.arange(len(values)), np.log(values))).tolist()


def problem_of(name):
    """The problem of a name."""
    if name in LAWS:
        return Law.draw(LAWS.index(name))
    table = find_table(name)
    return Recorded(table.runs, table.target, BASELINES[name])


def record_of(problem, spec):
    """A run's record."""
    asked = spec.batch_size, spec.lr, spec.seed, problem.target, spec.max_steps
    outcome = problem.outcome(*asked)
    reached = outcome.steps is not None
    status = "reached" if reached else "diverged" if outcome.diverged else "missed"
    missed = [step for step, value in outcome.history if not problem.target.reached(value)]
    if isinstance(problem, Law):
        missed = [outcome.end - max(1, outcome.end // 20)]
    return Record(
        **spec.model_dump(),
        status=status,
        steps=outcome.end,
        steps_low=max(missed, default=0) if reached else outcome.end,
        seconds_per_step=outcome.seconds_per_step,
        train_seconds=outcome.end * outcome.seconds_per_step,
        history=outcome.history,
    )


def search(problem, seed, baseline_first):
    """Yield the seconds spent after each trial and the choice then, up to the last spending."""
    question = Question(problem.target, problem.budget, schedule_ends=True)
    baseline = problem.baseline if baseline_first else None
    rates = problem.lrs[0], problem.lrs[-1]
    space = Space.around(problem.range, rates, "sqrt", baseline, multiple=1)
    records = []
    spent = 0.0
    choice = None
    while spent < SPENDINGS[-1] * problem.best[0] and len(records) < MOST_TRIALS:
        number = len(records)
        if baseline is not None and not records:
            batch_size, lr = baseline
            length = question.budget.last_step(batch_size)
        else:
            proposal = propose(question, space, problem.step_time, records, seed)
            batch_size, lr, length = proposal.batch_size, proposal.lr, proposal.max_steps
        spec = Spec(
            number=number, place=f"search/{number}", role="search", batch_size=batch_size, lr=lr,
            seed=10_000 * seed + number, max_steps=length, schedule_steps=length,
        )  # fmt: skip
        records.append(record_of(problem, spec))
        spent += records[-1].train_seconds
        if records[-1].reached:
            posterior = sample_posterior(question, space, records, seed=seed)
            predicted = predictions(posterior, question, problem.step_time)
            choice = min(predicted, key=lambda one: one.log_value)
        yield spent / problem.best[0], choice


def measure(problem, seed, baseline_first):
    """What the choices of one search take, over the least cost."""
    # What 0.1's benchmark added to the seeds of a law.
    seed += 1000 * LAWS.index(problem) if problem in LAWS else 0
    problem = problem_of(problem)
    path = list(search(problem, seed, baseline_first))
    fresh, own = [], []
    for spending in SPENDINGS:
        *_, choice = [None, *(choice for spent, choice in path if spent <= spending)]
        cost = seconds = math.inf
        if choice is not None:
            record, length = choice.record, round(choice.length.steps)
            cost = problem.cost(record.batch_size, record.lr, length) / problem.best[0]
            seconds = record.train_seconds / problem.best[0]
        for values, value in ((fresh, cost), (own, seconds)):
            values.append(round(value, 4) if math.isfinite(value) else None)
    return {"trials": len(path), "fresh": fresh, "own": own}


def summary(new):
    """Each kind with medians of ``fresh``, new and old; then new over old, its mean and 90%."""
    key = itemgetter("problem", "seed", "baseline_first")
    olds = {key(row): row for row in read_rows(OLD)}
    groups = defaultdict(list)
    for row in new:
        if key(row) in olds:
            kind = "laws" if row["problem"] in LAWS else row["problem"]
            groups[kind, row["baseline_first"]].append([row["fresh"], olds[key(row)]["fresh"]])
    logs = []
    for (kind, baseline_first), pairs in sorted(groups.items()):
        # A search without a choice takes infinitely long.
        both = np.nan_to_num(np.array(pairs, float), nan=np.inf)
        medians = np.median(both, axis=0).ravel()
        label = f"{kind}{', baseline first' if baseline_first else ''}"
        yield "| {} | {:.2f}, {:.2f}, {:.2f} | {:.2f}, {:.2f}, {:.2f} |".format(label, *medians)
        logs.append(np.diff(np.log(np.minimum(both[:, ::-1], WORST)), axis=1)[:, 0])
    rng = np.random.default_rng(0)
    resampled = []
    for _ in range(RESAMPLES if logs else 0):
        drawn = [of_group[rng.integers(len(of_group), size=len(of_group))] for of_group in logs]
        resampled.append(np.concatenate(drawn).mean())
    if logs:
        ends = np.exp([np.concatenate(logs).mean(), *np.quantile(resampled, ENDS)])
        yield "in all: new/old {:.3f} ({:.3f} to {:.3f})".format(*ends)


if __name__ == "__main__":
    run_gate(
        __doc__,
        "schedule_lengths_new.jsonl",
        measure,
        summary,
        seeds=10,
        # A law has one seed.
        wanted=lambda problem, seed, **job: seed == 0 or problem not in LAWS,
        problems=("problem", (*BASELINES, *LAWS)),
        starts=("baseline_first", (False, True)),
    )
