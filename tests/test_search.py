"""The loop of every process that works on a study: whose trials are whose, what fails, and where it is asked again."""

import re
import statistics
import threading
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import optuna
import pytest
from builders import options_of, result_of
from optuna.samplers import RandomSampler
from rich.console import Console
from sqlalchemy import event
from sqlalchemy.engine import Engine
from test_storage import BUDGET, SPACE
from toolbox import made_table, make_result, statuses, trials_of

from bstune.core.errors import StudyError, UserCodeError
from bstune.core.records import CUT_SHORT, OUT_OF_TIME, TrialSpec
from bstune.study.planning.plan import count_points
from bstune.study.planning.wall import TAKEN, WallTime
from bstune.study.prepare import compose_joined, prepare
from bstune.study.run import run_study, run_worker
from bstune.study.searching.finished_trial import (
    check_baseline,
    check_failures,
    is_out_of_time,
    record_to_store,
)
from bstune.study.storage.asking import ask
from bstune.study.storage.connection import connect
from bstune.study.storage.lease import Leases
from bstune.study.storage.opening import find_study, open_study
from bstune.study.storage.telling import tell
from bstune.study.storage.trials import running_specs, trial_index_of
from bstune.study.storage.turns import free_indices, free_turn, turn_at
from bstune.trial.backend import TrialBackend
from bstune.trial.processes.messages import Finished, failed
from bstune.trial.processes.workers import InProcess

OPTIONS = (
    "workload=replay",
    "workload.table=t.jsonl",
    "workload.target.value=0.14",
    "mlflow.enabled=false",
)
OPTIONS += (
    "workload.name=replay",
    "search.objective=steps",
    "search.replicates=1",
    "search.precision=null",
    "sampler=random",
)


COMMIT = "COMMIT"


class Answers(TrialBackend):
    """Reaches the target after 100 steps, unless ``does`` raises."""

    def __init__(self, does=lambda spec: None, device_kind="gpu A"):
        self.does = does
        self.device_kind = device_kind

    # A hundredth of a second, whatever the batch size.
    def step_time(self, batch_size):
        return 0.01

    def run(self, spec, folder, resumed_from):
        self.does(spec)
        return make_result(
            **spec.trial_fields(), steps=100, history=((100, 0.1),), seconds_per_step=0.01
        )


@pytest.fixture
def study(tmp_path, monkeypatch):
    """A function that prepares the study with a backend, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    made_table(tmp_path)

    def prepared(backend, *options, **more):
        return prepare(options_of(*OPTIONS, *options), None, backend=backend, **more)

    return prepared


def run(prepared):
    return run_study(prepared, list(OPTIONS), Console(width=200)).trials


# One object, so that each trial raises the same error.
BAD_LUCK = ValueError("bad luck")


def failing(numbers, error=BAD_LUCK):
    def does(spec):
        if spec.number in numbers:
            raise error

    return does


AMPLE = ("search.trials=20", "search.wall_seconds=100", "search.replicates=3")


@pytest.mark.slow
def test_wall_time_is_of_the_whole_command_and_keeps_the_replicates(study, capsys):
    """Imports take 20 s and a trial 10 s: three replicates fit after three trials, and another winner's do not."""
    clock = SimpleNamespace(now=20.0)

    class Timed(Answers):
        def run(self, spec, folder, resumed_from):
            clock.now += 10.0
            return replace(super().run(spec, folder, resumed_from), wall_seconds=10.0)

    options = (*AMPLE, "search.baseline=false")
    done = run(study(Timed(), *options, elapsed=lambda: clock.now))
    replicates = [one.replicate_of for one in done]
    assert replicates[:3] == [None] * 3
    assert len(replicates) == 6
    assert None not in replicates[3:]
    # 20 s and six trials of 10 s.
    assert clock.now == 80.0
    assert "(50.0 s taken, " in " ".join(capsys.readouterr().out.split())
    # The same command begins anew, and goes by what the study took before.
    clock.now = 5.0
    assert len(run(study(Timed(), *options, elapsed=lambda: clock.now))) == 6, (
        "80 s were spent before"
    )


@pytest.mark.slow
def test_each_trial_that_ends_stores_the_wall_time_so_that_a_kill_loses_one_at_most(study):
    """The time that is stored as a trial begins is what a process killed in it leaves behind."""
    clock = SimpleNamespace(now=20.0)
    stored = []

    class Timed(Answers):
        def run(self, spec, folder, resumed_from):
            attributes = find_study("replay", "sqlite:///bstune.db").user_attrs
            stored.append(attributes.get(TAKEN))
            clock.now += 10.0
            return replace(super().run(spec, folder, resumed_from), wall_seconds=10.0)

    run(study(Timed(), *AMPLE, "search.baseline=false", elapsed=lambda: clock.now))
    assert stored[0] is None
    # The first runs are the search's, the last ones those on fresh seeds.
    assert stored[1:] == [20.0 + 10.0 * trials for trials in range(1, len(stored))]


@pytest.mark.slow
def test_the_search_has_the_time_that_fresh_seeds_leave(study, monkeypatch):
    """Fresh seeds take 2 s of the 10 s that are kept for each: three further points have time."""
    clock = SimpleNamespace(now=20.0)
    walls = []
    monkeypatch.setattr(
        "bstune.study.run.WallTime",
        lambda *given, **more: walls.append(WallTime(*given, **more)) or walls[-1],
    )

    class Timed(Answers):
        def run(self, spec, folder, resumed_from):
            seconds = 10.0 if spec.replicate_of is None else 2.0
            clock.now += seconds
            return replace(super().run(spec, folder, resumed_from), wall_seconds=seconds)

    options = (*AMPLE, "search.baseline=false")
    done = run(study(Timed(), *options, elapsed=lambda: clock.now))
    of_search = [trial.replicate_of is None for trial in done]
    assert of_search[:9] == [True] * 3 + [False] * 3 + [True] * 3
    # The fake clock stands still between trials: the seeds' seconds are no decision's.
    assert walls[0].decision_seconds == 0.0
    # Another candidate's fresh seeds have the rest.
    assert not any(of_search[9:])


def test_the_search_goes_on_once_a_continued_trial_has_reached_the_target(study):
    """A step takes 0.1 s and the target 200 of them, for which the first trials have no time."""
    clock = SimpleNamespace(now=0.0)

    class Slow(Answers):
        stops = True
        continues = True

        def step_time(self, batch_size):
            return 0.1

        def run(self, spec, folder, resumed_from):
            before = 0 if resumed_from is None else resumed_from.steps
            steps = min(spec.max_steps or 200, 200)
            seconds = 0.1 * (steps - before)
            clock.now += seconds
            history = [(step, 0.9 - 0.004 * step) for step in range(10, steps + 1, 10)]
            return make_result(
                **spec.trial_fields(),
                status="reached" if steps == 200 else "stopped",
                steps=steps,
                history=tuple(history),
                seconds_per_step=0.1,
                train_seconds=seconds,
                wall_seconds=seconds,
            )

    options = ("sampler=frontier", "search.wall_seconds=60", "search.replicates=0")
    done = run(study(Slow(), *options, elapsed=lambda: clock.now))
    numbers = [trial.number for trial in done if trial.reached]
    assert numbers
    assert numbers[0] < done[-1].number


def test_a_study_that_had_no_time_for_a_trial_does_not_end_well(study, tmp_path):
    late = study(Answers(), "search.trials=2", "search.wall_seconds=100", elapsed=lambda: 130.0)
    with pytest.raises(StudyError, match="no trial has run"):
        run(late)
    # More time continues it, and one trial is enough to end well.
    again = study(Answers(), "search.trials=2", "search.wall_seconds=900", elapsed=lambda: 10.0)
    assert run(again)


@pytest.mark.parametrize(
    ("sampler", "start", "points"),
    [
        ("random", 80.0, 1),
        pytest.param("frontier", 200.0, 0, marks=pytest.mark.slow),
    ],
)
def test_the_advised_wall_time_has_time_for_two_points(study, sampler, start, points):
    """A trial takes 8 s, and the next start is a quarter slower."""
    clock = SimpleNamespace(now=start)

    class Timed(Answers):
        def run(self, spec, folder, resumed_from):
            clock.now += 8.0
            return replace(super().run(spec, folder, resumed_from), wall_seconds=8.0)

    def points_after(wall_seconds):
        # Eight points are enough to tell that there is time for two, and for another one.
        options = (f"search.wall_seconds={wall_seconds}", f"sampler={sampler}", "search.trials=8")
        prepared = study(Timed(), *options, elapsed=lambda: clock.now)
        try:
            findings = run_study(prepared, list(OPTIONS), Console(width=200))
        except StudyError as error:
            return 0, str(error)
        return count_points(findings.trials), findings.result.stop_reason

    def advised(reason):
        return re.findall(r"search\.wall_seconds=(\d+)", reason)[-1]

    found, reason = points_after(90)
    assert found == points
    clock.now = 1.25 * start
    found, reason = points_after(advised(reason))
    assert found >= 2
    if found < 8:
        # A command whose start takes all that is left says what another point needs, too.
        clock.now = start
        _, reason = points_after(re.findall(r"wall_seconds=(\d+)", reason)[0])
        clock.now = 1.25 * start
        assert points_after(advised(reason))[0] > found


def test_seconds_to_go_count_points_until_the_search_ends(study, monkeypatch):
    """Four points are tried, and the best one runs again."""
    seen = list[tuple[int, bool]]()

    def predict(prepared, wall, done, pace, search_has_ended, predicted):
        seen.append((len(done), search_has_ended))
        return 1.0

    monkeypatch.setattr("bstune.study.search.study_seconds_to_go", predict)
    run(study(Answers(), "search.trials=4"))
    # After one point the pace is not known.
    assert {number for number, ended in seen if not ended} == {2, 3, 4}
    assert {number for number, ended in seen if ended} >= {4, 5}
    assert seen == sorted(seen)


def test_what_a_trial_raises_is_its_own_end(study, tmp_path, capsys):
    done = run(study(Answers(failing({0, 3, 4})), "search.trials=4"))
    failed = [trial for trial in done if trial.status == "failed"]
    assert [(trial.number, trial.trial_index) for trial in failed] == [(0, 0), (3, 2), (4, 2)]
    assert failed[0].message.startswith("ValueError: bad luck (test_search.py:")
    # Trial 0 failed, and its point was asked again as trial 1.
    points = {trial.number: (trial.batch_size, trial.lr, trial.seed) for trial in done}
    assert points[1] == points[0], "asked again"
    assert points[4] == points[3] != points[5], "and after two tries elsewhere"
    reached = [trial.trial_index for trial in done if trial.status == "reached"]
    assert reached[:4] == [0, 1, 2, 3]
    assert "failed: ValueError: bad luck" in capsys.readouterr().out
    assert trials_of(tmp_path / "outputs" / "replay") == done


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (StopIteration("the loader is empty"), "StopIteration"),
        pytest.param(MemoryError(), "MemoryError", marks=pytest.mark.slow),
    ],
)
def test_the_first_three_trials_fail_and_end_the_study_with_the_users_frames(
    study, error, kind, capsys
):
    with pytest.raises(
        UserCodeError,
        match=rf"(?s)the first 3 trials all failed, .*{kind}.*test_search.py:\d+ in does: ",
    ):
        # The loader's StopIteration must not pass for an end of the search.
        run(study(Answers(failing(range(99), error))))
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("trial ")]
    assert [line.split()[1] for line in lines] == ["0", "1", "2"]
    # Three that failed, four that reached, and a run on a fresh seed.
    assert len(run(study(Answers(), "search.trials=4"))) == 3 + 4 + 1, (
        "and the same command goes on"
    )


class Terminated(InProcess):
    """A process that is ended together with the command, as a scheduler ends both."""

    # The signal reaches both: the command is interrupted as it waits.
    def wait(self):
        (self.spec,) = self.running
        raise KeyboardInterrupt

    def poll(self):
        yield failed(self.spec, RuntimeError("its process was ended by SIGTERM"), 1.0)


def test_what_is_ended_with_the_command_has_not_failed_by_itself(study, tmp_path):
    prepared = study(Answers(), "search.trials=4")
    with pytest.raises(KeyboardInterrupt):
        run(replace(prepared, open_processes=lambda count: Terminated(prepared.backend.run)))
    # The trial is asked again, as one whose process a crash took.
    (cut,) = trials_of(tmp_path / "outputs" / "replay")
    assert (cut.status, cut.message) == ("failed", CUT_SHORT)


def trial(status, message=None):
    return make_result(status=status, message=message)


@pytest.mark.parametrize(
    ("statuses", "ends"),
    # Of three failures in a row, whatever else went wrong between them.
    [
        ("ff", False),
        ("fff", True),
        # Trials that were cut short end no study.
        ("ccc", False),
        ("fcfcf", True),
        ("fdff", False),
        ("rff", False),
        ("rfff", True),
        ("rffoff", False),
    ],
)
def test_how_many_failures_end_a_study(statuses, ends):
    # The letters are short for statuses; a trial that was cut short counts as failed, too.
    kinds = {"r": "reached", "d": "diverged", "o": "out of memory", "f": "failed", "c": "failed"}
    done = []
    for kind in statuses:
        done.append(trial(kinds[kind], CUT_SHORT if kind == "c" else None))
    if ends:
        with pytest.raises(StudyError, match=r"trials (all )?failed") as raised:
            check_failures(done)
        # Without a trial that has finished there is none to be told of as stored.
        assert ("are stored" in str(raised.value)) == ("r" in statuses)
    else:
        check_failures(done)


@pytest.mark.parametrize(
    ("frames", "rest", "ends"),
    [
        ("  mine.py:5 in step: x", "stopped", True),
        ("  mine.py:5 in step: x", "reached", False),
        # A process that was ended from outside is no error of the user's code.
        ("", "stopped", False),
    ],
)
def test_the_users_own_configuration_that_raised_ends_a_study_without_an_answer(frames, rest, ends):
    failed = trial("failed", "ValueError: x")
    finished = Finished(failed.again(), failed, frames=frames)
    result = result_of([failed, replace(failed, number=1, status=rest, message=None)])
    check_baseline(result, None)
    if ends:
        with pytest.raises(UserCodeError, match=r"ValueError: x\n  mine\.py"):
            check_baseline(result, finished)
    else:
        check_baseline(result, finished)


class NeverReaches(Answers):
    def run(self, spec, folder, resumed_from):
        met = super().run(spec, folder, resumed_from)
        return replace(met, status="stopped", history=((100, 0.5),))


def test_the_command_that_saw_the_reference_raise_ends_with_its_error_after_the_answer(
    study, tmp_path
):
    with pytest.raises(UserCodeError, match="your own configuration failed with ValueError: bad"):
        # It is asked twice.
        run(study(NeverReaches(failing({0, 1})), "search.trials=2"))
    assert (tmp_path / "outputs" / "replay" / "curve.json").exists()
    # Nothing raises any more, and the study goes on.
    assert len(run(study(NeverReaches(), "search.trials=3"))) == 2 + 3


def test_a_reference_that_ran_when_it_was_asked_again_has_not_failed(study):
    done = run(study(NeverReaches(failing({0})), "search.trials=2"))
    assert [(one.trial_index, one.status) for one in done[:2]] == [(0, "failed"), (0, "stopped")]


@pytest.mark.slow
def test_each_index_is_run_once_however_many_processes_ask_at_once(study, tmp_path):
    url = f"sqlite:///{tmp_path}/bstune.db"
    storage = connect(url)
    optuna.create_study(study_name="s", storage=storage)

    def work(worker):
        mine = optuna.load_study(study_name="s", storage=connect(url))
        while (turn := free_turn(mine, 12, worker)) is not None:
            # It is None where another thread was faster.
            asked = ask(mine, turn, BUDGET, SPACE, RandomSampler(), stops=True)
            if asked is not None:
                result = make_result(**asked[1].trial_fields(), status="reached", steps=100)
                tell(mine, asked, result, "steps")

    # Four processes, in threads.
    threads = [threading.Thread(target=work, args=(name,)) for name in "0123"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    done = optuna.load_study(study_name="s", storage=storage).get_trials(
        states=(optuna.trial.TrialState.COMPLETE,)
    )
    assert sorted(map(trial_index_of, done)) == list(range(12))


@pytest.fixture
def statements():
    """Every statement of any database, as it is carried out."""
    carried_out = []

    def note(*call):
        carried_out.append(call[2])

    event.listen(Engine, "before_cursor_execute", note)
    yield carried_out
    event.remove(Engine, "before_cursor_execute", note)


@pytest.fixture
def commits():
    """Every transaction of SQLite that wrote, but for the lease's: a commit of what was only read is none."""
    # SQLite tells each connection's statements, BEGIN and COMMIT among them.
    written, of_the_test = [], threading.get_ident()

    def note(text):
        # Another thread renews the lease by the clock.
        if text == COMMIT and threading.get_ident() == of_the_test:
            written.append(text)

    def trace(connection, record):
        connection.set_trace_callback(note)

    event.listen(Engine, "connect", trace)
    yield written
    event.remove(Engine, "connect", trace)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sampler", "most"),
    [
        ("frontier", 4),
        ("tpe", 4),
        pytest.param("random", 4, marks=pytest.mark.soak),
        pytest.param("qmc", 5, marks=pytest.mark.soak),
    ],
)
def test_at_most_four_transactions_store_a_trial(study, commits, statements, sampler, most):
    """Optuna's QMC has one more, of the study: its place in the sequence.

    Each statement is a round trip to a server: 29 to a trial, where one for each parameter and attribute made 52.
    """
    counts = []
    stated = []
    numbers = []

    def does(spec):
        counts.append(len(commits))
        stated.append(len(statements))
        numbers.append(spec.number)

    run(study(Answers(does), "search.trials=12", f"sampler={sampler}"))
    assert numbers == [*range(len(numbers))]
    # Between the beginnings of two trials.
    taken = np.diff(counts)
    assert len(taken) >= 11
    assert max(taken) <= most
    if sampler == "frontier":
        taken = np.diff(stated)
        assert statistics.median(taken) <= 30
        # A replicate asks and stores more.
        assert max(taken) <= 36, "a trial on a fresh seed"


def test_only_the_owner_sends_to_mlflow(study, tmp_path):
    frozen = study(Answers()).frozen_settings
    # The storage has the owner's arguments: a worker goes by them.
    begun = open_study(
        "replay", "sqlite:///bstune.db", "steps", frozen, tmp_path, arguments=OPTIONS[:3]
    )
    assert compose_joined(begun, ["mlflow.enabled=true"]).options.mlflow.enabled is False


@pytest.mark.slow
def test_a_worker_runs_trials_of_a_study_that_another_process_owns(study, tmp_path, capsys):
    """The owner's third trial lasts until a worker on another device has run what was left."""
    joined = []

    def work():
        worker = study(Answers(device_kind="gpu B"), "output=elsewhere", "search.trials=6")
        joined.append(
            run_worker(worker, find_study("replay", "sqlite:///bstune.db"), Console(width=200))
        )

    thread = threading.Thread(target=work)

    def last(spec):
        # From the third trial on the worker takes what is left.
        if spec.number == 2:
            thread.start()
            mine = find_study("replay", "sqlite:///bstune.db")
            while free_indices(mine, 6) or len(running_specs(mine)) > 1:
                threading.Event().wait(0.01)

    done = run(study(Answers(last), "search.trials=6"))
    thread.join()
    assert joined == [3]
    out = capsys.readouterr().out
    # A worker on another device says whose seconds count.
    assert "joins study replay, run by " in out
    assert "its seconds are those of gpu A: trials on gpu B give steps only" in out
    searched = [one for one in done if one.replicate_of is None]
    assert sorted(one.trial_index for one in searched) == list(range(6))
    # Seconds of another device are not comparable.
    assert [one.seconds_per_step for one in searched] == [0.01, 0.01, 0.01, None, None, None]
    assert trials_of(tmp_path / "outputs" / "replay") == done


def test_trials_of_a_process_that_is_gone_are_asked_again(study, tmp_path):
    """A worker on another machine dies in a trial; the owner, which runs, gives it up."""
    asked = []

    def does(spec):
        asked.append(spec.trial_index)
        if spec.number == 1:
            other = find_study("replay", "sqlite:///bstune.db")
            # This worker is marked as ended in the midst of its trial.
            gone = Leases(other, "worker", 60)
            gone.own = replace(gone.own, ended=True)
            gone._write(gone.own)
            turn = turn_at(other, 2, gone.own.id)
            # It has asked for a trial at index 2, and never tells.
            ask(other, turn, BUDGET, replace(SPACE, high=512), RandomSampler(), stops=True)

    done = run(study(Answers(does), "search.trials=4"))
    assert asked[:4] == [0, 1, 2, 3]
    (failed,) = (one for one in done if one.status == "failed")
    assert (failed.number, failed.trial_index, failed.message) == (2, 2, CUT_SHORT)


@pytest.mark.parametrize(
    ("changes", "is_out"),
    [
        ({}, True),
        ({"status": "reached"}, False),
        # Its record ended.
        ({"wall_seconds": 4.0}, False),
        # It ended by itself.
        ({"message": "the training was stopped at step 9"}, False),
        # It went on without something, which did not end it.
        ({"message": "the noise scale is not measured: no"}, True),
    ],
)
def test_a_trial_that_ran_out_of_time_can_go_on(changes, is_out):
    spec = TrialSpec(0, 0, 64, 0.1, None, 1, max_steps=100, max_seconds=5.0)
    result = make_result(**({"status": "stopped", "steps": 9, "wall_seconds": 5.1} | changes))
    assert is_out_of_time(spec, result) == is_out
    # Without a limit no trial runs out of time.
    assert not is_out_of_time(replace(spec, max_seconds=None), result)


@pytest.mark.slow
def test_a_fresh_seed_without_time_to_reach_the_target_has_not_missed_it(study):
    """A step of the third fresh seed takes far longer: the wall time ends it."""
    clock = SimpleNamespace(now=0.0)

    class Slowing(Answers):
        is_slow = True

        def run(self, spec, folder, resumed_from):
            result = super().run(spec, folder, resumed_from)
            seconds = 10.0
            if self.is_slow and spec.replicate_of is not None and spec.max_seconds < 35.0:
                seconds = spec.max_seconds + 1.0
                result = replace(result, status="stopped", message=None)
            clock.now += seconds
            return replace(result, wall_seconds=seconds)

    options = (*AMPLE, "search.baseline=false")
    backend = Slowing()
    done = run(study(backend, *options, elapsed=lambda: clock.now))
    cut = [trial for trial in done if trial.was_cut_short]
    assert [trial.message for trial in cut] == [OUT_OF_TIME]
    assert cut[0].replicate_of is not None
    # It is asked again, on the same seed, by a command that has time for it.
    clock.now = 0.0
    backend.is_slow = False
    longer = (*options, "search.trials=5", "search.wall_seconds=300")
    again = run(study(backend, *longer, elapsed=lambda: clock.now))
    of_same_index = [trial for trial in again if trial.trial_index == cut[0].trial_index]
    assert statuses(of_same_index) == ["failed", "reached"]
    assert len({trial.seed for trial in of_same_index}) == 1


@pytest.mark.parametrize(("steps", "is_cut"), [(99, True), (100, False)])
def test_a_fresh_seed_that_ran_all_its_steps_has_missed_the_target(study, steps, is_cut):
    spec = TrialSpec(3, 10**6, 64, 0.1, None, 1, max_steps=100, max_seconds=5.0, replicate_of=0)
    result = make_result(status="stopped", steps=steps, wall_seconds=5.1, replicate_of=0)
    prepared = study(Answers())
    finished = Finished(spec, record=result)
    stored = record_to_store(prepared, finished, counts_seconds=True, revise=None)
    assert stored.was_cut_short == is_cut


# Where no trial can be continued


def without_continuation(study, *options):
    prepared = study(None, "sampler=frontier", *options)
    # As a backend whose trials leave no state.
    prepared.backend.continues = False
    return run(prepared)


# Two points that do not reach the target within a first trial's share.
HARD = ("search.trials=2", "search.baseline=false", "search.replicates=0")


@pytest.mark.slow
def test_a_backend_that_continues_nothing_is_never_asked_to(study):
    options = ("search.trials=6", "search.replicates=0", "search.baseline=false")
    continued = run(study(None, "sampler=frontier", *options, "study=continues"))
    assert {trial.resumed_from for trial in continued} != {None}
    afresh = without_continuation(study, *options, "study=afresh")
    assert {trial.resumed_from for trial in afresh} == {None}
    assert "reached" in statuses(afresh)


def test_the_most_promising_stopped_trial_is_trained_again_where_none_can_go_on(study, capsys):
    *stopped, last = without_continuation(study, *HARD)
    assert statuses(stopped) == ["stopped", "stopped"]
    # Index 2 lies behind those of the two points.
    assert (last.status, last.resumed_from, last.trial_index) == ("reached", None, 2)
    points = [(trial.batch_size, trial.lr, trial.seed) for trial in stopped]
    assert (last.batch_size, last.lr, last.seed) in points
    assert last.steps > max(trial.steps for trial in stopped)
    assert "trial 2  again from its first step  B " in capsys.readouterr().out
