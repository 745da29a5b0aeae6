"""Parts of a page, and its shell: one HTML file that needs no network.

Its charts are drawn by plotly's own bundle, packed inside it. Each chart is there twice. Paper,
readers without scripts and screen readers get a static picture
(:mod:`bstune.report.static_chart`). From the traces plotly draws a chart that can be pointed at.

Names in a study (metrics, devices, errors) may hold markup of any kind, and are shown as text: in
HTML they pass through :func:`text`, in a chart through :func:`label`. A Content-Security-Policy
forbids the page every request, and every script but its own, which it names by their hashes.
"""

import base64
import gzip
import hashlib
import html
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from bstune.core.records import dump_json
from bstune.report.static_chart import static_chart

# Digits of the numbers in charts: finer than a pixel.
CHART_DIGITS = 5
# A logarithmic axis over more decades than these has ticks at 20, 50, 100, or at 10, 100 alone.
WIDE_DECADES = 2.0
VERY_WIDE_DECADES = 2.5
# 0.1 s for plotly's 4.8 MB, which become 2.0 as text; 0.3 MB more at level 1, 0.1 less at 9.
GZIP_LEVEL = 4
# The height of a chart in pixels: on a screen, and of its static picture.
CHART_HEIGHT = 430
PICTURE_HEIGHT = 350.0
CHART = '<figure class="chart">'
POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; img-src data: blob:; base-uri 'none'; "
    "form-action 'none'"
)
PlotlyValues = Mapping[str, Any]
"""A trace, a layout or an axis, by plotly's own names."""
PAGE_SHELL = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
{head}<meta http-equiv="Content-Security-Policy" content="{policy}; script-src {hashes}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<link rel="icon" href="data:,">
<style>
{style}</style>
</head>
<body>
<header><h1>{heading}</h1></header>
<nav>{links}</nav>
<main>
{sections}
</main>
{scripts}
</body>
</html>
"""


@dataclass(frozen=True)
class Section:
    """A part of a page."""

    title: str
    """Its heading. Empty for a section without one."""
    body: str
    """Its HTML, in which all text is escaped already."""


@dataclass(frozen=True)
class Cell:
    """A cell of a table."""

    shown: str
    """The text that it shows."""
    value: float | str | None
    """The value that it is sorted by. None is a value that is not known, which comes last."""


def page(heading: str, sections: Sequence[Section], scripts: Sequence[str] = ()) -> str:
    """Make a whole page. ``scripts`` come after the one that draws charts and sorts tables."""
    parts = [resource("page.js"), *scripts]
    packed = ""
    # The page's security policy lets no other script run.
    allowed = [part.encode() for part in parts]
    # A page without charts is spared the two megabytes that draw them.
    if any(CHART in section.body for section in sections):
        plotly, bundle = _plotly()
        allowed.append(plotly)
        packed = f'<script id="plotly" type="application/gzip">{bundle}</script>\n'
    return _filled_shell(heading, sections, parts, allowed, packed=packed)


def still_page(
    heading: str, sections: Sequence[Section], scripts: Sequence[str] = (), head: str = ""
) -> str:
    """Make a page whose charts are pictures alone, and whose tables and commands have no buttons.

    ``scripts`` are the only ones that it has. ``head``: further HTML of its head.
    """
    allowed = [script.encode() for script in scripts]
    return _filled_shell(heading, sections, scripts, allowed, head=head)


def resource(name: str) -> str:
    """Read a script or a style sheet that lies beside this module."""
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def _filled_shell(
    heading: str,
    sections: Sequence[Section],
    scripts: Sequence[str],
    allowed: Sequence[bytes],
    *,
    packed: str = "",
    head: str = "",
) -> str:
    """Fill in the shell of a page.

    Args:
        heading: the page's heading and title.
        sections: the parts of the page. Each with a title has a link.
        scripts: the scripts that stand in the page.
        allowed: all scripts that the page may run, of which the policy has the hashes.
        packed: HTML with plotly's packed script. Empty for a page without charts.
        head: further HTML of the page's head.
    """
    hashes = list[str]()
    for part in allowed:
        digest = base64.b64encode(hashlib.sha256(part).digest()).decode()
        hashes.append(f"'sha256-{digest}'")
    links = list[str]()
    bodies = list[str]()
    for section in sections:
        if section.title:
            links.append(f'<a href="#{anchor(section.title)}">{text(section.title)}</a>')
        if section.body:
            bodies.append(_section_html(section))
    return PAGE_SHELL.format(
        head=head,
        policy=POLICY,
        hashes=" ".join(hashes) or "'none'",
        title=text(heading),
        heading=text(heading),
        style=resource("page.css"),
        links=" ".join(links),
        sections="\n".join(bodies),
        scripts=packed + "\n".join(f"<script>{script}</script>" for script in scripts),
    )


def anchor(title: str) -> str:
    """Give the id of the section with this title, to which links lead."""
    return re.sub(r"\W+", "-", title.lower()).strip("-")


def text(value: object) -> str:
    """Write a value as text of an HTML element or attribute, its markup escaped."""
    return html.escape(str(value))


def label(value: object) -> str:
    """Write a value as text for a chart, its markup escaped: plotly obeys a few tags of HTML."""
    return html.escape(str(value), quote=False)


def paragraph(value: object, kind: str = "") -> str:
    """Write a text as a paragraph. ``kind``: a class of the style sheet, such as ``warning``."""
    if kind:
        return f'<p class="{kind}">{text(value)}</p>'
    return f"<p>{text(value)}</p>"


def chart(
    traces: Sequence[PlotlyValues],
    layout: PlotlyValues,
    caption: str = "",
    height: int = CHART_HEIGHT,
    alt: str = "",
) -> str:
    """Give a chart as HTML: its static picture, and the traces from which plotly draws it.

    It is empty where no trace has points. A colour is one of the style sheet's names, such as
    ``--ink``.

    Args:
        traces: as plotly takes them. Those without points are left out.
        layout: as plotly takes it.
        caption: a text below the chart.
        height: of the chart on a screen, in pixels.
        alt: what the chart shows, for those who do not see it. Without one, the axes' titles.
    """
    traces = [trace for trace in traces if trace["x"]]
    if not traces:
        return ""
    full_layout = {
        "height": height,
        "margin": {"l": 64, "r": 16, "t": 44, "b": 52},
        "modebar": {"bgcolor": "rgba(0,0,0,0)", "color": "--grey", "activecolor": "--ink"},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"color": "--ink", "size": 12},
        "hovermode": "closest",
        "hoverlabel": {"align": "left"},
        "legend": {"orientation": "h", "yref": "container", "y": 0, "yanchor": "bottom"},
        # A zoom outlives a change of colours.
        "uirevision": "kept",
        **layout,
    }
    for name in ("x", "y"):
        axis_layout = full_layout.get(f"{name}axis", {})
        if axis_layout.get("type") == "log":
            full_layout[f"{name}axis"] = {
                **axis_layout,
                **_log_ticks(traces, name, axis_layout.get("range")),
            }
    alt_text = text(alt or _axes_text(full_layout))
    spec = json_script(_rounded({"data": traces, "layout": full_layout}))
    # The picture is scaled to the page's width, so that its height is in other pixels.
    picture = static_chart(traces, full_layout, PICTURE_HEIGHT * height / CHART_HEIGHT)
    image = f'<div class="static" role="img" aria-label="{alt_text}">{picture}</div>'
    # A screen reader reads out the picture's text. It skips plotly's chart, which shows the same.
    plot = f'<div class="plot" aria-hidden="true" style="min-height:{height}px"></div>'
    below = ""
    if caption:
        below = f"<figcaption>{text(caption)}</figcaption>"
    return f"{CHART}{image}{plot}{spec}{below}</figure>"


def _log_ticks(
    traces: Sequence[PlotlyValues], name: str, stated: Sequence[float] | None
) -> dict[str, Any]:
    """Give plotly's settings for the ticks of a logarithmic axis, by the decades that it spans.

    Args:
        traces: the chart's traces, whose values the axis holds.
        name: ``x`` or ``y``.
        stated: both ends of the axis's range, as logarithms to base 10. None: it is not stated.
    """
    logs = list(stated or ())
    if not logs:
        for trace in traces:
            for value in trace.get(name, ()):
                if value is not None and value > 0.0:
                    logs.append(math.log10(value))
    decades = 0.0
    if logs:
        decades = max(logs) - min(logs)
    # The wider the axis, the fewer ticks a decade has: on a phone more would lie over each other.
    if decades > VERY_WIDE_DECADES:
        return {"dtick": 1}
    # Plotly's "D2": ticks at 1, 2 and 5 of each decade.
    if decades > WIDE_DECADES:
        return {"dtick": "D2"}
    return {"nticks": 3}


def _axes_text(layout: PlotlyValues) -> str:
    """Write the titles of a chart's axes, such as ``steps to target S over batch size B``."""
    titles = list[str]()
    for name in ("yaxis", "xaxis"):
        title = layout.get(name, {}).get("title", {}).get("text", "")
        titles.append(html.unescape(title))
    return " over ".join(title for title in titles if title) or "chart"


def picture(png: bytes, alt: str, caption: str) -> str:
    """Show a PNG, at most as wide as the page, with a text below it.

    ``alt`` says what it shows, for those who do not see it.
    """
    data = base64.b64encode(png).decode()
    image = f'<img alt="{text(alt)}" src="data:image/png;base64,{data}">'
    return f"<figure>{image}<figcaption>{text(caption)}</figcaption></figure>"


def json_script(values: object) -> str:
    """Write values as JSON in an element of a page that scripts read."""
    # All characters are ASCII. With < escaped, no text in the JSON can end the element.
    document = dump_json(values).replace("<", "\\u003c")
    return f'<script type="application/json">{document}</script>'


def axis(title: str, log: bool = True, **changes: Any) -> dict[str, Any]:
    """Give plotly's settings of an axis. ``changes``: further ones, by plotly's names."""
    described: dict[str, Any] = {
        "title": {"text": label(title), "standoff": 10},
        "type": "log" if log else "linear",
        "gridcolor": "--grid",
        "linecolor": "--line",
        "zeroline": False,
        "automargin": True,
        "exponentformat": "none",
        "separatethousands": True,
    }
    if log:
        # Ticks are written in full, 20, 50, 100: plotly would write 2, 5, 100.
        described["tickformat"] = ",~r"
    return described | changes


def table(
    heads: Sequence[str],
    rows: Iterable[Sequence[Cell | str]],
    sortable: bool = True,
    name: str = "table",
    wrapped: bool = False,
) -> str:
    """Lay out a table, which is scrolled in a box of its own.

    Args:
        heads: the texts above the columns.
        rows: the cells of each row. A string is a cell of words, which stand at the left.
        sortable: whether the page's script turns the heads into buttons that sort.
        name: the name of the box, for those who reach it by the keyboard.
        wrapped: whether a cell's text may take several lines, so that all columns are seen.
    """
    cells = list[list[Cell]]()
    for row in rows:
        cells.append([_as_cell(cell) for cell in row])
    class_attributes = list[str]()
    for i in range(len(heads)):
        is_words = all(isinstance(row[i].value, str) for row in cells)
        class_attributes.append(' class="words"' if is_words else "")
    shown_heads = list[str]()
    for head, class_attribute in zip(heads, class_attributes, strict=True):
        shown_heads.append(f'<th scope="col"{class_attribute}>{text(head)}</th>')
    shown_rows = list[str]()
    for row_cells in cells:
        shown_rows.append(f"<tr>{''.join(map(_cell_html, row_cells, class_attributes))}</tr>")
    css_classes = list[str]()
    if sortable:
        css_classes.append("sortable")
    if wrapped:
        css_classes.append("wrapped")
    tag = "<table>"
    if css_classes:
        tag = f'<table class="{" ".join(css_classes)}">'
    box = f'<div class="scroll tall" tabindex="0" role="group" aria-label="{text(name)}">'
    top = f"<thead><tr>{''.join(shown_heads)}</tr></thead>"
    body = "\n".join(shown_rows)
    return f"{box}{tag}{top}<tbody>\n{body}\n</tbody></table></div>"


def _as_cell(cell: Cell | str) -> Cell:
    """Give a cell as it is, and a string as a cell of words."""
    if isinstance(cell, Cell):
        return cell
    return Cell(cell, cell)


def _cell_html(cell: Cell, kind: str) -> str:
    """Write a cell. ``kind``: the class attribute of its column, which may be empty."""
    value = ""
    if cell.value is not None:
        value = text(cell.value)
    return f'<td{kind} data-value="{value}">{text(cell.shown)}</td>'


def _section_html(section: Section) -> str:
    """Write a section with its heading, to which the page's links lead."""
    if not section.title:
        return f"<section>{section.body}</section>"
    heading = f"<h2>{text(section.title)}</h2>"
    return f'<section id="{anchor(section.title)}">{heading}\n{section.body}</section>'


def _rounded(value: object) -> object:
    """Round all numbers in a chart's traces and layout to ``CHART_DIGITS`` digits.

    More digits would make the page larger, and could not be seen.
    """
    if isinstance(value, float):
        return float(f"{value:.{CHART_DIGITS}g}")
    if isinstance(value, Mapping):
        return {name: _rounded(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(part) for part in value]
    return value


@cache
def _plotly() -> tuple[bytes, str]:
    """Give plotly's script, and the same packed as the text that a page holds."""
    # Only commands that draw wait for it.
    from plotly.offline import get_plotlyjs

    script = str(get_plotlyjs()).encode()
    # Without a time in it the same study gives the same page.
    return script, base64.b64encode(gzip.compress(script, GZIP_LEVEL, mtime=0)).decode()
