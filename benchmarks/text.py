"""Generate any amount of distinct rows: the chat corpora, then texts of installed packages.

`write_rows` writes a JSONL file: first the shared conversations, then one conversation per chunk of
an installed source or documentation file. If these are not enough, chunks repeat with the number of
the round in front, so that all rows are distinct.
"""

from __future__ import annotations

import json
import sysconfig
from collections.abc import Iterator
from itertools import count
from pathlib import Path

from benchmarks.data import corpora

ENDINGS = {
    ".py", ".pyi", ".pyx", ".pxd", ".md", ".rst", ".txt", ".h", ".hpp", ".cuh", ".c", ".cpp", ".js",
    ".ts", ".mjs", ".css", ".html", ".json", ".yaml", ".yml", ".toml", ".jinja", ".pl", ".pm",
}  # fmt: skip
SYSTEM = ("/usr/include", "/usr/lib", "/usr/share", "/usr/local")  # packages of the system
CHUNK_CHARS = 3000  # about the length of an answer


def package_texts() -> Iterator[tuple[str, str]]:
    """Yield name and text of every installed source and documentation file, each text once."""
    seen: set[int] = set()
    own = {sysconfig.get_path("purelib"), sysconfig.get_path("stdlib")}
    for root in [*sorted(own), *SYSTEM]:
        for path in sorted(Path(root).rglob("*")):
            if path.suffix in ENDINGS and path.is_file() and path.stat().st_size < 2_000_000:
                try:
                    text = path.read_text(encoding="utf-8")
                except (UnicodeDecodeError, OSError):
                    continue
                if hash(text) not in seen:
                    seen.add(hash(text))
                    yield path.name, text


def package_rows() -> Iterator[bytes]:
    """Yield one conversation per chunk, endlessly; from the second round on with a number."""
    for round_number in count():
        for name, text in package_texts():
            for start in range(0, len(text), CHUNK_CHARS):
                chunk = text[start : start + CHUNK_CHARS].strip()
                if chunk:
                    yield _row(f"What does {name} say from {start} on?", chunk, round_number)


def _row(question: str, answer: str, round_number: int) -> bytes:
    answer = f"({round_number}) {answer}" if round_number else answer
    messages = [
        {"role": "user", "content": question},
        {"role": "assistant", "content": answer},
    ]
    return json.dumps({"messages": messages}, ensure_ascii=False).encode() + b"\n"


def write_rows(path: Path, size: int) -> int:
    """Write at least ``size`` bytes of rows; returns how many rows."""
    rows = written = 0
    with open(path, "wb") as file:
        for corpus in corpora():
            with open(corpus, "rb") as lines:
                for line in lines:
                    if written >= size:
                        return rows
                    written += file.write(line if line.endswith(b"\n") else line + b"\n")
                    rows += 1
        for row in package_rows():
            if written >= size:
                return rows
            written += file.write(row)
            rows += 1
    return rows
