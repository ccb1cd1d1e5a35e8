"""A whole run of groups for TRL's `DPOTrainer`, `KTOTrainer` and `RewardTrainer`.

Comes in: a store, view or mixture with groups. Goes out: a lazy dataset of all epochs one after
another in our order, in the columns that the trainer's own collator takes, and the arguments of its
config. TRL cuts a row where the prompt rendered alone and the whole part; here the place is the
group's ``prompt_tokens``, and both sides are whole renders.

    dpo      prompt_ids, chosen_ids, rejected_ids; with ref_logps= ref_chosen_logps,
             ref_rejected_logps
    kto      prompt_ids, completion_ids, KL_completion_ids, label; with ref_logps= ref_logps
    reward   chosen_ids, rejected_ids, each with its prompt; margin where the data has any

Of these trainers only the last takes tokens by itself. `as_prepared` makes a class of any of them
that takes them as they are, and that takes reference log-probabilities which came with the dataset
instead of asking a reference model.

A sidecar holds one value per row of the store. KTO's KL term also wants the reference's value of
every mismatched sequence, and which sequences these are depends on the seed and on the rows that
are served, so no value of a row can stand for them. Known values are therefore taken only by the
KTO losses that have no such term.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import datasets
import pyarrow as pa

from tokenmill import fingerprint
from tokenmill.dataset import Mixture, View
from tokenmill.dataset.sidecars import ViewSidecar
from tokenmill.errors import UsageError, check_one_of
from tokenmill.integrations.hf.table import LazyTable
from tokenmill.loader import LengthGrouped, WholeRun
from tokenmill.loader.group_batches import GroupFiller, group_counts
from tokenmill.store import Row, Store

_IDS = pa.list_(pa.int32())
TRAINERS = {
    "dpo": pa.schema({"prompt_ids": _IDS, "chosen_ids": _IDS, "rejected_ids": _IDS}),
    "kto": pa.schema({"prompt_ids": _IDS, "completion_ids": _IDS, "KL_completion_ids": _IDS,
                      "label": pa.bool_()}),
    "reward": pa.schema({"chosen_ids": _IDS, "rejected_ids": _IDS}),
}  # fmt: skip
"""Trainers and the columns that each wants."""

KINDS = {"dpo": "preference", "kto": "kto", "reward": "preference"}
REFERENCE = {"dpo": ("ref_chosen_logps", "ref_rejected_logps"), "kto": ("ref_logps",)}
"""Trainers that compare with a reference, and the columns with its log-probability of each row."""


def group_dataset(
    data: Store | View | Mixture,
    trainer: str | None,
    *,
    epochs: int,
    seed: int,
    order: str | LengthGrouped,
    ref_logps: str | None,
) -> datasets.Dataset:
    """The dataset of a run of groups; see `tokenmill.integrations.hf.for_trl`."""
    samples = WholeRun(data, epochs=epochs, seed=seed, order=order, unit="groups")
    counts = group_counts(samples.view)
    if trainer is None:
        trainer = "kto" if counts["kto"] else "dpo"
    check_one_of("trainer", trainer, tuple(TRAINERS))
    others = [kind for kind in KINDS.values() if kind != KINDS[trainer]] + ["ranked", "single"]
    found = [kind for kind in dict.fromkeys(others) if counts[kind]]
    if found or not counts[KINDS[trainer]]:
        told = ", ".join(f"{counts[kind]:,} {kind}" for kind in found) or "none"
        raise UsageError(f"trainer={trainer!r} wants groups of {KINDS[trainer]}; there are {told}")
    if ref_logps is not None and trainer not in REFERENCE:
        raise UsageError(f"ref_logps= is for dpo and kto; trainer={trainer!r} has no reference")
    reader = GroupSamples(samples, trainer, seed, ref_logps)
    spec = samples.spec
    key = fingerprint.key(
        [trainer, ref_logps and reader.made_by, samples.epochs, spec.dataset, spec.seed,
         spec.order]
    )  # fmt: skip
    return datasets.Dataset(LazyTable.of(reader), fingerprint=key[:16])


class GroupSamples:
    """Groups of a run as Arrow columns.

    Args:
        samples: The run.
        trainer: One of `TRAINERS`.
        seed: Of the run; it says which answers are mismatched.
        ref_logps: The sidecar with the reference's log-probability of each row's answer.
    """

    def __init__(self, samples: WholeRun, trainer: str, seed: int, ref_logps: str | None) -> None:
        self.samples = samples
        self.trainer = trainer
        self._seed = seed
        self._name = ref_logps
        self._margins = trainer == "reward" and group_counts(samples.view)["margins"] > 0
        self._shift = GroupFiller.shift_of(samples.view, seed)
        self._sidecar: ViewSidecar | None = None
        if ref_logps is not None:
            self._sidecar = samples.view.sidecar(ref_logps)
            if self._sidecar.per != "row":
                raise UsageError(f"sidecar {ref_logps!r} is per token: TRL wants one value per row")

    def __reduce__(self) -> Any:
        return GroupSamples, (self.samples, self.trainer, self._seed, self._name)

    @property
    def made_by(self) -> str:
        """What made the reference's log-probabilities."""
        return "" if self._sidecar is None else self._sidecar.made_by

    def __len__(self) -> int:
        return len(self.samples)

    @property
    def schema(self) -> pa.Schema:
        """Columns and their types."""
        schema = TRAINERS[self.trainer]
        if self._sidecar is not None:
            for name in REFERENCE[self.trainer]:
                schema = schema.append(pa.field(name, pa.float32()))
        return schema.append(pa.field("margin", pa.float64())) if self._margins else schema

    @property
    def nbytes(self) -> int:
        """About how many bytes all columns have together."""
        return 4 * self.samples.tokens

    def read(self, indices: Sequence[int]) -> pa.Table:
        """Samples by number."""
        packs = self.samples.packs(indices)
        rows = self.samples.view.rows(packs.rows)
        groups = [rows[first:stop] for first, stop in pairwise(packs.bounds.tolist())]
        columns: dict[str, Any] = {}
        if self.trainer == "reward":
            for side, name in enumerate(("chosen_ids", "rejected_ids")):
                columns[name] = [group[side].input_ids for group in groups]
            if self._margins:
                columns["margin"] = [group[0].margin or 0.0 for group in groups]
        else:
            prompts = [_prompt_tokens(group[0]) for group in groups]
            pairs = list(zip(groups, prompts, strict=True))
            columns["prompt_ids"] = [group[0].input_ids[:size] for group, size in pairs]
            names = ("chosen_ids", "rejected_ids") if self.trainer == "dpo" else ("completion_ids",)
            for side, name in enumerate(names):
                columns[name] = [group[side].input_ids[size:] for group, size in pairs]
        if self.trainer == "kto":
            view = self.samples.view
            others = view.rows((packs.rows + self._shift) % len(view))
            answers = [other.input_ids[_prompt_tokens(other) :] for other in others]
            columns["KL_completion_ids"] = answers
            columns["label"] = [group[0].label for group in groups]
        if self._sidecar is not None:
            sides = REFERENCE[self.trainer]
            values = self._sidecar.of_rows(packs.rows).reshape(-1, len(sides))
            columns |= dict(zip(sides, values.T, strict=True))
        schema = self.schema
        arrays = [pa.array(columns[name], schema.field(name).type) for name in schema.names]
        return pa.Table.from_arrays(arrays, schema=schema)


def _prompt_tokens(row: Row) -> int:
    if row.prompt_tokens is None:
        raise UsageError(
            f"{row.origin}: the template writes the prompt differently for the answers of this "
            "group, and TRL takes one prompt for both: serve it with a Loader, or leave it out"
        )
    return row.prompt_tokens


def as_prepared(trainer: type[Any]) -> type[Any]:
    """A trainer class that takes the dataset of `for_trl` as it is.

    It tokenizes nothing, and where the dataset brings the reference's log-probabilities it neither
    loads nor calls a reference model.

    Args:
        trainer: `DPOTrainer`, `KTOTrainer` or a subclass; `RewardTrainer` needs no other class.
    """

    def _prepare_dataset(self: Any, dataset: Any, *arguments: Any, **named: Any) -> Any:
        if _is_ours(dataset):
            return dataset
        return trainer._prepare_dataset(self, dataset, *arguments, **named)

    def _precompute_ref_logps(self: Any, dataset: Any, *arguments: Any, **named: Any) -> Any:
        known = set(dataset.column_names) if _is_ours(dataset) else set()
        if known.issuperset(REFERENCE["kto"]) and self.calculate_KL:
            raise UsageError(
                f"loss_type={self.loss_type!r} wants the reference's log-probabilities of "
                "mismatched answers, too, which no value per row holds: leave ref_logps= out, or "
                "take a loss without a KL term (apo_zero_unpaired)"
            )
        if any(known.issuperset(names) for names in REFERENCE.values()):
            return dataset
        return trainer._precompute_ref_logps(self, dataset, *arguments, **named)

    members = {
        "_prepare_dataset": _prepare_dataset,
        "_precompute_ref_logps": _precompute_ref_logps,
    }
    return type(f"Prepared{trainer.__name__}", (trainer,), members)


def _is_ours(dataset: Any) -> bool:
    return isinstance(getattr(dataset, "data", None), LazyTable)
