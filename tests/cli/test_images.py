"""`prepare --processor DIR`: rows with images, and copies that contain them."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from tests.build.image_rows import Album, asked, part
from tests.build.making import write_rows
from tests.cli.harness import Shell
from tests.media import processors
from tokenmill import open_store
from tokenmill._core.fingerprint import checksum
from tokenmill.media import Processor


def test_processor_directory_media_root_and_embedded_images(shell: Shell, tmp_path: Path) -> None:
    album = Album(tmp_path / "album")
    rows = [{"messages": asked([part(album.name(number))])} for number in (0, 1, 0, 9)]
    source = write_rows(tmp_path / "rows" / "a.jsonl", rows)
    directory, out = tmp_path / "processor", tmp_path / "out"
    Processor(processors.make("llava")).save(directory)
    how = (source, "--processor", directory, "--media-root", album.directory,
           "--executor", "inline")  # fmt: skip
    detail = shell("prepare", *how, "--out", out, "--embed-media")
    assert detail.code == 0, detail.err
    assert "bad_media" in detail.err
    assert "images/9.png" in detail.err
    assert shell("why", *how, "--json").json["hit"]
    assert shell("prepare", *how, "--json").json["hit"]
    shutil.rmtree(album.directory)
    copy = open_store(out)
    assert len(copy) == 3
    assert " in 3 rows" in shell("stats", out).out
    assert [checksum(row.image()) for row in copy] == [row.media[0].digest for row in copy]
    assert shell("verify", out, "--json").json["ok"]
    shown = shell("stats", out)
    assert re.search(r"3 images of \d+ patches in 3 rows", shown.out + shown.err)
    target = tmp_path / "rows.parquet"
    assert shell("export", out, "--format", "parquet", "--out", target, "--embed-media").code == 0
    refused = shell("export", out, "--format", "hf", "--out", tmp_path / "hf", "--json")
    assert "images" in refused.error["message"]
