"""Charts and a table of one run's figures.

`draw` writes SVG bar charts: ratios to the peers, megabytes per second, and shares of time per
stage, with colours for light and dark mode and without a plotting library. `write_page` writes
every figure into the table of ``docs/internals/benchmarks.md``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

BEGIN, END = "<!-- figures: begin -->", "<!-- figures: end -->"
WIDTH, LABEL, ROW = 860, 400, 26  # pixels of a chart, of its labels, of one bar's row
STAGES = "share of "

STYLE = """
text { font: 13px system-ui, sans-serif; fill: #24292f }
.title { font-weight: 600; font-size: 15px } .quiet { fill: #57606a; font-size: 12px }
.ours { fill: #0969da } .peer { fill: #8c959f } .bound { stroke: #bc4c00; stroke-width: 2 }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 } .quiet { fill: #9198a1 } .ours { fill: #4493f8 } .peer { fill: #6e7681 }
  .bound { stroke: #db6d28 }
}
"""


@dataclass(frozen=True)
class Bar:
    """One bar with its label, value and bound, if any."""

    label: str
    value: float
    unit: str
    bound: float | None = None
    peer: bool = False


def draw(figures: list[dict[str, Any]], directory: Path) -> list[Path]:
    """Draw every chart for which the run has figures."""
    charts = {
        "benchmark-ratios": ("Times faster than the peer in the same run", _ratios(figures)),
        "benchmark-throughput": ("Megabytes of rows per second", _throughput(figures)),
        "benchmark-stages": ("Where one process spends its time", _stages(figures)),
    }
    directory.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, (title, bars) in charts.items():
        if bars:
            path = directory / f"{name}.svg"
            path.write_text(bar_chart(title, bars))
            paths.append(path)
    return paths


def bar_chart(title: str, bars: list[Bar]) -> str:
    """Return a horizontal bar chart as SVG; a bound is a line across its bar.

    If the longest value exceeds 100, lengths are logarithms, as the title states.
    """
    height = 44 + ROW * len(bars) + 12
    longest = max(max(bar.value, bar.bound or 0) for bar in bars)
    width = WIDTH - LABEL - 90
    logarithmic = longest > 100

    def pixels(value: float) -> float:
        if logarithmic:
            return width * math.log(max(value, 1)) / math.log(longest)
        return width * value / longest

    if logarithmic:
        title += " (logarithmic)"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img"'
        f' aria-label="{escape(title)}">',
        f"<style>{STYLE}</style>",
        f'<text class="title" x="8" y="22">{escape(title)}</text>',
    ]
    for index, bar in enumerate(bars):
        top = 40 + ROW * index
        length = max(pixels(bar.value), 1)
        kind = "peer" if bar.peer else "ours"
        parts += [
            f'<text x="{LABEL - 8}" y="{top + 13}" text-anchor="end">{escape(bar.label)}</text>',
            f'<rect class="{kind}" x="{LABEL}" y="{top}" width="{length:.1f}" height="18" rx="2"/>',
            f'<text class="quiet" x="{LABEL + length + 6:.1f}" y="{top + 13}">'
            f"{_number(bar.value)}{escape(bar.unit)}</text>",
        ]
        if bar.bound is not None:
            x = LABEL + pixels(bar.bound)
            parts.append(
                f'<line class="bound" x1="{x:.1f}" x2="{x:.1f}" y1="{top - 2}" y2="{top + 20}">'
                f"<title>the bound: {_number(bar.bound)}{escape(bar.unit)}</title></line>"
            )
    return "\n".join([*parts, "</svg>", ""])


def write_page(figures: list[dict[str, Any]], page: Path) -> None:
    """Replace the table between the markers of the page by the figures of this run."""
    text = page.read_text(encoding="utf-8")
    head, _, rest = text.partition(BEGIN)
    _, _, tail = rest.partition(END)
    rows = ["| section | figure | measured | bound |", "|---|---|---|---|"]
    rows += [
        f"| {figure['section']} | {figure['name']} | {_number(figure['value'])} {figure['unit']} |"
        f" {_bound(figure)} |"
        for figure in figures
    ]
    page.write_text(f"{head}{BEGIN}\n" + "\n".join(rows) + f"\n{END}{tail}", encoding="utf-8")


def _ratios(figures: list[dict[str, Any]]) -> list[Bar]:
    return [
        Bar(f"{figure['section']}: {figure['name']}", figure["value"], "×", figure["at_least"])
        for figure in figures
        if figure["unit"] == "x" and figure["at_least"] is not None
    ]


def _throughput(figures: list[dict[str, Any]]) -> list[Bar]:
    sections = ("build", "chat")
    return [
        Bar(f"{figure['section']}: {figure['name']}", figure["value"], " MB/s",
            peer="SkyRL" in figure["name"] or "datasets" in figure["name"])
        for figure in figures
        if figure["unit"] == "MB/s" and figure["section"] in sections
    ]  # fmt: skip


def _stages(figures: list[dict[str, Any]]) -> list[Bar]:
    return [
        Bar(figure["name"].removeprefix(STAGES), figure["value"], " %")
        for figure in figures
        if figure["section"] == "chat" and figure["name"].startswith(STAGES)
    ]


def _number(value: float) -> str:
    """Format three significant digits without an exponent."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.3g}"


def _bound(figure: dict[str, Any]) -> str:
    for word, name in (("at least", "at_least"), ("at most", "at_most")):
        if figure[name] is not None:
            return f"{word} {figure[name]:g}{'' if figure['kept'] else ': **missed**'}"
    return ""
