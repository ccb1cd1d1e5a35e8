"""Groups from the source to the store: whole, accounted for, and split at the right token."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.build.making import WORDS, conversations, files_of, prepare, run, small_cuts, write_rows
from tokenmill.build.pipeline import group_columns
from tokenmill.chat.render import GroupFacts
from tokenmill.store import Group
from tokenmill.tokenizers.encoded import Encoded


def said(rng: random.Random, most: int = 12) -> str:
    return " ".join(rng.choices(WORDS, k=rng.randint(1, most))) + "."


def pair(number: int) -> dict[str, Any]:
    rng = random.Random(number)
    asked = f"{number}: {said(rng)}"
    chosen, rejected = f"yes {said(rng)}", f"no {said(rng)}"
    row: dict[str, Any] = {"id": number, "prompt": asked + " " * (number % 2), "chosen": chosen,
                           "rejected": rejected}  # fmt: skip
    if number % 3:
        with_generation_prompt = {"role": "user", "content": asked}
        row["prompt"] = [with_generation_prompt]
        row |= {k: [{"role": "assistant", "content": row[k]}] for k in ("chosen", "rejected")}
        if number % 3 == 2:
            del row["prompt"]
            row |= {k: [with_generation_prompt, *row[k]] for k in ("chosen", "rejected")}
    if number % 5 == 0:
        row["margin"] = number / 8
    if number % 7 == 0:
        row |= {"score_chosen": number, "score_rejected": -number / 4}
    return row


def ranked(number: int) -> dict[str, Any]:
    rng = random.Random(number)
    answers = [f"{place} {said(rng)}" for place in range(rng.randint(2, 5))]
    row: dict[str, Any] = {"prompt": f"{number}: {said(rng)} ", "responses": answers}
    if number % 2:
        row["scores"] = [rng.randint(0, 9) for _ in answers]
    return row


def kto(number: int) -> dict[str, Any]:
    rng = random.Random(number)
    return {"prompt": f"{number}: {said(rng)} ", "completion": said(rng), "label": number % 3 == 0}


def sides(row: dict[str, Any]) -> list[dict[str, Any]]:
    found = []
    for name in ("chosen", "rejected"):
        prompt, answer = row.get("prompt"), row[name]
        if prompt is None:
            prompt, answer = answer[:-1], answer[-1:]
        found.append({"prompt": prompt, "completion": answer})
    return found


def shared_prefix(rows: list[tuple[Any, Any]]) -> int:
    """How many tokens all rows, of ids and masks, share and none trains."""
    tokens = zip(*(zip(ids, mask, strict=True) for ids, mask in rows), strict=False)
    same = itertools.takewhile(lambda all_: len(set(all_)) == 1 and not all_[0][1], tokens)
    return sum(1 for _ in same)


def parting(group: Group) -> int:
    return shared_prefix([(row.input_ids, row.loss_mask) for row in group.rows])


@pytest.fixture
def pairs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    small_cuts(monkeypatch)
    return write_rows(tmp_path / "pairs.jsonl", map(pair, range(120)))


def test_sides_are_the_rows_that_they_would_be_alone(pairs: Path, tmp_path: Path) -> None:
    rows = [pair(number) for number in range(120)]
    store = prepare(pairs)
    alone = prepare(write_rows(tmp_path / "s.jsonl", [side for row in rows for side in sides(row)]))
    assert len(store) == len(alone) == 240
    assert len(store.groups) == 120
    for ours, other in zip(store, alone, strict=True):
        assert ours.input_ids.tolist() == other.input_ids.tolist()
        assert ours.loss_mask.tolist() == other.loss_mask.tolist()
        assert ours.turns == other.turns
    for number, group in enumerate(store.groups):
        assert [row.part for row in group.rows] == [0, 1]
        assert {row.origin.row for row in group.rows} == {number}
        assert group.labels == (True, False)
        assert group.margin == rows[number].get("margin")
        expected = (number, -number / 4) if number % 7 == 0 else None
        assert group.scores == expected
        assert group.prompt_tokens == parting(group) > 0
    assert store.manifest["totals"]["groups"] == {
        "preference": 120, "kto": 0, "ranked": 0, "single": 0, "margins": 24, "scores": 18,
    }  # fmt: skip
    assert store.verify()


def test_groups_of_any_size_and_kind_follow_each_other(tmp_path: Path) -> None:
    rows = [make(n) for n in range(40) for make in (kto, ranked, pair)]
    plain = conversations(3)
    store = prepare(write_rows(tmp_path / "all.jsonl", [*rows, *plain]))
    groups = store.groups
    assert len(groups) == 123
    assert groups[-1].rows[0].origin.row == 122
    for row, group in zip([*rows, *plain], groups, strict=True):
        if "responses" in row:
            scores = row.get("scores")
            assert len(group) == len(row["responses"])
            assert group.labels is None
            assert group.scores == (scores and tuple(sorted(scores, reverse=True)))
        elif "label" in row:
            assert (group.labels, len(group)) == ((row["label"],), 1)
        elif "messages" in row:
            assert (group.labels, group.prompt_tokens, len(group)) == (None, None, 1)
            continue
        assert group.prompt_tokens == parting(group)
    assert sum(map(len, groups)) == len(store)
    with pytest.raises(IndexError, match="group 123 is out of range: there are 123"):
        groups[123]
    counts = store.manifest["totals"]["groups"]
    assert [counts[kind] for kind in ("kto", "ranked", "preference", "single")] == [40, 40, 40, 3]


def test_rows_without_groups_have_none(tmp_path: Path) -> None:
    store = prepare(write_rows(tmp_path / "chat.jsonl", conversations(4)))
    assert len(store.groups) == 0
    assert list(store.groups) == []
    assert "groups" not in store.manifest["totals"]
    assert store[0].label is None
    assert store[0].prompt_tokens is None


def test_a_group_is_one_row_of_the_account(tmp_path: Path) -> None:
    long = {**pair(1), "rejected": [{"role": "assistant", "content": "no " * 400}]}
    bad = [{"prompt": "x", "chosen": "a", "rejected": ""}, "{", long]
    source = write_rows(tmp_path / "p.jsonl", [pair(0), *bad, pair(2)])
    store = prepare(source, max_length=200)
    totals = store.manifest["totals"]
    assert (totals["rows_in"], totals["rows"], totals["source_rows"]) == (5, 4, 5)
    assert store.rejected == {"bad_group": 1, "bad_json": 1, "overlong": 1}
    assert [(o.line, why) for o, why, _ in store.rejected_rows()] == [
        (2, "bad_group"), (3, "bad_json"), (4, "overlong"),
    ]  # fmt: skip
    summary = run(source, max_length=200).summary()
    assert summary["rows_out"] == 2
    assert summary["rows_in"] == summary["rows_out"] + sum(summary["rejected"].values())


@pytest.mark.parametrize("overlong", ["drop", "truncate"])
def test_another_limit_gives_what_a_build_gives(pairs: Path, tmp_path: Path, overlong: str) -> None:
    limits: dict[str, Any] = {"max_length": 64, "overlong": overlong}
    prepare(pairs, cache_dir=tmp_path / "a")
    derived = prepare(pairs, cache_dir=tmp_path / "a", **limits)
    built = prepare(pairs, cache_dir=tmp_path / "b", reference=True, **limits)
    assert files_of(tmp_path / "a", "slices") == files_of(tmp_path / "b", "slices")
    assert derived.key == built.key
    assert 0 < len(built.groups) <= 120
    assert len(built.groups) < 120 or overlong == "truncate"
    assert max(built.lengths) <= 64
    for group in built.groups:
        assert len(group) == 2
        assert group.prompt_tokens == parting(group)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=6), st.integers(0, 5)),
                min_size=1, max_size=4))  # fmt: skip
def test_answers_part_where_tokens_or_training_say_so(rows: list[tuple[list[int], int]]) -> None:
    starts = np.cumsum([0, *(len(ids) for ids, _ in rows)])
    masks = [[int(n >= min(first, len(ids) - 1)) for n in range(len(ids))] for ids, first in rows]
    flat = np.array([token for ids, _ in rows for token in ids], np.int32)
    mask = np.array([trained for row in masks for trained in row], np.uint8)
    turns = np.zeros(len(rows) + 1, np.int64)
    encoded = Encoded(flat, starts, mask, np.zeros(0, np.int32), turns)
    facts = GroupFacts((-1,) * len(rows), None, None, one_prompt=True)
    shared = shared_prefix([(ids, own) for (ids, _), own in zip(rows, masks, strict=True)])
    assert set(group_columns(encoded, {0: facts}).prompt_tokens.tolist()) == {shared}
    other = replace(facts, one_prompt=False)
    assert set(group_columns(encoded, {0: other}).prompt_tokens.tolist()) == {-1}
