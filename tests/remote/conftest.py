"""Local servers for remote files, and retries without pauses."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import fsspec
import pytest

from tests.remote.servers import RangeServer, serving
from tokenmill._core import remote

Upload = Callable[[Path], str]
"""Uploads a file under its own name; returns its URL."""


@pytest.fixture(autouse=True)
def quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "FIRST_PAUSE_S", 0.001)


@pytest.fixture
def web(tmp_path: Path) -> Iterator[RangeServer]:
    root = tmp_path / "web"
    root.mkdir()
    with serving(RangeServer(root)) as server:
        yield server


@pytest.fixture(scope="session")
def s3_endpoint() -> Iterator[str]:
    """A real S3 server on loopback."""
    from moto.server import MotoRequestHandler, ThreadedMotoServer

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MotoRequestHandler, "disable_nagle_algorithm", True)  # as in `servers`
        server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
        server.start()
        host, port = server.get_host_and_port()
        yield f"http://{host}:{port}"
        server.stop()


@pytest.fixture
def s3(s3_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the URL of a new bucket; endpoint and keys are in the environment."""
    for name, value in {
        "AWS_ENDPOINT_URL": s3_endpoint,
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }.items():
        monkeypatch.setenv(name, value)
    bucket = f"b{uuid.uuid4().hex[:12]}"
    remote.filesystem(f"s3://{bucket}/x")[0].mkdir(bucket)
    return f"s3://{bucket}"


@pytest.fixture
def memory() -> Iterator[str]:
    """Return the URL of a directory in fsspec's memory."""
    root = f"memory://{uuid.uuid4().hex[:8]}"
    yield root
    fs = fsspec.filesystem("memory")
    fs.store.clear()
    fs.pseudo_dirs[:] = [""]


@pytest.fixture(params=["http", "s3", "memory"])
def upload(request: pytest.FixtureRequest) -> Upload:
    """Upload to each kind of server in turn."""
    if request.param == "http":
        server: RangeServer = request.getfixturevalue("web")

        def put_web(path: Path) -> str:
            (server.root / path.name).write_bytes(path.read_bytes())
            return server.url(path.name)

        return put_web
    root: str = request.getfixturevalue(request.param)

    def put(path: Path) -> str:
        url = f"{root}/{path.name}"
        fs, inner = remote.filesystem(url)
        fs.pipe_file(inner, path.read_bytes())
        return url

    return put
