"""Trials under protocol.fast=graph on fake CUDA tensors: what a captured step would ask of the host, or get wrong.

    python tests/fake_cuda/captured.py resnet_cifar airbench_muon [--precision bf16-mixed] [--steps 12]

Prints a JSON line a workload: the loop that took the steps, how many were replayed, the median of operators in them,
what they asked of the host, and what was not the same in all of them: both are to be empty. There are no CUDA graphs
here, so that a replay runs the step again.
"""

import argparse
import collections
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import library
from run import WORKLOADS, Case, _train, prepare


def captured(case: Case) -> dict[str, Any]:
    """Run a case and return what its replays were."""
    from watch import LOG, changes, watching

    from bstune.trial.fast import capturable, device_state, graph, lean_loop

    steps: list[list[Any]] = []
    events: collections.Counter = collections.Counter()
    loops: list[Any] = []

    def record(step: Callable[[], None], generators: Sequence[Any]) -> Callable[[], None]:
        def replay() -> None:
            before = LOG.events.copy()
            LOG.end_step()
            # The rates are tensors, as when it was captured.
            with loops[-1]._tensor_rates():
                step()
            # The first one is compared with its step, outside of the clock.
            if LOG.phase == "training":
                # Operators that are given several memory formats are slow, and captured as any
                # other.
                asked = LOG.events - before
                events.update(
                    {
                        key: times
                        for key, times in asked.items()
                        if key[1] != "several memory formats"
                    }
                )
                steps.append(LOG.steps[-2])

        return replay

    class Loop(graph.CapturedSteps):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            loops.append(self)

    graph.record, lean_loop.CapturedSteps = record, Loop  # type: ignore[misc]
    # The hook that is there is LOG's own, and is called in a replay too.
    capturable.has_step_hooks = lambda optimizer: False
    # Fake tensors have neither values nor places, and no generators.
    graph.first_difference = lambda *arguments: None
    device_state.generators_of = lambda module: []
    graph.host_random = lambda device: []
    with watching(), tempfile.TemporaryDirectory() as folder:
        _train(case, Path(folder))
    return {
        "workload": case.workload,
        "reason": loops[-1].reason if loops else "Lightning's loop",
        "replayed": len(steps),
        "operators": statistics.median(map(len, steps)) if steps else None,
        "asked": [[*key, times] for key, times in sorted(events.items())],
        "changes": changes(steps, 0),
    }


if __name__ == "__main__":
    if str(library.HERE) not in os.environ.get("LD_PRELOAD", ""):
        if reason := library.missing():
            sys.exit(f"nothing runs on fake CUDA tensors here: {reason}")
        os.execve(sys.executable, [sys.executable, *sys.argv], library.environment())  # noqa: S606 (the same program)
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("workloads", nargs="*", default=WORKLOADS)
    parser.add_argument("--precision", default="bf16-mixed")
    parser.add_argument("--steps", type=int, default=12)
    options = parser.parse_args()
    prepare()
    for name in options.workloads:
        print(
            json.dumps(
                captured(
                    Case(name, options.precision, None, options.steps, ("protocol.fast=graph",))
                )
            )
        )
