"""Runs a study: its trials, its answer, and further trials that an open answer asks for."""

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial

from bstune.core.records import Record
from bstune.study.advice import followed
from bstune.study.analysis import Study, analyse
from bstune.study.loop import (
    AskedTrial,
    HangWatch,
    Observer,
    asked_batches,
    train_here,
    train_in_worker,
)
from bstune.study.progress import Progress
from bstune.study.result import StudyResult
from bstune.study.storage import StudyStorage
from bstune.system.files import StudyFolder
from bstune.system.ticker import Ticker
from bstune.trial.trial import Trial
from bstune.trial.worker import AnyWorker


def answered(
    study: Study,
    storage: StudyStorage,
    folder: StudyFolder,
    train_one: Callable[[AskedTrial], Record] | None,
    observers: Sequence[Observer],
    ticker: Ticker,
    jobs: int = 1,
) -> Generator[list[AskedTrial], None, tuple[StudyResult, list[Record]]]:
    """Train what a study plans, and what its answer asks for while there is time.

    Args:
        study: with its plan.
        storage, folder: of the study.
        train_one: trains one trial; None: the trials are yielded, for a loop of one's own.
        observers: are told of each.
        ticker: that says what goes on.
        jobs: the most trials that are yielded at once.

    Returns:
        The result, and the records that it is of.

    Raises:
        BstuneError: as by :func:`bstune.study.loop.asked_batches` and :func:`trained`.
    """
    folder.checkpoints.mkdir(exist_ok=True)
    is_first = True
    while True:
        before = len(storage.records())
        with closing(asked_batches(study.plan, storage, folder, observers, jobs=jobs)) as batches:
            for batch in batches:
                if train_one is None:
                    with storage.beating([asked.spec for asked in batch]):
                        yield batch
                    continue
                for asked in batch:
                    asked.record = train_one(asked)
        ticker.does("computing the answer")
        records = storage.records()
        result = analyse(study, records)
        more = followed(study.plan, result, time.monotonic())
        is_stuck = not is_first and len(records) == before
        if more is None or is_stuck:
            return result, records
        study = replace(study, plan=more)
        is_first = False


def trained(
    worker: AnyWorker | None,
    train: Callable[[Trial], None],
    watch: HangWatch,
    storage: StudyStorage,
    progress: Progress,
    asked: AskedTrial,
) -> Record:
    """Train one trial, in the worker where there is one; see :func:`train_in_worker`."""
    if worker is None:
        return train_here(asked, train)
    progress.begun(asked.spec, partial(getattr, worker, "told"))
    alive = partial(storage.heartbeat, asked.spec)
    return train_in_worker(worker, asked, train, watch, alive)
