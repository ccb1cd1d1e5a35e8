"""Draw docs/images/quickstart.svg: the commands of the quickstart and what they print.

Runs them on the bundled examples in an empty directory, as on a terminal with colours:
`python -m scripts.quickstart_recording`.
"""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

PROJECT = Path(__file__).resolve().parent.parent
IMAGE = PROJECT / "docs" / "images" / "quickstart.svg"
COMMANDS = (
    "lint chat.jsonl --tokenizer tokenizer",
    "prepare chat.jsonl dirty.jsonl --tokenizer tokenizer --name first",
    "inspect first --row 3",
    "stats first --pack 1024",
)
WIDTH = 110
MAX_LINES = 22  # of one command


def run(arguments: str, directory: Path) -> str:
    environment = {
        **os.environ,
        "TOKENMILL_CACHE_DIR": str(directory / "cache"),
        "FORCE_COLOR": "1",
        "COLUMNS": str(WIDTH),
        "TERM": "xterm-256color",
        "PYTHONPATH": str(PROJECT / "src"),
    }
    done = subprocess.run(
        [sys.executable, "-m", "tokenmill", *arguments.split()],
        cwd=directory / "sample" if (directory / "sample").is_dir() else directory,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=True,
    )
    return done.stdout.replace(str(directory), "~")


def main() -> None:
    with tempfile.TemporaryDirectory() as made:
        directory = Path(made)
        run("demo --files sample", directory)
        console = Console(record=True, width=WIDTH, file=io.StringIO(), color_system="truecolor")
        for command in COMMANDS:
            console.print(Text(f"$ tokenmill {command}", style="bold"))
            lines = run(command, directory).splitlines()
            for line in lines[:MAX_LINES]:
                console.print(
                    Text.from_ansi(line), soft_wrap=False, overflow="ellipsis", no_wrap=True
                )
            if len(lines) > MAX_LINES:
                console.print(Text("…", style="dim"))
            console.print()
        drawn = console.export_svg(title="quickstart")
    # The site loads nothing from other servers, so the fonts are the reader's.
    IMAGE.write_text(re.sub(r"@font-face \{.*?\}\s*", "", drawn, flags=re.S), encoding="utf-8")


if __name__ == "__main__":
    main()
