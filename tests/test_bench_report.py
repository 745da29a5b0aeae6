import json
import math

import pytest
from synthetic import Law, synthetic_table

from bstune.core.records import Target, dump_json
from bstune.sweeps.baselines import Entry, baselines
from bstune.sweeps.contest import Played, make_task
from bstune.sweeps.search_benchmark_report import best_by, draw, leader, print_tables, standing, summary

TARGET = Target("error", 0.1, "min")
TABLE = synthetic_table(Law(), (8, 32, 128, 512, 2048), (0.02, 0.1, 0.5))
TASK, CURVE = (make_task("t", TABLE, TARGET, objective) for objective in ("time", "curve"))
ENTRIES = {entry.key: entry for entry in baselines()}
OWN = Entry("own", None, None, lambda problem, seed: None)
NONE = Played((), (), 3, 59.0, True)


def played(*path, trials=10, complete=True):
    return Played(path, (None,) * 5, trials, 59.0, complete)


def estimates(*values):
    return Played((), values, 10, 9.0, True)


def test_marks_are_the_median_and_the_90th_percentile_over_seeds():
    seeds = [played((1.0, 2.0), (4.0 + k, 1.0 + k / 100), trials=k, complete=k > 0) for k in range(20)]
    one = standing(TASK, ENTRIES["zeus"], seeds)
    assert [mark.spending for mark in one.marks] == [5, 10, 20, 40, 60]
    assert (one.marks[0].median, one.marks[0].p90) == (2.0, 2.0)  # 2 of 20 have got further after 5
    assert (one.marks[1].median, one.marks[1].p90) == (2.0, 2.0)  # 7 of 20 after 10
    assert one.marks[2].median == pytest.approx(1 + 9.5 / 100)  # 17 of 20 after 20
    assert one.marks[4].p90 == pytest.approx(1.17)
    assert one.within == (4 + 9.5, 4 + 17)
    assert (one.trials, one.cut_short) == (9.5, 1)


def test_what_most_seeds_lack_is_infinite():
    one = standing(TASK, ENTRIES["zeus"], [NONE, NONE, played((1.0, 1.1))])
    assert {mark.median for mark in one.marks} == {math.inf}
    assert one.within == (math.inf, math.inf)


def test_estimates_of_b_crit_are_off_either_way():
    one = standing(
        CURVE, ENTRIES["shallue"], [estimates(None, 0.5, 1.0), estimates(None, 1.5, 1.1), estimates(1.0, 1.2, 0.9)]
    )
    assert [mark.median for mark in one.marks] == [math.inf, 1.5, pytest.approx(1.1)]
    assert [mark.p90 for mark in one.marks] == [math.inf, 2.0, pytest.approx(1 / 0.9)]


def test_the_better_form_is_shown_and_the_best_search_comes_first():
    slow, fast = [played((30.0, 1.1))] * 3, [played((20.0, 1.2))] * 3
    found = [
        standing(TASK, ENTRIES["zeus"], [NONE] * 3),
        standing(TASK, ENTRIES["tpe/lr/pruned"], slow),
        standing(TASK, ENTRIES["tpe/lr/bound"], fast),
        standing(TASK, ENTRIES["gp/lr/bound"], [played((50.0, 1.0))] * 3),
    ]
    shown = [one.entry.key for one in best_by(found, lambda one: one.entry.group)]
    assert shown == ["tpe/lr/bound", "gp/lr/bound", "zeus"]
    rows = summary([TASK], found, [])["results"]
    assert {row["form"]: row["shown"] for row in rows if row["search"] == "tpe/lr"} == {"pruned": False, "bound": True}


def test_of_two_that_never_come_within_the_lower_at_the_end_is_better():
    worse, better = (
        standing(TASK, ENTRIES[f"tpe/lr/{form}"], [played((9.0, ratio))])
        for form, ratio in (("pruned", 3.0), ("bound", 2.0))
    )
    assert best_by([worse, better], lambda one: one.entry.group) == [better]


@pytest.mark.parametrize(
    ("own", "optuna", "expected"),
    [
        (5.0, 20.0, "tpe/lr after 20.0, own after 5.0: 4.0 times as much"),
        (5.0, None, "tpe/lr not after 60, own after 5.0: 12.0 times as much or more"),
        (None, 20.0, "tpe/lr after 20.0, own not after 60"),
    ],
)
def test_the_line_below_compares_with_the_best_of_optuna(own, optuna, expected):
    found = [
        standing(TASK, entry, [played((spent, 1.0)) if spent else NONE])
        for entry, spent in ((OWN, own), (ENTRIES["tpe/lr/bound"], optuna))
    ]
    assert leader(TASK, found) == f"within 1.25 of the best (median): {expected}"
    assert leader(CURVE, found) is None


def test_json_is_strict_and_null_where_there_is_none():
    text = dump_json(summary([TASK], [standing(TASK, ENTRIES["zeus"], [NONE])], ["note"]))
    shown = json.loads(text)
    assert shown["results"][0]["after"][0] == {"spending": 5.0, "median": None, "p90": None}
    assert shown["results"][0]["within"] == {"ratio": 1.25, "median": None, "p90": None}
    assert shown["tables"][0]["best"]["batch_size"] == TASK.best[0]
    assert shown["notes"] == ["note"]


@pytest.mark.parametrize("task", [TASK, CURVE], ids=["time", "curve"])
def test_the_table_and_the_figure(task, tmp_path, capsys):
    if task is TASK:
        found = [
            standing(task, ENTRIES["tpe/saturating/bound"], [played((2.0, 3.25), (30.0, 1.1))] * 2),
            standing(task, ENTRIES["gp/lr/bound"], [played((2.0, 1.5), complete=False)] * 2),
            standing(task, ENTRIES["zeus"], [NONE] * 2),
        ]
        expected = ["3.25/3.25", "1.10/1.10", "30.0", "none/none", "> 60", "10*", "ended by the cap"]
    else:
        found = [standing(task, ENTRIES["zeus"], [estimates(None, 1.5, 0.5)] * 2)]
        expected = ["none/none", "1.50/1.50", "2.00/2.00", "B_crit"]
    print_tables([task], found, ["a note"])
    out = capsys.readouterr().out
    for text in (*expected, "t: error <= 0.1; 2 seeds", "- a note"):
        assert text in out
    assert "…" not in out  # nothing is cut off
    draw([task, task], found, tmp_path / "bench.png")
    assert (tmp_path / "bench.png").read_bytes()[:4] == b"\x89PNG"
    assert [path.name for path in tmp_path.iterdir()] == ["bench.png"]
