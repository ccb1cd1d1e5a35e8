"""A reader of stores written from docs/internals/format.md alone: no module of ours, no Arrow.

`StoreFiles` reads a store directory and raises `InvalidStore` if it is not as the page describes.
Where this file needs to know what the page does not say, the page is to be completed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
from xxhash import xxh3_64_hexdigest, xxh3_64_intdigest, xxh3_128_hexdigest

FORMAT = 1
MEDIA_COLUMNS = {"images": "<i4", "patches": "<i4"}
BLOCK = 1 << 20
HEADER = np.dtype([("magic", "S8"), ("version", "<u4"), ("width", "<u4"), ("count", "<u8")])
TABLE = np.dtype(
    [
        ("key", "V20"), ("record", "V16"), ("source", "<u4"), ("rows", "<u4"), ("rejected", "<u4"),
        ("first_row", "<i8"), ("source_row", "<i8"), ("line", "<i8"), ("offset", "<i8"),
        ("tokens", "<i8"), ("trained", "<i8"),
    ]
)  # fmt: skip
COLUMNS = {
    "row_in_slice": "<i4", "part": "<i4", "line_in_slice": "<i8", "offset_in_slice": "<i8",
    "raw_length": "<i8", "digest": "<u8", "length": "<i4", "trained": "<i4",
}  # fmt: skip
GROUP_COLUMNS = {"label": "<i1", "score": "<f8", "margin": "<f8", "prompt_tokens": "<i4"}
KINDS = ("preference", "kto", "ranked", "single")


class InvalidStore(Exception):
    pass


def require(holds: bool, detail: str) -> None:
    if not holds:
        raise InvalidStore(detail)


def canonical(value: Any) -> str:
    if isinstance(value, dict):
        members = sorted(value.items())
        return "{" + ",".join(f"{canonical(n)}:{canonical(v)}" for n, v in members) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(canonical, value)) + "]"
    return _double(value) if isinstance(value, float) else json.dumps(value, ensure_ascii=False)


def _double(value: float) -> str:
    shortest = Decimal(repr(value))
    exponent = shortest.adjusted() if value else 0
    if -5 <= exponent < 16:
        plain = f"{shortest:f}"
        return plain if "." in plain else f"{plain}.0"
    sign, digits, _ = shortest.as_tuple()
    first, *rest = "".join(map(str, digits)).rstrip("0")
    return f"{'-' * sign}{first}{'.' * bool(rest)}{''.join(rest)}e{exponent}"


def key(document: Any) -> str:
    return hashlib.blake2b(canonical(document).encode(), digest_size=20).hexdigest()


def checksum(data: bytes) -> str:
    return xxh3_128_hexdigest(data)


def read_document(data: bytes, name: str) -> dict[str, Any]:
    """A file of canonical JSON and a final newline."""
    try:
        document = json.loads(data)
        written = canonical(document).encode() + b"\n"
    except ValueError as error:
        raise InvalidStore(f"{name} is not JSON") from error
    require(isinstance(document, dict), f"{name} is no object")
    require(data == written, f"{name} is not canonical")
    return document


def read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InvalidStore(f"{path.name} is missing") from error


@dataclass
class Row:
    input_ids: list[int]
    loss_mask: list[int]
    weights: list[float]
    turns: list[tuple[str, int, int]]
    extra: dict[str, Any]
    origin: tuple[int, int, int | None, int | None, int]  # source, row, line, offset, length
    part: int
    digest: int
    group: tuple[float | None, ...] | None  # label, score, margin, prompt_tokens
    media: list[list[Any]]  # kind, reference, digest, width, height, start, count, grid


class SliceData:
    """A slice: its commit record and its two files, every block checked."""

    def __init__(self, directory: Path, name: str, expected: str) -> None:
        stem = directory / name[:2] / name
        data = read_bytes(stem.with_suffix(".json"))
        require(checksum(data) == expected, "not the commit record that the table states")
        self.record = record = read_document(data, "commit record")
        require(record["slice"] == name, "the record is another slice's")
        rest = {field: value for field, value in record.items() if field != "checksum"}
        require(record["checksum"] == checksum(canonical(rest).encode()), "the record's checksum")
        self.has_groups = record.get("groups") is not None
        self.has_weights = "weight_runs.offsets" in record["meta_file"]["buffers"]
        self.has_media = "media.offsets" in record["meta_file"]["buffers"]
        require(record["format"] == FORMAT, f"format {record['format']!r}")
        self.files = {
            "token_file": _guarded(stem.with_suffix(".arrow"), record["token_file"]),
            "meta_file": _guarded(stem.with_suffix(".meta.arrow"), record["meta_file"]),
        }
        self.rows: int = record["rows"]
        units = sum(record["groups"][k] for k in KINDS) if self.has_groups else self.rows
        require(record["rows_in"] == units + len(record["rejected"]), "the record's account")
        self.columns = {n: self.fixed(n, kind) for n, kind in COLUMNS.items()}
        if self.has_groups:
            self.columns |= {n: self.fixed(n, kind) for n, kind in GROUP_COLUMNS.items()}
        if self.has_media:
            self.columns |= {n: self.fixed(n, kind) for n, kind in MEDIA_COLUMNS.items()}
        self.media = self.texts("media") if self.has_media else ["[]"] * self.rows
        self.starts, self.ids = self.lists("input_ids", "<i4", "token_file")
        mask_starts, self.mask = self.lists("loss_mask", "<i1", "token_file")
        require(np.array_equal(mask_starts, self.starts), "offsets of ids and mask differ")
        roles = len(record["roles"])
        self.role_kind = "<i1" if roles <= 128 else "<i2" if roles <= 32768 else "<i4"
        self.turn_starts, self.turn_ends = self.lists("turn_ends", "<i4")
        role_starts, self.turn_roles = self.lists("turn_roles", self.role_kind)
        require(np.array_equal(role_starts, self.turn_starts), "offsets of turns differ")
        self.extra = {name: self.texts(f"extra.{name}") for name in record["extra"]}
        self.weights = self._weights()
        self._check()

    def buffer(self, name: str, file: str = "meta_file") -> bytes:
        at, size = self.record[file]["buffers"][name]
        require(at % 8 == 0 and at + size <= len(self.files[file]), f"buffer {name}")
        return self.files[file][at : at + size]

    def fixed(self, name: str, kind: str) -> np.ndarray:
        values = np.frombuffer(self.buffer(name), kind)
        require(len(values) == self.rows, f"values of {name}")
        return values

    def lists(self, name: str, kind: str, file: str = "meta_file") -> tuple[np.ndarray, np.ndarray]:
        offsets = np.frombuffer(self.buffer(f"{name}.offsets", file), "<i4")
        values = np.frombuffer(self.buffer(f"{name}.values", file), kind)
        require(len(offsets) == self.rows + 1, f"offsets of {name}")
        whole = offsets[0] == 0 and offsets[-1] == len(values) and (np.diff(offsets) >= 0).all()
        require(bool(whole), f"offsets of {name}")
        return offsets, values

    def texts(self, name: str) -> list[str]:
        offsets, values = self.lists(name, "u1")
        return [values[offsets[n] : offsets[n + 1]].tobytes().decode() for n in range(self.rows)]

    def span(self, row: int) -> slice:
        return slice(int(self.starts[row]), int(self.starts[row + 1]))

    def _weights(self) -> np.ndarray:
        weights = self.mask.astype("<f4")
        if not self.has_weights:
            return weights
        starts, places = self.lists("weight_runs", "<i4")
        value_starts, values = self.lists("run_weights", "<f4")
        require(np.array_equal(starts, value_starts), "offsets of weights differ")
        for row in range(self.rows):
            own = slice(starts[row], starts[row + 1])
            if own.start < own.stop:
                weights[self.span(row)] = 0
                for place, value in zip(places[own], values[own], strict=True):
                    weights[self.starts[row] + place : self.starts[row + 1]] = value
        return weights

    def _check(self) -> None:
        """What follows from something else must follow, and the content digest covers the rest."""
        record = self.record
        require(record["tokens"] == len(self.ids), "tokens of the record")
        require(record["trained"] == int(self.mask.sum()), "trained tokens of the record")
        require(np.array_equal(np.diff(self.starts), self.columns["length"]), "lengths")
        require(record["longest"] == max(self.columns["length"].tolist(), default=0), "longest row")
        for row in range(self.rows):
            require(int(self.mask[self.span(row)].sum()) == self.columns["trained"][row], "trained")
        starts, runs = self.lists("mask_runs", "<i4")
        for row in range(self.rows):
            found = mask_of(runs[starts[row] : starts[row + 1]], len(self.ids[self.span(row)]))
            require(np.array_equal(found, self.mask[self.span(row)]), "runs of the mask")
        require(checksum(self._content()) == record["content"], "content digest")

    def _content(self) -> bytes:
        names = list(COLUMNS)[:6]
        arrays = [
            self.ids, self.mask.view("u1"), self.starts.astype("<i8"),
            *(self.columns[name] for name in names),
            self.turn_ends, self.turn_roles, self.turn_starts.astype("<i8"),
        ]  # fmt: skip
        if self.has_groups:
            arrays += [self.columns[name] for name in GROUP_COLUMNS]
        if self.has_weights:
            arrays.append(self.weights)
        if self.has_media:
            arrays += [self.columns[name] for name in MEDIA_COLUMNS]
        pieces = [
            f"{array.dtype.kind}{array.dtype.itemsize}:{len(array)};".encode() + array.tobytes()
            for array in arrays
        ]
        members = ("rejected", "roles", "rows_in", "source_rows")
        rest = {"extra": self.extra, **{name: self.record[name] for name in members}}
        if self.has_media:
            rest["media"] = self.media
        return b"".join([*pieces, canonical(rest).encode()])

    def group_ends(self) -> list[int]:
        """One past the last row of every group; of every row where there are none."""
        if not self.has_groups:
            return list(range(1, self.rows + 1))
        begins = np.flatnonzero(self.columns["part"] == 0).tolist()
        return [*begins[1:], self.rows] if begins else []


def _guarded(path: Path, stated: dict[str, Any]) -> bytes:
    data = read_bytes(path)
    require(len(data) == stated["size"], f"size of {path.name}")
    blocks = [xxh3_64_hexdigest(data[at : at + BLOCK]) for at in range(0, len(data), BLOCK)]
    require(blocks == stated["blocks"], f"a block of {path.name}")
    return data


def mask_of(runs: np.ndarray, length: int) -> np.ndarray:
    changes = np.zeros(length, np.int64)
    changes[runs] = 1
    return np.cumsum(changes) % 2


class StoreFiles:
    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.manifest = manifest = read_document(
            read_bytes(directory / "manifest.json"), "manifest"
        )
        require(manifest.get("format") == FORMAT, f"format {manifest.get('format')!r}")
        signed = {name: value for name, value in manifest.items() if name != "digest"}
        require(manifest.get("digest") == key(signed), "the manifest's digest")
        self.document = manifest["document"]
        require(manifest["key"] == key(self.document), "the store's key")
        if "tokenizer" in self.document:
            identity = key(self.document["tokenizer"])
            require(manifest["tokenizer"]["identity"] == identity, "the tokenizer's identity")
        self.files = {name: self._own(name, said) for name, said in manifest["files"].items()}
        self.table = self._table(self.files["slices.bin"])
        own = directory / "slices"
        place = own if own.is_dir() else directory.parent.parent / "slices"
        self.slices = [
            SliceData(place, entry["key"].tobytes().hex(), entry["record"].tobytes().hex())
            for entry in self.table
        ]
        self._check()

    def _own(self, name: str, stated: dict[str, Any]) -> bytes:
        data = read_bytes(self.directory / name)
        require(len(data) == stated["size"], f"size of {name}")
        require(checksum(data) == stated["checksum"], f"checksum of {name}")
        return data

    def _table(self, data: bytes) -> np.ndarray:
        require(len(data) >= 64, "slices.bin has no header")
        header = np.frombuffer(data, HEADER, 1)[0]
        # numpy drops the zero that ends the magic.
        require(header["magic"] == b"TOKMILL" and header["version"] == 1, "header of slices.bin")
        require(TABLE.itemsize == header["width"] == 96, "row width of slices.bin")
        require(len(data) == 64 + 96 * int(header["count"]), "count of slices.bin")
        return np.frombuffer(data, TABLE, offset=64)

    def array(self, name: str, kind: str) -> list[Any]:
        return np.frombuffer(self.files[name], kind).tolist()

    def _check(self) -> None:
        """The store's own files say of its slices what these say of themselves."""
        totals, table, slices = self.manifest["totals"], self.table, self.slices
        firsts = np.cumsum([0, *table["rows"]])[:-1]
        require(np.array_equal(firsts, table["first_row"]), "rows do not follow one another")
        for entry, data in zip(table, slices, strict=True):
            stated = [data.record[name] for name in ("rows", "tokens", "trained")]
            found = [int(entry[name]) for name in ("rows", "tokens", "trained")]
            require([*stated, len(data.record["rejected"])] == [*found, entry["rejected"]], "table")
        for member, name in (("rows", "rows"), ("tokens", "tokens"), ("trained_tokens", "trained")):
            require(totals[member] == int(table[name].sum()), f"total of {member}")
        require(totals["slices"] == len(table), "total of slices")
        for name in ("source_rows", "rows_in"):
            require(totals[name] == sum(data.record[name] for data in slices), f"total of {name}")
        reasons = [row[5] for data in slices for row in data.record["rejected"]]
        counted = {reason: reasons.count(reason) for reason in reasons}
        require(counted == totals["rejected"], "total of rejected rows")
        for name, column in (("lengths.bin", "length"), ("trained.bin", "trained")):
            require(self.array(name, "<i4") == self._joined(column), name)
        self._check_masks()
        require(("groups" in totals) == any(data.has_groups for data in slices), "groups")
        if "groups" in totals:
            self._check_groups(totals["groups"])
        has_weights = "weight_runs.bin" in self.files
        require(has_weights == any(data.has_weights for data in slices), "weights")
        if has_weights:
            self._check_weights()
        has_media = "images.bin" in self.files
        require(has_media == any(data.has_media for data in slices), "media")
        if has_media:
            for name in MEDIA_COLUMNS:
                require(self.array(f"{name}.bin", "<i4") == self._joined(name), f"{name}.bin")
            require(totals["images"] == sum(self.array("images.bin", "<i4")), "images")

    def _joined(self, column: str) -> list[Any]:
        columns = [data.columns.get(column, np.zeros(data.rows, int)) for data in self.slices]
        return [value for values in columns for value in values.tolist()]

    def _check_masks(self) -> None:
        ends, runs = self.array("mask_run_ends.bin", "<i8"), self.array("mask_runs.bin", "<i4")
        first = self.array("first_trained.bin", "u1")
        require(len(ends) == len(first) == self.manifest["totals"]["rows"], "rows of mask files")
        require((ends or [0])[-1] == len(runs), "runs of masks")
        row = 0
        for data in self.slices:
            for number in range(data.rows):
                mask = data.mask[data.span(number)]
                own = runs[ends[row - 1] if row else 0 : ends[row]]
                require(mask_of(np.array(own, int), len(mask)).tolist() == mask.tolist(), "runs")
                require(first[row] == int(mask[:1].sum()), "first_trained.bin")
                row += 1

    def _check_groups(self, counts: dict[str, int]) -> None:
        ends = [
            int(entry["first_row"]) + end
            for entry, data in zip(self.table, self.slices, strict=True)
            for end in data.group_ends()
        ]
        require(self.array("group_ends.bin", "<i8") == ends, "group_ends.bin")
        require(sum(counts[kind] for kind in KINDS) == len(ends), "total of groups")

    def _check_weights(self) -> None:
        lists = [data.lists for data in self.slices if data.has_weights]
        places = [p for of in lists for p in of("weight_runs", "<i4")[1].tolist()]
        values = [v for of in lists for v in of("run_weights", "<f4")[1].tolist()]
        require(self.array("weight_runs.bin", "<i4") == places, "weight_runs.bin")
        require(self.array("run_weights.bin", "<f4") == values, "run_weights.bin")
        sizes: list[int] = []
        for data in self.slices:
            plain = np.zeros(data.rows + 1, int)
            bounds = data.lists("weight_runs", "<i4")[0] if data.has_weights else plain
            sizes += np.diff(bounds).tolist()
        require(self.array("weight_run_ends.bin", "<i8") == np.cumsum(sizes).tolist(), "ends")

    def rows(self) -> Iterator[Row]:
        for entry, data in zip(self.table, self.slices, strict=True):
            for number in range(data.rows):
                yield self._row(entry, data, number)

    def _row(self, entry: np.void, data: SliceData, number: int) -> Row:
        own, at = data.span(number), {name: values[number] for name, values in data.columns.items()}
        turns, start = [], 0
        for turn in range(data.turn_starts[number], data.turn_starts[number + 1]):
            end = int(data.turn_ends[turn])
            turns.append((data.record["roles"][data.turn_roles[turn]], start, end))
            start = end
        group = None
        if data.has_groups:
            group = tuple(None if at[n] != at[n] else at[n].item() for n in GROUP_COLUMNS)
        return Row(
            input_ids=data.ids[own].tolist(),
            loss_mask=data.mask[own].tolist(),
            weights=data.weights[own].tolist(),
            turns=turns,
            extra={name: json.loads(texts[number]) for name, texts in data.extra.items()},
            origin=_origin(entry, *(int(at[n]) for n in ORIGIN)),
            part=int(at["part"]),
            digest=int(at["digest"]),
            group=group,
            media=json.loads(data.media[number]),
        )

    def rejected(self) -> Iterator[tuple[Any, str, str]]:
        """Origin, reason and detail of every row that is not served."""
        for entry, data in zip(self.table, self.slices, strict=True):
            for row, _, line, offset, length, reason, detail in data.record["rejected"]:
                yield _origin(entry, row, line, offset, length), reason, detail

    def check_sources(self, contents: list[bytes]) -> None:
        """Hold a store of lines against the decompressed bytes of its source files."""
        identity = self.manifest["tokenizer"]["identity"]
        recipe = self.document["recipe"]
        limit = {name: recipe[name] for name in ("max_length", "overlong")}
        shaping = {name: value for name, value in recipe.items() if name not in limit}
        shape = key({"format": 1, "recipe": shaping, "tokenizer": identity})
        for number, (source, content) in enumerate(
            zip(self.document["sources"], contents, strict=True)
        ):
            entries = self.table[self.table["source"] == number]
            begin = int(entries["offset"][0])
            ends = [*entries["offset"][1:].tolist(), begin + source["bytes"]]
            digests = [
                checksum(content[entry["offset"] : end])
                for entry, end in zip(entries, ends, strict=True)
            ]
            for entry, digest in zip(entries, digests, strict=True):
                made = key({"shape": shape, "kind": source["kind"], "digest": digest})
                keys = (
                    {made} if limit["max_length"] is None else {made, key({"slice": made, **limit})}
                )
                require(entry["key"].tobytes().hex() in keys, "slice key")
            listed = "".join(f"{source['kind']}:{digest}\n" for digest in digests)
            hashed = hashlib.blake2b(listed.encode(), digest_size=20).hexdigest()
            require(source["digest"] == hashed, "digest of a source")
        for row in self.rows():
            source, _, _, offset, length = row.origin
            assert offset is not None
            found = xxh3_64_intdigest(contents[source][offset : offset + length])
            require(found == row.digest, "digest of a source row")


def read_sidecar(directory: Path, store: StoreFiles) -> tuple[str, str, list[Any]]:
    """Name, producer and values of rows, or of each row's tokens."""
    summary = read_document(read_bytes(directory / "sidecar.json"), "sidecar.json")
    record = summary.get("record")
    require(summary.get("checksum") == checksum(canonical(record).encode()), "sidecar.json")
    document = record["document"]
    require(key(document) == directory.name, "the sidecar's key")
    require(document["sidecar"] == 1 and document["store"] == store.manifest["key"], "its store")
    size = 4 * record["values"]
    data = _guarded(directory / "values.f32", {"size": size, "blocks": record["blocks"]})
    require(checksum(data) == record["checksum"], "checksum of the values")
    values = np.frombuffer(data, "<f4")
    finite = values[np.isfinite(values)]
    require(record["infinite"] == len(values) - len(finite), "infinite values")
    require([record["low"], record["high"]] == [finite.min(), finite.max()], "range of values")
    lengths = store.array("lengths.bin", "<i4")
    require(record["rows"] == len(lengths), "rows of the sidecar")
    parts = np.split(values, np.cumsum(lengths)[:-1]) if record["per"] == "token" else values
    return document["name"], document["producer"], [part.tolist() for part in parts]


ORIGIN = ("row_in_slice", "line_in_slice", "offset_in_slice", "raw_length")


def _origin(
    entry: np.void, row: int, line: int, offset: int, length: int
) -> tuple[int, int, int | None, int | None, int]:
    return (
        int(entry["source"]),
        int(entry["source_row"]) + row,
        int(entry["line"]) + line if entry["line"] and line >= 0 else None,
        int(entry["offset"]) + offset if entry["offset"] >= 0 and offset >= 0 else None,
        length,
    )
