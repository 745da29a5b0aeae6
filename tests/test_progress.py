"""What is said of a study while it runs: a line a trial, a live line on a terminal, and how long it takes yet."""

from dataclasses import replace

import pytest
from rich.console import Console
from toolbox import make_spec, make_trial

from bstune.core.records import Target
from bstune.study.showing.progress import MINUTE, Progress, ending, trial_line
from bstune.trial.processes.reached import Reached


def last_step(batch_size):
    """The step at which a budget of 64,000 examples is spent."""
    return round(64_000 / batch_size)


def test_a_line_a_trial_in_the_order_in_which_they_end(capsys):
    target = Target("val/error", 0.1, "min")
    trials = [make_trial(number) for number in range(5)]
    trials[1] = replace(trials[1], resumed_from=0)
    trials[3] = replace(trials[3], replicate_of=0)
    progress = Progress(5, target, last_step, Console(width=200))
    # The first call has a trial that was done before.
    for done in ((0,), (0, 2), (0, 2), (0, 1, 2, 4), (0, 1, 2, 3, 4)):
        progress.show([trials[number] for number in done], 60.0 * len(done))
    lines = capsys.readouterr().out.splitlines()
    expected = [
        ("trial 2", "configuration 2 of 5", "2.00 min to go", True),
        # Of what ended together the last one says what is left.
        ("trial 1", "continues 0", "60.0 ms", False),
        ("trial 4", "configuration 3 of 5", "4.00 min to go", True),
        ("trial 3", "repeats 0 on a fresh seed", "5.00 min to go", True),
    ]
    for line, (name, place, end, is_last) in zip(lines, expected, strict=True):
        assert line.split("  ")[:2] == [name, place]
        assert line.endswith(end) == is_last


def test_a_point_that_failed_and_is_asked_again_is_the_same_configuration(capsys):
    target = Target("val/error", 0.1, "min")
    trials = [make_trial(number) for number in range(3)]
    trials[1] = replace(trials[1], status="failed")
    progress = Progress(5, target, last_step, Console(width=200))
    for count in range(4):
        progress.show(trials[:count])
    lines = capsys.readouterr().out.splitlines()
    places = [line.split("  ")[1] for line in lines]
    assert places == ["configuration 1 of 5", "configuration 2 of 5", "configuration 2 of 5"]


def test_a_line_comes_from_time_to_time_while_a_trial_trains():
    progress = Progress(5, Target("val/error", 0.1, "min"), last_step, Console(width=200))
    progress.show([])

    def seconds_with_a_line(start, until):
        """Return the whole seconds, which have no rounding, at which there is a line."""
        # As if the last line had come then.
        progress._last_line_at = start
        said = []
        for second in range(until):
            if progress.waiting_line(start + second) is not None:
                said.append(second)
        return said

    # More often before the first trial has ended.
    assert seconds_with_a_line(1000.0, 40) == [10, 20, 30]
    progress.show([make_trial(0)])
    assert seconds_with_a_line(2000.0, 200) == [MINUTE, 2 * MINUTE, 3 * MINUTE]


@pytest.mark.parametrize(
    ("begun", "reached", "texts"),
    [
        ([make_spec(64)], Reached(), ["trial 3", "B 64, lr 0.1; up to 1000 steps"]),
        ([make_spec(64, max_steps=10, max_seconds=90.0)], Reached(), ["up to 10 steps or 90.0 s"]),
        ([make_spec(64)], Reached(evaluation=(20, 0.25)), ["val/error 0.25 after 20 steps"]),
        ([make_spec(64)], Reached(evaluation=(20, None)), ["val/error nan after 20 steps"]),
        ([make_spec(64)], Reached(steps=57), ["lr 0.1; step 57 of up to 1000 steps)"]),
        (
            [make_spec(64)],
            Reached(57, (20, 0.25)),
            ["step 57 of up to 1000 steps; val/error 0.25 after 20 steps"],
        ),
        ([make_spec(64), make_spec(32, number=4)], Reached(30), ["training trials 3, 4"]),
        # Another process trains.
        ([], Reached(), ["training elsewhere"]),
    ],
)
def test_the_line_says_what_is_known_of_the_trial_that_trains(begun, reached, texts):
    progress = Progress(5, Target("val/error", 0.1, "min"), last_step, Console(width=200))
    progress.show([])
    for spec in begun:
        progress.begin(spec, lambda: reached)
    line = progress.waiting_line(progress._last_line_at + 20.0)
    for text in [*texts, "for 20.0 s", "0 of 5"]:
        assert text in line
    # A trial that has ended trains no more.
    progress.show([make_trial(spec.number) for spec in begun])
    assert "elsewhere" in progress.waiting_line(progress._last_line_at + 70.0)


def test_a_dumb_terminal_has_lines_in_place_of_a_live_one(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    console = Console(width=200, force_terminal=True)
    assert Progress(5, Target("val/error", 0.1, "min"), last_step, console).live is None


def test_one_live_line_on_a_terminal(capsys):
    console = Console(width=100, force_terminal=True)
    trials = [
        make_trial(0, status="stopped"),
        make_trial(1, 256, steps=80),
        make_trial(2, 64, tau=None),
    ]
    progress = Progress(5, Target("val/error", 0.1, "min"), last_step, console)
    with progress.live:
        for count in range(4):
            progress.show(trials[:count])
            assert len(console.render_lines(progress.live.get_renderable())) == 1
        assert progress.live.tasks[0].completed == 3
        text = progress.live.tasks[0].description
        progress.show(trials, 90.0)
        assert progress.live.tasks[0].description == f"about 90.0 s to go; {text}"
    assert (
        text == "best 800 ms at B 256, lr 0.1; trial 2: B 64, lr 0.1, reached at val/error 0.0995"
    )
    capsys.readouterr()


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (
            {},
            "trial 3  configuration 4 of 5  B 64  lr 0.1  reached at val/error 0.0995 after 400 steps, about 4.00 s",
        ),
        # Evaluated every 100 steps, it may have met the target at any of the last 100.
        (
            {"steps_low": 300},
            "trial 3  configuration 4 of 5  B 64  lr 0.1  reached at val/error 0.0995 "
            "after 300 to 400 steps, about 4.00 s",
        ),
        (
            {"steps_low": 300, "horizon": 400},
            "trial 3  configuration 4 of 5  B 64  lr 0.1  reached at val/error 0.0995 "
            "after 400 steps of 400, about 4.00 s",
        ),
        (
            {"status": "stopped", "resumed_from": 1, "horizon": 500},
            "trial 3  continues 1  B 64  lr 0.1  stopped at val/error 0.0995 after 400 steps of 500",
        ),
        (
            {
                "status": "diverged",
                "message": "the loss is not finite",
                "hyperparameters": {"momentum": 0.9},
            },
            "trial 3  configuration 4 of 5  B 64  lr 0.1  momentum 0.9  diverged at val/error 0.0995 after 400 steps",
        ),
        (
            {"status": "failed", "history": (), "steps": 7},
            "trial 3  configuration 4 of 5  B 64  lr 0.1  failed after 7 steps",
        ),
        # How far a process came that has died is not known.
        (
            {"status": "failed", "history": (), "steps": 0},
            "trial 3  configuration 4 of 5  B 64  lr 0.1  failed",
        ),
        (
            {"status": "out of memory", "history": ()},
            "trial 3  configuration 4 of 5  B 64  lr 0.1  out of memory after 400 steps",
        ),
    ],
)
def test_a_trial_as_a_line(changes, line):
    target = Target("val/error", 0.1, "min")
    assert trial_line(make_trial(3, **changes), target, last_step, "configuration 4 of 5") == line


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        # The budget of batch size 64 is 1,000 steps.
        ({"status": "stopped", "steps": 999}, "stopped"),
        ({"status": "stopped", "steps": 1000}, "spent its budget"),
        ({"status": "stopped", "steps": 1000, "horizon": 1000}, "spent its budget"),
        ({"status": "stopped", "steps": 227, "horizon": 1000}, "stopped"),
        ({"status": "stopped", "steps": 10, "horizon": 10}, "ended with its schedule"),
        ({"status": "reached", "steps": 1000}, "reached"),
        ({"status": "diverged", "steps": 1000}, "diverged"),
    ],
)
def test_a_trial_that_ran_to_its_end_was_not_stopped(changes, words):
    assert ending(make_trial(3, 64, **changes), last_step) == words


# A budget's trial is judged by its best value, not by its last.
@pytest.mark.parametrize(
    ("history", "seen"),
    [
        (((10, 0.2), (20, 0.1), (30, 0.15)), "val/error 0.15, best 0.1, after"),
        (((10, 0.2), (20, 0.1)), "val/error 0.1 after"),
    ],
)
def test_a_trial_of_a_budget_names_its_best_value(history, seen):
    trial = make_trial(3, status="stopped", history=history)
    assert seen in trial_line(trial, Target("val/error", 0.0, "min").never_met, last_step)


def test_what_ended_trials_is_said_once_and_why_they_failed_each_time(capsys):
    ended, failed = "the training was stopped at step 9: it had enough", "ValueError: no"
    trials = [
        make_trial(0, status="stopped", message=ended),
        make_trial(1, status="failed", message=failed, history=()),
        make_trial(2, status="stopped", message=ended),
        make_trial(3, status="failed", message=failed, history=()),
        # A warning has told it, and a note of the answer counts it.
        make_trial(4, message="the noise scale is not measured: no"),
    ]
    progress = Progress(5, Target("val/error", 0.1, "min"), last_step, Console(width=200))
    for count in range(6):
        progress.show(trials[:count])
    # What ended the trial, why it failed, and the metric.
    lines = capsys.readouterr().out.splitlines()
    texts = (ended, failed, "val/error 0.0995")
    found = [tuple(text in line for text in texts) for line in lines]
    assert found == [
        (True, False, True),
        (False, True, False),
        (False, False, True),
        (False, True, False),
        (False, False, True),
    ]
    assert "noise scale" not in lines[-1]
