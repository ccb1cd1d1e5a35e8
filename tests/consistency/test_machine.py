"""Any sequence of next, save, load, set_epoch, new geometry and crash equals a walk over lists.

Loops are over one epoch or over several (`repeat`), left and entered again anywhere.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    rule,
    run_state_machine_as_test,
)

from tests.consistency.cases import RANK_FREE, data_of, make_loader
from tests.consistency.corpus import Corpus
from tests.consistency.model import Model

GLOBAL = 6
SPLITS = {1: 6, 2: 3, 3: 2, 6: 1}  # ranks → samples per rank


class Trainer(RuleBasedStateMachine):
    corpus: Corpus
    name: str
    model: Model
    states = Bundle("states")

    @initialize(world=st.sampled_from(sorted(SPLITS)), prefetch=st.integers(0, 2))
    def begin(self, world: int, prefetch: int) -> None:
        self.at = (0, 0)
        self.first = 0
        self._start(world, prefetch, None)

    def _start(self, world: int, prefetch: int, state: Any) -> None:
        data = data_of(self.corpus, self.name)
        self.world = world
        self.loaders = [
            make_loader(data, self.name, rank=rank, world_size=world,
                        batch_size=SPLITS[world], prefetch=prefetch)
            for rank in range(world)
        ]  # fmt: skip
        if state is not None:
            for loader in self.loaders:
                loader.load_state_dict(json.loads(state))
        self._enter()

    def _enter(self) -> None:
        self.ended = False
        repeat = self.model.last == "wrap"
        self.iterators = [loader.repeat(2) if repeat else iter(loader) for loader in self.loaders]
        self._bound()

    def _bound(self) -> None:
        self.stop = self.first + 2 if self.model.last == "wrap" else self.at[0] + 1

    @rule(steps=st.integers(1, 5))
    def take(self, steps: int) -> None:
        for _ in range(steps):
            expected = None if self.ended else self.model.step(self.at, GLOBAL, self.stop)
            parts = [next(iterator, None) for iterator in self.iterators]
            if expected is None:
                assert parts == [None] * self.world
                self.ended = True
                return
            batch, self.at = expected
            found = [self.corpus.samples(part) for part in parts]  # type: ignore[arg-type]
            assert [sample for part in found for sample in part] == batch
            if len(batch) == GLOBAL:
                assert [len(part) for part in found] == [SPLITS[self.world]] * self.world

    @rule(target=states)
    def save(self) -> tuple[str, tuple[int, int], int]:
        states = [loader.state_dict() for loader in self.loaders]
        assert all(state == states[0] for state in states)
        assert (states[0]["epoch"], states[0]["position"]) == self.at
        return json.dumps(states[0]), self.at, self.first

    @rule()
    def count(self) -> None:
        """``len`` is the batches of the epoch, those before the position included."""
        epoch, position = self.at
        left = len(self.model.samples(epoch)) - position
        rest = left // GLOBAL if self.model.last == "drop" else -(-left // GLOBAL)
        assert {len(loader) for loader in self.loaders} == {position // GLOBAL + rest}

    @rule(saved=states)
    def load(self, saved: tuple[str, tuple[int, int], int]) -> None:
        state, self.at, self.first = saved
        for loader in self.loaders:
            loader.load_state_dict(json.loads(state))
        self._bound()

    @rule(saved=states, world=st.sampled_from(sorted(SPLITS)), prefetch=st.integers(0, 3))
    def crash_and_resume(
        self, saved: tuple[str, tuple[int, int], int], world: int, prefetch: int
    ) -> None:
        state, self.at, self.first = saved
        self._start(world, prefetch, state)

    @rule(epoch=st.integers(0, 3))
    def set_epoch(self, epoch: int) -> None:
        for loader in self.loaders:
            loader.set_epoch(epoch)
        if self.at[0] != epoch:
            self.at, self.first = (epoch, 0), epoch
            self._bound()

    @rule()
    def leave_the_loop_and_enter_again(self) -> None:
        self._enter()


@pytest.mark.parametrize("name", RANK_FREE)
@pytest.mark.parametrize(
    ("sequences", "steps"),
    [pytest.param(5, 20, marks=pytest.mark.slow), pytest.param(500, 60, marks=pytest.mark.soak)],
)
def test_any_sequence_of_actions_equals_the_lists(
    corpus: Corpus, name: str, sequences: int, steps: int
) -> None:
    given = {"corpus": corpus, "name": name, "model": Model(corpus, name)}
    run_state_machine_as_test(
        type(f"Trainer_{name}", (Trainer,), given),
        settings=settings(
            max_examples=sequences, stateful_step_count=steps, deadline=None, database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )  # fmt: skip
