"""Searches on recorded runs, compared at equal spending.

A search knows the batch sizes, the range of rates, step times and target, and a budget of 4 times
the best cell's steps. Costs are recorded seconds, or examples under ``steps``; a trial that is
resumed pays what it adds, and the unit is what the best cell costs. No clock goes into them.
"""

import math
import statistics
import tempfile
import warnings
import zlib
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from importlib.util import find_spec
from itertools import accumulate, count, product
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import numpy as np
import optuna
from matplotlib import colormaps
from matplotlib.figure import Figure
from optuna.pruners import BasePruner, HyperbandPruner, MedianPruner
from pandas import DataFrame
from pydantic import Field, PositiveFloat, PositiveInt

from bstune.core.question import Question
from bstune.core.records import Budget, Record, Spec, Status, Target
from bstune.core.space import Configuration, Space
from bstune.search.decide import Proposal, propose
from bstune.search.findings import predictions
from bstune.search.posterior import sample_posterior
from bstune.sweeps.rows import Unit, measure_units
from bstune.system.ticker import say
from bstune.trial.recorded_run import Outcome
from bstune.trial.table import Table, find_table

TableName = Literal["fashion_mlp", "mnist_cnn", "cifar_mlp", "shakespeare_lstm", "mnist_mlp"]
Objective = Literal["time", "steps"]
Search = Annotated[str, Field(pattern="^(bstune|(tpe|gp|qmc|random|smac)( hyperband)?( sqrt)?)$")]
SAMPLERS: dict[str, Callable[..., optuna.samplers.BaseSampler]] = {
    "tpe": optuna.samplers.TPESampler,
    "gp": optuna.samplers.GPSampler,
    "qmc": partial(optuna.samplers.QMCSampler, scramble=True),
    "random": optuna.samplers.RandomSampler,
}
# A trial's budget, in steps of the best cell.
BUDGET_FACTOR = 4.0
MOST_TRIALS = 1000
# A trial takes Optuna's Gaussian process a hundred times as long as the others.
MOST_OF_GP = 60
# A limit that is met exactly still holds, whatever its arithmetic has rounded.
FOR_ROUNDING = 1.0 + 1e-9
# Hyperband's reduction factor, and its resources: so many of the 27 parts of a trial's budget.
FACTOR = 3
SHARES, WHOLE = (1, 3, 9), 27
# Steps at which other trials report: the pruner compares equal steps.
STEPS = [(step, step) for step in accumulate([10] + 80 * [1.2], lambda step, by: round(step * by))]
# Trials of others end once they have cost so many times their fastest one.
PATIENCE = 2.0
# What SMAC minimises, of a run that diverged: more than any metric's log over its target.
DIVERGED = 5.0
# A search is as good as the best from this ratio to it on.
NEAR = 1.25


@dataclass(frozen=True)
class Problem:
    """What a search knows before its first trial, and the table that answers its trials.

    Args:
        table: recorded runs, with their target.
        objective: of the search; ``curve`` costs and counts seconds, as ``time`` does.
        baseline: batch size and rate of the first trial, which the square-root rule goes through;
            without one the rule goes through the geometric middle of both ranges.
    """

    table: Table
    objective: Literal["time", "steps", "curve"] = "time"
    baseline: tuple[int, float] | None = None

    @property
    def target(self) -> Target:
        """That of shipped tables and of laws, which have one."""
        return cast(Target, self.table.target)

    def step_cost(self, batch_size: float, seconds: float) -> float:
        """What a step of so many seconds costs."""
        return float(batch_size) if self.objective == "steps" else seconds

    def step_time(self, batch_size: float) -> float:
        """What a step costs, as a search knows it."""
        return self.step_cost(batch_size, self.table.step_time(batch_size))

    def value(self, cost: float, batch_size: float) -> float:
        """What is minimised, of a configuration that costs so much: the cost, or its steps."""
        return cost / batch_size if self.objective == "steps" else cost

    def median_cost(self, batch_size: float, lr: float) -> float:
        """Median cost to the target over the recorded seeds; infinite if half of them miss it."""
        # A multiple of each cell's number of runs: each is read equally often.
        draws = math.lcm(*map(len, self.table.cells.values()))
        costs = []
        for draw in range(draws):
            share = (draw + 0.5) / draws
            outcome = self.table.outcome_at(batch_size, lr, share, self.target)
            steps = math.inf if outcome.steps is None else outcome.steps
            costs.append(steps * self.step_cost(batch_size, outcome.seconds_per_step))
        return statistics.median(costs)

    @cached_property
    def best(self) -> tuple[float, float, float]:
        """Batch size, rate and median cost of the best cell; of equals the cheapest, smallest."""
        cells = []
        for batch_size, lr in self.table.cells:
            cost = self.median_cost(batch_size, lr)
            cells.append((self.value(cost, batch_size), cost, batch_size, lr))
        _, cost, batch_size, lr = min(cells)
        return batch_size, lr, cost

    @cached_property
    def question(self) -> Question:
        """The objective, to the table's target within ``BUDGET_FACTOR`` times the best's steps."""
        batch_size, _, cost = self.best
        # The step time that a search knows, which is not exactly the best cell's own.
        steps = BUDGET_FACTOR * cost / self.step_time(batch_size)
        budget = Budget(steps=max(1, round(steps)), examples=max(1, round(steps * batch_size)))
        return Question(self.target, budget, self.objective)

    @cached_property
    def space(self) -> Space:
        """All of the table, and the rule."""
        rates = self.table.lrs[0], self.table.lrs[-1]
        return cast(Space, Space.around(self.table.range, rates, "sqrt", self.baseline, 1))

    def ratio_of(self, chosen: Configuration | Record) -> float:
        """How many times the best cell's value a configuration takes; infinite where half miss."""
        best_size, _, best_cost = self.best
        cost = self.median_cost(chosen.batch_size, chosen.lr)
        return self.value(cost, chosen.batch_size) / self.value(best_cost, best_size)

    def outcome(self, asked: Configuration, seed: int) -> Outcome:
        """How a trial ends."""
        return self.table.outcome(asked.batch_size, asked.lr, seed, self.target)

    def answer(self, proposal: Proposal, seed: int, records: Sequence[Record]) -> Record:
        """The next trial's end; it stops at exactly its last step."""
        number = len(records)
        parent = None if proposal.resumed_from is None else records[proposal.resumed_from]
        spec = Spec(
            number=number,
            place=f"search/{number}",
            role="search",
            seed=parent.seed if parent else trial_seed(seed, number),
            **proposal.model_dump(),
        )
        outcome = self.outcome(proposal, spec.seed)
        before = parent.steps if parent else 0
        steps = min(outcome.end, max(spec.max_steps, before))
        status: Status = "pruned"
        if outcome.steps is not None and outcome.steps <= steps:
            status = "reached"
        elif outcome.diverged and steps == outcome.end:
            status = "diverged"
        elif steps >= self.question.budget.last_step(spec.batch_size):
            status = "missed"
        history = [(step, value) for step, value in outcome.history if step <= steps]
        missed = [step for step, value in history if not self.target.reached(value)]
        step_cost = self.step_cost(spec.batch_size, outcome.seconds_per_step)
        return Record(
            **spec.model_dump(),
            status=status,
            steps=steps,
            steps_low=max(missed, default=0) if status == "reached" else steps,
            seconds_per_step=step_cost,
            train_seconds=(steps - before) * step_cost,
            history=tuple(history),
        )


Asking = Generator[Proposal, Record, None]
"""Proposes a trial, and is sent how it ended."""
Searcher = Callable[[Problem, int], Asking]
"""Of a problem and a seed."""


def trial_seed(seed: int, number: int) -> int:
    """The seed of a trial of a search."""
    return int(np.random.SeedSequence([seed, number, 0]).generate_state(1)[0])


def by_bstune(problem: Problem, seed: int) -> Asking:
    """The search of a study, after the baseline, which runs to its whole budget."""
    records: list[Record] = []
    if problem.baseline is not None:
        size, lr = problem.baseline
        last_step = problem.question.budget.last_step(size)
        records.append((yield Proposal(batch_size=size, lr=lr, max_steps=last_step)))

    def resumable(number: int) -> bool:
        # The recorded run of a trial that ended before its last step goes no further.
        return records[number].steps >= records[number].max_steps

    while True:
        proposal = propose(
            problem.question, problem.space, problem.step_time, records, seed, resumable=resumable
        )
        records.append((yield proposal))


def by_posterior(problem: Problem, records: Sequence[Record], seed: int) -> Record:
    """The trial whose configuration is best by the posterior's mean, as a study answers."""
    posterior = sample_posterior(problem.question, problem.space, records, seed=seed)
    predicted = predictions(posterior, problem.question, problem.step_time)
    return min(predicted, key=lambda one: one.log_value).record


def fastest(problem: Problem, records: Sequence[Record], seed: int) -> Record:
    """The trial that reached the target in the least time, or the fewest steps."""
    reached = [record for record in records if record.reached]
    return min(reached, key=partial(_value_of, problem))


def _value_of(problem: Problem, record: Record) -> float:
    """What a trial took, in what is minimised."""
    cost = record.steps * (record.seconds_per_step or 0.0)
    return problem.value(cost, record.batch_size)


def axis_of(space: Space, on_rule: bool) -> tuple[str, float, float, bool]:
    """The coordinate of the rate: name, low, high, and whether it is searched by its logarithm."""
    if not on_rule:
        return "lr", space.lr_low, space.lr_high, True
    half = 0.5 * math.log2(space.lr_high / space.lr_low)
    return "octaves", -half, half, False


def lr_at(space: Space, batch_size: int, coordinate: float, on_rule: bool) -> float:
    """The rate at a coordinate: the rate itself, or so many octaves off the square-root rule."""
    lr = space.rule_lr(batch_size) * 2.0**coordinate if on_rule else coordinate
    return min(max(lr, space.lr_low), space.lr_high)


def by_optuna(
    problem: Problem,
    seed: int,
    sampler: Callable[..., optuna.samplers.BaseSampler],
    hyperband: bool = False,
    on_rule: bool = False,
    patience: float = PATIENCE,
) -> Asking:
    """A sampler of Optuna's, whose trials a pruner judges by their metric.

    Args:
        problem, seed: of the search.
        sampler: makes it.
        hyperband: the pruner is Hyperband, with a trial's budget as its resource; else the median
            of other trials at the same step. A trial is judged by its first evaluation from there.
        on_rule: search octaves off the square-root rule in place of the rate.
        patience: a trial ends at so many times the least value.
    """
    pruner: BasePruner = MedianPruner()
    if hyperband:
        pruner = HyperbandPruner(1, WHOLE, FACTOR)
    # Hyperband draws a trial's bracket by the study's name.
    study = optuna.create_study(study_name=str(seed), sampler=sampler(seed=seed), pruner=pruner)
    space, least = problem.space, math.inf
    name, low, high, is_log = axis_of(space, on_rule)
    for number in count():
        trial = study.ask()
        size = trial.suggest_int("batch_size", space.low, space.high, log=True)
        coordinate = trial.suggest_float(name, low, high, log=is_log)
        places = [trial.suggest_float(one.name, 0.0, 1.0) for one in space.tunables]
        asked = Configuration(
            batch_size=size,
            lr=lr_at(space, size, coordinate, on_rule),
            values=space.values_at(places),
        )
        last_step = problem.question.budget.last_step(size)
        end = worth = _last_step_worth_it(problem, size, patience * least)
        history = problem.outcome(asked, trial_seed(seed, number)).history
        reports = STEPS
        if hyperband:
            reports = [(share, math.ceil(last_step * share / WHOLE)) for share in SHARES]
        for resource, at in reports:
            value = next((value for step, value in history if at <= step <= worth), None)
            if value is None:
                break
            trial.report(value, resource)
            if trial.should_prune():
                end = at
                break
        record = yield Proposal(**asked.model_dump(), max_steps=end)
        value = _value_of(problem, record)
        if record.reached:
            least = min(least, value)
        # What has cost more than it may is as bad as that; what was pruned is ranked by its metric.
        if record.reached or record.steps == worth < last_step:
            study.tell(trial, math.log(value))
        else:
            study.tell(trial, state=optuna.trial.TrialState.PRUNED)


def _last_step_worth_it(problem: Problem, batch_size: int, value: float) -> int:
    """The last step of a trial that may come to a value, within its budget."""
    steps = value / problem.value(problem.step_time(batch_size), batch_size)
    return max(1, int(min(steps * FOR_ROUNDING, problem.question.budget.last_step(batch_size))))


def by_smac(problem: Problem, seed: int, on_rule: bool) -> Asking:
    """SMAC3's MultiFidelityFacade (Lindauer et al. 2022, JMLR 23(54)), asked and told.

    It minimises the log of a trial's value over the largest one that the budget allows, below 0,
    and of a trial that has not reached the target that of its best metric over the target, above.
    """
    from ConfigSpace import ConfigurationSpace, Float, Integer
    from smac import MultiFidelityFacade, Scenario
    from smac.runhistory import TrialValue

    space, budget, goal = problem.space, problem.question.budget, problem.target.goal or 1.0
    name, low, high, is_log = axis_of(space, on_rule)
    parameters = ConfigurationSpace(seed=seed)
    parameters.add(
        Integer("batch_size", (space.low, space.high), log=True),
        Float(name, (low, high), log=is_log),
    )
    dearest = max(
        problem.value(budget.last_step(size) * problem.step_time(size), size)
        for size in (space.low, space.high)
    )
    latest: dict[Any, Record] = {}
    least = math.inf
    with tempfile.TemporaryDirectory() as folder:
        scenario = Scenario(
            parameters, output_directory=Path(folder), deterministic=True, min_budget=1,
            max_budget=WHOLE, n_trials=MOST_TRIALS, seed=seed,
        )  # fmt: skip
        intensifier = MultiFidelityFacade.get_intensifier(scenario, eta=FACTOR)
        facade = MultiFidelityFacade(
            scenario, lambda config, seed, budget: 0.0, intensifier=intensifier,
            logging_level=False, overwrite=True,
        )  # fmt: skip
        while True:
            info = facade.ask()
            size = int(info.config["batch_size"])
            earlier = latest.get(info.config)
            last_step = math.ceil(budget.last_step(size) * info.budget / WHOLE)
            last = min(last_step, _last_step_worth_it(problem, size, PATIENCE * least))
            # What has ended, or is worth no further step, tells what is known.
            if earlier is None or (earlier.status == "pruned" and earlier.steps < last):
                lr = lr_at(space, size, info.config[name], on_rule)
                parent = None if earlier is None else earlier.number
                earlier = yield Proposal(
                    batch_size=size, lr=lr, max_steps=last, resumed_from=parent
                )
                latest[info.config] = earlier
            logs = [math.log(value / goal) for value in earlier.finite_values]
            cost = DIVERGED if earlier.status == "diverged" else min(logs, default=DIVERGED)
            if earlier.reached:
                value = _value_of(problem, earlier)
                least = min(least, value)
                cost = math.log(value / dearest)
            facade.tell(info, TrialValue(cost=cost), save=False)


def search(
    problem: Problem,
    seed: int,
    most: float,
    asks: Searcher = by_bstune,
    most_trials: int = MOST_TRIALS,
) -> Iterator[tuple[float, list[Record]]]:
    """What was spent and all records, after each trial, until trials have cost ``most``."""
    asking = asks(problem, seed)
    proposal = next(asking)
    records: list[Record] = []
    spent = 0.0
    while len(records) < most_trials:
        record = problem.answer(proposal, seed, records)
        spent += record.train_seconds / problem.best[2]
        if spent > most * FOR_ROUNDING:
            return
        records.append(record)
        yield spent, records
        proposal = asking.send(record)


def path_of(
    problem: Problem,
    seed: int,
    most: float,
    asks: Searcher = by_bstune,
    most_trials: int = MOST_TRIALS,
) -> dict[str, Any]:
    """``trials`` of a search, and its ``path``: spendings at which its choice's ratio changes.

    It begins at the first hit; the ratio is None where half of the choice's recorded runs miss.
    """
    chooses = by_posterior if asks is by_bstune else fastest
    trials = 0
    path: list[tuple[float, float | None]] = []
    for spent, records in search(problem, seed, most, asks, most_trials):
        trials = len(records)
        if records[-1].reached:
            value = problem.ratio_of(chooses(problem, records, seed))
            ratio = value if math.isfinite(value) else None
            if not path or path[-1][1] != ratio:
                path.append((spent, ratio))
    return {"trials": trials, "path": path}


def ratio_after(path: Sequence[tuple[float, float | None]], spending: float) -> float | None:
    """The ratio of a search's choice after a spending; None without one."""
    ratios = [ratio for spent, ratio in path if spent <= spending * FOR_ROUNDING]
    return ratios[-1] if ratios else None


def run(
    output: Path,
    *,
    tables: list[TableName],
    objectives: list[Objective],
    searches: list[Search],
    seeds: PositiveInt,
    times: Annotated[list[PositiveFloat], Field(min_length=1)],
) -> tuple[DataFrame, Figure]:
    """Run each search on each table, and compare what their choices take.

    bstune's choice is the best by the posterior's mean, that of the others is their fastest trial.

    Args:
        output: the sweep's folder.
        tables: recorded runs that ship.
        objectives: ``time`` to the target, or ``steps``, whose costs are examples.
        searches: of Optuna, pruned by its MedianPruner or by ``hyperband``, or of SMAC3; with
            ``sqrt`` over octaves off the square-root rule in place of the rate.
        seeds: their number.
        times: spendings, in costs of the best cell, after which searches are compared.
    """
    of_smac = [name for name in searches if "smac" in name]
    if of_smac and find_spec("smac") is None:
        say("SMAC3 is left out, as it is not installed: pip install smac")
        searches = [name for name in searches if name not in of_smac]
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    # QMCSampler is one.
    warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
    units: list[Unit] = []
    for seed, table, objective, name in product(range(seeds), tables, objectives, searches):
        units.append({"table": table, "objective": objective, "search": name, "seed": seed})
    most = max(times)
    rows = measure_units(output / "rows.jsonl", {"most": most}, units, partial(_search_unit, most))
    figure = Figure(figsize=(7 * len(objectives), 5), layout="tight")
    axes = dict(zip(objectives, figure.subplots(1, len(objectives), squeeze=False)[0], strict=True))
    spendings = [*times, *np.geomspace(1.0, most, 100)]
    lines = []
    for (objective, name), paths in rows.groupby(["objective", "search"], sort=False)["path"]:
        ratios = [[ratio_after(path, at) or math.inf for at in spendings] for path in paths]
        medians = np.median(ratios, axis=0)
        nineties = np.quantile(ratios, 0.9, axis=0, method="inverted_cdf")
        near = []
        for path in paths:
            all_near = [spent for spent, ratio in path if (ratio or math.inf) <= NEAR]
            near.append(min(all_near, default=math.inf))
        line = {"objective": objective, "search": name, "n": len(paths)}
        line[f"to {NEAR}"] = np.median(near)
        for time, median, ninety in zip(times, medians, nineties, strict=False):
            line |= {f"{time:g}": median, f"{time:g}, 90%": ninety}
        lines.append(line)
        style = {"color": colormaps["tab20"](searches.index(name)), "label": name}
        axes[objective].plot(spendings[len(times) :], medians[len(times) :], **style)
    labels = {"xlabel": "spending / cost of the best cell", "ylabel": "choice / best cell"}
    for objective, of_objective in axes.items():
        of_objective.set(xscale="log", yscale="log", ylim=(1.0, 10.0), title=objective, **labels)
    figure.axes[-1].legend()
    return DataFrame(lines), figure


def _search_unit(most: float, unit: Unit) -> dict[str, Any]:
    """One search."""
    problem = Problem(find_table(str(unit["table"])), cast(Objective, unit["objective"]))
    name, *how = str(unit["search"]).split()
    asks: Searcher = by_bstune
    on_rule = "sqrt" in how
    if name == "smac":
        asks = partial(by_smac, on_rule=on_rule)
    elif name != "bstune":
        sampler, hyperband = SAMPLERS[name], "hyperband" in how
        asks = partial(by_optuna, sampler=sampler, hyperband=hyperband, on_rule=on_rule)
    # The searches of a seed begin differently.
    seed = zlib.crc32(str([*unit.values()]).encode())
    found = path_of(problem, seed, most, asks, MOST_OF_GP if name == "gp" else MOST_TRIALS)
    path = [(round(spent, 2), ratio and round(ratio, 4)) for spent, ratio in found["path"]]
    return {**found, "path": path}
