import json
import math
from dataclasses import replace
from io import StringIO

import pytest
from recorded.draw import recorded
from rich.console import Console
from toolbox import best_of, hand_critical, make_trial

from bstune.core.curve import fit_curve, frontier_points
from bstune.core.records import Target, dump_json
from bstune.report.answer import critical_text, final_table, print_final, regimes_text
from bstune.report.rows import WINNERS
from bstune.study.critical import NextTrial
from bstune.study.summary import pareto_front, summarize, trials_table

TARGET = Target("val/error", 0.1, "min")


def printed(renderable):
    out = StringIO()
    Console(file=out, width=80).print(renderable)
    return out.getvalue()


def report(trials, fit="no fit", *options, target=TARGET):
    """Return the final table of a summary as one line."""
    summary = summarize(trials, target, fit, *options, best=best_of(trials))
    return " ".join(printed(final_table(summary)).split())


def rows_of(text, width):
    return {line[:width].strip(): line[width:].split() for line in text.splitlines()}


def test_summary_on_points_of_the_curve_itself():
    sizes = (8, 16, 32, 128, 512, 2048, 8192)
    shapes = [(1 + 300.0 / b, 0.004 + b / 4e4) for b in sizes]
    trials = [
        make_trial(i, b, steps=round(100 * shape), steps_low=round(95 * shape), tau=tau)
        for i, (b, (shape, tau)) in enumerate(zip(sizes, shapes, strict=True))
    ]
    fit = fit_curve(frontier_points(trials))
    critical = hand_critical(300.0, 250.0, 350.0, 8, 8192)
    summary = summarize(reversed(trials), TARGET, fit, critical=critical, best=best_of(trials))
    assert (summary["target"], summary["note"], summary["trials"]) == ("val/error <= 0.1", None, 7)
    assert summary["statuses"] == {"reached": 7, "censored": 0, "diverged": 0, "oom": 0, "failed": 0}
    assert [point["batch_size"] for point in summary["points"]] == list(sizes)
    point = summary["points"][3]
    assert (point["number"], point["steps_low"], point["steps"]) == (3, 318, 334)
    assert (point["time_low"], point["time_to_target"]) == pytest.approx((318 * 0.0072, 334 * 0.0072))
    assert (point["examples_low"], point["examples"]) == (318 * 128, 334 * 128)
    assert summary["fit"]["b_crit"] == pytest.approx(300.0, rel=0.02)
    names = ["perfect scaling", "diminishing returns", "maximal data parallelism"]
    assert [row["name"] for row in summary["regimes"]] == names
    bounds = (summary["regimes"][1]["from"], summary["regimes"][1]["to"])
    assert bounds == pytest.approx((300.0 / 9, 300.0 * 9))
    assert summary["best_by_time"]["number"] == min(range(7), key=lambda i: trials[i].time_to_target)
    fields = ("number", "seed", "batch_size", "lr", "hyperparameters", "horizon", "steps", "seconds_per_step")
    fields += ("time_to_target",)
    single = {name: getattr(trials[6], name) for name in ("steps", "time_to_target")}
    row = {name: getattr(trials[6], name) for name in fields}
    assert summary["best_by_steps"] == {**row, "confirmed": None, "single_run": single}
    assert (summary["lr_exponent"], summary["stop_reason"], summary["continued"]) == (None, None, 0)
    assert json.loads(dump_json(summary))["points"][0]["batch_size"] == 8


@pytest.mark.parametrize(
    ("steps", "used", "slope", "error"),
    [
        ({16: 800, 32: 400, 64: 200, 128: 190}, [16, 32, 64], -1.0, 0.0),
        ({16: 1000, 64: 500, 1024: 125}, [16, 64, 1024], -0.5, 0.0),  # too few within two octaves
        ({16: 1000, 64: 500}, [16, 64], -0.5, None),
        # residuals -r, 2r, -r of log2 S, and x = -1, 0, 1: the textbook's sqrt(6 r^2 / (3 - 2) / 2)
        ({16: 800, 32: 500, 64: 200}, [16, 32, 64], -1.0, math.log2(500 / 400) / math.sqrt(3)),
        ({64: 400}, None, None, None),
        ({}, None, None, None),
    ],
)
def test_slope_at_the_small_end(steps, used, slope, error):
    trials = [make_trial(i, size, steps=count) for i, (size, count) in enumerate(steps.items())]
    found = summarize([*trials, make_trial(9, 8, status="diverged")], TARGET, "no fit")["small_end"]
    if used is None:
        assert found is None
        return
    assert (found["batch_sizes"], found["slope"]) == (used, pytest.approx(slope))
    assert found["standard_error"] == (error if error is None else pytest.approx(error, abs=1e-7))


CLOSE = make_trial(0, 64, status="censored", history=((10, 0.5), (400, 0.2)))
NOISY = make_trial(1, 256, 0.4, status="censored", history=((10, 0.6), (300, 0.1324), (400, None)))
NEVER = "was never reached in"
CHANGE = (
    ": try more trials (search.trials), a larger budget (budget.steps, budget.examples), an easier target "
    "(workload.target.value) or another reference learning rate (scaling.lr)"
)
SEEN = f"the closest value seen was {{}}, at batch size {{}} and learning rate {{}} after {{}} steps{CHANGE}"
UPWARDS = Target("val/accuracy", 0.9, "max")


@pytest.mark.parametrize(
    ("trials", "target", "note"),
    [
        ([], TARGET, "no trial has run, so val/error <= 0.1 was not reached"),
        (
            [make_trial(status="oom", history=())],
            TARGET,
            f"{NEVER} 1 trial, and no evaluation gave a finite value{CHANGE}",
        ),
        ([CLOSE, NOISY], TARGET, f"{NEVER} 2 trials; {SEEN.format(0.132, 256, 0.4, 300)}"),
        ([CLOSE], UPWARDS, f"{NEVER} 1 trial; {SEEN.format(0.5, 64, 0.1, 10)}"),
    ],
)
def test_never_reached_says_the_closest_value(trials, target, note):
    note = f"{target} {note}" if trials else note
    summary = summarize(trials, target, "too few points")
    names = ("note", "best_by_time", "best_by_steps", "fit", "fit_note", "regimes")
    assert [summary[name] for name in names] == [note, None, None, None, "too few points", []]
    json.loads(dump_json(summary))
    text = report(trials, "too few points", target=target)
    assert note in text
    assert "critical batch not known, as no trial reached the target" in text
    assert "best by" not in text


def test_censored_point_has_a_lower_end_only():
    trials = [make_trial(0, 64, status="censored", steps_low=200), make_trial(1, 64, status="censored", steps_low=390)]
    (point,) = summarize(trials, TARGET, "no fit")["points"]
    assert (point["number"], point["censored"]) == (1, True)
    assert (point["steps_low"], point["time_low"], point["examples_low"]) == (390, pytest.approx(3.9), 390 * 64)
    assert (point["steps"], point["time_to_target"], point["examples"]) == (None, None, None)


@pytest.mark.parametrize(
    ("critical", "text", "regimes"),
    [
        (
            hand_critical(300.0, 190.0, 480.0),
            "300 examples (90% interval 190 to 480)",
            "perfect scaling up to B = 33; diminishing returns from 33 to 2700; maximal data parallelism above 2700",
        ),
        (  # what lies outside of the batch sizes that reached the target is not claimed
            hand_critical(300.0, 190.0, None, 64, 512),
            "300 examples (90% interval above 190)",
            "diminishing returns from 64 to 510; "
            "perfect scaling and maximal data parallelism not seen within B = 64 to 512",
        ),
        (
            hand_critical(None, 450.0, None),
            "undetermined (90% interval above 450)",
            "not known, as B_crit is not",
        ),
    ],
)
def test_the_critical_batch_size_and_the_regimes_in_words(critical, text, regimes):
    trials = [make_trial(i, b) for i, b in enumerate((16, 4096))]
    summary = summarize(trials, TARGET, "no fit", critical=critical)
    assert critical_text(summary["critical"]) == text
    assert regimes_text(summary["regimes"], summary["critical"]) == regimes
    assert json.loads(dump_json(summary))["critical"]["b_crit"] == critical.b_crit
    found = report(trials, "no fit", None, None, critical)
    assert found.count("critical batch") == 1
    assert text in found


def test_trials_that_would_narrow_the_interval_and_fewest_examples_are_said():
    more = (NextTrial(8, 0.011, 2310.0, 12.3), NextTrial(4096, 0.5, 81.0, None))
    critical = replace(hand_critical(300.0, None, 480.0), next_trials=more, b_opt=40.0, b_opt_low=30.0, b_opt_high=55.0)
    found = report([make_trial()], "no fit", None, None, critical)
    assert "narrow it trials at B = 8 at 0.011 (2300 steps, 12.3 s); B = 4096 at 0.5 (81 steps)" in found
    assert "fewest examples at B = 40 (90% interval 30 to 55): smaller batches need more examples" in found


def test_live_table_shows_the_last_trials_in_80_columns():
    trials = [make_trial(i, 2**i, 10.0**-i) for i in range(12)]
    trials.append(make_trial(12, 65536, status="censored", steps=123456, steps_low=120000))
    trials.append(make_trial(13, status="oom", steps=0, steps_low=0, tau=None, history=()))
    trials.append(make_trial(14, status="diverged", history=((1, 0.9), (2, None))))
    lines = printed(trials_table(trials, TARGET)).splitlines()
    assert lines[0].rstrip() == "target val/error <= 0.1: reached by 12 of 15 trials"
    rows = [line.split() for line in lines if line.split() and line.split()[0].isdigit()]
    assert [row[0] for row in rows] == [str(number) for number in range(3, 15)]
    assert " ".join(rows[0]) == "3 8 0.001 reached 400 4.00 s 0.01 0.0995"
    assert [" ".join(row) for row in rows[-3:]] == [
        "12 65,536 0.1 censored > 120,000 - 0.01 0.0995",
        "13 64 0.1 oom - - - -",
        "14 64 0.1 diverged - - 0.01 -",
    ]
    assert max(map(len, lines)) <= 80
    assert "…" not in "".join(lines)


CRITICAL = hand_critical(80.0, 30.0, 200.0)


@pytest.mark.parametrize(
    ("count", "critical", "text"),
    [
        (
            6,
            CRITICAL,
            "noise scale 99 examples (90% interval 91 to 110; 24 steps of 6 trials), 1.2 times the critical batch",
        ),
        (6, None, "24 steps of 6 trials)"),
        (2, CRITICAL, "undetermined: 4 trials that reach the target are needed (8 steps of 2 trials)"),
        (0, CRITICAL, None),
    ],
)
def test_the_noise_scale_stands_beside_b_crit(count, critical, text):
    scales = [100.0 * math.exp(0.3 * (n / 5 - 0.5)) for n in range(count)]  # each over four steps
    noise = [tuple((32 * i, 1.0 / scale, 1.0) for i in range(1, 5)) for scale in scales]
    trials = [make_trial(n, 16 * 2**n, noise_scale=one) for n, one in enumerate(noise)] or [make_trial()]
    found = report(trials, "no fit", None, None, critical)
    assert text in found if text else "noise scale" not in found


def test_final_table_names_winners_and_test_errors():
    trials = [make_trial(4, 64), make_trial(7, 500, 0.4, steps=90, tau=0.1), make_trial(8, status="oom")]
    summary = summarize(trials, TARGET, "no fit", best=best_of(trials)) | {
        "test": {"best_by_time": {"test/error": 0.1012}}
    }
    text = printed(final_table(summary))
    expected = {
        "batch size (examples)": ["64", "500"],
        "learning rate": ["0.1", "0.4"],
        "time to target": ["4", "s", "(predicted)", "9", "s", "(predicted)"],
        "steps to target": ["400", "(predicted)", "90", "(predicted)"],
        "time per step": ["10.0", "ms", "100", "ms"],
        "test/error": ["0.101", "-"],
        "trial": ["4", "7"],
        "seed": ["1004", "1007"],
    }
    assert expected.items() <= rows_of(text, 22).items()
    assert "reached by 2 of 3 trials (1 oom)" in text
    assert max(map(len, text.splitlines())) <= 80
    assert "\x1b" not in text


LUCKY, STEADY = make_trial(0, 64, 0.1, steps=400), make_trial(1, 256, 0.4, steps=420)


def fresh(number, steps=440, of=LUCKY, **changes):
    return make_trial(number, of.batch_size, of.lr, steps=steps, replicate_of=of.number, **changes)


CONFIRMED = [LUCKY, STEADY, make_trial(2, 4096, 0.8, steps=90, tau=0.1)]
CONFIRMED += [fresh(3 + i, steps) for i, steps in enumerate((440, 460, 480))]
CONFIRMED += [fresh(6 + i, steps, STEADY) for i, steps in enumerate((430, 450, 410))]


@pytest.mark.parametrize(
    ("trials", "expected"),
    [
        # the same time: fewer steps; the same steps: less time; all the same: the lower number
        ([make_trial(0, steps=400, tau=0.01), make_trial(1, steps=200, tau=0.02)], [1, 1]),
        ([make_trial(0, steps=200, tau=0.02), make_trial(1, steps=200, tau=0.01)], [1, 1]),
        ([make_trial(5), make_trial(3)], [3, 3]),
        # without a measured step time a trial can be best by steps alone
        ([make_trial(0, steps=100, tau=None), make_trial(1, steps=200)], [1, 0]),
        ([make_trial(0, steps=100, tau=None)], [None, 0]),
        (CONFIRMED, [1, 2]),  # the best on fresh seeds, and not the best fresh run, of the steady point
        ([LUCKY, STEADY, fresh(3, 50)], [0, 0]),  # never a fresh run
        ([LUCKY, fresh(3, 50), make_trial(4, 256, 0.4, steps=390)], [4, 4]),  # nor beside a better point without any
    ],
)
def test_winners(trials, expected):
    summary = summarize(trials, TARGET, "no fit", best=best_of(trials))
    for name, number in zip(("best_by_time", "best_by_steps"), expected, strict=True):
        assert (summary[name] and summary[name]["number"]) == number


def test_what_fresh_seeds_gave_is_reported_of_a_winner_and_else_what_is_predicted():
    best = best_of(CONFIRMED)
    best["steps"] = replace(best["steps"], steps=96.4)
    summary = summarize(CONFIRMED, TARGET, "no fit", best=best)
    winner, single = summary["best_by_time"], summary["best_by_steps"]
    row = winner["confirmed"]
    assert (row["seeds"], row["reached"], row["runs"]) == ([1006, 1007, 1008], 3, 3)
    assert (winner["steps"], row["steps_median"], row["steps_low"], row["steps_high"]) == (430, 430, 410, 450)
    times = [winner["time_to_target"], *(row[f"time_{name}"] for name in ("median", "low", "high"))]
    assert times == pytest.approx([4.3, 4.3, 4.1, 4.5])
    assert winner["single_run"] == {"steps": 420, "time_to_target": 4.2}
    # a point of its own, that no fresh run stood at
    assert (single["confirmed"], single["steps"], single["single_run"]["steps"]) == (None, 96.4, 90)
    assert single["time_to_target"] == pytest.approx(9.64)
    json.loads(dump_json(summary))
    text = printed(final_table(summary))
    expected = {
        "time to target": ["4.3", "s", "(4.1", "to", "4.5)", "9.64", "s", "(predicted)"],
        "steps to target": ["430", "(410", "to", "450)", "96", "(predicted)"],
        "reached on fresh seeds": ["3", "of", "3", "-"],
    }
    assert expected.items() <= rows_of(text, 24).items()
    assert max(map(len, text.splitlines())) <= 80


CENSORED = {"status": "censored", "steps": 800}


@pytest.mark.parametrize(
    ("runs", "texts", "absent"),
    [
        ([], ["steps to target: predicted of a fresh seed from all trials, not run again"], "fresh seeds "),
        ([fresh(3), fresh(4), fresh(5)], ["steps to target: median and range over runs on fresh seeds"], "predicted"),
        (CONFIRMED[1:], ["range over runs on fresh seeds, or predicted of a fresh seed from all"], "warning"),
        (
            [fresh(3), fresh(4, 460), fresh(5, **CENSORED)],
            [
                "time to target 4.6 s (4.4 and more)",
                "reached on fresh seeds 2 of 3",
                "warning least time, B = 64 at lr = 0.1: reached the target on 2 of 3 fresh seeds; fewest steps, B",
            ],
            "over (",
        ),
        (
            [fresh(3), *(fresh(n, **CENSORED) for n in (4, 5))],
            ["time to target over (4.4 and more)", "on 1 of 3 fresh seeds"],
            "2 of 3",
        ),
        ([fresh(3, 8, status="diverged")], ["time to target - -", "reached on fresh seeds 0 of 1"], "more"),
    ],
)
def test_what_the_table_says_of_fresh_runs(runs, texts, absent):
    text = report([LUCKY, *runs])
    assert all(one in text for one in texts)
    assert absent not in text


def stopped(number, resumed_from=None, **changes):
    return make_trial(number, resumed_from=resumed_from, **{"status": "censored", **changes})


@pytest.mark.parametrize(
    ("trials", "text"),
    [
        ([make_trial(0), make_trial(1)], "reached by 2 of 2 trials"),
        ([stopped(0), make_trial(1, resumed_from=0)], "reached by 1 of 1 trial (a stopped one was continued once)"),
        (
            [stopped(0), stopped(1), stopped(2, 0), make_trial(3, resumed_from=2)],
            "reached by 1 of 2 trials (1 censored, a stopped one was continued 2 times)",
        ),
        ([stopped(0), stopped(1, 0)], "was never reached in 1 trial;"),
        # a continuation that failed leaves the stopped trial as it was, and is asked again
        ([stopped(0), stopped(1, 0, status="failed")], "reached by 0 of 2 trials (1 censored, 1 failed)"),
        (
            [stopped(0), stopped(1, 0, status="failed"), make_trial(2, resumed_from=0)],
            "reached by 1 of 2 trials (1 failed, a stopped one was continued once)",
        ),
    ],
)
def test_a_trial_that_was_continued_counts_once(trials, text):
    summary = summarize(trials, TARGET, "no fit")
    assert text in report(trials)
    assert sum(summary["statuses"].values()) == summary["trials"]
    count = f"reached by {summary['statuses']['reached']} of {summary['trials']} trial"
    assert count in printed(trials_table(trials, TARGET))


def test_the_exponent_and_the_stop_reason_are_in_the_summary_and_the_table():
    exponent, reason = (
        {"exponent": 0.62, "text": "lr grew as B^0.62 [0.48, 0.75]"},
        "stopped: search.seconds=60 are spent",
    )
    summary = summarize([LUCKY], TARGET, "no fit", exponent, reason)
    assert (summary["lr_exponent"], summary["stop_reason"]) == (exponent, reason)
    text, bare = report([LUCKY], "no fit", exponent, reason), report([LUCKY])
    for label, value in (("scaling rule", exponent["text"]), ("stop reason", reason)):
        assert f"{label} {value}" in text
        assert label not in bare


def test_the_scatter_over_seeds_is_in_the_table():
    row = {"scatter": 0.094, "low": 0.061, "high": 0.128, "level": 0.9}
    text = printed(final_table(summarize([LUCKY], TARGET, "no fit") | {"seed_scatter": row}))
    assert "over seeds      steps to target scatter by 9% (90% interval 6% to 13%)" in text


def test_paths_and_the_command_are_printed_unbroken(tmp_path):
    out = StringIO()
    command = "mlflow ui --backend-store-uri sqlite:///" + "a-long-folder/" * 10 + "mlflow.db [x]"
    path = tmp_path / ("long" * 30) / "curve.json"
    print_final(Console(file=out, width=80), summarize([LUCKY], TARGET, "no fit"), {"summary": path}, command)
    lines = [line.rstrip() for line in out.getvalue().splitlines()]
    assert lines[-2:] == [f"summary         {path}", f"MLflow UI       {command}"]


@pytest.mark.parametrize(
    ("trials", "front"),
    [
        ([], []),
        ([(10, 1.0), (20, 2.0)], [0]),  # beaten in both
        ([(10, 2.0), (20, 1.0), (15, 1.5), (15, 1.6)], [1, 2, 0]),
        ([(10, 1.0), (10, 1.0)], [0]),  # of equals the first
    ],
)
def test_pareto_front(trials, front):
    some = [make_trial(i, steps=steps, tau=seconds / steps) for i, (steps, seconds) in enumerate(trials)]
    some.append(make_trial(9, status="censored", steps=1, tau=0.001))
    assert [found.number for found in pareto_front(some)] == front
    assert [row["number"] for row in summarize(some, TARGET, "no fit")["pareto"]] == front


def test_the_readmes_numbers_follow_from_the_recorded_trials():
    trials, _, summary = recorded()
    assert summary["statuses"]["reached"] == len(trials) == 13
    critical = summary["critical"]
    assert critical["b_crit"] == pytest.approx(300, rel=0.15)  # other draws, on another machine
    assert 30 < critical["b_crit_low"] < 60
    assert summary["fit"]["noise"] == pytest.approx(0.29, abs=0.005)
    assert [summary[name]["batch_size"] for name in WINNERS] == [60, 807]
    assert summary["small_end"]["batch_sizes"] == [39, 60, 93, 133]
    assert summary["small_end"]["slope"] == pytest.approx(-1.07, abs=0.005)
    front = [(row["batch_size"], row["steps"]) for row in summary["pareto"]]
    assert front == [(60, 667), (220, 319), (613, 316), (779, 223)]
