"""Lint rules, findings, and the report.

An ``error`` rejects the row or trains the wrong tokens; a ``warning`` is probably not intended; an
``info`` is worth knowing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tokenmill._core.origin import Origin
from tokenmill.errors import UsageError, check_one_of, check_strings

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
    # The reasons for which `prepare` rejects a row; two of them are split into several rules.
    ("bad_json", "error", "the line is not one JSON object",
     "fix the line: one JSON object per line, UTF-8, no NaN, no lone surrogates"),
    ("bad_shape", "error", "the row is not a conversation, pair or text of the format",
     "set --format or --column messages=NAME, or fix the row"),
    ("bad_group", "error", "the answers cannot be compared: one is empty, or they are equal",
     "fix the row: two different answers to one prompt, a label that is true or false, or a score "
     "per answer"),
    ("missing_image", "error", "an image of the row does not exist",
     "add the file, or set --media-root to the directory of the images"),
    ("bad_media", "error", "an image cannot be used: broken, too large, not allowed, no processor",
     "fix or replace the image; rows with images need --processor"),
    ("media_mismatch", "error", "the numbers of images and image places differ",
     "write one <image>, or one image part, per image of the row"),
    ("template_error", "error", "the chat template raises an error for the conversation",
     "fix the row, or use a template or encoder that accepts it (--chat-template, --encoder)"),
    ("role_order", "error", "the template raises an error for these roles in this order",
     "merge consecutive turns of one role, move the system turn to the front, or use another "
     "template"),
    ("template_drops_content", "error", "the template does not print the text of an assistant",
     "use a template that prints it, or remove it from the row"),
    ("template_drops_tool_calls", "error", "the template does not print the tool calls",
     "use a template that supports tool calls; this one trains answers without them"),
    ("mask_unproven", "error", "the text of the assistant could not be located with certainty",
     "often the template cuts or rewrites the text; `tokenmill doctor --tokenizer` names the line"),
    ("trailing_user", "warning", "the conversation ends with a user turn",
     "--trailing trim drops the last turn and keeps the row"),
    ("no_trained_tokens", "error", "no token of the row is trained",
     "check --train-on, and weight or train in the messages"),
    ("overlong", "warning", "the row has more tokens than --max-length",
     "raise --max-length, split the row, or use --overlong truncate, which drops its end"),
    ("limit", "error", "the row exceeds a limit of size, nesting or rendering time",
     "check the row: it is damaged, or more than one row"),
    # Rows that would be accepted.
    ("double_bos", "error", "the row starts with two begin-of-sequence tokens",
     "remove the token from the data or from the template"),
    ("control_text", "error", "the text of a turn contains a control token",
     "remove or escape it: it is encoded as the real token and ends or starts a turn"),
    ("missing_closer", "warning", "no end-of-turn token follows the trained text",
     "the model does not learn to stop: use a template that prints and trains an end-of-turn "
     "token, or append_eos"),
    ("generation_header", "info", "a generation block of the template includes the turn header",
     "nothing to do: the header is part of the generation prompt and is not trained"),
    ("rewrites_history", "warning", "the template drops the thinking of earlier turns",
     "--expand turns trains every turn once as the last, with its thinking"),
    ("template_drops_tools", "warning", "the row has tools, but the template prints none of them",
     "the model would learn to call functions that it cannot see: use a template that prints "
     "tools"),
    ("template_drops_context", "warning", "the template drops a system, user or tool text",
     "the model would be trained without this text: use a template that prints it, or move the "
     "text to a turn that is printed"),
    ("null_tool_keys", "warning", "null members in tools or calls change the rendered text",
     "drop them: a columnar schema added them; for Parquet rows tokenmill drops them"),
    ("broken_arguments", "warning", "the arguments of a call are text, but not a JSON object",
     "fix them: the template prints the text unchanged, with quotes"),
    ("misspelt_role", "warning", "a role is nearly, but not quite, one of the usual roles",
     "correct it: a turn of another role is not trained"),
    ("empty_turn", "warning", "a turn is empty",
     "drop the turn or the row: an empty answer trains the model to answer nothing"),
    ("duplicate", "warning", "the same rendered text as an earlier row",
     "keep one: every copy is trained again"),
    ("swapped_sides", "warning", "the rejected answer has the better score",
     "swap the sides, or fix the scores"),
    ("answer_repeats_prompt", "warning", "an answer begins with its prompt",
     "remove the prompt from the answer: the model would learn to repeat it"),
    ("repeated_image", "warning", "the same image twice in one row",
     "remove one, unless the row compares an image with itself"),
    ("large_image", "warning", "an image has more pixels than any supported processor uses",
     "store it smaller: it is decoded and scaled down every time it is served"),
    ("mojibake", "warning", "UTF-8 text that was decoded as Latin-1 or Windows-1252",
     "decode it again: text.encode('cp1252').decode('utf-8')"),
    ("replacement_character", "warning", "U+FFFD: an earlier step could not decode a character",
     "go back to the source: the character is lost here"),
    ("escaped_surrogate", "warning", "one half of an escaped surrogate pair",
     "the text was escaped twice: decode it once more before writing JSON"),
    ("byte_order_mark", "warning", "U+FEFF inside a text",
     "remove it: files were joined without removing their byte order marks"),
    ("control_character", "warning", "an invisible control character inside a text",
     "remove it, unless the data is terminal output"),
    ("pad_is_eos", "warning", "the tokenizer's pad token is its end-of-sequence token",
     "harmless in tokenmill, but a collator that masks by pad id never trains the eos: set "
     "another pad token"),
    ("label_imbalance", "warning", "nearly all answers have the same label",
     "add answers of the rare label, or weight them: KTO's loss has a weight per label"),
    # Worth knowing.
    ("plain_strings", "info", "prompt and answer are strings: the chat template is not applied",
     "--as-chat makes them user and assistant messages"),
    ("length_bias", "info", "the chosen answer is nearly always the longer one, or the shorter",
     "the model may learn length instead of quality: balance the pairs, or normalize by length"),
    ("no_pad_token", "info", "the tokenizer has no pad token",
     "tokenmill pads with eos and trains the real eos; a trainer with pad = eos may mask it"),
    ("bos_in_text", "info", "template and tokenizer each add a begin-of-sequence token",
     "tokenmill adds none; if you encode the text yourself, use add_special_tokens=False"),
    ("string_arguments", "info", "the arguments of a call are JSON text instead of an object",
     "write objects: tokenmill decodes the text, but another trainer may print it quoted"),
    ("history_differs", "info", "earlier turns are printed differently from the last one",
     "--expand turns trains every turn as it is generated"),
    ("duplicate_image", "info", "the same image as an earlier one under another name",
     "keep one file and refer to it"),
    ("near_duplicate", "info", "nearly the same rendered text as an earlier row",
     "compare the two; keep one unless the difference matters"),
)  # fmt: skip

# In the order in which findings of one severity are shown.
RULES: dict[str, Rule] = {row[0]: Rule(*row) for row in _TABLE}


def chosen_rules(only: Sequence[str] = (), ignore: Sequence[str] = ()) -> frozenset[str]:
    only, ignore = check_strings("only", only), check_strings("ignore", ignore)
    for name in (*only, *ignore):
        if name not in RULES:
            raise UsageError(f"unknown rule {name!r}; the rules are {', '.join(RULES)}")
    chosen = frozenset(only or RULES) - frozenset(ignore)
    if not chosen:
        raise UsageError(("only",), " and ", ("ignore",), " leave no rule to check")
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
        """Return the count, the first rows, and detail and excerpt of the first row, by rule."""
        findings = {}
        for rule, rows in self._rows.items():
            detail, shown = rows[min(rows)]
            first = sorted(rows)[:MAX_PLACES]
            findings[rule] = {"count": len(rows), "rows": first, "detail": detail, "excerpt": shown}
        return findings


@dataclass(frozen=True, slots=True)
class Finding:
    rule: str
    count: int  # 1 for a finding about the tokenizer or the data as a whole
    places: tuple[Origin, ...]  # of the first rows; rows of columnar files have length 0
    detail: str  # about the first row
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
    sample: dict[str, Any] | None = None  # how rows were chosen; None: all rows
    near_duplicates: dict[str, Any] | None = None  # parameters of the search; None: not searched
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
