"""The pinned date: what the C library prints in the C locale and UTC, wherever it is asked."""

from __future__ import annotations

import json
from functools import cache

import pytest

from tests.programs import python

DATES = ("2026-11-15", "2024-02-29", "1969-07-20")
PROGRAM = """
import json, locale, sys, time
from datetime import datetime
from tokenmill.chat.template import pinned_strftime
time.tzset()
try:
    locale.setlocale(locale.LC_ALL, "")
except locale.Error:
    pass
formats = [
    f"<%{flags}{width}{modifier}{conversion}>%%{conversion}"
    for flags in ("", "-", "_", "0", "^", "#", "-^", "^-", "_^", "0^")
    for width in ("", "3", "12")
    for modifier in ("", "E", "O")
    for conversion in "aAbBcCdDeFgGhHIjklmMnpPrRsStTuUVwWxXyYzZ%f"
]
found = {}
for date in sys.argv[1:]:
    ours, day = pinned_strftime(date), datetime.strptime(date, "%Y-%m-%d")
    found[date] = [{f: ours(f) for f in formats}, {f: day.strftime(f) for f in formats}]
print(json.dumps(found))
"""


@cache
def printed(zone: str, language: str) -> dict[str, list[dict[str, str]]]:
    """By date, what we print and what the C library does, by format."""
    answer = python(PROGRAM, *DATES, TZ=zone, LC_ALL=language)
    assert answer.returncode == 0, answer.stderr
    found: dict[str, list[dict[str, str]]] = json.loads(answer.stdout)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("date", DATES)
def test_pinned_date_is_the_c_librarys_in_utc_and_moves_with_no_zone_or_locale(date: str) -> None:
    ours, theirs = printed("UTC", "C")[date]
    assert ours == theirs
    for zone in ("Asia/Kathmandu", "America/St_Johns", "XYZ-9:30"):
        there, moved = printed(zone, "C")[date]
        assert there == ours
        assert moved != theirs, "the zone is not known here: the test sees nothing"
    assert printed("UTC", "de_DE.UTF-8")[date][0] == ours
