"""A study whose trials a loop of the user's trains: ``for trial in bstune.Study(...):``.

It is the study that the command runs (:func:`bstune.study.run.paused_study`), which pauses where it
waits for a trial. The loop's body runs there, so that nothing of it happens in another thread or
process: an error or Ctrl-C in the body ends the study as in any of its own parts.

* **Evaluations** are the loop's: the target is met in (last report that missed it, first one that
  met it]. A report at ``trial.max_steps`` lets a stopped trial go on; one that ends before it
  stands at its last report. ``report(0, value)``, before the first step, lets a trial far past its
  start count as diverged.
* **A schedule that ends with the trial**, as linear and cosine ones, is set up for
  ``trial.max_steps`` steps, with ``schedule_ends=True`` in the call. The search then chooses each
  trial's length, to whose end the loop trains unless it meets the target. No trial goes on.
* **Seconds** are those of training alone, which ``finish(seconds=...)`` tells. Of these one law of
  tau(B) is made, as there is no survey. ``objective="steps"`` needs none.
* **What the loop saves** at ``trial.save_to`` is its ``resume_from`` when it goes on, and
  ``first_step`` its steps so far. Where nothing is saved trials start afresh, which a line says
  once; one that its loop ends no later than before is not asked again. bstune removes what nothing
  needs.
* **A loop that is left**, by ``break``, an error, Ctrl-C or a kill, goes on by the same call. A
  body that ends without ``finish`` has failed; three failures in a row end the study.
* **Refused** are what only a trial of bstune's can take: ``workers``, ``devices``, ``compile``,
  ``precision``, ``threads``, ``trainer``, the survey, ``protocol`` but ``divergence``,
  ``override_lr``, half-lives, ``budget.seconds``, and something ``tunable`` by the name of what a
  trial has. Several processes cannot be searched so.
"""

import os
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import replace

from pydantic import BaseModel

from bstune.config import compose_given
from bstune.core.errors import ConfigError
from bstune.core.option_names import in_hydra, in_python
from bstune.options import StudyOptions, flatten, option_at
from bstune.study.prepare import prepare
from bstune.study.run import paused_study
from bstune.study.search import Paused
from bstune.system.console import print_line, quieten
from bstune.system.terminal import filtered, safe_console
from bstune.system.user import name_user
from bstune.trial.backend import make_protocol
from bstune.trial.own_loop.loop_backend import ANY_LOOP, LoopBackend, LoopLimits
from bstune.trial.own_loop.loop_runner import LoopRunner
from bstune.trial.own_loop.loop_trial import LoopTrial, is_name_of_a_trial

# What a loop does by itself in place of an option, by the option or its section.
OWN_WORK = {
    "compile": "compiles by itself",
    "data": "reads its data by itself",
    "hardware": "is not surveyed",
    "precision": "sets its precision by itself",
    "protocol.evaluation_cost": "evaluates when it likes",
    "protocol.evaluation_ratio": "evaluates when it likes",
    "protocol.evaluation_share": "evaluates when it likes",
    "protocol.close_to_target": "evaluates when it likes",
    "protocol.fast": "takes its steps by itself",
    "protocol.micro_batch_size": "accumulates gradients by itself",
    "protocol.noise_scale_every": "measures its noise scale by bstune.LoopNoiseScale",
    "protocol.trial_seconds": "is ended by nobody else",
    "protocol.warmup_steps": "tells its seconds by itself",
    "scaling.beta2_half_life": "sets its optimizer's numbers by itself",
    "scaling.override_lr": "sets its optimizer's numbers by itself",
    "scaling.weight_decay_half_life": "sets its optimizer's numbers by itself",
    "seconds_of": "tells its seconds by itself",
    "threads": "sets torch's threads by itself",
    "trainer": "has no Trainer that bstune makes",
}
# Options of these sections that a study without a module uses all the same.
USED_WITHOUT_MODULE = ("hardware.enabled", "hardware.scale_out")
# No noise scale is measured anyway.
HARMLESS = {"protocol.noise_scale_every": None}


def trials_of(
    options: StudyOptions, assumptions: tuple[str, ...] = (), limits: LoopLimits = ANY_LOOP
) -> Iterator[LoopTrial]:
    """Search, or go on with it: yield each trial for the loop to train.

    Write the report at the end.

    While the loop's body runs, generators, flags, loggers and the working directory are the loop's.

    Args:
        options: of a study that has no module.
        assumptions: lines to print first.
        limits: of what the loop can do.

    Raises:
        BstuneError: one of its subclasses, for what a user can mend.
    """
    with closing(batches_of(options, assumptions, limits)) as batches:
        # One job is the default of the limits, so that each list has one trial.
        for (trial,) in batches:
            yield trial


def batches_of(
    options: StudyOptions, assumptions: tuple[str, ...] = (), limits: LoopLimits = ANY_LOOP
) -> Generator[list[LoopTrial], None, None]:
    """Search, or go on with it, for a loop that trains several trials side by side.

    It yields lists of up to ``limits.jobs`` trials, and writes the report at the end. Each trial of
    a list was asked while those before it counted as running. The next list is asked once all
    trials of this one have ended. Runs on fresh seeds come alone, as their seconds are measured.
    """
    _check(options, limits)
    runners = list[LoopRunner]()
    study = _paused_study(options, assumptions, runners, limits)
    try:
        while True:
            try:
                with _keeping_the_loops_state():
                    next(study)
            except StopIteration:
                return
            batch = runners[-1].to_train
            # The study pauses once for each trial of a batch. From the second pause on none is
            # left to train, as the loop has trained all of them in the first.
            if batch:
                yield batch
    finally:
        with _keeping_the_loops_state():
            study.close()


def _check(options: StudyOptions, limits: LoopLimits) -> None:
    """Refuse options that a loop of the user's has no place for."""
    # A loop trains one trial at a time unless its limits say that it trains several side by side.
    if options.search.workers > limits.jobs:
        raise ConfigError(
            f"search.workers={options.search.workers}: a loop of yours trains one trial at a time: "
            "leave workers out"
        )
    if options.devices > 1:
        raise ConfigError(
            f"devices={options.devices}: a loop of yours shares its batches by itself: leave it out"
        )
    if options.budget.seconds is not None:
        raise ConfigError(
            f"budget.seconds={options.budget.seconds:g} needs steps that are timed over all batch "
            "sizes, and bstune does not run a loop of yours: give budget.examples or budget.steps"
        )
    _check_training(options)
    taken = [name for name in options.search.tune if is_name_of_a_trial(name)]
    if taken:
        raise ConfigError(f"a trial has {', '.join(taken)} already: choose another name in tunable")
    if options.trial.batch_size is not None:
        raise ConfigError(
            "trial.batch_size asks for one trial, which a loop of yours trains without a study: "
            "leave it out"
        )


def _check_training(options: StudyOptions) -> None:
    """Refuse options of how a module is trained, which a loop of the user's would never see."""
    if options.workload.trainer:
        raise ConfigError(f"workload.trainer: a loop of yours {OWN_WORK['trainer']}: leave it out")
    usual = compose_given(options.workload.model_dump(), (), {})
    for name, work in OWN_WORK.items():
        defaults = _flat(name, option_at(usual, name))
        for key, value in _flat(name, option_at(options, name)).items():
            # Defaults ask the loop for nothing, and a few other options do not concern it.
            is_usual = key in defaults and defaults[key] == value
            is_harmless = key in HARMLESS and HARMLESS[key] == value
            if is_usual or is_harmless or key.startswith(USED_WITHOUT_MODULE):
                continue
            text = "null" if value is None else value
            raise ConfigError(f"{key}={text}: a loop of yours {work}: leave it out")


def _flat(name: str, value: object) -> dict[str, object]:
    """Give the options of a section by their dotted names, or the one option ``name``."""
    if isinstance(value, BaseModel):
        value = value.model_dump()
    return flatten(value, f"{name}.") if isinstance(value, Mapping) else {name: value}


def _paused_study(
    options: StudyOptions,
    assumptions: tuple[str, ...],
    runners: list[LoopRunner],
    limits: LoopLimits,
) -> Paused[None]:
    """Run the study as a generator that pauses while the loop trains trials.

    ``runners``: each runner of trials is added to this list as it is opened. The loop takes its
    trials from the last one.
    """
    # A live line would be mixed with what the loop prints.
    console = safe_console(markup=False, emoji=False, highlight=False, force_interactive=False)

    # Lines name options as the user states them: as arguments of the call, or, in a Hydra sweep,
    # whose jobs have a command, as keys of the sweeper.
    spelled = in_python if limits.job_command is None else in_hydra

    def say(line: str) -> None:
        print_line(console, spelled(line))

    for line in assumptions:
        say(f"assumed: {line}")
    backend = LoopBackend(options, make_protocol(options, recipe=None), say, limits=limits)

    def open_runner(count: int) -> LoopRunner:
        runners.append(LoopRunner(backend, count))
        return runners[-1]

    prepared = prepare(options, recipe=None, log=say, backend=backend)
    prepared = replace(prepared, open_processes=open_runner)
    yield from paused_study(prepared, arguments=None, console=console)


@contextmanager
def _keeping_the_loops_state() -> Iterator[None]:
    """Run bstune's own code between two passes of the user's loop.

    Random generators, torch's settings, loggers and warnings are afterwards as the loop had them.
    """
    # It is imported here, as it imports torch.
    from bstune.trial.processes.restored import restored

    with restored(), filtered():
        name_user(os.environ)
        quieten(training=False)
        yield
