"""Fixtures of all tests: the data of ../shared, a cache per test, processes that start fast."""

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
from tests.skips import skip_line
from tokenmill._core import fingerprint
from tokenmill.chat import render, template
from tokenmill.media import Processor, RowExpansion
from tokenmill.media.probe import Probe, Row
from tokenmill.tokenizers import cache as tokenizer_cache

# No deadlines: the machine may be busy, and `make bench` measures speed.
settings.register_profile(
    "tokenmill", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("tokenmill")
# Every run draws new examples, so `make test` uses half of them; `make soak` sets 1.
EXAMPLES_SHARE = int(os.environ.get("TOKENMILL_TEST_EXAMPLES_SHARE", "2"))

# Many tests use the same templates, so they stay compiled.
template.compiled = functools.cache(template.Compiled)

# A shell starts background jobs with SIGINT ignored, and children inherit that. Tests of Ctrl-C
# need the default handler.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    reports = terminalreporter.stats.get("skipped", [])
    if line := skip_line(report.longrepr[2] for report in reports):
        terminalreporter.write_line(line)


HEAVY_LIBRARIES = ("torch", "transformers")
SHARED = PROJECT.parent / "shared" / "data"


def unpack_shared() -> Path | None:
    """Unpack the shared data once per user; return None if the folder is missing."""
    directory = os.environ.get("TOKENMILL_TEST_DATA")
    if directory:
        return Path(directory)
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
    """Replace `fsync`, which takes most of the time of a small build; `tests/core` restores it."""
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
    """Tokenizer fingerprints of all processes of this run, which take seconds each.

    Tests that use this fixture or the shared data get them in their own cache.
    """
    own = tmp_path_factory.getbasetemp()
    directory = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "identified"
    directory.mkdir(exist_ok=True)
    return directory


@pytest.fixture
def shell(capsys: pytest.CaptureFixture[str]) -> Shell:
    return Shell(capsys)


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    """Run commands and programs in forked processes, ten times faster than an interpreter."""
    running = Zygote(compile_shim())
    yield running
    running.close()


@pytest.fixture(scope="session")
def library_zygote() -> Iterator[Zygote]:
    """The same with torch and transformers imported."""
    installed = [name for name in HEAVY_LIBRARIES if importlib.util.find_spec(name)]
    running = Zygote(None, installed, HF_HUB_OFFLINE="1")
    yield running
    running.close()


def has_original_methods(processor: Any) -> bool:
    """Whether no test replaced a method of a processor; the key covers everything else."""
    parts = (processor, processor.image_processor)
    return not any(
        callable(member) and callable(getattr(type(part), name, None))
        for part in parts
        for name, member in vars(part).items()
    )


_answers: dict[tuple[str, Row], RowExpansion] = {}


@pytest.fixture(autouse=True, scope="session")
def cached_probes() -> Iterator[None]:
    """Probe a processor only once with the same blank images, which takes 0.1 s and more."""
    ask = Probe.with_blanks

    def with_blanks(self: Probe, row: Row) -> RowExpansion:
        processor = self._processor
        if not has_original_methods(processor):
            return ask(self, row)
        name = (fingerprint.key(Processor(processor, self._options)._settings), row)
        if name not in _answers:
            _answers[name] = ask(self, row)
        return _answers[name]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Probe, "with_blanks", with_blanks)
        yield


@pytest.fixture
def answered() -> None:
    """Keep cached probes in a test that uses monkeypatch, but not on processors."""


@contextlib.contextmanager
def without_cached_engines() -> Iterator[None]:
    """Load engines and templates again inside the context, and restore the others afterwards."""
    engines, templates = dict(tokenizer_cache._slots), dict(vars(render._cache))
    tokenizer_cache.clear_cache()
    render.clear_templates()
    yield
    tokenizer_cache.clear_cache()
    render.clear_templates()
    tokenizer_cache._slots.update(engines)
    vars(render._cache).update(templates)


@contextlib.contextmanager
def without_cached_probes() -> Iterator[None]:
    answers = dict(_answers)
    _answers.clear()
    yield
    _answers.clear()
    _answers.update(answers)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """Give every test its own cache directory.

    Tests without monkeypatch share loaded engines, compiled templates, probes of processors and
    fingerprints of real tokenizers.
    """
    patches = "monkeypatch" in request.fixturenames
    cache = tmp_path / "tokenmill-cache"
    with contextlib.ExitStack() as around:
        if patches:
            around.enter_context(without_cached_engines())
            if "answered" not in request.fixturenames:
                around.enter_context(without_cached_probes())
        if "identified" in request.fixturenames or (
            "shared" in request.fixturenames and not patches
        ):
            shared = request.getfixturevalue("identified")
            link_new_files(shared, cache / tokenizer_cache.DIRECTORY)
            if not patches:
                around.callback(link_new_files, cache / tokenizer_cache.DIRECTORY, shared)
        patch = around.enter_context(pytest.MonkeyPatch.context())
        patch.setenv("TOKENMILL_CACHE_DIR", str(cache))
        patch.setenv("HF_HUB_OFFLINE", "1")
        yield cache


CORE_ONLY = "TOKENMILL_TEST_CORE_ONLY"  # set by `make lowest`, which installs no extras
OUTSIDE = frozenset({"PIL", "aiohttp", "datasets", "hatchling", "huggingface_hub", "ray", "torch",
                     "transformers", "trl"})  # fmt: skip


def missing_extra(error: BaseException | None) -> str | None:
    """Return the optional library whose absence caused an error, else None."""
    while error is not None:
        if isinstance(error, ModuleNotFoundError) and (name := str(error.name)) in OUTSIDE:
            return name
        error = error.__cause__ or error.__context__
    return None


def skip_without_extra(report: Any, excinfo: pytest.ExceptionInfo[Any] | None, path: Path) -> None:
    """Skip tests of optional libraries, by name, when only the core is installed."""
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
    """Exclude torch, transformers and all tests from later garbage collections."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Also exclude what a test module imported."""
    if nextitem is None or nextitem.path != item.path:
        pytest_collection_finish()


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Skip test modules that import an optional library."""
    report = yield
    call: pytest.CallInfo[Any] | None = getattr(report, "call", None)
    skip_without_extra(report, call and call.excinfo, collector.path)
    return report


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests that use the shared data, and reduce the examples of properties."""
    for item in items:
        if "shared" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.shared)
    for test in {getattr(item, "obj", None) for item in items}:
        if declared := getattr(test, "_hypothesis_internal_use_settings", None):
            number = math.ceil(declared.max_examples / EXAMPLES_SHARE)
            test._hypothesis_internal_use_settings = settings(declared, max_examples=number)
