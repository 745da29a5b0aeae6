"""The workloads whose steps to target over batch size are recorded, as one figure has them."""

from functools import cache

import numpy as np
from recorded.figure import TOP
from recorded.studies import CURVE_SIZES, Arguments, found

from bstune.core.curve import fit_curve
from bstune.sweeps.search_problem import dense_points
from bstune.sweeps.shallue_panel import PanelCurve
from bstune.trial.replay import read_index, read_table

# Grids of batch sizes and learning rates, whose points are a cell's median over its seeds.
GRIDS = ("fashion_mlp", "cifar_mlp", "mnist_cnn", "mnist_mlp", "shakespeare_lstm")
CURVE = "search.objective=curve"
# Records of studies without a grid, from tests/recorded, and the arguments that tell the posterior
# what it looks for.
STUDIES: dict[str, Arguments] = {
    "studies/shakespeare_transformer": (
        "workload=shakespeare_transformer",
        CURVE,
        "search.batch_size.low=8",
        "search.batch_size.high=512",
    ),
    "studies/fashion_cnn_16": ("workload=fashion_cnn", CURVE),
    "studies/mnist_simple_cnn_16": ("workload=mnist_simple_cnn", CURVE),
    "studies/cifar_resnet8": (
        "workload=cifar_resnet8",
        CURVE,
        "prior.level_sigma=0.7",
        "search.batch_size.high=2048",
    ),
    "studies/cifar_vgg11": (
        "workload=cifar_vgg11",
        CURVE,
        "prior.level_sigma=0.7",
        "search.batch_size.high=2048",
    ),
}


def panel_records() -> list[str]:
    """Give the records' paths, from the top of the repository."""
    grids = [f"bstune/trial/tables/{name}.jsonl" for name in GRIDS]
    return [*grids, *(f"tests/recorded/{record}.jsonl" for record in STUDIES)]


@cache
def panel_curves() -> tuple[PanelCurve, ...]:
    """Give the curve of each workload: fitted to a grid's points, or a study's posterior."""
    curves = [_of_grid(name) for name in GRIDS]
    for record, arguments in STUDIES.items():
        curves.append(_of_study(record, arguments))
    return tuple(curves)


def _of_grid(name: str) -> PanelCurve:
    source = read_index()[name]
    fit = fit_curve(dense_points(read_table(source.path), source.target))
    points = [point for point in fit.points if not point.stopped]
    sizes = np.array([point.batch_size for point in points], dtype=np.float64)
    ladder = np.geomspace(sizes[0], sizes[-1], CURVE_SIZES)
    assert fit.s_min is not None
    assert fit.critical_batch_size is not None
    # A fit of two terms has no B_opt.
    small_batch = fit.b_opt or 0.0
    steps = fit.s_min * (1.0 + fit.critical_batch_size / ladder + (small_batch / ladder) ** 2)
    return PanelCurve(
        name=f"{name}, grid",
        point_sizes=sizes,
        point_steps=np.array([point.steps for point in points], dtype=np.float64),
        batch_size=ladder,
        steps=steps,
        # A fit to medians of a grid is drawn without an interval.
        steps_low=steps,
        steps_high=steps,
        b_crit=fit.critical_batch_size,
        s_min=fit.s_min,
    )


def _of_study(record: str, arguments: Arguments) -> PanelCurve:
    study = found(TOP / f"tests/recorded/{record}.jsonl", arguments)
    return PanelCurve(
        name=record.partition("/")[2],
        point_sizes=np.array([point.batch_size for point in study.points], dtype=np.float64),
        point_steps=np.array([point.steps for point in study.points], dtype=np.float64),
        batch_size=study.band.batch_size,
        steps=study.band.steps,
        steps_low=study.band.low,
        steps_high=study.band.high,
        b_crit=study.critical.value,
        s_min=study.critical.s_min,
    )
