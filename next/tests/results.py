"""Results and records for tests: results for the states of design.md, section 1."""

from search_records import record

from bstune.core.records import Budget, Target
from bstune.core.space import Configuration
from bstune.study.result import (
    Closest,
    Confirmed,
    Critical,
    CurvePoint,
    Faster,
    FewestSteps,
    Improvement,
    Interval,
    LrAlone,
    ResultWarning,
    Searched,
    Speedup,
    Spent,
    StudyResult,
)

TARGET = Target("val/loss", 0.1, "min")
# The law and the step time that all values here follow: S*(B) = 26 (1 + 130/B), and 0.4 ms a step
# with 1.7 us an example.
S_MIN = 26.0
B_CRIT = 130.0
OVERHEAD = 0.4e-3
PER_EXAMPLE = 1.7e-6


COMMAND = "bstune +workload=digits"
EASIER = f"{COMMAND} target='val/loss <= 0.08' study=digits-2"


def steps_of(batch_size):
    return S_MIN * (1 + B_CRIT / batch_size)


def step_seconds_of(batch_size):
    return OVERHEAD + PER_EXAMPLE * batch_size


def confirmed(
    batch_size,
    lr,
    steps,
    seconds,
    status="reached",
    number=0,
):
    """Runs on new seeds that all ended alike, with ``steps`` in ascending order."""
    median = steps[len(steps) // 2]
    return Confirmed(
        batch_size=batch_size,
        lr=lr,
        number=number,
        seeds=tuple(range(len(steps))),
        runs_steps=steps,
        runs_status=(status,) * len(steps),
        steps=median,
        steps_low=median / 1.15,
        steps_high=median * 1.15 if status == "reached" else None,
        seconds=seconds,
        seconds_low=seconds / 1.2,
        seconds_high=seconds * 1.2 if status == "reached" else None,
        is_bound=status != "reached",
        predicted_share=0.875,
        step_seconds=seconds / median,
        step_seconds_error=0.05,
    )


BEST = confirmed(118, 1.18, (52, 55, 61), 0.0331, number=9)
BASELINE = confirmed(64, 0.4, (188, 201, 214), 0.0964)


def curve():
    points = []
    for place in range(25):
        size = 8.0 * 2 ** (place / 4)
        steps = steps_of(size)
        lr = 1.18 * (size / 118) ** 0.45
        points.append(
            CurvePoint(
                batch_size=size,
                steps=steps,
                steps_low=steps / 1.2,
                steps_high=steps * 1.25,
                lr=lr,
                lr_low=lr / 1.5,
                lr_high=lr * 1.4,
                step_seconds=step_seconds_of(size),
            )
        )
    return tuple(points)


def critical(value, low, high):
    return Critical(
        interval=Interval(value=value, low=low, high=high),
        s_min=None if value is None else S_MIN,
        linear_below=None if value is None else value / 9,
        no_gain_above=None if value is None else 9 * value,
        smallest=8,
        largest=512,
    )


STUDY = {
    "bstune": "1.0.0.dev0",
    "workload": "digits",
    "study": "digits",
    "objective": "time",
    "target": TARGET,
    "budget": Budget(steps=2000),
    "device": "cpu",
    "threads": 1,
    "seeds": 3,
    "configurations": 64,
    "trials": 83,
    "spent": Spent(training=6.4, other=2.9),
}
CURVE = {
    "reached": True,
    "fewest_steps": FewestSteps(
        batch_size=480, lr=2.2, steps=33.0, steps_low=27.5, steps_high=41.2
    ),
    "critical": critical(130.2, 84.9, 212.0),
    "lr_exponent": Interval(value=0.45, low=0.31, high=0.58),
    "allowed_rules": ("sqrt",),
    "curve": curve(),
}


def speedup(value, low, high):
    return Speedup(value=value, low=low, high=high, at_least=high is None)


def result(**changes):
    """A study that says switch, but for what is changed."""
    values = {
        "verdict": "switch",
        "best": BEST,
        "baseline": BASELINE,
        "speedup": speedup(0.0964 / 0.0331, 2.31, 3.79),
        "near_optimal": (48, 173),
        "lr_alone": LrAlone(lr=1.05, speedup=2.4),
        "train_command": "bstune +workload=digits trial.batch_size=118 trial.lr=1.18",
    }
    return StudyResult(**{**STUDY, **CURVE, **values, **changes})


def nothing_reached(trend, **changes):
    configuration = Configuration(batch_size=24, lr=0.02)
    values = {
        "target": Target("val/loss", 0.05, "min"),
        "verdict": "not yet",
        "reached": False,
        "closest": Closest(configuration=configuration, value=0.0714, trend=trend),
    }
    return StudyResult(**{**STUDY, **values, **changes})


FEWEST = confirmed(512, 2.1, (32, 33, 35), 0.0419, number=21)


def of_curve(**changes):
    """A study of the curve whose B_crit has a wide interval, but for what is changed."""
    values = {
        "objective": "curve",
        "verdict": None,
        "searched": Searched(low=8, high=1024, octaves=7, reached=6, to_add=(724,)),
        "missing": "more trials",
        "next": f"{COMMAND} trials=128",
    }
    return StudyResult(**{**STUDY, **CURVE, **values, **changes})


def of_metric(pair, metrics, steps, number=0):
    """A configuration whose runs have these metrics at their budget's end, in rising order."""
    median = metrics[len(metrics) // 2]
    runs = confirmed(*pair, (steps,) * len(metrics), 300.0, "finished", number)
    return runs.model_copy(
        update={
            "metric": median,
            "metric_low": median - 0.02,
            "metric_high": median + 0.02,
            "is_bound": False,
        }
    )


BEST_METRIC = of_metric((24, 0.003), (1.51, 1.52, 1.54), 9360, number=9)
BASELINE_METRIC = of_metric((64, 0.001), (1.60, 1.61, 1.62), 4210)


def metric(**changes):
    """A study of the best metric that says switch, but for what is changed."""
    values = {
        "objective": "metric",
        "target": Target("val/loss", None, "min"),
        "budget": Budget(steps=1, seconds=300.0),
        "verdict": "switch",
        "reached": True,
        "best": BEST_METRIC,
        "baseline": BASELINE_METRIC,
        "improvement": Improvement(value=0.09, low=0.05, high=0.13, deviation=0.012),
        "near_optimal": (16, 40),
        "train_command": "bstune +workload=digits trial.batch_size=24 trial.lr=0.003 "
        "trial.steps=9360",
    }
    return StudyResult(**{**STUDY, **values, **changes})


STEP_TIMES = ResultWarning(
    kind="step times",
    fix="rerun idle with survey=refresh",
    state="step times are uncertain to 20%",
)
FEW_OCTAVES = ResultWarning(
    kind="far from the law",
    fix="raise batch_size.high to 1024",
    state="no trial reached the target above batch size 256",
)
FAR = ResultWarning(
    kind="far from the law",
    fix="try batch sizes 8 and 16",
    state="the curve is off the law by a factor of 1.4",
)

STATES = {
    "switch": result(),
    "switch, three warnings": result(warnings=(STEP_TIMES, FEW_OCTAVES, FAR)),
    # Neither 0.99985 nor 1536 is rounded.
    "several values": result(
        best=BEST.model_copy(update={"values": {"momentum": 0.99985, "layers": 1536}}),
        train_command=f"{COMMAND} trial=outputs/digits/best.yaml",
    ),
    # Two digits would hide that the speedup's lower end is above 1.
    "little to say": result(
        device="cuda",
        best=BEST.model_copy(update={"schedule_steps": 453}),
        speedup=speedup(1.2, 1.032, 1.4),
        near_optimal=(118, 118),
        lr_alone=None,
        critical=None,
    ),
    "keep": result(
        verdict="keep",
        best=BASELINE,
        other=confirmed(96, 0.5, (150, 162, 171), 0.0912, number=7),
        speedup=speedup(0.0964 / 0.0912, 0.92, 1.21),
        configurations=12,
        lr_alone=None,
        train_command=None,
    ),
    "not yet: the interval is too wide": result(
        verdict="not yet",
        speedup=speedup(1.3, 0.84, 2.07),
        missing="more new seeds",
        next=f"{COMMAND} seeds=6",
        train_command=None,
    ),
    "not yet: no new seeds": result(
        verdict="not yet",
        best=BEST.model_copy(update={"seeds": (), "runs_steps": (), "runs_status": ()}),
        speedup=None,
        lr_alone=None,
        missing="time for new seeds",
        next=f"{COMMAND} wall_seconds=180",
        train_command=None,
    ),
    "use": result(verdict="use", baseline=None, speedup=None, lr_alone=None),
    # Its median is a bound, four times the best's.
    "baseline stopped": result(
        baseline=confirmed(64, 0.4, (276,) * 3, 0.1324, "pruned"),
        baseline_limit="stopped",
        speedup=speedup(4.0, 3.2, None),
        lr_alone=None,
    ),
    "nothing reached: diverged": nothing_reached(
        "diverged", next=f"{COMMAND} lr.high=0.01 study=digits-2"
    ),
    "nothing reached: still falling": nothing_reached(
        "still falling",
        easier_goal=0.08,
        easier=EASIER,
        next=f"{COMMAND} budget.steps=4000 study=digits-2",
    ),
    "nothing reached: flat": nothing_reached("flat", easier_goal=0.08, easier=EASIER),
    "nothing reached: failed": nothing_reached(
        "failed", missing="ValueError: 17 is no class (model.py:12)"
    ),
    "largest size binds": result(critical=critical(None, 812.0, None)),
    "no critical batch size": result(critical=critical(None, None, None)),
    "steps: switch": result(
        objective="steps",
        best=FEWEST,
        speedup=speedup(201 / 33, 4.9, 7.6),
        near_optimal=(512, 1024),
        lr_alone=None,
        faster=Faster(batch_size=118, lr=1.18, seconds=0.0331, speedup=0.0419 / 0.0331),
        train_command=f"{COMMAND} trial.batch_size=512 trial.lr=2.1",
    ),
    "metric: switch": metric(),
    "metric: a budget of steps": metric(budget=Budget(steps=9360)),
    "metric: keep": metric(
        verdict="keep",
        best=BASELINE_METRIC,
        other=BEST_METRIC,
        improvement=Improvement(value=-0.002, low=-0.01, high=0.0051, deviation=0.012),
        train_command=None,
    ),
    "metric: not yet: the baseline is the best": metric(
        verdict="not yet",
        best=BASELINE_METRIC,
        other=of_metric((24, 0.003), (1.63, 1.64, 1.65), 9360, number=9),
        improvement=Improvement(value=-0.03, low=-0.07, high=0.01, deviation=0.02),
        missing="more new seeds",
        next=f"{COMMAND} seeds=6",
        train_command=None,
    ),
    "curve": of_curve(),
    "curve: open above": of_curve(
        critical=critical(None, 412.0, None),
        missing="batch sizes 8 to 4,096",
        next=f"{COMMAND} batch_size.low=8 batch_size.high=4096 study=digits-2",
    ),
    "curve: open below": of_curve(
        critical=critical(None, None, 12.0), warnings=(FAR,), allowed_rules=()
    ),
}


def records():
    """Trials on the law, of which 8 is resumed as 9, 10 diverged and 11 failed, and new seeds."""
    made = []
    for number, size in enumerate((64, 8, 16, 32, 64, 128, 256, 512, 90, 90, 256, 32)):
        status = {8: "pruned", 10: "diverged", 11: "failed"}.get(number, "reached")
        place = f"search/{number}" if number else "baseline"
        lr = 1.18 * (size / 118) ** 0.45
        made.append(_record(number, place, size, lr, round(steps_of(size)), status))
    made[9] = made[9].model_copy(update={"resumed_from": 8})
    message = "RuntimeError: shapes do not match (model.py:40)"
    made[11] = made[11].model_copy(update={"message": message})
    for index in range(3):
        for one in (BEST, BASELINE):
            place = f"seed/{one.number}/{index}"
            run = _record(len(made), place, one.batch_size, one.lr, one.runs_steps[index])
            made.append(run.model_copy(update={"repeats": one.number, "seed": 100 + index}))
    return made


def _record(number, place, size, lr, steps, status="reached"):
    tau = step_seconds_of(size)
    return record(
        number,
        status,
        place=place,
        batch_size=size,
        lr=lr,
        steps=steps,
        steps_low=steps - 3,
        history=((steps // 2, 0.4), (steps - 3, 0.12), (steps, 0.098)),
        seconds_per_step=tau,
        train_seconds=steps * tau,
    )
