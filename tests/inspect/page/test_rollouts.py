"""Recorded rollouts on the page: drift classes, values of tokens, groups, charts over steps."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tokenmill as tm
from tests.build.making import INLINE, TOKENIZER, write_rows
from tests.cli.harness import Shell
from tests.inspect.page.browsing import Visit, go_to, title, wait_for_status, wait_for_title
from tests.inspect.page.conftest import ATTACK, STEERING, own_page_and_server
from tests.inspect.page.test_document import data_of
from tests.rl.faults import INJECTIONS, conversation
from tests.rl.simulated import APPENDING, appending
from tokenmill.inspect.page.document import MAX_STEPS, overview
from tokenmill.inspect.page.serve import Viewer
from tokenmill.inspect.row import MAX_GROUP_ROWS, RowFacts, RowGroups, findings_of
from tokenmill.rl.verdict import CLASSES
from tokenmill.store import Store

FAULTS = ("turn_missing", "sampled_text", "mask_misses_sampled", "retokenized")
STEPS, ANSWERS = 3, 4
HOSTILE = 2  # number of the group with a hostile name


@pytest.fixture(scope="module")
def store(directory: Path) -> Store:
    world, _ = appending()
    rows = []
    for number in range(2 * STEPS * ANSWERS):
        group = 2 * (number // (2 * ANSWERS)) + number % 2
        rng, own = random.Random(group), random.Random(number)
        messages = conversation(rng, tools=False, thoughts=False)
        closing = messages[-1]["content"] + f" {own.random()}"
        messages[-1] = {**messages[-1], "content": f"{closing} {ATTACK} {STEERING}"}
        row = world.sample(messages, None)
        assert row is not None
        if number % 5 == 3:
            injected = INJECTIONS[FAULTS[number // 5 % len(FAULTS)]](world, row, own)
            assert injected is not None
            row = injected.row
        # The same names come again in later steps.
        name: Any = {"g": [ATTACK, STEERING]} if group == HOSTILE else f"g{group % 2}"
        row["logprobs"] = [-own.expovariate(1) if bit else 0.0 for bit in row["loss_mask"]]
        row |= {"group": name, "step": group // 2, "reward": own.randrange(5) / 4}
        row |= {"advantage": own.gauss(0, 1)} if number != 7 else {}
        rows.append(row)
    source = write_rows(directory / "dump.jsonl", rows)
    made = tm.from_rollouts(
        str(source), tokenizer=str(TOKENIZER), chat_template=APPENDING,
        cache_dir=directory / "cache", **INLINE,
    )  # fmt: skip
    assert isinstance(made, Store)
    assert len(made) == len(rows)
    assert {row.extra["drift"] for row in made} == set(CLASSES)
    return made


directory, page_file, server = own_page_and_server("rollouts")


def members(store: Store, row: int) -> list[int]:
    key = [store[row].extra[name] for name in ("group", "step")]
    return [n for n, one in enumerate(store) if [one.extra["group"], one.extra["step"]] == key]


def findings(store: Store, row: int) -> list[dict[str, Any]]:
    return sorted(store[row].extra["findings"], key=lambda one: -CLASSES.index(one["class"]))


def broken(store: Store) -> int:
    """Return a row with a structural finding about a token that is not its first finding."""
    return next(
        n for n, row in enumerate(store)
        if any(one["class"] == "structure" and one["token"] for one in row.extra["findings"])
    )  # fmt: skip


def test_page_rows_equal_those_of_the_store(store: Store, page_file: Path) -> None:
    viewer = Viewer(store)
    listed = viewer.rows({"count": "500"})["rows"]
    for found in data_of(page_file.read_bytes())["rows"]:
        number = found["row"]
        extra, asked = store[number].extra, viewer.row({"number": str(number)})
        assert found["drift"] == extra["drift"] == asked["drift"]
        assert listed[number]["drift"] == extra["drift"]
        numbers = {name: extra[name] for name in ("reward", "advantage", "step")}
        assert found["numbers"] == asked["numbers"] == listed[number]["numbers"] == numbers
        assert found["findings"] == asked["findings"] == findings(store, number)
        assert not {"drift", "findings", "version"} & set(found["extra"])
        assert asked["group"]["rows"] == members(store, number)


def test_queries_by_class_and_number(store: Store) -> None:
    viewer = Viewer(store)
    extra = [row.extra for row in store]

    def found(**given: str) -> list[int]:
        return [row["row"] for row in viewer.rows({"count": "500", **given})["rows"]]

    everything = range(len(store))
    for name in CLASSES:
        wanted = [n for n in everything if extra[n]["drift"] == name]
        assert found(where=f"extra.drift == {name!r}") == wanted
    between = [n for n in everything if 0.25 <= extra[n]["reward"] <= 0.5]
    assert found(where='extra["reward"] >= 0.25 and extra["reward"] <= 0.5') == between
    # Python's sort is the oracle; a row without the number comes last, whichever way.
    known = [n for n in everything if extra[n]["advantage"] is not None]
    falling = sorted(known, key=lambda n: -extra[n]["advantage"])
    assert found(order="highest:advantage") == [*falling, 7]
    assert found(order="lowest:advantage") == [*falling[::-1], 7]
    graver = sorted(everything, key=lambda n: -CLASSES.index(extra[n]["drift"]))
    assert found(order="drift") == graver
    for bad in ({"order": "highest:odd"}, {"where": "odd > 1"}, {"where": "length <"}):
        with pytest.raises(tm.errors.UsageError, match=r"odd|length"):
            viewer.rows(bad)


def test_filters_and_orders_in_the_list(visit: Visit, address: str, store: Store) -> None:
    page = visit(address)
    extra = [row.extra for row in store]

    def shown(rows: int) -> list[int]:
        page.wait_for_function(
            "rows => document.querySelectorAll('#list .item[data-row]').length === rows", arg=rows
        )
        numbers: list[int] = page.eval_on_selector_all(
            "#list .item", "all => all.map((one) => Number(one.dataset.row))"
        )
        return numbers

    page.click("#more summary")
    page.select_option("#drift", "structure")
    wanted = [n for n, one in enumerate(extra) if one["drift"] == "structure"]
    assert shown(len(wanted)) == wanted
    assert page.inner_text("#list .item .drift") == "structure"
    page.select_option("#drift", "")
    page.select_option("#number", "step")
    page.fill("#number-least", "1")
    page.fill("#number-most", "1")
    page.select_option("#order", "highest:reward")
    wanted = [n for n, one in enumerate(extra) if one["step"] == 1]
    wanted.sort(key=lambda n: -extra[n]["reward"])
    assert shown(len(wanted)) == wanted
    chips = page.eval_on_selector_all("#list .chip", "all => all.map((one) => one.textContent)")
    assert chips[:2] == [f"reward {extra[wanted[0]]['reward']:g}", "step 1"]


def test_tokens_are_coloured_by_sidecar_values(visit: Visit, on_disk: str, store: Store) -> None:
    page = visit(on_disk)
    row = 0
    go_to(page, row, page_title(store, row))
    page.uncheck("#look-group")
    labels = page.eval_on_selector_all(".toolbar .choices span", "all => all.map(e => e.innerText)")
    assert labels == ["role and loss", "role", "loss", "logprobs"]
    page.check("input[value='value:logprobs']", force=True)
    page.wait_for_selector("#row-body .colour-value .tok.heat")
    scale = overview(RowFacts(store), None)["scales"][0]
    detail = [page.inner_text(f".legend .scale-{end}") for end in ("low", "high")]
    assert detail == [f"−{-scale['low']:g} or less", "0"]
    heats = page.evaluate(
        """() => [...document.querySelectorAll("#row-body section.turn .tok")].map((one) =>
          [one.classList.contains("heat"), Number(one.style.getPropertyValue("--heat"))])"""
    )
    values, mask = store.sidecar("logprobs")[row], store[row].loss_mask
    assert [coloured for coloured, _ in heats] == (mask == 1).tolist()
    expected = np.clip(values / scale["low"], 0, 1)
    assert np.allclose([share for _, share in heats], np.where(mask == 1, expected, 0), atol=1e-3)
    # Seen by eyes that see no colour: the scale runs in lightness, whichever the scheme.
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        lightness = page.eval_on_selector_all(
            ".ramp i",
            """all => all.map((one) =>
              Number(/oklch\\(([\\d.]+)/.exec(getComputedStyle(one).backgroundColor)[1]))""",
        )
        assert lightness == sorted(lightness, reverse=scheme == "dark")
        assert abs(lightness[0] - lightness[-1]) > 0.2


def test_findings_lead_to_their_tokens(visit: Visit, on_disk: str, store: Store) -> None:
    page = visit(on_disk)
    row = broken(store)
    go_to(page, row, page_title(store, row))
    page.uncheck("#look-group")
    wait_for_title(page, f"Row {row}")
    page.click("#fold")
    expected = findings(store, row)
    items = page.query_selector_all(".row-head .finding-item")
    for item, one in zip(items, expected, strict=True):
        assert item.query_selector(".drift").inner_text() == one["class"]
        assert f"token {one['token']}" in item.inner_text()
        texts = [code.inner_text() for code in item.query_selector_all("code")]
        assert texts == [
            one[side].replace("\n", "⏎") for side in ("expected", "found") if one[side]
        ]
        item.click()
        marked = page.eval_on_selector_all("#view .tok.shown", "all => all.map(e => e.dataset.at)")
        assert marked == [str(one["token"])]
        assert page.is_visible(".tok.shown")
    marked = page.eval_on_selector_all(
        "#row-body .tok.finding", "all => all.map((one) => Number(one.dataset.at))"
    )
    assert marked == sorted({one["token"] for one in expected})


def page_title(store: Store, row: int) -> str:
    extra = store[row].extra
    return f"Group {extra['group']} at step {extra['step']}"


def test_answers_of_a_recorded_group_side_by_side(visit: Visit, address: str, store: Store) -> None:
    page = visit(address)
    row = 1
    together = members(store, row)
    assert len(together) == ANSWERS
    assert together != list(range(together[0], together[-1] + 1))  # not one after another
    go_to(page, row, page_title(store, row))
    sides = page.query_selector_all("#row-body .side")
    for side, number in zip(sides, together, strict=True):
        extra = store[number].extra
        detail = side.inner_text()
        assert f"row {number}" in detail
        assert side.query_selector(".drift").inner_text() == extra["drift"]
        assert side.query_selector(".chip").inner_text() == f"reward {extra['reward']:g}"
        assert ("advantage" in detail) == (extra["advantage"] is not None)
    # The prompt stands once: what all have in common before anything was sampled.
    ids = [store[n].input_ids.tolist() for n in together]
    first = min(int(np.argmax(store[n].loss_mask)) for n in together)
    common = next((i for i in range(first) if len({one[i] for one in ids}) > 1), first)
    assert len(page.query_selector_all("#prompt section.turn .tok")) == common > 0


def test_hostile_names_and_findings_are_text(visit: Visit, on_disk: str, store: Store) -> None:
    page = visit(on_disk)
    row = next(n for n, one in enumerate(store) if isinstance(one.extra["group"], dict))
    name = json.dumps(store[row].extra["group"])[:80]
    page.fill("#jump", str(row))
    page.press("#jump", "Enter")
    page.wait_for_function(
        "() => document.getElementById('row-title').textContent.includes('script')"
    )
    assert title(page).startswith("Group " + name[:20])
    assert page.query_selector("#view img") is None
    listed = page.inner_text(f"#list .item[data-row='{row}'] .where")
    assert name[:12] in listed
    place, line = (page.query_selector(f"#list .item[data-row='{row}'] {one}").bounding_box()
                   for one in (".where", ".line"))  # fmt: skip
    assert line["x"] + line["width"] <= place["x"] + place["width"] + 1


def test_overview_over_steps(visit: Visit, on_disk: str, store: Store) -> None:
    page = visit(on_disk)
    page.click("#tab-overview")
    assert len(page.query_selector_all("#steps-reward .column")) == STEPS
    extra = [row.extra for row in store]
    here = [one for one in extra if one["step"] == 2]
    middle = np.median([one["reward"] for one in here])
    label = page.get_attribute("#steps-reward .column >> nth=2", "aria-label")
    assert label.startswith(f"step 2: median {middle:.3g},")
    assert label.endswith(f"{len(here)} rows")
    drift = here[-1]["drift"]
    page.click(f"#steps-drift .column:nth-child(3) .drift-{drift}")
    wanted = sum(one["drift"] == drift for one in here)
    wait_for_status(page, f"{wanted} row{'' if wanted == 1 else 's'} of {len(store)}")
    page.click("#tab-overview")
    page.click("#steps-length .column >> nth=0")
    wanted = sum(one["step"] == 0 for one in extra)
    wait_for_status(page, f"{wanted} rows of {len(store)}")


def test_terminal_shows_drift_class_and_findings(store: Store, shell: Shell) -> None:
    row = broken(store)
    said = shell("inspect", store.path, "--row", str(row), "--values", "logprobs").out
    assert "drift: structure" in said
    one = findings(store, row)[0]
    assert f"{one['kind']}  turn {one['turn']}, token {one['token']}" in said
    assert said.count("\nreward: ") == 1
    assert "version" not in said  # was not recorded
    assert "\x1b" not in said


def test_many_steps_and_large_groups_are_bounded(store: Store) -> None:
    facts = RowFacts(store)
    facts.__dict__["numbers"] = {
        "step": np.arange(len(store)) * 1.0,
        "reward": np.array([np.nan, *range(1, len(store))]),
    }
    steps = overview(facts, None, max_steps=5)["steps"]
    assert MAX_STEPS <= 60
    assert (len(steps["bins"]), steps["steps"]) == (5, len(store))
    assert sum(one["rows"] for one in steps["bins"]) == len(store)
    assert steps["bins"][0]["from"] == 0
    assert steps["bins"][0]["reward"][2] == np.median(range(1, steps["bins"][0]["rows"]))
    rows = MAX_GROUP_ROWS + 1
    names = ['"all"'] * rows + ['"two"', "null", '"two"', "null"]
    groups = RowGroups.recorded(names, ["1"] * len(names))
    assert groups.members(int(groups.group_of[0])).tolist() == []
    assert groups.with_groups(np.array([rows + 2, 3, rows + 1])).tolist() == [
        rows,
        rows + 2,
        3,
        rows + 1,
    ]


def test_malformed_findings_are_ignored() -> None:
    odd = [7, {"class": "odd", "token": -1, "turn": True, "expected": 5}, {"class": "structure"}]
    none = {"kind": "", "expected": "", "found": "", "detail": "", "turn": None, "token": None}
    detail = [{"class": "structure", **none}, {"class": None, **none}]
    assert findings_of({"findings": odd}) == detail
    assert findings_of({"findings": "text"}) == findings_of({}) == []
    long = findings_of({"findings": [{"class": "text", "found": "x" * 10_000}] * 1000})
    assert len(json.dumps(long)) < 40 * 600
