"""What only a GPU shows, in ten minutes on one device and without a network; tests/gpu/run.sh runs this.

Each result is a line of JSON in OUT/results.jsonl and on the screen, with its section and the seconds since the start.
A section that fails says so in a line, and the next one runs; one that has no time left is cut short, or left out.

    environment  versions, and what a launch costs
    tests        those that need CUDA
    workloads    every CIFAR recipe to its end: accuracy and seconds, several seeds
    sources      the scripts of their sources in the folder --sources, timed in the same way (see source.py)
    studies      a search of batch size and rate for two recipes, then its winner and the source's pair in turns
    own          a module that bstune does not know, tuned from Python in a process of its own
    table        airbench_cifar over batch size, learning rate and horizon, by tests/benchmarks/record_horizons.py
    loops        seconds per step of every recipe in each training loop, and whether they lead to the same error
    steps        seconds per step over batch size, of each training loop and precision
    operators    operators, kernels and the host's time a step
    compiled     a step of airbench_cifar by torch.compile, beside the eager one
    powers       of two, under AMP
    alignment    the layers of resnet_cifar as they are and padded, in 16 bits
    workers      trials side by side
    ceiling      the memory ceiling, exact to the multiple, of the whole device and of a part of it

BSTUNE_DATA holds CIFAR-10's binary files; without them images are random, which changes no time. With --device cpu
--tiny it runs without a GPU, in a minute, so that a test can show that it still does.
"""

import argparse
import contextlib
import functools
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import torch
from lightning.pytorch import seed_everything
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from bstune.core.records import Budget, TrialProtocol, TrialResult, TrialSpec
from bstune.hardware.probe import measure_ceiling
from bstune.study.prepare import compose_checked
from bstune.sweeps.dawnbench import NO_EVALUATION, accuracy
from bstune.system.console import quieten
from bstune.system.files import write_text
from bstune.trial.devices.device import device_name, processor, synchronize, versions
from bstune.trial.loop import Workload, run_trial
from bstune.trial.workload import build_workload, checked_protocol, resolve
from bstune.workloads import datasets
from bstune.workloads.datasets import ImageDataset, Images

CHECKOUT = Path(__file__).resolve().parents[2]
# The sources train to this accuracy.
LEVEL = 0.94
# The examples of each source's run, None: the workload's own budget; the shorter recipes first,
# each seed in turn.
RECIPES = {"airbench_cifar": 487_424, "airbench_muon": 400_000, "speedrun_cifar": 373_248}
LONG_RECIPES = {"resnet_cifar_fast": None, "resnet_cifar": None}
NARROW = dict.fromkeys(
    RECIPES, ("workload.module.model.widths=[4,4,4]", "workload.module.model.whitening.images=100")
)
NARROW["resnet_cifar_fast"] = (
    "workload.module.model.width=4",
    "workload.module.model.whitening.images=100",
)
NARROW["resnet_cifar"] = ("workload.module.model.width=4",)
# Values of protocol.fast.
LOOPS = ("off", "auto", "graph")
SCRIPTS = ("airbench94.py", "airbench94_muon.py", "cifar10_speedrun.py")
# Those that the section studies searches, and the share of its time that a search gets. The rest is
# for its winner beside the source's pair.
SEARCHED = ("airbench_cifar", "speedrun_cifar")
SEARCH_SHARE = 0.75
# Of a search on a CPU.
TINY_SEARCH = (
    "workload.data.train_examples=500",
    "scaling.batch_size=64",
    "search.batch_size.high=256",
    "budget.examples=2000",
    "workload.target.value=0.88",
)


@dataclass(frozen=True)
class Day:
    """The options of a run, and when it, or the section that runs, has to end."""

    out: Path
    device: str
    tiny: bool
    seeds: int
    sources: Path | None
    recipes: tuple[str, ...]  # the names of those to train
    recipe_options: tuple[str, ...]  # of bstune, for the recipes, such as protocol.fast=graph
    start: float  # of time.monotonic()
    end: float

    @property
    def left(self) -> float:
        """Seconds that are left."""
        return self.end - time.monotonic()

    @property
    def cuda(self) -> bool:
        """Whether there is a GPU."""
        return self.device.startswith("cuda")

    @property
    def precision(self) -> str:
        """The precision of a run that names none."""
        return "bf16-mixed" if self.cuda else "32-true"

    def say(self, section: str, **values: Any) -> None:
        """Add a line to the results."""
        line = json.dumps(
            {"section": section, "at": round(time.monotonic() - self.start, 1), **values},
            default=str,
        )
        print(line, flush=True)
        with (self.out / "results.jsonl").open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    def command(
        self, name: str, *arguments: str, **options: Any
    ) -> subprocess.CompletedProcess[str]:
        """Run Python for no longer than there is time, its output in OUT/NAME.log; raise with its end if it fails."""
        text = subprocess.run(
            [sys.executable, *arguments],
            capture_output=True,
            text=True,
            timeout=max(1.0, self.left),
            **options,
        )
        write_text(self.out / f"{name}.log", text.stdout + text.stderr)
        if text.returncode:
            raise RuntimeError(f"status {text.returncode}: {(text.stdout + text.stderr)[-800:]}")
        return text


# Trials


@functools.cache
def prepared(
    device: str, tiny: bool, name: str, *options: str
) -> tuple[Workload, TrialProtocol, int, float]:
    """A workload, its protocol, which never ends before its budget, and its batch size and learning rate."""
    arguments = [
        f"+workload={name}",
        f"device={device}",
        *(NARROW.get(name, ()) if tiny else ()),
        *options,
    ]
    composed = compose_checked(arguments)
    resolved, recipe = resolve(composed.options, composed.trained_recipe)
    protocol = checked_protocol(resolved, recipe)
    protocol = replace(
        protocol.for_steps_only(),
        noise_scale_every=None,
        evaluation_schedule=replace(protocol.evaluation_schedule, share=NO_EVALUATION),
        trainer={
            **protocol.trainer,
            "num_sanity_val_steps": 0,
            "benchmark": device.startswith("cuda"),
        },
    )
    size = int(resolved.scaling.batch_size)
    if tiny:
        size = min(size, 64)
    return build_workload(resolved, recipe), protocol, size, resolved.scaling.lr


def timed_trial(day: Day, name: str, size: int, steps: int, *options: str) -> TrialResult:
    """Train some steps at a small learning rate, and evaluate one batch."""
    workload, protocol, _, lr = prepared(
        day.device, day.tiny, name, *options, "budget.steps=100000"
    )
    protocol = replace(
        protocol, budget=Budget(steps, 1), trainer={**protocol.trainer, "limit_val_batches": 1}
    )
    return run_trial(workload, TrialSpec(0, 0, size, 1e-3 * lr, None, 0), protocol)


# Sections


def environment(day: Day) -> None:
    """Say what the numbers are read with, and what one launch costs."""
    trainer = {"accelerator": "cuda" if day.cuda else "cpu", "devices": [0]}
    day.say(
        "environment",
        device=device_name(trainer),
        cpu=processor(),
        cpus=os.cpu_count(),
        threads=torch.get_num_threads(),
        versions=dict(versions()),
        cudnn=torch.backends.cudnn.version(),
        tf32={
            "matmul": torch.backends.cuda.matmul.allow_tf32,
            "cudnn": torch.backends.cudnn.allow_tf32,
        },
        real_data=real_data(),
    )
    x = torch.zeros(8, device=day.device)
    launches = 200 if day.tiny else 5000
    # The first launches take longer.
    for _ in range(100):
        x.add_(1.0)
    synchronize()
    start = time.perf_counter()
    for _ in range(launches):
        x.add_(1.0)
    # The host is done once the last launch is queued.
    host = time.perf_counter() - start
    synchronize()
    both = time.perf_counter() - start
    day.say(
        "environment", us_a_launch=1e6 * host / launches, us_a_tiny_kernel=1e6 * both / launches
    )


def tests(day: Day) -> None:
    """Run the tests that need a GPU."""
    if not day.cuda:
        day.say("tests", left_out="they need a CUDA device")
        return
    files = []
    for path in (CHECKOUT / "tests").glob("test_*.py"):
        if "cuda.is_available()" in path.read_text():
            files.append(path)
    command = [
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:benchmark",
        "-m",
        "",
        "-k",
        "cuda",
    ]
    # Of the installed package: the checkout has no configs in it.
    run = day.command(
        "tests", *command, *map(str, files), cwd=CHECKOUT, env={**os.environ, "PYTHONSAFEPATH": "1"}
    )
    day.say("tests", files=len(files), end=run.stdout.strip().splitlines()[-1])


def workloads(day: Day) -> None:
    """Train each recipe to its end, on as many seeds as there is time for."""
    for every in (RECIPES, LONG_RECIPES):
        recipes = {name: examples for name, examples in every.items() if name in day.recipes}
        runs = list[RecipeRun]()
        for name, examples in recipes.items():
            budget = of_examples(640 if day.tiny else examples)
            arguments = (*budget, *day.recipe_options)
            runs.append(RecipeRun(name, arguments, said={"options": day.recipe_options}))
        in_turns(day, "workloads", runs)


@dataclass(frozen=True)
class RecipeRun:
    """A recipe that is trained to its end on several seeds."""

    name: str
    arguments: tuple[str, ...]  # of bstune
    said: dict[str, Any]  # beside its results
    pair: tuple[int, float] | None = None  # batch size and learning rate; None: the recipe's own


def of_examples(examples: int | None) -> tuple[str, ...]:
    """Give the arguments that end a run after so many examples; None: after the recipe's own."""
    return () if examples is None else ("budget.steps=1", f"budget.examples={examples}")


def in_turns(day: Day, section: str, runs: Sequence[RecipeRun]) -> None:
    """Train recipes to their ends, each seed in turn, on as many as there is time for."""
    trials: list[list[TrialResult]] = [[] for _ in runs]
    for seed, (place, run) in itertools.product(range(-1, day.seeds), enumerate(runs)):
        if trials[place] and day.left < 1.2 * trials[place][-1].wall_seconds:
            continue
        workload, protocol, *own_pair = prepared(day.device, day.tiny, run.name, *run.arguments)
        size, lr = run.pair or own_pair
        # Once before, for the choice of kernels; the schedule's horizon stays the recipe's.
        if seed < 0:
            run_trial(workload, TrialSpec(0, 0, size, lr, None, 0, max_steps=8), protocol)
            continue
        trial = run_trial(workload, TrialSpec(seed, seed, size, lr, None, seed), protocol)
        trials[place].append(trial)
        day.say(
            section,
            workload=run.name,
            **run.said,
            precision=protocol.trainer["precision"],
            batch_size=size,
            lr=lr,
            seed=seed,
            status=trial.status,
            accuracy=accuracy(trial),
            steps=trial.steps,
            training_seconds=trial.train_seconds,
            wall_seconds=trial.wall_seconds,
            evaluation_seconds=trial.eval_seconds,
            seconds_per_step=trial.seconds_per_step,
            loop=trial.training_loop,
            message=trial.message,
        )
    for run, ended in zip(runs, trials, strict=True):
        say_mean(day, section, ended, workload=run.name, **run.said)


def say_mean(day: Day, section: str, trials: list[TrialResult], **values: Any) -> None:
    """Say the mean accuracy of the trials that got to their end, and the median seconds of training."""
    ended = [value for value in map(accuracy, trials) if value is not None]
    if not ended:
        return
    day.say(
        section,
        **values,
        n=len(ended),
        accuracy=statistics.fmean(ended),
        accuracy_sd=statistics.stdev(ended) if len(ended) > 1 else None,
        at_level=sum(value >= LEVEL for value in ended) / len(trials),
        training_seconds=statistics.median(trial.train_seconds for trial in trials),
    )


def studies(day: Day) -> None:
    """Search batch size and learning rate of recipes, and train each winner beside its source's pair."""
    if not real_data():
        day.say("studies", left_out="they need CIFAR-10 in BSTUNE_DATA")
        return
    for place, name in enumerate(SEARCHED):
        seconds = day.left / (len(SEARCHED) - place)
        search_and_compare(replace(day, end=time.monotonic() + seconds), name)


def search_and_compare(day: Day, name: str) -> None:
    """Search one recipe's batch size and learning rate; see :func:`studies`."""
    folder = day.out / f"study_{name}"
    options = (*(NARROW[name] if day.tiny else ()), *day.recipe_options)
    tiny = TINY_SEARCH if day.tiny else ()
    command = (
        *("-m", "bstune", f"+workload={name}", f"device={day.device}", f"output={folder}"),
        *(f"search.wall_seconds={SEARCH_SHARE * day.left:.0f}", "search.trials=1000"),
        *("mlflow.enabled=false", *options, *tiny),
    )
    began = time.monotonic()
    text = day.command(f"study_{name}", *command).stdout
    found = json.loads((folder / "curve.json").read_text())
    winner = found["best_by_time"]
    day.say(
        "studies",
        workload=name,
        seconds=time.monotonic() - began,
        configurations=found["configurations"],
        statuses=found["statuses"],
        winner=winner,
        gain=found["gain"],
        critical_batch_size=(found["critical_batch_size"] or {}).get("value"),
        answer=text[text.find("USE") :],
    )
    if winner is None:
        return
    horizon = (f"budget.steps={winner['horizon']}", "budget.examples=1")
    runs = [
        RecipeRun(
            name=name,
            arguments=(*horizon, *options),
            said={"pair": "winner"},
            pair=(winner["batch_size"], winner["lr"]),
        ),
        RecipeRun(
            name=name,
            arguments=(*of_examples(640 if day.tiny else RECIPES[name]), *options),
            said={"pair": "source"},
        ),
    ]
    in_turns(day, "studies", runs)


def own(day: Day) -> None:
    """Tune a module that bstune does not know, its trials in a process of their own; see own.py."""
    name = "own"
    text = day.command(name, str(Path(__file__).with_name("own.py")), day.device)
    day.say(name, **json.loads(text.stdout.splitlines()[-1]))


def table(day: Day) -> None:
    """Record as much of airbench_cifar's table as there is time for, after the runs that are recorded."""
    if not day.cuda:
        day.say("table", left_out="its runs need a GPU")
        return
    file = day.out / "airbench_cifar.jsonl"
    runs = file.with_name(file.name + ".runs")
    if not runs.exists():
        shutil.copyfile(CHECKOUT / "tests" / "recorded" / "h200" / "airbench_table.runs", runs)
    script = CHECKOUT / "tests" / "benchmarks" / "record_horizons.py"
    # What it has recorded so far counts.
    with contextlib.suppress(subprocess.TimeoutExpired):
        day.command("table", str(script), "airbench_cifar", str(file))
    day.say("table", runs=len(runs.read_text().splitlines()))


def sources(day: Day) -> None:
    """Run the sources' scripts, as many seeds as our own."""
    scripts = []
    if day.sources is not None:
        scripts = [day.sources / name for name in SCRIPTS if (day.sources / name).exists()]
    if not scripts:
        day.say("sources", left_out=f"the folder --sources holds none of {', '.join(SCRIPTS)}")
        return
    folder = Path("cifar10")
    folder.mkdir(exist_ok=True)
    data = datasets.load_cifar10(root=os.environ.get("BSTUNE_DATA", ""))
    for part, name in ((data.train, "train.pt"), (data.test, "test.pt")):
        images = torch.from_numpy(part.images).permute(0, 2, 3, 1).contiguous()
        labels = torch.from_numpy(part.labels)
        torch.save(
            {"images": images, "labels": labels, "classes": list("0123456789")}, folder / name
        )
    for place, script in enumerate(scripts):
        share = replace(day, end=time.monotonic() + day.left / (len(scripts) - place))
        failed = None
        try:
            share.command(
                script.stem, str(Path(__file__).with_name("source.py")), str(script), str(day.seeds)
            )
        # What a script that was cut short has printed counts.
        except subprocess.TimeoutExpired as error:
            write_text(day.out / f"{script.stem}.log", (error.stdout or b"").decode())
            failed = "cut short"
        except RuntimeError as error:
            failed = str(error)
        lines = (day.out / f"{script.stem}.log").read_text().splitlines()
        for line in lines:
            if not line.startswith('{"script"'):
                continue
            day.say("sources", **json.loads(line))
        if failed:
            day.say("sources", script=script.name, failed=failed)


def loops(day: Day) -> None:
    """Say the seconds per step of each recipe in each training loop, and the error that the same steps lead to."""
    for name in (*RECIPES, *LONG_RECIPES):
        workload, protocol, size, lr = prepared(day.device, day.tiny, name, "budget.steps=100000")
        protocol = replace(protocol, budget=Budget(8 if day.tiny else 200, 1))
        for loop in LOOPS:
            if day.left < 15.0:
                return
            result = run_trial(
                workload, TrialSpec(0, 0, size, lr, None, 0), replace(protocol, fast=loop)
            )
            day.say(
                "loops",
                workload=name,
                batch_size=size,
                precision=protocol.trainer["precision"],
                fast=loop,
                loop=result.training_loop,
                seconds_per_step=result.seconds_per_step,
                error=result.history[-1][1] if result.history else None,
                message=result.message,
            )


def steps(day: Day) -> None:
    """Say the seconds per step of airbench_cifar, over batch size, precision and training loop."""
    precisions = ("bf16-mixed", "16-true") if day.cuda else ("32-true",)
    sizes = (1024, 128, 512, 2048, 64, 256) if not day.tiny else (16,)
    for size, precision in itertools.product(sizes, precisions):
        if day.left < 15.0:
            return
        for loop in LOOPS:
            options = (f"precision={precision}", f"protocol.fast={loop}")
            result = timed_trial(day, "airbench_cifar", size, 12 if day.tiny else 120, *options)
            values = {"seconds_per_step": result.seconds_per_step, "message": result.message}
            day.say(
                "steps",
                batch_size=size,
                precision=precision,
                fast=loop,
                loop=result.training_loop,
                **values,
            )


class Operators(TorchDispatchMode):
    """Counts the operators that do something, not views."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Count one."""
        self.count += not function.is_view
        return function(*args, **(kwargs or {}))


def operators(day: Day) -> None:
    """Say how many operators and kernels a step is, and what it takes of the host and of the device."""
    measures = (operators_of, host_seconds, *((kernels, device_seconds) if day.cuda else ()))
    for name in (*RECIPES, *LONG_RECIPES):
        if day.left < 15.0:
            return
        workload, protocol, size, lr = prepared(day.device, day.tiny, name, "budget.steps=100000")
        spec = TrialSpec(0, 0, size, 1e-3 * lr, None, 0)
        protocol = replace(protocol, trainer={**protocol.trainer, "limit_val_batches": 1})
        values = {}
        for measure in measures:
            values[measure.__name__] = a_step(measure, day, workload, spec, protocol)
        day.say(
            "operators",
            workload=name,
            batch_size=size,
            precision=protocol.trainer["precision"],
            a_step=values,
        )


def a_step(
    measure: Callable[[Callable[[], object]], float],
    day: Day,
    workload: Workload,
    spec: TrialSpec,
    protocol: TrialProtocol,
) -> float:
    """The part of a step in a measure: a trial's start and its evaluation are in both of two trials."""
    few, many = (3, 5) if day.tiny else (5, 25)

    def of(count: int) -> float:
        limited = replace(protocol, budget=Budget(count, 1))
        return measure(lambda: run_trial(workload, spec, limited))

    # Once before, for the choice of kernels.
    of(few)
    return (of(many) - of(few)) / (many - few)


def operators_of(work: Callable[[], object]) -> float:
    """The operators of some work."""
    with Operators() as mode:
        work()
    return mode.count


def host_seconds(work: Callable[[], object]) -> float:
    """The CPU seconds of some work."""
    start = time.process_time()
    work()
    return time.process_time() - start


def on_device(work: Callable[[], object]) -> Iterator[tuple[int, float]]:
    """Yield the number and the seconds of each kind of kernel that some work launches."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        work()
    for event in profiler.key_averages():
        if str(event.device_type).endswith("CUDA"):
            yield event.count, 1e-6 * event.self_device_time_total


def kernels(work: Callable[[], object]) -> float:
    """The kernels that some work launches."""
    return sum(count for count, _ in on_device(work))


def device_seconds(work: Callable[[], object]) -> float:
    """The seconds of the kernels that some work launches."""
    return sum(seconds for _, seconds in on_device(work))


def ceiling(day: Day) -> None:
    """Find the memory ceiling, exact to the multiple."""
    name, low, high, multiple = (
        ("digits", 64, 1200, 8) if day.tiny else ("airbench_cifar", 1024, 50_000, 8)
    )
    composed = compose_checked(
        [f"+workload={name}", f"device={day.device}", f"precision={day.precision}"]
    )
    options, recipe = resolve(composed.options, composed.trained_recipe)
    for limit in (None, 6 * 2**30) if day.cuda else (None,):
        start = time.monotonic()
        found = measure_ceiling(
            options,
            recipe,
            low,
            high,
            high,
            limit=limit,
            multiple=multiple,
            relative=0.0,
            steps=2,
            seconds=60.0,
            largest_first=True,
            verify=0,
        )
        day.say(
            "ceiling",
            workload=name,
            limit=limit,
            batch_size=found.batch_size,
            exact_to=found.precision,
            model_error=found.model_error,
            probes=[
                (probe.batch_size, probe.outcome, probe.peak_bytes, probe.message)
                for probe in found.probes
            ],
            seconds=time.monotonic() - start,
        )


def workers(day: Day) -> None:
    """Train the same trials one by one and side by side."""
    name, size, examples, trials = (
        ("digits", 64, 640, 2) if day.tiny else ("airbench_cifar", 1024, 200_000, 8)
    )
    for count in (1, 2) if day.tiny else (1, 2, 4):
        folder = Path(f"workers_{count}").resolve()
        day.command(
            f"workers_{count}",
            *(
                "-m",
                "bstune",
                f"+workload={name}",
                f"device={day.device}",
                f"precision={day.precision}",
            ),
            *(
                f"study=workers_{count}",
                f"output={folder}",
                f"search.workers={count}",
                f"search.trials={trials}",
            ),
            *(
                "sampler=random",
                "search.replicates=0",
                "hardware.seconds=5",
                "mlflow.enabled=false",
            ),
            *("budget.steps=1", f"budget.examples={examples}", "search.precision=null"),
            *(
                f"search.batch_size.low={size // 2}",
                f"search.batch_size.high={size}",
                "protocol.noise_scale_every=null",
            ),
        )
        records = [json.loads(line) for line in (folder / "trials.jsonl").read_text().splitlines()]
        ran = optuna.load_study(study_name=f"workers_{count}", storage="sqlite:///bstune.db").trials
        wall = max(trial.datetime_complete for trial in ran) - min(
            trial.datetime_start for trial in ran
        )
        day.say(
            "workers",
            workload=name,
            workers=count,
            trials=len(records),
            examples=sum(record["examples"] for record in records),
            training_seconds=sum(record["train_seconds"] for record in records),
            wall_seconds=wall.total_seconds(),  # of the trials, without the survey
            statuses=sorted({record["status"] for record in records}),
        )


def powers(day: Day) -> None:
    """Time batch sizes around powers of two, the source's under AMP."""
    folder = Path("powers").resolve()
    options = [
        "workload=mobilenet_cifar",
        "precision=16-mixed",
        "sweep.experiment.centres=[128,512]",
    ]
    options += ["sweep.experiment.repeats=6", "sweep.experiment.steps=10"]
    if day.tiny:
        options = [
            "workload=digits",
            "sweep.experiment.centres=[32]",
            "sweep.experiment.batch_sizes=[]",
        ]
        options += [
            "sweep.experiment.repeats=2",
            "sweep.experiment.steps=2",
            "sweep.experiment.ceiling=256",
        ]
    options += [f"device={day.device}", f"sweep.output={folder}"]
    day.command("powers", "-m", "bstune", "sweep", "powers_of_two", *options)
    found = json.loads((folder / "result.json").read_text())
    day.say("powers", sentence=found["sentence"], rows=found["rows"])


def compiled(day: Day) -> None:
    """Say the seconds of a compiled step beside those of an eager one."""
    for mode in ("null", "default"):
        began = time.monotonic()
        result = timed_trial(
            day, "airbench_cifar", 1024, 40, f"compile={mode}", "protocol.fast=auto"
        )
        day.say(
            "compiled",
            mode=mode,
            loop=result.training_loop,
            seconds_per_step=result.seconds_per_step,
            wall_seconds=time.monotonic() - began,
            message=result.message,
        )


def alignment(day: Day) -> None:
    """Time the layers whose dimensions miss the multiple of tensor cores, as they are and padded."""
    folder = Path("alignment").resolve()
    options = ["workload=digits"] if day.tiny else ["workload=resnet_cifar", "precision=bf16-mixed"]
    day.command(
        "alignment",
        *("-m", "bstune", "sweep", "alignment", f"device={day.device}", *options),
        *(f"sweep.output={folder}", "sweep.experiment.rounds=5"),
    )
    found = json.loads((folder / "result.json").read_text())
    day.say("alignment", sentence=found["sentence"], rows=found["rows"])


# Each with its share of the seconds that are left when it begins
SECTIONS: dict[str, tuple[Callable[[Day], None], float]] = {
    "environment": (environment, 1.0),
    "workloads": (workloads, 0.4),
    "studies": (studies, 0.6),
    "own": (own, 0.2),
    "table": (table, 0.5),
    "sources": (sources, 0.45),
    "tests": (tests, 0.3),
    "loops": (loops, 0.3),
    "steps": (steps, 0.3),
    "operators": (operators, 0.4),
    "compiled": (compiled, 0.3),
    "powers": (powers, 0.5),
    "alignment": (alignment, 0.3),
    "workers": (workers, 0.5),
    # Its probes, of some ten seconds each, end when they are done.
    "ceiling": (ceiling, 1.0),
}


def real_data() -> bool:
    """Whether CIFAR-10 is at hand."""
    return (
        Path(os.environ.get("BSTUNE_DATA", "/nowhere")) / "cifar-10-batches-bin" / "test_batch.bin"
    ).exists()


def random_cifar(tiny: bool) -> ImageDataset:
    """Images of CIFAR-10's form."""
    draw = np.random.default_rng(0)
    sizes = (500, 100) if tiny else (50_000, 10_000)
    parts = []
    for count in sizes:
        images = draw.integers(0, 256, (count, 3, 32, 32), np.uint8)
        parts.append(Images(images, draw.integers(0, 10, count)))
    return ImageDataset("random images", 255, *parts)


def main() -> None:
    """Run the sections that are named, or all."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, help="the folder of the results")
    parser.add_argument("sections", nargs="*", metavar="SECTION", help="these alone, in this order")
    parser.add_argument("--seconds", type=float, default=570.0)
    parser.add_argument("--device", default="cuda")
    parser.add_argument(
        "--tiny", action="store_true", help="small networks and few steps, of random images"
    )
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="OPTION=VALUE",
        help="of bstune, for recipes",
    )
    every = (*RECIPES, *LONG_RECIPES)
    parser.add_argument(
        "--recipe", action="append", choices=every, help="to train this alone; may be repeated"
    )
    parser.add_argument("--sources", type=Path, help="folder of the sources' scripts")
    options = parser.parse_intermixed_args()
    if unknown := sorted(set(options.sections) - set(SECTIONS)):
        parser.error(f"there is no section {unknown[0]!r}: {', '.join(SECTIONS)}")
    options.out.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    day = Day(
        out=options.out.resolve(),
        device=options.device,
        tiny=options.tiny,
        seeds=options.seeds,
        sources=None if options.sources is None else options.sources.resolve(),
        recipes=tuple(options.recipe or every),
        recipe_options=tuple(options.option),
        start=start,
        end=start + options.seconds,
    )
    quieten()
    seed_everything(0, verbose=False)
    if options.tiny or not real_data():
        datasets.load_cifar10 = lambda root: random_cifar(options.tiny)
    for name in options.sections or SECTIONS:
        if day.left <= 0.0:
            day.say(name, left_out="no time was left")
            continue
        # A section that is named may take all the time that is left.
        section, share = SECTIONS[name]
        try:
            section(
                replace(day, end=time.monotonic() + (1.0 if options.sections else share) * day.left)
            )
        except Exception as error:  # noqa: BLE001  # the next section is worth more than a clean end
            day.say(
                name,
                failed=f"{type(error).__name__}: {str(error)[-800:]}",
                trace=traceback.format_exc()[-1500:],
            )
    day.say("end", seconds=time.monotonic() - start)


if __name__ == "__main__":
    main()
