"""Gate *one answer*: no two statements of a study contradict each other.

    python tests/benchmarks/one_answer.py [--seeds 212]

Each of 200 studies draws its table (recorded, or a synthetic law), its question (time, steps,
curve, metric), a baseline (none, the table's, one with a poor rate), a target (the table's, easier,
one that nothing reaches), the length of its search, new seeds and sampler. In twelve more the
baseline is one that studies have found. A row has what contradicts: line 1, the typed result, Train
and best.yaml, the curve at the best and the baseline, B_crit on the drawn law, counts, page, and in
one of ten studies MLflow.
"""

import html
import math
import re
import tempfile
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path

import numpy as np
import yaml
from common import run_gate
from synthetic import KINDS, draw_law, law_table

import bstune
from bstune.config import compose
from bstune.core.errors import BstuneError
from bstune.report.answer import answer, header, render
from bstune.report.figure import curve_figure
from bstune.run_study import run_study
from bstune.study.folder import read_records
from bstune.system import console
from bstune.trial.table import find_table

RECORDED = (
    "fashion_mlp",
    "cifar_mlp",
    "mnist_mlp",
    "mnist_cnn",
    "shakespeare_lstm",
    "digits_linear",
)
OBJECTIVES = ("time", "steps", "curve", "metric")
BASELINES = ("none", "table", "poor")
TARGETS = ("table", "table", "easier", "out of reach")
TRIALS = (4, 12, 24, 40)
# From this seed on the baseline is what studies of the table have found, so that Keep is right.
FIRST_GOOD = 200
GOOD = {"fashion_mlp": (255, 0.0733), "mnist_mlp": (62, 0.214), "cifar_mlp": (429, 0.00128)}
MOST_NUMBERS = 30
COMMANDS = ("Train", "Next")
# The share of a step count that is drawn or printed with three digits.
ROUNDED = 0.01
ROUNDING = 1e-9
# A median of a few new seeds lies off the curve's 90% band by so much at most.
OFF_THE_BAND = 1.5
EVERY_MLFLOW = 10


def measure(seed):
    """Run a study, and look for what contradicts."""
    rng = np.random.default_rng(seed)
    pick = lambda values: values[int(rng.integers(len(values)))]  # noqa: E731
    objective = OBJECTIVES[seed % len(OBJECTIVES)]
    drawn = {
        "objective": objective,
        "table": pick((*RECORDED, *KINDS)),
        "baseline": pick(BASELINES),
        "target": "none" if objective == "metric" else pick(TARGETS),
        "trials": pick(TRIALS),
        "seeds": pick((1, 3)),
        "sampler": "grid" if rng.random() < 0.1 else "frontier",
    }
    if seed >= FIRST_GOOD:
        of_good = {"table": pick(list(GOOD)), "baseline": "good", "seeds": 3, "sampler": "frontier"}
        drawn |= of_good | {"target": "none" if objective == "metric" else "table", "trials": 24}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            run(drawn, seed, folder)
        except BstuneError as error:
            return drawn | {"status": error.exit_status, "told": str(error)}
        result = bstune.load(folder / "out")
        return drawn | {"status": 0, "verdict": result.verdict, "wrong": wrong(result, folder)}


def run(drawn, seed, folder):
    """Run a study in silence."""
    line = arguments(drawn, seed, folder)
    with redirect_stderr(StringIO()), redirect_stdout(StringIO()):
        composed = compose(line)
        options = composed.options
        if drawn["baseline"] == "none":
            # The command line fills in the table's.
            none = options.baseline.model_copy(update={"batch_size": None, "lr": None})
            options = options.model_copy(update={"baseline": none})
        run_study(options, composed.workload())


def arguments(drawn, seed, folder):
    """The command line of a study."""
    table = drawn["table"]
    given = {name: drawn[name] for name in ("objective", "trials", "seeds", "sampler")}
    if table in KINDS:
        law = draw_law(table, seed)
        lines = [run.model_dump_json(exclude_none=True) for run in law_table(law).runs]
        table = folder / "law.jsonl"
        table.write_text("\n".join(lines))
        goal, metric, poor = 0.1, "error", law.best_lr(256) / 16
        given |= {"batch_size.low": 8, "batch_size.high": 4096, "baseline.batch_size": 256}
        given |= {"target": f"{metric} <= {goal}", "baseline.lr": f"{law.best_lr(256) / 2:.4g}"}
    else:
        shipped = find_table(table)
        goal, metric, poor = shipped.target.goal, shipped.target.metric, shipped.lrs[0]
    if drawn["objective"] == "metric":
        given |= {"target": f"min {metric}", "budget.steps": 300}
    elif drawn["target"] != "table":
        factor = 1.3 if drawn["target"] == "easier" else 0.01
        given["target"] = f"{metric} <= {goal * factor:.3g}"
    if drawn["baseline"] == "good":
        given["baseline.batch_size"], given["baseline.lr"] = GOOD[drawn["table"]]
    if drawn["baseline"] == "poor":
        given["baseline.lr"] = float(poor)
    given |= {"table": table, "seed": seed, "output": folder / "out"}
    given["storage"] = f"sqlite:///{folder}/study.db"
    given["mlflow.uri"] = "null" if seed % EVERY_MLFLOW else f"sqlite:///{folder}/mlflow.db"
    return ["+workload=replay", *(f"{name}={value}" for name, value in given.items())]


def wrong(result, folder):
    """What contradicts in a study's answer, result, files and figure; a line each."""
    records = read_records(folder / "out")
    rows = {row.label: row.text for row in answer(result)}
    checks = (of_verdict, of_best, of_counts, of_curve, of_critical, of_page, of_text)
    found = [line for check in checks for line in check(result, rows, records, folder)]
    if (folder / "mlflow.db").exists():
        found += of_mlflow(result, folder)
    return found


def of_verdict(result, rows, records, folder):
    """Line 1, the intervals and the verdict's definition."""
    line = next(iter(rows))
    if result.objective == "curve" and result.reached:
        if result.verdict is not None or line != "Critical" or "Train" in rows:
            yield "curve has a verdict"
        return
    if line.lower() != result.verdict:
        yield f"line 1 says {line}, the result {result.verdict}"
    gain = result.improvement if result.seeks_metric else result.speedup
    expected = ("use", "not yet") if result.baseline is None else ("not yet",)
    if gain is not None:
        low = -math.inf if gain.low is None else gain.low
        high = math.inf if gain.high is None else gain.high
        if not low - ROUNDING <= gain.value <= high + ROUNDING:
            yield f"the interval {low} to {high} leaves out {gain.value}"
        none, small = (0.0, 0.5 * gain.deviation) if result.seeks_metric else (1.0, 1.25)
        if low > none:
            expected = ("switch",)
        # Where nothing is better at all, no deviation is needed to say so.
        elif high < small or high <= none:
            expected = ("keep",)
    if result.reached and result.verdict not in expected:
        yield f"{result.verdict} with {gain}"


def of_best(result, rows, records, folder):
    """The best in line 1, Train and best.yaml; the speedup is the quotient of the medians."""
    best, baseline, gain = result.best, result.baseline, result.speedup
    has_train = result.verdict in ("switch", "use")
    if has_train != ("Train" in rows) or has_train != (result.train_command is not None):
        yield f"Train under {result.verdict}"
    file = folder / "out" / "best.yaml"
    if best is None:
        return
    pair = best.batch_size, best.lr
    if file.exists():
        trial = yaml.safe_load(file.read_text())["trial"]
        if (trial["batch_size"], trial["lr"]) != pair:
            yield f"best.yaml has {trial}, the result {pair}"
    if has_train:
        text = next(iter(rows.values()))
        named = f"batch size {best.batch_size:,}, lr {console.number(best.lr)}"
        if named not in text:
            yield f"line 1 does not name {named}"
        if f"batch_size={best.batch_size}" not in rows["Train"]:
            yield "Train names another batch size"
    if result.verdict == "keep" and best.number != baseline.number:
        yield "keep names another best than the baseline"
    if gain is not None:
        above, below = (baseline, result.other) if result.other else (baseline, best)
        axis = "steps" if result.objective == "steps" else "seconds"
        quotient = getattr(above, axis) / getattr(below, axis)
        if not math.isclose(quotient, gain.value, rel_tol=0.02):
            yield f"speedup {gain.value}, but the medians' quotient is {quotient}"
    alone = result.lr_alone
    if alone is not None and gain is not None and alone.speedup > gain.value:
        yield f"lr alone gives {alone.speedup}, the best {gain.value}"
    near = result.near_optimal
    if near is not None and result.reached and not near[0] <= best.batch_size <= near[1]:
        yield f"near-optimal {near} without {best.batch_size}"


def of_counts(result, rows, records, folder):
    """Configurations, trials and new seeds are those of the records."""
    searched = {(record.batch_size, record.lr) for record in records if record.role == "search"}
    if len(records) != result.trials:
        yield f"{result.trials} trials, but {len(records)} records"
    if result.configurations < len(searched):
        yield f"{result.configurations} configurations, but {len(searched)} pairs were searched"
    if console.count(result.configurations, "configuration") not in header(result):
        yield "the header counts otherwise"
    for runs in (result.best, result.baseline):
        if runs is None:
            continue
        seeds = {
            record.seed
            for record in records
            if record.role == "new seed" and record.repeats == runs.number
        }
        if not set(runs.seeds) <= seeds or len(runs.seeds) > result.seeds:
            yield f"new seeds {runs.seeds} of {sorted(seeds)}"


def of_curve(result, rows, records, folder):
    """No mark lies far below the curve's band, nor the best above it."""
    if not result.curve or result.seeks_metric:
        return
    sizes = np.log([point.batch_size for point in result.curve])
    for name, runs in (("best", result.best), ("baseline", result.baseline)):
        if runs is None or not runs.runs or runs.is_bound or runs.train_steps is not None:
            continue
        ends = [(point.steps_low, point.steps_high) for point in result.curve]
        low, high = (
            math.exp(np.interp(math.log(runs.batch_size), sizes, logs)) for logs in np.log(ends).T
        )
        if runs.steps < low / OFF_THE_BAND:
            yield f"{name} takes {runs.steps} steps, below the band {low:.0f} to {high:.0f}"
        if name == "best" and result.verdict != "keep" and runs.steps > high * OFF_THE_BAND:
            yield f"{name} takes {runs.steps} steps, above the band {low:.0f} to {high:.0f}"


def of_critical(result, rows, records, folder):
    """The printed B_crit is where the drawn law is twice its floor; its regimes are 9 times off."""
    critical = result.critical
    if critical is None or critical.interval.value is None:
        return
    value, low, high = (getattr(critical.interval, name) for name in ("value", "low", "high"))
    if not (low or 0.0) <= value <= (high or math.inf):
        yield f"B_crit {value} outside of {low} to {high}"
    if critical.s_min is None:
        yield "B_crit without a law"
    lines = {line.get_label(): line for line in curve_figure(result, records).axes[0].get_lines()}
    law = lines.get("law S_min (1 + B_crit/B)")
    if law is not None:
        x, y = np.log(law.get_xdata()), np.log(law.get_ydata())
        if x[0] <= math.log(value) <= x[-1]:
            there = math.exp(np.interp(math.log(value), x, y))
            if not math.isclose(there, 2.0 * critical.s_min, rel_tol=ROUNDED):
                yield f"the law at B_crit is {there}, not twice {critical.s_min}"
    text = " ".join(rows.values())
    if f"batch size {console.number(round(value))}" not in text:
        yield f"no row says B_crit {console.number(value)}"


def of_page(result, rows, records, folder):
    """The page has the header, all rows and every trial."""
    text = html.unescape((folder / "out" / "report.html").read_text())
    flat = " ".join(text.split())
    for part in (header(result), *rows.values()):
        if " ".join(part.split()) not in flat:
            yield f"the page lacks {part[:60]}"
    if flat.count("<tr><td>") < len(records):
        yield "the page lacks trials"


def of_text(result, rows, records, folder):
    """80 columns, at most 30 numbers."""
    text = render(result)
    wide = [line for line in text.splitlines() if len(line) > console.LINE_WIDTH]
    # A command's word is not broken.
    if any(" " in line.strip() and "=" not in line for line in wide):
        yield f"over 80 columns: {wide[0]}"
    # A command has the numbers that its user gave.
    said = [header(result), *(text for label, text in rows.items() if label not in COMMANDS)]
    numbers = re.findall(r"(?<![\w.])[\d,.]*\d", " ".join(said))
    if len(numbers) > MOST_NUMBERS:
        yield f"{len(numbers)} numbers"


def of_mlflow(result, folder):
    """MLflow's run of the study has its verdict, its best and its curve."""
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{folder}/mlflow.db")
    experiments = [one.experiment_id for one in client.search_experiments()]
    runs = client.search_runs(experiments, "tags.`bstune.result` != ''")
    if len(runs) != 1:
        yield f"MLflow has {len(runs)} runs of the study"
        return
    data = runs[0].data
    if data.tags.get("bstune.verdict") != result.verdict:
        yield f"MLflow says {data.tags.get('bstune.verdict')}"
    if result.best is not None and data.metrics["best/batch_size"] != result.best.batch_size:
        yield "MLflow has another best"
    points = []
    if result.curve:
        points = client.get_metric_history(runs[0].info.run_id, "batch_size_curve/steps")
    if len(points) != len(result.curve):
        yield f"MLflow has {len(points)} points of {len(result.curve)}"


def summary(rows):
    """What contradicts, and what is refused, by seed; then how many studies there are."""
    for row in rows:
        for line in row.get("wrong", [row.get("told")]):
            yield f"{row['objective']}, seed {row['seed']}: {line}"
    yield f"{len(rows)} studies"


if __name__ == "__main__":
    run_gate(__doc__, "one_answer.jsonl", measure, summary, seeds=212)
