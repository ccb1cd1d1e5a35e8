"""An engine caught lying is out, and what it made in the run is made anew (P17)."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.build.lying import ENTRY, VARIABLE, Lie
from tests.build.making import INLINE, TOKENIZER, conversations, files_of, small_cuts, write_rows
from tokenmill.api import run_part, run_recipe
from tokenmill.build import builder
from tokenmill.build.outcome import Prepared
from tokenmill.store import Store
from tokenmill.work import blocks

LOCAL = {"executor": "local", "num_workers": 2}
ROOMS = ("render", "encode")
ENGINE = {"render": ("renderer", "jinja2"), "encode": ("engine", "hf")}
FAST = INLINE | {"engine": "fastokens"}  # "auto" leaves so few rows to the reference
KIND = {"render": "renderer", "encode": "encoder"}
ROOT = Path(__file__).resolve().parents[2]


class FromTheFirst:
    """A builder's own place, without the chance in it: the first slice."""

    def randrange(self, _: int) -> int:
        return 0


@pytest.fixture(autouse=True)
def _small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    small_cuts(monkeypatch)
    monkeypatch.setattr(blocks.random, "SystemRandom", FromTheFirst)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some twenty slices; what an audit looks for stands in the last one."""
    rows = conversations(700)
    rows[-1]["messages"][0]["content"] += " audit me amber"
    return write_rows(tmp_path_factory.mktemp("lying") / "chat.jsonl", rows)


@pytest.fixture(scope="module")
def honest(source: Path) -> dict[str, bytes]:
    """Every file of slices and stores that an honest build makes."""
    cache = source.parent / "honest"
    with pytest.MonkeyPatch.context() as patch:
        small_cuts(patch)
        prepared = run_recipe(source, str(TOKENIZER), cache_dir=cache, **INLINE)
    assert prepared.summary()["slices"] > 15
    return published(cache)


def published(cache: Path) -> dict[str, bytes]:
    return files_of(cache, "slices") | files_of(cache, "stores")


@pytest.fixture
def lying(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Any:  # Callable[..., Prepared]
    """Build with a lie into one cache."""

    def build(lie: Lie, **more: Any) -> Prepared:
        monkeypatch.setenv(VARIABLE, lie.to_environment())
        monkeypatch.setattr(builder, "BUILD", ENTRY)
        return run_recipe(source, str(TOKENIZER), cache_dir=tmp_path / "cache", **(FAST | more))

    return build


def check_told(prepared: Prepared, room: str, caplog: pytest.LogCaptureFixture) -> None:
    """Proof, summary and the person at the terminal know."""
    proof, summary, kind = prepared.store.proof, prepared.summary(), KIND[room]
    assert proof["audit_mismatches"][kind] == 1
    assert proof["audited_rows"][kind] >= 1
    assert sum(proof["audit_mismatches"].values()) == 1, "the other engine is not accused"
    name, reference = ENGINE[room]
    assert proof[name] == summary[name] == reference, "what it made is in no slice any more"
    assert summary["audit_mismatches"] == 1
    assert summary["audited_rows"] == sum(proof["audited_rows"].values())
    assert summary["slices_built"] == summary["slices"]
    (notice,) = proof["notices"]
    assert notice.startswith(f"the fast {kind} (")
    assert f"{proof['slices_redone']} slices were made anew" in notice
    assert [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING] == [notice]


@pytest.mark.parametrize(
    ("room", "where"),
    [
        pytest.param("render", {}, id="render-inline"),
        pytest.param("encode", {}, id="encode-inline"),
        pytest.param("encode", LOCAL, id="encode-local"),
        pytest.param("render", LOCAL, id="render-local", marks=pytest.mark.soak),
    ],
)
def test_lie_seen_in_the_last_slice_undoes_all_before(
    room: str,
    where: dict[str, Any],
    lying: Any,
    honest: dict[str, bytes],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    prepared = lying(Lie(room), **where)
    assert published(tmp_path / "cache") == honest
    check_told(prepared, room, caplog)
    proof = prepared.store.proof
    if not where:
        assert proof["slices_redone"] == proof["slices"] - 1, "all but the one that was audited"
    assert proof["slices_replaced"] == proof["slices_redone"] > 10
    wrong = list((tmp_path / "cache" / "quarantine").iterdir())
    assert len(wrong) == 3 * proof["slices_replaced"], "moved away, never deleted"


@pytest.mark.parametrize("room", ["render", pytest.param("encode", marks=pytest.mark.soak)])
def test_one_liar_among_two_workers_is_out_in_both(
    room: str, lying: Any, honest: dict[str, bytes], tmp_path: Path
) -> None:
    """The liar's third slice shows it; then nobody uses that engine, and all it made goes."""
    lie = Lie(room, audited="amber", after=3, liar=str(tmp_path / "liar"))
    prepared = lying(lie, **LOCAL)
    assert published(tmp_path / "cache") == honest
    proof = prepared.store.proof
    assert proof["used"][".".join((room, ENGINE[room][0]))] == {ENGINE[room][1]: proof["slices"]}
    assert 3 <= proof["slices_replaced"] < proof["slices_redone"], "an honest worker's are equal"


@pytest.mark.parametrize("room", ROOMS)
def test_lie_about_some_rows_replaces_only_their_slices(
    room: str, lying: Any, honest: dict[str, bytes], tmp_path: Path
) -> None:
    prepared = lying(Lie(room, about="amber birch cedar", audited="audit me amber"))
    # The audited row is not lied about, so the lie goes unseen: that is what the audit's chance is.
    assert published(tmp_path / "cache") != honest
    prepared = lying(
        Lie(room, about="amber birch cedar", audited="amber birch"), force_recache=True
    )
    assert published(tmp_path / "cache") == honest, "a store of wrong slices is replaced, too"
    proof = prepared.store.proof
    assert proof["audit_mismatches"][KIND[room]] > 0
    assert 0 < proof["slices_replaced"] < proof["slices"]
    prepared.store.verify()


@pytest.mark.parametrize("room", ROOMS)
def test_slice_made_anew_with_the_same_bytes_is_left_alone(
    room: str, lying: Any, honest: dict[str, bytes], tmp_path: Path
) -> None:
    prepared = lying(Lie(room, about="audit me"))
    proof = prepared.store.proof
    assert published(tmp_path / "cache") == honest
    assert (proof["slices_redone"], proof["slices_replaced"]) == (proof["slices"] - 1, 0)
    assert not (tmp_path / "cache" / "quarantine").exists()


@pytest.mark.parametrize("room", ["encode", pytest.param("render", marks=pytest.mark.soak)])
def test_slice_of_a_worker_that_died_before_its_report_is_suspected(
    room: str, lying: Any, honest: dict[str, bytes], tmp_path: Path
) -> None:
    lying(Lie(room, dies=str(tmp_path / "died")), **LOCAL)
    assert (tmp_path / "died").exists()
    assert published(tmp_path / "cache") == honest


def test_parts_undo_their_own_slices(
    source: Path, lying: Any, honest: dict[str, bytes], tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setenv(VARIABLE, Lie("encode", audited="amber", after=2).to_environment())
    monkeypatch.setattr(builder, "BUILD", ENTRY)
    given = {"cache_dir": tmp_path / "cache", **FAST}
    outcomes = [run_part(source, str(TOKENIZER), part=f"{n}/3", **given) for n in (1, 2, 3)]
    assert [outcome.account.slices_redone for outcome in outcomes] == [2, 2, 2]
    assert published(tmp_path / "cache") == honest


def test_run_after_a_lie_that_was_undone_is_a_hit_that_still_tells(lying: Any) -> None:
    told = lying(Lie("encode")).store.proof["notices"]
    found = lying(Lie("encode"))
    assert found.hit
    assert list(found.remarks())[: len(told)] == told


def test_command_tells_on_stderr_and_keeps_its_json(source: Path, tmp_path: Path) -> None:
    program = (
        "import sys; from tokenmill.build import builder; from tokenmill.cli import main; "
        f"builder.BUILD = {ENTRY!r}; raise SystemExit(main())"
    )
    given = ["--tokenizer", str(TOKENIZER), "--tokenizer-backend", "file", "--num-workers", "2"]
    cache = ["--cache-dir", str(tmp_path / "cache"), "--json"]
    done = subprocess.run(
        [sys.executable, "-c", program, "prepare", str(source), *given, *cache],
        capture_output=True,
        text=True,
        check=True,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(str, (ROOT / "src", ROOT))),
            VARIABLE: Lie("render", audited="7").to_environment(),
        },
    )
    document = json.loads(done.stdout)
    assert isinstance(document["audited_rows"], int)
    assert document["audit_mismatches"] > 0
    assert done.stderr.count("the fast renderer (traced) differed from the reference in") == 1
    store = Store(Path(document["path"]))
    assert store.proof["notices"][0] in done.stderr
