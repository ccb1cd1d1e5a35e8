r"""Templates that need too much time or memory, each in a form that no limit but ours stops.

A template is an expression in a setting: evaluated once, in a loop of ten billion steps, on a text
or a list of 900,000 items, or on two values that contain 2\ :sup:`60` others.
"""

from __future__ import annotations

from collections.abc import Iterable

LOOP, END = "{% for i in range(99999) %}{% for j in range(99999) %}", "{% endfor %}{% endfor %}"
TEXT = "{% set s = 'a' * 900000 %}{% set t = 'a' * 900000 %}"
LIST = "{% set s = [0.5] * 900000 %}{% set t = [0.5] * 900000 %}"
NEST = (
    "{% set n = namespace(x=(1,), y=(1,)) %}{% for i in range(60) %}"
    "{% set n.x = (n.x, n.x) %}{% set n.y = (n.y, n.y) %}{% endfor %}"
)
DEEP = (
    "{% set n = namespace(x=(1,)) %}{% for i in range(99999) %}{% set n.x = (n.x,) %}{% endfor %}"
)
GROW = "{% set n = namespace(x='aa') %}{% for i in range(60) %}"
KEEP = "{% set n = namespace(x=1, y=1) %}" + LOOP
FAT = "{% if a %}{% endif %}" * 1000
SAME_HASH = "range(0, (2**61 - 1) * 99000, 2**61 - 1)"

ONCE = [
    # One number makes much of nothing.
    "'a' * 10**10", "([1] * 10**10) | length", "([1] * 9000000) * 9", "10 ** (10 ** 8)",
    "'%999999999d' % 1", "'%*d' % (999999999, 1)", "'%999999999d' | format(1)",
    "'{:999999999}'.format(1)", "'{:{}}'.format(1, 999999999)", "'%999999999d' is odd",
    "'%*d' is divisibleby((999999999, 1))", "'a' | center(999999999)", "'a'.ljust(999999999)",
    "'a'.rjust(999999999)", "'a'.zfill(999999999)", "'a\\nb' | indent(999999999)",
    "[1, [2]] | tojson(indent=999999999)", "[1] | batch(999999999, 'x') | list | length",
    "[1] | slice(99999999) | list", "cycler(*(range(9) | slice(999999999)))",
    "5 | round(-999999999)", "5 | round(999999999, 'ceil')", "0x" + "f" * 2000 + " * 3",
    # Two sizes are multiplied.
    "('\\n' * 4000) | indent('x' * 900000, true, true)", "('a\\n' * 60000) | indent(60000)",
    "('\\t' * 60000).expandtabs(60000)", "range(99999) | join('x' * 60000)",
    "range(99999) | map('string') | join('x' * 60000)",
    "('x' * 60000).join(range(99999) | map('string'))",
    "([['x' * 900000]] * 9000) | join(attribute=0)", "([['x' * 900000]] * 9000) | tojson",
    "(range(99999) | list) | tojson(separators=('x' * 60000, ':'))",
    "(range(99999) | list) | tojson(separators={'x' * 60000: 1, ':': 2})",
    "([[1]] * 99999) | tojson(indent=60000)", "([[1]] * 99999) | tojson(indent='x' * 60000)",
    "('{0}' * 6000).format('x' * 900000)", "('{a}' * 6000).format(a='x' * 900000)",
    "('{0[0]}' * 6000).format(['x' * 900000])", "('{0!r}' * 60).format('\\x00' * 9000000)",
    "('{0:60000}' * 9000).format(1)",
    "'{:{1}{2}}'.replace('{:', '{0:').format(1, '9999', '99999')",
    "'%(a)s' * 6000 % {'a': 'x' * 900000}", "'%s' * 6000 % (('x' * 900000,) * 6000)",
    "'%60000d' * 9000 % ((1,) * 9000)", "'%*d' * 9000 % ((60000, 1) * 9000)",
    "('%(a)s' * 6000) | format(a='x' * 900000)", "strftime_now('%60000d' * 9000)",
    "strftime_now('%c' * 90000)", "('a' * 900000).replace('', 'x' * 9000)",
    "([[1] * 9000] * 9000) | sum(start=[]) | length",
    "([[1]] * 900000) | sum(start=[]) | length",
    # A large text becomes much larger.
    "('\U0001f600' * 9000000) | list | length", "m(*('\U0001f600' * 9000000))",
    "('\U00010428' * 20000000) | upper | length", "('&' * 60000000) | e",
    "('a,' * 30000000).split(',')", "('\\n' * 9000000).splitlines()",
    "('a ' * 9000000) | wordcount",
    "('a-' * 9000000) | title | length", "['\\x00' * 30000000]", "('' | safe) + '&' * 60000000",
    "('' | safe).join(['&' * 900000] * 600)", "('%s' | safe) % ('&' * 60000000)",
    # The product of two lengths is read.
    SAME_HASH + " | unique | list | length", "('<' * 300000) | map(attribute='<' * 300000) | list",
    "('<' * 3000) | map(attribute='a.' * 30000, default={}) | list | length",
    "([{}] * 3000) | sort(attribute='a,' * 30000) | list | length",
]  # fmt: skip
ON_TEXT = [
    "s.rfind('b' ~ 'a' * 400000)", "s.rsplit('b' ~ 'a' * 400000)",
    "s.rpartition('b' ~ 'a' * 400000)", "(s ~ 'b').strip('c' * 900000 ~ 'a')",
    "(s ~ 'b') | trim('c' * 900000 ~ 'a')",
]  # fmt: skip
ON_TEXT_AGAIN = [
    "s.count('b')", "s.count('a' * 4000 ~ 'b' ~ 'a' * 4000)", "s.find('b')", "'b' in s",
    "'b' not in s", "s ~ 'x' in [t ~ 'y'] * 9000", "s[::-1] | length", "s == t", "s < t",
    "s <= t <= s <= t", "s is eq t", "{s: 1}[t]", "{s: 1}.get(t)", "t in {s: 1}",
    "s.replace('b', 'c') | length", "s.startswith(t)", "s.startswith(('b',) * 900000)",
    "s.isalpha()", "s is lower", "s.strip('b') | length",
]  # fmt: skip
ON_LIST_AGAIN = [
    "i in s", "i not in s", "i is in s", "0.5 in range(99999)",
    "0.5 in (range(99999) | slice(99999))", "s[1:] | length", "s == t", "s | sort | length",
    "s | min", "s | unique | list | length", "s.count(1)", "s | select('in', s) | list | length",
    "([[1]] * 90000) | groupby(0) | length",
    "(['a' * 90000 ~ 'x', 'a' * 90000 ~ 'y'] * 9000) | sort | length",
    "([['a' * 90000 ~ 'x'], ['a' * 90000 ~ 'y']] * 9000) | sort(attribute=0) | length",
]  # fmt: skip
ON_NESTED = [
    # hashed
    "{n.x: 1}", "{}.get(n.x)", "{}[n.x]", "n.x in {}", "n.x is in {}", "[n.x] | unique | list",
    "[{}] | map(attribute=n.x) | list",
    # compared
    "n.x == n.y", "n.x < n.y", "n.x in [n.y]", "n.x in dict(a=n.y).values()",
    "('a', n.x) in dict(a=n.y).items()", "dict(a=n.x).items() == dict(a=n.y).items()",
    "[n.x] | select('equalto', n.y) | list", "[n.x].index(n.y)", "[n.x, n.y] | sort",
    "[n.x, n.y] | max", "[namespace(z=n.x), namespace(z=n.y)] | sort(attribute='z')",
    "[cycler(n.x), cycler(n.y)] | groupby('items')",
    # printed
    "n.x", "n", "n ~ 'a'", "dict(a=n.x).items()", "dict(a=n.x).keys().mapping",
    "raise_exception(n.x)", "[1][n.x].a", "n.x | upper", "n.x | tojson", "n.x | string | length",
]  # fmt: skip
GROWING = [
    "n.x + n.x", "n.x ~ n.x", "n.x | replace('a', 'aa')", "n.x.replace('a', 'aa')",
    "[n.x, n.x] | join(n.x)", "n.x.join(n.x)", "n.x * 2", "'%s%s' % (n.x, n.x)",
    "'{0}{0}'.format(n.x)", "n.x | batch(1) | list + (n.x | list)",
]  # fmt: skip
KEPT = [
    "[], {}, [], {}", "q, q, q, q, q, q, q, q, q, q, q, q, q, q, q", "i * 1.5, i * 2.5, i * 1e9",
    "[1] | map('upper')", "''.upper, [].index", "namespace(a=1)", "'\U0001f600'[0], 'abcdef'[1:4]",
    "'ab,' * 9000, ('ab,' * 9000).split(',')", "('a' * 60000) | replace('b', '\U0001f600')",
]  # fmt: skip
PROGRAMS = {
    "nested loops": LOOP + END,
    "printing loops": LOOP + "xxxxxxxxxx" + END,
    "loops that fill a block": "{% set x %}" + LOOP + "x" * 9000 + END + "{% endset %}",
    "literal loops": "{% for a in 'xxxxxxxxxx' %}" * 9 + "{% endfor %}" * 9,
    "literal lists": "{% for a in [1, 2, 3, 4, 5, 6, 7, 8, 9] %}" * 9 + "{% endfor %}" * 9,
    "recursive loop": "{% for x in [1] recursive %}{% if loop.depth < 4 %}"
    "{{ loop(range(99999)) }}{% endif %}{% endfor %}",
    "filtered loop": LOOP.replace(" %}{% for j", " if false %}{% for j") + END + LOOP + END,
    "fat body": LOOP + FAT + END,
    "fat macro": "{% macro m() %}" + FAT + "{% endmacro %}" + LOOP + "{{ m() }}" + END,
    "fat default": "{% macro m(a=" + "q or " * 80 + "q) %}{% endmacro %}"
    + LOOP + "{{ m() }}" * 50 + END,
    "fat test": LOOP + "{% for k in range(999) if " + "q or " * 80 + "q %}{% endfor %}" + END,
    "fat block": "{% block b %}" + FAT + "{% endblock %}" + LOOP + "{{ self.b() }}" + END,
    "fat caller": "{% macro m() %}{{ caller() }}{% endmacro %}" + LOOP + "{% call m() %}" + FAT
    + "{% endcall %}" + END,
    "forking macro": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}"
    "{% endmacro %}{{ m(60) }}",
    "printing macro": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% else %}xx"
    "{% endif %}{% endmacro %}{{ m(60) }}",
    "squares": GROW.replace("'aa'", "7") + "{% set n.x = n.x * n.x %}{% endfor %}",
    "growing list": GROW.replace("'aa'", "[1]") + "{% set n.x = n.x + n.x %}{% endfor %}",
    "nested list": GROW + "{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x }}",
    "block sets": "{% set x = 'aa' %}" + "{% set x %}{{ x }}{{ x }}{% endset %}" * 60,
    "block set in a loop": GROW + "{% set n.x %}{{ n.x }}{{ n.x }}{% endset %}{% endfor %}",
    "escaped": "{% autoescape true %}{% set x %}{{ '&' * 60000000 }}{% endset %}{{ x }}"
    "{% endautoescape %}",
    "escaped by a value": "{% autoescape messages %}{{ '&' * 60000000 ~ '&' * 60000000 }}"
    "{% endautoescape %}",
    "kept macros": KEEP + "{% macro m() %}{% endmacro %}{% set n.x = [n.x, m] %}" + END,
    "kept loops": KEEP + "{% for k in 'ab' %}{% set n.x = [n.x, loop] %}{% endfor %}" + END,
    "kept arguments": KEEP + "{% set n.x = cycler(n.x, q, q, q, q, q, q, q, q, q) %}" + END,
    "changed values": NEST + "{% for i in [n.x, n.y] %}{{ loop.changed(i) }}{% endfor %}",
    "deep key": DEEP + "{{ {n.x: 1} }}",
    "deep lookup": DEEP + "{{ {}.get(n.x) }}",
    "four loops over a text": "".join("{% for a in messages[0].content %}" for _ in range(4))
    + "x" + "{% endfor %}" * 4,
}  # fmt: skip


def _printed(name: str, before: str, expressions: Iterable[str], after: str = "") -> dict[str, str]:
    return {f"{name}: {e}": f"{before}{{{{ {e} }}}}{after}" for e in expressions}


HUNGRY: dict[str, str] = {
    **_printed("once", "{% macro m() %}{% endmacro %}", ONCE),
    **_printed("text", TEXT, ON_TEXT),
    **_printed("text again", TEXT + LOOP, ON_TEXT_AGAIN, END),
    **_printed("list again", LIST + LOOP, ON_LIST_AGAIN, END),
    **_printed("nested", NEST, ON_NESTED),
    **{f"grow: {e}": f"{GROW}{{% set n.x = {e} %}}{{% endfor %}}" for e in GROWING},
    **{f"keep: {e}": f"{KEEP}{{% set n.x = [n.x, {e}] %}}{END}" for e in KEPT},
    **PROGRAMS,
}
