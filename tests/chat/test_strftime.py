"""The pinned date: equal to the C library in the C locale and UTC, in any locale and zone."""

from __future__ import annotations

import json

import pytest

from tests.faults.tools import Zygote
from tokenmill.chat.sandbox import RaiseExceptionCalled
from tokenmill.chat.template import pinned_strftime

PROGRAM = """
import json, locale, os, time
from datetime import datetime
from tokenmill.chat.template import pinned_strftime
numbers = "CdDeFgGHIjklmMnRStTuUVwWyY%f"
options = [flag + width for flag in ("", "-", "_", "0", "^", "-^") for width in ("", "3", "12")]
formats = [f"<%{option}{number}>%%{number}" for option in options for number in numbers]
formats += [f"<%{word}>%%{word}" for word in "aAbBchpPrsxXzZ"]
found = []
for zone, language in (
    ("UTC", "C"), ("Asia/Kathmandu", "C"), ("America/St_Johns", "C"), ("XYZ-9:30", "C"),
    ("UTC", "de_DE.UTF-8"),
):
    os.environ["TZ"] = zone
    time.tzset()
    try:
        locale.setlocale(locale.LC_ALL, language)
    except locale.Error:
        pass
    for date in ("2026-11-15", "2024-02-29", "1969-07-20"):
        ours, day = pinned_strftime(date), datetime.strptime(date, "%Y-%m-%d")
        texts = [[spell(form) for form in formats] for spell in (ours, day.strftime)]
        found.append([zone, language, date, *texts])
print(json.dumps(found))
"""


@pytest.mark.slow
def test_pinned_date_is_the_c_librarys_in_utc_in_every_zone_and_locale(
    zygote: Zygote,
) -> None:
    answer = zygote.program(PROGRAM)
    assert answer.exit == 0, answer.stderr
    expected = {}
    for zone, language, date, ours, theirs in json.loads(answer.stdout):
        expected.setdefault(date, theirs)  # those of UTC and C come first
        assert ours == expected[date]
        if language == "C" and zone != "UTC":
            assert theirs != ours, "the zone is not known here: the test sees nothing"
    assert len(expected) == 3


@pytest.mark.parametrize("conversion", ["%^a", "%-B", "%12p", "%#Z", "%Ey", "%Od", "%EY"])
def test_date_that_depends_on_the_locale_raises(conversion: str) -> None:
    with pytest.raises(RaiseExceptionCalled, match="locale"):
        pinned_strftime("2026-11-15")(conversion)
