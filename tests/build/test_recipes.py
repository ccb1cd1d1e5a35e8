"""Recipes as objects and as files: the same names, the same store."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import yaml

import tokenmill as tm
from tests.build.making import INLINE, TOKENIZER, conversations, prepare, write_rows
from tests.core.test_options import EVERYTHING
from tokenmill._core.options import declared
from tokenmill.build import run as running
from tokenmill.build.calls import resolve_call
from tokenmill.build.recipe import RunOptions

EVERY_NAME: dict[str, Any] = {
    **EVERYTHING,
    "columns": {"messages": "messages", "system": None},
    "keep_columns": ["id"],
    "tokenizer_backend": "file",
    "trust_remote_code": False,
    "max_rejected": "5%",
    "num_workers": 0,
    "force_recache": False,
    "disable_cache": False,
    "reference": True,
    "media_urls": True,
    "as_chat": True,
    "name": "mine",
}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_rows(tmp_path / "data" / "chat.jsonl", conversations(6))


def write_recipe(path: Path, **members: Any) -> Path:
    path.write_text(yaml.safe_dump(members))
    return path


def test_recipe_object_and_arguments_make_one_store(source: Path) -> None:
    recipe = tm.Recipe(source, tokenizer=str(TOKENIZER), tokenizer_backend="file", turn_end="turn")
    by_recipe = tm.prepare(recipe, executor="inline", progress=False)
    assert by_recipe.key == prepare(source, turn_end="turn").key
    overridden = tm.prepare(recipe, max_length=400, executor="inline", progress=False)
    assert overridden.manifest["document"]["recipe"]["max_length"] == 400
    assert overridden.manifest["document"]["recipe"]["turn_end"] == "turn"


def test_recipe_file_takes_every_name_and_paths_relative_to_itself(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = tmp_path / "own.jinja"
    template.write_text((TOKENIZER / "chat_template.jinja").read_text())
    named = {*declared(tm.Recipe), *declared(RunOptions)}
    apart = "sources tokenizer chat_template cache_dir executor processor media_root"
    apart += " encoder encoder_kwargs"  # test_encoders.py
    assert named == {*EVERY_NAME, *apart.split()}, "a name without a test"
    (tmp_path / "tok").symlink_to(TOKENIZER)
    (tmp_path / "cache").mkdir()
    path = write_recipe(
        tmp_path / "recipe.yaml",
        sources=["data/*.jsonl"],
        tokenizer="tok",
        chat_template="own.jinja",
        cache_dir="cache",
        executor="inline",
        media_root="data",
        **EVERY_NAME,
    )
    monkeypatch.chdir("/")
    recipe, options = resolve_call(str(path), None, {})
    assert options.media_root == str(tmp_path / "data")
    beside = write_recipe(tmp_path / "other.yaml", sources=["data/*.jsonl"], processor="tok")
    assert resolve_call(str(beside), None, {})[0].processor == str(tmp_path / "tok")
    for name, value in EVERY_NAME.items():
        holder = recipe if hasattr(recipe, name) else options
        wanted = {"keep_columns": ("id",), "max_rejected": 0.05}.get(name, value)
        assert getattr(holder, name) == wanted, name
    store = tm.prepare(str(path))
    assert len(store) == 6
    assert store.path.is_relative_to(tmp_path / "cache")
    assert store[0].extra == {"id": 0}


@pytest.mark.parametrize("name", EVERY_NAME)
def test_argument_that_is_given_overrides_the_recipe_even_with_the_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    run = mock.Mock()
    monkeypatch.setattr(running, "run", run)

    def asked(*arguments: Any, **given: Any) -> Any:
        tm.prepare(*arguments, **given)
        return getattr(run.call_args.args[name in declared(RunOptions)], name)

    option = {**declared(tm.Recipe), **declared(RunOptions)}[name]
    other = EVERY_NAME[name] if EVERY_NAME[name] != option.default else not option.default
    path = write_recipe(tmp_path / "recipe.yaml", sources="a", tokenizer="t", **{name: other})
    default = asked("a", "t")
    of_recipe = asked(str(path))
    assert of_recipe != default
    assert asked(str(path), **{name: option.default}) == default
    if name in declared(tm.Recipe):
        recipe = tm.Recipe("a", "t", **{name: other})
        assert asked(recipe) == of_recipe
        assert asked(recipe, **{name: option.default}) == default


def test_unquoted_date_in_yaml_is_a_date(source: Path, tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(f"sources: {source}\ntokenizer: {TOKENIZER}\ndate: 2026-11-15\n")
    recipe, _ = resolve_call(str(path), None, {})
    assert recipe.date == "2026-11-15"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("sources: x\ntokeniser: y\n", r"tokeniser \(did you mean tokenizer\?\)"),
        ("- a\n- b\n", "mapping"),
        ("a: [", "YAML"),
        ("", "mapping"),
        ("1: 2\n", "mapping"),
        ("sources: x\n", "tokenizer is missing"),
        ("tokenizer: x\n", "no sources"),
        ("sources: x\ntokenizer: y\nmax_length: -3\n", "max_length"),
        ("sources: 3\ntokenizer: y\n", "sources"),
        ("sources: x\ntokenizer: y\nexecutor: slurm\n", "executor"),
        ("sources: x\ntokenizer: y\nexecutor: 3\n", "executor"),
        ("sources: x\ntokenizer: y\nmax_rejected: 200%\n", "max_rejected"),
        ("sources: x\ntokenizer: y\ntemplate_kwargs: 7\n", "chat_template_kwargs"),
    ],
)
def test_recipe_file_that_is_wrong_is_refused(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "recipe.yml"
    path.write_text(text)
    with pytest.raises(tm.errors.UsageError, match=said):
        tm.prepare(str(path))


def test_missing_recipe_file_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="does not exist"):
        tm.prepare(str(tmp_path / "none.yaml"))
    with pytest.raises(tm.errors.UsageError, match="no sources"):
        tm.Recipe((), tokenizer="t")
    assert tm.Recipe("a", tokenizer="t") == tm.Recipe(("a",), tokenizer="t")


@pytest.mark.parametrize("kind", ["tokenizers", "transformers"])
def test_tokenizer_object_makes_the_rows_of_its_files(source: Path, kind: str) -> None:
    wanted = prepare(source)
    library: Any = pytest.importorskip(kind)
    if kind == "tokenizers":
        given = library.Tokenizer.from_file(str(TOKENIZER / "tokenizer.json"))
        more = INLINE | {"chat_template": str(TOKENIZER / "chat_template.jinja")}
    else:
        given = library.AutoTokenizer.from_pretrained(str(TOKENIZER))
        more = INLINE | {"tokenizer_backend": "auto"}
    store = tm.prepare(str(source), given, **more)
    for ours, theirs in zip(store, wanted, strict=True):
        assert ours.input_ids.tolist() == theirs.input_ids.tolist()
        assert ours.loss_mask.tolist() == theirs.loss_mask.tolist()
    assert tm.prepare(str(source), given, **more).key == store.key
