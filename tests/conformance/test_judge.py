"""The judge of `make conformance`: it sees every fault that is put into a row, and no other.

Rows are laid out by hand, a token per word or marker, so that each fault is one edit of a mask or
of ids that are right. A host's row that is right has no fault: the judge must not invent any.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from conformance.conversations import Case, forms, plant, shapes
from conformance.judge import (
    CONTENT_FAULTS,
    FAULTS,
    MASK_FAULTS,
    Answer,
    Question,
    Verdict,
    difference,
    judge,
)
from conformance.page import Host, Judged, OwnTests, render
from conformance.reference import Glue

CLOSER = "<|end|>"
HEADER = "<|start|>assistant"
GLUE = Glue(HEADER.encode(), frozenset([len(CLOSER)]))
Token = tuple[str, int]
"""What a token stands for, and whether it is trained."""


def identify(piece: str) -> int:
    """An id for a piece; the closer's is its length, which no other piece here has."""
    return len(CLOSER) if piece == CLOSER else 1000 + sum(map(ord, piece))


def laid_out(case: Case, trains: str = "every") -> list[Token]:
    """The tokens of a row under a small template, masked as they should be."""
    tokens: list[Token] = []
    answers = [n for n, m in enumerate(case.row["messages"]) if m["role"] == "assistant"]
    wanted = answers if trains == "every" else answers[-1:]
    for number, message in enumerate(case.row["messages"]):
        trained = int(number in wanted)
        tokens += [("<|start|>", 0), (message["role"], 0), ("\n", 0)]
        tokens += [(word + " ", trained) for word in message["content"].split()]
        tokens += [(CLOSER, trained), ("\n", 0)]
    return tokens


def as_answer(tokens: Sequence[Token]) -> Answer:
    pieces = [piece for piece, _ in tokens]
    return Answer(
        [identify(piece) for piece in pieces],
        [trained for _, trained in tokens],
        [piece.encode() for piece in pieces],
    )


TALK: dict[str, Any] = {
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "How warm?"},
        {"role": "assistant", "content": "Thirty degrees."},
        {"role": "user", "content": "Thanks."},
        {"role": "assistant", "content": "You are welcome."},
    ]
}


@pytest.fixture
def case() -> Case:
    return plant("talk", TALK)


def verdict_of(case: Case, tokens: Sequence[Token], trains: str = "every") -> Verdict:
    right = as_answer(laid_out(case))
    question = Question(case, right.ids, right.pieces, GLUE, trains)
    return judge(question, as_answer(tokens))


def place(tokens: Sequence[Token], piece: str, nth: int = 0) -> int:
    return [n for n, (text, _) in enumerate(tokens) if text.strip() == piece.strip()][nth]


def with_mask(tokens: list[Token], at: int, trained: int) -> list[Token]:
    return [*tokens[:at], (tokens[at][0], trained), *tokens[at + 1 :]]


def words(case: Case, message: int) -> list[str]:
    return [word.text for word in case.words if word.message == message]


@pytest.mark.parametrize("trains", ["every", "last"])
def test_right_row_has_no_fault(case: Case, trains: str) -> None:
    verdict = verdict_of(case, laid_out(case, trains), trains)
    assert verdict == Verdict("same")
    assert verdict.clean


@pytest.mark.parametrize("role", ["system", "user"])
def test_trained_word_of_another_role_is_seen(case: Case, role: str) -> None:
    tokens = laid_out(case)
    word = next(word.text for word in case.words if word.role == role)
    verdict = verdict_of(case, with_mask(tokens, place(tokens, word), 1))
    assert verdict.kinds(MASK_FAULTS) == ["other_role"]
    assert word in verdict.faults[0].excerpt


@pytest.mark.parametrize(("message", "fault"), [(1, "other_role"), (2, "answer")])
def test_half_a_word_is_enough(case: Case, message: int, fault: str) -> None:
    """A tokenizer cuts words, and a mask may begin inside of one."""
    tokens = laid_out(case)
    at = place(tokens, words(case, message)[0])
    piece = tokens[at][0]
    tokens[at : at + 1] = [(piece[:3], 0), (piece[3:], 1)]
    assert verdict_of(case, tokens).kinds(MASK_FAULTS) == [fault]


def test_untrained_word_of_an_answer_is_seen(case: Case) -> None:
    tokens = laid_out(case)
    verdict = verdict_of(case, with_mask(tokens, place(tokens, words(case, 2)[0]), 0))
    assert verdict.kinds(MASK_FAULTS) == ["answer"]


def test_earlier_answer_is_not_to_be_trained_where_the_last_is(case: Case) -> None:
    verdict = verdict_of(case, laid_out(case, "every"), "last")
    assert verdict.kinds(MASK_FAULTS) == ["other_turn"]


@pytest.mark.parametrize("piece", ["<|start|>", "assistant"])
def test_trained_header_is_seen(case: Case, piece: str) -> None:
    tokens = laid_out(case)
    at = place(tokens, words(case, 2)[0])
    header = max(n for n in range(at) if tokens[n][0] == piece)
    assert verdict_of(case, with_mask(tokens, header, 1)).kinds(FAULTS) == ["header"]


def test_trained_header_of_the_next_turn_is_seen(case: Case) -> None:
    tokens = laid_out(case)
    header = place(tokens, "<|start|>", 3)
    assert verdict_of(case, with_mask(tokens, header, 1)).kinds(FAULTS) == ["header"]


@pytest.mark.parametrize("answer", [2, 4])
def test_untrained_closer_is_seen(case: Case, answer: int) -> None:
    tokens = laid_out(case)
    closer = place(tokens, CLOSER, answer)
    assert verdict_of(case, with_mask(tokens, closer, 0)).kinds(FAULTS) == ["stop"]


def test_white_space_is_noted_and_no_fault(case: Case) -> None:
    tokens = laid_out(case)
    before = place(tokens, words(case, 2)[0]) - 1
    behind = place(tokens, CLOSER, 2) + 1
    verdict = verdict_of(case, with_mask(with_mask(tokens, before, 1), behind, 1))
    assert verdict.clean
    assert {note.kind for note in verdict.notes} == {"header_space", "behind_closer"}


def test_lost_doubled_and_added_words_are_seen(case: Case) -> None:
    tokens = laid_out(case)
    word = words(case, 1)[0]
    at = place(tokens, word)
    lost = verdict_of(case, tokens[:at] + tokens[at + 1 :])
    assert (lost.ids, lost.kinds(CONTENT_FAULTS)) == ("other", ["lost"])
    doubled = verdict_of(case, [*tokens[:at], tokens[at], *tokens[at:]])
    assert (doubled.ids, doubled.kinds(CONTENT_FAULTS)) == ("other", ["doubled"])
    right = as_answer(tokens[:at] + tokens[at + 1 :])  # the model's own render drops the word
    question = Question(case, right.ids, right.pieces, GLUE)
    assert judge(question, as_answer(tokens)).kinds(CONTENT_FAULTS) == ["added"]
    assert judge(question, right).kinds(CONTENT_FAULTS) == ["lost_by_template"]


def test_thinking_of_the_history_may_be_dropped_by_the_template() -> None:
    said = "<think>\nHm.\n</think>\n\nThirty."
    talk = [
        {"role": "user", "content": "How warm?"},
        {"role": "assistant", "content": said},
        {"role": "user", "content": "And now?"},
        {"role": "assistant", "content": said},
    ]
    case = plant("thinking", {"messages": talk})
    thoughts = [word for word in case.words if word.part == "thinking"]
    assert {word.message for word in thoughts} == {1, 3}

    def without(message: int) -> Verdict:
        gone = {word.text for word in thoughts if word.message == message}
        row = as_answer([token for token in laid_out(case) if token[0].strip() not in gone])
        return judge(Question(case, row.ids, row.pieces, GLUE), row)

    assert without(1).clean
    assert without(3).kinds(FAULTS) == ["lost_by_template"]


def test_ids_are_told_apart(case: Case) -> None:
    tokens = laid_out(case)
    assert verdict_of(case, [*tokens, ("<|endoftext|>", 1)]).ids == "tail"
    assert verdict_of(case, tokens[:-1]).ids == "tail"
    assert verdict_of(case, [*tokens, *[("more ", 0)] * 8]).ids == "tail"
    assert verdict_of(case, [*tokens, *[("more ", 0)] * 9]).ids == "other"
    first = tokens[0][0]
    cut = [(first[:2], 0), (first[2:], 0), *tokens[1:]]
    assert verdict_of(case, cut).ids == "retokenized"
    assert verdict_of(case, [("<bos>", 0), *tokens]).ids == "other"
    last = place(tokens, words(case, 4)[-1])
    assert verdict_of(case, tokens[:last]).ids == "other"  # a word is missing: no mere tail


def test_difference_shows_both(case: Case) -> None:
    right = as_answer(laid_out(case))
    other = as_answer([(piece.replace("Thanks.", "Danke."), t) for piece, t in laid_out(case)])
    shown = difference(Question(case, right.ids, right.pieces, GLUE), other)
    own, theirs = shown.split(" ≠ ")
    assert "Thanks." in own
    assert "Danke." in theirs


def test_mask_of_another_length_is_refused(case: Case) -> None:
    right = as_answer(laid_out(case))
    with pytest.raises(ValueError, match="ids and"):
        judge(
            Question(case, right.ids, right.pieces, GLUE),
            Answer(right.ids, right.mask[:-1], right.pieces),
        )


def test_words_are_unique_and_at_both_ends_of_every_text() -> None:
    for case in shapes():
        text = json.dumps(case.row)
        assert all(text.count(word.text) == 1 for word in case.words), case.name
        for number, message in enumerate(case.row["messages"]):
            own = [word.text for word in case.words if word.message == number]
            assert own, (case.name, number)
            said = [w.text for w in case.words if w.message == number and w.part == "content"]
            content = (message["content"] or "").split("</think>")[-1].strip()
            if content:
                assert content.startswith(said[0])
                assert content.endswith(said[-1])


def test_forms_differ_in_arguments_and_nulls_alone() -> None:
    case = next(case for case in shapes() if case.name.startswith("arguments as JSON"))
    before = json.dumps(case.row)
    given = case.row["messages"][1]["tool_calls"][0]["function"]["arguments"]
    found = [
        (row["messages"][1]["content"], row["messages"][1]["tool_calls"][0]["function"])
        for row in forms(case.row)
    ]
    decoded = json.loads(given)
    contents = [content for content, _ in found]
    assert contents == ["", None, "", None]
    assert [call["arguments"] for _, call in found] == [decoded, decoded, given, given]
    assert all(row["messages"][0] == case.row["messages"][0] for row in forms(case.row))
    assert json.dumps(case.row) == before  # what the hosts get is left as it is


def test_empty_content_stays_empty() -> None:
    case = next(case for case in shapes() if case.name == "a call")
    assert {row["messages"][1]["content"] for row in forms(case.row)} == {""}


def host(name: str, *rows: Judged, not_run: str | None = None) -> Host:
    return Host(name, "`prepare`", "every", "1.0", not_run, None, list(rows))


def test_page_says_where_a_host_is_right_and_we_are_not() -> None:
    refused = Judged("qwen3", "one answer", "mask_unproven: no")
    right = Judged("qwen3", "one answer", None, Verdict())
    page = render([host("tokenmill", refused), host("other", right)], [], 1)
    section = page.split("## Where a host is right")[1].split("\n## ")[0]
    assert "| qwen3 | one answer | refused: `mask_unproven: no` | other |" in section
    agreed = render([host("tokenmill", right), host("other", refused)], [], 1)
    assert "No row of this run" in agreed


def test_page_has_every_host_and_a_row_for_every_finding() -> None:
    case = plant("talk", TALK)
    tokens = laid_out(case)
    header = place(tokens, "<|start|>", 2)
    wrong = verdict_of(case, with_mask(tokens, header, 1)[:-4])  # without its last word, too
    rows = [Judged("gemma3", "row 7", None, wrong, "a | b ≠ a\nc")]
    tests = [
        OwnTests("other", "test_a.py", "`Sampler`", 6, 1, 0, 5, 4, [("a.b::test_c", "the words")]),
        OwnTests("other", "test_b.py", "nothing: no counterpart", 3),
        OwnTests("other", "test_c.py", "`Order`", 2, passed=2, reached=1, keywords="resume"),
    ]
    page = render([host("other", *rows), host("absent", not_run="no directory")], tests, 1)
    assert "- absent: no directory" in page
    assert "gemma3, row 7" in page
    assert "`a ¦ b ≠ a↵c`" in page
    assert "| other | `test_a.py` | `Sampler` | 6 | 1 | 5 | 4 | **1** |" in page
    assert "- other, `b::test_c`: the words" in page
    assert "| other | `test_b.py` | nothing: no counterpart | 3 | 0 |  |  |  |" in page
    assert "| other | `test_c.py` with `-k 'resume'` | `Order` | 2 | 0 | 2 | 1 | 0 |" in page
    counted = next(line for line in page.splitlines() if line.startswith("| other | 1.0"))
    assert counted == "| other | 1.0 | 1 | 0 | 0 | 0 | **1** | **1** | **1** | 0 |"
