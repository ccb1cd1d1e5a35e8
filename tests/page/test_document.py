"""The page on disk: what it carries equals the store, within its bound, and nothing can escape."""

from __future__ import annotations

import base64
import json
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cli.harness import Shell
from tests.page.conftest import ATTACK, Made
from tokenmill.errors import UsageError
from tokenmill.report.page import make_page
from tokenmill.report.page.document import script_json, write_page
from tokenmill.report.page.embedded_rows import mask_runs, varints
from tokenmill.report.page.overview import overview
from tokenmill.report.row import store_tokenizer
from tokenmill.store import Store


def data_of(page: bytes) -> dict[str, Any]:
    """The page's data, found as a browser finds it: up to the first end of the element."""
    inside = page.split(b'<script type="application/json" id="data">')[1].split(b"</script")[0]
    document = json.loads(inside)
    assert isinstance(document, dict)
    return document


def numbers(data: bytes) -> Iterator[int]:
    """An independent reader of varints."""
    value = shift = 0
    for byte in data:
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            yield value
            value = shift = 0


def unpacked(text: str) -> bytes:
    return zlib.decompress(base64.b64decode(text))


def rows_of(data: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Every row of a page, decoded the plain way."""
    packed = data["rows"]
    reader = numbers(unpacked(packed["pieces"]))
    size = next(reader)
    ids = [next(reader) for _ in range(size)]
    index = numbers(unpacked(packed["index"]))
    columns = {name: [next(index) for _ in range(packed["count"])] for name in packed["columns"]}
    for at, block in enumerate(packed["blocks"]):
        places = range(packed["count"])[at * packed["block_rows"] :][: packed["block_rows"]]
        reader = numbers(unpacked(block))
        tokens = sum(columns["length"][place] for place in places)
        flat = [ids[next(reader)] for _ in range(tokens)]
        runs = [next(reader) for _ in range(next(reader))]
        mask = [n % 2 for n, run in enumerate(runs) for _ in range(run)]
        start = 0
        for place in places:
            end = start + columns["length"][place]
            turns, before = [], 0
            for _ in range(next(reader)):
                role = packed["roles"][next(reader)]
                turns.append((role, before, before := before + next(reader)))
            yield {"ids": flat[start:end], "mask": mask[start:end], "turns": turns,
                   **{name: column[place] for name, column in columns.items()}}  # fmt: skip
            start = end


@given(st.lists(st.integers(0, 2**62)))
def test_varints_are_read_back(values: list[int]) -> None:
    assert list(numbers(varints(np.array(values, np.int64)))) == values


@given(st.lists(st.integers(0, 1)))
def test_runs_of_a_mask_are_read_back(mask: list[int]) -> None:
    runs = mask_runs(np.array(mask, np.uint8)).tolist()
    assert [n % 2 for n, run in enumerate(runs) for _ in range(run)] == mask


def test_page_carries_every_row_as_the_store_serves_it(store: Store, page_file: Path) -> None:
    data = data_of(page_file.read_bytes())
    rows = list(rows_of(data))
    assert [row["row"] for row in rows] == list(range(len(store)))
    for found in rows:
        row = store[found["row"]]
        assert found["ids"] == row.input_ids.tolist()
        assert found["mask"] == row.loss_mask.tolist()
        assert found["turns"] == row.turns
        origin = row.origin
        assert (found["source_row"], found["line"] - 1) == (origin.row, origin.line)
        assert (found["offset"] - 1, found["raw_length"]) == (origin.offset, origin.length)
        assert store.sources[found["source"]] == origin.path
    assert data["selection"] == f"All {len(store)} rows of the store are in this page."


def test_table_of_pieces_holds_the_bytes_of_every_token(store: Store, page_file: Path) -> None:
    data = unpacked(data_of(page_file.read_bytes())["rows"]["pieces"])
    reader = numbers(data)
    size = next(reader)
    ids, special, lengths = ([next(reader) for _ in range(size)] for _ in range(3))
    rest = data[-sum(lengths) :]
    tokenizer = store_tokenizer(store)
    pieces, start = [], 0
    for length in lengths:
        pieces.append(rest[start : start + length])
        start += length
    assert pieces == tokenizer.pieces(ids)
    assert special == tokenizer.is_special(ids).astype(int).tolist()


@pytest.mark.parametrize("most", [130_000, 145_000])
def test_page_keeps_its_bound_and_says_what_is_missing(
    made: Made, tmp_path: Path, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("embedded_rows", "selection"):
        monkeypatch.setattr(f"tokenmill.report.page.{module}.BLOCK_ROWS", 16)
    target = tmp_path / "small.html"
    told = make_page(made.store, target, cache_dir=str(made.cache), most_bytes=most)
    assert target.stat().st_size == told["bytes"] <= most
    assert 0 < told["rows_in_page"] < told["rows"] == len(made.store)
    data = data_of(target.read_bytes())
    rows = [row["row"] for row in rows_of(data)]
    assert len(rows) == told["rows_in_page"]
    assert f"{len(rows)} of {len(made.store)} rows" in data["selection"]
    assert f"{len(made.store) - len(rows)} rows are not" in data["selection"]
    longest = np.argsort(-made.store.lengths, kind="stable")[:10]
    assert set(longest.tolist()) <= set(rows), "a sample begins with what people look for"


def test_page_of_a_rule_holds_these_rows(shell: Shell, made: Made, tmp_path: Path) -> None:
    target = tmp_path / "rule.html"
    told = shell("inspect", made.store.path, "--html", target, "--rule", "shortest",
                 "--count", "7", "--cache-dir", made.cache, "--json").json  # fmt: skip
    assert told["rows_in_page"] == 7
    lengths = sorted(row["length"] for row in rows_of(data_of(target.read_bytes())))
    assert lengths == sorted(made.store.lengths)[:7]
    assert "by rule shortest" in told["selection"]


def test_page_is_one_file_that_asks_nobody(page_file: Path) -> None:
    page = page_file.read_text("utf-8")
    outside = re.sub(r'<script type="application/json".*?</script>', "", page, flags=re.DOTALL)
    assert not re.search(r"""(src|href)=["']?(?!data:,)\w""", outside)
    assert "http" not in outside.replace("http-equiv", "")
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)
    assert policy is not None
    assert "default-src &#x27;none&#x27;" in policy[1]
    assert "unsafe" not in policy[1]
    assert "connect-src &#x27;none&#x27;" in policy[1]


def test_no_text_of_the_data_stands_in_the_page_as_markup(made: Made, page_file: Path) -> None:
    page = page_file.read_text("utf-8")
    assert page.count("<script") == page.count("</script>") == 2
    assert "window.hacked" in json.dumps(data_of(page_file.read_bytes())), "it is there as data"
    assert ATTACK not in page
    assert "<b>" not in page
    rejected = data_of(page_file.read_bytes())["overview"]["rejected"]["rows"]
    assert any(ATTACK in row["raw"]["text"] for row in rejected)


@given(st.text())
def test_json_in_a_page_cannot_end_its_element(text: str) -> None:
    inside = script_json({"text": text, text: 1})
    assert not set(inside) & set("<>&\u2028\u2029")
    assert json.loads(inside) == {"text": text, text: 1}


def test_page_replaces_a_page_and_nothing_else(made: Made, tmp_path: Path) -> None:
    target = tmp_path / "page.html"
    make_page(made.store, target, count=3, cache_dir=str(made.cache))
    small = target.stat().st_size
    make_page(made.store, target, cache_dir=str(made.cache))
    assert target.stat().st_size > small
    foreign = tmp_path / "data.jsonl"
    foreign.write_text('{"precious": 1}\n')
    for path in (foreign, tmp_path):
        with pytest.raises(UsageError):
            make_page(made.store, path, count=3, cache_dir=str(made.cache))
    assert foreign.read_text() == '{"precious": 1}\n'
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data.jsonl", "page.html"]


def test_failed_write_leaves_the_old_page(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "page.html"
    write_page(target, b'<meta name="generator" content="tokenmill inspect">old')

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="disk is full"):
        write_page(target, b"new")
    assert target.read_bytes().endswith(b"old")
    assert list(tmp_path.iterdir()) == [target]


def test_overview_adds_up(made: Made) -> None:
    document = overview(made.store, None)
    totals = document["totals"]
    assert sum(document["lengths"]["counts"]) == sum(document["shares"]["counts"]) == totals["rows"]
    edges = document["lengths"]["edges"]
    bins = np.searchsorted(edges, made.store.lengths, side="right") - 1
    assert np.bincount(bins, minlength=len(edges) - 1).tolist() == document["lengths"]["counts"]
    assert sum(role["trained_tokens"] for role in document["roles"]) == totals["trained_tokens"]
    expected: dict[str, int] = dict.fromkeys((role["role"] for role in document["roles"]), 0)
    for row in made.store:
        for role, start, end in row.turns:
            expected[role] += int(row.loss_mask[start:end].sum())
    assert {role["role"]: role["trained_tokens"] for role in document["roles"]} == expected
    assert sum(source["rejected"] for source in document["sources"]) == 6
    for preview in document["packing"]["previews"]:
        assert sum(preview["counts"]) == preview["packs"]
        for pack in preview["drawn"]:
            assert sum(tokens for _, tokens in pack) <= preview["length"]


def test_store_without_rows_still_has_a_page(tmp_path: Path, shell: Shell) -> None:
    from tests.build.making import write_rows
    from tests.cli.harness import QUICK

    source = write_rows(tmp_path / "bad.jsonl", ["{"])
    path = shell("prepare", source, *QUICK, "--json").json["path"]
    told = shell("inspect", path, "--html", tmp_path / "empty.html", "--json").json
    assert told["rows_in_page"] == told["rows"] == 0


@pytest.fixture
def shell(capsys: pytest.CaptureFixture[str]) -> Shell:
    return Shell(capsys)
