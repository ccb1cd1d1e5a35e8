"""Which files of a hub repository make up which split: `datasets`' rules over a list of names.

A dataset's card may name *configurations*, each with patterns per split (``data_files``), or with a
directory (``data_dir``) whose files are looked at as a repository's without a card: by the shards'
names (``data/train-00000-of-00002.parquet``), else by a split's word in a directory's name, else in
a file's, else everything is ``train``. A pattern is a shell's, without braces: ``*`` stays within
one directory, ``**`` stands for any number of them, none included. What such a look finds is of the
format that most files have.

`configurations` reads a card, `split_files` applies it. `load_dataset` gives the same files in the
same order; what it would refuse, or can only guess, is a `UsageError` that says what to name.
Markdown, TOML and ``.eval`` files, which are data to the newest versions alone, are never rows.

`datasets` itself is not asked. It is no dependency of reading files, and importing it takes longer
than indexing most of them. Its public functions glob a file system, so that each pattern would ask
the hub again, past our retries and the one commit, where a list of names is all that is needed. It
differs from version to version, so one address would mean other rows on two machines; and where it
guesses, we refuse. `tests/source/test_splits.py` holds these rules against the installed version.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tokenmill.errors import SourceError, UsageError

Splits = dict[str, list[str]]
"""Split → files."""

_KEYWORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "dev", "val"),
    "test": ("test", "testing", "eval", "evaluation"),
}
_SEPARATOR = "[-._ 0-9]"
_IN_DIRECTORY = ("**/{0}/**", "**/{0}{1}*/**", "**/*{1}{0}/**", "**/*{1}{0}{1}*/**")
_IN_FILE = ("**/{0}{1}*", "**/*{1}{0}{1}*")
_DIGITS = "[0-9]" * 5
_SHARD = re.compile(rf"(.+)-{_DIGITS}-of-{_DIGITS}.*\..*", re.S)
_SPLIT_NAME = re.compile(r"\w+(\.\w+)*")
_HEAD = re.compile(r"^\s*---(?:\r\n|\r|\n)(.*?)(?:\r\n|\r|\n)---[ \t]*(?:\r\n|\n|$)", re.S)
_CLASS_OR_CHARACTER = re.compile(r"\[!?\]?[^\]]*\]|.", re.S)
_ROW_CHANGING = ("field", "columns", "filters")  # of a card: they would be applied when reading

_IGNORED = {"README.md", "config.json", "dataset_info.json", "dataset_infos.json",
            "dummy_data.zip", "dataset_dict.json"}  # fmt: skip
_BESIDE_MEDIA = {"metadata.csv", "metadata.jsonl", "metadata.parquet", "latest_version_hint.json"}
_OURS = {"parquet": "parquet", "arrow": "arrow", "jsonl": "json", "json": "json", "ndjson": "json",
         "geoparquet": "parquet", "gpq": "parquet"}  # fmt: skip
_PREFERRED = ("parquet", "lance", "vortex", "arrow", "jsonl", "json", "csv")
"""Of formats that equally many files have, the first of these."""

OTHER_DATA = frozenset(
    """csv tsv txt conll conllu tar xml hdf5 h5 lance tsfile vortex fa fasta fna ffn faa frn afa gb
    gbk genbank fq fastq cif mmcif zip""".split()  # noqa: SIM905
)
OTHER_MEDIA = frozenset(
    """3g2 3gp aiff apng asf au avi avr blp bmp bufr bw caf cur dcx dds dib emf ent eps f4v fit fits
    flac flc fli flv ftc ftu gbr gif glb gltf grib h5 hdf htk icb icns ico iim im ircam j2c j2k jfif
    jp2 jpc jpe jpeg jpf jpg jpx m4v mat4 mat5 mkv mov mp3 mp4 mpc2k mpeg mpg mpo msp mxf nii nist
    nut ogg ogm ogv opus paf palm pbm pcd pcx pdb pdf pgm ply png pnm ppm ps psd pvf pxr qoi ras raw
    rf64 rgb rgba sd2 sds sgi stl svx tga tif tiff vda voc vst w64 wav wavex webm webp wma wmf wmv
    wve xbm xi xpm""".split()  # noqa: SIM905
)
"""Endings that `datasets` reads as something else than rows of ours; media in capitals too."""
_DATA = {*_OURS, *OTHER_DATA, *OTHER_MEDIA, *(ending.upper() for ending in OTHER_MEDIA)}


class Configuration(NamedTuple):
    """One of a card's.

    Attributes:
        name: What it is called.
        data_dir: The directory that its patterns are relative to; empty for the repository's.
        data_files: Split → patterns; None looks at the files' names.
        is_default: Whether the card marks it as the default.
    """

    name: str
    data_dir: str = ""
    data_files: Mapping[str, Sequence[str]] | None = None
    is_default: bool = False


# --- the card -------------------------------------------------------------------------------


def configurations(readme: str, standalone: str, where: str) -> list[Configuration]:
    """What a card says; empty when it says nothing.

    Args:
        readme: Text of README.md.
        standalone: Text of .huggingface.yaml, whose members come before the README's.
        where: What to call the dataset in errors.
    """
    head = _HEAD.match(readme)
    members = {**_mapping(head[1] if head else "", where), **_mapping(standalone, where)}
    stated = members.get("configs") or []
    if not isinstance(stated, list) or not all(isinstance(one, dict) for one in stated):
        raise SourceError("the card's configs are no list of configurations", path=where)
    found = [_configuration(one, where) for one in stated]
    twice = [name for name, count in Counter(one.name for one in found).items() if count > 1]
    if twice:
        raise SourceError(f"the card has the configuration {twice[0]!r} twice", path=where)
    return found


def _mapping(text: str, where: str) -> dict[str, Any]:
    import yaml

    try:
        members = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError) as error:
        raise SourceError(f"the card's head is not YAML: {error}", path=where) from error
    if members is not None and not isinstance(members, dict):
        raise SourceError("the card's head is no mapping", path=where)
    return members or {}


def _configuration(stated: dict[str, Any], where: str) -> Configuration:
    if "config_name" not in stated:
        raise SourceError("a configuration of the card has no config_name", path=where)
    name = str(stated["config_name"])
    changing = [member for member in _ROW_CHANGING if stated.get(member) is not None]
    if changing:
        raise UsageError(
            f"configuration {name!r} of the card sets {changing[0]!r}, which changes rows while "
            "they are read and is not applied here; name the files, as in "
            "hf://datasets/owner/name/path",
            path=where,
        )
    data_dir = stated.get("data_dir") or ""
    files = stated.get("data_files")
    return Configuration(
        name,
        _relative(str(data_dir), name, where).rstrip("/"),
        None if files is None else _patterns(files, name, where),
        bool(stated.get("default")),
    )


def _patterns(stated: Any, name: str, where: str) -> dict[str, list[str]]:
    """Split → patterns, of each form that ``data_files`` may have."""
    malformed = SourceError(
        f"data_files of configuration {name!r} of the card are neither a pattern, a list of "
        "patterns, nor a list of {split, path}",
        path=where,
    )
    stated = [stated] if isinstance(stated, str) else stated
    if not isinstance(stated, list):
        raise malformed
    if all(isinstance(one, str) for one in stated):
        return {"train": [_relative(one, name, where) for one in stated]}
    found: dict[str, list[str]] = {}
    for one in stated:
        if not isinstance(one, dict) or set(one) != {"split", "path"}:
            raise malformed
        split, path = one["split"], one["path"]
        paths = [path] if isinstance(path, str) else path
        if not isinstance(paths, list) or not all(isinstance(each, str) for each in paths):
            raise malformed
        if not isinstance(split, str) or not _SPLIT_NAME.fullmatch(split) or split in found:
            raise SourceError(
                f"split {split!r} of configuration {name!r} of the card is no name, or stands "
                "there twice",
                path=where,
            )
        found[split] = [_relative(each, name, where) for each in paths]
    return found


def _relative(pattern: str, name: str, where: str) -> str:
    """A pattern without a leading ``./``; it must stay within the repository."""
    if "://" in pattern or pattern.startswith("/") or ".." in pattern.split("/"):
        raise UsageError(
            f"configuration {name!r} of the card leads out of the repository, to {pattern!r}; "
            "name that place itself",
            path=where,
        )
    while pattern.startswith("./"):
        pattern = pattern[2:].lstrip("/")
    return "" if pattern == "." else pattern


# --- files ------------------------------------------------------------------------------------


def split_files(files: Sequence[str], chosen: Configuration | None, where: str) -> Splits:
    """The files of each split.

    Args:
        files: Every file of the repository.
        chosen: A configuration of the card; None when there is none.
        where: What to call the dataset in errors.

    Returns:
        Split → files that `datasets` takes for data, in its order; empty when there is none.

    Raises:
        UsageError: A pattern that matches nothing, or is none; a file whose name speaks of two
            splits; splits of different formats.
    """
    data_dir = "" if chosen is None else chosen.data_dir
    before = f"{data_dir}/" if data_dir else ""
    inside = sorted(file.removeprefix(before) for file in files if file.startswith(before))
    if chosen is not None and chosen.data_files is not None:
        found = {
            split: _stated(inside, patterns, split, chosen.name, where)
            for split, patterns in chosen.data_files.items()
        }
    else:
        found = _by_name(inside, where)
        if chosen is None:
            found = _of_one_format(found, where)
        elif not found:
            raise UsageError(
                f"configuration {chosen.name!r} of the card has no data files in {data_dir!r}",
                path=where,
            )
    return {split: [before + file for file in names] for split, names in found.items()}


def _stated(
    files: Sequence[str], patterns: Sequence[str], split: str, name: str, where: str
) -> list[str]:
    found: dict[str, None] = {}
    for pattern in patterns:
        matching = [file for file in _matching(files, pattern, where) if _is_data(file)]
        if not matching and not re.search(r"[*?\[]", pattern):
            raise _nothing(pattern, split, name, where)
        found.update(dict.fromkeys(matching))
    if not found:
        raise _nothing(", ".join(patterns), split, name, where)
    return list(found)


def _nothing(pattern: str, split: str, name: str, where: str) -> UsageError:
    braces = " (braces are no part of a pattern)" if "{" in pattern else ""
    return UsageError(
        f"the card's configuration {name!r} has split {split!r} in {pattern!r}, which matches no "
        f"data file{braces}; name the files, as in hf://datasets/owner/name/path",
        path=where,
    )


def _by_name(files: Sequence[str], where: str) -> Splits:
    """What the names of files and directories say; the first way that finds anything counts."""
    found = _shards(files, where)
    for ways in (_IN_DIRECTORY, _IN_FILE):
        if not found:
            patterns = {
                split: [way.format(word, _SEPARATOR) for word in words for way in ways]
                for split, words in _KEYWORDS.items()
            }
            found = _first_look(files, patterns, where)
    if not found:
        found = _first_look(files, {"train": ["**"]}, where)
    data = {split: [file for file in names if _is_data(file)] for split, names in found.items()}
    if not any(data.values()):
        return {}
    if not all(data.values()):
        empty = next(split for split, names in data.items() if not names)
        raise UsageError(
            f"files of split {empty!r} are known by their names ({found[empty][0]}), but none "
            "holds data; name the files, as in hf://datasets/owner/name/path",
            path=where,
        )
    _refuse_shared(data, where)
    return data


def _first_look(files: Sequence[str], patterns: Mapping[str, Sequence[str]], where: str) -> Splits:
    found: Splits = {}
    for split, several in patterns.items():
        names: dict[str, None] = {}
        for pattern in several:
            names.update(dict.fromkeys(_matching(files, pattern, where)))
        if names:
            found[split] = list(names)
    return found


def _shards(files: Sequence[str], where: str) -> Splits:
    """``data/<split>-00000-of-00002.parquet``, whatever the splits are called."""
    found: Splits = {}
    for file in _matching(files, f"data/*-{_DIGITS}-of-{_DIGITS}*.*", where):
        shard = _SHARD.fullmatch(file.removeprefix("data/"))
        split = shard[1] if shard else ""
        if not _SPLIT_NAME.fullmatch(split):
            raise UsageError(f"{file}: {split!r} is no name of a split; name the files", path=where)
        found.setdefault(split, []).append(file)
    return {split: found[split] for split in (*_KEYWORDS, *sorted(found)) if split in found}


def _refuse_shared(splits: Splits, where: str) -> None:
    """A file whose name speaks of two splits would be trained on and tested on."""
    home: dict[str, str] = {}
    for split, names in splits.items():
        for file in names:
            if home.setdefault(file, split) != split:
                raise UsageError(
                    f"{file} is of the splits {home[file]} and {split} by its name; name the files "
                    "you mean, as in hf://datasets/owner/name/path",
                    path=where,
                )


def _of_one_format(splits: Splits, where: str) -> Splits:
    """The files of the format that most have, which must be the same in every split."""
    formats = {split: _format(names) for split, names in splits.items()}
    if len(set(formats.values())) > 1:
        raise UsageError(f"the splits are of different formats: {formats}; name one", path=where)
    return {
        split: [file for file in names if formats[split] in map(_family, _endings(file))]
        for split, names in splits.items()
    }


def _format(names: Sequence[str]) -> str:
    counts = Counter(
        (ending.lower(), _base(file) in _BESIDE_MEDIA)
        for file in names
        for ending in _endings(file)
    )

    def rank(item: tuple[tuple[str, bool], int]) -> tuple[Any, ...]:
        (ending, beside), count = item
        return (not beside, count, *(ending == one for one in _PREFERRED), ending)

    best = sorted(counts.items(), key=rank, reverse=True)
    return next(_family(ending) for (ending, _), _ in best if _family(ending))


def _family(ending: str) -> str:
    """The format of an ending; empty when it is of no data."""
    return _OURS.get(ending) or ("another" if ending in _DATA else "")


def _is_data(file: str) -> bool:
    return any(ending in _DATA for ending in _endings(file))


def _endings(file: str) -> list[str]:
    return _base(file).split(".")[1:]


def _base(file: str) -> str:
    return file.rpartition("/")[2]


# --- patterns ---------------------------------------------------------------------------------


def _matching(files: Sequence[str], pattern: str, where: str) -> list[str]:
    """Files that match, without those that are no data and the hidden ones nobody asked for."""
    matcher = _matcher(pattern, where)
    ignored = _IGNORED - {_base(pattern)}
    hidden, special = _hidden(pattern), _special(pattern)
    return [
        file
        for file in files
        if matcher.fullmatch(file)
        and _base(file) not in ignored
        and _hidden(file) == hidden
        and _special(file) == special
    ]


def _hidden(path: str) -> int:
    return sum(part.startswith(".") and set(part) != {"."} for part in path.split("/"))


def _special(path: str) -> int:
    return sum(part.startswith("__") for part in path.split("/")[:-1])


def _matcher(pattern: str, where: str) -> re.Pattern[str]:
    *directories, last = pattern.split("/")
    if any("**" in part and part != "**" for part in (*directories, last)):
        raise UsageError(f"pattern {pattern!r} of the card: ** stands alone", path=where)
    text = "".join(
        "(?:.+/)?" if part == "**" else f"{_translated(part)}/" for part in directories
    ) + (".+" if last == "**" else _translated(last))
    try:
        return re.compile(text, re.S)
    except re.error as error:
        raise UsageError(f"pattern {pattern!r} of the card: {error}", path=where) from error


def _translated(part: str) -> str:
    """One name of a pattern as a regular expression."""
    wild = {"*": "[^/]*", "?": "[^/]"}
    return "".join(
        _character_class(piece) if len(piece) > 1 else wild.get(piece, re.escape(piece))
        for piece in _CLASS_OR_CHARACTER.findall(part)
    )


def _character_class(piece: str) -> str:
    inside = piece[1:-1]
    mark = "^/" if inside.startswith("!") else ""
    inside = inside.removeprefix("!") if mark else inside
    return "[" + mark + re.sub(r"([\\\[\]^&~|]|(?<=-)-)", r"\\\1", inside) + "]"
