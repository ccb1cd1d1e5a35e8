"""Tests of the file system kind of a path, with a table of mounts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tokenmill._core import paths as kind
from tokenmill._core.paths import filesystem_kind, is_network

TABLE = r"""
21 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
22 21 0:5 / /proc rw,nosuid - proc proc rw
30 21 0:40 / /mnt/data rw,relatime shared:9 - nfs4 server:/export rw,vers=4.2
31 30 0:41 / /mnt/data/fast rw,relatime - xfs /dev/nvme0n1 rw
32 21 0:42 / /mnt/with\040space rw - lustre 10.0.0.1@tcp:/fs rw
33 21 0:43 / /mnt/bucket rw - fuse.s3fs s3fs rw
34 21 0:44 / /mnt/plain-bucket rw - fuse mountpoint rw
35 21 0:45 / /mnt/stick rw - fuseblk /dev/sdb1 rw
36 21 0:46 / /mnt/covered rw - ext4 /dev/sdc1 rw
37 36 0:47 / /mnt/covered rw shared:3 master:7 propagate_from:2 - 9p host rw
""".strip()


@pytest.fixture(autouse=True)
def mounts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    table = tmp_path / "mountinfo"
    table.write_text(TABLE + "\n")
    monkeypatch.setattr(kind, "_MOUNTS", str(table))
    monkeypatch.setattr(os.path, "realpath", os.fspath)
    return table


@pytest.mark.parametrize(
    ("path", "expected", "network"),
    [
        ("/", "ext4", False),
        ("/home/someone/cache", "ext4", False),
        ("/mnt/data", "nfs4", True),
        ("/mnt/data/a/b", "nfs4", True),
        ("/mnt/database", "ext4", False),  # shares letters with /mnt/data, not the mount
        ("/mnt/data/fast/store", "xfs", False),
        ("/mnt/with space/x", "lustre", True),
        ("/mnt/bucket/x", "fuse.s3fs", True),
        ("/mnt/plain-bucket/x", "fuse", True),
        ("/mnt/stick/x", "fuseblk", False),
        ("/mnt/covered/x", "9p", True),
    ],
)
def test_kind_is_that_of_the_innermost_latest_mount(
    path: str, expected: str, network: bool
) -> None:
    assert filesystem_kind(path) == expected
    assert is_network(path) is network


def test_kind_without_a_table_is_unknown_and_local(mounts: Path) -> None:
    mounts.unlink()
    assert filesystem_kind("/mnt/data") == "unknown"
    assert is_network("/mnt/data") is False


def test_kind_follows_symbolic_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os.path, "realpath", lambda path: "/mnt/data/behind")
    assert filesystem_kind(tmp_path / "link") == "nfs4"


def test_kind_of_a_real_path_is_found_in_the_real_table(monkeypatch: pytest.MonkeyPatch) -> None:
    if not Path("/proc/self/mountinfo").exists():
        pytest.skip("this kernel has no table of mounts")
    monkeypatch.undo()
    assert filesystem_kind("/proc/self") == "proc"
