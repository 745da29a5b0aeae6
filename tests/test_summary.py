import json
import math
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from toolbox import hand_fit, make_trial

from bstune.core.curve import fit_curve, frontier_points
from bstune.core.records import Target, TrialResult, dump_json
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
RECORDED = Path(__file__).parent / "recorded" / "fashion_cnn.jsonl"


def printed(renderable):
    out = StringIO()
    Console(file=out, width=80).print(renderable)
    return out.getvalue()


def report(*arguments):
    """Return the final table of a summary as one line."""
    return " ".join(printed(final_table(summarize(*arguments))).split())


def test_summary_on_points_of_the_curve_itself():
    sizes = (8, 16, 32, 128, 512, 2048, 8192)
    trials = [
        make_trial(
            i, b, steps=round(S_MIN * (1 + B_CRIT / b)), steps_low=round(95 * (1 + B_CRIT / b)), tau=0.004 + b / 4e4
        )
        for i, b in enumerate(sizes)
    ]
    fit = fit_curve(frontier_points(trials))
    summary = summarize(reversed(trials), TARGET, fit)
    assert (summary["target"], summary["note"], summary["trials"]) == ("val/error <= 0.1", None, 7)
    assert summary["statuses"] == {"reached": 7, "censored": 0, "diverged": 0, "oom": 0, "failed": 0}
    assert [point["batch_size"] for point in summary["points"]] == list(sizes)
    point = summary["points"][3]
    assert (point["number"], point["steps_low"], point["steps"]) == (3, 318, 334)
    assert (point["time_low"], point["time_to_target"]) == pytest.approx((318 * 0.0072, 334 * 0.0072))
    assert (point["examples_low"], point["examples"]) == (318 * 128, 334 * 128)
    assert summary["fit"]["b_crit"] == pytest.approx(B_CRIT, rel=0.02)
    names = ["perfect scaling", "diminishing returns", "maximal data parallelism"]
    assert [row["name"] for row in summary["regimes"]] == names
    assert (summary["regimes"][1]["from"], summary["regimes"][1]["to"]) == pytest.approx(
        (fit.b_crit / 9, fit.b_crit * 9)
    )
    assert summary["best_by_time"]["number"] == min(range(7), key=lambda i: trials[i].time_to_target)
    fields = ("number", "seed", "batch_size", "lr", "hyperparameters", "steps", "seconds_per_step", "time_to_target")
    best = {name: getattr(trials[6], name) for name in fields}
    assert summary["best_by_steps"] == {**best, "confirmed": None}
    assert (summary["lr_exponent"], summary["stop_reason"], summary["continued"]) == (None, None, 0)
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
    trials = [make_trial(i, b, steps=s) for i, (b, s) in enumerate(zip(sizes, steps, strict=True))]
    small_end = summarize(trials, TARGET, "no fit")["small_end"]
    assert small_end["batch_sizes"] == used
    assert small_end["slope"] == pytest.approx(slope)
    assert (small_end["standard_error"] is not None) == has_error
    if has_error:
        assert small_end["standard_error"] == pytest.approx(0.0, abs=1e-7)


def test_standard_error_of_the_slope_is_the_textbook_one():
    trials = [make_trial(i, b, steps=s) for i, (b, s) in enumerate([(16, 800), (32, 500), (64, 200)])]
    # x = -1, 0, 1 octaves; y = log2 of 800, 500, 200: residuals from the line through the mean with slope -1
    y = [math.log2(s) for s in (800, 500, 200)]
    residuals = [value - sum(y) / 3 + x for x, value in zip((-1, 0, 1), y, strict=True)]
    expected = math.sqrt(sum(r * r for r in residuals) / 1 / 2)
    small_end = summarize(trials, TARGET, "no fit")["small_end"]
    assert small_end["slope"] == pytest.approx(-1.0)
    assert small_end["standard_error"] == pytest.approx(expected)


@pytest.mark.parametrize("trials", [[], [make_trial()], [make_trial(status="diverged")]])
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
            [make_trial(status="oom", steps=0, steps_low=0, tau=None, history=())],
            TARGET,
            "val/error <= 0.1 was never reached in 1 trial, and no evaluation gave a finite value" + TRY,
        ),
        (
            [
                make_trial(0, 64, status="censored", history=((10, 0.5), (400, 0.2))),
                make_trial(1, 256, 0.4, status="censored", history=((10, 0.6), (300, 0.1324), (400, None))),
            ],
            TARGET,
            "val/error <= 0.1 was never reached in 2 trials; the closest value seen was 0.132, at batch size 256 and "
            "learning rate 0.4 after 300 steps" + TRY,
        ),
        (
            [make_trial(0, 64, status="censored", history=((10, 0.5), (400, 0.2)))],
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
        ([make_trial(0, steps=400, tau=0.01), make_trial(1, steps=200, tau=0.02)], 1, 1),
        ([make_trial(0, steps=200, tau=0.02), make_trial(1, steps=200, tau=0.01)], 1, 1),
        ([make_trial(5), make_trial(3)], 3, 3),
        # without a measured step time a trial can be best by steps alone
        ([make_trial(0, steps=100, tau=None), make_trial(1, steps=200)], 1, 0),
        ([make_trial(0, steps=100, tau=None)], None, 0),
    ],
)
def test_ties_between_winners(trials, by_time, by_steps):
    summary = summarize(trials, TARGET, "no fit")
    assert (summary["best_by_time"] or {"number": None})["number"] == by_time
    assert summary["best_by_steps"]["number"] == by_steps


def test_censored_point_has_a_lower_end_only():
    trials = [make_trial(0, 64, status="censored", steps_low=200), make_trial(1, 64, status="censored", steps_low=390)]
    (point,) = summarize(trials, TARGET, "no fit")["points"]
    assert (point["number"], point["censored"]) == (1, True)
    assert (point["steps_low"], point["time_low"], point["examples_low"]) == (390, pytest.approx(3.9), 390 * 64)
    assert (point["steps"], point["time_to_target"], point["examples"]) == (None, None, None)


REGIMES = "perfect scaling up to B = 33; diminishing returns to 2700; maximal data parallelism above"


@pytest.mark.parametrize(
    ("fit", "critical", "regimes"),
    [
        ((300.0, 190.0, 480.0), "300 examples (90% interval 190 to 480)", REGIMES),
        ((300.0, 190.0, None), "300 examples (90% interval above 190)", REGIMES),
        (
            (None, 450.0, None),
            "undetermined (90% interval above 450)",
            "perfect scaling up to at least B = 50; the points do not identify the rest",
        ),
        (
            (None, None, 20.0),
            "undetermined (90% interval below 20)",
            "maximal data parallelism from B = 180 at the latest; the points do not identify the rest",
        ),
        ((None,) * 3, "undetermined (90% interval open at both ends)", "the points do not identify the rest"),
    ],
)
def test_critical_batch_size_and_regimes_in_words(fit, critical, regimes):
    summary = summarize([make_trial(i, b) for i, b in enumerate((16, 64, 256, 1024, 4096))], TARGET, hand_fit(*fit))
    assert critical_text(summary["fit"]) == critical
    assert regimes_text(summary["regimes"], summary["points"]) == regimes
    assert json.loads(dump_json(summary))["fit"]["b_crit"] == fit[0]
    assert critical in " ".join(printed(final_table(summary)).split())


def test_bounds_outside_what_was_run_are_said_to_be_extrapolated():
    summary = summarize([make_trial(0, 64), make_trial(1, 512)], TARGET, hand_fit(300.0, 190.0, 480.0))
    assert regimes_text(summary["regimes"], summary["points"]).endswith("; outside B = 64 to 512 this is extrapolated")


def test_live_table_shows_the_last_trials_in_80_columns():
    trials = [make_trial(i, 2**i, 10.0**-i) for i in range(15)]
    trials[12] = make_trial(12, 65536, status="censored", steps=123456, steps_low=120000)
    trials[13] = make_trial(13, status="oom", steps=0, steps_low=0, tau=None, history=())
    trials[14] = make_trial(14, status="diverged", history=((1, 0.9), (2, None)))
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
        make_trial(n, 16 * 2**n, noise_scale=tuple((32 * i, 1.0 / scale, 1.0) for i in range(1, 5)))
        for n, scale in enumerate(scales)
    ]


INTERVAL = (30.0, 80.0, 200.0)


@pytest.mark.parametrize(
    ("count", "fit", "b_crit", "text"),
    [
        (
            6,
            hand_fit(400.0, 200.0, 900.0),
            INTERVAL,
            "noise scale 99 examples (90% interval 91 to 110; 24 steps of 6 trials), 1.2 times the critical batch"
            " and 0.25 times the fit's regimes",
        ),
        (6, "no fit", INTERVAL, "24 steps of 6 trials), 1.2 times the critical batch small end"),
        (6, hand_fit(400.0, 200.0, 900.0), None, "24 steps of 6 trials), 0.25 times the fit's regimes"),
        (6, hand_fit(None, 500.0, None), None, "24 steps of 6 trials) regimes"),
        (
            2,
            "no fit",
            INTERVAL,
            "noise scale undetermined: 4 trials that reach the target are needed (8 steps of 2 trials) small end",
        ),
    ],
)
def test_the_noise_scale_stands_beside_b_crit(count, fit, b_crit, text):
    scales = [100.0 * math.exp(0.3 * (n / 5 - 0.5)) for n in range(count)]  # each over four steps
    noise = [tuple((32 * i, 1.0 / scale, 1.0) for i in range(1, 5)) for scale in scales]
    trials = [make_trial(n, 16 * 2**n, noise_scale=one) for n, one in enumerate(noise)]
    assert text in report(trials, TARGET, fit, None, None, b_crit)
    assert "noise scale" not in report([make_trial()], TARGET, fit, None, None, b_crit)


def test_final_table_names_winners_and_test_errors():
    trials = [
        make_trial(4, 64, 0.1, steps=400),
        make_trial(7, 500, 0.4, steps=90, tau=0.1),
        make_trial(8, status="oom"),
    ]
    summary = summarize(trials, TARGET, "no fit") | {"test": {"best_by_time": {"test/error": 0.1012}}}
    lines = printed(final_table(summary)).splitlines()
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
    return make_trial(number, batch_size, lr, replicate_of=of, **changes)


LUCKY, STEADY = make_trial(0, 64, 0.1, steps=400), make_trial(1, 256, 0.4, steps=420)
CONFIRMED = [
    *(LUCKY, STEADY, make_trial(2, 4096, 0.8, steps=90, tau=0.1)),
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
    found = winners([LUCKY, fresh(3, 0, steps=50), make_trial(4, 256, 0.4, steps=390)])
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
    text = report([LUCKY, *runs], TARGET, "no fit")
    assert "time on 3 fresh seeds 4.6 s (4.4 and more)" in text
    assert "reached on fresh seeds 2 of 3" in text
    worse = [fresh(3, 0, steps=440), *(fresh(n, 0, status="censored", steps=800) for n in (4, 5))]
    assert "time on 3 fresh seeds over (4.4 and more)" in report([LUCKY, *worse], TARGET, "no fit")
    none = [fresh(3, 0, status="diverged", steps=8)]
    text = report([LUCKY, *none], TARGET, "no fit")
    assert "time on 1 fresh seed - -" in text
    assert "reached on fresh seeds 0 of 1" in text


def test_single_runs_are_said_to_be_optimistic():
    text = report([LUCKY], TARGET, "no fit")
    assert "each the best of single runs, not repeated on fresh seeds: optimistic" in text
    assert "fresh seeds 0" not in text
    both = [fresh(3 + i, 0, steps=440) for i in range(3)]
    text = report([LUCKY, *both], TARGET, "no fit")
    assert "optimistic" not in text


def stopped(number, resumed_from=None, steps=100):
    return make_trial(number, status="censored", steps=steps, steps_low=steps, resumed_from=resumed_from)


@pytest.mark.parametrize(
    ("trials", "text"),
    [
        ([make_trial(0), make_trial(1)], "reached by 2 of 2 trials"),
        ([stopped(0), make_trial(1, resumed_from=0)], "reached by 1 of 1 trial (a stopped one was continued once)"),
        (
            [stopped(0), stopped(1), stopped(2, 0, 200), make_trial(3, resumed_from=2)],
            "reached by 1 of 2 trials (1 censored, a stopped one was continued 2 times)",
        ),
        # a continuation that failed leaves the stopped trial as it was, and is asked again
        (
            [stopped(0), make_trial(1, status="failed", resumed_from=0)],
            "reached by 0 of 2 trials (1 censored, 1 failed)",
        ),
        (
            [stopped(0), make_trial(1, status="failed", resumed_from=0), make_trial(2, resumed_from=0)],
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


def test_the_exponent_and_the_stop_reason_are_in_the_summary_and_the_table():
    exponent = {"exponent": 0.62, "text": "lr grew as B^0.62 [0.48, 0.75] up to B = 900: between sqrt and linear"}
    reason = "stopped: search.seconds=60 of training are spent (61.0 s)"
    summary = summarize([LUCKY], TARGET, "no fit", exponent, reason)
    assert (summary["lr_exponent"], summary["stop_reason"]) == (exponent, reason)
    text = " ".join(printed(final_table(summary)).split())
    assert f"scaling rule {exponent['text']}" in text
    assert f"stop reason {reason}" in text
    bare = printed(final_table(summarize([LUCKY], TARGET, "no fit")))
    assert "scaling rule" not in bare
    assert "stop reason" not in bare


def test_paths_and_the_command_are_printed_unbroken(tmp_path):
    out = StringIO()
    command = "mlflow ui --backend-store-uri sqlite:///" + "a-long-folder/" * 10 + "mlflow.db [x]"
    path = tmp_path / ("long" * 30) / "curve.json"
    console = Console(file=out, width=80)
    print_final(console, summarize([make_trial()], TARGET, "no fit"), {"summary": path}, command)
    lines = [line.rstrip() for line in out.getvalue().splitlines()]
    assert f"MLflow UI       {command}" in lines
    assert f"summary         {path}" in lines


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
    some = [make_trial(number=number, steps=steps, tau=seconds / steps) for number, steps, seconds in trials]
    censored = make_trial(number=9, status="censored", steps=1, tau=0.001)
    assert [found.number for found in pareto_front([*some, censored])] == front
    assert [row["number"] for row in summarize(some, TARGET, "no fit")["pareto"]] == front


def test_the_readmes_numbers_follow_from_the_recorded_trials():
    trials = [TrialResult.from_json(line) for line in RECORDED.read_text().splitlines()]
    fit = fit_curve(frontier_points(trials))
    summary = summarize(trials, Target("val/error", 0.10, "min"), fit)
    assert summary["statuses"]["reached"] == len(trials) == 13
    assert (fit.b_crit, fit.b_crit_low, fit.b_crit_high) == pytest.approx((337, 127, 1158), rel=0.01)
    assert summary["small_end"]["batch_sizes"] == [39, 60, 93, 133]
    assert summary["small_end"]["slope"] == pytest.approx(-1.07, abs=0.005)
    assert [(row["batch_size"], row["steps"]) for row in summary["pareto"]] == [
        (60, 667),
        (220, 319),
        (613, 316),
        (779, 223),
    ]
