"""Fixtures every room's tests share: the real data of ../shared, a cache of one's own."""

from __future__ import annotations

import contextlib
import functools
import gc
import hashlib
import importlib.util
import math
import os
import signal
import subprocess
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.cli.harness import Shell
from tests.faults.tools import Zygote, compile_shim
from tests.programs import PROJECT
from tokenmill._core import fingerprint
from tokenmill.chat import render, template
from tokenmill.media import Answers, Processor
from tokenmill.media.asking import Asking, Row
from tokenmill.tokenizers import cache as tokenizer_cache

# Time is no assertion: the machine is shared, and speed is measured by `make bench`.
settings.register_profile(
    "tokenmill", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("tokenmill")
# Examples are drawn anew in every run, so half of what a property states does between two edits;
# `make soak` says 1.
EXAMPLES_SHARE = int(os.environ.get("TOKENMILL_TEST_EXAMPLES_SHARE", "2"))

# The zoo's templates, which many tests go through, stay compiled from one to the next.
template.compiled = functools.cache(template.Compiled)

# A shell starts background jobs with Ctrl-C ignored, and every child inherits that: a suite that
# runs in the background could interrupt nothing.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

HOST_LIBRARIES = ("torch", "transformers")
SHARED = PROJECT.parent / "shared" / "data"


def unpack_shared() -> Path | None:
    """Lay the shared data out once per user; None where the folder is missing."""
    stated = os.environ.get("TOKENMILL_TEST_DATA")
    if stated:
        return Path(stated)
    if not (SHARED / "unpack").is_file():
        return None
    sizes = "".join(f"{p.name}:{p.stat().st_size};" for p in sorted(SHARED.glob("*.tar.xz")))
    name = hashlib.sha256(sizes.encode()).hexdigest()[:12]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    target = cache / "tokenmill-tests" / name
    subprocess.run([SHARED / "unpack", target], check=True)
    return target


@pytest.fixture(scope="session")
def shared() -> Path:
    directory = unpack_shared()
    if directory is None:
        pytest.skip("needs ../shared/data, which is not beside this checkout")
    return directory


@pytest.fixture(autouse=True, scope="session")
def sync_to_disk() -> Iterator[Callable[[int], None]]:
    """Replace `fsync`, which takes most of a small build; `tests/core` has the real one back."""
    real = os.fsync
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield real


def link_new_files(source: Path, target: Path) -> None:
    for path in source.rglob("*"):
        new = target / path.relative_to(source)
        if path.is_file() and not new.exists():
            new.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileExistsError):  # another process was faster
                os.link(path, new)


@pytest.fixture(scope="session")
def identified(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What any process of this run found out about tokenizers, which takes seconds for each.

    A test that asks for this, or for the shared data, has it in its own cache.
    """
    own = tmp_path_factory.getbasetemp()
    place = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "identified"
    place.mkdir(exist_ok=True)
    return place


@pytest.fixture
def shell(capsys: pytest.CaptureFixture[str]) -> Shell:
    return Shell(capsys)


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    """Runs commands and programs in new processes for a tenth of what an interpreter costs."""
    running = Zygote(compile_shim())
    yield running
    running.close()


@pytest.fixture(scope="session")
def host_zygote() -> Iterator[Zygote]:
    """The same for programs that import what hosts do: torch and transformers are there."""
    installed = [name for name in HOST_LIBRARIES if importlib.util.find_spec(name)]
    running = Zygote(None, installed, HF_HUB_OFFLINE="1")
    yield running
    running.close()


def as_its_class_says(processor: Any) -> bool:
    """Whether a test replaced no method of a processor: all else is in what names it."""
    parts = (processor, processor.image_processor)
    return not any(
        callable(member) and callable(getattr(type(part), name, None))
        for part in parts
        for name, member in vars(part).items()
    )


_answers: dict[tuple[str, Row], Answers] = {}


@pytest.fixture(autouse=True, scope="session")
def asked_once() -> Iterator[None]:
    """Processors are asked with the same black pictures once: it takes tenths of a second."""
    ask = Asking.with_blanks

    def with_blanks(self: Asking, row: Row) -> Answers:
        processor = self._processor
        if not as_its_class_says(processor):
            return ask(self, row)
        name = (fingerprint.key(Processor(processor, self._options)._question), row)
        if name not in _answers:
            _answers[name] = ask(self, row)
        return _answers[name]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Asking, "with_blanks", with_blanks)
        yield


@pytest.fixture
def answered() -> None:
    """For a test that patches, but nothing that processors answer by: they are not asked again."""


@contextlib.contextmanager
def nothing_known() -> Iterator[None]:
    """Engines and templates are made anew inside, by what is patched there; the others stay."""
    engines, templates = dict(tokenizer_cache._slots), dict(vars(render._known))
    tokenizer_cache.clear_cache()
    render.forget()
    yield
    tokenizer_cache.clear_cache()
    render.forget()
    tokenizer_cache._slots.update(engines)
    vars(render._known).update(templates)


@contextlib.contextmanager
def nothing_answered() -> Iterator[None]:
    answers = dict(_answers)
    _answers.clear()
    yield
    _answers.clear()
    _answers.update(answers)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """Give every test a cache of its own.

    Between tests that patch nothing, engines stay loaded, templates compiled, processors' answers
    known, and the real tokenizers identified.
    """
    patches = "monkeypatch" in request.fixturenames
    cache = tmp_path / "tokenmill-cache"
    with contextlib.ExitStack() as around:
        if patches:
            around.enter_context(nothing_known())
            if "answered" not in request.fixturenames:
                around.enter_context(nothing_answered())
        if "identified" in request.fixturenames or (
            "shared" in request.fixturenames and not patches
        ):
            known = request.getfixturevalue("identified")
            link_new_files(known, cache / tokenizer_cache.DIRECTORY)
            if not patches:
                around.callback(link_new_files, cache / tokenizer_cache.DIRECTORY, known)
        patch = around.enter_context(pytest.MonkeyPatch.context())
        patch.setenv("TOKENMILL_CACHE_DIR", str(cache))
        patch.setenv("HF_HUB_OFFLINE", "1")
        yield cache


CORE_ONLY = "TOKENMILL_TEST_CORE_ONLY"  # set by `make lowest`, which installs the core alone
OUTSIDE = frozenset({"PIL", "aiohttp", "datasets", "hatchling", "huggingface_hub", "ray", "torch",
                     "transformers", "trl"})  # fmt: skip


def missing_extra(error: BaseException | None) -> str | None:
    """The library beyond the core for want of which something failed; None where it was not."""
    while error is not None:
        if isinstance(error, ModuleNotFoundError) and (name := str(error.name)) in OUTSIDE:
            return name
        error = error.__cause__ or error.__context__
    return None


def skip_without_extra(report: Any, excinfo: pytest.ExceptionInfo[Any] | None, path: Path) -> None:
    """Where the core is tried alone, what asks for more is skipped by the name of it."""
    if CORE_ONLY in os.environ and report.failed and excinfo is not None:
        name = missing_extra(excinfo.value)
        if name is not None:
            report.outcome = "skipped"
            report.longrepr = (str(path), 0, f"Skipped: needs {name}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    skip_without_extra(report, call.excinfo, item.path)
    return report


def pytest_collection_finish() -> None:
    """Keep the collector from walking through torch, transformers and all the tests again."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Nor through what a module of tests has imported and leaves."""
    if nextitem is None or nextitem.path != item.path:
        pytest_collection_finish()


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """A module of tests may import more, too."""
    report = yield
    call: pytest.CallInfo[Any] | None = getattr(report, "call", None)
    skip_without_extra(report, call and call.excinfo, collector.path)
    return report


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test that asks for the shared data carries the marker without being told."""
    for item in items:
        if "shared" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.shared)
    for test in {getattr(item, "obj", None) for item in items}:
        if stated := getattr(test, "_hypothesis_internal_use_settings", None):
            some = settings(stated, max_examples=math.ceil(stated.max_examples / EXAMPLES_SHARE))
            test._hypothesis_internal_use_settings = some
