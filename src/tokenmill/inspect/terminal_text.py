r"""Replace characters that must not reach a terminal: escapes, and marks that change direction.

`harmless` shows them as ``␛`` or ``\u202e``; `visible` also shows white space.
"""

from __future__ import annotations

_DIRECTION_MARKS = (0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))

_ALL = {code: chr(0x2400 + code) for code in range(0x20)}
_ALL |= {0x7F: "␡", **{code: f"\\x{code:02x}" for code in range(0x80, 0xA0)}}
_ALL |= {code: f"\\u{code:04x}" for code in _DIRECTION_MARKS}

_HARMLESS = {code: shown for code, shown in _ALL.items() if code not in (0x09, 0x0A)}
_VISIBLE = _ALL | {0x20: "·", 0x0A: "⏎\n", 0x09: "⇥", 0xA0: "⍽"}


def harmless(text: str) -> str:
    return text.translate(_HARMLESS)


def visible(text: str) -> str:
    return text.translate(_VISIBLE)
