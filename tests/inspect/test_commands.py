"""`lint`, `stats` and `doctor` as commands: exit codes, one JSON object, text for people."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.build.making import TOKENIZER, conversations, write_rows
from tests.cli.harness import QUICK, Shell
from tests.inspect.crafted import GOLDEN, MAX_LENGTH, clean, crafted, tokenizer_with
from tokenmill.inspect.doctor import examine
from tokenmill.inspect.lint.rules import RULES


@pytest.fixture
def without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)  # loading it takes seconds


def test_lint_json_has_the_findings_and_exit_code_1(shell: Shell, tmp_path: Path) -> None:
    source, tokenizer = crafted(tmp_path), tokenizer_with(tmp_path)
    flags = ("--tokenizer", tokenizer, *QUICK[2:], "--max-length", str(MAX_LENGTH), "--json")
    answer = shell("lint", source, *flags)
    assert answer.code == 1
    found = {
        f["rule"]: [int(p.rpartition(":")[2]) for p in f["places"]] for f in answer.json["findings"]
    }
    assert found == GOLDEN
    assert answer.json["ok"] is False
    assert answer.json["errors"] + answer.json["warnings"] + answer.json["infos"] == len(GOLDEN)


def test_lint_exit_codes(shell: Shell, tmp_path: Path) -> None:
    answer = shell("lint", clean(tmp_path), *QUICK)
    assert (answer.code, answer.out) == (0, "")
    assert "nothing found in 40 of 40 rows" in answer.err
    source = write_rows(tmp_path / "a.jsonl", [*conversations(3), conversations(1)[0]])
    assert shell("lint", source, *QUICK).code == 0
    assert shell("lint", source, *QUICK, "--fail-on", "warning").code == 1
    assert shell("lint", source, *QUICK, "--fail-on", "warning", "--ignore", "duplicate").code == 0
    assert shell("lint", source, *QUICK, "--only", "bad_json,bad_shape").out == ""
    missing = shell("lint", "/no/such.jsonl", *QUICK, "--json")
    assert (missing.code, missing.error["type"]) == (1, "SourceMissing")
    for flag in ("--ignore", "--fail-on", "--train-on"):
        refused = shell("lint", source, *QUICK, flag, "nonsense")
        assert refused.code == 2
        assert "nonsense" in refused.err
    assert shell("lint", source, *QUICK, "--sample", "0").code == 2


def test_lint_shows_place_example_and_hint(shell: Shell, tmp_path: Path) -> None:
    source = write_rows(tmp_path / "a\x1b[2J.jsonl", [*conversations(2), "{", "["])
    answer = shell("lint", source, *QUICK, "--sample", "100")
    assert answer.code == 1
    assert shell("lint", source, *QUICK, "--fail-on", "never").code == 0
    assert re.search(r"error: bad_json +2 rows\n    .*a␛\[2J\.jsonl:3: not valid JSON", answer.out)
    assert re.search(r"also .*:4\n", answer.out)
    assert f"→ {RULES['bad_json'].hint}" in answer.out
    assert "\x1b[2J" not in answer.out + answer.err


def test_lint_reports_that_it_used_a_sample(shell: Shell, tmp_path: Path) -> None:
    source = write_rows(tmp_path / "a.jsonl", conversations(30))
    answer = shell("lint", source, *QUICK, "--sample", "10")
    assert "10 of 30 rows" in answer.err
    assert "--all" in answer.err
    for flags, counts in (((), (True, 30, 10)), (("--all",), (False, 30, 30))):
        document = shell("lint", source, *QUICK, "--sample", "10", *flags, "--json").json
        assert (document["sampled"], document["rows"], document["rows_checked"]) == counts


def test_lint_lists_its_rules(shell: Shell) -> None:
    answer = shell("lint", "--list-rules")
    assert answer.code == 0
    assert len(answer.out.splitlines()) == len(RULES)
    listed = shell("lint", "--list-rules", "--json").json["rules"]
    assert [rule["rule"] for rule in listed] == list(RULES)


def test_stats_shows_bars_limits_and_packs(shell: Shell, tmp_path: Path) -> None:
    source = write_rows(tmp_path / "a.jsonl", conversations(20))
    store = shell("prepare", source, *QUICK).out.strip()
    answer = shell("stats", store, "--max-length", "30", "--max-length", "40")
    assert answer.code == 0
    assert re.search(r"^ +\d+–\d+ +\d+  █+", answer.out, re.MULTILINE)
    assert re.search(r"^30 +20 +100.0%", answer.out, re.MULTILINE)
    assert re.search(r"^4,096 +1 +\d+\.\d+% +0$", answer.out, re.MULTILINE)
    document = shell("stats", store, "--json").json
    assert {"rows", "tokens", "trained_tokens", "percentiles"} <= set(document)
    assert [fill["length"] for fill in document["packing"]] == [4096, 8192, 16384, 32768]
    assert shell("stats", store, "--max-length", "0").code == 2


@pytest.mark.usefixtures("without_ray")
def test_doctor_exits_0_when_ready_and_1_when_a_check_fails(shell: Shell) -> None:
    ready = shell("doctor", "--tokenizer", TOKENIZER, "--tokenizer-backend", "file", "--json")
    assert ready.code == 0
    assert ready.json["ok"] is True
    for check in ready.json["checks"]:
        assert set(check) == {"name", "status", "detail", "do"}
        assert all(check.values())
    failed = shell("doctor", "--tokenizer", "/no/such", "--json")
    assert failed.code == 1
    assert failed.json["ok"] is False
    assert [c["name"] for c in failed.json["checks"] if c["status"] == "fail"] == ["tokenizer"]


@pytest.mark.usefixtures("without_ray")
def test_doctor_shows_problems_first_and_is_short_about_the_rest(shell: Shell) -> None:
    answer = shell("doctor", "--tokenizer", "/no/such")
    *problems, fine = answer.out.splitlines()
    statuses = [line.split()[0] for line in problems[::2]]
    assert statuses == sorted(statuses, key=("fail", "warning", "note").index)
    assert (statuses[0], problems[0].split()[1]) == ("fail", "tokenizer")
    assert all(line.lstrip().startswith("→ ") for line in problems[1::2])
    assert fine.startswith("ok      tokenmill, ")
    assert {"cache", "offline"} <= {*fine.split("      ")[1].split(", ")}
    assert re.fullmatch(r"1 of \d+ checks failed", answer.err.strip())


@pytest.mark.usefixtures("without_ray")
def test_doctor_reports_each_check_before_it_runs() -> None:
    begun: list[str] = []
    names = [check.name for check in examine(report=begun.append)]
    assert begun[0] == "libraries"
    assert {"cache", "space", "Ray"} <= {*begun} & {*names}


def test_stats_count_rejected_rows_per_source(shell: Shell, tmp_path: Path) -> None:
    good = write_rows(tmp_path / "good.jsonl", conversations(2))
    bad = write_rows(tmp_path / "bad.jsonl", [{"x": 1}, {"x": 2}, *conversations(1)])
    out = shell("stats", shell("prepare", good, bad, *QUICK).out.strip()).out
    assert re.search(r"source +rows +tokens +trained +rejected +share", out)
    assert re.search(r"good\.jsonl +2 +\d+ +\d+ +0 ", out)
    assert re.search(r"bad\.jsonl +1 +\d+ +\d+ +2 ", out)
