"""How long a decision takes, from ``study.ask`` to the parameters of the next trial, and the posterior of a report.

The study is in memory, with trials of a synthetic table (:mod:`synthetic`, run to run noise 0.1) that the sampler
itself asked for, stopped where it said. At each size the same study is asked again with other seeds; the trial that was
asked for is recorded as failed, so that nothing is learned from it. The first decision is thrown away. Seconds are the
wall's, then the processor's, which are the ones to read on a busy machine. The aim at 200 trials is 0.1 s for a
decision and 0.5 s for a report's posterior.

    python tests/benchmarks/bench_decision.py [--trials 10 50 100 200] [--repeats 20] [--json FILE]
"""

import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

import optuna
from common import machine, options_of, write
from optuna.distributions import FloatDistribution, IntDistribution
from optuna.trial import TrialState
from synthetic import Law, synthetic_table

from bstune.core.records import Target, TrialResult, TrialSpec
from bstune.search.sampler import RECORD, RESUMED_FROM, FrontierSampler
from bstune.study.analysis.model import MOVES, REPORT_PARTICLES
from bstune.trial.replay import replay

TARGET = Target("error", 0.1, "min")
TABLE = synthetic_table(Law(noise=0.1))
# The budget of a trial, in steps.
BUDGET = 40_000
SPACE = {
    "batch_size": IntDistribution(8, 4096, log=True),
    "lr": FloatDistribution(2.0**-11, 2.0, log=True),
}
SETTINGS = {
    "budget": lambda batch_size: BUDGET,
    "resumable": lambda number: True,
    "target": TARGET,
    "ideal": 0.0,
}


def measure(objective: str, sizes: Sequence[int], repeats: int) -> Iterator[dict[str, Any]]:
    """Yield the timings of one study as it grows to each of ``sizes``."""
    study = optuna.create_study()
    for size in sizes:
        while (
            len(study.get_trials(deepcopy=False, states=(TrialState.COMPLETE, TrialState.PRUNED)))
            < size
        ):
            _run(study, objective)
        # A trial that reached the target is complete; the others were stopped.
        reached = sum(
            trial.state == TrialState.COMPLETE for trial in study.get_trials(deepcopy=False)
        )
        seconds = []
        cpu = []
        # One more, for the first one is thrown away.
        for repeat in range(repeats + 1):
            study.sampler = FrontierSampler(
                objective=objective, seed=repeat, search_space=SPACE, **SETTINGS
            )
            start = time.perf_counter()
            busy = time.process_time()
            trial = study.ask(SPACE)
            seconds.append(time.perf_counter() - start)
            cpu.append(time.process_time() - busy)
            # So the study has as many trials for the next repeat.
            study.tell(trial, state=TrialState.FAIL)
        busy = time.process_time()
        study.sampler.posterior(study, particles=REPORT_PARTICLES, moves=MOVES)
        times = {"median": statistics.median(seconds[1:]), "longest": max(seconds[1:])}
        times |= {"cpu": statistics.median(cpu[1:]), "report_cpu": time.process_time() - busy}
        yield {"objective": objective, "trials": size, "reached": reached, **times}


def _run(study: optuna.Study, objective: str) -> None:
    """Run one trial of the study, answered from the table."""
    trials = study.get_trials(deepcopy=False)
    number = len(trials)
    # A sampler a trial, as a study makes one.
    study.sampler = sampler = FrontierSampler(
        objective=objective, seed=number, search_space=SPACE, **SETTINGS
    )
    trial = study.ask(SPACE)
    max_steps = sampler.max_steps(number)
    resumed_from = sampler.resumed_from(number)
    continued = (
        None
        if resumed_from is None
        else TrialResult.from_json(trials[resumed_from].user_attrs[RECORD])
    )
    # A trial that goes on keeps the noise that it has.
    seed = number if continued is None else continued.seed
    spec = TrialSpec(
        number,
        number,
        **trial.params,
        delta=None,
        seed=seed,
        max_steps=max_steps,
        resumed_from=resumed_from,
    )
    result = replay(TABLE, spec, TARGET, BUDGET if max_steps is None else max_steps, continued)
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
    )
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    about = machine(options.device, options.repeats)
    print(
        f"{'objective':10}{'trials':>8}{'reached':>9}{'median s':>10}{'max s':>8}{'cpu s':>8}{'report cpu s':>14}"
    )
    rows = []
    for objective in ("time", "curve"):
        for row in measure(objective, sorted(options.trials), options.repeats):
            numbers = f"{row['trials']:8}{row['reached']:9}{row['median']:10.3f}{row['longest']:8.3f}{row['cpu']:8.3f}"
            print(f"{objective:10}{numbers}{row['report_cpu']:14.2f}", flush=True)
            rows.append(row)
    write(options.json, about, rows)
