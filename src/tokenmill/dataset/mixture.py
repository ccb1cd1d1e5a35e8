"""Mixtures: sources with weights, described; the loader serves them.

A `Mixture` holds named views, their weights and the policy for an exhausted one. It computes what
the weights mean in rows: ``by="rows"`` takes them as they are; ``by="tokens"`` and
``by="trained_tokens"`` divide each by the source's mean length (or mean trained count), as an
exact fraction of stored totals, so that the shares hold in tokens over every pass of the sources.
Rows are numbered through the concatenation of the sources; nothing is copied and nothing is drawn
here.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from tokenmill import fingerprint
from tokenmill.dataset.view import ConcatView, View, as_view
from tokenmill.errors import UsageError
from tokenmill.sampling import EXHAUSTED, as_fraction
from tokenmill.store import Store

BY = ("rows", "tokens", "trained_tokens")


class Mixture:
    """Named sources, weights and a policy.

    Args:
        sources: Views by name.
        weights: Share of every source; None takes shares in proportion to what is there.
        by: What the weights count: rows, tokens or trained_tokens.
        exhausted: What happens when a source runs out: repeat, stop or drop.
    """

    def __init__(
        self,
        sources: Mapping[str, Store | View],
        weights: Mapping[str, float] | None,
        by: str,
        exhausted: str,
    ) -> None:
        if not isinstance(sources, Mapping) or not sources:
            raise UsageError("mix wants stores by name, such as {'a': store_a, 'b': store_b}")
        if by not in BY:
            raise UsageError(f"by must be one of {', '.join(BY)}, not {by!r}")
        if exhausted not in EXHAUSTED:
            raise UsageError(f"exhausted must be one of {', '.join(EXHAUSTED)}, not {exhausted!r}")
        self.names = tuple(sources)
        self.views = tuple(as_view(source) for source in sources.values())
        self.by = by
        self.exhausted = exhausted
        for name, view in zip(self.names, self.views, strict=True):
            if not len(view):
                raise UsageError(f"source {name!r} of the mixture has no rows")
        self._totals = tuple(self._total(view) for view in self.views)
        self.weights = self._checked(weights)
        self.view: View = ConcatView(self.views)

    def _total(self, view: View) -> int:
        if self.by == "rows":
            return len(view)
        total = view.total("lengths" if self.by == "tokens" else "trained")
        if not total:
            raise UsageError(f"{view!r} has no {self.by}: it cannot be weighted by them")
        return total

    def _checked(self, weights: Mapping[str, float] | None) -> tuple[Fraction, ...]:
        if weights is None:
            return tuple(Fraction(total) for total in self._totals)
        if set(weights) != set(self.names):
            raise UsageError(
                f"weights are for {sorted(weights)}, the sources are {sorted(self.names)}"
            )
        found = []
        for name in self.names:
            weight = weights[name]
            if isinstance(weight, bool) or not isinstance(weight, int | float | Fraction):
                raise UsageError(f"the weight of {name!r} must be a number, not {weight!r}")
            if not 0 < weight < float("inf"):
                raise UsageError(f"the weight of {name!r} must be positive, not {weight!r}")
            found.append(as_fraction(weight))
        return tuple(found)

    def sizes(self, grouped: bool = False) -> tuple[int, ...]:
        """Rows per source, or groups."""
        return tuple(view.group_count if grouped else len(view) for view in self.views)

    def rates(self, grouped: bool = False) -> tuple[Fraction, ...]:
        """Rows drawn per source, relative to each other; or groups: ``by="rows"`` counts them."""
        sizes = self.sizes(grouped)
        totals = sizes if self.by == "rows" else self._totals
        return tuple(
            weight * Fraction(size, total)
            for weight, size, total in zip(self.weights, sizes, totals, strict=True)
        )

    @property
    def document(self) -> Any:
        """Sources in order, by content; names and weights; policy."""
        return {
            "mix": [
                [name, view.key, str(weight)]
                for name, view, weight in zip(self.names, self.views, self.weights, strict=True)
            ],
            "by": self.by,
            "exhausted": self.exhausted,
        }

    @property
    def key(self) -> str:
        """Name of the mixture's content."""
        return fingerprint.key(self.document)

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
    sources: Mapping[str, Store | View],
    weights: Mapping[str, float] | None = None,
    by: str = "rows",
    exhausted: str = "repeat",
) -> Mixture:
    """Serve several sources in given shares; see `Mixture` for the arguments."""
    return Mixture(sources, weights, by, exhausted)
