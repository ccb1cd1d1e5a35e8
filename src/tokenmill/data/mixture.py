"""Mixtures: named sources with weights."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from numbers import Real
from typing import Any

from tokenmill._core import fingerprint
from tokenmill.data.interleave import EXHAUSTED, Schedule, as_fraction
from tokenmill.data.view import View, as_view, concat
from tokenmill.errors import UsageError, check_one_of
from tokenmill.store import Store
from tokenmill.store.by_source import SourceRows

BY = ("rows", "tokens", "trained_tokens")


class Mixture:
    """Named sources with weights. Row numbers are those of their concatenation.

    Args:
        sources: Stores or views by name.
        weights: Share of every source; None: in proportion to their sizes.
        by: Unit of the weights: rows, tokens or trained_tokens.
        exhausted: What happens when a source is exhausted: repeat, stop or drop.
    """

    def __init__(
        self,
        sources: Mapping[str, Store | SourceRows | View],
        weights: Mapping[str, float] | None,
        by: str,
        exhausted: str,
    ) -> None:
        if not isinstance(sources, Mapping) or not sources:
            raise UsageError(
                f"sources must be a mapping such as {{'a': store_a, 'b': store_b}}, got {sources!r}"
            )
        check_one_of("by", by, BY)
        check_one_of("exhausted", exhausted, EXHAUSTED)
        self.names = tuple(sources)
        self.views = tuple(as_view(source) for source in sources.values())
        self.by = by
        self.exhausted = exhausted
        for name, view in zip(self.names, self.views, strict=True):
            if not len(view):
                raise UsageError(f"source {name!r} of the mixture has no rows")
        self._totals = tuple(self._total(view) for view in self.views)
        self.weights = self._checked(weights)
        self.view = concat(self.views)

    def _total(self, view: View) -> int:
        if self.by == "rows":
            return len(view)
        total = view.total("lengths" if self.by == "tokens" else "trained")
        if not total:
            raise UsageError(
                ("by", self.by), f" needs {self.by} in every source; {view!r} has none"
            )
        return total

    def _checked(self, weights: Mapping[str, float] | None) -> tuple[Fraction, ...]:
        if weights is None:
            return tuple(Fraction(total) for total in self._totals)
        if not isinstance(weights, Mapping):
            raise UsageError(f"weights must be a mapping of names to numbers, got {weights!r}")
        if set(weights) != set(self.names):
            raise UsageError(
                f"weights must have the names {sorted(self.names)}, got {sorted(weights)}"
            )
        return tuple(_weight(name, weights[name]) for name in self.names)

    def sizes(self, grouped: bool = False) -> tuple[int, ...]:
        """Return the number of rows or groups per source."""
        return tuple(view.group_count if grouped else len(view) for view in self.views)

    def rates(self, grouped: bool = False) -> tuple[Fraction, ...]:
        """Return the relative number of rows or groups to draw per source.

        Weights in tokens are divided by the source's mean length, an exact fraction, so that the
        shares are exact over complete passes.
        """
        sizes = self.sizes(grouped)
        totals = sizes if self.by == "rows" else self._totals  # ``by="rows"`` also means groups
        return tuple(
            weight * Fraction(size, total)
            for weight, size, total in zip(self.weights, sizes, totals, strict=True)
        )

    def schedule(self, grouped: bool = False) -> Schedule:
        return Schedule(self.sizes(grouped), self.rates(grouped), self.exhausted)

    @property
    def key(self) -> str:
        sources = [
            [name, view.key, str(weight)]
            for name, view, weight in zip(self.names, self.views, self.weights, strict=True)
        ]
        return fingerprint.key({"mix": sources, "by": self.by, "exhausted": self.exhausted})

    def __len__(self) -> int:
        return len(self.view)

    def __repr__(self) -> str:
        total = sum(self.weights)
        shares = ", ".join(
            f"{name}: {float(weight / total):.3g}"
            for name, weight in zip(self.names, self.weights, strict=True)
        )
        return f"Mixture({shares}; by {self.by}, {self.exhausted})"


def mix(
    sources: Mapping[str, Store | SourceRows | View],
    weights: Mapping[str, float] | None = None,
    by: str = "rows",
    exhausted: str = "repeat",
) -> Mixture:
    """Return a mixture of sources with weights; see `Mixture` for the arguments."""
    return Mixture(sources, weights, by, exhausted)


def _weight(name: str, weight: Any) -> Fraction:
    if isinstance(weight, bool) or not isinstance(weight, Real):
        raise UsageError(f"the weight of {name!r} must be a number, got {weight!r}")
    if not 0 < float(weight) < float("inf"):
        raise UsageError(f"the weight of {name!r} must be positive, got {weight!r}")
    return as_fraction(weight)
