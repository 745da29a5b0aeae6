"""How long bstune's sampler takes for a decision: from ``study.ask`` to the parameters of the next trial.

The study is in memory and holds trials of a synthetic table (:mod:`synthetic`, run to run noise 0.1), each with
its record and its history, as bstune's own studies do: those that the sampler itself asked for, stopped where it said.
At each size the same study is asked again and again with other seeds; the trial that was asked for is recorded as
failed, so that nothing is learned from it. The first decision is thrown away. Seconds are the wall's; the processor's
own are beside them, and are the ones to read on a busy machine. The aim is 0.2 s at 200 trials.

    python tests/benchmarks/bench_decision.py [--trials 10 50 100 200] [--repeats 20] [--others 0] [--json FILE]
"""

import math
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

import optuna
from common import machine, options_of, write
from optuna.distributions import BaseDistribution, FloatDistribution, IntDistribution
from optuna.trial import TrialState
from synthetic import Law, synthetic_table

from bstune.core.records import Target, TrialResult, TrialSpec
from bstune.search.sampler import RECORD, RESUMED_FROM, FrontierSampler
from bstune.trial.replay import Table, replay

TARGET = Target("error", 0.1, "min")
LAW = Law(noise=0.1)
BUDGET = 40_000.0  # steps


def measure(objective: str, sizes: Sequence[int], repeats: int, others: int) -> Iterator[dict[str, Any]]:
    """Yield the timings of one study as it grows to each of ``sizes``."""
    table, space, study = synthetic_table(LAW), _space(others), optuna.create_study()
    for size in sizes:
        while len(study.get_trials(deepcopy=False, states=(TrialState.COMPLETE, TrialState.PRUNED))) < size:
            _run(study, table, objective, space)
        reached = sum(trial.state == TrialState.COMPLETE for trial in study.get_trials(deepcopy=False))
        seconds, cpu = [], []
        for repeat in range(repeats + 1):
            study.sampler = _sampler(objective, space, repeat)
            start, busy = time.perf_counter(), time.process_time()
            trial = study.ask(space)
            seconds.append(time.perf_counter() - start)
            cpu.append(time.process_time() - busy)
            study.tell(trial, state=TrialState.FAIL)
        times = {"median": statistics.median(seconds[1:]), "longest": max(seconds[1:])}
        yield {"objective": objective, "trials": size, "reached": reached, **times, "cpu": statistics.median(cpu[1:])}


def _space(others: int) -> dict[str, BaseDistribution]:
    space: dict[str, BaseDistribution] = {
        "batch_size": IntDistribution(8, 4096, log=True),
        "lr": FloatDistribution(2.0**-11, 2.0, log=True),
    }
    return space | {f"other{i}": FloatDistribution(0.0, 1.0) for i in range(others)}


def _sampler(objective: str, space: dict[str, BaseDistribution], seed: int) -> FrontierSampler:
    return FrontierSampler(
        objective=objective,
        budget=lambda batch_size: BUDGET,
        target=TARGET,
        ideal=0.0,
        resumable=lambda number: True,
        search_space=space,
        seed=seed,
    )


def _run(study: optuna.Study, table: Table, objective: str, space: dict[str, BaseDistribution]) -> None:
    """Run one trial of the study, answered from the table."""
    number = len(study.get_trials(deepcopy=False))
    sampler = _sampler(objective, space, number)
    study.sampler = sampler
    trial = study.ask(space)
    max_steps, resumed_from = sampler.max_steps(trial.number), sampler.resumed_from(trial.number)
    before = None if resumed_from is None else study.get_trials(deepcopy=False)[resumed_from].user_attrs[RECORD]
    continued = None if before is None else TrialResult.from_json(before)
    seed = number if continued is None else continued.seed
    batch_size, lr = trial.params["batch_size"], trial.params["lr"]
    spec = TrialSpec(number, number, batch_size, lr, None, seed, max_steps, resumed_from)
    result = replay(table, spec, TARGET, math.ceil(BUDGET) if max_steps is None else max_steps, continued)
    trial.set_user_attr(RECORD, result.to_json())
    trial.set_user_attr(RESUMED_FROM, resumed_from)
    if result.time_to_target is None:
        study.tell(trial, state=TrialState.PRUNED)
    else:
        study.tell(trial, result.time_to_target)


if __name__ == "__main__":
    options = options_of(
        __doc__,
        ("--trials", {"type": int, "nargs": "+", "default": [10, 50, 100, 200]}),
        ("--repeats", {"type": int, "default": 20, "help": "decisions timed at each size"}),
        ("--others", {"type": int, "default": 0, "help": "other hyper-parameters beside batch size and lr"}),
    )
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    about = machine(options.device, options.repeats) | {"others": options.others}
    print(f"{'objective':10}{'trials':>8}{'reached':>9}{'median s':>10}{'max s':>8}{'cpu s':>8}")
    rows = []
    for objective in ("time", "curve"):
        for row in measure(objective, sorted(options.trials), options.repeats, options.others):
            numbers = f"{row['trials']:8}{row['reached']:9}{row['median']:10.3f}{row['longest']:8.3f}{row['cpu']:8.3f}"
            print(f"{objective:10}{numbers}", flush=True)
            rows.append(row)
    write(options.json, about, rows)
