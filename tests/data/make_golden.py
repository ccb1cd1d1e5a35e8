"""Writes golden_order.json: the order's values that no release may change under ORDER_VERSION 1.

Running this is a decision, not a fix: a changed value breaks the resume of every run under way.
``python -m tests.data.make_golden`` after a bump of ORDER_VERSION, with a "Changed" in the
changelog.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from tokenmill.data.interleave import Interleave
from tokenmill.data.order import ORDER_VERSION, FeistelOrder, derive_key

GOLDEN = Path(__file__).with_name("golden_order.json")
SIZES = (1, 2, 3, 10, 257, 1000, 65537, 10**6, 2**31 - 1, 2**33, 2**33 + 5, 2**40 + 1)


def vectors() -> dict[str, object]:
    orders = []
    for n in SIZES:
        for seed, epoch, stream in ((42, 0, 0), (42, 1, 0), (43, 0, 0), (2**64 - 1, 7, 3)):
            order = FeistelOrder(n, seed, stream)
            positions = sorted({p % n for p in (0, 1, 2, 3, n // 3, n // 2, n - 2, n - 1)})
            orders.append(
                {
                    "n": n,
                    "seed": seed,
                    "epoch": epoch,
                    "stream": stream,
                    "positions": positions,
                    "indices": order.indices(epoch, np.asarray(positions)).tolist(),
                }
            )
    draws = Interleave([0.5, 0.3, 0.2]).draws(np.arange(20))
    return {
        "order_version": ORDER_VERSION,
        "keys": {"42,0": derive_key(42, 0), "42,1": derive_key(42, 1), "43,0": derive_key(43, 0)},
        "orders": orders,
        "whole": {"n": 20, "seed": 42, "epoch": 0,
                  "indices": FeistelOrder(20, 42).indices(0, np.arange(20)).tolist()},
        "interleave": np.stack(draws, axis=1).tolist(),
    }  # fmt: skip


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps(vectors(), indent=1) + "\n")
