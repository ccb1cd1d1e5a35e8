"""``tokenmill attach``: numbers from a file, attached to the rows or tokens of a store.

The file is a NumPy array (``.npy``, mapped, never whole in memory), one value per row or all tokens
one behind the other; or lines of JSON (``.jsonl``), one per row: a number, or with ``--per token``
a list with one number for each token.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from tokenmill.cli.app import app
from tokenmill.cli.options import StorePath, command
from tokenmill.cli.output import Output
from tokenmill.errors import SourceMissing, UsageError

if TYPE_CHECKING:
    from tokenmill.store import Store


@command(app)
def attach(
    output: Output,
    store: StorePath,
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="What batches and filters call them.")
    ],
    file: Annotated[str, typer.Argument(metavar="FILE", help="A .npy or .jsonl file.")],
    made_by: Annotated[
        str, typer.Option(help="What computed the values: a digest of the model, or a text.")
    ],
    per: Annotated[Literal["row", "token"], typer.Option(help="One value for each of these.")] = (
        "row"
    ),
) -> None:
    """Attach numbers to the rows of a store."""
    from tokenmill.store import open_store

    opened = open_store(store)
    path = Path(file)
    if not path.is_file():
        raise SourceMissing("no such file", path=path)
    values = _array(path) if path.suffix == ".npy" else _lines(path, opened, per)
    sidecar = opened.attach(name, values, made_by=made_by, per=per)
    document = {
        "path": str(sidecar.path),
        "name": sidecar.name,
        "made_by": sidecar.made_by,
        "per": sidecar.per,
        "rows": len(sidecar),
        "bytes": sidecar.bytes,
    }
    output.say(f"{sidecar.name}: {sidecar.record.values:,} values, one per {sidecar.per}")
    output.result(document)


def _array(path: Path) -> Any:
    import numpy as np

    try:
        return np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        raise UsageError(f"not an array of numbers: {error}", path=path) from error


def _lines(path: Path, store: Store, per: str) -> Iterator[Any]:
    """One line per row, each with as many numbers as its row wants."""
    import msgspec

    kind: Any = float if per == "row" else list[float]
    decoder, row = msgspec.json.Decoder(kind), 0
    with open(path, "rb") as file:
        for line, data in enumerate(file, 1):
            if not data.strip():
                continue
            try:
                values = decoder.decode(data)
            except (msgspec.MsgspecError, UnicodeDecodeError) as error:
                wanted = "a number" if per == "row" else "a list of numbers"
                raise UsageError(f"not {wanted}: {error}", path=path, line=line) from error
            if per == "token" and row < len(store) and len(values) != store.lengths[row]:
                raise UsageError(
                    f"{len(values)} values for row {row}, which has {store.lengths[row]} tokens",
                    path=path,
                    line=line,
                )
            yield values
            row += 1
