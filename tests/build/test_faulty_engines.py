"""A fast engine that differs from its reference: the references build every slice again."""

from __future__ import annotations

import json
import logging
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.build.faulty_engines import ENTRY, VARIABLE, Fault
from tests.build.making import INLINE, TOKENIZER, conversations, files_of, small_cuts, write_rows
from tests.programs import python
from tokenmill.build import blocks
from tokenmill.build import run as build_run
from tokenmill.build.calls import run_recipe
from tokenmill.build.outcome import Prepared
from tokenmill.errors import CorruptionError
from tokenmill.store import Store

Files = dict[str, bytes]
LOCAL = {"executor": "local", "num_workers": 2}
ENGINE = {"render": ("renderer", "jinja2"), "encode": ("engine", "hf")}
KIND = {"render": "renderer", "encode": "encoder"}


class InOrder:
    """A builder's random order without the chance in it."""

    def randrange(self, _: int) -> int:
        return 0

    def shuffle(self, _: list[Any]) -> None:
        pass


@pytest.fixture(autouse=True)
def _small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    small_cuts(monkeypatch)
    monkeypatch.setattr("tokenmill.tokenizers.cache.SMALL_JOB_BYTES", 0)  # use the fast engine
    monkeypatch.setattr(blocks.random, "SystemRandom", InOrder)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some twelve slices; what an audit looks for is in the last one."""
    rows = conversations(420)
    rows[-1]["messages"][0]["content"] += " audit me amber"
    return write_rows(tmp_path_factory.mktemp("faulty") / "chat.jsonl", rows)


@pytest.fixture(scope="module")
def honest(source: Path) -> Files:
    cache = source.parent / "honest"
    with pytest.MonkeyPatch.context() as patch:
        small_cuts(patch)
        prepared = run_recipe(source, str(TOKENIZER), cache_dir=cache, **INLINE)
    assert prepared.summary()["slices"] > 9
    return published(cache)


def published(cache: Path) -> Files:
    return files_of(cache, "slices") | files_of(cache, "stores")


@pytest.fixture
def faulty(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    def build(fault: Fault, **more: Any) -> Prepared:
        monkeypatch.setenv(VARIABLE, fault.to_environment())
        monkeypatch.setattr(build_run, "BUILD", ENTRY)
        sources = more.pop("sources", source)
        return run_recipe(sources, str(TOKENIZER), cache_dir=tmp_path / "cache", **(INLINE | more))

    return build


def check_reported(prepared: Prepared, stage: str, caplog: pytest.LogCaptureFixture) -> None:
    proof, summary, kind = prepared.store.proof, prepared.summary(), KIND[stage]
    assert proof["audit_mismatches"][kind] == 1
    assert proof["audited_rows"][kind] >= 1
    assert sum(proof["audit_mismatches"].values()) == 1, "the other engine is not accused"
    name, reference = ENGINE[stage]
    assert proof[name] == summary[name] == reference, "nothing of the fast engine is in a slice"
    assert proof["used"][f"{stage}.{name}"] == {reference: proof["slices"]}
    assert summary["audit_mismatches"] == 1
    assert summary["audited_rows"] == sum(proof["audited_rows"].values())
    assert summary["slices_built"] == summary["slices"]
    (notice,) = proof["notices"]
    assert notice.startswith(f"the fast {kind} (")
    assert f"all {proof['slices']} slices were built again by the references" in notice
    assert [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING] == [notice]


@pytest.mark.parametrize(
    ("stage", "where"),
    [
        pytest.param("render", {}, id="render-inline"),
        pytest.param("encode", {}, id="encode-inline", marks=pytest.mark.soak),
        pytest.param("encode", LOCAL, id="encode-local"),
    ],
)
def test_mismatch_in_the_last_slice_undoes_all_before(
    stage: str,
    where: dict[str, Any],
    faulty: Any,
    honest: Files,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    prepared = faulty(Fault(stage), **where)
    assert published(tmp_path / "cache") == honest
    check_reported(prepared, stage, caplog)
    replaced = prepared.store.proof["slices_replaced"]
    assert replaced > 6
    wrong = Counter(p.name.split(".")[0] for p in (tmp_path / "cache" / "quarantine").iterdir())
    assert len(wrong) == replaced, "moved away, never deleted"
    # Each of two workers may have been stopped before it had published all files of a slice.
    assert sum(files < 3 for files in wrong.values()) <= (2 if where else 0)
    found = faulty(Fault(stage))
    assert found.hit
    assert list(found.remarks())[:1] == prepared.store.proof["notices"]


def test_one_wrong_worker_of_two_restarts_the_build(
    faulty: Any, honest: Files, tmp_path: Path
) -> None:
    fault = Fault("render", audited="amber", after=3, marker=str(tmp_path / "marker"))
    prepared = faulty(fault, **LOCAL)
    assert published(tmp_path / "cache") == honest
    proof = prepared.store.proof
    assert proof["used"]["render.renderer"] == {"jinja2": proof["slices"]}
    assert 3 <= proof["slices_replaced"] < proof["slices"], "an honest worker's are equal"


@pytest.mark.parametrize(
    ("stage", "again"),
    [("render", "force_recache"), ("encode", "another limit"), ("render", "more rows")],
)
def test_slices_of_an_earlier_run_are_replaced_too(
    stage: str, again: str, source: Path, faulty: Any, honest: Files, tmp_path: Path
) -> None:
    missed = Fault(stage, about="amber birch cedar", audited="audit me amber")
    faulty(missed)
    assert published(tmp_path / "cache") != honest, "the audited row was not lied about"
    seen, more = Fault(stage, about="amber birch cedar", audited="amber birch"), {}
    if again == "more rows":
        rows = conversations(20, first=420)
        rows[0]["messages"][0]["content"] += " amber birch cedar"
        more["sources"] = [source, write_rows(tmp_path / "more.jsonl", rows)]
    elif again == "another limit":  # nothing to tokenize, so nothing to see
        store = faulty(seen, max_length=80).store
        assert (store.proof["slices_built"], store.proof["notices"]) == (0, [])
        more = {"max_length": 80, "force_recache": True}
    else:
        more["force_recache"] = True
    prepared = faulty(seen, **more)
    proof = prepared.store.proof
    assert proof["audit_mismatches"][KIND[stage]] > 0
    assert 0 < proof["slices_replaced"] < proof["slices"] == proof["slices_built"]
    prepared.store.verify()
    now = files_of(tmp_path / "cache", "slices")
    assert now.items() >= {name: data for name, data in honest.items() if name in now}.items()
    if again != "force_recache":  # a store of the slices that were replaced is noticed
        with pytest.raises(CorruptionError):
            faulty(missed).store.verify()


def test_slice_with_the_same_bytes_is_left_alone(
    faulty: Any, honest: Files, tmp_path: Path
) -> None:
    proof = faulty(Fault("encode", about="audit me")).store.proof
    assert published(tmp_path / "cache") == honest
    assert (proof["slices_built"], proof["slices_replaced"]) == (proof["slices"], 0)
    assert not (tmp_path / "cache" / "quarantine").exists()


def test_slice_of_a_worker_that_died_before_its_report_is_replaced(
    faulty: Any, honest: Files, tmp_path: Path
) -> None:
    faulty(Fault("encode", dies=str(tmp_path / "died")), **LOCAL)
    assert (tmp_path / "died").exists()
    assert published(tmp_path / "cache") == honest


def test_parts_replace_their_own_slices(
    source: Path, faulty: Any, honest: Files, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setenv(VARIABLE, Fault("encode", audited="amber", after=2).to_environment())
    monkeypatch.setattr(build_run, "BUILD", ENTRY)
    given = {"cache_dir": tmp_path / "cache", **INLINE}
    outcomes = [run_recipe(source, str(TOKENIZER), part=f"{n}/3", **given) for n in (1, 2, 3)]
    assert [outcome.build_stats.slices_replaced for outcome in outcomes] == [2, 2, 2]
    assert published(tmp_path / "cache") == honest


def test_command_tells_on_stderr_and_keeps_its_json(source: Path, tmp_path: Path) -> None:
    program = (
        "import sys; from tokenmill.build import run; from tokenmill.cli import main; "
        f"run.BUILD = {ENTRY!r}; raise SystemExit(main())"
    )
    given = ["--tokenizer", TOKENIZER, "--tokenizer-backend", "file", "--num-workers", "0"]
    cache = ["--cache-dir", tmp_path / "cache", "--json"]
    fault = {VARIABLE: Fault("render", audited="7").to_environment()}
    done = python(program, "prepare", source, *given, *cache, **fault)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert isinstance(document["audited_rows"], int)
    assert document["audit_mismatches"] > 0
    assert done.stderr.count("the fast renderer (traced) differed from the reference in") == 1
    store = Store(Path(document["path"]))
    assert store.proof["notices"][0] in done.stderr
