import json
import os
import sys
from dataclasses import replace
from io import StringIO
from types import SimpleNamespace

import numpy as np
import pytest
import yaml
from builders import LUCKY, SizeTiming, asked_of, hand_at_budget, make_baseline, result_of
from recorded.fashion_cnn import recorded
from rich.console import Console
from toolbox import make_result, make_trial

from bstune.core.curve import CurveBand
from bstune.core.step_time_law import fit_step_time_law
from bstune.report.answer import answer
from bstune.report.lines.cautions import _other_by_own_seconds
from bstune.report.trust import trust
from bstune.result import INTERVAL_LEVEL, Gain, GainAtBudget, SearchPlan, StepTiming
from bstune.study import commands
from bstune.study.analysis.analyse import curve_of
from bstune.study.analysis.scale_out import step_times
from bstune.study.analysis.step_times import not_told_apart, own_over_timed
from bstune.study.analysis.summary import Analysis, summarize, winner_result
from bstune.study.commands import best_yaml, train_command
from bstune.study.planning.replicates import Winner
from bstune.study.report import _next_in_python, has_figures_of, missing_in_trials
from bstune.study.showing.printed import places, show, show_places
from bstune.system.files import Output
from bstune.trial.backend import Timed


@pytest.mark.parametrize(
    ("stops", "horizon", "again", "ends"),
    [
        (True, None, None, " budget.steps=100 budget.examples=1"),
        (False, None, None, ""),
        (False, 130, None, " budget.steps=130 budget.examples=1"),
        # The budget is that of its runs on fresh seeds.
        (False, 130, 150, " budget.steps=150 budget.examples=1"),
    ],
)
def test_the_command_of_a_winner_ends_with_it_or_with_its_schedule(
    tmp_path, stops, horizon, again, ends
):
    backend = SimpleNamespace(stops=stops)
    fresh = make_result(horizon=again, steps=110, seconds_per_step=0.01)
    prepared = SimpleNamespace(backend=backend, files=Output(tmp_path), options=None, goal=None)
    winner = Winner(make_result(horizon=horizon), 110.0, () if again is None else (fresh,))
    # The numbers are those of the result, which knows more of their errors.
    told = winner_result(winner, scatter=0.1)
    written = best_yaml(
        {"time": winner},
        SimpleNamespace(best_by_time=told, best_by_steps=None),
        # A rate that the study itself was given makes way for the winner's.
        ["+workload=mine", "trial.lr=9", "storage=${oc.env:STUDIES}"],
        prepared,
    )
    row = yaml.safe_load(written)["best_by_time"]
    own = f"trial.batch_size=32 trial.lr=0.1 trial.seed=1{ends}"
    assert (
        row["command"]
        == f"{sys.executable} -m bstune +workload=mine 'storage=${{oc.env:STUDIES}}' {own}"
    )
    assert written.startswith("# The commands read the environment: first set STUDIES.\n")
    assert (row["number"], row["hyperparameters"], row["horizon"], row["checkpoint"]) == (
        0,
        {},
        again or horizon,
        None,
    )
    # What is expected of it, and beside that what its one run took.
    assert (row["steps"], row["time_to_target"]) == pytest.approx((110.0, 1.1))
    assert row["single_run"] == {"steps": 100, "time_to_target": 1.0}
    assert row["confirmed"] == told.model_dump(mode="json")["confirmed"]


@pytest.mark.parametrize(
    # Neither the seconds may scatter, nor the process have waited for a processor, nor the runs of
    # the winner have taken other seconds than those that were timed.
    ("error", "waited", "own", "is_quiet"),
    [
        (0.02, 0.0, None, True),
        (0.3, 0.0, None, False),
        (0.02, 0.5, None, False),
        (0.02, 0.0, 1.4, True),
        (0.02, 0.0, 1.9, False),
        (0.02, 0.0, 0.5, False),
    ],
)
def test_timings_that_are_not_to_be_trusted_are_said(error, waited, own, is_quiet):
    timing = StepTiming(
        seconds_of="lean",
        surveyed=True,
        relative_error=error,
        waited=waited,
        threads=1,
        own_over_timed=own,
    )
    (noise,) = [one for one in trust(result_of([], timing=timing)) if one.name == "noise"]
    assert noise.good == is_quiet
    assert f"{error:.0%}" in noise.text
    assert ("busy" in noise.text) == (waited > 0.0)


@pytest.mark.parametrize(
    # The runs' own seconds of a step, where 0.01 were timed, and what else they have.
    ("of_trial", "of_runs", "changes", "ratio"),
    [
        (0.02, (), {}, 2.0),
        (0.02, (0.01, 0.04), {}, 2.0),
        (0.02, (None, 0.04), {}, 4.0),
        (None, (), {}, None),
        # The Trainer's steps are not compared with the lean loop's, nor those beside other trials.
        (0.02, (0.01,), {"training_loop": "Lightning's: 2 optimizers"}, None),
        (0.02, (0.01,), {"ran_alone": False}, None),
    ],
)
def test_a_winners_own_seconds_are_held_against_those_that_were_timed(
    of_trial, of_runs, changes, ratio
):
    first = replace(
        make_trial(0), seconds_per_step=0.01, measured_seconds_per_step=of_trial, **changes
    )
    runs = [replace(first, measured_seconds_per_step=seconds) for seconds in of_runs]
    winner = Winner(first, 100.0, tuple(runs))
    assert own_over_timed(winner, "lean") == (ratio and pytest.approx(ratio))


@pytest.mark.parametrize(
    ("own", "surveyed", "is_said"),
    [
        (1.7, False, True),
        (5.4, False, True),
        (2.6, False, False),
        (None, False, False),
        # A survey timed a few steps of all sizes side by side.
        (1.7, True, False),
    ],
)
def test_another_gain_by_the_runs_own_seconds_is_said(own, surveyed, is_said):
    timing = StepTiming(
        seconds_of="lean", surveyed=surveyed, relative_error=0.02, waited=0.0, threads=None
    )
    gain = Gain(
        ratio=2.7,
        low=1.4,
        high=5.0,
        level=0.9,
        merit="time",
        seeds=3,
        at_least=False,
        by_own_seconds=own,
    )
    result = SimpleNamespace(gain=gain, timing=timing)
    said = list(_other_by_own_seconds(result))
    assert len(said) == is_said
    assert not is_said or f"{own} times" in said[0]


@pytest.mark.parametrize("apart", [(), (64, 1024)])
def test_batch_sizes_that_the_timing_does_not_tell_from_the_winner_are_listed(apart):
    """A machine so noisy is no error: the result says that its winner is not confirmed."""
    first = make_trial(0)
    fresh = [replace(first, number=i, trial_index=0, seed=i) for i in (1, 2, 3)]
    best = {"time": Winner(first, 100.0, tuple(fresh))}
    timing = StepTiming(
        seconds_of="lean", surveyed=True, relative_error=0.3, waited=0.0, threads=1, not_told_apart=apart
    )  # fmt: skip
    analysis = Analysis(critical=None, best=best, timing=timing)
    result = summarize([first, *fresh], asked_of(), analysis)
    assert result.confirmed == (apart == ())
    assert json.loads(result.to_json())["confirmed"] == result.confirmed
    (noise,) = [one for one in trust(result) if one.name == "noise"]
    line = "a step's seconds are known to 30%, too little to tell USE from batch size 64 and 1024"
    assert (line in noise.text) == (apart != ())
    assert not noise.good


@pytest.mark.parametrize(
    ("spread", "seconds", "told"),
    [
        # Seconds of a step that hardly scatter tell 10% apart; those of a busy machine do not.
        (0.01, 1.1, True),
        (0.8, 1.1, False),
        (0.8, 9.0, True),
    ],
)
def test_what_the_timing_does_not_tell_from_the_winner(spread, seconds, told):
    sizes = (16, 32, 64, 128, 256)
    law = fit_step_time_law(
        [SizeTiming(size, 0.01, 0.01 / (1 + spread), 0.01 * (1 + spread), 4) for size in sizes]
    )

    def confirmed_at(batch_size, seconds):
        trial = make_trial(batch_size, batch_size, 0.1)
        runs = [replace(trial, number=i, steps=100, seconds_per_step=seconds) for i in range(3)]
        return Winner(trial, 100.0, tuple(runs))

    winner = confirmed_at(32, 0.01)
    other = confirmed_at(256, 0.01 * seconds)
    assert not_told_apart(law, winner, [winner, other]) == (() if told else (256,))


def test_the_curves_seconds_per_step_are_the_trials_where_the_objective_is_steps():
    trials, posterior, _ = recorded()
    trials = sorted(trials, key=lambda trial: trial.batch_size)
    sizes = [float(trial.batch_size) for trial in trials]
    # Costs are in examples.
    assert posterior.tau(np.array(sizes)) == pytest.approx(sizes)
    band = CurveBand(*[np.array(sizes)] * 4)
    curve = curve_of(posterior, band, step_times(posterior, 1024, None))
    assert curve.seconds_per_step == pytest.approx(
        [trial.seconds_per_step for trial in trials], rel=0.1
    )
    assert list(curve.batch_size) == sizes
    assert curve_of(posterior, band, None).seconds_per_step is None
    untimed = replace(posterior, observations=())
    assert step_times(untimed, 1024, None) is None
    assert step_times(untimed, 1024, lambda size: 0.5)(np.array([64.0])) == 0.5


def test_what_trials_went_on_without_is_said_once():
    eagerly = "trained eagerly, as compile=default failed: E"
    noise = "the noise scale is not measured: 5 examples of 9"
    trials = [make_trial(i, message=eagerly) for i in range(2)]
    trials += [
        make_trial(2, status="stopped", message=noise),
        # It differs in numbers alone.
        make_trial(5, message="the noise scale is not measured: 17 examples of 34"),
        # What ended a trial says at which step.
        make_trial(6, status="stopped", message="the training was stopped at step 7: enough"),
        make_trial(7, status="stopped", message="the training was stopped at step 9: enough"),
        # A failed trial's message is its error.
        make_trial(3, status="failed", message="ValueError"),
    ]
    assert missing_in_trials([*trials, make_trial(4)]) == [
        # Why was told when it came to lack, and stands beside each trial on the page.
        "trained eagerly (in 2 trials)",
        "the noise scale is not measured (in 2 trials)",
        "the training was stopped at step 7: enough (in 1 trial)",
        "the training was stopped at step 9: enough (in 1 trial)",
    ]


def test_paths_are_printed_unbroken_and_as_they_are_typed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    name = "a study [x] with a " + "long" * 40 + " name"
    files = Output(tmp_path / "outputs" / name)
    for path in (files.curve, files.report, tmp_path / "outputs" / "other" / "curve.json"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    train = f"bstune 'study={name}'"
    out = StringIO()
    summary = result_of([], workload="[red]digits[/red]", train=train)
    console = Console(file=out, width=80)
    show(answer(summary), console, [("NEXT", (train,))])
    show_places(places(files, ("MLflow", ("mlflow ui", "http://127.0.0.1:5000"))), [], console)
    assert out.getvalue().splitlines()[1:] == [
        "study s · [red]digits[/red] · val/error <= 0.1 · 0 configurations",
        "",
        "USE       nothing yet: no trial has run, so val/error <= 0.1 was not reached",
        f"NEXT      {train}",
        f"page      'outputs/{name}/report.html'",
        "compare   bstune compare outputs/*",
        "MLflow    mlflow ui",
        "          http://127.0.0.1:5000",
    ]


def test_studies_beside_much_else_are_compared_by_their_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("mine", "other", "no study"):
        (tmp_path / name).mkdir()
    for name in ("mine", "other"):
        (tmp_path / name / "curve.json").touch()
    lines = dict(places(Output(tmp_path / "mine"), None))
    assert lines["compare"] == ("bstune compare mine other",)


TRAIN = [
    "+workload=mine",
    "search.trials=9",
    "study=s",
    "seed=3",
    "sampler=tpe",
    "data.root=/d",
    "storage=${oc.env:STUDIES}",
]


@pytest.mark.parametrize(
    ("lr", "stops", "own"),
    [
        # Four digits are near enough.
        (0.123456, True, "trial.lr=0.1235"),
        # Where a schedule ends with the trial, its seed has reached the target with these values.
        (0.123456, False, "trial.lr=0.123456 trial.seed=1 budget.steps=130 budget.examples=1"),
        # A rate of 1 is beyond what can be had.
        (0.99999, True, "trial.lr=0.99999"),
    ],
)
def test_the_command_that_trains_the_winner_is_short(lr, stops, own):
    backend = SimpleNamespace(stops=stops, timed=None)
    prepared = SimpleNamespace(
        backend=backend,
        space=SimpleNamespace(lr_low=0.0, lr_high=0.99999, tunables=()),
        options=None,
        goal=None,
        budget=SimpleNamespace(objective="time"),
    )
    horizon = None if stops else 130
    found = train_command(Winner(make_result(lr=lr, horizon=horizon), 110.0), TRAIN, prepared)
    kept = "+workload=mine study=s data.root=/d 'storage=${oc.env:STUDIES}'"
    assert found == f"bstune {kept} trial.batch_size=32 {own}"


@pytest.mark.parametrize(
    ("arguments", "given", "chosen", "is_said"),
    [
        ((), "auto", 1, True),
        # A command that continues the study has the number from its storage, not from the user.
        ((), 1, 1, True),
        (("threads=1",), 1, 1, False),
        # A single trial has as many by itself.
        ((), "auto", 4, False),
        ((), "auto", None, False),
    ],
)
def test_the_command_has_the_threads_that_a_survey_chose(
    monkeypatch, arguments, given, chosen, is_said
):
    monkeypatch.setattr(commands, "processors", lambda: 4)
    prepared = SimpleNamespace(
        backend=SimpleNamespace(stops=True, timed=Timed("lean", 0.0, chosen)),
        space=SimpleNamespace(lr_low=0.0, lr_high=1.0, tunables=()),
        options=SimpleNamespace(threads=given),
        goal=None,
        budget=SimpleNamespace(objective="time"),
    )
    found = train_command(Winner(make_result(), 110.0), [*TRAIN, *arguments], prepared)
    assert found.split().count(f"threads={chosen}") == is_said + len(arguments)


@pytest.mark.parametrize(
    ("tracked", "labels"),
    [
        (None, ["page"]),
        (("MLflow", ()), ["page"]),
        # Whatever a study is logged to has its own name.
        (("CSV", ("runs.csv",)), ["page", "CSV"]),
    ],
)
def test_a_trackers_view_is_named_as_the_tracker_is(tracked, labels, tmp_path):
    assert [label for label, _ in places(Output(tmp_path / "s"), tracked)] == labels


def gain_above(low):
    return Gain(
        ratio=1.2, low=low, high=1.5, level=INTERVAL_LEVEL, merit="time", seeds=3, at_least=False
    )


def test_next_names_the_arguments_of_a_study_of_python_objects():
    own = make_baseline(batch_size=LUCKY.batch_size, lr=LUCKY.lr)
    limited = SearchPlan(trials=32, replicates=3, limit="search.wall_seconds")
    alone = result_of([LUCKY], baseline=own, search=limited, in_python=True)
    ((_, (advice, _)),) = _next_in_python(SimpleNamespace(recipe=object()), alone, None)
    assert " wall_seconds;" in advice
    assert "search." not in advice


@pytest.mark.parametrize("arguments", [None, ["+workload=mine"]])
@pytest.mark.parametrize(
    ("gain", "is_kept"), [(gain_above(0.9), True), (gain_above(1.1), False), (None, False)]
)
def test_next_keeps_the_users_configuration_where_gain_does(gain, is_kept, arguments):
    """In Python and on the command line, to a target and within a budget."""
    command = None if arguments is None else "bstune +workload=mine trial.batch_size=64"
    found = result_of([make_trial(0)], baseline=make_baseline(), gain=gain, train=command)
    at_budget = hand_at_budget()
    if gain is not None:
        difference = GainAtBudget(
            difference=0.12, low=gain.low - 1.0, high=0.5, level=0.9, seeds=3, share=0.4
        )
        at_budget = hand_at_budget(gain=difference)
    else:
        at_budget = hand_at_budget(baseline=None, gain=None)
    within_budget = result_of([make_trial(0)], objective="loss", at_budget=at_budget, train=command)
    prepared = SimpleNamespace(recipe=object())
    for result in (found, within_budget):
        lines = dict([*answer(result).actions, *_next_in_python(prepared, result, arguments)])
        gain_text = " ".join(dict(answer(result).lines)["GAIN"])
        assert ("keep what you have" in gain_text) == is_kept
        assert lines["NEXT"][0].startswith("keep your configuration") == is_kept
        # USE is named, and how to train it all the same.
        assert lines["NEXT"][-1] == (command or "result.train()")


def test_figures_are_drawn_again_only_for_another_result(tmp_path):
    files = Output(tmp_path)
    result = SimpleNamespace(to_json=lambda: "{}")
    assert not has_figures_of(result, files)
    files.curve.write_text("{}")
    # A command was killed before it drew.
    assert not has_figures_of(result, files)
    for figure in (files.figure, files.vector_figure):
        figure.write_text("drawn")
    assert has_figures_of(result, files)
    assert not has_figures_of(SimpleNamespace(to_json=lambda: "{1}"), files)
    # They are of the result before.
    later = files.figure.stat().st_mtime_ns + 1
    os.utime(files.curve, ns=(later, later))
    assert not has_figures_of(result, files)
