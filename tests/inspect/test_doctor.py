"""The doctor: every problem is reported with a remedy, and the other checks still run."""

from __future__ import annotations

import re
import shutil
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from tests.build.making import TOKENIZER, conversations, write_rows
from tests.inspect.crafted import tokenizer_with
from tokenmill.inspect import doctor
from tokenmill.inspect.doctor import STATUSES, Check, examine


@pytest.fixture(autouse=True)
def without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading Ray takes seconds; tests about it use a fake."""
    monkeypatch.setitem(sys.modules, "ray", None)


def look(*sources: str, tokenizer: Any = None, **given: Any) -> dict[str, Check]:
    checks = examine(sources, tokenizer, tokenizer_backend="file", **given)
    found = {check.name: check for check in checks}
    assert len(found) == len(checks)
    return found


def require(check: Check, status: str, word: str) -> None:
    assert check.status == status
    assert word in check.detail


def test_healthy_machine_passes_every_check(tmp_path: Path) -> None:
    source = write_rows(tmp_path / "a.jsonl", conversations(5))
    found = look(str(source), tokenizer=str(TOKENIZER))
    assert [c.name for c in found.values() if c.status == "fail"] == []
    assert {"cache", "file system", "space", "offline", "Ray", "cores", "parity"} <= set(found)
    assert found["parity"].status == "ok"
    assert re.search(r"all [1-9][\d,]+ texts", found["parity"].detail)
    assert "5 rows" in found["sources"].detail
    assert all(c.status in STATUSES and c.detail and c.remedy for c in found.values())


def test_missing_library_is_named_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "installed_versions", lambda names: {})
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    found = [check for check in examine() if "tokenmill[" in check.remedy]
    extras = [re.findall(r"tokenmill\[(\w+)\]", check.remedy)[0] for check in found]
    assert sorted(extras) == ["hf", "ray", "remote", "serve", "torch", "vision"]


def test_missing_fast_engine_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fastokens", None)
    found = look(tokenizer=str(TOKENIZER))
    assert found["engine fastokens"].status == "warning"
    assert found["engine fastokens"].remedy == "pip install fastokens"
    require(found["parity"], "note", "fastokens")


def test_engine_that_differs_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    from tokenmill.tokenizers import engines

    encode = engines.FastokensEngine.encode

    def wrong(self: Any, texts: Any) -> Any:
        ids, starts = encode(self, texts)
        ids = ids.copy()
        ids[-1] += 1
        return ids, starts

    monkeypatch.setattr(engines.FastokensEngine, "encode", wrong)
    require(look(tokenizer=str(TOKENIZER))["parity"], "note", "different ids")


def test_read_only_cache_fails_with_a_remedy() -> None:
    found = look("nothing.jsonl", cache_dir="/proc/tokenmill-cache")
    assert found["cache"].status == "fail"
    assert "TOKENMILL_CACHE_DIR" in found["cache"].remedy
    assert found["sources"].status == "note", "not checked, and reported"
    assert found["engine hf"].status == "ok", "the other checks still run"


@pytest.mark.parametrize("name", ["/no/such/tokenizer", "broken"])
def test_invalid_tokenizer_fails(tmp_path: Path, name: str) -> None:
    if name == "broken":
        name = str(tmp_path / "broken")
        shutil.copytree(TOKENIZER, name)
        (Path(name) / "tokenizer.json").write_text("{")
    found = look(tokenizer=name)
    require(found["tokenizer"], "fail", name)
    assert "parity" not in found


def test_missing_source_fails() -> None:
    require(look("/no/such.jsonl")["sources"], "fail", "/no/such.jsonl")


@pytest.mark.parametrize(("times", "status"), [(0.9, "fail"), (1.5, "warning"), (2.5, "ok")])
def test_free_space_is_compared_with_the_estimate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times: float, status: str
) -> None:
    source = write_rows(tmp_path / "a.jsonl", conversations(10))
    need = 2 * source.stat().st_size + 10 * doctor.ROW_BYTES
    usage = types.SimpleNamespace(total=1 << 40, used=0, free=int(times * need))
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _: usage)
    assert look(str(source))["space"].status == status


@pytest.mark.parametrize(
    ("kind", "status", "word"),
    [("ext4", "ok", "mapped"), ("nfs4", "note", "pread"), ("fuse.s3fs", "note", "pread"),
     ("tmpfs", "warning", "memory"), ("unknown", "note", "local")],
)  # fmt: skip
def test_file_system_shows_how_stores_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, status: str, word: str
) -> None:
    from tokenmill._core import paths as kinds

    monkeypatch.setattr(kinds, "filesystem_kind", lambda _: kind)
    monkeypatch.setattr(doctor, "filesystem_kind", lambda _: kind)
    require(doctor.file_system(tmp_path), status, word)


def test_offline_setting_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    for value, word in (("1", "HF_HUB_OFFLINE set"), ("0", "not set")):
        monkeypatch.setenv("HF_HUB_OFFLINE", value)
        require(doctor.offline(), "ok", word)


def test_missing_ray_is_a_note_with_the_pip_line() -> None:
    found = doctor.ray(None)
    assert (found.status, found.detail) == ("note", "not installed")
    assert "pip install 'tokenmill[ray]'" in found.remedy


@pytest.mark.parametrize(
    ("answer", "status", "word"),
    [({"address": None, "reachable": None}, "ok", "no cluster"),
     ({"address": "10.0.0.1:6379", "reachable": True}, "ok", "is reachable"),
     ({"address": "10.0.0.1:6379", "reachable": False}, "warning", "not reachable"),
     (None, "note", "cannot be used")],
)  # fmt: skip
def test_ray_cluster_is_described(
    monkeypatch: pytest.MonkeyPatch, answer: Any, status: str, word: str
) -> None:
    from importlib.machinery import ModuleSpec

    def describe() -> dict[str, Any]:
        if answer is None:
            raise ImportError("no such library")
        return {"version": "2.60", "from": "RAY_ADDRESS", **answer}

    fake = types.ModuleType("ray")
    fake.__spec__ = ModuleSpec("ray", None)
    monkeypatch.setitem(sys.modules, "ray", fake)
    require(doctor.ray(describe), status, word)


@pytest.mark.parametrize(
    ("changes", "name", "status", "word"),
    [
        ({"pad_token": "<|im_end|>"}, "special tokens", "note", "pad is eos"),
        ({"pad_token": None}, "special tokens", "note", "no pad token"),
        ({"eos_token": None}, "special tokens", "warning", "no end-of-sequence"),
        ({"template": "{% for m in messages %}{{ m.content }}{% endfor %}"},
         "chat template", "ok", "traced"),
        ({"template": "{{ strftime_now('%Y') }}"}, "chat template", "note", "date"),
        ({"template": "{% if %}"}, "chat template", "fail", "line 1"),
    ],
)  # fmt: skip
def test_unusual_special_tokens_and_chat_templates_are_reported(
    tmp_path: Path, changes: dict[str, Any], name: str, status: str, word: str
) -> None:
    template = changes.get("template")
    tokenizer = tokenizer_with(tmp_path, **({} if template else changes))
    if template is not None:
        (tokenizer / "chat_template.jinja").write_text(template)
    require(look(tokenizer=str(tokenizer))[name], status, word)


def test_error_in_one_check_does_not_stop_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> Check:
        raise RuntimeError("raised by the test")

    monkeypatch.setattr(doctor, "cores", broken)
    found = look()
    require(found["cores"], "fail", "raised by the test")
    assert found["cache"].status == "ok"
