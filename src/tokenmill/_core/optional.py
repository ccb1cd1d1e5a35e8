"""Optional libraries: imported where they are needed, or refused by name.

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
    "openrlhf": ("OpenRLHF", None),
    "ray": ("Ray", "tokenmill[ray]"),
    "skyrl": ("SkyRL", None),
    "starlette": ("starlette", "tokenmill[serve]"),
    "swift": ("ms-swift", None),
    "torch": ("PyTorch", "tokenmill[torch]"),
    "torchtune": ("torchtune", None),
    "transformers": ("transformers", "tokenmill[hf]"),
    "uvicorn": ("uvicorn", "tokenmill[serve]"),
    "verl": ("verl", None),
}
"""Package → its name in a sentence, and what pip installs it by; None: the host brings itself."""


def install_line(package: str) -> str:
    wanted = LIBRARIES[package][1]
    return f"pip install '{wanted}'" if "[" in str(wanted) else f"pip install {wanted}"


@functools.cache  # milliseconds each, and what is installed stays so while a process runs
def installed_version(package: str) -> str | None:
    from importlib import metadata  # which loads a parser of e-mails

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


@contextmanager
def optional(
    package: str,
    purpose: str = "this",
    *,
    raises: type[TokenmillError] = UsageError,
    path: str | os.PathLike[str] | None = None,
) -> Iterator[None]:
    """Import a package of `LIBRARIES`, or modules that import it, inside this context.

    ``purpose`` is the subject of "needs" in the error, ``path`` the file that it is about.
    """
    try:
        yield
    except ImportError as error:
        name, wanted = LIBRARIES[package]
        message = f"{purpose} needs {name}"
        if wanted is None or (error.name or "").partition(".")[0] != package:
            message += f", which cannot be imported ({error})"
        if wanted is not None:
            message += f": {install_line(package)}"
        raise raises(message, path=path) from error


_muting = threading.RLock()


@contextmanager
def transformers_muted() -> Iterator[None]:
    """Mute what transformers logs and warns, for one thread at a time."""
    import logging  # which a process that only reads does without

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


def first_use(package: str, **homes: str) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of a package that imports a name's module on first use.

    ``homes`` maps a module of the package to its names, separated by spaces.
    """
    home_of = {name: module for module, names in homes.items() for name in names.split()}

    def find(name: str) -> Any:
        if name not in home_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(f"{package}.{home_of[name]}"), name)
        setattr(sys.modules[package], name, value)
        return value

    return find
