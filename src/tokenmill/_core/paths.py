"""Local paths: the default cache directory, symbolic links, and the kind of a file system."""

from __future__ import annotations

import os
import re
from pathlib import Path

from tokenmill.errors import CacheError


def default_cache_dir() -> Path:
    """Return the cache directory of this user; it need not exist yet."""
    stated = os.environ.get("TOKENMILL_CACHE_DIR")
    if stated:
        return Path(stated)
    shared = os.environ.get("XDG_CACHE_HOME")
    # The XDG rules say that a relative path is to be ignored.
    if shared and os.path.isabs(shared):
        return Path(shared) / "tokenmill"
    return Path.home() / ".cache" / "tokenmill"


def require_inside(path: Path, root: Path) -> None:
    """Raise `CacheError` for a path below a root that a symbolic link leads out of it."""
    place, top = os.fspath(path), os.fspath(root)
    while len(place) > len(top) and not os.path.islink(place):
        place = os.path.dirname(place)
    if len(place) <= len(top):
        return  # nothing that could lead anywhere; the usual case, at one look per directory
    real, real_root = os.path.realpath(path), os.path.realpath(root)
    if os.path.commonpath([real, real_root]) != real_root:
        raise CacheError(f"a symbolic link leads out of the cache, to {real}", path=path)


NETWORK_KINDS = frozenset((
    "9p", "afs", "beegfs", "ceph", "cifs", "coda", "fuse", "gfs2", "glusterfs", "gpfs", "lustre",
    "ncpfs", "nfs", "nfs4", "ocfs2", "orangefs", "panfs", "pvfs2", "smb3", "smbfs", "vboxsf",
    "virtiofs", "wekafs",
))  # fmt: skip
# Plain ``fuse`` is a mounted bucket that names no subtype; ``fuseblk`` is a disk.

_MOUNTS = "/proc/self/mountinfo"


def filesystem_kind(path: str | os.PathLike[str]) -> str:
    """Return the kind of file system that holds a path: ``ext4``, ``nfs4``, ``fuse.s3fs``."""
    try:
        with open(_MOUNTS, encoding="utf-8", errors="surrogateescape") as table:
            mounts = [_parse(line) for line in table]
    except OSError:
        return "unknown"
    real = os.path.realpath(path)
    kind, longest = "unknown", -1
    for mount_point, mount_kind in mounts:
        inside = real == mount_point or real.startswith(mount_point.rstrip("/") + "/")
        # A later mount on the same point covers the earlier one, hence ">=".
        if inside and len(mount_point) >= longest:
            kind, longest = mount_kind, len(mount_point)
    return kind


def is_network(path: str | os.PathLike[str]) -> bool:
    """Whether mapping a file is unsafe: where it can vanish, it ends its reader with SIGBUS."""
    kind = filesystem_kind(path)
    return kind in NETWORK_KINDS or kind.startswith("fuse.")


def _parse(line: str) -> tuple[str, str]:
    """Mount point and kind of ``36 35 98:0 /root /mnt opts - ext4 /dev/x rw``."""
    fields, _, rest = line.partition(" - ")
    mount_point = re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), fields.split(" ")[4])
    return mount_point, rest.split(" ")[0]
