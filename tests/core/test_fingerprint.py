"""Tests of keys and checksums, which are equal on every machine and in every version."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tokenmill._core.fingerprint
from tokenmill._core.fingerprint import block_checksums, canonical, checksum, checksum64, key

SCALARS = (
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.text()
    | st.floats(allow_nan=False, allow_infinity=False)
)  # fmt: skip
DOCUMENTS = st.recursive(
    SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=20
)


def reordered(value: Any, data: st.DataObject) -> Any:
    """Return the document with the members of every object in another order."""
    if isinstance(value, dict):
        names = data.draw(st.permutations(list(value)))
        return {name: reordered(value[name], data) for name in names}
    if isinstance(value, list):
        return [reordered(member, data) for member in value]
    return value


@given(DOCUMENTS, st.data())
def test_key_does_not_depend_on_insertion_order(document: Any, data: st.DataObject) -> None:
    other = reordered(document, data)
    assert canonical(other) == canonical(document)
    assert key(other) == key(document)


@given(DOCUMENTS)
def test_canonical_decodes_to_the_document(document: Any) -> None:
    assert json.loads(canonical(document)) == document


@given(DOCUMENTS, DOCUMENTS)
def test_different_documents_have_different_keys(one: Any, two: Any) -> None:
    # Compared as text, because 1 == 1.0 == True in Python, but they are different documents.
    if json.dumps(one, sort_keys=True) != json.dumps(two, sort_keys=True):
        assert key(one) != key(two)


@pytest.mark.parametrize(
    "value",
    [float("nan"), float("inf"), float("-inf"), b"bytes", {1: "a"}, {None: 1}, {"a"}, 1j],
    ids=str,
)
@pytest.mark.parametrize("wrap", [lambda v: v, lambda v: [1, (v,)], lambda v: {"a": {"b": [v]}}])
def test_value_without_canonical_form_is_refused(value: Any, wrap: Any) -> None:
    with pytest.raises(ValueError, match="no canonical form"):
        key(wrap(value))


class Point(msgspec.Struct):
    y: float
    x: list[int]


def test_struct_is_encoded_as_the_dict_of_its_fields() -> None:
    assert key([Point(y=0.5, x=[1])]) == key([{"x": [1], "y": 0.5}])
    with pytest.raises(ValueError, match="no canonical form"):
        key({"point": Point(y=float("nan"), x=[])})


# These must never change, because they are keys of existing stores.
GOLDEN_KEYS = [
    ({}, "{}", "a22cbfd1a6f7d67d65014b57b47a96408c8f58b5"),
    ({"b": [1, 2.5, None], "a": "ä\n\u2028"}, '{"a":"ä\\n\u2028","b":[1,2.5,null]}',
     "5cdceb27efa690f27855ea8ab536e2153f8da834"),
    ({"train_on": "completion", "max_length": 4096, "keep_columns": []},
     '{"keep_columns":[],"max_length":4096,"train_on":"completion"}',
     "39a1ed912237b83c401cda1e63a90a05a0b1428c"),
    (["x", True, -1, 1e300, 0.1], '["x",true,-1,1e300,0.1]',
     "3d92d59aa8d8f5f4561aa5d49230d0f2267188d4"),
]  # fmt: skip
GOLDEN_CHECKSUMS = [
    (b"", "99aa06d3014798d86001c324468d497f", 0x2D06800538D394C2),
    (b"tokenmill", "1acc2a6d8595318eb04888611cca627b", 0x04D1AD308626F563),
    (bytes(range(256)) * 33, "6e30f4bc41c8a9b76225b792d3ca478a", 0x6225B792D3CA478A),
]


@pytest.mark.parametrize(("document", "text", "name"), GOLDEN_KEYS)
def test_key_of_golden_documents_is_unchanged(document: Any, text: str, name: str) -> None:
    assert canonical(document).decode() == text
    assert key(document) == name


@pytest.mark.parametrize(("data", "long", "short"), GOLDEN_CHECKSUMS)
def test_checksum_of_golden_bytes_is_unchanged(data: bytes, long: str, short: int) -> None:
    for form in (data, bytearray(data), memoryview(data)):
        assert checksum(form) == long
        assert checksum64(form) == short


@given(st.binary(max_size=300), st.integers(1, 64))
def test_block_checksums_cover_every_byte_once(data: bytes, block: int) -> None:
    found = block_checksums(data, block)
    assert found == [f"{checksum64(data[i : i + block]):016x}" for i in range(0, len(data), block)]
    assert len(found) == -(-len(data) // block)
    numbers = memoryview(data[: len(data) // 4 * 4]).cast("i")
    assert block_checksums(numbers, 16) == block_checksums(numbers.tobytes(), 16)


def test_key_does_not_depend_on_hash_seed_locale_or_time_zone() -> None:
    program = (
        "from tokenmill._core.fingerprint import key;"
        "print(key({'b': {'z': 0.1, 'y': 'ß'}, 'a': [1, None], 'c': dict.fromkeys('qwerty', 2)}))"
    )
    package = Path(tokenmill._core.fingerprint.__file__).parents[2]
    names = set()
    for seed, locale, zone in [("0", "C", "UTC"), ("1", "C.UTF-8", "Asia/Tokyo"), ("77", "", "")]:
        environment = {
            **os.environ, "PYTHONPATH": str(package), "PYTHONHASHSEED": seed, "LC_ALL": locale,
            "TZ": zone, "PYTHONUTF8": "1",
        }  # fmt: skip
        names.add(subprocess.check_output([sys.executable, "-c", program], env=environment))
    assert len(names) == 1
