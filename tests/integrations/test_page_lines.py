"""Run the configurations of docs/trainers/verl.md and axolotl.md, if these are installed."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import yaml
from scripts.trainer_signatures import commands, find_page, read_page

import tokenmill as tm
from tests.data.making import EXAMPLES

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copy(EXAMPLES / "conversations.jsonl", tmp_path / "chat.jsonl")
    prompt = '{"prompt": [{"role": "user", "content": "What is six times seven?"}]}\n'
    (tmp_path / "math.jsonl").write_text(prompt * 4, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def block_of(page: str, language: str, word: str = "") -> str:
    blocks = read_page(find_page(page)).blocks
    (block,) = [block for written, _, block in blocks if written == language and word in block]
    return block


def overrides(program: str) -> list[str]:
    for language, _, block in read_page(find_page("verl.md")).blocks:
        if language == "sh":
            for words in commands(block):
                if program in words:
                    return words[words.index(program) + 1 :]
    raise LookupError(program)


def composed(name: str, stated: list[str]) -> Any:
    hydra = pytest.importorskip("hydra")
    import verl

    where = Path(verl.__file__).parent / "trainer" / "config"
    with hydra.initialize_config_dir(str(where), version_base=None):
        return hydra.compose(name, overrides=[*stated, "+data.tokenmill.num_workers=0"])


@pytest.fixture
def tokenizer() -> Any:
    pytest.importorskip("verl", reason="verl is not installed: its page's names are looked up only")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import AutoTokenizer
    return AutoTokenizer.from_pretrained(EXAMPLES / "tokenizer")


@pytest.mark.usefixtures("workplace")
def test_verl_makes_the_sft_dataset_that_the_page_names(tokenizer: Any) -> None:
    config = composed("sft_trainer_engine", overrides("verl.trainer.sft_trainer"))
    from verl.trainer.sft_trainer import create_sft_dataset

    dataset = create_sft_dataset(config.data.train_files, config.data, tokenizer, processor=None)
    assert type(dataset).__module__.startswith("tokenmill")
    assert {"input_ids", "loss_mask"} <= set(dataset[0])


@pytest.mark.usefixtures("workplace")
def test_verl_makes_the_rl_dataset_that_the_page_names(tokenizer: Any) -> None:
    config = composed("ppo_trainer", overrides("verl.trainer.main_ppo"))
    from verl.trainer.ppo.utils import create_rl_dataset

    dataset = create_rl_dataset(config.data.train_files, config.data, tokenizer, processor=None)
    assert type(dataset).__module__.startswith("tokenmill")
    assert len(dataset) == 4 * 15  # rows × epochs, as the page says
    assert dataset[0]["raw_prompt"][0]["role"] == "user"


def test_verl_takes_the_builder_of_the_page(tokenizer: Any) -> None:
    """docs/guides/bridge.md: what verl calls is ours, and appends what the template prints."""
    space: dict[str, Any] = {}
    exec(block_of("guides/bridge.md", "py", "BridgeBuilder"), space)
    builder = space["builder"](tokenizer, ())
    asked = [{"role": "user", "content": "What is six times seven?"}]
    ids = builder.build_initial_tokens(asked, tools=None, images=None, mm_inputs_out={})
    ids += tokenizer.encode("Let me count.<|im_end|>", add_special_tokens=False)
    said = [*asked, {"role": "assistant", "content": "Let me count."}]
    merged = builder.merge_context_tokens(said, [*said, {"role": "user", "content": "Do."}], ids)
    assert merged.token_ids[: len(ids)] == ids
    added = tokenizer.decode(merged.token_ids[len(ids) :])
    assert added == "\n<|im_start|>user\nDo.<|im_end|>\n<|im_start|>assistant\n"
    assert merged.appended_token_count == len(merged.token_ids) - len(ids)


def test_axolotl_loads_what_the_page_names(workplace: Path) -> None:
    pytest.importorskip(
        "axolotl.utils", reason="axolotl is not installed: its page's names are looked up only"
    )
    from axolotl.utils.data.shared import load_dataset_with_config
    from axolotl.utils.dict import DictDefault

    store = tm.prepare("chat.jsonl", tokenizer=EXAMPLES / "tokenizer", num_workers=0)
    (entry,) = yaml.safe_load(block_of("axolotl.md", "yaml"))["datasets"]
    tm.export(store, "hf", entry["path"])
    rows = load_dataset_with_config(DictDefault(entry), use_auth_token=False)
    assert set(rows.column_names) == {"input_ids", "attention_mask", "labels"}
    assert rows[3]["input_ids"] == store[3].input_ids.tolist()
    assert entry["type"] is None  # a dataset that is tokenized already
