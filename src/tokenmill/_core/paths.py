"""Local paths: the default cache directory, symbolic links, and the kind of a file system."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path

from tokenmill.errors import CacheError, CorruptionError, UsageError

_URL = re.compile(r"[a-zA-Z][\w+.:\-]+:/")
MAX_METADATA_BYTES = 256 << 20  # of a file read whole; a manifest of 100,000 sources has 30 MB


def checked_path(name: str, value: object) -> str:
    """Return a path or URL as text; raise `UsageError` if no file can have that path."""
    text = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(text, str) or not text:
        raise UsageError((name,), f" must be a path, got {value!r:.200}")
    if "://" in text and "::" in text.partition("://")[0]:
        raise UsageError((name,), " must not be a chain of URLs", path=text)
    try:
        text.encode()  # manifests and keys contain paths as UTF-8
        if "://" not in text.removeprefix("file://"):
            os.lstat(text.removeprefix("file://"))
    except ValueError as error:
        raise UsageError((name,), f" is not a valid path: {value!r:.200} ({error})") from error
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise UsageError((name,), f" is too long for a path: {value!r:.200}") from error
    return text


def default_cache_dir() -> Path:
    """Return the cache directory of this user, which may not exist yet."""
    directory = os.environ.get("TOKENMILL_CACHE_DIR")
    if directory:
        return Path(directory)
    xdg = os.environ.get("XDG_CACHE_HOME")
    # The XDG specification requires that relative paths are ignored.
    if xdg and os.path.isabs(xdg):
        return Path(xdg) / "tokenmill"
    return Path.home() / ".cache" / "tokenmill"


def cache_root(directory: str | os.PathLike[str] | None) -> Path:
    """Return a cache directory, by default that of this user, as an absolute path."""
    root = default_cache_dir() if directory is None else local_target("cache_dir", directory)
    if _URL.match(str(root)):
        raise UsageError(("cache_dir",), " must be a local path, not a URL", path=root)
    return root.absolute()


def local_target(name: str, value: object) -> Path:
    """Return a path to write to; a URL would become a local directory."""
    text = checked_path(name, value)
    if "://" in text:
        raise UsageError((name,), " must be a local path, not a URL", path=text)
    return Path(text)


def require_bounded(path: str | os.PathLike[str], size: int) -> None:
    if size > MAX_METADATA_BYTES:
        raise CorruptionError(
            f"more than {MAX_METADATA_BYTES} bytes, the limit of a metadata file; it is damaged or"
            " another file",
            path=path,
        )


def read_bounded(path: Path) -> bytes:
    """Return all bytes of a file, or raise `CorruptionError` if it is over the limit."""
    if not isinstance(path, Path):  # a `RemotePath`, whose reads are bounded
        return path.read_bytes()
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size  # 0 for a device without end
        require_bounded(path, size)
        return file.read(size)


def require_inside(path: Path, root: Path) -> None:
    """Raise `CacheError` if a symbolic link leads from a path below a root out of the root."""
    current, top = os.fspath(path), os.fspath(root)
    while len(current) > len(top) and not os.path.islink(current):
        current = os.path.dirname(current)
    if len(current) <= len(top):
        return  # no symbolic link: the usual case, at one lstat per directory
    real, real_root = os.path.realpath(path), os.path.realpath(root)
    if os.path.commonpath([real, real_root]) != real_root:
        raise CacheError(f"a symbolic link leads out of the cache to {real}", path=path)


NETWORK_KINDS = frozenset((
    "9p", "afs", "beegfs", "ceph", "cifs", "coda", "fuse", "gfs2", "glusterfs", "gpfs", "lustre",
    "ncpfs", "nfs", "nfs4", "ocfs2", "orangefs", "panfs", "pvfs2", "smb3", "smbfs", "vboxsf",
    "virtiofs", "wekafs",
))  # fmt: skip
# ``fuse`` without a subtype is a mounted bucket; ``fuseblk`` is a disk.

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
    """Whether mapping is unsafe: if a mapped network file vanishes, its reader gets SIGBUS."""
    kind = filesystem_kind(path)
    return kind in NETWORK_KINDS or kind.startswith("fuse.")


def _parse(line: str) -> tuple[str, str]:
    """Return mount point and kind of ``36 35 98:0 /root /mnt opts - ext4 /dev/x rw``."""
    fields, _, rest = line.partition(" - ")
    mount_point = re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), fields.split(" ")[4])
    return mount_point, rest.split(" ")[0]
