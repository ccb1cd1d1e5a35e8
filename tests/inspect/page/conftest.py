"""Fixtures: a store of the bundled examples and hostile rows, its page and server, a browser."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from tests.build.making import EXAMPLES, INLINE, TOKENIZER, write_rows
from tests.programs import environment
from tokenmill.build.calls import run_recipe
from tokenmill.inspect.page.document import make_page
from tokenmill.inspect.page.serve import HOST, Viewer, application, listen
from tokenmill.store import Store

NEEDS_SERVE = "needs the extra: pip install 'tokenmill[serve]'"
# The headless shell uses a fifth less CPU.
BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser")
CHROMIUM_FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking",
                  "--disable-component-update", "--disable-sync", "--no-first-run"]  # fmt: skip
ATTACK = "</script><script>window.hacked = 1</script><img src=x onerror='window.hacked = 2'>"
STEERING = "a\u202eb\x1b[31mc\x00d"


def hostile_rows() -> list[Any]:
    answer = {"role": "assistant", "content": f"answer {ATTACK} {STEERING}"}
    return [
        {"topic": ATTACK, "messages": [{"role": "user", "content": f"zebra {ATTACK}"}, answer]},
        {"topic": "%%DATA%%", "messages": [{"role": "user", "content": "%%PROGRAM%%"}, answer]},
        {"messages": [{"role": ATTACK, "content": "x"}, answer]},  # the template raises an error
        f'{{"messages": [{ATTACK}',  # not JSON
    ]


@dataclass(frozen=True)
class Made:
    directory: Path
    cache: Path
    store: Store
    other: Store


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    directory = tmp_path_factory.mktemp("page")
    paths = [
        shutil.copy(EXAMPLES / f"{name}.jsonl", directory) for name in ("conversations", "dirty")
    ]
    paths.append(write_rows(directory / "<b>hostile.jsonl", hostile_rows()))
    common: dict[str, Any] = {
        "cache_dir": directory / "cache",
        "keep_columns": ("topic",),
        **INLINE,
    }
    first, second = (
        run_recipe([str(path) for path in paths], str(TOKENIZER), **common, **more).store
        for more in ({}, {"train_on": "last_assistant_message", "trailing": "trim"})
    )
    return Made(directory, directory / "cache", first, second)


@pytest.fixture(scope="session")
def store(made: Made) -> Store:
    return made.store


@pytest.fixture(scope="session")
def page_file(made: Made) -> Path:
    target = made.directory / "page.html"
    make_page(made.store, target, cache_dir=str(made.cache))
    return target


@pytest.fixture(scope="session")
def server(made: Made) -> Iterator[str]:
    """Serve the store, and another one to compare it with, in a separate process."""
    pytest.importorskip("uvicorn", reason=NEEDS_SERVE)
    pytest.importorskip("starlette", reason=NEEDS_SERVE)
    command = [sys.executable, "-m", "tokenmill", "inspect", str(made.store.path), "--serve",
               "--compare", str(made.other.path), "--cache-dir", str(made.cache),
               "--json"]  # fmt: skip
    running = subprocess.Popen(
        command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert running.stdout is not None
    line = running.stdout.readline()
    assert line, running.communicate()[1]
    yield json.loads(line)["url"]
    running.send_signal(signal.SIGINT)
    rest, problems = running.communicate(timeout=30)
    assert (running.returncode, rest, problems) == (0, "", "")


def own_page_and_server(name: str) -> tuple[Any, Any, Any]:
    """Return fixtures `directory`, `page_file` and `server` for a module with its own `store`."""

    @pytest.fixture(scope="module")
    def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
        return tmp_path_factory.mktemp(name)

    @pytest.fixture(scope="module")
    def page_file(directory: Path, store: Store) -> Path:
        target = directory / "page.html"
        make_page(store, target)
        return target

    @pytest.fixture(scope="module")
    def server(store: Store) -> Iterator[str]:
        """Serve in a thread, which starts faster than a process."""
        uvicorn = pytest.importorskip("uvicorn", reason=NEEDS_SERVE)
        pytest.importorskip("starlette", reason=NEEDS_SERVE)
        with listen(0) as listening:
            listening.listen()
            port = listening.getsockname()[1]
            config = uvicorn.Config(application(Viewer(store), "token", port), log_level="error")
            running = uvicorn.Server(config)
            thread = Thread(target=running.run, kwargs={"sockets": [listening]})
            thread.start()
            yield f"http://{HOST}:{port}/token/"
            running.should_exit = True
            thread.join()

    return directory, page_file, server


@pytest.fixture(scope="package")
def browser() -> Iterator[Any]:
    """One browser for this package only: children of later tests would keep its pipe open."""
    driver = pytest.importorskip("playwright.sync_api", reason="needs playwright")
    program = next(filter(None, map(shutil.which, BROWSERS)), None)
    if program is None:
        pytest.skip("needs Debian's chromium-headless-shell, or chromium: none is installed")
    with driver.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=program, args=CHROMIUM_FLAGS)
        yield started
        started.close()


class Tabs:
    """Reuses tabs, which takes a fifth of the time; `visit` checks that a page stores nothing."""

    def __init__(self, browser: Any) -> None:
        self._browser = browser
        self._contexts: dict[str, Any] = {}
        self._idle: dict[tuple[str, str], list[Any]] = {}

    @contextmanager
    def one(self, url: str, settings: dict[str, Any]) -> Iterator[Any]:
        name = json.dumps(settings, sort_keys=True)
        if name not in self._contexts:
            self._contexts[name] = self._browser.new_context(**settings)
        # Changing between file and server would start another process.
        idle = self._idle.setdefault((name, url.partition(":")[0]), [])
        page = idle.pop() if idle else self._contexts[name].new_page()
        page.bring_to_front()  # a background tab draws only once a second
        yield page
        page.goto("about:blank")
        page.mouse.move(0, 0)
        page.emulate_media(color_scheme=settings.get("color_scheme", "light"))
        idle.append(page)


@pytest.fixture(scope="package")
def tabs(browser: Any) -> Tabs:
    return Tabs(browser)


@pytest.fixture
def visit(tabs: Tabs) -> Iterator[Callable[..., Any]]:
    """Open pages; at the end, no page may have logged an error or run injected code."""
    problems: list[str] = []
    listeners: dict[str, Callable[[Any], None]] = {
        "console": lambda message: problems.append(f"{message.type}: {message.text}"),
        "pageerror": lambda error: problems.append(str(error)),
        "dialog": lambda dialog: problems.append("a dialog"),
    }

    @contextmanager
    def one(url: str, **settings: Any) -> Iterator[Any]:
        settings = {"viewport": {"width": 1280, "height": 800}, **settings}
        with tabs.one(url, settings) as page:
            for event, listener in listeners.items():
                page.on(event, listener)
            page.set_default_timeout(30_000)
            page.goto(url)
            page.wait_for_selector("body[data-ready=yes]")
            yield page
            assert page.evaluate("window.hacked") is None
            assert page.evaluate("localStorage.length + sessionStorage.length") == 0
            assert page.context.cookies() == []
            for event, listener in listeners.items():
                page.remove_listener(event, listener)

    with ExitStack() as opened:
        yield lambda url, **settings: opened.enter_context(one(url, **settings))
    assert problems == []


@pytest.fixture(params=["file", "server"])
def address(request: pytest.FixtureRequest) -> str:
    if request.param == "server":
        return str(request.getfixturevalue("server"))
    path: Path = request.getfixturevalue("page_file")
    return path.as_uri()


@pytest.fixture
def on_disk(page_file: Path) -> str:
    return page_file.as_uri()
