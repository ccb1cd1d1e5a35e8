"""Lint: every rule on its own line, nothing on clean rows, the same with workers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import tokenmill as tm
from tests.build.making import EXAMPLES, TOKENIZER, conversations, small_cuts, write_rows
from tests.build.making import INLINE as QUICK
from tests.inspect.crafted import (
    GOLDEN,
    GOLDEN_OF_IMAGES,
    MAX_LENGTH,
    clean,
    crafted,
    talk,
    tokenizer_with,
)
from tokenmill.errors import REASONS, UsageError
from tokenmill.inspect.lint import minhash
from tokenmill.inspect.lint.rules import RULES, LintReport
from tokenmill.inspect.lint.run import SAMPLE_BLOCKS, choose


def lines(report: LintReport) -> dict[str, list[int | None]]:
    return {f.rule: [origin.line for origin in f.places] for f in report.findings}


def detail(report: LintReport) -> dict[str, Any]:
    document = report.document()
    del document["seconds"]
    return document


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("lint")


@pytest.fixture(scope="module")
def tokenizer(directory: Path) -> str:
    return str(tokenizer_with(directory))


@pytest.fixture(scope="module")
def all_rules(directory: Path, tokenizer: str) -> LintReport:
    given = {**QUICK, "max_length": MAX_LENGTH, "cache_dir": directory / "cache"}
    return tm.lint(str(crafted(directory)), tokenizer, **given)


def test_crafted_rows_give_each_rule_on_its_own_line(all_rules: LintReport) -> None:
    assert lines(all_rules) == GOLDEN


def test_golden_table_names_every_rule_that_a_row_can_break() -> None:
    about_no_row = {"pad_is_eos", "no_pad_token", "bos_in_text", "label_imbalance", "length_bias",
                    "generation_header"}  # fmt: skip
    golden = set(GOLDEN) | set(GOLDEN_OF_IMAGES)
    in_other_tests = {"misspelt_role"}  # this template refuses other roles
    assert golden == set(RULES) - about_no_row - in_other_tests
    assert set(REASONS) <= golden


def test_findings_have_origin_count_detail_and_hint(all_rules: LintReport) -> None:
    severities = [finding.severity for finding in all_rules.findings]
    assert severities == sorted(severities, key=("error", "warning", "info").index)
    for document in all_rules.document()["findings"]:
        assert document["count"] == len(GOLDEN[document["rule"]])
        assert document["place"] == f"{document['path']}:{document['line']}"
        assert document["detail"]
        assert document["hint"] == RULES[document["rule"]].hint
    shown = {finding.rule: finding for finding in all_rules.findings}
    assert "<|im_end|>" in shown["control_text"].excerpt
    assert "turn 1 of 4" in shown["rewrites_history"].detail
    assert "expand" in shown["rewrites_history"].hint
    assert shown["duplicate"].detail.endswith("crafted.jsonl:23")
    assert "crafted.jsonl:25" in shown["near_duplicate"].detail


def test_control_tokens_come_from_the_given_tokenizer(tmp_path: Path) -> None:
    """The flag is not part of the identity, so the cache has one copy for both tokenizers."""
    flagged, plain = tokenizer_with(tmp_path), tokenizer_with(tmp_path)
    file = flagged / "tokenizer.json"
    document = json.loads(file.read_text(encoding="utf-8"))
    token = next(t for t in document["added_tokens"] if t["content"] == "<tool_call>")
    assert not token["special"]
    token["special"] = True
    file.write_text(json.dumps(document), encoding="utf-8")
    row = talk("What begins a call?", "Write <tool_call> for it.")
    source = str(write_rows(tmp_path / "rows.jsonl", [row]))
    for first, second in ((flagged, plain), (plain, flagged)):
        cache = tmp_path / f"cache of {first.name}"
        for given in (first, second):
            report = tm.lint(source, str(given), cache_dir=cache, **QUICK)
            assert ("control_text" in lines(report)) == (given == flagged)
        assert len([p for p in (cache / "tokenizers").iterdir() if p.name != "memo"]) == 1


def test_clean_rows_have_no_findings(directory: Path, tokenizer: str) -> None:
    report = tm.lint(str(clean(directory)), tokenizer, cache_dir=directory / "cache", **QUICK)
    assert report.findings == ()
    assert report.rows_checked == report.rows == 40
    assert not report.fails("info")


def test_workers_and_one_process_give_the_same_findings(
    all_rules: LintReport, directory: Path, tokenizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_cuts(monkeypatch)  # several blocks, so that both workers have something to do
    given = {**QUICK, "executor": "local", "max_length": MAX_LENGTH, "num_workers": 2}
    source = str(crafted(directory))
    report = tm.lint(source, tokenizer, cache_dir=directory / "workers", sample=None, **given)
    assert detail(report) == detail(all_rules)


def test_sample_is_reported_and_reproducible(directory: Path, tokenizer: str) -> None:
    source = str(write_rows(directory / "many.jsonl", conversations(300)))
    given = {**QUICK, "cache_dir": directory / "cache", "sample": 50}
    reports = [tm.lint(source, tokenizer, **given) for _ in range(2)]
    assert detail(reports[0]) == detail(reports[1])
    assert (reports[0].rows_checked, reports[0].rows) == (50, 300)
    assert reports[0].sample == {"rows": 50, "blocks": 1, "of_blocks": 1, "seed": 0}


def test_choice_of_rows_is_reproducible() -> None:
    counts = [10, 0, 1000, 3, *[20] * 100]
    chosen = choose(counts, 200)
    assert chosen == choose(counts, 200)
    assert len(chosen) <= SAMPLE_BLOCKS
    assert sum(len(rows or ()) for rows in chosen.values()) == 200
    for block, rows in chosen.items():
        assert rows == sorted(set(rows or ()))
        assert max(rows or ()) < counts[block]
    assert choose(counts, None) == {n: None for n, count in enumerate(counts) if count}
    with pytest.raises(UsageError, match="positive"):
        choose(counts, 0)


def test_memory_for_near_duplicates_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_cuts(monkeypatch)
    rows = [*conversations(60, words=60), *conversations(4, words=60)]
    rows[-1]["messages"][1]["content"] += " Really."
    source = str(write_rows(tmp_path / "a.jsonl", rows))
    report = tm.lint(source, str(TOKENIZER), **QUICK)
    assert lines(report) == {"duplicate": [61, 62, 63], "near_duplicate": [64]}
    assert report.near_duplicates is not None
    assert report.near_duplicates["rows_compared"] == 61
    monkeypatch.setattr(minhash, "MAX_ROWS", 50)
    report = tm.lint(source, str(TOKENIZER), **QUICK)
    assert lines(report) == {"duplicate": [61, 62, 63]}
    assert report.near_duplicates is not None
    assert report.near_duplicates["rows_compared"] == 50


def test_parquet_rows_have_row_numbers_and_are_not_copied(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [*conversations(4), conversations(1)[0], {"id": 9, "messages": []}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    report = tm.lint(str(tmp_path / "a.parquet"), str(TOKENIZER), cache_dir=tmp_path / "c", **QUICK)
    found = {f.rule: [str(origin) for origin in f.places] for f in report.findings}
    assert {origin.length for f in report.findings for origin in f.places} == {0}
    path = tmp_path / "a.parquet"
    assert found == {"bad_shape": [f"{path}#5"], "duplicate": [f"{path}#4"]}
    assert {one.name for one in (tmp_path / "c" / "rows").glob("*/*")} <= {"note.json"}


def test_header_in_a_generation_block_is_reported(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'user' %}<user>{{ m.content }}{% else %}"
        "{% generation %}<assistant>{{ m.content }}<|im_end|>{% endgeneration %}{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    source = write_rows(tmp_path / "a.jsonl", [talk("Why is it so?", "Because.")])
    given = {**QUICK, "cache_dir": tmp_path / "cache", "chat_template": template}
    report = tm.lint(str(source), str(TOKENIZER), **given)
    assert [f.rule for f in report.findings if f.rule == "generation_header"]


def test_rules_can_be_chosen_and_depend_on_the_recipe(directory: Path, tokenizer: str) -> None:
    given = {**QUICK, "cache_dir": directory / "cache"}
    source = str(crafted(directory))
    only = tm.lint(source, tokenizer, only=["mojibake", "duplicate"], **given)
    assert set(lines(only)) == {"mojibake", "duplicate"}
    assert only.near_duplicates is None
    less = tm.lint(source, tokenizer, ignore=["mojibake"], **given)
    assert set(lines(less)) == set(GOLDEN) - {"mojibake", "overlong"}
    expanded = tm.lint(source, tokenizer, expand="turns", **given)  # loses no thinking
    assert not {"rewrites_history", "history_differs"} & set(lines(expanded))
    with pytest.raises(UsageError, match="no_such_rule"):
        tm.lint(source, tokenizer, ignore=["no_such_rule"], **given)
    with pytest.raises(UsageError, match="leave no rule"):
        tm.lint(source, tokenizer, only=["mojibake"], ignore=["mojibake"], **given)


@pytest.mark.parametrize(
    ("changes", "rules"),
    [({"pad_token": "<|im_end|>"}, {"pad_is_eos"}), ({"pad_token": None}, {"no_pad_token"}),
     ({"post": "<|endoftext|>"}, {"bos_in_text"})],
)  # fmt: skip
def test_tokenizer_findings_have_no_origin(
    tmp_path: Path, changes: dict[str, Any], rules: set[str]
) -> None:
    tokenizer = str(tokenizer_with(tmp_path, **changes))
    report = tm.lint(str(clean(tmp_path)), tokenizer, **QUICK)
    assert set(lines(report)) == rules
    assert all(f.places == () and f.detail and f.count == 1 for f in report.findings)


GENERATION = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
FIRST_CALL = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% if m.tool_calls %}{{ m.tool_calls[0] | tojson }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PICKY = (
    "{% for m in messages %}{% if m.tool_calls and not m.tool_calls[0].id %}"
    "{{ raise_exception('a call needs an id') }}{% endif %}"
    "{% if m.role == 'tool' and not messages[loop.index0 - 1].tool_calls %}"
    "{{ raise_exception('a result needs a call') }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PAIRS = [{"prompt": "One, two,", "completion": " three."}]


def call(**arguments: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "look_up", "arguments": arguments}}


def with_null(tool: dict[str, Any], **arguments: Any) -> list[dict[str, Any]]:
    function = {"name": "look_up", "parameters": {"properties": {"q": tool}}}
    row = talk("What is x?", "Let me see.", tool_calls=[call(**arguments)], name=None)
    return [{**row, "tools": [{"type": "function", "function": function}]}]


def with_result(*calls: dict[str, Any]) -> dict[str, Any]:
    asked, answer = talk("One?", "", **({"tool_calls": list(calls)} if calls else {}))["messages"]
    result, closing = {"role": "tool", "content": "1"}, {"role": "assistant", "content": "One."}
    return {"messages": [asked, *([answer] if calls else []), result, closing]}


CASES: dict[str, tuple[list[Any], dict[str, Any], dict[str, list[int]]]] = {
    "generation without the end of turn": (
        conversations(3), {"chat_template": GENERATION}, {"missing_closer": [1, 2, 3]}),
    "generation with the end of turn": (
        conversations(3),
        {"chat_template": GENERATION.replace(
            "{% endgeneration %}", "<|im_end|>{% endgeneration %}")}, {}),
    "pairs with eos": (PAIRS, {}, {"plain_strings": [1]}),
    "pairs without eos": (
        PAIRS, {"append_eos": False}, {"missing_closer": [1], "plain_strings": [1]}),
    "a schema may mean null": (with_null({"default": None}, q="x"), {}, {}),
    "an argument that the tool declares": (with_null({"type": "string"}, q=None), {}, {}),
    "an argument that a columnar schema added": (
        with_null({"type": "string"}, q="x", other=None), {}, {"null_tool_keys": [1]}),
    "null in a schema": (with_null({"type": None}, q="x"), {}, {"null_tool_keys": [1]}),
    "only the first call is printed": (
        [talk("One?", "", tool_calls=[call(q="one")]),
         talk("Two?", "", tool_calls=[call(q="one"), call(q="two")])],
        {"chat_template": FIRST_CALL}, {"template_drops_tool_calls": [2]}),
    "a refusal for another reason than roles": (
        [with_result(call(q="one")), with_result()],
        {"chat_template": PICKY}, {"template_error": [1], "role_order": [2]}),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_findings_are_exactly_as_expected(tmp_path: Path, name: str) -> None:
    rows, given, expected = CASES[name]
    source = str(write_rows(tmp_path / "a.jsonl", rows))
    assert lines(tm.lint(source, str(TOKENIZER), **given, **QUICK)) == expected


def test_findings_of_the_bundled_dirty_rows() -> None:
    report = tm.lint(str(EXAMPLES / "dirty.jsonl"), str(TOKENIZER), **QUICK)
    expected = {"bad_json": [5], "bad_shape": [3], "role_order": [4], "trailing_user": [2]}
    assert lines(report) == {**expected, "duplicate": [6]}
    assert report.fails()
    assert not report.fails("never")


def test_rejections_equal_those_of_a_build(
    all_rules: LintReport, directory: Path, tokenizer: str
) -> None:
    given = {**QUICK, "max_length": MAX_LENGTH, "cache_dir": directory / "cache"}
    rejected = tm.prepare(str(crafted(directory)), tokenizer, **given).rejected
    finer = {"role_order": "template_error", "template_drops_tool_calls": "template_drops_content"}
    counts: dict[str, int] = {}
    for finding in all_rules.findings:
        reason = finer.get(finding.rule, finding.rule)
        if reason in REASONS:
            counts[reason] = counts.get(reason, 0) + finding.count
    assert counts == rejected


def labelled(unwanted: int) -> list[dict[str, Any]]:
    return [
        {"prompt": f"{n}? ", "completion": f"{n * n}", "label": n >= unwanted} for n in range(60)
    ]


def chosen_longer(longer: int) -> list[dict[str, Any]]:
    long, short = "amber birch cedar delta", "amber"
    longs = [{"prompt": f"{n}? ", "chosen": long, "rejected": short} for n in range(longer)]
    shorts = [{"prompt": f"{n}? ", "chosen": short, "rejected": long} for n in range(longer, 60)]
    return longs + shorts


@pytest.mark.parametrize(
    ("rows", "rule", "detail"),
    [
        (labelled(3), "label_imbalance", "3 of 60 answers are unwanted"),
        (labelled(6), "label_imbalance", None),
        (chosen_longer(45), "length_bias", ""),
        (chosen_longer(44), "length_bias", None),
        (chosen_longer(10), "length_bias", ""),
    ],
    ids=["3 unwanted", "6 unwanted", "45 longer", "44 longer", "10 longer"],
)
def test_imbalance_of_labels_and_lengths_is_reported(
    tmp_path: Path, rows: list[Any], rule: str, detail: str | None
) -> None:
    source = write_rows(tmp_path / "rows.jsonl", rows)
    report = tm.lint(str(source), str(TOKENIZER), only=[rule], **QUICK)
    assert set(lines(report)) == (set() if detail is None else {rule})
    assert all((detail or "") in finding.detail for finding in report.findings)
