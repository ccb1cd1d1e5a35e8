"""Rows by number, origin and rule, in the terminal and as JSON."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.cli.harness import Shell
from tests.inspect.page.conftest import Made
from tokenmill.errors import UsageError
from tokenmill.inspect.row import SourceExcerpts, rows_at_address, rows_by_rule
from tokenmill.store import Store


def test_rules_select_the_right_rows(store: Store) -> None:
    lengths, shares = store.lengths, store.trained / store.lengths
    assert np.all((shares > 0) & (shares < 1))
    assert [lengths[n] for n in rows_by_rule(store, "longest", 9)] == sorted(lengths)[:-10:-1]
    assert [lengths[n] for n in rows_by_rule(store, "shortest", 9)] == sorted(lengths)[:9]
    assert [shares[n] for n in rows_by_rule(store, "least-trained", 9)] == sorted(shares)[:9]


def test_random_rows_are_a_function_of_the_seed(store: Store) -> None:
    drawn = rows_by_rule(store, "random", len(store), 7)
    assert sorted(drawn) == list(range(len(store)))
    assert rows_by_rule(store, "random", 5, 7) == drawn[:5]
    assert rows_by_rule(store, "random", 5, 8) != drawn[:5]


def test_every_origin_leads_back_to_its_row(store: Store) -> None:
    for number in range(0, len(store), 17):
        origin = store[number].origin
        name = Path(origin.path or "").name
        assert rows_at_address(store, str(origin)) == ([number], [])
        assert rows_at_address(store, f"{name}:{origin.line}") == ([number], [])
        assert rows_at_address(store, f"{name}#{origin.row}") == ([number], [])


def test_origin_of_a_rejected_row_shows_why(shell: Shell, made: Made) -> None:
    answer = shell("inspect", made.store.path, "--origin", "dirty.jsonl:3",
                   "--cache-dir", made.cache)  # fmt: skip
    assert answer.code == 0
    assert "bad_shape" in answer.out
    assert "Is·101·prime?" in answer.out


@pytest.mark.parametrize("address", ["dirty.jsonl", "none.jsonl:1", "dirty.jsonl:999", ":3"])
def test_unknown_address_is_a_usage_error(store: Store, address: str) -> None:
    with pytest.raises(UsageError):
        rows_at_address(store, address)


def test_json_of_a_rule_keeps_the_keys_of_a_row(shell: Shell, made: Made) -> None:
    answer = shell("inspect", made.store.path, "--rule", "longest", "--count", "3", "--json").json
    longest = rows_by_rule(made.store, "longest", 3)
    assert [row["row"] for row in answer["rows"]] == longest
    assert answer["row"] == longest[0]
    assert answer["ids"] == made.store[longest[0]].input_ids.tolist()
    assert {"ids", "pieces", "mask", "turns", "origin"} <= set(answer)


def test_rejected_rows_are_listed_with_origin_reason_and_bytes(shell: Shell, made: Made) -> None:
    answer = shell("inspect", made.store.path, "--rule", "rejected", "--json",
                   "--cache-dir", made.cache).json  # fmt: skip
    expected = list(made.store.rejected_rows())
    assert answer["total"] == len(expected) == 6
    for found, (origin, reason, detail) in zip(answer["rows"], expected, strict=True):
        assert found["origin"] == origin._asdict()
        assert (found["reason"], found["detail"]) == (reason, detail)
        raw = Path(origin.path or "").read_bytes()
        assert found["raw"]["text"].encode() == raw[origin.offset :][: origin.length]


@pytest.mark.parametrize(
    "flags",
    ["--row 1 --rule longest", "--rule prettiest", "--html x.html --serve", "--compare x",
     "--serve --row 1", "--row 100000", "--html x.html --rule rejected"],
)  # fmt: skip
def test_contradictory_options_are_a_usage_error(
    shell: Shell, made: Made, flags: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    answer = shell("inspect", made.store.path, *flags.split(), "--json")
    assert answer.code == 2
    assert answer.error["type"] == "UsageError"
    assert not (tmp_path / "x.html").exists()


def test_excerpt_of_a_changed_source_is_a_note_and_no_text(made: Made, tmp_path: Path) -> None:
    origin = made.store[0].origin
    moved = tmp_path / "moved.jsonl"
    raws = SourceExcerpts(made.store, str(made.cache))
    assert json.loads(raws.excerpt(origin)["text"])["id"] == "example-0000"
    moved.write_text('{"id": 1}\n{"id": 2}\n')
    changed = raws.excerpt(origin._replace(path=str(moved)))
    assert changed["text"] is None
    assert "changed" in changed["note"]
    gone = raws.excerpt(origin._replace(path=str(tmp_path / "gone.jsonl")))
    assert gone["text"] is None
    assert "not on this machine" in gone["note"]
    assert raws.excerpt(origin, 10)["cut"] == origin.length - 10


def test_store_cannot_reveal_other_files_of_this_machine(made: Made, tmp_path: Path) -> None:
    """Offset and length of a row can be guessed, for example those of a private key's lines."""
    origin = made.store[0].origin
    secret = tmp_path / "secret.jsonl"
    line = "s" * origin.length
    secret.write_text(f"{line}\n{line}\n")
    shown = SourceExcerpts(made.store, str(made.cache)).excerpt(origin._replace(path=str(secret)))
    assert shown["text"] is None
    assert "not shown" in shown["note"]
