r"""One row made readable.

In go a store and a row number; out comes a `RowView`, which ``tokenmill inspect`` prints. A
`RowView` holds a row's tokens with the text of each, its turns and its origin. A *piece* is the
text of one token's bytes; bytes that are no whole character alone are written ``\xe4\xbd``. The
*kind* of a token says how to show it: ``trained`` or ``untrained`` text, ``special`` (a control
token that is not trained), ``closer`` (a trained control token that ends a turn), and ``control``
(any other trained control token). How whitespace is shown is said in `terminal_text`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tokenmill.origin import Origin
from tokenmill.store import Media, Sidecar, Store
from tokenmill.tokenizer import Tokenizer, load

LONGEST_REFERENCE = 200  # characters that are shown


@dataclass(frozen=True)
class RowView:
    """One row, ready to be shown.

    Attributes:
        number: Its number in the store.
        ids: Token ids.
        pieces: Text of each token.
        mask: 1 where trained.
        kinds: How each token is shown.
        turns: ``(role, start, end)`` over tokens.
        origin: Where it comes from.
        carried: The carried columns.
        sidecars: What is attached to it: by name one number, or one per token; and what its tokens
            count in the loss, where that is not always 1.
        media: Its pictures, and the tokens that stand for them.
    """

    number: int
    ids: list[int]
    pieces: list[str]
    mask: list[int]
    kinds: list[str]
    turns: list[tuple[str, int, int]]
    origin: Origin
    carried: dict[str, Any]
    sidecars: dict[str, float | list[float]]
    media: list[Media]

    def document(self) -> dict[str, Any]:
        """The object that ``tokenmill inspect --json`` prints."""
        return {
            "row": self.number,
            "ids": self.ids,
            "pieces": self.pieces,
            "mask": self.mask,
            "kinds": self.kinds,
            "turns": [list(turn) for turn in self.turns],
            "origin": self.origin._asdict(),
            "carried": self.carried,
            "sidecars": self.sidecars,
            "media": [media_document(one) for one in self.media],
        }


def store_tokenizer(store: Store) -> Tokenizer:
    """The tokenizer a store was made with, from the store's own copy."""
    return load(str(store.tokenizer_path), backend="file")


def view_row(store: Store, number: int, tokenizer: Tokenizer) -> RowView:
    """Make one row readable."""
    row = store[number]
    ids, mask = row.input_ids.tolist(), row.loss_mask.tolist()
    special = tokenizer.is_special(ids).tolist()
    return RowView(
        number=number if number >= 0 else len(store) + number,
        ids=ids,
        pieces=[piece.decode("utf-8", "backslashreplace") for piece in tokenizer.pieces(ids)],
        mask=mask,
        kinds=token_kinds(mask, special),
        turns=row.turns,
        origin=row.origin,
        carried=row.carried,
        sidecars=attached_to(store.sidecars, number)
        | ({"loss_weights": row.weights.tolist()} if store.has_weights else {}),
        media=row.media,
    )


def media_document(media: Media) -> dict[str, Any]:
    """One picture of a row: where its tokens are, and how large it is."""
    return {
        "start": media.start,
        "count": media.count,
        "width": media.width,
        "height": media.height,
        "grid": None if media.grid is None else list(media.grid),
        "reference": media.reference[:LONGEST_REFERENCE],
        "digest": media.digest,
    }


def attached_to(sidecars: Sequence[Sidecar], number: int) -> dict[str, float | list[float]]:
    """What is attached to a row, by the names of `labelled`."""
    found = {}
    for label, sidecar in labelled(sidecars):
        values = sidecar[number]
        found[label] = values if isinstance(values, float) else values.tolist()
    return found


def labelled(sidecars: Sequence[Sidecar]) -> list[tuple[str, Sidecar]]:
    """Sidecars by name; where several made what has one name, each says which."""
    named = Counter(sidecar.name for sidecar in sidecars)
    return [
        (one.name if named[one.name] == 1 else f"{one.name} {one.made_by}", one) for one in sidecars
    ]


def answer_name(label: bool | None, place: int, size: int) -> str:
    """What an answer of a group is called; an ordinary row in a store that has groups, nothing.

    Args:
        label: Whether it is wanted, where that is known.
        place: Its number within the group.
        size: How many answers the group has.
    """
    if label is None:
        return f"rank {place + 1}" if size > 1 else ""
    wanted, unwanted = ("chosen", "rejected") if size == 2 else ("wanted", "unwanted")
    return wanted if label else unwanted


def token_kinds(mask: Sequence[int], special: Sequence[bool]) -> list[str]:
    """How to show each token: a function of what is trained and what is a control token."""
    kinds = []
    for at, (trained, control) in enumerate(zip(mask, special, strict=True)):
        ends = at + 1 == len(mask) or not mask[at + 1]
        if not control:
            kinds.append("trained" if trained else "untrained")
        elif not trained:
            kinds.append("special")
        else:
            kinds.append("closer" if ends else "control")
    return kinds
