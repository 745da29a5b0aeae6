"""What a study answers, in words: of whole studies, of what is not known, and of what went wrong."""

from dataclasses import replace

import pytest
from builders import (
    CONFIRMED,
    LUCKY,
    STEADY,
    changed,
    fresh,
    hand_at_budget,
    hand_critical,
    make_baseline,
    make_growth,
    make_law,
    make_noise_scale,
    make_plan,
    result_of,
)
from toolbox import make_trial

from bstune.core.records import STATUSES, Budget
from bstune.report.answer import answer
from bstune.report.block import SHOWN_CAUTIONS, console_rows
from bstune.report.compared_study import compared_study
from bstune.report.lines.cautions import warnings
from bstune.report.lines.learning_rate import fitting_rules_text
from bstune.report.lines.next_steps import how_to_narrow, on_limits
from bstune.report.lines.unreached import NOTHING_REACHED, more_of_limit
from bstune.report.trust import trust, trust_in_timing
from bstune.report.words import critical_text, expected_text, trials_text
from bstune.result import (
    AsGood,
    Exponent,
    Gain,
    NextTrial,
    NotRunAgain,
    Reaching,
    SearchPlan,
    SeedScatter,
    StepTiming,
    UntoldOthers,
)

# So many trials and fresh seeds were asked for, and no limit ended them.
SEARCH = SearchPlan(trials=32, replicates=3, limit=None)


# What a step's seconds are known to, as a share of them.
def timing(error, waited=0.0):
    return StepTiming(
        seconds_of="lean", surveyed=True, relative_error=error, waited=waited, threads=1
    )


def texts(summary, label):
    found = answer(summary)
    return dict([*found.lines, *found.details, *found.actions]).get(label, ())


# A study with all that an answer can have: each test changes one part of it.
WHOLE = result_of(
    CONFIRMED,
    critical=hand_critical(67.0, 41.0, 110.0, 5, 1114),
    stop_reason="the plan is done: search.trials=32",
    lr_exponent=make_law(),
    train="bstune +workload=digits trial.batch_size=256 trial.lr=0.4",
    timing=timing(0.4),
    as_good=AsGood(
        merit="time",
        within=0.1,
        low=180,
        middle=256,
        high=331,
        lr_low=0.31,
        lr_middle=0.4,
        lr_high=0.5123,
        # The upper end is the largest batch size that was searched: as good may go on.
        is_low_open=False,
        is_high_open=True,
    ),
    seed_scatter=SeedScatter(scatter=0.17, low=0.1, high=0.2, level=0.9),
    scale_out=(make_plan(1, 1.0), make_plan(2, 0.62), make_plan(4, 0.39), make_plan(8, 0.2)),
)


def test_a_whole_study_reads_as_six_lines():
    page = [("page", ("outputs/digits/report.html",))]
    assert console_rows(answer(WHOLE), page, 80) == [
        # One test pins the whole block; the others look at a line each.
        "study s · digits · val/error <= 0.1 · NVIDIA H200 · 3 configurations, 6 fresh",
        "seeds",
        "",
        "USE       batch size 256, learning rate 0.4: 4.30 s, 430 steps (3 of 3 fresh",
        "          seeds reached it; 90%: 3.91 to 4.5 s, 391 to 450 steps)",
        "AS GOOD   batch sizes 180 to 331, predicted within 10% of the least time;",
        "          learning rate 0.31 at 180, 0.4 at 256, 0.512 at 331; larger ones are",
        "          not known",
        "DEVICES   up to 2 pay (each gives at least half): predicted 1.24 times as fast",
        "          on 2 (batch size 2 in all), only 1.56 times on 4, communication not",
        "          counted; critical batch size 67 (90%: 41 to 110)",
        "CAUTION   timings are noisy: a step's seconds are known to 40%: on a quiet",
        "          machine, hardware.refresh=true times them anew",
        "NEXT      to train with USE:",
        "          bstune +workload=digits trial.batch_size=256 trial.lr=0.4",
        "page      outputs/digits/report.html",
    ]
    assert answer(WHOLE).headline == "digits: use B = 256; critical batch size 67 (41 to 110)"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {},
            # The interval lies below 0: B_crit rises as the error falls.
            "rises as the target gets harder: as val/error^-4.3 (90%: -5.0 to -3.5) from 2.6 to 2",
        ),
        # The interval holds 0: no direction is sure.
        (
            {"high": 0.1},
            (
                "shows no sure change as the target gets harder: as val/error^-4.3 (90%: -5.0 to "
                "0.1) from 2.6"
            ),
        ),
        # The interval lies above 0.
        (
            {"low": 0.4, "exponent": 0.5, "high": 0.7},
            "falls as the target gets harder: as val/error^0.5 (90%: 0.4 to 0",
        ),
        # With an ideal value of 1 the error is counted from there.
        (
            {"ideal": 1.0},
            (
                "rises as the target gets harder: as |val/error - 1|^-4.3 (90%: -5.0 to -3.5) from "
                "2.6 to 2"
            ),
        ),
    ],
)
def test_how_the_critical_batch_size_grows_with_the_target(changes, expected):
    found = list(texts(changed(WHOLE, over_target_growth=make_growth(**changes)), "CRITICAL"))
    assert found[2].startswith(expected)


def test_batch_sizes_are_said_in_tokens_where_an_example_has_some():
    found = changed(WHOLE, tokens=64)
    # 256 x 64 tokens.
    assert texts(found, "USE")[0].startswith("batch size 256 (16,384 tokens), learning rate 0.4: ")
    # 67 x 64 = 4288, in two digits.
    assert texts(found, "CRITICAL")[0] == "batch size 67 (90%: 41 to 110), 4300 tokens"
    # An end in tokens stands only beside a value.
    assert texts(changed(found, critical_batch_size=hand_critical(None, 450.0, None)), "CRITICAL")[
        0
    ].endswith("above 450)")


NARROWER = (
    NextTrial(batch_size=8, lr=0.011, steps=2310.0, seconds=12.3),
    NextTrial(batch_size=4096, lr=0.5, steps=81.0, seconds=None),
)


@pytest.mark.parametrize(
    ("critical", "text", "regimes"),
    [
        (
            # 300/9 = 33 and 9 x 300 = 2700 lie within the sizes 16 to 4096.
            hand_critical(300.0, 190.0, 480.0),
            "300 (90%: 190 to 480)",
            "below 33 twice the batch halves the steps; above 2700 it gains nothing",
        ),
        # Nothing is claimed of what lies outside of the batch sizes that reached the target.
        (
            hand_critical(300.0, 190.0, None, 64, 512),
            "300 (90%: above 190)",
            (
                "sizes 64 to 512 do not show where twice the batch halves the steps or where it "
                "gains nothing"
            ),
        ),
        (
            hand_critical(300.0, None, 480.0, 8, 512),
            "300 (90%: below 480)",
            (
                "below 33 twice the batch halves the steps; sizes 8 to 512 do not show where it "
                "gains nothing"
            ),
        ),
        # 2700 lies within, 33 does not.
        (
            hand_critical(300.0, 190.0, 480.0, 64, 8192),
            "300 (90%: 190 to 480)",
            (
                "above 2700 a larger batch gains nothing; sizes 64 to 8192 do not show where it "
                "halves the steps"
            ),
        ),
        # An open interval says what is known, without a value.
        (hand_critical(None, 450.0, None), "undetermined (90%: above 450)", None),
        (hand_critical(None, None, None), "undetermined (90% interval open at both ends)", None),
    ],
)
def test_the_critical_batch_size_and_its_regimes(critical, text, regimes):
    summary = result_of([LUCKY, STEADY], critical=critical)
    assert critical_text(summary.critical_batch_size) == text
    expected = [f"batch size {text}"] + [] * (regimes is None)
    assert list(texts(summary, "CRITICAL")) == expected + ([] if regimes is None else [regimes])
    found = answer(summary).headline
    assert ("critical batch size 300 (" in found) == (critical.value is not None)


# A point has no slope.
def test_one_batch_size_tells_nothing_of_a_curve():
    summary = result_of([LUCKY], critical=hand_critical(None, None, None, 64, 64))
    assert texts(summary, "CRITICAL") == ("not known, as batch size 64 alone reached the target",)
    assert not {"range", "coverage"} & {one.name for one in trust(summary)}


def test_what_else_is_known_of_the_critical_batch_size():
    # A small-batch term, with an interval of its own.
    critical = hand_critical(300.0, None, 480.0, b_opt=40.0, b_opt_low=30.0, b_opt_high=55.0)
    known = result_of([LUCKY], critical=critical, noise_scale=make_noise_scale(99.4))
    assert texts(known, "CRITICAL")[2:] == (
        "fewest examples at batch size 40 (90%: 30 to 55); smaller batches need more of them",
        "gradient noise scale 99 (90%: 91 to 110), a hint at it",
    )
    undetermined = changed(known, noise_scale=make_noise_scale(None))
    # A noise scale that is not determined is no hint.
    assert len(texts(undetermined, "CRITICAL")) == 3


CENSORED = {"status": "stopped", "steps": 800}


@pytest.mark.parametrize(
    ("runs", "text", "warning"),
    [
        # No fresh seed has run.
        ([], "4.00 s, 400 steps (predicted, not run again on fresh seeds)", None),
        (
            [fresh(3), fresh(4), fresh(5, 500)],
            "4.40 s, 440 steps (3 of 3 fresh seeds reached it; 90%: 3.91 to 5 s, 391 to 500 steps)",
            None,
        ),
        # The one that was stopped leaves no upper end.
        (
            [fresh(3), fresh(4, 460), fresh(5, **CENSORED)],
            (
                "4.60 s, 460 steps (2 of 3 fresh seeds reached it; 90%: 3.91 s and more, 391 steps "
                "and more)"
            ),
            "only 2 of 3 fresh seeds reached the target at batch size 64, learning rate 0.1",
        ),
        # One of three is no median.
        (
            [fresh(3), fresh(4, **CENSORED), fresh(5, **CENSORED)],
            (
                "not known: only 1 of 3 fresh seeds reached the target (3.91 s and more, 391 steps "
                "and more)"
            ),
            "only 1 of 3 fresh seeds reached the target at batch size 64, learning rate 0.1",
        ),
        # Nothing reached: not even a lower end.
        (
            [fresh(3, 8, status="diverged")],
            "not known: 0 of 1 fresh seed reached the target",
            "only 0 of 1 fresh seed reached the target at batch size 64, learning rate 0.1; "
            "1 diverged",
        ),
    ],
)
def test_a_winner_is_shown_by_its_fresh_seeds(runs, text, warning):
    summary = result_of([LUCKY, *runs])
    assert expected_text(summary.best_by_time) == text
    assert texts(summary, "USE") == (f"batch size 64, learning rate 0.1: {text}",)
    assert (warning in texts(summary, "CAUTION")) == (warning is not None)
    seeds = next(one for one in trust(summary) if one.name == "seeds")
    # No fresh run at all is no good sign either.
    assert seeds.good == (bool(runs) and warning is None)


def test_hyperparameters_horizon_and_test_metrics_stand_with_the_winner():
    trial = make_trial(0, 64, hyperparameters={"momentum": 0.9}, horizon=500)
    tested = result_of([trial], test={"best_by_time": {"test/error": 0.1012}})
    point = "batch size 64, learning rate 0.1, momentum 0.9, a schedule of 500 steps: "
    assert texts(tested, "USE")[0].startswith(point)
    assert texts(tested, "TEST")[0].startswith("test/error 0.1012 of one run")


def test_a_rate_that_was_set_in_the_optimizer_is_said_where_it_belongs():
    of_search = changed(WHOLE, overrides_lr=True)
    of_budget = changed(WHOLE, objective="loss", at_budget=hand_at_budget(), overrides_lr=True)
    # Without such a rate the point stands alone.
    assert len(texts(WHOLE, "USE")) == 1
    assert "write 0.4 in configure_optimizers" in texts(of_search, "USE")[1]
    assert "write 0.1 in configure_optimizers" in texts(of_budget, "USE")[1]


# A small chance is a caution, too.
@pytest.mark.parametrize(("chance", "cautions"), [(0.62, 1), (0.93, 0)])
def test_what_further_seeds_reach_stands_beside_what_three_did(chance, cautions):
    shown = result_of(CONFIRMED)
    reaching = Reaching(chance=chance, best_chance=0.97, longest=900)
    winner = shown.best_by_time.model_copy(update={"reaching": reaching, "horizon": 500})
    shown = shown.model_copy(update={"best_by_time": winner})
    assert f"{chance:.0%}" in texts(shown, "USE")[0]
    warnings = [text for text in texts(shown, "CAUTION") if f"{chance:.0%}" in text]
    assert len(warnings) == cautions


def test_test_metrics_of_the_other_winner_are_not_shown():
    # The metrics are of the winner by steps, and the answer names the one by time.
    tested = result_of(CONFIRMED, test={"best_by_steps": {"test/error": 0.1012}})
    assert texts(tested, "TEST") == ()


def test_a_study_for_steps_says_which_point_is_the_fastest():
    # USE is the point of the fewest steps, and another one is faster.
    summary = result_of(CONFIRMED, use="best_by_steps")
    assert texts(summary, "USE")[0].startswith("batch size 4096, learning rate 0.8: ")
    assert texts(summary, "FASTEST") == (
        "4.30 s at batch size 256, learning rate 0.4 (3 of 3 fresh seeds)",
    )
    assert texts(summary, "FEWEST") == ()


def test_another_point_is_named_only_where_it_takes_less():
    assert len(texts(WHOLE, "FEWEST")) == 1
    # With 500 steps it takes more than the point to use.
    more = changed(WHOLE, best_by_steps=changed(WHOLE.best_by_steps, steps=500.0))
    assert texts(more, "FEWEST") == ()


# It fell from 0.5 to 0.2, the last step included.
STOPPED = make_trial(0, 64, status="stopped", steps=100, history=((10, 0.5), (100, 0.2)))
ONCE = make_trial(3, 64, status="stopped", steps=100, history=((100, 0.3),))
# The value of this one moved by less than 1% in the second half.
FLAT = make_trial(1, 64, status="stopped", steps=100, history=((10, 0.5), (50, 0.201), (100, 0.2)))


@pytest.mark.parametrize(
    ("trials", "why", "change"),
    [
        (
            [STOPPED],
            "1 of 1 stopped trial still improved when the search ended",
            # Four times the trials of the plan.
            "search.trials=128: the same command continues them",
        ),
        (
            # It used up its budget, where the first one was stopped by the search.
            [replace(STOPPED, steps=400)],
            "1 of 1 stopped trial still improved at the end of the budget",
            # Four times the budget of 400 steps; its examples are one, which is no limit.
            "a larger budget: budget.steps=1600",
        ),
        (
            [FLAT],
            "1 of 1 stopped trial no longer improved when stopped",
            # 5% above the closest value, 0.2.
            "an easier target (workload.target.value=0.21) or another learning rate (scaling.lr)",
        ),
        # All evaluations of all trials have one value.
        (
            [replace(FLAT, history=((10, 1.0), (100, 1.0))), replace(ONCE, history=((100, 1.0),))],
            "val/error is 1 in all evaluations of all trials",
            "to mend the training or the metric: nothing trains, or",
        ),
        # One evaluation shows no improvement, and none that it has ended.
        (
            [ONCE, replace(ONCE, number=1, seed=1), STOPPED],
            "2 of 3 stopped trials had fewer than two evaluations, which show no improvement",
            "evaluations more often, or search.trials=128: the same command continues them",
        ),
        (
            [replace(ONCE, steps=400)],
            "1 of 1 stopped trial had fewer than two evaluations, which show no improvement",
            "evaluations more often, or a larger budget: budget.steps=1600",
        ),
        # Those that do not tell are left out of the majority.
        (
            [ONCE, FLAT, replace(FLAT, number=2, seed=2)],
            "2 of 3 stopped trials no longer improved when stopped",
            "an easier target",
        ),
        (
            [
                make_trial(0, lr=0.3, status="diverged"),
                make_trial(1, lr=0.9, status="diverged"),
                STOPPED,
            ],
            "2 of 3 trials diverged",
            # A tenth of the lowest rate that diverged.
            "smaller learning rates: scaling.lr=0.03",
        ),
        (
            # Far below the reference's rate.
            [make_trial(0, lr=0.3, status="diverged"), make_trial(1, lr=1e-5, status="diverged")],
            "2 of 2 trials diverged, at learning rates down to 1e-05",
            "to mend the loss or the metric",
        ),
        (
            [make_trial(0, status="out of memory", history=())],
            "1 of 1 trial ran out of memory",
            "a smaller search.batch_size.high",
        ),
        (
            [make_trial(0, status="failed", history=(), message="ValueError: x")],
            "1 of 1 trial failed, the last one with ValueError: x",
            "to mend what fails; the same command goes on",
        ),
        # As many failed as were stopped: what fails is mended first.
        (
            [make_trial(0, status="failed", history=(), message="ValueError: x"), STOPPED],
            "1 of 2 trials failed, the last one with ValueError: x",
            "to mend what fails; the same command goes on",
        ),
    ],
)
def test_advice_follows_the_cause(trials, why, change):
    summary = result_of(trials, budget=Budget(400, 1))
    assert texts(summary, "CAUTION") == (why,)
    assert texts(summary, "NEXT")[0].startswith(f"try {change}")
    assert texts(summary, "USE")[0].startswith(
        f"nothing yet: val/error <= 0.1 was not reached in {len(trials)} trial"
    )
    assert texts(summary, "AS GOOD") == ()
    assert texts(summary, "DEVICES") == (f"not known: {NOTHING_REACHED}",)
    limited = changed(summary, search=changed(SEARCH, limit="search.seconds", limit_value=60.0))
    # More of a limit helps only where the search itself stopped the trials: four times as much.
    ended_by_search = "the same command continues them" in change
    assert ("search.seconds=240" in texts(limited, "NEXT")[0]) == ended_by_search


@pytest.mark.parametrize("others", [[STOPPED, replace(STOPPED, number=8, seed=8)], [make_trial(2)]])
def test_a_trial_that_failed_is_named_whatever_most_others_came_to(others):
    failed = make_trial(0, status="failed", history=(), message="ValueError: x")
    cautions = texts(result_of([failed, *others], budget=Budget(400, 1)), "CAUTION")
    assert any("ValueError: x" in caution for caution in cautions)


def test_the_closest_value_is_named_with_its_trial():
    closest = make_trial(7, 256, 0.4, status="stopped", history=((300, 0.1324),))
    found = texts(result_of([STOPPED, closest]), "USE")
    assert found[0].endswith(
        "the closest was 0.1324, at batch size 256, learning rate 0.4, after 300 steps"
    )
    assert "no trial has run" in texts(result_of([]), "USE")[0]


def test_a_search_that_ended_before_its_first_trial_says_what_ended_it():
    reason = "stopped: search.wall_seconds=120 leaves no time for another point"
    ended = result_of([], stop_reason=reason)
    assert texts(ended, "CAUTION") == (reason,)
    assert texts(ended, "NEXT") == ()


@pytest.mark.parametrize(
    ("low", "high", "text"),
    [
        # A rule fits where its exponent lies in the interval.
        (-0.1, 0.2, "a constant rate fits"),
        (0.5, 0.5, "the square root fits"),
        # Exponents 0.8 and 1 lie within.
        (0.75, 1.4, "the saturating rule and linear scaling both fit"),
        (
            0.3,
            1.1,
            "the surge rule, the square root, the saturating rule and linear scaling all fit",
        ),
        (0.55, 0.65, "between the square root and linear scaling"),
        (0.05, 0.2, "slower than the square root"),
        (1.1, 1.3, "faster than linear scaling"),
        # Below 0: larger batches need smaller rates.
        (-0.5, -0.1, "slower than a constant rate"),
    ],
)
def test_what_an_interval_says_of_the_rules(low, high, text):
    assert (
        fitting_rules_text(
            low, high, {"none": 0.0, "surge": 0.3, "sqrt": 0.5, "saturating": 0.8, "linear": 1.0}
        )
        == text
    )


# It ends at B_crit of WHOLE.
LAW = make_law(exponent=0.5, low=0.4, high=0.6, end=67.0)
# The law below the critical batch size has the same numbers, of its own kind.
BELOW = Exponent(**{name: getattr(LAW, name) for name in Exponent.model_fields})


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({}, "grew as B^0.22 (0.16 to 0.27): slower than the square root"),
        (
            {"exponent": -0.3, "low": -0.5, "high": -0.1},
            "fell as B^-0.30 (-0.50 to -0.10): slower than a constant rate",
        ),
        (
            # Two trials over one octave are too few for an exponent.
            {"identified": False, "reached": 2, "octaves": 1.0},
            "not known: 2 trials over 1.0 octaves of batch size reached the target",
        ),
        (
            {"below_b_crit": BELOW},
            (
                "grew as B^0.22 (0.16 to 0.27): slower than the square root; up to the critical "
                "batch size grew as "
                "B^0.50 (0.40 to 0.60): the square root fits"
            ),
        ),
    ],
)
def test_how_the_learning_rate_grew(changes, text):
    assert texts(result_of([LUCKY], lr_exponent=make_law(**changes)), "LR") == (text,)


@pytest.mark.parametrize(
    ("changes", "actions"),
    [
        ({}, []),
        ({"high": 200.0}, ["search.trials=64 narrows the interval"]),
        (
            {"low": None, "next_trials": NARROWER},
            ["search.trials=64 looks further (first at batch sizes 8 and 4096)"],
        ),
        (
            {"note": "the interval reaches beyond the search"},
            ["the interval reaches beyond the search"],
        ),
    ],
)
def test_what_would_tell_more(changes, actions):
    critical = changed(hand_critical(100.0, 90.0, 120.0), **changes)
    assert (
        list(dict(answer(result_of(CONFIRMED, critical=critical)).actions).get("MORE", ()))
        == actions
    )


@pytest.mark.parametrize(
    ("limit", "more_of"),
    [(None, "search.trials=64"), ("search.wall_seconds", "a larger search.wall_seconds")],
)
def test_more_is_advised_of_what_ended_the_search(limit, more_of):
    critical = changed(hand_critical(100.0, 90.0, 120.0), high=200.0)
    assert (
        how_to_narrow(critical, changed(SEARCH, limit=limit)) == f"{more_of} narrows the interval"
    )


@pytest.mark.parametrize(
    ("limits", "text"),
    [
        ({}, None),
        # Four times as much, in whole seconds.
        ({"limit": "search.seconds", "limit_value": 0.3}, "search.seconds=2"),
        ({"limit": "search.wall_seconds", "limit_value": 60.0}, "search.wall_seconds=240"),
        # Two configurations take more.
        (
            {"limit": "search.wall_seconds", "limit_value": 60.0, "least_limit": 300.0},
            "search.wall_seconds=300",
        ),
        # A result of an earlier version does not tell how much it was.
        ({"limit": "search.wall_seconds"}, "a much larger search.wall_seconds"),
    ],
)
def test_a_limit_is_advised_with_its_value(limits, text):
    assert more_of_limit(changed(SEARCH, **limits)) == text


def test_cautions_are_what_would_change_the_answer_the_worst_first():
    left = NotRunAgain(batch_size=32, lr=0.3, candidates=2)
    missed = changed(WHOLE.best_by_time.confirmed, reached=2)
    open_above = hand_critical(67.0, 41.0, None, 5, 1114)
    whole = changed(
        WHOLE,
        not_run_again=left,
        best_by_time=changed(WHOLE.best_by_time, confirmed=missed),
        critical_batch_size=open_above,
    )
    found = texts(whole, "CAUTION")
    starts = [
        # From what makes the answer wrong to what makes it wide.
        "only 2 of 3 fresh seeds reached the target at batch size 256, learning rate 0.4",
        "batch size 32, learning rate 0.3 may be better, and lacks fresh seeds",
        "timings are noisy",
        "the critical batch size has no upper end yet",
    ]
    for text, start in zip(found, starts, strict=True):
        assert text.partition(": ")[0] == start
    # The block has room for the worst cautions alone.
    shown = "\n".join(console_rows(answer(whole), [], 1000))
    assert found[SHOWN_CAUTIONS - 1] in shown
    assert found[SHOWN_CAUTIONS] not in shown


@pytest.mark.parametrize(
    ("changes", "who"),
    [
        ({"training_loops": {"lean": 40}}, "no code of yours"),
        ({"training_loops": {"lean": 40}, "in_python": True}, "no code of yours"),
        ({"training_loops": {}, "in_python": True}, "trial.seed, under another name=NAME"),
        ({"training_loops": {}, "in_python": True, "in_hydra": True}, "hydra.sweeper.seed names"),
    ],
)
def test_seeds_that_change_nothing_are_the_first_caution(changes, who):
    whole = changed(WHOLE, seed_is_unused=True, **changes)
    caution, *_ = texts(whole, "CAUTION")
    assert who in caution
    assert len(warnings(whole)) == 1
    at_budget = result_of([LUCKY], at_budget=hand_at_budget(), objective="loss")
    before = texts(at_budget, "CAUTION")
    first, *rest = texts(changed(at_budget, seed_is_unused=True, **changes), "CAUTION")
    assert who in first
    assert len(rest) == len(before)


@pytest.mark.parametrize(
    ("changes", "spelled"),
    [
        ({}, ("search.batch_size.high", "study=NAME")),
        ({"in_python": True}, ("batch_sizes[1]", "name=NAME")),
        (
            {"in_python": True, "in_hydra": True},
            ("high end of the batch size", "hydra.sweeper.study_name=NAME"),
        ),
    ],
)
def test_a_range_that_ends_too_early_is_told_as_that(changes, spelled):
    """No number of trials would show what lies beyond the range."""
    note = "the interval ends: a larger search.batch_size.high, with another study=NAME"
    beyond = changed(hand_critical(None, 5800.0, None), next_trials=(), note=note)
    whole = changed(WHOLE, critical_batch_size=beyond, **changes)
    (*_, caution) = texts(whole, "CAUTION")
    assert all(name in caution for name in spelled)
    assert "trials" not in caution
    # MORE does not advise what CAUTION does not.
    assert len(texts(whole, "MORE")) == 1
    # An end that lies within the range is looked for by further trials.
    within = changed(beyond, next_trials=NARROWER)
    assert "looks further" in texts(changed(whole, critical_batch_size=within), "CAUTION")[-1]


def make_gain(**changes):
    values = {
        "ratio": 2.6,
        "low": 1.94,
        "high": 3.6,
        "level": 0.9,
        "merit": "time",
        "seeds": 3,
        "baseline_seeds": 3,
        "winner_seeds": 3,
        "at_least": False,
    }
    return Gain(**{**values, **changes})


@pytest.mark.parametrize(
    ("ratio", "at_least", "text"),
    [
        (0.8, False, "USE takes 1.25 times the seconds of your batch size 16, learning rate 0.1 ("),
        (1.1, False, None),
        (1.5, True, None),
    ],
)
def test_fewer_steps_that_take_more_seconds_are_a_caution(ratio, at_least, text):
    ends = {"low": None, "high": None} if at_least else {"low": 0.5 * ratio, "high": 2.0 * ratio}
    seconds = make_gain(ratio=ratio, at_least=at_least, **ends)
    whole = changed(WHOLE, baseline=make_baseline(), gain_in_seconds=seconds)
    found = [caution for caution in texts(whole, "CAUTION") if "search.objective=time" in caution]
    assert len(found) == (text is not None)
    assert all(text in caution and "interval: 0.625 to 2.5)" in caution for caution in found)


# No common seed: yours ran once, USE on three fresh seeds.
SINGLE = {"seeds": 0, "baseline_seeds": 0, "winner_seeds": 3}
# The clock has ended the search, not its plan.
OF_TIME = changed(SEARCH, limit="search.wall_seconds", limit_value=30.0)


@pytest.mark.parametrize(
    ("changes", "basis", "is_cautioned"),
    [
        ({}, "3.6)", False),
        ({"seeds": 1, "baseline_seeds": 1}, "3.6; on 1 fresh seed of both)", False),
        (SINGLE, "3.6; yours in its single search trial, USE on 3 fresh seeds)", True),
        # USE, too, has run only once.
        ({**SINGLE, "winner_seeds": 0}, "search trial, USE's is predicted)", True),
        (
            {**SINGLE, "baseline_seeds": 2},
            "yours on 2 other fresh seeds, USE on 3 fresh seeds)",
            False,
        ),
        # A bound has no interval, and more seeds of what was stopped are no advice.
        ({**SINGLE, "at_least": True}, "search trial, USE on 3 fresh seeds", False),
        # Of a file that does not tell.
        ({"seeds": 0, "baseline_seeds": None, "winner_seeds": None}, "on no common seed)", False),
    ],
)
def test_a_gain_says_on_which_runs_it_stands(changes, basis, is_cautioned):
    whole = changed(WHOLE, baseline=make_baseline(), gain=make_gain(**changes), search=OF_TIME)
    assert texts(whole, "GAIN")[0].endswith(basis)
    found = [text for text in texts(whole, "CAUTION") if "GAIN" in text]
    assert len(found) == is_cautioned
    assert all("a larger search.wall_seconds" in text for text in found)


@pytest.mark.parametrize("has_baseline", [True, False])
@pytest.mark.parametrize(("median", "is_advised"), [(None, True), (440.0, False)])
def test_a_winner_that_misses_on_most_fresh_seeds_is_no_advice(has_baseline, median, is_advised):
    fresh_seeds = changed(WHOLE.winner.confirmed, reached=1, steps_median=median, diverged=2)
    winner = changed(WHOLE.winner, confirmed=fresh_seeds, steps=median)
    baseline = make_baseline() if has_baseline else None
    missed = changed(WHOLE, best_by_time=winner, baseline=baseline, search=SEARCH)
    assert texts(missed, "CAUTION")[0].endswith("learning rate 0.4; 2 diverged")
    advice, command = texts(missed, "NEXT")
    assert (
        "USE missed the target on 2 of 3 fresh seeds: try others with search.trials=128" in advice
    ) == is_advised
    assert command == WHOLE.train


def test_a_gain_over_a_trial_that_was_evaluated_rarely_says_so():
    baseline = make_baseline()
    points = tuple(
        changed(point, number=baseline.number, steps_low=300, steps=400)
        for point in WHOLE.points[:1]
    )
    whole = changed(WHOLE, baseline=baseline, gain=make_gain(**SINGLE), points=points)
    assert (
        "yours in its single search trial, after 300 to 400 steps, USE" in texts(whole, "GAIN")[0]
    )


@pytest.mark.parametrize(("horizon", "is_bound"), [(None, True), (860, False)])
def test_a_schedule_that_ended_before_the_target_is_no_bound(horizon, is_bound):
    """Under a longer schedule the target may be met earlier."""
    bound = make_gain(**SINGLE, at_least=True)
    whole = changed(WHOLE, baseline=make_baseline(horizon=horizon), gain=bound, search=OF_TIME)
    text = texts(whole, "GAIN")[0]
    assert text.startswith("at least") == is_bound
    assert text.startswith("not known") != is_bound


@pytest.mark.parametrize(
    ("changes", "basis"),
    [
        (
            {"seeds": 1, "baseline_seeds": 1},
            "on 1 fresh seed of both; yours was stopped before the target in 2 more runs)",
        ),
        (
            SINGLE,
            "USE on 3 fresh seeds; yours was stopped before the target in 2 more runs)",
        ),
    ],
)
def test_fresh_seeds_that_yours_missed_are_said_and_no_time_was_short(changes, basis):
    # Of three runs of the baseline one reached the target.
    missed = make_baseline(runs=3, reached=1)
    whole = changed(WHOLE, baseline=missed, gain=make_gain(**changes), search=OF_TIME)
    assert texts(whole, "GAIN")[0].endswith(basis)
    assert not [text for text in texts(whole, "CAUTION") if "GAIN" in text]


@pytest.mark.parametrize(
    ("search", "option"), [(OF_TIME, "wall_seconds=120"), (SEARCH, "trials=128")]
)
def test_a_configuration_that_was_compared_with_nothing_is_not_the_best_one(search, option):
    own = make_baseline(batch_size=LUCKY.batch_size, lr=LUCKY.lr)
    alone = result_of([LUCKY], baseline=own, search=search, train="bstune +workload=mine")
    (gain,) = texts(alone, "GAIN")
    assert "nothing was compared with your batch size" in gain
    advice, command = texts(alone, "NEXT")
    assert f"search.{option}" in advice
    assert command == "bstune +workload=mine"
    few = changed(alone, configurations=3)
    assert "only 2 other configurations were tried" in texts(few, "GAIN")[0]
    assert f"search.{option}" in texts(few, "NEXT")[0]
    asked_for = changed(few, search=changed(search, trials=3))
    for enough in (changed(alone, configurations=6), asked_for):
        assert texts(enough, "GAIN")[0].startswith("none: ")
        assert texts(enough, "NEXT")[0].startswith("keep your configuration")


@pytest.mark.parametrize(
    ("batch_size", "text"), [(66, "none: USE lies within 15% of"), (80, "not known: ")]
)
def test_a_winner_that_counts_as_the_users_own_point_has_no_gain(batch_size, text):
    own = make_baseline(batch_size=batch_size, lr=LUCKY.lr)
    beside = changed(result_of([LUCKY], baseline=own, search=SEARCH), configurations=6)
    assert texts(beside, "GAIN")[0].startswith(text)


@pytest.mark.parametrize(
    ("reached", "says"),
    [(0, ("none of 5 others", "4 stopped early, 1 diverged")), (2, ("4 of 7 others", "may be"))],
)
def test_others_that_were_stopped_and_may_be_better_leave_the_gain_open(reached, says):
    own = make_baseline(batch_size=LUCKY.batch_size, lr=LUCKY.lr)
    others = UntoldOthers(chance=0.9, reached=reached, stopped=4, diverged=1, out_of_memory=0)
    leads = result_of([LUCKY], baseline=own, search=SEARCH, train="bstune +workload=mine")
    leads = changed(leads, configurations=6 + reached)
    assert texts(leads, "GAIN")[0].startswith("none: ")
    assert compared_study(leads, "s").gain_text == "none"
    leads = changed(leads, untold_others=others)
    (gain,) = texts(leads, "GAIN")
    assert gain.startswith("not known: ")
    assert all(part in gain for part in says)
    assert "search.trials=128" in texts(leads, "NEXT")[0]
    assert compared_study(leads, "s").gain_text == "not known"


def test_a_budget_with_one_configuration_advises_to_try_others():
    at_budget = hand_at_budget(gain=None)
    alone = result_of(
        [LUCKY], objective="loss", at_budget=at_budget, train="bstune", search=OF_TIME
    )
    assert "nothing was compared" in texts(alone, "GAIN")[0]
    assert "search.wall_seconds=120" in texts(alone, "NEXT")[0]
    assert texts(changed(alone, configurations=6), "NEXT")[0].startswith("keep your configuration")


@pytest.mark.parametrize(
    ("search", "stop_reason", "advice"),
    [
        (OF_TIME, "stopped", "a larger search.wall_seconds"),
        # The trials were through, and the time was over then.
        (SEARCH, "the plan is done", "a larger search.wall_seconds"),
        # What ended the search is not what the fresh seeds lacked.
        (changed(SEARCH, limit="search.least_gain"), "stopped", "a larger search.wall_seconds"),
        (changed(SEARCH, limit="search.seconds"), "stopped", "a larger search.wall_seconds"),
        (SEARCH, None, "and the same command runs them"),
        # Asked for none: then it is a matter of options.
        (changed(SEARCH, replicates=0), "the plan is done", "search.replicates=3"),
    ],
)
def test_a_winner_that_ran_once_is_the_first_caution(search, stop_reason, advice):
    once = result_of([LUCKY], search=search, stop_reason=stop_reason)
    assert advice in texts(once, "CAUTION")[0]
    assert advice in warnings(once)[0]


@pytest.mark.parametrize(
    ("changes", "advice", "other"),
    [
        # No command begins a study of Python objects again.
        ({"in_python": True}, "the same call runs them", "command"),
        # The command of the trials is that of another target.
        ({"few_passed": "2 trials passed it, and it takes 8"}, "a study of this target", "same"),
    ],
)
def test_what_runs_a_winner_again_is_what_the_reader_has(changes, advice, other):
    caution = " ".join(texts(result_of([LUCKY], search=SEARCH, **changes), "CAUTION"))
    assert advice in caution
    assert other not in caution


@pytest.mark.parametrize("surveyed", [True, False])
def test_a_busy_survey_names_what_times_it_anew(surveyed):
    busy = changed(timing(0.4, waited=0.5), surveyed=surveyed)
    (caution,) = texts(changed(WHOLE, timing=busy), "CAUTION")
    # A survey that the study ran can be repeated; timings of the trials cannot.
    assert ("hardware.refresh=true" in caution) == surveyed


@pytest.mark.parametrize(("error", "is_told"), [(0.05, False), (0.3, True)])
def test_trials_that_time_themselves_in_busy_minutes_are_a_caution(error, is_told):
    by_trials = changed(timing(error), surveyed=False)
    cautions = texts(changed(WHOLE, timing=by_trials), "CAUTION")
    assert any("30%" in text and "beside them" in text for text in cautions) == is_told


ONCE = result_of([LUCKY])


@pytest.mark.parametrize(
    ("summary", "says_interval", "says_predicted"),
    [
        (WHOLE, True, False),
        # A single run has no interval.
        (ONCE, False, True),
        (
            changed(ONCE, best_by_time=changed(ONCE.best_by_time, time_to_target=None)),
            False,
            False,
        ),
        # Fresh seeds that all missed the target have no seconds.
        (result_of([LUCKY, fresh(3, 8, status="diverged")]), False, False),
        (result_of([]), False, False),
    ],
)
def test_an_error_of_timing_is_in_uses_interval_where_it_has_one(
    summary, says_interval, says_predicted
):
    noise = trust_in_timing(changed(summary, timing=timing(0.52, waited=0.5)))
    assert "52%" in noise.text
    assert ("as USE's interval says" in noise.text) == says_interval
    assert ("predicted for USE" in noise.text) == says_predicted


def test_a_study_of_python_objects_names_arguments():
    busy = changed(
        WHOLE,
        in_python=True,
        timing=timing(0.4),
        # In Python an option is an argument.
        critical_batch_size=changed(hand_critical(67.0, 41.0, None), next_trials=()),
    )
    cautions = texts(busy, "CAUTION")
    assert "options=['hardware.refresh=true']" in cautions[0]
    assert ": trials=64 looks" in cautions[1]
    assert texts(busy, "MORE")[-1].startswith("trials=64 ")
    once = result_of([LUCKY], in_python=True, search=OF_TIME, stop_reason="stopped")
    assert "a larger wall_seconds" in compared_study(once, "s").notes[0]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        # 64 + 6 trials.
        ({"configurations": 64, "trials": 70}, "64 configurations, 6 fresh seeds"),
        ({"configurations": 1, "trials": 1}, "1 configuration"),
        (
            {
                "configurations": 8,
                "trials": 13,
                # Two of the five that are no configurations failed.
                "statuses": {**dict.fromkeys(STATUSES, 0), "failed": 2},
            },
            "8 configurations, 3 fresh seeds, 2 failed",
        ),
        # An older file does not tell them apart.
        ({"configurations": None, "trials": 70}, "70 trials"),
    ],
)
def test_trials_are_counted_by_what_they_ran_for(changes, text):
    whole = changed(WHOLE, **changes)
    assert trials_text(whole) == text
    assert answer(whole).title.endswith(f" · {text}")


def test_without_a_caution_there_is_no_such_line():
    # Seconds that are known to 2% change no choice.
    quiet = changed(WHOLE, timing=timing(0.02))
    assert texts(quiet, "CAUTION") == ()


@pytest.mark.parametrize(
    # A step's seconds that are known to 2% change no choice.
    ("changes", "text"),
    [
        ({"merit": "steps"}, "batch sizes 180 to 331, predicted within 10% of the least number"),
    ],
)
def test_what_is_as_good(changes, text):
    found = changed(WHOLE, as_good=changed(WHOLE.as_good, **changes))
    assert texts(found, "AS GOOD")[0].startswith(text)
    assert ("number of steps" in texts(found, "AS GOOD")[0]) == ("merit" in changes)


@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        # Few batch sizes do not show that all others are worse.
        ((181, 256, 512), "not known, as the target was reached within 3 half octaves of B"),
        # 256 and 262 share a half octave.
        ((181, 256, 262), "not known, as the target was reached within 2 half octaves of B"),
        ((32, 64, 128, 256, 512), "no batch size but about USE's is predicted within 10%"),
    ],
)
def test_a_range_of_uses_size_alone_says_what_it_stands_on(sizes, text):
    trials = [make_trial(number, size) for number, size in enumerate(sizes)]
    as_good = changed(WHOLE.as_good, low=256, high=256)
    critical = hand_critical(67.0, 41.0, 110.0, min(sizes), max(sizes))
    found = changed(result_of(trials), as_good=as_good, critical_batch_size=critical)
    assert texts(found, "AS GOOD")[0].startswith(text)


@pytest.mark.parametrize("low", [180, 256])
def test_the_smallest_batch_size_that_ran_out_of_memory_bounds_what_is_as_good(low):
    broken = [make_trial(9 + i, size, status="out of memory") for i, size in enumerate((700, 500))]
    found = result_of([*CONFIRMED, *broken])
    assert found.smallest_out_of_memory == 500
    sizes = changed(WHOLE.as_good, low=low, high=256)
    assert "batch size 500 ran out of memory" in texts(changed(found, as_good=sizes), "AS GOOD")[0]
    in_budget = changed(found, objective="loss", at_budget=hand_at_budget())
    assert "batch size 500 ran out of memory" in texts(in_budget, "AS GOOD")[0]
    assert "memory" not in texts(WHOLE, "AS GOOD")[0]


@pytest.mark.parametrize(
    ("rates", "text"),
    [
        ((0.31, 0.4, 0.512), "0.31 at 180, 0.4 at 256, 0.512"),
        ((0.512, 0.4, 0.31), "0.512 at 180, 0.4 at 256, 0.31"),
        # USE, at batch size 256, has a rate of its own beside those that are predicted to be best.
        ((0.31, 0.2, 0.512), "0.31 at 180, USE's own 0.2 at 256, 0.512"),
    ],
)
def test_a_rate_of_use_that_lies_off_the_others_is_told(rates, text):
    named = dict(zip(("lr_low", "lr_middle", "lr_high"), rates, strict=True))
    found = changed(WHOLE, as_good=changed(WHOLE.as_good, **named))
    assert f"learning rate {text} at 331" in texts(found, "AS GOOD")[0]


def test_devices_are_named_only_where_there_is_a_plan():
    # A plan for one device says nothing of several.
    alone = changed(WHOLE, scale_out=(make_plan(1),))
    assert texts(alone, "DEVICES") == ("not known yet; critical batch size 67 (90%: 41 to 110)",)


# Each of these breaks a text that is cut, marked up or counted in bytes.
NAMES = ("two words/and a path", "<b>bold</b> & co", "[red]markup[/red]", "größe 数据", "x" * 200)
LABELS = ("USE", "GAIN", "AS GOOD", "DEVICES", "CAUTION", "NEXT")


@pytest.mark.parametrize("width", [40, 60, 80, 100])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    # With everything, with nothing, and where each trial was stopped.
    "base",
    [WHOLE, result_of([]), result_of([STOPPED] * 3)],
    ids=["whole", "none", "stopped"],
)
def test_the_block_has_six_labels_and_is_as_narrow_as_it_is_asked_to_be(base, name, width):
    # Thirty notes are more than a block holds.
    notes = tuple(f"note {i} with {name[:60]} " + "and more words " * 12 for i in range(30))
    page = f"outputs/{name}/report.html"
    found = answer(changed(base, workload=name, notes=notes))
    lines = console_rows(found, [("page", (page,))], width)
    unbroken = ("NEXT", "page")
    next_at = min(i for i, line in enumerate(lines) if line.startswith(unbroken))
    first = lines.index("") + 1
    labels = {line[:10].strip() for line in lines[first:]} - {""}
    assert labels <= {*LABELS, "page"}
    longest_word = max(map(len, name.split()))
    for line in lines[:next_at]:
        # A word that is longer than the width stands whole.
        assert len(line) <= max(width, longest_word)
    # What is copied is not broken.
    assert page in "\n".join(lines[next_at:])


def test_what_took_the_steps_is_said_where_it_is_not_what_the_option_asks_for():
    # The last trial's record is of a version that did not tell.
    loops = ("lean", "Lightning's: Mine has backward", "Lightning's: protocol.fast=off", None)
    trials = [make_trial(number, training_loop=loop) for number, loop in enumerate(loops)]
    summary = result_of(trials)
    assert summary.training_loops == {
        "Lightning's: Mine has backward": 1,
        # A loop that the option asks for is no news.
        "Lightning's: protocol.fast=off": 1,
        "lean": 1,
    }
    assert texts(summary, "NOTE") == (
        "Lightning's own loop took the steps, not the lean one: Mine has backward",
    )


@pytest.mark.parametrize(
    ("command", "lines"),
    [
        ("bstune +workload=mine trial.lr=0.1 budget.steps=233 budget.examples=1", 1),
        ("bstune +workload=mine trial.lr=0.1", 0),
        ("bstune +workload=mine budget.examples=1000", 0),
        ("result.train()", 0),
    ],
)
def test_a_command_with_a_limit_of_one_example_is_explained(command, lines):
    assert len(list(on_limits(command))) == lines
