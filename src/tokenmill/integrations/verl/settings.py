"""What verl's data config says, and where an item of a dataset comes from.

`Settings` are the names below ``data.tokenmill``, which verl hands on without looking at them
(``+data.tokenmill.seed=7`` on its command line). `ItemRows` maps item numbers to row numbers: our
order of every epoch, one epoch after the other, so that a trainer told ``total_epochs=1`` and
not to shuffle sees each epoch in an order of its own. It is a pure function of seed and number;
nothing is stored and a resume needs nothing but verl's own count.

verl makes a validation set by the same class and does not say so; it is known by its files, and
stays in the order of the files, once.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from tokenmill.errors import UsageError, check_one_of, check_positive
from tokenmill.integrations.hosts import check_names, stated_date
from tokenmill.sampling import ORDERS, FeistelOrder, Int64Array, Order, make_order, unroll

DATE_FLAG = "+data.tokenmill.date"
_STREAM_OF_SAMPLES = 1 << 16  # tells the draw of max_samples from every order of rows


@dataclass(frozen=True)
class Settings:
    """What verl has no name for: the keys of ``data.tokenmill``.

    Attributes:
        seed: Of the order; None: ``data.seed``, else 42.
        epochs: Epochs that the dataset holds, one after the other.
        order: feistel, sequential or miles.
        cache_dir: Where stores and indexes live.
        num_workers: Processes that prepare; 0 runs inline.
        train_on: SFT: as for `tokenmill.prepare`.
        turn_end: SFT: ``turn`` trains to the start of the next turn, as verl does, or ``stop``.
        thinking_opener: SFT: ``prompt`` leaves thinking that the generation prompt opens untrained,
            as verl does, or ``trained``.
        trailing: SFT: ``trim`` cuts a user turn at the end, which trains nothing, or ``reject``.
        media_root: SFT: directory of pictures; None: that of the row's file.
        date: For templates that print the date; None: the environment's ``TOKENMILL_DATE``.
        undo_shuffle: SFT: lay items out so that the shuffle of verl's SFT trainer yields our
            order; see `tokenmill.integrations.verl.SFTDataset`.
    """

    seed: int | None = None
    epochs: int = 1
    order: str = "feistel"
    cache_dir: str | None = None
    num_workers: int | None = None
    train_on: str | None = None
    turn_end: str = "turn"
    thinking_opener: str = "prompt"
    trailing: str = "trim"
    media_root: str | None = None
    date: str | None = None
    undo_shuffle: bool = False

    def __post_init__(self) -> None:
        check_one_of("data.tokenmill.order", self.order, ORDERS)
        check_positive("data.tokenmill.epochs", self.epochs)

    @classmethod
    def of(cls, config: Mapping[str, Any], files: Sequence[str]) -> Settings:
        """Those of a config, for a training or a validation set of these files."""
        stated = dict(config.get("tokenmill") or {})
        check_names(stated, [field.name for field in fields(cls)], "under data.tokenmill")
        if stated.get("seed") is None:
            stated["seed"] = 42 if config.get("seed") is None else config["seed"]
        stated["date"] = stated.get("date") or stated_date()
        if _is_validation(config, files):
            stated.update(order="sequential", epochs=1, undo_shuffle=False)
        return cls(**stated)


class ItemRows:
    """Item number → row number.

    Args:
        rows: Rows there are.
        settings: Seed, order and epochs.
        max_samples: As verl gives it: at most so many rows, -1 for all.
        shuffled: Whether ``max_samples`` are drawn rather than the first ones.
    """

    def __init__(
        self, rows: int, settings: Settings, max_samples: int = -1, *, shuffled: bool = False
    ) -> None:
        limited = max_samples is not None and 0 < max_samples < rows
        self.rows = max_samples if limited else rows
        seed = int(settings.seed or 0)
        self._draw: Order | None = None
        if limited and shuffled:
            self._draw = FeistelOrder(rows, seed, _STREAM_OF_SAMPLES)
        self._order = make_order(settings.order, self.rows, seed)
        self._epochs = settings.epochs

    def __len__(self) -> int:
        return self.rows * self._epochs

    def __call__(self, items: Int64Array) -> Int64Array:
        """Row numbers of items."""
        found = unroll(self._order, items)
        return found if self._draw is None else self._draw.indices(0, found)


def plain(value: Any) -> Any:
    """OmegaConf's containers as Python's own; everything else as it is."""
    if hasattr(value, "items"):
        return {str(name): plain(item) for name, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [plain(item) for item in value]
    return value


def file_list(files: Any) -> list[str]:
    """One path or several, with the home directory written out."""
    several = [files] if isinstance(files, str | os.PathLike) else list(files)
    return [os.path.expanduser(os.fspath(file)) for file in several]


def refuse_hooks(subclass: type, names: Sequence[str], why: str) -> None:
    """Refuse a subclass whose override of a method of verl's datasets would never be called."""
    for name in names:
        if name in vars(subclass):
            raise UsageError(
                f"{subclass.__name__}.{name} would never be called: {why}. Change the files "
                "beforehand, or override __getitem__"
            )


def _is_validation(config: Mapping[str, Any], files: Sequence[str]) -> bool:
    theirs, train = config.get("val_files"), config.get("train_files")
    if not theirs or file_list(theirs) != list(files):
        return False
    return not train or file_list(train) != list(files)
