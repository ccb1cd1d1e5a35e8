"""Serve the page for a whole store, to this machine only.

The server listens on 127.0.0.1, and every path begins with a random token. It refuses requests with
another Host header, forbids caching and other origins, and writes nothing.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import cached_property, lru_cache
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokenmill._core.optional import optional
from tokenmill.build.plan import differences
from tokenmill.data.choices import rows_matching
from tokenmill.errors import TokenmillError, UsageError
from tokenmill.inspect.page.document import (
    filter_names,
    overview,
    page,
    rejected_row,
    row_summary,
    row_with_pieces,
    security_policy,
    thumbnail,
)
from tokenmill.inspect.row import (
    Int64,
    RowFacts,
    SourceExcerpts,
    row_weights,
    rows_of_source_row,
)
from tokenmill.store import Store
from tokenmill.store.where import Where

HOST = "127.0.0.1"
TOKEN_BYTES = 24
MAX_ROWS = 500  # of one response
RAW_BYTES = 64 << 10
SCANNED_TOKENS = 20_000_000  # of one search for text; about a second
CACHED_QUERIES = 8  # so that paging does not filter again
MAX_SEARCH_TEXT = 1000  # characters
MAX_ALIGNED_TOKENS = 4000  # between equal ends; the time grows with the square
MAX_SURVEYED_ROWS = 100_000  # takes some seconds
ORDERS = ("row", "longest", "shortest", "least-trained", "most-trained", "drift")
NUMBER_ORDERS = ("highest", "lowest")  # as ``highest:reward``; rows without it come last


@dataclass(frozen=True)
class Query:
    where: str = ""  # an expression of the filter language of views
    role: str = ""  # rows with a turn of this role
    changed: bool = False  # rows that changed, in a comparison
    text: str = ""  # rows that contain this text, ignoring case
    start: int = 0  # first row to search for text
    order: str = "row"

    @classmethod
    def parse(cls, params: Mapping[str, str]) -> Query:
        order, text = params.get("order", "row"), params.get("text", "")
        if order not in ORDERS and order.partition(":")[0] not in NUMBER_ORDERS:
            known = [*ORDERS, *(f"{name}:NUMBER" for name in NUMBER_ORDERS)]
            raise UsageError(f"order must be one of {', '.join(known)}, got {order!r}")
        if len(text) > MAX_SEARCH_TEXT:
            raise UsageError(f"text must have at most {MAX_SEARCH_TEXT} characters")
        return cls(
            where=params.get("where", "").strip(),
            role=params.get("role", ""),
            changed=params.get("changed") == "1",
            text=text.lower(),
            start=parse_integer(params, "start", 0),
            order=order,
        )


def parse_integer(params: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = params.get(name, "")
    if not text and default is not None:
        return default
    if not (text.isascii() and text.isdigit() and len(text) < 16):
        raise UsageError(f"{name} must be a non-negative integer, got {text!r}")
    return int(text)


def _page_of(params: Mapping[str, str]) -> tuple[int, int]:
    return parse_integer(params, "first", 0), min(parse_integer(params, "count", 50), MAX_ROWS)


class RowFinder:
    def __init__(
        self,
        facts: RowFacts,
        changed: Callable[[], list[int]] = list,  # rows that changed, in a comparison
        scanned_tokens: int = SCANNED_TOKENS,  # limit of one search for text
    ) -> None:
        self._facts = facts
        self._store = facts.store
        self._changed = changed
        self._scanned_tokens = scanned_tokens
        self.find = lru_cache(CACHED_QUERIES)(self._find)

    def _find(self, query: Query) -> tuple[Int64, int]:
        """Return row numbers, and the row before which a search for text stopped."""
        kept = np.ones(len(self._store), bool)
        if query.where:
            # Filter single rows: a view would keep whole groups and write an index.
            where = Where(query.where, filter_names(self._store))
            kept &= rows_matching(self._store, where)
        if query.changed:
            kept &= np.isin(np.arange(len(kept)), self._changed())
        if query.role:
            kept &= self._with_role(query.role)
        searched = self._search(query, kept) if query.text else len(self._store)
        rows: Int64 = np.flatnonzero(kept)
        if query.order != "row":
            rows = rows[np.argsort(self._weights(query.order)[rows], kind="stable")]
        return rows, searched

    def _weights(self, order: str) -> NDArray[np.float64]:
        direction, _, name = order.partition(":")
        if direction in NUMBER_ORDERS:
            known = self._facts.numbers
            if name not in known:
                names = ", ".join(known) or "none"
                raise UsageError(f"rows have no number {name!r}; their numbers are {names}")
            return -known[name] if direction == "highest" else known[name]
        if order != "drift":
            return row_weights(self._store, order)
        if self._facts.drift is None:
            raise UsageError("order=drift needs a store of recorded rollouts")
        return -self._facts.drift.astype(np.float64)

    def _with_role(self, role: str) -> NDArray[np.bool_]:
        has_role = np.zeros(len(self._store), bool)
        for at, entry in enumerate(self._store.table):
            reader = self._store.slice_at(at)
            if role not in reader.record.roles:
                continue
            _, bounds, roles = reader.all_turns()
            turns = np.flatnonzero(roles == reader.record.roles.index(role))
            rows = np.searchsorted(bounds, turns, side="right") - 1
            has_role[int(entry["first_row"]) + rows] = True
        return has_role

    def _search(self, query: Query, kept: NDArray[np.bool_]) -> int:
        """Clear rows without the text; return the row before which the search stopped."""
        kept[: query.start] = False
        scanned = 0
        for row in np.flatnonzero(kept).tolist():
            if scanned > self._scanned_tokens:
                kept[row:] = False
                return int(row)
            ids = self._store[row].input_ids
            scanned += len(ids)
            kept[row] = query.text in self._text(ids).lower()
        return len(self._store)

    def _text(self, ids: NDArray[np.int32]) -> str:
        table = self._store.tokenizer.table
        if len(ids) and int(ids.max()) < len(table):
            data = bytes(table.joined(ids)[1])
        else:
            data = b"".join(table.pieces(ids))
        return data.decode("utf-8", "replace")


class _RowsByDigest:
    def __init__(self, store: Store) -> None:
        chunks = [columns for _, columns in store.columns(("digest", "part"))]
        self.digests = np.concatenate([np.zeros(0, np.uint64), *(c["digest"] for c in chunks)])
        self.parts = np.concatenate([np.zeros(0, np.int32), *(c["part"] for c in chunks)])
        self.order = np.argsort(self.digests, kind="stable")
        self.sorted = self.digests[self.order]

    def rows(self, digest: np.uint64, part: int) -> Int64:
        first = np.searchsorted(self.sorted, digest, side="left")
        last = np.searchsorted(self.sorted, digest, side="right")
        rows = self.order[first:last]
        equal: Int64 = rows[self.parts[rows] == part]
        return equal


class StoreComparison:
    """Compares the rows of two stores that come from the same source rows.

    The *partner* of a row has the same source bytes (and turn number, with ``expand``); equal rows
    are paired in order. If no row has the same bytes, its source was edited, and the partner is the
    row with the same file name and row number. Partners are aligned by ids if both stores have the
    same tokenizer, else by the bytes of tokens.
    """

    def __init__(self, ours: Store, theirs: Store) -> None:
        self.ours = ours
        self.theirs = theirs
        self._our_facts, self._their_facts = RowFacts(ours), RowFacts(theirs)
        identities = {store.manifest["tokenizer"]["identity"] for store in (ours, theirs)}
        self._one_tokenizer = len(identities) == 1

    @cached_property
    def _contents(self) -> tuple[_RowsByDigest, _RowsByDigest]:
        return _RowsByDigest(self.ours), _RowsByDigest(self.theirs)

    def partner(self, row: int) -> tuple[int, str] | None:
        """Return the row of the other store, and ``content`` or ``origin`` for how it matches."""
        ours, theirs = self._contents
        digest, part = ours.digests[row], int(ours.parts[row])
        equal = theirs.rows(digest, part)
        if len(equal):
            place = int(np.searchsorted(ours.rows(digest, part), row))
            return (int(equal[place]), "content") if place < len(equal) else None
        origin = self.ours[row].origin
        name = os.path.basename(origin.path or "")
        for source, path in enumerate(self.theirs.sources):
            if path is None or os.path.basename(path) != name:
                continue
            for other in rows_of_source_row(self.theirs, source, origin.row, by_line=False):
                if theirs.parts[other] == part and not len(ours.rows(theirs.digests[other], part)):
                    return other, "origin"
        return None

    def row(self, number: int) -> dict[str, Any]:
        ours = row_with_pieces(self._our_facts, number)
        partner = self.partner(number)
        if partner is None:
            note = "the other store has no row from this source row"
            return {"ours": ours, "theirs": None, "note": note}
        place, by = partner
        theirs = row_with_pieces(self._their_facts, place)
        mine, other = self.ours[number], self.theirs[place]
        our_ids, their_ids = ours["ids"], theirs["ids"]
        our_pieces = self.ours.tokenizer.pieces(our_ids)
        their_pieces = self.theirs.tokenizer.pieces(their_ids)
        if self._one_tokenizer:
            steps, aligned = align(our_ids, their_ids)
        else:
            steps, aligned = align(our_pieces, their_pieces)
        mask_tokens = sum(
            int(np.count_nonzero(mine.loss_mask[a0:a1] != other.loss_mask[b0:b1]))
            for kind, a0, a1, b0, b1 in steps
            if kind == "equal"
        )
        return {
            "ours": ours,
            "theirs": theirs,
            "by": by,
            "steps": steps,
            "aligned": aligned,
            "changed": {
                "text": b"".join(our_pieces) != b"".join(their_pieces),
                "ids": our_ids != their_ids,
                "mask": mask_tokens > 0,  # of tokens in both rows; others count as changed ids
                "mask_tokens": mask_tokens,
            },
            "note": "" if by == "content" else "the source row was edited between the two builds",
        }

    @cached_property
    def survey(self) -> dict[str, Any]:
        surveyed = min(len(self.ours), MAX_SURVEYED_ROWS)
        counts = dict.fromkeys(("same", "ids", "mask_only", "missing"), 0)
        changed = []
        for number in range(surveyed):
            kind = self._change(number)
            counts[kind] += 1
            if kind != "same":
                changed.append(number)
        matched = surveyed - counts["missing"]
        is_complete = surveyed == len(self.ours)
        return {
            **counts,
            "surveyed": surveyed,
            "of": len(self.ours),
            "only_theirs": len(self.theirs) - matched if is_complete else None,
            "rows": changed,
        }

    def _change(self, number: int) -> str:
        partner = self.partner(number)
        if partner is None:
            return "missing"
        mine, other = self.ours[number], self.theirs[partner[0]]
        if not np.array_equal(mine.input_ids, other.input_ids):
            return "ids"
        return "same" if np.array_equal(mine.loss_mask, other.loss_mask) else "mask_only"

    def document(self) -> dict[str, Any]:
        return {
            "path": str(self.theirs.path),
            "key": self.theirs.key,
            "totals": self.theirs.manifest["totals"],
            "one_tokenizer": self._one_tokenizer,
            "differs": differences(*(s.manifest["document"] for s in (self.ours, self.theirs))),
        }


def align(ours: list[Any], theirs: list[Any]) -> tuple[list[list[Any]], bool]:
    """Return edit steps ``[kind, a0, a1, b0, b1]``, and whether the middle was aligned."""
    shorter = min(len(ours), len(theirs))
    head = next((n for n in range(shorter) if ours[n] != theirs[n]), shorter)
    tail = 0
    while tail < shorter - head and ours[-1 - tail] == theirs[-1 - tail]:
        tail += 1
    a_end, b_end = len(ours) - tail, len(theirs) - tail
    steps: list[list[Any]] = [["equal", 0, head, 0, head]] if head else []
    aligned = max(a_end, b_end) - head <= MAX_ALIGNED_TOKENS
    if a_end > head or b_end > head:
        if aligned:
            matcher = SequenceMatcher(None, ours[head:a_end], theirs[head:b_end], autojunk=False)
            steps += [
                [kind, a0 + head, a1 + head, b0 + head, b1 + head]
                for kind, a0, a1, b0, b1 in matcher.get_opcodes()
            ]
        else:
            steps.append(["replace", head, a_end, head, b_end])
    if tail:
        steps.append(["equal", a_end, len(ours), b_end, len(theirs)])
    return steps, aligned


REQUESTS = ("rows", "place", "rejected", "image", "row", "raw", "rejected_raw", "compared",
            "survey")  # fmt: skip


class Viewer:
    """Handles the requests of the page; each of `REQUESTS` is a method."""

    def __init__(
        self,
        store: Store,
        other: Store | None = None,  # to compare with
        cache_dir: str | None = None,
        *,
        fetch: bool = False,  # read remote sources for the text of rejected rows
    ) -> None:
        self.store = store
        self._excerpts = SourceExcerpts(store, cache_dir, fetch=fetch)
        self._facts = RowFacts(store)
        self._finder = RowFinder(self._facts, lambda: self._compared_stores.survey["rows"])
        self.comparison = None if other is None else StoreComparison(store, other)

    @cached_property
    def page(self) -> bytes:
        return page(
            {
                "overview": overview(self._facts, None),
                "selection": f"The page loads all {len(self.store):,} rows of the store on demand.",
                "compare": None if self.comparison is None else self.comparison.document(),
            }
        )

    def rows(self, params: Mapping[str, str]) -> dict[str, Any]:
        first, count = _page_of(params)
        rows, searched = self._finder.find(Query.parse(params))
        shown = rows[first : first + count].tolist()
        return {
            "total": len(rows),
            "searched": searched,
            "of": len(self.store),
            "first": first,
            "rows": [row_summary(self._facts, number) for number in shown],
        }

    def place(self, params: Mapping[str, str]) -> dict[str, Any]:
        rows, _ = self._finder.find(Query.parse(params))
        found = (rows == parse_integer(params, "row", 0)).nonzero()[0]
        return {"place": int(found[0]) if len(found) else -1}

    def row(self, params: Mapping[str, str]) -> dict[str, Any]:
        return row_with_pieces(self._facts, self._row_number(params))

    def image(self, params: Mapping[str, str]) -> dict[str, str]:
        media = self.store[self._row_number(params)].media
        place = parse_integer(params, "image", 0)
        if place >= len(media):
            raise UsageError(f"image must be below {len(media)}, got {place}")
        return thumbnail(self.store, media[place])

    def raw(self, params: Mapping[str, str]) -> dict[str, Any]:
        return self._excerpts.excerpt(self.store[self._row_number(params)].origin, RAW_BYTES)

    def rejected(self, params: Mapping[str, str]) -> dict[str, Any]:
        first, count = _page_of(params)
        reason = params.get("reason")
        rows = enumerate(self.store.rejected_rows())
        matching = (row for row in rows if not reason or row[1][1] == reason)
        shown = islice(matching, first, first + count)
        return {"first": first, "rows": [rejected_row(*row) for row in shown]}

    def rejected_raw(self, params: Mapping[str, str]) -> dict[str, Any]:
        number = parse_integer(params, "number")
        row = next(islice(self.store.rejected_rows(), number, None), None)
        if row is None:
            raise UsageError(f"the store has no rejected row {number}")
        return self._excerpts.excerpt(row[0], RAW_BYTES)

    def compared(self, params: Mapping[str, str]) -> dict[str, Any]:
        return self._compared_stores.row(self._row_number(params))

    def survey(self, _: Mapping[str, str]) -> dict[str, Any]:
        survey = self._compared_stores.survey
        return {name: value for name, value in survey.items() if name != "rows"}

    @property
    def _compared_stores(self) -> StoreComparison:
        if self.comparison is None:
            raise UsageError("this page compares nothing; start it with --compare OTHER")
        return self.comparison

    def _row_number(self, params: Mapping[str, str]) -> int:
        number = parse_integer(params, "number")
        if number >= len(self.store):
            raise UsageError(f"the store has {len(self.store):,} rows, got row {number}")
        return number


def application(viewer: Viewer, token: str, port: int) -> Any:
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

    def plain(text: str, status: int) -> Response:
        return Response(text, status, headers, "text/plain; charset=utf-8")

    # Starlette runs plain functions in threads, so a search does not block other requests.
    def respond(request: Request) -> Response:
        if request.headers.get("host") not in hosts:
            return plain("wrong host", 421)
        sent = request.path_params.get("token", "").encode("utf-8", "replace")
        if not secrets.compare_digest(sent, secret):
            return plain("not found", 404)
        name = request.path_params.get("name")
        if name is None:
            return Response(viewer.page, 200, headers, "text/html; charset=utf-8")
        if name not in REQUESTS:
            return plain("not found", 404)
        try:
            document, status = getattr(viewer, name)(request.query_params), 200
        except TokenmillError as error:  # such as a damaged slice; the page shows the message
            document = {"error": error.as_dict()}
            status = 400 if isinstance(error, UsageError) else 500
        body = json.dumps(document, ensure_ascii=False).encode("utf-8", "replace")
        return Response(body, status, headers, "application/json")

    def not_found(request: Request, error: Exception) -> Response:
        return plain("not found", 404)

    app = Starlette(
        routes=[
            Route("/{token}/", respond, methods=["GET"]),
            Route("/{token}/api/{name}", respond, methods=["GET"]),
        ],
        exception_handlers={404: not_found, 405: not_found},
    )
    app.router.redirect_slashes = False  # a redirect would reveal valid prefixes
    return app


def listen(port: int) -> socket.socket:
    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((HOST, port))
    except (OSError, OverflowError) as error:
        listening.close()
        raise UsageError(
            ("port", port), f" cannot be used: {error}; ", ("port", 0), " chooses a free one"
        ) from error
    return listening


def serve(viewer: Viewer, port: int, ready: Callable[[str, int], None]) -> None:
    """Serve until interrupted; call ``ready`` with the URL of the page and the port."""
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
        listening.listen()  # from now on a browser can connect and wait
        ready(f"http://{HOST}:{bound}/{token}/", bound)
        # Ctrl-C ends the server: uvicorn closes everything, then raises the signal again.
        with suppress(KeyboardInterrupt):
            server.run(sockets=[listening])
