"""Datasets of the Hugging Face hub, by name and split, pinned to a commit.

`pinned` turns whatever revision a ``hf://`` URL names (main, a branch, a tag) into the commit
behind it; every read is of that commit, and so is every path that a store's proof remembers.
`find_in_hub` finds the files of a split, as `splits` says. A dataset whose files are all of other
formats is read from the Parquet files that the hub itself keeps at ``refs/convert/parquet``.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any, NamedTuple

from tokenmill.errors import SourceError, SourceMissing, UsageError
from tokenmill.files.ranged import RemoteFile
from tokenmill.files.remote import RemoteObject
from tokenmill.optional import optional
from tokenmill.source.address import Address
from tokenmill.source.discover import KNOWN, Found, form_of, named, one_format
from tokenmill.source.splits import Configuration, Splits, configurations, split_files

CONVERTED = "refs/convert/parquet"
_SCHEME = "hf://datasets/"
_COMMIT = re.compile(r"[0-9a-f]{40}")
_URL = re.compile(
    r"^hf://datasets/(?P<repo>[^/@]+/[^/@]+)(?:@(?P<revision>refs/[^/]+/[^/]+|[^/]+))?(?P<rest>/.*)?$"
)


class Repo(NamedTuple):
    """A dataset at one commit."""

    name: str
    commit: str
    files: tuple[str, ...]

    def url(self, file: str) -> str:
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
        revision = look_up(match["repo"], revision, url).commit
    return f"{_SCHEME}{match['repo']}@{revision}{match['rest'] or ''}"


def look_up(name: str, revision: str | None, asked: str) -> Repo:
    """Ask the hub for the commit behind a revision (None is main), and the files in it."""
    with optional("huggingface_hub", "a dataset of the hub", path=name):
        from huggingface_hub import HfApi

    def work() -> Any:
        return HfApi().repo_info(name, revision=revision, repo_type="dataset")

    here = "" if asked.startswith(_SCHEME) else "no file or directory here, and "
    try:
        info = RemoteObject(f"{_SCHEME}{name}").retrying(work, None)
    except SourceMissing as error:
        raise SourceMissing(
            f"{here}no such dataset or revision on the hub (a private one needs HF_TOKEN)",
            path=asked,
        ) from error
    except SourceError as error:
        raise SourceError(
            f"{here}it could not be looked up on the hub ({_reason(error)}); offline, name local "
            f"files (`hf download {name} --repo-type dataset --local-dir DIR` gets them)",
            path=asked,
        ) from error
    files = tuple(sorted(sibling.rfilename for sibling in info.siblings or ()))
    return Repo(name, str(info.sha), files)


def _reason(error: SourceError) -> str:
    """Why the hub gave no answer, in a few words."""
    cause = error.__cause__
    if type(cause).__name__ == "OfflineModeIsEnabled":
        return "HF_HUB_OFFLINE is set"
    text = " ".join((str(cause).strip() or "no answer").splitlines()[0].split())
    return f"{type(cause).__name__}: {text[:80]}"


def find_in_hub(address: Address) -> list[Found]:
    """The files of a dataset's split."""
    hub = address.hub
    assert hub is not None
    repo = look_up(hub.repo, hub.revision, address.path)
    config, _, split = (address.split or "").rpartition("/")
    cards = _configurations(repo, address)
    chosen = _choose(address, cards, config, split)
    splits = split_files(repo.files, chosen, address.path)
    files = [file for names in splits.values() for file in names]
    others = [file for file in files if form_of(file) is None]
    if len(others) < len(files):
        if others:
            raise UsageError(
                f"{others[0]} is data of another format than {KNOWN}; name the files you mean, as "
                f"in hf://datasets/{hub.repo}/{files[0]}",
                path=address.path,
            )
    elif hub.revision is None:
        repo, splits = _converted(address, config)
    else:
        raise SourceMissing(
            f"the dataset has no files of a known format ({KNOWN})", path=address.path
        )
    if not split and len(splits) == 1:
        split = next(iter(splits))
    if split not in splits:
        raise _no_split(address, splits, split, [one.name for one in cards], config)
    found = [named(repo.url(file)) for file in splits[split]]
    return one_format(address.path, found, "the split has no files")


def _no_split(
    address: Address, splits: Splits, split: str, configs: Collection[str], config: str
) -> UsageError:
    within = f"{config}/" if config else ""
    example = f"as in {_bare(address)}:{within}{next(iter(splits))}"
    if not split:
        return UsageError(
            f"has the splits {', '.join(splits)}: name one, {example}", path=address.path
        )
    if split in configs and not config:
        return UsageError(
            f"{split!r} is a configuration: name one of its splits too, as in "
            f"{_bare(address)}:{split}/train",
            path=address.path,
        )
    return UsageError(f"there is no split {split!r}, only {', '.join(splits)}", path=address.path)


def _choose(
    address: Address, cards: list[Configuration], config: str, split: str
) -> Configuration | None:
    """The configuration that is meant; None where the card has none."""
    known = {one.name: one for one in cards}
    if not known:
        _require_config(address, ["default"], config)
        return None
    defaults = [one for one in cards if one.is_default or one.name == "default" or len(cards) == 1]
    if not config and len(defaults) == 1:
        return defaults[0]
    if not config:
        raise _several(address, [*known], split)
    _require_config(address, [*known], config)
    return known[config]


def _several(address: Address, configs: list[str], split: str) -> UsageError:
    return UsageError(
        f"has the configurations {', '.join(configs)}: name one, as in "
        f"{_bare(address)}:{configs[0]}/{split or 'train'}",
        path=address.path,
    )


def _require_config(address: Address, configs: list[str], config: str) -> None:
    if config and config not in configs:
        raise UsageError(
            f"there is no configuration {config!r}, only {', '.join(configs)}", path=address.path
        )


def _bare(address: Address) -> str:
    hub = address.hub
    assert hub is not None
    return hub.repo + (f"@{hub.revision}" if hub.revision else "")


def _configurations(repo: Repo, address: Address) -> list[Configuration]:
    """What the dataset's card says."""

    def text(name: str) -> str:
        if name not in repo.files:
            return ""
        card = RemoteFile(repo.url(name))
        return card.pread(card.size, 0).decode("utf-8", errors="replace")

    return configurations(text("README.md"), text(".huggingface.yaml"), address.path)


def _converted(address: Address, config: str) -> tuple[Repo, Splits]:
    """The hub's own conversion of a configuration: ``config/split/0000.parquet``."""
    hub = address.hub
    assert hub is not None
    try:
        repo = look_up(hub.repo, CONVERTED, address.path)
    except SourceMissing as error:
        raise SourceMissing(
            f"the dataset has no files of a known format ({KNOWN}), and the hub keeps no converted "
            f"ones at {CONVERTED}",
            path=address.path,
        ) from error
    tables: dict[str, Splits] = {}
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
    if not tables:
        raise SourceMissing("the hub's conversion of the dataset is empty", path=address.path)
    _require_config(address, [*tables], config)
    if not config and len(tables) > 1 and "default" not in tables:
        raise _several(address, [*tables], "")
    return repo, tables[config or ("default" if "default" in tables else next(iter(tables)))]
