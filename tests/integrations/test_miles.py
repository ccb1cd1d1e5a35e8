"""The data source of miles and slime: driven by flags, saved, loaded, given rollouts back."""

from __future__ import annotations

import copy
import importlib.util
import json
import pickle
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

import tokenmill
from tests.data.making import EXAMPLES, PROMPTS, TOKENIZER, write_rows
from tests.integrations.conftest import stand_in
from tests.integrations.stand_in_miles import EagerSource, Sample, flags, install
from tests.programs import python
from tests.sampling import sampled
from tokenmill._core import fingerprint
from tokenmill.errors import CorruptionError, SourceError, StateError, UsageError
from tokenmill.integrations import miles
from tokenmill.integrations.miles import saved, source
from tokenmill.tokenizers.loading import identify


def look_at(tokenizer: Path, cache: Path) -> None:
    """What else a worker would do, which has to import torch for it; here it is imported."""
    identify(tokenizer, cache_dir=cache, backend="transformers", trust_remote_code=True)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("miles-cache")
    if importlib.util.find_spec("transformers"):
        look_at(TOKENIZER, place)
    return place


@pytest.fixture(autouse=True)
def framework(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, cache: Path) -> str:
    name = str(getattr(request, "param", "miles"))
    monkeypatch.setenv("TOKENMILL_CACHE_DIR", str(cache))
    install(monkeypatch, name)
    return name


both_frameworks = pytest.mark.parametrize("framework", ["miles", "slime"], indirect=True)
LIMIT = 36


def described(**stated: Any) -> Any:
    return flags(
        **{
            "prompt_data": str(PROMPTS),
            "hf_checkpoint": str(TOKENIZER),
            "input_key": "text",
            "label_key": "label",
            "apply_chat_template": True,
            "rollout_max_prompt_len": LIMIT,
            "n_samples_per_prompt": 2,
            **stated,
        }
    )


def eager_samples(tokenizer: Any) -> list[Sample]:
    kept = []
    for line in PROMPTS.read_text().splitlines():
        row = json.loads(line)
        talk = [{"role": "user", "content": row["text"]}]
        text = tokenizer.apply_chat_template(talk, tokenize=False, add_generation_prompt=True)
        if len(tokenizer(text, add_special_tokens=False)["input_ids"]) <= LIMIT:
            metadata = row.get("metadata") or {}
            kept.append(Sample(prompt=text, label=row["label"], metadata=metadata))
    return kept


def detail(groups: list[list[Any]]) -> list[list[dict[str, Any]]]:
    return [
        [{k: v for k, v in sample.to_dict().items() if k != source.ROW} for sample in group]
        for group in groups
    ]


def partial(groups: list[list[Any]], step: int) -> list[list[Any]]:
    """The groups of a step that were not finished, with what they have so far."""
    unfinished = groups[step % 3 :: 4]
    for group in unfinished:
        for sample in group:
            sample.response = f"so far {step}"
            sample.tokens = [1, 2, step]
            sample.status = Sample.Status.ABORTED
            sample.metadata["start_rollout_id"] = step
    return unfinished


@both_frameworks
@pytest.mark.parametrize("shuffled", [True, False])
def test_source_over_three_epochs_with_partial_rollouts_equals_the_eager_one(
    tmp_path: Path, tokenizer: Any, shuffled: bool
) -> None:
    args = described(save=str(tmp_path), load=str(tmp_path), rollout_shuffle=shuffled)
    ours, theirs = miles.DataSource(args), EagerSource(args, eager_samples(tokenizer))
    assert len(ours) == len(ours.dataset or ()) == len(theirs.origin)
    assert 8 < len(ours) < 50
    ours.update_metadata({"seen": 1})
    step = 0
    while theirs.epoch < 3:
        count = (7, 11, 5)[step % 3]
        mine, wanted = ours.get_samples(count), theirs.get_samples(count)
        assert detail(mine) == detail(wanted)
        ours.add_samples(partial(mine, step))
        theirs.add_samples(partial(wanted, step))
        assert ours.get_buffer_length() == len(theirs.buffer) > 0
        assert (ours.epoch_id, ours.sample_offset) == (theirs.epoch, theirs.offset)
        if step % 2:
            ours.save(step)
            ours = miles.DataSource(args)
            ours.load(step)
            assert ours.get_metadata() == {"seen": 1}
        step += 1
    assert step > 6


def test_groups_share_no_data_and_have_increasing_numbers(tokenizer: Any) -> None:
    ours = miles.DataSource(described(n_samples_per_prompt=3))
    first, second = ours.get_samples(2)
    assert [s.index for s in first + second] == list(range(6))
    assert [s.group_index for s in first + second] == [0] * 3 + [1] * 3
    first[0].metadata["mine"] = 1
    assert "mine" not in first[1].metadata
    assert ours.get_samples(0) == []


def test_environment_selects_our_order(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = [group[0].prompt for group in miles.DataSource(described()).get_samples(9)]
    monkeypatch.setenv("TOKENMILL_ORDER", "feistel")
    ours = miles.DataSource(described())
    assert ours.dataset is not None
    assert ours.dataset.order == "feistel"
    assert [group[0].prompt for group in ours.get_samples(9)] != theirs


def test_date_comes_from_the_environment_and_the_refusal_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = tmp_path / "t.jinja"
    template.write_text("{{ strftime_now('%Y') }}{{ messages[0].content }}")
    args = described(chat_template_path=str(template))
    monkeypatch.delenv("TOKENMILL_DATE", raising=False)
    with pytest.raises(tokenmill.errors.TemplateError, match="TOKENMILL_DATE"):
        miles.DataSource(args)
    monkeypatch.setenv("TOKENMILL_DATE", "2026-11-15")
    assert miles.DataSource(args).get_samples(1)[0][0].prompt.startswith("2026")


def newest(args: Any, rollout_id: Any, buffer: list[Any], count: int) -> list[Any]:
    taken = buffer[-count:]
    del buffer[-count:]
    return taken


def test_custom_buffer_filter_is_called() -> None:
    path = f"{newest.__module__}.newest"
    sys.modules.setdefault(newest.__module__, sys.modules[__name__])
    ours = miles.DataSource(described(buffer_filter_path=path))
    groups = ours.get_samples(3)
    ours.add_samples(groups)
    assert ours.get_samples(1) == [groups[2]]
    with pytest.raises(UsageError, match=r"nothing\.here"):
        miles.DataSource(described(buffer_filter_path="nothing.here"))


def test_groups_of_another_size_are_refused() -> None:
    ours = miles.DataSource(described())
    with pytest.raises(UsageError, match="n_samples_per_prompt"):
        ours.add_samples([[Sample()]])
    with pytest.raises(UsageError, match="list of groups"):
        ours.add_samples([Sample()])  # type: ignore[list-item]
    ours.add_samples([])
    assert ours.get_buffer_length() == 0


def test_source_without_a_global_dataset_gives_empty_samples(tmp_path: Path) -> None:
    args = described(rollout_global_dataset=False, save=str(tmp_path), load=str(tmp_path))
    ours = miles.DataSource(args)
    assert (len(ours), ours.dataset) == (0, None)
    assert [len(group) for group in ours.get_samples(3)] == [2, 2, 2]
    ours.save(1)
    ours.load(1)
    assert list(tmp_path.iterdir()) == []


def test_state_that_is_damaged_or_of_other_data_is_refused(tmp_path: Path) -> None:
    args = described(save=str(tmp_path), load=str(tmp_path))
    ours = miles.DataSource(args)
    ours.add_samples(ours.get_samples(2))
    ours.save(4)
    path = saved.state_path(str(tmp_path), 4)
    good = path.read_bytes()
    ours.load(None)  # nothing was saved under that name: starting from the beginning
    half = good[: len(good) // 2]
    for damage in (good[:-1], good + b"x", half, b"{}\n", b"", good[:-9] + b"\0" * 9):
        path.write_bytes(damage)
        with pytest.raises(CorruptionError):
            miles.DataSource(args).load(4)
    path.write_bytes(good.replace(b'"version":2}', b'"version":9}'))
    with pytest.raises(StateError, match="version 9"):
        miles.DataSource(args).load(4)
    path.write_bytes(good)
    for name, value in (
        ("rollout_seed", 1), ("rollout_max_prompt_len", 35), ("n_samples_per_prompt", 1)
    ):  # fmt: skip
        with pytest.raises(StateError):
            miles.DataSource(described(load=str(tmp_path), **{name: value})).load(4)
    with pytest.raises(UsageError, match="--save"):
        miles.DataSource(described()).save(4)


def test_value_that_would_need_pickle_is_refused_with_its_location(tmp_path: Path) -> None:
    ours = miles.DataSource(described(save=str(tmp_path)))
    groups = ours.get_samples(1)
    groups[0][1].metadata["found"] = [1, Path("x")]
    ours.add_samples(groups)
    with pytest.raises(UsageError, match=r"\['buffer'\]\[0\]\[1\]\['metadata'\]\['found'\]\[1\]"):
        ours.save(1)
    assert not saved.state_path(str(tmp_path), 1).exists()


def forge(args: Any, body: bytes) -> None:
    miles.DataSource(args).save(4)
    path = saved.state_path(args.save, 4)
    head = json.loads(path.read_bytes().partition(b"\n")[0])
    seal = fingerprint.checksum(fingerprint.canonical(head["state"]) + body)
    forged = {**head, "seal": seal}
    path.write_bytes(fingerprint.canonical(forged) + b"\n" + body)


class Trap:
    """Records that it was unpickled."""

    def __reduce__(self) -> Any:
        return print, ("unpickled",)


def tagged(kind: int, value: Any) -> bytes:
    tag = msgspec.msgpack.Ext(kind, msgspec.msgpack.encode(value))
    return msgspec.msgpack.encode({"metadata": {}, "buffer": [tag]})


@pytest.mark.parametrize(
    "body",
    [
        pickle.dumps({"metadata": {"x": Trap()}, "buffer": []}),
        msgspec.msgpack.encode({"metadata": {}}),
        msgspec.msgpack.encode({"metadata": 3, "buffer": []}),
        msgspec.msgpack.encode({"metadata": {}, "buffer": [[3]]}),
        tagged(99, None),
        tagged(2, [[[], 1]]),  # a key that is a list
        tagged(6, ["O", [1], False, b"x" * 8]),  # an array of objects
        tagged(7, ["load", [1], b"x"]),  # torch.load is no type of numbers
    ],
)
def test_checksummed_state_with_other_fields_is_corrupt_and_runs_no_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], body: bytes
) -> None:
    """A checksum is not a signature: anyone who can write the file can compute it."""
    args = described(save=str(tmp_path), load=str(tmp_path))
    forge(args, body)
    with pytest.raises(CorruptionError):
        miles.DataSource(args).load(4)
    assert capsys.readouterr().out == ""


def test_state_is_replaced_atomically(tmp_path: Path) -> None:
    args = described(save=str(tmp_path), load=str(tmp_path))
    ours = miles.DataSource(args)
    for count in (3, 5):
        ours.get_samples(count)
        ours.save(0)
    again = miles.DataSource(args)
    again.load(0)
    assert again.sample_offset == 8
    assert [path.name for path in (tmp_path / "rollout").iterdir()] == [
        "tokenmill_data_source_0.state"
    ]


@both_frameworks
def test_state_of_the_frameworks_own_source_is_loaded(tmp_path: Path, tokenizer: Any) -> None:
    torch = pytest.importorskip("torch")
    args = described(load=str(tmp_path))
    theirs = EagerSource(args, eager_samples(tokenizer))
    theirs.get_samples(len(theirs.origin) + 4)
    (tmp_path / "rollout").mkdir()
    state = {
        "sample_offset": theirs.offset,
        "epoch_id": theirs.epoch,
        "sample_group_index": theirs.group,
        "sample_index": theirs.index,
        "metadata": {"a": 1},
    }
    torch.save(state, tmp_path / "rollout" / "global_dataset_state_dict_3.pt")
    ours = miles.DataSource(args)
    ours.load(3)
    assert detail(ours.get_samples(9)) == detail(theirs.get_samples(9))
    assert ours.metadata == {"a": 1}


@both_frameworks
def test_sft_rollout_fills_samples_from_the_store(tmp_path: Path, caplog: Any) -> None:
    lines = (EXAMPLES / "conversations.jsonl").read_text().splitlines()[:30]
    unanswered = {"messages": [{"role": "user", "content": "nobody answered"}]}
    rows = write_rows(tmp_path / "talks.jsonl", [*lines, unanswered])
    args = described(
        prompt_data=str(rows), input_key="messages", label_key=None, apply_chat_template=False,
        n_samples_per_prompt=1, rollout_batch_size=10,
    )  # fmt: skip
    data = miles.DataSource(args)
    assert len(data) == 31
    store = tokenmill.prepare(
        rows, TOKENIZER, tokenizer_backend="transformers", turn_end="turn", executor="inline"
    )
    by_line = {row.origin.line: row for row in store}
    seen = []
    for step in range(4):
        for (sample,) in miles.sft_rollout(args, step, data):
            row = by_line[getattr(sample, source.ROW) + 1]
            assert sample.tokens == row.input_ids.tolist()
            first = int(np.flatnonzero(row.loss_mask)[0])
            assert sample.response_length == len(row.input_ids) - first
            assert sample.loss_mask == row.loss_mask[first:].tolist()
            assert sample.loss_mask[0] == 1
            assert sample.reward == 0
            seen.append(row.origin.line)
    assert len(seen) == 40
    assert sorted(seen[:30]) == list(range(1, 31))
    assert "rows skipped" in caplog.text


def trained(rows: Path, tokenizer: Path) -> list[tuple[list[int], list[int]]]:
    """Ids and whole mask of every row of a file, as `sft_rollout` fills them, in order."""
    args = flags(
        prompt_data=str(rows), hf_checkpoint=str(tokenizer), input_key="messages",
        rollout_shuffle=False, rollout_batch_size=len(rows.read_text().splitlines()),
    )  # fmt: skip
    filled = [group[0] for group in miles.sft_rollout(args, 0, miles.DataSource(args))]
    return [
        (one.tokens, [0] * (len(one.tokens) - one.response_length) + one.loss_mask)
        for one in filled
    ]


@pytest.mark.parametrize(
    ("tokenizer", "kind"), sampled([("qwen3", "qwen3"), ("qwen2.5", "qwen")], 2)
)
def test_masks_equal_the_frameworks_golden_masks(
    tokenizer: str, kind: str, shared: Path, tmp_path: Path, cache: Path
) -> None:
    look_at(shared / "tokenizers" / tokenizer, cache)
    path = shared / "golden" / "miles" / f"mask-{tokenizer}-{kind}.jsonl"
    golden = [json.loads(line) for line in path.read_text().splitlines()]
    # In the other rows, miles' concatenated messages differ from the template's text, tokenmill
    # removes an unanswered last turn, or a token contains both header and answer.
    whole = [
        one
        for one in golden
        if one["token_ids_equal_whole_render"]
        and one["messages"][-1]["role"] == "assistant"
        and not any(message["content"].startswith("\n") for message in one["messages"])
    ]
    rows = write_rows(tmp_path / "golden.jsonl", ({"messages": one["messages"]} for one in whole))
    assert len(whole) > 60
    for (ids, mask), one in zip(
        trained(rows, shared / "tokenizers" / tokenizer), whole, strict=True
    ):
        assert ids == one["token_ids"]
        assert mask == [int(bit) for bit in one["loss_mask"]]


def test_sft_rollout_trains_the_end_of_a_turn_as_the_frameworks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokenizer: Any
) -> None:
    said = zip(("user", "assistant", "user"), ("one", "two", "three"), strict=True)
    talk = [{"role": role, "content": text} for role, text in said]
    rows = write_rows(tmp_path / "talk.jsonl", [{"messages": talk}])
    for turn_end, closing in ((None, "<|im_end|>\n"), ("stop", "<|im_end|>")):
        if turn_end:
            monkeypatch.setenv("TOKENMILL_TURN_END", turn_end)
        ((ids, mask),) = trained(rows, TOKENIZER)
        chosen = [number for number, bit in zip(ids, mask, strict=True) if bit]
        assert tokenizer.decode(chosen) == f"two{closing}"
        assert "three" not in tokenizer.decode(ids)  # it has no answer


def test_sft_rollout_refuses_what_it_cannot_do(tmp_path: Path, monkeypatch: Any) -> None:
    args = described(n_samples_per_prompt=1)
    data = miles.DataSource(args)
    with pytest.raises(UsageError, match="--eval-function-path"):
        miles.sft_rollout(args, 0, data, evaluation=True)
    with pytest.raises(UsageError, match="--data-source-path"):
        miles.sft_rollout(args, 0, object())
    other = tokenmill.prepare(
        EXAMPLES / "conversations.jsonl", TOKENIZER, tokenizer_backend="file", executor="inline"
    )
    monkeypatch.setenv("TOKENMILL_STORE", str(other.path))
    with pytest.raises(tokenmill.errors.SourceError, match="other data"):
        miles.sft_rollout(args, 0, data)


def test_import_needs_no_framework_but_construction_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    program = (
        "import sys, tokenmill.integrations.miles as m; m.DataSource, m.sft_rollout\n"
        "print([n for n in ('miles', 'slime', 'torch', 'transformers') if n in sys.modules])"
    )
    answer = python(program)
    assert answer.stdout == "[]\n", answer.stderr
    for name in ("miles", "slime"):
        monkeypatch.setitem(sys.modules, f"{name}.utils.types", None)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="miles or slime"):
        miles.DataSource(described())


# Evaluation


class HostDataset:
    """The frameworks' own class of evaluation sets, which reads all rows."""


def evaluation_modules(framework: str, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    names = (f"{framework}.utils.data", f"{framework}.rollout.sglang_rollout")
    return [stand_in(monkeypatch, name, Dataset=HostDataset) for name in names]


def evaluated(dataset: Any, times: int) -> list[Any]:
    made: list[Any] = []
    for sample in dataset.samples:
        for _ in range(times):
            one = copy.deepcopy(sample)
            one.index = len(made)
            made.append(one)
    return made


@both_frameworks
def test_evaluation_sets_are_served_if_the_environment_requests_it(
    framework: str, tokenizer: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    modules = evaluation_modules(framework, monkeypatch)
    miles.DataSource(described())
    assert [module.Dataset for module in modules] == [HostDataset] * 2
    monkeypatch.setenv("TOKENMILL_EVAL", "1")
    miles.DataSource(described(prompt_data=None, hf_checkpoint=str(tmp_path)))
    last = described()
    miles.DataSource(last)  # a second source in the process, of other flags
    assert all(module.Dataset.flags.args is last for module in modules)
    asked: dict[str, Any] = {
        "path": str(PROMPTS), "tokenizer": tokenizer, "processor": None, "prompt_key": "text",
        "label_key": "label", "tool_key": None, "metadata_key": None, "multimodal_keys": None,
        "apply_chat_template_kwargs": {},
    }  # fmt: skip
    for module in modules:
        dataset = module.Dataset(**asked, max_length=LIMIT, apply_chat_template=True)
        expected = evaluated(SimpleNamespace(samples=eager_samples(tokenizer)), 2)
        assert evaluated(dataset, 2) == expected
        assert len(dataset) == len(dataset.samples) > 20
        assert dataset.samples[3] is not dataset.samples[3]
    with pytest.raises(SourceError, match="no prompt left"):
        modules[1].Dataset(**asked, max_length=1, apply_chat_template=True)
    monkeypatch.setenv("TOKENMILL_EVAL", "yes")
    with pytest.raises(UsageError, match=r"TOKENMILL_EVAL must be .* got 'yes'"):
        miles.DataSource(described())
