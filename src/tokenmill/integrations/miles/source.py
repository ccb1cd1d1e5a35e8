"""The rollout data source of miles and slime over a lazy index of prompts, and SFT over a store.

The state has the position, the counters and the buffer of returned groups. If there is none, the
framework's own state of the same rollout is loaded, so a run can switch at a checkpoint.
`sft_rollout` finds a sample's row in a store by the digest of the source row's bytes, so the store
may have more files, in another order.
"""

from __future__ import annotations

import copy
import importlib
import json
import logging
import os
import pkgutil
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from tokenmill._core.fingerprint import checksum64
from tokenmill._core.origin import nothing_left
from tokenmill.data.order import FeistelOrder
from tokenmill.data.prompt_rows import Prompt
from tokenmill.data.prompts import PromptDataset, PromptSettings, open_prompts
from tokenmill.data.view import as_view, tokens_alone
from tokenmill.errors import CorruptionError, SourceError, StateError, UsageError, check_one_of
from tokenmill.integrations.miles.conventions import MILES, SLIME, MilesOrder
from tokenmill.integrations.miles.saved import (
    framework_state_path,
    read_state,
    state_path,
    write_state,
)
from tokenmill.integrations.trainers import date_named, prepared, response_mask, stated_date
from tokenmill.store import Row, Store, open_store

logger = logging.getLogger(__name__)

FRAMEWORKS: tuple[Literal["miles", "slime"], ...] = ("miles", "slime")
EVALUATION = "TOKENMILL_EVAL"
ORDER = "TOKENMILL_ORDER"
STORE = "TOKENMILL_STORE"
TURN_END = "TOKENMILL_TURN_END"
ROW = "tokenmill_row"  # attribute of a sample: the number of its source row
CONVENTIONS = {"miles": MILES, "slime": SLIME}
COUNTERS = ("sample_group_index", "sample_index")
PROCESSOR_FILES = (
    "preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json",
)  # fmt: skip


# The framework and its flags


@dataclass(frozen=True)
class Framework:
    name: Literal["miles", "slime"]
    sample: Any

    @classmethod
    def find(cls) -> Framework:
        """Return the framework that this process has loaded, else the first that is installed."""
        loaded = [name for name in FRAMEWORKS if f"{name}.utils.types" in sys.modules]
        reasons = []
        for name in [*loaded, *(name for name in FRAMEWORKS if name not in loaded)]:
            try:
                return cls(name, importlib.import_module(f"{name}.utils.types").Sample)
            except (ImportError, AttributeError) as error:
                reasons.append(f"{name}: {error}")
        raise UsageError(f"miles or slime must be installed ({'; '.join(reasons)}).")

    @property
    def loaders(self) -> Any:
        return importlib.import_module(f"{self.name}.utils.processing_utils")

    def new_sample(self, prompt: Prompt) -> Any:
        """Return a sample that shares no data with others: rollouts write into them."""
        names = ("prompt", "label", "metadata", "multimodal_inputs")
        return self.sample(**{name: copy.deepcopy(getattr(prompt, name)) for name in names})


@dataclass(frozen=True)
class Flags:
    """The framework's flags; one that it does not have is None."""

    args: Any

    def __getattr__(self, name: str) -> Any:
        return getattr(self.args, name, None)

    @property
    def chat_template_kwargs(self) -> dict[str, Any]:
        value = self.apply_chat_template_kwargs
        value = json.loads(value) if isinstance(value, str) else value
        return dict(value or {})

    @property
    def order(self) -> type[MilesOrder | FeistelOrder]:
        stated = os.environ.get(ORDER) or "miles"
        check_one_of(ORDER, stated, ("miles", "feistel"))
        return MilesOrder if stated == "miles" else FeistelOrder

    @property
    def serves_evaluation(self) -> bool:
        stated = os.environ.get(EVALUATION) or "0"
        check_one_of(EVALUATION, stated, ("0", "1"))
        return stated == "1"

    @property
    def tokenizer(self) -> dict[str, Any]:
        return {
            "tokenizer": self.hf_checkpoint,
            "tokenizer_backend": "transformers",
            "trust_remote_code": True,
            "chat_template": self.chat_template_path,
            "date": stated_date(),
        }

    @property
    def is_multimodal(self) -> bool:
        """Whether the checkpoint has a processor, which the framework would load."""
        directory = Path(str(self.hf_checkpoint))
        has_files = any((directory / name).is_file() for name in PROCESSOR_FILES)
        return self.multimodal_keys is not None or has_files


def _load_function(path: str) -> Any:
    try:
        return pkgutil.resolve_name(path)
    except (ImportError, AttributeError, ValueError) as error:
        raise UsageError(f"{path!r} cannot be imported: {error}") from error


def _open_prompts(
    flags: Flags, framework: Framework, path: Any, order: Any = FeistelOrder, **arguments: Any
) -> PromptDataset:
    with date_named(flags.hf_checkpoint):
        settings = PromptSettings(convention=CONVENTIONS[framework.name], order=order)
        prompts = open_prompts(settings, path, **{**flags.tokenizer, **arguments})
    if not len(prompts):
        raise nothing_left("prompt", prompts.rejected, prompts.rejected_rows(), str(path))
    if prompts.rejected:
        logger.warning("Rejected prompts of %s: %s", path, prompts.rejected)
    return prompts


# Evaluation


class EvalDataset:
    framework: Framework
    flags: Flags
    replaced: Any  # the framework's class

    def __init__(
        self, path: str, tokenizer: Any, processor: Any, max_length: int | None, **described: Any
    ) -> None:
        described["metadata_key"] = described.get("metadata_key") or "metadata"
        described |= {"processor": processor, "max_length": max_length}
        self.prompts = _open_prompts(self.flags, self.framework, path, **described)

    @property
    def samples(self) -> EvalDataset:
        return self

    def __len__(self) -> int:
        return len(self.prompts)

    def __getitem__(self, number: int) -> Any:
        return self.framework.new_sample(self.prompts[number])


def serve_evaluation(framework: Framework, flags: Flags) -> None:
    """Replace the framework's dataset class in all of its loaded modules."""
    module = importlib.import_module(f"{framework.name}.utils.data")
    theirs = getattr(module.Dataset, "replaced", module.Dataset)
    members = {"framework": framework, "flags": flags, "replaced": theirs}
    ours = type("Dataset", (EvalDataset,), members)
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == framework.name:
            found = vars(module).get("Dataset")
            if found is not None and getattr(found, "replaced", found) is theirs:
                module.Dataset = ours  # type: ignore[attr-defined]


# The data source


class DataSource:
    def __init__(self, args: Any) -> None:
        self.args = args
        self._framework = Framework.find()
        self.sample_group_index = 0  # number of groups served
        self.sample_index = 0  # number of samples served
        self.metadata: dict[str, Any] = {}  # the framework's, saved with the state
        self.lookup: Lookup | None = None  # of `sft_rollout`
        self.buffer: list[list[Any]] = []
        flags = Flags(args)
        if flags.serves_evaluation:
            serve_evaluation(self._framework, flags)
        path = flags.buffer_filter_path
        self.buffer_filter = _pop_first if path is None else _load_function(path)
        self.dataset: PromptDataset | None = None  # with --disable-rollout-global-dataset
        if flags.rollout_global_dataset and flags.prompt_data is not None:
            self.dataset = self._open(flags)
            if flags.rollout_shuffle:
                self.dataset.shuffle(0)

    def _open(self, flags: Flags) -> PromptDataset:
        checkpoint, framework = flags.hf_checkpoint, self._framework
        processor = None
        if flags.is_multimodal:
            processor = framework.loaders.load_processor(checkpoint, trust_remote_code=True)
        if flags.dump_details is not None:
            template = flags.chat_template_path
            options = {} if template is None else {"chat_template_path": template}
            load = framework.loaders.load_tokenizer
            tokenizer = load(checkpoint, trust_remote_code=True, **options)
            tokenizer.save_pretrained(Path(flags.dump_details) / "tokenizer")
            if processor is not None and hasattr(processor, "save_pretrained"):
                processor.save_pretrained(Path(flags.dump_details) / "processor")
        return _open_prompts(
            flags,
            framework,
            flags.prompt_data,
            processor=processor,
            max_length=flags.rollout_max_prompt_len,
            prompt_key=flags.input_key,
            label_key=flags.label_key,
            tool_key=flags.tool_key,
            metadata_key=flags.metadata_key or "metadata",
            multimodal_keys=flags.multimodal_keys,
            apply_chat_template=bool(flags.apply_chat_template),
            apply_chat_template_kwargs=flags.chat_template_kwargs,
            seed=flags.rollout_seed,
            order=flags.order,
        )

    # Samples

    def get_samples(self, num_samples: int) -> list[list[Any]]:
        groups: list[list[Any]] = []
        if self.buffer and num_samples:
            groups = list(self.buffer_filter(self.args, None, self.buffer, num_samples))
        missing = max(0, num_samples - len(groups))
        prompts: Sequence[Prompt | None] = [None] * missing
        if self.dataset is not None and missing:
            prompts = self.dataset.take(missing)
        return groups + [self._group(prompt) for prompt in prompts]

    def _group(self, prompt: Prompt | None) -> list[Any]:
        group = []
        for _ in range(self.args.n_samples_per_prompt):
            if prompt is None:
                sample = self._framework.sample()
            else:
                sample = self._framework.new_sample(prompt)
                setattr(sample, ROW, prompt.row)
            sample.group_index = self.sample_group_index
            sample.index = self.sample_index
            self.sample_index += 1
            group.append(sample)
        self.sample_group_index += 1
        return group

    def add_samples(self, samples: list[list[Any]]) -> None:
        if not isinstance(samples, list) or not all(isinstance(group, list) for group in samples):
            raise UsageError("add_samples takes a list of groups, each a list of samples")
        size = self.args.n_samples_per_prompt
        for group in samples:
            if len(group) != size:
                raise UsageError(
                    f"A group has {len(group)} samples, but n_samples_per_prompt is {size}."
                )
        self.buffer += samples

    def get_buffer_length(self) -> int:
        return len(self.buffer)

    def __len__(self) -> int:
        return 0 if self.dataset is None else len(self.dataset)

    def update_metadata(self, metadata: dict[str, Any]) -> None:
        self.metadata.update(metadata)

    def get_metadata(self) -> dict[str, Any]:
        return self.metadata

    @property
    def epoch_id(self) -> int:
        return 0 if self.dataset is None else self.dataset.epoch

    @property
    def sample_offset(self) -> int:
        return 0 if self.dataset is None else self.dataset.position

    # State

    def save(self, rollout_id: Any) -> None:
        if not self.args.rollout_global_dataset:
            return
        if self.args.save is None:
            raise UsageError("Set --save to save the data source.")
        state = {
            "prompts": None if self.dataset is None else self.dataset.state_dict(),
            **{name: getattr(self, name) for name in COUNTERS},
            "n_samples_per_prompt": self.args.n_samples_per_prompt,
            "host": self._framework.name,
        }
        path = state_path(self.args.save, rollout_id)
        path.parent.mkdir(parents=True, exist_ok=True)
        buffer = [[sample.to_dict() for sample in group] for group in self.buffer]
        write_state(path, state, {"metadata": self.metadata, "buffer": buffer})

    def load(self, rollout_id: Any = None) -> None:
        if not self.args.rollout_global_dataset or self.args.load is None:
            return
        path = state_path(self.args.load, rollout_id)
        theirs = framework_state_path(self.args.load, rollout_id)
        if path.exists():
            self._load_own(path)
        elif theirs.exists():
            self._load_framework(theirs)
        else:
            logger.info("No state of a data source at %s, starting from the beginning", path)

    def _load_own(self, path: Path) -> None:
        state, body = read_state(path)
        missing = {"prompts", "n_samples_per_prompt", *COUNTERS} - set(state)
        if missing or not all(type(state[name]) is int for name in COUNTERS):
            raise CorruptionError(
                f"The state has no valid {', '.join(sorted(missing or COUNTERS))}.", path=path
            )
        if self.dataset is not None:
            self.dataset.load_state_dict(state["prompts"] or {})
        for name in COUNTERS:
            setattr(self, name, state[name])
        self.metadata = dict(body["metadata"])
        rebuild = self._framework.sample.from_dict
        self.buffer = [[rebuild(values) for values in group] for group in body["buffer"]]
        size = self.args.n_samples_per_prompt
        if any(len(group) != size for group in self.buffer):
            raise StateError(
                f"The state has groups of {state['n_samples_per_prompt']} samples, but "
                f"n_samples_per_prompt is {size}.",
                path=path,
            )
        logger.info("data source: epoch %s, prompt %s", self.epoch_id, self.sample_offset)

    def _load_framework(self, path: Path) -> None:
        import torch

        state = torch.load(path, weights_only=True)
        logger.warning("%s is the framework's own state: it has a position, but no buffer", path)
        if self.dataset is not None:
            position = int(state.get("sample_offset", 0))
            self.dataset.seek(int(state.get("epoch_id", 0)), position)
        for name in COUNTERS:
            setattr(self, name, int(state.get(name, 0)))
        self.metadata = dict(state.get("metadata", {}))


def _pop_first(args: Any, rollout_id: Any, buffer: list[list[Any]], count: int) -> list[list[Any]]:
    """Remove and return the oldest groups, the default of the frameworks."""
    oldest = buffer[:count]
    del buffer[: len(oldest)]
    return oldest


# SFT


class Lookup:
    """Rows of a store by the bytes of their source row; 16 bytes per row."""

    def __init__(self, store: Store) -> None:
        self.store = store
        tokens_alone(as_view(store), "sft_rollout of miles and slime")
        digests = np.zeros(len(store), dtype=np.uint64)
        for first, columns in store.columns(["digest", "part"]):
            size = len(columns["digest"])
            digests[first : first + size] = columns["digest"]
            if np.any(columns["part"]):
                raise UsageError(
                    "This store has one row per turn. Prepare it with ",
                    ("expand", "none"),
                    ".",
                    path=store.path,
                )
        self._order = np.argsort(digests, kind="stable")
        self._sorted = digests[self._order]
        self.skipped: Counter[str] = Counter()

    def find(self, raw: bytes) -> Row | None:
        digest = np.uint64(checksum64(raw))
        place = int(np.searchsorted(self._sorted, digest))
        if place == len(self._sorted) or self._sorted[place] != digest:
            return None
        return self.store[int(self._order[place])]


def sft_rollout(args: Any, rollout_id: Any, data_source: Any, evaluation: bool = False) -> Any:
    """Return one step's samples, with tokens, response_length and loss_mask from the store."""
    if evaluation:
        raise UsageError("sft_rollout cannot evaluate. Set --eval-function-path.")
    if not isinstance(data_source, DataSource) or data_source.dataset is None:
        raise UsageError(
            "sft_rollout needs --data-source-path tokenmill.integrations.miles.DataSource "
            "with --prompt-data"
        )
    if data_source.lookup is None:
        data_source.lookup = Lookup(open_sft_store(args))
    lookup = data_source.lookup
    groups: list[list[Any]] = []
    missing = 0
    while len(groups) < args.rollout_batch_size:
        for group in data_source.get_samples(args.rollout_batch_size - len(groups)):
            row = lookup.find(data_source.dataset.rows.raw(getattr(group[0], ROW)))
            if row is None:
                missing += 1
                continue
            for sample in group:
                sample.tokens = row.input_ids.tolist()
                sample.loss_mask = response_mask(row.loss_mask).tolist()
                sample.response_length = len(sample.loss_mask)
                sample.reward = 0
            groups.append(group)
        if missing > len(data_source) + args.rollout_batch_size and not groups:
            raise SourceError(
                f"None of {missing:,} rows is in the store. It was prepared from other data.",
                path=lookup.store.path,
            )
    if missing:
        lookup.skipped["rows"] += missing
        logger.warning(
            "%s rows skipped, %s in total: the store rejected them (%s)",
            missing, lookup.skipped["rows"], lookup.store.rejected,
        )  # fmt: skip
    return groups


def open_sft_store(args: Any) -> Store:
    stated = os.environ.get(STORE)
    if stated:
        return open_store(stated)
    flags = Flags(args)
    turn_end: Any = os.environ.get(TURN_END) or "turn"  # as the frameworks
    return prepared(
        sources=flags.prompt_data,
        columns={"messages": flags.input_key or "messages", "tools": flags.tool_key or "tools"},
        chat_template_kwargs=flags.chat_template_kwargs,
        turn_end=turn_end,
        trailing="trim",  # the frameworks train the turns before it
        **flags.tokenizer,
    )
