"""Runs a published CIFAR-10 script as it is, with a timer around each part: source.py SCRIPT RUNS.

For airbench94.py, airbench94_muon.py and cifar10_speedrun.py, whose own seconds are those of whitening, training and
the last evaluation in one. A line of JSON a run: the script's seconds and accuracy, and what is left for training. The
first run is to warm up, as the scripts' own is. The data are read from cifar10/ in the working directory.
"""

import inspect
import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

# The scripts' level of the evaluation that counts.
VIEWS = 2


def timed_as(part: str, work: Callable[..., Any], spent: dict[str, float]) -> Callable[..., Any]:
    """``work`` with its seconds added to ``spent[part]``; evaluations of other levels are not the run's own."""

    def timed(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("tta_level", VIEWS) != VIEWS:
            return work(*args, **kwargs)
        synchronize()
        start = time.perf_counter()
        result = work(*args, **kwargs)
        synchronize()
        spent[part] += time.perf_counter() - start
        return result

    return timed


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def run(script: Path, runs: int) -> None:
    """Run a script's ``main`` once to warm up, then ``runs`` times."""
    # The scripts read themselves from here.
    sys.argv = [str(script)]
    names: dict[str, Any] = {"__name__": "source", "__file__": str(script)}
    exec(compile(script.read_text(), str(script), "exec"), names)  # noqa: S102  # its functions, not its own runs
    spent: dict[str, float] = defaultdict(float)
    seen: dict[str, Any] = {}
    names["evaluate"] = timed_as("views", names["evaluate"], spent)
    if (name := "init_whitening_conv") in names:
        names[name] = timed_as("whitening", names[name], spent)
    else:
        network = names["CifarNet"]
        network.init_whiten = timed_as("whitening", network.init_whiten, spent)
    names["print_training_details"] = lambda variables, is_final_entry: seen.update(variables)
    arguments: list[Any] = []
    # Those that compile share a network.
    if len(inspect.signature(names["main"]).parameters) > 1:
        model = names["CifarNet"]().cuda().to(memory_format=torch.channels_last)
        model.compile(mode="max-autotune")
        arguments = [model]
    for number in ("warmup", *range(runs)):
        spent.clear()
        start = time.perf_counter()
        names["main"](number, *arguments)
        wall = time.perf_counter() - start
        whole = seen.get("total_time_seconds", seen.get("time_seconds"))
        print(
            json.dumps(
                {
                    "script": script.name,
                    "run": number,
                    "accuracy": seen["tta_val_acc"],
                    "seconds": whole,
                    "training_seconds": whole - spent["whitening"] - spent["views"],
                    "whitening_seconds": spent["whitening"],
                    "views_seconds": spent["views"],
                    "wall_seconds": wall,
                }
            ),
            flush=True,
        )


if __name__ == "__main__":
    run(Path(sys.argv[1]).resolve(), int(sys.argv[2]))
