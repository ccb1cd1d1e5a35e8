"""Bounds on a template's work and memory, counted, never timed (promises P6 and P15).

A chat template is a program that came with a model: it may be hostile. The sandbox keeps it from
touching Python; a `Budget` keeps it from eating the machine. Everything that a template can do has
a price that is known *before* it is done, from the sizes of what goes in, and is charged to the
budget of the render in progress. Counts do not depend on the machine, so a row that is refused
here is refused everywhere.

Two things are counted. *Work* in units of about 50 nanoseconds of CPython on an ordinary core: a
node of the template that is evaluated, sixty-four characters that are scanned. *Size* in bytes of
all values that were made, whether they still live or not. With what `Budget.refill` gives, no
template takes 256 MB or 5 seconds for a row of up to a million characters, and at most 48 bytes
and 4 units for each further character.

The prices stand in four tables: `METHODS` (of strings, lists, numbers, …), `FILTERS`, `TESTS` and
`FUNCTIONS`. A method, filter or test without a price is refused; so a new jinja2 or Python opens
no door. Operators, slices, comparisons and keys have a function each.
"""

from __future__ import annotations

import itertools
import operator
import re
import types
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jinja2
import jinja2.utils
import markupsafe

BASE_WORK = 16_000_000  # what any render may take: about a second
WORK_PER_CHARACTER = 64  # plus this much per character that was put in,
MORE_WORK = 32_000_000  # up to two seconds more,
LONG_WORK = 4  # and this much per character however many there are
BASE_SIZE = 96 << 20  # bytes that any render may make, and so on
SIZE_PER_CHARACTER = 512
MORE_SIZE = 64 << 20
LONG_SIZE = 48

CALL_WORK = 32  # a call of a macro, method or filter
STEP_WORK = 8  # one step through an iterator
NODE_WORK = 4  # one value that is walked past
FIELD_WORK = 64  # one field of str.format, which string.Formatter makes in Python
POINTER = 8  # a place in a list
OBJECT = 64  # the least that a value of its own takes
ENTRY = 104  # a place in a dict, with room to grow
CHARACTER = 96  # a character as a string of its own, with its place in a list
GENERATOR = 512
NUMERAL = 400  # the longest text of a float without a precision

WIDEST_FIELD = 1 << 16  # largest width, precision or indent in a format
LONGEST_NUMBER = 1 << 12  # bits of an integer
LARGEST_DISTINCT = (1 << 61) - 2  # integers up to here have hashes of their own
DEEPEST = 320  # levels of nesting: more than a row may have (256), less than the C stack can take
SHORT = 64  # characters that cost nothing to look at
QUOTED = 10  # how much longer `repr` may make a text: \\U0010ffff
ESCAPED = 6  # how much longer HTML or JSON escapes may make it: &quot; and \\u0000
CASED = 16  # bytes that a change of case needs per character beyond ASCII: three UCS-4 and one more

_DIGITS = re.compile(r"\d+")
_LINE_ENDS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"
_VIEWS: tuple[Any, ...] = (type({}.keys()), type({}.values()), type({}.items()))
_COLLECTIONS: tuple[Any, ...] = (list, tuple, set, frozenset, *_VIEWS)
SIZED: tuple[Any, ...] = (*_COLLECTIONS, str, dict, range)
SCALARS = frozenset((str, int, float, bool, type(None)))

Arguments = tuple[Any, ...]
Keywords = dict[str, Any]


class LimitReached(Exception):
    """The template took more than it may."""


def text_size(text: str) -> int:
    """Bytes that a text takes at most: the same on every machine, unlike what Python caches."""
    return len(text) if text.isascii() else 4 * len(text)


def _leaf_size(value: Any) -> int:
    if isinstance(value, str):
        return text_size(value)
    return NUMERAL if isinstance(value, float) else OBJECT + _bits(value)


def _bits(value: Any) -> int:
    """Bits of a number that is longer than most."""
    return value.bit_length() & -128 if isinstance(value, int) else 0


def _members(value: Any) -> tuple[int, Iterator[Any]] | None:
    """What a value holds and would show, hash or compare; None for one that holds nothing."""
    if value.__class__ in SCALARS:
        return None
    if isinstance(value, (dict, types.MappingProxyType)):
        return 2 * len(value), itertools.chain(value, value.values())
    if isinstance(value, _COLLECTIONS):
        return len(value), iter(value)
    if isinstance(value, jinja2.utils.Namespace):
        return _members(object.__getattribute__(value, "_Namespace__attrs"))
    return None


class Weight(NamedTuple):
    """All that a value holds, what is held twice counted twice."""

    nodes: int
    text: int  # bytes
    depth: int

    @property
    def shown(self) -> int:
        """Bytes that its `repr` takes at most."""
        return OBJECT * self.nodes + QUOTED * self.text


class Budget:
    """What is left of one render's allowance."""

    __slots__ = ("size", "work")

    def __init__(self) -> None:
        self.work = 0
        self.size = 0

    def refill(self, characters: int) -> None:
        """Start a render whose input has this many characters."""
        self.work = (
            BASE_WORK + min(WORK_PER_CHARACTER * characters, MORE_WORK) + LONG_WORK * characters
        )
        self.size = (
            BASE_SIZE + min(SIZE_PER_CHARACTER * characters, MORE_SIZE) + LONG_SIZE * characters
        )

    def spend(self, work: int) -> None:
        """Charge work."""
        self.work -= work
        if self.work < 0:
            raise LimitReached("the template takes too many steps")

    def make(self, size: int) -> None:
        """Charge bytes before they are made."""
        self.size -= size
        if self.size < 0:
            raise LimitReached("the template makes too much text")

    def charge(self, work: int, size: int) -> None:
        """Charge both."""
        self.spend(work)
        self.make(size)

    def walk(self, iterable: Any, work: int = STEP_WORK) -> Any:
        """Charge steps: of sized things at once and as they are, of generators one by one."""
        if isinstance(iterable, SIZED):
            self.spend(work * len(iterable) + 1)
            return iterable
        if not isinstance(iterable, Iterable) or isinstance(iterable, jinja2.Undefined):
            return iterable  # which fails, or is empty
        return self._steps(iterable, work)

    def _steps(self, iterable: Iterable[Any], work: int) -> Iterator[Any]:
        for value in iterable:
            self.charge(work, POINTER)
            yield value

    def listed(self, iterable: Any) -> Any:
        """The same thing with a length that can be asked for, for what is consumed at once."""
        walked = self.walk(iterable)
        if walked is iterable or not isinstance(walked, types.GeneratorType):
            return walked
        return list(walked)

    def weigh(self, value: Any) -> Weight:
        """Walk all that a value holds, charging each step.

        Raises:
            LimitReached: It holds more than may be walked, or goes deeper than Python can follow.
        """
        members = _members(value)
        if members is None:
            return Weight(1, _leaf_size(value), 0)
        nodes, text, depth = 1, 0, 1
        self.spend(NODE_WORK * members[0])
        pending = [members[1]]
        while pending:
            for inner in pending[-1]:
                nodes += 1
                if inner.__class__ is str:
                    text += len(inner) if inner.isascii() else 4 * len(inner)
                    continue
                members = _members(inner)
                if members is None:
                    text += _leaf_size(inner)
                    continue
                self.spend(NODE_WORK * members[0] + 2 * NODE_WORK)
                pending.append(members[1])
                depth = max(depth, len(pending))
                if depth > DEEPEST:
                    raise LimitReached("the template nests values too deep")
                break
            else:
                pending.pop()
        return Weight(nodes, text, depth)

    def shown(self, value: Any) -> int:
        """Bytes of a value's text at most, walked but not charged."""
        if isinstance(value, str):
            return text_size(value)
        self.spend(_bits(value))  # decimal digits take the square of their number
        return self.weigh(value).shown

    def show(self, value: Any) -> Any:
        """Charge a value that is about to become text; nested ones by all they hold."""
        if value.__class__ is str:
            self.size -= len(value) if value.isascii() else 4 * len(value)
            if self.size < 0:
                raise LimitReached("the template makes too much text")
        else:
            self.make(self.shown(value))
        return value

    def measure(self, value: Any) -> Any:
        """Charge a call and what it returned."""
        self.work -= CALL_WORK
        if self.work < 0:
            raise LimitReached("the template takes too many steps")
        kind = value.__class__
        if kind is str:
            self.make(OBJECT + (len(value) if value.isascii() else 4 * len(value)))
        elif kind is int:
            if value.bit_length() > LONGEST_NUMBER:
                raise LimitReached("the template makes an enormous number")
        elif kind is list or kind is tuple:
            self.make(OBJECT + POINTER * len(value))
        elif isinstance(value, str):
            self.make(text_size(value))
        elif isinstance(value, (dict, set, frozenset)):
            self.make(OBJECT + ENTRY * len(value))
        else:
            self.make(GENERATOR if kind is types.GeneratorType else OBJECT)
        return value


def _given(args: Arguments, kwargs: Keywords, place: int, name: str, otherwise: Any = None) -> Any:
    """An argument, by place or by name."""
    return args[place] if len(args) > place else kwargs.get(name, otherwise)


def _count(value: Any) -> int:
    """A number that was given as an argument; what is no number fails by itself."""
    return max(value, 0) if isinstance(value, int) else 0


def _length(value: Any) -> int:
    return len(value) if isinstance(value, str) else 0


# Operators, slices, comparisons, keys.


def price_operator(budget: Budget, symbol: str, left: Any, right: Any) -> None:
    """Charge what ``left operator right`` will make, before it is made."""
    if isinstance(left, (int, float)) and isinstance(right, (int, float)):
        bits = left.bit_length() if isinstance(left, int) and isinstance(right, int) else 0
        if symbol == "**" and bits * max(right, 0) > LONGEST_NUMBER:
            raise LimitReached("the template makes an enormous number")
    elif symbol == "*":
        for repeated, times in ((left, right), (right, left)):
            if isinstance(repeated, (str, list, tuple)) and isinstance(times, int):
                budget.make(_copied(repeated) * max(times, 0))
    elif symbol == "%":
        if isinstance(left, str):
            price_percent(budget, left, right)
    elif symbol == "+":
        budget.make(_copied(left) + _copied(right))
    else:  # views of dicts can be subtracted, from and by whatever can be iterated
        for side in (left, right):
            if isinstance(side, SIZED):
                price_keys(budget, side)
    if isinstance(left, markupsafe.Markup) or isinstance(right, markupsafe.Markup):
        budget.make((ESCAPED + 1) * (_copied(left) + _copied(right)))


def _copied(value: Any) -> int:
    """Bytes of a copy of a text or a list."""
    if isinstance(value, str):
        return text_size(value)
    return POINTER * len(value) if isinstance(value, (list, tuple)) else 0


def price_slice(budget: Budget, value: Any, start: Any, stop: Any, step: Any) -> None:
    """Charge ``value[start:stop:step]``."""
    if isinstance(value, (str, list, tuple)):
        made = len(range(*slice(start, stop, step).indices(len(value))))
        each = POINTER if not isinstance(value, str) else 1 if value.isascii() else 4
        budget.charge(made >> 4, OBJECT + made * each)


def price_comparison(budget: Budget, symbol: str, left: Any, right: Any) -> None:
    """Charge ``left < right`` and the like: no more is looked at than the lighter side has."""
    if isinstance(left, str):
        if isinstance(right, str) and len(left) > SHORT:
            budget.spend(min(len(left), len(right)) >> 4)
    elif left.__class__ not in SCALARS and right.__class__ not in SCALARS:
        alike = left.__class__ is right.__class__ and isinstance(left, (list, tuple, dict))
        if not (alike and symbol in ("eq", "ne") and len(left) != len(right)):
            _price_equality(budget, left)


def _price_equality(budget: Budget, value: Any, times: int = 1) -> None:
    """Charge comparing a value so many times with whatever there is."""
    if value.__class__ in SCALARS:
        budget.spend(times * (1 + (_length(value) >> 4)))
    else:
        weight = budget.weigh(value)
        budget.spend(times * (NODE_WORK * weight.nodes + (weight.text >> 4)))


def price_membership(budget: Budget, value: Any, container: Any) -> Any:
    """Charge ``value in container`` and return the container; an iterator charges its steps."""
    if isinstance(container, str):
        if isinstance(value, str):
            _price_search(budget, container, value)
    elif isinstance(container, (dict, set, frozenset, types.MappingProxyType)):
        price_key(budget, value, container)
    elif isinstance(container, SIZED):
        if not (isinstance(container, range) and isinstance(value, int)):
            _price_equality(budget, value, NODE_WORK * len(container) + 1)
    elif isinstance(container, Iterable):
        weight = budget.weigh(value)
        each = STEP_WORK + NODE_WORK * weight.nodes + (weight.text >> 4)
        return budget.walk(container, each)
    return container


def _collides(key: Any) -> bool:
    """Whether a key's hash can be chosen, so that many keys fall on one place of a table."""
    if isinstance(key, int):
        return not -LARGEST_DISTINCT <= key <= LARGEST_DISTINCT
    return not (isinstance(key, str) or key is None)


def price_key(budget: Budget, key: Any, table: Any = ()) -> None:
    """Charge looking up a key: hashing it, and comparing it where keys collide."""
    if isinstance(key, str):
        if len(key) > SHORT:
            budget.spend(len(key) >> 4)
    elif _collides(key):
        budget.weigh(key)  # tuples have their hash worked out each time, as deep as they go
        _price_equality(budget, key, 1 + (len(table) if _members(table) is not None else 0))


def price_keys(budget: Budget, keys: Iterable[Any]) -> None:
    """Charge making a table of these keys: each with each, where they can be made to collide."""
    colliding, each = 0, 0
    for key in keys:
        if isinstance(key, str):
            budget.charge(1 + (len(key) >> 4), ENTRY)
        else:
            budget.charge(NODE_WORK, ENTRY)
            if _collides(key):
                colliding += 1
                each = max(each, budget.weigh(key).nodes)
    budget.spend(colliding * colliding * each)


# Texts.


def _price_search(budget: Budget, text: str, needle: str, backwards: bool = False) -> None:
    """Charge looking for one text in another, in the worst case of CPython's algorithms.

    Forwards, long texts are searched in linear time, short ones in the product of both lengths;
    backwards, all are.
    """
    length = len(text)
    if length <= SHORT or len(needle) > length:
        return
    if backwards:
        budget.spend(length * len(needle) >> 5)
    else:
        budget.spend((length * min(len(needle), 128) >> 6) if length < 30_000 else length >> 3)


def free(budget: Budget, value: Any, args: Arguments, kwargs: Keywords) -> None:
    """What takes no longer for large values than for small ones."""


def _price_scan(budget: Budget, text: Any, args: Arguments, kwargs: Keywords) -> None:
    budget.spend(_length(text) >> 3)


def _price_copy(budget: Budget, text: Any, args: Arguments, kwargs: Keywords) -> None:
    if isinstance(text, str):
        budget.charge(len(text) >> 6, text_size(text))


def _price_cased(budget: Budget, text: Any, args: Arguments, kwargs: Keywords) -> None:
    if isinstance(text, str):
        budget.charge(len(text) >> 1, CASED * len(text))


def _price_lower(budget: Budget, text: Any, args: Arguments, kwargs: Keywords) -> None:
    if isinstance(text, str) and text.isascii():
        budget.charge(len(text) >> 4, len(text))
    else:
        _price_cased(budget, text, args, kwargs)


def _price_strip(budget: Budget, text: Any, args: Arguments, kwargs: Keywords) -> None:
    """Every character is looked for in a set given as text: the product of both lengths."""
    chars = _given(args, kwargs, 0, "chars")
    if isinstance(text, str):
        budget.charge((len(text) >> 4) + (len(text) * _length(chars) >> 5), text_size(text))


def _price_find(
    budget: Budget, text: str, args: Arguments, kwargs: Keywords, backwards: bool = False
) -> None:
    if args and isinstance(args[0], str):
        _price_search(budget, text, args[0], backwards)


def _price_partition(
    budget: Budget, text: str, args: Arguments, kwargs: Keywords, backwards: bool = False
) -> None:
    _price_find(budget, text, args, kwargs, backwards)
    budget.make(4 * OBJECT + text_size(text))


def _price_prefix(budget: Budget, text: str, args: Arguments, kwargs: Keywords) -> None:
    for tried in args[:1]:
        if isinstance(tried, str):
            budget.spend(len(tried) >> 6)
        elif isinstance(tried, tuple):
            budget.spend(NODE_WORK * len(tried))
            budget.spend(sum(_length(prefix) for prefix in tried) >> 6)


def _price_split(
    budget: Budget, text: str, args: Arguments, kwargs: Keywords, backwards: bool = False
) -> None:
    separator = _given(args, kwargs, 0, "sep")
    most = _given(args, kwargs, 1, "maxsplit", -1)
    if isinstance(separator, str) and separator:
        _price_search(budget, text, separator, backwards)
        pieces = len(text) // len(separator) + 1
        if pieces > SHORT:
            _price_search(budget, text, separator)
            pieces = text.count(separator) + 1
    else:
        budget.spend(len(text) >> 3)
        pieces = len(text) // 2 + 1
    if isinstance(most, int) and most >= 0:
        pieces = min(pieces, most + 1)
    _price_parts(budget, text, pieces)


def _price_splitlines(budget: Budget, text: str, args: Arguments, kwargs: Keywords) -> None:
    pieces = len(text) + 1
    if pieces > SHORT:
        budget.spend(len(text) >> 2)
        pieces = 1 + sum(map(text.count, _LINE_ENDS))
    _price_parts(budget, text, pieces)


def _price_parts(budget: Budget, text: str, pieces: int) -> None:
    each = POINTER + OBJECT + (OBJECT if isinstance(text, markupsafe.Markup) else 0)
    budget.charge(pieces, each * pieces + text_size(text))


def _price_replace(budget: Budget, text: Any, args: Arguments, kwargs: Keywords) -> None:
    text = str(text)  # as the filter does
    old, new = (str(_given(args, kwargs, i, n, "")) for i, n in enumerate(("old", "new")))
    longer = text_size(new) - (len(old) if text.isascii() else 4 * len(old))
    _price_search(budget, text, old)
    size = text_size(text)
    if longer > 0 and text:
        places = len(text) // max(len(old), 1) + 1
        if places * longer > size + SHORT:  # count, where guessing would be unfair
            _price_search(budget, text, old)
            places = text.count(old)
        size += places * longer
    if not new.isascii() and text.isascii():
        size += 3 * len(text)  # all of it becomes as wide as the new characters
    budget.charge(len(text) >> 4, size)


def _price_pad(budget: Budget, text: Any, args: Arguments, kwargs: Keywords) -> None:
    width = _count(_given(args, kwargs, 0, "width", 80))
    budget.make(4 * max(width, _length(text)) if width > SHORT else text_size(text) + SHORT)


def _price_expandtabs(budget: Budget, text: str, args: Arguments, kwargs: Keywords) -> None:
    width = _count(_given(args, kwargs, 0, "tabsize", 8))
    budget.charge(len(text) >> 3, text_size(text) + 4 * text.count("\t") * width)


def _price_join_method(budget: Budget, glue: str, args: Arguments, kwargs: Keywords) -> None:
    if args:
        price_join(budget, glue, args[0])


def price_join(budget: Budget, glue: str, values: Any) -> None:
    """Charge ``join`` by what it will make. Iterators have been listed."""
    if isinstance(values, SIZED):
        count = len(values)
        budget.charge(NODE_WORK * count, OBJECT + text_size(glue) * count)
        if isinstance(values, str):
            budget.make(text_size(values) + POINTER * count)
        else:
            ascii_only = glue.isascii()
            size = 0
            for value in values:
                if isinstance(value, str):
                    size += len(value)
                    ascii_only = ascii_only and value.isascii()
                else:
                    size += budget.shown(value)
            budget.make(size if ascii_only else 4 * size + 3 * len(glue) * count)


def _price_translate(budget: Budget, text: str, args: Arguments, kwargs: Keywords) -> None:
    longest = 1
    for table in args[:1]:
        members = _members(table)
        if members is not None:
            budget.spend(NODE_WORK * members[0])
            longest = max((_length(value) for value in members[1]), default=1)
    budget.charge(NODE_WORK * len(text), 4 * len(text) * max(longest, 1))


def _price_maketrans(budget: Budget, text: Any, args: Arguments, kwargs: Keywords) -> None:
    for given in args:
        count = len(given) if isinstance(given, (str, dict)) else 0
        budget.charge(NODE_WORK * count, (ENTRY + OBJECT) * count)


def _price_striptags(budget: Budget, text: Any, args: Arguments, kwargs: Keywords) -> None:
    length = _length(text)
    if length:
        tags = text.count("<")
        budget.charge(16 * length + (length * tags >> 8), ESCAPED * CASED * length)


def _price_escape(budget: Budget, text: Any, args: Arguments, kwargs: Keywords) -> None:
    if isinstance(text, str):
        budget.charge(len(text) >> 3, 2 * ESCAPED * text_size(text))
    for value in args:
        budget.make(2 * ESCAPED * budget.shown(value))


# Formats.


def widths(template: str) -> int:
    """The sum of all widths and precisions that a format names.

    Raises:
        LimitReached: One of them is larger than any text needs.
    """
    total = 0
    for found in _DIGITS.finditer(template):
        digits = found[0]
        if len(digits) > 6 or int(digits) > WIDEST_FIELD:
            raise LimitReached("the template formats an enormously wide field")
        total += int(digits)
    return total


def refuse_wide(values: Iterable[Any]) -> None:
    """Refuse widths given as arguments."""
    for value in values:
        if isinstance(value, int) and abs(value) > WIDEST_FIELD:
            raise LimitReached("the template asks for an enormous width")


def price_percent(budget: Budget, template: str, values: Any) -> None:
    """Charge ``template % values``."""
    fields = template.count("%")
    budget.spend(NODE_WORK * len(template) + 4 * FIELD_WORK * fields)
    size = text_size(template) + 4 * widths(template) + NUMERAL * fields
    if isinstance(values, tuple):
        size += QUOTED * sum(budget.shown(value) for value in values)
        if "*" in template:
            refuse_wide(values)
            size += 4 * template.count("*") * max(map(_count, values), default=0)
    else:  # a mapping's values may be asked for again in every field
        size += QUOTED * budget.shown(values) * max(fields, 1)
    budget.make(size)


def price_field(budget: Budget, value: Any, specification: str) -> None:
    """Charge one field of ``str.format``, when it is made and all that is nested is known."""
    size = budget.shown(value) + 4 * widths(specification) + NUMERAL
    budget.charge(FIELD_WORK, 2 * size)


def _price_format_filter(budget: Budget, text: Any, args: Arguments, kwargs: Keywords) -> None:
    price_percent(budget, str(text), kwargs or args)


def _price_strftime(budget: Budget, value: Any, args: Arguments, kwargs: Keywords) -> None:
    for template in (*args, *kwargs.values()):
        if isinstance(template, str):
            fields = template.count("%")
            budget.charge(
                FIELD_WORK * fields + len(template),
                4 * widths(template) + 16 * OBJECT * fields + 16 * len(template),
            )


# Numbers.


def _price_number(budget: Budget, value: Any, args: Arguments, kwargs: Keywords) -> None:
    if isinstance(value, str):
        budget.charge(len(value), QUOTED * text_size(value))  # an error would quote it
    budget.spend(4 * FIELD_WORK)


def _price_round(budget: Budget, value: Any, args: Arguments, kwargs: Keywords) -> None:
    precision = _given(args, kwargs, 0, "precision", 0)
    refuse_wide((precision,))
    budget.spend(FIELD_WORK * 8 + (abs(precision) if isinstance(precision, int) else 0))


def _price_remainder(budget: Budget, value: Any, args: Arguments, kwargs: Keywords) -> None:
    """``value is divisibleby x`` is ``value % x``, which formats where the value is a text."""
    if not isinstance(value, (int, float)):
        price_operator(budget, "%", value, args[0] if args else 2)


# Lists and dicts.


def _price_index(budget: Budget, values: Any, args: Arguments, kwargs: Keywords) -> None:
    for sought in args[:1]:
        _price_equality(budget, sought, NODE_WORK * len(values) + 1)


def _price_list_copy(budget: Budget, values: Any, args: Arguments, kwargs: Keywords) -> None:
    if isinstance(values, str):
        budget.make((POINTER if values.isascii() else CHARACTER) * len(values))
    elif isinstance(values, range):
        budget.make(OBJECT * len(values))
    elif isinstance(values, SIZED):
        budget.make(ENTRY * len(values))


def _price_lookup(budget: Budget, table: Any, args: Arguments, kwargs: Keywords) -> None:
    for key in args[:1]:
        price_key(budget, key, table)


def _price_dict_copy(budget: Budget, table: Any, args: Arguments, kwargs: Keywords) -> None:
    price_keys(budget, table)


def _price_fromkeys(budget: Budget, table: Any, args: Arguments, kwargs: Keywords) -> None:
    for keys in args[:1]:
        if isinstance(keys, SIZED):
            price_keys(budget, keys)


def _price_table(budget: Budget, table: Any, args: Arguments, kwargs: Keywords) -> None:
    """Charge ``dict(…)`` and ``namespace(…)``."""
    for given in args[:1]:
        if isinstance(given, (dict, types.MappingProxyType)):
            price_keys(budget, given)
        elif isinstance(given, SIZED):
            for pair in given:  # whatever can be iterated
                if isinstance(pair, SIZED):
                    budget.charge(NODE_WORK * len(pair), POINTER * len(pair))
            pairs: list[Any] = [p for p in given if isinstance(p, (list, tuple, str)) and p]
            price_keys(budget, (pair[0] for pair in pairs))
    budget.make(4 * OBJECT + 2 * ENTRY * len(kwargs))


def _price_changed(budget: Budget, value: Any, args: Arguments, kwargs: Keywords) -> None:
    _price_equality(budget, args)


def price_shown(budget: Budget, value: Any, args: Arguments, kwargs: Keywords) -> None:
    """What becomes a text, or may: everything that is given."""
    for given in (value, *args, *kwargs.values()):
        size = budget.shown(given)
        budget.charge(size >> 3, size)


# Filters.


def step_work(args: Arguments, kwargs: Keywords) -> int:
    """Work of one step of a filter that looks up a name, or a path of names, in each item."""
    names = (name for name in (*args, *kwargs.values()) if isinstance(name, str))
    return 2 * CALL_WORK + sum((len(name) >> 2) + CALL_WORK * name.count(".") for name in names)


def _price_name(budget: Budget, value: Any, args: Arguments, kwargs: Keywords) -> None:
    budget.spend(4 * FIELD_WORK + sum(_length(name) >> 3 for name in (*args, *kwargs.values())))


def _price_batch(budget: Budget, value: Any, args: Arguments, kwargs: Keywords) -> None:
    if _given(args, kwargs, 1, "fill_with") is not None:
        budget.make(POINTER * _count(_given(args, kwargs, 0, "linecount")))
    _price_list_copy(budget, value, args, kwargs)


def _price_columns(budget: Budget, value: Any, args: Arguments, kwargs: Keywords) -> None:
    slices = _count(_given(args, kwargs, 0, "slices"))
    budget.charge(STEP_WORK * slices, 2 * OBJECT * slices)
    _price_list_copy(budget, value, args, kwargs)


def _price_sorted(budget: Budget, values: Any, args: Arguments, kwargs: Keywords) -> None:
    """Every level of a merge sort looks at every value; sorting by a key makes one of each."""
    if isinstance(values, dict):
        values = (*values, *values.values())
    if isinstance(values, SIZED):
        budget.spend(CALL_WORK * len(values))  # for weighing them
        total, text = 0, 0
        for value in values:
            weight = budget.weigh(value)
            total += 2 * NODE_WORK * weight.nodes + (weight.text >> 4)
            text += weight.text
        budget.charge(
            total * (1 + len(values).bit_length()), 4 * text + (ENTRY + OBJECT) * len(values)
        )


def _price_unique(budget: Budget, values: Any, args: Arguments, kwargs: Keywords) -> None:
    if isinstance(values, SIZED):
        price_keys(budget, values)
        budget.make(4 * sum(text_size(value) for value in values if isinstance(value, str)))


def _price_sum(budget: Budget, values: Any, args: Arguments, kwargs: Keywords) -> None:
    """Lists are added one by one, each sum a new list."""
    start = _given(args, kwargs, 1, "start", 0)
    if isinstance(values, SIZED):
        held = (len(value) for value in (start, *values) if isinstance(value, (list, tuple)))
        total = sum(held)
        budget.charge(
            NODE_WORK * len(values) + (total * len(values) >> 4), 2 * POINTER * total + OBJECT
        )


def _price_join_filter(budget: Budget, values: Any, args: Arguments, kwargs: Keywords) -> None:
    price_join(budget, str(_given(args, kwargs, 0, "d", "")), values)


def _price_indent(budget: Budget, text: Any, args: Arguments, kwargs: Keywords) -> None:
    width = _given(args, kwargs, 0, "width", 4)
    if isinstance(text, str):
        size = text_size(width) if isinstance(width, str) else _count(width)
        lines = len(text) + 2
        if lines * size > SHORT << 10:
            budget.spend(len(text) >> 2)
            lines = 2 + sum(map(text.count, _LINE_ENDS))
        wide = 1 if text.isascii() else 4
        budget.charge(
            (len(text) >> 3) + 2 * lines,
            3 * text_size(text) + lines * (wide * size + 2 * OBJECT),
        )


def _price_title(budget: Budget, text: Any, args: Arguments, kwargs: Keywords) -> None:
    budget.charge(NODE_WORK * _length(text), (CASED + CHARACTER) * _length(text))


def _price_words(budget: Budget, text: Any, args: Arguments, kwargs: Keywords) -> None:
    budget.charge(2 * _length(text), OBJECT * _length(text))


def _price_wordwrap(budget: Budget, text: Any, args: Arguments, kwargs: Keywords) -> None:
    """`textwrap` searches each place to the end of a word: the square of the length."""
    length = _length(text)
    glue = _given(args, kwargs, 2, "wrapstring")
    width = max(_count(_given(args, kwargs, 0, "width", 79)), 1)
    breaks = 2 * length // width + (sum(map(text.count, _LINE_ENDS)) if length else 0) + 2
    budget.charge(
        64 * length + (length * length >> 2),
        (CHARACTER + 8) * length + 4 * _length(glue) * breaks,
    )


def _price_urlize(budget: Budget, text: Any, args: Arguments, kwargs: Keywords) -> None:
    """Its expressions backtrack over a word, and every link gets the attributes anew."""
    length = _length(text)
    attributes = sum(
        QUOTED * _length(_given(args, kwargs, place, name))
        for place, name in ((2, "target"), (3, "rel"))
    )
    schemes = _given(args, kwargs, 4, "extra_schemes")
    budget.spend(length * (len(schemes) if isinstance(schemes, (list, tuple)) else 0))
    budget.charge(
        64 * length + (length * length >> 1),
        (CHARACTER + 8 * ESCAPED) * length + 4 * (length // 4 + 1) * attributes,
    )


def _price_urlencode(budget: Budget, value: Any, args: Arguments, kwargs: Keywords) -> None:
    size = budget.shown(value)
    budget.charge(NODE_WORK * size, 24 * size)


def _price_xmlattr(budget: Budget, value: Any, args: Arguments, kwargs: Keywords) -> None:
    weight = budget.weigh(value)
    budget.charge(2 * CALL_WORK * weight.nodes, 2 * ESCAPED * weight.shown)


def _price_pprint(budget: Budget, value: Any, args: Arguments, kwargs: Keywords) -> None:
    """Each level has its text made anew, and stands to the right of all keys above it."""
    weight = budget.weigh(value)
    indents = weight.nodes * (weight.depth + weight.text) if weight.depth > 1 else 0
    budget.charge(
        (CALL_WORK * weight.nodes + weight.text) * (weight.depth + 1),
        weight.shown * 3 + indents,
    )


def _price_tojson(budget: Budget, value: Any, args: Arguments, kwargs: Keywords) -> None:
    weight = budget.weigh(value)
    indent = _given(args, kwargs, 1, "indent")
    separators = _given(args, kwargs, 2, "separators")
    if not (separators is None or isinstance(separators, SIZED)):
        raise LimitReached("the template separates JSON by something that has no length")
    between = 4 if separators is None else sum(map(_length, separators))
    work, step = NODE_WORK * weight.nodes + (weight.text >> 3), OBJECT + 4 * between
    if indent is not None:  # then Python's own encoder is used, each level handing on the next's
        work += weight.nodes * (STEP_WORK + weight.depth)
        step += 4 * (1 + weight.depth * max(_length(indent), _count(indent)))
    if _given(args, kwargs, 3, "sort_keys"):
        work += (NODE_WORK * weight.nodes + (weight.text >> 4)) * weight.nodes.bit_length()
    budget.charge(work, weight.nodes * step + ESCAPED * weight.text)


Price = Callable[[Budget, Any, Arguments, Keywords], None]

_ABOUT_CHARACTERS = (
    "isalnum", "isalpha", "isascii", "isdecimal", "isdigit", "isidentifier", "islower",
    "isnumeric", "isprintable", "isspace", "istitle", "isupper",
)  # fmt: skip
_TEXT_METHODS: dict[str, Price] = {
    **dict.fromkeys(_ABOUT_CHARACTERS, _price_scan),
    **dict.fromkeys(("capitalize", "casefold", "swapcase", "title"), _price_cased),
    **dict.fromkeys(("lower", "upper"), _price_lower),
    **dict.fromkeys(("lstrip", "rstrip", "strip"), _price_strip),
    **dict.fromkeys(("count", "find", "index"), _price_find),
    **dict.fromkeys(("rfind", "rindex"), partial(_price_find, backwards=True)),
    **dict.fromkeys(("startswith", "endswith"), _price_prefix),
    **dict.fromkeys(("removeprefix", "removesuffix"), _price_copy),
    **dict.fromkeys(("center", "ljust", "rjust", "zfill"), _price_pad),
    **dict.fromkeys(("format", "format_map"), _price_copy),  # their fields: `price_field`
    "expandtabs": _price_expandtabs,
    "join": _price_join_method,
    "maketrans": _price_maketrans,
    "partition": _price_partition,
    "replace": _price_replace,
    "rpartition": partial(_price_partition, backwards=True),
    "rsplit": partial(_price_split, backwards=True),
    "split": _price_split,
    "splitlines": _price_splitlines,
    "translate": _price_translate,
}
_NUMBER_METHODS: dict[str, Price] = dict.fromkeys(
    ("as_integer_ratio", "bit_count", "bit_length", "conjugate", "hex", "is_integer"), free
)
METHODS: dict[type, dict[str, Price]] = {
    str: _TEXT_METHODS,
    markupsafe.Markup: {
        **_TEXT_METHODS,
        "escape": _price_escape,
        "striptags": _price_striptags,
        "unescape": _price_striptags,
    },
    int: _NUMBER_METHODS,
    bool: _NUMBER_METHODS,
    float: _NUMBER_METHODS,
    list: {"copy": _price_list_copy, "count": _price_index, "index": _price_index},
    tuple: {"count": _price_index, "index": _price_index},
    range: {"count": _price_index, "index": _price_index},
    dict: {
        "copy": _price_dict_copy,
        "fromkeys": _price_fromkeys,
        "get": _price_lookup,
        **dict.fromkeys(("items", "keys", "values"), free),
    },
}
"""Methods of Python's own values."""

FUNCTIONS: dict[str, Price] = {
    **dict.fromkeys(("Cycler", "Joiner", "cycle", "next", "reset", "safe_range", "_wrap"), free),
    **dict.fromkeys(("Namespace", "TemplateDict", "dict"), _price_table),
    "changed": _price_changed,
    "fromkeys": _price_fromkeys,
    "strftime_now": _price_strftime,
}
"""Functions, classes and methods written in Python, by name; others by what they are given."""

CONSUMING = frozenset(("Namespace", "TemplateDict", "dict", "fromkeys", "join"))
"""What runs over its first argument at once, so that iterators must be counted and listed first."""


class Filter(NamedTuple):
    """How a filter is charged."""

    price: Price
    takes: str = "value"
    """What it does with its value: "text" makes a text of it first, "steps" runs over it one by
    one, "list" at once, "list later" at once when the first result is asked for."""
    attribute: int | None = None  # place of the argument that names what of each item is meant


FILTERS: dict[str, Filter] = {
    **dict.fromkeys(("abs", "count", "d", "default", "first", "last", "length"), Filter(free)),
    **dict.fromkeys(("e", "escape", "forceescape"), Filter(_price_escape, "text")),
    **dict.fromkeys(("filesizeformat", "float", "int"), Filter(_price_number)),
    **dict.fromkeys(("lower", "upper"), Filter(_price_lower, "text")),
    **dict.fromkeys(
        ("map", "reject", "rejectattr", "select", "selectattr"), Filter(_price_name, "steps")
    ),
    **dict.fromkeys(("max", "min"), Filter(_price_sorted, "list", 1)),
    **dict.fromkeys(("safe", "string"), Filter(_price_copy, "text")),
    "attr": Filter(_price_name),
    "batch": Filter(_price_batch, "steps"),
    "capitalize": Filter(_price_cased, "text"),
    "center": Filter(_price_pad, "text"),
    "dictsort": Filter(_price_sorted),
    "format": Filter(_price_format_filter, "text"),
    "groupby": Filter(_price_sorted, "list", 0),
    "indent": Filter(_price_indent),
    "items": Filter(free, "steps"),
    "join": Filter(_price_join_filter, "list", 1),
    "list": Filter(_price_list_copy, "list"),
    "pprint": Filter(_price_pprint),
    "replace": Filter(_price_replace, "text"),
    "reverse": Filter(_price_copy, "steps"),
    "round": Filter(_price_round),
    "slice": Filter(_price_columns, "steps"),
    "sort": Filter(_price_sorted, "list", 2),
    "striptags": Filter(_price_striptags, "text"),
    "sum": Filter(_price_sum, "list", 0),
    "title": Filter(_price_title, "text"),
    "tojson": Filter(_price_tojson),
    "trim": Filter(_price_strip, "text"),
    "truncate": Filter(_price_copy),
    "unique": Filter(_price_unique, "list later", 1),
    "urlencode": Filter(_price_urlencode, "list"),
    "urlize": Filter(_price_urlize, "text"),
    "wordcount": Filter(_price_words, "text"),
    "wordwrap": Filter(_price_wordwrap),
    "xmlattr": Filter(_price_xmlattr),
}
"""The filters of jinja2; one that is not here is refused."""


def _price_test_of(symbol: str) -> Price:
    def price(budget: Budget, value: Any, args: Arguments, kwargs: Keywords) -> None:
        for other in args[:1]:
            price_comparison(budget, symbol, value, other)

    return price


_COMPARISONS = {
    "eq": ("==", "eq", "equalto"), "ne": ("!=", "ne"), "gt": (">", "gt", "greaterthan"),
    "ge": (">=", "ge"), "lt": ("<", "lt", "lessthan"), "le": ("<=", "le"),
}  # fmt: skip
TESTS: dict[str, Price | None] = {
    **dict.fromkeys(
        (
            "boolean", "callable", "defined", "escaped", "false", "float", "integer", "iterable",
            "mapping", "none", "number", "sameas", "sequence", "string", "true", "undefined",
        )
    ),
    **{name: _price_test_of(symbol) for symbol, names in _COMPARISONS.items() for name in names},
    **dict.fromkeys(("divisibleby", "even", "odd"), _price_remainder),
    **dict.fromkeys(("filter", "test"), lambda budget, value, *_: price_key(budget, value)),
    **dict.fromkeys(("lower", "upper"), price_shown),
    "in": None,  # `price_membership` instead, which replaces iterators
}  # fmt: skip
"""The tests of jinja2, None where they cost the same whatever they are given."""

OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "eq": operator.eq, "ne": operator.ne, "gt": operator.gt, "gteq": operator.ge,
    "lt": operator.lt, "lteq": operator.le,
}  # fmt: skip
"""Comparisons under the names that jinja2 has for them."""
