"""What a project tells of itself, and the options that follow from it; nothing here needs torch."""

import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from bstune.core.errors import InputError, StudyError
from bstune.core.records import Frozen, Mode, Target
from bstune.core.rules import Rule
from bstune.core.space import Number, Tunable
from bstune.options import Options, options_from
from bstune.recipe.recipe import epoch_examples
from bstune.system.console import exact

# Words of a metric's name that say whether it falls or rises.
FALL = ("loss", "error", "err", "perplexity", "mae", "mse", "rmse")
RISE = (
    *("acc", "accuracy", "f1", "auc", "auroc", "iou", "dice"),
    *("map", "bleu", "r2", "psnr", "ssim"),
)
# The metric that is meant where several are logged: val_loss, val/loss, valid.loss ...
VALIDATION_LOSS = re.compile(r"(val|valid|validation)\W?_?loss", re.IGNORECASE)
# The range of batch sizes around the baseline's.
SMALLER = 16
LARGER = 32
# A trial may take so many times the steps in which the pilot reached the target.
BUDGET_RATIO = 3
# A target that is found is easier than the best that one seed reached, by this part of what it
# gained from untrained weights, and at most this part of its value.
SLACK = 0.05
MOST_SLACK = 0.25
# Significant digits of such a target.
DIGITS = 2


class Found(Frozen):
    """What a project tells of itself; None: it does not tell."""

    batch_size: int | None
    lr: float | None
    examples: int | None
    """Of the training set; None: a stream does not tell."""
    epochs: int | None
    """The Trainer's ``max_epochs``."""
    steps: int | None
    """The Trainer's ``max_steps``."""
    limit_train_batches: int | float
    """Of an epoch, by the Trainer; 1.0: all."""
    metrics: tuple[str, ...]
    """That are logged in validation."""
    metric: str | None
    """The one that is meant."""
    untrained: float | None
    """Its value for untrained weights, on the first batch of the validation data."""
    mode: Mode | None
    """Whether it falls or rises."""
    rule: Rule
    """That suits its optimizers."""
    values: dict[str, Number | None] = {}
    """Further values of today, by name; None: it does not tell."""
    parameters: int | None = None
    """Of the module, that are trained."""
    sources: dict[str, str]
    """Where a value was found, by the names above."""

    @property
    def meant(self) -> tuple[str, Mode]:
        """The metric and its direction; only once :func:`fill_by_found` has seen that there are."""
        assert self.metric is not None and self.mode is not None  # noqa: PT018, S101
        return self.metric, self.mode

    @property
    def without_goal(self) -> Target:
        """What is meant, of which the best value counts."""
        metric, mode = self.meant
        return Target(metric, None, mode)

    def length(self, batch_size: int) -> int | None:
        """The Trainer's length at a batch size, in steps, by max_steps or max_epochs, the shorter.

        None: it has neither, or max_epochs alone over a training set of unknown size.
        """
        lengths = [self.steps] if self.steps is not None else []
        epoch = epoch_examples(self.examples, batch_size, self.limit_train_batches)
        if self.epochs is not None and epoch is not None:
            lengths.append(math.ceil(self.epochs * epoch / batch_size))
        return min(lengths, default=None)


def mode_by_name(metric: str) -> Mode | None:
    """Whether a metric of this name falls or rises; None: its name does not tell.

    >>> mode_by_name("val/loss"), mode_by_name("valid_top1_acc"), mode_by_name("score")
    ('min', 'max', None)
    """
    # "val_error_of_r2" ends with what it is: the last word counts.
    words = re.split(r"[^A-Za-z0-9]+", metric)
    if "neg" in words:
        return None
    for word in reversed(words):
        # "valAcc" is two words, "mAP" is one.
        for part in (word, *reversed(re.findall(r"[A-Z]*[a-z0-9]+|[A-Z]+", word))):
            if part.lower() in FALL or part.lower().endswith("loss"):
                return "min"
            if part.lower() in RISE or part.lower().endswith(("accuracy", "iou")):
                return "max"
    return None


def chosen_metric(
    metrics: Sequence[str], monitors: Mapping[str, Mode]
) -> tuple[str | None, Mode | None, str]:
    """Choose the validation metric that is meant, its direction, and say why.

    It is the one that a call-back or a schedule monitors, else the only one, else the one called
    validation loss. Its name tells the direction; where it does not, the call-back does.

    Args:
        metrics: that are logged in validation.
        monitors: names that call-backs monitor, and their directions.
    """
    losses = [name for name in metrics if VALIDATION_LOSS.fullmatch(name)]
    ways = (
        ([name for name in monitors if name in metrics], "a call-back or a schedule monitors it"),
        (metrics, "the only one that is logged"),
        (losses, f"of {', '.join(metrics)}, the validation loss"),
    )
    for names, why in ways:
        if len(names) == 1:
            return names[0], mode_by_name(names[0]) or monitors.get(names[0]), why
    return None, None, ""


def fill_by_stored(options: Options, setting: Callable[[str], Any]) -> Options:
    """Fill what is open by what a study was begun with, which the same command goes on with.

    Args:
        options: as given.
        setting: gives a setting of the stored study by its name; None where there is none.
    """
    values = options.model_dump()
    for name in ("target", "scaling", "threads"):
        # Recorded runs have 0 threads.
        if values[name] is None:
            values[name] = setting(name) or None
    for section in ("budget", "batch_size", "baseline"):
        stored = setting(section) or {}
        if not isinstance(stored, dict):
            raise StudyError(f"the study has {section}={stored!r:.200}: give another study=NAME")
        opened = section == "budget" and options.is_open("budget.steps")
        for key, value in stored.items():
            if opened or values[section][key] is None:
                values[section][key] = value
    # The training set bounds batch sizes that were given, too.
    sizes = values["batch_size"]
    examples = setting("examples")
    if examples is not None and sizes["high"] is not None:
        sizes["high"] = min(sizes["high"], examples)
    return options_from(values)


def fill_by_found(
    options: Options, found: Found, command: Callable[[Mapping[str, object]], str]
) -> tuple[Options, list[str]]:
    """Fill what nobody gave by what the project tells: all but a target, which is run for.

    Args:
        options: as given.
        found: what the project tells.
        command: what runs the study with further options.

    Returns:
        The options, and a line for each thing that was looked up.

    Raises:
        InputError: one line for all that has to be given, with the call; or a contradiction.
    """
    values = options.model_dump()
    baseline, budget = values["baseline"], values["budget"]
    absent: dict[str, str] = {}
    lines = _fill_pair(values, found, absent)
    if options.is_open("target"):
        lines += _metric_line(found, absent)
    if None not in (baseline["batch_size"], baseline["lr"]):
        lines += _fill_values(baseline, found, absent)
        check_whole_ranges(options.tunables, baseline["values"])
    if options.seeks_metric and budget["steps"] is None and found.length(1) is None:
        absent["budget.seconds"] = "no max_steps of the Trainer, or max_epochs of a known length"
    if absent:
        call = command(_example_values(absent, options, found, baseline["values"] or {}))
        raise InputError(f"{', and '.join(absent.values())}: give {', '.join(absent)}, as {call}")
    lines += _fill_range(values["batch_size"], baseline["batch_size"], found)
    used = baseline["batch_size"]
    length = None if used is None else found.length(used)
    if budget["steps"] is None and length is not None:
        # All sizes may take as many examples, large ones half as many steps at least.
        budget |= {"steps": max(1, length // 2), "examples": length * used}
        lines.append(f"{length:,} steps: {found.sources['steps']}")
    if options.validation_batch_size is None:
        lines.append("validation keeps its own batch size in all trials")
    values["scaling"] = options.scaling or found.rule
    if options.seeks_metric and options.is_open("target"):
        values["target"] = found.without_goal
    return options_from(values), lines


def _fill_pair(values: dict[str, Any], found: Found, absent: dict[str, str]) -> list[str]:
    """Fill the baseline's batch size and rate; where ranges say what to try, both or neither."""
    baseline, sizes, rates = values["baseline"], values["batch_size"], values["lr"]
    has_ranges = None not in (sizes["low"], sizes["high"], rates["low"], rates["high"])
    if has_ranges and None in (found.batch_size, found.lr):
        return []
    lines = []
    names = {"batch_size": "batch size", "lr": "learning rate"}
    for key, name in names.items():
        if baseline[key] is not None:
            continue
        baseline[key] = getattr(found, key)
        if baseline[key] is None:
            absent[f"baseline.{key}"] = f"no {name} of {found.sources[key]}"
        else:
            lines.append(f"{name} {baseline[key]:g}: {found.sources[key]}")
    return lines


def _fill_values(baseline: dict[str, Any], found: Found, absent: dict[str, str]) -> list[str]:
    """Fill the baseline's further values; InputError for one that is not tuned."""
    given = baseline["values"] or {}
    if not given.keys() <= found.values.keys():
        tuned = ", ".join(found.values) or "nothing"
        raise InputError(
            f"baseline.values must name what tune does, {tuned}, but got {', '.join(given)}"
        )
    baseline["values"] = found.values | given
    unknown = [name for name, value in baseline["values"].items() if value is None]
    if unknown:
        absent["baseline.values"] = f"no default of {', '.join(unknown)} is found"
    return [
        f"{name} {exact(own)}: the project's own"
        for name, own in found.values.items()
        if name not in given and own is not None
    ]


def _example_values(
    absent: Collection[str], options: Options, found: Found, known: Mapping[str, Number | None]
) -> dict[str, object]:
    """A value for each option that has to be given."""
    metric = found.metric or "METRIC"
    unknown = [one for one in options.tunables if known.get(one.name, 0) is None]
    examples: dict[str, object] = {
        "baseline.batch_size": 32,
        "baseline.lr": 0.1,
        "target": f"min {metric}" if options.seeks_metric else f"{metric} <= GOAL",
        "budget.seconds": 60,
        "baseline.values": {one.name: one.value(0.5) for one in unknown},
    }
    return {name: examples[name] for name in absent}


def _fill_range(sizes: dict[str, Any], used: int | None, found: Found) -> list[str]:
    """Fill the range of batch sizes, up to the training set; InputError where that is too small."""
    examples = math.inf if found.examples is None else found.examples
    least = max(sizes["low"] or 1, used or 1)
    if least > examples:
        raise InputError(
            f"the training set has {examples} examples: give baseline.batch_size and "
            f"batch_size.low of at most that, but got {least}"
        )
    fill_sizes(sizes, used)
    if sizes["high"] <= examples:
        return []
    sizes["high"] = examples
    return [f"batch sizes up to {examples:,}: the training set has no more examples"]


def check_whole_ranges(tunables: Sequence[Tunable], of_today: Mapping[str, float]) -> None:
    """InputError for a range of whole numbers whose baseline is none."""
    for one in tunables:
        if one.is_whole and isinstance(of_today.get(one.name), float):
            raise InputError(
                f"tune must give {one.name} ends with a decimal point, [{one.low}.0, {one.high}.0],"
                f" as the baseline's {of_today[one.name]} has: between [{one.low}, {one.high}] all "
                f"values are whole"
            )


def fill_sizes(sizes: dict[str, Any], baseline: int | None) -> None:
    """Fill the ends of a range of batch sizes that are None by the baseline's batch size."""
    if baseline is not None:
        sizes["low"] = sizes["low"] or max(1, baseline // SMALLER)
        sizes["high"] = sizes["high"] or LARGER * baseline


def _metric_line(found: Found, absent: dict[str, str]) -> list[str]:
    """Say which metric is meant, or add to what is absent."""
    logged = ", ".join(found.metrics)
    if not found.metrics:
        absent["target"] = "no metric is logged in validation (self.log in validation_step)"
    elif found.metric is None:
        absent["target"] = f"several metrics are logged in validation, {logged}"
    elif found.mode is None:
        absent["target"] = f"{found.metric} does not tell whether it has to fall (<=) or rise (>=)"
    else:
        how = "falls" if found.mode == "min" else "rises"
        return [f"metric {found.metric}, which {how}: {found.sources['metric']}"]
    return []


def target_of(
    metric: str, mode: Mode, untrained: float, history: Sequence[tuple[int, float]]
) -> Target:
    """The target that a pilot run reached, with some slack: further seeds have to reach it, too.

    The slack is ``SLACK`` of what training gained, at most ``MOST_SLACK`` of the best value; then
    it is rounded to what is easier.

    >>> str(target_of("val/loss", "min", 2.3, [(10, 0.9), (20, 0.4321)]))
    'val/loss <= 0.53'
    >>> str(target_of("val/acc", "max", 0.1, [(10, 0.5), (20, 0.9)]))
    'val/acc >= 0.86'

    Args:
        metric, mode: its name and direction.
        untrained: its value before the first step.
        history: (step, metric) of the pilot's evaluations.

    Raises:
        InputError: the metric did not improve.
    """
    sign = 1.0 if mode == "min" else -1.0
    best = sign * min((sign * value for _, value in history), default=math.inf)
    gained = sign * (untrained - best)
    if not gained > 0.0:
        comparison = "<=" if mode == "min" else ">="
        raise InputError(
            f"{metric} did not improve in the baseline's first {history[-1][0] if history else 0} "
            f"steps: it was {untrained:.4g} before them, and {best:.4g} at best; give "
            f"target='{metric} {comparison} GOAL'"
        )
    goal = best + sign * min(SLACK * gained, MOST_SLACK * abs(best))
    return Target(metric, eased(goal, mode), mode)


def eased(goal: float, mode: Mode) -> float:
    """A goal in ``DIGITS`` significant digits, on the easier side.

    Of one between 0 and 1 that rises, such as an accuracy, it is what it lacks of 1 that has them.
    """
    if mode == "min":
        return _rounded_up(goal)
    lowered = 1.0 - _rounded_up(1.0 - goal) if 0.0 < goal < 1.0 else -_rounded_up(-goal)
    return round(lowered, 12)


def _rounded_up(value: float) -> float:
    """The next number of ``DIGITS`` significant digits that is not below.

    For a goal that falls; :func:`eased` turns one that rises around.
    """
    if value == 0.0:
        return 0.0
    digits = DIGITS - 1 - math.floor(math.log10(abs(value)))
    scale = 10.0**digits
    # The least above a float's error, so that 0.44 stays 0.44.
    return round(math.ceil(value * scale - 1e-9) / scale, max(digits, 0))


def fill_by_pilot(
    options: Options, found: Found, history: Sequence[tuple[int, float]]
) -> tuple[Options, str]:
    """Fill the target by what a pilot run reached, and the budget where no length was found.

    Args:
        options: completed.
        found: what the project tells.
        history: (step, metric) of the pilot's evaluations, at the baseline.

    Returns:
        The options, and a line that says what was filled.

    Raises:
        InputError: the metric did not improve.
    """
    values = options.model_dump()
    target = options.target
    if options.is_open("target"):
        metric, mode = found.meant
        target = target_of(metric, mode, found.untrained or 0.0, history)
    steps = next((step for step, value in history if target.reached(value)), history[-1][0])
    values["target"] = target
    line = f"target {target}: the baseline reached it in {steps:,} steps"
    if options.is_open("budget.steps"):
        most = BUDGET_RATIO * steps
        used = options.baseline.batch_size or 1
        values["budget"] |= {"steps": most // 2, "examples": most * used}
        line += f", of which a trial may take {BUDGET_RATIO} times as many"
    return options_from(values), line
