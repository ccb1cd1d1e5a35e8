"""Templates whose output depends on what a fast path forgets easily, and odd rows for them.

Python's string methods on odd characters, 1, 1.0 and True, the order of keys, undefined values,
state that one message leaves for the next.
"""

from __future__ import annotations

import random
from typing import Any

from tokenmill.chat.sandbox import METHODS

Row = dict[str, Any]

QUESTIONS = [
    "m.content.splitlines() | length > 1", "m.content == m.content.title()",
    "m.content.casefold() == m.content.lower()", "m.content.upper().lower() == m.content",
    "m.content is lower", "m.content is upper", "m.content | int(-1) > 3",
    "m.content | int(-1, 16) >= 10", "m.content | float(-1.0) >= 1.5", "m.content | length > 4",
    "m.content | length is even", "m.content | length is divisibleby 3",
    "m.content.count('a') == 1", "m.content | wordcount > 1", "m.content | trim == m.content",
    "m.content.strip()", "m.content.strip('ab') == m.content", "m.content",
    "m.content.startswith(('a', '<', ' '))", "m.content.endswith('\\n')", "'a' in m.content",
    "'' in m.content", "m.content.find('a') > 0", "m.content.partition('a')[2]",
    "m.content.split() | length == 1", "m.content.split('a', 1)[-1]",
    "m.content.rsplit(None, 1)[0] == m.content",
    "m.content.encode('utf-8') | length == m.content | length", "m.content[0] == 'a'",
    "m.content[-1:] == ' '", "m.content < 'b'", "'0' <= m.content[:1] <= '9'",
    "m.content == messages[0].content", "m.content < messages[0].content",
    "m.content in messages[0].content", "messages[-1].content in m.content",
    "m.content | length == messages[0].content | length",
    "m.content[:1] == messages[0].content[:1]",
    "m.content in (messages | map(attribute='content') | list)[1:]", "m == messages[-1]",
    "m is sameas messages[0]", "m.content in ('', 'a', ' ')",
    "m.content | sort | join == m.content",
    "m.content | unique | list | length == m.content | length", "(m.content | max) == 'b'",
    "m.content.replace('a', '') != m.content", "m.content.expandtabs(4) == m.content",
    "m.content[::-1] == m.content", "m.n is number", "m.n is integer", "m.n is boolean",
    "m.n is none", "m.n", "m.n == 1", "m.n in [0, 1]", "m.n is string", "m.n is mapping",
    "m.n is sequence", "m.n is iterable", "'n' in m", "m.n is defined", "m | length == 3",
    "m.keys() | first == 'role'", "m.content is callable", "m.content is eq 'a'",
    "not m.content and m.n or m.n is none", "(m.content if m.content else m.n) is string",
    "m.items",
]  # fmt: skip
"""Questions about a message, which decide a branch."""
EXPRESSIONS = [
    "m.content | title", "m.content.title()", "m.content | capitalize", "m.content | upper",
    "m.content.lower()", "m.content.casefold()", "m.content.swapcase()",
    "m.content.splitlines() | join('|')", "m.content.splitlines(True) | length", "m.content | int",
    "m.content[:2] | int(7)", "m.content | float", "m.content | length", "m.content.count('a')",
    "m.content[1:-1]", "m.content[::2]", "m.content[::-1]", "m.content[:m.content | length // 2]",
    "m.content | first", "m.content | last", "m.content[3]",
    "'%s:%5.1f|%r' % (m.content, m.content | length, m.content)", "('a%' + m.content) % 7",
    "'%d%%' % (m.content | int)", "'{}|{!r}|{:>8}'.format(m.content, m.content, m.content)",
    "m.content.format(1, a=2)", "'%s-%s' | format(m.content, m.n)", "[m.content, m.n]", "m",
    "m | tojson", "m.content | tojson", "m.content | tojson(ensure_ascii=True)",
    "m | tojson(indent=2)", "m | tojson(sort_keys=True)", "m.n", "m.n | string", "m.n | tojson",
    "m.n ~ m.n", "m.n * 2", "m.n + 1", "m.n | round(1)", "-m.n",
    "{1: 'one', '1': 'text', none: 'none'}[m.n]", "'abc'[m.n]", "m.content | e",
    "m.content | forceescape", "m.content | safe", "m.content | center(9)",
    "m.content | indent(2, first=True)", "m.content | truncate(5, True)", "m.content | wordcount",
    "m.content | replace('a', 'bb')", "m.content.replace('a', 'bb', 1)",
    "m.content | replace('a', 'bb', 2)", "m.content.replace(messages[0].content, '#')",
    "m.content.replace('', '-', 3)", "m.content * 2", "'-' * (m.content | length)",
    "m.content * (m.content | length % 2)", "(m.content | length + 7) // 3 * 2 - 1 ** 2 % 5",
    "m.content | length / 2", "m.content | join('.')", "m.content | list",
    "m.content | sort | join", "m.content | sort(case_sensitive=false) | join",
    "m.content | unique | join", "m.content | reverse", "m.content | batch(2, '_') | list",
    "m.content | slice(2) | list", "m.content | min",
    "messages | map(attribute='content') | map('length') | sum",
    "messages | groupby('role') | map(attribute='grouper') | join",
    "messages | selectattr('role', 'eq', 'user') | map(attribute='content') | join('+')",
    "messages | rejectattr('content') | list | length", "m.content | select('in', 'ab') | join",
    "messages | map(attribute='content') | map('upper') | join",
    "messages | map(attribute='n', default='none') | join(',')",
    "messages | sort(attribute='content') | map(attribute='content') | join('|')",
    "messages | unique(attribute='content') | list | length", "m | dictsort",
    "(m | dictsort(by='value')) | length", "m.items() | list", "m | items | map('first') | join",
    "m.values() | list", "m.get('n', 'nothing')", "m.get(m.content, 'nothing')",
    "m | attr('content')", "m.n | default('d')", "m.n | default('d', true)",
    "m.content.partition('a')", "m.content.rfind('a')", "m.content.zfill(6)",
    "m.content.ljust(6, '.')", "m.content.removeprefix('a').removesuffix(' ')",
    "m.content.expandtabs(3)", "m.content.encode('utf-8')", "tools | tojson", "tools",
    "[m.content, m.n] | join('/')", "m.content ~ m.n ~ none ~ 1.0 ~ true ~ []",
    "1 < m.content | length < 4", "m.content in ['a', 'b']", "m.content.__class__",
    "m.content if m.content == 'a'", "(m.content | map('upper') | sort | join)[:3]",
]  # fmt: skip
"""What is printed beside the text of a message."""
UNDEFINED = [
    "m.nothing", "m.nothing + 'x'", "'x' + m.nothing", "m.nothing + m.nothing", "'x' ~ m.nothing",
    "m.nothing()", "m.nothing.strip()", "m.nothing.x", "m.nothing[0]", "m.content[m.nothing]",
    "m[m.nothing]", "m.content[m.nothing:]", "m.nothing == ''", "m.nothing == none",
    "m.nothing == m.nothing_else", "m.nothing != m.content", "m.nothing < 1",
    "m.content < m.nothing", "'a' in m.nothing", "m.nothing in m.content",
    "m.nothing in [m.content]", "-m.nothing", "not m.nothing", "m.nothing and m.content",
    "m.nothing or m.content", "1 if m.nothing else 2", "m.nothing | length", "m.nothing | trim",
    "m.nothing | upper", "m.nothing | default(m.content)", "m.nothing | tojson", "m.nothing | int",
    "m.nothing | list", "m.nothing | join(',')", "[m.content, m.nothing] | join(',')",
    "[m.nothing]", "m.nothing | string", "m.nothing | first", "'' | first", "('' | first) + 'x'",
    "m.nothing | sort", "[1, m.nothing] | sum", "m.content.replace(m.nothing, 'x')",
    "m.content | replace('a', m.nothing)", "m.content.startswith(m.nothing)",
    "m.content.split(m.nothing)", "'%s' % m.nothing", "'%d' % m.nothing", "m.nothing * 2",
    "'{}'.format(m.nothing)", "m.nothing is none", "m.nothing is string", "m.nothing is mapping",
    "m.nothing is iterable", "range(m.nothing) | list", "dict(a=m.nothing)",
    "m.get('nothing', m.nothing)", "messages[99]", "messages[99].content", "messages[99:][0]",
    "nothing_at_all", "nothing_at_all.x", "nothing_at_all()", "none + 'x'", "none()", "none | list",
    "none.x", "none[0]", "namespace(a=1).b", "loop.nothing", "loop.previtem.content",
    "loop.previtem", "loop.nextitem.content + 'x'",
]  # fmt: skip
"""Uses of something that is not there, and of null."""


def each(body: str, before: str = "", after: str = "") -> str:
    return (
        before
        + "{% for m in messages %}<|{{ m.role }}|>"
        + body
        + "<|end|>\n{% endfor %}"
        + after
        + "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )


def branch(question: str) -> str:
    return each(
        "{% if " + question + " %}yes {{ m.content }}{% else %}{{ m.content }} no{% endif %}"
    )


def printed(expression: str) -> str:
    return each("{{ m.content }}\n{{ " + expression + " }}")


def _programs() -> dict[str, str]:
    """Whole templates: state, captures, scopes, loops that are more than loops."""
    chat = "<|{{ m.role }}|>{{ m.content }}<|end|>\n"
    return {
        "exception half-way": each(
            "{{ m.content }}{% if m.content | length % 5 == 4 %}"
            "{{ raise_exception('no ' ~ m.content) }}{% endif %}"
        ),
        "exception at the end": each("{{ m.content }}")
        + "{% if messages[-1].content == 'a' %}{{ raise_exception('a') }}{% endif %}",
        "division by zero": printed("10 // (m.content | length - 3)"),
        "index not found": printed("m.content.index('a')"),
        "no such filter": each("{% if m.content == 'a' %}{{ m.content | upper }}{% endif %}"),
        "namespace list": each(
            "{% if m.content in ns.seen %}again{% endif %}{% set ns.seen = ns.seen + [m.content] %}"
            "{{ m.content }}{{ ns.seen | length }}",
            "{% set ns = namespace(seen=[]) %}",
        ),
        "namespace list printed": each(
            "{% set ns.seen = ns.seen + [m.content] %}{{ ns.seen | join('|') }}",
            "{% set ns = namespace(seen=[]) %}",
        ),
        "namespace counter": each(
            "{% set ns.n = ns.n + (m.content | length) %}{{ m.content }}{{ ns.n }}",
            "{% set ns = namespace(n=0) %}",
        ),
        "namespace last": each(
            "{{ ns.last }}{{ m.content }}{% set ns.last = m.content[-1:] %}",
            "{% set ns = namespace(last='') %}",
        ),
        "namespace text": "{% set ns = namespace(out='') %}{% for m in messages %}"
        "{% set ns.out = ns.out + '<|' + m.role + '|>' + m.content + '<|end|>' %}{% endfor %}"
        "{{ ns.out }}",
        "namespace text asked": "{% set ns = namespace(out='') %}{% for m in messages %}"
        "{% if ns.out.endswith('a<|end|>') %}{% set ns.out = ns.out ~ '!' %}{% endif %}"
        "{% set ns.out = ns.out ~ '<|' ~ m.role ~ '|>' ~ m.content ~ '<|end|>' %}{% endfor %}"
        "{{ ns.out }}",
        "range": "{% for i in range(messages | length) %}{% set m = messages[i] %}"
        + chat
        + "{% endfor %}",
        "range backwards": "{% for i in range(messages | length - 1, -1, -1) %}"
        "<|{{ messages[i].role }}|>{{ messages[i].content }}<|end|>\n{% endfor %}",
        "range of a length": each(
            "{{ m.content }}{% for i in range(m.content | length) %}{{ i }}{% endfor %}"
        ),
        "characters": each("{% for c in m.content %}{{ c }}.{% endfor %}"),
        "characters chosen": each("{% for c in m.content if c.isalpha() %}{{ c }}{% endfor %}"),
        "characters else": each("{% for c in m.content %}{{ c }}{% else %}none{% endfor %}"),
        "characters counted": each(
            "{% for c in m.content %}{{ loop.index }}{{ loop.last }}{% endfor %}{{ m.content }}"
        ),
        "lines": each(
            "{% for line in m.content.split('\\n') %}> {{ line }}{% if not loop.last %}\n"
            "{% endif %}{% endfor %}"
        ),
        "words": each("{% for w in m.content.split() %}{{ w }}{{ loop.revindex0 }}{% endfor %}"),
        "pairs": each("{% for k, v in m | dictsort %}{{ k }}={{ v }};{% endfor %}"),
        "items": each("{% for k, v in m.items() %}{{ k }}={{ v }};{% endfor %}"),
        "keys": each("{% for k in m %}{{ k }},{% endfor %}{{ m.content }}"),
        "filter block": each("{% filter upper %}{{ m.content }}{% endfilter %}"),
        "filter block trim": each("{% filter trim %} {{ m.content }} {% endfilter %}"),
        "filter block nested": each(
            "{% filter replace('a', 'b') %}{% filter trim %}{{ m.content }}{% endfilter %}"
            "{% endfilter %}"
        ),
        "set block": each("{% set x %}[{{ m.content }}]{% endset %}{{ x }}{{ x | length }}"),
        "set block filtered": each("{% set x | upper %}{{ m.content }}{% endset %}{{ x }}"),
        "set block asked": each(
            "{% set x %}{{ m.content | trim }}{% endset %}{% if x == '' %}none{% endif %}{{ x }}"
        ),
        "macro": each(
            "{{ say(m, loop.first) }}",
            "{% macro say(m, first) %}{% if first %}1{% endif %}{{ m.content }}{% endmacro %}",
        ),
        "macro asked": each(
            "{% if say(m) %}{{ say(m) }}{% else %}none{% endif %}",
            "{% macro say(m) %}{{ m.content.strip() }}{% endmacro %}",
        ),
        "macro defaults": each(
            "{{ say(m.content) }}{{ say(m.content, [1]) }}",
            "{% macro say(t, acc=[]) %}{% set acc = acc + [t] %}{{ acc | length }}{{ t }}"
            "{% endmacro %}",
        ),
        "macro default that grows": each(
            "{{ say(m.content) }}",
            "{% macro say(t, acc=[]) %}{{ acc.append(t) }}{{ acc | length }}{% endmacro %}",
        ),
        "macro arguments": each(
            "{{ say(m.content, 1, x=m.n) }}",
            "{% macro say(t) %}{{ t }}{{ varargs }}{{ kwargs }}{% endmacro %}",
        ),
        "macro recursive": each(
            "{{ down(m.content) }}",
            "{% macro down(t) %}{{ t[:1] }}{% if t | length > 1 %}{{ down(t[1:]) }}{% endif %}"
            "{% endmacro %}",
        ),
        "macro without end": each(
            "{{ m.content }}{% if m.content == 'a' %}{{ down(m.content) }}{% endif %}",
            "{% macro down(t) %}{{ down(t) }}{% endmacro %}",
        ),
        "macro scope": each(
            "{% set x = m.content %}{{ say() }}{{ x }}",
            "{% set x = 'outer' %}{% macro say() %}{{ x }}{% endmacro %}",
        ),
        "call block": each(
            "{% call wrap(m.content | length) %}{{ m.content }}{% endcall %}",
            "{% macro wrap(n) %}[{{ n }}{{ caller() }}{{ caller() | length }}]{% endmacro %}",
        ),
        "call block with arguments": each(
            "{% call(c) every(m.content) %}{{ c }}{{ m.role }}{% endcall %}",
            "{% macro every(t) %}{% for c in t %}{{ caller(c) }}{% endfor %}{% endmacro %}",
        ),
        "recursive loop": "{% for m in messages recursive %}"
        + chat
        + "{% if m.content | length > 3 and loop.depth < 3 %}{{ loop(messages[:1]) }}{% endif %}"
        "{% endfor %}",
        "loop before and after": each(
            "{% if loop.previtem is defined and loop.previtem.content == m.content %}same"
            "{% endif %}{{ m.content }}{% if loop.nextitem is defined %}"
            "{{ loop.nextitem.content | length }}"
            "{% endif %}"
        ),
        "loop cycle": each("{{ loop.cycle('a', 'b', m.content) }}{{ m.content }}"),
        "loop changed": each(
            "{% if loop.changed(m.content | length) %}new{% endif %}{{ m.content }}"
        ),
        "loop numbers": each(
            "{{ loop.index }}{{ loop.revindex }}{{ loop.length }}{{ loop.depth0 }}{{ m.content }}"
        ),
        "loop filtered": "{% for m in messages if m.content.strip() %}" + chat + "{% endfor %}",
        "loop break": each("{{ m.content }}")
        + "{% for m in messages %}{% if m.content == 'a' %}{% break %}{% endif %}{{ loop.index }}"
        "{% endfor %}",
        "loop continue": "{% for m in messages %}{% if not m.content %}{% continue %}{% endif %}"
        + chat
        + "{% endfor %}",
        "loops nested": "{% for m in messages %}"
        + chat
        + "{% for x in messages %}{% if x.content == m.content and x.role != m.role %}="
        "{% endif %}{% endfor %}{% endfor %}",
        "loop variable shadowed": "{% for m in messages %}"
        + chat
        + "{% for m in m.content[:2] %}{{ m }}{% endfor %}{{ m.role }}{% endfor %}",
        "groupby": "{% for role, group in messages | groupby('role') %}<|{{ role }}|>"
        "{% for m in group %}{{ m.content }}{% endfor %}<|end|>{% endfor %}",
        "groupby content": "{% for text, group in messages | groupby('content') %}"
        "{{ text }}{{ group | length }};{% endfor %}",
        "sort by length": "{% for m in messages | sort(attribute='content') %}"
        + chat
        + "{% endfor %}",
        "generator twice": "{% set g = messages | map(attribute='content') %}{{ g | join('|') }}"
        "+{{ g | join('|') }}",
        "generator asked": "{% set g = messages | selectattr('content') %}"
        "{% if g %}{{ g | map(attribute='content') | join('|') }}{% endif %}"
        "{{ g | list | length }}",
        "generator half": "{% set g = messages | map(attribute='content') %}{{ g | first }}"
        "{{ g | list }}",
        "joiner": each("{{ j() }}{{ m.content }}", "{% set j = joiner(', ') %}"),
        "cycler": each(
            "{{ c.next() }}{{ m.content }}{% if not m.content %}{{ c.reset() }}{% endif %}"
            "{{ c.current }}",
            "{% set c = cycler('x', 'y', 'z') %}",
        ),
        "with": each("{% with t = m.content.strip(), n = 1 %}{{ t }}{{ n }}{% endwith %}{{ t }}"),
        "set in if": each(
            "{% if m.content == 'a' %}{% set x = 1 %}{% endif %}{{ m.content }}{{ x }}"
        ),
        "set in loop": "{% set x = 'before' %}{% for m in messages %}{{ x }}{% set x = m.content %}"
        + chat
        + "{{ x }}{% endfor %}{{ x }}",
        "set of two": each("{% set a, b = m.content[:1], m.content[1:] %}{{ b }}{{ a }}"),
        "messages replaced": "{% if messages[0].content == 'a' %}{% set messages = messages[1:] %}"
        "{% endif %}{% for m in messages %}" + chat + "{% endfor %}",
        "block": "{% block all %}{% for m in messages %}" + chat + "{% endfor %}{% endblock %}",
        "raw": each("{% raw %}{{ m.content }}{% endraw %}{{ m.content }}"),
        "trailing whitespace": each("  {{- m.content -}}  \n"),
        "text before": each("{{ m.content }}", "{{ messages | length }}{{ messages[0].content }}"),
        "text after": each("{{ m.content }}", after="{{ messages[-1].content[-1:] }}"),
        "content of the neighbour": each("{{ messages[loop.index0 - 1].content }}{{ m.content }}"),
        "append to data": each("{% set _ = messages.append(1) %}{{ m.content }}"),
        "tuple of contents": each("{{ (m.content, m.content | length) }}"),
        "dict of contents": each("{{ {m.content: m.n, 'a': 1} }}"),
        "dict looked up": each("{{ {'a': 1, '': 2}.get(m.content, 'other') }}{{ m.content }}"),
        "numbers compared": each(
            "{% if m.n == true %}true{% elif m.n == 0 %}zero{% else %}{{ m.n }}{% endif %}"
            "{{ m.content }}"
        ),
        "tools": each("{{ m.content }}", "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}"),
        "tools asked": each(
            "{{ m.content }}",
            "{% if tools and tools[0].strict is sameas true %}strict{% endif %}"
            "{{ tools[0].strict if tools }}",
        ),
        "calls": each(
            "{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name }}"
            "{{ c.function.arguments | tojson }}{% for k, v in c.function.arguments.items() %}"
            "{{ k }}:{{ v }}{{ v is string }}{% endfor %}{% endfor %}"
        ),
        "random": each(
            "{{ m.content }}{% if m.content == 'a' %}{{ m.content | random }}{% endif %}"
        ),
        "lipsum": each("{{ m.content }}{% if m.content == 'a' %}{{ lipsum(1) }}{% endif %}"),
        "date": each("{{ strftime_now('%d') if m.content == 'a' }}{{ m.content }}"),
        "fixed point": each("{{ '%.3f' % (m.content | length / 7) }}{{ m.content }}"),
        "generation block": "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}"
        "{% generation %}{{ m.content }}{% if m.content.isdigit() %}!{% endif %}<|end|>"
        "{% endgeneration %}{% else %}{{ m.content }}<|end|>{% endif %}{% endfor %}",
    }


HOSTILE: dict[str, str] = {
    **{f"asks: {question}": branch(question) for question in QUESTIONS},
    **{
        f"asks: {name}": branch(f"m.content.{name}()")
        for name in METHODS[str]
        if name.startswith("is")
    },
    **{f"prints: {expression}": printed(expression) for expression in EXPRESSIONS},
    **{
        f"undefined: {expression}": each(
            "{{ m.content }}{% if 'a' in m.content %}{{ " + expression + " }}{% endif %}"
        )
        for expression in UNDEFINED
    },
    "undefined: iterated": each("{% for x in m.nothing %}{{ x }}{% else %}none{% endfor %}"),
    "undefined: iterated, attribute": each("{% for x in m.nothing.y %}{{ x }}{% endfor %}"),
    "undefined: asked": branch("m.nothing"),
    "undefined: asked by attribute": branch("m.nothing.x"),
    **_programs(),
}

PIECES = (
    "a", "a", "b", "A", "aa", "Ab cD", " ", "  ", "\n", "\r\n", "\t", "\x0b", "\x0c",
    "\x1c", "\x1e", "\x85", "\xa0", "\u2028", "\u2029", "\u3000", "\u200b", "\ufeff",
    "\x00", "0", "7", "42", "-5", "1.5", "1e3", "0x1f", "1_000", "²", "½", "٣", "Ⅷ",
    "一", "ß", "ẞ", "ŉ", "ǆ", "ǅ", "Ǆ", "İ", "ı", "ς", "Σ", "ﬃ", "ŉ", "é", "e\u0301",
    "你好", "👋🏽", "👨‍👩‍👧", "\U0001d7d8", "%", "%s", "%d", "%%", "{", "}", "{}", "{0}",
    "{a}", "{{ x }}", "{% if %}", "<", ">", "&", '"', "'", "\\", "<b>", "</b>",
    "<think>", "</think>", "<|end|>", "<|assistant|>", "it's", "o'Neil mc'X", "ﬀ x",
    "x\ny", "\U000f0000", "\U0010fffd", "\ue000",
)  # fmt: skip
VALUES: tuple[Any, ...] = (
    1, 1.0, True, 0, 0.0, -0.0, False, None, "1", "", "a", 10**20, 1e20, 1.5, -3, [], {}, [1, "a"],
    {"x": 1, "y": 2}, {"y": 2, "x": 1}, {"x": 1.0, "y": True}, "ß",
)  # fmt: skip
SHAPES = ("ua", "ua", "ua", "ua", "sua", "uaua", "uaua", "suaua", "uua", "a")
ROLES = {"u": "user", "a": "assistant", "s": "system"}


def odd_text(source: random.Random) -> str:
    return "".join(source.choice(PIECES) for _ in range(source.choice((0, 1, 1, 1, 2, 2, 3, 5))))


def rows(seed: object, count: int) -> list[Row]:
    source = random.Random(str(seed))
    made: list[Row] = []
    for _ in range(count):
        messages: list[dict[str, Any]] = []
        with_value = source.random() < 0.5
        same = odd_text(source) if source.random() < 0.15 else None
        for role in source.choice(SHAPES):
            text = odd_text(source) if same is None else same
            message: dict[str, Any] = {"role": ROLES[role], "content": text}
            if with_value:
                message["n"] = source.choice(VALUES)
            if role == "a" and source.random() < 0.1:
                arguments = {odd_text(source): source.choice(VALUES) for _ in range(2)}
                function = {"name": "f", "arguments": arguments}
                message["tool_calls"] = [{"type": "function", "function": function}]
            messages.append(message)
        row: Row = {"messages": messages}
        if source.random() < 0.1:
            strict = source.choice((True, 1, 1.0, False, 0, None))
            row["tools"] = [{"name": "f", "strict": strict, "x": source.choice(VALUES)}]
        made.append(row)
    return made
