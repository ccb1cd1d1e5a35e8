"""The page on disk: its rows equal the store, its size is bounded, and data is never code."""

from __future__ import annotations

import base64
import gzip
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.build.making import write_rows
from tests.cli.harness import QUICK, Shell
from tests.inspect.page.conftest import ATTACK, Made
from tokenmill.errors import UsageError
from tokenmill.inspect.page.document import compressed, make_page, overview, page, write_page
from tokenmill.inspect.row import RowFacts
from tokenmill.store import Store


def element_of(page: bytes) -> bytes:
    """Return the data of the page as a browser reads it: up to the first end of the element."""
    return page.split(b'<script type="application/json" id="data">')[1].split(b"</script")[0]


def decompressed(text: str) -> Any:
    return json.loads(gzip.decompress(base64.b64decode(text)))


def data_of(page: bytes) -> dict[str, Any]:
    """Return everything in a page: overview, selection, rows and the table of pieces."""
    inside = json.loads(element_of(page))
    rows = inside["rows"]
    blocks = [decompressed(block) for block in rows["blocks"]]
    return {
        **decompressed(inside["about"]),
        "rows": [row for block in blocks for row in block["rows"]],
        "table": {int(one): it for block in blocks for one, it in block["table"].items()},
        "images": decompressed(rows["images"]),
    }


def test_page_contains_every_row_of_the_store(store: Store, page_file: Path) -> None:
    data, tokenizer = data_of(page_file.read_bytes()), store.tokenizer
    assert sorted(row["row"] for row in data["rows"]) == list(range(len(store)))
    for found in data["rows"]:
        row = store[found["row"]]
        assert found["ids"] == row.input_ids.tolist()
        assert found["mask"] == row.loss_mask.tolist()
        assert found["turns"] == [list(turn) for turn in row.turns]
        assert found["origin"] == row.origin._asdict()
        assert (found["length"], found["trained"]) == (len(row), int(row.loss_mask.sum()))
        assert (found["extra"], found["group"]) == (row.extra, None)
    assert data["selection"] == f"This page contains all {len(store)} rows of the store."
    table = data["table"]
    assert set(table) == {int(token) for row in store for token in row.input_ids}
    assert [bytes.fromhex(piece) for piece, _ in table.values()] == tokenizer.pieces(table)
    assert [bool(special) for _, special in table.values()] == tokenizer.is_special(table).tolist()
    assert any(special for _, special in table.values())


def test_page_size_is_bounded_and_the_selection_is_described(made: Made, tmp_path: Path) -> None:
    target, most = tmp_path / "small.html", 150_000
    detail = make_page(made.store, target, cache_dir=str(made.cache), max_bytes=most)
    assert target.stat().st_size == detail["bytes"] <= most
    assert 0 < detail["rows_in_page"] < detail["rows"] == len(made.store)
    data = data_of(target.read_bytes())
    rows = [row["row"] for row in data["rows"]]
    assert len(rows) == detail["rows_in_page"]
    assert f"{len(rows)} of {len(made.store)} rows" in data["selection"]
    assert f"{len(rows)} of {len(made.store)} rows" in data["selection"]
    longest = np.argsort(-made.store.lengths, kind="stable")[:10]
    assert set(longest.tolist()) <= set(rows), "a sample begins with what people look for"


def test_page_of_a_rule_contains_its_rows(shell: Shell, made: Made, tmp_path: Path) -> None:
    target = tmp_path / "rule.html"
    detail = shell("inspect", made.store.path, "--html", target, "--rule", "shortest",
                 "--count", "7", "--cache-dir", made.cache, "--json").json  # fmt: skip
    assert detail["rows_in_page"] == 7
    lengths = sorted(row["length"] for row in data_of(target.read_bytes())["rows"])
    assert lengths == sorted(made.store.lengths)[:7]
    assert "by rule shortest" in detail["selection"]


def test_page_is_one_file_without_requests(page_file: Path) -> None:
    page = page_file.read_text("utf-8")
    outside = re.sub(r'<script type="application/json".*?</script>', "", page, flags=re.DOTALL)
    assert not re.search(r"""(src|href)=["']?(?!data:,)\w""", outside)
    assert "http" not in outside.replace("http-equiv", "")
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)
    assert policy is not None
    assert "default-src &#x27;none&#x27;" in policy[1]
    assert "unsafe" not in policy[1]
    assert "connect-src &#x27;none&#x27;" in policy[1]


def test_data_never_appears_as_markup(made: Made, page_file: Path) -> None:
    page = page_file.read_text("utf-8")
    assert page.count("<script") == page.count("</script>") == 2
    assert "window.hacked" in json.dumps(data_of(page_file.read_bytes())), "it is there as data"
    assert ATTACK not in page
    assert "<b>" not in page
    rejected = data_of(page_file.read_bytes())["overview"]["rejected"]["rows"]
    assert any(ATTACK in row["raw"]["text"] for row in rejected)


@given(st.text())
def test_data_in_a_page_has_only_harmless_characters(text: str) -> None:
    about = {"overview": {"name": "x", "text": text, text: 1}}
    inside = element_of(page(about, rows={"blocks": [compressed(text)]})).decode("ascii")
    assert re.fullmatch(r'[A-Za-z0-9+/={}":,_\[\]]*', inside)
    found = json.loads(inside)
    assert decompressed(found["about"]) == about
    assert decompressed(found["rows"]["blocks"][0]) == text


def test_page_replaces_only_a_page(made: Made, tmp_path: Path) -> None:
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
    document = overview(RowFacts(made.store), None)
    totals = document["totals"]
    for bins in (document["lengths"], document["shares"]):
        assert sum(one["rows"] for one in bins) == totals["rows"]
    assert sum(role["trained_tokens"] for role in document["roles"]) == totals["trained_tokens"]
    expected: dict[str, int] = dict.fromkeys((role["role"] for role in document["roles"]), 0)
    for row in made.store:
        for role, start, end in row.turns:
            expected[role] += int(row.loss_mask[start:end].sum())
    assert {role["role"]: role["trained_tokens"] for role in document["roles"]} == expected
    assert sum(source["rejected"] for source in document["sources"]) == 6
    for preview in document["packing"]["previews"]:
        assert sum(one["rows"] for one in preview["histogram"]) == preview["packs"]
        for pack in preview["drawn"]:
            assert sum(tokens for _, tokens in pack) <= preview["length"]


def test_store_without_rows_still_has_a_page(tmp_path: Path, shell: Shell) -> None:
    source = write_rows(tmp_path / "bad.jsonl", ["{"])
    path = shell("prepare", source, *QUICK, "--json").json["path"]
    detail = shell("inspect", path, "--html", tmp_path / "empty.html", "--json").json
    assert detail["rows_in_page"] == detail["rows"] == 0
