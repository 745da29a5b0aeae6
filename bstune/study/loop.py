"""The loop of a study: ask, train, store; a generator, so that any training can be its body."""

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from bstune.core.records import Record, Records, Spec, Status, Target
from bstune.search.fit import trained_sizes
from bstune.study.new_seeds import NEW_SEED_LIMIT
from bstune.study.next_step import fatal_error, next_step
from bstune.study.plan import Ask, Done, Plan, Wait
from bstune.study.storage import StudyStorage
from bstune.study.trials import baseline_of
from bstune.system.console import number
from bstune.system.files import StudyFolder, discard
from bstune.trial.trial import Trial, run_trial
from bstune.trial.worker import POLL_SECONDS, AnyWorker, Failure, tell_progress

# A trial hangs when nothing comes of it for the larger of this, in seconds, and so many times the
# longest silence before; before the first evaluation of a study it may have data to download.
HANG_SECONDS = 60.0
HANG_RATIO = 20.0
START_SECONDS = 600.0
# The most of a time limit that a silence may take, and that of a study's first trial.
HANG_SHARE = 0.2
FIRST_HANG_SHARE = 0.5
# Seconds between two looks at a worker beside which others train.
AT_ONCE_SECONDS = 0.01


class Observer(Protocol):
    """Is told of each trial."""

    def finished(self, record: Record) -> None:
        """A trial has ended, and its record is stored."""


@dataclass
class AskedTrial:
    """A trial to train; whoever trains it sets ``record``."""

    spec: Spec
    target: Target
    """That ends it."""
    total_steps: int
    """Where its schedule ends: at its own end, or with its budget."""
    earlier: Record | None = None
    """The record of the trial that it resumes."""
    until: float | None = None
    """The ``time.monotonic()`` at which it stops; None: no limit."""
    save_to: Path | None = None
    resume_from: Path | None = None
    keep: bool = False
    """Save its state however it ends."""
    record: Record | None = None

    def trial(self) -> Trial:
        """The trial that is reported to, made by whoever trains it."""
        return Trial(
            self.spec,
            self.target,
            total_steps=self.total_steps,
            earlier=self.earlier,
            save_to=self.save_to,
            keep=self.keep,
            resume_from=self.resume_from,
            until=self.until,
        )


def asked_batches(
    plan: Plan,
    storage: StudyStorage,
    folder: StudyFolder,
    observers: Sequence[Observer] = (),
    now: Callable[[], float] = time.monotonic,
    jobs: int = 1,
) -> Generator[list[AskedTrial]]:
    """Yield the trials that run at once, whenever one has ended, until the plan is done.

    :mod:`bstune.run_study` goes through them, and again where an open answer asks for more.

    Whoever trains them sets the record of one at least before asking for what runs then. One that
    is left without a record at the end, as its body was interrupted, is asked again later.

    What failed before this call is asked again, and what was refused while nothing had trained: the
    user may have mended it.

    Args:
        plan: of the study.
        storage, folder: of the study.
        observers: are told of each record.
        now: a clock, in seconds.
        jobs: the most trials at once; where some have to wait for others they are fewer.

    Raises:
        UserCodeError: after failures that end a study, with the user's own error.
        InputError: where the smallest batch size does not fit.
    """
    before = storage.records()
    since = max((record.number for record in before), default=-1) + 1
    mended = {"failed"} if trained_sizes(before) else {"failed", "refused"}
    running: list[AskedTrial] = []
    records: list[Record] = []
    try:
        while True:
            records = [
                record
                for record in storage.records()
                if record.number >= since or record.status not in mended
            ]
            error = fatal_error(plan.space, records, since)
            if error is not None:
                raise error
            step: Ask | Wait | Done = Wait()
            if len(running) < jobs:
                step = next_step(plan, records, storage.running(), now())
            if isinstance(step, Ask):
                spec = storage.claim(step)
                if spec is not None:
                    running.append(_asked_trial(plan, spec, step, records, folder))
            elif running:
                yield list(running)
                for asked in [one for one in running if one.record is not None]:
                    running.remove(asked)
                    _store(asked, records, storage, observers)
            elif isinstance(step, Done):
                return
            else:
                time.sleep(POLL_SECONDS)
                storage.settle()
    finally:
        for asked in running:
            _store(asked, records, storage, observers)


def _store(
    asked: AskedTrial,
    records: Records,
    storage: StudyStorage,
    observers: Sequence[Observer],
) -> None:
    """Store a trial's record and tell it; one that tells nothing is left to be asked again.

    Args:
        asked: the trial.
        records: of the trials before it.
        storage: of the study.
        observers: are told of the record.
    """
    record = asked.record
    if record is None or _was_cut_off(record, asked, baseline_of(records)):
        storage.abandon(asked.spec)
        return
    if record.status == "refused" and record.batch_size in trained_sizes(records):
        record = record.model_copy(update={"status": "failed"})
    if not storage.finish(record):
        return
    if asked.resume_from is not None:
        discard(asked.resume_from)
    for observer in observers:
        observer.finished(record)


def _was_cut_off(record: Record, asked: AskedTrial, baseline: Record | None) -> bool:
    """Whether the time limit ended a run on a new seed that tells nothing; it is asked again.

    The baseline's tells that it takes longer, once it has run as long as the best.
    """
    if record.role != "new seed" or asked.until is None or record.status != "pruned":
        return False
    least = float(record.max_steps)
    if baseline is not None and record.repeats == baseline.number:
        least /= NEW_SEED_LIMIT
    return record.steps < least


def _asked_trial(
    plan: Plan, spec: Spec, ask: Ask, records: Records, folder: StudyFolder
) -> AskedTrial:
    """Collect what a claimed trial needs: its parent's record, and where states are saved."""
    earlier = None
    resume_from = None
    if spec.resumed_from is not None:
        earlier = next(record for record in records if record.number == spec.resumed_from)
        resume_from = folder.checkpoint(spec.resumed_from)
    is_resumable = spec.schedule_steps is None and spec.role != "new seed"
    save_to = folder.checkpoint(spec.number) if is_resumable else None
    budget = plan.question.last_step(spec.batch_size)
    return AskedTrial(
        spec=spec,
        target=plan.question.target,
        total_steps=spec.schedule_steps or budget,
        earlier=earlier,
        until=ask.until,
        save_to=save_to,
        resume_from=resume_from,
    )


@dataclass
class HangWatch:
    """How long a trial may be silent before it counts as hanging.

    Args:
        wall_seconds: the time limit of the study.
        trial_seconds: the user's own limit.
        longest_silence: of a trial so far, in seconds; 0: nothing has been evaluated yet.
    """

    wall_seconds: float | None = None
    trial_seconds: float | None = None
    longest_silence: float = 0.0

    @property
    def limit(self) -> float:
        """Seconds of silence after which a trial is ended."""
        if self.trial_seconds is not None:
            return self.trial_seconds
        limit = max(HANG_SECONDS, HANG_RATIO * self.longest_silence)
        share = HANG_SHARE
        if self.longest_silence == 0.0:
            limit = START_SECONDS
            share = FIRST_HANG_SHARE
        if self.wall_seconds is not None:
            limit = min(limit, share * self.wall_seconds)
        return limit


def train_here(asked: AskedTrial, train: Callable[[Trial], None]) -> Record:
    """Train a trial in this process: a worker's, or that of a study without one."""
    trial = asked.trial()
    trial.on_progress = partial(tell_progress, partial(_last_evaluation_text, trial))
    return run_trial(train, trial)


def _last_evaluation_text(trial: Trial) -> str:
    """A trial's last evaluation, in words; empty before the first one."""
    if not trial.history:
        return ""
    step, value = trial.history[-1]
    shown = "no number" if value is None else number(value)
    return f"step {step:,} of {trial.max_steps:,}, {trial.target.metric} {shown}"


def train_in_worker(
    worker: AnyWorker,
    asked: AskedTrial,
    train: Callable[[Trial], None],
    watch: HangWatch,
    patience: float = POLL_SECONDS,
) -> Generator[Record | None]:
    """Train a trial in the worker's process; whatever the user's code does, a record comes at last.

    A :class:`Crew` goes through one for each worker, a single training through its only one.

    Args:
        worker: that the trial is sent to.
        asked: the trial.
        train: that is called with it.
        watch: which ends it when it is silent for too long.
        patience: seconds that are waited for it at a time.

    Yields:
        None while it trains, then the record.

    Raises:
        BstuneError: for what no other trial could use either, such as a metric that is not logged.
    """
    worker.submit(train_here, asked, train)
    yield None
    silence = 0.0
    while (outcome := worker.poll(patience)) is None:
        silence = max(silence, worker.silent_seconds)
        if silence > watch.limit:
            worker.kill(watch.limit)
        yield None
    if isinstance(outcome, Failure):
        if outcome.refusal is not None:
            raise outcome.refusal
        # Linux ends a process so where the machine is short of memory.
        status: Status = "out of memory" if "SIGKILL" in outcome.reason else "failed"
        yield Record(**asked.spec.model_dump(), status=status, steps=0, message=outcome.reason)
        return
    record: Record = outcome.value
    if record.history:
        watch.longest_silence = max(watch.longest_silence, silence, POLL_SECONDS)
    yield record


class Crew:
    """Trains as many trials at once as there are workers.

    Args:
        workers: one at least.
        train: that is called with each trial.
        watch: which ends those that are silent for too long.
        begun: is told of each trial that begins, and what gives its last evaluation.
    """

    def __init__(
        self,
        workers: Sequence[AnyWorker],
        train: Callable[[Trial], None],
        watch: HangWatch,
        begun: Callable[[Spec, Callable[[], str]], None],
    ) -> None:
        self._idle = list(reversed(workers))
        self._patience = POLL_SECONDS if len(workers) == 1 else AT_ONCE_SECONDS
        self._train = train
        self._watch = watch
        self._begun = begun
        self._at_work: dict[int, tuple[AnyWorker, Iterator[Record | None]]] = {}

    def train(self, running: Sequence[AskedTrial]) -> None:
        """Begin those of the trials that are new, and go on until one has its record.

        A study calls it with all trials that run, whenever one has ended.

        BstuneError as by :func:`train_in_worker`.
        """
        for asked in running:
            if asked.spec.number not in self._at_work:
                worker = self._idle.pop()
                self._begun(asked.spec, partial(getattr, worker, "told"))
                going = train_in_worker(worker, asked, self._train, self._watch, self._patience)
                asked.record = next(going)
                self._at_work[asked.spec.number] = worker, going
        while all(asked.record is None for asked in running):
            for asked in running:
                worker, trained = self._at_work[asked.spec.number]
                asked.record = next(trained)
                if asked.record is not None:
                    del self._at_work[asked.spec.number]
                    self._idle.append(worker)
