"""The state of a data source on disk: versioned, sealed, written in one step.

A state file is one line of JSON and a pickle (the samples of the buffer, the host's metadata). The
line says kind, version, the cursor of the prompts, the counters, and size and checksum of the
pickle, so a file that is cut or damaged, or of another version or other data, is refused by name
before anything is unpickled.
It is written beside its place, synced and renamed, so a crash leaves the old state or the new one.

The pickle holds plain dictionaries (`Sample.to_dict`); unpickling is as trusting as the hosts' own
checkpoints are: load only what a run of yours has saved.
"""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import msgspec

from tokenmill import fingerprint
from tokenmill.errors import CorruptionError, StateError
from tokenmill.files import Staging, sync_directory, writing_errors

KIND = "tokenmill.integrations.miles.DataSource"
VERSION = 1


def state_path(directory: str, rollout_id: Any) -> Path:
    """Where the state of a rollout lies below ``--save`` or ``--load``."""
    return Path(directory) / "rollout" / f"tokenmill_data_source_{rollout_id}.state"


def host_path(directory: str, rollout_id: Any) -> Path:
    """Where the host's own data source keeps its state."""
    return Path(directory) / "rollout" / f"global_dataset_state_dict_{rollout_id}.pt"


def write_state(path: Path, state: dict[str, Any], carried: dict[str, Any]) -> None:
    """Write a state; an older one of this rollout is replaced.

    Args:
        path: From `state_path`.
        state: Plain values.
        carried: Whatever the host put into samples and metadata.
    """
    body = pickle.dumps(carried, protocol=pickle.HIGHEST_PROTOCOL)
    head = {
        "kind": KIND,
        "version": VERSION,
        "state": state,
        "carried_bytes": len(body),
        "seal": fingerprint.checksum(fingerprint.canonical(state) + body),
    }
    with Staging(path.parent, beside=path) as staging:
        staged = staging.write("state", fingerprint.canonical(head) + b"\n" + body)
        with writing_errors(path):
            os.replace(staged, path)
            sync_directory(path.parent)


def read_state(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """A state and what it carries.

    Raises:
        CorruptionError: The file is not what was written.
        StateError: It is of another kind or version.
    """
    data = path.read_bytes()
    line, _, body = data.partition(b"\n")
    try:
        head = msgspec.json.decode(line, type=dict[str, Any])
        kind, version = head["kind"], head["version"]
    except (msgspec.MsgspecError, UnicodeDecodeError, KeyError) as error:
        raise CorruptionError(f"not a state of a data source ({error})", path=path) from error
    if kind != KIND:
        raise StateError(f"a state of {kind!r}, not of a data source", path=path)
    if version != VERSION:
        raise StateError(
            f"the state has version {version!r}, this tokenmill has {VERSION}: finish the run with "
            "the release that started it",
            path=path,
        )
    try:
        state, size = head["state"], head["carried_bytes"]
        sealed = fingerprint.checksum(fingerprint.canonical(state) + body) == head["seal"]
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptionError(f"a member is missing: {error}", path=path) from error
    if len(body) != size or not sealed:
        raise CorruptionError(
            f"{len(body)} bytes of samples, expected {size}, or not the ones written", path=path
        )
    return state, pickle.loads(body)
