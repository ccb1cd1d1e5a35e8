"""Checks of a row's own content: texts, encodings, tool calls, groups and images."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from tokenmill.chat import ChatSpec, Rendering
from tokenmill.chat.calls import strings
from tokenmill.chat.images import MediaTokens, take_images
from tokenmill.chat.shapes import AnswerGroup, Conversation, Plain
from tokenmill.chat.template import REASONING_KEYS
from tokenmill.errors import RowError
from tokenmill.inspect.lint.rules import excerpt
from tokenmill.media import Images, Reference, reference_of
from tokenmill.media.reference import MissingImage
from tokenmill.tokenizers.encoded import Encoded

RowFinding = tuple[str, str, str]  # rule, detail, excerpt
Side = Conversation | Plain

CALL_KEYS = ("tool_calls", "function_call")
SILENT_ROLES = ("tool", "function", "ipython")  # an empty tool result is a result


def texts_of(parsed: Side) -> Iterator[tuple[str, str]]:
    """Yield (place, text) for every text of a row."""
    if isinstance(parsed, Plain):
        if parsed.prompt:
            yield "the prompt", parsed.prompt
        yield "the text" if parsed.shape == "text" else "the completion", parsed.text
        return
    for number, message in enumerate(parsed.messages):
        place = f"turn {number} ({message['role']})"
        content = message.get("content")
        if isinstance(content, str):
            yield place, content
        elif isinstance(content, list):
            for part in content:
                if isinstance(part, dict) and isinstance(part.get("text"), str):
                    yield place, part["text"]
        if len(message) > 2:
            reasoning = [message.get(key) for key in REASONING_KEYS]
            for value in dict.fromkeys(text for text in reasoning if isinstance(text, str)):
                yield f"the reasoning of {place}", value
            for key in CALL_KEYS:
                for text in strings(message.get(key)):
                    yield f"a call of {place}", text


def control_text(
    tokens: re.Pattern[str] | None, texts: Iterable[tuple[str, str]]
) -> Iterator[RowFinding]:
    for place, text in texts:
        match = None if tokens is None else tokens.search(text)
        if match is not None:
            detail = f"{place} contains {match[0]!r}, which is encoded as a control token"
            yield "control_text", detail, excerpt(text, match.start())


def empty_turns(parsed: Side) -> Iterator[RowFinding]:
    if isinstance(parsed, Plain):
        if parsed.shape == "prompt_completion" and not parsed.prompt.strip():
            yield "empty_turn", "the prompt is empty", excerpt(parsed.text)
        if not parsed.text.strip():
            yield "empty_turn", "the trained text is empty", excerpt(parsed.prompt)
        return
    for number, message in enumerate(parsed.messages):
        content = message.get("content")
        text = content.strip() if isinstance(content, str) else content
        more = any(message.get(key) for key in (*REASONING_KEYS, *CALL_KEYS))
        if not text and not more and message["role"] not in SILENT_ROLES:
            before = parsed.messages[number - 1].get("content") if number else None
            shown = excerpt(before) if isinstance(before, str) else ""
            yield "empty_turn", f"turn {number} ({message['role']}) is empty", shown


def argument_texts(row: Any, columns: Sequence[str]) -> Iterator[RowFinding]:
    """Yield tool calls with text as arguments, from the row before normalization."""
    turns = next((row[name] for name in columns if row.get(name) is not None), None)
    for number, turn in enumerate(turns if isinstance(turns, list) else ()):
        calls = turn.get("tool_calls") if isinstance(turn, dict) else None
        for call in calls if isinstance(calls, list) else ():
            function = function_of(call)
            arguments, name = function.get("arguments"), function.get("name")
            if not isinstance(arguments, str):
                continue
            if _is_object(arguments):
                detail = f"turn {number} calls {name!r} with JSON text as arguments"
                yield "string_arguments", detail, excerpt(arguments)
            else:
                detail = f"turn {number} calls {name!r} with text that is not a JSON object"
                yield "broken_arguments", detail, excerpt(arguments)


def function_of(value: Any) -> dict[str, Any]:
    function = value.get("function", value) if isinstance(value, dict) else None
    return function if isinstance(function, dict) else {}


def _is_object(text: str) -> bool:
    try:
        return isinstance(msgspec.json.decode(text), dict)
    except (msgspec.DecodeError, RecursionError, UnicodeEncodeError):
        return False


# Mojibake is UTF-8 read as Latin-1 or Windows-1252 (``cafÃ©``, ``donâ€™t``). One ``Â`` or ``Ã``
# before a character that follows it in no language is enough. Other sequences that are valid UTF-8
# count only if there are several and they contain most characters beyond ASCII, so that
# ``«CAFÉ»`` and ``CORAÇÃO`` pass.


MIN_SEQUENCES = 3  # of weak evidence
MIN_SHARE = 0.9  # of the characters beyond ASCII that they make up

# Bytes 0x80 to 0xBF, which follow a lead byte in UTF-8, decoded as Windows-1252 or Latin-1.
_TRAIL = "".join(bytes([byte]).decode("cp1252", "ignore") for byte in range(0x80, 0xC0))
_TRAIL += "".join(map(chr, range(0x80, 0xA0)))
# Quotes, dashes and dots may follow a letter in real text, so after Â and Ã they prove nothing.
_PLAIN_TRAIL = "".join(c for c in _TRAIL if c not in "‘’“”–—…‹›‚„«» \u00a0\u00ba\u00aa\u00b7")

_STRONG = re.compile(
    f"[\u00c2\u00c3][{re.escape(_PLAIN_TRAIL)}]|\u00e2\u20ac[{re.escape(_TRAIL)}]|"
    "\u00f0\u0178[" + re.escape(_TRAIL) + "]{2}|\u00ef\u00bb\u00bf"
)
_WEAK = re.compile(
    f"[\u00c2-\u00df][{re.escape(_TRAIL)}]|[\u00e0-\u00ef][{re.escape(_TRAIL)}]{{2}}"
    f"|[\u00f0-\u00f4][{re.escape(_TRAIL)}]{{3}}"
)
_BEYOND_ASCII = re.compile("[^\x00-\x7f]")

_SIGNS = (
    ("replacement_character", re.compile("\ufffd")),
    # Code writes an emoji as an escaped pair; half of a pair is damage.
    (
        "escaped_surrogate",
        re.compile(
            r"\\u[dD][89aAbB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F][0-9a-fA-F]{2})"
            r"|(?<!\\u[dD][89aAbB][0-9a-fA-F]{2})\\u[dD][c-fC-F][0-9a-fA-F]{2}"
        ),
    ),
    ("byte_order_mark", re.compile("\ufeff")),
    ("control_character", re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")),
)
# A quick test: accents are common, but a lead byte before a trail byte is not.
_ANY = re.compile(
    "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ufeff\ufffd]|\\\\u[dD]|"
    f"[\u00c2-\u00f4][{re.escape(_TRAIL)}]"
)


def odd_characters(texts: Iterable[tuple[str, str]]) -> Iterator[RowFinding]:
    for place, text in texts:
        for rule, at in first_positions(text).items():
            sign = text[at : at + 6] if rule == "escaped_surrogate" else text[at]
            shown = f"U+{ord(sign):04X}" if len(sign) == 1 else sign
            yield rule, f"{place} has {shown} at character {at:,}", excerpt(text, at)


def first_positions(text: str) -> dict[str, int]:
    """Return the first position of every rule that a text breaks."""
    if not _ANY.search(text):
        return {}
    broken = mojibake(text)
    positions = {} if broken is None else {"mojibake": broken}
    for rule, pattern in _SIGNS:
        match = pattern.search(text)
        # Half of a wrongly decoded character may be a control character: report it once.
        if match is not None and not (rule == "control_character" and broken is not None):
            positions[rule] = match.start()
    return positions


def mojibake(text: str) -> int | None:
    """Return the start of wrongly decoded text, or None."""
    strong = _STRONG.search(text)
    if strong is not None:
        return strong.start()
    weak = [match for match in _WEAK.finditer(text) if _decodes(match[0])]
    if len(weak) < MIN_SEQUENCES:
        return None
    beyond = len(_BEYOND_ASCII.findall(text))
    inside = sum(len(match[0]) for match in weak)
    return weak[0].start() if inside >= MIN_SHARE * beyond else None


def _decodes(run: str) -> bool:
    """Return whether the characters, encoded as bytes, are one UTF-8 character."""
    data = bytearray()
    for character in run:
        try:
            data += character.encode("cp1252")
        except UnicodeEncodeError:
            if ord(character) > 0xFF:
                return False
            data.append(ord(character))
    try:
        return len(data.decode("utf-8")) == 1
    except UnicodeDecodeError:
        return False


# Groups. `prepare` rejects answers that cannot be compared; these checks are about the others.


MIN_GROUPS = 50  # fewer may be one-sided by chance
RARE_LABEL = 0.1  # share of the rarer label
ONE_LENGTH = 0.75  # share of pairs in which the longer, or the shorter, answer is chosen
MIN_REPEATED = 8  # characters; an answer may begin with a shorter prompt by chance


def sides_of(parsed: Side | AnswerGroup) -> list[Side]:
    return parsed.sides if isinstance(parsed, AnswerGroup) else [parsed]


def side_of(sides: Sequence[Side], part: int) -> Side:
    """Return the conversation of one text of a row; expanded turns share one."""
    return sides[part] if part < len(sides) else sides[0]


def comparisons(parsed: Side | AnswerGroup) -> Iterator[RowFinding]:
    if not isinstance(parsed, AnswerGroup):
        return
    scores, swapped = parsed.scores, ""
    if parsed.shape == "preference" and scores is not None and scores[0] < scores[1]:
        swapped = f"the score of chosen is {scores[0]:g}, that of rejected {scores[1]:g}"
    elif parsed.margin is not None and parsed.margin < 0:
        swapped = f"the margin is {parsed.margin:g}, so rejected is better than chosen"
    if swapped:
        yield "swapped_sides", swapped, excerpt(_prompt_and_answer(parsed.sides[0])[1])
    for number, side in enumerate(parsed.sides):
        prompt, answer = _prompt_and_answer(side)
        if len(prompt) >= MIN_REPEATED and answer.startswith(prompt):
            detail = f"{parsed.name(number)} begins with the prompt"
            yield "answer_repeats_prompt", detail, excerpt(answer)


def _prompt_and_answer(side: Side) -> tuple[str, str]:
    if isinstance(side, Plain):
        return side.prompt.strip(), side.text.strip()
    prompts = [m.get("content") for m in side.messages[: side.completion] if m["role"] == "user"]
    answer = side.messages[side.completion].get("content")
    return _text(prompts[-1] if prompts else ""), _text(answer)


def _text(content: Any) -> str:
    return content.strip() if isinstance(content, str) else ""


def balance(rendering: Rendering, encoded: Encoded) -> dict[str, int]:
    """Count answers by label, and pairs by which side has more trained tokens."""
    counts: Counter[str] = Counter()
    trained = encoded.trained
    rejected = {place for place, _ in encoded.rejected}
    for first, facts in rendering.groups.items():
        if first in rejected:
            continue
        if len(facts.labels) == 1:
            counts["wanted" if facts.labels[0] else "unwanted"] += 1
        elif facts.labels == (1, 0) and first + 1 not in rejected:
            difference = int(trained[first]) - int(trained[first + 1])
            counts["longer" if difference > 0 else "shorter" if difference else "equal"] += 1
    return dict(counts)


def one_sided(counts: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    labels = {name: counts.get(name, 0) for name in ("wanted", "unwanted")}
    answers, rare = sum(labels.values()), min(labels, key=lambda name: labels[name])
    if answers >= MIN_GROUPS and labels[rare] < RARE_LABEL * answers:
        yield "label_imbalance", f"{labels[rare]:,} of {answers:,} answers are {rare}"
    lengths = {name: counts.get(name, 0) for name in ("longer", "shorter")}
    pairs = sum(lengths.values()) + counts.get("equal", 0)
    usual = max(lengths, key=lambda name: lengths[name])
    if pairs >= MIN_GROUPS and lengths[usual] >= ONE_LENGTH * pairs:
        yield "length_bias", f"chosen is {usual} than rejected in {lengths[usual]:,} of {pairs:,}"


LARGE_PIXELS = 1 << 24  # 4096 × 4096; Qwen 2 VL uses 12.8 million at most, others less


def check_images(
    row: dict[str, Any], base: str | None, images: Images, spec: ChatSpec, tokens: MediaTokens
) -> tuple[list[RowFinding], list[tuple[int, int]]]:
    """Return findings, and the digests of bytes and name of every image (name 0: inline)."""
    row_findings: list[RowFinding] = []
    digests: list[tuple[int, int]] = []
    try:
        _, found = take_images(row, spec, tokens)
    except RowError:
        return row_findings, digests  # rendering raises the same error
    names: dict[int, str] = {}
    for image in (*found.own.values(), *(found.column or ())):
        try:
            reference = reference_of(image.value)
            data = images.read(reference, base)
            image = images.open(data, reference.name)
        except RowError as error:
            rule = "missing_image" if isinstance(error, MissingImage) else error.reason
            row_findings.append((rule, error.message, ""))
            continue
        digest, name = xxhash.xxh3_64_intdigest(data), reference.name
        digests.append((digest, _name_digest(reference)))
        if digest in names:
            same = name if name == names[digest] else f"{names[digest]} and {name}"
            row_findings.append(
                ("repeated_image", f"the row contains the same image twice: {same}", "")
            )
        names.setdefault(digest, name)
        width, height = image.size
        if width * height > LARGE_PIXELS:
            detail = f"{name} has {width:,} × {height:,} pixels"
            row_findings.append(("large_image", detail, ""))
    return row_findings, digests


def _name_digest(reference: Reference) -> int:
    if reference.kind == "inline":
        return 0
    return xxhash.xxh3_64_intdigest(reference.text().encode()) or 1


def image_copies(
    rows: npt.NDArray[np.int64],
    digests: npt.NDArray[np.uint64],  # of bytes and name of every image
) -> list[tuple[int, int]]:
    """Return pairs of a row and an earlier row that has the same image under another name."""
    known = digests[:, 1] != 0
    rows, contents, names = rows[known], digests[known, 0], digests[known, 1]
    first = first_equal(contents)
    other = names != names[first]
    return sorted(zip(rows[other].tolist(), rows[first[other]].tolist(), strict=True))


def first_equal(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
    _, first, inverse = np.unique(values, return_index=True, return_inverse=True)
    places: npt.NDArray[np.int64] = first[inverse]
    return places
