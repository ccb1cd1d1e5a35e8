"""Methods that stores and views share. They import higher packages when called."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, SupportsIndex

if TYPE_CHECKING:
    from tokenmill.data.images import StoredImages
    from tokenmill.data.view import View
    from tokenmill.integrations.torch import DataLoader
    from tokenmill.tokenizers.tokenizer import Tokenizer


class ViewMethods:
    def filter(
        self: Any, where: str | Callable[..., Any], columns: Sequence[str] | None = None
    ) -> View:
        """Return the rows for which an expression or a function is true.

        Args:
            where: An expression such as ``"length < 4096 and extra.lang == 'en'"``; or a function
                of the ``columns``, each an array over many rows, that returns one boolean per row.
                Its value for a row may not depend on other rows.
            columns: Arguments of the function: ``length``, ``trained``, ``source``, ``file``,
                ``images``, ``patches``, ``extra.<name>``, or the name of a sidecar per row.
        """
        from tokenmill.data.choices import filter_rows

        return filter_rows(self, where, columns)

    def select(self: Any, rows: Iterable[SupportsIndex]) -> View:
        """Return rows by number, in this order. Numbers may repeat or be negative."""
        from tokenmill.data.choices import select

        return select(self, rows)

    def shuffle(self: Any, seed: int = 0) -> View:
        """Return all rows in an order that depends on the seed and the number of rows only."""
        from tokenmill.data.choices import shuffle

        return shuffle(self, seed)

    def split(self: Any, shares: Mapping[str, float], *, seed: int = 0) -> dict[str, View]:
        """Split rows by content; return a view for each name.

        A row's split depends on its bytes and the seed only. So a row stays in its split when other
        rows are added or removed, equal rows are in the same split, and so are all turns of one
        conversation (``expand="turns"``).

        Args:
            shares: Share of every split, by name; they add up to 1.
            seed: Seed of the split.
        """
        from tokenmill.data.choices import split

        return split(self, shares, seed)

    def map(self: Any, function: Callable[[Any], Any]) -> View:
        """Return the same rows, each passed through a function when it is served.

        Args:
            function: Takes a `Row` and returns a `Row`, or a dict with ``input_ids``, ``loss_mask``
                or both. It must be deterministic and keep the number of tokens.
        """
        from tokenmill.data.view import mapped

        return mapped(self, function)

    def torch(self, batch_size: int = 8, **arguments: Any) -> DataLoader:
        """Return a torch DataLoader with ``state_dict``, over batches of tensors.

        Args:
            batch_size: Samples per rank.
            **arguments: Arguments of `tokenmill.integrations.torch.DataLoader` (``num_workers``, …)
                and of `tokenmill.Loader`.
        """
        from tokenmill.integrations.torch import DataLoader

        data: Any = self  # a store or a view
        return DataLoader(data, batch_size=batch_size, **arguments)

    def _range(self: Any, numbers: range) -> View:
        from tokenmill.data.choices import sliced

        return sliced(self, numbers)


def tokenizer_of(store: Any) -> Tokenizer:
    from tokenmill.data.view import tokenizer_of

    return tokenizer_of(store)


def images_of(store: Any) -> StoredImages:
    from tokenmill.data.images import images_of

    return images_of(store)
