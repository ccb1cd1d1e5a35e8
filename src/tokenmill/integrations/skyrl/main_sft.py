"""SkyRL's ``skyrl.train.main_sft`` with datasets prepared by tokenmill."""

from __future__ import annotations

from typing import Any

from tokenmill._core.optional import optional
from tokenmill.integrations.skyrl.data import as_task, eval_from_config, from_config

with optional("skyrl", "this program"):
    from skyrl.train import main_sft as original

_SKYRL_TASK = original.sft_entrypoint  # before `main` replaces it


class Trainer(original.SFTTrainer):  # type: ignore[misc]
    def load_dataset(self) -> Any:
        return from_config(self.sft_cfg, tokenizer=self.tokenizer)

    def load_eval_datasets(self) -> Any:
        return eval_from_config(self.sft_cfg, tokenizer=self.tokenizer)


def sft_entrypoint(cfg: Any, skyrl_cfg: Any) -> None:
    """The body of SkyRL's Ray task, with our trainer class where it looks for its own."""
    original.SFTTrainer = Trainer
    _SKYRL_TASK._function(cfg, skyrl_cfg)


def main() -> None:
    original.sft_entrypoint = as_task(sft_entrypoint)
    original.main()


if __name__ == "__main__":
    # Not this module's `main`: Ray pickles functions of __main__ by value, without their globals.
    from tokenmill.integrations.skyrl import main_sft

    main_sft.main()
