"""Trees to rows: every sampled token is trained exactly once, after exactly what the sampler saw.

Trees come as ``tree`` and, where siblings differ in their first id, as ``trajectories``.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from tokenmill.errors import RowError
from tokenmill.rl.formats import read_rollouts
from tokenmill.rl.trajectory import cut_rows


def random_tree(rng: random.Random, *, distinct: bool) -> list[dict[str, Any]]:
    """Nodes with what each adds; sampled tokens have a log-probability of their own."""
    nodes: list[dict[str, Any]] = []
    for number in range(rng.randrange(1, 9)):
        parent = None if number == 0 else rng.randrange(number)
        size = rng.randrange(1, 5)
        ids = [rng.randrange(3) for _ in range(size)]
        if distinct:
            ids[0] = 10 + number  # siblings, and whoever goes on from their parent, part here
        mask = [rng.randrange(2) for _ in range(size)]
        logprobs = [-(100 * number + place) / 8 if bit else None for place, bit in enumerate(mask)]
        nodes.append({"parent": parent, "token_ids": ids, "loss_mask": mask, "logprobs": logprobs})
    return nodes


def sampled_tokens(nodes: list[dict[str, Any]]) -> Counter[tuple[tuple[int, ...], float]]:
    """(ids up to and including it, log-probability) of every sampled token."""
    found: Counter[tuple[tuple[int, ...], float]] = Counter()
    ways: list[list[int]] = []
    for node in nodes:
        way = [] if node["parent"] is None else list(ways[node["parent"]])
        for token, bit, logprob in zip(
            node["token_ids"], node["loss_mask"], node["logprobs"], strict=True
        ):
            way.append(token)
            if bit:
                found[tuple(way), logprob] += 1
        ways.append(way)
    return found


def trained_tokens(row: dict[str, Any]) -> Counter[tuple[tuple[int, ...], float]]:
    found: Counter[tuple[tuple[int, ...], float]] = Counter()
    for cut in cut_rows(read_rollouts(row)):
        ids = cut.ids.tolist()
        assert cut.logprobs is not None
        for place, bit in enumerate(cut.mask.tolist()):
            if bit:
                found[tuple(ids[: place + 1]), float(cut.logprobs[place])] += 1
            else:
                assert cut.logprobs[place] == 0
    return found


def trajectories(nodes: list[dict[str, Any]], rng: random.Random) -> list[dict[str, Any]]:
    """The way to every leaf, and to some inner nodes, each with the mask of its last node or all.

    So step-wise recorders write it: what was sampled before is context.
    """
    inner = {node["parent"] for node in nodes}
    stepwise = rng.random() < 0.5
    found = []
    for number in range(len(nodes)):
        if number in inner and not stepwise:
            continue
        way, step = [], number
        while step is not None:
            way.append(step)
            step = nodes[step]["parent"]
        row: dict[str, Any] = {"token_ids": [], "loss_mask": [], "logprobs": []}
        for node in reversed(way):
            own = node == number or not stepwise
            row["token_ids"] += nodes[node]["token_ids"]
            row["loss_mask"] += [bit if own else 0 for bit in nodes[node]["loss_mask"]]
            row["logprobs"] += nodes[node]["logprobs"]
        found.append(row)
    rng.shuffle(found)
    return found


@pytest.mark.parametrize("trees", [200, pytest.param(10_000, marks=pytest.mark.soak)])
def test_sampled_tokens_of_a_tree_are_trained_exactly_once(trees: int) -> None:
    for seed in range(trees):
        rng = random.Random(seed)
        nodes = random_tree(rng, distinct=False)
        if any(1 in node["loss_mask"] for node in nodes):
            assert trained_tokens({"tree": nodes}) == sampled_tokens(nodes), seed
        nodes = random_tree(rng, distinct=True)
        if any(1 in node["loss_mask"] for node in nodes):
            row = {"trajectories": trajectories(nodes, rng)}
            assert trained_tokens(row) == sampled_tokens(nodes), seed


def test_prefix_of_another_trajectory_gives_no_row() -> None:
    first = {"token_ids": [1, 2, 3], "loss_mask": [0, 1, 1]}
    whole = {"token_ids": [1, 2, 3, 4, 5], "loss_mask": [0, 0, 0, 0, 1], "reward": 0.5}
    [row] = cut_rows(read_rollouts({"trajectories": [first, whole]}))
    assert row.mask.tolist() == [0, 1, 1, 0, 1]
    assert row.trajectory.reward == 0.5


def test_choices_of_one_prompt_are_separate_samples() -> None:
    choice = {"token_ids": [7, 8], "message": {"role": "assistant", "content": "x"}}
    rows = cut_rows(read_rollouts({"prompt_token_ids": [1, 2], "choices": [choice, choice]}))
    assert [row.mask.tolist() for row in rows] == [[0, 0, 1, 1]] * 2


@pytest.mark.parametrize("parent", [1, -1, "0", 1.0])
def test_parent_must_be_an_earlier_node(parent: Any) -> None:
    nodes = [{"parent": None, "token_ids": [1], "loss_mask": 0},
             {"parent": parent, "token_ids": [2], "loss_mask": 1}]  # fmt: skip
    with pytest.raises(RowError, match="earlier node"):
        read_rollouts({"tree": nodes})
