"""Import optional libraries where they are needed; name the pip command if one is missing.

with optional("torch", "verl's datasets"): import torch
"""

from __future__ import annotations

import functools
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from tokenmill.errors import TokenmillError, UsageError

LIBRARIES: dict[str, tuple[str, str | None]] = {
    "PIL": ("Pillow", "tokenmill[vision]"),
    "datasets": ("Hugging Face datasets", "tokenmill[hf]"),
    "fastokens": ("fastokens", "fastokens"),
    "huggingface_hub": ("huggingface_hub", "tokenmill[hf]"),
    "megatron": ("Megatron-LM", None),
    "mistral_common": ("mistral-common", "tokenmill[encoders]"),
    "openai_harmony": ("openai-harmony", "tokenmill[encoders]"),
    "openrlhf": ("OpenRLHF", None),
    "ray": ("Ray", "tokenmill[ray]"),
    "renderers": ("renderers", "renderers"),
    "skyrl": ("SkyRL", None),
    "starlette": ("starlette", "tokenmill[serve]"),
    "swift": ("ms-swift", None),
    "tinker_cookbook": ("tinker-cookbook", None),
    "torch": ("PyTorch", "tokenmill[torch]"),
    "torchtune": ("torchtune", None),
    "transformers": ("transformers", "tokenmill[hf]"),
    "uvicorn": ("uvicorn", "tokenmill[serve]"),
    "verl": ("verl", None),
}
"""Package → its display name and pip requirement; None for trainers, which users install."""


def install_line(package: str) -> str:
    requirement = LIBRARIES[package][1]
    quote = "'" if "[" in str(requirement) else ""
    return f"pip install {quote}{requirement}{quote}"


@functools.cache  # each lookup takes milliseconds, and the answer is constant within a process
def installed_version(package: str) -> str | None:
    from importlib import metadata  # imports the email parser

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


@contextmanager
def optional(
    package: str,
    purpose: str | tuple[Any, ...] = "this",
    *,
    raises: type[TokenmillError] = UsageError,
    path: str | os.PathLike[str] | None = None,
) -> Iterator[None]:
    """Translate a failed import of a package of `LIBRARIES` into an error with a pip command.

    ``purpose`` is the subject of "needs" in the message, a text or an argument as in
    `TokenmillError`; ``path`` is the file concerned.
    """
    try:
        yield
    except ImportError as error:
        name, requirement = LIBRARIES[package]
        message = f" needs {name}"
        if requirement is None or (error.name or "").partition(".")[0] != package:
            message += f", which cannot be imported ({error})"
        if requirement is not None:
            message += f": {install_line(package)}"
        raise raises(purpose, message, path=path) from error


_muting = threading.RLock()


@contextmanager
def transformers_muted() -> Iterator[None]:
    """Suppress logs and warnings of transformers, for one thread at a time."""
    import logging  # not needed by processes that only read stores

    logger = logging.getLogger("transformers")
    with _muting:
        level = logger.level
        logger.setLevel(logging.ERROR)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                yield
        finally:
            logger.setLevel(level)


def lazy_exports(package: str, **modules: str) -> Callable[[str], Any]:
    """Return a ``__getattr__`` for a package that imports the module of a name on first use.

    ``modules`` maps a module of the package to its names, separated by spaces.
    """
    module_of = {name: module for module, names in modules.items() for name in names.split()}

    def find(name: str) -> Any:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(f"{package}.{module_of[name]}"), name)
        setattr(sys.modules[package], name, value)
        return value

    return find
