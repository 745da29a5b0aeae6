"""Runs bstune's own trials on fake CUDA tensors, on a machine without CUDA, and says what they ask of the device.

    python tests/fake_cuda/run.py resnet_cifar airbench_muon [--precision bf16-mixed] [--batch-size B] [--steps 12]
        [--override OPTION=VALUE ...] [--examples 50000] [--resume] [--survey] [--operators] [--all] [--json]

Mixed devices raise an error in the fake tensors themselves. Printed are reads of values on the host, copies between
host and device, explicit synchronisations, convolutions on images of several memory formats, and lists that a fused
optimizer's kernel refuses, while the training runs (of all phases with ``--all``), operators a step,
and what changes from step to step, which a captured CUDA graph would get wrong. Not seen are time, memory, streams,
numbers, and whether a kernel exists for its arguments. It starts itself again with guard.cpp loaded before torch.
"""

import argparse
import collections
import contextlib
import json
import logging
import os
import statistics
import sys
import tempfile
import traceback
import warnings
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import library

# Others have CIFAR's.
IMAGE_SHAPES = {
    "digits": (1, 8, 8),
    "fashion_mlp": (1, 28, 28),
    "mnist_cnn": (1, 28, 28),
    "fashion_cnn": (1, 28, 28),
    "mnist_mlp": (1, 28, 28),
    "mnist_simple_cnn": (1, 28, 28),
}
RECURRENT = ("shakespeare_lstm",)
TEXTS = ("shakespeare_transformer", "shakespeare_lstm")
# After so many steps nothing is built any more, such as an optimizer's state.
FIRST_STEPS = 3
WORKLOADS = (
    *("digits", "fashion_mlp", "mnist_cnn", "fashion_cnn", "cifar_mlp"),
    *("mnist_mlp", "mnist_simple_cnn", "cifar_resnet8"),
    *(
        "resnet_cifar",
        "resnet_cifar_fast",
        "airbench_cifar",
        "airbench_muon",
        "speedrun_cifar",
        "mobilenet_cifar",
    ),
    *TEXTS,
)


@dataclass(frozen=True)
class Case:
    """What is run: a trial, a trial that is stopped half-way and resumed, or the survey's timing of a batch size."""

    workload: str
    precision: str = "bf16-mixed"
    batch_size: int | None = None  # None: the workload's reference
    steps: int = 12
    overrides: tuple[str, ...] = ()
    examples: int = 10_240  # of made training images; mobilenet_cifar's 45,000 would be 150 MB
    resumes: bool = False
    surveys: bool = False


def run(case: Case) -> dict[str, Any]:
    """Run a case and return what was seen as plain data; ``error`` is the traceback of one that failed."""
    from watch import LOG, changes, watching

    seen: dict[str, Any] = {"case": asdict(case), "error": None}
    try:
        with watching(), tempfile.TemporaryDirectory() as folder:
            seen |= _survey(case) if case.surveys else _train(case, Path(folder))
    except Exception:  # noqa: BLE001 (all cases are to be reported)
        seen["error"] = traceback.format_exc()
    by_phase: collections.Counter = collections.Counter()
    for (phase, _), times in LOG.operators.items():
        by_phase[phase] += times
    # These are without what follows the last step.
    steps = LOG.steps[:-1]
    lengths = [len(step) for step in steps]
    return seen | {
        "events": [[*key, times] for key, times in sorted(LOG.events.items())],
        "operators": dict(by_phase),
        "operators_a_step": round(statistics.mean(lengths[FIRST_STEPS:]), 1)
        if lengths[FIRST_STEPS:]
        else None,
        "lengths": lengths,
        "names": dict(collections.Counter(one.name for one in steps[-2]).most_common())
        if steps[1:]
        else {},
        "changes": changes(steps, FIRST_STEPS),
    }


def _load(case: Case) -> tuple[Any, Any, Any, Any, int]:
    """The options, the recipe, the workload, the protocol and the batch size of a case."""
    from bstune.config import ADDS, compose, with_settings
    from bstune.core.records import Budget
    from bstune.trial.workload import load_workload, resolve

    arguments = [
        f"workload={case.workload}",
        "device=cuda",
        f"precision={case.precision}",
        *case.overrides,
    ]
    composed = compose(arguments)
    shape = list(IMAGE_SHAPES.get(case.workload, (3, 32, 32)))
    # Given, as they cannot be computed of fake tensors.
    given: dict[str, Any] = {"mean": [0.5] * shape[0], "std": [0.25] * shape[0]}
    if case.workload in TEXTS:
        given = {"load": {"_target_": "made.made_text", "_partial_": True, "vocabulary": 65}}
    # The images of digits ship with scikit-learn.
    elif case.workload != "digits":
        size = {"shape": shape, "examples": case.examples}
        given["load"] = {"_target_": "made.made_images", "_partial_": True, **size}
    settings = {f"{ADDS}workload.data.{name}": value for name, value in given.items()}
    changed = with_settings(composed, settings)
    options, recipe = resolve(changed.options, changed.trained_recipe)
    workload, protocol = load_workload(options, recipe)
    protocol = protocol.for_steps_only(Budget(case.steps, 1))
    size = int(case.batch_size or options.scaling.batch_size)
    return options, recipe, workload, protocol, size


def _decomposed(case: Case) -> contextlib.AbstractContextManager[Any]:
    """A mode that puts the operators of an LSTM in place of cuDNN's one, which torch's CPU build lacks."""
    from torch._dispatch.python import enable_python_dispatcher

    return enable_python_dispatcher() if case.workload in RECURRENT else contextlib.nullcontext()


def _train(case: Case, folder: Path) -> dict[str, Any]:
    from bstune.core.records import TrialSpec
    from bstune.trial.loop import run_trial
    from bstune.trial.parts.checkpoint import Stopped

    options, recipe, workload, protocol, size = _load(case)
    spec = TrialSpec(0, 0, size, options.scaling.lr, None, 0)
    with _decomposed(case):
        if case.resumes:
            half = replace(spec, max_steps=case.steps // 2)
            state = folder / "state"
            stopped = Stopped(run_trial(workload, half, protocol, state_file=state), state)
            spec = replace(spec, number=1, max_steps=case.steps, resumed_from=0)
            result = run_trial(workload, spec, protocol, resume=stopped)
        else:
            horizon = case.steps if recipe.takes("total_steps") else None
            result = run_trial(workload, spec, protocol, horizon=horizon)
    kept = ("status", "steps", "message", "seconds_per_step")
    evaluations = len(result.history)
    measured = len(result.noise_scale)
    return {name: getattr(result, name) for name in kept} | {
        "evaluations": evaluations,
        "noise_scales": measured,
    }


def _survey(case: Case) -> dict[str, Any]:
    import torch

    from bstune.hardware.timing import time_bare, time_trial

    options, _, workload, protocol, size = _load(case)
    arguments = (workload, protocol, size, options.scaling.lr, case.steps)
    with _decomposed(case):
        timed = {
            "trial": time_trial(*arguments),
            "bare": time_bare(*arguments, torch.device("cuda")),
        }
    return {name: list(seconds) for name, seconds in timed.items()}


def text(seen: dict[str, Any], operators: bool, phases: bool) -> str:
    """The record in words."""
    case = seen["case"]
    events = seen["events"]
    lines = [f"== {case['workload']} in {case['precision']}"]
    if seen["error"]:
        return "\n".join([*lines, seen["error"]])
    lines += [
        f"  {name}: {seen[name]}"
        for name in ("status", "steps", "evaluations", "message")
        if name in seen
    ]
    lines += [
        f"  {times:>5} x {kind} ({what}) in {phase}: {place}"
        for phase, kind, what, place, times in events
        if phases or phase == "training"
    ]
    lines.append(f"  operators by phase {seen['operators']}, a step {seen['operators_a_step']}")
    lines.append(f"  operators of each step {seen['lengths']}")
    if operators:
        lines += [f"      {times:>4} {name}" for name, times in seen["names"].items()]
    lines.append(
        "  from step to step nothing changes" if not seen["changes"] else "  from step to step:"
    )
    lines += [f"      {times:>4} x {what}" for what, times in seen["changes"].items()]
    return "\n".join(lines)


def prepare() -> None:
    """Import what trials need, then put the fake device in torch's place."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    import bstune.hardware.timing
    import bstune.trial.workload  # noqa: F401
    from bstune.system.console import quieten

    quieten()
    from device import replace_torch_cuda

    replace_torch_cuda()


def main() -> int:
    """Run the cases that the command line, or JSON lines on the standard input, give."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("workloads", nargs="*", default=WORKLOADS)
    parser.add_argument("--precision", default="bf16-mixed")
    parser.add_argument("--batch-size", type=int)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--override", nargs="*", default=[], metavar="OPTION=VALUE")
    parser.add_argument("--examples", type=int, default=Case.examples)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--survey", action="store_true")
    parser.add_argument("--operators", action="store_true", help="list those of one step")
    parser.add_argument("--all", action="store_true", help="events of all phases")
    parser.add_argument("--json", action="store_true", help="print JSON lines")
    parser.add_argument(
        "--cases", action="store_true", help="read the cases as JSON lines from the standard input"
    )
    options = parser.parse_args()
    cases = [
        Case(
            name,
            options.precision,
            options.batch_size,
            options.steps,
            tuple(options.override),
            options.examples,
            options.resume,
            options.survey,
        )
        for name in options.workloads
    ]
    if options.cases:
        cases = [Case(**json.loads(line)) for line in sys.stdin]
    prepare()
    failures = 0
    for case in cases:
        seen = run(case)
        failures += seen["error"] is not None
        print(
            json.dumps(seen) if options.json else text(seen, options.operators, options.all),
            flush=True,
        )
    return min(failures, 1)


if __name__ == "__main__":
    if str(library.HERE) not in os.environ.get("LD_PRELOAD", ""):
        if reason := library.missing():
            sys.exit(f"nothing runs on fake CUDA tensors here: {reason}")
        os.execve(sys.executable, [sys.executable, *sys.argv], library.environment())  # noqa: S606 (the same program)
    sys.exit(main())
