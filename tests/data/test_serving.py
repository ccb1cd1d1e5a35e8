"""Orders, the cursor, pickles, and that nothing is read before it is requested."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.making import PROMPTS, TOKENIZER, open_prompts, write_rows
from tests.programs import python
from tokenmill import PromptDataset
from tokenmill.data.order import FeistelOrder, unroll
from tokenmill.errors import StateError, UsageError
from tokenmill.integrations.miles import MilesOrder


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("serving-cache")


def fresh(cache: Path, **arguments: Any) -> PromptDataset:
    limit = 36 if arguments.get("apply_chat_template") else 25  # leaves some out
    return open_prompts(PROMPTS, cache_dir=cache, max_length=limit, **arguments)


def rows_of(prompts: Any) -> list[int]:
    return [prompt.row for prompt in prompts]


def test_shuffled_order_is_the_documented_function_of_seed_and_epoch(cache: Path) -> None:
    prompts = fresh(cache, seed=7)
    file_order = rows_of(prompts)
    assert file_order == sorted(file_order)  # before the first shuffle
    assert 0 < len(prompts) < prompts.source_rows
    order = FeistelOrder(len(prompts), 7)
    seen = set()
    for epoch in (0, 1, 5):
        prompts.shuffle(epoch)
        wanted = [file_order[n] for n in order.indices(epoch, np.arange(len(prompts)))]
        assert rows_of(prompts) == wanted
        assert [prompts[n].row for n in range(-3, 3)] == wanted[-3:] + wanted[:3]
        assert rows_of(prompts[2:9]) == wanted[2:9]
        assert prompts.lengths.tolist() == [prompt.length for prompt in prompts]
        seen.add(tuple(wanted))
    assert len(seen) == 3
    assert tuple(rows_of(prompts.samples)) in seen


@pytest.mark.parametrize("index", [1.9, "3", None, [0], b"1", np.float64(1), np.array([1])])
def test_index_that_is_no_integer_is_a_type_error(cache: Path, index: Any) -> None:
    prompts = fresh(cache)
    with pytest.raises(TypeError, match="the number of a prompt must be an integer"):
        prompts[index]
    assert prompts[np.int64(1)].row == prompts[1].row
    with pytest.raises(IndexError, match="prompt 1180591620717411303424 is out of range"):
        prompts[2**70]


def stream(prompts: PromptDataset, counts: list[int]) -> list[int]:
    return [row for count in counts for row in rows_of(prompts.take(count))]


@given(
    counts=st.lists(st.integers(0, 90), max_size=6),
    cut=st.integers(0, 6),
    order=st.sampled_from([FeistelOrder, MilesOrder, None]),
)
@settings(max_examples=25)
def test_resume_at_any_step_equals_an_uninterrupted_stream(
    cache: Path, counts: list[int], cut: int, order: Any
) -> None:
    def start() -> PromptDataset:
        prompts = fresh(cache, order=order or FeistelOrder)
        if order is not None:
            prompts.shuffle(0)
        return prompts

    whole = start()
    uninterrupted = stream(whole, counts)
    first = start()
    head = stream(first, counts[:cut])
    state = json.loads(json.dumps(first.state_dict()))
    second = fresh(cache, order=order or FeistelOrder)
    for _ in range(2):
        second.load_state_dict(state)
    assert head + stream(second, counts[cut:]) == uninterrupted
    assert second.state_dict() == whole.state_dict()
    size = len(whole)
    model = order(size, 42) if order else None
    file_order = rows_of(fresh(cache))
    numbers = np.arange(len(uninterrupted)) % size
    if model is not None:
        numbers = unroll(model, np.arange(len(uninterrupted)))
    assert uninterrupted == [file_order[number] for number in numbers]
    assert len(json.dumps(state)) < 1024


def test_state_of_another_stream_is_refused_by_name(cache: Path) -> None:
    prompts = fresh(cache)
    prompts.take(3)
    state = prompts.state_dict()
    others = {
        "seed": fresh(cache, seed=1),
        "order": fresh(cache, order=MilesOrder),
        "max_length": open_prompts(PROMPTS, cache_dir=cache, max_length=24),
        "index": open_prompts(f"{PROMPTS}@[1:]", cache_dir=cache, max_length=25),
    }
    for name, other in others.items():
        with pytest.raises(StateError, match=name):
            other.load_state_dict(state)
    wrong: list[Any] = [None, 3, "state", [1], [("kind", 1)], {},
             {**state, "version": 0}, {**state, "order_version": 99},
             {**state, "epoch": -1}, {**state, "position": 10_000}, {**state, "position": True},
             {**state, "shuffled": 1}]  # fmt: skip
    for damaged in wrong:
        with pytest.raises(StateError):
            prompts.load_state_dict(damaged)
    assert prompts.state_dict() == state


def test_shuffle_of_the_same_epoch_keeps_the_cursor(cache: Path) -> None:
    prompts = fresh(cache)
    prompts.shuffle(2)
    prompts.take(4)
    prompts.shuffle(2)
    assert (prompts.epoch, prompts.position) == (2, 4)
    prompts.shuffle(3)
    assert (prompts.epoch, prompts.position) == (3, 0)
    for wrong in (-1, 1.5, True, "1"):
        with pytest.raises(UsageError):
            prompts.shuffle(wrong)  # type: ignore[arg-type]


def test_pickle_is_small_and_serves_the_same(cache: Path, tmp_path: Path) -> None:
    template = (TOKENIZER / "chat_template.jinja").read_text() + "{# " + "x" * 20_000 + " #}"
    prompts = fresh(cache, apply_chat_template=True, chat_template=template, label_key="label")
    prompts.shuffle(1)
    prompts.take(2)
    pickled = pickle.dumps(prompts)
    assert len(pickled) < 16 * 1024
    serialized = pickle.loads(pickled)
    assert [(p.row, p.prompt, p.label) for p in serialized] == [
        (p.row, p.prompt, p.label) for p in prompts
    ]
    assert serialized.state_dict() == prompts.state_dict()
    large = write_rows(tmp_path / "large.jsonl", ({"text": str(n)} for n in range(5_000)))
    assert len(pickle.dumps(open_prompts(large, cache_dir=cache))) < len(pickled) + 1024


def test_opening_a_known_index_loads_no_tokenizer_and_no_template_engine(cache: Path) -> None:
    fresh(cache, apply_chat_template=True)
    program = (
        "import sys, tokenmill as tm\n"
        "p = tm.PromptDataset(sys.argv[1], sys.argv[2], max_length=36, cache_dir=sys.argv[3],\n"
        "    apply_chat_template=True, tokenizer_backend='file')\n"
        "assert p.hit and len(p)\n"
        "heavy = ('tokenizers', 'fastokens', 'transformers', 'torch', 'pyarrow', 'jinja2')\n"
        "print([name for name in heavy if name in sys.modules])"
    )
    answer = python(program, PROMPTS, TOKENIZER, cache)
    assert answer.stdout == "[]\n", answer.stderr


def test_metadata_of_two_reads_is_not_shared(cache: Path) -> None:
    prompts = fresh(cache)
    prompts[0].metadata["mine"] = 1
    assert "mine" not in prompts[0].metadata


def test_rows_served_as_they_are_need_no_tokenizer(tmp_path: Path) -> None:
    texts = [{"text": f"prompt {n}", "metadata": {"n": n}} for n in range(20)]
    messages = {"text": [{"role": "user", "content": "as messages"}]}
    source = write_rows(tmp_path / "a.jsonl", [*texts, messages, "{no JSON", {"other": 1}])
    given: dict[str, Any] = {"cache_dir": tmp_path / "cache", "num_workers": 1}
    plain = open_prompts(source, tokenizer=None, **given)
    assert plain.measured == 23
    assert not (tmp_path / "cache" / "tokenizers").exists()
    counted = open_prompts(source, **given)
    assert plain.key != counted.key
    assert plain.rejected == counted.rejected == {"bad_json": 1, "bad_shape": 1}
    for ours, theirs in zip(plain, counted, strict=True):
        assert (ours.prompt, ours.metadata) == (theirs.prompt, theirs.metadata)
        assert ours.origin == theirs.origin
        assert ours.length is None
    assert set(plain.lengths.tolist()) == {-2}
    again = open_prompts(source, tokenizer=None, **given)
    assert again.hit
    again.shuffle(1)
    again.load_state_dict(plain.state_dict())


@pytest.mark.parametrize(
    ("given", "why"),
    [({"max_length": 5}, "max_length"), ({"apply_chat_template": True}, "apply_chat_template")],
)
def test_missing_tokenizer_is_refused_with_what_needs_it(given: dict[str, Any], why: str) -> None:
    with pytest.raises(UsageError, match=f"{why} needs tokenizer: pass a directory"):
        PromptDataset(PROMPTS, **given)


def test_many_prompts_of_a_columnar_file_are_read_once(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also for their origins: a row group may cost half a second to decode."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from tokenmill.sources.columnar import ColumnReader

    path = tmp_path / "prompts.parquet"
    pq.write_table(pa.table({"text": [f"question {n}" for n in range(40)]}), path)
    prompts = open_prompts(path, cache_dir=cache)
    single = [prompt.origin for prompt in prompts]
    monkeypatch.delattr(ColumnReader, "value")
    assert [prompt.origin for prompt in prompts.batch(range(40))] == single
