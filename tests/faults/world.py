"""A small world: sources, the command that prepares them, and what its cache must hold.

An *image* is the checksum of every published file of slices and stores, proofs left out. Two
caches with the same image are bit-identical in everything that is guaranteed.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path

import xxhash

import tokenmill
from tokenmill.errors import TokenmillError
from tokenmill.store import CacheLayout, open_store
from tokenmill.store.layout import PROOF
from tokenmill.store.slices import SliceReader

TOKENIZER = Path(tokenmill.__file__).parent / "examples" / "tokenizer"
FILES = 6

Image = dict[str, str]


def conversation(rng: random.Random, turns: int = 1) -> dict[str, object]:
    messages = []
    for turn in range(turns):
        question, answer = (" ".join(rng.choices(WORDS, k=rng.randrange(3, 12))) for _ in range(2))
        messages += [{"role": "user", "content": f"{question} {turn}?"}]
        messages += [{"role": "assistant", "content": f"{answer}."}]
    return {"messages": messages}


WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "ate", "seven", "fish", "before", "noon"]


def write_sources(directory: Path, files: int = FILES, rows: int = 4, seed: int = 0) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    rng = random.Random(seed)
    for number in range(files):
        lines = [json.dumps(conversation(rng, rng.randrange(1, 4))) for _ in range(rows)]
        if number == 1:
            lines.insert(1, '{"messages": [')
        (directory / f"part-{number:03}.jsonl").write_text("\n".join(lines) + "\n")
    return directory


def prepare_arguments(sources: Path | Sequence[Path], cache: Path, *more: str) -> list[str]:
    named = [sources] if isinstance(sources, Path) else sources
    given = ["prepare", *map(str, named), "--tokenizer", str(TOKENIZER), "--json"]
    # Without AutoTokenizer's opinion nothing has to import transformers.
    given += ["--tokenizer-backend", "file", "--cache-dir", str(cache)]
    if "--executor" not in more:
        given += ["--executor", "inline"]
    return [*given, *more]


def image(cache: Path) -> Image:
    shown = {}
    for part in ("slices", "stores"):
        for path in sorted((cache / part).rglob("*")):
            if path.is_file() and path.name != PROOF:
                shown[str(path.relative_to(cache))] = xxhash.xxh3_128_hexdigest(path.read_bytes())
    return shown


def committed(cache: Path) -> set[str]:
    return {path.stem for path in (cache / "slices").glob("*/*.json")}


def read_back(directory: str) -> int:
    """Look at a cache as a reader would; exit code 1 when something visible is not whole."""
    cache = Path(directory)
    layout = CacheLayout(cache)
    try:
        for key in committed(cache):
            SliceReader(layout.slice(key), None, mapped=False, check=False).check_all()
        stores = sorted(path for path in layout.stores.glob("*") if path.is_dir())
        rows = [len(open_store(path, verify="open")) for path in stores]
        found = {"slices": len(committed(cache)), "stores": len(stores), "rows": rows}
        print(json.dumps(found))
    except TokenmillError as error:
        print(json.dumps({"error": error.as_dict()}))
        return 1
    return 0
