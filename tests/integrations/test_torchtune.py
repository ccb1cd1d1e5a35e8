"""torchtune: rows and packs of a store for its recipes, and torchtune itself if installed."""

from __future__ import annotations

import sys
import warnings
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.integrations.conftest import labels_of, stand_in
from tokenmill.data.view import as_view
from tokenmill.errors import SourceError, UsageError
from tokenmill.store import Store

torch = pytest.importorskip("torch")

from tokenmill.integrations.torchtune import TokenizedRows, labels_are_shifted, sft_dataset  # noqa: E402

IGNORED = -100


class Transform:
    shifts = True

    def __init__(self, message_transform: Any = None, model_transform: Any = None) -> None:
        self.model_transform = model_transform

    def __call__(self, sample: Any) -> Any:
        made = self.model_transform(sample)
        labels = np.where(made["mask"], IGNORED, made["tokens"])
        made["labels"] = [*labels[1:], IGNORED] if self.shifts else list(labels)
        return made


class Odd(Transform):
    def __call__(self, sample: Any) -> Any:
        return {**self.model_transform(sample), "labels": [IGNORED] * 3}


class Packed:
    def __init__(self, ds: Any, *, max_seq_len: int, padding_idx: int = 0) -> None:
        self.packs: list[dict[str, list[int]]] = []
        for sample in ds:
            tokens, labels = sample["tokens"], sample["labels"]
            if not self.packs or len(self.packs[-1]["tokens"]) + len(tokens) > max_seq_len:
                self.packs.append({"tokens": [], "labels": [], "seq_lens": []})
            self.packs[-1]["tokens"] += tokens
            self.packs[-1]["labels"] += labels
            self.packs[-1]["seq_lens"] += [len(tokens)]

    def __len__(self) -> int:
        return len(self.packs)

    def __getitem__(self, number: int) -> Any:
        return {name: torch.tensor(values) for name, values in self.packs[number].items()}


def install(monkeypatch: pytest.MonkeyPatch, transform: type) -> None:
    stand_in(monkeypatch, "torchtune.datasets", PackedDataset=Packed)
    stand_in(monkeypatch, "torchtune.datasets._sft", SFTTransform=transform)


@pytest.fixture(params=["shifting", "not shifting", "torchtune"])
def shifts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    if request.param == "torchtune":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what torchtune imports
            reason = "torchtune is not installed: only its stand-in is tried"
            pytest.importorskip("torchtune.datasets", reason=reason)
        return labels_are_shifted()
    shifting = request.param == "shifting"
    install(monkeypatch, type("Transform", (Transform,), {"shifts": shifting}))
    return shifting


def predictions(tokens: list[int], labels: list[int], *, shifted: bool) -> list[int]:
    return labels if shifted else [*labels[1:], IGNORED]


def expected(row: Any) -> list[int]:
    return predictions([], labels_of(row), shifted=False)


def test_labels_are_shifted_like_the_installed_torchtunes(chat: Store, shifts: bool) -> None:
    dataset = sft_dataset(SimpleNamespace(max_seq_len=None), source=str(chat.path))
    assert len(dataset) == len(chat) > 50
    for number, row in enumerate(chat):
        item = dataset[number]
        assert item["tokens"] == row.input_ids.tolist()
        assert type(item["tokens"]) is type(item["labels"]) is list
        assert predictions(item["tokens"], item["labels"], shifted=shifts) == expected(row)
        # Whichever it is, no label of one row stands at a token of another.
        assert item["labels"][-1 if shifts else 0] == IGNORED


def test_unknown_label_shift_is_refused(monkeypatch: pytest.MonkeyPatch, chat: Store) -> None:
    install(monkeypatch, Odd)
    with pytest.raises(UsageError, match="version of torchtune is not supported"):
        labels_are_shifted()
    monkeypatch.setitem(sys.modules, "torchtune", None)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="torchtune"):
        TokenizedRows(as_view(chat))
    assert len(TokenizedRows(as_view(chat), shifted=True)) == len(chat)


def test_packs_are_torchtunes_own(chat: Store, shifts: bool) -> None:
    tokenizer = SimpleNamespace(max_seq_len=int(max(chat.lengths)), pad_token_id=0)
    made = sft_dataset(tokenizer, source=chat, packed=True)
    assert type(made) is sys.modules["torchtune.datasets"].PackedDataset  # type: ignore[attr-defined]
    assert len(made) < len(chat)
    rows = iter(chat)
    for number in range(len(made)):
        pack, end = made[number], 0
        found = predictions(pack["tokens"].tolist(), pack["labels"].tolist(), shifted=shifts)
        for length in pack["seq_lens"].tolist():
            if set(pack["tokens"][end:].tolist()) == {0}:
                break  # padding is torchtune's last sequence
            row = next(rows)
            assert pack["tokens"][end : end + length].tolist() == row.input_ids.tolist()
            assert found[end : end + length] == expected(row)
            end += length
        assert set(found[end:]) <= {IGNORED}
    assert next(rows, None) is None
    with pytest.raises(UsageError, match=r"tokenizer\.max_seq_len"):
        sft_dataset(SimpleNamespace(max_seq_len=None), source=chat, packed=True)


def test_rows_that_would_be_truncated_are_refused_before_the_run(
    monkeypatch: pytest.MonkeyPatch, chat: Store
) -> None:
    install(monkeypatch, Transform)
    longest = int(max(chat.lengths))
    assert len(sft_dataset(SimpleNamespace(max_seq_len=longest), source=chat)) == len(chat)
    with pytest.raises(SourceError, match=rf"max_seq_len is {longest - 1} \(\d+ such rows\)") as it:
        sft_dataset(SimpleNamespace(max_seq_len=longest - 1), source=chat)
    assert "conversations.jsonl" in str(it.value)
    assert "--max-length" in str(it.value)
