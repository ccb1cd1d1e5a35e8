"""Rename identifiers and find old words: ``python -m scripts.glossary``.

Without arguments it prints every old word that is left, and fails if there is one. ``--rename``
first replaces the identifiers of `RENAMED` in all tracked Python files and pages. A name that the
file already uses for something else is reported, because the rename would merge the two.
"""

from __future__ import annotations

import argparse
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path

PROJECT = Path(__file__).parent.parent

# Old identifier → new identifier. A key "folder/:name" holds for files below that folder only.
RENAMED = {
    "IdentityCard": "TokenizerFingerprint",
    "LITTLE_WORK": "SMALL_JOB_BYTES",
    "near_caller": "prefer_local",
    "to_travel": "serialize",
    "as_travelled": "deserialize",
    "travelled": "serialized",
    "STRETCH": "BATCH",
    "by_reference": "reference_pipeline",
    "src/tokenmill/rl/:by_reference": "render_by_reference",
    "suspects": "candidates",
    "_SUSPECT": "_CANDIDATE",
    "Account": "BuildStats",
    "account": "build_stats",
    "_account": "_build_stats",
    "Share": "Partition",
    "src/tokenmill/build/:WHOLE": "ALL",
    "tests/build/:WHOLE": "ALL",
    "src/tokenmill/chat/:WHOLE": "ALL_MESSAGES",
    "ME": "CURRENT_MESSAGE",
    "HELD": "BOUND",
    "NOTHING": "NO_SOURCE",
    "_NOTHING": "_EMPTY",
    "Rest": "Completion",
    "Settled": "RenderedRow",
    "settle": "resolve_spans",
    "_settle": "_render_sample",
    "_settle_turns": "_resolve_turns",
    "_settle_generation": "_resolve_generation",
    "settled": "rendered",
    "has_settled": "is_stable",
    "_settled": "_rendered_row",
    "_is_settled": "_is_stable",
    "SETTLED_S": "STABLE_AFTER_S",
    "TurnJudge": "SpanResolver",
    "src/tokenmill/chat/:judge": "resolver",
    "src/tokenmill/build/:judge": "raise_for_rejections",
    "src/tokenmill/cli/:judge": "raise_for_rejections",
    "src/tokenmill/integrations/:judge": "raise_for_rejections",
    "src/tokenmill/rl/:judge": "check",
    "src/tokenmill/inspect/:judge": "checker",
    "src/tokenmill/build/:_judge": "_check_worker",
    "Judge": "RolloutChecker",
    "_CANNOT_TRAVEL": "_NOT_SERIALIZABLE",
    "RemoteGuardedFile": "RemoteChecksummedFile",
    "open_guarded": "open_checksummed",
    "LONGEST_MADE_BY": "MAX_PRODUCER",
    "MADE_BY": "PRODUCER",
    "LONGEST_NAME": "MAX_NAME",
    "src/tokenmill/chat/:stands": "is_at_message",
    "_stands": "_is_given",
    "_as_it_stands": "_unchanged",
    "pad_id": "pad_token_id",
    "_pad_id": "_pad_token_id",
    "pad_side": "padding_side",
    "bos_id": "bos_token_id",
    "eos_id": "eos_token_id",
    "Openings": "GenerationPrompts",
    "Opening": "TurnHeader",
    "src/tokenmill/:openings": "generation_prompts",
    "asking": "with_generation_prompt",
    "Asked": "PromptRequest",
    "Differs": "AuditMismatch",
    "Unlearned": "PathMiss",
    "Refused": "TemplateRaised",
    "Beyond": "LimitExceeded",
    "Rope": "AnnotatedStr",
    "says_something": "has_output",
    "closer": "end_of_turn",
    "next_closer": "next_end_of_turn",
    "forget": "clear_templates",
    "illustrate": "attach_images",
    "hopeless": "needs_offsets",
    "twins": "prefixless_ids",
    "twin": "counterpart",
    "has_twin": "has_counterpart",
    "_encode_surely": "_encode_with_fallback",
    "Hollow": "ShapeOnlyArray",
    "HollowTensor": "ShapeOnlyTensor",
    "_hollow_tensor": "_shape_only_tensor",
    "hollow_pictures": "shape_only_images",
    "src/tokenmill/media/:hollow": "shape_only",
    "src/tokenmill/chat/:hollow": "without_content",
    "src/tokenmill/build/:hollow": "shape_only",
    "tests/media/:hollow": "shape_only",
    "tests/build/:hollow": "shape_only",
    "hollow": "shape_only",
    "_hollow": "_shape_only",
    "hollowed": "shape_only_of",
    "asks_hollow": "uses_shape_only",
    "PixelsWanted": "PixelAccess",
    "Asking": "Probe",
    "_asking": "_probe",
    "Shelf": "IndexCache",
    "shelf": "index_cache",
    "_shelf": "_index_cache",
    "private_shelf": "private_index_cache",
    "existing_private_shelf": "existing_private_index_cache",
    "SealedKind": "ArtifactKind",
    "Sealed": "Artifact",
    "sealed": "artifact",
    "_sealed": "_artifact",
    "Draft": "ArtifactWriter",
    "admit": "open",
    "admit_or_none": "open_or_none",
    "_admitted": "_opened",
    "GuardedFile": "ChecksummedFile",
    "src/tokenmill/store/:clean": "verified",
    "src/tokenmill/store/:ahead": "prefetch_map",
    "src/tokenmill/build/:ahead": "prefetch_map",
    "Home": "SidecarDir",
    "_HOMES": "_EXPORTS",
    "carry": "keep_columns",
    "carried": "extra",
    "_carried": "_extra",
    "CARRIED": "EXTRA",
    "Carried": "Extra",
    "carried_json": "extra_json",
    "encode_carried": "encode_extra",
    "decode_carried": "decode_extra",
    "carried_names": "extra_names",
    "carried_texts": "extra_texts",
    "carried_columns": "extra_columns",
    "_carried_values": "_extra_values",
    "short_carried": "short_extra",
    "in_carried": "in_extra",
    "carried_values": "extra_values",
    "_carried_path": "_extra_path",
    "MAX_CARRIED": "MAX_EXTRA",
    "made_by": "producer",
    "Units": "Samples",
    "WholeRun": "RunIndex",
    "unpredicted": "label_shift",
    "src/tokenmill/data/:level": "balance_groups",
    "first_use": "lazy_exports",
    "externals": "referenced",
    "condemned": "expired",
    "distrust": "disable_fast_path",
    "_distrusted": "_disabled_stages",
    "told": "detail",
    "UNTOLD": "UNKNOWN",
    "_untold": "_unknown",
    "_told": "_described",
    "_was_told": "_was_reported",
    "mend": "rebuild",
    "mended": "rebuilt",
    "rooms": "capacities",
    "room": "capacity_left",
    "by_room": "by_capacity",
    "most_room": "most_capacity",
    "_make_room": "_evict",
    "bos_elsewhere": "bos_in_text",
    "template_kwargs": "chat_template_kwargs",
}
# Modules and tests that change their names.
MOVED = {
    "src/tokenmill/media/asking.py": "src/tokenmill/media/probe.py",
    "src/tokenmill/media/hollow.py": "src/tokenmill/media/shape_only.py",
    "src/tokenmill/_core/sealed.py": "src/tokenmill/_core/artifact.py",
    "src/tokenmill/build/externals.py": "src/tokenmill/build/referenced.py",
    "src/tokenmill/store/ahead.py": "src/tokenmill/store/prefetch.py",
    "src/tokenmill/chat/planted.py": "src/tokenmill/chat/unique_words.py",
    "src/tokenmill/chat/pictures.py": "src/tokenmill/chat/images.py",
    "src/tokenmill/data/pictures.py": "src/tokenmill/data/images.py",
    "src/tokenmill/media/pictures.py": "src/tokenmill/media/images.py",
    "src/tokenmill/inspect/page/client/pictures.js": "src/tokenmill/inspect/page/client/images.js",
    "tests/core/sealed.json": "tests/core/artifact.json",
    "tests/core/test_sealed.py": "tests/core/test_artifact.py",
    "tests/media/test_asking.py": "tests/media/test_probe.py",
    "scripts/page_pictures.py": "scripts/page_images.py",
    "tests/build/test_pictures.py": "tests/build/test_images.py",
    "tests/cli/test_pictures.py": "tests/cli/test_images.py",
    "tests/data/test_pictures.py": "tests/data/test_images.py",
    "tests/inspect/page/test_pictures.py": "tests/inspect/page/test_images.py",
    "tests/inspect/test_lint_pictures.py": "tests/inspect/test_lint_images.py",
    "tests/integrations/test_miles_pictures.py": "tests/integrations/test_miles_images.py",
    "tests/integrations/test_skyrl_pictures.py": "tests/integrations/test_skyrl_images.py",
    "tests/integrations/test_verl_pictures.py": "tests/integrations/test_verl_images.py",
    "tests/media/test_pictures.py": "tests/media/test_images.py",
}
# Parts of longer names, replaced anywhere in a Python identifier.
PARTS = (
    (re.compile(r"MOST_(?=[A-Z])"), "MAX_"),
    (re.compile(r"LEAST_(?=[A-Z])"), "MIN_"),
    (re.compile(r"Pictures(?![a-z])"), "Images"),
    (re.compile(r"Picture(?![a-z])"), "Image"),
    (re.compile(r"pictures(?![a-z])"), "images"),
    (re.compile(r"picture(?![a-z])"), "image"),
    (re.compile(r"PICTURE"), "IMAGE"),
)
# Words that may not appear anywhere, also not between the underscores of an identifier.
OLD_WORDS = re.compile(
    r"(?<![a-z])(house|rooms?|elsewhere|distrust[a-z]*|liar|hopeless|twins|shelf|passport|settled?"
    r"|settles|hollow|asking|anew|condemned|told|admit(ted|s)?|mend(ed|s)?|travelled|unroller"
    r"|illustrated?|picture[sd]?)(?![a-z])",
    re.IGNORECASE,
)
OLD_IDENTIFIERS = re.compile(
    r"(?<![A-Za-z0-9])_?(IdentityCard|LITTLE_WORK|near_caller|to_travel|MOST_\w+|LEAST_\w+"
    r"|TurnJudge|Openings|Unlearned|Rope|says_something|PixelsWanted|SealedKind|GuardedFile"
    r"|made_by|WholeRun|unpredicted|first_use|externals|(?<!chat_)(?<!opaque_)template_kwargs|on_bad_row|rehash"
    r"|LengthGrouped|print_rope|NOBODY|TEMPLATES_KNOWN|SOURCES_KNOWN|says_itself|worth_learning"
    r"|encode_surely|believed_until|carefully|handed_out|loop_ended|rows_alone|rows_within"
    r"|Geometry|whole_run|open_guarded|beside_plain"
    r"|refuse_unknown|lost_slices|rows_holding|T[0-2]\d|promises? P\d+)(?![A-Za-z0-9])"
)
# `compare` passes old names to old commits, and the examples are prose about other subjects.
NOT_READ = re.compile(
    r"^(scripts/(glossary|compare|example_facts|example_languages)\.py|src/tokenmill/examples/|tests/examples/|build/"
    r"|docs/images/)|"
    r"\.(png|svg|json|jsonl|parquet|lock|woff2?|ico)$"
)


def tracked() -> list[str]:
    done = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=PROJECT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    names = sorted({name for name in done.stdout.split("\n") if name})
    return [n for n in names if not NOT_READ.search(n) and (PROJECT / n).is_file()]


def new_name(name: str, file: str) -> str:
    scoped = [
        new
        for old, new in RENAMED.items()
        if ":" in old and old.partition(":")[2] == name and file.startswith(old.partition(":")[0])
    ]
    found = scoped[0] if scoped else RENAMED.get(name, name)
    for pattern, new in PARTS:
        found = pattern.sub(new, found)
    return found


def rename(text: str, file: str) -> tuple[str, list[str]]:
    """Return the text of a Python file with new names, and the names that it merges."""
    lines = text.splitlines(keepends=True)
    changes: list[tuple[int, int, int, str]] = []
    names, merged = set(), {}
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.NAME:
            names.add(token.string)
            new = new_name(token.string, file)
            if new != token.string:
                merged[token.string] = new
                changes.append((token.start[0] - 1, token.start[1], token.end[1], new))
    for line, start, end, new in reversed(changes):
        lines[line] = lines[line][:start] + new + lines[line][end:]
    both = [f"{old} → {new}" for old, new in merged.items() if new in names]
    twice = [new for new in set(merged.values()) if list(merged.values()).count(new) > 1]
    return "".join(lines), both + twice


def old_words(names: Iterable[str]) -> Iterator[str]:
    """Yield every place with an old word as ``file:line: word``."""
    for name in names:
        path = PROJECT / name
        if not path.is_file():
            continue
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
            for pattern in (OLD_WORDS, OLD_IDENTIFIERS):
                for found in pattern.finditer(line):
                    yield f"{name}:{number}: {found[0]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rename", action="store_true")
    if parser.parse_args().rename:
        for name in tracked():
            if name.endswith(".py"):
                path = PROJECT / name
                text, merged = rename(path.read_text(), name)
                path.write_text(text)
                for one in merged:
                    print(f"{name}: check {one}")
    found = list(old_words(tracked()))
    print("\n".join(found) if found else "no old word is left")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
