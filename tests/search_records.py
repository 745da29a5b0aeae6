"""Records for tests of the search: single ones, and those of a workload that follows the law."""

import math
from dataclasses import dataclass

import numpy as np

from bstune.core.question import Question
from bstune.core.records import Budget, Record, Spec, Target
from bstune.core.space import Space

TARGET = Target("val/error", 0.1, "min")
# Steps of a trial.
BUDGET = 4000
QUESTION = Question(TARGET, Budget(steps=BUDGET))
SPACE = Space(8, 512, 0.001, 1.0, "sqrt", (64, 0.05))
ROLES = {"baseline": "baseline", "search": "search", "seed": "new seed"}


def history(text):
    """Evaluations as a text: ``10 0.8, 40 0.3, 80 -``, - where there is no value."""
    pairs = [pair.split() for pair in text.split(", ")] if text else ()
    return tuple((int(step), None if value == "-" else float(value)) for step, value in pairs)


def step_time(batch_size):
    """Seconds of a step."""
    return 1e-3 + 1e-5 * batch_size


def spec(number=0, **fields):
    """A trial of the search at batch size 8 and lr 0.1, of 100 steps at most."""
    values = {
        "place": f"search/{number}",
        "role": "search",
        "batch_size": 8,
        "lr": 0.1,
        "seed": 3,
        "max_steps": 100,
    }
    return Spec(number=number, **(values | fields))


def record(number=0, status="reached", **fields):
    """A trial that ran 100 steps at batch size 64 and lr 0.05; its place tells its role."""
    place = fields.get("place", f"search/{number}")
    values = {
        "place": place,
        "role": ROLES[place.partition("/")[0]],
        "batch_size": 64,
        "lr": 0.05,
        "seed": number,
        "max_steps": 4000,
        "steps": 100,
        "steps_low": 90 if status == "reached" else 100,
    }
    return Record(number=number, status=status, **(values | fields))


@dataclass(frozen=True)
class Workload:
    """Steps to the target that follow the law, metrics that fall as a power of the steps."""

    s_min: float = 100.0
    b_crit: float = 40.0
    lr: float = 0.1
    """The best rate at batch size 64; it grows as the square root of B."""
    per_octave: float = 0.3
    """Curvature of log S off the best rate."""
    noise: float = 0.0
    rate: float = 0.5

    def steps(self, batch_size, lr, seed=0):
        """Steps to the target."""
        octaves = math.log2(lr / self.lr) - 0.5 * math.log2(batch_size / 64)
        off = self.per_octave * octaves**2 + self.noise * np.random.default_rng(seed).normal()
        return self.s_min * (1.0 + self.b_crit / batch_size) * math.exp(off)

    def train(self, number, proposal, records):
        """Train a proposal, evaluated at steps 5% apart."""
        parent = None if proposal.resumed_from is None else records[proposal.resumed_from]
        seed = parent.seed if parent else number
        needed = self.steps(proposal.batch_size, proposal.lr, seed)
        history = []
        step = 1
        while True:
            step = min(step, proposal.max_steps)
            history.append((step, TARGET.goal * (needed / step) ** self.rate))
            if TARGET.reached(history[-1][1]) or step == proposal.max_steps:
                break
            step = max(step + 1, int(1.05 * step))
        misses = [step for step, value in history if not TARGET.reached(value)]
        status = "reached" if TARGET.reached(history[-1][1]) else "pruned"
        if status == "pruned" and step >= QUESTION.budget.last_step(proposal.batch_size):
            status = "missed"
        return record(
            number,
            status,
            **proposal.model_dump(),
            seed=seed,
            steps=step,
            steps_low=max(misses, default=0),
            history=tuple(history),
        )
