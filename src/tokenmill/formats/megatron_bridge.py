"""Packs as Megatron-Bridge reads them, and what it wants to know of all of them together.

`tables` asks it for the records of packs, `export_files` for the metadata beside them. Its packed
dataset cuts every row to predictions: inputs are all tokens but the last, labels all but the first.
Three things follow. The mask stands one token earlier than ours: there it says of a position
whether the token *behind* it is trained. A row's place in a pack is a token less than the row. And
where context parallelism wants rows of a multiple of tokens (``pad_multiple``, its
``pad_seq_to_mult``), it is the predictions that are counted: a row is stored with that many tokens
and one more, padded with the end-of-sequence token, by which its reader tells the padding.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import numpy.typing as npt

from tokenmill.dataset import View
from tokenmill.errors import UsageError
from tokenmill.formats.plan import ExportPlan
from tokenmill.packing import Packs, Piece

METADATA = "_metadata.json"
"""Beside the packs in a directory (readers of Parquet pass over the name): what its option
``packed_metadata_path`` names."""


def eos_of(view: View) -> int:
    """The token that rows are padded with."""
    found = {store.manifest["tokenizer"].get("eos_id") for store in view.stores}
    if len(found) != 1 or None in found:
        raise UsageError("pad_multiple needs one end-of-sequence token, which the data has not")
    eos: int = found.pop()
    return eos


def bridge_record(pieces: list[Piece], slots: list[int], eos: int) -> dict[str, npt.NDArray[Any]]:
    """One pack: pieces side by side, each padded to its slot of stored tokens."""
    size = sum(slots)
    ids, mask = np.full(size, eos, np.int32), np.zeros(size, np.uint8)
    starts = np.concatenate(([0], np.cumsum(slots, dtype=np.int64)))[:-1]
    for start, (tokens, trained) in zip(starts.tolist(), pieces, strict=True):
        ids[start : start + tokens.size] = tokens
        # One earlier: the first of every row predicts the second, the last one nothing.
        mask[start : start + max(tokens.size - 1, 0)] = trained[1:]
    return {"input_ids": ids, "loss_mask": mask, "seq_start_id": starts}


def stored_slots(plan: ExportPlan, packs: Packs) -> npt.NDArray[np.int64]:
    """Stored tokens of every piece, padding included."""
    slots = plan.run.slots
    return packs.lengths if slots is None else packs.lengths + slots.unpredicted


def metadata_of(plan: ExportPlan) -> list[bytes]:
    """What its collator needs to give every batch one shape, counted in predictions."""
    packing = plan.run.spec.packing
    assert packing is not None
    length = shortest = packing["length"]
    longest = most = packs = rows = total = 0
    for samples in plan.shards:
        for block in plan.blocks(samples):
            predictions = stored_slots(plan, block) - 1
            filled = block.per_pack(predictions)
            shortest = min(shortest, int(filled.min()))
            most = max(most, int(np.diff(block.bounds).max()))
            longest = max(longest, int(predictions.max(initial=0)))
            packs += len(block)
            rows += predictions.size
            total += int(filled.sum())
    document = {
        "dataset_max_seqlen": longest,
        "max_samples_per_bin": most,
        "packing_factor": round(rows / packs, 2),
        "packing_efficiency": round(total / packs / length * 100, 2),
        "pack_size": length,
        "min_packed_seqlen": shortest,
    }
    return [json.dumps([document]).encode() + b"\n"]
