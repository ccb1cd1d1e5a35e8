"""No message, log, origin or file of a store contains the password or query of a URL."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tokenmill as tm
from tests.build.making import INLINE, TOKENIZER, conversations, write_rows
from tests.remote.servers import RangeServer
from tests.sampling import sampled
from tokenmill._core import remote
from tokenmill.errors import SourceError, TokenmillError, UsageError, hide_secrets, shown
from tokenmill.media import Images, Limits, reference_of, web
from tokenmill.sources.rows import open_rows

CANARY = "c4n4ryS3cret"
USER = f"user:{CANARY}@"
QUERY = f"?sv=1&sig={CANARY}"
CLOSED = "127.0.0.1:9"

FAILING = [
    f"{scheme}://{user}{host}/{name}{query}"
    for scheme, host in {
        "http": CLOSED, "https": CLOSED, "ftp": CLOSED, "sftp": CLOSED, "s3": "bucket", "gs": "b",
        "az": "container", "abfs": "container", "hf": "datasets/o/n", "memory": "h", "foo": "h",
        "simplecache::http": CLOSED,
    }.items()
    for user, query in ((USER, ""), ("", QUERY), (f"key:{CANARY}/x@", QUERY))
    for name in ("a.jsonl", "a.unknown", "dir", "*.jsonl", "a.jsonl@train[0:x]")
]  # fmt: skip


ARGUMENTS = ["tokenizer", "processor", "chat_template", "media_root", "cache_dir"]


@pytest.fixture(autouse=True)
def closed_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "ATTEMPTS", 1)
    monkeypatch.setattr(web, "RETRY_DELAY_S", 0.0)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{CLOSED}")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def assert_hidden(call: Callable[[], Any], error: type[Exception] = TokenmillError) -> None:
    with pytest.raises(error) as caught:
        call()
    made = caught.value
    assert isinstance(made, TokenmillError)
    assert CANARY not in f"{made} {made!r} {made.as_dict()}"
    assert CANARY not in "".join(traceback.format_exception(made))
    if isinstance(made, UsageError):
        assert CANARY not in made.render({"sources": "--sources"})


@pytest.mark.parametrize("url", sampled(FAILING, 2))
def test_failing_url(url: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert_hidden(lambda: open_rows(url))
    assert_hidden(lambda: tm.open_store(url))
    # The S3 server of another test may run in this process; it logs the requests that it gets.
    own = [record for record in caplog.records if record.name != "werkzeug"]
    assert not any(CANARY in record.getMessage() for record in own)


@pytest.mark.parametrize(
    "url",
    [f"{scheme}://{USER}{CLOSED}/a" for scheme in ("http", "s3", "foo")]
    + [f"http://{CLOSED}/a?x='q'&sig={CANARY}", f"http://u:80/{CANARY}@h/a", f"az://c/a?{CANARY}"],
)
@pytest.mark.parametrize("argument", ARGUMENTS)
def test_failing_argument(
    url: str, argument: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    source = write_rows(tmp_path / "chat.jsonl", conversations(3))
    options: dict[str, Any] = {"tokenizer": TOKENIZER, "cache_dir": "cache", **INLINE}
    if argument == "media_root":
        assert_hidden(lambda: Images(url))
    else:
        assert_hidden(lambda: tm.prepare(source, **{**options, argument: url}))
    assert [path.name for path in tmp_path.iterdir() if CANARY in str(path)] == []


@pytest.mark.parametrize("url", [f"s3://{USER}b/a", f"simplecache::http://{USER}{CLOSED}/a{QUERY}"])
def test_url_is_not_written_to_as_a_local_directory(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_rows(tmp_path / "chat.jsonl", conversations(3))
    store = tm.prepare(source, TOKENIZER, cache_dir=tmp_path / "cache", **INLINE)
    monkeypatch.chdir(tmp_path)
    assert_hidden(lambda: tm.export(store, format="jsonl", out=url), UsageError)
    assert_hidden(lambda: tm.pull(store.path, out=url, cache_dir="cache"), UsageError)
    if "::" in url:
        assert_hidden(lambda: tm.push(store, url), UsageError)
        assert_hidden(lambda: tm.open_store(url), UsageError)
    assert {path.name for path in tmp_path.iterdir()} == {"chat.jsonl", "cache"}


@pytest.mark.parametrize("status", [400, 401, 403, 404, 410, 416, 429, 500, 503])
@pytest.mark.parametrize("redirected", [False, True])
def test_failing_server(
    web: RangeServer, monkeypatch: pytest.MonkeyPatch, status: int, redirected: bool
) -> None:
    def answer(handler: Any) -> bool:
        if redirected and "sig" not in handler.path:
            handler.send_response(302)
            handler.send_header("Location", f"/signed.jsonl{QUERY}")
            handler.send_header("Content-Length", "0")
            handler.end_headers()
        else:
            handler.status(status)
        return True

    monkeypatch.setattr(web, "answer", answer)
    url = web.url("rows.jsonl" if redirected else f"rows.jsonl{QUERY}")
    assert_hidden(lambda: open_rows(url), SourceError)


@pytest.mark.parametrize(
    "value",
    [
        f"http://{USER}{CLOSED}/a b.png{QUERY}", f"http://a..b/{QUERY}", f"http://{USER}a..b/",
        f"https://{USER}[/{QUERY}", f"s3://{USER}{'b' * 200}/a.png", f"az://c/a.png{QUERY}",
        f"zip://a.png::http://{USER}h/a.zip{QUERY}", {"url": f"ftp://{USER}h/a.png"},
        {"unknown": f"http://{'u' * 90}:{CANARY}@h/a.png"},
    ],
)  # fmt: skip
def test_failing_image(value: Any, tmp_path: Path) -> None:
    for urls in (True, False):
        images = Images(tmp_path, urls=urls, private=True, limits=Limits(seconds=2))
        assert_hidden(lambda images=images: images.read(reference_of(value)), SourceError)


def test_store_of_a_signed_url(
    web: RangeServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    write_rows(web.root / "chat.jsonl", [*conversations(20), "{bad"])
    url = web.url(f"chat.jsonl{QUERY}").replace("http://", f"http://{USER}")
    store = tm.prepare(url, tokenizer=TOKENIZER, cache_dir=tmp_path / "cache", **INLINE)
    texts = [repr(store), repr(store[0]), str(store.path), caplog.text, repr(store.manifest)]
    texts += [repr(store[0].origin), repr(list(store.sources)), repr(open_rows(url).origin(0))]
    assert CANARY not in "".join(texts)
    for path in filter(Path.is_file, (tmp_path / "cache").rglob("*")):
        assert CANARY.encode() not in path.read_bytes(), path
    assert store[0].origin.path == web.url("chat.jsonl")


def test_remote_store_with_a_password(memory: str, tmp_path: Path) -> None:
    path = write_rows(tmp_path / "chat.jsonl", conversations(20))
    store = tm.prepare(path, tokenizer=TOKENIZER, cache_dir=tmp_path / "cache", **INLINE)
    url = memory.replace("memory://", f"memory://{USER}")
    pushed = tm.push(store, f"{url}/store")
    opened = tm.open_store(f"{url}/store", cache_dir=tmp_path / "other")
    assert CANARY not in f"{pushed} {opened!r} {opened.path} {opened.path!r}"
    assert len(opened) == len(store)


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("http://u:p@h:80/a@b.jsonl?x=1#y", "http://h:80/a@b.jsonl"),
        ("http://h/a?nothing", "http://h/a"),
        ("http://[::1]:80/a@b", "http://[::1]:80/a@b"),
        ("https://u@h", "https://h"),
        ("s3://key:a/b+c@bucket/x", "s3://bucket/x"),
        ("s3://bucket/part-?.jsonl", "s3://bucket/part-?.jsonl"),
        ("s3://bucket/a#1.jsonl", "s3://bucket/a#1.jsonl"),
        ("az://c/x?sig=a/b", "az://c/x"),
        ("az://c/x?token", "az://c/x"),
        ("abfs://c@account/x?token", "abfs://account/x"),
        ("http://u:80/a@h/x", "http://h/x"),
        ("http://127.0.0.1:80/a@b/x", "http://127.0.0.1:80/a@b/x"),
        ("http://localhost:80/a@b/x", "http://localhost:80/a@b/x"),
        ("http://h:80/a.jsonl@train[0:9]", "http://h:80/a.jsonl@train[0:9]"),
        ("http:///u:p@h/x", "http:///h/x"),
        ("file:///data/a@b/x.jsonl", "file:///data/a@b/x.jsonl"),
        ("hf://datasets/o/n@main/x.jsonl", "hf://datasets/o/n@main/x.jsonl"),
        ("/data/a?b=c@d.jsonl", "/data/a?b=c@d.jsonl"),
        ("http://[", "http://["),
    ],
)
def test_shown(url: str, text: str) -> None:
    assert shown(url) == text
    assert hide_secrets(f"url='{url}', and more") == f"url='{text}', and more"
