"""Methods of stores and views that give views; they import higher packages when called."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, SupportsIndex

if TYPE_CHECKING:
    from tokenmill.data.pictures import StoredPictures
    from tokenmill.data.view import View
    from tokenmill.integrations.torch import DataLoader


class ViewMethods:
    def filter(
        self: Any, where: str | Callable[..., Any], columns: Sequence[str] | None = None
    ) -> View:
        """The rows for which an expression, or a function over columns, holds.

        Args:
            where: An expression such as ``"length < 4096 and carried.lang == 'en'"``; or a function
                that is given the ``columns``, each an array over many rows at once, and gives one
                truth value per row. It must look at each row by itself.
            columns: What the function is given, in this order: ``length``, ``trained``, ``source``,
                ``file``, ``pictures``, ``patches``, ``carried.<name>``, and what is attached per
                row, by its name.
        """
        from tokenmill.data.choices import filtered

        return filtered(self, where, columns)

    def select(self: Any, rows: Iterable[SupportsIndex]) -> View:
        """Rows by number, in the given order; a number may come twice, or count from the end."""
        from tokenmill.data.choices import select

        return select(self, rows)

    def shuffle(self: Any, seed: int = 0) -> View:
        """All rows in another order, which depends on the seed and the number of rows alone."""
        from tokenmill.data.choices import shuffle

        return shuffle(self, seed)

    def split(self: Any, parts: Mapping[str, float], *, seed: int = 0) -> tuple[View, ...]:
        """Split rows by content; see `tokenmill.split`."""
        from tokenmill.data.choices import split

        return split(self, parts, seed=seed)

    def map(self: Any, function: Callable[[Any], Any]) -> View:
        """The same rows, each given to a function before it is served.

        Args:
            function: Gets a `Row` and gives one back (the same, or `Row.with_tokens`), or
                ``{"input_ids": …, "loss_mask": …}``, or one of the two: what it does not give
                stays. Both keep their number of tokens. The same row must always give the same
                answer.
        """
        from tokenmill.data.view import mapped

        return mapped(self, function)

    def torch(self, batch_size: int = 8, **arguments: Any) -> DataLoader:
        """The rows as batches of tensors, from a stateful DataLoader.

        Args:
            batch_size: Samples per rank.
            **arguments: Of `tokenmill.integrations.torch.DataLoader` (``num_workers``, …) and of
                `tokenmill.Loader`.
        """
        from tokenmill.integrations.torch import DataLoader

        whole: Any = self  # a store or a view
        return DataLoader(whole, batch_size=batch_size, **arguments)

    def _range(self: Any, numbers: range) -> View:
        from tokenmill.data.choices import sliced

        return sliced(self, numbers)


def pictures_of(store: Any) -> StoredPictures:
    from tokenmill.data.pictures import pictures_of

    return pictures_of(store)
