"""ms-swift: its templates serve rows of tokens, with a stand-in and with ms-swift if installed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

import tokenmill as tm
from tests.integrations.conftest import labels_of, stand_in
from tokenmill.errors import UsageError
from tokenmill.integrations import ms_swift
from tokenmill.store import Store

datasets = pytest.importorskip("datasets")


class MaxLengthError(ValueError):
    """Its refusal, upon which its lazy dataset takes another row."""


def host_template() -> type:
    class Template:
        task_type, mode, truncation_strategy = "causal_lm", "train", "raise"
        max_length: int | None = None

        def encode(
            self, inputs: Any, return_template_inputs: bool = False, return_length: bool = False
        ) -> Any:
            return {"rendered": inputs, "asked": (return_template_inputs, return_length)}

        def _truncate(self, ids: Any, labels: Any, encoded: Any, truncation_strategy: str) -> Any:
            kept = slice(None, self.max_length)
            if truncation_strategy == "left":
                kept = slice(-int(self.max_length or 0), None)
            return ids[kept], [-100, *labels[kept][1:]]

    return Template


@pytest.fixture
def template(monkeypatch: pytest.MonkeyPatch) -> Any:
    made = host_template()
    stand_in(monkeypatch, "swift.template", Template=made, MaxLengthError=MaxLengthError)
    ms_swift.serve_tokens()
    once = made.encode
    ms_swift.serve_tokens()
    assert made.encode is once
    return made()


@pytest.fixture(scope="module")
def exported(chat: Store, tmp_path_factory: pytest.TempPathFactory) -> Any:
    out = tmp_path_factory.mktemp("export") / "rows"
    tm.export(chat, "hf", out, also=["lengths"])
    return datasets.load_from_disk(str(out))


def test_rows_of_an_export_are_served_as_they_are(
    template: Any, exported: Any, chat: Store
) -> None:
    assert len(exported) == len(chat) > 50
    for data, row in zip(exported, chat, strict=True):
        made = template.encode(data, return_length=True)
        assert made == {
            "input_ids": row.input_ids.tolist(), "labels": labels_of(row),
            "length": len(row), "lengths": [len(row)],
        }  # fmt: skip
        assert data["lengths"] == len(row)
    assert set(template.encode(data)) == {"input_ids", "labels"}


def test_other_rows_go_to_ms_swift_as_before(template: Any) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    # Behind each other in one table, rows of either kind have the columns of the other.
    for ids in ({}, {"input_ids": None}, {"input_ids": [5, 6], "labels": [-100, 6]}):
        row = {"messages": messages, **ids}
        assert template.encode(row, return_length=True)["rendered"] is row
    request = SimpleNamespace(messages=messages)
    assert template.encode(request, True)["asked"] == (True, False)
    stored = {"messages": None, "input_ids": [5, 6], "labels": [-100, 6], "lengths": 2}
    assert template.encode(stored)["input_ids"] == [5, 6]


def test_limits_are_those_of_the_template(template: Any) -> None:
    row = {"input_ids": [5, 6, 7, 8], "labels": [-100, 6, 7, 8], "lengths": 4}
    template.max_length = 4
    assert template.encode(row)["input_ids"] == [5, 6, 7, 8]
    template.max_length = 3
    with pytest.raises(MaxLengthError, match="4 tokens, max_length is 3"):
        template.encode(row)
    template.truncation_strategy = "left"
    made = template.encode(row, return_length=True)
    assert (made["input_ids"], made["labels"]) == ([6, 7, 8], [-100, 7, 8])
    assert made["lengths"] == [3]
    assert row["labels"] == [-100, 6, 7, 8]


def test_rows_that_would_be_trained_wrongly_are_refused(template: Any) -> None:
    row = {"input_ids": [5, 6], "labels": [-100, 6]}
    with pytest.raises(UsageError, match="would ignore loss_weights"):
        template.encode({**row, "loss_weights": [0.0, 0.5]})
    with pytest.raises(UsageError, match="columns input_ids"):
        template.encode({"input_ids": [5, 6]})
    template.mode = "rlhf"
    with pytest.raises(UsageError, match="mode rlhf"):
        template.encode(row)


@pytest.mark.filterwarnings("ignore")
def test_ms_swift_itself_batches_and_packs_the_rows(
    exported: Any, chat: Store, tokenizer: Any
) -> None:
    reason = "ms-swift is not installed: only its stand-in is tried"
    pytest.importorskip("swift.template", reason=reason)
    from swift.dataset import LazyLLMDataset, PackingDataset
    from swift.template import Template, get_template

    theirs = Template.encode
    try:
        ms_swift.serve_tokens()
        tokenizer.model_info = SimpleNamespace(
            config=None, task_type="causal_lm", max_model_len=9999, model_dir="", torch_dtype=None
        )
        tokenizer.model_meta = SimpleNamespace(is_multimodal=False, template=None, model_arch=None)
        template = get_template(tokenizer, template_type="chatml", max_length=9999)
        template.set_mode("train")
        lazy = LazyLLMDataset(exported, template.encode, strict=True)
        for start in range(0, len(chat), 4):
            numbers = range(start, min(start + 4, len(chat)))
            batch = template.data_collator([lazy[number] for number in numbers])
            for number, ids, labels in zip(
                numbers, batch["input_ids"].tolist(), batch["labels"].tolist(), strict=True
            ):
                row = chat[number]
                assert ids[: len(row)] == row.input_ids.tolist()
                assert labels == labels_of(row) + [-100] * (len(labels) - len(row))
        packs = PackingDataset(template, lazy, packing_length=int(max(chat.lengths)))
        for number in range(len(packs)):
            rows = [chat[row] for row in packs.packed_idx[number]]
            batch = template.data_collator([packs[number]])
            ids = [token for row in rows for token in row.input_ids.tolist()]
            assert batch["input_ids"][0].tolist() == ids
            assert batch["labels"][0].tolist() == [at for row in rows for at in labels_of(row)]
    finally:
        Template.encode = theirs
