"""The engines, and what they make of one tokenizer: parity, template, tokens.

Without a tokenizer only the engines' presence can be told. With one, it is loaded as a build would
load it (so an ambiguity between AutoTokenizer and tokenizer.json shows here), the fast engine is
compared with the reference on all parity texts, and the template is compiled and traced on small
conversations of every kind.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

from tokenmill.build.proof import installed_versions
from tokenmill.chat import ChatSpec
from tokenmill.chat.render import Template
from tokenmill.chat.traced import NotTraced
from tokenmill.chat.turns import CONVERSATIONS, TOOL
from tokenmill.errors import RowError, TemplateError, TokenmillError
from tokenmill.report.doctor.checks import Check, fail, note, ok, warning
from tokenmill.tokenizer import Tokenizer, choose_engine, load
from tokenmill.tokenizer.parity_texts import parity_texts

SLOWER = "encoding falls back to tokenizers, the same ids at a tenth of the speed or less"


def engines() -> Iterator[Check]:
    """Which engines are there."""
    versions = installed_versions(("tokenizers", "fastokens"))
    if importlib.util.find_spec("tokenizers") is None:
        yield fail("engine hf", "tokenizers is not installed", "pip install tokenizers")
    else:
        yield ok("engine hf", f"tokenizers {versions.get('tokenizers', '?')}, the reference")
    if not _can_import("fastokens"):
        yield warning("engine fastokens", f"not installed; {SLOWER}", "pip install fastokens")
    else:
        yield ok("engine fastokens", f"fastokens {versions.get('fastokens', '?')}")


def _can_import(name: str) -> bool:
    try:
        importlib.import_module(name)
    except ImportError:
        return False
    return True


def tokenizer(source: Any, *, backend: str, trust_remote_code: bool) -> Iterator[Check]:
    """What a build would make of one tokenizer."""
    try:
        loaded = load(source, backend=backend, trust_remote_code=trust_remote_code)
        key = loaded.key
    except TokenmillError as error:
        remedy = "give a directory, a tokenizer.json or a hub id; the message names the choice"
        yield fail("tokenizer", str(error), remedy)
        return
    agreed = loaded.notes.get("auto_tokenizer")
    compared = f"; AutoTokenizer {agreed}" if agreed else ""
    yield ok("tokenizer", f"{source}: identity {key[:12]}, encoded by {loaded.backend}{compared}")
    yield _parity(loaded)
    yield _special_tokens(loaded)
    yield _template(loaded)


def _parity(loaded: Tokenizer) -> Check:
    texts = len(parity_texts(loaded.added_contents))
    engine, why = choose_engine(loaded, "auto")
    if engine.name == "fastokens":
        return ok("parity", f"fastokens gives the ids of tokenizers on all {texts:,} texts")
    return note("parity", f"{SLOWER}: {why}", "nothing to do: the ids are right, only slower")


def _special_tokens(loaded: Tokenizer) -> Check:
    pad, eos = loaded.pad_id, loaded.eos_id
    shown = f"bos {loaded.bos_id}, eos {eos}, pad {pad}"
    if eos is None:
        remedy = "append_eos=False for text and pairs; set eos_token in tokenizer_config.json"
        return warning("special tokens", f"{shown}: no end-of-sequence token", remedy)
    if pad is None or pad == eos:
        which = "no pad token" if pad is None else "pad is eos"
        remedy = "fine here; a trainer that masks labels by pad id would mask the real eos"
        return note("special tokens", f"{shown}: {which}", remedy)
    return ok("special tokens", shown)


def _template(loaded: Tokenizer) -> Check:
    template = loaded.template
    source = template.get("default") if isinstance(template, dict) else template
    if source is None:
        remedy = "for conversations give --chat-template; text and pairs of strings need none"
        return note("chat template", "none", remedy)
    try:
        found = Template(source, ChatSpec(), loaded.special_tokens)
        untraced = _untraced(found)
    except TemplateError as error:
        if "date" in error.message:
            return note("chat template", "prints the date", "pin it: --date 2026-11-15")
        return fail("chat template", error.message, "mend it, or give --chat-template")
    if untraced:
        remedy = "such rows are rejected unless everything is trained; the rest is not affected"
        return warning("chat template", f"not traced: {untraced}", remedy)
    return ok("chat template", f"traced on {found.traced.learned} kinds of conversations")


def _untraced(template: Template) -> str:
    """Why some kind of conversation cannot be traced through a template; empty where all can."""
    for messages in CONVERSATIONS:
        for tools in (None, [TOOL]):
            try:
                template.traced.follow(messages, tools)
            except RowError:  # it wants something else of a conversation
                continue
            except NotTraced as error:
                return str(error)
    return ""
