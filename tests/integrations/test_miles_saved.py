"""Saved states of miles and slime restore values and arrays without executing code."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenmill.errors import UsageError
from tokenmill.integrations.miles import saved

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False)
    | st.text(st.characters(exclude_categories=[]), max_size=8)
    | st.binary(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.sets(st.integers(), max_size=1)
        | st.dictionaries(st.text(max_size=3) | st.integers() | st.tuples(st.text()), inner)
    ),
    max_leaves=8,
)


@given(st.dictionaries(st.text(), values, max_size=3))
def test_values_are_restored_unchanged(extra: dict[str, Any]) -> None:
    again = saved.decode_extra(saved.encode_extra(extra))
    assert repr(again) == repr(extra)  # equal in types and order too


def test_arrays_and_tensors_are_restored_unchanged() -> None:
    torch = pytest.importorskip("torch")
    arrays = [
        np.arange(6, dtype="<i2").reshape(2, 3),
        np.float32(1.5),
        np.zeros((0, 2)),
        np.bool_(1),
    ]
    tensors = [
        torch.tensor([[1.5, -2.0]], dtype=torch.bfloat16),
        torch.tensor(7),
        torch.zeros(0, 3),
        torch.tensor([True, False]),
        torch.arange(6).reshape(2, 3).T,
    ]
    again = saved.decode_extra(saved.encode_extra({"a": arrays, "t": tensors}))
    for one, other in zip(arrays, again["a"], strict=True):
        assert type(one) is type(other)
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert np.array_equal(one, other)
    for one, other in zip(tensors, again["t"], strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert torch.equal(one, other)


def test_images_are_restored_unchanged() -> None:
    image = pytest.importorskip("PIL.Image").new("RGB", (3, 2), (1, 2, 3))
    again = saved.decode_extra(saved.encode_extra({"p": [image]}))["p"][0]
    assert (again.mode, again.size, again.tobytes()) == ("RGB", (3, 2), image.tobytes())
    with pytest.raises(UsageError, match="cannot be saved without pickle"):
        saved.encode_extra({"p": image.convert("P")})
