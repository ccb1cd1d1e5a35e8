"""All checks, one after the other, as far as what is given allows.

``tokenmill doctor`` calls `examine` with what is to be prepared, as far as it is known, and prints
the answers. `examine` answers a list of `Check` values in a fixed order: libraries, machine,
settings, cache, engines, tokenizer, Ray. A check that fails in a way nobody foresaw is itself a
failed check with the exception's words; the others still run, because the one that fails is what a
person came for.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from tokenmill.files import default_cache_dir
from tokenmill.report.doctor import cache, machine, tokenizers
from tokenmill.report.doctor.checks import Check, fail

Answer = Check | Iterable[Check]


def examine(
    sources: Sequence[str] = (),
    tokenizer: Any = None,
    *,
    tokenizer_backend: str = "auto",
    trust_remote_code: bool = False,
    cache_dir: str | os.PathLike[str] | None = None,
    describe_ray: Callable[[], dict[str, Any]] | None = None,
) -> list[Check]:
    """Ask everything.

    Args:
        sources: Files that are to be prepared, for the space they need.
        tokenizer: The tokenizer to try the engines with.
        tokenizer_backend: As for `tokenmill.prepare`.
        trust_remote_code: As for `tokenmill.prepare`.
        cache_dir: The cache to look at; None: the user's own.
        describe_ray: Says which cluster Ray would use; None: only whether Ray is there.
    """
    root = Path(cache_dir or default_cache_dir()).absolute()
    found: list[Check] = []

    def ask(name: str, question: Callable[[], Answer]) -> None:
        try:
            answer = question()
            found.extend([answer] if isinstance(answer, Check) else answer)
        except Exception as error:  # the other checks are still worth having
            detail = f"could not be looked at: {type(error).__name__}: {error}"
            found.append(fail(name, detail, "this is a defect of the doctor's; please report it"))

    ask("libraries", machine.libraries)
    ask("cores", machine.cores)
    ask("open files", machine.open_files)
    ask("settings", machine.settings)
    ask("cache", lambda: cache.writable(root))
    can_write = found[-1].status == "ok"
    ask("file system", lambda: cache.file_system(root))
    ask("space", lambda: cache.room(root, sources, can_write=can_write))
    ask("engines", tokenizers.engines)
    if tokenizer is not None:
        ask(
            "tokenizer",
            lambda: tokenizers.tokenizer(
                tokenizer, backend=tokenizer_backend, trust_remote_code=trust_remote_code
            ),
        )
    ask("Ray", lambda: machine.ray(describe_ray))
    return found
