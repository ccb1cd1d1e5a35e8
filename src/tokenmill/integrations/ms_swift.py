"""ms-swift's ``--cached_dataset`` with tokens in it; limits and batches are ms-swift's own."""

from __future__ import annotations

import functools
from typing import Any

from tokenmill._core.optional import optional
from tokenmill.errors import UsageError

IDS, LABELS = "input_ids", "labels"


def serve_tokens() -> None:
    """Let every template of this process serve rows of tokens; repeated calls change nothing."""
    with optional("swift", "this plugin"):
        from swift.template import MaxLengthError, Template
    theirs = Template.encode
    if getattr(theirs, "serves_tokens", False):
        return

    @functools.wraps(theirs)
    def encode(
        self: Any, inputs: Any, return_template_inputs: bool = False, return_length: bool = False
    ) -> Any:
        # In a mixed dataset, rows of tokens also have the other columns, with None in them.
        row = inputs if isinstance(inputs, dict) else {}
        row = {name: value for name, value in row.items() if value is not None}
        if IDS not in row or "messages" in row:
            return theirs(self, inputs, return_template_inputs, return_length)
        return _encoded(self, row, return_length, MaxLengthError)

    encode.serves_tokens = True  # type: ignore[attr-defined]
    Template.encode = encode


def _encoded(template: Any, row: dict[str, Any], return_length: bool, overlong: Any) -> Any:
    if LABELS not in row or template.task_type != "causal_lm" or template.mode != "train":
        raise UsageError(
            f"rows of tokens with labels are for supervised fine-tuning; this is task type "
            f"{template.task_type} in mode {template.mode}, with {', '.join(sorted(row))}"
        )
    extra = sorted(set(row) - {IDS, LABELS, "attention_mask", "length", "lengths"})
    if extra:
        raise UsageError(f"ms-swift would not look at {', '.join(extra)}: export without")
    ids, labels = list(row[IDS]), list(row[LABELS])
    limit = template.max_length
    if limit is not None and len(ids) > limit:
        if template.truncation_strategy not in ("left", "right"):
            raise overlong(f"{len(ids)} tokens, max_length is {limit}")
        ids, labels = template._truncate(ids, labels, {}, template.truncation_strategy)
    made: dict[str, Any] = {IDS: ids, LABELS: labels}
    if return_length:
        made |= {"length": len(ids), "lengths": [len(ids)]}
    return made
