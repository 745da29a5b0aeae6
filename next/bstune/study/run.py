"""Runs a study: its trials, its answer, and further trials that an open answer asks for."""

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import replace

from bstune.core.records import Record
from bstune.study.advice import followed
from bstune.study.analysis import StudyFacts, analyse
from bstune.study.loop import AskedTrial, Observer, asked_batches, train_here
from bstune.study.plan import Plan
from bstune.study.result import StudyResult
from bstune.study.storage import StudyStorage
from bstune.system.files import StudyFolder
from bstune.system.ticker import Ticker
from bstune.trial.trial import Trial


def answered(
    study: StudyFacts,
    storage: StudyStorage,
    folder: StudyFolder,
    train: Callable[[Sequence[AskedTrial]], None] | None,
    observers: Sequence[Observer],
    ticker: Ticker,
    jobs: int = 1,
) -> Generator[list[AskedTrial], None, tuple[StudyResult, list[Record]]]:
    """Train what a study plans, and what its answer asks for while there is time.

    Args:
        study: with its plan.
        storage, folder: of the study.
        train: trains those that run until one has its record; None: they are yielded, for a loop of
            one's own.
        observers: are told of each.
        ticker: that says what goes on.
        jobs: the most trials at once.

    Returns:
        The result, and the records that it is of.

    Raises:
        BstuneError: as by :func:`bstune.study.loop.asked_batches` and ``train``.
    """
    folder.checkpoints.mkdir(exist_ok=True)
    is_first = True
    while True:
        before = len(storage.records())
        yield from planned(study.plan, storage, folder, train, observers, jobs)
        ticker.does("computing the answer")
        records = storage.records()
        result = analyse(study, records)
        more = followed(study.plan, result, time.monotonic())
        is_stuck = not is_first and len(records) == before
        if more is None or is_stuck:
            return result, records
        study = replace(study, plan=more)
        is_first = False


def planned(
    plan: Plan,
    storage: StudyStorage,
    folder: StudyFolder,
    train: Callable[[Sequence[AskedTrial]], None] | None,
    observers: Sequence[Observer],
    jobs: int,
) -> Generator[list[AskedTrial]]:
    """Train what is planned; arguments and errors as of :func:`answered`."""
    with closing(asked_batches(plan, storage, folder, observers, jobs=jobs)) as batches:
        for running in batches:
            if train is None:
                yield running
            else:
                train(running)


def train_all_here(train: Callable[[Trial], None], running: Sequence[AskedTrial]) -> None:
    """Train trials in this process, one after another."""
    for asked in running:
        asked.record = train_here(asked, train)
