"""``tokenmill inspect``: show rows with their tokens and masks.

In colour, trained text is green; without (a pipe, ``NO_COLOR``) it is in ``⟦ ⟧``. Spaces show as
``·``, line ends as ``⏎``, tabs as ``⇥``.
"""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from tokenmill.cli.app import app
from tokenmill.cli.options import CACHE, Given, StorePath, command
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
    "closer": "bold green reverse",
    "control": "bold cyan underline",
}
ROLE_STYLES = {"system": "magenta", "user": "blue", "assistant": "green", "tool": "yellow"}
DRIFT_STYLES = {"equal": "green", "retokenized": "blue", "text": "bold yellow",
                "structure": "bold red"}  # fmt: skip
LEGEND = "green: trained · cyan: control token · reversed: trained and closes a turn"
LEGEND_PLAIN = "⟦ ⟧: trained"
LISTED = 10  # rejected rows shown without --count
PICTURE_NAME = 80  # characters of an image's name in the terminal
RAW_SHOWN = 400  # characters of a rejected row in the terminal


@command(app, *CACHE)
def inspect(
    output: Output,
    given: Given,
    store: StorePath,
    *,
    row: int | None = None,
    origin: str | None = None,
    group: int | None = None,
    rule: Literal["longest", "shortest", "least-trained", "rejected", "random"] | None = None,
    count: Annotated[
        int | None, typer.Option(min=1, help="How many rows of a rule; on a page, the most.")
    ] = None,
    seed: int = 0,
    html: str | None = None,
    serve: Annotated[
        bool,
        typer.Option("--serve", help="Serve the page over the whole store, to this machine only."),
    ] = False,
    port: Annotated[int, typer.Option(min=0, help="Port of --serve; 0 takes a free one.")] = 0,
    compare: str | None = None,
    values: str | None = None,
    fetch: Annotated[
        bool,
        typer.Option(
            "--fetch-sources",
            help="Fetch the text of rejected rows from remote sources that the store names.",
        ),
    ] = False,
) -> None:
    """Show rows with their tokens and masks.

    Args:
        row: Number of the row; negative counts from the end.
        origin: The row made from this line; or FILE#ROW, from 0.
        group: Number of a group: its answers side by side, from where they part.
        rule: Choose rows by a rule.
        seed: Seed of random rows.
        html: Write one self-contained page.
        compare: With --serve: another store to show beside it.
        values: Show this sidecar's value behind every token.
    """
    from tokenmill.inspect.row import SourceExcerpts
    from tokenmill.store import open_store

    cache_dir = given.get("cache_dir")
    named = [flag for flag, given in (("--row", row), ("--group", group), ("--origin", origin),
                                      ("--rule", rule)) if given is not None]  # fmt: skip
    if len(named) > 1:
        raise UsageError(f"{' and '.join(named)} both name rows; choose one")
    if html is not None and serve:
        raise UsageError("--html writes a page, --serve serves one; choose one")
    if compare is not None and not serve:
        raise UsageError("--compare needs --serve: the page shows both stores side by side")
    if serve and named:
        raise UsageError(f"--serve shows every row; {named[0]} is for the terminal or a page")
    opened = open_store(store)
    excerpts = SourceExcerpts(opened, cache_dir, fetch=fetch)
    if serve:
        from tokenmill.inspect.page.serve import Viewer

        other = None if compare is None else open_store(compare)
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
        chosen: dict[str, Any] = {"rule": rule, "rows": rows, "count": count, "seed": seed}
        document = make_page(opened, Path(html), cache_dir=cache_dir, fetch=fetch, **chosen)
        told = f"{html}: {document['bytes'] / 1e6:.1f} MB. {document['selection']}"
        output.result(document, lambda: output.say(told))
    elif rule == "rejected":
        first = list(islice(opened.rejected_rows(), count or LISTED))
        _show_rejected(output, opened, first, excerpts)
    elif rule is not None:
        from tokenmill.inspect.row import rows_by_rule

        if not len(opened):
            raise UsageError("the store has no rows; --rule rejected shows why")
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
        raise UsageError(f"--row {number}: the store has {len(store):,} rows")
    return [number], []


def _serve(output: Output, viewer: Viewer, port: int) -> None:
    from tokenmill.inspect.page.serve import serve

    def ready(url: str, bound: int) -> None:
        if output.as_json:
            print_json({"url": url, "port": bound, "rows": len(viewer.store)})
        else:
            # The address alone stands on stdout, so that a shell can hand it to a browser.
            typer.echo(url)
            output.say("open this address in a browser of this machine; Ctrl-C stops the server")

    serve(viewer, port, ready)


def _show_rows(output: Output, store: Store, numbers: list[int], values: str | None = None) -> None:
    from tokenmill.inspect.row import store_tokenizer, view_row

    tokenizer = store_tokenizer(store)
    views = [view_row(store, number, tokenizer) for number in numbers]
    per_token = sorted(name for name, it in views[0].sidecars.items() if isinstance(it, list))
    if values is not None and values not in per_token:
        there = ", ".join(per_token) or "nothing"
        raise UsageError(("values",), f" is {values!r}; attached per token is: {there}")
    document = views[0].document()
    if len(views) > 1:
        document["rows"] = [view.document() for view in views]

    def show() -> None:
        for place, view in enumerate(views):
            if place:
                output.screen.print()
            show_row(output, view, legend=place + 1 == len(views), values=values)

    output.result(document, show)


def _rows_of_group(store: Store, number: int) -> tuple[int, list[int]]:
    """Return the number of a group, counted from the beginning, and its rows."""
    import numpy as np

    count = len(store.groups)
    if not -count <= number < count:
        raise UsageError(f"--group {number}: the store has {count:,} groups")
    number %= count
    first, stop = store.group_starts(np.asarray([number, number + 1])).tolist()
    return number, list(range(first, stop))


def _show_group(output: Output, store: Store, number: int) -> None:
    """Print the prompt of a group, then its answers side by side from where they part."""
    from tokenmill.inspect.row import store_tokenizer, view_row

    number, rows = _rows_of_group(store, number)
    found, tokenizer = store.groups[number], store_tokenizer(store)
    views = [view_row(store, row, tokenizer) for row in rows]
    document = {
        "group": number,
        "labels": found.labels,
        "scores": found.scores,
        "margin": found.margin,
        "prompt_tokens": found.prompt_tokens,
        "rows": [view.document() for view in views],
    }

    def show() -> None:
        from rich.table import Table

        screen, parting = output.screen, found.prompt_tokens or 0
        plain = not screen.is_terminal or screen.no_color
        told = (f"  {parting} tokens of the prompt", "not bold")
        if found.prompt_tokens is None:
            told = ("  the template writes the prompt differently", "not bold yellow")
        margin = "" if found.margin is None else f", margin {found.margin:g}"
        head = f"group {number}  {views[0].origin}"
        output.show(head, told, (margin, "not bold"), style="bold")
        if parting:
            screen.print(_tokens(views[0], 0, parting, plain=plain))
        table = Table(*(_answer_title(found, place, views) for place in range(len(views))))
        table.add_row(*(_tokens(view, parting, len(view.ids), plain=plain) for view in views))
        screen.print(table)
        output.show(LEGEND_PLAIN if plain else LEGEND, style="dim")

    output.result(document, show)


def _answer_title(group: Group, place: int, views: list[RowView]) -> str:
    from tokenmill.inspect.row import answer_name

    name = answer_name(group.rows[place].label, place, len(group))
    told = f"{name}, " if name else ""
    told += f"row {views[place].number}, {len(views[place].ids)} tokens"
    return told if group.scores is None else f"{told}, score {group.scores[place]:g}"


def _tokens(view: RowView, start: int, end: int, *, plain: bool, values: Any = None) -> Text:
    from rich.text import Text

    text = Text()
    here = [one for one in view.media if one.start < end and one.start + one.count > start]
    pictures = {max(one.start, start): one for one in here}
    folded = start  # tokens before it are told by their picture
    for at in range(start, end):
        if at in pictures:
            text.append(f"[{_picture(pictures[at])}]", style="magenta")
            folded = pictures[at].start + pictures[at].count
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
        text.right_crop()  # the line end is shown; the screen has one of its own
    return text


def _picture(media: Media) -> str:
    name = harmless(one_line(media.reference, PICTURE_NAME))
    grid = "" if media.grid is None else f", grid {'×'.join(map(str, media.grid))}"
    return f"picture {name}, {media.width}×{media.height}{grid}, {media.count} tokens"


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
        for (origin, reason, detail), found in zip(rejected, listed, strict=True):
            output.show(str(origin), (f"  {reason}", "red"), style="bold")
            output.show(f"  {one_line(detail)}")
            raw = found["raw"]
            if raw["text"] is not None:
                output.show(f"  {one_line(visible(raw['text']), RAW_SHOWN)}", style="dim")
            if raw["note"]:
                output.show(f"  {one_line(raw['note'])}", style="dim italic")
        output.show(f"{len(listed):,} of {total:,} rejected rows", style="dim")

    output.result(document, show)


def _show_verdict(output: Output, view: RowView) -> None:
    from tokenmill.inspect.row import UNJUDGED, findings_of

    drift = view.carried["drift"]
    drift = drift if drift in DRIFT_STYLES else UNJUDGED
    output.show(("drift: ", "dim"), (drift, DRIFT_STYLES.get(drift, "")))
    for finding in findings_of(view.carried):
        name = finding["class"] or UNJUDGED
        places = [f"{k} {finding[k]}" for k in ("turn", "token") if finding[k] is not None]
        told = [*places, *([finding["detail"]] if finding["detail"] else [])]
        kind = (one_line(finding["kind"]), DRIFT_STYLES.get(name, ""))
        output.show("  ", kind, f"  {', '.join(map(one_line, told))}")
        for side in ("expected", "found"):
            text = visible(finding[side]).replace("\n", "") or "nothing"
            output.show(f"    {side:8} {text}", style="dim")


def show_row(
    output: Output, view: RowView, *, legend: bool = True, values: str | None = None
) -> None:
    """Print a row, turn by turn; behind every token its value of the sidecar ``values``."""
    plain = not output.screen.is_terminal or output.screen.no_color
    trained, tokens = sum(view.mask), len(view.ids)
    counts = (f"  {tokens} tokens, {trained} trained", "not bold")
    share = (f" ({trained / tokens:.0%})" if tokens else "", "not bold dim")
    output.show(f"row {view.number}  {view.origin}", counts, share, style="bold")
    judged = {"drift", "findings"} <= set(view.carried)
    for name, value in view.carried.items():
        # Of a rollout what was not recorded is not told, and the verdict stands below by itself.
        if not judged or (value is not None and name not in ("drift", "findings")):
            output.show(f"{name}: {value!r}", style="dim")
    if judged:
        _show_verdict(output, view)
    for name, attached in view.sidecars.items():
        if judged and not isinstance(attached, list) and name in view.carried:
            continue  # told above, as it was recorded
        if isinstance(attached, float):
            told = f"{attached:.6g}"
        else:
            mean = sum(attached) / max(1, len(attached))
            told = f"{len(attached):,} values, one per token, mean {mean:.6g}"
        output.show(f"{name}: {told}", style="cyan")
    shown = view.sidecars.get(values) if values is not None else None
    for role, start, end in view.turns:
        title = (role, f"bold {ROLE_STYLES.get(role, 'white')}")
        told = f" [{start}:{end}] {sum(view.mask[start:end])} trained "
        output.show("── ", title, told, style="dim")
        output.screen.print(_tokens(view, start, end, plain=plain, values=shown))
    if legend:
        output.show(LEGEND_PLAIN if plain else LEGEND, style="dim")
