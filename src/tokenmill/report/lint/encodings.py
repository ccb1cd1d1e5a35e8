r"""Suspicious encodings: text that went through a wrong decoder on its way here.

Text in, suspicious positions by rule out; `content` asks it of every text of a row. `suspicions`
looks at one text and names what it finds: *mojibake* (UTF-8 bytes read as Latin-1 or Windows-1252,
``cafÃ©``, ``donâ€™t``), U+FFFD where a decoder gave up, halves of surrogate pairs spelled out as
``\ud83d`` (the text was escaped twice), a byte order mark inside, and control characters other than
tab and line ends.

Mojibake is a guess, so it is made with care. Letters such as ``Â`` and ``Ã`` followed by a sign
that no language puts there count alone; any other sequence that happens to be valid UTF-8 counts
only where there are several and nearly everything beyond ASCII in the text belongs to one. So
``«CAFÉ»`` and ``CORAÇÃO`` pass.
"""

from __future__ import annotations

import re

SEQUENCES = 3  # weak sequences of mojibake that a text must hold …
SHARE = 0.9  # … and the share of its characters beyond ASCII that they must make up

# Bytes 0x80 to 0xBF, which follow a lead byte in UTF-8, as Windows-1252 or Latin-1 show them.
_TRAIL = "".join(bytes([byte]).decode("cp1252", "ignore") for byte in range(0x80, 0xC0))
_TRAIL += "".join(map(chr, range(0x80, 0xA0)))
# Quotes, dashes and dots may follow a letter in real text, so behind Â and Ã they prove nothing.
_PLAIN_TRAIL = "".join(c for c in _TRAIL if c not in "‘’“”–—…‹›‚„«» \u00a0\u00ba\u00aa\u00b7")

_STRONG = re.compile(
    f"[\u00c2\u00c3][{re.escape(_PLAIN_TRAIL)}]|\u00e2\u20ac[{re.escape(_TRAIL)}]|"
    "\u00f0\u0178[" + re.escape(_TRAIL) + "]{2}|\u00ef\u00bb\u00bf"
)
_WEAK = re.compile(
    f"[\u00c2-\u00df][{re.escape(_TRAIL)}]|[\u00e0-\u00ef][{re.escape(_TRAIL)}]{{2}}"
    f"|[\u00f0-\u00f4][{re.escape(_TRAIL)}]{{3}}"
)
_BEYOND_ASCII = re.compile("[^\x00-\x7f]")
# Ordinary words with an accent are common; only a lead beside a trail makes the closer look due.
_LEAD_AND_TRAIL = re.compile(f"[\u00c2-\u00f4][{re.escape(_TRAIL)}]")

_SIGNS = (
    ("replacement_character", re.compile("\ufffd")),
    # A whole pair spelled out is how code writes an emoji; half of one is damage.
    (
        "escaped_surrogate",
        re.compile(
            r"\\u[dD][89aAbB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F][0-9a-fA-F]{2})"
            r"|(?<!\\u[dD][89aAbB][0-9a-fA-F]{2})\\u[dD][c-fC-F][0-9a-fA-F]{2}"
        ),
    ),
    ("byte_order_mark", re.compile("\ufeff")),
    ("control_character", re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")),
)
_ANY = re.compile(
    "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ufeff\ufffd]|\\\\u[dD]|" + _LEAD_AND_TRAIL.pattern
)


def suspicions(text: str) -> dict[str, int]:
    """Rule → position of its first sign in a text; empty for nearly every text."""
    if not _ANY.search(text):
        return {}
    found = {}
    broken = mojibake(text)
    if broken is not None:
        found["mojibake"] = broken
    for rule, sign in _SIGNS:
        place = sign.search(text)
        # Half a wrongly decoded character is a control character, too; one name for it is enough.
        if place is not None and not (rule == "control_character" and broken is not None):
            found[rule] = place.start()
    return found


def mojibake(text: str) -> int | None:
    """Where wrongly decoded text starts, None where there is none."""
    strong = _STRONG.search(text)
    if strong is not None:
        return strong.start()
    weak = [place for place in _WEAK.finditer(text) if _decodes(place[0])]
    if len(weak) < SEQUENCES:
        return None
    beyond = len(_BEYOND_ASCII.findall(text))
    inside = sum(len(place[0]) for place in weak)
    return weak[0].start() if inside >= SHARE * beyond else None


def _decodes(run: str) -> bool:
    """Whether a run of characters is, read back as bytes, one character of UTF-8."""
    data = bytearray()
    for character in run:
        try:
            data += character.encode("cp1252")
        except UnicodeEncodeError:
            if ord(character) > 0xFF:
                return False
            data.append(ord(character))
    try:
        return len(data.decode("utf-8")) == 1
    except UnicodeDecodeError:
        return False
