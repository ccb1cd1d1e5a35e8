"""Every row accounted for: rows in = rows out + rejected, each with its origin."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.build.making import (
    EXAMPLES,
    conversation,
    conversations,
    files_of,
    prepare,
    run,
    small_cuts,
    write_rows,
)
from tokenmill.build.outcome import REMARKS, Prepared
from tokenmill.errors import REASONS, RowError, SourceError
from tokenmill.inspect.stats import store_stats
from tokenmill.sources.block import BlockRows

TURNS = conversation(0)["messages"]
ROLES = ("system", "user", "assistant", "tool", "narrator")

texts = st.text(max_size=12)
message = st.fixed_dictionaries(
    {"role": st.sampled_from(ROLES), "content": texts | st.none() | st.integers()}
)
row = st.one_of(
    st.fixed_dictionaries({"messages": st.lists(message, max_size=5)}),
    st.fixed_dictionaries({"messages": texts | st.integers() | st.none()}),
    st.fixed_dictionaries({"text": texts}),
    st.fixed_dictionaries({"prompt": texts, "completion": texts}),
    st.fixed_dictionaries({"instruction": texts, "input": texts, "output": texts}),
    st.lists(st.integers(), max_size=2),
    st.integers() | texts | st.none(),
).map(lambda value: json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass"))
broken = st.sampled_from(
    [b"{", b'{"messages": [', b"\xff\xfe", b'{"a": NaN}', b'{"text": "\\ud800"}', b"[" * 600,
     b'{"text": 1e400}', b"\xef\xbb\xbf{}", b'{"text": "a\x00b"}']
)  # fmt: skip
blank = st.sampled_from([b"", b" ", b"\t ", b"\r"])
ends = st.sampled_from([b"\n", b"\r\n"])
files = st.lists(st.tuples(row | broken | blank, ends), max_size=30)


def check_account(prepared: Prepared, data: bytes) -> None:
    totals, store = prepared.summary(), prepared.store
    rejected = list(store.rejected_rows())
    assert totals["rows_in"] == totals["rows_out"] + sum(totals["rejected"].values())
    assert totals["rows_out"] == len(store)
    assert sum(totals["rejected"].values()) == len(rejected)
    assert set(totals["rejected"]) <= set(REASONS)
    assert totals["tokens"] == int(store.lengths.sum())
    assert totals["trained_tokens"] == int(store.trained.sum())
    lines = data.split(b"\n")
    for origin in [served.origin for served in store] + [origin for origin, _, _ in rejected]:
        assert origin.line is not None
        assert origin.offset is not None
        own = data[origin.offset : origin.offset + origin.length]
        line = lines[origin.line - 1]
        assert line.rstrip(b"\r") == own or line.removeprefix(b"\xef\xbb\xbf").rstrip(b"\r") == own


@given(
    lines=files,
    expand=st.sampled_from(["none", "turns"]),
    trailing=st.sampled_from(["trim", "reject"]),
)
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_dirty_file_is_accounted_for_row_by_row(
    tmp_path: Path, lines: list[tuple[bytes, bytes]], expand: str, trailing: str
) -> None:
    data = b"".join(line + end for line, end in lines)
    source = tmp_path / "dirty.jsonl"
    source.write_bytes(data)
    # No drawn text ends a line: JSON escapes control characters.
    rows = sum(1 for line in data.split(b"\n") if line.strip(b" \t\r"))
    try:
        prepared = run(source, expand=expand, trailing=trailing, raise_for_rejections=False)
    except SourceError as error:
        assert not rows, error
        return
    assert prepared.summary()["source_rows"] == rows
    if expand == "none":
        assert prepared.summary()["rows_in"] == rows
    check_account(prepared, data)


def test_expanded_turns_count_rows_in_and_source_rows(tmp_path: Path) -> None:
    turns = conversations(1)[0]["messages"]
    rows = [{"messages": turns * 3}, {"messages": turns}, "{", {"messages": turns[:1]}]
    source = write_rows(tmp_path / "turns.jsonl", rows)
    prepared = run(source, expand="turns")
    summary = prepared.summary()
    assert (summary["source_rows"], summary["rows_in"], summary["rows_out"]) == (4, 6, 4)
    assert sum(summary["rejected"].values()) == 2
    assert [served.origin.row for served in prepared.store] == [0, 0, 0, 1]
    lengths = prepared.store.lengths.tolist()
    assert lengths[0] < lengths[1] < lengths[2]
    check_account(prepared, source.read_bytes())


def test_examples_are_accounted_for() -> None:
    for name, limit in (("conversations.jsonl", 80), ("dirty.jsonl", None), ("dirty.jsonl", 80)):
        source = EXAMPLES / name
        check_account(run(str(source), max_length=limit), source.read_bytes())


def test_carried_columns_keep_their_values(tmp_path: Path) -> None:
    values: list[Any] = [1, "ä", None, [1, {"b": None}], {"x": 1.5}, True, 2**60]
    rows = [{**row, "extra": value} for row, value in zip(conversations(7), values, strict=True)]
    del rows[2]["extra"]
    rows.insert(3, {"messages": 1, "extra": "rejected"})
    store = run(write_rows(tmp_path / "c.jsonl", rows), keep_columns=("extra", "id")).store
    assert [row.extra["extra"] for row in store] == values
    assert [row.extra["id"] for row in store] == list(range(7))


def test_turns_partition_the_tokens_and_name_the_roles() -> None:
    store = run(str(EXAMPLES / "conversations.jsonl")).store
    seen = set()
    for row in store:
        ends = [0]
        for role, start, end in row.turns:
            seen.add(role)
            assert start == ends[-1]
            ends.append(end)
            if role != "assistant":
                assert not row.loss_mask[start:end].any(), "only the assistant is trained"
        assert ends[-1] == len(row.input_ids)
    assert seen == {"system", "user", "assistant", "tool"}


def test_max_rejected_0_raises_for_build_and_hit(tmp_path: Path) -> None:
    source = write_rows(tmp_path / "d.jsonl", [*conversations(3), '{"messages": 7}', "{"])
    for _ in ("build", "hit"):
        with pytest.raises(RowError) as caught:
            prepare(source, max_rejected=0)
        assert (caught.value.row, caught.value.line) == (3, 4)
        assert caught.value.reason == "bad_shape"
    assert len(prepare(source)) == 3


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    directory = tmp_path / "scratch"
    directory.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(directory))
    return directory


def test_disabled_cache_leaves_nothing_behind(
    tmp_path: Path, own_cache: Path, scratch: Path
) -> None:
    source = write_rows(tmp_path / "c.jsonl", conversations(5))
    store = prepare(source, disable_cache=True)
    wanted = [row.input_ids.tolist() for row in prepare(source)]
    assert [row.input_ids.tolist() for row in store] == wanted
    [private] = scratch.iterdir()
    assert store.path.is_relative_to(private)
    row = store[0]
    del store
    assert row.origin.line == 1, "a row that is held keeps its store, and so the directory"
    assert private.exists()
    del row
    assert not list(scratch.iterdir())


def test_disabled_cache_that_fails_leaves_nothing_behind(tmp_path: Path, scratch: Path) -> None:
    with pytest.raises(SourceError) as held:
        prepare(tmp_path / "none.jsonl", disable_cache=True)
    assert not list(scratch.iterdir()), f"{held.value} is held, as interactive sessions do"
    bad = write_rows(tmp_path / "bad.jsonl", ["{"])
    with pytest.raises(SourceError, match="no row left"):
        prepare(bad, disable_cache=True)
    gc.collect()  # Python 3.12 makes a cycle of the error and its frames
    assert not list(scratch.iterdir())


BARE = "{% for m in messages %}{{ m.content }}{% endfor %}"
CLOSED = "{% for m in messages %}<{{ m.role }}>{{ m.content }}<|im_end|>{% endfor %}"
TEXT_CALLS = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content or '' }}{% for call in m.tool_calls or [] %}"
    "{{ call.function.name + call.function.arguments }}{% endfor %}<|im_end|>{% endfor %}"
)
ANNOUNCED = "{% if messages[-1].content == 'No.' %}!{% endif %}" + CLOSED
HEADER_IN_BLOCK = (
    "{% for m in messages %}{% if m.role == 'user' %}<user>{{ m.content }}{% else %}"
    "{% generation %}<assistant>{{ m.content }}<|im_end|>{% endgeneration %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
SHORT = {"content": "No.", "tool_calls": None}
CALLING = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"type": "function", "function": {"name": "look", "arguments": '{"a":  1}'}}],
}
ITEMS = [{"type": "message", "role": "assistant", "content": "That."}]
SPEAKING: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "trimmed_trailing": ({"messages": [*TURNS, {"role": "user", "content": "More?"}]},
                         {"trailing": "trim"}),
    "trimmed_tool_turns": ({"messages": [*TURNS, {"role": "tool", "content": "42"}]}, {}),
    "null_as_empty": ({"messages": [*TURNS, {"role": "user"}, TURNS[-1]]},
                      {"chat_template": CLOSED.replace("m.content", "m.content + ''")}),
    "generation_clipped": ({"messages": TURNS}, {"chat_template": HEADER_IN_BLOCK}),
    "arguments_as_text": ({"messages": [*TURNS[:-1], CALLING]}, {"chat_template": TEXT_CALLS}),
    "prompts_differ": ({"prompt": "What?", "chosen": TURNS[-1:], "rejected": [CALLING | SHORT]},
                       {"chat_template": ANNOUNCED}),
    "rows_without_closer": ({"messages": TURNS}, {"chat_template": BARE}),
    "plain_strings": ({"prompt": "What?", "completion": "That."}, {}),
    "no_system_prompt": ({"output": ITEMS}, {}),
    "no_tool_definitions": (
        {"output": [{"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"}]},
        {}),
    "truncated_traces": ({"output": [*ITEMS, *ITEMS], "status": "incomplete"}, {}),
    "subagents_left_out": (
        {"agent": {}, "subagent_trajectories": [{}],
         "steps": [{"source": "agent", "message": "That."}]}, {}),
    "misspelt_roles": ({"messages": [{"role": "users", "content": "Hi."}, *TURNS]},
                       {"chat_template": CLOSED}),
}  # fmt: skip
"""For every remark a row and arguments that make it be made."""


@pytest.mark.parametrize("counter", REMARKS)
def test_every_remark_is_made_of_a_row_that_deserves_it(tmp_path: Path, counter: str) -> None:
    row, arguments = SPEAKING[counter]
    silent = {"messages": TURNS}
    source = write_rows(tmp_path / "rows.jsonl", [silent, row, row])
    number = 3 if row == silent else 2
    assert f"{number} {REMARKS[counter]}" in list(run(source, **arguments).remarks())


@pytest.mark.parametrize(("roles", "kind"), [(128, "int8"), (129, "int16")])
def test_any_number_of_role_names_is_stored_and_read(tmp_path: Path, roles: int, kind: str) -> None:
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    users = [f"user{n}" for n in range(roles - 1)]
    rows = [{"messages": [{"role": user, "content": f"I am {user}."}, TURNS[1]]} for user in users]
    source = write_rows(tmp_path / "roles.jsonl", rows)
    store = run(source, chat_template=template).store
    assert [[role for role, _, _ in row.turns] for row in store] == [
        [user, "assistant"] for user in users
    ]
    meta = next((tmp_path / "tokenmill-cache" / "slices").rglob("*.meta.arrow"))
    column = pa.ipc.open_stream(meta.read_bytes()).read_all().column("turn_roles")
    assert str(column.type.value_type) == kind, "wider only where it must be"
    assert len(store_stats(store)["roles"]) == roles
    limit = int(store.lengths.max()) - 1  # derived: some rows and their roles are dropped
    derived = run(source, chat_template=template, max_length=limit)
    assert derived.build_stats.slices_derived == 1
    run(source, chat_template=template, max_length=limit, cache_dir=tmp_path / "again")
    fresh, shared = (files_of(tmp_path / name, "slices") for name in ("again", "tokenmill-cache"))
    assert fresh.items() <= shared.items()


@pytest.mark.parametrize("is_on", [True, False], ids=["on", "off"])
def test_rows_are_dead_before_the_collector_may_look(
    is_on: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_cuts(monkeypatch)
    source = write_rows(tmp_path / "chat.jsonl", conversations(100))
    alive: list[int] = []
    enable = gc.enable

    def watched() -> None:
        alive.append(sum(type(thing) is BlockRows for thing in gc.get_objects()))
        enable()

    monkeypatch.setattr(gc, "enable", watched)
    try:
        if not is_on:
            gc.disable()
        prepare(source)
        assert gc.isenabled() is is_on
    finally:
        enable()
    assert not any(alive)
    assert bool(alive) is is_on
