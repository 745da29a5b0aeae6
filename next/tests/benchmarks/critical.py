"""Gate *critical batch size*: what is printed is what is drawn.

    python tests/benchmarks/critical.py [--seeds 40] [--workloads mnist_mlp digits]

Studies of ``time`` on the recorded table mnist_mlp and on ``digits``, which trains, differ in their
seed; a row each. From the drawn figure it takes the law and the line 2 S_min at the printed and
rounded B_crit, and the curve there; the warning must stand where that is off the law by over 1.3.
"""

import math
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from common import add_rows, jobs_of, parser, read_rows

from bstune.report.answer import answer
from bstune.report.figure import curve_figure
from bstune.report.read import read_records, read_result

WORKLOADS = {"mnist_mlp": ["+workload=replay", "table=mnist_mlp"], "digits": ["+workload=digits"]}
FAR_FROM_LAW = 1.3
# Printed values have three digits, and lines are straight between 97 batch sizes.
TOLERANCE = 0.01


def measure(workload, seed):
    """Run one study in a folder of its own."""
    with tempfile.TemporaryDirectory() as folder:
        options = [
            f"seed={seed}",
            f"output={folder}/out",
            f"storage=sqlite:///{folder}/study.db",
            "mlflow.uri=null",
        ]
        command = [sys.executable, "-m", "bstune", *WORKLOADS[workload], *options]
        subprocess.run(command, check=True, capture_output=True)
        result = read_result(Path(folder) / "out")
        panel = curve_figure(result, read_records(Path(folder) / "out")).axes[0]
    row = {
        "trials": result.trials,
        "verdict": result.verdict,
        "warnings": [warning.kind for warning in result.warnings],
    }
    if result.critical is not None:
        row |= {"critical": result.critical.model_dump()} | drawn(result, panel)
    return row


def drawn(result, panel):
    """What the panel of steps shows at the printed B_crit; nothing where B_crit has no value."""
    lines = {line.get_label(): line for line in panel.lines}
    law = lines.get("law S_min (1 + B_crit/B)")
    if law is None:
        return {}
    text = next(row.text for row in answer(result) if row.label == "Scaling")
    printed = float(text.removeprefix("critical batch size ").split(" ")[0].replace(",", ""))
    curve = lines["median at the best rate, with its 90% band"]
    twice_floor = float(lines["2 S_min"].get_ydata()[0])
    law_there = height(law, printed)
    return {
        "printed": printed,
        "law_over_twice_floor": law_there / twice_floor,
        "curve_over_law": height(curve, printed) / law_there,
    }


def height(line, batch_size):
    """The height of a drawn line at a batch size, straight on logarithmic axes."""
    x, y = np.log(line.get_xdata()), np.log(line.get_ydata())
    return math.exp(float(np.interp(math.log(batch_size), x, y)))


def summary(rows):
    """A line a workload: studies, of these with a value, and what holds of them."""
    lines = ["workload    studies  with a value  twice its floor  off by 1.3  warned rightly"]
    for workload in WORKLOADS:
        ours = [row for row in rows if row["workload"] == workload]
        valued = [row for row in ours if "printed" in row]
        twice = sum(abs(math.log(row["law_over_twice_floor"])) <= TOLERANCE for row in valued)
        far = [abs(math.log(row["curve_over_law"])) > math.log(FAR_FROM_LAW) for row in valued]
        warned = ["far from the law" in row["warnings"] for row in valued]
        right = sum(one == other for one, other in zip(far, warned, strict=True))
        lines.append(
            f"{workload:<12}{len(ours):>7}{len(valued):>14}{twice:>17}{sum(far):>12}{right:>16}"
        )
    return lines


def main():
    options = parser(__doc__, "critical.jsonl", seeds=40)
    options.add_argument("--workloads", nargs="+", default=list(WORKLOADS))
    given = options.parse_args()
    jobs = jobs_of(workload=given.workloads, seed=range(given.seeds))
    add_rows(given, jobs, measure)
    print("\n".join(summary(read_rows(given.rows))))


if __name__ == "__main__":
    main()
