"""The server: access, responses, comparison of stores."""

from __future__ import annotations

import http.client
import json
import socket
import sys
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.build.making import INLINE, TOKENIZER
from tests.cli.harness import Shell
from tests.inspect.page.conftest import ATTACK, Made
from tokenmill.build.calls import run_recipe
from tokenmill.errors import UsageError
from tokenmill.inspect.page.serve import Query, RowFinder, StoreComparison, Viewer, align, listen
from tokenmill.inspect.row import RowFacts
from tokenmill.store import Store


class Client:
    def __init__(self, url: str) -> None:
        self.parts = urlsplit(url)

    def get(
        self, path: str, *, host: str | None = None, method: str = "GET"
    ) -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.parts.port, timeout=30)
        connection.request(
            method, path, headers={"Host": self.parts.netloc if host is None else host}
        )
        response = connection.getresponse()
        body = response.read()
        connection.close()
        return response.status, {name.lower(): value for name, value in response.getheaders()}, body

    def request(self, name: str, **params: Any) -> dict[str, Any]:
        status, _, body = self.get(f"{self.parts.path}api/{name}?{urlencode(params)}")
        document = json.loads(body)
        assert isinstance(document, dict)
        assert (status == 200) == ("error" not in document)
        return document


@pytest.fixture
def client(server: str) -> Client:
    return Client(server)


def test_server_is_local_and_a_wrong_token_is_not_found(client: Client) -> None:
    token = client.parts.path.strip("/")
    assert client.parts.hostname == "127.0.0.1"
    assert len(token) >= 32
    for wrong in ("", "x", token[:-1], token + "x", token.swapcase(), "%00", quote("…")):
        for rest in ("/", "/api/rows", "/api/row?number=0"):
            status, _, body = client.get(f"/{wrong}{rest}")
            assert (status, body) == (404, b"not found"), wrong
    assert client.get("/favicon.ico")[0] == 404


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1", "[::1]:1", ""])
def test_other_host_is_refused(client: Client, host: str) -> None:
    port = client.parts.port
    for name in (host, f"{host}.evil:{port}"):
        status, _, body = client.get(client.parts.path, host=name)
        assert status in (400, 421)
        assert b"html" not in body.lower()


def test_responses_forbid_caching_framing_and_other_origins(client: Client) -> None:
    for path in (client.parts.path, f"{client.parts.path}api/rows", "/wrong/"):
        _, headers, _ = client.get(path)
        assert headers["cache-control"] == "no-store"
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"
        assert headers["cross-origin-resource-policy"] == "same-origin"
        assert "default-src 'none'" in headers["content-security-policy"]
        assert "frame-ancestors 'none'" in headers["content-security-policy"]
        assert "unsafe" not in headers["content-security-policy"]
        assert not [name for name in headers if name.startswith("access-control")]


def test_only_get_is_supported(client: Client) -> None:
    for method in ("POST", "PUT", "DELETE", "OPTIONS"):
        assert client.get(f"{client.parts.path}api/rows", method=method)[0] in (404, 405)


def test_rows_equal_those_of_the_store(client: Client, made: Made) -> None:
    for number in (0, 4, len(made.store) - 1):
        row, found = made.store[number], client.request("row", number=number)
        assert found["ids"] == row.input_ids.tolist()
        assert found["turns"] == [list(turn) for turn in row.turns]
        pieces = [bytes.fromhex(found["table"][str(n)][0]) for n in found["ids"]]
        assert pieces == made.store.tokenizer.pieces(found["ids"])
        raw = client.request("raw", number=number)
        assert len(raw["text"].encode()) == row.origin.length


def test_lists_are_paged(client: Client, made: Made) -> None:
    seen = []
    for first in range(0, len(made.store) + 100, 100):
        answer = client.request("rows", first=first, count=100)
        assert answer["total"] == len(made.store)
        seen += [row["row"] for row in answer["rows"]]
    assert seen == list(range(len(made.store)))


def test_invalid_request_is_a_usage_error(client: Client) -> None:
    for asked in ({"number": "x"}, {"number": "-1"}, {"number": "99999"}, {}, {"number": "9" * 40}):
        assert client.request("row", **asked)["error"]["type"] == "UsageError", asked


def matches(store: Store, text: str) -> list[int]:
    tokenizer = store.tokenizer
    whole = (b"".join(tokenizer.pieces(row.input_ids)).decode("utf-8", "replace") for row in store)
    return [n for n, row in enumerate(whole) if text.lower() in row.lower()]


def test_filters_equal_a_check_of_every_row(store: Store) -> None:
    finder = RowFinder(RowFacts(store))
    lengths, shares = store.lengths, store.trained / store.lengths
    cases: list[tuple[dict[str, str], Any]] = [
        ({}, lambda n: True),
        ({"where": "length >= 100 and length <= 200"}, lambda n: 100 <= lengths[n] <= 200),
        ({"where": "trained / length >= 0.5"}, lambda n: shares[n] >= 0.5),
        (
            {"where": f"source == {json.dumps(store.sources[1])}", "role": "user"},
            lambda n: store[n].origin.path == store.sources[1],
        ),
        ({"where": "extra.topic is not None"}, lambda n: store[n].extra["topic"] is not None),
        ({"role": "tool"}, lambda n: any(turn[0] == "tool" for turn in store[n].turns)),
        ({"role": "nobody"}, lambda n: False),
    ]
    for asked, fits in cases:
        rows = finder.find(Query.parse(asked))[0].tolist()
        assert rows == [n for n in range(len(store)) if fits(n)], asked
    for text in ("Tides", "木漏れ日", "<|im_end|>", ATTACK, "nowhere to be found"):
        assert finder.find(Query.parse({"text": text}))[0].tolist() == matches(store, text)
    longest, _ = finder.find(Query.parse({"order": "longest", "role": "tool"}))
    assert np.all(np.diff(lengths[longest]) <= 0)


def test_search_is_bounded_and_can_be_continued(store: Store) -> None:
    finder = RowFinder(RowFacts(store), scanned_tokens=5000)
    found: list[int] = []
    start, requests = 0, 0
    while start < len(store):
        rows, searched = finder.find(Query.parse({"text": "the", "start": str(start)}))
        found += rows.tolist()
        assert searched > start
        start, requests = searched, requests + 1
    assert requests > 3
    assert found == matches(store, "the")


@pytest.mark.parametrize(
    "query", [{"where": "x"}, {"where": "__import__('os')"}, {"where": "length >"},
              {"order": "best"}, {"order": "drift"}, {"order": "highest:x"}, {"text": "x" * 2000},
              {"start": "1e3"}], ids=str)  # fmt: skip
def test_invalid_query_is_a_usage_error(store: Store, query: dict[str, str]) -> None:
    finder = RowFinder(RowFacts(store))
    with pytest.raises(UsageError):
        finder.find(Query.parse(query))


def test_comparison_distinguishes_mask_and_text(made: Made, client: Client) -> None:
    comparison = StoreComparison(made.store, made.other)
    survey = comparison.survey
    assert survey["ids"] == survey["missing"] == 0
    assert survey["only_theirs"] == 1, "the trailing user turn that is trimmed there"
    assert survey["same"] + survey["mask_only"] == len(made.store)
    assert survey["mask_only"] == len(survey["rows"]) > 0
    fields = {one["field"] for one in comparison.document()["differs"]}
    assert fields == {"recipe.train_on", "recipe.trailing"}
    for number in survey["rows"][:5]:
        answer = client.request("compared", number=number)
        other = answer["theirs"]["row"]
        assert made.store[number].origin == made.other[other].origin
        apart = made.store[number].loss_mask != made.other[other].loss_mask
        changed = answer["changed"]
        assert changed == {"text": False, "ids": False, "mask": True,
                           "mask_tokens": int(apart.sum())}  # fmt: skip
    last = client.request("place", changed=1, row=survey["rows"][-1])
    assert last == {"place": len(survey["rows"]) - 1}
    shown = client.request("rows", changed=1, count=500)
    assert [row["row"] for row in shown["rows"]] == survey["rows"]


def test_equal_rows_are_partners_in_order(made: Made) -> None:
    comparison = StoreComparison(made.store, made.other)
    partners = [comparison.partner(number) for number in range(len(made.store))]
    rows = [partner[0] for partner in partners if partner is not None]
    assert len(rows) == len(set(rows)) == len(made.store), "dirty.jsonl holds one row twice"
    for number, partner in enumerate(partners):
        assert partner is not None
        assert made.other[partner[0]].origin == made.store[number].origin


def test_edited_row_is_compared_by_its_origin(made: Made, tmp_path: Path) -> None:
    edited = tmp_path / "conversations.jsonl"
    lines = (made.directory / "conversations.jsonl").read_text("utf-8").splitlines(keepends=True)
    lines[3] = lines[3].replace("tides", "great tides")
    edited.write_text("".join(lines), "utf-8")
    other = run_recipe(str(edited), str(TOKENIZER), cache_dir=tmp_path / "cache", **INLINE).store
    comparison = StoreComparison(made.store, other)
    answer = comparison.row(3)
    changed = answer["changed"]
    assert (answer["by"], changed["text"], changed["ids"]) == ("origin", True, True)
    assert not changed["mask"]
    assert any(step[0] != "equal" for step in answer["steps"])
    assert comparison.row(4)["by"] == "content"
    assert comparison.row(len(made.store) - 1)["theirs"] is None


@given(st.text("abc", max_size=12), st.text("abc", max_size=12))
def test_alignment_rebuilds_both_sides(ours: str, theirs: str) -> None:
    steps, aligned = align(list(ours), list(theirs))
    assert aligned
    assert "".join(ours[a0:a1] for _, a0, a1, _, _ in steps) == ours
    assert "".join(theirs[b0:b1] for _, _, _, b0, b1 in steps) == theirs
    for kind, a0, a1, b0, b1 in steps:
        assert (ours[a0:a1] == theirs[b0:b1]) == (kind == "equal")


def test_taken_port_is_a_usage_error() -> None:
    with listen(0) as taken:
        taken.listen()
        with pytest.raises(UsageError, match=r"port=.*cannot be used"):
            listen(taken.getsockname()[1])
    with pytest.raises(UsageError):
        listen(99_999)
    assert isinstance(taken, socket.socket)


@pytest.mark.parametrize("missing", ["uvicorn", "starlette", "starlette.applications"])
def test_missing_extra_names_its_install_line(
    made: Made, shell: Shell, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    answer = shell("inspect", made.store.path, "--serve")
    assert answer.code == 2
    assert "pip install 'tokenmill[serve]'" in answer.err
    assert answer.out == ""


def test_viewer_without_another_store_names_the_flag(made: Made) -> None:
    viewer = Viewer(made.store, cache_dir=str(made.cache))
    for ask in (viewer.survey, viewer.compared, viewer.rows):
        with pytest.raises(UsageError, match="--compare"):
            ask({"number": "0", "changed": "1"})
