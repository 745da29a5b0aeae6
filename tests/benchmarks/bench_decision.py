"""How long bstune's sampler takes for a decision: from ``study.ask`` to the parameters of the next trial.

The study is in memory and holds trials of a synthetic table (:mod:`synthetic`, run to run noise 0.1), each with
its record and its history, as bstune's own studies do: those that the sampler itself asked for, stopped where it said.
At each size the same study is asked again and again with other seeds; the trial that was asked for is told to have
failed, so that nothing is learned from it. The first decision is thrown away. Seconds are the wall's; the processor's
own are beside them, and are the ones to read on a busy machine. The aim is 0.2 s at 200 trials.

    python tests/benchmarks/bench_decision.py [--trials 10 50 100 200] [--repeats 20] [--others 0] [--json FILE]
"""

import argparse
import json
import math
import os
import platform
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy
import optuna
import scipy
from optuna.distributions import BaseDistribution, FloatDistribution, IntDistribution
from optuna.trial import TrialState
from synthetic import Law, synthetic_table

import bstune
from bstune.core.records import Target, TrialResult, TrialSpec
from bstune.search.sampler import RECORD, RESUMED_FROM, FrontierSampler
from bstune.trial.replay import Table, replay

TARGET = Target("error", 0.1, "min")
LAW = Law(noise=0.1)
BUDGET = 40_000.0  # steps


@dataclass(frozen=True)
class Timing:
    """Seconds a decision with ``trials`` in the study, ``reached`` of which reached the target; ``cpu``: the median."""

    objective: str
    trials: int
    reached: int
    median: float
    longest: float
    cpu: float
    repeats: int


def main(arguments: Sequence[str]) -> None:
    """Print a table of timings, and write them as JSON."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--trials", type=int, nargs="+", default=[10, 50, 100, 200])
    parser.add_argument("--repeats", type=int, default=20, help="decisions timed at each size")
    parser.add_argument("--others", type=int, default=0, help="other hyper-parameters beside batch size and lr")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    print(
        f"{_processor()}, {os.environ.get('OMP_NUM_THREADS', 'all')} threads, {platform.system()}; "
        f"Python {platform.python_version()}, numpy {numpy.__version__}, scipy {scipy.__version__}, "
        f"optuna {optuna.__version__}, bstune {bstune.__version__}; {options.others} other hyper-parameters"
    )
    print(f"{'objective':10}{'trials':>8}{'reached':>9}{'median s':>10}{'max s':>8}{'cpu s':>8}{'n':>5}")
    timings = []
    for objective in ("time", "curve"):
        for timing in measure(objective, sorted(options.trials), options.repeats, options.others):
            timings.append(timing)
            print(
                f"{timing.objective:10}{timing.trials:8}{timing.reached:9}{timing.median:10.3f}{timing.longest:8.3f}"
                f"{timing.cpu:8.3f}{timing.repeats:5}",
                flush=True,
            )
    if options.json:
        options.json.write_text(json.dumps([asdict(timing) for timing in timings], indent=1), encoding="utf-8")


def measure(objective: str, sizes: Sequence[int], repeats: int, others: int) -> list[Timing]:
    """Return the timings of one study as it grows to each of ``sizes``."""
    table = synthetic_table(LAW)
    space = _space(others)
    study = optuna.create_study()
    timings = []
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
        middle, longest = statistics.median(seconds[1:]), max(seconds[1:])
        timings.append(Timing(objective, size, reached, middle, longest, statistics.median(cpu[1:]), repeats))
    return timings


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


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


if __name__ == "__main__":
    main(sys.argv[1:])
