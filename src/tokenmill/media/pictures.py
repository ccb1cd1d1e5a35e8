"""`Pictures`: the bytes of what rows refer to, and what they are, within stated bounds.

Reading. A file is looked for under each *root* in turn, or beside the file of the row where no
roots are given; what is opened must lie below one of them after every link was followed, also where
the row gives an absolute path. ``media_root="/"`` therefore allows every file, and nothing else
does. Addresses are read only where allowed (`tokenmill.media.web`), members only of archives that
are themselves allowed files (`tokenmill.media.archives`).

Looking. The reference is ``transformers.image_utils.load_image``: the first frame, turned as its
EXIF orientation says, converted to RGB. `Pictures.open` does exactly that. `Pictures.facts` says
how large the result will be, from the header alone where that is certain: JPEG, PNG and WebP files
whose structure is whole to the end. Every other file is decoded to find out, so that what is cut
short or broken is refused here and not in the middle of a training run. Pillow reads the headers,
but for the plainest JPEG files (`_plain_jpeg`), of which there are most.

What cannot be used is a `RowError` with reason ``bad_media`` that names the picture. What may work
tomorrow (a server that does not answer) is a `SourceError`: no row is rejected for the weather.
"""

from __future__ import annotations

import errno
import functools
import io
import os
import stat
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from tokenmill import fingerprint
from tokenmill.errors import RowError, SourceChanged, SourceError, UsageError
from tokenmill.media import archives
from tokenmill.media.reference import Reference, bad_media, missing, require_size
from tokenmill.optional import optional

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "DIB", "TIFF", "PPM", "JPEG2000", "AVIF")
"""What is read, where Pillow was built with it. It knows more, some of which start programs."""

_VIDEO = (".mp4", ".mov", ".avi", ".mkv", ".webm", ".m4v", ".mpg", ".mpeg", ".flv", ".wmv")
_TURNED = (5, 6, 7, 8)  # EXIF orientations that exchange width and height
_ORIENTATION = 0x0112
_MOST_DEFLATED = 1032  # bytes that a byte of a PNG's pixels can stand for
_FOR_GOOD = (errno.EACCES, errno.EPERM, errno.ELOOP, errno.ENAMETOOLONG, errno.EINVAL)


class Limits(msgspec.Struct, frozen=True):
    """How much one picture may cost.

    Attributes:
        size: Bytes of its file.
        pixels: Width × height; the default is where Pillow begins to speak of a bomb.
        seconds: Of silence from a server, and of one fetch in all.
        redirects: From one address to another.
    """

    size: int = 128 << 20
    pixels: int = 89_478_485
    seconds: float = 60.0
    redirects: int = 5


class PictureFacts(msgspec.Struct, frozen=True):
    """What is known of a picture without its pixels.

    Attributes:
        digest: Checksum of its bytes, as of every source: xxh3, 128 bits.
        size: Bytes of its file.
        width: Of the picture as `Pictures.open` gives it, its orientation applied.
        height: Likewise.
        format: ``JPEG``, ``PNG`` and so on.
        mode: Pillow's word for its pixels: ``RGB``, ``L``, ``P``, ``CMYK``, ``I;16`` …
        animated: Whether more frames follow the first, which is the one that is used.
        turned: Whether its orientation exchanged width and height.
    """

    digest: str
    size: int
    width: int
    height: int
    format: str
    mode: str
    animated: bool
    turned: bool = False

    @property
    def unturned(self) -> tuple[int, int]:
        """Width and height as a loader sees them that knows no orientation."""
        return (self.height, self.width) if self.turned else (self.width, self.height)


class Pictures:
    """Opens what rows refer to.

    Args:
        roots: Directories that pictures may come from, in the order they are looked in. None: the
            directory of each row's file.
        urls: Whether ``http://`` and ``https://`` are opened.
        private: Whether addresses inside this network or machine are, too.
        limits: What one picture may cost.
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
                raise UsageError("media_root is not a directory", path=root)
        self._roots = tuple(map(str, self.roots))  # every picture is looked for under them
        self.urls = urls
        self.private = private
        self.limits = limits or Limits()
        self._archives = archives.OpenArchives()

    def __reduce__(self) -> Any:
        # What it knows of archives stays here.
        again = functools.partial(
            Pictures, urls=self.urls, private=self.private, limits=self.limits
        )
        return again, (self.roots,)

    def read(self, reference: Reference, base: str | os.PathLike[str] | None = None) -> bytes:
        """The bytes of a picture.

        Args:
            reference: Of `reference_of`.
            base: Directory of the row's file.

        Raises:
            RowError: It is missing, not allowed, or too large (``bad_media``).
            SourceError: A server or a disk failed, or the file is just being written; another time
                it may not be.
        """
        if reference.kind == "inline":
            if reference.data is None:
                raise UsageError("an inline picture is read from its row")
            require_size(len(reference.data), self.limits.size, reference.name)
            return reference.data
        if reference.kind == "url":
            if not self.urls:
                raise bad_media(f"{reference.name} is an address; media_urls=True opens those")
            from tokenmill.media import web  # with all of http and TLS, which few rows need

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
                data = file.read(size + 1)  # a byte more than it had, if it has grown
                while len(data) < size and (more := file.read(size - len(data))):
                    data += more
            except OSError as error:
                raise SourceError(f"cannot be read: {error.strerror}", path=file.name) from error
        if len(data) != size:
            raise SourceChanged("changed while it was read", path=reference.path)
        return data

    def _opened(self, reference: Reference, base: str | os.PathLike[str] | None) -> io.FileIO:
        """The file a reference names, below one of the roots whatever links lead to it."""
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
                    if error.errno in _FOR_GOOD
                    else SourceError(message, path=reference.path)
                ) from error
            # The file that is open is judged, not a name that may mean another one by now.
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
        """What a picture is.

        Args:
            data: The bytes of its file.
            name: What it is called in a refusal.
            digest: Their checksum, where the caller has just made it.

        Raises:
            RowError: It is no picture that can be used (``bad_media``).
        """
        digest = digest or fingerprint.checksum(data)
        plain = _plain_jpeg(data)
        if plain is not None and self._is_allowed(plain.width, plain.height):
            return PictureFacts(
                digest, len(data), plain.width, plain.height, "JPEG", plain.mode, animated=False
            )
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
        """A picture as the reference way loads it: oriented, first frame, RGB.

        Raises:
            RowError: It is no picture that can be used (``bad_media``).
        """
        image = self._header(data, name)
        try:
            return _loaded(image).convert("RGB")
        except Exception as error:
            raise _unreadable(name, error) from error

    @staticmethod
    def blank(width: int, height: int) -> Image:
        """A picture of a size that shows nothing, for those who are asked about sizes."""
        with optional("PIL", "asking about pictures"):
            from PIL import Image
        return Image.new("RGB", (width, height))

    def _is_allowed(self, width: int, height: int) -> bool:
        """Whether a size is within these limits and within Pillow's."""
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
    """Those of `FORMATS` that Pillow was built with."""
    from PIL import Image

    Image.init()
    return tuple(name for name in FORMATS if name in Image.OPEN)


def _is_below(place: str, root: str) -> bool:
    """Whether a resolved path is below a directory, which may itself be reached by links."""
    # In a resolved path there are none, so a directory that it begins with needs no resolving.
    if place.startswith(root.rstrip("/") + "/"):
        return True
    return place.startswith(os.path.join(os.path.realpath(root), ""))


def _unreadable(name: str, error: Exception) -> RowError:
    from PIL import UnidentifiedImageError

    if isinstance(error, UnidentifiedImageError):
        return bad_media(f"{name} is in no format that is read: {', '.join(_formats())}")
    return bad_media(f"{name} cannot be decoded: {error or type(error).__name__}")


def _loaded(image: Any) -> Any:
    """The first frame, turned as its orientation says: what ``load_image`` does."""
    from PIL import ImageOps

    return ImageOps.exif_transpose(image)


def _oriented(image: Any) -> tuple[int, int]:
    """Width and height of `_loaded`, of a file for which `_is_whole` holds."""
    from PIL.Image import Image

    # Image's own method: that of PNG files decodes the picture to look for what comes after the
    # pixels, and in a whole file nothing does.
    orientation = Image.getexif(image).get(_ORIENTATION, 1)
    width, height = image.size
    return (height, width) if orientation in _TURNED else (width, height)


def _is_whole(data: bytes, image: Any) -> bool:
    """Whether the structure of a file shows that nothing is cut off, and its header says all."""
    if image.format == "JPEG":
        return _jpeg_is_whole(data)
    if image.format == "PNG":
        return _png_is_whole(data, *image.size)
    if image.format == "WEBP":
        return len(data) >= 8 + int.from_bytes(data[4:8], "little")
    return False


class _PlainJpeg(NamedTuple):
    """What the header of a plain JPEG file says."""

    width: int
    height: int
    mode: str


def _plain_jpeg(data: bytes) -> _PlainJpeg | None:
    """What Pillow says of a JPEG file that is whole and holds nothing that could say otherwise.

    That is one frame of 8 bits in grey or three colours; tables; a JFIF header; a comment. Of any
    other file (with EXIF, XMP, profiles, Adobe's marks, further frames, or something amiss) None.
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
            found = _PlainJpeg(width, height, "L" if layers == 1 else "RGB")
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
    """Whether a scan begins, and the last two bytes end the picture it belongs to."""
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
    """Whether chunk follows chunk to the end, and none but that comes after the pixels.

    These must be as many bytes as such a picture takes at the least, one bit for each.
    """
    at, length, pixels = 8, len(data), 0
    while at + 12 <= length:
        size, kind = struct.unpack_from(">I4s", data, at)
        if kind == b"IEND":
            return pixels > 0 and pixels * _MOST_DEFLATED >= width * height // 8
        if kind == b"IDAT":
            pixels += size
        elif pixels:
            return False
        at += 12 + size
    return False
