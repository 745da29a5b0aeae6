"""Gate *schedule lengths*: searches that choose the length of schedules that end with trials.

    python tests/benchmarks/schedule_lengths.py [--seeds 16] [--problems ...]

Problems are two tables of recorded runs, and synthetic laws, one a seed, each without and with the
baseline first (with the whole budget as its schedule, and the square-root rule through it;
else it goes through the middle of both ranges). No clock goes in. A row has, after 10, 20 and 40
times the least cost of any batch size, rate and length, ``fresh``: what the configuration and the
length of the search's choice take on new seeds until one reaches the target, runs that miss
included, over that least cost.

A law: a run of length h reaches the target if h is at least S(B, lr) exp(0.1 z), z drawn by its
seed, at step S^(1 - m) h^m; at its end the metric is f + (goal - f)(S/h)^p with noise. S is the
law of McCandlish et al. with a parabola in log2(lr/lr*(B)), and beyond an edge a run diverges.
"""

import math
from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from operator import itemgetter

import numpy as np
import synthetic
from common import run_gate
from scipy.special import ndtr

from bstune.core.question import Question
from bstune.core.records import Budget
from bstune.search.findings import predictions
from bstune.search.posterior import sample_posterior
from bstune.sweeps.search_benchmark import Problem, ratio_after, search
from bstune.trial.recorded_run import Outcome
from bstune.trial.table import Table, find_table

# Spendings at which choices are judged, in least costs.
SPENDINGS = (10.0, 20.0, 40.0)
# What the recorded workloads use today.
BASELINES = {"digits_linear": (64, 0.4), "mnist_mlp_linear": (64, 0.2)}
# The noise of a law's metric.
METRIC_NOISE = 0.03
# Lengths over S among which a law's least cost lies.
LENGTHS = np.exp(np.linspace(-0.3, 0.8, 45))
# A table's least cost is sought at twice as many places as were recorded, and at so many lengths.
TABLE_LENGTHS = 60


@dataclass(frozen=True)
class Law(synthetic.Law):
    """A synthetic law; see the module."""

    power: float = 1.0
    floor: float = 0.0
    share: float = 1.0
    budget_factor: float = 1.0
    off: tuple[float, float] = (0.0, 0.0)

    target = synthetic.TARGET
    range = (8, 4096)
    lrs = (2.0**-11, 2.0**1.25)

    @staticmethod
    def draw(number):
        """The law of a number, in the order of draws of 0.1's benchmark."""
        rng = np.random.default_rng([number, 5])
        return Law(
            **vars(synthetic.draw_law("noise 10%", number)),
            power=math.exp(rng.uniform(math.log(0.3), math.log(1.2))),
            floor=rng.uniform(0.0, 0.08),
            share=(0.2, 0.5, 0.8, 1.0)[number % 4],
            budget_factor=math.exp(rng.uniform(0.0, math.log(4.0))),
            off=(rng.uniform(-2.0, 2.0), rng.uniform(-1.5, 1.5)),
        )

    def step_time(self, batch_size):
        """tau(B), in seconds."""
        return self.overhead + self.per_example * batch_size

    def outcome(self, batch_size, lr, seed, target, length):
        """How a run ends; the evaluation before a hit was 5% of the steps earlier, a miss."""
        rng = np.random.default_rng([seed, 77])
        tau = self.step_time(batch_size)
        shortest = self.steps(batch_size, lr)
        if shortest is None:
            end = max(1, round(0.1 * min(length, self.curve(batch_size))))
            return Outcome(None, end, tau, (), diverged=True)
        shortest *= math.exp(self.noise * rng.standard_normal())
        height = (shortest / length) ** self.power * math.exp(METRIC_NOISE * rng.standard_normal())
        goal = target.goal
        value = min(self.floor + (goal - self.floor) * height, synthetic.START)
        missed = math.nextafter(goal, 1.0)
        if length < shortest:
            return Outcome(None, length, tau, ((length, max(value, missed)),), diverged=False)
        steps = min(max(1, round(shortest ** (1.0 - self.share) * length**self.share)), length)
        value = min(value, goal) if steps == length else goal
        history = (steps - max(1, steps // 20), missed), (steps, value)
        return Outcome(steps, steps, tau, history, diverged=False)

    def cost(self, batch_size, lr, length):
        """Seconds until a new seed reaches the target, those of misses included."""
        shortest = self.steps(batch_size, lr)
        if shortest is None:
            return math.inf
        reaches = float(ndtr(math.log(length / shortest) / self.noise))
        if reaches < 1e-6:
            return math.inf
        steps = min(shortest ** (1.0 - self.share) * length**self.share, length)
        return self.step_time(batch_size) * (steps + length * (1.0 - reaches) / reaches)

    @cached_property
    def best(self):
        """Batch size and rate of the least cost, that, and the length."""
        points = []
        for size in 2.0 ** np.arange(3.0, 12.0 + 1e-9, 0.125):
            rate = float(np.clip(self.best_lr(size), *self.lrs))
            steps = self.steps(size, rate)
            for length in [] if steps is None else steps * LENGTHS:
                points.append((size, rate, self.cost(size, rate, length), length))
        return min(points, key=itemgetter(2))

    @property
    def baseline(self):
        """A batch size and rate up to two octaves and 1.5 from the best ones."""
        size = float(np.clip(self.best[0] * 2.0 ** self.off[0], *self.range))
        lr = self.best_lr(size) * 2.0 ** self.off[1]
        return round(size), float(np.clip(lr, *self.lrs))

    @property
    def budget(self):
        """1 to 4 times the examples of the best point."""
        size, _, _, length = self.best
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
        """Batch size and rate of the least cost, and that, between recorded places as well."""
        lengths = [run.horizon for run in self.runs]
        grid = product(
            _finer(self.batch_sizes),
            _finer(self.lrs),
            np.geomspace(min(lengths), max(lengths), TABLE_LENGTHS),
        )
        points = []
        for size, lr, length in grid:
            size, length = round(size), round(length)
            if length <= self.budget.last_step(size):
                points.append((size, lr, self.cost(size, lr, length)))
        return min(points, key=itemgetter(2))


def _finer(values):
    """The values, and one between each two in the logarithm."""
    places = np.arange(0.0, len(values) - 1 + 1e-9, 0.5)
    return np.exp(np.interp(places, np.arange(len(values)), np.log(values))).tolist()


@dataclass(frozen=True)
class EndingProblem(Problem):
    """A problem whose schedules end with their trials, of a law or of recorded runs."""

    @property
    def best(self):
        """Batch size, rate and cost of the best configuration and length."""
        return self.table.best

    @property
    def question(self):
        """The target, within the table's budget."""
        return Question(self.target, self.table.budget, schedule_ends=True)

    def outcome(self, asked, seed):
        """How a trial ends, with its schedule."""
        return self.table.outcome(asked.batch_size, asked.lr, seed, self.target, asked.max_steps)

    def answer(self, proposal, seed, records):
        """The next trial's end: one whose schedule has ended was not pruned."""
        record = super().answer(proposal, seed, records)
        status = "missed" if record.status == "pruned" else record.status
        return record.model_copy(update={"status": status, "schedule_steps": record.max_steps})

    def ratio(self, records, seed):
        """What the choice takes, over the least cost; None: no seed reaches the target."""
        posterior = sample_posterior(self.question, self.space, records, seed=seed)
        predicted = predictions(posterior, self.question, self.step_time)
        choice = min(predicted, key=lambda one: one.log_value)
        record, length = choice.record, round(choice.length.steps)
        ratio = self.table.cost(record.batch_size, record.lr, length) / self.best[2]
        return round(ratio, 4) if math.isfinite(ratio) else None


def measure(problem, seed, baseline_first):
    """What the choices of one search take."""
    table = Law.draw(seed)
    if problem != "laws":
        recorded = find_table(problem)
        table = Recorded(recorded.runs, recorded.target, BASELINES[problem])
    ending = EndingProblem(table, baseline=table.baseline if baseline_first else None)
    path, trials = [], 0
    for spent, records in search(ending, seed, SPENDINGS[-1]):
        trials = len(records)
        if records[-1].reached:
            path.append((spent, ending.ratio(records, seed)))
    return {"trials": trials, "fresh": [ratio_after(path, spending) for spending in SPENDINGS]}


def summary(rows):
    """Each kind of problem with medians of ``fresh``; inf: too many searches had no choice."""
    groups = defaultdict(list)
    for row in rows:
        label = f"{row['problem']}{', baseline first' if row['baseline_first'] else ''}"
        groups[label].append([ratio or math.inf for ratio in row["fresh"]])
    for label, ratios in sorted(groups.items()):
        yield "| {} | {:.2f}, {:.2f}, {:.2f} |".format(label, *np.median(ratios, axis=0))


if __name__ == "__main__":
    run_gate(
        __doc__,
        "schedule_lengths_new.jsonl",
        measure,
        summary,
        seeds=16,
        problems=("problem", (*BASELINES, "laws")),
        starts=("baseline_first", (False, True)),
    )
