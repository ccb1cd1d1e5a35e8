"""Every kind of stream, described by plain values that other processes can read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

from tests.consistency.corpus import Corpus
from tokenmill.data.loader import Loader
from tokenmill.data.mixture import Mixture, mix
from tokenmill.data.packs import Pack
from tokenmill.data.view import View, as_view

WEIGHTS = {"one": 0.6, "two": 0.4}
LENGTH_WINDOW, LENGTH_GROUP = 16, 4  # smaller than the corpus

CASES: dict[str, dict[str, Any]] = {
    "rows": {},
    "rows_keep": {"last": "keep"},
    "rows_drop": {"last": "drop"},
    "sequential": {"shuffle": False, "last": "keep"},
    "grouped": {"group_by_length": True, "last": "keep"},
    "packed": {"pack": {"length": 64, "window": 20}},
    "packed_keep": {"pack": {"length": 64, "window": 20}, "last": "keep"},
    "packed_first_fit": {"pack": {"length": 64, "window": 33, "method": "first_fit"}},
    "packed_split": {"pack": {"length": 24, "window": 20, "oversize": "split"}, "last": "drop"},
    # Some windows have no pack.
    "packed_dropping": {"pack": {"length": 20, "window": 2, "oversize": "drop"}, "last": "keep"},
    "packed_balanced": {"pack": {"length": 64, "window": 40, "method": "balanced"}},
    "mixed": {"mix": {"by": "rows", "exhausted": "repeat"}},
    "mixed_stop": {"mix": {"by": "tokens", "exhausted": "stop"}, "last": "keep"},
    "mixed_drop": {"mix": {"by": "trained_tokens", "exhausted": "drop"}, "last": "keep"},
    "mixed_packed": {"mix": {"by": "rows", "exhausted": "drop"},
                     "pack": {"length": 64, "window": 25}},
}  # fmt: skip
"""Name → what differs from a plain loader.

``last`` is how its epochs end: ``wrap`` (the default) is `Loader.repeat`, ``keep`` and ``drop`` are
loops over single epochs with ``drop_last=False`` and ``True``.
"""

RANK_FREE = [name for name in CASES if name != "packed_balanced"]  # independent of ranks


def data_of(corpus: Corpus, name: str) -> View | Mixture:
    case = CASES[name]
    if "mix" not in case:
        return as_view(corpus.stores["one"])
    return mix(corpus.stores, WEIGHTS, **case["mix"])


def arguments_of(name: str, **more: Any) -> dict[str, Any]:
    case = {key: value for key, value in CASES[name].items() if key not in ("mix", "last")}
    if "pack" in case:
        case["pack"] = Pack(**case["pack"])
    case["drop_last"] = CASES[name].get("last") == "drop"
    return {"batch_size": 6, "seed": 11, **case, **more}


def loader_of(corpus: Corpus, name: str, **more: Any) -> Loader:
    return make_loader(data_of(corpus, name), name, **more)


def make_loader(data: View | Mixture, name: str, **more: Any) -> Loader:
    groups = {"LENGTH_WINDOW": LENGTH_WINDOW, "LENGTH_GROUP": LENGTH_GROUP}
    with mock.patch.multiple("tokenmill.data.stream", **groups):
        return Loader(data, **arguments_of(name, **more))


def run_of(loader: Any, name: str, epochs: int | None = None) -> Iterator[Any]:
    if CASES[name].get("last", "wrap") == "wrap":
        yield from loader.repeat(epochs)
    else:
        while epochs is None or loader.state_dict()["epoch"] < epochs:
            yield from loader
