"""Write the bundled example data: conversations.jsonl, dirty.jsonl and prompts.jsonl.

The rows are composed from the tables of `example_facts.py` and `example_languages.py` and from
small problems whose answers this script computes. Every row of conversations.jsonl is a valid
conversation that ends with an assistant turn: single or multi-turn, with system prompts, tool calls
and results (arguments as objects and as JSON strings), and thinking inline (``<think>``) and as
``reasoning_content``. dirty.jsonl has rows that must be rejected. prompts.jsonl has RL prompts with
labels.

The same script always writes the same bytes: `python scripts/make_examples.py [DIRECTORY]`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

from example_facts import FACTS, PARTNERS
from example_languages import EXCHANGES, SNIPPETS
from example_parts import ELEMENTS, Numbers, Row, assistant, system, user
from example_tools import converting_rows, other_tool_rows

EXAMPLES = Path(__file__).resolve().parent.parent / "src" / "tokenmill" / "examples"


def fact_rows() -> Iterator[Row]:
    """Yield each fact three times: plain, short with a system prompt, and as two turns."""
    for number, fact in enumerate(FACTS):
        yield {"topic": "facts", "messages": [user(fact.question), assistant(fact.long)]}
        yield {
            "topic": "facts",
            "messages": [
                system(PARTNERS[number % len(PARTNERS)]),
                user(fact.question),
                assistant(fact.short),
            ],
        }
        yield {
            "topic": "facts",
            "messages": [
                user(fact.question),
                assistant(fact.long if number % 2 else fact.short),
                user(fact.next_question),
                assistant(fact.next_answer),
            ],
        }


def language_rows() -> Iterator[Row]:
    """Yield each exchange as one turn and as two."""
    for exchange in EXCHANGES:
        first = [user(exchange.question), assistant(exchange.answer)]
        second = [user(exchange.next_question), assistant(exchange.next_answer)]
        topic = f"language/{exchange.language}"
        yield {"topic": topic, "messages": first}
        yield {"topic": topic, "messages": first + second}


def code_rows() -> Iterator[Row]:
    """Yield each snippet as one turn and, with a system prompt, as two."""
    for snippet in SNIPPETS:
        answer = f"```{snippet.language}\n{snippet.code}\n```\n\n{snippet.remark}"
        first = [user(snippet.task), assistant(answer)]
        yield {"topic": "code", "messages": first}
        yield {
            "topic": "code",
            "messages": [
                system("You are a careful programmer. Show code first, then explain it."),
                *first,
                user(snippet.next_task),
                assistant(snippet.next_answer),
            ],
        }


class Problem(dict[str, str]):
    """A word problem: question, steps, answer, and a follow-up with steps and answer."""


THINGS = ("apples", "tiles", "tickets", "bolts", "seeds", "pages", "marbles", "bricks")


def problems(numbers: Numbers, count: int) -> Iterator[Problem]:
    """Yield word problems of four kinds with computed answers."""
    for index in range(count):
        thing = THINGS[index % len(THINGS)]
        a, b, c = numbers.between(3, 19), numbers.between(4, 28), numbers.between(2, 9)
        if index % 4 == 0:
            yield Problem(
                kind="multiply",
                question=f"A box holds {a} {thing}. How many {thing} are in {b} boxes?",
                steps=f"Each box holds {a}, and there are {b} boxes: {a} × {b} = {a * b}.",
                answer=str(a * b),
                next_question=f"And if {c} of the {thing} are broken?",
                next_steps=f"From {a * b} I take {c} away: {a * b} - {c} = {a * b - c}.",
                next_answer=str(a * b - c),
            )
        elif index % 4 == 1:
            total = a * c
            yield Problem(
                kind="share",
                question=f"{total} {thing} are shared equally among {c} people. "
                "How many does each get?",
                steps=f"{total} divided by {c}: {c} × {a} = {total}, so each gets {a}.",
                answer=str(a),
                next_question="And if one more person joins, how many are left over?",
                next_steps=f"Now there are {c + 1} people. {total} = {c + 1} × {total // (c + 1)} "
                f"+ {total % (c + 1)}.",
                next_answer=str(total % (c + 1)),
            )
        elif index % 4 == 2:
            speed, hours = a * 5, c
            yield Problem(
                kind="travel",
                question=f"A train runs at {speed} km/h for {hours} hours. How far does it get?",
                steps=f"Distance is speed times time: {speed} × {hours} = {speed * hours} km.",
                answer=str(speed * hours),
                next_question="How far in one hour less?",
                next_steps=f"{hours} - 1 = {hours - 1} hours, {speed} × {hours - 1} = "
                f"{speed * (hours - 1)} km.",
                next_answer=str(speed * (hours - 1)),
            )
        else:
            yield Problem(
                kind="area",
                question=f"A garden is {a} m wide and {b} m long. What is its area in square "
                "metres?",
                steps=f"The area is width times length: {a} × {b} = {a * b}.",
                answer=str(a * b),
                next_question="How long is the fence around it, in metres?",
                next_steps=f"Twice the sum of the sides: 2 × ({a} + {b}) = {2 * (a + b)}.",
                next_answer=str(2 * (a + b)),
            )


def thinking_rows(numbers: Numbers) -> Iterator[Row]:
    """Yield problems with thinking: inline, in its own field, and in the history."""
    for index, problem in enumerate(problems(numbers, 64)):
        steps, answer = problem["steps"], f"The answer is {problem['answer']}."
        topic = f"problems/{problem['kind']}"
        inline = assistant(f"<think>\n{steps}\n</think>\n\n{answer}")
        apart = assistant(answer, reasoning_content=steps)
        follow_up = [
            user(problem["next_question"]),
            assistant(f"{problem['next_answer']}.", reasoning_content=problem["next_steps"]),
        ]
        question = user(problem["question"])
        # 5 and the 4 kinds of problems are coprime, so every kind gets every form.
        form = index % 5
        if form == 0:
            messages = [question, inline]
        elif form == 1:
            messages = [system("Think first, then answer."), question, apart]
        elif form == 2:
            messages = [question, assistant(f"{steps} {answer}")]
        elif form == 3:
            messages = [question, apart, *follow_up]
        else:
            messages = [question, inline, *follow_up]
        yield {"topic": topic, "messages": messages}


WORDS = ["river", "anchor", "lantern", "copper", "meadow", "violin", "harbour", "kettle", "walnut",
         "ember", "saddle", "thimble"]  # fmt: skip


def editing_rows(numbers: Numbers) -> Iterator[Row]:
    """Yield computed answers over many turns: sorting, counting letters, tables, lists."""
    for index in range(16):
        words = numbers.shuffled(WORDS)[: 4 + index % 3]
        longest = max(words, key=len)
        yield {
            "topic": "editing/words",
            "messages": [
                user(f"Sort these words: {', '.join(words)}."),
                assistant(", ".join(sorted(words)) + "."),
                user("Now as a numbered list."),
                assistant("\n".join(f"{i}. {w}" for i, w in enumerate(sorted(words), 1))),
                user("How many letters does the longest word have?"),
                assistant(f"{len(longest)}, as in “{longest}”."),
            ],
        }
    for index in range(16):
        chosen = numbers.shuffled(list(ELEMENTS))[: 3 + index % 3]
        lines = [f"| {name} | {ELEMENTS[name][0]} | {ELEMENTS[name][1]} |" for name in chosen]
        table = "\n".join(["| element | symbol | number |", "|---|---|---:|", *lines])
        yield {
            "topic": "editing/tables",
            "messages": [
                system("Format answers as Markdown."),
                user(f"Make a table of {', '.join(chosen)} with symbol and atomic number."),
                assistant(table),
            ],
        }
    for _ in range(16):
        count = numbers.between(2, 40)
        binary, hexadecimal = f"{count:b}", f"{count:x}"
        yield {
            "topic": "editing/numerals",
            "messages": [
                user(f"Write {count} in binary."),
                assistant(f"{count} is `{binary}` in binary."),
                user("In hexadecimal?"),
                assistant(f"`{hexadecimal}`"),
                user("Check the binary form by adding its powers of two."),
                assistant(" + ".join(str(1 << i) for i in range(7) if count >> i & 1)
                          + f" = {count}"),
            ],
        }  # fmt: skip


def conversations() -> list[Row]:
    """Return all conversations, shuffled, each with an id."""
    numbers = Numbers(seed=7)
    rows: list[Row] = [*fact_rows(), *language_rows(), *code_rows()]
    rows += [*thinking_rows(numbers), *converting_rows(numbers), *other_tool_rows(numbers)]
    rows += editing_rows(numbers)
    mixed = numbers.shuffled(rows)
    return [{"id": f"example-{number:04}", **row} for number, row in enumerate(mixed)]


def dirty_lines() -> list[str]:
    """Return two good rows and rows that must be rejected, each for another reason."""
    good = {"messages": [user("Is 91 prime?"), assistant("No: 91 = 7 × 13.")]}
    trailing = {"messages": [user("Is 97 prime?"), assistant("Yes."), user("And 99?")]}
    shapeless = {"messages": "Is 101 prime?"}
    unknown = {"messages": [{"role": "narrator", "content": "Night falls."}, assistant("Indeed.")]}
    rows = [good, trailing, shapeless, unknown]
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    return [*lines, '{"messages": [{"role": "user", "content": "cut off', lines[0]]


def prompts() -> list[Row]:
    """Return RL prompts: a problem, its label, and metadata."""
    numbers = Numbers(seed=11)
    return [
        {
            "text": f"{problem['question']} Answer with a number.",
            "label": problem["answer"],
            "metadata": {"kind": problem["kind"], "number": number},
        }
        for number, problem in enumerate(problems(numbers, 50))
    ]


def main(directory: Path) -> None:
    """Write the three files."""
    directory.mkdir(parents=True, exist_ok=True)
    files = {
        "conversations.jsonl": [json.dumps(r, ensure_ascii=False) for r in conversations()],
        "dirty.jsonl": dirty_lines(),
        "prompts.jsonl": [json.dumps(r, ensure_ascii=False) for r in prompts()],
    }
    for name, lines in files.items():
        (directory / name).write_bytes("".join(line + "\n" for line in lines).encode())
        print(f"{name}: {len(lines)} rows", file=sys.stderr)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else EXAMPLES)
