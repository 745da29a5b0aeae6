"""Optuna's samplers in the search's place: what they are told, and what they propose."""

import math
import statistics

import numpy as np
import pytest
from search_records import BUDGET, QUESTION, SPACE, Workload, record, spec, step_time

from bstune.core.question import Question
from bstune.core.records import Budget, Target
from bstune.core.space import Space
from bstune.search.fit import Ends
from bstune.search.other_samplers import propose_by

SAMPLERS = ("tpe", "gp", "qmc", "random")
LOWEST = Question(Target("val/error", None, "min"), Budget(steps=BUDGET), "metric")
HIGHEST = Question(Target("val/accuracy", None, "max"), Budget(steps=BUDGET), "metric")


def search(sampler, count, space=SPACE, records=()):
    """Run so many trials of a known law, after some records."""
    records = list(records)
    for number in range(len(records), len(records) + count):
        proposal = propose_by(sampler, QUESTION, space, step_time, records, 0)
        records.append(Workload(noise=0.1).train(number, proposal, records))
    return records


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_proposals_are_allowed_and_follow_from_their_arguments(sampler):
    space = Space(16, 496, 0.01, 1.0, "sqrt", (64, 0.05), multiple=16)
    records = search(sampler, 14, space)
    for one in records:
        assert space.low <= one.batch_size <= space.high
        assert one.batch_size % space.multiple == 0
        assert space.lr_low <= one.lr <= space.lr_high
    assert len({(one.batch_size, one.lr) for one in records}) == len(records)
    again = propose_by(sampler, QUESTION, space, step_time, records[:-1], 0)
    assert (again.batch_size, again.lr) == (records[-1].batch_size, records[-1].lr)
    few = QUESTION, space, step_time, records[:4]
    beside = propose_by(sampler, *few, 0, [spec(4)])
    assert len({beside, *(propose_by(sampler, *few, seed) for seed in (0, 1))}) == 3


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_sizes_that_do_not_fit_are_not_proposed(sampler):
    records = [record(0, steps=400), record(1, "out of memory", batch_size=256, steps=0)]
    refused = [*records, record(2, "refused", batch_size=36, steps=0)]
    for seed in range(4):
        sizes = []
        for given, fits in ((records, Ends()), (refused, Ends()), ([], Ends(90, 100))):
            proposal = propose_by(sampler, QUESTION, SPACE, step_time, given, seed, fits=fits)
            sizes.append(proposal.batch_size)
        assert sizes[0] <= 128
        assert sizes[1] % 8 == 0
        assert sizes[2] <= 94


def told(status, question):
    """Trials all over the rates, which are the better the nearer theirs is to 0.1."""
    records = []
    for number, octaves in enumerate(np.linspace(-6.0, 3.0, 19)):
        off = abs(octaves)
        metric = 0.5 + off if question.target.mode == "min" else 0.5 - off
        fields = {"lr": 0.1 * 2.0**octaves, "batch_size": 8 * 2 ** (number % 7)}
        fields["steps"] = 100
        if status == "reached":
            fields["steps"] = round(100 * 2.0**off)
        if status == "diverged" and off < 1.0:
            fields |= {"steps": 100, "history": ((100, metric),)}
            records.append(record(number, "reached", **fields))
            continue
        history = ((100, None if status == "diverged" else metric),)
        records.append(record(number, status, **fields, history=history))
    return records


@pytest.mark.parametrize(
    ("sampler", "status", "question"),
    [
        ("tpe", "reached", QUESTION),
        ("tpe", "finished", LOWEST),
        ("tpe", "finished", HIGHEST),
        # By their metric.
        ("tpe", "pruned", QUESTION),
        ("tpe", "missed", QUESTION),
        ("tpe", "diverged", QUESTION),
        ("gp", "reached", QUESTION),
        ("gp", "finished", HIGHEST),
        ("gp", "diverged", QUESTION),
    ],
)
def test_what_a_sampler_learns_from(sampler, status, question):
    """The proposals of one that learns nothing lie 2.3 octaves off; of the first 5 seeds 1.1."""
    records = told(status, question)
    octaves = []
    seeds, most = (5, 0.5) if sampler == "gp" else (15, 1.6)
    for seed in range(seeds):
        proposal = propose_by(
            sampler, question, SPACE, step_time, records, seed, resumable=lambda number: False
        )
        octaves.append(abs(math.log2(proposal.lr / 0.1)))
    assert statistics.median(octaves) < most


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_trial_ends_at_little_more_than_the_best_takes(sampler):
    """Before any has reached the target its budget alone ends it."""
    records = [record(0, steps=305, steps_low=304), record(1, steps=700, steps_low=699)]
    proposal = propose_by(sampler, QUESTION, SPACE, step_time, records, 0)
    best = 305 * step_time(64)
    assert proposal.max_steps == math.ceil(1.2 * best / step_time(proposal.batch_size))
    assert propose_by(sampler, QUESTION, SPACE, step_time, [], 0).max_steps == BUDGET


def of_metric(number, status, at_eighth, at_end=None):
    """A run whose metric falls to one value at an eighth of its budget, and to another then."""
    history = [(100, 9.0), (BUDGET // 8, at_eighth)]
    if at_end is not None:
        history.append((BUDGET, at_end))
    steps = history[-1][0]
    pair = {"lr": 0.01 * (number + 1), "max_steps": steps, "steps": steps}
    return record(number, status, **pair, history=tuple(history))


FINISHED = [of_metric(number, "finished", 1.0 + 0.1 * number, 0.5) for number in range(5)]


@pytest.mark.parametrize(
    ("sampler", "metric", "resumable", "resumed_from", "max_steps"),
    [
        # The median of those that finished was 1.2 then.
        ("tpe", 1.1, True, 5, BUDGET),
        ("random", 1.1, True, 5, BUDGET),
        ("qmc", 1.3, True, None, BUDGET // 8),
        ("tpe", 1.3, True, None, BUDGET // 8),
        # A machine on which none can be resumed.
        ("random", 1.1, False, None, BUDGET),
        # The Gaussian process reads trials that finished.
        ("gp", 1.3, True, None, BUDGET),
    ],
)
def test_of_the_best_metric_trials_are_pruned(sampler, metric, resumable, resumed_from, max_steps):
    records = [*FINISHED, of_metric(5, "pruned", metric)]
    proposal = propose_by(
        sampler, LOWEST, SPACE, step_time, records, 0, resumable=lambda number: resumable
    )
    assert (proposal.resumed_from, proposal.max_steps) == (resumed_from, max_steps)
    running = [record(6, lr=0.06, resumed_from=5, steps=1)]
    beside = propose_by(sampler, LOWEST, SPACE, step_time, records, 0, running)
    assert beside.resumed_from is None


def test_a_quasi_random_sequence_goes_on():
    """Each sixteenth of the rates' logarithms has one of 16 trials, whatever else was run."""
    records = search("qmc", 16, records=[record(0, role="baseline")])
    places = [math.log(one.lr / SPACE.lr_low) / math.log(1e3) for one in records[1:]]
    assert sorted(int(16 * place) for place in places) == list(range(16))
