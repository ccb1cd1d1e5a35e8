"""Any argument gives a result, or an error that names the argument or shows its value."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import io
import random
import re
import warnings
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import tokenmill as tm
from tests.build.making import INLINE, TOKENIZER, conversations, prepare, write_rows
from tests.conftest import EXAMPLES_SHARE
from tokenmill.errors import UsageError

SAMPLE = 4  # values of each parameter in `make test`; `make soak` tries all

VALUES: list[Callable[[], Any]] = [
    lambda value=value: value  # type: ignore[misc]
    for value in (
        None, True, 5, -1, 0, 2.5, float("nan"), float("inf"), 10**400, 2**70, "x", "", "a\0b",
        "\ud800", "\udcff", "a" * 5000, b"x", b"\xff", [], ["x"], [5], [None], [[1]], ["\ud800"],
        [b"x"], {}, {"a": 1}, {1: 2}, {"a": None}, (1, 2), {1}, object(), 1j, range(3),
        np.array([1.5]), np.array(["a"]), np.float64(2), np.int64(3), Path("/nope"), Path("a\0b"),
        Path("a" * 5000), lambda *_, **__: 1, slice(0, 2),
    )
]  # fmt: skip
VALUES += [lambda: iter([1]), lambda: (text for text in ("x",))]

PLAIN = re.compile(
    r"has no attribute|object is not|unhashable|unsupported operand|not supported between|codec"
    r"|embedded null|expected str, bytes or|string pattern|not subscriptable|must be (str|real)"
    r"|__\w+__|File name too long|takes \d|indices must be|too large to convert|NoneType"
)
"""Messages of Python itself, which do not name the argument."""


class World(NamedTuple):
    directory: Path
    rows: str
    prompts: str
    rollouts: str
    store: tm.Store
    view: tm.View
    groups: tm.Store
    loader: tm.Loader
    dataset: tm.PromptDataset
    bridge: tm.Bridge
    lazy: Any


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    root = tmp_path_factory.mktemp("arguments")
    rows = str(write_rows(root / "rows.jsonl", conversations(6)))
    chats = [{"prompt": row["messages"][:1]} for row in conversations(6)]
    prompts = str(write_rows(root / "prompts.jsonl", chats))
    rollout = {"token_ids": [5, 6, 7], "loss_mask": [0, 1, 1], "reward": 1.0, "group": "g"}
    rollouts = str(write_rows(root / "rollouts.jsonl", [rollout]))
    pair = {"prompt": "a", "chosen": "b", "rejected": "c"}
    pairs = str(write_rows(root / "pairs.jsonl", [pair]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("TOKENMILL_CACHE_DIR", str(root / "cache"))
        (root / "here").mkdir()
        patch.chdir(root / "here")
        with contextlib.suppress(ImportError):
            import huggingface_hub.constants

            patch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
        store = prepare([rows], keep_columns=["id"])
        store.attach("reward", np.ones(len(store)), producer="p")
        dataset = tm.PromptDataset(
            prompts, str(TOKENIZER), prompt_key="prompt", num_workers=0,
            tokenizer_backend="file", apply_chat_template=True,
        )  # fmt: skip
        yield World(
            root, rows, prompts, rollouts, store, store.shuffle(1), prepare([pairs]),
            tm.Loader(store, 2), dataset, tm.Bridge(str(TOKENIZER), tokenizer_backend="file"),
            tm.prepare([rows], lazy=True, cache_dir=root / "lazy", **QUICK),
        )  # fmt: skip


Call = Callable[[World], tuple[Callable[..., Any], dict[str, Any]]]
QUICK: dict[str, Any] = {"tokenizer": str(TOKENIZER), **INLINE}
MESSAGES = [{"role": "user", "content": "Hi"}]


def _adapter(name: str, *needed: str) -> Any:
    for library in needed:
        pytest.importorskip(library)
    return importlib.import_module(f"tokenmill.integrations.{name}")


def _renderer(world: World) -> Any:
    return _adapter("renderers", "renderers").TemplateRenderer(world.bridge.tokenizer)


def _collated(**given: Any) -> Any:
    data = _adapter("torch", "torch").Dataset(**given)
    return data.collate([data[0], data[1]])


CALLS: dict[str, Call] = {
    "prepare": lambda w: (tm.prepare, {"sources": [w.rows], **QUICK}),
    "Recipe": lambda w: (tm.Recipe, {"sources": [w.rows]}),
    "open_store": lambda w: (tm.open_store, {"path_or_url": w.store.path}),
    "open_rows": lambda w: (tm.open_rows, {"source": w.rows}),
    "concat": lambda w: (tm.concat, {}),
    "mix": lambda w: (tm.mix, {"sources": {"a": w.store}}),
    "Mixture": lambda w: (
        tm.Mixture, {"sources": {"a": w.store}, "weights": None, "by": "rows", "exhausted": "stop"}
    ),
    "Loader": lambda w: (
        lambda **given: next(iter(tm.Loader(**given))), {"data": w.store}
    ),
    "Loader of groups": lambda w: (
        lambda **given: next(iter(tm.Loader(**given))), {"data": w.groups, "batch_size": 1}
    ),
    "Pack": lambda w: (tm.Pack, {"length": 64}),
    "MicroBatches": lambda w: (tm.MicroBatches, {"max_tokens": 512}),
    "Align": lambda w: (tm.Align, {}),
    "PromptDataset": lambda w: (
        tm.PromptDataset,
        {"path": w.prompts, "prompt_key": "prompt", "num_workers": 0, "apply_chat_template": True,
         **{name: QUICK[name] for name in ("tokenizer", "tokenizer_backend")}},
    ),
    "Bridge": lambda w: (tm.Bridge, {"tokenizer": str(TOKENIZER), "tokenizer_backend": "file"}),
    "check_rollouts": lambda w: (tm.check_rollouts, {"sources": w.rollouts, **QUICK}),
    "from_rollouts": lambda w: (tm.from_rollouts, {"sources": w.rollouts, **QUICK}),
    "lint": lambda w: (tm.lint, {"sources": w.rows, **QUICK}),
    "export": lambda w: (
        tm.export, {"data": w.store, "format": "jsonl", "out": w.directory / "out.jsonl"}
    ),
    "push": lambda w: (tm.push, {"store": w.store, "target": w.directory / "pushed"}),
    "pull": lambda w: (tm.pull, {"source": w.store.path}),
    "to_hf": lambda w: (tm.to_hf, {"data": w.store}),
    "Store.filter": lambda w: (w.store.filter, {"where": "length > 1"}),
    "Store.filter by function": lambda w: (
        w.store.filter, {"where": lambda *lengths: lengths[0] > 0, "columns": ["length"]}
    ),
    "Store.split": lambda w: (w.store.split, {"shares": {"a": 1.0}}),
    "Store.select": lambda w: (w.store.select, {}),
    "Store.shuffle": lambda w: (w.store.shuffle, {}),
    "Store.map": lambda w: (w.store.map, {}),
    "Store.batch": lambda w: (w.store.batch, {}),
    "Store.sidecar": lambda w: (w.store.sidecar, {"name": "reward"}),
    "Store.attach": lambda w: (
        w.groups.attach, {"name": "other", "values": np.ones(2), "producer": "p"}
    ),
    "Store.attach_writer": lambda w: (w.groups.attach_writer, {"name": "again", "producer": "p"}),
    "SidecarWriter.write": lambda w: (
        w.groups.attach_writer("third", producer="p").write, {"rows": [0], "values": [1.0]}
    ),
    "SidecarWriter.share": lambda w: (
        w.groups.attach_writer("third", producer="p").share, {"rank": 0, "world_size": 1}
    ),
    "Store.torch": lambda w: (w.store.torch, {}),
    "Store[]": lambda w: (w.store.__getitem__, {}),
    "Store.image": lambda w: (w.store.image, {}),
    "View.filter": lambda w: (w.view.filter, {"where": "length > 1"}),
    "View.split": lambda w: (w.view.split, {"shares": {"a": 1.0}}),
    "View.select": lambda w: (w.view.select, {}),
    "View.batch": lambda w: (w.view.batch, {}),
    "View.sidecar": lambda w: (w.view.sidecar, {"name": "reward"}),
    "View[]": lambda w: (w.view.__getitem__, {}),
    "groups[]": lambda w: (w.groups.groups.__getitem__, {}),
    "Loader.repeat": lambda w: (w.loader.repeat, {}),
    "Loader.set_epoch": lambda w: (w.loader.set_epoch, {}),
    "Loader.load_state_dict": lambda w: (w.loader.load_state_dict, {}),
    "Loader state": lambda w: (
        lambda **given: w.loader.load_state_dict(given), w.loader.state_dict()
    ),
    "PromptDataset[]": lambda w: (w.dataset.__getitem__, {}),
    "PromptDataset.batch": lambda w: (w.dataset.batch, {}),
    "PromptDataset.shuffle": lambda w: (w.dataset.shuffle, {}),
    "PromptDataset.seek": lambda w: (w.dataset.seek, {"epoch": 0, "position": 0}),
    "PromptDataset.take": lambda w: (w.dataset.take, {}),
    "PromptDataset.load_state_dict": lambda w: (w.dataset.load_state_dict, {}),
    "PromptDataset state": lambda w: (
        lambda **given: w.dataset.load_state_dict(given), w.dataset.state_dict()
    ),
    "Bridge.prompt": lambda w: (w.bridge.prompt, {"messages": MESSAGES}),
    "Bridge.extend": lambda w: (
        w.bridge.extend,
        {"ids": [*w.bridge.prompt(MESSAGES), 5], "messages": MESSAGES, "sampled": None},
    ),
    "Bridge.rewrite": lambda w: (w.bridge.rewrite, {"messages": MESSAGES}),
    "Bridge.is_append_only": lambda w: (w.bridge.is_append_only, {"messages": MESSAGES}),
    "Bridge.remember": lambda w: (
        w.bridge.remember, {"ids": w.bridge.prompt(MESSAGES), "messages": MESSAGES}
    ),
    "Bridge.messages": lambda w: (w.bridge.messages, {"ids": w.bridge.prompt(MESSAGES)}),
    "prepare(lazy=True)": lambda w: (
        tm.prepare, {"sources": [w.rows], "lazy": True, "cache_dir": w.directory / "lazy", **QUICK}
    ),
    "lazy[]": lambda w: (w.lazy.__getitem__, {}),
    "lazy.batch": lambda w: (w.lazy.batch, {}),
    "lazy.select": lambda w: (w.lazy.select, {}),
    "lazy.shuffle": lambda w: (w.lazy.shuffle, {}),
    "lazy.map": lambda w: (w.lazy.map, {}),
    "lazy.filter": lambda w: (w.lazy.filter, {"where": "extra.a == 1"}),
    "Loader of lazy rows": lambda w: (
        lambda **given: next(tm.Loader(**given).repeat()), {"data": w.lazy, "batch_size": 2}
    ),
    "concat of lazy rows": lambda w: (lambda data: tm.concat([w.lazy, data]), {}),
    "by_source[]": lambda w: (w.store.by_source().__getitem__, {}),
    "by_source.batch": lambda w: (w.store.by_source().batch, {}),
    "Row.image": lambda w: (w.store[0].image, {}),
    "View.shuffle": lambda w: (w.view.shuffle, {}),
    "View.map": lambda w: (w.view.map, {}),
    "groups.select": lambda w: (w.groups.groups.select, {}),
    "Sidecar[]": lambda w: (w.store.sidecar("reward").__getitem__, {}),
    "Sidecar.batch": lambda w: (w.store.sidecar("reward").batch, {}),
    "View.sidecar[]": lambda w: (w.view.sidecar("reward").__getitem__, {}),
    "View.sidecar.batch": lambda w: (w.view.sidecar("reward").batch, {}),
    "Rows[]": lambda w: (tm.open_rows(w.rows).__getitem__, {}),
    "Rows.raw": lambda w: (tm.open_rows(w.rows).raw, {}),
    "Rows.origin": lambda w: (tm.open_rows(w.rows).origin, {"index": 0}),
    "Rows.batch": lambda w: (tm.open_rows(w.rows).batch, {}),
    "hf.for_trl": lambda w: (_adapter("hf", "datasets", "trl").for_trl, {"data": w.store}),
    "hf.for_grpo": lambda w: (_adapter("hf", "datasets", "trl").for_grpo, {"prompts": w.dataset}),
    "torch.Dataset": lambda w: (_collated, {"data": w.store, "padding_side": "right"}),
    "torch.Dataset[]": lambda w: (_adapter("torch", "torch").Dataset(w.lazy).__getitem__, {}),
    "grain.DataSource": lambda w: (_adapter("grain").DataSource, {"data": w.store}),
    "grain.DataSource[]": lambda w: (_adapter("grain").DataSource(w.store).__getitem__, {}),
    "grain.DataSource of lazy rows": lambda w: (
        _adapter("grain").DataSource(w.lazy)._getitems, {}
    ),
    "megatron.PackedSamples": lambda w: (
        lambda **given: _adapter("megatron").PackedSamples(**given)[0],
        {"view": w.view, "pack": tm.Pack(128), "count": 2, "seed": 1, "order": "feistel",
         "context_parallel": 1},
    ),
    "TemplateRenderer.render": lambda w: (_renderer(w).render, {"messages": MESSAGES}),
    "TemplateRenderer.parse_response": lambda w: (_renderer(w).parse_response, {"token_ids": [5]}),
    "TemplateRenderer.bridge_to_next_turn": lambda w: (
        _renderer(w).bridge_to_next_turn,
        {"previous_prompt_ids": w.bridge.prompt(MESSAGES), "previous_completion_ids": [6],
         "new_messages": MESSAGES},
    ),
}  # fmt: skip
POSITIVE = [value for value in VALUES if isinstance(value(), int | np.integer) and value() > 0]


def test_every_public_function_is_tried() -> None:
    """A function or class that takes arguments of the caller has an entry in `CALLS`."""
    returned = {"Store", "View", "Row", "Origin", "Media", "Prompt", "Sidecar"}
    assert set(tm.__all__) - returned - {"TokenmillError", "errors"} <= set(CALLS)


def _parameters(function: Callable[..., Any], base: dict[str, Any]) -> list[str]:
    named = inspect.signature(function).parameters.values()
    names = [one.name for one in named if one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL)]
    of_loader = "data" in base and "padding_side" not in base
    return names or list(inspect.signature(tm.Loader).parameters if of_loader else base)


def _values(parameter: str) -> list[Callable[[], Any]]:
    values = VALUES
    if parameter in ("num_workers", "count"):  # starts no processes, and comes to an end
        values = [value for value in VALUES if value not in POSITIVE]
    return values if EXAMPLES_SHARE == 1 else random.sample(values, SAMPLE)


ALIASES = {
    "kind": "not the state", "parts": "concat", "where": "filter", "epochs": "exists",
    "media": "image", "tools": "failed", "data": "splits", "messages": "conversation",
    "sampled": "role", "context_parallel": "pad_multiple", "embed_media": "contains store",
}  # fmt: skip


def _is_clear(error: Exception, parameter: str, value: Any) -> bool:
    """Whether the message has the argument's name, its value, or a member of its value."""
    text = str(error)
    if not isinstance(error, tm.TokenmillError) and PLAIN.search(text):
        return False
    members = list(value) if isinstance(value, Collection) else []
    members += list(value.values()) if isinstance(value, dict) else []
    shown = [form(one)[:12].strip("'") for one in (value, *members) for form in (str, repr)]
    words = [parameter, parameter.split("_")[-1].rstrip("s"), type(value).__name__]
    words.append(ALIASES.get(parameter, ""))
    is_spent = isinstance(value, Iterator) or not shown[0]
    return is_spent or any(word and word in text for word in (*words, *shown))


def _outcome(function: Callable[..., Any], given: dict[str, Any], parameter: str) -> str:
    """Return what is wrong with the outcome of a call; empty if nothing is."""
    value = given[parameter]
    kinds = inspect.signature(function).parameters.values()
    first = [given.pop(one.name) for one in kinds if one.kind is one.POSITIONAL_ONLY]
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            function(*first, **given)
    except (tm.TokenmillError, TypeError, ValueError) as error:
        if not _is_clear(error, parameter, value):
            return f"unclear {type(error).__name__}: {error}"
    except IndexError as error:
        if "out of range" not in str(error):
            return f"unclear IndexError: {error}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.hypothesis
@pytest.mark.parametrize("name", CALLS)
def test_any_argument_gives_a_result_or_a_clear_error(world: World, name: str) -> None:
    if name == "Store.torch":
        pytest.importorskip("torch")
    function, base = CALLS[name](world)
    wrong = []
    for parameter in _parameters(function, base):
        for value in _values(parameter):
            given = {**base, parameter: value()}
            if found := _outcome(function, given, parameter):
                wrong.append(f"{parameter}={value()!r:.60}: {found:.300}")
    assert not wrong, "\n" + "\n".join(wrong)


def test_row_that_is_missing_fails_a_batch_from_an_iterator(world: World) -> None:
    rows = tm.open_rows(world.rows)
    assert rows.batch(iter([5, 0])) == [rows[5], rows[0]]  # type: ignore[arg-type]
    for wrong in (99, "0"):
        with pytest.raises((IndexError, TypeError), match=repr(wrong)):
            rows.batch(iter([wrong, 0]))  # type: ignore[arg-type]


def test_ids_that_are_no_integers_are_not_rounded(world: World) -> None:
    ids = np.array(world.bridge.prompt(MESSAGES))
    for wrong in (ids + 0.5, ids.astype(np.float32), ids[None]):
        with pytest.raises(UsageError, match="ids must be a list of integers"):
            world.bridge.messages(wrong)
