"""Identity: changes that must change the key, changes that must not, and cached facts."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.programs import python
from tests.tokenizers.families import family_json, write_directory
from tokenmill.tokenizers import cache
from tokenmill.tokenizers.cache import recall
from tokenmill.tokenizers.loading import identify, load

PreTrainedTokenizerFast = pytest.importorskip("transformers").PreTrainedTokenizerFast

CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "eos_token": "<|im_end|>",
    "bos_token": "<s>",
    "mask_token": "<pad>",
    "chat_template": "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}",
}
Document = dict[str, Any]


def key_of(path: Path, document: Document, config: Document, indent: int | None = None) -> str:
    write_directory(path, config)
    (path / "tokenizer.json").write_text(json.dumps(document, indent=indent))
    return load(path, backend="file").key


def _swap(entries: Any, one: Any, other: Any) -> None:
    entries[one], entries[other] = entries[other], entries[one]


CHANGES: dict[str, Callable[[Document, Document], Any]] = {
    "merges": lambda document, _: _swap(document["model"]["merges"], -1, -2),
    "added token": lambda document, _: document["added_tokens"].append(
        {**document["added_tokens"][-1], "id": 600, "content": "<new>"}
    ),
    "flag": lambda document, _: document["added_tokens"][0].update(lstrip=True),
    "normalizer": lambda document, _: document.update(normalizer=None),
    "pre-tokenizer": lambda document, _: document["pre_tokenizer"].update(add_prefix_space=True),
    "ids": lambda document, _: _swap(
        (vocab := document["model"]["vocab"]), *sorted(vocab, key=vocab.get)[-2:]
    ),
    "template": lambda _, config: config.update(chat_template=config["chat_template"] + " "),
    "end": lambda _, config: config.update(eos_token="</s>"),
    "token of the template": lambda _, config: config.update(
        chat_template=config["chat_template"] + "{{ mask_token }}"
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_key_changes_with_everything_that_can_change_the_output(
    change: str, tmp_path: Path
) -> None:
    document, config = json.loads(family_json("byte_level")), dict(CONFIG)
    before = key_of(tmp_path / "a", document, config)
    CHANGES[change](document, config)
    assert key_of(tmp_path / "b", document, config) != before


def test_key_does_not_depend_on_path_or_form_of_the_file(tmp_path: Path) -> None:
    document = json.loads(family_json("byte_level"))
    key = key_of(tmp_path / "a", document, CONFIG)
    assert key_of(tmp_path / "renamed", document, CONFIG, indent=2) == key
    old = json.loads(family_json("byte_level"))
    merges = old["model"]["merges"]  # old versions of tokenizers write one text per merge
    old["model"]["merges"] = [m if isinstance(m, str) else " ".join(m) for m in merges]
    old["model"] = {name: value for name, value in old["model"].items() if value is not None}
    old["truncation"] = {"max_length": 4, "stride": 0, "strategy": "LongestFirst",
                         "direction": "Right"}  # fmt: skip
    old["padding"] = {"strategy": "BatchLongest", "direction": "Right", "pad_id": 0,
                      "pad_type_id": 0, "pad_token": "<pad>"}  # fmt: skip
    old["post_processor"] = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True}
    assert key_of(tmp_path / "old", dict(reversed(old.items())), CONFIG) == key
    assert key_of(tmp_path / "unmentioned", document, {**CONFIG, "mask_token": "<x>"}) == key


def test_key_of_an_object_stays_after_use_with_truncation_and_padding(tmp_path: Path) -> None:
    path = write_directory(tmp_path / "a", CONFIG)
    fast = PreTrainedTokenizerFast.from_pretrained(path, pad_token="<pad>")
    before = load(fast)
    key, ids = before.key, before.reference.encode("Hello world", add_special_tokens=False).ids
    fast(["Hello world", "x"], truncation=True, max_length=2, padding="max_length")
    assert json.loads(fast.backend_tokenizer.to_str())["truncation"] is not None
    after = load(fast)
    assert after.key == key
    assert after.reference.encode("Hello world", add_special_tokens=False).ids == ids


def test_key_of_a_real_tokenizer_equals_that_of_its_object(shared: Path) -> None:
    import tokenizers

    for name in ("t5-small", "bert-base-uncased", "chatglm3"):
        path = shared / "tokenizers" / name / "tokenizer.json"
        tokenizer = load(path)
        other = load(tokenizers.Tokenizer.from_file(str(path)), chat_template=tokenizer.template)
        other.special_tokens = tokenizer.special_tokens
        assert other.key == tokenizer.key, name


def test_read_only_cache_costs_only_time(directory: Path, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("a file where the cache should be")
    tokenizer = identify(directory, cache_dir=blocked)
    assert tokenizer.key == load(directory, backend="file").key
    cache.share_table(tokenizer, blocked)
    assert tokenizer.table.pieces([0]) == [b"<s>"]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return write_directory(tmp_path / "model", CONFIG)


RECALL = """
import sys, json
from tokenmill.tokenizers.cache import recall
card = recall(sys.argv[1], cache_dir=sys.argv[2])
heavy = [m for m in ("tokenizers", "transformers", "fastokens", "torch", "pyarrow", "numpy")
         if m in sys.modules]
print(json.dumps([card and card.as_dict(), heavy]))
"""


def test_recall_returns_the_same_fingerprint_and_loads_no_engine(
    directory: Path, own_cache: Path
) -> None:
    assert recall(directory, cache_dir=own_cache) is None
    card = identify(directory, cache_dir=own_cache).card
    recalled, heavy = json.loads(python(RECALL, directory, own_cache).stdout)
    assert recalled == json.loads(json.dumps(card.as_dict()))
    assert heavy == []
    assert card == identify(directory, cache_dir=own_cache).card
    assert (card.eos_token_id, card.bos_token_id, card.pad_token_id) == (3, 0, None)


def test_facts_are_valid_for_every_template(
    directory: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = identify(directory, cache_dir=own_cache)
    copy = own_cache / "tokenizers" / first.key
    assert {path.name for path in copy.iterdir()} == set(first.files())

    def forbidden(*arguments: Any, **more: Any) -> Any:
        raise AssertionError("compared again")

    monkeypatch.setattr("tokenmill.tokenizers.loading.load_auto", forbidden)
    for template in ("x{{ mask_token }}", "y"):
        tokenizer = identify(directory, cache_dir=own_cache, chat_template=template)
        card = recall(directory, cache_dir=own_cache, chat_template=template)
        direct = load(directory, backend="file", chat_template=template).card
        assert card == tokenizer.card == replace(direct, notes=card.notes)
        assert (own_cache / "tokenizers" / tokenizer.key).is_dir()
    assert identify(directory, cache_dir=own_cache).card == first.card


def test_facts_of_changed_files_arguments_or_versions_are_not_used(
    directory: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    identify(directory, cache_dir=own_cache)
    assert recall(directory, cache_dir=own_cache) is not None
    assert recall(directory, cache_dir=own_cache, backend="file") is None
    assert recall(directory, cache_dir=own_cache, trust_remote_code=True) is None
    with monkeypatch.context() as patch:
        patch.setattr(cache, "installed_version", lambda package: "99")
        assert recall(directory, cache_dir=own_cache) is None
    (directory / "chat_template.jinja").write_text("other")
    assert recall(directory, cache_dir=own_cache) is None
    card = identify(directory, cache_dir=own_cache).card
    assert card.template == "other"


def test_template_file_counts_by_content(directory: Path, own_cache: Path, tmp_path: Path) -> None:
    template = tmp_path / "t.jinja"
    template.write_text("one")
    one = identify(directory, cache_dir=own_cache, chat_template=template).card
    template.write_text("two")
    two = identify(directory, cache_dir=own_cache, chat_template=template).card
    assert (one.template, two.template) == ("one", "two")
    assert one.key != two.key
