"""Rows with images in every way that data sets write them, and the processor's own answer."""

from __future__ import annotations

import base64
import functools
import io
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

SIZES = ((64, 48), (333, 190), (200, 310), (97, 61))


class Album:
    """Images of noise, by number: ``images/<n>.png`` below a directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        (directory / "images").mkdir(parents=True)
        for number, size in enumerate(SIZES):
            self.draw(number, size)

    def draw(self, number: int, size: tuple[int, int], seed: int = 0) -> Path:
        path = self.path(number)
        path.write_bytes(_noise(size, (number, seed)))
        return path

    def path(self, number: int) -> Path:
        return self.directory / self.name(number)

    def name(self, number: int) -> str:
        return f"images/{number}.png"

    def base64(self, number: int) -> str:
        return base64.b64encode(self.path(number).read_bytes()).decode()

    def open(self, number: int) -> Any:
        return Image.open(io.BytesIO(self.path(number).read_bytes())).convert("RGB")


@functools.cache
def _noise(size: tuple[int, int], seed: tuple[int, int]) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 255, (size[1], size[0], 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def part(value: Any) -> dict[str, Any]:
    return {"type": "image", "image": value}


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value}


def asked(*content: Any, answer: Any = "A cat.") -> list[dict[str, Any]]:
    return [
        {"role": "user", "content": content[0] if len(content) == 1 else list(content)},
        {"role": "assistant", "content": answer},
    ]


# A row, the conversations that it means (bare parts for images), and its images.
Case = tuple[dict[str, Any], list[list[dict[str, Any]]], list[int]]


def cases(album: Album) -> dict[str, Case]:
    bare = {"type": "image"}
    what = [bare, text("\nWhat is it?")]
    mixed = asked(bare, text("and"), bare)
    answered = [*asked(bare, text("One?")), *asked(text("Two?"), bare, answer="Two cats.")]
    data = f"data:image/png;base64,{album.base64(0)}"
    name = album.name
    answers = {"chosen": "A cat.", "rejected": "A dog."}
    return {
        "openai": (
            {"messages": asked({"type": "image_url", "image_url": {"url": data}}, text("Hm"))},
            [asked(bare, text("Hm"))],
            [0],
        ),
        "own parts": (
            {"messages": asked(part(name(1)), text("and"), part(name(2)))},
            [mixed],
            [1, 2],
        ),
        "bare parts": ({"messages": mixed, "images": [name(3), name(0)]}, [mixed], [3, 0]),
        "llava": (
            {
                "image": name(2),
                "conversations": [
                    {"from": "human", "value": "<image>\nWhat is it?"},
                    {"from": "gpt", "value": "A cat."},
                ],
            },
            [asked(*what)],
            [2],
        ),
        "llama-factory": (
            {"images": [name(1)], "messages": asked("<image>\nWhat is it?")},
            [asked(*what)],
            [1],
        ),
        "alpaca": (
            {"images": [name(1)], "instruction": "<image>", "input": "What?", "output": "A cat."},
            [asked(bare, text("\n\nWhat?"))],
            [1],
        ),
        "cell": (
            {"images": [{"bytes": album.base64(2), "path": "x.png"}], "messages": asked("<image>")},
            [asked([bare])],
            [2],
        ),
        "prompt": (
            {"images": [name(0)], "prompt": asked("<image>Hm")[:1], "completion": "A cat."},
            [asked(bare, text("Hm"))],
            [0],
        ),
        "pair": (
            {"images": [name(0)], "prompt": asked("<image>Hm")[:1], **answers},
            [asked(bare, text("Hm")), asked(bare, text("Hm"), answer="A dog.")],
            [0],
        ),
        "two turns": (
            {
                "messages": [
                    *asked(part(name(0)), text("One?")),
                    *asked(text("Two?"), part(name(3)), answer="Two cats."),
                ]
            },
            [answered],
            [0, 3],
        ),
        "no image": ({"messages": asked("Hello <image>?")}, [asked("Hello <image>?")], []),
        "empty list": ({"messages": asked("Hello?"), "images": []}, [asked("Hello?")], []),
    }


def oracle(processor: Any, messages: list[dict[str, Any]], images: list[Any]) -> list[int]:
    """The ids of a conversation by the processor itself, with the real images."""
    rendered = processor.apply_chat_template(messages, tokenize=False)
    made = processor(text=[rendered], images=[images] if images else None, add_special_tokens=False)
    return [int(number) for number in made["input_ids"][0]]
