"""``bstune.Study``: typed options and a recipe, which the command line and Python build alike.

>>> study = bstune.Study(module=LitModel, data=MyDataModule(), target=..., ...)  # doctest: +SKIP
>>> study.run().best.batch_size  # doctest: +SKIP
64
"""

import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from bstune.config import Composed, compose_given
from bstune.core.clock import stopwatch
from bstune.core.errors import BstuneError, ConfigError, UserCodeError
from bstune.core.option_names import ARGUMENT_OPTIONS, are_timed, in_python
from bstune.core.records import Budget, Target, TrialResult
from bstune.core.search_space import OVERRIDE_LR
from bstune.hydra_recipe import instantiate
from bstune.options import GivenOptions, StudyOptions, with_option
from bstune.recipe import Recipe
from bstune.study.prepare import compose_joined, prepare
from bstune.study.report import Findings
from bstune.study.run import run as run_options
from bstune.study.run import run_worker
from bstune.study.storage.opening import find_study
from bstune.system.arguments import without_unknown_arguments
from bstune.system.console import plain_console, print_line, quieten
from bstune.system.exits import os_exit_as_users_error
from bstune.system.failures import in_users_code, without_own_frames
from bstune.system.files import check_writable
from bstune.system.loading import loading
from bstune.system.terminal import filtered
from bstune.system.user import name_user
from bstune.system.watchdog import waiting_for
from bstune.trial.processes.messages import PICKLE_ERRORS

# torch and lightning take 4 s to import, and a study of recorded runs needs neither: what knows
# them is imported where it is used.
if TYPE_CHECKING:
    from bstune.study.given import Data, GivenObjects, Module
    from bstune.study.result import Result
    from bstune.trial.own_loop.loop_trial import LoopTrial
    from bstune.trial.own_project.python_recipe import PythonRecipe


class Study:
    """A search of batch size and learning rate; :meth:`run` or your own loop trains its trials.

    What an argument leaves at None is as ``conf/`` has it. The same arguments continue the study;
    other settings than those it began with are refused, and a change in the module's code is not
    noticed. Without ``module`` and ``data`` it hands its trials to a loop: ``for trial in
    bstune.Study(...):`` (:mod:`bstune.study.own_loop`).

    Args:
        module: a function of a trial (``trial.lr``, ``.batch_size``, ``.seed``, ``.total_steps``
            and what is ``tunable``) that returns a new LightningModule; or a class with an argument
            ``lr`` or ``learning_rate``, and, if it likes, others of these names.
        data: a LightningDataModule; DataLoaders ``(train, val)`` or ``(train, val, test)``, or a
            dict of these names; or a function of a batch size that returns one of them. Trials
            train on batches of exactly B examples; iterable data sets and several training loaders
            need such a function, whose batches are taken as they come.
        target: the validation metric to reach, such as ``Target("val_loss", 0.1, mode="min")`` or
            ``"val_loss<=0.1"``; a metric alone, such as ``"val_loss"``, or None, is to become what
            the reference comes to.
        batch_sizes: the smallest and the largest one to search; None: from 1/16 of the reference's
            on.
        reference: a batch size and a learning rate that go together: where the search begins; None:
            the batch size of the data and the rate that the module's class has as a default.
        budget: after which a trial gives up; None: the Trainer's own length, or two minutes of the
            whole study, of which a schedule that ends with its trial gets a quarter. What is taken
            for granted is printed, a line each.
        trainer: further arguments of the Lightning Trainer; ``max_epochs`` and ``max_steps`` in
            place of ``budget``.
        tunable: further hyper-parameters to search, by name: ``(low, high)``, or a dict of ``low``,
            ``high``, ``log``, ``integer``, ``complement`` (1 - value is searched) and ``own``, the
            value that you train with today; left out, the default of the module's class.
        name: of the study: one of the same name is continued; None: the module's class.
        objective: ``time``, ``steps``, ``both`` or ``curve``; or ``loss``, the best metric within a
            budget, such as ``options=["budget.seconds=300"]``, without a target's value.
        trials: of the whole search; a stopped one that is continued counts once.
        seconds: of training, over the whole search.
        wall_seconds: of wall time, over all calls that began a trial, each from its start to its
            report.
        workers: trials side by side, each in a process of its own; 0: one by one in this process.
        precision: as the Trainer takes it, or ``auto``.
        device: ``cpu``, ``cuda`` or ``auto``.
        seed: of the study.
        output: folder of the study's files.
        storage: URL of Optuna's storage.
        survey: whether to measure first what the hardware allows.
        mlflow: whether to log to MLflow.
        override_lr: whether to set a trial's learning rate in the optimizers that the module has
            built, in place of the rates that stand in its ``configure_optimizers``, all groups and
            schedules in proportion.
        options: further ones, as on the command line: ``["search.replicates=1",
            "scaling=linear"]``.

    Raises:
        ConfigError: for an argument that cannot be used.
    """

    options: StudyOptions
    recipe: Recipe | None
    # The command line that composed it; None for a study of Python objects.
    arguments: tuple[str, ...] | None
    # Values that were taken from the project because no argument gave them, a line each.
    assumptions: tuple[str, ...] = ()
    # Seconds that it took to read module and data, which count as wall time of the first run.
    _seconds_before: float = 0.0

    @without_own_frames
    @without_unknown_arguments
    def __init__(
        self,
        module: "Module | None" = None,
        data: "Data | None" = None,
        *,
        target: Target | str | None = None,
        batch_sizes: tuple[int, int] | None = None,
        reference: tuple[int, float] | None = None,
        budget: Budget | None = None,
        trainer: Mapping[str, Any] | None = None,
        tunable: Mapping[str, Any] | None = None,
        name: str | None = None,
        objective: str | None = None,
        trials: int | None = None,
        seconds: float | None = None,
        wall_seconds: float | None = None,
        workers: int | None = None,
        precision: str | None = None,
        device: str | None = None,
        seed: int | None = None,
        output: str | PathLike[str] | None = None,
        storage: str | None = None,
        survey: bool | None = None,
        mlflow: bool | None = None,
        override_lr: bool | None = None,
        options: Sequence[str] = (),
    ) -> None:
        # All arguments by name.
        arguments = dict(locals())
        elapsed = stopwatch()
        chosen = {
            option: arguments[argument]
            for argument, option in ARGUMENT_OPTIONS.items()
            if arguments[argument] is not None
        }
        if output is not None:
            chosen["output"] = str(output)
            _check_writable(output)
        with loading(training=True):
            self._complete(arguments, chosen)
        self._seconds_before = elapsed()

    def _complete(self, arguments: Mapping[str, Any], chosen: dict[str, Any]) -> None:
        """Complete the arguments from the project, and make the options and the recipe of them.

        Args:
            arguments: of the call, by name.
            chosen: values of options that they set, by dotted name.
        """
        # torch and Lightning take seconds to import, and a study of recorded runs needs neither.
        from bstune.study.assumed import Stated, complete
        from bstune.trial.processes.restored import restored

        options = arguments["options"]
        is_timed = arguments["seconds"] is not None or arguments["wall_seconds"] is not None
        stated = Stated(
            module=arguments["module"],
            data=arguments["data"],
            target=arguments["target"],
            batch_sizes=arguments["batch_sizes"],
            reference=arguments["reference"],
            budget=arguments["budget"],
            trainer=arguments["trainer"],
            tunable=arguments["tunable"],
            seed=arguments["seed"],
            device=arguments["device"],
            objective=arguments["objective"] or _objective_among(options),
            has_budget=any(str(option).startswith("budget.") for option in options),
            is_timed=is_timed or are_timed(options),
            overrides_lr=arguments["override_lr"] or _overrides_lr(options),
        )
        # No command line composes a study of Python objects.
        self.arguments = None
        # Secrets and control characters stay out of all that is logged and raised.
        with restored(), filtered(), waiting_for("the module and the data"):
            quieten()
            completed = complete(stated)
            self.assumptions = completed.lines
            if completed.budget_seconds is not None:
                chosen["budget.seconds"] = completed.budget_seconds
            if completed.quick:
                chosen["quick"] = True
            # Without a module a loop of the user's trains, whose steps bstune cannot time.
            if arguments["module"] is None:
                _refuse_survey(arguments["survey"], options)
            self.options, recipe = compose_objects(completed.given, options, chosen)
            self.recipe = recipe
            if recipe is not None:
                self.options = _fitted_to_pickling(self.options, recipe, chosen)

    @classmethod
    def from_composed(cls, composed: Composed, arguments: Sequence[str] | None) -> "Study":
        """Make the study of options and a recipe that a command line has composed.

        ``arguments``: of that command line; None where it cannot compose them again.
        """
        # __init__ would make options and recipe of module and data, which are not at hand.
        study = cls.__new__(cls)
        study.options = composed.options
        study.recipe = composed.recipe
        study.arguments = None if arguments is None else tuple(arguments)
        return study

    @classmethod
    def join(cls, name: str, storage: str, arguments: Sequence[str], console: Console) -> int:
        """Run trials of a study that another process owns, until none is left to run.

        Args:
            name: of the study.
            storage: URL of the storage that has the study.
            arguments: options of this machine, in place of the study's own.
            console: to print to.

        Returns:
            How many trials ran here.
        """

        def say(line: str) -> None:
            print_line(console, line)

        stored = find_study(name, storage)
        own = cls.from_composed(compose_joined(stored, arguments), arguments)
        quieten(training=own.recipe is not None)
        prepared = prepare(own.options, own.recipe, say)
        try:
            return run_worker(prepared, stored, console)
        finally:
            prepared.close()

    @without_own_frames
    def run(self) -> "Result":
        """Search, or go on with it, write the report, and return the results.

        Generators, torch's flags, the working directory, loggers, warnings, environment variables
        and the objects that were given are afterwards as they were.

        The first steps, the survey's steps and the trials run in a process of their own. Whatever
        ends that process is a UserCodeError here: ``os._exit``, a crash, or a step that takes
        longer than ``protocol.trial_seconds`` (300 s where none is set).

        With ``workers=0``, and where module or data cannot be pickled, they run in this process.
        There a step that takes too long is interrupted as by Ctrl-C. One that hangs in C code, or
        that is not called from the main thread, cannot be interrupted: lines say what is waited
        for. ``os._exit`` ends this process, with a line and status 1.

        Raises:
            BstuneError: one of its subclasses, for what a user can mend.
            UserCodeError: where nothing reached the target and the user's own configuration failed
                in its code; ``bstune.load`` has the result all the same.
            Exception: what the user's own code raised before any trial, or in this process, with a
                note.
        """
        # torch and lightning take 4 s to import.
        from bstune.study.result import Result
        from bstune.trial.processes.restored import restored

        # Secrets and control characters stay out of all that is logged and raised.
        with restored(), filtered():
            # torch asks for the user's name, which a container's user may lack.
            name_user(os.environ)
            quieten()
            with users_errors(), os_exit_as_users_error(), refusals_in_python(self.options):
                findings = self.run_on(plain_console(), self._started())
        if isinstance(findings, TrialResult):
            raise ConfigError(
                "trial.batch_size and trial.lr ask for one trial, which has no study's result: "
                "leave them out, or use the command line"
            )
        return Result.from_findings(findings, self.recipe)

    def _started(self, now: Callable[[], float] = time.monotonic) -> Callable[[], float]:
        """Start the clock of a run; give a function that reads its seconds.

        They include those that the study object took to make, in its first run.
        """
        before = self._seconds_before
        self._seconds_before = 0.0
        since = stopwatch(now)
        return lambda: before + since()

    @property
    def _needs_own_loop(self) -> bool:
        """Whether the study was given no module, so that only a loop of the user's can train.

        A study of recorded runs has no module, either. Its options are of another kind.
        """
        return self.recipe is None and isinstance(self.options, GivenOptions)

    def __iter__(self) -> "Iterator[LoopTrial]":
        """Search, or go on with it: the body of your loop trains each trial.

        This is for a study without ``module`` and ``data``. The body trains ``trial.batch_size``
        examples a step at ``trial.lr``, reports its evaluations, and ends each trial by
        ``trial.finish()``. After the last trial the report is written; ``study.result`` has the
        results. After ``break``, an error or Ctrl-C the same call goes on where the loop was.

        Raises:
            ConfigError: where the study has a module to train, and for what a loop cannot have.
            BstuneError: one of its subclasses, for what a user can mend.
        """
        if not self._needs_own_loop:
            raise ConfigError(
                f"{self!r} trains its trials by itself: study.run(); for a loop of your own leave "
                "module and data out"
            )
        # It imports optuna and the report, which take seconds.
        from bstune.study.own_loop import trials_of

        return _refused_in_python(trials_of(self.options, self.assumptions), self.options)

    @property
    def result(self) -> "Result":
        """What the study has come to so far, read from its output folder.

        Raises:
            StudyError: where it has not begun.
        """
        # It imports what calls pandas and matplotlib.
        from bstune.study.result import load

        result = load(self.options.output)
        options = self.options
        # The first trial sets the target that the options leave open.
        if options.workload.target.target.is_open and result.summary.target_value is not None:
            options = with_option(options, "workload.target.value", result.summary.target_value)
        return replace(result, options=options, recipe=self.recipe)

    def run_on(
        self, console: Console, elapsed: Callable[[], float] | None = None
    ) -> Findings | TrialResult:
        """Run the study as the command line does.

        Args:
            console: to print to.
            elapsed: says how many seconds ago the command began; None: it begins now.

        Returns:
            The study's findings. Where ``trial.batch_size`` and ``trial.lr`` ask for one trial in
            place of a study, that trial's record.
        """
        if self._needs_own_loop:
            raise ConfigError(
                "the study has no module to train: give module=... and data=..., or train each "
                "trial in a loop of your own: for trial in study"
            )
        for line in self.assumptions:
            print_line(console, f"assumed: {line}")
        return run_options(self.options, self.recipe, self.arguments, console, elapsed)

    def __repr__(self) -> str:
        return f"Study({self.options.study!r}, workload={self.options.workload.name!r})"


def _objective_among(options: Sequence[str]) -> str | None:
    """Read the objective from options of the command line; None where they set none."""
    name = ARGUMENT_OPTIONS["objective"] + "="
    # Of an option that is given twice the last one counts, as on the command line.
    value: str | None = None
    for option in map(str, options):
        if option.startswith(name):
            value = option.removeprefix(name)
    return value


def _refuse_survey(survey: bool | None, options: Sequence[str]) -> None:
    """Raise ConfigError where a survey is asked for, which a loop of the user's cannot have.

    By default a study of such a loop leaves it out.
    """
    asked = [str(option) for option in options if str(option).lower() == "hardware.enabled=true"]
    if survey:
        asked.append("survey=True")
    if asked:
        raise ConfigError(f"{asked[0]}: a loop of yours is not surveyed: leave it out")


def _overrides_lr(options: Sequence[str]) -> bool:
    """Whether options of the command line let bstune set the learning rate in the optimizer."""
    return f"{OVERRIDE_LR}=true" in [str(option).lower() for option in options]


def compose_objects(
    given: "GivenObjects", arguments: Sequence[str], chosen: Mapping[str, Any]
) -> "tuple[StudyOptions, PythonRecipe | None]":
    """Make the options and the recipe of a study of Python objects.

    The recipe is None where the study has no module, as a loop of the user's trains.

    Args:
        given: the objects.
        arguments: options as on the command line.
        chosen: values by option, which override those of ``arguments``.
    """
    # torch and lightning take 4 s to import.
    from bstune.study.given import given_study

    if isinstance(arguments, str) or not all(isinstance(text, str) for text in arguments):
        raise ConfigError(
            f"options must be a list such as ['search.replicates=1'], but got {arguments!r}"
        )
    workload, recipe = given_study(given)
    tuned = {"search.tune": list(workload["tunable"])}
    try:
        options = compose_given(workload, arguments, {**chosen, **tuned})
    except ConfigError as error:
        # The caller has written arguments, not the options that are made of them.
        raise ConfigError(in_python(str(error))) from error
    if recipe is not None and options.trainer:
        # Trainer arguments that are Python values override those of the options.
        recipe = recipe.with_trainer(instantiate(options.trainer, "trainer"))
    return options, recipe


def _fitted_to_pickling(
    options: StudyOptions, recipe: "PythonRecipe", chosen: Mapping[str, Any]
) -> StudyOptions:
    """Fit the options to whether module and data can be pickled for another process.

    Where they cannot, trials run in this process and the hardware is not surveyed.

    ``chosen``: the options that the call's own arguments set, by dotted name.

    Raises:
        ConfigError: where they cannot, and the user asked for devices, for workers or for a survey.
    """
    if not options.search.workers and not options.hardware.enabled and options.devices == 1:
        return options
    try:
        # Reading this property pickles module and data.
        _ = recipe.pickled
    except PICKLE_ERRORS as error:
        reason = (
            f"module and data cannot be sent to another process ({type(error).__name__}: {error})"
        )
        if options.devices > 1:
            raise ConfigError(
                f"devices={options.devices}: {reason}: let them be pickled, or use one device"
            ) from error
        for name, option in (("workers", "search.workers"), ("survey", "hardware.enabled")):
            if chosen.get(option):
                raise ConfigError(
                    f"{name}={chosen[option]}: {reason}: leave {name} out, or let them be pickled"
                ) from error
        plain_console().print(
            f"{reason}: trials run in this one, and the hardware is not surveyed", soft_wrap=True
        )
        options = with_option(options, "search.workers", 0)
        return with_option(options, "hardware.enabled", False)
    return options


@contextmanager
def refusals_in_python(options: StudyOptions) -> "Iterator[None]":
    """Let refusals within the context name the arguments of the call, if objects were given.

    The caller has written these arguments, not the options that are made of them.
    """
    try:
        yield
    except UserCodeError:
        raise
    except BstuneError as error:
        if isinstance(options, GivenOptions):
            error.args = (in_python(str(error)),)
        raise


def _refused_in_python(
    trials: "Iterator[LoopTrial]", options: StudyOptions
) -> "Iterator[LoopTrial]":
    """Yield the trials for the user's loop; refusals name the arguments of the call."""
    with refusals_in_python(options):
        yield from trials


@contextmanager
def users_errors() -> Iterator[None]:
    """Let an error of the user's code leave the body as the user's code raised it.

    bstune raises an error of its own about it. The text of that one becomes a note.
    """
    handler = signal.getsignal(signal.SIGINT)
    try:
        yield
    except SystemExit as error:
        # Lightning turns a KeyboardInterrupt into SystemExit, and ignores Ctrl-C from then on.
        if isinstance(error.__context__, KeyboardInterrupt):
            if handler is not None and signal.getsignal(signal.SIGINT) != handler:
                signal.signal(signal.SIGINT, handler)
            raise error.__context__ from None
        raise
    except BstuneError as error:
        cause = error.__cause__
        while cause is not None and not _is_users_error(cause):
            cause = cause.__cause__
        if cause is None:
            raise
        cause.add_note(str(error))
        raise cause from cause.__cause__


def _is_users_error(error: BaseException) -> bool:
    """Whether an error was raised in the user's code.

    SystemExit and KeyboardInterrupt do not count.
    """
    is_error = isinstance(error, Exception) and not isinstance(error, BstuneError)
    return is_error and in_users_code(error)


def _check_writable(output: str | PathLike[str]) -> None:
    """Refuse an output folder that cannot be written, before module and data are loaded."""
    path = Path(os.path.expanduser(str(output)))
    # A text that is no path is refused with the other options.
    with suppress(ValueError):
        check_writable(path / "trials.jsonl", f"output={output}")
