"""Read the images that rows refer to, and their sizes, within limits.

The reference is ``transformers.image_utils.load_image``: the first frame, transposed by its EXIF
orientation, converted to RGB. An unusable image raises `RowError` (``bad_media``). A failing server
raises `SourceError`, because transient errors never reject rows.
"""

from __future__ import annotations

import errno
import functools
import io
import os
import stat
import struct
import tarfile
import threading
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from tokenmill._core import fingerprint
from tokenmill._core.optional import optional
from tokenmill._core.process import RecentValues
from tokenmill.errors import RowError, SourceChanged, SourceError, UsageError
from tokenmill.media.reference import Reference, bad_media, missing, require_size

if TYPE_CHECKING:
    from PIL.Image import Image

# Formats that may be read, if Pillow supports them. Other formats of Pillow may start programs.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "DIB", "TIFF", "PPM", "JPEG2000", "AVIF")

_VIDEO = (".mp4", ".mov", ".avi", ".mkv", ".webm", ".m4v", ".mpg", ".mpeg", ".flv", ".wmv")
_ROTATED = (5, 6, 7, 8)  # EXIF orientations that exchange width and height
_ORIENTATION = 0x0112
_MAX_DEFLATED = 1032  # bytes that one compressed byte of a PNG can expand to
_PERMANENT = (errno.EACCES, errno.EPERM, errno.ELOOP, errno.ENAMETOOLONG, errno.EINVAL)


class Limits(msgspec.Struct, frozen=True):
    size: int = 128 << 20  # bytes of its file
    pixels: int = 89_478_485  # width × height; above the default Pillow warns of a bomb
    seconds: float = 60.0  # timeout of a connection and of a whole fetch
    redirects: int = 5


class ImageFacts(msgspec.Struct, frozen=True):
    digest: str  # xxh3-128 of its bytes
    size: int  # bytes of its file
    width: int  # after its orientation, as in `Images.open`
    height: int
    format: str  # ``JPEG``, ``PNG`` and so on
    mode: str  # of Pillow: ``RGB``, ``L``, ``P``, ``CMYK``, ``I;16`` …
    animated: bool  # there are more frames; only the first is used
    rotated: bool = False  # its orientation exchanged width and height

    @property
    def stored_size(self) -> tuple[int, int]:
        return (self.height, self.width) if self.rotated else (self.width, self.height)


class Images:
    """Reads the images that rows refer to.

    They may come from the directories ``roots``, searched in this order; without any, from the
    directory of each row's file. With all links resolved, a file must be below one of them.
    ``urls`` and ``private`` allow URLs, and private addresses and this machine.
    """

    def __init__(
        self,
        roots: str | os.PathLike[str] | Iterable[str | os.PathLike[str]] | None = None,
        *,
        urls: bool = False,
        private: bool = False,
        limits: Limits | None = None,
    ) -> None:
        if roots is None:
            roots = ()
        elif isinstance(roots, str | os.PathLike):
            roots = (roots,)
        self.roots = tuple(Path(os.path.abspath(root)) for root in roots)
        for root in self.roots:
            if not root.is_dir():
                raise UsageError(("media_root",), " must be a directory", path=root)
        self._roots = tuple(map(str, self.roots))
        self.urls = urls
        self.private = private
        self.limits = limits or Limits()
        self._archives = OpenArchives()

    def __reduce__(self) -> Any:
        make = functools.partial(Images, urls=self.urls, private=self.private, limits=self.limits)
        return make, (self.roots,)

    def read(self, reference: Reference, base: str | os.PathLike[str] | None = None) -> bytes:
        """Return the bytes of an image; ``base`` is the directory of the row's file.

        Raises:
            RowError: The image is missing or not allowed.
            SourceError: A server or a disk failed, or the file is being written.
        """
        if reference.kind == "inline":
            if reference.data is None:
                raise UsageError("the reference of an inline image has no bytes; read its row")
            require_size(len(reference.data), self.limits.size, reference.name)
            return reference.data
        if reference.kind == "url":
            if not self.urls:
                raise bad_media(f"{reference.name} is a URL, and URLs are not allowed")
            from tokenmill.media import web

            return web.fetch(
                reference.url,
                size=self.limits.size,
                seconds=self.limits.seconds,
                redirects=self.limits.redirects,
                private=self.private,
            )
        if reference.kind == "member":
            with self._opened(reference, base) as file:
                return self._archives.read(file, reference, self.limits.size)
        with self._opened(reference, base) as file:
            size = os.fstat(file.fileno()).st_size
            require_size(size, self.limits.size, reference.name)
            try:
                data = file.read(size + 1)  # one byte more, to notice a file that has grown
                while len(data) < size and (more := file.read(size - len(data))):
                    data += more
            except OSError as error:
                raise SourceError(f"cannot be read: {error.strerror}", path=file.name) from error
        if len(data) != size:
            raise SourceChanged("the file changed while it was read", path=reference.path)
        return data

    def _opened(self, reference: Reference, base: str | os.PathLike[str] | None) -> io.FileIO:
        """Open the file of a reference; with all links resolved, it must be below a root."""
        if reference.path.lower().endswith(_VIDEO):
            raise bad_media(f"{reference.name} is a video; give its frames as a list of images")
        roots: tuple[str, ...] = self._roots
        if not roots and base is not None:
            roots = (os.path.abspath(base),)
        if not roots:
            raise bad_media(
                f"{reference.name} is a path, but the row has no file to be relative to, and no"
                " directory of images is set"
            )
        outside = None
        for root in roots:
            try:
                path = os.path.join(root, reference.path)
                descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
            except (FileNotFoundError, NotADirectoryError):
                continue
            except OSError as error:
                message = f"{reference.name} cannot be opened: {error.strerror}"
                raise (
                    bad_media(message)
                    if error.errno in _PERMANENT
                    else SourceError(message, path=reference.path)
                ) from error
            # Check the open file: its name may lead to another file by now.
            resolved = os.readlink(f"/proc/self/fd/{descriptor}")
            regular = stat.S_ISREG(os.fstat(descriptor).st_mode)
            if regular and any(_is_below(resolved, allowed) for allowed in roots):
                return io.FileIO(descriptor)
            os.close(descriptor)
            if not regular:
                raise bad_media(f"{reference.name} is not a file")
            outside = outside or resolved
        if outside is not None:
            raise bad_media(
                f"{reference.name} is {outside}, outside of the allowed directories"
                f" ({', '.join(roots)})"
            )
        raise missing(f"{reference.name} does not exist in {', '.join(roots)}")

    def facts(self, data: bytes, name: str = "the image", digest: str | None = None) -> ImageFacts:
        """Return the metadata of an image from its bytes; errors use ``name``.

        The header is enough if the structure of the file shows that it is complete. Other files
        are decoded, so that a truncated one is rejected here and not during training.
        """
        digest = digest or fingerprint.checksum(data)
        plain = _plain_jpeg(data)
        if plain is not None and self._is_allowed(*plain[:2]):
            width, height, mode = plain
            return ImageFacts(digest, len(data), width, height, "JPEG", mode, animated=False)
        image = self._header(data, name)
        try:
            animated = bool(getattr(image, "is_animated", False))
            complete = _is_complete(data, image)
            width, height = _oriented(image) if complete else _loaded(image).size
            rotated = (width, height) != image.size
        except Exception as error:
            raise _unreadable(name, error) from error
        return ImageFacts(
            digest=digest,
            size=len(data),
            width=width,
            height=height,
            format=image.format,
            mode=image.mode,
            animated=animated,
            rotated=rotated,
        )

    def open(self, data: bytes, name: str = "the image") -> Image:
        """Decode an image as ``load_image`` does."""
        image = self._header(data, name)
        try:
            return _loaded(image).convert("RGB")
        except Exception as error:
            raise _unreadable(name, error) from error

    @staticmethod
    def blank(width: int, height: int) -> Image:
        with optional("PIL", "reading images"):
            from PIL import Image
        return Image.new("RGB", (width, height))

    def _is_allowed(self, width: int, height: int) -> bool:
        with optional("PIL", "reading images"):
            from PIL import Image
        limit = Image.MAX_IMAGE_PIXELS
        return width * height <= self.limits.pixels and (limit is None or width * height <= limit)

    def _header(self, data: bytes, name: str) -> Any:
        with optional("PIL", "reading images"):
            from PIL import Image
        try:
            image = Image.open(io.BytesIO(data), formats=_formats())
        except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
            raise bad_media(f"{name} is too large: {error}") from error
        except Exception as error:
            raise _unreadable(name, error) from error
        width, height = image.size
        if width * height > self.limits.pixels:
            raise bad_media(f"{name} has {width}×{height} pixels; {self.limits.pixels} are allowed")
        if width < 1 or height < 1:
            raise bad_media(f"{name} has {width}×{height} pixels")
        return image


@functools.cache
def _formats() -> tuple[str, ...]:
    from PIL import Image

    Image.init()
    return tuple(name for name in FORMATS if name in Image.OPEN)


def _is_below(resolved: str, root: str) -> bool:
    """Return whether a resolved path is below a directory, whose own path may contain links."""
    if resolved.startswith(root.rstrip("/") + "/"):
        return True
    return resolved.startswith(os.path.join(os.path.realpath(root), ""))


def _unreadable(name: str, error: Exception) -> RowError:
    from PIL import UnidentifiedImageError

    if isinstance(error, UnidentifiedImageError):
        return bad_media(f"{name} is not an image; supported formats: {', '.join(_formats())}")
    return bad_media(f"{name} cannot be decoded: {error or type(error).__name__}")


def _loaded(image: Any) -> Any:
    """Decode the first frame and apply the EXIF orientation, as ``load_image`` does."""
    from PIL import ImageOps

    return ImageOps.exif_transpose(image)


def _oriented(image: Any) -> tuple[int, int]:
    from PIL.Image import Image

    # The method of PNG files would decode the image to look for EXIF after the pixels. Files that
    # `_is_complete` accepts have none there.
    orientation = Image.getexif(image).get(_ORIENTATION, 1)
    width, height = image.size
    return (height, width) if orientation in _ROTATED else (width, height)


def _is_complete(data: bytes, image: Any) -> bool:
    if image.format == "JPEG":
        return _jpeg_is_complete(data)
    if image.format == "PNG":
        return _png_is_complete(data, *image.size)
    if image.format == "WEBP":
        return len(data) >= 8 + int.from_bytes(data[4:8], "little")
    return False


def _plain_jpeg(data: bytes) -> tuple[int, int, str] | None:
    """Return width, height and mode of a complete plain JPEG as Pillow reads them, else None.

    Plain means: one frame of 8 bits in grey or three colours, tables, a JFIF header, a comment.
    A file with EXIF, XMP, a profile, an Adobe marker, more frames or an error is not plain.
    """
    if not (data.startswith(b"\xff\xd8\xff") and data.endswith(b"\xff\xd9")):
        return None
    at, last, header = 2, len(data) - 2, None
    while at + 4 <= last and data[at] == 0xFF:
        marker = data[at + 1]
        size = data[at + 2] << 8 | data[at + 3]
        end = at + 2 + size
        if size < 2 or end > last:
            return None
        if marker == 0xDA:
            return header
        if marker in (0xC0, 0xC1, 0xC2):
            if header is not None or size < 11 or data[at + 4] != 8:
                return None
            height, width, layers = struct.unpack_from(">HHB", data, at + 5)
            if layers not in (1, 3) or size != 8 + 3 * layers or not width * height:
                return None
            header = width, height, "L" if layers == 1 else "RGB"
        elif marker == 0xDB:
            table = at + 4
            while table < end:
                table += 129 if data[table] >> 4 else 65
            if table != end:
                return None
        elif marker == 0xE0:
            if size < 16 or not data.startswith(b"JFIF\0", at + 4):
                return None
        elif marker not in (0xC4, 0xDD, 0xFE):  # Huffman tables, restarts, a comment
            return None
        at = end
    return None


def _jpeg_is_complete(data: bytes) -> bool:
    at, length = 2, len(data)
    while at + 4 <= length and data[at] == 0xFF:
        marker = data[at + 1]
        if marker == 0xDA:  # the scan; a thumbnail's end-of-image is in a segment before it
            return data.endswith(b"\xff\xd9")
        if marker == 0xFF:  # padding
            at += 1
        else:
            at += 2 + int.from_bytes(data[at + 2 : at + 4], "big")
    return False


def _png_is_complete(data: bytes, width: int, height: int) -> bool:
    """Return whether all chunks are complete, there are enough pixels, and only IEND follows."""
    at, length, pixels = 8, len(data), 0
    while at + 12 <= length:
        size, kind = struct.unpack_from(">I4s", data, at)
        if kind == b"IEND":
            # An image needs at least one bit for each pixel.
            return pixels > 0 and pixels * _MAX_DEFLATED >= width * height // 8
        if kind == b"IDAT":
            pixels += size
        elif pixels:
            return False
        at += 12 + size
    return False


# Archives

_MAX_ARCHIVES = 8  # archives with a cached directory
_MAX_MEMBERS = 1_000_000  # of one archive: about 200 MB of directory

_MAX_HEADER_BYTES = 1 << 16  # of one entry of a tar archive, with its long name and attributes

_Members = dict[str, tuple[int, int]]


class OpenArchives:
    """Reads members of archives and caches the directories of a few. Thread-safe."""

    def __init__(self) -> None:
        self._directories = RecentValues(_MAX_ARCHIVES)
        self._lock = threading.Lock()

    def read(self, file: io.FileIO, reference: Reference, size: int) -> bytes:
        try:
            with self._lock:
                return self._read(file, reference, size)
        except (RowError, MemoryError):
            raise
        except Exception as error:  # a damaged archive; the libraries raise many types
            # bz2 raises an OSError without errno, and a seek to a wrong offset EINVAL.
            if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):
                raise SourceError(f"cannot be read: {error}", path=reference.path) from error
            reason = str(error) or type(error).__name__
            raise bad_media(f"{reference.name} cannot be unpacked: {reason}") from error

    def _read(self, file: io.FileIO, reference: Reference, size: int) -> bytes:
        status = os.fstat(file.fileno())
        version = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
        members: _Members | zipfile.ZipFile | None = self._directories.get(version)
        if members is None:
            members = _directory(file, reference)
            self._directories.put(version, members, 1)
        name = reference.member
        if isinstance(members, zipfile.ZipFile):
            try:
                expected = members.getinfo(name).file_size
            except KeyError:
                raise missing(f"{reference.name} is not in the archive") from None
            require_size(expected, size, reference.name)
            members.fp = file  # the file that the directory was read from may be closed
            with members.open(name) as member:
                data = member.read(size + 1)  # the header may give a smaller size
            require_size(len(data), size, reference.name)
            return data
        position = members.get(name) or members.get(f"./{name}")
        if position is None:
            raise missing(f"{reference.name} is not in the archive")
        at, expected = position
        require_size(expected, size, reference.name)
        data = os.pread(file.fileno(), expected, at)
        if len(data) != expected:
            raise bad_media(f"{reference.name} is truncated: the archive ends before it")
        return data


class _TarHeaders(io.RawIOBase):
    """A tar archive for reading its headers: refuses long reads and offsets outside of it."""

    def __init__(self, file: io.FileIO) -> None:
        super().__init__()
        self._file = file
        self._size = os.fstat(file.fileno()).st_size

    def tell(self) -> int:
        return self._file.tell()

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        if not 0 <= offset <= self._size:
            raise tarfile.ReadError(f"an entry ends at byte {offset} of {self._size}")
        return self._file.seek(offset)

    def read(self, size: int = -1) -> bytes:
        if not 0 <= size <= _MAX_HEADER_BYTES:
            raise tarfile.ReadError(f"a header has {size} bytes")
        return self._file.read(size) or b""


def _directory(file: io.FileIO, reference: Reference) -> _Members | zipfile.ZipFile:
    start = os.pread(file.fileno(), 4, 0)
    if start[:2] == b"PK":
        archive = zipfile.ZipFile(file)
        if len(archive.namelist()) > _MAX_MEMBERS:
            raise bad_media(f"{reference.path} has more than {_MAX_MEMBERS} members")
        return archive
    if start.startswith((b"\x1f\x8b", b"BZh", b"\xfd7zX", b"\x28\xb5\x2f\xfd")):
        raise bad_media(
            f"{reference.path} is a compressed tar archive, which cannot be read at random;"
            " convert it to .zip or uncompressed .tar"
        )
    members: _Members = {}
    last = -1
    with tarfile.open(fileobj=_TarHeaders(file), mode="r:") as archive_of_files:
        for entry in archive_of_files:
            if entry.size < 0 or entry.offset <= last:
                raise bad_media(
                    f"{reference.path} is damaged: the entry at byte {entry.offset} has"
                    f" {entry.size} bytes and follows the entry at byte {last}"
                )
            last = entry.offset
            if entry.isreg() and not entry.issparse():
                members[entry.name] = (entry.offset_data, entry.size)
            if len(members) > _MAX_MEMBERS:
                raise bad_media(f"{reference.path} has more than {_MAX_MEMBERS} members")
            archive_of_files.members = []  # type: ignore[attr-defined]  # else it keeps them all
    return members
