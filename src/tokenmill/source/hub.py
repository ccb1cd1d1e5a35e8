"""Datasets of the Hugging Face hub, by name and split, pinned to a commit.

`pinned` turns whatever revision a ``hf://`` URL names (main, a branch, a tag) into the commit
behind it; every read is of that commit, and so is every path that a store's proof remembers.
`find_in_hub` finds the files of a split: as the dataset's card says (``configs`` in its README),
else by the names of its Parquet files, else by those of its JSON lines. A dataset that has neither
is read from the Parquet files that the hub itself keeps at ``refs/convert/parquet``.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

from tokenmill.errors import SourceError, SourceMissing, UsageError
from tokenmill.files.remote import RemoteObject
from tokenmill.source.address import Address
from tokenmill.source.find import Found, form_of, named, one_format

CONVERTED = "refs/convert/parquet"
_SCHEME = "hf://datasets/"
_COMMIT = re.compile(r"[0-9a-f]{40}")
_URL = re.compile(
    r"^hf://datasets/(?P<repo>[^/@]+/[^/@]+)(?:@(?P<revision>refs/[^/]+/[^/]+|[^/]+))?(?P<rest>/.*)?$"
)
_SPLITS = ("train", "validation", "test", "valid", "dev", "val", "eval", "training", "testing",
           "evaluation")  # fmt: skip
_USUAL = {"valid": "validation", "dev": "validation", "val": "validation", "eval": "test",
          "training": "train", "testing": "test", "evaluation": "test"}  # fmt: skip
_WORD = re.compile(rf"(?:^|[/._\- ])({'|'.join(_SPLITS)})(?=[/._\- 0-9]|$)", re.IGNORECASE)
_T = TypeVar("_T")


class Repo(NamedTuple):
    """A dataset at one commit."""

    name: str
    commit: str
    files: tuple[str, ...]

    def url(self, file: str) -> str:
        """A file of it."""
        return f"{_SCHEME}{self.name}@{self.commit}/{file}"


def pinned(url: str) -> str:
    """The same URL at a commit."""
    match = _URL.match(url)
    if match is None:
        raise UsageError(
            "write it as hf://datasets/owner/name[@revision]/path, or owner/name[:split]", path=url
        )
    revision = match["revision"]
    if revision is None or not _COMMIT.fullmatch(revision):
        revision = look_up(match["repo"], revision).commit
    return f"{_SCHEME}{match['repo']}@{revision}{match['rest'] or ''}"


def look_up(name: str, revision: str | None) -> Repo:
    """Ask the hub for the commit behind a revision, and the files in it."""
    api = _api(name)

    def work() -> Any:
        return api.repo_info(name, revision=revision, repo_type="dataset")

    info = _asking(f"{_SCHEME}{name}@{revision or 'main'}", work)
    files = tuple(sorted(sibling.rfilename for sibling in info.siblings or ()))
    return Repo(name, str(info.sha), files)


def _api(name: str) -> Any:
    try:
        from huggingface_hub import HfApi
    except ImportError as error:
        raise UsageError(
            'datasets of the hub need a driver: pip install "tokenmill[hf]"', path=name
        ) from error
    return HfApi()


def _asking(url: str, work: Callable[[], _T]) -> _T:
    try:
        return RemoteObject(url).persist(work, None)
    except SourceMissing as error:
        raise SourceMissing(
            "no such dataset or revision on the hub (a private one needs HF_TOKEN), and no such "
            "file here",
            path=url,
        ) from error


def find_in_hub(address: Address) -> list[Found]:
    """The files of a dataset's split."""
    hub = address.hub
    assert hub is not None
    repo = look_up(hub.repo, hub.revision)
    config, _, split = (address.split or "").rpartition("/")
    tables = _tables(repo)
    if not tables and hub.revision is None:
        try:
            repo = look_up(hub.repo, CONVERTED)
        except SourceMissing as error:
            raise SourceMissing(
                "the dataset has neither Parquet files nor JSON lines, and the hub keeps no "
                f"converted ones at {CONVERTED}",
                path=address.path,
            ) from error
        tables = _converted(repo)
    files = _chosen(address, tables, config, split)
    found = [named(repo.url(file)) for file in files]
    return one_format(address.path, found, "the split has no files")


Tables = dict[str, dict[str, list[str]]]
"""Configuration → split → files."""


def _chosen(address: Address, tables: Tables, config: str, split: str) -> list[str]:
    if not tables:
        raise SourceMissing("the dataset has no Parquet files or JSON lines", path=address.path)
    if not config and len(tables) > 1 and "default" not in tables:
        raise UsageError(
            f"has the configurations {', '.join(sorted(tables))}: name one, as in "
            f"{_bare(address)}:{min(tables)}/{split or 'train'}",
            path=address.path,
        )
    config = config or ("default" if "default" in tables else next(iter(tables)))
    if config not in tables:
        raise UsageError(
            f"there is no configuration {config!r}, only {', '.join(sorted(tables))}",
            path=address.path,
        )
    splits = tables[config]
    if not split and len(splits) > 1:
        raise UsageError(
            f"has the splits {', '.join(splits)}: name one, as in "
            f"{_bare(address)}:{next(iter(splits))}",
            path=address.path,
        )
    split = split or next(iter(splits))
    if split not in splits:
        raise UsageError(
            f"there is no split {split!r}, only {', '.join(splits)}", path=address.path
        )
    return splits[split]


def _bare(address: Address) -> str:
    hub = address.hub
    assert hub is not None
    return hub.repo + (f"@{hub.revision}" if hub.revision else "")


def _tables(repo: Repo) -> Tables:
    """What the dataset's own files hold: by its card, else by their names."""
    data = _data_files(repo.files)
    if not data:
        return {}
    return _by_card(repo, data) or {"default": by_name(data)}


def _data_files(files: Sequence[str]) -> list[str]:
    """Its Parquet files, or where there is none its files of JSON."""
    kinds: dict[str, list[str]] = {}
    for file in files:
        form = form_of(file)
        if form is not None and not file.startswith("."):
            kinds.setdefault(form.family, []).append(file)
    return kinds.get("parquet") or kinds.get("jsonl") or []


def by_name(files: Sequence[str]) -> dict[str, list[str]]:
    """Split → files, by the words in their names; files without such a word are the training's."""
    splits: dict[str, list[str]] = {}
    for file in files:
        words = _WORD.findall(file)
        word = words[-1].lower() if words else "train"
        splits.setdefault(_USUAL.get(word, word), []).append(file)
    return splits


def _converted(repo: Repo) -> Tables:
    """The hub's own conversion: ``config/split/0000.parquet``."""
    tables: Tables = {}
    for file in repo.files:
        parts = file.split("/")
        if len(parts) == 3 and parts[2].endswith(".parquet"):
            split = parts[1].removeprefix("partial-")
            if split != parts[1]:
                raise SourceError(
                    "the hub converted only the first part of this dataset to Parquet; name its "
                    "own files by hf://datasets/owner/name/path",
                    path=repo.url(file),
                )
            tables.setdefault(parts[0], {}).setdefault(split, []).append(file)
    return tables


def _by_card(repo: Repo, data: Sequence[str]) -> Tables:
    """What ``configs`` in the card says; empty when it says nothing."""
    if "README.md" not in repo.files:
        return {}
    from tokenmill.files.ranged import RemoteFile

    card = RemoteFile(repo.url("README.md"))
    text = card.pread(card.size, 0).decode("utf-8", errors="replace")
    tables: Tables = {}
    for config in _card_configs(text, card.path):
        name = str(config.get("config_name", "default"))
        splits = tables.setdefault("default" if config.get("default") else name, {})
        for split, patterns in _patterns(config.get("data_files")):
            files = [file for file in data if any(map(_matcher(file), patterns))]
            if files:
                splits.setdefault(split, []).extend(files)
    return {name: splits for name, splits in tables.items() if splits}


def _card_configs(text: str, path: str) -> list[dict[str, Any]]:
    match = re.match(r"^---[ \t]*\r?\n(.*?)\r?\n---[ \t]*(?:\r?\n|$)", text, re.S)
    if match is None:
        return []
    import yaml

    try:
        head = yaml.safe_load(match[1])
    except yaml.YAMLError as error:
        raise SourceError(f"the card's head is not YAML: {error}", path=path) from error
    configs = head.get("configs") if isinstance(head, dict) else None
    return [one for one in configs or [] if isinstance(one, dict)]


def _patterns(stated: Any) -> list[tuple[str, list[str]]]:
    """(split, patterns) of a card's ``data_files``, in each of the forms it may have."""
    if isinstance(stated, str):
        return [("train", [stated])]
    found = []
    for one in stated if isinstance(stated, list) else []:
        if isinstance(one, str):
            found.append(("train", [one]))
        elif isinstance(one, dict):
            path = one.get("path")
            paths = [path] if isinstance(path, str) else list(path or ())
            found.append((str(one.get("split", "train")), [str(each) for each in paths]))
    return found


def _matcher(file: str) -> Callable[[str], bool]:
    return lambda pattern: fnmatch.fnmatchcase(file, pattern.removeprefix("./"))
