"""A study whose trials are jobs of a Hydra application: ``hydra/sweeper=bstune``."""

import math
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from omegaconf import OmegaConf

from bstune.core.errors import BstuneError, InputError, Interrupted, print_error
from bstune.core.question import Question
from bstune.integrations.hydra_params import Application, options_by_our_names, read_sweep
from bstune.options import Options
from bstune.own_loop import begin_driven_study
from bstune.report.answer import files_row
from bstune.result import Result, load
from bstune.study.commands import Commands, application_command
from bstune.study.loop import AskedTrial
from bstune.system.files import write_text
from bstune.system.interruption import interruptible
from bstune.system.secrets import hide
from bstune.system.ticker import say
from bstune.trial.trial import Trial

if TYPE_CHECKING:
    from bstune.integrations.hydra_plugins.bstune_sweeper import BstuneSweeper

MULTIRUN = ("-m", "--multirun")
# Overrides of Hydra's own that a job is composed and run with.
OF_A_JOB = ("hydra.searchpath", "hydra.job", "hydra.run")


def sweep(sweeper: "BstuneSweeper", arguments: Sequence[str]) -> None:
    """Run or continue a study, and print its answer; a mistake ends the process with a line.

    Args:
        sweeper: as Hydra has set it up.
        arguments: overrides of the command line.
    """
    try:
        with interruptible():
            _run_sweep(sweeper, arguments)
    except (BstuneError, Interrupted) as error:
        sys.exit(print_error(error, with_traceback=bool(sweeper.given.get("debug"))))


def _run_sweep(sweeper: "BstuneSweeper", arguments: Sequence[str]) -> None:
    """As :func:`sweep`, but mistakes are raised."""
    config = sweeper.config
    known = {"study": str(config.hydra.job.name)} | options_by_our_names(sweeper.given)
    jobs = known.pop("workers", 1)
    if not isinstance(jobs, int) or jobs < 1:
        raise InputError(f"workers must be at least 1, but got {jobs}")
    loader = sweeper.hydra_context.config_loader
    application, options = read_sweep(known, arguments, config, loader)
    if "seed" not in application.keys:
        say("jobs take no seed, so that new seeds only run them again; hydra.sweeper.seed=KEY")
    settings = {"training": "a Hydra application", "overrides": list(application.fixed)}
    commands = Commands(
        "application",
        study=partial(_study_command, application, options),
        train=partial(_training_command, application),
    )
    with closing(begin_driven_study(options, settings, commands, jobs)) as batches:
        folder = Path(config.hydra.sweep.dir)
        folder.mkdir(parents=True, exist_ok=True)
        # As Hydra's own sweeper does, but for secrets.
        written = hide(OmegaConf.to_container(config, enum_to_str=True))
        write_text(folder / "multirun.yaml", yaml.safe_dump(written, sort_keys=False))
        for batch in batches:
            _run_jobs(batch, application, sweeper.launcher, options.budget.is_whole_run)
    result = load(options.output)
    print(result)
    print(f"\n{files_row(result.folder)}")
    _write_best(result, application, folder / "optimization_results.yaml")


def _run_jobs(
    batch: Sequence[AskedTrial], application: Application, launcher: Launcher, is_whole_run: bool
) -> None:
    """Run the jobs of trials, all at once, and set their records."""
    trials = []
    for asked in batch:
        # A job ends where its max_steps says, or by itself.
        asked.until = None
        if "max_steps" not in application.keys:
            asked.spec = asked.spec.model_copy(update={"max_steps": asked.total_steps})
        if "save_to" not in application.keys:
            asked.save_to = None
        trials.append(asked.trial())
    overrides = [application.overrides(trial) for trial in trials]
    try:
        jobs = launcher.launch(overrides, initial_job_idx=trials[0].number)
    except BstuneError:
        raise
    except Exception as error:  # noqa: BLE001 (a job may end its process, and all with it)
        jobs = [JobReturn(status=JobStatus.FAILED, _return_value=error)] * len(batch)
    for asked, trial, job in zip(batch, trials, jobs, strict=True):
        try:
            returned, seconds = job.return_value
        except BstuneError:
            raise
        except Exception as error:  # noqa: BLE001 (the application may raise anything)
            # Nothing tells whether it had begun: what it raises is no matter of its batch size.
            trial.has_stepped = True
            trial.fail(error)
        else:
            report(trial, returned, seconds, is_whole_run)
        asked.record = trial.record()


def report(trial: Trial, returned: Any, seconds: float, is_whole_run: bool) -> None:
    """Report to a trial what its job returned.

    Args:
        trial: of the job.
        returned: the metric's number at the job's end, its history as pairs of step and value, or
            either under the metric's name, beside ``seconds`` of training. A value that is None or
            NaN has diverged.
        seconds: of the job, which count where it returns none.
        is_whole_run: whether the budget is a job's own length: of a history the best value counts.

    Raises:
        InputError: for anything else.
    """
    metric, has_goal = trial.target.metric, trial.target.goal is not None
    wanted = f"[(step, value), ...], or {{'{metric}': [(step, value), ...], 'seconds': SECONDS}}"
    if has_goal:
        wanted += f"; one number is its best value, as target='{trial.target.mode} {metric}' seeks"
    else:
        wanted = f"{metric} as a number, or {wanted}"
    history = returned
    try:
        if isinstance(returned, Mapping):
            history, seconds = returned[metric], float(returned.get("seconds", seconds))
        elif returned is None:
            raise TypeError
        if not isinstance(history, list | tuple) and not has_goal:
            history = [(trial.max_steps, history)]
        points = [(int(step), math.nan if it is None else float(it)) for step, it in history]
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"the job returned {returned!r:.200}: return {wanted}") from error
    if is_whole_run and points:
        last = points[-1][1]
        finite = [value for _, value in points if math.isfinite(value)]
        points = [(trial.max_steps, trial.target.best(finite) if math.isfinite(last) else last)]
    first = trial.first_step
    points = [(step, value) for step, value in points if step > first]
    if not points:
        trial.fail(
            f"the job returned no value after step {first}: count its first steps, too, and "
            f"evaluate at its last one, {trial.max_steps}"
        )
    for step, value in points:
        share = (step - first) / (points[-1][0] - first)
        if not trial.report(step, value, seconds * share):
            break


def _start_words() -> list[str]:
    """The words that start the application."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return ["python", sys.argv[0]] if spec is None else ["python", "-m", spec.name]


def _study_command(
    application: Application, options: Options, further: Mapping[str, object]
) -> str:
    """The command of the sweep with further options."""
    words = [*_start_words(), *sys.argv[1:]]
    others = dict(further)
    for name in ("batch_size", "lr"):
        ends = getattr(options, name)
        low, high = (others.pop(f"{name}.{end}", getattr(ends, end)) for end in ("low", "high"))
        if (low, high) != (ends.low, ends.high):
            words.append(f"{application.keys[name]}=interval({low},{high})")
    return application_command(words, others)


def _training_command(
    application: Application, batch_size: int, lr: float, steps: int | None
) -> str:
    """The application's command that trains a batch size and a rate."""
    # Flags and their values, and what of Hydra's a job has, too. Of the other overrides the fixed
    # ones stand in application.fixed, also ~key, which has no "=".
    kept = []
    for word in sys.argv[1:]:
        is_flag = word.startswith("-") or not ("=" in word or word.startswith("~"))
        if word not in MULTIRUN and (is_flag or word.lstrip("+").startswith(OF_A_JOB)):
            kept.append(word)
    words = [*_start_words(), *kept, *application.fixed]
    if not set(MULTIRUN) & set(sys.argv):
        words.append("hydra.mode=RUN")
    values = {"batch_size": batch_size, "lr": f"{lr:g}", "max_steps": steps}
    for name, value in values.items():
        if value is not None and name in application.keys:
            words.append(f"{application.keys[name]}={value}")
    return application_command(words, {})


def _write_best(result: Result, application: Application, file: Path) -> None:
    """Write the best as Hydra's Optuna sweeper does; there is none under ``objective=curve``."""
    best = result.best
    if best is None:
        return
    found = {"batch_size": best.batch_size, "lr": best.lr, **best.values}
    question = Question(result.target, result.budget, result.objective)
    value: float | None = best.steps if question.counts_steps else best.seconds
    if question.seeks_metric:
        value = best.metric
    content = {
        "name": "bstune",
        "best_params": {application.keys[name].lstrip("+"): it for name, it in found.items()},
        "best_value": value,
    }
    write_text(file, yaml.safe_dump(content, sort_keys=False))
