"""Draw the images of docs/concepts/what-is-trained.md from a row of the bundled examples.

``python scripts/draw_masks.py`` prepares the bundled conversations and writes two SVG files:
``mask-tokens.svg`` has the tokens of a row by role with the trained ones filled, ``mask-glue.svg``
the text of the template and the texts of the row.
"""

from __future__ import annotations

import tempfile
from html import escape
from pathlib import Path

import tokenmill as tm
from tokenmill.inspect.row import RowView, view_row

EXAMPLES = Path(tm.__file__).parent / "examples"
IMAGES = Path(__file__).parent.parent / "docs" / "images"
CHAR, LINE, PAD, WIDTH = 8.4, 34, 7, 860  # pixels: a character, a line, around a box, the image

STYLE = """
text { font: 14px ui-monospace, monospace; fill: #24292f }
.quiet { font: 13px system-ui; fill: #57606a }
rect { stroke-width: 1.5 } .system { stroke: #8250df } .user { stroke: #1a7f37 }
.assistant { stroke: #0969da } .plain { fill: #f6f8fa } .trained { fill: #b6e3ff }
.glue { stroke: #8c959f; fill: #eaeef2 } .text { stroke: #bf8700; fill: #fff8c5 }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 } .quiet { fill: #9198a1 } .plain { fill: #161b22 }
  .trained { fill: #0c4a86 } .glue { fill: #21262d } .text { fill: #4d3800 }
}
"""

Box = tuple[str, str]  # text and CSS classes


def image(lines: list[tuple[str, list[Box]]]) -> str:
    """Return an SVG of lines of boxes, each with a heading; boxes wrap at the width."""
    parts, top = [], 8
    for heading, boxes in lines:
        parts.append(f'<text class="quiet" x="8" y="{top + 14}">{escape(heading)}</text>')
        top += 22
        left = 8.0
        for words, kind in boxes:
            width = CHAR * len(words) + 2 * PAD
            if left + width > WIDTH - 8 and left > 8:
                left, top = 8.0, top + LINE
            parts.append(
                f'<rect class="{kind}" x="{left:.1f}" y="{top}" width="{width:.1f}" height="26"'
                f' rx="4"/><text x="{left + PAD:.1f}" y="{top + 18}" xml:space="preserve">'
                f"{escape(words)}</text>"
            )
            left += width + 4
        top += LINE + 10
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {top}" role="img">'
        f"<style>{STYLE}</style>\n" + "\n".join(parts) + "\n</svg>\n"
    )


def shown(text: str) -> str:
    """Make white space visible."""
    return text.replace("\n", "⏎").replace(" ", "·")


def token_lines(row: RowView) -> list[tuple[str, list[Box]]]:
    """Return one line per turn with its tokens; trained tokens are filled."""
    return [
        (
            f"{role}: {sum(row.mask[start:end])} of {end - start} tokens trained",
            [
                (shown(row.pieces[at]), f"{role} {'trained' if row.mask[at] else 'plain'}")
                for at in range(start, end)
            ],
        )
        for role, start, end in row.turns
    ]


def glue_lines(row: RowView, texts: list[str]) -> list[tuple[str, list[Box]]]:
    """Split the rendered text at the texts of messages: glue, text, glue, text, glue."""
    rest, boxes = "".join(row.pieces), []
    for text in texts:
        glue, found, rest = rest.partition(text)
        assert found, "the render does not hold a message's text"
        boxes += [(shown(glue), "glue"), (shown(text), "text")]
    heading = "the render = the template's own text (grey) + what it took from the row (yellow)"
    return [(heading, [*boxes, (shown(rest), "glue")])]


def main() -> None:
    """Draw both images of the shortest row with a system turn."""
    source = EXAMPLES / "conversations.jsonl"
    with tempfile.TemporaryDirectory() as cache:
        store = tm.prepare(
            str(source), tokenizer=str(EXAMPLES / "tokenizer"), cache_dir=cache, executor="inline"
        )
        with_system = [n for n in range(len(store)) if store[n].turns[0][0] == "system"]
        number = min(with_system, key=lambda n: int(store.lengths[n]))
        row = view_row(store, number)
        messages = tm.open_rows(str(source), cache_dir=cache)[row.origin.row]["messages"]
    texts = [message["content"] for message in messages]
    IMAGES.mkdir(parents=True, exist_ok=True)
    (IMAGES / "mask-tokens.svg").write_text(image(token_lines(row)), encoding="utf-8")
    (IMAGES / "mask-glue.svg").write_text(image(glue_lines(row, texts)), encoding="utf-8")


if __name__ == "__main__":
    main()
