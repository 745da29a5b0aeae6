"""All that needs a study's data and modules, in one process: first steps, timings, trials, tests.

The command keeps none of them: it asks :class:`TrainingProcess`, which has loaded them in a process
of its own. Whatever the user's code does there, ``sys.exit`` or a crash, ends that process and is
one line of the command. Where ``search.workers=0``, or objects cannot be sent, the same
:class:`TrainingService` answers in the command's process::

    training = TrainingProcess(options, recipe, log)
    tried = training.try_steps(None, continues=True, surveyed=True, say=print)
    with training.runner(1) as runner:
        ...  # trains the trials in the same process
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import chdir, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from bstune.core.errors import BstuneError, UserCodeError
from bstune.core.records import TrialProtocol, TrialResult, TrialSpec
from bstune.core.search_space import SizeLimits, Space
from bstune.options import StudyOptions
from bstune.recipe import Recipe
from bstune.system.console import quieten
from bstune.system.exits import is_interruption, untrainable
from bstune.system.failures import described
from bstune.system.files import Output, is_own
from bstune.system.watchdog import waiting_for, watching
from bstune.trial.backend import TrialBackend, make_space
from bstune.trial.processes.printed_once import own_lines, printed_once
from bstune.trial.processes.process import Process
from bstune.trial.processes.trials_log import TrialsLog
from bstune.trial.processes.workers import Workers

if TYPE_CHECKING:
    from bstune.hardware.memory import Ceiling
    from bstune.hardware.workload_steps import HowTimed, TimedSteps
    from bstune.trial.checks.preflight import PreflightFindings
    from bstune.trial.lightning.installed import LightningDataModule
    from bstune.trial.workload import LightningBackend

Say = Callable[[str], None]
End = Callable[[str], NoReturn]
# Compiled trials in one process, as torch keeps some memory of each
# (tests/benchmarks/bench_flat_memory.py).
COMPILED_TRIALS = 32


@dataclass(frozen=True)
class Tried:
    """What the process that trains knows of a study before its first trial.

    Args:
        findings: what the first steps have shown: seconds, gradients' bytes, notes.
        device: the device's name, as in records.
        device_kind: the kind of device that its seconds are of.
        description: where trials run, in words.
        versions: of the packages that results depend on.
        frozen_settings: settings that must not change while the study goes on.
        stops: whether a trial can be stopped early and continued.
        horizon: whether a trial's schedule ends with the trial.
        validates_on_test: whether the target is measured on the published test set.
        evaluation_share: seconds of evaluation per second of training.
        train_examples: length of the training data; None where they have none.
        has_test: whether there is a test set.
        notes: further lines of the plan.
        survey_key: key of the workload's survey in the cache; None: none is made.
        how_timed: how the survey times steps; None: none is made.
    """

    findings: "PreflightFindings"
    device: str
    device_kind: str
    description: str
    versions: Mapping[str, str]
    frozen_settings: Mapping[str, object]
    stops: bool
    horizon: bool
    validates_on_test: bool
    evaluation_share: float
    train_examples: int | None
    has_test: bool
    notes: tuple[str, ...]
    survey_key: str | None
    how_timed: "HowTimed | None"


@dataclass(frozen=True)
class DeviceNames:
    """The names of the device that trains, which depend on torch's number of threads.

    The fields are those of :class:`Tried`.
    """

    device: str
    device_kind: str
    description: str
    frozen_settings: Mapping[str, object]


class TrainingService:
    """Does what needs the data and the modules, in the process in which it is made.

    Args:
        options: whose device and precision are resolved.
        recipe: builds the data and the modules.
        protocol: of all trials.
    """

    def __init__(self, options: StudyOptions, recipe: Recipe, protocol: TrialProtocol) -> None:
        self._options = options
        self._recipe = recipe
        self._protocol = protocol
        # None until the first steps are taken or the first trial is trained.
        self._backend: LightningBackend | None = None
        # What the first steps told; None before them.
        self._first_steps: PreflightFindings | None = None

    @property
    def backend(self) -> "LightningBackend":
        """The backend that trains trials. The data are loaded for it once."""
        if self._backend is None:
            # torch and lightning take seconds to import: the process that trains needs them.
            from bstune.trial.workload import LightningBackend, build_workload

            workload = build_workload(self._options, self._recipe)
            self._backend = LightningBackend(self._options, self._recipe, workload, self._protocol)
        return self._backend

    def __call__(
        self, spec: TrialSpec, output: Output, resumed_from: TrialResult | None
    ) -> TrialResult:
        """Train a trial."""
        return self.backend.run(spec, output, resumed_from)

    def try_steps(
        self,
        trial: TrialSpec | None,
        continues: bool,
        surveyed: bool,
        *,
        say: Say,
        end: End | None = None,
    ) -> Tried:
        """Load the data and take a few steps; refuse a workload that cannot be tuned.

        Args:
            trial: the one to run instead of a study; None for a study.
            continues: whether the sampler stops and continues trials.
            surveyed: whether a survey follows.
            say: takes lines of progress.
            end: ends this process where a step never ends; None: as the command does.

        Returns:
            What these steps told of the data, the module and the seconds of a step.
        """
        seconds = self._options.protocol.trial_seconds
        # Lines go through the watch, which says what is waited for once there were none for long.
        with watching(say, seconds, end) as watched_say:
            return self._try_steps(trial, continues, surveyed, watched_say)

    def _try_steps(
        self, trial: TrialSpec | None, continues: bool, surveyed: bool, say: Say
    ) -> Tried:
        """Load the data and take a few steps; :meth:`try_steps` adds a watch over their time."""
        # torch takes seconds to import: the process that trains needs it.
        from bstune.hardware.survey_cache import survey_key
        from bstune.trial.checks.preflight import preflight
        from bstune.trial.checks.start import check_hooks
        from bstune.trial.checks.tunables import check_tunables
        from bstune.trial.workload import LightningBackend, build_workload

        options = self._options
        recipe = self._recipe
        protocol = self._protocol
        space = make_space(options)
        data = self._load_checked_data(space, trial, say)
        workload = build_workload(options, recipe, data)
        module = workload.build_module(trial or _smallest_trial(space))
        check_hooks(module, protocol.target.metric)
        backend = LightningBackend(options, recipe, workload, protocol)
        # The devices of a batch have processes of their own; the first steps are taken in this one.
        alone = replace(protocol, devices=1)
        # Only a trial that was stopped can be continued.
        continues = continues and backend.stops
        say(f"trying a few steps of {type(module).__name__} at its smallest batch size")
        findings = preflight(workload, alone, space, trial, continues=continues, survey=surveyed)
        smallest = replace(space, low=findings.smallest)
        check_tunables(options, workload, alone, smallest, stops=backend.stops)
        self._backend = backend
        self._first_steps = findings
        key: str | None = None
        how: HowTimed | None = None
        if surveyed:
            key, how = survey_key(options, recipe, space, protocol, workload.train_examples)
        return Tried(
            findings=findings,
            device=backend.device,
            device_kind=backend.device_kind,
            description=backend.description,
            versions=backend.versions,
            frozen_settings=backend.frozen_settings,
            stops=backend.stops,
            horizon=backend.horizon,
            validates_on_test=backend.validates_on_test,
            evaluation_share=backend.evaluation_share,
            train_examples=backend.train_examples,
            has_test=workload.test_batches is not None,
            notes=(*backend.notes, *findings.notes),
            survey_key=key,
            how_timed=how,
        )

    def _load_checked_data(
        self, space: Space, trial: TrialSpec | None, say: Say
    ) -> "LightningDataModule":
        """Load the data module, and refuse loaders and batch sizes that cannot be trained with.

        ``trial``: the one to run instead of a study; None for a study.
        """
        # torch takes seconds to import: the process that trains needs it.
        from bstune.study.planning.baseline import text_on_excess
        from bstune.trial.checks.loaders import check_loaders
        from bstune.trial.workload import check_largest, load_data, seeded, train_examples

        options = self._options
        say(f"reading the data of {options.workload.name}")
        data = load_data(options, self._recipe)
        with seeded(options.seed), waiting_for(f"the loaders of {type(data).__name__}"):
            check_loaders(
                data,
                is_given=self._recipe.data_at is not None,
                how_to_give=self._recipe.how_to_give_data,
            )
            examples = train_examples(data)
            if trial is None:
                # Loaders without a length have 0 examples: their number is not known.
                known_examples = examples or None
                # The user's own batch size is checked before the range around it: of the two errors
                # the one that names what the user gave comes first.
                too_large = text_on_excess(options, SizeLimits(known_examples))
                # The plan says it, too, but only once steps have been taken.
                if too_large is not None:
                    say(too_large)
                check_largest(space.high, examples)
            else:
                check_largest(trial.batch_size, examples, "trial.batch_size")
        return data

    def time_steps(
        self,
        how: "HowTimed",
        ceiling: "Ceiling",
        seconds: float,
        *,
        say: Say,
        end: End | None = None,
    ) -> "TimedSteps":
        """Time steps at batch sizes up to the memory ceiling, for about ``seconds`` in all.

        ``say`` is told what is waited for. A single step that takes longer than a whole trial may
        is given up: ``end`` ends this process then.
        """
        # torch takes seconds to import: the process that trains needs it.
        from bstune.hardware.workload_steps import time_workload

        options = self._options
        with (
            watching(say, options.protocol.trial_seconds, end),
            waiting_for("the survey of the hardware"),
        ):
            return time_workload(
                options,
                self._recipe,
                make_space(options),
                self._protocol,
                self.backend.workload,
                self._first_steps,
                how,
                ceiling,
                seconds,
            )

    def test(
        self, spec: TrialSpec, output: Output, *, say: Say, end: End | None = None
    ) -> Mapping[str, float]:
        """Test a trial's checkpoint on the test set, and give its metrics.

        ``say`` and ``end``, which each call from another process brings, are not used.

        Raises:
            UserCodeError: where the user's code fails.
        """
        try:
            return self.backend.test(spec, output)
        except BstuneError:
            raise
        # The user's code may raise anything. Left to the caller, the error would say that the
        # workload cannot be trained, but it has been trained.
        except Exception as error:
            message, frames = described(error)
            raise UserCodeError(f"{message}\n{frames}".rstrip()) from error

    def use_threads(self, count: int, *, say: Say, end: End | None = None) -> DeviceNames:
        """Train with ``count`` threads of torch from now on; give the device's names with these.

        This is too quick for ``say`` and ``end``, which each call from another process brings.
        """
        # torch takes seconds to import: only a process that trains needs it.
        import torch

        torch.set_num_threads(count)
        backend = self.backend
        backend.name_device()
        return DeviceNames(
            device=backend.device,
            device_kind=backend.device_kind,
            description=backend.description,
            frozen_settings=backend.frozen_settings,
        )


def _smallest_trial(space: Space) -> TrialSpec:
    """Make a trial at the smallest batch size, with the rate that the scaling rule gives."""
    return TrialSpec(
        number=0,
        trial_index=0,
        batch_size=space.low,
        lr=space.lr(space.low, 0.0),
        delta=0.0,
        seed=0,
    )


class Training(Protocol):
    """Where a study trains: :class:`TrainingProcess` or :class:`TrainingHere`.

    The methods do what those of :class:`TrainingService` do, in its process.
    """

    def try_steps(
        self, trial: TrialSpec | None, continues: bool, surveyed: bool, say: Say
    ) -> Tried:
        """Load the data and take a few steps, as :meth:`TrainingService.try_steps` does."""

    def time_steps(
        self, say: Say, how: "HowTimed", ceiling: "Ceiling", seconds: float
    ) -> "TimedSteps":
        """Time steps at batch sizes up to the memory ceiling.

        Args:
            say: takes lines of progress.
            how: how the survey times steps.
            ceiling: the largest batch size that fits into the memory.
            seconds: that the timing may take.
        """

    def use_threads(self, count: int) -> DeviceNames:
        """Train with ``count`` threads of torch from now on; give the device's names with these."""

    def test(self, spec: TrialSpec, output: Output) -> Mapping[str, float]:
        """Test a trial's checkpoint on the test set, and give its metrics."""

    def close(self) -> None:
        """End the process that was started, or give torch the threads that it had before."""


class TrainingHere:
    """Trains in the command's own process: for debuggers, and for what cannot be pickled."""

    def __init__(
        self, options: StudyOptions, recipe: Recipe, protocol: TrialProtocol, log: TrialsLog
    ) -> None:
        # torch takes seconds to import: only a process that trains needs it.
        import torch

        # Training changes the number for the whole process; close() sets it back.
        self._threads_before = torch.get_num_threads()
        if options.threads != "auto" and options.device == "cpu":
            torch.set_num_threads(options.threads)
        self.service = TrainingService(options, recipe, protocol)
        self._log = log

    def try_steps(
        self, trial: TrialSpec | None, continues: bool, surveyed: bool, say: Say
    ) -> Tried:
        """Load the data and take a few steps, as :meth:`TrainingService.try_steps` does."""
        # The log takes what the user's code prints; bstune's own lines are shown.
        say_own = own_lines(say)
        with printed_once(self._log), _users_errors():
            return self.service.try_steps(trial, continues, surveyed, say=say_own)

    def time_steps(
        self, say: Say, how: "HowTimed", ceiling: "Ceiling", seconds: float
    ) -> "TimedSteps":
        """Time steps for the survey, as :meth:`Training.time_steps` describes it."""
        # The log takes what the user's code prints; bstune's own lines are shown.
        say_own = own_lines(say)
        with printed_once(self._log), _users_errors():
            return self.service.time_steps(how, ceiling, seconds, say=say_own)

    def use_threads(self, count: int) -> DeviceNames:
        """Train with ``count`` threads of torch until this is closed; give the device's names."""
        return self.service.use_threads(count, say=lambda line: None)

    def test(self, spec: TrialSpec, output: Output) -> Mapping[str, float]:
        """Give a trial's metrics on the test set."""
        return self.service.backend.test(spec, output)

    def close(self) -> None:
        """Give torch the number of threads that it had before."""
        # torch takes seconds to import: only a process that trains needs it.
        import torch

        torch.set_num_threads(self._threads_before)


@contextmanager
def _users_errors() -> Iterator[None]:
    """Turn what the user's code raises in the body into a UserCodeError that says where.

    Afterwards the working directory is the one before, even if that code has changed it.
    """
    try:
        with chdir("."):
            yield
    except BstuneError:
        raise
    except (Exception, SystemExit) as error:
        # Lightning makes a SystemExit of Ctrl-C, which is no error of the user's code.
        if isinstance(error, SystemExit) and is_interruption(error):
            raise
        raise untrainable(error) from error


class TrainingProcess:
    """Trains in processes of its own; the one that took the first steps trains the first trial.

    Args:
        options: whose device and precision are resolved.
        recipe: builds what is trained there, and can be pickled.
        log: takes what the processes print.
    """

    def __init__(self, options: StudyOptions, recipe: Recipe, log: TrialsLog) -> None:
        self._options = options
        self._recipe = recipe
        self._log = log
        # At most one: the process that has loaded the data, while it trains nothing. The runner
        # takes it from this list, and puts it back.
        self._kept: list[Process] = []
        # Torch's threads in each process; None: as many as the options or the machine say.
        self.threads: int | None = None

    def try_steps(
        self, trial: TrialSpec | None, continues: bool, surveyed: bool, say: Say
    ) -> Tried:
        """Load the data and take a few steps, as :meth:`TrainingService.try_steps` does."""
        tried: Tried = self._call("try_steps", trial, continues, surveyed, say=say)
        return tried

    def time_steps(
        self, say: Say, how: "HowTimed", ceiling: "Ceiling", seconds: float
    ) -> "TimedSteps":
        """Time steps for the survey, as :meth:`Training.time_steps` describes it."""
        steps: TimedSteps = self._call("time_steps", how, ceiling, seconds, say=say)
        return steps

    def use_threads(self, count: int) -> DeviceNames:
        """Train with ``count`` threads of torch from now on; give the device's names with these."""
        self.threads = count
        names: DeviceNames = self._call("use_threads", count, say=lambda line: None)
        return names

    def test(self, spec: TrialSpec, output: Output) -> Mapping[str, float]:
        """Give a trial's metrics on the test set."""
        metrics: Mapping[str, float] = self._call("test", spec, output, say=lambda line: None)
        return metrics

    def runner(self, count: int, threads: int | None = None, limit: int | None = None) -> Workers:
        """Start processes that train trials, one trial each at a time.

        Args:
            count: how many; a single one is the process that has loaded the data already.
            threads: of torch in each; None: as many as :meth:`use_threads` chose.
            limit: bytes of CUDA memory that each may use; None: all of it.
        """
        options = self._options
        # The process that has loaded the data trains the first trial, where trials run one by one.
        # Else each process loads the data itself, and this one ends.
        alone = count == 1 and options.devices == 1
        kept: list[Process] | None = None
        if alone:
            kept = self._kept
        else:
            self.close()
        # A process that compiles is replaced after some trials, as each leaves memory behind.
        trials_per_process: int | None = None
        if options.compile:
            trials_per_process = COMPILED_TRIALS
        return Workers(
            partial(open_service, options, self._recipe, threads or self.threads, limit),
            count,
            options.protocol.trial_seconds,
            options.devices,
            trials_per_process,
            self._log,
            spare=kept,
        )

    def close(self) -> None:
        """End the process that has loaded the data, if it waits here for work.

        One that trains trials belongs to the :class:`Workers` of :meth:`runner`, which end it.
        """
        for process in self._kept:
            process.close()
            process.end()
        self._kept.clear()

    def _call(self, method: str, *arguments: object, say: Say) -> Any:
        """Call a method of the :class:`TrainingService` in the process that has loaded the data.

        Without such a process one is started. One in which the call fails is ended.
        """
        self._kept[:] = [process for process in self._kept if process.is_alive()]
        if not self._kept:
            opened = partial(open_service, self._options, self._recipe, self.threads)
            self._kept.append(Process(opened, self._log))
        process = self._kept[0]
        try:
            return process.call(method, *arguments, say=say)
        except BaseException:
            # After an error or an interruption the process may be in any state: the next call
            # starts a new one.
            self._kept.clear()
            process.kill()
            process.end()
            raise


def open_service(
    options: StudyOptions, recipe: Recipe, threads: int | None = None, limit: int | None = None
) -> TrainingService:
    """Make the :class:`TrainingService` of this process, which a study has started to train.

    ``threads``: of torch; None: as many as the options say. ``limit``: bytes of CUDA memory that
    it may use; None: all of it.
    """
    # torch and lightning take seconds to import: the process that trains needs them.
    import torch

    from bstune.hardware.memory import cap_cuda_memory
    from bstune.trial.devices.distributed import options_of_process
    from bstune.trial.workload import checked_protocol

    quieten()
    if threads is None and options.threads != "auto" and options.device == "cpu":
        threads = options.threads
    if threads is not None:
        torch.set_num_threads(threads)
    # Of several devices each process has one.
    here = options_of_process(options)
    recipe_here = recipe.on(here.device, here.precision)
    if limit is not None:
        device = torch.device(here.device)
        cap_cuda_memory(device, limit / torch.cuda.get_device_properties(device).total_memory)
    return TrainingService(here, recipe_here, checked_protocol(here, recipe_here))


class TriedBackend(TrialBackend):
    """The command's backend of a study that trains: a :class:`Training` runs its trials."""

    def __init__(self, tried: Tried, training: Training) -> None:
        self.step_time = tried.findings.step_time
        self.parameters = tried.findings.parameters
        self.device = tried.device
        self.device_kind = tried.device_kind
        self.description = tried.description
        self.versions = tried.versions
        self.frozen_settings = tried.frozen_settings
        self.stops = tried.stops
        self.continues = tried.findings.continues
        self.horizon = tried.horizon
        self.validates_on_test = tried.validates_on_test
        self.evaluation_share = tried.evaluation_share
        self.train_examples = tried.train_examples
        self.notes = tried.notes
        self._has_test = tried.has_test
        self._training = training

    def rename(self, names: DeviceNames) -> None:
        """Take over the device's names, and the frozen settings that go with them."""
        self.device = names.device
        self.device_kind = names.device_kind
        self.description = names.description
        self.frozen_settings = names.frozen_settings

    def run(
        self, spec: TrialSpec, folder: Output | None, resumed_from: TrialResult | None
    ) -> TrialResult:
        """Train a trial in this process.

        Raises:
            NotImplementedError: where trials are trained in other processes, by a runner.
        """
        if not isinstance(self._training, TrainingHere):
            raise NotImplementedError("trials are run by the study's runner")
        return self._training.service.backend.run(spec, folder, resumed_from)

    def test(self, spec: TrialSpec, folder: Output) -> Mapping[str, float]:
        """Give a trial's metrics on the test set; empty without such a set or a checkpoint."""
        if not self._has_test or not is_own(folder.checkpoint(spec.number)):
            return {}
        return self._training.test(spec, folder)

    def resumable(self, number: int, folder: Output) -> bool:
        """Whether the state of a stopped trial is there, from which it can go on."""
        return is_own(folder.state(number))
