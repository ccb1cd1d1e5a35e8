"""The checks of `make conformance` find every inserted fault and no other."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from conformance.checks import (
    CONTENT_FAULTS,
    FAULTS,
    Actual,
    Expected,
    RowResult,
    check_row,
    difference,
)
from conformance.conversations import Case, forms, plant, shapes
from conformance.page import CheckedRow, OwnTests, TrainerReport, render
from conformance.reference import TurnMarkers

END_OF_TURN = "<|end|>"
HEADER = "<|start|>assistant"
MARKERS = TurnMarkers(HEADER.encode(), frozenset([len(END_OF_TURN)]))
Token = tuple[str, int]  # its text, and whether it is trained


def identify(piece: str) -> int:
    return len(END_OF_TURN) if piece == END_OF_TURN else 1000 + sum(map(ord, piece))


def tokens_of(case: Case, trains: str = "every") -> list[Token]:
    tokens: list[Token] = []
    answers = [n for n, m in enumerate(case.row["messages"]) if m["role"] == "assistant"]
    trained_messages = answers if trains == "every" else answers[-1:]
    for number, message in enumerate(case.row["messages"]):
        trained = int(number in trained_messages)
        tokens += [("<|start|>", 0), (message["role"], 0), ("\n", 0)]
        tokens += [(word + " ", trained) for word in message["content"].split()]
        tokens += [(END_OF_TURN, trained), ("\n", 0)]
    return tokens


def as_row(tokens: Sequence[Token]) -> Actual:
    pieces = [piece for piece, _ in tokens]
    return Actual(
        [identify(piece) for piece in pieces],
        [trained for _, trained in tokens],
        [piece.encode() for piece in pieces],
    )


CONVERSATION: dict[str, Any] = {
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "How warm?"},
        {"role": "assistant", "content": "Thirty degrees."},
        {"role": "user", "content": "Thanks."},
        {"role": "assistant", "content": "You are welcome."},
    ]
}


CASE = plant("talk", CONVERSATION)
CORRECT = tokens_of(CASE)


def result_of(tokens: Sequence[Token], trains: str = "every") -> RowResult:
    correct = as_row(CORRECT)
    return check_row(Expected(CASE, correct.ids, correct.pieces, MARKERS, trains), as_row(tokens))


def token_at(piece: str, nth: int = 0) -> int:
    return [n for n, (text, _) in enumerate(CORRECT) if text.strip() == piece.strip()][nth]


def words(message: int) -> list[str]:
    return [word.text for word in CASE.words if word.message == message]


def masked(trained: int, *places: int) -> list[Token]:
    return [(piece, trained if n in places else on) for n, (piece, on) in enumerate(CORRECT)]


def halved(at: int) -> list[Token]:
    piece = CORRECT[at][0]
    return [*CORRECT[:at], (piece[:3], 0), (piece[3:], 1), *CORRECT[at + 1 :]]


FIRST_WORD = [token_at(words(message)[0]) for message in range(5)]


@pytest.mark.parametrize(
    ("tokens", "trains", "fault"),
    [
        pytest.param(CORRECT, "last", "other_turn", id="earlier-answer"),
        pytest.param(masked(1, FIRST_WORD[0]), "every", "other_role", id="system"),
        pytest.param(masked(1, FIRST_WORD[1]), "every", "other_role", id="user"),
        pytest.param(masked(0, FIRST_WORD[2]), "every", "answer", id="answer"),
        pytest.param(halved(FIRST_WORD[1]), "every", "other_role", id="half-of-user"),
        pytest.param(halved(FIRST_WORD[2]), "every", "answer", id="half-of-answer"),
        pytest.param(masked(1, FIRST_WORD[2] - 3), "every", "header", id="header-start"),
        pytest.param(masked(1, FIRST_WORD[2] - 2), "every", "header", id="header-role"),
        pytest.param(masked(1, FIRST_WORD[3] - 3), "every", "header", id="next-header"),
        pytest.param(masked(0, token_at(END_OF_TURN, 2)), "every", "stop", id="end-of-turn"),
        pytest.param(masked(0, token_at(END_OF_TURN, 4)), "every", "stop", id="last-end-of-turn"),
    ],
)
def test_one_wrong_token_is_one_fault_of_the_mask(
    tokens: list[Token], trains: str, fault: str
) -> None:
    result = result_of(tokens, trains)
    assert result.kinds(FAULTS) == [fault]
    assert not result.is_correct


def test_correct_row_has_no_fault_and_white_space_is_a_note() -> None:
    (fault,) = result_of(masked(1, FIRST_WORD[1])).faults
    assert words(1)[0] in fault.excerpt
    for trains in ("every", "last"):
        result = result_of(tokens_of(CASE, trains), trains)
        assert result == RowResult("same")
        assert result.is_correct
    result = result_of(masked(1, FIRST_WORD[2] - 1, token_at(END_OF_TURN, 2) + 1))
    assert result.is_correct
    assert {note.kind for note in result.notes} == {"header_space", "after_end_of_turn"}


def test_lost_doubled_and_added_words_are_faults() -> None:
    at = FIRST_WORD[1]
    without = CORRECT[:at] + CORRECT[at + 1 :]
    for tokens, kind in (
        (without, "lost"),
        ([*CORRECT[:at], *CORRECT[at:][:1], *CORRECT[at:]], "doubled"),
    ):
        result = result_of(tokens)
        assert (result.ids, result.kinds(CONTENT_FAULTS)) == ("other", [kind])
    correct = as_row(without)  # the model's own render drops the word
    expected = Expected(CASE, correct.ids, correct.pieces, MARKERS)
    assert check_row(expected, as_row(CORRECT)).kinds(CONTENT_FAULTS) == ["added"]
    assert check_row(expected, correct).kinds(CONTENT_FAULTS) == ["lost_by_template"]


def test_thinking_of_the_history_may_be_dropped_by_the_template() -> None:
    contents = "<think>\nHm.\n</think>\n\nThirty."
    messages = [
        {"role": "user", "content": "How warm?"},
        {"role": "assistant", "content": contents},
        {"role": "user", "content": "And now?"},
        {"role": "assistant", "content": contents},
    ]
    case = plant("thinking", {"messages": messages})
    thoughts = [word for word in case.words if word.part == "thinking"]
    assert {word.message for word in thoughts} == {1, 3}

    def without(message: int) -> RowResult:
        gone = {word.text for word in thoughts if word.message == message}
        row = as_row([token for token in tokens_of(case) if token[0].strip() not in gone])
        return check_row(Expected(case, row.ids, row.pieces, MARKERS), row)

    assert without(1).is_correct
    assert without(3).kinds(FAULTS) == ["lost_by_template"]


START = CORRECT[0][0]


@pytest.mark.parametrize(
    ("tokens", "ids"),
    [
        ([*CORRECT, ("<|endoftext|>", 1)], "tail"),
        (CORRECT[:-1], "tail"),
        ([*CORRECT, *[("more ", 0)] * 8], "tail"),
        ([*CORRECT, *[("more ", 0)] * 9], "other"),
        ([(START[:2], 0), (START[2:], 0), *CORRECT[1:]], "retokenized"),
        ([("<bos>", 0), *CORRECT], "other"),
        (CORRECT[: token_at(words(4)[-1])], "other"),  # a word is missing, so it is not a tail
    ],
)
def test_ids_are_classified(tokens: list[Token], ids: str) -> None:
    assert result_of(tokens).ids == ids


def test_difference_shows_both_texts_and_mask_length_is_checked() -> None:
    correct = as_row(CORRECT)
    expected = Expected(CASE, correct.ids, correct.pieces, MARKERS)
    other = as_row([(piece.replace("Thanks.", "Danke."), on) for piece, on in CORRECT])
    own, theirs = difference(expected, other).split(" ≠ ")
    assert "Thanks." in own
    assert "Danke." in theirs
    with pytest.raises(ValueError, match="45 ids, but 44 mask values"):
        check_row(expected, Actual(correct.ids, correct.mask[:-1], correct.pieces))


def test_words_are_unique_and_at_both_ends_of_every_text() -> None:
    for case in shapes():
        text = json.dumps(case.row)
        assert all(text.count(word.text) == 1 for word in case.words), case.name
        for number, message in enumerate(case.row["messages"]):
            own = [word.text for word in case.words if word.message == number]
            assert own, (case.name, number)
            contents = [w.text for w in case.words if w.message == number and w.part == "content"]
            content = (message["content"] or "").split("</think>")[-1].strip()
            if content:
                assert content.startswith(contents[0])
                assert content.endswith(contents[-1])


def test_forms_differ_only_in_arguments_and_nulls() -> None:
    case = next(case for case in shapes() if case.name.startswith("arguments as JSON"))
    before = json.dumps(case.row)
    original = case.row["messages"][1]["tool_calls"][0]["function"]["arguments"]
    turns = [row["messages"][1] for row in forms(case.row)]
    decoded = json.loads(original)
    assert [turn["content"] for turn in turns] == ["", None, "", None]
    arguments = [turn["tool_calls"][0]["function"]["arguments"] for turn in turns]
    assert arguments == [decoded, decoded, original, original]
    assert all(row["messages"][0] == case.row["messages"][0] for row in forms(case.row))
    assert json.dumps(case.row) == before  # the original row is not modified
    called = next(case for case in shapes() if case.name == "a call")
    assert {row["messages"][1]["content"] for row in forms(called.row)} == {""}


def report(name: str, *rows: CheckedRow, not_run: str | None = None) -> TrainerReport:
    return TrainerReport(name, "`prepare`", "every", "1.0", not_run, None, list(rows))


def test_page_lists_rows_that_only_other_trainers_get_right() -> None:
    refused = CheckedRow("qwen3", "one answer", "mask_unproven: no")
    correct = CheckedRow("qwen3", "one answer", None, RowResult())
    page = render([report("tokenmill", refused), report("other", correct)], [], 1)
    section = page.split("### Rows that only other trainers get right")[1].split("\n### ")[0]
    assert "| qwen3 | one answer | refused: `mask_unproven: no` | other |" in section
    agreed = render([report("tokenmill", correct), report("other", refused)], [], 1)
    assert "There are none in this run." in agreed


def test_page_has_every_trainer_and_a_row_for_every_finding() -> None:
    wrong = result_of(masked(1, token_at("<|start|>", 2))[:-4])  # without its last word, too
    rows = [CheckedRow("gemma3", "row 7", None, wrong, "a | b ≠ a\nc")]
    tests = [
        OwnTests("other", "test_a.py", "`Sampler`", 6, 1, 0, 5, 4, [("a.b::test_c", "the words")]),
        OwnTests("other", "test_b.py", "nothing: no counterpart", 3),
        OwnTests("other", "test_c.py", "`Order`", 2, passed=2, reached=1, keywords="resume"),
    ]
    page = render([report("other", *rows), report("absent", not_run="no directory")], tests, 1)
    assert "- absent: no directory" in page
    assert "gemma3, row 7" in page
    assert "`a ¦ b ≠ a↵c`" in page
    assert "| other | `test_a.py` | `Sampler` | 6 | 1 | 5 | 4 | **1** |" in page
    assert "- other, `b::test_c`: the words" in page
    assert "| other | `test_b.py` | nothing: no counterpart | 3 | 0 |  |  |  |" in page
    assert "| other | `test_c.py` with `-k 'resume'` | `Order` | 2 | 0 | 2 | 1 | 0 |" in page
    counted = next(line for line in page.splitlines() if line.startswith("| other | 1.0"))
    assert counted == "| other | 1.0 | 1 | 0 | 0 | 0 | **1** | **1** | **1** | 0 |"
