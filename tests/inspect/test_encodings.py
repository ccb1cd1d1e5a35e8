"""Broken encodings are found, and ordinary text in any language is not reported."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenmill.inspect.lint.checks import first_positions, mojibake

HONEST = (
    "CORAÇÃO, AMANHÃ, NÃO, SÃO: «CAFÉ» «THÉ» “AMANHÃ” — État, naïve, Straße, 20 °C, 5 µm, ½",
    "Điều này rất tốt, ÂM NHẠC, NHÂN “ÂN” … Là để à chị",
    "Здравствуйте, «мир» — ÄÖÜ äöü ß ÆØÅ æøå “ÄÖ” ‘É’ À l’été",
    "你好，世界。日本語テキスト 한국어 العربية हिन्दी ไทย 👩‍👩‍👧‍👦 ❤️",
    "def f(x):\n\treturn '\\u00e9' + '\\ud83d\\ude00'\r\n",
    "1ª e 2º; l·l; Â e Ã; ã©? não·",
)


@pytest.mark.parametrize("text", HONEST)
def test_ordinary_text_has_no_findings(text: str) -> None:
    assert first_positions(text) == {}


@pytest.mark.parametrize(
    ("text", "rule", "at"),
    [
        ("a cafÃ© here", "mojibake", 5),
        ("it isnâ€™t", "mojibake", 6),
        ("party ðŸŽ‰", "mojibake", 6),
        ("20 Â°C", "mojibake", 3),
        ("a \ufffd b", "replacement_character", 2),
        ("a \\ud83d b", "escaped_surrogate", 2),
        ("a \\ude00 b", "escaped_surrogate", 2),
        ("a\ufeffb", "byte_order_mark", 1),
        ("a\x00b", "control_character", 1),
        ("a\x1b[0m", "control_character", 1),
        ("a\x85b", "control_character", 1),
    ],
)
def test_damage_is_found_at_its_position(text: str, rule: str, at: int) -> None:
    assert first_positions(text) == {rule: at}


@given(st.text(st.characters(min_codepoint=0x3B1, max_codepoint=0x4FF), min_size=4))
def test_text_read_as_latin_1_is_mojibake(text: str) -> None:
    assert mojibake(text.encode("utf-8").decode("latin-1")) is not None


@given(st.text(st.characters(codec="ascii"), max_size=200))
def test_ascii_is_never_mojibake(text: str) -> None:
    assert mojibake(text) is None
