"""The pinned date: what the C library prints in the C locale and UTC, wherever it is asked."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import tokenmill

PACKAGE = Path(tokenmill.__file__).parent
PROGRAM = """
import json, locale, sys, time
from datetime import datetime
from tokenmill.chat.template import pinned_strftime
time.tzset()
try:
    locale.setlocale(locale.LC_ALL, "")
except locale.Error:
    pass
date = sys.argv[1]
formats = [
    f"<%{flags}{width}{modifier}{conversion}>%%{conversion}"
    for flags in ("", "-", "_", "0", "^", "#", "-^", "^-", "_^", "0^")
    for width in ("", "3", "12")
    for modifier in ("", "E", "O")
    for conversion in "aAbBcCdDeFgGhHIjklmMnpPrRsStTuUVwWxXyYzZ%f"
]
ours = pinned_strftime(date)
day = datetime.strptime(date, "%Y-%m-%d")
print(json.dumps([{f: ours(f) for f in formats}, {f: day.strftime(f) for f in formats}]))
"""


def printed(date: str, **environment: str) -> tuple[dict[str, str], dict[str, str]]:
    """What we print and what the C library does, by format."""
    answer = subprocess.run(
        [sys.executable, "-c", PROGRAM, date], capture_output=True, text=True, check=True,
        env={**os.environ, "PYTHONPATH": str(PACKAGE.parent), **environment},
    )  # fmt: skip
    ours, theirs = json.loads(answer.stdout)
    return ours, theirs


@pytest.mark.slow
@pytest.mark.parametrize("date", ["2026-11-15", "2024-02-29", "1969-07-20"])
def test_pinned_date_is_the_c_librarys_in_utc_and_moves_with_no_zone_or_locale(date: str) -> None:
    ours, theirs = printed(date, TZ="UTC", LC_ALL="C")
    assert ours == theirs
    for zone in ("Asia/Kathmandu", "America/St_Johns", "XYZ-9:30"):
        there, moved = printed(date, TZ=zone, LC_ALL="C")
        assert there == ours
        assert moved != theirs, "the zone is not known here: the test sees nothing"
    assert printed(date, TZ="UTC", LC_ALL="de_DE.UTF-8")[0] == ours
