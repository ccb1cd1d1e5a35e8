"""The page in a real browser, from disk and from the server: what it shows."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.inspect.page.browsing import Visit, go_to, tokens, wait_for_status, wait_for_title
from tests.inspect.page.conftest import ATTACK, STEERING
from tokenmill.inspect.lint.rules import RULES
from tokenmill.inspect.rejected import rejected_by_file
from tokenmill.store import Store

# Contrast of an element's text with its background, as WCAG counts it.
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

READ = (".tok", "button", ".muted", "dt", "dd", "th", "td", ".hint", ".item span", ".reason",
        ".verdict", ".status", "p")  # fmt: skip


@contextmanager
def fresh_page(browser: Any, url: str, script: str = "") -> Iterator[Any]:
    context = browser.new_context()
    context.add_init_script(script)
    page = context.new_page()
    page.goto(url)
    page.wait_for_selector("body[data-ready=yes]")
    yield page
    context.close()


def test_shown_tokens_equal_those_of_the_store(visit: Visit, address: str, store: Store) -> None:
    page = visit(address)
    page.check("#look-ids")
    side = ".side" if page.query_selector("#tab-compare") else "#row-body"
    for number in (0, 7, len(store) - 2):
        go_to(page, number)
        row = store[number]
        expected = zip(row.input_ids.tolist(), (row.loss_mask == 1).tolist(), strict=True)
        assert tokens(page, side) == [
            [one, trained, at] for at, (one, trained) in enumerate(expected)
        ]


def test_tokens_are_coloured_by_role_and_by_loss(visit: Visit, on_disk: str) -> None:
    page = visit(on_disk)
    go_to(page, 3)
    ground = "one => getComputedStyle(one).backgroundColor"

    def of(selector: str) -> str:
        return str(page.eval_on_selector(f"#row-body .turns:not(.legend) {selector}", ground))

    trained = of(".role-assistant .tok.trained")
    assert len({of(".role-user .tok"), trained, of(".role-assistant .tok:not(.trained)")}) == 3
    underline = "one => getComputedStyle(one).borderBottomColor"
    seen = page.eval_on_selector("#row-body .role-assistant .tok.trained", underline)
    user = page.eval_on_selector("#row-body .role-user .tok", underline)
    assert seen not in ("rgba(0, 0, 0, 0)", user)
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


def test_token_shows_id_and_bytes_for_pointer_and_keyboard(
    visit: Visit, on_disk: str, store: Store
) -> None:
    page = visit(on_disk)
    go_to(page, 2)
    ids = store[2].input_ids.tolist()
    pieces = store.tokenizer.pieces(ids)

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


def test_text_is_readable_in_light_and_dark(visit: Visit, server: str) -> None:
    page = visit(server)
    go_to(page, 4)
    for name in ("rows", "overview", "rejected", "packing", "recipe", "compare"):
        page.click(f"#tab-{name}")
        page.wait_for_timeout(50)
        texts = ", ".join(f"#panel-{name} {one}:not(:disabled):not(.bar)" for one in READ)
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)
            ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
            dark = sum(int(part) for part in re.findall(r"\d+", ground)[:3]) < 3 * 128
            assert dark == (scheme == "dark")
            ratios = page.evaluate(CONTRAST, texts)
            assert min(ratios) >= 4.5, (name, scheme)


def test_hostile_rows_are_shown_as_text(visit: Visit, address: str, store: Store) -> None:
    page = visit(address)
    page.fill("#search", "zebra")
    wait_for_status(page, f"1 row of {len(store)}")
    page.press("#search", "Enter")
    number = len(store) - 2
    wait_for_title(page, f"Row {number}")
    page.wait_for_selector("#row-body .tok")
    shown = page.text_content("#row-body section.turn.role-assistant .tokens")
    assert ATTACK in shown
    assert "\u202e" not in shown
    assert "\\u202e" in shown
    assert "␛[31m" in shown
    assert STEERING not in shown
    assert page.text_content(".extra dd") == ATTACK
    assert "<b>hostile.jsonl" in page.text_content(".row-head .origin")
    assert page.query_selector_all("main img, main script, main b, main iframe") == []
    for name in ("overview", "rejected", "packing", "recipe"):
        page.click(f"#tab-{name}")
    page.wait_for_selector("#panel-rejected .rejected-row", state="attached")
    assert page.query_selector_all("main img, main script, main b, main iframe") == []


def test_policy_stops_an_injected_script(browser: Any, on_disk: str) -> None:
    with fresh_page(browser, on_disk) as page:
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


def test_recipe_and_proof_are_shown(visit: Visit, on_disk: str, store: Store) -> None:
    page = visit(on_disk)
    page.click("#tab-recipe")
    assert store.proof["tokenizer"] in page.inner_text("#model")
    words = page.inner_text("#proof")
    assert re.search(r"[\d,]+ masks proven by following the template's own loop", words)
    assert "rows compared with the reference, 0 different" in words
    page.click("#panel-recipe summary")
    text = page.inner_text("#panel-recipe")
    assert store.key in text
    for name in (*store.manifest["document"]["recipe"], "audited_rows", "probe", "trained_tokens"):
        assert name in text
    assert f"{sum(store.proof['audit_mismatches'].values())} different" in text


def test_narrow_screen_needs_no_sideways_scrolling(visit: Visit, on_disk: str) -> None:
    page = visit(on_disk, viewport={"width": 360, "height": 740})
    for name in ("rows", "overview", "rejected", "packing", "recipe"):
        page.click(f"#tab-{name}")
        page.wait_for_timeout(50)
        assert page.evaluate("document.documentElement.scrollWidth") <= 360, name
        right = "all => all.map(one => one.getBoundingClientRect().right)"
        assert max(page.eval_on_selector_all(f"#panel-{name} p", right), default=0) <= 360, name
        assert max(page.eval_on_selector_all(f"#panel-{name} code", right), default=0) <= 360, name


def test_tapped_row_scrolls_into_view_on_a_phone_and_no_tab_is_cut(
    visit: Visit, on_disk: str
) -> None:
    page = visit(on_disk, viewport={"width": 390, "height": 800})
    assert page.evaluate("document.documentElement.scrollTop") == 0
    for tab in page.query_selector_all("#tabs button"):
        box = tab.bounding_box()
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= 390
    page.click("#list .item >> nth=2")
    page.wait_for_function(
        "() => Math.abs(document.querySelector('#view').getBoundingClientRect().top) < 2"
    )


def test_list_shows_the_line_even_of_a_file_with_a_long_name(visit: Visit, on_disk: str) -> None:
    page = visit(on_disk)
    items = page.query_selector_all("#list .item")[:5]
    assert len(items) == 5
    for item in items:
        line, place = item.query_selector(".line"), item.query_selector(".where")
        assert re.fullmatch(r":\d+", line.inner_text())
        assert place.inner_text().endswith(line.inner_text())
        own, outer = line.bounding_box(), place.bounding_box()
        assert own["x"] + own["width"] <= outer["x"] + outer["width"] + 1


def test_rejected_rows_are_grouped_by_reason_and_file_with_advice(
    visit: Visit, on_disk: str, store: Store
) -> None:
    page = visit(on_disk)
    page.click("#tab-rejected")
    text = page.inner_text(".reasons")
    for reason, files in rejected_by_file(store).items():
        assert f"{store.rejected[reason]} {reason}: {RULES[reason].hint}" in text
        for file in files:
            assert f"{file.count} of {file.source_rows} rejected" in text


def test_keys_of_the_help_are_those_of_the_tabs(visit: Visit, on_disk: str) -> None:
    page = visit(on_disk)
    page.keyboard.press("?")
    texts = "all => all.map((one) => one.innerText)"
    keys, meanings = (page.eval_on_selector_all(f"#help {tag}", texts) for tag in ("dt", "dd"))
    listed = dict(zip(keys, meanings, strict=True))
    page.keyboard.press("Escape")
    tabs = [
        re.sub(r"\s*\d+$", "", tab.inner_text())
        for tab in page.query_selector_all("#tabs *[role=tab]")
    ]
    assert listed[f"1 … {len(tabs)}"].split(", ") == tabs
    page.keyboard.press(str(len(tabs)))
    assert page.evaluate("document.activeElement.textContent").startswith(tabs[-1])


def test_old_browser_gets_a_message(browser: Any, on_disk: str) -> None:
    with fresh_page(browser, on_disk, "delete window.DecompressionStream") as page:
        assert "too old" in page.inner_text("#view")
        assert "Firefox 113" in page.inner_text("#view")


def test_damaged_data_is_reported(browser: Any, page_file: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.html"
    content = page_file.read_bytes()
    middle = content.index(b'"about"') + 500
    broken.write_bytes(content[:middle] + b"AAAA" + content[middle + 4 :])
    with fresh_page(browser, broken.as_uri()) as page:
        assert "Cannot load" in page.inner_text("#status")
