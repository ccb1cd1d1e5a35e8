"""Write, publish and read files.

A file is written in a *staging* directory, synced, closed, its size checked, and then *published*:
it appears under its final name in one step, if nothing is there yet. Directories are staged whole
and appear by one rename. Published bytes never change, so readers need no lock, and a crash leaves
at worst a staging directory. `sealed` keeps checksummed directories in a cache; `remote` and
`ranged` read objects by URL.
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
