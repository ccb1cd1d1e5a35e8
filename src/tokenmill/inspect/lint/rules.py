"""Lint rules, findings, and the report.

An ``error`` loses the row, or trains something the data does not mean; a ``warning`` is probably
not intended; an ``info`` is worth knowing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tokenmill._core.origin import Origin
from tokenmill.errors import UsageError, check_one_of

SEVERITIES = ("error", "warning", "info")
FAIL_ON = (*SEVERITIES, "never")
SAMPLE_ROWS = 2000  # rows that lint checks by default: a few seconds
MAX_PLACES = 20  # rows listed per finding
EXCERPT_CHARS = 120
DETAIL_CHARS = 300


@dataclass(frozen=True, slots=True)
class Rule:
    name: str
    severity: str
    about: str  # what is wrong
    hint: str  # what to do


_TABLE = (
    # The reasons for which `prepare` rejects a row, two of them split more finely.
    ("bad_json", "error", "the bytes are not one JSON object",
     "mend the line: one JSON object per line, UTF-8, no NaN, no lone surrogates"),
    ("bad_shape", "error", "no conversation, pair or text that the format describes",
     "name the columns (--format, --messages-key …) or mend the row"),
    ("bad_group", "error", "answers that cannot be compared: one is empty, or they do not differ",
     "mend the row: two answers to one prompt that differ, a label that is true or false, a score "
     "for each answer"),
    ("missing_picture", "error", "a picture that the row refers to is not there",
     "put it there, or say where pictures are (--media-root)"),
    ("bad_media", "error", "a picture cannot be used: broken, too large, outside, or no processor",
     "mend or replace the picture; rows with pictures need --processor"),
    ("media_mismatch", "error", "more or fewer pictures than places for them",
     "one <image>, or one image part, for every picture of the row"),
    ("template_error", "error", "the chat template itself refuses the conversation",
     "mend the row, or use a template that accepts it (--chat-template)"),
    ("role_order", "error", "the template refuses these roles in this order",
     "merge neighbouring turns of one role, move the system turn to the front, or use another "
     "template"),
    ("template_drops_content", "error", "the template prints an assistant's words nowhere",
     "use a template that prints them, or take them out of the row"),
    ("template_drops_tool_calls", "error", "the template does not print the tool calls",
     "use a template that knows tool calls; this one trains an answer without them"),
    ("mask_unproven", "error", "no method could show which text is the assistant's",
     "see docs/masks.md; often the template cuts or rewrites the text"),
    ("trailing_user", "warning", "the conversation ends with a user turn",
     "--trailing trim keeps such rows without their last turn"),
    ("no_trained_tokens", "error", "nothing in the row would be trained",
     "look at --train-on, and at weight or train in the messages"),
    ("overlong", "warning", "the row has more tokens than --max-length",
     "raise --max-length, split the row, or --overlong truncate (which loses its end)"),
    ("limit", "error", "larger, deeper or costlier to render than any real row",
     "look at the row: it is damaged, or not one row"),
    # Rows that would be accepted.
    ("double_bos", "error", "the row starts with two begin-of-sequence tokens",
     "take the token out of the data or out of the template; one of them prints it already"),
    ("control_text", "error", "a control token is written inside somebody's text",
     "take it out or escape it: it is encoded as the real token and ends or opens a turn"),
    ("missing_closer", "warning", "no token closes what is trained",
     "nothing teaches the model to stop: use a template that prints and trains an end-of-turn, "
     "or append_eos"),
    ("generation_header", "info", "a generation block of the template holds the turn header",
     "nothing: the generation prompt gives the header, so it is not trained"),
    ("rewrites_history", "warning", "the template drops the thinking of earlier turns",
     '--expand turns (expand="turns") trains every turn once as the last, with its thinking'),
    ("template_drops_tools", "warning", "the row has tools and the template prints none of them",
     "the model would call functions it was never shown: use a template that prints tools"),
    ("template_drops_context", "warning", "the template prints a system, user or tool text nowhere",
     "the model would be trained to answer what it was not told: use a template that prints it, or "
     "move the words into a turn that is printed"),
    ("null_tool_keys", "warning", "null members in tools or calls change what the template prints",
     "drop them: a columnar schema has filled them in; Parquet rows lose them here by themselves"),
    ("broken_arguments", "warning", "a call's arguments are text that is no JSON object",
     "mend them: the template prints the text as it stands, quotes and all"),
    ("empty_turn", "warning", "a turn says nothing",
     "drop the turn or the row; an empty answer teaches the model to say nothing"),
    ("duplicate", "warning", "the same rendered text as an earlier row",
     "keep one: every copy is trained again"),
    ("swapped_sides", "warning", "the rejected answer has the better score",
     "swap the sides, or mend the scores"),
    ("answer_repeats_prompt", "warning", "an answer begins with its prompt",
     "cut the prompt out of the answer: the model would learn to repeat it"),
    ("repeated_picture", "warning", "the same picture twice in one row",
     "take one out, unless the row compares a picture with itself"),
    ("large_picture", "warning", "a picture of more pixels than any processor here looks at",
     "store it smaller: it is decoded whole and scaled down every time it is served"),
    ("mojibake", "warning", "UTF-8 that was once read as Latin-1 or Windows-1252",
     "decode it again: text.encode('cp1252').decode('utf-8')"),
    ("replacement_character", "warning", "U+FFFD: a character that an earlier step could not read",
     "go back to the source; what stood there is lost here"),
    ("escaped_surrogate", "warning", "half a surrogate pair, spelled out as text",
     "the text was escaped twice: decode it once more before writing JSON"),
    ("byte_order_mark", "warning", "U+FEFF inside a text",
     "take it out: files were joined without removing their byte order marks"),
    ("control_character", "warning", "an invisible control character inside a text",
     "take it out, unless the data really is terminal output"),
    ("pad_is_eos", "warning", "the tokenizer's pad token is its end-of-sequence token",
     "harmless in tokenmill; a collator that masks by pad id unlearns to stop: set another pad"),
    ("label_imbalance", "warning", "nearly all answers have the same label",
     "add the rarer ones, or weight them: KTO's loss has a weight for each label"),
    # Worth knowing.
    ("length_bias", "info", "the chosen answer is nearly always the longer one, or the shorter",
     "the model may learn length instead of quality: balance the pairs, or normalise by length"),
    ("no_pad_token", "info", "the tokenizer has no pad token",
     "tokenmill pads with eos, unmasked; a trainer that sets pad = eos may mask the real eos"),
    ("bos_elsewhere", "info", "template and tokenizer each add a begin-of-sequence token",
     "tokenmill adds none; whoever encodes the rendered text must say add_special_tokens=False"),
    ("string_arguments", "info", "a call's arguments are JSON text instead of an object",
     "decoded here; another trainer may print them quoted: write objects"),
    ("history_differs", "info", "earlier turns are printed differently from the last one",
     '--expand turns (expand="turns") trains every turn as it is generated'),
    ("duplicate_picture", "info", "the same picture as an earlier one under another name",
     "keep one file and refer to it: copies hide that rows share a picture"),
    ("near_duplicate", "info", "nearly the same rendered text as an earlier row",
     "look at both; keep one unless the difference matters"),
)  # fmt: skip

# In the order in which findings of one severity are shown.
RULES: dict[str, Rule] = {row[0]: Rule(*row) for row in _TABLE}


def chosen_rules(only: Sequence[str] = (), ignore: Sequence[str] = ()) -> frozenset[str]:
    if isinstance(only, str) or isinstance(ignore, str):
        raise UsageError("only and ignore are lists of rules' names, not one text")
    for name in (*only, *ignore):
        if name not in RULES:
            raise UsageError(f"{name!r} is no rule; the rules are {', '.join(RULES)}")
    chosen = frozenset(only or RULES) - frozenset(ignore)
    if not chosen:
        raise UsageError("no rule is left to look for")
    return chosen


def excerpt(text: str, at: int = 0) -> str:
    start = max(0, at - EXCERPT_CHARS // 3)
    end = min(len(text), start + EXCERPT_CHARS)
    return f"{'…' if start else ''}{text[start:end]}{'…' if end < len(text) else ''}"


class Collector:
    """The findings of one block; each row counts once per rule, with its first finding."""

    def __init__(self, rules: frozenset[str]) -> None:
        self._rules = rules
        self._rows: dict[str, dict[int, tuple[str, str]]] = {}

    def add(self, row: int, rule: str, detail: str, shown: str = "") -> None:
        if rule in self._rules:
            self._rows.setdefault(rule, {}).setdefault(row, (detail[:DETAIL_CHARS], shown))

    def has(self, rule: str, row: int) -> bool:
        return row in self._rows.get(rule, ())

    def document(self) -> dict[str, Any]:
        """Return by rule the count, the first rows, and detail and excerpt of the first."""
        found = {}
        for rule, rows in self._rows.items():
            detail, shown = rows[min(rows)]
            first = sorted(rows)[:MAX_PLACES]
            found[rule] = {"count": len(rows), "rows": first, "detail": detail, "excerpt": shown}
        return found


@dataclass(frozen=True, slots=True)
class Finding:
    rule: str
    count: int  # 1 for a finding about the tokenizer or the data as a whole
    places: tuple[Origin, ...]  # of the first rows; rows of columnar files have length 0
    detail: str  # what is wrong with the first row
    excerpt: str = ""

    @property
    def severity(self) -> str:
        return RULES[self.rule].severity

    @property
    def hint(self) -> str:
        return RULES[self.rule].hint

    def document(self) -> dict[str, Any]:
        first = self.places[0] if self.places else None
        nowhere = dict.fromkeys(("path", "row", "line", "offset"))
        return {
            "rule": self.rule,
            "severity": self.severity,
            "about": RULES[self.rule].about,
            "count": self.count,
            "place": None if first is None else str(first),
            **(nowhere if first is None else first.location),
            "detail": self.detail,
            "excerpt": self.excerpt,
            "hint": self.hint,
            "places": [str(origin) for origin in self.places],
        }


@dataclass(frozen=True, slots=True)
class LintReport:
    findings: tuple[Finding, ...]  # most severe first
    rows: int
    rows_checked: int
    rules: tuple[str, ...]  # that ran
    sample: dict[str, Any] | None = None  # how rows were chosen; None: all
    near_duplicates: dict[str, Any] | None = None  # how they were found; None: not looked for
    seconds: float = 0.0

    def of(self, severity: str) -> list[Finding]:
        return [finding for finding in self.findings if finding.severity == severity]

    def fails(self, on: str = "error") -> bool:
        check_one_of("fail_on", on, FAIL_ON)
        failing: Sequence[str] = () if on == "never" else SEVERITIES[: SEVERITIES.index(on) + 1]
        return any(finding.severity in failing for finding in self.findings)

    def document(self) -> dict[str, Any]:
        return {
            "ok": not self.of("error"),
            "findings": [finding.document() for finding in self.findings],
            "errors": len(self.of("error")),
            "warnings": len(self.of("warning")),
            "infos": len(self.of("info")),
            "rows": self.rows,
            "rows_checked": self.rows_checked,
            "sampled": self.sample is not None,
            "sample": self.sample,
            "rules": list(self.rules),
            "near_duplicates": self.near_duplicates,
            "seconds": round(self.seconds, 3),
        }
