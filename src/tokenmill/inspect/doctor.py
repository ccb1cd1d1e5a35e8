"""Check whether this machine is ready to prepare data.

Nothing is built; a probe file in the cache's staging directory is all that is written, beside the
index of the given sources.
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

from tokenmill._core.paths import default_cache_dir, filesystem_kind, is_network
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

STATUSES = ("ok", "note", "warning", "fail")  # note: not everybody needs it; fail: nothing works


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
) -> list[Check]:
    """Run all checks; one that raises does not stop the others.

    ``describe_ray`` returns the cluster that ``executor="ray"`` would use.
    """
    root = Path(cache_dir or default_cache_dir()).absolute()
    found: list[Check] = []

    def run(name: str, check: Callable[[], Check | Iterable[Check]]) -> None:
        try:
            made = check()
            found.extend([made] if isinstance(made, Check) else made)
        except Exception as error:
            detail = f"could not be looked at: {type(error).__name__}: {error}"
            found.append(fail(name, detail, "this is a defect of the doctor's; please report it"))

    run("libraries", libraries)
    run("cores", cores)
    run("open files", open_files)
    run("offline", offline)
    run("cache", lambda: writable(root))
    can_write = found[-1].status == "ok"
    run("file system", lambda: file_system(root))
    run("space", lambda: space(root, sources, can_write=can_write))
    run("engines", engines)
    if tokenizer is not None:
        run("tokenizer", lambda: one_tokenizer(tokenizer, tokenizer_backend, trust_remote_code))
    run("Ray", lambda: ray(describe_ray))
    return found


# The machine

EXTRAS = {
    "hf": ("transformers", "datasets", "huggingface_hub"),
    "torch": ("torch", "torchdata"),
    "ray": ("ray",),
    "serve": ("starlette", "uvicorn"),
    "remote": ("s3fs", "gcsfs", "aiohttp"),
}
FEW_FILES = 1024  # descriptors: a loader over many slices and its workers need a few hundred
OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE")
TRUE = ("1", "on", "yes", "true")  # as huggingface_hub reads its variables


def libraries() -> Iterator[Check]:
    core = installed_versions(LIBRARIES)
    own = core.pop("tokenmill", "run from its source")
    shown = ", ".join(f"{name} {version}" for name, version in core.items())
    yield ok("tokenmill", f"{own}, Python {platform.python_version()}; {shown}")
    for extra, names in EXTRAS.items():
        found = installed_versions(names)
        missing = [name for name in names if name not in found]
        shown = ", ".join(f"{name} {version}" for name, version in found.items()) or "not installed"
        if missing:
            lacks = f"{shown}; without {', '.join(missing)}" if found else shown
            remedy = f"where you need it: pip install 'tokenmill[{extra}]'"
            yield note(f"extra {extra}", lacks, remedy)
        else:
            yield ok(f"extra {extra}", shown)


def cores() -> Check:
    machine, usable, quota = os.cpu_count() or 1, usable_cores(), cpu_quota()
    shown = "none" if quota is None else f"{quota:g}"
    bounds = f"{usable} of {machine} cores (affinity {len(allowed_cores())}, quota {shown})"
    if usable < machine:
        remedy = "more workers than that gain nothing; raise taskset, Slurm or --cpus if you can"
        return note("cores", bounds, remedy)
    return ok("cores", bounds)


def open_files() -> Check:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    shown = f"{'no limit' if soft == resource.RLIM_INFINITY else f'{soft:,}'} at once"
    if soft != resource.RLIM_INFINITY and soft < FEW_FILES:
        most = "" if hard == resource.RLIM_INFINITY else f" (up to {hard:,} without root)"
        return warning("open files", shown, f"ulimit -n 65536{most}")
    return ok("open files", shown)


def offline() -> Check:
    on = [name for name in OFFLINE if os.environ.get(name, "").lower() in TRUE]
    if on:
        remedy = "hub ids must be in the local cache already; unset it to download"
        return ok("offline", f"{', '.join(on)} set: nothing is downloaded", remedy)
    remedy = "HF_HUB_OFFLINE=1 for machines without network: it fails at once instead of trying"
    return ok("offline", "not set: hub ids may be downloaded", remedy)


def ray(describe: Callable[[], dict[str, Any]] | None) -> Check:
    if importlib.util.find_spec("ray") is None:
        return note("Ray", "not installed", "for executor='ray': pip install 'tokenmill[ray]'")
    if describe is None:
        version = installed_versions(["ray"]).get("ray", "of unknown version")
        return ok("Ray", version, "`tokenmill doctor` says which cluster executor='ray' would use")
    try:
        found = describe()
    except Exception as error:  # a broken installation
        return note("Ray", f"cannot be asked: {error}", "reinstall: pip install 'tokenmill[ray]'")
    version, address = found["version"], found["address"]
    if address is None:
        remedy = "executor='ray' starts a local one; for a cluster: RAY_ADDRESS=host:6379"
        return ok("Ray", f"{version}; no cluster is running here", remedy)
    if not found["reachable"]:
        remedy = "start the cluster, or correct or unset RAY_ADDRESS"
        return warning("Ray", f"{version}; {address} ({found['from']}) does not answer", remedy)
    return ok("Ray", f"{version}; {address} ({found['from']}) answers")


# The cache. The estimate is an upper bound: int32 ids and int8 masks of one token per two and a
# half bytes of source, which is more tokens than real text gives.

STORE_PER_SOURCE = 2.0  # bytes of a store per byte of source: 5 bytes for each 2.5 bytes of text
ROW_BYTES = 128  # per row beside its tokens: index, origin, lengths, turns
GIB = 1 << 30
LITTLE = GIB  # bytes free, where the need is unknown
FEW_INODES = 10_000


def writable(root: Path) -> Check:
    """Check that the cache can be written, by writing: permissions do not show read-only mounts."""
    existed = root.exists()
    try:
        with Staging(root) as staging:
            staging.write("doctor", b"a file of the doctor's")
    except TokenmillError as error:
        do = "choose another: --cache-dir or TOKENMILL_CACHE_DIR (finished stores stay readable)"
        return fail("cache", f"{root}: {error.message}", do)
    return ok("cache", f"{root} can be written{'' if existed else ' (it was made just now)'}")


def file_system(root: Path) -> Check:
    kind = filesystem_kind(_nearest(root))
    if is_network(_nearest(root)):
        return note(
            "file system",
            f"{kind}: a network file system; stores are read with pread, never mapped",
            "safe as it is; for quicker single rows put the cache on a local disk",
        )
    if kind == "unknown":
        remedy = "if it is a network file system, copy stores to a local disk before training"
        return note("file system", "unknown kind, taken for local: stores are mapped", remedy)
    if kind == "tmpfs":
        remedy = "the cache takes memory and is gone after a restart: choose a disk"
        return warning("file system", "tmpfs: stores are mapped from memory", remedy)
    return ok("file system", f"{kind}: local; stores are mapped")


def space(root: Path, sources: Sequence[str], *, can_write: bool) -> Iterator[Check]:
    place = _nearest(root)
    free = shutil.disk_usage(place).free
    inodes = os.statvfs(place)
    if inodes.f_files > 0 and inodes.f_favail < FEW_INODES:
        remedy = "remove small files from this disk, or choose another --cache-dir"
        yield warning("inodes", f"{inodes.f_favail:,} left", remedy)
    need = None
    if sources and not can_write:
        remedy = "see the cache: rows are indexed there"
        yield note("sources", "not looked at: the cache cannot be written", remedy)
    elif sources:
        try:
            rows = open_rows(list(sources), cache_dir=root)
            files = rows.files  # reads columnar files whole
        except TokenmillError as error:
            yield fail("sources", str(error), "name files that are there and can be read")
        else:
            size = sum(file.bytes for file in files)
            text = f"{len(rows):,} rows in {len(files):,} files, {_size(size)} of text"
            yield ok("sources", text)
            need = int(size * STORE_PER_SOURCE) + len(rows) * ROW_BYTES
    shown = f"{_size(free)} free"
    if need is not None:
        shown += f"; a store of these rows needs at most about {_size(need)}"
    if need is not None and free < need:
        yield fail("space", shown, "free some (tokenmill cache gc), or choose another --cache-dir")
    elif free < (LITTLE if need is None else 2 * need):
        yield warning("space", shown, "it may suffice; tokenmill cache gc removes what is unused")
    else:
        yield ok("space", shown)


def _nearest(path: Path) -> Path:
    return next(place for place in (path, *path.absolute().parents) if place.exists())


def _size(count: int) -> str:
    return f"{count / GIB:,.1f} GiB" if count >= GIB else f"{count / (1 << 20):,.1f} MiB"


# Engines and tokenizer

SLOWER = "encoding falls back to tokenizers, the same ids at a tenth of the speed or less"


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
        shown += ": no pad token" if pad is None else ": pad is eos"
        remedy = "fine here; a trainer that masks labels by pad id would mask the real eos"
        return note("special tokens", shown, remedy)
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
        return fail("chat template", error.message, "correct it, or give --chat-template")
    if untraced:
        remedy = "such rows are rejected unless everything is trained; the rest is not affected"
        return warning("chat template", f"not traced: {untraced}", remedy)
    return ok("chat template", f"traced on {found.traced.learned} kinds of conversations")


def _untraced(template: Template) -> str:
    """Return why some kind of conversation cannot be traced; empty if all can."""
    for messages in CONVERSATIONS:
        for tools in (None, [TOOL]):
            try:
                template.traced.follow(messages, tools)
            except RowError:  # the template refuses this kind of conversation
                continue
            except NotTraced as error:
                return str(error)
    return ""
