"""Gate *other targets*: what a study says of easier targets, beside studies that were run for them.

    python tests/benchmarks/other_targets.py [--seeds 10] [--tables fashion_mlp ...]

A row is a table, a seed and a share of the best cell's steps to the table's target: the easier goal
is what that cell had met there. It has two answers: of a study that was run for the table's target
(32 configurations, 3 new seeds, the table's middle as baseline), asked for the easier one, and of a
study that was run for that one. Two values agree where they differ by no more than both intervals
allow, in quadrature. The truth of B_crit is the slope's, of the recorded cells; a choice is the
best, or what is predicted to be faster, and its median time over the best cell's.
"""

import functools
import math
import statistics
from dataclasses import replace
from functools import partial

from common import TABLES, Problem, add_rows, jobs_of, parser, read_rows, table_problem
from coverage import truth_of_problem

from bstune.core.question import Question
from bstune.core.records import Spec
from bstune.core.space import Configuration
from bstune.study.analysis import Study, analyse
from bstune.study.next_step import next_step
from bstune.study.plan import Ask, Plan
from bstune.study.retarget import retargeted
from bstune.trial.table import train
from bstune.trial.trial import Trial, run_trial

SHARES = (0.2, 0.35, 0.5, 0.65, 0.8)
HOLD = 0.9


@functools.cache
def easier_problem(name, share):
    """The problem of a table whose target is what its best cell had met at a share of its steps."""
    table = table_problem(name).table
    best_size, best_lr, _ = table_problem(name).best
    goals = []
    for run in table.cells[best_size, best_lr]:
        last = share * (run.steps_to(table.target) or run.end)
        until = [value for step, value in run.history() if step <= last]
        goals.append(min(until or run.metric[:1], key=table.target.gap))
    goal = float(f"{statistics.median(goals):.3g}")
    return Problem(replace(table, target=replace(table.target, goal=goal)))


def middle(values):
    """The one nearest to the geometric middle."""
    geometric = math.sqrt(values[0] * values[-1])
    return min(values, key=lambda value: abs(math.log(value / geometric)))


def plan_of(problem, seed):
    """A study of a table, as ``+workload=replay`` has it."""
    table = problem.table
    size, lr = round(middle(table.batch_sizes)), middle(table.lrs)
    return Plan(
        question=Question(table.target, table.budget),
        space=replace(problem.space, anchor=(size, lr)),
        baseline=Configuration(batch_size=size, lr=lr),
        trials=32,
        seeds=3,
        seed=seed,
        step_time=table.step_time,
    )


def records_of(problem, seed):
    """All trials of a study, one after another."""
    plan = plan_of(problem, seed)
    records = []
    while isinstance(ask := next_step(plan, records, [], 0.0), Ask):
        spec = Spec(number=len(records), **ask.model_dump(exclude={"until"}))
        trial = Trial(
            spec,
            plan.question.target,
            total_steps=plan.question.last_step(spec.batch_size),
            earlier=None if spec.resumed_from is None else records[spec.resumed_from],
        )
        records.append(run_trial(partial(train, problem.table), trial))
    return records


@functools.lru_cache(maxsize=1)
def hard_records(table, seed):
    """Those of the study of the table's own target."""
    return records_of(table_problem(table), seed)


def answer(problem, seed, records, ran_for=None):
    """What a study says of its target, and the truth of what it names as best, or as faster."""
    plan = plan_of(problem, seed)
    study = Study(
        plan, "table", "table", "recorded", 0, command=str, train="{} {} {}".format, ran_for=ran_for
    )
    result = analyse(study, records)
    best, critical = result.best, result.critical
    named = result.faster or best
    truth = problem.median_cost(named.batch_size, named.lr)
    return {
        "verdict": result.verdict,
        "best": [best.batch_size, best.lr],
        "named": [named.batch_size, named.lr],
        "runs": best.runs,
        "seconds": [best.seconds_low, best.seconds, best.seconds_high],
        "ratio": truth and truth / problem.best[2],
        "b_crit": [critical.interval.low, critical.interval.value, critical.interval.high],
    }


def measure(table, seed, share):
    """Both answers at one target."""
    hard, problem = table_problem(table), easier_problem(table, share)
    asked = plan_of(problem, seed)
    again = retargeted(plan_of(hard, seed).question, asked.question, hard_records(table, seed))
    return {
        "goal": problem.table.target.goal,
        "b_crit": truth_of_problem(replace(problem, objective="steps")),
        "asked": answer(problem, seed, again, "the table's"),
        "run": answer(problem, seed, records_of(problem, seed)),
    }


def within(value, interval):
    """Whether an interval holds a value; None without either, an end that is None is open."""
    low, _, high = interval
    if value is None or (low is None and high is None):
        return None
    return (low or 0.0) <= value <= (high or math.inf)


def agree(one, other):
    """Whether two values are equal within both intervals, whose half-widths add in quadrature.

    None where a value or the end that faces the other one is open.
    """
    low, high = sorted((one, other), key=lambda interval: interval[1] or 0.0)
    if None in (*low[1:], *high[:2]):
        return None
    halves = math.log(low[2] / low[1]), math.log(high[1] / high[0])
    return math.log(high[1] / low[1]) <= math.hypot(*halves)


def counted(found):
    """How many of those that tell hold."""
    told = [one for one in found if one is not None]
    return f"{sum(told):5}/{len(told):<4}"


def summary(rows):
    """A line: how many values agree; then of each answer truths held, and what choices take."""
    line = counted(agree(row["asked"]["seconds"], row["run"]["seconds"]) for row in rows)
    line += counted(agree(row["asked"]["b_crit"], row["run"]["b_crit"]) for row in rows)
    for side in ("asked", "run"):
        answers = [row[side] for row in rows]
        ratios = [one["ratio"] or math.inf for one in answers]
        line += "  "
        line += counted(within(row["b_crit"], row[side]["b_crit"]) for row in rows)
        line += f"{statistics.median(ratios):6.2f}"
    return line


def two_seeds(rows):
    """How many values agree of two studies that were run for one target, at successive seeds."""
    runs = {(row["table"], row["share"], row["seed"]): row["run"] for row in rows}
    line = ""
    for value in ("seconds", "b_crit"):
        pairs = []
        for (table, share, seed), run in runs.items():
            if (table, share, seed + 1) in runs:
                pairs.append(agree(run[value], runs[table, share, seed + 1][value]))
        line += counted(pairs)
    return line


def main():
    options = parser(__doc__, "other_targets.jsonl", seeds=10)
    options.add_argument("--tables", nargs="+", default=TABLES)
    given = options.parse_args()
    jobs = jobs_of(seed=range(given.seeds), table=given.tables, share=SHARES)
    add_rows(given, jobs, measure)
    rows = read_rows(given.rows)
    print(f"{'':18}agree in seconds, B_crit; asked: B_crit held, choice; run: the same")
    for table in dict.fromkeys(row["table"] for row in rows):
        print(f"{table:18}", summary([row for row in rows if row["table"] == table]))
    for share in SHARES:
        print(f"{share:<18}", summary([row for row in rows if row["share"] == share]))
    print(f"{'in all':18}", summary(rows))
    print("run for the same target, at two seeds:", two_seeds(rows))


if __name__ == "__main__":
    main()
