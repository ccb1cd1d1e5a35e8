"""The only writer of files.

Everything tokenmill leaves on disk goes the same way: a file is written under a *staging*
directory whose name nobody else can have, synced, closed with its size checked, and then
*published*: it appears under its final name in one step, if and only if nothing is there yet.
Directories are staged whole and appear by one rename. Published bytes never change, so readers
need no lock and a crash leaves at worst a staging directory that harms nobody.

`Staging` owns the temporary directory; `publish_file` and `publish_directory` are the two ways
out of it. `sealed` is what most rooms keep in a cache: directories that are staged, checksummed,
published whole, and admitted or refused. `filesystem_kind` tells where mapping a file is unsafe and
must be a read. Objects that live elsewhere are read by ranges: `remote` and `ranged`. What is
removed when a process ends, or locked in it, goes through `process`, so that a forked child touches
nothing of its parent's.
"""

from __future__ import annotations

from tokenmill.files.paths import (
    NETWORK_KINDS,
    default_cache_dir,
    filesystem_kind,
    is_network,
    require_inside,
)
from tokenmill.files.process import (
    PrivateDirectory,
    ProcessLock,
    at_end,
    has_process_directory,
    process_directory,
)
from tokenmill.files.publish import (
    NewFile,
    Staging,
    copy_or_link,
    make_directory,
    publish_directory,
    publish_file,
    replace_file,
    sync_directory,
    write_file,
    writing_errors,
)
from tokenmill.files.remote import is_remote

__all__ = [
    "NETWORK_KINDS",
    "NewFile",
    "PrivateDirectory",
    "ProcessLock",
    "Staging",
    "at_end",
    "copy_or_link",
    "default_cache_dir",
    "filesystem_kind",
    "has_process_directory",
    "is_network",
    "is_remote",
    "make_directory",
    "process_directory",
    "publish_directory",
    "publish_file",
    "replace_file",
    "require_inside",
    "sync_directory",
    "write_file",
    "writing_errors",
]
