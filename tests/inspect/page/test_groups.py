"""Groups on the page: never split, and answers side by side after the common prompt."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tokenmill as tm
from tests.build.making import INLINE, TOKENIZER, conversations, write_rows
from tests.build.test_groups import kto, pair, ranked
from tests.cli.harness import Shell
from tests.inspect.page.browsing import Visit, go_to, tokens, wait_for_title
from tests.inspect.page.conftest import own_page_and_server
from tests.inspect.page.test_document import data_of, decompressed
from tokenmill.inspect.page.document import embed, make_page, select_rows
from tokenmill.inspect.page.serve import Viewer
from tokenmill.inspect.row import RowFacts
from tokenmill.store import Group, Store

PAIR, KTO, RANKED = 0, 1, 2  # numbers of groups


@pytest.fixture(scope="module")
def store(directory: Path) -> Store:
    rows = [make(number) for number in range(35, 65) for make in (pair, kto, ranked)]
    write_rows(directory / "rows.jsonl", rows)
    write_rows(directory / "chat.jsonl", conversations(3))
    sources = [str(directory / "rows.jsonl"), str(directory / "chat.jsonl")]
    return tm.prepare(sources, str(TOKENIZER), cache_dir=directory / "cache", **INLINE)


directory, page_file, _ = own_page_and_server("groups")


@pytest.fixture(scope="module")
def members(store: Store) -> list[list[int]]:
    ends = np.cumsum([len(group) for group in store.groups]).tolist()
    return [list(range(a, b)) for a, b in zip([0, *ends], ends, strict=False)]


def names(group: Group) -> list[str]:
    if group.labels is None:
        return [f"rank {n + 1}" for n in range(len(group))] if len(group) > 1 else [""]
    kinds = ("rejected", "chosen") if len(group) == 2 else ("unwanted", "wanted")
    return [kinds[label] for label in group.labels]


def detail(number: float | None) -> str | None:
    return None if number is None else f"{number:g}"


def test_every_row_has_its_group_and_answer(
    store: Store, members: list[list[int]], page_file: Path
) -> None:
    expected = [
        {"number": number, "rows": rows, "name": None, "answer": names(group)[place],
         "score": detail(group.scores[place] if group.scores else None),
         "margin": detail(group.margin), "prompt_tokens": group.prompt_tokens}
        for number, (rows, group) in enumerate(zip(members, store.groups, strict=True))
        for place in range(len(rows))
    ]  # fmt: skip
    assert {one["answer"] for one in expected} > {"chosen", "rejected", "wanted", "rank 3", ""}
    assert any(one["margin"] for one in expected)
    embedded = {row["row"]: row["group"] for row in data_of(page_file.read_bytes())["rows"]}
    assert embedded == dict(enumerate(expected))
    viewer = Viewer(store)
    assert [viewer.row({"number": str(n)})["group"] for n in (0, 1, 5)] == [
        expected[n] for n in (0, 1, 5)
    ]
    listed = viewer.rows({"count": "500", "order": "longest"})["rows"]
    assert len(listed) == len(store)
    assert all(line["group"] == expected[line["row"]] for line in listed)


CHOICES = st.one_of(
    st.fixed_dictionaries({"rows": st.lists(st.integers(0, 150), min_size=1, max_size=9)}),
    st.fixed_dictionaries({"rule": st.sampled_from(["longest", "shortest", "random"])}),
    st.just({}),
)


@given(CHOICES, st.one_of(st.none(), st.integers(1, 60)), st.integers(3_000, 30_000))
def test_groups_are_never_split(
    store: Store, members: list[list[int]], choice: dict[str, Any], count: int | None, most: int
) -> None:
    facts = RowFacts(store)
    wanted, _ = select_rows(facts, count=count, seed=3, **choice)
    rows, blocks = embed(facts, wanted, most)
    assert rows == wanted[: len(rows)].tolist()
    assert len(rows) == len(set(rows))
    at = 0
    while at < len(rows):  # group after group, each from its first row to its last
        whole = next(one for one in members if rows[at] == one[0])
        assert rows[at : at + len(whole)] == whole
        at += len(whole)
    # The first group is complete, even if fewer rows are requested.
    assert count is None or len(rows) <= max(count, 5)
    assert len(json.dumps(blocks)) <= most + 2
    held = [row["row"] for block in blocks for row in decompressed(block)["rows"]]
    assert held == rows


def test_page_of_one_group_and_of_one_of_its_rows(
    shell: Shell, store: Store, members: list[list[int]], tmp_path: Path
) -> None:
    expected = members[RANKED]
    target = tmp_path / "one.html"
    for flags in (("--group", str(RANKED)), ("--row", str(expected[-1])), ("--group", "-91")):
        answer = shell("inspect", store.path, "--html", target, *flags, "--json").json
        assert [row["row"] for row in data_of(target.read_bytes())["rows"]] == expected
        assert "the requested rows, each with its whole group" in answer["selection"]
    assert shell("inspect", store.path, "--html", target, "--group", "93").code == 2


def stored(store: Store, row: int, first: int, last: int | None) -> list[list[Any]]:
    ids, mask = store[row].input_ids.tolist(), (store[row].loss_mask == 1).tolist()
    whole = [[one, mask[at], at] for at, one in enumerate(ids)]
    return whole[first:last]


def test_prompt_is_shown_once_and_answers_side_by_side(
    visit: Visit, on_disk: str, store: Store, members: list[list[int]]
) -> None:
    page = visit(on_disk)
    page.check("#look-ids")
    for number in (PAIR, RANKED, 6):  # with scores and margin, or without
        group, rows = store.groups[number], members[number]
        assert len(group) > 1
        go_to(page, rows[-1], f"Group {number}")
        parting = group.prompt_tokens
        assert parting
        assert tokens(page, "#prompt") == stored(store, rows[0], 0, parting)
        sides = page.query_selector_all("#row-body .side")
        assert [side.query_selector("h3").inner_text() for side in sides] == names(group)
        for place, row in enumerate(rows):
            shown = tokens(page, f"#row-body .side:nth-child({place + 1})")
            assert shown == stored(store, row, parting, None)
            facts = sides[place].query_selector_all(".facts span")
            expected = [f"row {row}", f"{len(store[row])} tokens", f"{store.trained[row]} trained"]
            if group.scores is not None:
                expected.append(f"score {group.scores[place]:g}")
            assert [fact.inner_text() for fact in facts] == expected
        margin = page.query_selector(".row-head .margin")
        assert (margin and margin.inner_text()) == (
            None if group.margin is None else f"margin {group.margin:g}"
        )
    ids = page.eval_on_selector_all("#view [id]", "all => all.map((one) => one.id)")
    assert len(ids) == len(set(ids))


def test_rows_are_shown_completely_if_their_prompts_differ(visit: Visit, tmp_path: Path) -> None:
    asked, yes = {"role": "user", "content": "A tree?"}, {"role": "assistant", "content": "Yes."}
    row = {"prompt": [asked], "chosen": [yes], "rejected": [{**yes, "content": "No."}, asked, yes]}
    source = write_rows(tmp_path / "rows.jsonl", [row])
    counting = (
        "{{ messages|length }} turns\n{% for one in messages %}<|im_start|>{{ one.role }}\n"
        "{{ one.content }}<|im_end|>\n{% endfor %}"
    )
    store = tm.prepare(
        str(source), str(TOKENIZER), chat_template=counting, cache_dir=tmp_path / "cache", **INLINE
    )
    assert store.groups[0].prompt_tokens is None
    make_page(store, tmp_path / "page.html")
    page = visit((tmp_path / "page.html").as_uri())
    page.check("#look-ids")
    wait_for_title(page, "Group 0")
    assert page.query_selector("#prompt") is None
    assert "rendered differently" in page.inner_text("#row-body .note")
    for row_number in (0, 1):
        shown = tokens(page, f"#row-body .side:nth-child({row_number + 1})")
        assert shown == stored(store, row_number, 0, None)


def test_previous_and_next_go_from_group_to_group(
    visit: Visit, on_disk: str, store: Store, members: list[list[int]]
) -> None:
    page = visit(on_disk)
    wait_for_title(page, "Group 0")
    for title in (f"Row {members[KTO][0]}", "Group 2", "Group 3"):
        page.keyboard.press("j")
        wait_for_title(page, title)
    page.click("text=↑ previous")
    wait_for_title(page, "Group 2")
    page.keyboard.press("k")
    wait_for_title(page, f"Row {members[KTO][0]}")
    label = store.groups[KTO].labels
    assert label is not None
    shown = page.inner_text(".row-head .title .muted")
    assert shown == f"group 1, {'wanted' if label[0] else 'unwanted'}"


def test_list_names_the_group_and_a_row_can_be_shown_alone(
    visit: Visit, on_disk: str, store: Store
) -> None:
    page = visit(on_disk)
    page.wait_for_selector("#item-1 .where")
    answers = [(0, "chosen"), (0, "rejected"), (1, names(store.groups[KTO])[0]), (2, "rank 1")]
    for item, (number, answer) in enumerate(answers):
        where = page.inner_text(f"#item-{item} .where").replace("\n", "")  # three boxes
        assert where == f"group {number}, {answer} · rows.jsonl:{number + 1}"
    page.check("#look-ids")
    go_to(page, 0, f"Group {PAIR}")
    page.uncheck("#look-group")
    for row, answer in enumerate(("chosen", "rejected")):
        wait_for_title(page, f"Row {row}")
        assert tokens(page) == stored(store, row, 0, None)
        assert page.inner_text(".row-head .title .muted") == f"group 0, {answer}"
        page.keyboard.press("j")


def test_answers_need_no_sideways_scrolling(
    visit: Visit, on_disk: str, members: list[list[int]]
) -> None:
    page = visit(on_disk, viewport={"width": 360, "height": 740})
    go_to(page, members[RANKED][0], f"Group {RANKED}")
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    beyond = page.eval_on_selector("#view", "view => view.scrollWidth - view.clientWidth")
    assert beyond <= 0
