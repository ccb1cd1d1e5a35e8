"""Serving compared with the peers: the order, packing, padded batches and memory.

Peers: TRL's ``bfd`` packing (which copies tokens), and a `datasets` dataset under torch's
DataLoader with a ``pad_sequence`` collate and no workers. The data of the padded batches is one
store, which the peer opens with `datasets.load_from_disk`: the same bytes.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.report import Report, seconds
from tokenmill._core import fingerprint
from tokenmill.data.loader import Loader
from tokenmill.data.order import FeistelOrder
from tokenmill.data.packs import Pack, pack_window
from tokenmill.store import CacheLayout, Store
from tokenmill.store.columns import SliceColumns
from tokenmill.store.commit import Placement, commit_store
from tokenmill.store.slice_writer import encode_slice, publish_slice

CAPACITY = 8192


def lognormal(rows: int, mean: float = 6.0, sigma: float = 1.0) -> np.ndarray[Any, Any]:
    drawn = np.random.default_rng(0).lognormal(mean, sigma, rows)
    return np.clip(drawn, 1, CAPACITY).astype(np.int64)


def slice_of(lengths: np.ndarray[Any, Any], seed: int) -> SliceColumns:
    rows = len(lengths)
    starts = np.concatenate(([0], np.cumsum(lengths)))
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, 150_000, int(starts[-1]), dtype=np.int32)
    mask = np.ones(len(ids), np.uint8)
    mask[starts[:-1]] = 0
    return SliceColumns(
        ids=ids, mask=mask, starts=starts,
        row=np.arange(rows, dtype=np.int32), part=np.zeros(rows, np.int32),
        line=np.arange(rows, dtype=np.int64), offset=np.arange(rows, dtype=np.int64),
        raw_length=np.ones(rows, np.int64), digest=rng.integers(0, 2**63, rows, dtype=np.uint64),
        turn_ends=lengths.astype(np.int32), turn_roles=np.zeros(rows, np.int8),
        turn_starts=np.arange(rows + 1, dtype=np.int64), roles=("assistant",),
        source_rows=rows, rows_in=rows,
    )  # fmt: skip


def store_of(root: Path, slices: int, lengths: np.ndarray[Any, Any], name: str) -> Store:
    """A store of equal slices of the given lengths."""
    cache = CacheLayout(root)
    placements = []
    for number in range(slices):
        key = fingerprint.key([name, number])
        publish_slice(cache, encode_slice(key, slice_of(lengths, number)))
        first = number * len(lengths)
        placements.append(Placement(key, 0, first, first + 1, first))
    document = {"format": 1, "recipe": {"name": name}, "sources": [{"digest": name}]}
    tokenizer = {"identity": fingerprint.key(name), "pad_token_id": 0, "eos_token_id": 1}
    layout = commit_store(cache, document, placements, tokenizer, {"paths": [name]})
    return Store(layout.directory)


def order(report: Report) -> None:
    positions = np.arange(10**6) * 8589
    huge = FeistelOrder(2**33, 42)
    small = FeistelOrder(10**6, 42)
    own = seconds(lambda: small.indices(0, np.arange(10**6)), repeat=3)
    report.figure("order of 1M positions, n = 1M", own, "s", at_most=0.2)
    own = seconds(lambda: huge.indices(0, positions), repeat=3)
    report.figure("order of 1M positions, n = 2^33", own, "s", at_most=0.2)
    tracemalloc.start()
    huge.index(5, 2**32)
    huge.indices(5, positions[:1000])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    report.figure("memory of an epoch's order, n = 2^33", peak / 1024, "KiB", at_most=256)


def packing(report: Report) -> None:
    import datasets
    from trl import pack_dataset

    lengths = lognormal(10**6)
    found: list[Any] = []
    own = seconds(lambda: found.append(pack_window(np.arange(10**6), lengths, Pack(CAPACITY))))
    fill = lengths.sum() / (len(found[0]) * CAPACITY)
    report.figure("best_fit of 1M lognormal lengths into 8,192", own, "s", at_most=2.0)
    report.figure("its fill", 100 * fill, "%", at_least=99.5)

    def windowed() -> int:
        packs = 0
        for first in range(0, 10**6, 65536):
            part = lengths[first : first + 65536]
            packs += len(pack_window(np.arange(len(part)), part, Pack(CAPACITY)))
        return packs

    packs = windowed()
    own_windowed = seconds(windowed)
    report.figure("the same in the loader's windows of 65,536", own_windowed, "s")
    report.figure("its fill", 100 * lengths.sum() / (packs * CAPACITY), "%", at_least=99.5)

    rows = 50_000
    part = lengths[:rows]
    flat = np.zeros(int(part.sum()), np.int32)
    import pyarrow as pa

    column = pa.ListArray.from_arrays(
        pa.array(np.concatenate(([0], np.cumsum(part))), pa.int32()), pa.array(flat)
    )
    dataset = datasets.Dataset(pa.table({"input_ids": column}))
    datasets.disable_progress_bars()
    packed: list[Any] = []
    with tempfile.TemporaryDirectory() as directory:
        # A fresh cache file, so that nothing is found again from an earlier run.
        peer = seconds(lambda: packed.append(
            pack_dataset(dataset, CAPACITY, strategy="bfd",
                         map_kwargs={"cache_file_name": f"{directory}/packed.arrow"})
        ))  # fmt: skip
        peer_fill = part.sum() / (len(packed[0]) * CAPACITY)
    ours = seconds(lambda: found.append(pack_window(np.arange(rows), part, Pack(CAPACITY))))
    own_fill = part.sum() / (len(found[-1]) * CAPACITY)
    report.figure("trl bfd, per 1M rows", peer / rows * 10**6, "s", note=f"measured on {rows}")
    report.ratio("packing per row, ours against trl bfd (1M rows)", ours=own / 10**6,
                 peer=peer / rows, at_least=5)  # fmt: skip
    report.ratio("packing the same 50,000 rows, ours against trl bfd", ours=ours, peer=peer)
    report.figure("fill of the same rows, trl bfd", 100 * peer_fill, "%")
    report.figure("fill of the same rows, ours", 100 * own_fill, "%", at_least=100 * peer_fill)


def padding(report: Report, root: Path) -> None:
    import datasets
    import torch
    from torch.nn.utils.rnn import pad_sequence

    lengths = np.random.default_rng(1).integers(250, 750, 2000)
    store = store_of(root, 4, lengths, "padding")
    steps = 100

    def ours() -> None:
        iterator = Loader(store, batch_size=64).repeat()
        for _ in range(steps):
            next(iterator)

    dataset = datasets.load_from_disk(str(store.path))

    def collate(rows: list[dict[str, Any]]) -> dict[str, Any]:
        ids = [torch.tensor(row["input_ids"]) for row in rows]
        labels = [
            torch.where(torch.tensor(row["loss_mask"]) == 1, own, -100)
            for row, own in zip(rows, ids, strict=True)
        ]
        return {
            "input_ids": pad_sequence(ids, batch_first=True, padding_value=0),
            "attention_mask": pad_sequence([torch.ones_like(i) for i in ids], batch_first=True),
            "labels": pad_sequence(labels, batch_first=True, padding_value=-100),
        }

    peer_steps = 10

    def peer() -> None:
        loader = torch.utils.data.DataLoader(
            dataset, batch_size=64, shuffle=True, collate_fn=collate, num_workers=0
        )
        for number, _ in enumerate(loader, 1):
            if number == peer_steps:
                break

    ours()
    own = seconds(ours, repeat=3) / steps
    theirs = seconds(peer, repeat=2) / peer_steps
    report.figure("padded batch of 64 × ~500 tokens", own * 1e3, "ms")
    report.figure("the same, datasets + pad_sequence", theirs * 1e3, "ms")
    report.ratio("padded batches, ours against datasets", ours=own, peer=theirs, at_least=10)

    def packed() -> None:
        iterator = Loader(store, batch_size=4, pack=Pack(CAPACITY)).repeat()
        for _ in range(steps):
            next(iterator)

    packed()
    report.figure("packed batch of 4 × 8,192 tokens", seconds(packed) / steps * 1e3, "ms")


WATCH = """
import sys
from tokenmill import Loader, open_store

def private():
    with open("/proc/self/smaps_rollup") as lines:
        return sum(int(l.split()[1]) for l in lines if l.startswith("Private_Dirty"))

loader = Loader(open_store(sys.argv[1]), batch_size=4096)
rows, peak, start = 0, 0, None
for number, batch in enumerate(loader):
    rows += len(batch["input_ids"])
    if number == 20:
        start = private()
    elif number % 100 == 0 and start is not None:
        peak = max(peak, private())
print(rows, (peak - start) / 1024)
"""


def memory(report: Report, root: Path) -> None:
    lengths = np.random.default_rng(2).integers(3, 8, 250_000)
    store = store_of(root, 40, lengths, "memory")
    done = subprocess.run(
        [sys.executable, "-c", WATCH, str(store.path)], capture_output=True, text=True, check=True
    )
    rows, growth = done.stdout.split()
    report.figure("growth of private memory over a pass", float(growth), "MiB", at_most=32,
                  note=f"{int(rows):,} rows")  # fmt: skip


def run(report: Report) -> None:
    """All figures of the serving half."""
    order(report)
    packing(report)
    with tempfile.TemporaryDirectory(prefix="tokenmill-bench-") as directory:
        padding(report, Path(directory) / "padding")
        memory(report, Path(directory) / "memory")
