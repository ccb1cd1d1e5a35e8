"""Draw the images of docs/guides/inspect.md from the bundled examples, light and dark.

Prepares the examples with and without earlier turns trained, writes the *page* of the first store,
serves it beside the second, makes rollouts out of the examples (answers of several lengths, some
broken on purpose) and a row with images, opens all of it in Debian's chromium and takes
*images* of the parts that the documentation describes. Needs the extras ``serve``, ``vision``
and ``test``: `python scripts/page_images.py [DIRECTORY]`.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

import tokenmill as tm
from tokenmill.build.calls import run_recipe
from tokenmill.inspect.page.document import make_page
from tokenmill.inspect.page.serve import Viewer, serve
from tokenmill.store import Store

PROJECT = Path(__file__).resolve().parent.parent
EXAMPLES = PROJECT / "src" / "tokenmill" / "examples"
IMAGES = PROJECT / "docs" / "images"
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking",
         "--disable-component-update", "--disable-sync", "--no-first-run"]  # fmt: skip
WIDE = {"width": 1280, "height": 800}
NARROW = {"width": 390, "height": 800}
ROW = 4  # tools, a system prompt and several turns
PROMPTS, ANSWERS = 60, 4
BROKEN = 13  # a rollout whose mask is shifted


def prepared(**more: Any) -> Store:
    """A store of the bundled examples."""
    return run_recipe(
        ["conversations.jsonl", "dirty.jsonl"], "tokenizer", cache_dir="cache",
        keep_columns=("topic",), tokenizer_backend="file", executor="inline", progress=False,
        **more,
    ).store  # fmt: skip


def rollouts() -> Store:
    """Return rollouts as a sampler would record them: the examples' answers, cut at a word."""
    rng = random.Random(7)
    with open("conversations.jsonl", encoding="utf-8") as file:
        chats = [json.loads(line) for line in file][:PROMPTS]
    answers = []
    for chat in chats:
        *asked, last = chat["messages"]
        words = last["content"].split(" ")
        for _ in range(ANSWERS):
            text = " ".join(words[: rng.randint(min(8, len(words)), len(words))])
            answers.append({**chat, "messages": [*asked, {**last, "content": text}]})
    Path("answers.jsonl").write_text("".join(json.dumps(one) + "\n" for one in answers))
    sampled = run_recipe(
        ["answers.jsonl"], "tokenizer", cache_dir="cache", tokenizer_backend="file",
        executor="inline", progress=False, train_on="last_assistant_message",
    ).store  # fmt: skip
    with open("rollouts.jsonl", "w", encoding="utf-8") as file:
        for number, row in enumerate(sampled):
            ids, mask = row.input_ids.tolist(), row.loss_mask.tolist()
            chat = answers[row.origin.row]
            prompt, step = row.origin.row // ANSWERS, row.origin.row // ANSWERS // 4
            logprobs = [-rng.expovariate(1.1) if bit else 0.0 for bit in mask]
            if number % 16 == BROKEN:
                mask = [0, 0, 0, *mask[:-3]]
                logprobs = [0.0, 0.0, 0.0, *logprobs[:-3]]
            elif number % 7 == 5:
                ids[mask.index(1) + 3] = ids[mask.index(1) + 1]
            reward = min(1.0, max(0.0, rng.gauss(0.35 + 0.03 * step, 0.2)))
            recorded = {"messages": chat["messages"], "tools": chat.get("tools"), "token_ids": ids,
                        "loss_mask": mask, "logprobs": logprobs, "reward": round(reward, 2),
                        "advantage": round(rng.gauss(0, 1), 2), "group": f"prompt-{prompt}",
                        "step": step, "version": step}  # fmt: skip
            file.write(json.dumps(recorded) + "\n")
    made = tm.from_rollouts(
        "rollouts.jsonl", "tokenizer", cache_dir="cache", tokenizer_backend="file",
        executor="inline", progress=False,
    )  # fmt: skip
    assert isinstance(made, Store)
    return made


def store_with_images() -> Store:
    """Return rows with two generated images, one of which was removed."""
    import numpy as np
    from PIL import Image, ImageDraw
    from transformers import LlavaNextProcessor, PreTrainedTokenizerFast
    from transformers.models.llava_next.image_processing_pil_llava_next import (
        LlavaNextImageProcessorPil,
    )

    Path("images").mkdir()
    for name, width, height, sky in (
        ("noon", 960, 540, 215),
        ("dusk", 420, 560, 20),
        ("x", 97, 61, 0),
    ):
        y, x = np.mgrid[0:height, 0:width]
        sea = y > 0.62 * height
        wave = (18 * np.sin(x / 23 + y / 9)).astype(int)
        shade = y // 9
        red, green = np.where(sea, 20, 255 - sky) - shade % 40, np.where(sea, 90, 150 + shade % 60)
        pixels = np.stack([red, green, np.where(sea, 130 + wave, 120 + sky // 2)], axis=-1)
        image = Image.fromarray(pixels.clip(0, 255).astype(np.uint8))
        top, size = height // 6 + (0 if sky else 90), width // 7
        ImageDraw.Draw(image).ellipse([width // 2, top, width // 2 + size, top + size], "#ffe08a")
        image.save(f"images/{name}.png")
    parts = [{"type": "text", "text": "Which of these was taken at noon? "}]
    parts += [{"type": "image", "image": f"images/{name}.png"} for name in ("noon", "dusk", "x")]
    answer = {"role": "assistant", "content": "The first: the sky is pale and the sun stands high."}
    row = {"messages": [{"role": "user", "content": parts}, answer]}
    Path("seen.jsonl").write_text(json.dumps(row) + "\n")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file="tokenizer/tokenizer.json", extra_special_tokens={"image_token": "<image>"}
    )
    template = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['content'] is string %}"
        "{{ m['content'] }}{% else %}{% for part in m['content'] %}{% if part['type'] == 'image' %}"
        "<image>{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n"
        "{% endfor %}"
    )
    processor = LlavaNextProcessor(
        LlavaNextImageProcessorPil(size={"shortest_edge": 336}, crop_size=336), tokenizer,
        patch_size=14, vision_feature_select_strategy="default", num_additional_image_tokens=1,
        chat_template=template,
    )  # fmt: skip
    store = tm.prepare("seen.jsonl", processor=processor, cache_dir="cache", num_workers=0)
    os.remove("images/x.png")
    return store


def served(store: Store, other: Store) -> str:
    """Start a server in a thread and return its address."""
    found: list[str] = []
    ready = threading.Event()

    def tell(url: str, _: int) -> None:
        found.append(url)
        ready.set()

    viewer = Viewer(store, other, "cache")
    threading.Thread(target=serve, args=(viewer, 0, tell), daemon=True).start()
    ready.wait(30)
    return found[0]


def row(page: Any) -> None:
    """Show one row with the details of a token."""
    page.fill("#jump", str(ROW))
    page.press("#jump", "Enter")
    page.wait_for_function(
        f"() => document.getElementById('row-title').textContent === 'Row {ROW}'"
    )
    page.evaluate("document.querySelector('#view').scrollTop = 330")
    page.wait_for_timeout(200)
    page.hover(".role-assistant .tok.trained >> nth=4")


def rollout(page: Any) -> None:
    """A broken rollout alone, its tokens by log-probability."""
    page.fill("#jump", str(BROKEN))
    page.press("#jump", "Enter")
    page.wait_for_selector("#row-body .side")
    page.uncheck("#look-group")
    page.wait_for_selector(".row-head .finding-item")
    page.check("input[value='value:logprobs']", force=True)
    page.wait_for_selector(".tok.heat")


def answers(page: Any) -> None:
    """The answers of one group."""
    page.fill("#jump", str(BROKEN))
    page.press("#jump", "Enter")
    page.wait_for_selector("#row-body .side")
    page.evaluate("document.querySelector('.answers').scrollIntoView()")


def steps(page: Any) -> None:
    """Rewards, lengths and drift over steps."""
    page.click("#tab-overview")
    page.evaluate("document.querySelector('#steps').previousSibling.scrollIntoView()")


def tab(name: str) -> Callable[[Any], None]:
    """One part of the page."""
    return lambda page: page.click(f"#tab-{name}")


def rejected(page: Any) -> None:
    """Rejected rows, one opened."""
    page.click("#tab-rejected")
    page.click(".rejected-row summary >> nth=1")
    page.wait_for_selector(".raw")


def compared(page: Any) -> None:
    """A row whose mask changed."""
    page.fill("#jump", "2")
    page.press("#jump", "Enter")
    page.wait_for_function("() => document.getElementById('row-title').textContent === 'Row 2'")
    page.wait_for_selector(".tok.mask-changed")
    page.evaluate("document.querySelector('#view').scrollTop = 130")


def main() -> None:
    """Take all images."""
    target = Path(sys.argv[1] if len(sys.argv) > 1 else IMAGES).absolute()
    target.mkdir(parents=True, exist_ok=True)
    chromium = shutil.which("chromium") or shutil.which("chromium-headless-shell")
    with tempfile.TemporaryDirectory() as directory, sync_playwright() as playwright:
        shutil.copytree(EXAMPLES, directory, dirs_exist_ok=True)
        os.chdir(directory)  # so that the images show relative paths
        store, other = prepared(), prepared(train_on="last_assistant_message")
        make_page(store, Path("page.html"), cache_dir="cache")
        make_page(rollouts(), Path("rollouts.html"))
        make_page(store_with_images(), Path("seen.html"))
        seen = Path("seen.html").absolute().as_uri()
        recorded = Path("rollouts.html").absolute().as_uri()
        on_disk, by_server = Path("page.html").absolute().as_uri(), served(store, other)
        browser = playwright.chromium.launch(executable_path=chromium, args=FLAGS)
        images: list[tuple[str, str, dict[str, int], Callable[[Any], None]]] = [
            ("row", on_disk, WIDE, row),
            ("overview", on_disk, WIDE, tab("overview")),
            ("rejected", on_disk, WIDE, rejected),
            ("packing", on_disk, WIDE, tab("packing")),
            ("compare", by_server, WIDE, compared),
            ("rollout", recorded, WIDE, rollout),
            ("answers", recorded, WIDE, answers),
            ("steps", recorded, WIDE, steps),
            ("images", seen, WIDE, lambda page: page.wait_for_selector(".image img")),
            ("narrow", on_disk, NARROW, lambda page: page.fill("#search", "tides")),
        ]
        for scheme in ("light", "dark"):
            for name, url, size, prepare in images:
                page = browser.new_context(color_scheme=scheme, viewport=size).new_page()
                page.goto(url)
                page.wait_for_selector("body[data-ready=yes]")
                prepare(page)
                page.wait_for_timeout(400)
                page.screenshot(path=target / f"inspect-{name}-{scheme}.png")
                page.context.close()
        browser.close()
        os.chdir(target)


if __name__ == "__main__":
    main()
