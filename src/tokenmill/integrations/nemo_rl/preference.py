"""NeMo RL's pairs from a store, for its DPO and its reward models.

Comes in: a store, view or mixture of pairs. Goes out: a dataset whose items are what NeMo RL's
``preference_collate_fn`` takes, two message logs each. NeMo RL's ``setup_preference_data`` cannot
make it: whatever ``dataset_name`` says, it renders and encodes messages by a processor of its own.
So a script of one's own, a copy of ``run_dpo.py`` or ``run_rm.py``, makes it in that line's place.

Of each log the collator trains the last piece, which is the last trained stretch of the answer
(`message_log`): an answer of several turns is trained as NeMo RL trains its own, the last turn.
"""

from __future__ import annotations

from itertools import pairwise

from torch.utils import data as torch_data

from tokenmill.dataset import Mixture, View, as_view
from tokenmill.errors import UsageError
from tokenmill.integrations.hosts import Items
from tokenmill.integrations.nemo_rl.sft import TASK, Item, message_log
from tokenmill.loader import WholeRun
from tokenmill.loader.group_batches import group_kind
from tokenmill.sampling import Int64Array
from tokenmill.store import Store


class PreferenceLogs(Items[Item], torch_data.Dataset[Item]):  # type: ignore[misc]
    """Pairs as message logs in our order, one epoch after the other.

    Args:
        data: A store, a view or a mixture of pairs.
        seed: Of the order; None: as they stand.
        epochs: Epochs in the dataset.
    """

    def __init__(
        self, data: Store | View | Mixture, seed: int | None = 42, epochs: int = 1
    ) -> None:
        view = data.view if isinstance(data, Mixture) else as_view(data)
        if group_kind(view) != "preference":
            raise UsageError("NeMo RL's DPO and reward models take pairs, and this has other rows")
        order = "sequential" if seed is None else "feistel"
        self._run = WholeRun(data, epochs=epochs, seed=seed or 0, order=order, unit="groups")

    def __len__(self) -> int:
        return len(self._run)

    def items_at(self, numbers: Int64Array) -> list[Item]:
        """Both message logs of pairs."""
        packs = self._run.packs(numbers.tolist())
        logs = [message_log(row) for row in self._run.view.rows(packs.rows)]
        pairs = [logs[first:stop] for first, stop in pairwise(packs.bounds.tolist())]
        return [
            {
                "message_log_chosen": chosen,
                "message_log_rejected": rejected,
                "length_chosen": sum(len(piece["token_ids"]) for piece in chosen),
                "length_rejected": sum(len(piece["token_ids"]) for piece in rejected),
                "loss_multiplier": 1.0,
                "idx": number,
                "task_name": TASK,
            }
            for number, (chosen, rejected) in zip(numbers.tolist(), pairs, strict=True)
        ]
