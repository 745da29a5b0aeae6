"""The shell of a page: one HTML file that needs no network, its charts drawn by plotly's own bundle, packed inside it.

Each chart is there twice: as a static picture (:mod:`bstune.report.static_chart`), which paper, readers without scripts
and screen readers get, and as the traces from which plotly draws it to be pointed at.

What a study names (metrics, devices, errors) may hold markup of any kind, and is shown as text: in HTML it passes
through :func:`text`, in a chart through :func:`label`. A Content-Security-Policy forbids the page every request, and
every script but its own, which it names by their hashes.
"""

import base64
import gzip
import hashlib
import html
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from bstune.core.records import dump_json
from bstune.report.static_chart import static_chart
from bstune.system.secrets import json_without_known

DIGITS = 5  # of the numbers in charts: finer than a pixel
# Of a logarithmic axis, in decades: beyond them it has ticks at 20, 50, 100, and at 10, 100.
WIDE = 2.0
VERY_WIDE = 2.5
LEVEL = 4  # of gzip: 0.1 s for plotly's 4.8 MB, which become 2.0 as text; 0.3 MB more at level 1, 0.1 less at 9
HEIGHT = 430  # pixels of a chart on a screen
STATIC_HEIGHT = 350.0  # pixels of its picture
CHART = '<figure class="chart">'
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data: blob:; base-uri 'none'; form-action 'none'"
PAGE = """<!doctype html>
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
    """A part of a page: its heading (empty: it has none) and its HTML, all text in it escaped already."""

    title: str
    body: str


@dataclass(frozen=True)
class Cell:
    """A cell of a table: what it shows, and what it is sorted by (None: not known, which comes last)."""

    shown: str
    value: float | str | None


def page(heading: str, sections: Sequence[Section], scripts: Sequence[str] = ()) -> str:
    """Return a whole page; ``scripts`` are further ones, after that of the charts and tables."""
    parts, packed = [resource("page.js"), *scripts], ""
    allowed = [part.encode() for part in parts]
    if any(CHART in section.body for section in sections):
        allowed.append(_plotly())
        bundle = base64.b64encode(gzip.compress(allowed[-1], LEVEL, mtime=0)).decode()
        packed = f'<script id="plotly" type="application/gzip">{bundle}</script>\n'
    return _filled(heading, sections, parts, allowed, packed)


def still_page(
    heading: str, sections: Sequence[Section], scripts: Sequence[str] = (), head: str = ""
) -> str:
    """Return a page whose charts are pictures alone, and whose tables and commands have no buttons.

    ``scripts`` are the only ones; ``head``: HTML of its head.
    """
    return _filled(heading, sections, scripts, [part.encode() for part in scripts], head=head)


def resource(name: str) -> str:
    """Read a script or a style sheet that lies beside this module."""
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def _filled(
    heading: str,
    sections: Sequence[Section],
    parts: Sequence[str],
    allowed: Sequence[bytes],
    packed: str = "",
    head: str = "",
) -> str:
    """Fill in the shell: its scripts are ``parts``, those that it may run are ``allowed``."""
    hashes = list[str]()
    for part in allowed:
        digest = base64.b64encode(hashlib.sha256(part).digest()).decode()
        hashes.append(f"'sha256-{digest}'")
    titled = [section for section in sections if section.title]
    return PAGE.format(
        head=head,
        policy=POLICY,
        hashes=" ".join(hashes) or "'none'",
        title=text(heading),
        heading=text(heading),
        style=resource("page.css"),
        links=" ".join(f'<a href="#{anchor(one.title)}">{text(one.title)}</a>' for one in titled),
        sections="\n".join(_section(section) for section in sections if section.body),
        scripts=packed + "\n".join(f"<script>{part}</script>" for part in parts),
    )


def anchor(title: str) -> str:
    """Return the id of the section of a title."""
    return re.sub(r"\W+", "-", title.lower()).strip("-")


def text(value: object) -> str:
    """Return a value as the text of an HTML element or attribute."""
    return html.escape(str(value))


def label(value: object) -> str:
    """Return a value as text for a chart: plotly reads a few tags of HTML in its texts."""
    return html.escape(str(value), quote=False)


def paragraph(value: object, kind: str = "") -> str:
    """Return a text as a paragraph; ``kind``: a class of the style sheet, such as ``warning``."""
    return f'<p class="{kind}">{text(value)}</p>' if kind else f"<p>{text(value)}</p>"


def chart(
    traces: Sequence[Mapping[str, Any]],
    layout: Mapping[str, Any],
    caption: str = "",
    height: int = HEIGHT,
    alt: str = "",
) -> str:
    """Give a chart of the traces that have points, empty if none has; both are plotly's.

    A colour is one of the style sheet's names, such as ``--ink``.

    Args:
        traces: plotly's, of which those without points are left out.
        layout: plotly's.
        caption: a text below it.
        height: pixels, on a screen.
        alt: what it shows, for those who do not see it; without one, what it draws over what.
    """
    traces = [one for one in traces if one["x"]]
    if not traces:
        return ""
    whole = {
        "height": height,
        "margin": {"l": 64, "r": 16, "t": 44, "b": 52},
        "modebar": {"bgcolor": "rgba(0,0,0,0)", "color": "--grey", "activecolor": "--ink"},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"color": "--ink", "size": 12},
        "hovermode": "closest",
        "hoverlabel": {"align": "left"},
        "legend": {"orientation": "h", "yref": "container", "y": 0, "yanchor": "bottom"},
        "uirevision": "kept",  # a zoom outlives a change of colours
        **layout,
    }
    for name in ("x", "y"):
        shown = whole.get(f"{name}axis", {})
        if shown.get("type") == "log":
            whole[f"{name}axis"] = {**shown, **_log_ticks(traces, name, shown.get("range"))}
    said = text(alt or _described(whole))
    spec = json_script(_rounded({"data": traces, "layout": whole}))
    picture = static_chart(traces, whole, STATIC_HEIGHT * height / HEIGHT)
    image = f'<div class="static" role="img" aria-label="{said}">{picture}</div>'
    plot = f'<div class="plot" aria-hidden="true" style="min-height:{height}px"></div>'
    below = f"<figcaption>{text(caption)}</figcaption>" if caption else ""
    return f"{CHART}{image}{plot}{spec}{below}</figure>"


def _log_ticks(
    traces: Sequence[Mapping[str, Any]], name: str, stated: Sequence[float] | None
) -> dict[str, Any]:
    """Give ticks at 20, 50, 100, ..., or at 10, 100, ...; where few of them or none would be, plotly's own choice."""
    ends = list(stated or ())
    if not ends:
        for trace in traces:
            for value in trace.get(name, ()):
                if value is not None and value > 0.0:
                    ends.append(math.log10(value))
    span = max(ends) - min(ends) if ends else 0.0
    # On a phone more of them would lie over each other.
    if span > VERY_WIDE:
        return {"dtick": 1}
    if span > WIDE:
        return {"dtick": "D2"}
    return {"nticks": 3}


def _described(layout: Mapping[str, Any]) -> str:
    """Say what a chart draws over what, by the titles of its axes."""
    titles = list[str]()
    for name in ("yaxis", "xaxis"):
        title = layout.get(name, {}).get("title", {}).get("text", "")
        titles.append(html.unescape(title))
    return " over ".join(title for title in titles if title) or "chart"


def json_script(values: Any) -> str:
    """Return values as a page's script of JSON, without the secrets that are remembered."""
    document = json_without_known(dump_json(values))
    # dump_json leaves no character that is not ASCII; without < no text in it ends the element.
    document = document.replace("<", "\\u003c")
    return f'<script type="application/json">{document}</script>'


def axis(title: str, log: bool = True, **changes: Any) -> dict[str, Any]:
    """Return an axis of a chart, its title as text; ``changes`` are plotly's."""
    return {
        "title": {"text": label(title), "standoff": 10},
        "type": "log" if log else "linear",
        "gridcolor": "--grid",
        "linecolor": "--line",
        "zeroline": False,
        "automargin": True,
        "exponentformat": "none",
        "separatethousands": True,
        **({"tickformat": ",~r"} if log else {}),  # 20, 50, 100 in full: plotly writes 2, 5, 100
        **changes,
    }


def table(
    heads: Sequence[str],
    rows: Iterable[Sequence[Cell | str]],
    sortable: bool = True,
    name: str = "table",
    wrapped: bool = False,
) -> str:
    """Give a table, which is scrolled in a box of its own; a cell that is a string is words, which stand at the left.

    ``sortable``: the page's script makes its heads buttons. ``name``: what the box is called, for those who reach it by
    the keyboard. ``wrapped``: what its cells say may take several lines, so that all columns are seen.
    """
    cells = [[_as_cell(cell) for cell in row] for row in rows]
    kinds = list[str]()
    for i in range(len(heads)):
        is_words = all(isinstance(row[i].value, str) for row in cells)
        kinds.append(' class="words"' if is_words else "")
    head = "".join(
        f'<th scope="col"{kind}>{text(one)}</th>' for one, kind in zip(heads, kinds, strict=True)
    )
    body = "\n".join("<tr>" + "".join(map(_cell, row, kinds)) + "</tr>" for row in cells)
    looks = list[str]()
    if sortable:
        looks.append("sortable")
    if wrapped:
        looks.append("wrapped")
    tag = f'<table class="{" ".join(looks)}">' if looks else "<table>"
    box = f'<div class="scroll tall" tabindex="0" role="group" aria-label="{text(name)}">'
    return f"{box}{tag}<thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table></div>"


def _as_cell(cell: Cell | str) -> Cell:
    if isinstance(cell, Cell):
        return cell
    return Cell(cell, cell)


def _cell(cell: Cell, kind: str) -> str:
    value = "" if cell.value is None else text(cell.value)
    return f'<td{kind} data-value="{value}">{text(cell.shown)}</td>'


def _section(section: Section) -> str:
    if not section.title:
        return f"<section>{section.body}</section>"
    return f'<section id="{anchor(section.title)}"><h2>{text(section.title)}</h2>\n{section.body}</section>'


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, Mapping):
        return {name: _rounded(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(one) for one in value]
    return value


def _plotly() -> bytes:
    # only commands that draw wait for it
    from plotly.offline import get_plotlyjs

    return str(get_plotlyjs()).encode()
