r"""Layouts: the glue that a template prints around the texts of one kind of conversation.

Conversations of one *signature* (the same roles, whitespace and thinking tags in the same places)
get the same glue from a template. A `Layout` is learned once per signature from a proven row: the
glue, the order of the texts in it, and where in the glue spans and turns begin and end. For every
further row of that signature its own render is compared with glue + text + glue + text …: string
equality shows that the texts stand where they stood, so the spans are proven without another
render. A row that is not equal gets a proof of its own.

::

    render   <|im_start|>user\n Hi <|im_end|>\n<|im_start|>assistant\n Hello <|im_end|>\n
    glue     └───── g0 ──────┘    └────────────── g1 ───────────────┘       └─── g2 ───┘
    span                                               from g1's end to byte 10 of g2
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from tokenmill.chat.checks import Proof, Span
from tokenmill.chat.marks import CALL, any_of, cut

Anchor = tuple[int, int]  # number of the glue, offset in it


class Layout:
    """Glue, order of texts, and the anchors of spans and turns."""

    __slots__ = ("closed", "ends", "glue", "order", "plain_order", "spans")

    def __init__(self, proof: Proof) -> None:
        glue: list[str] = []
        position = 0
        for hit in proof.hits:
            glue.append(proof.text[position : hit.start])
            position = hit.end
        glue.append(proof.text[position:])
        self.glue = glue
        self.order = [hit.piece for hit in proof.hits]
        self.plain_order = self.order == list(range(len(proof.pieces)))
        anchors = _Anchors(proof)
        self.spans = [(anchors(start), anchors(end)) for start, end in proof.spans]
        self.ends = [(role, *anchors(end)) for role, end in proof.ends]
        self.closed = all(turn.closed for turn in proof.turns.values())

    def expected(self, texts: list[str]) -> str:
        """The render that this glue makes of these texts."""
        if not self.plain_order:
            texts = [texts[number] for number in self.order]
        parts = [""] * (2 * len(texts) + 1)
        parts[::2] = self.glue
        parts[1::2] = texts
        return "".join(parts)

    def place(self, texts: list[str]) -> tuple[list[Span], list[tuple[str, int]]]:
        """Spans and turn ends of a render that equals `expected`."""
        if not self.plain_order:
            texts = [texts[number] for number in self.order]
        before = [0, *accumulate(map(len, texts))]
        spans = [
            (before[first] + start, before[last] + end)
            for (first, start), (last, end) in self.spans
        ]
        return spans, [(role, before[number] + offset) for role, number, offset in self.ends]


class _Anchors:
    """Positions in a proven render as (how many texts lie before, characters of glue before)."""

    def __init__(self, proof: Proof) -> None:
        self._hits = proof.hits

    def __call__(self, position: int) -> Anchor:
        texts = [hit for hit in self._hits if hit.end <= position]
        inside = [hit for hit in self._hits if hit.start < position < hit.end]
        if inside:
            raise ValueError("a boundary lies inside a text")
        return len(texts), position - sum(hit.end - hit.start for hit in texts)


def learnable(proof: Proof) -> bool:
    """Whether a proof can serve other rows: it holds no text but contents and reasoning."""
    return all(piece.kind != CALL for piece in proof.pieces)


def _shared(tags: list[str]) -> str:
    """The longest run of characters that all tags have in common."""
    first = tags[0]
    runs = (first[a:b] for a in range(len(first)) for b in range(a + 1, len(first) + 1))
    return max((run for run in runs if all(run in tag for tag in tags)), key=len, default="")


class Signatures:
    """Reads signature and texts off a simple conversation.

    Args:
        tags: Thinking tags at which assistant texts are cut, as in `marks`.
    """

    def __init__(self, tags: set[str]) -> None:
        self._thinking = any_of(tags)
        # One plain search for what all tags share ("think>") clears nearly every text.
        self._shared = _shared(sorted(tags)) if tags else ""

    def read(self, messages: Sequence[dict[str, Any]]) -> tuple[tuple[Any, ...], list[str]]:
        """The signature of a conversation whose messages hold a role and a text, and the texts."""
        signature: list[Any] = []
        texts: list[str] = []
        thinking, shared = self._thinking, self._shared
        for message in messages:
            role = message["role"]
            content = message["content"]
            stripped = content.strip()
            if (
                len(stripped) == len(content)
                and content
                and (role != "assistant" or thinking is None or (shared and shared not in content))
            ):
                signature.append(role)
                texts.append(content)
                continue
            kinds: list[str] = []
            for kind, run in cut(
                content,
                thinking if role == "assistant" else None,
                thinking if role == "assistant" else None,
            ):
                if kind:
                    kinds.append("")
                    texts.append(run)
                else:
                    kinds.append(run)
            signature.append((role, *kinds))
        return tuple(signature), texts
