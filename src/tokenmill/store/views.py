"""Methods of stores and views that give views.

The results live in higher packages, `tokenmill.dataset` and `tokenmill.integrations.torch`. This
module is the only one that imports them from below, when a method is called.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, SupportsIndex

if TYPE_CHECKING:
    from tokenmill.dataset import StoredPictures, View
    from tokenmill.integrations.torch import DataLoader


class ViewMethods:
    """The methods of stores and views that give views."""

    def filter(self, where: str | Callable[..., Any], columns: Sequence[str] | None = None) -> View:
        """The rows for which an expression, or a function over columns, holds.

        Args:
            where: An expression such as ``"length < 4096 and carried.lang == 'en'"``; or a function
                that is given the ``columns``, each an array over many rows at once, and gives one
                truth value per row. It must look at each row by itself.
            columns: What the function is given, in this order: ``length``, ``trained``, ``source``,
                ``file``, ``pictures``, ``patches``, ``carried.<name>``, and what is attached per
                row, by its name.
        """
        view: View = _dataset().filtered(self, where, columns)
        return view

    def select(self, rows: Iterable[SupportsIndex]) -> View:
        """Rows by number, in the given order; a number may come twice, or count from the end."""
        view: View = _dataset().select(self, rows)
        return view

    def shuffle(self, seed: int = 0) -> View:
        """All rows in another order, which depends on the seed and the number of rows alone."""
        view: View = _dataset().shuffle(self, seed)
        return view

    def split(self, parts: Mapping[str, float], *, seed: int = 0) -> tuple[View, ...]:
        """Split rows by content; see `tokenmill.split`."""
        sides: tuple[View, ...] = _dataset().split(self, parts, seed=seed)
        return sides

    def map(self, function: Callable[[Any], Any]) -> View:
        """The same rows, each given to a function before it is served.

        Args:
            function: Gets a `Row` and gives one back (the same, or `Row.with_tokens`), or
                ``{"input_ids": …, "loss_mask": …}``, or one of the two: what it does not give
                stays. Both keep their number of tokens. The same row must always give the same
                answer.
        """
        view: View = _dataset().mapped(self, function)
        return view

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

    def _range(self, numbers: range) -> View:
        view: View = _dataset().sliced(self, numbers)
        return view


def pictures_of(store: Any) -> StoredPictures:
    """The reader of a store's images."""
    found: StoredPictures = _dataset().pictures_of(store)
    return found


def _dataset() -> Any:
    from tokenmill import dataset

    return dataset
