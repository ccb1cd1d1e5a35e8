"""The page over a whole store, on this machine alone: the only module that knows starlette.

``tokenmill inspect --serve`` calls `serve` with a `Viewer` and waits until it is interrupted.
`Viewer` answers the page's questions from a store (rows by filter, one row, rejected rows, a
comparison) as plain values; `application` puts it behind HTTP, `serve` runs it. It listens on
127.0.0.1, and every path begins with a random *token*: other users and web pages of this machine
cannot guess it, requests with another Host header (a name that was made to lead here) are refused,
nothing is sent to other origins, nothing may be cached, and nothing is ever written.
"""

from __future__ import annotations

import json
import secrets
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cached_property
from itertools import islice
from typing import Any

from tokenmill.errors import TokenmillError, UsageError
from tokenmill.optional import optional
from tokenmill.report.page.compare import StoreComparison
from tokenmill.report.page.document import page, security_policy
from tokenmill.report.page.overview import overview, rejected_row
from tokenmill.report.page.query import Query, RowFinder, whole
from tokenmill.report.page.rows import row_document, summaries
from tokenmill.report.page.thumbnails import thumbnail
from tokenmill.report.row import store_tokenizer
from tokenmill.report.row_facts import RowFacts
from tokenmill.report.row_lookup import rejected_rows
from tokenmill.report.source_excerpts import SourceExcerpts
from tokenmill.store import Store

HOST = "127.0.0.1"
TOKEN_BYTES = 24
MOST_AT_ONCE = 500  # rows of one answer
RAW_BYTES = 64 << 10


class Viewer:
    """Answers the page's questions.

    Args:
        store: The store to look at.
        other: Another one to compare it with.
        cache_dir: Where row indexes of the sources are kept.
        fetch: Whether sources that are elsewhere are asked for the text of rejected rows.
    """

    def __init__(
        self,
        store: Store,
        other: Store | None = None,
        cache_dir: str | None = None,
        *,
        fetch: bool = False,
    ) -> None:
        self.store = store
        self.tokenizer = store_tokenizer(store)
        self._excerpts = SourceExcerpts(store, cache_dir, fetch=fetch)
        self._facts = RowFacts(store)
        self._finder = RowFinder(
            self._facts, self.tokenizer, lambda: self._compared_stores.survey["rows"]
        )
        self.comparison = (
            StoreComparison(store, other, self.tokenizer) if other is not None else None
        )

    @cached_property
    def page(self) -> bytes:
        return page(
            {
                "overview": overview(self._facts, None),
                "selection": f"All {len(self.store):,} rows of the store, asked for as you look.",
                "compare": None if self.comparison is None else self.comparison.document(),
            }
        )

    def rows(self, given: Mapping[str, str]) -> dict[str, Any]:
        """A stretch of the rows that a query wants."""
        query = Query.parse(given)
        first, count = whole(given, "first") or 0, whole(given, "count") or 50
        answer = self._finder.find(query)
        shown = answer.rows[first : first + min(count, MOST_AT_ONCE)]
        return {
            "total": len(answer.rows),
            "searched": answer.searched,
            "of": len(self.store),
            "first": first,
            "rows": summaries(self._facts, shown.tolist(), self.tokenizer),
        }

    def place(self, given: Mapping[str, str]) -> dict[str, Any]:
        """Where a row stands in the answer to a query; -1 when it is not in it."""
        number = whole(given, "row") or 0
        found = (self._finder.find(Query.parse(given)).rows == number).nonzero()[0]
        return {"place": int(found[0]) if len(found) else -1}

    def row(self, number: int) -> dict[str, Any]:
        return row_document(self._facts, self._known(number), self.tokenizer)

    def picture(self, given: Mapping[str, str]) -> dict[str, str]:
        """A small picture of one of a row's."""
        media = self.store[self._known(_number(given))].media
        place = whole(given, "picture") or 0
        if place >= len(media):
            raise UsageError(f"picture {place}: the row has {len(media)}")
        return thumbnail(self.store, media[place])

    def raw(self, number: int) -> dict[str, Any]:
        return self._excerpts.excerpt(self.store[self._known(number)].origin, RAW_BYTES)

    def rejected(self, given: Mapping[str, str]) -> dict[str, Any]:
        """A stretch of the rejected rows, of one reason or all."""
        first, count = whole(given, "first") or 0, whole(given, "count") or 50
        reason = given.get("reason")
        wanted = (row for row in rejected_rows(self.store) if not reason or row.reason == reason)
        shown = islice(wanted, first, first + min(count, MOST_AT_ONCE))
        return {"first": first, "rows": [rejected_row(row) for row in shown]}

    def rejected_raw(self, number: int) -> dict[str, Any]:
        """The source row of a rejected row."""
        row = next(rejected_rows(self.store, number), None)
        if row is None:
            raise UsageError(f"no rejected row {number}")
        return self._excerpts.excerpt(row.origin, RAW_BYTES)

    def compared(self, number: int) -> dict[str, Any]:
        """A row beside its partner."""
        return self._compared_stores.row(self._known(number))

    def survey(self) -> dict[str, Any]:
        """What changed over the store."""
        survey = self._compared_stores.survey
        return {name: value for name, value in survey.items() if name != "rows"}

    @property
    def _compared_stores(self) -> StoreComparison:
        if self.comparison is None:
            raise UsageError("nothing to compare with: start with --compare OTHER")
        return self.comparison

    def _known(self, number: int) -> int:
        if not 0 <= number < len(self.store):
            raise UsageError(f"row {number}: the store has {len(self.store):,} rows")
        return number


def application(viewer: Viewer, token: str, port: int) -> Any:
    """The viewer behind HTTP."""
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Route

    hosts = {f"{HOST}:{port}", f"localhost:{port}"}
    secret = token.encode()
    headers = {
        "Cache-Control": "no-store",
        "Content-Security-Policy": f"{security_policy(served=True)}; frame-ancestors 'none'",
        "Cross-Origin-Opener-Policy": "same-origin",
        "Cross-Origin-Resource-Policy": "same-origin",
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
        "X-Frame-Options": "DENY",
    }
    questions: dict[str, Callable[[Mapping[str, str]], dict[str, Any]]] = {
        "rows": viewer.rows,
        "place": viewer.place,
        "rejected": viewer.rejected,
        "picture": viewer.picture,
        "row": lambda given: viewer.row(_number(given)),
        "raw": lambda given: viewer.raw(_number(given)),
        "rejected-raw": lambda given: viewer.rejected_raw(_number(given)),
        "compared": lambda given: viewer.compared(_number(given)),
        "survey": lambda _: viewer.survey(),
    }

    def plain(text: str, status: int) -> Response:
        return Response(text, status, headers, "text/plain; charset=utf-8")

    # Plain functions: starlette runs them in threads, so that a search does not hold the others.
    def answer(request: Request) -> Response:
        if request.headers.get("host") not in hosts:
            return plain("not this host", 421)
        given = request.path_params.get("token", "").encode("utf-8", "replace")
        if not secrets.compare_digest(given, secret):
            return plain("not found", 404)
        name = request.path_params.get("name")
        if name is None:
            return Response(viewer.page, 200, headers, "text/html; charset=utf-8")
        ask = questions.get(name)
        if ask is None:
            return plain("not found", 404)
        try:
            document, status = ask(request.query_params), 200
        except UsageError as error:
            document, status = {"error": error.as_dict()}, 400
        except TokenmillError as error:  # a damaged slice, say: the page shows it where it is
            document, status = {"error": error.as_dict()}, 500
        body = json.dumps(document, ensure_ascii=False).encode("utf-8", "replace")
        return Response(body, status, headers, "application/json")

    def nowhere(request: Request, error: Exception) -> Response:
        return plain("not found", 404)

    made = Starlette(
        routes=[
            Route("/{token}/", answer, methods=["GET"]),
            Route("/{token}/api/{name}", answer, methods=["GET"]),
        ],
        exception_handlers={404: nowhere, 405: nowhere},
    )
    made.router.redirect_slashes = False  # a redirect would tell which paths are half right
    return made


def _number(given: Mapping[str, str]) -> int:
    number = whole(given, "number")
    if number is None:
        raise UsageError("which row? ?number=")
    return number


def listen(port: int) -> socket.socket:
    """A socket on this machine's loopback; port 0 takes a free one."""
    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((HOST, port))
    except (OSError, OverflowError) as error:
        listening.close()
        raise UsageError(f"--port {port} cannot be used: {error}; 0 takes a free one") from error
    return listening


def serve(viewer: Viewer, port: int, ready: Callable[[str, int], None]) -> None:
    """Serve until interrupted.

    Args:
        viewer: What is served.
        port: Where; 0 takes a free one.
        ready: Called with the page's address and port once it can be opened.

    Raises:
        UsageError: The port is taken, or the extra is not installed.
    """
    with optional("starlette", "--serve"):
        import starlette.applications  # noqa: F401
    with optional("uvicorn", "--serve"):
        import uvicorn
    with listen(port) as listening:
        bound = listening.getsockname()[1]
        token = secrets.token_urlsafe(TOKEN_BYTES)
        config = uvicorn.Config(
            application(viewer, token, bound),
            log_level="error",
            access_log=False,  # it would print the token
            lifespan="off",
            ws="none",
            server_header=False,
            date_header=False,
            timeout_graceful_shutdown=2,
        )
        server = uvicorn.Server(config)
        listening.listen()  # from here on a browser waits instead of being refused
        ready(f"http://{HOST}:{bound}/{token}/", bound)
        # Ctrl-C is how this ends: uvicorn closes everything, then hands the signal on.
        with suppress(KeyboardInterrupt):
            server.run(sockets=[listening])
