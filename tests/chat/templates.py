"""Small templates of our own, one per habit that real ones have."""

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

# A turn is closed only by the next one's opener.
UNCLOSED = (
    "[gMASK]<sop>{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)

# Closes the last turn with another token than the turns of the history.
RETURNING = (
    "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}"
    "{% if m.role == 'assistant' and loop.last and not add_generation_prompt %}<|return|>"
    "{% else %}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)

# Prints the generation prompt whether it is asked to or not.
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
