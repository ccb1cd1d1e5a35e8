"""Commands that attach values to a store, for processes that are killed meanwhile."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import tokenmill as tm
from tokenmill.errors import TokenmillError
from tokenmill.store import Store, sidecar_writer


def values_of(store: Store) -> list[NDArray[np.float32]]:
    lengths = store.lengths.tolist()
    return [np.arange(length, dtype=np.float32) + 1000 * row for row, length in enumerate(lengths)]


def attach_whole(argument: str) -> int:

    def work(store: Store) -> None:
        store.attach("ref", values_of(store), producer="m", per="token")

    return _described(work, argument)


def attach_share(argument: str) -> int:
    path, number, count = json.loads(argument)

    def work(store: Store) -> None:
        sidecar_writer.FLUSH_S = 1e9  # only the explicit flushes
        with store.attach_writer("ref", producer="m", per="token") as writer:
            for done, row in enumerate(writer.share(number, count).tolist()):
                writer.write(row, values_of(store)[row])
                if done % 2:
                    writer.flush()

    return _described(work, path)


def judge_sidecars(argument: str) -> int:
    """Print how many sidecars a fresh reader sees; each must be whole and right."""

    def work(store: Store) -> dict[str, int]:
        for sidecar in store.sidecars:
            sidecar.check_all()
            assert sidecar.values.tobytes() == np.concatenate(values_of(store)).tobytes()
        writer = store.attach_writer("ref", producer="m", per="token")
        return {"sidecars": len(store.sidecars), "missing": int(writer.missing.size)}

    return _described(work, argument)


def _described(work: Callable[[Store], dict[str, int] | None], path: str) -> int:
    try:
        found = work(tm.open_store(Path(path)))
    except TokenmillError as error:
        print(json.dumps({"error": error.as_dict()}))
        return 1
    print(json.dumps(found or {}))
    return 0
