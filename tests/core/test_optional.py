"""Tests of the errors for missing and broken optional libraries."""

from __future__ import annotations

import importlib
import types

import pytest

from tokenmill._core.optional import LIBRARIES, install_line, installed_version, optional
from tokenmill.errors import TokenizerError, UsageError


def fail_for(package: str, error: ImportError) -> None:
    with optional(package, "the thing", raises=TokenizerError, path="here"):
        raise error


@pytest.mark.parametrize("package", LIBRARIES)
def test_missing_library_is_an_error_with_the_pip_command(package: str) -> None:
    missing = ModuleNotFoundError(f"No module named {package!r}", name=f"{package}.part")
    with pytest.raises(TokenizerError, match=r"^here: the thing needs ") as caught:
        fail_for(package, missing)
    name, installable = LIBRARIES[package]
    assert name in caught.value.message
    assert (install_line(package) in caught.value.message) == (installable is not None)
    assert caught.value.__cause__ is missing


@pytest.mark.parametrize("package", LIBRARIES)
def test_broken_library_is_an_error_with_the_cause(package: str) -> None:
    with pytest.raises(TokenizerError, match=r"which cannot be imported \(libcudart"):
        fail_for(package, ImportError("libcudart.so.12: cannot open"))


def test_every_pip_command_names_an_existing_extra() -> None:
    from pathlib import Path

    from scripts.lowest import tomllib

    project = Path(__file__).resolve().parents[2] / "pyproject.toml"
    extras = tomllib.loads(project.read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    named = {line[len("tokenmill[") : -1] for _, line in LIBRARIES.values() if line and "[" in line}
    assert named <= set(extras)


def test_other_errors_are_not_translated() -> None:
    with pytest.raises(KeyError), optional("torch"):
        raise KeyError("x")
    with pytest.raises(UsageError, match="this needs PyTorch: pip install"), optional("torch"):
        raise ModuleNotFoundError(name="torch")


LAZY = ("tokenmill.chat", "tokenmill.media")


@pytest.mark.parametrize("package", [importlib.import_module(name) for name in LAZY])
def test_lazy_exports_are_resolved_once_and_unknown_names_are_attribute_errors(
    package: types.ModuleType,
) -> None:
    for name in package.__all__:
        value = getattr(package, name)
        assert vars(package)[name] is value
    with pytest.raises(AttributeError, match=f"module '{package.__name__}' has no .*'nonsense'"):
        _ = package.nonsense


def test_installed_version_equals_the_version_of_the_package() -> None:
    assert installed_version("pytest") == pytest.__version__
    assert installed_version("no-such-package") is None
