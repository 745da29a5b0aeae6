"""A study of any training: ``for trial in bstune.Study(...)``."""

import sys
import time
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from bstune.config import options_from_python
from bstune.core.errors import InputError
from bstune.core.records import Budget, Target
from bstune.options import Options, differing, options_from
from bstune.recipe.found import check_whole_ranges, fill_sizes
from bstune.result import Result, ask_again
from bstune.run_study import study_trials
from bstune.study.begin import Begun
from bstune.study.commands import Commands, call_commands, for_any_best
from bstune.study.loop import AskedTrial
from bstune.study.machine import RECORDED, Machine
from bstune.study.workload import Workload, config_of
from bstune.system.files import StudyFolder, claim_folder, discard, ensure_home
from bstune.system.ticker import Ticker, say
from bstune.trial.trial import Trial

# Options of a training that bstune runs itself.
OF_TRAINING = (
    *("data", "module", "trainer", "precision", "compile", "micro_batch_size", "algorithm"),
    *("schedule", "override_lr", "validation_batch_size", "trial_seconds", "noise_scale"),
    *("devices", "threads", "survey", "survey_seconds", "memory_limit", "budget.seconds"),
    *("workload", "workers", "trial.batch_size", "trial.lr", "trial.steps"),
)

# What a loop is told once.
NO_SECONDS = (
    "step times include evaluations: trial.report(step, value, seconds=SECONDS) takes the training "
    "seconds of the run so far"
)
WENT_ON = (
    "the loop trains on after trial.report gave False, which is lost: write `if not "
    "trial.report(step, value): break`"
)


class Study:
    """Trials of a loop of one's own, which is its body; bstune chooses them and gives the answer.

    ::

        study = bstune.Study("mine", target="val/loss <= 0.1", baseline=(64, 0.1), budget=2000)
        for trial in study:
            model = make_model(trial.lr, trial.seed, trial.resume_from)
            step = trial.first_step
            every = max(1, 1280 // trial.batch_size)
            for batch in trial.batches(len(data)):
                model.train_on(data[batch])
                step += 1
                if step % every == 0 and not trial.report(step, model.validation_loss()):
                    break
            if trial.worth_saving:
                model.save(trial.save_to)
        print(study.result)

    ``trial`` is a :class:`bstune.trial.trial.Trial`. ``trial.save_to`` may become a file or a
    folder; a trial whose body saves nothing is not resumed. Where the body raises, the trial is
    asked again by the next run of the script; ``trial.fail(error)`` makes it a failed one, or one
    that was short of memory, and the study goes on. The same script in several processes shares
    the work.

    Args:
        name: of the study; the same name continues it.
        target: such as ``"val/loss <= 0.1"``; with ``objective="metric"`` ``"min val/loss"``.
        baseline: batch size and rate that are used today. Without it give ``batch_size`` and
            ``lr``.
        batch_size: the smallest and the largest to try; from a sixteenth of the baseline's to 32
            times as many.
        budget: of a trial that does not reach the target: steps, or steps and examples.
        options: any other option of ``conf/config.yaml`` that is no training's, such as
            ``scaling="linear"`` for SGD.

    Raises:
        InputError: with all that is missing, or for an option of a training.
    """

    def __init__(
        self,
        name: str,
        *,
        target: str | Target | None = None,
        baseline: tuple[int, float] | Mapping[str, Any] | None = None,
        batch_size: tuple[int, int] | None = None,
        budget: Budget | Mapping[str, int] | int | None = None,
        **options: Any,
    ) -> None:
        given = dict(options, target=target, baseline=baseline, batch_size=batch_size)
        checked = options_from_python(**{"study": name} | given, budget=budget)
        self._name = checked.study_name
        self._options = _with_range(checked)
        self._folder = Path(checked.output)

    @property
    def result(self) -> Result:
        """The answer for the target given here; while the study runs, what its trials say so far.

        Raises:
            InputError: it has no trial yet, or its trials do not tell of that target.
        """
        if not StudyFolder(self._folder).trials.exists():
            raise InputError(
                f"{self._name} has no finished trial yet: `for trial in study` trains them"
            )
        return ask_again(self._folder, {"target": str(self._options.target)})

    def __iter__(self) -> Iterator[Trial]:
        """Yield trials until the answer is settled; asking for the next keeps the last's record."""
        settings = {"training": "a loop of one's own"}
        commands = call_commands("loop", self._name)
        told = set[str]()
        with closing(begin_driven_study(self._options, settings, commands)) as batches:
            for (asked,) in batches:
                trial = asked.trial()
                yield trial
                if trial.save_to is not None and (trial.went_on or trial.status is None):
                    # What it saved may be of a later step than its last evaluation.
                    discard(trial.save_to)
                asked.record = trial.record()
                hints = {
                    NO_SECONDS: trial.history and not trial.has_seconds,
                    WENT_ON: trial.went_on,
                }
                new = {hint for hint, holds in hints.items() if holds} - told
                told |= new
                for hint in new:
                    say(hint)


def begin_driven_study(
    options: Options,
    settings: Mapping[str, object],
    commands: Commands,
    jobs: int = 1,
) -> Generator[list[AskedTrial], None, Result | None]:
    """Claim the folder of a study whose trials its caller trains, a loop or a Hydra sweep.

    Args:
        options: of the study, complete.
        settings, commands: as in :class:`bstune.study.workload.Workload`.
        jobs: the most trials at once.

    Returns:
        The trials, as of :func:`bstune.run_study.study_trials`.
    """
    ensure_home()
    name = options.study_name
    if options.tunables:
        train = for_any_best(f"the configuration in {options.output}/best.yaml")
        commands = replace(commands, train=train)
    workload = Workload(
        name=name,
        settings=settings,
        config=config_of(options),
        commands=commands,
        machine=_machine_of_loop(options.device),
    )
    claim_folder(StudyFolder(Path(options.output)), name, options.storage)
    # The loop prints what it likes while it trains.
    begun = Begun(time.monotonic(), Ticker(), worker=None)
    return study_trials(options, workload, begun, jobs)


def _with_range(options: Options) -> Options:
    """The options with the range of batch sizes; InputError for what is missing or has no use."""
    refuse_training(options, "your own loop")
    values = options.model_dump()
    sizes, rates = values["batch_size"], values["lr"]
    fill_sizes(sizes, options.baseline.batch_size)
    ends = sizes["low"], sizes["high"], rates["low"], rates["high"]
    baseline, example = options.baseline, "(64, 0.1)"
    of_today = {one.name: one.value(0.5) for one in options.tunables}
    if of_today:
        example = str({"batch_size": 64, "lr": 0.1, "values": of_today})
    has_values = (baseline.values or {}).keys() == of_today.keys()
    needed = {
        "target='val/loss <= 0.1'": options.is_open("target"),
        "budget=2000": options.is_open("budget.steps"),
        f"baseline={example}": None in ends if baseline.pair is None else not has_values,
    }
    absent = [example for example, is_absent in needed.items() if is_absent]
    if absent:
        names = ", ".join(example.partition("=")[0] for example in absent)
        raise InputError(f"{names} is missing: give it, as bstune.Study(..., {', '.join(absent)})")
    check_whole_ranges(options.tunables, baseline.values or {})
    return options_from(values)


def refuse_training(options: Options, who: str) -> None:
    """InputError for options of a training that bstune runs, where somebody else trains."""
    defaults = options_from_python(study=options.study)
    useless = [name for name in OF_TRAINING if name in differing(defaults, options)]
    if useless:
        raise InputError(
            f"{', '.join(useless)}: {who} decides that, where bstune.tune would train; leave it out"
        )


def _machine_of_loop(device: str) -> Machine:
    """The machine that a loop's trials are of, by what of torch and JAX the loop has imported.

    Args:
        device: as the option says.
    """
    torch, jax = sys.modules.get("torch"), sys.modules.get("jax")
    name = device
    if device == "auto":
        name = "cpu"
        if torch is not None and torch.cuda.is_available():
            name = torch.cuda.get_device_name()
        elif jax is not None:
            name = jax.devices()[0].device_kind
    threads = 0 if torch is None else torch.get_num_threads()
    return RECORDED.model_copy(update={"device": name, "threads": threads})
