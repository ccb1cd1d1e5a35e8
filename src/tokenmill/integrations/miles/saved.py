"""Files of miles and slime: the state of a data source, and dumps of rollouts.

A state file is one line of JSON, with size and checksum of the rest, and a *body* in MessagePack
(buffered samples, the framework's metadata). The body holds plain values, arrays, tensors and
images only: decoding it executes no code that the file names.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from tokenmill._core import fingerprint
from tokenmill._core.optional import optional
from tokenmill._core.publish import Staging, sync_directory, writing_errors
from tokenmill.errors import CorruptionError, SourceError, SourceMissing, StateError, UsageError

KIND = "tokenmill.integrations.miles.DataSource"
VERSION = 2


def state_path(directory: str, rollout_id: Any) -> Path:
    return Path(directory) / "rollout" / f"tokenmill_data_source_{rollout_id}.state"


def framework_state_path(directory: str, rollout_id: Any) -> Path:
    """The state of the framework's own data source."""
    return Path(directory) / "rollout" / f"global_dataset_state_dict_{rollout_id}.pt"


def write_state(path: Path, state: dict[str, Any], extra: dict[str, Any]) -> None:
    """Write a state of plain values, and a body with the framework's samples and metadata."""
    body = encode_extra(extra)
    head = {
        "kind": KIND,
        "version": VERSION,
        "state": state,
        "seal": fingerprint.checksum(fingerprint.canonical(state) + body),
    }
    with Staging(path.parent, beside=path) as staging:
        staged = staging.write("state", fingerprint.canonical(head) + b"\n" + body)
        with writing_errors(path):
            os.replace(staged, path)
            sync_directory(path.parent)


def read_state(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a state and its body."""
    line, _, body = path.read_bytes().partition(b"\n")
    try:
        head = msgspec.json.decode(line, type=dict[str, Any])
        kind, version = head["kind"], head["version"]
    except (msgspec.MsgspecError, UnicodeDecodeError, KeyError) as error:
        raise CorruptionError(f"not a state of a data source ({error})", path=path) from error
    if kind != KIND:
        raise StateError(f"This is a state of {kind!r}, not of a data source.", path=path)
    if version != VERSION:
        raise StateError(
            f"The state has version {version!r}, but this tokenmill reads {VERSION}. Finish the "
            "run with the release that started it, or remove this file to restart the prompts.",
            path=path,
        )
    state = head.get("state")
    seal = fingerprint.checksum(fingerprint.canonical(state) + body)
    if not isinstance(state, dict) or seal != head.get("seal"):
        raise CorruptionError("The checksum of the state does not match.", path=path)
    try:
        extra = decode_extra(body)
        msgspec.convert(extra, _Body)  # validates
    except UNREADABLE as error:
        raise CorruptionError(f"The samples cannot be read: {error}", path=path) from error
    return state, extra


class _Body(msgspec.Struct):
    metadata: dict[Any, Any]
    buffer: list[list[dict[str, Any]]]


# Values

_TUPLE, _PAIRS, _SET, _INTEGER, _TEXT, _ARRAY, _TENSOR, _IMAGE = range(1, 9)
UNREADABLE = (msgspec.MsgspecError, ValueError, TypeError, KeyError, RuntimeError, ImportError)
_KINDS = "biufc"  # of array elements: booleans, numbers
_DTYPES = ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8",
           "bool")  # fmt: skip
_MODES = ("1", "L", "LA", "RGB", "RGBA", "CMYK", "YCbCr", "HSV", "I", "F")


def encode_extra(extra: dict[str, Any]) -> bytes:
    try:
        return msgspec.msgpack.encode(_plain(extra, "the state"))
    except RecursionError:
        raise UsageError(
            "Values of a sample or of the metadata are nested too deeply to be saved."
        ) from None


def decode_extra(body: bytes) -> dict[str, Any]:
    return msgspec.msgpack.decode(body, type=dict[str, Any], ext_hook=_restored)


def _tagged(kind: int, value: Any) -> msgspec.msgpack.Ext:
    return msgspec.msgpack.Ext(kind, msgspec.msgpack.encode(value))


def _plain(value: Any, where: str) -> Any:
    """Convert a value to MessagePack's own types; other types are tagged."""
    kind = type(value)
    if value is None or kind in (bool, float, bytes):
        return value
    if kind is int:
        return value if -(2**63) <= value < 2**63 else _tagged(_INTEGER, hex(value))
    if kind is str:
        return value if _is_text(value) else _tagged(_TEXT, value.encode("utf-8", "surrogatepass"))
    if kind is list:
        return [_plain(one, f"{where}[{n}]") for n, one in enumerate(value)]
    if kind is dict:
        if all(type(name) is str and _is_text(name) for name in value):
            return {name: _plain(one, f"{where}[{name!r}]") for name, one in value.items()}
        pairs = [[_plain(k, where), _plain(v, f"{where}[{k!r}]")] for k, v in value.items()]
        return _tagged(_PAIRS, pairs)
    if kind in (tuple, set):
        return _tagged(_TUPLE if kind is tuple else _SET, [_plain(one, where) for one in value])
    return _foreign(value, where)


def _is_text(value: str) -> bool:
    return value.isascii() or not any("\ud800" <= character <= "\udfff" for character in value)


def _foreign(value: Any, where: str) -> msgspec.msgpack.Ext:
    """Tag arrays, tensors and images by the name of their library, without importing it."""
    home = type(value).__module__.partition(".")[0]
    if home == "numpy" and isinstance(value, np.ndarray | np.generic):
        array = np.ascontiguousarray(value)
        if array.dtype.kind in _KINDS:
            shape = list(np.shape(value))
            scalar = isinstance(value, np.generic)
            return _tagged(_ARRAY, [array.dtype.str, shape, scalar, array.tobytes()])
    if home == "torch" and hasattr(value, "untyped_storage"):
        import torch

        named = str(value.dtype).removeprefix("torch.")
        if named in _DTYPES and value.layout == torch.strided:
            flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            return _tagged(_TENSOR, [named, list(value.shape), flat.numpy().tobytes()])
    if home == "PIL" and hasattr(value, "tobytes") and value.mode in _MODES:
        return _tagged(_IMAGE, [value.mode, list(value.size), value.tobytes()])
    raise UsageError(
        f"{where} is a {type(value).__module__}.{type(value).__qualname__}, which cannot be saved "
        "without pickle. Use plain values, arrays, tensors or images in samples and metadata."
    )


def _restored(kind: int, data: memoryview) -> Any:
    restore: dict[int, Callable[[Any], Any]] = {
        _TUPLE: tuple,
        _PAIRS: dict,
        _SET: set,
        _INTEGER: lambda text: int(text, 16),
        _TEXT: lambda text: text.decode("utf-8", "surrogatepass"),
        _ARRAY: lambda parts: _array(*parts),
        _TENSOR: lambda parts: _tensor(*parts),
        _IMAGE: lambda parts: _image(*parts),
    }
    if kind not in restore:
        raise ValueError(f"unknown tag {kind}")
    return restore[kind](msgspec.msgpack.decode(data, ext_hook=_restored))


def _array(dtype: str, shape: list[int], scalar: bool, data: bytes) -> Any:
    kind = np.dtype(dtype)
    if kind.kind not in _KINDS:
        raise ValueError(f"unsupported array type {dtype!r}")
    array = np.frombuffer(data, kind).reshape(shape)
    return array[()] if scalar else array.copy()


def _tensor(dtype: str, shape: list[int], data: bytes) -> Any:
    import torch

    if dtype not in _DTYPES:
        raise ValueError(f"unsupported tensor type {dtype!r}")
    kind = getattr(torch, dtype)
    if not data:
        return torch.empty(shape, dtype=kind)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(kind).reshape(shape)


def _image(mode: str, size: list[int], data: bytes) -> Any:
    from PIL import Image

    if mode not in _MODES:
        raise ValueError(f"unsupported image mode {mode!r}")
    return Image.frombytes(mode, (size[0], size[1]), data)


# Dumps of rollouts

DUMP_ENDINGS = (".pt", ".pth")


def rows_of_dump(path: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    """Yield the samples of a rollout dump as rows of JSON values, without executing code."""
    with optional("torch", "a dump of torch", path=path):
        import torch
    try:
        dump = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError as error:
        raise SourceMissing("no such file", path=path) from error
    except pickle.UnpicklingError as error:
        raise SourceError(
            "The file has objects other than tensors and plain values, and loading them would "
            "execute code. Save the samples as dicts, or as JSON lines.",
            path=path,
        ) from error
    except (OSError, RuntimeError, EOFError, ValueError) as error:
        raise SourceError(f"torch cannot read it: {error}", path=path) from error
    samples = dump.get("samples") if isinstance(dump, dict) else dump
    if not isinstance(samples, list) or not all(isinstance(one, dict) for one in samples):
        raise SourceError("Not a dump of rollouts: it has no list of samples.", path=path)
    step = dump.get("rollout_id") if isinstance(dump, dict) else None
    for sample in samples:
        row = sample if step is None else {"rollout_id": step, **sample}
        yield msgspec.to_builtins(row, str_keys=True, enc_hook=_foreign_json)


def _foreign_json(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else str(value)
