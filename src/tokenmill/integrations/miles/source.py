"""`DataSource`: the rollout data source of miles and slime, over prompts that are not in memory.

The hosts make one from their flags, ask it for groups of samples, give back the groups that they
did not finish, and have it save and load its place. All of that is here under their names. Prompts
come from a `PromptDataset` in the host's own order (``TOKENMILL_ORDER=feistel`` chooses
tokenmill's); what was given back waits in ``buffer`` and is served first, in turn or as the
function of ``--buffer-filter-path`` chooses. A state holds cursor, counters and buffer, which the
host's own source would lose.

The host's state file of the same rollout is taken up where there is none of ours, so a run can
change over to this source at a checkpoint.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from tokenmill.errors import CorruptionError, StateError, UsageError
from tokenmill.integrations.hosts import date_named
from tokenmill.integrations.miles.evaluation import host_sample, serve_evaluation
from tokenmill.integrations.miles.host import Host, HostFlags, find_host, load_function
from tokenmill.integrations.miles.saved import host_path, read_state, state_path, write_state
from tokenmill.origin import nothing_left
from tokenmill.prompts import Prompt, PromptDataset

logger = logging.getLogger(__name__)

ROW = "tokenmill_row"
"""Attribute of a sample that says which row of the source it is; `sft_rollout` reads it."""

COUNTERS = ("sample_group_index", "sample_index")


class DataSource:
    """Prompts in groups, with a buffer for what comes back.

    Args:
        args: The host's flags.

    Attributes:
        dataset: The prompts, or None with ``--disable-rollout-global-dataset``.
        buffer: Groups that were given back.
        sample_group_index: Groups handed out so far.
        sample_index: Samples handed out so far.
        metadata: The host's, saved with the state.
    """

    def __init__(self, args: Any) -> None:
        self.args = args
        self._host: Host = find_host()
        self.sample_group_index = 0
        self.sample_index = 0
        self.metadata: dict[str, Any] = {}
        self.lookup: Any = None  # of `sft_rollout`, which fills it
        self.buffer: list[list[Any]] = []
        settings = HostFlags(args)
        if settings.lazy_evaluation:
            serve_evaluation(self._host, settings)
        path = settings.buffer_filter_path
        self.buffer_filter = pop_first if path is None else load_function(path)
        self.dataset: PromptDataset | None = None
        if settings.rollout_global_dataset and settings.prompt_data is not None:
            self.dataset = open_prompts(settings, self._host)
            if not len(self.dataset):
                rejected = self.dataset.rejected_rows()
                path = str(settings.prompt_data)
                raise nothing_left("prompt", self.dataset.rejected, rejected, path)
            if self.dataset.rejected:
                logger.warning("prompts that are not served: %s", self.dataset.rejected)
            if settings.rollout_shuffle:
                self.dataset.shuffle(0)

    # What the hosts ask for

    def get_samples(self, num_samples: int) -> list[list[Any]]:
        """The next groups: given back ones first, then new ones."""
        groups: list[list[Any]] = []
        if self.buffer and num_samples:
            groups = list(self.buffer_filter(self.args, None, self.buffer, num_samples))
        for prompt in self._next_prompts(num_samples - len(groups)):
            groups.append(self._group(prompt))
        return groups

    def _next_prompts(self, count: int) -> list[Prompt | None]:
        if count <= 0:
            return []
        return [None] * count if self.dataset is None else [*self.dataset.take(count)]

    def _group(self, prompt: Prompt | None) -> list[Any]:
        group = []
        for _ in range(self.args.n_samples_per_prompt):
            sample = self._host.sample() if prompt is None else self._sample(prompt)
            sample.group_index = self.sample_group_index
            sample.index = self.sample_index
            self.sample_index += 1
            group.append(sample)
        self.sample_group_index += 1
        return group

    def _sample(self, prompt: Prompt) -> Any:
        sample = host_sample(self._host, prompt)
        setattr(sample, ROW, prompt.row)
        return sample

    def add_samples(self, samples: list[list[Any]]) -> None:
        """Take groups back, to be served again before new ones."""
        if not isinstance(samples, list) or not all(isinstance(group, list) for group in samples):
            raise UsageError("add_samples takes a list of groups, each a list of samples")
        wanted = self.args.n_samples_per_prompt
        for group in samples:
            if len(group) != wanted:
                raise UsageError(
                    f"a group of {len(group)} samples; n_samples_per_prompt is {wanted}"
                )
        self.buffer += samples

    def get_buffer_length(self) -> int:
        """Groups that wait to be served again."""
        return len(self.buffer)

    def __len__(self) -> int:
        return 0 if self.dataset is None else len(self.dataset)

    def update_metadata(self, metadata: dict[str, Any]) -> None:
        """Add to what is saved with the state."""
        self.metadata.update(metadata)

    def get_metadata(self) -> dict[str, Any]:
        """What is saved with the state."""
        return self.metadata

    @property
    def epoch_id(self) -> int:
        """The epoch of the next new prompt."""
        return 0 if self.dataset is None else self.dataset.epoch

    @property
    def sample_offset(self) -> int:
        """New prompts of this epoch that were handed out."""
        return 0 if self.dataset is None else self.dataset.position

    # Saving and loading

    def save(self, rollout_id: Any) -> None:
        """Save place, counters and buffer below ``--save``."""
        if not self.args.rollout_global_dataset:
            return
        if self.args.save is None:
            raise UsageError("there is nowhere to save to: give --save")
        state = {
            "prompts": None if self.dataset is None else self.dataset.state_dict(),
            **{name: getattr(self, name) for name in COUNTERS},
            "n_samples_per_prompt": self.args.n_samples_per_prompt,
            "host": self._host.name,
        }
        path = state_path(self.args.save, rollout_id)
        path.parent.mkdir(parents=True, exist_ok=True)
        buffer = [[_values(sample) for sample in group] for group in self.buffer]
        write_state(path, state, {"metadata": self.metadata, "buffer": buffer})

    def load(self, rollout_id: Any = None) -> None:
        """Go on from what was saved for a rollout below ``--load``, if anything was."""
        if not self.args.rollout_global_dataset or self.args.load is None:
            return
        path = state_path(self.args.load, rollout_id)
        if path.exists():
            self._load_own(path)
        elif host_path(self.args.load, rollout_id).exists():
            self._load_host(host_path(self.args.load, rollout_id))
        else:
            logger.info("no state of a data source at %s: starting from the beginning", path)

    def _load_own(self, path: Path) -> None:
        state, carried = read_state(path)
        missing = {"prompts", "n_samples_per_prompt", *COUNTERS} - set(state)
        if missing or not all(type(state[name]) is int for name in COUNTERS):
            raise CorruptionError(f"has no {', '.join(sorted(missing or COUNTERS))}", path=path)
        if self.dataset is not None:
            self.dataset.load_state_dict(state["prompts"] or {})
        for name in COUNTERS:
            setattr(self, name, state[name])
        self.metadata = dict(carried["metadata"])
        self.buffer = [[self._rebuilt(values) for values in group] for group in carried["buffer"]]
        wanted = self.args.n_samples_per_prompt
        if any(len(group) != wanted for group in self.buffer):
            raise StateError(
                f"the state's buffer holds groups of {state['n_samples_per_prompt']} samples, "
                f"n_samples_per_prompt is {wanted}",
                path=path,
            )
        logger.info("data source: epoch %s, prompt %s", self.epoch_id, self.sample_offset)

    def _load_host(self, path: Path) -> None:
        import torch

        state = torch.load(path, weights_only=True)
        logger.warning(
            "%s is the host's own state: its place is taken up, its buffer was never saved", path
        )
        if self.dataset is not None:
            position = int(state.get("sample_offset", 0))
            self.dataset.seek(int(state.get("epoch_id", 0)), position)
        for name in COUNTERS:
            setattr(self, name, int(state.get(name, 0)))
        self.metadata = dict(state.get("metadata", {}))

    def _rebuilt(self, values: dict[str, Any]) -> Any:
        cls = self._host.sample
        if hasattr(cls, "from_dict"):
            return cls.from_dict(values)
        sample = cls()
        sample.__dict__.update(values)
        return sample


def _values(sample: Any) -> dict[str, Any]:
    """A sample as plain values."""
    values: dict[str, Any] = sample.to_dict() if hasattr(sample, "to_dict") else dict(vars(sample))
    return values


def pop_first(args: Any, rollout_id: Any, buffer: list[list[Any]], count: int) -> list[list[Any]]:
    """The buffer's oldest groups: what the hosts do without ``--buffer-filter-path``."""
    taken = buffer[:count]
    del buffer[: len(taken)]
    return taken


def open_prompts(settings: HostFlags, host: Host) -> PromptDataset:
    """The prompts that the host's flags describe."""
    checkpoint = settings.hf_checkpoint
    processor = host.load_processor(checkpoint) if _is_multimodal(settings) else None
    if settings.dump_details is not None:
        tokenizer = host.load_tokenizer(checkpoint, settings.chat_template_path)
        tokenizer.save_pretrained(Path(settings.dump_details) / "tokenizer")
        if processor is not None and hasattr(processor, "save_pretrained"):
            processor.save_pretrained(Path(settings.dump_details) / "processor")
    with date_named(checkpoint):
        return PromptDataset(
            settings.prompt_data,
            processor=processor,
            max_length=settings.rollout_max_prompt_len,
            prompt_key=settings.input_key,
            label_key=settings.label_key,
            tool_key=settings.tool_key,
            metadata_key=settings.metadata_key or "metadata",
            multimodal_keys=settings.multimodal_keys,
            apply_chat_template=bool(settings.apply_chat_template),
            apply_chat_template_kwargs=settings.template_kwargs,
            seed=settings.rollout_seed,
            order=settings.order,
            convention=host.name,
            **settings.tokenizer,
        )


def _is_multimodal(settings: HostFlags) -> bool:
    """Whether the checkpoint brings a processor: then the host would load it too."""
    directory = Path(str(settings.hf_checkpoint))
    names = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
    return settings.multimodal_keys is not None or any((directory / n).is_file() for n in names)
