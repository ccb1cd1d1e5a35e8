"""Templates and tokenizers under which rollouts are simulated: one of our own, and the released.

`APPENDING` only ever appends, thoughts and calls included. The bundled tokenizer's template drops
thoughts from history at the next user turn. `released` gives those of the shared data.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path

from tests.build.making import TOKENIZER
from tests.chat.conversations import DATE, SPECIAL, VARIABLES, zoo
from tests.rl.faults import World
from tokenmill.chat import ChatSpec
from tokenmill.chat.template import ReferenceTemplate
from tokenmill.rl.verdict import Judge
from tokenmill.tokenizers.loading import load
from tokenmill.tokenizers.tokenizer import Tokenizer

APPENDING = """\
{%- if tools %}{{- '<|im_start|>system\\n' + tools|tojson + '<|im_end|>\\n' }}{%- endif %}
{%- for m in messages %}
{{- '<|im_start|>' + m.role + '\\n' }}
{%- if m.reasoning_content %}
{{- '<think>\\n' + m.reasoning_content + '\\n</think>\\n\\n' }}
{%- endif %}
{{- m.content }}
{%- for call in m.tool_calls or [] %}
{{- '\\n<tool_call>' + call.function|tojson + '</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""


@functools.cache
def bundled() -> Tokenizer:
    return load(str(TOKENIZER), backend="file")


def world_of(template: str, name: str = "") -> tuple[World, Judge]:
    """Where to sample and who judges, under one template."""
    base, more = bundled(), VARIABLES.get(name) or {}
    tokenizer = Tokenizer(base.data, template=template, special_tokens=SPECIAL, path=base.path)
    reference = ReferenceTemplate(template, {**SPECIAL, **more}, DATE)
    spec = ChatSpec(format="messages", date=DATE, template_kwargs=more)
    return World(tokenizer, reference), Judge(tokenizer, spec)


@functools.cache
def appending() -> tuple[World, Judge]:
    return world_of(APPENDING)


def released(shared: Path) -> Iterator[tuple[str, str]]:
    """Released templates by name; twins for training print the same."""
    for name, template in zoo(shared).items():
        if not name.endswith("_training"):
            yield name, template
