"""The page in a real browser, from disk and from the server: what a person sees and can do."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.page.conftest import ATTACK, STEERING, Made
from tokenmill.report.row import store_tokenizer
from tokenmill.store import Store

Visit = Callable[..., Any]

CONTRAST = """(selector) => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const rgb = (...colours) => {
    for (const colour of colours) { canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1); }
    return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3);
  };
  const light = (parts) => parts.map((part) => part / 255)
    .map((part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4))
    .reduce((sum, part, n) => sum + part * [0.2126, 0.7152, 0.0722][n], 0);
  return [...document.querySelectorAll(selector)].filter((one) => one.offsetParent).map((one) => {
    const grounds = [];
    for (let at = one; at; at = at.parentElement) {
      grounds.unshift(getComputedStyle(at).backgroundColor);
    }
    const pair = [light(rgb(...grounds)), light(rgb(...grounds, getComputedStyle(one).color))];
    return (Math.max(...pair) + 0.05) / (Math.min(...pair) + 0.05);
  });
}"""
"""Contrast of an element's text with what lies behind it, as WCAG counts it."""

READ = (".tok", "button", ".muted", "dt", "dd", "th", "td", ".hint", ".item span", ".reason",
        ".verdict", ".status", "p")  # fmt: skip
"""What people read."""


@pytest.fixture(params=["file", "server"])
def address(request: pytest.FixtureRequest) -> str:
    """The same page, both ways."""
    if request.param == "server":
        return str(request.getfixturevalue("server"))
    path: Path = request.getfixturevalue("page_file")
    return path.as_uri()


@pytest.fixture
def on_disk(page_file: Path) -> str:
    return page_file.as_uri()


def title(page: Any) -> str:
    return str(page.inner_text("#row-title"))


def go_to(page: Any, row: int) -> None:
    page.fill("#jump", str(row))
    page.press("#jump", "Enter")
    page.wait_for_function(
        """text => document.getElementById('row-title')?.textContent === text
        && document.querySelector('#row-body .tok')""",
        arg=f"Row {row}",
    )


def tokens(page: Any, side: str = "#row-body") -> list[list[Any]]:
    """Id, whether shown as trained, and place of every token shown (ids must be switched on)."""
    found: list[list[Any]] = page.evaluate(
        """(side) => [...document.querySelector(side).querySelectorAll("section.turn .tok")]
          .map((one) => [Number(one.querySelector("sub").textContent),
                         one.classList.contains("trained"), Number(one.dataset.at)])""",
        side,
    )
    return found


def test_search_finds_a_row_and_enter_opens_it(
    visit: Visit, address: str, store: Store, made: Made
) -> None:
    page = visit(address)
    page.keyboard.press("/")
    page.keyboard.type("what causes the TIDES")
    page.wait_for_function("() => document.getElementById('status').textContent.includes(' of ')")
    lines = (made.room / "conversations.jsonl").read_text("utf-8").splitlines()
    expected = [n for n, line in enumerate(lines) if "What causes the tides" in line]
    assert page.inner_text("#status") == f"{len(expected)} rows of {len(store)}".replace(
        "1 rows", "1 row"
    )
    page.wait_for_selector(".item[data-row]")
    assert (
        page.eval_on_selector_all(".item", "all => all.map((one) => Number(one.dataset.row))")
        == expected
    )
    page.keyboard.press("Enter")
    page.wait_for_function("() => document.getElementById('row-title').textContent !== 'Row 0'")
    assert title(page) == f"Row {expected[0]}"
    assert f"conversations.jsonl:{expected[0] + 1}" in page.inner_text(".row-head .origin")


def test_tokens_shown_are_those_of_the_store(visit: Visit, address: str, store: Store) -> None:
    page = visit(address)
    page.check("#look-ids")
    side = ".side" if page.query_selector(".side") else "#row-body"
    for number in (0, 4, 7, len(store) - 2, len(store) - 1):
        go_to(page, number)
        row = store[number]
        expected = zip(row.input_ids.tolist(), (row.loss_mask == 1).tolist(), strict=True)
        assert tokens(page, side) == [
            [one, trained, at] for at, (one, trained) in enumerate(expected)
        ]


def test_tokens_are_coloured_by_role_and_by_loss(visit: Visit, address: str) -> None:
    page = visit(address)
    go_to(page, 3)
    ground = "one => getComputedStyle(one).backgroundColor"

    def of(selector: str) -> str:
        return str(page.eval_on_selector(f"#row-body .turns:not(.legend) {selector}", ground))

    user = of(".role-user .tok")
    trained = of(".role-assistant .tok.trained")
    untrained = of(".role-assistant .tok:not(.trained)")
    assert len({user, trained, untrained}) == 3
    underline = "one => getComputedStyle(one).borderBottomColor"
    seen = page.eval_on_selector("#row-body .role-assistant .tok.trained", underline)
    assert seen not in (
        "rgba(0, 0, 0, 0)",
        page.eval_on_selector("#row-body .role-user .tok", underline),
    )
    page.check("input[name='Colour by'][value=loss]")
    page.wait_for_selector(".turns.colour-loss section.turn")
    assert of("section.turn.role-user .tok") == "rgba(0, 0, 0, 0)"
    assert of("section.turn.role-assistant .tok.trained") == trained
    page.check("input[name='Colour by'][value=role]")
    page.wait_for_selector(".turns.colour-role section.turn")
    assert of("section.turn.role-assistant .tok.trained") == of(
        "section.turn.role-assistant .tok:not(.trained)"
    )
    assert of("section.turn.role-user .tok") != of("section.turn.role-assistant .tok")


def test_token_tells_id_and_bytes_to_pointer_and_keyboard(
    visit: Visit, address: str, store: Store
) -> None:
    page = visit(address)
    go_to(page, 2)
    ids = store[2].input_ids.tolist()
    pieces = store_tokenizer(store).pieces(ids)

    def tip() -> list[str]:
        page.wait_for_selector("#tip:not([hidden])")
        return [page.inner_text(f"#tip .tip-{name}") for name in ("id", "bytes", "loss")]

    def expected(at: int) -> list[str]:
        loss = "trained" if store[2].loss_mask[at] else "not trained"
        return [str(ids[at]), pieces[at].hex(" "), loss]

    trained = int(store[2].loss_mask.argmax())
    page.hover(f"#row-body .tok[data-at='{trained}'] >> nth=0")
    assert tip() == expected(trained)
    page.mouse.move(2, 2)
    page.focus("#row-body .tok[tabindex='0']")
    assert tip() == expected(0)
    for _ in range(trained):
        page.keyboard.press("ArrowRight")
    assert tip() == expected(trained)
    page.keyboard.press("ArrowLeft")
    assert tip() == expected(trained - 1)
    page.keyboard.press("Home")
    page.keyboard.press("ArrowDown")
    moved = int(page.evaluate("document.activeElement.dataset.at"))
    assert moved > 0


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


def test_keyboard_alone_reaches_everything(visit: Visit, address: str, store: Store) -> None:
    page = visit(address)
    press = page.keyboard.press
    press("Escape")
    assert page.evaluate("document.activeElement.id") == "list"
    for _ in range(3):
        press("ArrowDown")
    page.wait_for_function("() => document.getElementById('row-title').textContent === 'Row 3'")
    chosen = page.get_attribute("#list", "aria-activedescendant")
    assert page.get_attribute(f"#{chosen}", "aria-selected") == "true"
    press("End")
    page.wait_for_function(
        f"() => document.getElementById('row-title').textContent === 'Row {len(store) - 1}'"
    )
    press("k")
    page.wait_for_function(
        f"() => document.getElementById('row-title').textContent === 'Row {len(store) - 2}'"
    )
    press("g")
    page.keyboard.type("5")
    press("Enter")
    page.wait_for_function("() => document.getElementById('row-title').textContent === 'Row 5'")
    press("Escape")
    press("Enter")
    page.wait_for_function("() => document.activeElement.classList.contains('tok')")
    press("f")
    page.wait_for_function("() => !document.querySelector('#view .turn-head[aria-expanded=true]')")
    assert not page.is_visible("#row-body section.turn .tok")
    page.focus("#view .turn-head")
    press("Enter")
    assert page.is_visible("#row-body section.turn .tok")
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


def test_tab_key_visits_a_short_way(visit: Visit, on_disk: str) -> None:
    page = visit(on_disk)
    seen = []
    for _ in range(25):
        page.keyboard.press("Tab")
        seen.append(page.evaluate("document.activeElement.id || document.activeElement.className"))
    assert {"tab-rows", "search", "jump", "order", "list"} <= set(seen)
    assert sum(str(one).startswith("tok") for one in seen) == 1, "tokens are one stop, not hundreds"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_is_readable_in_light_and_dark(visit: Visit, server: str, scheme: str) -> None:
    page = visit(server, color_scheme=scheme)
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    dark = sum(int(part) for part in re.findall(r"\d+", ground)[:3]) < 3 * 128
    assert dark == (scheme == "dark")
    go_to(page, 4)
    for name in ("rows", "overview", "rejected", "packing", "recipe", "compare"):
        page.click(f"#tab-{name}")
        page.wait_for_timeout(50)
        for selector in READ:
            ratios = page.evaluate(CONTRAST, f"#panel-{name} {selector}:not(:disabled):not(.bar)")
            assert all(ratio >= 4.5 for ratio in ratios), (name, selector, min(ratios))


def test_hostile_rows_are_text_and_nothing_else(visit: Visit, address: str, store: Store) -> None:
    page = visit(address)
    page.fill("#search", "zebra")
    page.wait_for_function(
        f"() => document.getElementById('status').textContent === '1 row of {len(store)}'"
    )
    page.press("#search", "Enter")
    number = len(store) - 2
    page.wait_for_function(
        f"() => document.getElementById('row-title').textContent === 'Row {number}'"
    )
    page.wait_for_selector("#row-body .tok")
    shown = page.text_content("#row-body section.turn.role-assistant .tokens")
    assert ATTACK in shown
    assert "\u202e" not in shown
    assert "\\u202e" in shown
    assert "␛[31m" in shown
    assert STEERING not in shown
    assert page.text_content(".carried dd") == ATTACK
    assert "<b>hostile.jsonl" in page.text_content(".row-head .origin")
    assert page.query_selector_all("main img, main script, main b, main iframe") == []
    for name in ("overview", "rejected", "packing", "recipe"):
        page.click(f"#tab-{name}")
    page.wait_for_selector("#panel-rejected .rejected-row", state="attached")
    assert page.query_selector_all("main img, main script, main b, main iframe") == []


def test_injected_script_would_be_stopped_by_the_policy(
    visit: Visit, browser: Any, on_disk: str
) -> None:
    page = browser.new_context().new_page()
    page.goto(on_disk)
    page.wait_for_selector("body[data-ready=yes]")
    page.evaluate(
        """() => {
          const made = document.createElement("div");
          made.innerHTML = '<img src=x onerror="window.hacked = 1">';
          const script = document.createElement("script");
          script.textContent = "window.hacked = 2";
          document.body.append(made, script);
        }"""
    )
    page.wait_for_timeout(200)
    assert page.evaluate("window.hacked") is None
    page.context.close()


def test_bar_of_a_histogram_shows_its_rows(visit: Visit, address: str, store: Store) -> None:
    page = visit(address)
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


def test_row_of_a_pack_opens(visit: Visit, address: str) -> None:
    page = visit(address)
    page.click("#tab-packing")
    piece = page.query_selector(".pack .piece >> nth=1")
    row = piece.get_attribute("data-row")
    piece.click()
    page.wait_for_function(
        f"() => document.getElementById('row-title').textContent === 'Row {row}'"
    )
    assert page.is_visible("#panel-rows")


def test_filters_by_source_role_and_share(visit: Visit, address: str, store: Store) -> None:
    page = visit(address)
    page.click("#more summary")
    page.select_option("#role", "tool")
    page.fill("#share-most", "40")
    expected = [
        n
        for n, row in enumerate(store)
        if any(turn[0] == "tool" for turn in row.turns) and row.loss_mask.sum() / len(row) <= 0.4
    ]
    wanted = f"{len(expected)} rows of {len(store)}"
    page.wait_for_function(
        "text => document.getElementById('status').textContent === text", arg=wanted
    )
    page.select_option("#order", "longest")
    longest = max(expected, key=lambda n: (len(store[n]), -n))
    page.wait_for_function(
        f"() => document.querySelector('.item[data-row]')?.dataset.row === '{longest}'"
    )
    page.click("#clear")
    page.wait_for_function(
        f"() => document.getElementById('status').textContent === '{len(store)} rows'"
    )


def test_turns_fold_and_unfold(visit: Visit, address: str) -> None:
    page = visit(address)
    go_to(page, 2)
    page.click("#view .turn-head >> nth=0")
    assert page.get_attribute("#view .turn-head >> nth=0", "aria-expanded") == "false"
    assert not page.is_visible("#view section.turn >> nth=0 >> .tokens")
    assert page.is_visible("#view section.turn >> nth=1 >> .tokens")
    page.click("#fold")
    assert not page.is_visible("#view section.turn >> nth=1 >> .tokens")
    page.click("#unfold")
    assert page.is_visible("#view section.turn >> nth=0 >> .tokens")


def test_recipe_and_proof_are_shown(visit: Visit, address: str, store: Store) -> None:
    page = visit(address)
    page.click("#tab-recipe")
    text = page.inner_text("#panel-recipe")
    assert store.key in text
    for name in (*store.manifest["document"]["recipe"], "audited_rows", "probe", "trained_tokens"):
        assert name in text
    assert f"{store.proof['audit_mismatches']} differed" in text


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
    page.click(".item[data-row]")
    page.wait_for_selector(".side .tok.mask-changed")
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


def test_narrow_screen_needs_no_sideways_scrolling(visit: Visit, on_disk: str) -> None:
    page = visit(on_disk, viewport={"width": 360, "height": 740})
    for name in ("rows", "overview", "rejected", "packing", "recipe"):
        page.click(f"#tab-{name}")
        page.wait_for_timeout(50)
        assert page.evaluate("document.documentElement.scrollWidth") <= 360, name


def test_long_list_draws_only_what_is_seen(visit: Visit, on_disk: str, store: Store) -> None:
    page = visit(on_disk)
    assert len(page.query_selector_all(".item")) < 30 < len(store)
    page.evaluate("document.getElementById('list').scrollTop = 1e9")
    page.wait_for_selector(f".item[data-row='{len(store) - 1}']")
    assert len(page.query_selector_all(".item")) < 30
