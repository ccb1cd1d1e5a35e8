"""Write, stage and publish files.

`publish_file` hard-links a staged file to its final name, which fails if the name exists; without
hard links it renames without replacing. `publish_directory` renames. Both detect a lost reply: the
file system did the step but returned an error. File modes come from the cache root, not from the
umask: in a group-writable root, files are group-writable.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import secrets
import shutil
import socket
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import xxhash

from tokenmill._core.paths import require_inside
from tokenmill.errors import CacheError, TokenmillError

_UNSUPPORTED = (  # error codes of os.link where hard links do not work
    errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV, errno.EACCES,
    errno.EINVAL,
)  # fmt: skip
_AT_FDCWD = -100
_RENAME_NOREPLACE = 1
_CACHE = ("cache_dir",)
_FREE_SPACE = (
    "free space or choose another directory (for the cache with ",
    _CACHE,
    ") and run it again: it continues from finished work",
)
_REMEDIES: dict[int, tuple[str | tuple[str], ...]] = {
    errno.ENOSPC: ("the disk is full; ", *_FREE_SPACE),
    errno.EDQUOT: ("the disk quota is used up; ", *_FREE_SPACE),
    errno.EROFS: ("the file system is read-only; choose a writable ", _CACHE),
    errno.EACCES: ("no permission to write here; choose another ", _CACHE),
    errno.EPERM: ("no permission to write here; choose another ", _CACHE),
    errno.EEXIST: ("a file is in place of a directory; choose another ", _CACHE),
    errno.ENOTDIR: ("a file is in place of a directory; choose another ", _CACHE),
}
_WRITE_BYTES = 1 << 20  # small pieces are buffered up to this size

Buffer = bytes | bytearray | memoryview


@contextlib.contextmanager
def writing_errors(path: str | os.PathLike[str]) -> Iterator[None]:
    try:
        yield
    except TokenmillError:
        raise  # some TokenmillErrors are OSErrors
    except OSError as error:
        again = ("nothing was published; run the command again",)
        remedy = _REMEDIES.get(error.errno or 0, again)
        reason = error.strerror or str(error)
        raise CacheError(f"cannot write: {reason}; ", *remedy, path=path) from error


def write_file(path: Path, chunks: Buffer | Iterable[Buffer]) -> NewFile:
    """Write a new file, sync it, close it, and check its size."""
    if isinstance(chunks, bytes | bytearray | memoryview):
        chunks = (chunks,)
    with writing_errors(path), NewFile(path) as file:
        for chunk in chunks:
            file.write(chunk)
    return file


class NewFile:
    """A file written piece by piece. On exit it is synced, closed, and its size checked.

    A network file system may report lost data only on close.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = 0
        self._hasher = xxhash.xxh3_128()
        self._buffered = bytearray()
        self._descriptor = -1

    def __enter__(self) -> NewFile:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        with writing_errors(self.path):
            self._descriptor = os.open(self.path, flags, 0o666)
        return self

    def write(self, piece: Buffer) -> None:
        view = memoryview(piece).cast("B")
        self.size += len(view)
        self._hasher.update(view)
        if len(self._buffered) + len(view) < _WRITE_BYTES:
            self._buffered += view
            return
        self._flush()
        self._put(view)

    @property
    def checksum(self) -> str:
        return self._hasher.hexdigest()

    def _flush(self) -> None:
        buffered, self._buffered = self._buffered, bytearray()
        self._put(memoryview(buffered))

    def _put(self, view: memoryview) -> None:
        with writing_errors(self.path):
            while view:  # os.write may write less than it was given
                step = os.write(self._descriptor, view)
                if step == 0:
                    raise OSError(errno.EIO, "no bytes were written")
                view = view[step:]

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            with contextlib.suppress(OSError):
                os.close(self._descriptor)
            return
        with writing_errors(self.path):
            try:
                self._flush()
                os.fsync(self._descriptor)
            finally:
                os.close(self._descriptor)
            size = os.stat(self.path).st_size
        if size != self.size:
            raise CacheError(f"wrote {self.size} bytes, but the file has {size}", path=self.path)


def make_directory(path: Path, root: Path) -> None:
    """Create a directory and its parents below ``root`` with the mode of the root.

    The root itself gets the caller's umask. A symbolic link out of the root is a `CacheError`.
    """
    if path == root or root not in path.parents:
        path.mkdir(parents=True, exist_ok=True)
        return
    if path.is_dir():
        require_inside(path, root)
        return
    make_directory(path.parent, root)
    try:
        path.mkdir()
    except FileExistsError:
        return
    _apply_mode(path, root, directory=True)


def _apply_mode(path: Path, root: Path, *, directory: bool) -> None:
    mode = root.stat().st_mode & (0o3777 if directory else 0o666)
    # A directory of another user keeps its mode.
    with contextlib.suppress(PermissionError):
        path.chmod(mode)


def sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems cannot sync a directory; names are durable there without it.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):
            raise
    finally:
        os.close(descriptor)


class Staging:
    """A private directory ``<root>/staging/<host>-<pid>-<random>``, removed on exit.

    Host and process id let garbage collection verify that the owner is dead. ``beside`` is a target
    outside any cache: staging is then a hidden directory next to it, so that the final rename stays
    within one file system, and the caller's umask applies.
    """

    def __init__(self, root: Path, *, beside: Path | None = None) -> None:
        self.root = root
        self._process = os.getpid()
        self._own_modes = beside is None
        unique = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(8)}"
        if beside is None:
            self.path = root / "staging" / unique
        else:
            self.path = beside.parent / f".{beside.name}.{unique}"

    def __enter__(self) -> Staging:
        self.make(self.path)
        return self

    def make(self, directory: Path) -> None:
        with writing_errors(directory):
            if self._own_modes:
                make_directory(directory, self.root)
            else:
                directory.mkdir(parents=True, exist_ok=True)

    def __exit__(self, *_: object) -> None:
        if os.getpid() == self._process:  # a forked child leaves the context too
            shutil.rmtree(self.path, ignore_errors=True)

    def write(self, name: str, chunks: Buffer | Iterable[Buffer]) -> Path:
        path = self.path / name
        if path.parent != self.path:
            self.make(path.parent)
        write_file(path, chunks)
        return path

    def publish(self, staged: Path, target: Path, *, durable: bool = True) -> bool:
        """Publish a staged file or directory; return whether ours is now visible."""
        self.make(target.parent)
        with writing_errors(target):
            is_directory = staged.is_dir()
            if self._own_modes:
                for path in (staged, *staged.rglob("*")) if is_directory else (staged,):
                    _apply_mode(path, self.root, directory=path.is_dir())
            if is_directory:
                return publish_directory(staged, target)
            return publish_file(staged, target, durable=durable)

    def replace(self, staged: Path, target: Path) -> None:
        """Move a staged file over a target, which unlike published data may be overwritten."""
        self.make(target.parent)
        with writing_errors(target):
            if self._own_modes:
                _apply_mode(staged, self.root, directory=False)
            os.replace(staged, target)
            sync_directory(target.parent)


def publish_file(staged: Path, target: Path, *, durable: bool = True) -> bool:
    """Publish a staged file if its name is free; return whether the visible file is ours."""
    before = os.stat(staged)
    ours = True
    for step in (os.link, _rename_without_replacing, _rename_if_free):
        try:
            step(staged, target)
            break
        except (FileExistsError, FileNotFoundError):
            # A network file system may repeat a request whose first attempt succeeded. The
            # repetition then fails, because the target exists or the staged file is gone.
            ours = target.exists() and os.path.samestat(before, os.stat(target))
            if not ours and not (target.exists() and staged.exists()):
                raise
            break
        except OSError as error:
            if error.errno not in _UNSUPPORTED or step is _rename_if_free:
                raise
    # Also sync if another process published first: it may have died before its own sync, and the
    # next steps rely on the name.
    if durable:
        sync_directory(target.parent)
    return ours


def _rename_without_replacing(staged: Path, target: Path) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "renameat2"):
        raise OSError(errno.ENOSYS, "no renameat2")
    result = libc.renameat2(
        _AT_FDCWD, os.fsencode(staged), _AT_FDCWD, os.fsencode(target), _RENAME_NOREPLACE
    )
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), os.fspath(target))


def _rename_if_free(staged: Path, target: Path) -> None:
    # The last resort has a race, which is harmless: equal keys have equal bytes, so a second rename
    # replaces a file by an equal one.
    if target.exists():
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), os.fspath(target))
    os.rename(staged, target)


def publish_directory(staged: Path, target: Path) -> bool:
    """Publish a staged directory by one rename; return whether the visible one is ours."""
    before = os.stat(staged)
    for directory, _, _ in os.walk(staged):
        sync_directory(Path(directory))
    ours = True
    try:
        os.rename(staged, target)
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOENT):
            raise
        if not target.is_dir():
            raise
        ours = os.path.samestat(before, os.stat(target))
        if not ours and not staged.is_dir():  # the staged directory was lost
            raise
    sync_directory(target.parent)
    return ours


def copy_or_link(
    source: Path, target: Path, pieces: Callable[[], Iterable[Buffer]] | None = None
) -> None:
    """Hard-link or copy a published file; ``pieces`` reads and checks the source of a copy."""
    try:
        os.link(source, target)
        return
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
    if pieces is not None:
        write_file(target, pieces())
        return
    with open(source, "rb") as reader:
        write_file(target, iter(lambda: reader.read(1 << 20), b""))
