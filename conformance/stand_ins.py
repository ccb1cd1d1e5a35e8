"""Empty modules for packages that a trainer imports but does not use.

Every attribute of such a module is a class that does nothing. Installed packages take precedence.
"""

from __future__ import annotations

import abc
import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import Any


class _Nothing(abc.ABCMeta):
    """Metaclass of the attributes: classes with any attribute that work as decorators."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _made(name)

    def __or__(cls, other: Any) -> Any:
        return cls

    def __ror__(cls, other: Any) -> Any:
        return cls

    def __getitem__(cls, item: Any) -> Any:
        return cls


def _made(name: str) -> Any:
    def construct(cls: type, *given: Any, **named: Any) -> Any:
        if len(given) == 1 and not named and callable(given[0]):
            return given[0]  # used as a decorator
        return object.__new__(cls)

    def call(self: Any, *given: Any, **named: Any) -> Any:
        return given[0] if given and callable(given[0]) else None

    return _Nothing(name, (), {"__new__": construct, "__init__": _ignore, "__call__": call})


def _ignore(self: Any, *given: Any, **named: Any) -> None:
    pass


class _EmptyModule(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = _made(name)
        setattr(self, name, made)
        return made


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, names: Iterable[str]) -> None:
        self.names = tuple(names)

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if any(name == stated or name.startswith(stated + ".") for stated in self.names):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _EmptyModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        module.__version__ = "0"  # type: ignore[attr-defined]


def stand_in(names: Iterable[str]) -> None:
    """Make packages importable as empty modules; installed packages take precedence.

    transformers must cache first which packages are installed, or it would use the empty ones.
    """
    from transformers.utils import import_utils

    for name in dir(import_utils):
        ask = getattr(import_utils, name)
        if name.startswith("is_") and name.endswith("_available") and hasattr(ask, "cache_info"):
            with contextlib.suppress(TypeError):  # some need arguments
                ask()
    sys.meta_path.append(_Finder(names))
