"""Collection while others read and build: correct rows, or an error."""

from __future__ import annotations

import json
import time
from pathlib import Path

from tests.faults.conftest import Clean
from tests.faults.tools import Zygote
from tests.faults.world import image, prepare_arguments
from tokenmill.store.collect import collect


def collect_often(cache: str) -> int:
    removed = 0
    deadline = time.monotonic() + 1
    while time.monotonic() < deadline:
        removed += len(collect(Path(cache), grace_s=0).removed)
    print(json.dumps({"removed": removed}))
    return 0


def test_build_among_rude_collectors_is_whole_or_a_typed_error(
    zygote: Zygote, clean: Clean, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    arguments = prepare_arguments(clean.sources, cache)
    collector = {"call": "tests.faults.test_collecting:collect_often", "argument": str(cache)}
    builder, detail = zygote.run({"arguments": arguments, "delay": 0.2}, collector)
    assert detail.exit == 0, detail.stderr
    assert builder.exit == 0 or builder.error in ("CorruptionError", "CacheError"), builder.stderr
    zygote.read_back(cache) if builder.exit == 0 else None
    again = zygote.one(prepare_arguments(clean.sources, cache, "--force-recache"))
    assert again.exit == 0, again.stderr
    assert image(cache) == clean.image
