"""A training step under the roofline, over batch size.

Williams, Waterman and Patterson 2009: attainable FLOP/s = min(peak, bandwidth x intensity). A batch
size whose FLOPs per byte lie below ops:byte, peak over bandwidth, is bound by memory. Both limits,
and a step's FLOPs, bytes and seconds, are those of bstune's survey.
"""

import math
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from bstune.config import compose
from bstune.core.errors import InputError
from bstune.hardware.roofline import Roofline
from bstune.study.once import survey_once
from bstune.sweeps.rows import Unit, measure_units


def run(output: Path, *, workloads: list[str], options: list[str]) -> tuple[pd.DataFrame, Figure]:
    """Survey each workload, and place its steps under the roofline.

    Args:
        output: the sweep's folder.
        workloads: names.
        options: of each survey, as on the command line.
    """
    units: list[Unit] = [{"workload": name} for name in workloads]
    measure = partial(survey_workload, options)
    surveys = measure_units(output / "rows.jsonl", {"options": options}, units, measure)
    tables = {}
    figure = Figure(figsize=(4.2 * len(units), 3.8), layout="constrained")
    panels = figure.subplots(1, len(units), squeeze=False)[0]
    for axes, (_, survey) in zip(panels, surveys.iterrows(), strict=True):
        roofline = Roofline.model_validate(survey["roofline"])
        steps = pd.DataFrame(survey["timings"]).set_index("batch_size")[["seconds"]]
        steps["FLOPs/byte"] = steps.index.map(roofline.intensity)
        steps["ops:byte"] = roofline.ridge
        steps["bound by memory"] = steps["FLOPs/byte"] < roofline.ridge
        gigaflops = steps.index.map(roofline.flops) / 1e9
        steps["attained"] = gigaflops / steps["seconds"]
        steps["attainable"] = gigaflops / steps.index.map(roofline.allowed_seconds)
        steps[["attained", "attainable"]].plot(ax=axes, style=["o-", "--"], loglog=True, grid=True)
        turn = roofline.compute_bound_from or math.inf
        title = f"{survey['workload']}: memory below B = {turn:.3g}"
        axes.set(title=title, ylabel="GFLOP/s")
        tables[survey["workload"]] = steps
    return pd.concat(tables, names=["workload"]).reset_index(), figure


def survey_workload(options: list[str], unit: Unit) -> dict[str, Any]:
    """Survey a workload: its roofline and the seconds of its steps."""
    composed = compose([f"+workload={unit['workload']}", *options])
    survey, _ = survey_once(composed.options, composed.workload())
    if survey.roofline is None:
        raise InputError(
            f"{unit['workload']}: its survey had too little time: raise survey_seconds"
        )
    return survey.model_dump(mode="json")
