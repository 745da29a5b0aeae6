"""The page of a study: answer, figure and trials in one file, without network.

Its script sorts the trials; without it they stand in their order.
"""

import base64
import hashlib
import io
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template
from markupsafe import Markup
from matplotlib import rc_context
from matplotlib.figure import Figure

from bstune.core.records import Record
from bstune.hardware.survey import Survey
from bstune.report.answer import MOST_WARNINGS, Row, answer, header, noise_scale, phases, rates
from bstune.report.figure import curve_figure, roofline_figure
from bstune.report.hardware import survey_text
from bstune.study.result import StudyResult
from bstune.system import console

# Ids in an SVG follow from it, so that the same study gives the same page.
HASH_SALT = "bstune"
# Of what is a bitmap in an SVG.
DPI = 150


def page(
    result: StudyResult,
    records: Sequence[Record],
    config_text: str,
    survey: Survey | None = None,
) -> str:
    """Write the page of a study as HTML; all texts in it are escaped.

    Args:
        result: what the study found.
        records: of all its trials.
        config_text: the composed config, without secrets.
        survey: of its machine.
    """
    script = (Path(__file__).parent / "sort.js").read_text()
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    roofline = None
    if survey is not None and survey.roofline is not None:
        roofline = svg(partial(roofline_figure, survey.roofline, survey.timings))
    verdict, *rows = answer(result)
    # The page has the rates and the noise scale for every question.
    for label, text in (("Rates", rates(result)), ("Scaling", noise_scale(result))):
        if text is not None and label not in [row.label for row in rows]:
            rows.append(Row(label, text))
    return template("page.html.j2").render(
        result=result,
        records=records,
        header=header(result),
        verdict=verdict,
        rows=rows,
        further_warnings=result.warnings[MOST_WARNINGS:],
        phases=phases(result.spent.phases, console.seconds),
        figure=svg(partial(curve_figure, result, records, has_title=False)),
        hardware=None if survey is None else survey_text(survey, was_kept=False),
        roofline=roofline,
        script=Markup(script),  # noqa: S704 a file of this package
        script_hash=f"sha256-{digest}",
        config_text=config_text,
    )


def template(name: str) -> Template:
    """One of this package's templates, which escapes all that it is given."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["number"] = console.number
    environment.filters["exact"] = console.exact
    environment.filters["seconds"] = console.seconds
    return environment.get_template(name)


def svg(draw: Callable[[], Figure]) -> Markup:
    """Draw a figure as an SVG element."""
    text = io.StringIO()
    with rc_context({"svg.hashsalt": HASH_SALT}):
        draw().savefig(text, format="svg", dpi=DPI, metadata={"Date": None})
    element = text.getvalue()
    # matplotlib escapes its texts.
    return Markup(element[element.index("<svg") :])  # noqa: S704
