"""Tests of error locations, pickling, the --json object and usage messages."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenmill import errors
from tokenmill.build import wire
from tokenmill.errors import REASONS, RowError, TokenmillError, UsageError


def all_classes(root: type[TokenmillError] = TokenmillError) -> list[type[TokenmillError]]:
    children = [leaf for child in root.__subclasses__() for leaf in all_classes(child)]
    return [root, *[child for child in children if child.__module__ == "tokenmill.errors"]]


@pytest.mark.parametrize("cls", all_classes())
@given(
    message=st.text(),
    path=st.none() | st.text(),
    row=st.none() | st.integers(0),
    line=st.none() | st.integers(1),
    offset=st.none() | st.integers(0),
    protocol=st.integers(2, pickle.HIGHEST_PROTOCOL),
)
def test_error_pickled_keeps_every_attribute(
    cls: type[TokenmillError], message: str, protocol: int, **location: Any
) -> None:
    # Under OSError a second positional argument would become an errno; there is none here.
    error = cls(message, **location)
    error.add_note("seen in worker 3")
    for copied in (pickle.loads(pickle.dumps(error, protocol)), copy.copy(error)):
        assert type(copied) is cls
        assert copied.__dict__ == error.__dict__
        assert str(copied) == str(error)
        assert copied.args == error.args == (message,)
        assert copied.as_dict() == error.as_dict()


def test_row_error_keeps_its_reason_and_refuses_an_unknown_one() -> None:
    error = RowError("x", reason=REASONS[0], path="a", row=0)
    assert pickle.loads(pickle.dumps(error)).reason == REASONS[0]
    with pytest.raises(AssertionError, match="unlucky"):
        RowError("x", reason="unlucky")


@pytest.mark.parametrize(
    ("location", "text"),
    [
        ({}, "broken"),
        ({"path": "a.jsonl"}, "a.jsonl: broken"),
        ({"path": Path("a.jsonl"), "line": 3}, "a.jsonl:3: broken"),
        ({"path": "a", "row": 0, "line": 1, "offset": 0}, "a:1 (row 0, byte 0): broken"),
        ({"path": "a", "offset": 7}, "a (byte 7): broken"),
        ({"row": 2}, "row 2: broken"),
        ({"row": 2, "offset": 9}, "row 2, byte 9: broken"),
        ({"line": 4}, "line 4: broken"),
        ({"line": 4, "row": 3}, "line 4 (row 3): broken"),
    ],
)
def test_str_has_the_known_parts_of_the_location(location: dict[str, Any], text: str) -> None:
    assert str(TokenmillError("broken", **location)) == text
    # OSError defines its own str(), which must not be used.
    assert str(errors.SourceMissing("broken", **location)) == text


def test_as_dict_has_the_keys_of_the_command_line() -> None:
    error = errors.CorruptionError("cut", path=Path("s/a.arrow"), offset=64)
    assert error.as_dict() == {
        "type": "CorruptionError", "message": "cut", "path": "s/a.arrow", "row": None, "line": None,
        "offset": 64,
    }  # fmt: skip


@pytest.mark.parametrize("value", [0, -1, True, 1.0, "1", None])
def test_check_positive_rejects_other_values(value: object) -> None:
    assert type(errors.check_positive("epochs", np.int32(1))) is int
    with pytest.raises(UsageError, match=r"epochs must be a positive integer, got "):
        errors.check_positive("epochs", value)


def test_check_one_of_lists_the_choices() -> None:
    errors.check_one_of("order", "a", ("a", "b"))
    with pytest.raises(UsageError, match="order must be one of a, b, got 'c'"):
        errors.check_one_of("order", "c", ("a", "b"))


def test_every_reason_has_a_hint_for_the_command_line() -> None:
    from tokenmill.inspect.lint.rules import RULES

    assert set(REASONS) <= set(RULES)


def test_usage_error_renders_its_arguments_as_python_or_flags() -> None:
    error = UsageError(("max_length", 8, 9), " and ", ("date",), " of ", ("window",), path="a")
    assert error.message == "max_length=8 | 9 and date of window"
    flags = {"max_length": "--max-length", "date": "--date"}
    sent = wire.unpack_error(wire.pack_error(error))
    for copied in (error, pickle.loads(pickle.dumps(error)), sent):
        assert isinstance(copied, UsageError)
        assert copied.render(flags) == "--max-length 8 | 9 and --date of window"
