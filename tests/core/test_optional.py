"""Optional libraries: what is said where one is missing, or there and broken."""

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
def test_missing_library_is_refused_with_its_install_line(package: str) -> None:
    missing = ModuleNotFoundError(f"No module named {package!r}", name=f"{package}.part")
    with pytest.raises(TokenizerError, match=r"^here: the thing needs ") as caught:
        fail_for(package, missing)
    name, installable = LIBRARIES[package]
    assert name in caught.value.message
    assert (install_line(package) in caught.value.message) == (installable is not None)
    assert caught.value.__cause__ is missing


@pytest.mark.parametrize("package", LIBRARIES)
def test_library_that_is_there_and_broken_says_what_broke(package: str) -> None:
    with pytest.raises(TokenizerError, match=r"which cannot be imported \(libcudart"):
        fail_for(package, ImportError("libcudart.so.12: cannot open"))


def test_every_install_line_names_an_extra_that_there_is() -> None:
    import tomllib
    from pathlib import Path

    project = Path(__file__).resolve().parents[2] / "pyproject.toml"
    extras = tomllib.loads(project.read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    named = {line[len("tokenmill[") : -1] for _, line in LIBRARIES.values() if line and "[" in line}
    assert named <= set(extras)


def test_other_errors_pass_as_they_are() -> None:
    with pytest.raises(KeyError), optional("torch"):
        raise KeyError("x")
    with pytest.raises(UsageError, match="this needs PyTorch: pip install"), optional("torch"):
        raise ModuleNotFoundError(name="torch")


PUT_OFF = ("tokenmill.chat", "tokenmill.media")


@pytest.mark.parametrize("package", [importlib.import_module(name) for name in PUT_OFF])
def test_name_that_is_put_off_is_found_once_and_an_unknown_one_is_an_attribute_error(
    package: types.ModuleType,
) -> None:
    for name in package.__all__:
        found = getattr(package, name)
        assert vars(package)[name] is found  # the next use is a plain look-up
    with pytest.raises(AttributeError, match=f"module '{package.__name__}' has no .*'nonsense'"):
        _ = package.nonsense


def test_installed_version_is_what_the_package_says_of_itself() -> None:
    assert installed_version("pytest") == pytest.__version__
    assert installed_version("no-such-package") is None
