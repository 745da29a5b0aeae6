"""Results and records for tests: one result for each state of design.md, section 1."""

from typing import Any

from bstune.core.records import Record, Status, Target
from bstune.core.space import Configuration
from bstune.study.result import (
    Closest,
    Confirmed,
    Critical,
    CurvePoint,
    Faster,
    FewestSteps,
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


def steps_of(batch_size: float) -> float:
    return S_MIN * (1 + B_CRIT / batch_size)


def step_seconds_of(batch_size: float) -> float:
    return OVERHEAD + PER_EXAMPLE * batch_size


def confirmed(
    batch_size: int,
    lr: float,
    steps: tuple[int, ...],
    seconds: float,
    status: Status = "reached",
    number: int = 0,
) -> Confirmed:
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
        predicted_share=(len(steps) * (status == "reached") + 0.5) / (len(steps) + 1),
        step_seconds=seconds / median,
        step_seconds_error=0.05,
    )


BEST = confirmed(118, 1.18, (52, 55, 61), 0.0331, number=9)
BASELINE = confirmed(64, 0.4, (188, 201, 214), 0.0964)


def curve() -> tuple[CurvePoint, ...]:
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


def critical(value: float | None, low: float | None, high: float | None) -> Critical:
    return Critical(
        interval=Interval(value=value, low=low, high=high),
        s_min=None if value is None else S_MIN,
        linear_below=None if value is None else value / 9,
        no_gain_above=None if value is None else 9 * value,
        smallest=8,
        largest=512,
    )


def result(**changes: Any) -> StudyResult:
    """A study that says switch, but for what is changed."""
    values: dict[str, Any] = {
        "bstune": "1.0.0.dev0",
        "workload": "digits",
        "study": "digits",
        "objective": "time",
        "target": TARGET,
        "device": "cpu",
        "threads": 1,
        "seeds": 3,
        "configurations": 64,
        "trials": 83,
        "verdict": "switch",
        "reached": True,
        "best": BEST,
        "other": None,
        "baseline": BASELINE,
        "baseline_limit": None,
        "speedup": Speedup(value=0.0964 / 0.0331, low=2.31, high=3.79, at_least=False),
        "near_optimal": (48, 173),
        "fewest_steps": FewestSteps(
            batch_size=480, lr=2.2, steps=33.0, steps_low=27.5, steps_high=41.2, seconds=0.0401
        ),
        "lr_alone": LrAlone(lr=1.05, speedup=2.4, low=2.0, high=2.9),
        "critical": critical(130.2, 84.9, 212.0),
        "lr_exponent": Interval(value=0.45, low=0.31, high=0.58),
        "allowed_rules": ("sqrt",),
        "curve": curve(),
        "closest": None,
        "easier_goal": None,
        "missing": None,
        "next": None,
        "warnings": (),
        "spent": Spent(training=6.4, other=2.9),
        "train": "bstune +workload=digits trial.batch_size=118 trial.lr=1.18",
        "easier": None,
    }
    return StudyResult(**{**values, **changes})


def keep() -> StudyResult:
    return result(
        verdict="keep",
        best=BASELINE,
        other=confirmed(96, 0.5, (150, 162, 171), 0.0912, number=7),
        speedup=Speedup(value=0.0964 / 0.0912, low=0.92, high=1.21, at_least=False),
        configurations=12,
        lr_alone=None,
        train=None,
    )


def not_yet(**changes: Any) -> StudyResult:
    values: dict[str, Any] = {
        "verdict": "not yet",
        "speedup": Speedup(value=0.0964 / 0.0731, low=0.84, high=2.07, at_least=False),
        "best": confirmed(118, 1.18, (104, 121, 140), 0.0731, number=9),
        "lr_alone": LrAlone(lr=1.05, speedup=1.1, low=0.8, high=1.5),
        "missing": "more new seeds",
        "next": f"{COMMAND} seeds=6",
        "train": None,
    }
    return result(**{**values, **changes})


def use() -> StudyResult:
    return result(verdict="use", baseline=None, speedup=None, lr_alone=None)


def baseline_missed(limit: str, times: float) -> StudyResult:
    """The baseline's median is a bound: its runs ended without the target."""
    seconds = times * BEST.seconds
    # At 0.48 ms a step, as the baseline's other runs.
    steps = round(seconds / BASELINE.step_seconds)
    return result(
        baseline=confirmed(64, 0.4, (steps,) * 3, seconds, "missed"),
        baseline_limit=limit,
        speedup=Speedup(value=times, low=0.8 * times, high=None, at_least=True),
        lr_alone=None,
    )


def nothing_reached(trend: str, **changes: Any) -> StudyResult:
    configuration = Configuration(batch_size=24, lr=0.02)
    closest = Closest(configuration=configuration, number=11, value=0.0714, trend=trend)
    values: dict[str, Any] = {
        "target": Target("val/loss", 0.05, "min"),
        "verdict": "not yet",
        "reached": False,
        "best": None,
        "baseline": None,
        "speedup": None,
        "near_optimal": None,
        "fewest_steps": None,
        "lr_alone": None,
        "critical": None,
        "lr_exponent": None,
        "allowed_rules": (),
        "curve": (),
        "closest": closest,
        "train": None,
    }
    return result(**{**values, **changes})


FEWEST = confirmed(512, 2.1, (32, 33, 35), 0.0419, number=21)


def steps(**changes: Any) -> StudyResult:
    """A study for the fewest steps that says switch, but for what is changed."""
    values: dict[str, Any] = {
        "objective": "steps",
        "best": FEWEST,
        "speedup": Speedup(value=201 / 33, low=4.9, high=7.6, at_least=False),
        "near_optimal": (512, 1024),
        "lr_alone": None,
        "faster": Faster(batch_size=118, lr=1.18, seconds=0.0331, speedup=0.0419 / 0.0331),
        "train": "bstune +workload=digits trial.batch_size=512 trial.lr=2.1",
    }
    return result(**{**values, **changes})


def of_curve(**changes: Any) -> StudyResult:
    """A study of the curve whose B_crit has a wide interval, but for what is changed."""
    values: dict[str, Any] = {
        "objective": "curve",
        "verdict": None,
        "best": None,
        "baseline": None,
        "speedup": None,
        "near_optimal": None,
        "lr_alone": None,
        "searched": Searched(low=8, high=1024, octaves=7, reached=6, to_add=(724,)),
        "missing": "more trials",
        "next": f"{COMMAND} trials=128",
        "train": None,
    }
    return result(**{**values, **changes})


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

STATES: dict[str, StudyResult] = {
    "switch": result(),
    "switch, three warnings": result(warnings=(STEP_TIMES, FEW_OCTAVES, FAR)),
    "keep": keep(),
    "not yet: the interval is too wide": not_yet(),
    "not yet: no new seeds": not_yet(
        best=BEST.model_copy(update={"seeds": (), "runs_steps": (), "runs_status": ()}),
        speedup=None,
        lr_alone=None,
        missing="time for new seeds",
        next=f"{COMMAND} wall_seconds=180",
    ),
    "not yet: the baseline is the best": not_yet(
        best=BASELINE,
        speedup=Speedup(value=0.89, low=0.56, high=1.41, at_least=False),
        lr_alone=None,
    ),
    "not yet: nothing but the baseline": not_yet(
        best=BASELINE.model_copy(update={"seeds": (), "runs_steps": (), "runs_status": ()}),
        speedup=None,
        lr_alone=None,
        missing="another configuration that reaches the target",
        next=f"{COMMAND} trials=128",
    ),
    "use": use(),
    "baseline missed in its budget": baseline_missed("budget", 17.2),
    "baseline stopped": baseline_missed("stopped", 4.0),
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
    "nothing reached: stopped early": nothing_reached(
        "stopped early", easier_goal=0.08, easier=EASIER, next=f"{COMMAND} trials=128"
    ),
    "nothing reached: failed": nothing_reached(
        "failed", missing="ValueError: 17 is no class (model.py:12)"
    ),
    "largest size binds": result(critical=critical(None, 812.0, None)),
    "no critical batch size": result(critical=critical(None, None, None)),
    "steps: switch": steps(),
    "steps: nothing else is faster": steps(faster=None),
    "steps: keep": steps(
        verdict="keep",
        best=BASELINE,
        other=FEWEST.model_copy(update={"steps": 190.0, "seconds": 0.241}),
        speedup=Speedup(value=201 / 190, low=0.96, high=1.2, at_least=False),
        faster=None,
        train=None,
    ),
    "steps: not yet": steps(
        verdict="not yet",
        speedup=Speedup(value=201 / 33, low=0.9, high=41.0, at_least=False),
        faster=None,
        missing="more new seeds",
        next=f"{COMMAND} seeds=6",
        train=None,
    ),
    "steps: use": steps(verdict="use", baseline=None, speedup=None),
    "steps: baseline missed": steps(
        baseline=confirmed(64, 0.4, (938,) * 3, 0.45, "missed"),
        baseline_limit="budget",
        speedup=Speedup(value=938 / 33, low=22.0, high=None, at_least=True),
    ),
    "steps: nothing reached": nothing_reached(
        "flat", objective="steps", easier_goal=0.08, easier=EASIER
    ),
    "curve": of_curve(),
    "curve: narrow": of_curve(
        critical=critical(58.0, 41.0, 80.0), missing=None, next=None, allowed_rules=()
    ),
    "curve: open above": of_curve(
        critical=critical(None, 412.0, None),
        missing="batch sizes 8 to 4,096",
        next=f"{COMMAND} batch_size.low=8 batch_size.high=4096 study=digits-2",
    ),
    "curve: open below": of_curve(critical=critical(None, None, 12.0), warnings=(FAR,)),
    "curve: both ends open": of_curve(critical=critical(None, None, None)),
    "curve: nothing reached": nothing_reached(
        "diverged", objective="curve", next=f"{COMMAND} lr.high=0.01 study=digits-2"
    ),
}


def records() -> list[Record]:
    """A study's 40 trials around the law, some resumed, pruned or failed, and new seeds."""
    made: list[Record] = []
    for number in range(40):
        size = 8 * 2 ** (number % 7)
        off = ((number * 7) % 11 - 5) / 4
        made.append(_search_record(number, size, off))
    for index in range(3):
        for configuration in (BEST, BASELINE):
            made.append(_new_seed(len(made), configuration, index))
    return made


def _search_record(number: int, size: int, off: float) -> Record:
    """A trial ``off`` octaves from the best rate."""
    lr = 1.18 * (size / 118) ** 0.45 * 2.0**off
    steps = round(steps_of(size) * (1 + 0.35 * off**2))
    status: Status = "reached"
    if abs(off) >= 1.0:
        status = "pruned"
    if off > 1.0:
        status = "diverged"
    if number == 13:
        status = "failed"
    role = "search" if number else "baseline"
    history = tuple((step, 2.3 / (1 + step / steps * 22)) for step in range(1, steps + 1, 4))
    return Record(
        number=number,
        place=f"search/{number}",
        role=role,
        batch_size=size,
        lr=lr,
        seed=number,
        max_steps=1000,
        status=status,
        steps=steps,
        steps_low=steps - 3,
        seconds_per_step=step_seconds_of(size),
        train_seconds=steps * step_seconds_of(size),
        other_seconds=0.01,
        history=history,
        resumed_from=17 if number == 24 else None,
        message="RuntimeError: shapes do not match (model.py:40)" if number == 13 else "",
    )


def _new_seed(number: int, configuration: Confirmed, index: int) -> Record:
    steps = configuration.runs_steps[index]
    return Record(
        number=number,
        place=f"seed/{configuration.number}/{index}",
        role="new seed",
        batch_size=configuration.batch_size,
        lr=configuration.lr,
        seed=100 + index,
        max_steps=1000,
        repeats=configuration.number,
        status="reached",
        steps=steps,
        steps_low=steps - 3,
        seconds_per_step=configuration.step_seconds,
        train_seconds=steps * configuration.step_seconds,
        history=((steps - 3, 0.12), (steps, 0.098)),
    )
