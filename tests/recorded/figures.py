"""Every number of the READMEs that comes from a record: which record, and by which function.

python tests/recorded/figures.py [TOPIC]    prints the list, of one topic or of all
python tests/recorded/figures.py --draw     draws the pictures whose rows are recorded
"""

import argparse
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

# As a script it lies below the folder that its packages are found from.
sys.path.append(str(Path(__file__).parents[1]))

from recorded import of_benchmarks, of_gpu, of_readmes, of_seeds, of_sweeps
from recorded.accounts import HELD, not_recorded
from recorded.figure import TOP, Figure, RecordFormatError, units_in
from recorded.panel import panel_curves
from rich.console import Console

from bstune.report.drawing import PAGE_DPI, save_figure
from bstune.sweeps import rule_cost, search_benchmark
from bstune.sweeps.shallue_panel import paint_panel, panel_inches
from bstune.sweeps.unit_log import UnitLog

FIGURES: list[Figure] = [
    *of_readmes.FIGURES,
    *of_sweeps.FIGURES,
    *of_seeds.FIGURES,
    *of_gpu.FIGURES,
    *of_benchmarks.FIGURES,
]


def topics() -> list[str]:
    return list(dict.fromkeys(figure.topic for figure in FIGURES))


def draw_all() -> None:
    """Draw each picture anew, in this folder."""
    folder = Path(__file__).parent
    curves = panel_curves()
    save_figure(
        lambda figure: paint_panel(figure, curves),
        panel_inches(len(curves)),
        folder / "shallue_panel.png",
        dots_per_inch=PAGE_DPI,
    )
    settings = of_sweeps.settings_of("rule_cost")
    found = rule_cost.run(
        tables=[], target=None, rules=settings["rules"], tuned_at=settings["tuned_at"]
    )
    save_figure(found.paint, found.inches, folder / "rule_cost.png")
    with TemporaryDirectory() as work:
        # The record has all of these runs, so that none is run again.
        units = Path(work, "runs.jsonl")
        of_sweeps.write_search_units(TOP / of_sweeps.RUNS, units)
        compared = search_benchmark.run(
            UnitLog(units, of_sweeps.SEARCH_SWEEP, {}, {}, None, Console()),
            tables=list(of_sweeps.SEARCH_TABLES),
            target=None,
            searches=list(of_sweeps.RECORDED_SEARCHES),
            seeds=of_sweeps.RECORDED_SEEDS,
            objective="time",
            quick=False,
            lr_factor=1.0,
            budget_factor=1.0,
            again=[],
            workers=1,
            only=[],
        )
    save_figure(compared.paint, compared.inches, folder / "bench.png")


def main() -> int:
    """Print or draw; the exit status is 2 where a record has another format."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("topic", nargs="?", metavar="TOPIC", choices=topics())
    parser.add_argument("--draw", action="store_true", help="the pictures in place of the list")
    options = parser.parse_args()
    if options.draw:
        draw_all()
        return 0
    status = 0
    for figure in FIGURES:
        if options.topic not in (None, figure.topic):
            continue
        try:
            print(f"{figure.readme}: {figure.text}")
        except RecordFormatError as error:
            # The others can be derived all the same.
            print(error, file=sys.stderr)
            status = 2
            continue
        print(f"    {figure.derivation} of {', '.join(figure.records)}")
    if options.topic is None:
        for readme in HELD:
            for text in not_recorded(units_in(readme)):
                print(f"{readme}, not recorded: {text}")
    return status


if __name__ == "__main__":
    sys.exit(main())
