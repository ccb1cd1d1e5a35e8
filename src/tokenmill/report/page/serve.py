"""Serve the page over a whole store, to this machine only.

`Viewer` answers the page's requests, `application` puts it behind HTTP, `serve` runs it. It listens
on 127.0.0.1, and every path begins with a random token. Requests with another Host header are
refused, nothing may be cached, nothing is sent to other origins, nothing is written.
"""

from __future__ import annotations

import json
import secrets
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokenmill.dataset import rows_holding
from tokenmill.dataset.where import Where
from tokenmill.errors import TokenmillError, UsageError
from tokenmill.optional import optional
from tokenmill.report.lookup import SourceExcerpts, rejected_rows, row_weights
from tokenmill.report.page.compare import StoreComparison
from tokenmill.report.page.document import page, security_policy
from tokenmill.report.page.overview import filter_names, overview, rejected_row
from tokenmill.report.page.rows import row_summary, row_with_pieces, thumbnail
from tokenmill.report.row import Int64, RowFacts, store_tokenizer
from tokenmill.store import Store
from tokenmill.tokenizer import Tokenizer

HOST = "127.0.0.1"
TOKEN_BYTES = 24
MAX_ROWS = 500  # of one answer
RAW_BYTES = 64 << 10
SCANNED_TOKENS = 20_000_000  # of one search for text; about a second
CACHED_QUERIES = 8  # so that paging does not filter again
MAX_SEARCH_TEXT = 1000  # characters
ORDERS = ("row", "longest", "shortest", "least-trained", "most-trained", "drift")
NUMBER_ORDERS = ("highest", "lowest")
"""Of a number, as ``highest:reward``; rows without it come last in both."""


@dataclass(frozen=True)
class Query:
    """Which rows a list shows; the default is all."""

    where: str = ""  # an expression of the filter language of views
    role: str = ""  # rows with a turn of this role
    changed: bool = False  # rows that a comparison found changed
    text: str = ""  # rows whose text contains this, whatever the case
    start: int = 0  # first row that is searched for text
    order: str = "row"

    @classmethod
    def parse(cls, given: Mapping[str, str]) -> Query:
        """Parse the query of a URL."""
        order, text = given.get("order", "row"), given.get("text", "")
        if order not in ORDERS and order.partition(":")[0] not in NUMBER_ORDERS:
            known = [*ORDERS, *(f"{name}:NUMBER" for name in NUMBER_ORDERS)]
            raise UsageError(f"order must be one of {', '.join(known)}")
        if len(text) > MAX_SEARCH_TEXT:
            raise UsageError(f"text has at most {MAX_SEARCH_TEXT} characters")
        return cls(
            where=given.get("where", "").strip(),
            role=given.get("role", ""),
            changed=given.get("changed") == "1",
            text=text.lower(),
            start=whole(given, "start", 0),
            order=order,
        )


def whole(given: Mapping[str, str], name: str, default: int | None = None) -> int:
    """Parse an integer from 0 of a URL."""
    text = given.get(name, "")
    if not text and default is not None:
        return default
    if not (text.isascii() and text.isdigit() and len(text) < 16):
        raise UsageError(f"{name} is a whole number, not {text!r}")
    return int(text)


@dataclass(frozen=True)
class FoundRows:
    """Row numbers, and the row before which a search for text stopped."""

    rows: Int64
    searched: int


class RowFinder:
    """Finds the rows of a store that a query wants.

    Args:
        facts: Of the store.
        tokenizer: Of the store.
        changed: Returns the rows that a comparison found changed.
        scanned_tokens: Maximum number of tokens that one search for text reads.
    """

    def __init__(
        self,
        facts: RowFacts,
        tokenizer: Tokenizer,
        changed: Callable[[], list[int]] = list,
        scanned_tokens: int = SCANNED_TOKENS,
    ) -> None:
        self._facts = facts
        self._store = facts.store
        self._tokenizer = tokenizer
        self._changed = changed
        self._scanned_tokens = scanned_tokens
        self.find = lru_cache(CACHED_QUERIES)(self._find)

    def _find(self, query: Query) -> FoundRows:
        kept = np.ones(len(self._store), bool)
        if query.where:
            kept &= self._holds(query.where)
        if query.changed:
            kept &= np.isin(np.arange(len(kept)), self._changed())
        if query.role:
            kept &= self._with_role(query.role)
        searched = self._search(query, kept) if query.text else len(self._store)
        rows: Int64 = np.flatnonzero(kept)
        if query.order != "row":
            rows = rows[np.argsort(self._weights(query.order)[rows], kind="stable")]
        return FoundRows(rows, searched)

    def _holds(self, expression: str) -> NDArray[np.bool_]:
        """Return for which rows an expression holds.

        Each row is looked at by itself: a view would keep whole groups, and write an index.
        """
        return rows_holding(self._store, Where(expression, filter_names(self._store)))

    def _weights(self, order: str) -> NDArray[np.float64]:
        """Return the sort key of every row, ascending; NaN comes last."""
        direction, _, name = order.partition(":")
        if direction in NUMBER_ORDERS:
            known = self._facts.numbers
            if name not in known:
                names = ", ".join(known) or "none"
                raise UsageError(f"no number {name!r} per row; there are {names}")
            return -known[name] if direction == "highest" else known[name]
        if order != "drift":
            return row_weights(self._store, order)
        if self._facts.drift is None:
            raise UsageError("no drift classes: this is not a store of recorded rollouts")
        return -self._facts.drift.astype(np.float64)

    def _with_role(self, role: str) -> NDArray[np.bool_]:
        having = np.zeros(len(self._store), bool)
        for at, entry in enumerate(self._store.table):
            reader = self._store.slice_at(at)
            if role not in reader.record.roles:
                continue
            _, bounds, roles = reader.all_turns()
            mine = np.flatnonzero(roles == reader.record.roles.index(role))
            rows = np.searchsorted(bounds, mine, side="right") - 1
            having[int(entry["first_row"]) + rows] = True
        return having

    def _search(self, query: Query, kept: NDArray[np.bool_]) -> int:
        """Clear rows without the text; return the row before which the search stopped."""
        kept[: query.start] = False
        scanned = 0
        for row in np.flatnonzero(kept).tolist():
            if scanned > self._scanned_tokens:
                kept[row:] = False
                return row
            ids = self._store[row].input_ids
            scanned += len(ids)
            kept[row] = query.text in self._text(ids).lower()
        return len(self._store)

    def _text(self, ids: NDArray[np.int32]) -> str:
        table = self._tokenizer.table
        if len(ids) and int(ids.max()) < len(table):
            data = bytes(table.joined(ids)[1])
        else:
            data = b"".join(table.pieces(ids))
        return data.decode("utf-8", "replace")


class Viewer:
    """Answers the page's requests.

    Args:
        store: The store.
        other: Another store to compare it with.
        cache_dir: Cache for row indexes of the sources.
        fetch: Whether remote sources are read for the text of rejected rows.
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
        first, count = whole(given, "first", 0), min(whole(given, "count", 50), MAX_ROWS)
        found = self._finder.find(Query.parse(given))
        shown = found.rows[first : first + count].tolist()
        return {
            "total": len(found.rows),
            "searched": found.searched,
            "of": len(self.store),
            "first": first,
            "rows": [row_summary(self._facts, number, self.tokenizer) for number in shown],
        }

    def place(self, given: Mapping[str, str]) -> dict[str, Any]:
        """Return the position of a row in the answer to a query, or -1."""
        rows = self._finder.find(Query.parse(given)).rows
        found = (rows == whole(given, "row", 0)).nonzero()[0]
        return {"place": int(found[0]) if len(found) else -1}

    def row(self, given: Mapping[str, str]) -> dict[str, Any]:
        return row_with_pieces(self._facts, self._row_number(given), self.tokenizer)

    def picture(self, given: Mapping[str, str]) -> dict[str, str]:
        media = self.store[self._row_number(given)].media
        place = whole(given, "picture", 0)
        if place >= len(media):
            raise UsageError(f"picture {place}: the row has {len(media)}")
        return thumbnail(self.store, media[place])

    def raw(self, given: Mapping[str, str]) -> dict[str, Any]:
        """Return the source row of a row."""
        return self._excerpts.excerpt(self.store[self._row_number(given)].origin, RAW_BYTES)

    def rejected(self, given: Mapping[str, str]) -> dict[str, Any]:
        """Return some of the rejected rows, of one reason or all."""
        first, count = whole(given, "first", 0), min(whole(given, "count", 50), MAX_ROWS)
        reason = given.get("reason")
        wanted = (row for row in rejected_rows(self.store) if not reason or row.reason == reason)
        shown = islice(wanted, first, first + count)
        return {"first": first, "rows": [rejected_row(row) for row in shown]}

    def rejected_raw(self, given: Mapping[str, str]) -> dict[str, Any]:
        """Return the source row of a rejected row."""
        number = whole(given, "number")
        row = next(rejected_rows(self.store, number), None)
        if row is None:
            raise UsageError(f"no rejected row {number}")
        return self._excerpts.excerpt(row.origin, RAW_BYTES)

    def compared(self, given: Mapping[str, str]) -> dict[str, Any]:
        return self._compared_stores.row(self._row_number(given))

    def survey(self, _: Mapping[str, str]) -> dict[str, Any]:
        """Return what changed over the store."""
        survey = self._compared_stores.survey
        return {name: value for name, value in survey.items() if name != "rows"}

    @property
    def _compared_stores(self) -> StoreComparison:
        if self.comparison is None:
            raise UsageError("nothing to compare with: start with --compare OTHER")
        return self.comparison

    def _row_number(self, given: Mapping[str, str]) -> int:
        number = whole(given, "number")
        if number >= len(self.store):
            raise UsageError(f"row {number}: the store has {len(self.store):,} rows")
        return number


def application(viewer: Viewer, token: str, port: int) -> Any:
    """Return the viewer as a starlette application."""
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
    requests: dict[str, Callable[[Mapping[str, str]], dict[str, Any]]] = {
        "rows": viewer.rows,
        "place": viewer.place,
        "rejected": viewer.rejected,
        "picture": viewer.picture,
        "row": viewer.row,
        "raw": viewer.raw,
        "rejected-raw": viewer.rejected_raw,
        "compared": viewer.compared,
        "survey": viewer.survey,
    }

    def plain(text: str, status: int) -> Response:
        return Response(text, status, headers, "text/plain; charset=utf-8")

    # Starlette runs plain functions in threads, so a search does not block other requests.
    def answer(request: Request) -> Response:
        if request.headers.get("host") not in hosts:
            return plain("not this host", 421)
        given = request.path_params.get("token", "").encode("utf-8", "replace")
        if not secrets.compare_digest(given, secret):
            return plain("not found", 404)
        name = request.path_params.get("name")
        if name is None:
            return Response(viewer.page, 200, headers, "text/html; charset=utf-8")
        if name not in requests:
            return plain("not found", 404)
        try:
            document, status = requests[name](request.query_params), 200
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
    made.router.redirect_slashes = False  # a redirect would reveal valid prefixes
    return made


def listen(port: int) -> socket.socket:
    """Return a socket on the loopback interface; port 0 takes a free one."""
    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((HOST, port))
    except (OSError, OverflowError) as error:
        listening.close()
        raise UsageError(f"--port {port} cannot be used: {error}; 0 takes a free one") from error
    return listening


def serve(viewer: Viewer, port: int, ready: Callable[[str, int], None]) -> None:
    """Serve until interrupted; ``ready`` gets the page's address and port."""
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
        listening.listen()  # from now on a browser waits instead of being refused
        ready(f"http://{HOST}:{bound}/{token}/", bound)
        # Ctrl-C is how this ends: uvicorn closes everything, then hands the signal on.
        with suppress(KeyboardInterrupt):
            server.run(sockets=[listening])
