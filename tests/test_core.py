"""Targets, budgets, evaluations, clock, rules, ranges, step times: tables and closed forms."""

import math
import statistics
import subprocess
import sys

import numpy as np
import pytest
from refusals import cases, refused
from search_records import history, record

import bstune
from bstune.core.clock import TrainingClock, processor_wait, seconds_per_step
from bstune.core.evaluation_schedule import next_evaluation
from bstune.core.records import Record, Target
from bstune.core.rules import RULES, allowed_rules, lr_of
from bstune.core.space import Space
from bstune.core.step_time import fit_step_time
from bstune.hardware.memory import Probe
from bstune.hardware.roofline import Roofline
from bstune.hardware.survey import Timed
from bstune.recipe.found import Found
from bstune.study.machine import Machine
from bstune.trial.checks import Checks

LOSS = Target("val/loss", 0.1, "min")


@cases("""
text | metric | goal | mode
val/loss <= 0.1 | val/loss | 0.1 | min
val/error  <=1.0e-2 | val/error | 0.01 | min
loss >=-3 | loss | -3.0 | max
""")
def test_a_target_is_read(text, metric, goal, mode):
    target = Target.parse(f"  {text} ")
    assert (target.metric, target.goal, target.mode) == (metric, goal, mode)
    assert Target.parse(str(target)) == target
    for wrong in ("val/loss", "val/loss < 0.1", "val/loss <= nan", "a b <= 1"):
        with refused():
            Target.parse(wrong)


@pytest.mark.parametrize("low, high", [(0, 4), (26, 46), (100, 105)])
def test_steps_to_target_are_uniform_over_what_evaluations_leave(low, high):
    possible = range(low + 1, high + 1)
    trial = record(steps_low=low, steps=high)
    assert trial.steps_to_target == statistics.fmean(possible)
    deviation = statistics.pstdev(possible) / statistics.fmean(possible)
    assert trial.steps_error == pytest.approx(deviation)
    # Without the target all steps are a bound; one that is met before training takes a step.
    for fields, steps in (({"status": "missed"}, high), ({"steps_low": 0, "steps": 0}, 1)):
        trial = record(**{"steps": high} | fields)
        assert (trial.steps_to_target, trial.steps_error) == (steps, 0)


# Evaluations of 100 examples cost 50; far from the target an eighth of the examples may be spent.
@cases("""
evaluations | batch_size | first | step
null | 10 | null | 40
null | 1000 | null | 1
# One step on at least.
10 0.9 | 1000 | null | 11
# Two evaluations for an eighth.
40 0.9 | 10 | null | 80
# The line through (50, 0.25) and (100, 0.15) meets the target within 1.5 times the steps; what was
# near stays near.
50 0.25, 100 0.15 | 10 | null | 105
50 0.25, 100 0.15, 150 0.4 | 10 | null | 157
# One without a value tells nothing.
50 0.9, 100 0.8, 150 - | 10 | null | 160
# The first one may be asked for earlier; early ones count no cost, and lie a factor of two apart.
null | 10 | 7 | 7
7 0.9 | 10 | 7 | 14
7 0.9, 28 0.88 | 10 | 7 | 40
""")
def test_the_next_evaluation(evaluations, batch_size, first, step):
    due = next_evaluation(history(evaluations), LOSS, batch_size, examples=100, first=first)
    assert due == step


def test_a_wait_between_the_readings_of_two_clocks_is_left_out_of_both():
    """A process that is put aside for 9 s as a segment begins, and again as it ends."""
    at = {"now": 0.0, "waited": 0.0}
    held = iter([False, True, False, False, True, False, False, False])

    def now():
        if next(held, False):
            at["now"] += 9.0
            at["waited"] += 9.0
        return at["now"]

    clock = TrainingClock(now=now, waited=lambda: at["waited"])
    for _ in range(3):
        clock.start()
        at["now"] += 2.0
        clock.stop(steps=1)
    assert [seconds for _, seconds in clock.segments] == pytest.approx([2.0, 2.0, 2.0])


def test_the_clock_counts_training_alone_without_waits():
    at = {"now": 0.0, "waited": 0.0}
    synchronized = []
    clock = TrainingClock(
        lambda: at["now"], lambda: synchronized.append(at["now"]), lambda: at["waited"]
    )
    # Begin, end, what was waited for a processor by then, steps, those that ran in between.
    for begin, end, waited, steps, timed in (
        (0.0, 10.0, 4.0, 3, 3),
        (50.0, 51.0, 4.0, 2, 2),
        (51.0, 52.0, 9.0, 1, 1),  # waits can seem longer than the segment
        (52.0, 60.0, 9.0, 5, 4),  # the first of five ran before the start
    ):
        at["now"] = begin
        clock.start()
        at |= {"now": end, "waited": waited}
        clock.stop(steps=steps, timed=timed)
        clock.stop(steps=2)  # nothing has begun
    assert clock.segments == [(3, 6.0), (2, 1.0), (1, pytest.approx(0.01)), (5, 10.0)]
    assert synchronized == [0.0, 10.0, 50.0, 51.0, 51.0, 52.0, 52.0, 60.0]
    assert 0.0 <= processor_wait()() < 1e6


@cases("""
segments | epochs | seconds
[] | 0 | null
# Nothing is warm: the last one counts.
[[3, 30.0]] | 0 | 10.0
[[3, 30.0], [3, 6.0]] | 0 | 2.0
# The median of 1, 2, 9.
[[5, 50.0], [10, 10.0], [10, 20.0], [10, 90.0]] | 0 | 2.0
# Every second step begins an epoch, which takes 4 s more; a stall takes 100.
[[5, 50.0], [1, 1.0], [1, 105.0]] | 9 | 3.0
""")
def test_seconds_per_step(segments, epochs, seconds):
    assert seconds_per_step(segments + epochs * [(1, 1.0), (1, 5.0)]) == seconds


@cases("""
low | multiple | size | snapped
8 | 1 | 0.2 | 8
8 | 1 | 5000 | 1024
8 | 8 | 12.4 | 16
8 | 8 | 3 | 8
4 | 8 | 4 | 8
""")
def test_batch_sizes_and_rates_are_snapped(low, multiple, size, snapped):
    space = Space(low, 1024, 1e-3, 1.0, "sqrt", (64, 0.1), multiple)
    assert space.snap(size) == snapped
    # Rates to what is printed.
    assert [space.snap_lr(lr) for lr in (0.123456, 9.0, 1e-9)] == [0.123, 1.0, 1e-3]


def test_step_times_are_found_with_one_outlier():
    timings = [(size, 1e-3 + 2e-5 * size) for size in (8, 16, 32, 64, 128, 256, 512)]
    model = fit_step_time([*timings, (100, 0.5)])
    for size, seconds in timings:
        assert model(size) == pytest.approx(seconds, rel=0.05)
    # Batch sizes that come from their logarithms are whole.
    assert model.error(math.exp(math.log(64))) == pytest.approx(model.error(64))
    # It grows with the distance from what was timed.
    assert 0.01 < model.error(64) < model.error(512) < 0.7 * model.error(1 << 14)


@cases("""
timings | size | seconds | least | most
[[32, 0.01]] | 32 | 0.01 | 0.03 | 0.15
# Anything from an overhead alone to the examples alone.
[[32, 0.01]] | 128 | 0.025 | 0.4 | 0.7
[[32, 0.01], [64, 0.01]] | 128 | 0.01 | 0.1 | 0.3
""")
def test_few_step_times(timings, size, seconds, least, most):
    for model in (fit_step_time(timings), fit_step_time([], [(*one, 0.05) for one in timings])):
        assert model(size) == pytest.approx(seconds, rel=0.1)
        assert least <= model.error(size) <= most


TAUS = {
    "a line": lambda size: 1.0 + size / 64,
    "aligned": lambda size: (1.0 + size / 64) * (1.0 if size % 8 == 0 else 1.25),
}


@pytest.mark.parametrize("name", TAUS)
@pytest.mark.parametrize("is_surveyed", [False, True])
def test_the_interval_of_a_step_time_holds_it(name, is_surveyed):
    tau = TAUS[name]
    held, errors = [], []
    for seed in range(15):
        rng = np.random.default_rng(seed)
        timings = []
        for size in np.round(2 ** rng.uniform(3, 11, 10)):
            busy = rng.uniform(1.3, 3.0) if rng.random() < 0.05 else 1.0
            timings.append((size, tau(size) * math.exp(0.05 * rng.normal()) * busy))
        surveyed = [(2**k, tau(2**k), 0.02) for k in range(3, 12) if is_surveyed]
        model = fit_step_time(timings, surveyed)
        for size in np.round(2 ** rng.uniform(3, 11, 20)):
            off = abs(math.log(model(size) / tau(size)))
            errors.append(model.error(size))
            held.append(off < 1.645 * errors[-1])
    assert np.mean(held) > 0.8
    assert np.median(errors) < 0.12


LIGHT = ("search.decide", "config", "report.page", "study.folder", "tracking.mlflow")
ANSWERS = (Checks, Found, Machine, Probe, Record, Roofline, Timed)
HEAVY = "torch", "lightning", "mlflow", "matplotlib.pyplot"


def test_imports_are_light():
    """The main process composes and reads the worker's answers without torch, too."""
    light = {answer.__module__ for answer in ANSWERS} | {f"bstune.{module}" for module in LIGHT}
    code = f"""
import sys, {", ".join(light)}
heavy = lambda: [name for name in {HEAVY} if name in sys.modules]
bstune.config.compose(["+workload=digits"])
print(heavy())
import matplotlib.pyplot
print(heavy())
"""
    printed = subprocess.check_output([sys.executable, "-c", code], text=True)
    assert printed.splitlines() == ["[]", "['matplotlib.pyplot']"]


BASELINE = (64, 0.1)


# McCandlish's, with B_noise 128: lr_max = 0.1 (1 + 2) = 0.3, of which 2/3. Surge: at twice and half
# the noise scale the rates are equal.
BY_HAND = {"none": 0.1, "sqrt": 0.2, "linear": 0.4, "saturating": 0.2, "surge": 0.1}


@pytest.mark.parametrize("rule", RULES)
def test_rates_by_hand(rule):
    found = bstune.lr_of(rule, 256, BASELINE, noise_scale=128)
    assert found == pytest.approx(BY_HAND[rule])


@cases("""
rule | batch_size | baseline | noise_scale
square root | 256 | [64, 0.1] | null
saturating | 256 | [64, 0.1] | null
surge | 256 | [64, 0.1] | 0.0
sqrt | 0 | [64, 0.1] | null
sqrt | 256 | [-64, 0.1] | null
sqrt | 256 | 64 | null
[sqrt] | 256 | [64, 0.1] | null
sqrt | [256] | [64, 0.1] | null
""")
def test_what_gives_no_rate_is_refused(rule, batch_size, baseline, noise_scale):
    with refused():
        lr_of(rule, batch_size, baseline, noise_scale)


# An interval of the exponent over batch sizes 16 to 256. With the noise scale 64 in the middle
# saturating grows fourfold, as the square root, and surge comes back to where it was.
@cases("""
interval | noise_scale | allowed
[-0.1, 0.1] | null | none
[0.4, 0.6] | null | sqrt
[0.6, 0.9] | 64 | null
[0.4, 0.6] | 64 | sqrt saturating
[-0.1, 0.1] | 64 | none surge
""")
def test_the_rules_that_an_interval_allows(interval, noise_scale, allowed):
    found = allowed_rules(*interval, (16, 256), 64, noise_scale)
    assert found == tuple((allowed or "").split())
