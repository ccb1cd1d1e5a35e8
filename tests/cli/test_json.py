"""`--json` prints exactly one object on stdout."""

from __future__ import annotations

from pathlib import Path

from tests.build.making import conversations, write_rows
from tests.cli.harness import QUICK, Shell
from tokenmill import open_store

PREPARE = {"path", "key", "hit", "source_rows", "rows_in", "rows_out", "rejected", "tokens",
           "trained_tokens", "slices", "slices_built", "slices_derived", "seconds", "engine",
           "renderer", "audited_rows", "audit_mismatches"}  # fmt: skip


def test_prepare_json_of_build_and_hit(shell: Shell, dirty: Path) -> None:
    built = shell("prepare", dirty, *QUICK, "--json").json
    assert set(built) == PREPARE
    assert (built["hit"], built["slices"], built["slices_built"]) == (False, 1, 1)
    assert built["rows_in"] == built["source_rows"] == 10
    assert built["rows_out"] == 7
    assert built["engine"] in ("fastokens", "hf")
    assert built["renderer"]
    assert built["rejected"] == {"bad_json": 1, "bad_shape": 1, "trailing_user": 1}
    store = open_store(built["path"])
    assert (len(store), store.key) == (7, built["key"])
    assert built["tokens"] == int(store.lengths.sum())
    assert built["trained_tokens"] == int(store.trained.sum())
    hit = shell("prepare", dirty, *QUICK, "--json")
    assert hit.code == 0
    assert hit.json["hit"]
    assert hit.json["slices_built"] == hit.json["slices_derived"] == 0
    same = PREPARE - {"hit", "slices_built", "seconds"}
    assert {name: hit.json[name] for name in same} == {name: built[name] for name in same}


def test_prepare_prints_only_the_path_on_stdout(shell: Shell, chat: Path) -> None:
    answer = shell("prepare", chat, *QUICK)
    assert answer.code == 0
    assert len(open_store(answer.out.strip())) == 20
    assert "20 rows" in answer.err


def test_column_flags_map_roles_to_columns(shell: Shell, tmp_path: Path) -> None:
    rows = [{"chat": row["messages"], "tools": 7} for row in conversations(3)]
    source = write_rows(tmp_path / "chat.jsonl", rows)
    flags = ("--column", "messages=chat", "--column", "tools=")
    assert shell("prepare", source, *QUICK, *flags, "--json").json["rows_out"] == 3
    assert shell("prepare", source, *QUICK, *flags[:2], "--json").code == 1


def test_inspect_json_shows_the_requested_row(shell: Shell, store: Path) -> None:
    shown, row = shell("inspect", store, "--row", "3", "--json").json, open_store(store)[3]
    assert shown["ids"] == row.input_ids.tolist()
    assert shown["mask"] == row.loss_mask.tolist()
    assert shown["origin"] == row.origin._asdict()
    assert shown["turns"] == [list(turn) for turn in row.turns]
    assert "".join(shown["pieces"]).count("<|im_end|>") == 2
    assert shell("inspect", store, "--row", "-17", "--json").json == shown
    assert shown["extra"] == {"id": 3}


def test_stats_json_counts(shell: Shell, store: Path) -> None:
    stats, opened = shell("stats", store, "--json").json, open_store(store)
    assert (stats["rows"], stats["trained_tokens"]) == (20, int(opened.trained.sum()))
    assert stats["tokens"] == int(opened.lengths.sum())
    assert stats["percentiles"]["p100"] == int(opened.lengths.max())
    assert sum(role["tokens"] for role in stats["roles"].values()) == stats["tokens"]
    assert sum(source["rows"] for source in stats["sources"]) == 20


def test_rows_json_counts_rows_and_shows_one(shell: Shell, dirty: Path) -> None:
    counted = shell("rows", dirty, "--json").json
    assert set(counted) == {"rows", "bytes", "files", "seconds"}
    assert (counted["rows"], counted["files"]) == (10, 1)
    assert counted["bytes"] == dirty.stat().st_size
    shown = shell("rows", dirty, "--row", "1", "--json").json
    assert shown["row"]["id"] == 1
    assert shown["origin"]["line"] == 2
    assert shell("rows", dirty, "--scan", "--json").json["bad"] == {"bad_json": 1}


def test_rows_shows_the_bytes_of_a_bad_row(shell: Shell, dirty: Path) -> None:
    people = shell("rows", dirty, "--row", "7")
    assert people.code == 1
    assert people.out == '{"messages": [\n'
    assert "dirty.jsonl:8" in people.err
    program = shell("rows", dirty, "--row", "7", "--json")
    assert program.code == 1
    assert program.error["type"] == "RowError"
    assert program.error["line"] == 8


def test_cache_json_lists_and_collects(shell: Shell, chat: Path, own_cache: Path) -> None:
    prepared = shell("prepare", chat, *QUICK, "--json").json
    listed = shell("cache", "list", "--json").json
    assert {"entries", "bytes"} <= set(listed)
    [entry] = listed["entries"]
    assert (entry["key"], entry["rows"]) == (prepared["key"], 20)
    size = sum(path.stat().st_size for path in own_cache.rglob("*") if path.is_file())
    assert 0 < listed["bytes"] <= size
    marked = shell("cache", "gc", "--store", prepared["key"], "--json").json
    assert {"entries", "bytes"} <= set(marked)
    assert marked["entries"] == []
    assert f"stores/{prepared['key']}" in marked["marked"]
    assert Path(prepared["path"]).exists()
    removed = shell("cache", "gc", "--store", prepared["key"], "--grace", "0s", "--json").json
    assert f"stores/{prepared['key']}" in removed["entries"]
    assert removed["bytes"] > 0
    assert not Path(prepared["path"]).exists()


def test_why_json_names_the_different_field_and_builds_nothing(
    shell: Shell, chat: Path, tmp_path: Path, own_cache: Path
) -> None:
    alone = shell("why", chat, *QUICK, "--json").json
    assert not (own_cache / "slices").exists()
    assert not (own_cache / "stores").exists()
    assert {"hit", "nearest", "differs"} <= set(alone)
    assert (alone["hit"], alone["nearest"], alone["differs"]) == (False, None, [])
    key = shell("prepare", chat, *QUICK, "--json").json["key"]
    hit = shell("why", chat, *QUICK, "--json").json
    assert (hit["hit"], hit["nearest"], hit["key"], hit["differs"]) == (True, key, key, [])
    miss = shell("why", chat, *QUICK, "--turn-end", "turn", "--json").json
    assert (miss["hit"], miss["nearest"]) == (False, key)
    assert miss["differs"] == [{"field": "recipe.turn_end", "ours": "turn", "theirs": "stop"}]
    more = write_rows(tmp_path / "more.jsonl", [*chat.read_text().splitlines(), '{"text": "x"}'])
    fields = {d["field"] for d in shell("why", more, *QUICK, "--json").json["differs"]}
    assert fields == {"sources[0].bytes", "sources[0].digest", "sources[0].rows"}
    assert "recipe.turn_end" in shell("why", chat, *QUICK, "--turn-end", "turn").err


def test_stats_pack_counts_the_packs_of_the_loader(shell: Shell, store: Path) -> None:
    from tokenmill import Loader, Pack

    opened = open_store(store)
    longest = int(opened.lengths.max())
    for method in ("best_fit", "sequential"):
        flags = ("--pack", str(2 * longest), "--method", method, "--window", "3")
        [detail] = shell("stats", store, *flags, "--json").json["packing"]
        assert detail["packs"] == len(
            Loader(opened, batch_size=1, pack=Pack(2 * longest, method, 3))
        )
    refused = shell("stats", store, "--pack", "8", "--oversize", "error", "--json")
    assert refused.code == 2
    assert "oversize" in refused.error["message"]
    [dropped] = shell("stats", store, "--pack", str(longest - 1), "--json").json["packing"]
    assert dropped["rows_longer"] >= 1
    assert dropped["tokens"] <= int(opened.lengths.sum()) - longest


def test_demo_json_is_the_second_prepare(shell: Shell, own_cache: Path) -> None:
    answer = shell("demo", "--json")
    assert answer.code == 0, answer.err
    assert set(answer.json) == PREPARE
    assert answer.json["hit"]
    assert answer.json["rejected"]
    assert "next: your own rows and model" in answer.err


def test_demo_writes_its_files_to_a_new_directory(shell: Shell, tmp_path: Path) -> None:
    sample = tmp_path / "sample"
    assert shell("demo", "--files", sample, "--json").json == {"path": str(sample)}
    assert shell("lint", sample / "chat.jsonl", "--tokenizer", sample / "tokenizer").code == 0
    again = shell("demo", "--files", sample)
    assert (again.code, "--files" in again.err) == (2, True)


def test_prompts_json_of_build_hit_and_limit(shell: Shell, tmp_path: Path) -> None:
    rows = tmp_path / "prompts.jsonl"
    rows.write_text('{"q": "one"}\n{"q": "' + "many words " * 30 + '"}\nbad\n')
    flags = ("prompts", rows, *QUICK, "--prompt-key", "q", "--json")
    built = shell(*flags).json
    assert {"rows", "kept", "rejected", "seconds", "hit"} <= set(built)
    assert (built["rows"], built["kept"], built["hit"]) == (3, 2, False)
    assert built["rejected"] == {"bad_json": 1}
    limited = shell(*flags, "--max-length", "20").json
    assert (limited["kept"], limited["hit"]) == (1, True)
    assert limited["rejected"] == {"bad_json": 1, "overlong": 1}
    assert Path(limited["path"]).is_dir()


def test_no_prompt_left_exits_with_1(shell: Shell, tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "prompts.jsonl", ["", '{"text": "far too long"}', "nonsense"])
    answer = shell("prompts", rows, *QUICK, "--max-length", "1", "--json")
    assert answer.code == 1
    assert answer.json["rejected"] == {"overlong": 1, "bad_json": 1}
    assert "no prompt left: all 2 were rejected" in answer.error["message"]
    assert "the first, for overlong: " in answer.error["message"]
    assert (answer.error["path"], answer.error["line"]) == (str(rows), 2)
    assert shell("prompts", rows, *QUICK, "--multimodal-keys", "[]", "--json").code == 2


def test_prompts_text_names_an_example_per_reason(shell: Shell, tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "prompts.jsonl", ['{"text": "x"}', '{"other": 1}'])
    answer = shell("prompts", rows, *QUICK)
    assert answer.code == 0
    assert "1 of 2 prompts" in answer.err
    assert "prompts.jsonl:2" in answer.err
    assert Path(answer.out.strip()).is_dir()
