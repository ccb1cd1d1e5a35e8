"""Example conversations in which the assistant calls tools.

A *tool* is described by a schema in the row's ``tools``; a *call* is part of an assistant's turn;
a *result* is a turn of the tool. The rows show one call, two at once, two in sequence, a failed one
that is repeated, tools that are offered and not needed, thinking before a call, and arguments both
as an object and as the JSON string that some programming interfaces send.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from example_facts import FACTS
from example_parts import ELEMENTS, Message, Numbers, Row, assistant, system, user


def function(name: str, description: str, **parameters: str) -> Row:
    """A tool's description in the usual schema; parameters map a name to its JSON type."""
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {
                "type": "object",
                "properties": {key: {"type": kind} for key, kind in parameters.items()},
                "required": list(parameters),
            },
        },
    }


CONVERT = function("convert_units", "Convert a length.", value="number", source="string",
                   target="string")  # fmt: skip
CALCULATE = function("calculate", "Evaluate an arithmetic expression.", expression="string")
LOOK_UP = function("look_up_element", "Atomic number and symbol of an element.", element="string")
METRES = {"inch": 0.0254, "foot": 0.3048, "yard": 0.9144, "mile": 1609.344}
PLURALS = {"inch": "inches", "foot": "feet", "yard": "yards", "mile": "miles"}


def call(name: str, number: int, *, as_text: bool = False, **arguments: Any) -> Row:
    """A tool call; arguments as an object, or as the JSON string that the OpenAI API sends."""
    stated: Any = json.dumps(arguments, ensure_ascii=False) if as_text else arguments
    return {
        "id": f"call_{number}",
        "type": "function",
        "function": {"name": name, "arguments": stated},
    }


def result(number: int, name: str, value: Any) -> Message:
    """A tool's answer."""
    text = value if isinstance(value, str) else json.dumps(value)
    return {"role": "tool", "tool_call_id": f"call_{number}", "name": name, "content": text}


def converting_rows(numbers: Numbers) -> Iterator[Row]:
    """One call each: with a system prompt, with thinking before the call, with string arguments."""
    for index in range(34):
        unit = list(METRES)[index % len(METRES)]
        value = numbers.between(2, 60)
        metres = round(value * METRES[unit], 3)
        request = user(f"How many metres are {value} {PLURALS[unit]}?")
        asked = call("convert_units", 1, as_text=index % 3 == 1, value=value, source=unit,
                     target="metre")  # fmt: skip
        thought = {"reasoning_content": "I should use the converter."} if index % 4 == 2 else {}
        messages = [
            request,
            assistant("", tool_calls=[asked], **thought),
            result(1, "convert_units", {"value": metres, "unit": "metre"}),
            assistant(f"{value} {PLURALS[unit]} are {metres:g} metres."),
        ]
        if index % 5 == 0:
            messages.insert(0, system("You may use tools. Never convert units in your head."))
        yield {"topic": "tools/units", "tools": [CONVERT, CALCULATE], "messages": messages}


def other_tool_rows(numbers: Numbers) -> Iterator[Row]:
    """Two calls at once, two in sequence, a failed call that is repeated, and no call at all."""
    names = list(ELEMENTS)
    for index in range(12):
        one, two = names[index], names[(index * 5 + 1) % 12]
        (sign_one, first), (sign_two, second) = ELEMENTS[one], ELEMENTS[two]
        looked = [call("look_up_element", 1, element=one), call("look_up_element", 2, element=two)]
        answers = [
            result(1, "look_up_element", {"symbol": sign_one, "number": first}),
            result(2, "look_up_element", {"symbol": sign_two, "number": second}),
        ]
        messages = [
            user(f"What is the sum of the atomic numbers of {one} and {two}?"),
            assistant("I look both up.", tool_calls=looked),
            *answers,
        ]
        if index % 2:
            messages += [
                assistant("", tool_calls=[call("calculate", 3, expression=f"{first} + {second}")]),
                result(3, "calculate", str(first + second)),
            ]
        messages.append(assistant(f"{sign_one} has {first} and {sign_two} has {second}: "
                                  f"the sum is {first + second}."))  # fmt: skip
        yield {"topic": "tools/elements", "tools": [LOOK_UP, CALCULATE], "messages": messages}
    for index in range(10):
        a, b = numbers.between(12, 99), numbers.between(12, 99)
        request = user(f"Multiply {a} by {b}, please.")
        if index % 2:
            messages = [
                request,
                assistant("", tool_calls=[call("calculate", 1, expression=f"{a} x {b}")]),
                result(1, "calculate", {"error": "unknown operator: x"}),
                assistant("The tool wants `*` instead of `x`.",
                          tool_calls=[call("calculate", 2, expression=f"{a} * {b}")]),
                result(2, "calculate", str(a * b)),
                assistant(f"{a} × {b} = {a * b}."),
            ]  # fmt: skip
        else:
            fact = FACTS[index]
            messages = [user(fact.question), assistant(fact.short)]
        yield {"topic": "tools/calculate", "tools": [CALCULATE], "messages": messages}
