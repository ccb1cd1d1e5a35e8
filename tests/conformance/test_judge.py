"""The judge of `make conformance` finds every fault that is put into a row, and no other."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from conformance.conversations import Case, forms, plant, shapes
from conformance.judge import CONTENT_FAULTS, FAULTS, Answer, Question, Verdict, difference, judge
from conformance.page import Host, Judged, OwnTests, render
from conformance.reference import Glue

CLOSER = "<|end|>"
HEADER = "<|start|>assistant"
GLUE = Glue(HEADER.encode(), frozenset([len(CLOSER)]))
Token = tuple[str, int]  # its text, and whether it is trained


def identify(piece: str) -> int:
    return len(CLOSER) if piece == CLOSER else 1000 + sum(map(ord, piece))


def laid_out(case: Case, trains: str = "every") -> list[Token]:
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


CASE = plant("talk", TALK)
RIGHT = laid_out(CASE)


def verdict_of(tokens: Sequence[Token], trains: str = "every") -> Verdict:
    right = as_answer(RIGHT)
    return judge(Question(CASE, right.ids, right.pieces, GLUE, trains), as_answer(tokens))


def place(piece: str, nth: int = 0) -> int:
    return [n for n, (text, _) in enumerate(RIGHT) if text.strip() == piece.strip()][nth]


def words(message: int) -> list[str]:
    return [word.text for word in CASE.words if word.message == message]


def masked(trained: int, *places: int) -> list[Token]:
    return [(piece, trained if n in places else on) for n, (piece, on) in enumerate(RIGHT)]


def halved(at: int) -> list[Token]:
    piece = RIGHT[at][0]
    return [*RIGHT[:at], (piece[:3], 0), (piece[3:], 1), *RIGHT[at + 1 :]]


FIRST_WORD = [place(words(message)[0]) for message in range(5)]


@pytest.mark.parametrize(
    ("tokens", "trains", "fault"),
    [
        pytest.param(RIGHT, "last", "other_turn", id="earlier-answer"),
        pytest.param(masked(1, FIRST_WORD[0]), "every", "other_role", id="system"),
        pytest.param(masked(1, FIRST_WORD[1]), "every", "other_role", id="user"),
        pytest.param(masked(0, FIRST_WORD[2]), "every", "answer", id="answer"),
        pytest.param(halved(FIRST_WORD[1]), "every", "other_role", id="half-of-user"),
        pytest.param(halved(FIRST_WORD[2]), "every", "answer", id="half-of-answer"),
        pytest.param(masked(1, FIRST_WORD[2] - 3), "every", "header", id="header-start"),
        pytest.param(masked(1, FIRST_WORD[2] - 2), "every", "header", id="header-role"),
        pytest.param(masked(1, FIRST_WORD[3] - 3), "every", "header", id="next-header"),
        pytest.param(masked(0, place(CLOSER, 2)), "every", "stop", id="closer"),
        pytest.param(masked(0, place(CLOSER, 4)), "every", "stop", id="last-closer"),
    ],
)
def test_one_wrong_token_is_one_fault_of_the_mask(
    tokens: list[Token], trains: str, fault: str
) -> None:
    verdict = verdict_of(tokens, trains)
    assert verdict.kinds(FAULTS) == [fault]
    assert not verdict.clean


def test_right_row_has_no_fault_and_white_space_is_noted() -> None:
    (fault,) = verdict_of(masked(1, FIRST_WORD[1])).faults
    assert words(1)[0] in fault.excerpt
    for trains in ("every", "last"):
        verdict = verdict_of(laid_out(CASE, trains), trains)
        assert verdict == Verdict("same")
        assert verdict.clean
    verdict = verdict_of(masked(1, FIRST_WORD[2] - 1, place(CLOSER, 2) + 1))
    assert verdict.clean
    assert {note.kind for note in verdict.notes} == {"header_space", "behind_closer"}


def test_lost_doubled_and_added_words_are_seen() -> None:
    at = FIRST_WORD[1]
    without = RIGHT[:at] + RIGHT[at + 1 :]
    for tokens, kind in (
        (without, "lost"),
        ([*RIGHT[:at], *RIGHT[at:][:1], *RIGHT[at:]], "doubled"),
    ):
        verdict = verdict_of(tokens)
        assert (verdict.ids, verdict.kinds(CONTENT_FAULTS)) == ("other", [kind])
    right = as_answer(without)  # the model's own render drops the word
    question = Question(CASE, right.ids, right.pieces, GLUE)
    assert judge(question, as_answer(RIGHT)).kinds(CONTENT_FAULTS) == ["added"]
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


START = RIGHT[0][0]


@pytest.mark.parametrize(
    ("tokens", "ids"),
    [
        ([*RIGHT, ("<|endoftext|>", 1)], "tail"),
        (RIGHT[:-1], "tail"),
        ([*RIGHT, *[("more ", 0)] * 8], "tail"),
        ([*RIGHT, *[("more ", 0)] * 9], "other"),
        ([(START[:2], 0), (START[2:], 0), *RIGHT[1:]], "retokenized"),
        ([("<bos>", 0), *RIGHT], "other"),
        (RIGHT[: place(words(4)[-1])], "other"),  # a word is missing: no mere tail
    ],
)
def test_ids_are_told_apart(tokens: list[Token], ids: str) -> None:
    assert verdict_of(tokens).ids == ids


def test_difference_shows_both_and_a_mask_of_another_length_is_refused() -> None:
    right = as_answer(RIGHT)
    question = Question(CASE, right.ids, right.pieces, GLUE)
    other = as_answer([(piece.replace("Thanks.", "Danke."), on) for piece, on in RIGHT])
    own, theirs = difference(question, other).split(" ≠ ")
    assert "Thanks." in own
    assert "Danke." in theirs
    with pytest.raises(ValueError, match="ids and"):
        judge(question, Answer(right.ids, right.mask[:-1], right.pieces))


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
    turns = [row["messages"][1] for row in forms(case.row)]
    decoded = json.loads(given)
    assert [turn["content"] for turn in turns] == ["", None, "", None]
    arguments = [turn["tool_calls"][0]["function"]["arguments"] for turn in turns]
    assert arguments == [decoded, decoded, given, given]
    assert all(row["messages"][0] == case.row["messages"][0] for row in forms(case.row))
    assert json.dumps(case.row) == before  # what the hosts get is left as it is
    called = next(case for case in shapes() if case.name == "a call")
    assert {row["messages"][1]["content"] for row in forms(called.row)} == {""}


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
    wrong = verdict_of(masked(1, place("<|start|>", 2))[:-4])  # without its last word, too
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
