"""Mixtures: sources with weights, described; the loader serves them.

A `Mixture` holds named views, their weights and the policy for an exhausted one. It computes what
the weights mean in rows: ``by="rows"`` takes them as they are; ``by="tokens"`` and
``by="trained_tokens"`` divide each by the source's mean length (or mean trained count), as an
exact fraction of stored totals, so that the shares hold in tokens over every pass of the sources.
Rows are numbered through the concatenation of the sources; nothing is copied and nothing is drawn
here.

A weight may also be a *schedule*: points (position, weight) of a piecewise linear function of the
samples, or of the tokens, that the mixture has served. `Mixture.points` says what schedules
mean in rows: the rates of all sources wherever one of them has a point.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from itertools import pairwise
from typing import Any

from tokenmill import fingerprint
from tokenmill.dataset.view import ConcatView, View, as_view
from tokenmill.errors import UsageError, check_one_of
from tokenmill.sampling import EXHAUSTED, Schedule, VaryingInterleave, as_fraction
from tokenmill.store import Store

BY = ("rows", "tokens", "trained_tokens")
SCHEDULE_BY = ("samples", "tokens")

Weight = float | Sequence[tuple[int, float]]
"""The weight of a source, or the points of its schedule."""

Points = tuple[tuple[int, Fraction], ...]


class Mixture:
    """Named sources, weights and a policy.

    Args:
        sources: Views by name.
        weights: Share of every source; None takes shares in proportion to what is there. A list of
            points (position, weight) is a schedule: linear between its points, standing still
            before the first and behind the last. A scheduled weight may be 0.
        by: What the weights count: rows, tokens or trained_tokens.
        exhausted: What happens when a source runs out: repeat, stop or drop.
        schedule_by: What the positions of schedules count, over all epochs: samples (rows) that the
            mixture has served, or their tokens, as many as the sources' mean lengths let expect.
    """

    def __init__(
        self,
        sources: Mapping[str, Store | View],
        weights: Mapping[str, Weight] | None,
        by: str,
        exhausted: str,
        schedule_by: str = "samples",
    ) -> None:
        if not isinstance(sources, Mapping) or not sources:
            raise UsageError("mix wants stores by name, such as {'a': store_a, 'b': store_b}")
        check_one_of("by", by, BY)
        check_one_of("exhausted", exhausted, EXHAUSTED)
        check_one_of("schedule_by", schedule_by, SCHEDULE_BY)
        self.schedule_by = schedule_by
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

    def _checked(self, weights: Mapping[str, Weight] | None) -> tuple[Fraction | Points, ...]:
        if weights is None:
            return tuple(Fraction(total) for total in self._totals)
        if set(weights) != set(self.names):
            raise UsageError(
                f"weights are for {sorted(weights)}, the sources are {sorted(self.names)}"
            )
        found = tuple(
            _points(name, weight) if isinstance(weight, list | tuple) else _weight(name, weight)
            for name, weight in ((name, weights[name]) for name in self.names)
        )
        if self.exhausted == "drop" and any(isinstance(weight, tuple) for weight in found):
            raise UsageError(
                "a schedule needs exhausted='repeat' or 'stop': sources that leave would change "
                "the shares that it states"
            )
        return found

    @property
    def is_scheduled(self) -> bool:
        """Whether the weight of any source is a schedule."""
        return any(isinstance(weight, tuple) for weight in self.weights)

    def sizes(self, grouped: bool = False) -> tuple[int, ...]:
        """Rows per source, or groups."""
        return tuple(view.group_count if grouped else len(view) for view in self.views)

    def rates(self, grouped: bool = False) -> tuple[Fraction, ...]:
        """Rows drawn per source, relative to each other, or groups; of schedules, at the start."""
        return self._rates([_at(weight, 0) for weight in self.weights], grouped)

    def _rates(self, weights: Sequence[Fraction], grouped: bool) -> tuple[Fraction, ...]:
        sizes = self.sizes(grouped)
        totals = sizes if self.by == "rows" else self._totals  # ``by="rows"`` counts groups, too
        return tuple(
            weight * Fraction(size, total)
            for weight, size, total in zip(weights, sizes, totals, strict=True)
        )

    def points(self, grouped: bool = False) -> list[tuple[int, tuple[Fraction, ...]]]:
        """Rates of all sources wherever a schedule has a point; positions in samples."""
        places = sorted({place for w in self.weights if isinstance(w, tuple) for place, _ in w})
        rates = [
            self._rates([_at(weight, place) for weight in self.weights], grouped)
            for place in places
        ]
        if self.schedule_by == "tokens":
            places = self._in_samples(places, rates, grouped)
        return list(zip(places, rates, strict=True))

    def _in_samples(
        self, places: list[int], rates: list[tuple[Fraction, ...]], grouped: bool
    ) -> list[int]:
        """How many samples are expected to have as many tokens."""
        means = [
            Fraction(view.total("lengths"), size)
            for view, size in zip(self.views, self.sizes(grouped), strict=True)
        ]
        lengths = [
            sum(rate * mean for rate, mean in zip(here, means, strict=True)) / sum(here)
            for here in rates
        ]  # of a sample, at every point; linear in between
        found = [round(places[0] / lengths[0])]
        for (first, second), (one, other) in zip(pairwise(places), pairwise(lengths), strict=True):
            found.append(found[-1] + max(1, round((second - first) / ((one + other) / 2))))
        return found

    def schedule(self, grouped: bool = False) -> Schedule:
        """Which source is served where."""
        draws = (
            VaryingInterleave(self.points(grouped)) if self.is_scheduled else self.rates(grouped)
        )
        return Schedule(self.sizes(grouped), draws, self.exhausted)

    @property
    def document(self) -> Any:
        """Sources in order, by content; names and weights; policy."""
        document = {
            "mix": [
                [name, view.key, _written(weight)]
                for name, view, weight in zip(self.names, self.views, self.weights, strict=True)
            ],
            "by": self.by,
            "exhausted": self.exhausted,
        }
        return document | ({"schedule_by": self.schedule_by} if self.is_scheduled else {})

    @property
    def key(self) -> str:
        """Name of the mixture's content."""
        return fingerprint.key(self.document)

    @property
    def sources_key(self) -> str:
        """Name of the sources and the policy, weights left out."""
        sources = [[name, view.key] for name, view in zip(self.names, self.views, strict=True)]
        return fingerprint.key({"mix": sources, "by": self.by, "exhausted": self.exhausted})

    def __len__(self) -> int:
        return len(self.view)

    def __repr__(self) -> str:
        total = sum(_at(weight, 0) for weight in self.weights)
        shares = ", ".join(
            f"{name}: {float(_at(weight, 0) / total):.3g}{'…' * isinstance(weight, tuple)}"
            for name, weight in zip(self.names, self.weights, strict=True)
        )
        return f"Mixture({shares}; by {self.by}, {self.exhausted})"


def mix(
    sources: Mapping[str, Store | View],
    weights: Mapping[str, Weight] | None = None,
    by: str = "rows",
    exhausted: str = "repeat",
    schedule_by: str = "samples",
) -> Mixture:
    """Serve several sources in given shares; see `Mixture` for the arguments."""
    return Mixture(sources, weights, by, exhausted, schedule_by)


def _weight(name: str, weight: Any, *, scheduled: bool = False) -> Fraction:
    if isinstance(weight, bool) or not isinstance(weight, int | float | Fraction):
        raise UsageError(f"the weight of {name!r} must be a number, not {weight!r}")
    if not 0 <= weight < float("inf") or not (weight or scheduled):
        raise UsageError(f"the weight of {name!r} must be positive, not {weight!r}")
    return as_fraction(weight)


def _points(name: str, points: Any) -> Points:
    """A schedule as it is given, checked."""
    found = []
    for point in points:
        if not isinstance(point, list | tuple) or len(point) != 2:
            raise UsageError(
                f"the schedule of {name!r} has points (position, weight), not {point!r}"
            )
        position, weight = point
        if isinstance(position, bool) or not isinstance(position, int) or position < 0:
            raise UsageError(
                f"the schedule of {name!r} has positions in whole numbers from 0, not {position!r}"
            )
        found.append((position, _weight(name, weight, scheduled=True)))
    positions = [position for position, _ in found]
    if not found or sorted(set(positions)) != positions:
        raise UsageError(f"the schedule of {name!r} must have ascending positions, not {positions}")
    return tuple(found)


def _at(weight: Fraction | Points, position: int) -> Fraction:
    """A weight at a position, exactly."""
    if isinstance(weight, Fraction):
        return weight
    if position <= weight[0][0]:
        return weight[0][1]
    for (start, before), (stop, behind) in pairwise(weight):
        if position <= stop:
            return before + (behind - before) * Fraction(position - start, stop - start)
    return weight[-1][1]


def _written(weight: Fraction | Points) -> Any:
    if isinstance(weight, Fraction):
        return str(weight)
    return [[position, str(value)] for position, value in weight]
