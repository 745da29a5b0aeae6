"""The comparison of searches: the searches, their figures of merit, and the sweep."""

import json
import math
from collections import Counter
from dataclasses import replace
from functools import cache
from itertools import product

import numpy as np
import pytest
from matplotlib.figure import Figure
from optuna.distributions import FloatDistribution, IntDistribution
from optuna.samplers import RandomSampler
from optuna.trial import TrialState
from rich.console import Console
from searches import TABLE, Scripted, first_trials, posed, recorded
from synthetic import Law, synthetic_table
from unit_logs import StoppedError, of_experiment, stopping_after, units_in

from bstune.core.errors import BstuneError, ConfigError, Interrupted, StudyError
from bstune.core.records import TrialResult, dump_json
from bstune.sweeps import search_benchmark, search_problem
from bstune.sweeps.baselines import (
    AXES,
    MAX_GP_TRIALS,
    EveryBatchSize,
    FrontierSearch,
    OptunaSearch,
    Zeus,
    rule_of,
)
from bstune.sweeps.harness import check_sweep, compose_sweep, main, write
from bstune.sweeps.search_benchmark_report import (
    RULES_OF_COMPARISON,
    best_by,
    make_finding,
    paint,
    sentence,
    standing,
    title,
)
from bstune.sweeps.search_problem import (
    MULTIPLES_OF_UNIT,
    SearchRun,
    least,
    run_search,
    stopping_step,
)
from bstune.sweeps.unit_log import UnfinishedError
from bstune.trial.recorded_run import Run
from bstune.trial.replay import Table, find_table

# Of a sweep: a change elsewhere seldom breaks it, and CI runs it.
pytestmark = pytest.mark.slow

ENTRIES = {entry.key: entry for entry in search_benchmark.searches()}


# The searches


# Made where they are asked for: each process that collects the tests imports this module.
@cache
def noisy():
    return posed(synthetic_table(Law(noise=0.1), (8, 32, 128, 512), (0.01, 0.1, 1.0)))


@cache
def hand():
    """B 40 is fastest, 50 s; lr 1 never reaches the target, and diverges at B 40 after 5 steps."""
    return posed(Table((*TABLE.runs[:3], recorded(40, 1.0, None, end=5, diverged=True))))


HORIZONS = str(find_table("digits_linear"))
# A batch size and a learning rate each.
REACHED, STOPPED, DIVERGED = (40, 0.1), (10, 1.0), (40, 1.0)


def asked_for(benchmark, points, rule=None, form="bound"):
    """Return an Optuna search of which the study first asks for the given points, dictionaries of parameters."""
    search = OptunaSearch(benchmark.problem, 0, RandomSampler(seed=0), rule, form)
    for point in points:
        search.study.enqueue_trial(point)
    return search


def test_a_stopped_trial_is_recorded_in_either_form():
    def last_trial(form, benchmark, *points):
        """Return the Optuna trial after trials at ``points``, and its result."""
        named_points = [{"batch_size": size, "lr": lr} for size, lr in points]
        search = asked_for(benchmark, named_points, form=form)
        finished = first_trials(search, benchmark, len(points))
        search.propose(finished)
        return search.study.trials[-2], finished[-1]

    # 8000 examples, the budget; then twice the fastest, also of one that diverged after 5 s
    for points, bound in (([STOPPED], 800), ([REACHED, STOPPED], 100), ([REACHED, DIVERGED], 100)):
        complete, _ = last_trial("bound", hand(), *points)
        assert (complete.state, complete.value) == (
            TrialState.COMPLETE,
            pytest.approx(math.log(bound)),
        )
        assert last_trial("pruned", hand(), *points)[0].state == TrialState.PRUNED
    for form in ("bound", "pruned"):
        reached, _ = last_trial(form, hand(), REACHED)
        assert (reached.state, reached.value) == (TrialState.COMPLETE, pytest.approx(math.log(50)))
    # a pruned trial is ranked by its distance from the target
    pruned, result = last_trial(
        "pruned", posed(synthetic_table(Law(), (8, 128), (0.001, 0.01, 0.1))), (8, 0.001)
    )
    gap = result.history[-1][1] - 0.1
    assert pruned.intermediate_values == {1: pytest.approx(gap)}
    assert 0.02 < gap < 0.5


def test_rules_go_through_the_reference():
    # The ratio of the rates at 256 and at 64, with a noise scale of 100.
    ratios = {
        "none": 1,
        "sqrt": 2,
        "linear": 4,
        "saturating": 4 * (64 + 100) / (256 + 100),
        "surge": 2 * 164 / 356,
    }
    for axis, ratio in ratios.items():
        rule = rule_of(replace(noisy().problem, noise_scale=100.0), axis)
        assert [rule(64), rule(256)] == pytest.approx([0.1, 0.1 * ratio])


@pytest.mark.parametrize(
    # 0.1 x 2; half of that at a quarter of the batch; 0.28 x 8 is clipped to the table's largest
    # rate.
    ("batch_size", "delta", "expected"),
    [(64, 1, 0.2), (16, 1, 0.1), (512, 3, 1.0)],
)
def test_the_axis_is_delta_around_the_rule_and_lr_is_clipped(batch_size, delta, expected):
    search = asked_for(
        noisy(), [{"batch_size": batch_size, "delta": delta}], rule_of(noisy().problem, "sqrt")
    )
    spec = search.propose([])
    # The rule goes through B = 64 and 0.1.
    assert (spec.batch_size, spec.delta, spec.lr) == (batch_size, delta, pytest.approx(expected))
    assert spec.max_steps == stopping_step(noisy().problem, batch_size, [])
    # The table's rates span a factor of 100.
    half = math.log2(100) / 2
    distributions = {
        "batch_size": IntDistribution(8, 512, log=True),
        "delta": FloatDistribution(-half, half),
    }
    assert search.study.trials[0].distributions == distributions


def test_each_batch_size_gets_as_many_trials_spread_over_the_learning_rates():
    finished = first_trials(EveryBatchSize(noisy().problem, 3), noisy(), 32)
    sizes = [trial.batch_size for trial in finished]
    orders = set()
    # The table has four batch sizes: a round is four trials.
    for rounds in range(1, 9):
        assert set(Counter(sizes[: 4 * rounds]).values()) == {rounds}
        orders.add(tuple(sizes[4 * (rounds - 1) : 4 * rounds]))
    assert len(orders) > 1

    def shares_at(batch_size):
        """Return how far up the logarithmic range of learning rates each trial of a batch size is."""
        rates = [trial.lr for trial in finished if trial.batch_size == batch_size]
        return np.log(np.array(rates) / 0.01) / math.log(100)

    for shares in (shares_at(8), shares_at(512)):
        # Quasi-random: after 8 terms no gap is wider than an eighth.
        gaps = np.diff([*sorted(shares), min(shares) + 1])
        assert max(gaps) == pytest.approx(1 / 8)
    # Independent of each other.
    assert np.abs(np.subtract.outer(shares_at(8), shares_at(512))).min() > 1e-4


@pytest.mark.parametrize(
    ("steps", "expected", "left"),
    [
        # 8 costs more than twice the least and 128 never gets there; the second round starts at the cheapest
        (
            {8: 300, 16: 80, 32: 60, 64: 50, 128: None},
            [32, 16, 8, 64, 128, 64, 32, 16, 64, 64, 64],
            (16, 32, 64),
        ),
        # 32 fails at once, upwards goes on
        ({8: 60, 16: 60, 32: None, 64: 50, 128: 40}, [32, 64, 128, 128, 64, 128, 128], (64, 128)),
        # nothing reaches the target within the budget of a step: the pruning starts over
        ({10: 100, 40: 50}, [10, 40, 10, 40, 10, 40], (10, 40)),
    ],
)
def test_zeus_prunes_twice_then_takes_the_cheapest(steps, expected, left):
    runs = [recorded(size, 0.1, reached, end=4000) for size, reached in steps.items()]
    # The last case alone has a budget of a step.
    budget_factor = 1e-4 if 10 in steps else 1
    benchmark = posed(Table(tuple(runs)), budget_factor=budget_factor)
    search = Zeus(benchmark.problem, 0)
    finished = first_trials(search, benchmark, len(expected))
    assert [trial.batch_size for trial in finished] == expected
    assert search.left == left


def test_zeus_keeps_trying_batch_sizes_that_may_be_as_good_at_the_rate_of_the_rule():
    law = Law(noise=0.2, right=0, left=0)
    benchmark = posed(synthetic_table(law, seeds=range(8)))
    # No side of the best rate costs anything, so that the batch size alone decides.
    search = Zeus(benchmark.problem, 1)
    # Left out are the first 20, which hold both rounds of pruning.
    tried = Counter(trial.batch_size for trial in first_trials(search, benchmark, 120)[20:])
    cheapest = sorted(
        benchmark.problem.batch_sizes, key=lambda size: law.frontier(size) * law.tau(size)
    )[:3]
    assert len(tried) > 1
    # Most of them, as it explores the others.
    assert sum(map(tried.__getitem__, cheapest)) > 0.6 * tried.total()
    # The rule's rate, within those of the table.
    for trial in first_trials(Zeus(noisy().problem, 0), noisy(), 6):
        assert trial.lr == pytest.approx(
            min(max(0.1 * math.sqrt(trial.batch_size / 64), 0.01), 1.0)
        )


def test_every_search_has_a_name():
    optunas = set(map("/".join, product(("random", "qmc", "tpe", "gp"), AXES)))
    groups = {entry.group for entry in ENTRIES.values()}
    assert groups == {"bstune", "bstune/none", "bstune/linear", *optunas, "shallue", "zeus"}
    assert ENTRIES["gp/sqrt/bound"].max_trials == MAX_GP_TRIALS
    chosen = {
        # Alone it is the one with its usual rule.
        ("bstune",): ["bstune"],
        ("bstune/none", "bstune"): ["bstune/none", "bstune"],
        ("tpe/sqrt",): ["tpe/sqrt/pruned", "tpe/sqrt/bound"],
        ("qmc",): [f"qmc/{axis}" for axis in AXES],
        (): list(ENTRIES),
    }
    for names, expected in chosen.items():
        assert [entry.key for entry in search_benchmark.choose(names, quick=False)] == expected


# bstune's own search

LAW = Law(noise=0.1)


@cache
def of_law(objective="time"):
    return posed(synthetic_table(LAW, metric_noise=0.05), objective)


@pytest.fixture(scope="module")
def searched():
    """Return a search, what it came to, and its trials."""
    search, trials = FrontierSearch(of_law().problem, 3), []
    incumbent = search.incumbent
    search.incumbent = lambda finished: trials.append(finished[-1]) or incumbent(finished)
    return search, run_search(search, of_law(), (20.0,)), trials


def test_a_continued_trial_has_the_samplers_max_steps_and_the_study_its_record(searched):
    search, found, trials = searched
    continued = [trial for trial in trials if trial.resumed_from is not None]
    assert found.trials > len(continued) > 3
    # Within a half of the best trial's time.
    assert found.path[-1][1] < 1.5
    # The budget binds, whatever the search wishes.
    for trial in trials:
        assert trial.steps <= of_law().problem.budget.last_step(trial.batch_size)
    for trial in continued:
        before = trials[trial.resumed_from]
        assert (trial.batch_size, trial.lr, trial.seed) == (
            before.batch_size,
            before.lr,
            before.seed,
        )
        assert before.steps < trial.steps <= search.sampler.max_steps(trial.number)
        assert trial.reached or trial.steps == search.sampler.max_steps(trial.number)
    fresh = [trial.seed for trial in trials if trial.resumed_from is None]
    # A continuation keeps its seed; no two new trials share one.
    assert len(set(fresh)) == len(fresh)
    for trial, one in zip(search.study.trials, trials, strict=False):
        assert TrialResult.from_json(trial.user_attrs["bstune:record"]) == one
        expected = (
            (TrialState.COMPLETE, math.log(one.time_to_target))
            if one.reached
            else (TrialState.PRUNED, None)
        )
        assert (trial.state, trial.value if one.reached else None) == expected


def test_the_incumbent_is_the_posteriors_not_the_fastest(searched, monkeypatch):
    search, _, trials = searched
    # The slowest of those that reached, so that it differs from the fastest.
    reached = [trial for trial in trials if trial.reached]
    first, other = reached[0], max(reached, key=lambda trial: trial.time_to_target)
    monkeypatch.setattr(search.sampler, "recommended", lambda study: other.number)
    # Its last trial did not reach the target.
    before = search.incumbent(trials[: first.number])
    assert search.incumbent(trials[: other.number + 1]) == other != least(trials)
    assert before != other


@pytest.mark.slow
def test_a_trial_whose_record_ended_is_not_continued():
    """Only one learning rate reaches the target; the records of the others end early."""
    steps = tuple(range(5, 101, 5))

    # Twenty looks, every five steps.
    def errors_down_to(end):
        return tuple(0.9 - (0.9 - end) * step / 100 for step in steps)

    falls = errors_down_to(0.05)
    stays = errors_down_to(0.15)
    runs = []
    for size in (8, 16, 32):
        runs.append(Run(size, 0.5, 0, steps, falls, 0.01, diverged=False))
    # Eight of the looks, up to step 40.
    for size, lr in product((8, 16, 32), (0.01, 0.03, 0.1, 0.25)):
        runs.append(Run(size, lr, 0, steps[:8], stays[:8], 0.01, diverged=False))
    benchmark = posed(Table(tuple(runs)))
    search = FrontierSearch(benchmark.problem, 0)
    trials = first_trials(search, benchmark, 40)
    ended = set()
    for trial in trials:
        is_at_the_end = trial.status == "stopped" and trial.steps == 40
        # Others that stopped there ended where they should.
        if is_at_the_end and search.sampler.max_steps(trial.number) > 40:
            # It was allowed to go further than the record does.
            ended.add(trial.number)
    assert ended
    assert ended.isdisjoint(trial.resumed_from for trial in trials)


@pytest.mark.soak
def test_b_crit_is_what_a_study_would_report():
    one_size = posed(synthetic_table(replace(LAW, exponent=0.0), (64,), (0.05, 0.1, 0.2)))
    search = FrontierSearch(one_size.problem, 0)
    run_search(search, one_size, (10.0,))
    # The posterior's median is the prior's there.
    assert search.b_crit([]) is None
    search = FrontierSearch(of_law("curve").problem, 0)
    assert search.b_crit([]) is None
    (ratio,) = run_search(search, of_law("curve"), (2.0,)).b_crit
    assert ratio * of_law("curve").b_crit == pytest.approx(LAW.b_crit, rel=0.3)


# Figures of merit

NONE = SearchRun((), (), 3, 59.0, True)


def of_path(*path, trials=10, complete=True):
    return SearchRun(path, (None,) * 5, trials, 59.0, complete)


def stands(key, *runs, benchmark=None):
    return standing(benchmark or noisy(), ENTRIES[key], runs)


def test_marks_are_the_median_and_the_90th_percentile_over_seeds():
    # How much was spent, and how far the incumbent was from the best then; None: it had none.
    path = ((2.0, 3.0), (5.0, 1.2), (9.0, 1.3), (10.0, None))
    after = {1.9: math.inf, 2.0: 3.0, 5.0: 1.2, 9.0: 1.3, 11: math.inf}
    for spent, ratio in after.items():
        assert search_problem.ratio_after(path, spent) == ratio
    assert search_problem.spending_within(path, 1.25) == 5.0
    assert search_problem.spending_within(path, 1.1) == math.inf
    # 0.07 x 100 is more than 7 in floats.
    assert search_problem.percentile(list(range(1, 101)), 0.07) == 7
    seeds = []
    # The second point comes after 4 to 23, the later the further from the best.
    for k in range(20):
        second = (4.0 + k, 1.0 + k / 100)
        seeds.append(of_path((1.0, 2.0), second, trials=k, complete=k > 0))
    one = stands("zeus", *seeds)
    assert [mark.spending for mark in one.marks] == [5, 10, 20, 40, 60]
    # After 10, 7 of 20 are further.
    assert (one.marks[1].median, one.marks[1].p90) == (2.0, 2.0)
    # After 20, 17 of 20.
    assert one.marks[2].median == pytest.approx(1 + 9.5 / 100)
    assert one.marks[4].p90 == pytest.approx(1.17)
    assert (one.within, one.trials, one.cut_short) == ((4 + 9.5, 4 + 17), 9.5, 1)
    # Two of three found nothing.
    one = stands("zeus", NONE, NONE, of_path((1.0, 1.1)))
    # What most seeds lack.
    assert {mark.median for mark in one.marks} == {*one.within} == {math.inf}
    runs = []
    # Estimates over the truth, after 1, 3 and 10 times the frontier's cost.
    for estimates in ((None, 0.5, 1.0), (0.0, 1.5, 1.1), (1.0, 1.2, 0.9)):
        runs.append(SearchRun((), estimates, 10, 9.0, True))
    one = stands("shallue", *runs, benchmark=of_law("curve"))
    marks = [(mark.spending, mark.median, mark.p90) for mark in one.marks]
    # Off either way: an estimate of half is off by 2.
    assert marks == [
        (1, math.inf, math.inf),
        (3, 1.5, 2.0),
        (10, pytest.approx(1.1), pytest.approx(1 / 0.9)),
    ]


def test_the_better_form_is_shown_and_the_best_search_comes_first():
    standings = [
        stands("zeus", NONE),
        stands("tpe/lr/pruned", of_path((30.0, 1.1))),
        stands("tpe/lr/bound", of_path((2.0, 3.25), (20.0, 1.2), trials=7, complete=False)),
        stands("bstune", of_path((6.0, 1.0))),
        stands("bstune/linear", of_path((5.0, 1.0))),
    ]
    finding = make_finding([noisy()], standings, [], [{"digest": "abc"}], 1)
    assert [row["search"] for row in finding.rows] == ["bstune/linear", "bstune", "tpe/lr", "zeus"]
    row = {
        "table": "t",
        "search": "tpe/lr",
        "form": "bound",
        "5x": "3.25/3.25",
        "10x": "3.25/3.25",
        "20x": "1.20/1.20",
    }
    assert finding.rows[2] == {
        **row,
        "40x": "1.20/1.20",
        "60x": "1.20/1.20",
        "to_1.25": "20.0",
        "trials": "7*",
    }
    assert (finding.rows[3]["5x"], finding.rows[3]["to_1.25"]) == ("none/none", "> 60")
    # the usual rule of bstune's, not the best one of these seeds
    assert finding.sentence.endswith("t: tpe/lr after 20.0, bstune after 6.0, 3.3 times as much.")
    details = json.loads(dump_json(finding.details))
    assert details["tables"][0]["digest"] == "abc"
    zeus, pruned = details["results"][:2]
    assert zeus["after"][0] == {"spending": 5.0, "median": None, "p90": None}
    assert (zeus["shown"], pruned["shown"]) == (True, False)
    assert not any("Optuna's GP" in note for note in finding.notes)
    # neither comes within: the lower at the end is better
    worse, better = (
        stands("tpe/lr/pruned", of_path((9.0, 3.0))),
        stands("tpe/lr/bound", of_path((9.0, 2.0))),
    )
    assert best_by([worse, better], lambda one: one.entry.group) == [better]


def test_the_sentence_compares_with_the_best_of_optuna_or_names_the_best_estimate():
    within, never = of_path((20.0, 1.0)), NONE
    for zeus, tpe, expected in (
        # It was not within after 60, so 60/20 is the least that it is.
        (within, never, "tpe/lr not after 60, zeus after 20.0, 3.0 times as much or more."),
        (never, within, "tpe/lr after 20.0, zeus not after 60."),
    ):
        text = sentence([noisy()], [stands("zeus", zeus), stands("tpe/lr/bound", tpe)])
        assert (
            text == f"Spending until within 1.25 of the best, in its cost (median): t: {expected}"
        )
    runs = []
    # One of them has no estimate: the median is the larger of the other two errors.
    for estimate in (None, 0.8, 1.1):
        runs.append(SearchRun((), (None, 0.5, estimate), 10, 9.0, True))
    assert sentence([of_law("curve")], [stands("shallue", *runs, benchmark=of_law("curve"))]) == (
        "After 10 times the frontier's cost B_crit is off least (median factor) with t: shallue by 1.25."
    )


@pytest.mark.parametrize(
    ("objective", "cost", "unit"),
    [("time", "incumbent's time", " s"), ("steps", "incumbent's steps", " examples")],
)
def test_the_figure_and_the_title_name_what_is_compared(objective, cost, unit):
    benchmark, figure = posed(objective=objective), Figure()
    paint([benchmark], [stands("zeus", of_path((5.0, 1.2)), benchmark=benchmark)], figure)
    (axes,) = figure.axes
    assert axes.get_ylabel().startswith(cost)
    assert ("examples" in axes.get_xlabel()) == (objective == "steps")
    assert title(benchmark).endswith(unit)


# The sweep


@pytest.fixture
def folder(tmp_path, monkeypatch, write_table):
    """Two shipped tables with their index; the working directory is another one, with a table without a B_crit."""
    shipped = tmp_path / "shipped"
    shipped.mkdir()
    table = synthetic_table(Law(noise=0.1), (8, 32, 128, 512, 2048), (0.01, 0.03, 0.1, 0.3))
    for name in ("easy", "other"):
        write_table(shipped / f"{name}.jsonl", table, "stopped")
        with (shipped / "tables.yaml").open("a") as index:
            index.write(f"{name}: {{metric: val/error, target: 0.1, command: make {name}}}\n")
    write_table(tmp_path / "two.jsonl", synthetic_table(Law(), (8, 32), (0.03, 0.1)), "stopped")
    monkeypatch.setattr("bstune.trial.replay.SHIPPED", shipped)
    monkeypatch.chdir(tmp_path)
    return shipped


def go(output="out", **options):
    """Run the sweep and write its files; return the finding."""
    config = compose_sweep("search_benchmark", ())
    config.sweep.output = output
    config.sweep.experiment.update(options)
    sweep = check_sweep("search_benchmark", config)
    finding = sweep.find(Console(quiet=True))
    write(sweep, finding, ())
    return finding


def best_point(problem, seed):
    """Return a search that knows the best point of the table ``easy``."""
    return Scripted((128, 0.1), seed=seed)


def test_all_tables_by_default_and_anyones_search(folder, tmp_path, monkeypatch):
    anyones = f"{__name__}:best_point"
    go(searches=["tpe/lr", anyones], seeds=2)
    written = json.loads((tmp_path / "out/result.json").read_text())
    commands = {table["table"]: table["command"] for table in written["tables"]}
    assert commands == {"easy": "make easy", "other": "make other"}
    # TPE in two forms, and anyone's, on two tables.
    assert len(written["results"]) == 6
    assert (written["n"], written["tables"][0]["target"]) == (2, "val/error <= 0.1")
    by_name = {(result["search"], result["table"]): result for result in written["results"]}
    merits = by_name[anyones, "easy"]
    # It knows the best point, so its ratio is 1 from the first trial on.
    assert merits["after"][0] == {"spending": 5.0, "median": 1.0, "p90": 1.0}
    # Its first trial, with the noise of one run.
    assert 0.7 < merits["within"]["median"] < 1.4
    monkeypatch.setitem(search_problem.MULTIPLES_OF_UNIT, "time", (1.0, 2.0))
    # A shipped table may be named by its path.
    finding = go(quick=True, tables=[str(folder / "easy.jsonl")])
    assert {row["search"] for row in finding.rows} == set(search_benchmark.QUICK_SEARCHES)
    assert (finding.n, finding.details["tables"][0]["target"]) == (3, "val/error <= 0.1")


@pytest.mark.slow
def test_the_same_seeds_find_the_same_in_other_processes(folder, tmp_path):
    common = {
        "searches": ["qmc/linear", "tpe/surge/bound", "shallue"],
        "tables": ["easy"],
        "seeds": 2,
    }
    # The second time in two processes.
    one, two = go("one", **common), go("two", **common, workers=2)
    assert (one.rows, one.details) == (two.rows, two.details)
    lines = (tmp_path / "one/runs.jsonl").read_text().splitlines()[1:]
    # As texts, of which a set can be made.
    values = [json.dumps(json.loads(line)["value"]) for line in lines]
    # Seeds differ.
    assert len(set(values)) == len(values) == 6


@pytest.mark.slow
def test_kept_runs_are_not_run_again(folder, tmp_path, monkeypatch, write_table):
    ran, run = [], search_benchmark.Case.run
    monkeypatch.setattr(
        search_benchmark.Case,
        "run",
        lambda case: ran.append((case.entry.key, case.seed)) or run(case),
    )

    def runs(**options):
        ran.clear()
        return go(searches=["random/lr", "zeus"], tables=["easy"], **options), list(ran)

    first, _ = runs(seeds=2)
    again, new = runs(seeds=2)
    assert (again.details, new) == (first.details, [])
    # A third seed has its units alone to run.
    assert runs(seeds=3)[1] == [("random/lr", 2), ("zeus", 2)]
    # They are the first ones.
    assert runs(seeds=1)[1] == []
    path = tmp_path / "out/runs.jsonl"
    whole = path.read_text()
    # A killed process left the last line half written.
    path.write_text(whole[:-40])
    assert runs(seeds=3)[1] == [("zeus", 2)]
    assert units_in(path) == [json.loads(line).get("unit") for line in whole.splitlines()[1:]]
    both = [("random/lr", 0), ("zeus", 0)]
    # Another target is another search.
    assert runs(seeds=1, target=0.2)[1] == both
    assert runs(seeds=1)[1] == both
    # By whole parts of the name.
    assert runs(seeds=1, again=["zeus", "rand", "random/sqrt"])[1] == [("zeus", 0)]
    # The search has changed, for every seed.
    assert units_in(path).count("easy/zeus/0") == 1
    assert "easy/zeus/1" not in units_in(path)
    assert runs(seeds=1, again=["random"])[1] == [("random/lr", 0)]
    # Another table under the same name: what was kept is of the former one.
    table = synthetic_table(Law(noise=0.2), (8, 128, 2048), (0.03, 0.1))
    write_table(folder / "easy.jsonl", table, "stopped")
    assert runs(seeds=1)[1] == both
    before = path.read_text()
    # What changes the question is refused for these runs as a whole.
    for changed in ({"lr_factor": 10}, {"budget_factor": 0.5}, {"objective": "steps"}):
        with pytest.raises(StudyError, match=next(iter(changed))):
            runs(seeds=1, **changed)
    assert path.read_text() == before
    # What an earlier bstune kept is of another format.
    path.write_text('{"key": {"search": "zeus"}, "run": {}}\n')
    assert runs(seeds=1)[1] == both
    assert path.with_name("runs.other-1.jsonl").exists()


def test_a_comparison_that_is_stopped_goes_on(folder, tmp_path, monkeypatch):
    common = {"searches": ["random/lr", "zeus"], "tables": ["easy"], "seeds": 2}
    whole = go("whole", **common)
    run = search_benchmark.Case.run
    for count in (1, 2):
        with monkeypatch.context() as patched:
            patched.setattr(search_benchmark.Case, "run", stopping_after(count, run))
            with pytest.raises(StoppedError):
                # Its units come one by one: stopped after one, and after two more.
                go("stopped", **common)
    with monkeypatch.context() as patched:
        patched.setattr(search_benchmark.Case, "run", stopping_after(1, run))
        found = go("stopped", **common)
    assert (found.rows, found.details) == (whole.rows, whole.details)
    paths = [tmp_path / name / "runs.jsonl" for name in ("whole", "stopped")]
    assert units_in(paths[0]) == units_in(paths[1])


def test_a_choice_of_searches_runs_those_alone(folder, tmp_path):
    common = {"searches": ["random/lr", "zeus"], "tables": ["easy"], "seeds": 2}
    with pytest.raises(UnfinishedError, match="3 of 4 units"):
        go(only=["easy/zeus", "easy/random/lr/1"], **common)
    units = ["easy/random/lr/1", "easy/zeus/0", "easy/zeus/1"]
    assert units_in(tmp_path / "out/runs.jsonl") == units
    with pytest.raises(ConfigError, match=r"only names zeus, .*units: easy/random/lr/0; "):
        go(only=["zeus"], **common)


def test_a_rule_without_a_noise_scale_is_left_out(folder):
    finding = go(tables=["two.jsonl"], target=0.1, searches=["random/surge", "random/lr"], seeds=1)
    assert finding.notes[-1].startswith(
        "two: random/surge is left out: its rule takes a noise scale"
    )
    assert [row["search"] for row in finding.rows] == ["random/lr"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"searches": ["x"]},
            "no search is named 'x': choose from bstune, bstune/none, bstune/linear, random/lr",
        ),
        ({"searches": ["nowhere:make"]}, "the search 'nowhere:make' cannot be imported"),
        ({"searches": ["math:nothing"]}, "cannot be imported"),
        ({"tables": ["missing.jsonl"]}, "there is no table missing.jsonl: give the path of a file"),
        ({"tables": ["two.jsonl"]}, "two.jsonl is not one of bstune's own tables"),
        ({"tables": [HORIZONS], "target": 0.1}, "name a table whose runs have no horizon"),
        (
            {"tables": ["easy"], "target": 0.01},
            "is never reached in this table; lowest val/error 0.1",
        ),
        ({"seeds": 0}, "seeds and .workers must be at least 1, but got 0"),
        ({"objective": "price"}, "objective must be one of time, steps, curve, but got 'price'"),
    ],
)
def test_unusable_input_is_refused_before_anything_runs(folder, tmp_path, options, message):
    with pytest.raises(BstuneError) as caught:
        go(**options)
    assert message in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_an_interruption_names_the_file_of_kept_runs(folder, monkeypatch):
    def interrupted(case):
        if case.seed:
            raise KeyboardInterrupt
        return run(case)

    run = search_benchmark.Case.run
    monkeypatch.setattr(search_benchmark.Case, "run", interrupted)
    options = ("tables=[easy]", "searches=[zeus]", "seeds=2")
    with pytest.raises(Interrupted, match=r"/runs\.jsonl keeps what has ended; the same command"):
        main(["search_benchmark", *of_experiment(*options)])


def test_every_objective_has_its_rules_in_the_report():
    assert RULES_OF_COMPARISON.keys() == MULTIPLES_OF_UNIT.keys()
