import json
import math
import os
import random
import struct
import subprocess
import sys
from dataclasses import replace
from io import StringIO
from itertools import pairwise

import matplotlib
import pytest
from matplotlib.figure import Figure
from rich.console import Console

from bstune.core.console import format_count, format_number, format_seconds
from bstune.core.curve import CurveError, CurveFit, FrontierPoint, fit_curve, frontier_points
from bstune.core.figures import FIGURE_DPI
from bstune.core.records import Target, TrialResult, dump_json
from bstune.study.figure import FIGURE_INCHES, draw_curve, paint_curve
from bstune.study.model import Exponent, Held
from bstune.study.summary import (
    counts_text,
    critical_text,
    final_table,
    pareto_front,
    print_final,
    regimes_text,
    summarize,
    trials_table,
    winners,
)

TARGET = Target("val/error", 0.1, "min")
S_MIN, B_CRIT = 100.0, 300.0


def trial(number=0, batch_size=64, lr=0.1, status="reached", steps=400, steps_low=390, tau=0.01, **changes):
    known = TrialResult(
        number=number,
        trial_index=number,
        batch_size=batch_size,
        lr=lr,
        delta=0.0,
        seed=1000 + number,
        status=status,
        steps=steps,
        steps_low=steps_low,
        examples=steps * batch_size,
        train_seconds=steps * (tau or 0.0),
        eval_seconds=1.0,
        startup_seconds=1.0,
        wall_seconds=2.0 + steps * (tau or 0.0),
        seconds_per_step=tau,
        device="NVIDIA H200",
        versions={},
        history=((1, 0.9), (steps, 0.0995)),
    )
    return replace(known, **changes)


def simulated(n=40, seed=1, largest=8192, budget=8000, all_censored=False, with_delta=True):
    """Trials over S = S_MIN (1 + B_CRIT/B) x penalty(delta) with noise, tau(B) = 4 ms + B/40000 s."""
    draw = random.Random(seed)
    trials = []
    for number in range(n):
        batch_size = round(math.exp(draw.uniform(math.log(8), math.log(largest))))
        delta = draw.gauss(0, 1.3)
        penalty = math.exp((0.25 if delta < 0 else 0.4) * delta**2 + draw.gauss(0, 0.05))
        steps = round(S_MIN * (1 + B_CRIT / batch_size) * penalty)
        ends = {"status": "reached", "steps": steps, "steps_low": int(steps / 1.05), "tau": 0.004 + batch_size / 40000}
        if batch_size > 6000:
            ends = {"status": "oom", "steps": 0, "steps_low": 0, "tau": None}
        elif delta > 2.1:
            ends |= {"status": "diverged", "steps": 37, "steps_low": 20}
        elif all_censored or steps > budget:
            ends |= {"status": "censored", "steps": min(budget, steps), "steps_low": min(budget, steps)}
        lr = 0.1 * math.sqrt(batch_size / 256) * 2**delta
        trials.append(trial(number, batch_size, lr, **ends, delta=delta if with_delta else None))
    return trials


def fitted(trials):
    try:
        return fit_curve(frontier_points(trials))
    except CurveError as error:
        return str(error)


def hand_fit(b_crit, low, high):
    points = tuple(FrontierPoint(b, S_MIN * (1 + B_CRIT / b), False, None) for b in (16, 64, 256, 1024, 4096))
    below, above = (None, None) if b_crit is None else (b_crit / 9, b_crit * 9)
    return CurveFit(S_MIN, b_crit, low, high, None, below, above, 0.9, 0.05, None, points)


def printed(renderable, width=80):
    out = StringIO()
    Console(file=out, width=width).print(renderable)
    return out.getvalue()


@pytest.mark.parametrize(
    ("value", "digits", "text"),
    [
        (None, 3, "-"),
        (0.0, 3, "0"),
        (0.01234, 3, "0.0123"),
        (1e-5, 3, "1e-05"),
        (57.4, 2, "57"),
        (4613.0, 2, "4600"),
        (99999.0, 3, "100,000"),
        (12345.0, 3, "12,300"),
        (0.1, 3, "0.1"),
        (math.nan, 3, "nan"),
    ],
)
def test_numbers_have_their_significant_digits(value, digits, text):
    assert format_number(value, digits) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "-"),
        (0.0, "0 s"),
        (0.0000351, "0.0351 ms"),
        (0.0123, "12.3 ms"),
        (0.99996, "1.00 s"),
        (29.0, "29.0 s"),
        (119.96, "2.00 min"),
        (3600.0, "60.0 min"),
        (7199.9, "2.00 h"),
        (1e6, "278 h"),
    ],
)
def test_durations_have_three_digits_and_a_unit(seconds, text):
    assert format_seconds(seconds) == text


def test_counts_are_exact():
    assert [format_count(n) for n in (None, 500, 4613, 12345)] == ["-", "500", "4613", "12,345"]


def test_summary_on_points_of_the_curve_itself():
    sizes = (8, 16, 32, 128, 512, 2048, 8192)
    trials = [
        trial(i, b, steps=round(S_MIN * (1 + B_CRIT / b)), steps_low=round(95 * (1 + B_CRIT / b)), tau=0.004 + b / 4e4)
        for i, b in enumerate(sizes)
    ]
    fit = fit_curve(frontier_points(trials))
    summary = summarize(reversed(trials), TARGET, fit)
    assert summary["target"] == "val/error <= 0.1"
    assert summary["trials"] == 7
    assert summary["statuses"] == {"reached": 7, "censored": 0, "diverged": 0, "oom": 0, "failed": 0}
    assert summary["note"] is None
    assert [point["batch_size"] for point in summary["points"]] == list(sizes)
    point = summary["points"][3]
    assert (point["number"], point["steps_low"], point["steps"]) == (3, 318, 334)
    assert point["time_low"] == pytest.approx(318 * 0.0072)
    assert point["time_to_target"] == pytest.approx(334 * 0.0072)
    assert (point["examples_low"], point["examples"]) == (318 * 128, 334 * 128)
    assert summary["fit"]["b_crit"] == pytest.approx(B_CRIT, rel=0.02)
    assert [row["name"] for row in summary["regimes"]] == [
        "perfect scaling",
        "diminishing returns",
        "maximal data parallelism",
    ]
    assert summary["regimes"][1]["from"] == pytest.approx(fit.b_crit / 9)
    assert summary["regimes"][1]["to"] == pytest.approx(fit.b_crit * 9)
    least = min(range(7), key=lambda i: trials[i].time_to_target)
    assert summary["best_by_time"]["number"] == least
    assert summary["best_by_steps"] == {
        "number": 6,
        "seed": 1006,
        "batch_size": 8192,
        "lr": 0.1,
        "hyperparameters": {},
        "steps": 104,
        "seconds_per_step": trials[6].seconds_per_step,
        "time_to_target": trials[6].time_to_target,
        "confirmed": None,
    }
    assert (summary["scaling"], summary["ended"], summary["continued"]) == (None, None, 0)
    assert json.loads(dump_json(summary))["points"][0]["batch_size"] == 8


@pytest.mark.parametrize(
    ("sizes", "steps", "used", "slope", "has_error"),
    [
        ((16, 32, 64, 128), (800, 400, 200, 190), [16, 32, 64], -1.0, True),
        ((16, 64, 1024), (1000, 500, 125), [16, 64, 1024], -0.5, True),  # too few within two octaves
        ((16, 64), (1000, 500), [16, 64], -0.5, False),
    ],
)
def test_slope_at_the_small_end(sizes, steps, used, slope, has_error):
    trials = [trial(i, b, steps=s) for i, (b, s) in enumerate(zip(sizes, steps, strict=True))]
    small_end = summarize(trials, TARGET, "no fit")["small_end"]
    assert small_end["batch_sizes"] == used
    assert small_end["slope"] == pytest.approx(slope)
    assert (small_end["standard_error"] is not None) == has_error
    if has_error:
        assert small_end["standard_error"] == pytest.approx(0.0, abs=1e-7)


def test_standard_error_of_the_slope_is_the_textbook_one():
    trials = [trial(i, b, steps=s) for i, (b, s) in enumerate([(16, 800), (32, 500), (64, 200)])]
    # x = -1, 0, 1 octaves; y = log2 of 800, 500, 200: residuals from the line through the mean with slope -1
    y = [math.log2(s) for s in (800, 500, 200)]
    residuals = [value - sum(y) / 3 + x for x, value in zip((-1, 0, 1), y, strict=True)]
    expected = math.sqrt(sum(r * r for r in residuals) / 1 / 2)
    small_end = summarize(trials, TARGET, "no fit")["small_end"]
    assert small_end["slope"] == pytest.approx(-1.0)
    assert small_end["standard_error"] == pytest.approx(expected)


@pytest.mark.parametrize("trials", [[], [trial()], [trial(status="diverged")]])
def test_no_slope_from_fewer_than_two_points(trials):
    assert summarize(trials, TARGET, "no fit")["small_end"] is None


TRY = (
    ": try a larger budget (budget.steps, budget.examples), an easier target (workload.target.value) or another "
    "reference learning rate (scaling.lr)"
)


@pytest.mark.parametrize(
    ("trials", "target", "note"),
    [
        ([], TARGET, "no trial has run, so val/error <= 0.1 was not reached"),
        (
            [trial(status="oom", steps=0, steps_low=0, tau=None, history=())],
            TARGET,
            "val/error <= 0.1 was never reached in 1 trial, and no evaluation gave a finite value" + TRY,
        ),
        (
            [
                trial(0, 64, status="censored", history=((10, 0.5), (400, 0.2))),
                trial(1, 256, 0.4, status="censored", history=((10, 0.6), (300, 0.1324), (400, None))),
            ],
            TARGET,
            "val/error <= 0.1 was never reached in 2 trials; the closest value seen was 0.132, at batch size 256 and "
            "learning rate 0.4 after 300 steps" + TRY,
        ),
        (
            [trial(0, 64, status="censored", history=((10, 0.5), (400, 0.2)))],
            Target("val/accuracy", 0.9, "max"),
            "val/accuracy >= 0.9 was never reached in 1 trial; the closest value seen was 0.5, at batch size 64 and "
            "learning rate 0.1 after 10 steps" + TRY,
        ),
    ],
)
def test_never_reached_says_the_closest_value(trials, target, note):
    summary = summarize(trials, target, "too few points")
    assert summary["note"] == note
    assert summary["best_by_time"] is None
    assert summary["best_by_steps"] is None
    assert summary["fit"] is None
    assert summary["fit_note"] == "too few points"
    assert summary["regimes"] == []
    json.loads(dump_json(summary))
    text = " ".join(printed(final_table(summary)).split())
    assert note in text
    assert "too few points" in text
    assert "best by" not in text


@pytest.mark.parametrize(
    ("trials", "by_time", "by_steps"),
    [
        # the same time: fewer steps; the same steps: less time; all the same: the lower number
        ([trial(0, steps=400, tau=0.01), trial(1, steps=200, tau=0.02)], 1, 1),
        ([trial(0, steps=200, tau=0.02), trial(1, steps=200, tau=0.01)], 1, 1),
        ([trial(5), trial(3)], 3, 3),
        # without a measured step time a trial can be best by steps alone
        ([trial(0, steps=100, tau=None), trial(1, steps=200)], 1, 0),
        ([trial(0, steps=100, tau=None)], None, 0),
    ],
)
def test_ties_between_winners(trials, by_time, by_steps):
    summary = summarize(trials, TARGET, "no fit")
    assert (summary["best_by_time"] or {"number": None})["number"] == by_time
    assert summary["best_by_steps"]["number"] == by_steps


def test_tied_frontier_trials_are_named_by_the_lower_number():
    assert summarize([trial(5), trial(3)], TARGET, "no fit")["points"][0]["number"] == 3


def test_censored_point_has_a_lower_end_only():
    trials = [trial(0, 64, status="censored", steps_low=200), trial(1, 64, status="censored", steps_low=390)]
    (point,) = summarize(trials, TARGET, "no fit")["points"]
    assert (point["number"], point["censored"]) == (1, True)
    assert (point["steps_low"], point["time_low"], point["examples_low"]) == (390, pytest.approx(3.9), 390 * 64)
    assert (point["steps"], point["time_to_target"], point["examples"]) == (None, None, None)


@pytest.mark.parametrize(
    ("b_crit", "low", "high", "critical", "regimes"),
    [
        (
            300.0,
            190.0,
            480.0,
            "300 examples (90% interval 190 to 480)",
            "perfect scaling up to B = 33; diminishing returns to 2700; maximal data parallelism above",
        ),
        (
            300.0,
            190.0,
            None,
            "300 examples (90% interval above 190)",
            "perfect scaling up to B = 33; diminishing returns to 2700; maximal data parallelism above",
        ),
        (
            None,
            450.0,
            None,
            "undetermined (90% interval above 450)",
            "perfect scaling up to at least B = 50; the points do not tell the rest",
        ),
        (
            None,
            None,
            20.0,
            "undetermined (90% interval below 20)",
            "maximal data parallelism from B = 180 at the latest; the points do not tell the rest",
        ),
        (None, None, None, "undetermined (90% interval open at both ends)", "the points do not tell the rest"),
    ],
)
def test_critical_batch_size_and_regimes_in_words(b_crit, low, high, critical, regimes):
    trials = [trial(i, b) for i, b in enumerate((16, 64, 256, 1024, 4096))]
    summary = summarize(trials, TARGET, hand_fit(b_crit, low, high))
    assert critical_text(summary["fit"]) == critical
    assert regimes_text(summary["regimes"], summary["points"]) == regimes
    assert json.loads(dump_json(summary))["fit"]["b_crit"] == b_crit
    assert critical in " ".join(printed(final_table(summary)).split())


def test_bounds_outside_what_was_run_are_said_to_be_extrapolated():
    summary = summarize([trial(0, 64), trial(1, 512)], TARGET, hand_fit(300.0, 190.0, 480.0))
    assert regimes_text(summary["regimes"], summary["points"]).endswith("; outside B = 64 to 512 this is extrapolated")


def test_live_table_shows_the_last_trials_in_80_columns():
    trials = [trial(i, 2**i, 10.0**-i) for i in range(15)]
    trials[12] = trial(12, 65536, status="censored", steps=123456, steps_low=120000)
    trials[13] = trial(13, status="oom", steps=0, steps_low=0, tau=None, history=())
    trials[14] = trial(14, status="diverged", history=((1, 0.9), (2, None)))
    lines = printed(trials_table(trials, TARGET)).splitlines()
    assert lines[0].rstrip() == "target val/error <= 0.1: reached by 12 of 15 trials"
    rows = [line.split() for line in lines if line.split() and line.split()[0].isdigit()]
    assert [row[0] for row in rows] == [str(number) for number in range(3, 15)]
    assert rows[0] == ["3", "8", "0.001", "reached", "400", "4.00", "s", "0.01", "0.0995"]
    assert rows[-3] == ["12", "65,536", "0.1", "censored", ">", "120,000", "-", "0.01", "0.0995"]
    assert rows[-2] == ["13", "64", "0.1", "oom", "-", "-", "-", "-"]
    assert rows[-1] == ["14", "64", "0.1", "diverged", "-", "-", "0.01", "-"]
    assert max(map(len, lines)) <= 80
    assert "…" not in "".join(lines)


def measured(count=6, spread=0.3):
    """Trials that reached the target and measured a noise scale near 100, four steps each."""
    scales = (100.0 * math.exp(spread * (n / (count - 1) - 0.5)) for n in range(count))
    return [
        trial(n, 16 * 2**n, noise_scale=tuple((32 * i, 1.0 / scale, 1.0) for i in range(1, 5)))
        for n, scale in enumerate(scales)
    ]


@pytest.mark.parametrize(
    ("trials", "fit", "posterior", "text"),
    [
        (
            measured(),
            hand_fit(400.0, 200.0, 900.0),
            (30.0, 80.0, 200.0),
            "noise scale 99 examples (90% interval 91 to 110; 24 steps of 6 trials), 1.2 times the critical batch"
            " and 0.25 times the fit's regimes",
        ),
        (measured(), "no fit", (30.0, 80.0, 200.0), "24 steps of 6 trials), 1.2 times the critical batch small end"),
        (measured(), hand_fit(400.0, 200.0, 900.0), None, "24 steps of 6 trials), 0.25 times the fit's regimes"),
        (measured(), hand_fit(None, 500.0, None), None, "24 steps of 6 trials) regimes"),
        (
            measured()[:2],
            "no fit",
            (30.0, 80.0, 200.0),
            "noise scale undetermined: 4 trials that reach the target are needed (8 steps of 2 trials) small end",
        ),
    ],
)
def test_the_noise_scale_stands_beside_b_crit(trials, fit, posterior, text):
    summary = summarize(trials, TARGET, fit, None, None, posterior)
    assert text in " ".join(printed(final_table(summary)).split())
    assert json.loads(dump_json(summary))["noise_scale"]["steps"] == 4 * len(trials)


def test_there_is_no_line_where_no_noise_scale_was_measured():
    summary = summarize([trial(0)], TARGET, "no fit", None, None, (30.0, 80.0, 200.0))
    assert summary["noise_scale"] is None
    assert "noise scale" not in printed(final_table(summary))


def test_final_table_names_winners_and_test_errors():
    trials = [trial(4, 64, 0.1, steps=400), trial(7, 500, 0.4, steps=90, tau=0.1), trial(8, status="oom")]
    lines = printed(
        final_table(summarize(trials, TARGET, "no fit"), {"best_by_time": {"test/error": 0.1012}})
    ).splitlines()
    rows = {line[:22].strip(): line[22:].split() for line in lines}
    assert rows["batch size (examples)"] == ["64", "500"]
    assert rows["learning rate"] == ["0.1", "0.4"]
    assert rows["time to target"] == ["4.00", "s", "9.00", "s"]
    assert rows["steps to target"] == ["400", "90"]
    assert rows["time per step"] == ["10.0", "ms", "100", "ms"]
    assert rows["test/error"] == ["0.101", "-"]
    assert rows["trial"] == ["4", "7"]
    assert rows["seed"] == ["1004", "1007"]
    assert "reached by 2 of 3 trials (1 oom)" in "\n".join(lines)
    assert max(map(len, lines)) <= 80
    assert "\x1b" not in "".join(lines)


def fresh(number, of, batch_size=64, lr=0.1, **changes):
    return trial(number, batch_size, lr, replicate_of=of, **changes)


LUCKY, STEADY = trial(0, 64, 0.1, steps=400), trial(1, 256, 0.4, steps=420)
CONFIRMED = [
    *(LUCKY, STEADY, trial(2, 4096, 0.8, steps=90, tau=0.1)),
    *(fresh(3 + i, 0, steps=steps) for i, steps in enumerate((440, 460, 480))),
    *(fresh(6 + i, 1, 256, 0.4, steps=steps) for i, steps in enumerate((430, 450, 410))),
]


def test_a_confirmed_winner_is_the_best_on_fresh_seeds_and_no_fresh_run():
    # the best fresh run, of the steady point, is better than any on the lucky one's
    assert {name: found.number for name, found in winners(CONFIRMED).items()} == {"best_by_time": 1, "best_by_steps": 2}
    summary = summarize(CONFIRMED, TARGET, "no fit")
    assert summary["best_by_time"]["confirmed"] == {
        "seeds": [1006, 1007, 1008],
        "reached": 3,
        "runs": 3,
        "time_median": pytest.approx(4.3),
        "time_low": pytest.approx(4.1),
        "time_high": pytest.approx(4.5),
        "steps_median": 430,
        "steps_low": 410,
        "steps_high": 450,
    }
    assert summary["best_by_steps"]["confirmed"] is None  # a point of its own, that no fresh run stood at
    json.loads(dump_json(summary))


def test_a_fresh_run_is_never_a_winner():
    found = winners([LUCKY, STEADY, fresh(3, 0, steps=50)])
    assert {name: winner.number for name, winner in found.items()} == {"best_by_time": 0, "best_by_steps": 0}
    # nor where a better point was found since, that has none
    found = winners([LUCKY, fresh(3, 0, steps=50), trial(4, 256, 0.4, steps=390)])
    assert {name: winner.number for name, winner in found.items()} == {"best_by_time": 4, "best_by_steps": 4}


def test_the_final_table_shows_the_spread_over_fresh_seeds():
    lines = printed(final_table(summarize(CONFIRMED, TARGET, "no fit"))).splitlines()
    rows = {line[:24].strip(): line[24:].split() for line in lines}
    assert rows["time on 3 fresh seeds"] == ["4.3", "s", "(4.1", "to", "4.5)", "-"]
    assert rows["steps on 3 fresh seeds"] == ["430", "(410", "to", "450)", "-"]
    assert rows["time to target"] == ["4.20", "s", "9.00", "s"]
    assert max(map(len, lines)) <= 80
    text = " ".join(" ".join(lines).split())
    assert "time and steps to target are the chosen run's own: expect those on fresh seeds; fewest steps: the" in text
    assert "fewest steps: the best of single runs, not repeated on fresh seeds: optimistic" in text
    assert "each the best" not in text


def test_runs_short_of_the_target_open_the_spread():
    runs = [fresh(3, 0, steps=440), fresh(4, 0, steps=460), fresh(5, 0, status="censored", steps=800)]
    text = " ".join(printed(final_table(summarize([LUCKY, *runs], TARGET, "no fit"))).split())
    assert "time on 3 fresh seeds 4.6 s (4.4 and more)" in text
    assert "reached on fresh seeds 2 of 3" in text
    worse = [fresh(3, 0, steps=440), *(fresh(n, 0, status="censored", steps=800) for n in (4, 5))]
    summary = summarize([LUCKY, *worse], TARGET, "no fit")
    assert "time on 3 fresh seeds over (4.4 and more)" in " ".join(printed(final_table(summary)).split())
    none = [fresh(3, 0, status="diverged", steps=8)]
    text = " ".join(printed(final_table(summarize([LUCKY, *none], TARGET, "no fit"))).split())
    assert "time on 1 fresh seed - -" in text
    assert "reached on fresh seeds 0 of 1" in text


def test_single_runs_are_said_to_be_optimistic():
    text = " ".join(printed(final_table(summarize([LUCKY], TARGET, "no fit"))).split())
    assert "each the best of single runs, not repeated on fresh seeds: optimistic" in text
    assert "fresh seeds 0" not in text
    both = [fresh(3 + i, 0, steps=440) for i in range(3)]
    text = " ".join(printed(final_table(summarize([LUCKY, *both], TARGET, "no fit"))).split())
    assert "optimistic" not in text


def stopped(number, resumed_from=None, steps=100):
    return trial(number, status="censored", steps=steps, steps_low=steps, resumed_from=resumed_from)


@pytest.mark.parametrize(
    ("trials", "text"),
    [
        ([trial(0), trial(1)], "reached by 2 of 2 trials"),
        ([stopped(0), trial(1, resumed_from=0)], "reached by 1 of 1 trial (a stopped one was continued once)"),
        (
            [stopped(0), stopped(1), stopped(2, 0, 200), trial(3, resumed_from=2)],
            "reached by 1 of 2 trials (1 censored, a stopped one was continued 2 times)",
        ),
        # a continuation that failed leaves the stopped trial as it was, and is asked again
        ([stopped(0), trial(1, status="failed", resumed_from=0)], "reached by 0 of 2 trials (1 censored, 1 failed)"),
        (
            [stopped(0), trial(1, status="failed", resumed_from=0), trial(2, resumed_from=0)],
            "reached by 1 of 2 trials (1 failed, a stopped one was continued once)",
        ),
    ],
)
def test_a_trial_that_was_continued_counts_once(trials, text):
    summary = summarize(trials, TARGET, "no fit")
    assert counts_text(summary) == text
    assert sum(summary["statuses"].values()) == summary["trials"]


def test_trials_that_were_continued_count_once_where_nothing_was_reached():
    trials = [stopped(0), stopped(1, 0, 200)]
    assert "was never reached in 1 trial;" in summarize(trials, TARGET, "no fit")["note"]
    assert "reached by 0 of 1 trial" in printed(trials_table(trials, TARGET))


def test_the_scaling_rule_and_what_ended_the_study_are_in_the_summary_and_the_table():
    exponent = Exponent(0.62, 0.48, 0.75, -0.08, 1.08, 8.0, 900.0, 7, True)
    held = Held(exponent, None, 0.9, "lr grew as B^0.62 [0.48, 0.75] up to B = 900: between sqrt and linear")
    summary = summarize([LUCKY], TARGET, "no fit", held, "stopped: search.seconds=60 of training are spent (61.0 s)")
    assert summary["ended"] == "stopped: search.seconds=60 of training are spent (61.0 s)"
    assert summary["scaling"] == {
        "exponent": 0.62,
        "low": 0.48,
        "high": 0.75,
        "prior_low": -0.08,
        "prior_high": 1.08,
        "from": 8.0,
        "to": 900.0,
        "reached": 7,
        "told": True,
        "below_b_crit": None,
        "level": 0.9,
        "text": held.text,
    }
    assert json.loads(dump_json(summary))["scaling"]["from"] == 8
    text = " ".join(printed(final_table(summary)).split())
    assert f"scaling rule {held.text}" in text
    assert "ended stopped: search.seconds=60 of training are spent (61.0 s)" in text
    bare = printed(final_table(summarize([LUCKY], TARGET, "no fit")))
    assert "scaling rule" not in bare
    assert "ended" not in bare


def test_paths_and_the_command_are_printed_unbroken(tmp_path):
    out = StringIO()
    command = "mlflow ui --backend-store-uri sqlite:///" + "a-long-folder/" * 10 + "mlflow.db [x]"
    path = tmp_path / ("long" * 30) / "curve.json"
    console = Console(file=out, width=80)
    print_final(console, summarize([trial()], TARGET, "no fit"), None, {"summary": path}, command)
    lines = [line.rstrip() for line in out.getvalue().splitlines()]
    assert f"MLflow UI       {command}" in lines
    assert f"summary         {path}" in lines


def by_label(axes):
    return dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))


def drawn(trials, fit):
    summary = summarize(trials, TARGET, fit)
    figure = Figure(figsize=FIGURE_INCHES, dpi=FIGURE_DPI, layout="constrained")
    paint_curve(figure, trials, summary, None if isinstance(fit, str) else fit, "a workload")
    return summary, figure


def test_figure_has_the_curve_the_points_and_their_labels():
    trials = simulated(budget=1500)
    fit = fitted(trials)
    summary, figure = drawn(trials, fit)
    left, right = figure.axes[:2]
    for axes in (left, right):
        assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
        assert axes.get_xlabel() == "batch size B (examples per optimizer step)"
        assert {"8", "32", "128", "512", "2048", "8192"} <= {label.get_text() for label in axes.get_xticklabels()}
    assert left.get_ylabel() == "steps to target S (optimizer steps)"
    assert right.get_ylabel() == "time to target T = S x tau(B) (s of training)"
    counts = {status: n for status, n in summary["statuses"].items() if n}
    assert set(counts) == {"reached", "censored", "diverged", "oom"}
    marks = by_label(left)
    censored = [point for point in summary["points"] if point["censored"]]
    assert len(censored) == 3
    assert marks["frontier bound: target not reached by then"].get_offsets().tolist() == [
        [point["batch_size"], point["steps_low"]] for point in censored
    ]
    frontier = marks["frontier point, (last miss, first hit]"].get_offsets()
    assert len(frontier) == len(summary["points"]) - len(censored)
    assert len(marks["trial that reached the target"].get_offsets()) == counts["reached"]
    assert len(marks["trial stopped before the target"].get_offsets()) == counts["censored"]
    assert len(marks["diverged (at the foot)"].get_offsets()) == counts["diverged"]
    assert len(marks["out of memory (at the foot)"].get_offsets()) == counts["oom"]
    critical = marks[f"critical batch size {critical_text(summary['fit'])}"]
    assert list(critical.get_xdata()) == [fit.b_crit, fit.b_crit]
    guide = marks["perfect scaling: slope -1"].get_xydata()
    assert guide[:, 0] * guide[:, 1] == pytest.approx(fit.e_min)
    best = summary["best_by_time"]
    assert f"B = {best['batch_size']}, lr = {format_number(best['lr'])}" in right.texts[0].get_text()
    assert by_label(right)["best trial"].get_offsets().tolist() == [[best["batch_size"], best["time_to_target"]]]
    title = figure.get_suptitle()
    assert title.splitlines()[0] == "a workload"
    assert "val/error <= 0.1; NVIDIA H200; reached by" in title
    assert "of 40 trials" in title


def test_intervals_span_last_miss_to_first_hit():
    _, figure = drawn([trial(0, 64, steps=400, steps_low=300), trial(1, 512, steps=90, steps_low=80)], "no fit")
    segments = [
        line.tolist() for artist in figure.axes[0].collections for line in getattr(artist, "get_segments", list)()
    ]
    assert segments == [[[64, 300], [64, 400]], [[512, 80], [512, 90]]]


CASES = {
    "rich": simulated(),
    "budget": simulated(budget=1500),
    "open": simulated(24, seed=6, largest=64),
    "few": simulated(4, seed=2),
    "learning rate as colour": simulated(9, seed=5, with_delta=False),
    "all censored": simulated(20, seed=4, all_censored=True),
    "one": [trial()],
    "first evaluation hit": [trial(steps=1, steps_low=0)],
    "no step time": [trial(tau=None), trial(1, 128, status="censored", tau=None)],
    "nothing measured": [trial(status="oom", steps=0, steps_low=0, tau=None)],
    "none": [],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_no_text_is_clipped_and_regime_names_do_not_collide(name):
    trials = CASES[name]
    _, figure = drawn(trials, fitted(trials))
    figure.draw_without_rendering()
    left, right = figure.axes[:2]
    texts = [*left.texts, *right.texts, *figure.texts, *figure.legends, left.yaxis.label, right.yaxis.label]
    texts += [label for axes in figure.axes[:2] for label in (*axes.get_xticklabels(), *axes.get_yticklabels())]
    width, height = figure.bbox.size
    for text in [text for text in texts if not hasattr(text, "get_text") or text.get_text()]:
        box = text.get_window_extent()
        assert box.x0 >= 0, text
        assert box.y0 >= 0, text
        assert box.x1 <= width, text
        assert box.y1 <= height, text
    for axes in (left, right):
        for labels in (axes.get_xticklabels(), axes.get_yticklabels()):
            boxes = [label.get_window_extent() for label in labels if label.get_text()]
            assert len(boxes) >= 2
            assert not any(a.overlaps(b) for a, b in pairwise(boxes))
    boxes = [text.get_window_extent() for text in left.texts if "B = " not in text.get_text()]
    assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])


@pytest.mark.parametrize(
    ("smallest", "largest", "names"),
    [
        (4, 16384, ["perfect\nscaling", "diminishing\nreturns", "maximal\ndata parallelism"]),
        (30, 16384, ["diminishing\nreturns", "maximal\ndata parallelism"]),
        (30, 2800, ["diminishing\nreturns"]),
    ],
)
def test_a_regime_name_wider_than_its_span_is_left_out(smallest, largest, names):
    trials = [trial(i, b, steps=s) for i, (b, s) in enumerate([(smallest, 1100), (300, 200), (largest, 110)])]
    _, figure = drawn(trials, hand_fit(300.0, 190.0, 480.0))
    assert [text.get_text() for text in figure.axes[0].texts if "B = " not in text.get_text()] == names


def test_curve_is_written_as_a_png_and_nothing_else(tmp_path):
    trials = simulated()
    fit = fitted(trials)
    before = dict(matplotlib.rcParams)
    path = tmp_path / "curve.png"
    path.write_bytes(b"an older figure")
    draw_curve(trials, summarize(trials, TARGET, fit), fit, r"a title is text, not mathematics: $\nosuch$", path)
    head = path.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", head[16:24]) == (1950, 975)
    assert os.listdir(tmp_path) == ["curve.png"]
    assert dict(matplotlib.rcParams) == before


def test_a_figure_that_cannot_be_written_leaves_nothing_behind(tmp_path):
    (tmp_path / "curve.png").mkdir()
    with pytest.raises(OSError, match=r"curve\.png"):
        draw_curve([trial()], summarize([trial()], TARGET, "no fit"), None, "a workload", tmp_path / "curve.png")
    assert os.listdir(tmp_path) == ["curve.png"]


@pytest.mark.parametrize(
    ("statement", "absent"),
    [
        ("", ("torch", "lightning", "matplotlib")),
        (
            "from pathlib import Path; from bstune.core.records import Target; "
            "summary = r.summarize([], Target('val/error', 0.1, 'min'), 'no points'); "
            "f.draw_curve([], summary, None, 'none', Path(sys.argv[1]))",
            ("torch", "lightning", "matplotlib.pyplot"),
        ),
    ],
)
def test_imports_stay_light(statement, absent, tmp_path):
    imports = "import sys, bstune.study.summary as r, bstune.study.figure as f"
    code = f"{imports}; {statement}\nprint([m for m in {absent!r} if m in sys.modules])"
    command = [sys.executable, "-c", code, str(tmp_path / "curve.png")]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "[]\n"


@pytest.mark.parametrize(
    ("trials", "front"),
    [
        ([], []),
        ([(0, 10, 1.0)], [0]),
        ([(0, 10, 1.0), (1, 20, 2.0)], [0]),  # beaten in both
        ([(0, 10, 2.0), (1, 20, 1.0)], [1, 0]),
        ([(0, 10, 2.0), (1, 20, 1.0), (2, 15, 1.5), (3, 15, 1.6)], [1, 2, 0]),
        ([(0, 10, 1.0), (1, 10, 1.0)], [0]),  # of equals the first
    ],
)
def test_pareto_front(trials, front):
    some = [trial(number=number, steps=steps, tau=seconds / steps) for number, steps, seconds in trials]
    censored = trial(number=9, status="censored", steps=1, tau=0.001)
    assert [found.number for found in pareto_front([*some, censored])] == front
    assert [row["number"] for row in summarize(some, TARGET, "no fit")["pareto"]] == front
