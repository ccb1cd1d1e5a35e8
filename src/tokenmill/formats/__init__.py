"""Other libraries' formats: a store's rows as files that do not need tokenmill.

    parquet, arrow, jsonl   one record per row: ids, mask, origin, carried columns
    hf, axolotl             a Hugging Face dataset with exactly the columns that trainers take
    llama-factory           the same; of pairs and KTO data under LLaMA-Factory's names
    megatron                Megatron-LM's indexed pair .bin/.idx, the loss mask as a second pair
    packed-parquet          one record per pack, laid out by our packing

An `ExportPlan` says what is to be made; each format is a function from it to *files*: names with a
stream of bytes, made a block of rows at a time, so memory does not grow with the data. `export`
stages the files and makes them visible in one step, or finds that they are there already.
"""

from __future__ import annotations

from tokenmill.formats.export_files import Exported, export
from tokenmill.formats.plan import FORMATS, LAYOUTS, MASKS, ExportPlan, SplitPlan

__all__ = ["FORMATS", "LAYOUTS", "MASKS", "ExportPlan", "Exported", "SplitPlan", "export"]
