"""`Pictures`: read the images that rows refer to, and their sizes, within limits.

The reference is ``transformers.image_utils.load_image``: the first frame, transposed by its EXIF
orientation, converted to RGB. An unusable image is a `RowError` with reason ``bad_media``; a server
that does not answer is a `SourceError`, because transient errors never reject rows.
"""

from __future__ import annotations

import errno
import functools
import io
import lzma
import os
import stat
import struct
import tarfile
import threading
import zipfile
import zlib
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

# What is read, where Pillow was built with it. Other formats of Pillow may start programs.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "DIB", "TIFF", "PPM", "JPEG2000", "AVIF")

_VIDEO = (".mp4", ".mov", ".avi", ".mkv", ".webm", ".m4v", ".mpg", ".mpeg", ".flv", ".wmv")
_TURNED = (5, 6, 7, 8)  # EXIF orientations that exchange width and height
_ORIENTATION = 0x0112
_MOST_DEFLATED = 1032  # bytes that a byte of a PNG's pixels can stand for
_PERMANENT = (errno.EACCES, errno.EPERM, errno.ELOOP, errno.ENAMETOOLONG, errno.EINVAL)


class Limits(msgspec.Struct, frozen=True):
    size: int = 128 << 20  # bytes of its file
    pixels: int = 89_478_485  # width × height; the default is where Pillow warns of a bomb
    seconds: float = 60.0  # of silence from a server, and of one fetch in all
    redirects: int = 5


class PictureFacts(msgspec.Struct, frozen=True):
    """What is known of an image without its pixels."""

    digest: str  # xxh3-128 of its bytes
    size: int  # bytes of its file
    width: int  # as `Pictures.open` gives it, after its orientation
    height: int
    format: str  # ``JPEG``, ``PNG`` and so on
    mode: str  # of Pillow: ``RGB``, ``L``, ``P``, ``CMYK``, ``I;16`` …
    animated: bool  # more frames follow the first, which is the one that is used
    turned: bool = False  # its orientation exchanged width and height

    @property
    def unturned(self) -> tuple[int, int]:
        return (self.height, self.width) if self.turned else (self.width, self.height)


class Pictures:
    """Opens the images that rows refer to.

    Args:
        roots: Directories that images may come from, searched in this order; after all links are
            followed, a file must be below one of them. None: the directory of each row's file.
        urls: Whether ``http://`` and ``https://`` are opened.
        private: Whether addresses inside this network or machine are, too.
        limits: Bounds of one image.
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
                raise UsageError(("media_root",), " is not a directory", path=root)
        self._roots = tuple(map(str, self.roots))
        self.urls = urls
        self.private = private
        self.limits = limits or Limits()
        self._archives = OpenArchives()

    def __reduce__(self) -> Any:
        again = functools.partial(
            Pictures, urls=self.urls, private=self.private, limits=self.limits
        )
        return again, (self.roots,)

    def read(self, reference: Reference, base: str | os.PathLike[str] | None = None) -> bytes:
        """The bytes of an image; ``base`` is the directory of the row's file.

        SourceError means that a server or a disk failed, or the file is being written.
        """
        if reference.kind == "inline":
            if reference.data is None:
                raise UsageError("an inline picture is read from its row")
            require_size(len(reference.data), self.limits.size, reference.name)
            return reference.data
        if reference.kind == "url":
            if not self.urls:
                raise bad_media(f"{reference.name} is an address; media_urls=True opens those")
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
                data = file.read(size + 1)  # one byte more, if it has grown
                while len(data) < size and (more := file.read(size - len(data))):
                    data += more
            except OSError as error:
                raise SourceError(f"cannot be read: {error.strerror}", path=file.name) from error
        if len(data) != size:
            raise SourceChanged("changed while it was read", path=reference.path)
        return data

    def _opened(self, reference: Reference, base: str | os.PathLike[str] | None) -> io.FileIO:
        """Open the file of a reference, which must be below one of the roots after all links."""
        if reference.path.lower().endswith(_VIDEO):
            raise bad_media(f"{reference.name} is a video; give its frames as a list of pictures")
        roots: tuple[str, ...] = self._roots
        if not roots and base is not None:
            roots = (os.path.abspath(base),)
        if not roots:
            raise bad_media(f"{reference.name} is a path, and there is no directory to find it in")
        outside = None
        for root in roots:
            try:
                where = os.path.join(root, reference.path)
                descriptor = os.open(where, os.O_RDONLY | os.O_NONBLOCK)
            except (FileNotFoundError, NotADirectoryError):
                continue
            except OSError as error:
                message = f"{reference.name} cannot be opened: {error.strerror}"
                raise (
                    bad_media(message)
                    if error.errno in _PERMANENT
                    else SourceError(message, path=reference.path)
                ) from error
            # Checks the open file, not a name that may lead to another one by now.
            place = os.readlink(f"/proc/self/fd/{descriptor}")
            regular = stat.S_ISREG(os.fstat(descriptor).st_mode)
            if regular and any(_is_below(place, allowed) for allowed in roots):
                return io.FileIO(descriptor)
            os.close(descriptor)
            if not regular:
                raise bad_media(f"{reference.name} is not a file")
            outside = outside or place
        if outside is not None:
            raise bad_media(
                f"{reference.name} is {outside}, which is outside of"
                f" {', '.join(roots)}; media_root says where pictures may come from"
            )
        raise missing(f"{reference.name} is not there; looked in {', '.join(roots)}")

    def facts(
        self, data: bytes, name: str = "the picture", digest: str | None = None
    ) -> PictureFacts:
        """Describe an image from its bytes; errors call it ``name``.

        The header is enough where the structure of the file shows that it is complete. Every other
        file is decoded, so that a truncated one is refused here and not during training.
        """
        digest = digest or fingerprint.checksum(data)
        plain = _plain_jpeg(data)
        if plain is not None and self._is_allowed(*plain[:2]):
            width, height, mode = plain
            return PictureFacts(digest, len(data), width, height, "JPEG", mode, animated=False)
        image = self._header(data, name)
        try:
            animated = bool(getattr(image, "is_animated", False))
            whole = _is_whole(data, image)
            width, height = _oriented(image) if whole else _loaded(image).size
            turned = (width, height) != image.size
        except Exception as error:
            raise _unreadable(name, error) from error
        return PictureFacts(
            digest=digest,
            size=len(data),
            width=width,
            height=height,
            format=image.format,
            mode=image.mode,
            animated=animated,
            turned=turned,
        )

    def open(self, data: bytes, name: str = "the picture") -> Image:
        """Decode an image as ``load_image`` does: oriented, first frame, RGB."""
        image = self._header(data, name)
        try:
            return _loaded(image).convert("RGB")
        except Exception as error:
            raise _unreadable(name, error) from error

    @staticmethod
    def blank(width: int, height: int) -> Image:
        with optional("PIL", "asking about pictures"):
            from PIL import Image
        return Image.new("RGB", (width, height))

    def _is_allowed(self, width: int, height: int) -> bool:
        with optional("PIL", "reading pictures"):
            from PIL import Image
        most = Image.MAX_IMAGE_PIXELS
        return width * height <= self.limits.pixels and (most is None or width * height <= most)

    def _header(self, data: bytes, name: str) -> Any:
        with optional("PIL", "reading pictures"):
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


def _is_below(place: str, root: str) -> bool:
    """Whether a resolved path is below a directory, which may itself contain links."""
    if place.startswith(root.rstrip("/") + "/"):
        return True
    return place.startswith(os.path.join(os.path.realpath(root), ""))


def _unreadable(name: str, error: Exception) -> RowError:
    from PIL import UnidentifiedImageError

    if isinstance(error, UnidentifiedImageError):
        return bad_media(f"{name} is in no format that is read: {', '.join(_formats())}")
    return bad_media(f"{name} cannot be decoded: {error or type(error).__name__}")


def _loaded(image: Any) -> Any:
    """The first frame after its orientation, as ``load_image`` gives it."""
    from PIL import ImageOps

    return ImageOps.exif_transpose(image)


def _oriented(image: Any) -> tuple[int, int]:
    """The size of `_loaded`, of a file for which `_is_whole` holds."""
    from PIL.Image import Image

    # The method of PNG files would decode the image to look for EXIF after the pixels, where a
    # whole file has nothing.
    orientation = Image.getexif(image).get(_ORIENTATION, 1)
    width, height = image.size
    return (height, width) if orientation in _TURNED else (width, height)


def _is_whole(data: bytes, image: Any) -> bool:
    """Whether the structure of a file shows that it is complete, and its header suffices."""
    if image.format == "JPEG":
        return _jpeg_is_whole(data)
    if image.format == "PNG":
        return _png_is_whole(data, *image.size)
    if image.format == "WEBP":
        return len(data) >= 8 + int.from_bytes(data[4:8], "little")
    return False


def _plain_jpeg(data: bytes) -> tuple[int, int, str] | None:
    """Width, height and mode of a complete JPEG file, as Pillow reads them, if it is plain.

    Plain is one frame of 8 bits in grey or three colours, tables, a JFIF header and a comment; not
    EXIF, XMP, profiles, Adobe's marks, further frames, or any error.
    """
    if not (data.startswith(b"\xff\xd8\xff") and data.endswith(b"\xff\xd9")):
        return None
    at, last, found = 2, len(data) - 2, None
    while at + 4 <= last and data[at] == 0xFF:
        marker = data[at + 1]
        size = data[at + 2] << 8 | data[at + 3]
        end = at + 2 + size
        if size < 2 or end > last:
            return None
        if marker == 0xDA:
            return found
        if marker in (0xC0, 0xC1, 0xC2):
            if found is not None or size < 11 or data[at + 4] != 8:
                return None
            height, width, layers = struct.unpack_from(">HHB", data, at + 5)
            if layers not in (1, 3) or size != 8 + 3 * layers or not width * height:
                return None
            found = width, height, "L" if layers == 1 else "RGB"
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


def _jpeg_is_whole(data: bytes) -> bool:
    """Whether there is a scan, and the last two bytes end the image."""
    at, length = 2, len(data)
    while at + 4 <= length and data[at] == 0xFF:
        marker = data[at + 1]
        if marker == 0xDA:  # the scan; a thumbnail's own end is in a segment before it
            return data.endswith(b"\xff\xd9")
        if marker == 0xFF:  # padding
            at += 1
        else:
            at += 2 + int.from_bytes(data[at + 2 : at + 4], "big")
    return False


def _png_is_whole(data: bytes, width: int, height: int) -> bool:
    """Whether all chunks are complete, none but the end follows the pixels, and these suffice."""
    at, length, pixels = 8, len(data), 0
    while at + 12 <= length:
        size, kind = struct.unpack_from(">I4s", data, at)
        if kind == b"IEND":
            # An image needs at least one bit for each pixel.
            return pixels > 0 and pixels * _MOST_DEFLATED >= width * height // 8
        if kind == b"IDAT":
            pixels += size
        elif pixels:
            return False
        at += 12 + size
    return False


# --- archives ----------------------------------------------------------------------------------

_MAX_ARCHIVES = 8  # whose directories are kept
_MAX_MEMBERS = 1_000_000  # of one archive: about 200 MB of directory

_DAMAGED = (  # what reading a damaged archive raises; bz2 raises an OSError of no number
    zipfile.BadZipFile, zlib.error, lzma.LZMAError, tarfile.TarError, EOFError, RuntimeError,
    ValueError,
)  # fmt: skip

_Members = dict[str, tuple[int, int]]


class OpenArchives:
    """Members of archives; the directories of a few archives are kept. Thread-safe."""

    def __init__(self) -> None:
        self._known = RecentValues(_MAX_ARCHIVES)
        self._lock = threading.Lock()

    def read(self, file: io.FileIO, reference: Reference, size: int) -> bytes:
        try:
            with self._lock:
                return self._read(file, reference, size)
        except RowError:
            raise
        except (*_DAMAGED, OSError) as error:
            if isinstance(error, OSError) and error.errno is not None:  # bz2 has none for damage
                raise SourceError(f"cannot be read: {error}", path=reference.path) from error
            raise bad_media(f"{reference.name} cannot be unpacked: {error}") from error

    def _read(self, file: io.FileIO, reference: Reference, size: int) -> bytes:
        status = os.fstat(file.fileno())
        version = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
        members: _Members | zipfile.ZipFile | None = self._known.get(version)
        if members is None:
            members = _directory(file, reference)
            self._known.put(version, members, 1)
        name = reference.member
        if isinstance(members, zipfile.ZipFile):
            try:
                stated = members.getinfo(name).file_size
            except KeyError:
                raise missing(f"{reference.name} is not in the archive") from None
            require_size(stated, size, reference.name)
            members.fp = file  # the file that the directory was read from may be closed
            with members.open(name) as member:
                data = member.read(size + 1)  # the header may understate it
            require_size(len(data), size, reference.name)
            return data
        place = members.get(name) or members.get(f"./{name}")
        if place is None:
            raise missing(f"{reference.name} is not in the archive")
        at, stated = place
        require_size(stated, size, reference.name)
        data = os.pread(file.fileno(), stated, at)
        if len(data) != stated:
            raise bad_media(f"{reference.name} is cut off: the archive ends before it")
        return data


def _directory(file: io.FileIO, reference: Reference) -> _Members | zipfile.ZipFile:
    start = os.pread(file.fileno(), 4, 0)
    if start[:2] == b"PK":
        archive = zipfile.ZipFile(file)
        if len(archive.namelist()) > _MAX_MEMBERS:
            raise bad_media(f"{reference.path} has more than {_MAX_MEMBERS} members")
        return archive
    if start.startswith((b"\x1f\x8b", b"BZh", b"\xfd7zX", b"\x28\xb5\x2f\xfd")):
        raise bad_media(
            f"{reference.path} is a compressed archive, in which no picture can be reached without"
            " unpacking all before it; make it a .zip or an uncompressed .tar"
        )
    members: _Members = {}
    with tarfile.open(fileobj=file, mode="r:") as archive_of_files:
        for entry in archive_of_files:
            if entry.isreg() and not entry.issparse():
                members[entry.name] = (entry.offset_data, entry.size)
            if len(members) > _MAX_MEMBERS:
                raise bad_media(f"{reference.path} has more than {_MAX_MEMBERS} members")
            archive_of_files.members = []  # type: ignore[attr-defined]  # or it keeps them all
    return members
