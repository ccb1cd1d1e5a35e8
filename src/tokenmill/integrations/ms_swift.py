"""ms-swift's ``--cached_dataset`` with tokens in it; limits and batches are ms-swift's own."""

from __future__ import annotations

import functools
from typing import Any

from tokenmill._core.optional import optional
from tokenmill.errors import UsageError

IDS, LABELS = "input_ids", "labels"


def serve_tokens() -> None:
    """Patch `Template.encode` of this process to return tokenized rows; can be called again."""
    with optional("swift", "this plugin"):
        from swift.template import MaxLengthError, Template
    original = Template.encode
    if getattr(original, "serves_tokens", False):
        return

    @functools.wraps(original)
    def encode(
        self: Any, inputs: Any, return_template_inputs: bool = False, return_length: bool = False
    ) -> Any:
        # In a mixed dataset, rows of tokens also have the other columns, with None in them.
        row = inputs if isinstance(inputs, dict) else {}
        row = {name: value for name, value in row.items() if value is not None}
        if IDS not in row or "messages" in row:
            return original(self, inputs, return_template_inputs, return_length)
        return _encoded(self, row, return_length, MaxLengthError)

    encode.serves_tokens = True  # type: ignore[attr-defined]
    Template.encode = encode


def _encoded(template: Any, row: dict[str, Any], return_length: bool, overlong: Any) -> Any:
    if LABELS not in row or template.task_type != "causal_lm" or template.mode != "train":
        raise UsageError(
            f"Tokenized rows work only in supervised fine-tuning and need labels; got task type "
            f"{template.task_type}, mode {template.mode}, columns {', '.join(sorted(row))}."
        )
    extra = sorted(set(row) - {IDS, LABELS, "attention_mask", "length", "lengths"})
    if extra:
        raise UsageError(f"ms-swift would ignore {', '.join(extra)}. Export without these columns.")
    ids, labels = list(row[IDS]), list(row[LABELS])
    limit = template.max_length
    if limit is not None and len(ids) > limit:
        if template.truncation_strategy not in ("left", "right"):
            raise overlong(f"{len(ids)} tokens, max_length is {limit}")
        ids, labels = template._truncate(ids, labels, {}, template.truncation_strategy)
    encoded: dict[str, Any] = {IDS: ids, LABELS: labels}
    if return_length:
        encoded |= {"length": len(ids), "lengths": [len(ids)]}
    return encoded
