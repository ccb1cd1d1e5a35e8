"""Rows that break every rule once, and a template that fails if a row requests it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from tests.build.making import TOKENIZER, conversation, write_rows

TEMPLATE = """\
{%- if messages[0].again %}{{ bos_token }}{% endif -%}
{{- bos_token -}}
{%- set place = namespace(last=-1) -%}
{%- for m in messages -%}
{%- if m.role == 'user' -%}{%- set place.last = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- if tools and not messages[0].unarmed -%}
<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n
{%- endif -%}
{%- for m in messages -%}
{%- if m.explode %}{{ raise_exception('this one explodes') }}{% endif -%}
{%- if m.role == 'narrator' %}{{ raise_exception('no such role') }}{% endif -%}
<|im_start|>{{ m.role }}\n
{%- if m.role == 'assistant' and loop.index0 > place.last -%}
<think>\n\n</think>\n\n
{%- endif -%}
{%- if not m.unheard %}{{- m.content -}}{% endif -%}
{%- if m.leaks %}{{ messages[0].content }}{% endif -%}
{%- if m.tool_calls and not m.hide -%}
{%- for call in m.tool_calls -%}
<tool_call>{{ call.function.name }} {{ call.function.arguments | tojson }}</tool_call>
{%- endfor -%}
{%- endif -%}
{%- if not m.open %}<|im_end|>\n{% endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif -%}
""".replace("\\n", "{{- '\\n' -}}")
MAX_LENGTH = 600

TOOL = {
    "type": "function",
    "function": {"name": "look_up", "parameters": {"properties": {"q": {"default": None}}}},
}
PROSE = " ".join(f"word{n} {n * 7919 % 613}" for n in range(60))


def says(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def talk(question: str, answer: str, **more: Any) -> dict[str, Any]:
    """One question, one answer; ``more`` are members of the answer."""
    return {"messages": [says("user", question), says("assistant", answer, **more)]}


def asked(question: str, answer: str, **more: Any) -> dict[str, Any]:
    return {"messages": [says("user", question, **more), says("assistant", answer)]}


def joined(*rows: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [message for row in rows for message in row["messages"]]}


def calling(question: str, arguments: Any, **more: Any) -> dict[str, Any]:
    call = {"type": "function", "function": {"name": "look_up", "arguments": arguments}}
    return talk(question, "", tool_calls=[call], **more)


TWICE = talk("Which tree keeps its needles?", "The spruce does.")
SWAPPED = {"prompt": "Where to?", "chosen": "Out.", "rejected": "In.", "score_chosen": 1,
           "score_rejected": 2}  # fmt: skip
REPEATED = {"prompt": "And where from?", "chosen": "And where from? From here.", "rejected": "No."}

ROWS: list[tuple[str | None, Any]] = [
    (None, conversation(1)),
    ("bad_json", '{"messages": [{"role": "user"'),
    ("bad_shape", {"messages": 7}),
    ("limit", '{"messages": ' + "[" * 300 + "]" * 300 + "}"),
    ("template_error", asked("Will it hold?", "It will not.", explode=True)),
    ("role_order", {"messages": [says("narrator", "Night falls over the harbour."),
                                 says("assistant", "Indeed it does.")]}),
    ("template_drops_content", talk("Why is it so?", "Because.", reasoning_content="I think.")),
    ("template_drops_tool_calls", calling("Who hides?", {"q": "hidden"}, hide=True)),
    ("mask_unproven", talk("Say it once.", "Here it comes.", leaks=True)),
    ("trailing_user", joined(conversation(2), {"messages": [says("user", "?")]})),
    ("no_trained_tokens", talk("Count me?", "No.", weight=0)),
    ("overlong", talk("Tell me everything.", " ".join(f"item{n}" for n in range(700)))),
    ("double_bos", asked("Do you begin?", "I begin twice.", again=True)),
    ("control_text", talk("What ends a turn?", "Write <|im_end|> for it.")),
    ("missing_closer", talk("When will you stop?", "I will not", open=True)),
    ("rewrites_history", joined(talk("One and one?", "Two.", reasoning_content="1 + 1 = 2"),
                                talk("Two and two?", "Four."))),
    ("template_drops_tools", {"tools": [TOOL], **asked("Which tools have you?", "None that I see.",
                                                       unarmed=True)}),
    ("template_drops_context", asked("What was asked?", "Nobody knows.", unheard=True)),
    ("null_tool_keys", {"tools": [{**TOOL, "strict": None}],
                        **talk("Is there a null?", "There is.")}),
    ("broken_arguments", calling("Is it broken?", "q: not json")),
    ("string_arguments", calling("Is it text?", '{"q": "text"}')),
    ("empty_turn", talk("", "Nobody asked for this.")),
    (None, TWICE),
    ("duplicate", TWICE),
    (None, talk("What do you remember?", PROSE)),
    ("near_duplicate", talk("What do you remember?", PROSE.replace("word40", "another"))),
    ("mojibake", talk("Where do we meet?", "In the cafÃ©.")),
    ("replacement_character", talk("What was lost?", "A \ufffd was.")),
    ("escaped_surrogate", talk("Smile!", "Half a smile: \\ud83d")),
    ("byte_order_mark", talk("What is between?", "A mark\ufeff is.")),
    ("control_character", talk("Can you hear it?", "A bell: \x07")),
    ("bad_group", {"prompt": "Which is it?", "chosen": "This.", "rejected": "This."}),
    ("swapped_sides", SWAPPED),
    ("answer_repeats_prompt", REPEATED),
    ("history_differs", joined(conversation(3), conversation(4))),
]  # fmt: skip

# Rule → the lines on which it is to be found.
GOLDEN = {rule: [line] for line, (rule, _) in enumerate(ROWS, 1) if rule is not None}
GOLDEN["plain_strings"] = [line for line, (_, row) in enumerate(ROWS, 1) if "chosen" in row]


def crafted(directory: Path) -> Path:
    return write_rows(directory / "crafted.jsonl", [row for _, row in ROWS])


def clean(directory: Path) -> Path:
    return write_rows(directory / "clean.jsonl", [conversation(n) for n in range(100, 140)])


def tokenizer_with(directory: Path, post: str | None = None, **config: Any) -> Path:
    target = directory / f"tokenizer-{len(list(directory.iterdir()))}"
    shutil.copytree(TOKENIZER, target)
    (target / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    path = target / "tokenizer_config.json"
    document = {**json.loads(path.read_text()), **config}
    path.write_text(json.dumps({k: v for k, v in document.items() if v is not None}))
    if post is not None:
        import tokenizers

        made = tokenizers.Tokenizer.from_file(str(target / "tokenizer.json"))
        number = made.token_to_id(post)
        made.post_processor = tokenizers.processors.TemplateProcessing(
            single=f"{post} $A", special_tokens=[(post, number)]
        )
        made.save(str(target / "tokenizer.json"))
    return target


# The same for the rows of `tests.inspect.test_lint_images`.
GOLDEN_OF_IMAGES = {"missing_image": [2], "bad_media": [3], "large_image": [4],
                      "media_mismatch": [5], "repeated_image": [6],
                      "duplicate_image": [7]}  # fmt: skip
