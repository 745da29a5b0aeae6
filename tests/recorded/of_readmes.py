"""The figures of README.md and conf/README.md."""

import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path

from recorded.figure import Figure, Values, rows_of
from recorded.in_training import RECORDS, b_crit_in_training
from recorded.of_benchmarks import (
    COVERAGE,
    LAWS,
    OVERHEAD_ROWS,
    WALLS,
    coverage_row,
    other_walls,
    overhead_range,
)
from recorded.of_gpu import H200_DAY, ended_on_h200
from recorded.of_sweeps import (
    ALL_TABLES,
    CURVE,
    MNIST,
    RUNS,
    SAMPLED,
    TABLES,
    interval_text,
    over_targets,
    record_of,
    within_a_quarter,
)
from recorded.studies import Arguments, found

TOP_README = "README.md"
CONF = "conf/README.md"


def top(topic: str, sentence: str, derive: Callable[..., Values], *records: str) -> Figure:
    """Give a figure of the README at the top."""
    return Figure(topic, TOP_README, sentence, records, derive)


# README.md.


def laws_in_all(path: Path) -> Values:
    both = coverage_row(LAWS, ["time", "curve"], path)
    held = both["time_held"] + both["curve_held"]
    studies = both["time_studies"] + both["curve_studies"]
    return {"share": held / studies, "studies": studies}


def hooks_cost(path: Path) -> Values:
    """Give what Lightning's own loop adds to a step, in ms, of two workloads with short steps."""
    added = list[float]()
    for row in rows_of(path):
        if row["workload"] in ("digits", "fashion_mlp"):
            added.append((row["lightning_us"] - row["lean_us"]) / 1000.0)
    return {"least": min(added), "most": max(added)}


def recipe_seconds(path: Path) -> Values:
    """Give the median seconds of training of each recipe, by its name."""
    recipes = ("airbench_cifar", "speedrun_cifar", "airbench_muon", "resnet_cifar_fast")
    seconds = dict[str, object]()
    for name in recipes:
        runs = ended_on_h200(path, name, "source")
        seconds[name] = statistics.median(run["training_seconds"] for run in runs)
    return seconds


TOP_FIGURES = [
    top(
        "overhead",
        "{least:.2f} to {most:.2f} of a plain loop's time",
        overhead_range,
        OVERHEAD_ROWS,
    ),
    top("overhead", "{least:.1f} to {most:.1f} ms more", hooks_cost, OVERHEAD_ROWS),
    top("searches compared", "{ours}", within_a_quarter, RUNS),
    top("searches compared", "{optuna}", within_a_quarter, RUNS),
    top(
        "recipes",
        "`airbench_cifar` takes {airbench_cifar:.2f} s of training to 94.0%, `speedrun_cifar` "
        "{speedrun_cifar:.2f} s, `airbench_muon` {airbench_muon:.2f} s to 94.1%, "
        "`resnet_cifar_fast` {resnet_cifar_fast:.1f} s to 94.6%",
        recipe_seconds,
        H200_DAY,
    ),
    top("first study", "{faster} of {studies} studies", other_walls, WALLS),
    top(
        "in training",
        "{held} of {studies} intervals held {truth:.0f}",
        b_crit_in_training,
        *RECORDS,
    ),
    top(
        "in training", "under `curve` {curve_held} of {curve_studies}", b_crit_in_training, *RECORDS
    ),
    top("coverage", "{share:.0%} of {studies} intervals hold the truth", laws_in_all, COVERAGE),
]

# conf/README.md: a B_crit and an exponent side by side, of a grid of runs or of a study.


def of_grid(name: str) -> Figure:
    sentence = "| {b_crit} | {lr}"
    derive = partial(over_targets, name)
    return Figure("workloads", CONF, sentence, (f"{TABLES}/{name}.jsonl",), derive)


def critical_and_exponent(arguments: Arguments, path: Path) -> Values:
    study = found(path, arguments)
    critical = study.critical
    exponent = study.exponent
    return {
        "b_crit": interval_text(critical.value, critical.low, critical.high),
        "lr": f"{exponent.exponent:.2f} ({exponent.low:.2f} to {exponent.high:.2f})",
    }


def of_study(study: str, *arguments: str) -> Figure:
    sentence = "| {b_crit} | {lr}"
    derive = partial(critical_and_exponent, arguments)
    return Figure("workloads", CONF, sentence, (record_of(study),), derive, SAMPLED)


def runs_that_ship(*paths: Path) -> Values:
    return {"runs": sum(len(rows_of(path)) for path in paths)}


LSTM_SIZES = ("search.batch_size.low=4", "search.batch_size.high=1024")
TRANSFORMER_SIZES = ("search.batch_size.low=8", "search.batch_size.high=512")
LINEAR = (f"{TABLES}/digits_linear.jsonl", f"{TABLES}/mnist_mlp_linear.jsonl")
CONF_FIGURES = [
    Figure("tables that ship", CONF, "{runs} runs", ALL_TABLES, runs_that_ship),
    Figure("tables that ship", CONF, "{runs} runs of a linear schedule", LINEAR, runs_that_ship),
    *[of_grid(name) for name in ("fashion_mlp", "cifar_mlp", "mnist_cnn")],
    of_study("shallue_regularisation/none", *MNIST),
    of_study("studies/shakespeare_lstm", "workload=shakespeare_lstm", CURVE, *LSTM_SIZES),
    of_study(
        "studies/shakespeare_transformer",
        "workload=shakespeare_transformer",
        CURVE,
        *TRANSFORMER_SIZES,
    ),
    of_study("studies/fashion_cnn_16", "workload=fashion_cnn", CURVE),
    of_study("studies/mnist_simple_cnn_16", "workload=mnist_simple_cnn", CURVE),
    of_study(
        "studies/cifar_resnet8",
        "workload=cifar_resnet8",
        CURVE,
        "prior.level_sigma=0.7",
        "search.batch_size.high=2048",
    ),
    of_study(
        "studies/cifar_vgg11",
        "workload=cifar_vgg11",
        CURVE,
        "prior.level_sigma=0.7",
        "search.batch_size.high=2048",
    ),
]
FIGURES = [*TOP_FIGURES, *CONF_FIGURES]
