"""A hostile store cannot lead out of its directory, nor make its reader run code."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.faults.conftest import Clean
from tests.faults.tools import Zygote
from tests.faults.world import prepare_arguments
from tokenmill._core import fingerprint
from tokenmill.errors import TokenmillError
from tokenmill.store import open_store
from tokenmill.store.manifest import encode_manifest, with_digest

Manifest = dict[str, Any]


def signed(manifest: Manifest) -> Manifest:
    """Compute key and digest as an attacker would: they are no signatures."""
    return with_digest(manifest, key=fingerprint.key(manifest.get("document")))


HOSTILE: dict[str, Callable[[Manifest], Any]] = {
    "tokenizer outside": lambda m: m["tokenizer"].update(identity="../../../../etc"),
    "tokenizer absolute": lambda m: m["tokenizer"].update(identity="/etc"),
    "tokenizer a number": lambda m: m["tokenizer"].update(identity=7),
    "no tokenizer": lambda m: m.update(tokenizer=None),
    "file outside": lambda m: m["files"].update({"../../../etc/passwd": {"size": 1}}),
    "files a list": lambda m: m.update(files=list(m["files"])),
    "file without a size": lambda m: m["files"].update({"slices.bin": {}}),
    "file of negative size": lambda m: m["files"]["slices.bin"].update(size=-1),
    "totals absurd": lambda m: m["totals"].update(rows=10**30, rows_in=10**30),
    "totals a text": lambda m: m["totals"].update(rows="many"),
    "totals negative": lambda m: m["totals"].update(rows=-5),
    "one row more": lambda m: m["totals"].update(rows=m["totals"]["rows"] + 1),
    "no document": lambda m: m.update(document=None),
    "document a text": lambda m: m.update(document="sources"),
    "sources a number": lambda m: m["document"].update(sources=3),
    "no sources": lambda m: m["document"].update(sources=[]),
}


NO_MANIFEST = {
    "nested lists": b"[" * 100_000,
    "nested objects": b'{"a":' * 100_000,
    "no text": b"\xff\xfe",
    "empty": b"",
    "null": b"null",
    "bare": b'{"format":1}',
    "a long number": b"9" * 10**6,
}


@pytest.mark.parametrize("name", [*HOSTILE, *NO_MANIFEST])
def test_hostile_manifest_is_refused(cache: Path, name: str) -> None:
    path = next((cache / "stores").iterdir()) / "manifest.json"
    data = NO_MANIFEST.get(name)
    if data is None:
        manifest = json.loads(path.read_text())
        HOSTILE[name](manifest)
        data = encode_manifest(signed(manifest))
    path.write_bytes(data)
    with pytest.raises(TokenmillError):
        open_store(path.parent, verify="open")


ALLOWED = ("/proc/self/mountinfo",)


def read_everything_watched(store: str) -> int:
    """Open, serve and verify a store while every event that could run code is written down."""
    from tokenmill.store import Store

    def read() -> int:
        opened = Store(store, "open")
        opened.verify()
        for row in opened:
            assert len(row.input_ids) == len(row.loss_mask)
            assert row.turns
            assert row.origin is not None
            assert row.extra is not None
        return len(list(opened.rejected_rows())) + len(opened.proof)

    read()  # so that nothing is left to be imported
    suspicious: list[str] = []
    watching = True

    def tripwire(event: str, arguments: tuple[Any, ...]) -> None:
        if not watching:
            return
        if event.startswith(("pickle.", "marshal.", "os.exec", "os.posix_spawn", "subprocess.")):
            suspicious.append(event)
        if event in ("exec", "compile", "import", "os.system", "os.fork", "socket.connect"):
            suspicious.append(f"{event} {arguments[:1]!r}")
        if event == "open":
            path, mode, flags = arguments
            outside = not str(path).startswith(str(Path(store).parents[1]))
            if (outside and str(path) not in ALLOWED) or (mode or "r")[0] not in "r":
                suspicious.append(f"open {path} {mode} {flags}")

    sys.addaudithook(tripwire)
    read()
    watching = False
    print(json.dumps(suspicious))
    return 0


def test_reading_a_store_runs_no_code_and_opens_no_other_files(
    zygote: Zygote, clean: Clean
) -> None:
    store = next((clean.cache / "stores").iterdir())
    (outcome,) = zygote.run(
        {"call": "tests.faults.test_hostile:read_everything_watched", "argument": str(store)}
    )
    assert outcome.exit == 0, outcome.stderr
    assert json.loads(outcome.stdout) == []


def test_directory_that_leads_out_of_the_cache_is_refused(
    zygote: Zygote, clean: Clean, tmp_path: Path
) -> None:
    for name in ("slices", "staging", "stores", "tokenizers"):
        cache, outside = tmp_path / name / "cache", tmp_path / name / "outside"
        cache.mkdir(parents=True)
        outside.mkdir()
        (cache / name).symlink_to(outside)
        outcome = zygote.one(prepare_arguments(clean.sources, cache))
        assert outcome.exit == 1, (name, outcome.stderr)
        assert outcome.error == "CacheError"
        assert list(outside.iterdir()) == []
