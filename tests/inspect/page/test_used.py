"""The page in a real browser, from disk and from the server: what users can do."""

from __future__ import annotations

import json
import re
from pathlib import Path

from tests.inspect.page.browsing import Visit, go_to, title, wait_for_status, wait_for_title
from tests.inspect.page.conftest import Made
from tokenmill.store import Store


def test_search_finds_a_row_and_enter_opens_it(
    visit: Visit, address: str, store: Store, made: Made
) -> None:
    page = visit(address)
    page.keyboard.press("/")
    page.keyboard.type("what causes the TIDES")
    lines = (made.directory / "conversations.jsonl").read_text("utf-8").splitlines()
    expected = [n for n, line in enumerate(lines) if "What causes the tides" in line]
    # What was typed so far is searched for, too, where typing is slow: the last search counts.
    status = f"{len(expected)} rows of {len(store)}".replace("1 rows", "1 row")
    page.wait_for_function(
        """([status, rows]) => document.getElementById('status').textContent === status
        && String([...document.querySelectorAll('.item')].map((item) => item.dataset.row))
        === rows""",
        arg=[status, ",".join(map(str, expected))],
    )
    page.keyboard.press("Enter")
    page.wait_for_function("() => document.getElementById('row-title').textContent !== 'Row 0'")
    assert title(page) == f"Row {expected[0]}"
    assert f"conversations.jsonl:{expected[0] + 1}" in page.inner_text(".row-head .origin")


def test_rejected_row_leads_to_its_origin(visit: Visit, address: str, made: Made) -> None:
    page = visit(address)
    page.click("#tab-rejected")
    page.wait_for_selector(".rejected-row")
    rejected = list(made.store.rejected_rows())
    rows = page.query_selector_all(".rejected-row")
    assert len(rows) == len(rejected)
    for item, (origin, reason, detail) in zip(rows, rejected, strict=True):
        item.query_selector("summary").click()
        item.wait_for_selector(".raw")
        facts = item.query_selector(".origin-facts").inner_text()
        assert str(origin.path) in facts
        assert f"\n{origin.line}\n" in facts
        assert item.query_selector(".reason").inner_text() == reason
        assert detail in item.query_selector(".detail").text_content()
        raw = Path(origin.path or "").read_bytes()[origin.offset :][: origin.length]
        assert item.query_selector(".raw").text_content() == raw.decode()
    page.check("input[name=Reason][value=bad_shape]")
    page.wait_for_function("() => document.querySelectorAll('.rejected-row').length === 1")


def test_keyboard_alone_reaches_everything(visit: Visit, on_disk: str, store: Store) -> None:
    page = visit(on_disk)
    press = page.keyboard.press
    press("Escape")
    assert page.evaluate("document.activeElement.id") == "list"
    for _ in range(3):
        press("ArrowDown")
    wait_for_title(page, "Row 3")
    chosen = page.get_attribute("#list", "aria-activedescendant")
    assert page.get_attribute(f"#{chosen}", "aria-selected") == "true"
    press("End")
    wait_for_title(page, f"Row {len(store) - 1}")
    press("k")
    wait_for_title(page, f"Row {len(store) - 2}")
    press("g")
    page.keyboard.type("5")
    press("Enter")
    wait_for_title(page, "Row 5")
    press("Escape")
    press("Enter")
    page.wait_for_function("() => document.activeElement.classList.contains('tok')")
    press("f")
    page.wait_for_function("() => !document.querySelector('#view .turn-head[aria-expanded=true]')")
    assert not page.is_visible("#row-body section.turn .tok")
    page.focus("#view .turn-head")
    press("Enter")
    assert page.is_visible("#row-body section.turn .tok")
    page.click("#unfold")
    assert page.is_visible("#view section.turn >> nth=1 >> .tokens")
    press("3")
    assert page.evaluate("document.activeElement.id") == "tab-rejected"
    press("ArrowLeft")
    assert page.evaluate("document.activeElement.id") == "tab-overview"
    assert page.is_visible("#chart-length")
    press("?")
    assert page.is_visible("#help")
    press("Escape")
    press("/")
    assert page.evaluate("document.activeElement.id") == "search"


def test_tab_key_needs_few_steps(visit: Visit, on_disk: str) -> None:
    page = visit(on_disk)
    seen = []
    for _ in range(25):
        page.keyboard.press("Tab")
        seen.append(page.evaluate("document.activeElement.id || document.activeElement.className"))
    assert {"tab-rows", "search", "jump", "order", "list"} <= set(seen)
    assert sum(str(one).startswith("tok") for one in seen) == 1, "tokens are one stop, not hundreds"


def test_bar_of_a_histogram_shows_its_rows(visit: Visit, on_disk: str, store: Store) -> None:
    page = visit(on_disk)
    page.click("#tab-overview")
    bar = page.query_selector("#chart-length button:not([tabindex='-1'])")
    label = bar.get_attribute("aria-label")
    least, most, rows = (int(part) for part in re.findall(r"\d+", label)[:3])
    assert rows == int(((store.lengths >= least) & (store.lengths <= most)).sum())
    bar.click()
    page.wait_for_function(
        f"() => document.getElementById('status').textContent.startsWith('{rows} row')"
    )
    assert page.input_value("#least") == str(least)


def test_row_of_a_pack_opens(visit: Visit, on_disk: str) -> None:
    page = visit(on_disk)
    page.click("#tab-packing")
    piece = page.query_selector(".pack .piece >> nth=1")
    row = piece.get_attribute("data-row")
    piece.click()
    wait_for_title(page, f"Row {row}")
    assert page.is_visible("#panel-rows")


def test_filters_by_source_role_and_share(visit: Visit, address: str, store: Store) -> None:
    page = visit(address)
    page.click("#more summary")
    page.select_option("#role", "tool")
    page.fill("#share-least", "20")
    page.fill("#share-most", "25")
    with_tool = [n for n, row in enumerate(store) if any(turn[0] == "tool" for turn in row.turns)]
    shares = {n: float(store[n].loss_mask.mean()) for n in with_tool}
    expected = [n for n in with_tool if 0.2 <= shares[n] <= 0.25]
    assert any(share < 0.2 for share in shares.values())
    assert any(share > 0.25 for share in shares.values())
    wanted = f"{len(expected)} rows of {len(store)}"
    wait_for_status(page, wanted)
    page.select_option("#order", "longest")
    longest = max(expected, key=lambda n: (len(store[n]), -n))
    page.wait_for_function(
        f"() => document.querySelector('.item[data-row]')?.dataset.row === '{longest}'"
    )
    page.click("#clear")
    wait_for_status(page, f"{len(store)} rows")


def test_server_filters_by_the_language_of_views(visit: Visit, server: str, store: Store) -> None:
    page = visit(server)
    page.click("#more summary")
    page.fill("#least", "100")
    page.fill("#where", 'length < 200 or file == "dirty.jsonl"')
    expected = [
        n
        for n, row in enumerate(store)
        if len(row) >= 100 and (len(row) < 200 or Path(row.origin.path or "").name == "dirty.jsonl")
    ]
    wait_for_status(page, f"{len(expected)} rows of {len(store)}")


def test_comparison_marks_what_changed(visit: Visit, server: str, made: Made) -> None:
    page = visit(server)
    page.click("#tab-compare")
    assert "last_assistant_message" in page.inner_text("#differs")
    page.click("#survey button")
    page.wait_for_selector("#survey table")
    page.click("#survey button")
    page.wait_for_function(
        r"() => /^\d+ rows of/.test(document.getElementById('status').textContent)"
    )
    page.wait_for_selector(".item[data-row]")
    # The row that is shown may have changes, too: wait for another body.
    page.evaluate("document.getElementById('row-body').classList.add('before')")
    page.click(".item[data-row]")
    page.wait_for_selector("#row-body:not(.before) .side .tok.mask-changed")
    page.wait_for_selector(".verdict.differs[data-what=mask]")
    assert page.query_selector(".verdict.differs[data-what=ids]") is None
    number = int(title(page).split()[1])
    row = made.store[number]
    partner = next(n for n, other in enumerate(made.other) if other.origin == row.origin)
    apart = (row.loss_mask != made.other[partner].loss_mask).nonzero()[0].tolist()
    for side in (0, 1):
        marked = page.eval_on_selector_all(
            f".side:nth-child({side + 1}) .tok.mask-changed",
            "all => all.map((one) => Number(one.dataset.at))",
        )
        assert marked == apart


def test_source_row_is_shown_by_the_server(visit: Visit, server: str) -> None:
    page = visit(server)
    go_to(page, 1)
    page.click(".source-row summary")
    page.wait_for_selector(".source-row .raw")
    assert json.loads(page.text_content(".source-row .raw"))["id"] == "example-0001"


def test_long_list_draws_only_visible_rows(visit: Visit, on_disk: str, store: Store) -> None:
    page = visit(on_disk)
    assert len(page.query_selector_all(".item")) < 30 < len(store)
    page.evaluate("document.getElementById('list').scrollTop = 1e9")
    page.wait_for_selector(f".item[data-row='{len(store) - 1}']")
    assert len(page.query_selector_all(".item")) < 30
