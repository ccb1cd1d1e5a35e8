"""Statistics of stores, packs and mixtures, from stored lengths; no token is read."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tokenmill._core.options import check_names
from tokenmill.build.recipe import read_yaml
from tokenmill.data.mixture import Mixture, mix
from tokenmill.data.order import FeistelOrder
from tokenmill.data.packs import Pack, Packs
from tokenmill.data.samples import PackSamples, Samples
from tokenmill.data.view import as_view
from tokenmill.errors import UsageError, check_positive
from tokenmill.store import Store, open_store
from tokenmill.store.sidecar_writer import unfinished

PERCENTILES = (1, 5, 25, 50, 75, 95, 99, 100)
MAX_LENGTHS = tuple(1 << power for power in range(9, 21))  # 512 to 1M: what models are trained at
PACK_LENGTHS = (4096, 8192, 16384, 32768)
PACK_SEED = 42  # the loader's default
MAX_PACK_WINDOWS = 16  # of 65,536 rows: the fill of a million rows is that of a hundred million

Lengths = npt.NDArray[np.int32]


def store_stats(store: Store) -> dict[str, Any]:
    totals = store.manifest["totals"]
    return {
        **{name: totals[name] for name in ("rows", "tokens", "trained_tokens", "rejected")},
        "groups": totals.get("groups", {}),
        "percentiles": percentiles(store.lengths),
        "trained_percentiles": percentiles(store.trained),
        "sources": _per_source(store),
        "roles": per_role(store),
        "sidecars": sidecar_stats(store),
        **image_stats(store),
    }


def image_stats(store: Store) -> dict[str, int]:
    images = store.images
    return {
        "rows_with_images": int(np.count_nonzero(images)),
        "images": int(images.sum(dtype=np.int64)),
        "patches": int(store.patches.sum(dtype=np.int64)),
    }


def sidecar_stats(store: Store) -> list[dict[str, Any]]:
    measured = ("low", "high", "mean", "infinite")
    sidecars = []
    for one in store.sidecars:
        numbers = {name: getattr(one.record, name) for name in measured}
        info = {"name": one.name, "producer": one.producer, "per": one.per, "bytes": one.bytes}
        sidecars.append({**info, **numbers, "missing": 0})
    for writer in unfinished(store):
        info = {"name": writer.identity.name, "producer": writer.identity.producer}
        info |= {"per": writer.per, "bytes": 0, **dict.fromkeys(measured)}
        sidecars.append({**info, "missing": int(writer.missing.size)})
    return sidecars


def store_distributions(
    store: Store, *, max_lengths: Sequence[int] = (), packs: Sequence[Pack] = ()
) -> dict[str, Any]:
    """Return histograms, the effect of common and given ``max_lengths``, and the fill of packs."""
    previews = [packing_preview(store, pack, windows=None) for pack in packs]
    if not previews:
        previews = [packing_preview(store, Pack(n, oversize="drop")) for n in PACK_LENGTHS]
    lengths, trained = np.asarray(store.lengths), np.asarray(store.trained)
    limits = limits_to_try(lengths, max_lengths)
    return {
        "histogram": length_histogram(lengths),
        "trained_share_histogram": share_histogram(trained, lengths),
        "max_length": [limit_effect(lengths, trained, limit) for limit in limits],
        "packing": [preview.document() for preview in previews],
        "source_percentiles": _percentiles_per_source(store, lengths),
    }


def percentiles(values: np.ndarray[Any, Any]) -> dict[str, int]:
    if not len(values):
        return {}
    results = np.percentile(values, PERCENTILES, method="inverted_cdf")
    return {f"p{p}": int(value) for p, value in zip(PERCENTILES, results, strict=True)}


def length_histogram(lengths: Lengths, per_doubling: int = 2) -> list[dict[str, int]]:
    if not len(lengths):
        return []
    top = int(lengths.max())
    steps = per_doubling * (top.bit_length() + 1)
    edges = [0, *sorted({round(2 ** (step / per_doubling)) for step in range(steps)})]
    first = int(np.searchsorted(edges, lengths.min(), side="right")) - 1
    last = int(np.searchsorted(edges, top, side="right"))
    edges = edges[first : last + 1]
    bins = np.searchsorted(edges, lengths, side="right") - 1
    rows = np.bincount(bins, minlength=len(edges) - 1)
    tokens = np.bincount(bins, weights=lengths.astype(np.float64), minlength=len(edges) - 1)
    return [
        {"from": edges[n], "to": edges[n + 1] - 1, "rows": int(rows[n]), "tokens": int(tokens[n])}
        for n in range(len(edges) - 1)
    ]


def share_histogram(
    parts: npt.NDArray[Any], wholes: npt.NDArray[Any], bins: int = 10
) -> list[dict[str, Any]]:
    """Return the number of rows by ``parts / wholes``; the last bin includes 1."""
    places = parts.astype(np.int64) * bins // np.maximum(wholes, 1)
    rows = np.bincount(np.minimum(places, bins - 1), minlength=bins)
    return [{"from": n / bins, "to": (n + 1) / bins, "rows": int(rows[n])} for n in range(bins)]


def limits_to_try(lengths: Lengths, requested: Sequence[int] = ()) -> list[int]:
    for limit in requested:
        check_positive("max_length", limit)
    longest = int(lengths.max()) if len(lengths) else 0
    usual = [limit for limit in MAX_LENGTHS if limit < longest]
    usual += [limit for limit in MAX_LENGTHS if limit >= longest][:1]
    return sorted({*usual, *requested})


def limit_effect(lengths: Lengths, trained: Lengths, limit: int) -> dict[str, Any]:
    over = lengths > limit
    long = lengths[over].astype(np.int64)
    return {
        "max_length": limit,
        "rows_dropped": int(over.sum()),
        "tokens_dropped": int(long.sum()),
        "trained_tokens_dropped": int(trained[over].astype(np.int64).sum()),
        "tokens_truncated": int((long - limit).sum()),
    }


def _percentiles_per_source(store: Store, lengths: Lengths) -> list[dict[str, int]]:
    owners = np.repeat(store.table["source"], store.table["rows"])
    return [percentiles(lengths[owners == number]) for number in range(len(store.sources))]


def _per_source(store: Store) -> list[dict[str, Any]]:
    columns = {"rows": "rows", "tokens": "tokens", "trained_tokens": "trained",
               "rejected": "rejected"}  # fmt: skip
    sums = {
        name: np.bincount(store.table["source"], store.table[column], len(store.sources))
        for name, column in columns.items()
    }
    return [
        {"path": path, **{name: int(values[number]) for name, values in sums.items()}}
        for number, path in enumerate(store.sources)
    ]


def per_role(store: Store, *, with_trained: bool = False) -> dict[str, dict[str, int]]:
    """Return turns and tokens by role; counting trained tokens reads every mask."""
    counts: dict[str, dict[str, int]] = {}
    for at in range(len(store.table)):
        reader = store.slice_at(at)
        ends, bounds, roles = reader.all_turns()
        if not len(ends):
            continue
        starts = np.concatenate(([0], ends[:-1]))
        starts[bounds[:-1][np.diff(bounds) > 0]] = 0  # the first turn of a row starts at token 0
        of_turns = {"turns": np.ones_like(ends), "tokens": ends - starts}
        if with_trained:
            _, mask = reader.all_tokens()
            before = np.repeat(np.frombuffer(reader.starts, np.int32)[:-1], np.diff(bounds))
            running = np.concatenate(([0], np.cumsum(mask, dtype=np.int64)))
            of_turns["trained_tokens"] = running[before + ends] - running[before + starts]
        for number, name in enumerate(reader.record.roles):
            entry = counts.setdefault(name, dict.fromkeys(of_turns, 0))
            for what, values in of_turns.items():
                entry[what] += int(values[roles == number].sum())
    return counts


# Packing


@dataclass(frozen=True)
class PackingPreview:
    pack: Pack
    rows: int  # packed rows
    rows_longer: int  # rows that are longer than a pack
    packs: Packs

    def document(self) -> dict[str, Any]:
        capacity = len(self.packs) * self.pack.length
        return {
            "length": self.pack.length,
            "packs": len(self.packs),
            "fill": round(self.packs.tokens / capacity, 6) if capacity else 0.0,
            "tokens": self.packs.tokens,
            "rows": self.rows,
            "rows_longer": self.rows_longer,
        }

    def first_packs(self, max_packs: int, max_rows: int) -> list[list[list[int]]]:
        """Return [row number, tokens] of every row in the first packs; at least one pack."""
        shown: list[list[list[int]]] = []
        for first, last in pairwise(self.packs.bounds[: max_packs + 1].tolist()):
            if shown and last > max_rows:
                break
            pieces = zip(self.packs.rows[first:last], self.packs.lengths[first:last], strict=True)
            shown.append([[int(row), int(tokens)] for row, tokens in pieces])
        return shown


def packing_preview(
    store: Store, pack: Pack, *, windows: int | None = MAX_PACK_WINDOWS
) -> PackingPreview:
    """Pack the first windows of the loader's default order; all with ``windows=None``."""
    samples = Samples.of(as_view(store), "auto")
    rows = samples.count if windows is None else min(samples.count, windows * pack.window)
    if not rows:
        empty = np.zeros(0, np.int64)
        return PackingPreview(pack, 0, 0, Packs(empty, empty, empty, np.zeros(1, np.int64)))
    order = FeistelOrder(samples.count, PACK_SEED)
    packed = PackSamples(order, samples, pack, 1, None)
    packs = Packs.join([packed.packed(0, n) for n in range(-(-rows // pack.window))])
    longer = samples.lengths_at(order.indices(0, np.arange(rows))) > pack.length
    return PackingPreview(pack, rows, int(longer.sum()), samples.expand(packs))


# Mixtures


def open_mixture(path: str | os.PathLike[str]) -> Mixture:
    """Open a mixture from a YAML file with the arguments of `tokenmill.mix`.

    The sources are stores, as for `open_store`; paths are relative to the file:
    ``sources: {chat: stores/chat, code: code-v2}``.
    """
    path = Path(path)
    document: dict[str, Any] = read_yaml(path)
    check_names(document, ("sources", "weights", "by", "exhausted"), "names", path=path)
    sources = document.pop("sources", None)
    if not isinstance(sources, dict) or not all(
        isinstance(name, str) and isinstance(store, str) for name, store in sources.items()
    ):
        raise UsageError("sources must map names to stores: {chat: path/to/store, …}", path=path)
    if not isinstance(document.get("weights", {}), dict):
        raise UsageError("weights must map the names of sources to numbers", path=path)

    def located(store: str) -> str:
        near = path.parent / Path(store).expanduser()
        is_name = os.sep not in store and not near.exists()
        return store if is_name or "://" in store else str(near)

    return mix({name: open_store(located(store)) for name, store in sources.items()}, **document)


def mixture_stats(mixture: Mixture, steps: int, batch_size: int) -> dict[str, Any]:
    """Return how many rows of every source `tokenmill.Loader` serves in a number of steps."""
    grouped = mixture.view.has_groups  # a sample is then a group, as for the loader
    schedule = mixture.schedule(grouped)
    samples = steps * batch_size
    rows = dict(zip(mixture.names, schedule.served(*divmod(samples, schedule.rows)), strict=True))
    sizes = dict(zip(mixture.names, mixture.sizes(grouped), strict=True))
    return {
        "shares": {name: round(count / samples, 6) for name, count in rows.items()},
        "rows": rows,
        "passes": {name: round(count / sizes[name], 6) for name, count in rows.items()},
        "steps": steps,
        "batch_size": batch_size,
        "samples": samples,
    }
