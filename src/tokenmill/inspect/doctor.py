"""Check whether this machine is ready to prepare data.

It builds nothing. It writes one file to the cache's staging directory, and indexes the sources.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import resource
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tokenmill._core.paths import cache_root, filesystem_kind, is_network
from tokenmill._core.publish import Staging
from tokenmill.build.executors import allowed_cores, cpu_quota, usable_cores
from tokenmill.build.outcome import LIBRARIES, installed_versions
from tokenmill.chat import ChatSpec
from tokenmill.chat.program import NotTraced
from tokenmill.chat.render import Template
from tokenmill.chat.turns import CONVERSATIONS, TOOL
from tokenmill.errors import RowError, TemplateError, TokenmillError
from tokenmill.sources.rows import open_rows
from tokenmill.tokenizers.engines import choose_engine
from tokenmill.tokenizers.loading import load
from tokenmill.tokenizers.parity_texts import parity_texts
from tokenmill.tokenizers.tokenizer import Tokenizer

STATUSES = ("ok", "note", "warning", "fail")  # note: may be fine; fail: prepare would not work


@dataclass(frozen=True, slots=True)
class Check:
    name: str
    detail: str
    remedy: str = "nothing to do"
    status: str = "ok"  # one of `STATUSES`

    def document(self) -> dict[str, str]:
        return {"name": self.name, "status": self.status, "detail": self.detail, "do": self.remedy}


ok = Check
note, warning, fail = (partial(Check, status=status) for status in STATUSES[1:])


def examine(
    sources: Sequence[str] = (),
    tokenizer: Any = None,
    *,
    tokenizer_backend: str = "auto",
    trust_remote_code: bool = False,
    cache_dir: str | os.PathLike[str] | None = None,
    describe_ray: Callable[[], dict[str, Any]] | None = None,
    report: Callable[[str], object] = str,
) -> list[Check]:
    """Run all checks; an error in one does not stop the others.

    ``describe_ray`` returns the cluster that ``executor="ray"`` would use. ``report`` is called
    with the name of each check before it runs.
    """
    root = cache_root(cache_dir)
    checks: list[Check] = []

    def run(name: str, check: Callable[[], Check | Iterable[Check]]) -> None:
        report(name)
        try:
            result = check()
            checks.extend([result] if isinstance(result, Check) else result)
        except Exception as error:
            detail = f"the check failed: {type(error).__name__}: {error}"
            checks.append(fail(name, detail, "this is a bug in tokenmill; please report it"))

    run("libraries", libraries)
    run("cores", cores)
    run("open files", open_files)
    run("offline", offline)
    run("cache", lambda: writable(root))
    can_write = checks[-1].status == "ok"
    run("file system", lambda: file_system(root))
    run("space", lambda: space(root, sources, can_write=can_write))
    run("engines", engines)
    if tokenizer is not None:
        run("tokenizer", lambda: one_tokenizer(tokenizer, tokenizer_backend, trust_remote_code))
    run("Ray", lambda: ray(describe_ray))
    return checks


# The machine

EXTRAS = {
    "hf": ("transformers", "datasets", "huggingface_hub"),
    "torch": ("torch", "torchdata"),
    "vision": ("transformers", "pillow"),
    "serve": ("starlette", "uvicorn"),
    "remote": ("s3fs", "gcsfs", "aiohttp"),
}
MIN_OPEN_FILES = 1024  # a loader over many slices and its workers need a few hundred
OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE")
TRUE = ("1", "on", "yes", "true")  # as huggingface_hub reads its variables


def libraries() -> Iterator[Check]:
    core = installed_versions(LIBRARIES)
    own = core.pop("tokenmill", "not installed as a package")
    shown = ", ".join(f"{name} {version}" for name, version in core.items())
    yield ok("tokenmill", f"{own}, Python {platform.python_version()}; {shown}")
    for extra, names in EXTRAS.items():
        versions = installed_versions(names)
        missing = [name for name in names if name not in versions]
        shown = ", ".join(f"{name} {version}" for name, version in versions.items())
        if missing:
            detail = f"{shown}; missing: {', '.join(missing)}" if versions else "not installed"
            remedy = f"if you need it: pip install 'tokenmill[{extra}]'"
            yield note(f"extra {extra}", detail, remedy)
        else:
            yield ok(f"extra {extra}", shown)


def cores() -> Check:
    machine, usable, quota = os.cpu_count() or 1, usable_cores(), cpu_quota()
    shown = "none" if quota is None else f"{quota:g}"
    bounds = f"{usable} of {machine} cores (affinity {len(allowed_cores())}, quota {shown})"
    if usable < machine:
        remedy = "more workers than cores do not help; raise the limit of taskset, Slurm or --cpus"
        return note("cores", bounds, remedy)
    return ok("cores", bounds)


def open_files() -> Check:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    shown = "no limit" if soft == resource.RLIM_INFINITY else f"at most {soft:,}"
    if soft != resource.RLIM_INFINITY and soft < MIN_OPEN_FILES:
        limit = "" if hard == resource.RLIM_INFINITY else f" (up to {hard:,} without root)"
        return warning("open files", shown, f"ulimit -n 65536{limit}")
    return ok("open files", shown)


def offline() -> Check:
    on = [name for name in OFFLINE if os.environ.get(name, "").lower() in TRUE]
    if on:
        remedy = "hub ids must be in the local cache; unset it to download"
        return ok("offline", f"{', '.join(on)} set: nothing is downloaded", remedy)
    remedy = "without network, set HF_HUB_OFFLINE=1 to fail at once instead of after a timeout"
    return ok("offline", "not set: hub ids may be downloaded", remedy)


def ray(describe: Callable[[], dict[str, Any]] | None) -> Check:
    if importlib.util.find_spec("ray") is None:
        return note("Ray", "not installed", "for --executor ray: pip install 'tokenmill[ray]'")
    if describe is None:
        version = installed_versions(["ray"]).get("ray", "of unknown version")
        return ok("Ray", version, "`tokenmill doctor` shows the cluster that --executor ray uses")
    try:
        cluster = describe()
    except Exception as error:  # a broken installation
        return note("Ray", f"cannot be used: {error}", "reinstall: pip install 'tokenmill[ray]'")
    version, address = cluster["version"], cluster["address"]
    if address is None:
        remedy = "--executor ray starts a local cluster; for another one set RAY_ADDRESS=host:6379"
        return ok("Ray", f"{version}; no cluster is running here", remedy)
    where = f"{version}; {address} ({cluster['from']})"
    if not cluster["reachable"]:
        remedy = "start the cluster, or correct or unset RAY_ADDRESS"
        return warning("Ray", f"{where} is not reachable", remedy)
    return ok("Ray", f"{where} is reachable")


# The cache. The estimate is an upper bound: int32 ids and int8 masks of one token per 2.5 bytes of
# source. Real text has fewer tokens.

STORE_PER_SOURCE = 2.0  # bytes of a store per byte of source: 5 bytes for each 2.5 bytes of text
ROW_BYTES = 128  # per row beside its tokens: index, origin, lengths, turns
GIB = 1 << 30
MIN_FREE_BYTES = GIB  # if the size of the store is unknown
MIN_INODES = 10_000


def writable(root: Path) -> Check:
    """Write a file to the cache: permissions do not reveal read-only mounts."""
    existed = root.exists()
    try:
        with Staging(root) as staging:
            staging.write("doctor", b"written by tokenmill doctor")
    except TokenmillError as error:
        remedy = "choose another directory with --cache-dir or TOKENMILL_CACHE_DIR"
        return fail("cache", f"{root}: {error.message}", remedy)
    return ok("cache", f"{root} is writable{'' if existed else ' (created now)'}")


def file_system(root: Path) -> Check:
    kind = filesystem_kind(_nearest(root))
    if is_network(_nearest(root)):
        return note(
            "file system",
            f"{kind}, a network file system: stores are read with pread, not mapped",
            "this is safe; single rows are faster from a cache on a local disk",
        )
    if kind == "unknown":
        remedy = "if it is a network file system, copy stores to a local disk before training"
        return note("file system", "unknown, treated as local: stores are mapped", remedy)
    if kind == "tmpfs":
        remedy = "the cache uses memory and is lost at a restart; put it on a disk"
        return warning("file system", "tmpfs: stores are mapped from memory", remedy)
    return ok("file system", f"{kind}, local: stores are mapped")


def space(root: Path, sources: Sequence[str], *, can_write: bool) -> Iterator[Check]:
    directory = _nearest(root)
    free = shutil.disk_usage(directory).free
    inodes = os.statvfs(directory)
    if inodes.f_files > 0 and inodes.f_favail < MIN_INODES:
        remedy = "delete small files from this disk, or choose another --cache-dir"
        yield warning("inodes", f"{inodes.f_favail:,} left", remedy)
    need = None
    if sources and not can_write:
        remedy = "make the cache writable: the index of the sources is written there"
        yield note("sources", "not checked, because the cache is not writable", remedy)
    elif sources:
        try:
            rows = open_rows(list(sources), cache_dir=root)
            files = rows.files  # reads columnar files completely
        except TokenmillError as error:
            yield fail("sources", str(error), "give files that exist and are readable")
        else:
            size = sum(file.bytes for file in files)
            text = f"{len(rows):,} rows in {len(files):,} files, {_size(size)} of text"
            yield ok("sources", text)
            need = int(size * STORE_PER_SOURCE) + len(rows) * ROW_BYTES
    shown = f"{_size(free)} free"
    if need is not None:
        shown += f"; a store of these rows needs at most about {_size(need)}"
    if need is not None and free < need:
        remedy = "free space (tokenmill cache gc), or choose another --cache-dir"
        yield fail("space", shown, remedy)
    elif free < (MIN_FREE_BYTES if need is None else 2 * need):
        yield warning("space", shown, "this may be too little; tokenmill cache gc frees space")
    else:
        yield ok("space", shown)


def _nearest(path: Path) -> Path:
    return next(place for place in (path, *path.absolute().parents) if place.exists())


def _size(count: int) -> str:
    return f"{count / GIB:,.1f} GiB" if count >= GIB else f"{count / (1 << 20):,.1f} MiB"


# Engines and tokenizer

SLOWER = "tokenizers encodes instead: the same ids, at least ten times slower"


def engines() -> Iterator[Check]:
    versions = installed_versions(("tokenizers", "fastokens"))
    if importlib.util.find_spec("tokenizers") is None:
        yield fail("engine hf", "tokenizers is not installed", "pip install tokenizers")
    else:
        yield ok("engine hf", f"tokenizers {versions.get('tokenizers', '?')}, the reference")
    try:
        importlib.import_module("fastokens")
        yield ok("engine fastokens", f"fastokens {versions.get('fastokens', '?')}")
    except ImportError:
        yield warning("engine fastokens", f"not installed; {SLOWER}", "pip install fastokens")


def one_tokenizer(source: Any, backend: str, trust_remote_code: bool) -> Iterator[Check]:
    try:
        loaded = load(source, backend=backend, trust_remote_code=trust_remote_code)
        key = loaded.key
    except TokenmillError as error:
        remedy = "follow the message; a tokenizer is a directory, a tokenizer.json or a hub id"
        yield fail("tokenizer", str(error), remedy)
        return
    comparison = loaded.notes.get("auto_tokenizer")
    compared = f"; AutoTokenizer {comparison}" if comparison else ""
    yield ok("tokenizer", f"{source}: identity {key[:12]}, encoded by {loaded.backend}{compared}")
    yield _parity(loaded)
    yield _special_tokens(loaded)
    yield _template(loaded)


def _parity(loaded: Tokenizer) -> Check:
    texts = len(parity_texts(loaded.added_contents))
    engine, reason = choose_engine(loaded, "auto")
    if engine.name == "fastokens":
        return ok("parity", f"fastokens and tokenizers give equal ids for all {texts:,} texts")
    return note("parity", f"{reason}; {SLOWER}", "nothing to do: the ids are correct")


def _special_tokens(loaded: Tokenizer) -> Check:
    pad, eos = loaded.pad_token_id, loaded.eos_token_id
    shown = f"bos {loaded.bos_token_id}, eos {eos}, pad {pad}"
    if eos is None:
        remedy = "set eos_token in tokenizer_config.json, or --no-append-eos for text and pairs"
        return warning("special tokens", f"{shown}: no end-of-sequence token", remedy)
    if pad is None or pad == eos:
        shown += ": no pad token" if pad is None else ": pad is eos"
        remedy = "fine in tokenmill; a trainer that masks labels by pad id would mask the real eos"
        return note("special tokens", shown, remedy)
    return ok("special tokens", shown)


def _template(loaded: Tokenizer) -> Check:
    template = loaded.template
    source = template.get("default") if isinstance(template, dict) else template
    if source is None:
        remedy = "set --chat-template for conversations; text and pairs of strings need none"
        return note("chat template", "none", remedy)
    try:
        compiled = Template(source, ChatSpec(), loaded.special_tokens)
        untraced = _untraced(compiled)
    except TemplateError as error:
        if "date" in error.message:
            return note("chat template", "prints the date", "set the date: --date 2026-11-15")
        return fail("chat template", error.message, "fix the template, or set --chat-template")
    if untraced:
        remedy = "such rows are rejected unless everything is trained; other rows are not affected"
        return warning("chat template", f"cannot be traced: {untraced}", remedy)
    return ok("chat template", f"traced on {compiled.traced.recorded} kinds of conversations")


def _untraced(template: Template) -> str:
    for messages in CONVERSATIONS:
        for tools in (None, [TOOL]):
            try:
                template.traced.follow(messages, tools)
            except RowError:  # the template raises an error for this kind of conversation
                continue
            except NotTraced as error:
                return str(error)
    return ""
