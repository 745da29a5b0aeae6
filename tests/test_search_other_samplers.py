"""The grid and Optuna's samplers in the search's place: what they propose."""

import math
import statistics
from dataclasses import replace

import numpy as np
import pytest
from refusals import cases
from search_records import BUDGET, QUESTION, SPACE, Workload, record, spec, step_time

from bstune.core.question import Question
from bstune.core.records import Budget, Target
from bstune.core.space import Space
from bstune.search.grid import best_of_grid, grid_sizes, propose_of_grid
from bstune.search.other_samplers import propose_by

LOWEST = Question(Target("val/error", None, "min"), Budget(steps=BUDGET), "metric")
HIGHEST = Question(Target("val/accuracy", None, "max"), Budget(steps=BUDGET), "metric")


def propose(sampler, records, seed=0, question=QUESTION, space=SPACE, **arguments):
    return propose_by(sampler, question, space, step_time, records, seed, **arguments)


@pytest.mark.parametrize("sampler", ["tpe", "gp", "qmc", "random"])
def test_proposals_are_allowed_and_follow_from_their_arguments(sampler):
    space = Space(16, 496, 0.01, 1.0, "sqrt", (64, 0.05), multiple=16)
    records = [record(steps=305, steps_low=304)]
    for number in range(1, 10):
        proposal = propose(sampler, records, space=space)
        assert proposal.batch_size in range(16, 497, 16)
        assert 0.01 <= proposal.lr <= 1.0
        # Again, from the same records; another seed proposes another one.
        assert propose(sampler, records, space=space) == proposal
        if number == 4:
            assert propose(sampler, records, seed=1, space=space) != proposal
        if number == 1:
            # A trial ends a little beyond what the best takes.
            of_best = 305 * step_time(64) / step_time(proposal.batch_size)
            assert proposal.max_steps == math.ceil(1.2 * of_best)
        records.append(Workload(noise=0.1).train(number, proposal, records))
    assert len({(one.batch_size, one.lr) for one in records}) == 10
    # Before one has reached the target its budget alone ends it.
    assert propose(sampler, []).max_steps == BUDGET
    unfit = [record(0, steps=400), record(1, "out of memory", batch_size=256, steps=0)]
    unfit.append(record(2, "refused", batch_size=36, steps=0))
    for seed in range(4):
        assert propose(sampler, unfit, seed).batch_size in range(8, 129, 8)


@pytest.mark.parametrize(
    "sampler, near, far, question",
    [
        # Their metric tells.
        ("tpe", "pruned", "pruned", QUESTION),
        ("tpe", "finished", "finished", LOWEST),
        ("gp", "finished", "diverged", HIGHEST),
    ],
)
def test_what_a_sampler_learns_from(sampler, near, far, question):
    """Of these five seeds a sampler that learns nothing proposes rates 1.1 octaves off the best."""
    records = []
    for number, octaves in enumerate(np.linspace(-6.0, 3.0, 19)):
        off = abs(octaves)
        metric = 9.0 - off if question is HIGHEST else 9.0 + off
        fields = {"lr": 0.1 * 2.0**octaves, "history": ((100, metric),)}
        fields |= {"steps": round(100 * 2.0**off), "steps_low": 0}
        records.append(record(number, near if off < 2.0 else far, **fields))
    found = []
    for seed in range(5):
        proposal = propose(sampler, records, seed, question, resumable=lambda number: False)
        found.append(abs(math.log2(proposal.lr / 0.1)))
    assert statistics.median(found) < 0.5


def of_metric(number, status, at_eighth, **fields):
    """A run of the whole budget, or of an eighth, and its metric there."""
    steps = BUDGET if status == "finished" else BUDGET // 8
    history = ((BUDGET // 8, at_eighth), (BUDGET, 0.5))
    fields |= {"steps": steps, "history": history[: 1 + (status == "finished")]}
    return record(number, status, lr=0.01 * (number + 1), **fields)


@cases("""
sampler | metric | resumable | resumed_from | max_steps
# The median of those that finished was 1.2 then.
random | 1.1 | true | 5 | 4000
qmc | 1.3 | true | null | 500
# A machine on which none can be resumed.
tpe | 1.1 | false | null | 4000
""")
def test_for_the_best_metric_trials_are_pruned(sampler, metric, resumable, resumed_from, max_steps):
    records = [of_metric(number, "finished", 1.0 + 0.1 * number) for number in range(5)]
    records.append(of_metric(5, "pruned", metric))
    arguments = {"question": LOWEST, "resumable": lambda number: resumable}
    proposal = propose(sampler, records, **arguments)
    assert (proposal.resumed_from, proposal.max_steps) == (resumed_from, max_steps)
    running = [spec(6, resumed_from=5)]
    assert propose(sampler, records, running=running, **arguments).resumed_from is None


SMALL = Space(16, 64, 0.0001, 10.0, "sqrt", (64, 0.1))


@cases("""
low | high | status | size | sizes
# Ends between two powers.
5 | 128 | null | null | [5, 8, 16, 32, 64, 128]
48 | 48 | null | null | [48]
32 | 128 | out of memory | 128 | [32, 64]
8 | 128 | refused | 16 | [32, 64, 128]
""")
def test_batch_sizes_are_powers_of_two(low, high, status, size, sizes):
    records = [record(0), record(1, status, batch_size=size)] if status else []
    assert grid_sizes(replace(SPACE, low=low, high=high), records) == sizes


TRIED = [[4, [0, 1, -1, 2, -2, 3, 4, 5]], [-3, [0, 1, -1, 2, -2, -3, -4]]]


@pytest.mark.parametrize("best, tried", TRIED)
def test_a_grid_is_extended_until_its_best_rate_lies_inside(best, tried):
    workload, records = Workload(lr=0.1 * 2.0**best), []
    octaves = {16: [], 32: [], 64: []}
    for number in range(3 * len(tried) + 6):
        proposal = propose_of_grid(QUESTION, SMALL, step_time, records)
        size = proposal.batch_size
        octaves[size].append(round(math.log2(proposal.lr / SMALL.rule_lr(size)), 1))
        records.append(workload.train(number, proposal, records))
    # Then it is refined, each batch size as often.
    assert list(octaves.values()) == 3 * [[*tried, best + 0.5, best - 0.5]]
    for size, one in zip(octaves, best_of_grid(SMALL, records), strict=True):
        assert one.batch_size == size
        assert one.lr == pytest.approx(SMALL.rule_lr(size) * 2.0**best, rel=0.01)
        assert one.steps_to_target == pytest.approx(workload.steps(size, one.lr), rel=0.05)
