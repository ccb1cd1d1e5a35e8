"""The command `inspect`.

Trained text is green, or in ``⟦ ⟧`` without colours (a pipe, ``NO_COLOR``). Spaces are shown as
``·``, line ends as ``⏎``, tabs as ``⇥``.
"""

from __future__ import annotations

import socket
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from tokenmill.cli.app import app
from tokenmill.cli.options import CACHE, Flags, StorePath, command
from tokenmill.cli.output import Output, one_line, print_json
from tokenmill.errors import UsageError
from tokenmill.inspect.terminal_text import harmless, visible

if TYPE_CHECKING:
    from rich.text import Text

    from tokenmill.inspect.page.serve import Viewer
    from tokenmill.inspect.row import Rejected, RowView, SourceExcerpts
    from tokenmill.store import Group, Media, Store

STYLES = {
    "untrained": "",
    "trained": "green",
    "special": "cyan",
    "end_of_turn": "bold green reverse",
    "control": "bold cyan underline",
}
ROLE_STYLES = {"system": "magenta", "user": "blue", "assistant": "green", "tool": "yellow"}
DRIFT_STYLES = {"equal": "green", "retokenized": "blue", "text": "bold yellow",
                "structure": "bold red"}  # fmt: skip
LEGEND = "green: trained · cyan: control token · reversed: trained end-of-turn token"
LEGEND_PLAIN = "⟦ ⟧: trained"
DEFAULT_REJECTED = 10  # rejected rows shown without --count
MAX_IMAGE_NAME = 80  # characters
MAX_RAW_CHARS = 400  # of a rejected row


@command(app, *CACHE)
def inspect(
    output: Output,
    flags: Flags,
    store: StorePath,
    *,
    row: int | None = None,
    origin: str | None = None,
    group: int | None = None,
    rule: Literal["longest", "shortest", "least-trained", "rejected", "random"] | None = None,
    count: Annotated[
        int | None, typer.Option(min=1, help="Number of rows to show with --rule or --html.")
    ] = None,
    seed: int = 0,
    html: str | None = None,
    serve: Annotated[
        bool,
        typer.Option("--serve", help="Serve a page of the whole store, to this machine only."),
    ] = False,
    port: Annotated[int, typer.Option(min=0, help="Port of --serve; 0 chooses a free one.")] = 0,
    compare: str | None = None,
    values: str | None = None,
    fetch: Annotated[
        bool,
        typer.Option(
            "--fetch-sources",
            help="Read the text of rejected rows from remote sources, too.",
        ),
    ] = False,
) -> None:
    """Show rows with their tokens and masks.

    Args:
        row: Row number; negative numbers count from the end.
        origin: Show the row of this source line; or FILE#ROW, from 0.
        group: Show the answers of this group side by side.
        rule: Choose rows by a rule.
        seed: Seed of --rule random.
        html: Write a self-contained page to this file.
        compare: With --serve, show another store beside this one.
        values: Show the values of this sidecar after each token.
    """
    from tokenmill.inspect.row import SourceExcerpts
    from tokenmill.store import open_store

    cache_dir = flags.get("cache_dir")
    selections = {"--row": row, "--group": group, "--origin": origin, "--rule": rule}
    selected = [flag for flag, value in selections.items() if value is not None]
    if len(selected) > 1:
        raise UsageError(f"{' and '.join(selected)} both select rows. Use one of them")
    if html is not None and serve:
        raise UsageError("--html and --serve cannot be combined. Use one of them")
    if compare is not None and not serve:
        raise UsageError("--compare needs --serve")
    if serve and selected:
        raise UsageError(f"--serve shows every row. Remove {selected[0]}")
    opened = open_store(store, cache_dir=cache_dir)
    excerpts = SourceExcerpts(opened, cache_dir, fetch=fetch)
    if serve:
        from tokenmill.inspect.page.serve import Viewer

        other = None if compare is None else open_store(compare, cache_dir=cache_dir)
        _serve(output, Viewer(opened, other, cache_dir, fetch=fetch), port)
    elif group is not None and html is None:
        _show_group(output, opened, group)
    elif html is not None:
        from tokenmill.inspect.page.document import make_page

        rows = None
        if group is not None:
            rows = _rows_of_group(opened, group)[1]
        elif row is not None or origin is not None:
            rows = [number % len(opened) for number in _named_rows(opened, row, origin)[0]]
        selection: dict[str, Any] = {"rule": rule, "rows": rows, "count": count, "seed": seed}
        document = make_page(opened, Path(html), cache_dir=cache_dir, fetch=fetch, **selection)
        detail = f"{html}: {document['bytes'] / 1e6:.1f} MB. {document['selection']}"
        output.result(document, lambda: output.message(detail))
    elif rule == "rejected":
        first = list(islice(opened.rejected_rows(), count or DEFAULT_REJECTED))
        _show_rejected(output, opened, first, excerpts)
    elif rule is not None:
        from tokenmill.inspect.row import rows_by_rule

        if not len(opened):
            raise UsageError("The store has no rows. Use --rule rejected to see why")
        _show_rows(output, opened, rows_by_rule(opened, rule, count or 1, seed), values)
    else:
        rows, rejected = _named_rows(opened, row, origin)
        if rows:
            _show_rows(output, opened, rows[:count], values)
        else:
            _show_rejected(output, opened, rejected, excerpts)


def _named_rows(
    store: Store, row: int | None, origin: str | None
) -> tuple[list[int], list[Rejected]]:
    from tokenmill.inspect.row import rows_at_address

    if origin is not None:
        return rows_at_address(store, origin)
    number = row or 0
    if not -len(store) <= number < len(store):
        raise UsageError(f"--row {number} is out of range: the store has {len(store):,} rows")
    return [number], []


def _serve(output: Output, viewer: Viewer, port: int) -> None:
    from tokenmill.inspect.page.serve import serve

    def ready(url: str, bound: int) -> None:
        if output.as_json:
            print_json({"url": url, "port": bound, "rows": len(viewer.store)})
        else:
            # Only the address goes to stdout, so that a script can pass it to a browser.
            typer.echo(url)
            output.message("Open this address in a browser of this machine. Ctrl-C stops it.")
            host = socket.gethostname()
            output.message(f"From another machine: ssh -L {bound}:127.0.0.1:{bound} {host}")

    serve(viewer, port, ready)


def _show_rows(output: Output, store: Store, numbers: list[int], values: str | None = None) -> None:
    from tokenmill.inspect.row import view_row

    views = [view_row(store, number) for number in numbers]
    per_token = sorted(name for name, it in views[0].sidecars.items() if isinstance(it, list))
    if values is not None and values not in per_token:
        attached = ", ".join(per_token) or "none"
        raise UsageError(
            ("values",), f" must be a sidecar per token, got {values!r}. Attached: {attached}"
        )
    document = views[0].document()
    if len(views) > 1:
        document["rows"] = [view.document() for view in views]

    def show() -> None:
        for index, view in enumerate(views):
            if index:
                output.stdout.print()
            show_row(output, view, legend=index + 1 == len(views), values=values)

    output.result(document, show)


def _rows_of_group(store: Store, number: int) -> tuple[int, list[int]]:
    """Return the number of a group, counted from the beginning, and its rows."""
    import numpy as np

    count = len(store.groups)
    if not -count <= number < count:
        raise UsageError(f"--group {number} is out of range: the store has {count:,} groups")
    number %= count
    first, stop = store.group_starts(np.asarray([number, number + 1])).tolist()
    return number, list(range(first, stop))


def _show_group(output: Output, store: Store, number: int) -> None:
    """Print the common prompt of a group, then its answers side by side."""
    from tokenmill.inspect.row import view_row

    number, rows = _rows_of_group(store, number)
    group = store.groups[number]
    views = [view_row(store, row) for row in rows]
    document = {
        "group": number,
        "labels": group.labels,
        "scores": group.scores,
        "margin": group.margin,
        "prompt_tokens": group.prompt_tokens,
        "rows": [view.document() for view in views],
    }

    def show() -> None:
        from rich.table import Table

        screen, prompt_end = output.stdout, group.prompt_tokens or 0
        plain = not screen.is_terminal or screen.no_color
        detail = (f"  {prompt_end} prompt tokens", "not bold")
        if group.prompt_tokens is None:
            detail = ("  the prompts of the rows differ", "not bold yellow")
        margin = "" if group.margin is None else f", margin {group.margin:g}"
        head = f"group {number}  {views[0].origin}"
        output.line(head, detail, (margin, "not bold"), style="bold")
        if prompt_end:
            screen.print(_tokens(views[0], 0, prompt_end, plain=plain))
        table = Table(*(_answer_title(group, index, views) for index in range(len(views))))
        table.add_row(*(_tokens(view, prompt_end, len(view.ids), plain=plain) for view in views))
        screen.print(table)
        output.line(LEGEND_PLAIN if plain else LEGEND, style="dim")

    output.result(document, show)


def _answer_title(group: Group, index: int, views: list[RowView]) -> str:
    from tokenmill.inspect.row import answer_name

    name = answer_name(group.rows[index].label, index, len(group))
    title = f"{name}, " if name else ""
    title += f"row {views[index].number}, {len(views[index].ids)} tokens"
    return title if group.scores is None else f"{title}, score {group.scores[index]:g}"


def _tokens(view: RowView, start: int, end: int, *, plain: bool, values: Any = None) -> Text:
    from rich.text import Text

    text = Text()
    media = [it for it in view.media if it.start < end and it.start + it.count > start]
    images = {max(it.start, start): it for it in media}
    folded = start  # An image replaces the tokens before this position.
    for at in range(start, end):
        if at in images:
            text.append(f"[{_image(images[at])}]", style="magenta")
            folded = images[at].start + images[at].count
        if at < folded:
            continue
        if plain and view.mask[at] and (at == start or not view.mask[at - 1]):
            text.append("⟦")
        text.append(visible(view.pieces[at]), style=STYLES[view.kinds[at]])
        if isinstance(values, list):
            text.append(f"‹{values[at]:.3g}›", style="dim")
        if plain and view.mask[at] and (at + 1 == end or not view.mask[at + 1]):
            text.append("⟧")
    if text.plain.endswith("\n"):
        text.right_crop()  # The console prints a line end, too.
    return text


def _image(media: Media) -> str:
    name = harmless(one_line(media.reference, MAX_IMAGE_NAME))
    grid = "" if media.grid is None else f", grid {'×'.join(map(str, media.grid))}"
    return f"image {name}, {media.width}×{media.height}{grid}, {media.count} tokens"


def _show_rejected(
    output: Output, store: Store, rejected: list[Rejected], excerpts: SourceExcerpts
) -> None:
    total = sum(store.rejected.values())
    listed: list[dict[str, Any]] = [
        {"origin": origin._asdict(), "reason": reason, "detail": detail,
         "raw": excerpts.excerpt(origin)}
        for origin, reason, detail in rejected
    ]  # fmt: skip
    document = {"rejected": store.rejected, "total": total, "rows": listed}

    def show() -> None:
        for (origin, reason, detail), row in zip(rejected, listed, strict=True):
            output.line(str(origin), (f"  {reason}", "red"), style="bold")
            output.line(f"  {one_line(detail)}")
            raw = row["raw"]
            if raw["text"] is not None:
                output.line(f"  {one_line(visible(raw['text']), MAX_RAW_CHARS)}", style="dim")
            if raw["note"]:
                output.line(f"  {one_line(raw['note'])}", style="dim italic")
        output.line(f"{len(listed):,} of {total:,} rejected rows", style="dim")

    output.result(document, show)


def _show_drift(output: Output, view: RowView) -> None:
    from tokenmill.inspect.row import UNCHECKED, findings_of

    drift = view.extra["drift"]
    drift = drift if drift in DRIFT_STYLES else UNCHECKED
    output.line(("drift: ", "dim"), (drift, DRIFT_STYLES.get(drift, "")))
    for finding in findings_of(view.extra):
        name = finding["class"] or UNCHECKED
        location = [f"{k} {finding[k]}" for k in ("turn", "token") if finding[k] is not None]
        detail = [*location, *([finding["detail"]] if finding["detail"] else [])]
        kind = (one_line(finding["kind"]), DRIFT_STYLES.get(name, ""))
        output.line("  ", kind, f"  {', '.join(map(one_line, detail))}")
        for side in ("expected", "found"):
            text = visible(finding[side]).replace("\n", "") or "nothing"
            output.line(f"    {side:8} {text}", style="dim")


def show_row(
    output: Output, view: RowView, *, legend: bool = True, values: str | None = None
) -> None:
    """Print a row turn by turn, each token followed by its value of the sidecar ``values``."""
    plain = not output.stdout.is_terminal or output.stdout.no_color
    trained, tokens = sum(view.mask), len(view.ids)
    counts = (f"  {tokens} tokens, {trained} trained", "not bold")
    share = (f" ({trained / tokens:.0%})" if tokens else "", "not bold dim")
    output.line(f"row {view.number}  {view.origin}", counts, share, style="bold")
    is_rollout = {"drift", "findings"} <= set(view.extra)
    for name, value in view.extra.items():
        # `_show_drift` prints the drift and the findings of a rollout.
        if not is_rollout or (value is not None and name not in ("drift", "findings")):
            output.line(f"{name}: {value!r}", style="dim")
    if is_rollout:
        _show_drift(output, view)
    for name, attached in view.sidecars.items():
        if is_rollout and not isinstance(attached, list) and name in view.extra:
            continue  # printed above, as recorded
        if isinstance(attached, float):
            detail = f"{attached:.6g}"
        else:
            mean = sum(attached) / max(1, len(attached))
            detail = f"{len(attached):,} values, one per token, mean {mean:.6g}"
        output.line(f"{name}: {detail}", style="cyan")
    shown = view.sidecars.get(values) if values is not None else None
    covered = view.turns[-1][2] if view.turns else 0  # rows of ids have no turns
    rest = [("(no turn)", covered, tokens)] if covered < tokens else []
    for role, start, end in [*view.turns, *rest]:
        title = (role, f"bold {ROLE_STYLES.get(role, 'white')}")
        detail = f" [{start}:{end}] {sum(view.mask[start:end])} trained "
        output.line("── ", title, detail, style="dim")
        output.stdout.print(_tokens(view, start, end, plain=plain, values=shown))
    if legend:
        output.line(LEGEND_PLAIN if plain else LEGEND, style="dim")
