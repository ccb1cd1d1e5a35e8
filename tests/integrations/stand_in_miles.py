"""Stand-ins for miles and slime: their `Sample`, flags and buffered data source, in memory."""

from __future__ import annotations

import copy
import random
import sys
from dataclasses import dataclass, field
from enum import Enum
from types import SimpleNamespace
from typing import Any

import pytest

from tests.integrations.conftest import stand_in


@dataclass
class Sample:
    class Status(Enum):  # noqa: D106
        PENDING = "pending"
        ABORTED = "aborted"

    group_index: int | None = None
    index: int | None = None
    prompt: Any = ""
    tokens: list[int] = field(default_factory=list)
    multimodal_inputs: Any = None
    response: str = ""
    response_length: int = 0
    label: Any = None
    reward: Any = None
    loss_mask: list[int] | None = None
    status: Status = Status.PENDING
    metadata: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return {**self.__dict__, "status": self.status.value}

    @staticmethod
    def from_dict(detail: dict[str, Any]) -> Sample:
        names = set(Sample.__dataclass_fields__)
        known = {name: value for name, value in detail.items() if name in names}
        sample = Sample(**{**known, "status": Sample.Status(detail["status"])})
        for name in set(detail) - names:
            setattr(sample, name, detail[name])
        return sample


def install(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    for other in ("miles", "slime"):
        for module in (other, f"{other}.utils", f"{other}.utils.types"):
            monkeypatch.setitem(sys.modules, module, None)  # type: ignore[arg-type]
    stand_in(monkeypatch, f"{name}.utils.types", Sample=Sample)


def flags(**stated: Any) -> SimpleNamespace:
    unset = (
        "prompt_data", "hf_checkpoint", "chat_template_path", "dump_details", "label_key",
        "rollout_max_prompt_len", "multimodal_keys", "buffer_filter_path", "save", "load",
    )  # fmt: skip
    known = {
        "rollout_global_dataset": True, "input_key": "input", "metadata_key": "metadata",
        "tool_key": "tools", "apply_chat_template": False, "apply_chat_template_kwargs": {},
        "rollout_seed": 42, "rollout_shuffle": True, "rollout_batch_size": 8,
        "n_samples_per_prompt": 1,
    }  # fmt: skip
    return SimpleNamespace(**{**dict.fromkeys(unset), **known, **stated})


class EagerSource:
    def __init__(self, args: Any, samples: list[Sample]) -> None:
        self.args = args
        self.origin = samples
        self.samples = samples
        self.epoch = self.offset = self.group = self.index = 0
        self.buffer: list[list[Sample]] = []
        self._shuffle()

    def _shuffle(self) -> None:
        if self.args.rollout_shuffle:
            order = list(range(len(self.origin)))
            random.Random(self.args.rollout_seed + self.epoch).shuffle(order)
            self.samples = [self.origin[number] for number in order]

    def get_samples(self, count: int) -> list[list[Sample]]:
        groups = self.buffer[:count]
        del self.buffer[: len(groups)]
        for _ in range(count - len(groups)):
            if self.offset == len(self.samples):
                self.epoch, self.offset = self.epoch + 1, 0
                self._shuffle()
            group = []
            for _ in range(self.args.n_samples_per_prompt):
                sample = copy.deepcopy(self.samples[self.offset])
                sample.group_index, sample.index = self.group, self.index
                self.index += 1
                group.append(sample)
            self.offset += 1
            self.group += 1
            groups.append(group)
        return groups

    def add_samples(self, groups: list[list[Sample]]) -> None:
        self.buffer += groups
