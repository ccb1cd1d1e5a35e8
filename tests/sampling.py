"""Parameters of which `make test` runs a sample and `make soak` all."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def sampled(values: Iterable[Any], one_in: int, first: int = 0) -> list[Any]:
    """Return all values as parameters; those outside of the sample are marked ``soak``."""
    return [
        value if number % one_in == first else _soak(value) for number, value in enumerate(values)
    ]


def _soak(value: Any) -> Any:
    values = value if isinstance(value, tuple) else (value,)
    return pytest.param(*values, marks=pytest.mark.soak)
