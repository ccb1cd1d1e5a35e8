"""Self-contained copies: a store that can be moved, mailed or mounted alone.

`copy_store` makes a directory that is itself a store, with its slices and its tokenizer beneath it
(hard links where the file system allows, else synced copies). Key, document and rows are the same;
``state.json`` points into the directory, so the manifest is signed anew. The copy is staged as a
hidden sibling of the target and appears by one rename, like everything else; what is attached to
the store follows, sidecar by sidecar.
"""

from __future__ import annotations

from pathlib import Path

from tokenmill.errors import TokenmillError, UsageError
from tokenmill.files import Staging, copy_or_link, publish_directory, writing_errors
from tokenmill.store import layout as names
from tokenmill.store.commit import file_document, state_json
from tokenmill.store.embedded import counted, distinct_pictures, place_of
from tokenmill.store.layout import SliceFiles, StoreLayout
from tokenmill.store.manifest import encode_manifest, with_files
from tokenmill.store.record import Media
from tokenmill.store.sidecars import KIND, Sidecar
from tokenmill.store.store import Store


def copy_store(store: Store, target: Path, *, embed_media: bool = False) -> Path:
    """Make a self-contained copy of a store at ``target``.

    Args:
        store: An open store.
        target: A directory that does not exist, is empty, or already is a copy of this store.
        embed_media: Bring the pictures of its rows along, each once; one that has some does so in
            any case.

    Returns:
        The target.
    """
    target = target.absolute()
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        return _with_sidecars(store, _already_there(store, target))
    with writing_errors(target):
        target.parent.mkdir(parents=True, exist_ok=True)
    with Staging(target.parent, beside=target) as staging:
        staged = staging.path
        with writing_errors(target):
            _link_slices(store, staged)
            (staged / "tokenizer").mkdir()  # there even where it has no files
            for name, path in model_files(store):
                copied = staged / name
                copied.parent.mkdir(parents=True, exist_ok=True)
                copy_or_link(path, copied)
            for name in store.manifest["files"]:
                if name != names.STATE:
                    copy_or_link(store.path / name, staged / name)
            if (store.path / names.PROOF).is_file():
                copy_or_link(store.path / names.PROOF, staged / names.PROOF)
        staging.write(names.STATE, state_json(staged / names.TABLE, store.key, "slices"))
        files = {**store.manifest["files"], names.STATE: file_document(staged / names.STATE)}
        media = None
        if embed_media or "media" in store.manifest:
            media = counted([_embed(store, one, staging) for one in distinct_pictures(store)])
        manifest = with_files(store.manifest, files, media)
        staging.write(names.MANIFEST, encode_manifest(manifest))
        with writing_errors(target):
            if not publish_directory(staged, target):
                _already_there(store, target)
    return _with_sidecars(store, target)


def _with_sidecars(store: Store, target: Path) -> Path:
    """Bring what is attached to a store to its copy, as far as it is not there.

    Each appears by one rename. A copy that was cut short here is whole, and copying again goes on.
    """
    for sidecar in store.sidecars:
        carry(sidecar, StoreLayout(target))
    return target


def carry(sidecar: Sidecar, store: StoreLayout) -> bool:
    """Have a sidecar at another copy of its store; True when it was not there."""
    place, cache = store.sidecars / sidecar.path.name, store.cache_root
    if place.exists():
        return False
    sidecar.check_all()  # damage must not travel
    with Staging(cache or store.directory, beside=None if cache else place) as staging:
        staged = staging.path / "sidecar"
        staging.make(staged)
        staging.make(place.parent)
        with writing_errors(place):
            for name in (KIND.summary, *KIND.files):
                copy_or_link(sidecar.path / name, staged / name)
            return publish_directory(staged, place)


def _already_there(store: Store, target: Path) -> Path:
    try:
        found = Store(target)
    except TokenmillError as error:
        raise UsageError(
            "exists and is not a copy of this store; name another directory", path=target
        ) from error
    if found.key != store.key:
        raise UsageError(
            f"holds store {found.key[:12]}, not {store.key[:12]}; name another directory",
            path=target,
        )
    return target


def _link_slices(store: Store, staged: Path) -> None:
    for key in store.slice_keys():
        source = store.layout.slice(key)
        copied = SliceFiles(staged / "slices" / key[:2], key)
        copied.directory.mkdir(parents=True, exist_ok=True)
        if copied.record.exists():  # equal stretches of a source are one slice
            continue
        copy_or_link(source.tokens, copied.tokens)
        copy_or_link(source.meta, copied.meta)
        copy_or_link(source.record, copied.record)


def _embed(store: Store, media: Media, staging: Staging) -> int:
    """Have a picture beneath the copy; its size."""
    data = store.picture(media)
    staging.write(place_of(media.digest), data)
    return len(data)


def model_files(store: Store) -> list[tuple[str, Path]]:
    """The files of a store's tokenizer and processor, by their names beneath its copy."""
    models = {"tokenizer": store.tokenizer_path, "processor": store.processor_path}
    return [
        (f"{kind}/{name}", path)
        for kind, root in models.items()
        if root is not None
        for name, path in files_below(root)
    ]


def files_below(root: Path) -> list[tuple[str, Path]]:
    """The files of a directory and of those in it, by their names below it."""
    paths = sorted(path for path in root.rglob("*") if path.is_file())
    return [(path.relative_to(root).as_posix(), path) for path in paths]
