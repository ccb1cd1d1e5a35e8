"""Runs of one token: folded, encoded and repeated, they are what the whole text gives."""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.build.illustrated import Album, asked, oracle, part, text
from tests.build.making import write_rows
from tests.media import processors
from tokenmill.build.calls import run_recipe
from tokenmill.build.expansion import Folding, unfolded
from tokenmill.media import Processor
from tokenmill.tokenizers.encoder import Encoder
from tokenmill.tokenizers.tokenizer import Tokenizer

PAD, VIDEO = "<|image_pad|>", "<|video_pad|>"


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    backend = processors.make("qwen2_vl").tokenizer.backend_tokenizer
    return Encoder(Tokenizer(backend.to_str().encode()), "hf")


PIECES = st.one_of(
    st.tuples(st.sampled_from([PAD, VIDEO]), st.integers(1, 9)),
    st.tuples(st.text("a é\n😀<|image_pad>", max_size=9), st.just(1)),
)


@given(st.lists(st.lists(PIECES, max_size=7), min_size=1, max_size=3))
def test_folded_texts_give_the_tokens_of_whole_ones(encoder: Encoder, rows: Any) -> None:
    folding = Folding({one: encoder.tokenizer.reference.token_to_id(one) for one in (PAD, VIDEO)})
    texts, ends, short_texts, marks, turns, folded = [], [], [], [], [], []
    for number, row in enumerate(rows):
        whole, short, borders, short_borders, runs = "", "", [], [], []
        for piece, count in row:
            one, found = folding.fold(piece * count)
            assert len(found) == (count > 1)
            runs += [run._replace(at=len(short) + run.at) for run in found]
            whole, short = whole + piece * count, short + one
            borders.append(len(whole))
            short_borders.append(len(short))
        texts.append(whole)
        ends.append(borders)
        short_texts.append(short)
        marks.append(sorted([*short_borders, *(run.at for run in runs)]))
        turns.append([marks[-1].index(border) for border in short_borders])
        folded += [(number, marks[-1].index(run.at), run) for run in runs]
    wanted = encoder.encode(texts, turn_ends=ends)
    found = unfolded(encoder.encode(short_texts, turn_ends=marks), folded)
    assert found is not None
    for name in ("ids", "mask", "row_starts"):
        assert getattr(found, name).tolist() == getattr(wanted, name).tolist(), name
    for number, places in enumerate(turns):
        assert found.row(number)[2][places].tolist() == wanted.row(number)[2].tolist()


def prepared(album: Album, processor: Any) -> Any:
    messages = asked(part(album.name(1)), text("What?"))
    source = write_rows(album.directory / "a.jsonl", [{"messages": messages}])
    given = {"executor": "inline", "progress": False, "judge": False}
    store = run_recipe(str(source), processor=processor, **given).store
    wanted = oracle(processor, asked({"type": "image"}, text("What?")), [album.open(1)])
    assert store[0].input_ids.tolist() == wanted
    return store


def test_token_that_is_not_split_off_alone_is_not_folded(album: Album) -> None:
    from transformers import AddedToken

    for token in (f"~{PAD}", AddedToken(PAD, lstrip=True, special=True)):
        processor = processors.make("qwen2_vl")
        assert PAD in Processor(processor).repeatable
        processor.tokenizer.add_tokens([token], special_tokens=True)
        assert PAD not in Processor(processor).repeatable
        prepared(album, processor)


def test_run_that_is_encoded_as_something_else_is_left_to_the_processor(album: Album) -> None:
    with mock.patch.object(Processor, "repeatable", {PAD: 5}):
        store = prepared(album, processors.make("qwen2_vl"))
    assert store.proof["used"]["expand.expansion"].keys() == {"processor"}
    assert np.isin(store[0].input_ids, [5]).sum() < store[0].media[0].count


@pytest.fixture
def album(tmp_path: Any) -> Album:
    return Album(tmp_path / "data")
