"""Small templates, one for each feature of real ones."""

from __future__ import annotations

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

# Drops thinking from history, adds an empty block to the last turn, prints tool calls.
THINKING = """\
{%- for m in messages %}
{%- set content = m.content %}
{%- set thought = m.reasoning_content or '' %}
{%- if m.role == 'assistant' and '</think>' in content %}
{%- set thought = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}
{%- endif %}
{{- '<|im_start|>' + m.role + '\\n' }}
{%- if m.role == 'assistant' and loop.last %}
{{- '<think>\\n' + thought + '\\n</think>\\n\\n' }}
{%- endif %}
{{- content }}
{%- for call in m.tool_calls or [] %}
{{- '\\n<tool_call>' + call.function|tojson + '</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n<think>\\n' }}{% endif %}"""

TRIMMING = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{{ m.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)

# No generation prompt at all.
INST = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% elif m.role == 'assistant' %} {{ m.content }}{{ eos_token }}"
    "{% else %}{{ raise_exception('only user and assistant') }}{% endif %}{% endfor %}"
)

# Only the header of the next turn ends a turn.
UNCLOSED = (
    "[gMASK]<sop>{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)

# Ends the last turn with another token than earlier turns.
RETURNING = (
    "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}"
    "{% if m.role == 'assistant' and loop.last and not add_generation_prompt %}<|return|>"
    "{% else %}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)

# Always prints the generation prompt.
STANDING = (
    "{{ bos_token }}{% for m in messages %}<|turn|><|{{ m.role }}|>{{ m.content }}<|over|>"
    "{% endfor %}<|turn|><|assistant|>"
)

GENERATION = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}\n"
    "{% else %}{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

# Generation blocks inside a macro, where counting printed characters goes wrong.
GENERATION_MACRO = (
    "{% macro say(m) %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endmacro %}"
    "{% for m in messages %}{{ say(m) }}{% endfor %}"
)

DATED = "{{ strftime_now('%d %b %Y, %A') }}\n" + CHATML

ALL = {
    "chatml": CHATML,
    "thinking": THINKING,
    "trimming": TRIMMING,
    "inst": INST,
    "unclosed": UNCLOSED,
    "returning": RETURNING,
    "standing": STANDING,
    "generation": GENERATION,
    "generation_macro": GENERATION_MACRO,
}

# Features of released templates that decide the owner of text. Not in ALL, because they need not
# be traced.
HABITS = {
    # The generation prompt begins with a newline that the turns do not have (Llama 4).
    "newline before the prompt": (
        "{% for m in messages %}<|header|>{{ m.role }}<|/header|>\n\n{{ m.content }}<|eot|>"
        "{% endfor %}{% if add_generation_prompt %}\n\n<|header|>assistant<|/header|>\n\n"
        "{% endif %}"
    ),
    # Messages by number.
    "numbers": (
        "{% for i in range(messages|length) %}{% set m = messages[i] %}<|{{ m.role }}|>"
        "{{ m.content }}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    ),
    # A text that is added up and printed at the end (Reka-Edge).
    "added up": (
        "{% set ns = namespace(out='') %}{% for m in messages %}"
        "{% set ns.out = ns.out ~ m.role ~ ': ' ~ m.content ~ '\n\n<sep>' %}{% endfor %}"
        "{% if add_generation_prompt %}{% set ns.out = ns.out ~ 'assistant: ' %}{% endif %}"
        "{{ ns.out }}"
    ),
    # Tool results are printed inside the step of the assistant who called (command-r7b).
    "looks ahead": (
        "{% for m in messages %}{% if m.role != 'tool' %}<|{{ m.role }}|>{{ m.content }}"
        "{% for c in m.tool_calls or [] %}<call>{{ c.function|tojson }}</call>{% endfor %}<|end|>"
        "{% if m.role == 'assistant' %}{% for t in messages[loop.index0 + 1:] %}"
        "{% if t.role != 'tool' %}{% break %}{% endif %}<|tool|>{{ t.content }}<|end|>{% endfor %}"
        "{% endif %}{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    ),
    # A turn is closed in the next one's step (Apertus).
    "closed by the next": (
        "{% set ns = namespace(open=false) %}{% for m in messages %}"
        "{% if ns.open %}<|assistant_end|>{% endif %}{% set ns.open = m.role == 'assistant' %}"
        "<|{{ m.role }}_start|>{{ m.content }}{% if m.role != 'assistant' %}<|{{ m.role }}_end|>"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant_start|>{% endif %}"
    ),
    # The last message is printed outside of the loop (Nemotron Nano 2).
    "last outside": (
        "{% set last = messages[-1] if messages[-1].role == 'assistant' else none %}"
        "{% for m in (messages[:-1] if last else messages) %}<|{{ m.role }}|>{{ m.content }}<|end|>"
        "{% endfor %}{% if last %}<|assistant|>{{ last.content }}<|end|>"
        "{% elif add_generation_prompt %}<|assistant|>{% endif %}"
    ),
    # The header is printed in the user's step, the end of turn once at the end.
    "header by the user": (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}USER: {{ m.content }}"
        " ASSISTANT:{% else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
    ),
    # The generation prompt stands inside the loop (chatglm3, zephyr).
    "prompt in the loop": (
        "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{{ eos_token }}\n"
        "{% if loop.last and add_generation_prompt %}<|assistant|>\n{% endif %}{% endfor %}"
    ),
    # Without a generation prompt it prints an eos (phi-3).
    "eos or prompt": (
        "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}{% endif %}"
    ),
    # A macro prints the turns.
    "macro": (
        "{% macro turn(m, last) %}<|{{ m.role }}|>{{ m.content }}{% if last %}<|stop|>"
        "{% else %}<|end|>{% endif %}{% endmacro %}"
        "{% for m in messages %}{{ turn(m, loop.last) }}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    ),
}
