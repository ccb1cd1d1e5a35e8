"""Record the names, parameters and calls of trainers that our documentation relies on.

A page of docs/ names flags, configuration keys, classes, functions and files of a *trainer* (or of
a library that trainers use) and shows code that imports from it. The record,
``tests/trainers.json``, has the file that defines each name, the parameters of each function that
the code calls or overrides, and the arguments with which trainers call our code. Trainers are
parsed from a checkout or an installed package, and never imported. ``tests/test_trainer_pages.py``
compares the pages with the record, and the record with the trainers that are available.

``python -m scripts.trainer_signatures DIRECTORY`` updates the record from the checkouts in
DIRECTORY. Trainers that are missing there keep their entries.
"""

from __future__ import annotations

import ast
import functools
import importlib.metadata
import importlib.util
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

PROJECT = Path(__file__).resolve().parent.parent
DOCS = PROJECT / "docs"
RECORD = PROJECT / "tests" / "trainers.json"


@dataclass(frozen=True)
class Trainer:
    """Location of a trainer's files.

    Attributes:
        parts: Directories and files to read, relative to a checkout or to site-packages.
        checkout: Name of the checkout; None for an installed package.
        roots: Directories of the checkout from which Python imports.
    """

    parts: tuple[str, ...]
    checkout: str | None = None
    roots: tuple[str, ...] = ("",)


TRAINERS = {
    "TRL": Trainer(("trl",)),
    "transformers": Trainer(
        ("transformers/trainer.py", "transformers/training_args.py",
         "transformers/trainer_utils.py", "transformers/trainer_pt_utils.py",
         "transformers/tokenization_utils_base.py",
         "transformers/models/auto")
    ),
    "datasets": Trainer(("datasets/__init__.py", "datasets/arrow_dataset.py", "datasets/load.py")),
    "torch": Trainer(("torch/utils/data/distributed.py",)),
    "verl": Trainer(("verl",)),
    "miles": Trainer(("miles", "train.py", "train_async.py"), "miles"),
    "slime": Trainer(("slime", "train.py", "train_async.py"), "slime"),
    "SkyRL": Trainer(("skyrl", "tests/train"), "SkyRL"),
    "NeMo RL": Trainer(("nemo_rl", "examples"), "NeMo-RL"),
    "axolotl": Trainer(("src/axolotl",), "axolotl", ("src",)),
    "LLaMA-Factory": Trainer(("src/llamafactory",), "LLaMA-Factory", ("src",)),
    "ms-swift": Trainer(("swift",), "ms-swift"),
    "OpenRLHF": Trainer(("openrlhf",), "OpenRLHF"),
    "open-instruct": Trainer(("open_instruct",), "open-instruct"),
    "torchtune": Trainer(("torchtune", "recipes"), "torchtune"),
    "torchtitan": Trainer(("torchtitan/components/data", "torchtitan/hf_datasets"), "torchtitan"),
    "grain": Trainer(("grain",)),
    "Megatron-LM": Trainer(("megatron/core/datasets", "megatron/training", "pretrain_gpt.py",
                         "tools/preprocess_data.py"),
                        "Megatron-LM"),
    "renderers": Trainer(("renderers",)),
    "prime-rl": Trainer(("src/prime_rl", "packages/prime-rl-configs/src"), "prime-rl",
                        ("src", "packages/prime-rl-configs/src")),
    "tinker-cookbook": Trainer(("tinker_cookbook/supervised", "tinker_cookbook/renderers"),
                               "tinker-cookbook"),
    "Megatron-Bridge": Trainer(("src/megatron/bridge",), "Megatron-Bridge", ("src",)),
}  # fmt: skip

PAGES = {
    "trl": ("TRL", "transformers", "datasets"),
    "verl": ("verl", "torch"),
    "miles": ("miles", "slime"),
    "skyrl": ("SkyRL", "datasets"),
    "megatron": ("Megatron-LM", "Megatron-Bridge"),
    "torchtitan": ("torchtitan", "grain"),
    "renderers": ("renderers", "prime-rl"),
    "tinker": ("tinker-cookbook",),
    "bridge": ("verl", "SkyRL", "miles", "slime"),
    "export": tuple(TRAINERS),
    "index": tuple(TRAINERS),
}
"""Page → its trainers, if the page is not named like its trainer."""

OTHER_PAGES = ("bridge.md", "export.md")
"""Pages outside of docs/trainers that show lines of trainers."""


@dataclass(frozen=True)
class Call:
    """A call of our code by a trainer: `callee` inside `function` of `file`."""

    trainer: str
    file: str
    function: str
    callee: str
    ours: str
    skip: int = 0
    """Leading arguments that are not passed to our code."""


CALLS = (
    Call("verl", "verl/trainer/sft_trainer.py", "create_sft_dataset", "dataset_cls",
         "tokenmill.integrations.verl.SFTDataset"),
    Call("verl", "verl/trainer/ppo/utils.py", "create_rl_dataset", "dataset_cls",
         "tokenmill.integrations.verl.RLDataset"),
    Call("miles", "miles/ray/rollout/rollout_manager.py", "__init__", "data_source_cls",
         "tokenmill.integrations.miles.DataSource"),
    Call("miles", "miles/rollout/inference_rollout/compatibility.py", "__call__", "self.fn",
         "tokenmill.integrations.miles.sft_rollout"),
    Call("slime", "slime/ray/rollout.py", "__init__", "data_source_cls",
         "tokenmill.integrations.miles.DataSource"),
    Call("slime", "slime/ray/rollout.py", "_get_rollout_data", "call_rollout_fn",
         "tokenmill.integrations.miles.sft_rollout", skip=1),
    Call("SkyRL", "skyrl/train/sft_trainer.py", "build_train_sampler", "sampler_cls",
         "tokenmill.integrations.skyrl.Sampler"),
    Call("SkyRL", "skyrl/train/entrypoints/main_base.py", "get_train_dataset", "PromptDataset",
         "tokenmill.integrations.skyrl.PromptDataset"),
    Call("NeMo RL", "nemo_rl/data/datasets/response_datasets/__init__.py", "load_response_dataset",
         "dataset.set_task_spec", "tokenmill.integrations.nemo_rl.SFTDataset.set_task_spec"),
    Call("NeMo RL", "nemo_rl/data/datasets/response_datasets/__init__.py", "load_response_dataset",
         "dataset.set_processor", "tokenmill.integrations.nemo_rl.SFTDataset.set_processor"),
    Call("Megatron-LM", "megatron/core/datasets/blended_megatron_dataset_builder.py",
         "_build_megatron_dataset_splits", "self.build_generic_dataset",
         "tokenmill.integrations.megatron.SFTDataset", skip=3),
    Call("Megatron-LM", "megatron/core/datasets/blended_megatron_dataset_builder.py",
         "_build_megatron_dataset_splits", "self.cls.build_low_level_dataset",
         "tokenmill.integrations.megatron.SFTDataset.build_low_level_dataset"),
)  # fmt: skip

INTERFACES = {
    "miles": {"miles.rollout.data_source.RolloutDataSourceWithBuffer":
              "tokenmill.integrations.miles.DataSource"},
    "slime": {"slime.rollout.data_source.RolloutDataSourceWithBuffer":
              "tokenmill.integrations.miles.DataSource"},
    "SkyRL": {"skyrl.train.dataset.dataset.PromptDataset":
              "tokenmill.integrations.skyrl.PromptDataset"},
}  # fmt: skip
"""Trainer → its class → our class that replaces it and has its public methods."""


# Pages


@dataclass
class Page:
    """The fenced blocks of a page by language, and its inline code."""

    path: Path
    blocks: list[tuple[str, int, str]] = field(default_factory=list)
    spans: list[tuple[int, str]] = field(default_factory=list)

    @property
    def trainers(self) -> tuple[str, ...]:
        """Trainers whose names the page may use."""
        stem = self.path.stem
        same = tuple(name for name in TRAINERS if name.lower().replace(" ", "-") == stem)
        return PAGES.get(stem, same)


def read_page(path: Path) -> Page:
    """Return the blocks and inline code of a page with their lines."""
    page, language, opened = Page(path), None, 0
    lines: list[str] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if line.startswith("```"):
            if language is None:
                language, opened, lines = line[3:].strip(), number, []
            else:
                page.blocks.append((language, opened, "\n".join(lines)))
                language = None
        elif language is not None:
            lines.append(line)
        else:
            page.spans += [(number, span) for span in re.findall(r"`([^`]+)`", line)]
    return page


def find_page(name: str) -> Path:
    (path,) = DOCS.rglob(name)
    return path


def trainer_pages() -> list[Page]:
    """Return the pages of docs/trainers and the other pages that show lines of trainers."""
    paths = [*sorted((DOCS / "trainers").glob("*.md")), *map(find_page, OTHER_PAGES)]
    return [read_page(path) for path in paths]


def commands(block: str) -> Iterator[list[str]]:
    """Return the commands of a shell block as words, without ellipses (…)."""
    for line in block.replace("\\\n", " ").splitlines():
        words = shlex.split(line.removeprefix("$ ").replace("…", " "), comments=True)
        if words:
            yield words


def without_dots(block: str) -> str:
    """Return a Python block with its ellipses (…) replaced, so that it can be parsed."""
    return re.sub(r"^…$", "", re.sub(r",\s*…(?=\s*[)\]])", "", block), flags=re.MULTILINE).replace(
        "…", "..."
    )


FLAG = re.compile(r"(?<![\w-])--[A-Za-z][\w-]*(?:\.\w+)*")
WORD = re.compile(r"(?<![\w./@-])[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*(?![\w/(-]*/)")
FILE = re.compile(r"^[\w.-]+(?:/[\w.-]+)+$|^[\w-]+\.(?:py|ya?ml)$")
DATA = re.compile(r"\.(?:jsonl|json|parquet|arrow|pt|md|bin|idx|npy|html|txt|zst|gz|state|csv)$")


def words_of(code: str) -> Iterator[str]:
    """Return the names in a line of code: flags, paths and words with dots, _ or capitals."""
    if FILE.match(code):
        if not DATA.search(code):
            yield code
        return
    code = re.sub(r"""("|')(?:\\.|(?!\1).)*\1""", " ", code)  # strings are data
    if "<" in code or re.match(r"\w+://", code):
        return
    yield from FLAG.findall(code)
    code = FLAG.sub(lambda flag: " " * len(flag[0]), code)
    for found in WORD.finditer(code):
        word, behind = found.group(), code[found.end() :]
        if DATA.search(word):
            continue
        inner = word.rpartition(".")[2]
        is_code = "." in word or "_" in inner.strip("_") or re.search(r"[a-z][A-Z]", inner)
        is_key = code == word + ":" or re.fullmatch(r"=\S+", behind)
        if is_code or is_key:
            yield word


def names_of(page: Page) -> dict[str, int]:
    """Return name → first line on the page, of the trainer's names or of ours."""
    found: dict[str, int] = {}

    def take(name: str, line: int) -> None:
        found.setdefault(name.lstrip("+"), line)

    for line, span in page.spans:
        for word in words_of(span):
            take(word, line)
    for language, line, block in page.blocks:
        if language == "sh":
            for words in commands(block):
                if words[0] == "tokenmill":
                    continue  # it is run
                for word in words:
                    if word.startswith("--"):
                        take(word.partition("=")[0], line)
                    elif key := re.match(r"\+{0,2}([A-Za-z_][\w.]*)=", word):
                        take(key[1], line)
                if words[:2] == ["python", "-m"]:
                    take(words[2], line)
                elif words[0] == "python" and len(words) > 1:
                    take(words[1], line)
        elif language == "yaml":
            for name in paths_of(yaml.safe_load(block)):
                take(name, line)
        elif language == "py":
            for name in (*imported(block).values(), *modules_of(block), *members_of(block)):
                take(name, line)
    return found


def paths_of(document: Any, prefix: str = "") -> Iterator[str]:
    """Return the dotted paths of the keys of a YAML document."""
    if isinstance(document, list):
        for item in document:
            yield from paths_of(item, prefix)
    elif isinstance(document, dict):
        for key, value in document.items():
            name = f"{prefix}{key}"
            yield name
            yield from paths_of(value, f"{name}.")


def imported(block: str) -> dict[str, str]:
    """Return name → imported dotted name of a Python block."""
    found = {}
    for node in ast.walk(ast.parse(without_dots(block))):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                found[alias.asname or alias.name] = f"{node.module}.{alias.name}"
        elif isinstance(node, ast.Import):
            for alias in node.names:
                first = alias.name.partition(".")[0]
                found[alias.asname or first] = alias.name if alias.asname else first
    return found


def modules_of(block: str) -> Iterator[str]:
    """Return the modules that a Python block imports by full name."""
    for node in ast.walk(ast.parse(without_dots(block))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def members_of(block: str) -> Iterator[str]:
    """Return the specific attributes and keywords of a Python block."""
    for node in ast.walk(ast.parse(without_dots(block))):
        if isinstance(node, ast.Attribute) and "_" in node.attr.strip("_"):
            yield node.attr
        elif isinstance(node, ast.keyword) and "_" in (node.arg or ""):
            yield str(node.arg)


def overridden(page: Page) -> dict[str, dict[str, list[str]]]:
    """Return base class → overridden method → its parameters on the page."""
    found: dict[str, dict[str, list[str]]] = {}
    for language, _, block in page.blocks:
        if language != "py":
            continue
        origins = imported(block)
        for node in ast.walk(ast.parse(without_dots(block))):
            if not isinstance(node, ast.ClassDef):
                continue
            for base in node.bases:
                if isinstance(base, ast.Name) and base.id in origins:
                    methods = found.setdefault(origins[base.id], {})
                    for child in node.body:
                        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                            methods[child.name] = parameters(child)
    return found


# Trainers


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    """Return parameters in order: ``a``, ``b=`` (with default), ``*``, ``*rest``, ``**rest``."""
    detail, stated = function.args, []
    plain = [*detail.posonlyargs, *detail.args]
    for number, argument in enumerate(plain):
        optional = number >= len(plain) - len(detail.defaults)
        stated.append(argument.arg + "=" * optional)
    if detail.vararg:
        stated.append(f"*{detail.vararg.arg}")
    elif detail.kwonlyargs:
        stated.append("*")
    for argument, default in zip(detail.kwonlyargs, detail.kw_defaults, strict=True):
        stated.append(argument.arg + "=" * (default is not None))
    if detail.kwarg:
        stated.append(f"**{detail.kwarg.arg}")
    return stated


class Files:
    """The parsed files of a trainer: definitions, parameters and calls."""

    def __init__(self, root: Path, trainer: Trainer, source: str) -> None:
        self.root, self.trainer, self.source = root, trainer, source
        self.files = {
            str(path.relative_to(root)): path
            for part in trainer.parts
            for path in ([root / part] if (root / part).is_file() else (root / part).rglob("*"))
            if path.suffix in (".py", ".yaml", ".yml")
        }
        if not self.files:
            raise FileNotFoundError(f"{root} holds none of {', '.join(trainer.parts)}")
        self._defined: dict[str, str] = {}
        self._written: dict[str, str] = {}
        self._paths: dict[str, str] = {}
        for name in sorted(self.files, key=lambda file: (file.count("/"), file)):
            self._index(name)

    @functools.cache  # noqa: B019 - a trainer is read once per run
    def tree(self, file: str) -> ast.Module:
        return ast.parse(self.files[file].read_text(encoding="utf-8"))

    def _index(self, file: str) -> None:
        if not file.endswith(".py"):
            try:
                documents = list(yaml.safe_load_all(self.files[file].read_text(encoding="utf-8")))
            except yaml.YAMLError:
                return
            group = Path(file).parent.name
            for path in paths_of(documents):
                self._paths.setdefault(path, file)
                self._paths.setdefault(f"{group}.{path}", file)
            return
        for node in ast.walk(self.tree(file)):
            names: list[str] = []
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                names = [node.name]
            elif isinstance(node, ast.arg | ast.keyword) and node.arg:
                names = [node.arg]
            elif isinstance(node, ast.AnnAssign | ast.Assign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                names = [t.id for t in targets if isinstance(t, ast.Name)]
                names += [t.attr for t in targets if isinstance(t, ast.Attribute)]
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                if re.fullmatch(r"-{0,2}[A-Za-z_][\w.-]*", node.value):
                    self._written.setdefault(node.value, file)
                continue
            for name in names:
                self._defined.setdefault(name, file)

    def module_file(self, module: str) -> str | None:
        """Return the file of a dotted module name."""
        for root in self.trainer.roots:
            start = f"{root}/" if root else ""
            for file in (
                f"{module.replace('.', '/')}.py",
                f"{module.replace('.', '/')}/__init__.py",
            ):
                if start + file in self.files:
                    return start + file
        return None

    def find(self, name: str) -> str | None:
        """Return the file that defines a flag, key, path, module or name, or None."""
        if "/" in name or name.endswith((".py", ".yaml", ".yml")):
            match = (f for f in self.files if f == name or f"/{f}".endswith(f"/{name}"))
            inside = (f for f in self.files if f"/{name.rstrip('/')}/" in f"/{f}")
            return next(match, None) or (name if next(inside, None) else None)
        if name.startswith("--"):
            # A flag is written out, or a field of the class that the parser is made of.
            under, plain = name[2:].replace("-", "_"), name[2:].removeprefix("no-")
            for spelled in (name, f"--{plain}"):
                if spelled in self._written:
                    return self._written[spelled]
            return self._defined.get(under) or self._defined.get(plain.replace("-", "_"))
        if "." not in name:
            return self._defined.get(name) or self._written.get(name) or self._paths.get(name)
        if file := self._paths.get(name) or self.module_file(name):
            return file
        front, _, last = name.rpartition(".")
        if (module := self.module_file(front)) is not None:
            return module if self._at_top(module, last) else None
        if self.method(name) is not None:
            return self.method(name)[0]  # type: ignore[index]
        if front.partition(".")[0] in self._packages():
            return None  # a dotted path into the trainer that leads nowhere
        parts = name.split(".")
        if all(part in self._defined or part in self._written for part in parts):
            return self._defined.get(last) or self._written[last]
        return None

    def _packages(self) -> set[str]:
        starts = [
            f.removeprefix(f"{r}/" if r else "") for f in self.files for r in self.trainer.roots
        ]
        return {start.partition("/")[0] for start in starts if start.count("/")}

    def _at_top(self, file: str, name: str) -> bool:
        """Whether a module defines or imports a name."""
        tree = self.tree(file)
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom | ast.Import):
                if any((alias.asname or alias.name) == name for alias in node.names):
                    return True
            elif isinstance(node, ast.Constant) and node.value == name:
                return True  # of a module that imports late, by a table of names
        return any(
            isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            and node.name == name
            for node in tree.body
        )

    def method(self, dotted: str) -> tuple[str, list[str]] | None:
        """Return file and parameters of a function or method by its dotted name."""
        for cut in range(len(dotted.split(".")) - 1, 0, -1):
            module = ".".join(dotted.split(".")[:cut])
            file = self.module_file(module)
            if file is None:
                continue
            return self._inside(file, dotted.split(".")[cut:])
        return None

    def _inside(self, file: str, names: list[str]) -> tuple[str, list[str]] | None:
        body: list[ast.stmt] = self.tree(file).body
        for number, name in enumerate(names):
            node = next((one for one in body if getattr(one, "name", None) == name), None)
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                return file, parameters(node)
            if not isinstance(node, ast.ClassDef):
                return None
            body = node.body
            rest = names[number + 1 :]
            if rest and not any(getattr(n, "name", None) == rest[0] for n in body):
                return self._inherited(file, node, rest)
        return None

    def _inherited(self, file: str, node: ast.ClassDef, rest: list[str]) -> Any:
        origins = imported_by(self.tree(file))
        for base in node.bases:
            if isinstance(base, ast.Name):
                if base.id in origins and (found := self.method(f"{origins[base.id]}.{rest[0]}")):
                    return found
                if base.id not in origins and (found := self._inside(file, [base.id, *rest])):
                    return found
        return None

    def public_methods(self, dotted: str) -> dict[str, list[str]]:
        """Return public method → parameters of a class and its bases in the same file."""
        module, _, name = dotted.rpartition(".")
        file = self.module_file(module)
        if file is None:
            raise LookupError(f"{dotted}: no such module in {self.source}")
        found: dict[str, list[str]] = {}
        waiting = [name]
        while waiting:
            wanted = waiting.pop(0)
            for node in self.tree(file).body:
                if isinstance(node, ast.ClassDef) and node.name == wanted:
                    waiting += [base.id for base in node.bases if isinstance(base, ast.Name)]
                    for child in node.body:
                        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) and (
                            not child.name.startswith("_") or child.name in ("__len__", "__init__")
                        ):
                            found.setdefault(child.name, parameters(child))
        return dict(sorted(found.items()))

    def call(self, wanted: Call) -> list[str]:
        """Return the arguments of a call: ``_`` (positional), ``name=``, ``*``, ``**``."""
        if wanted.file not in self.files:
            raise LookupError(f"{wanted.trainer}: {wanted.file} is gone")
        for node in ast.walk(self.tree(wanted.file)):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            if node.name != wanted.function:
                continue
            for inner in ast.walk(node):
                if isinstance(inner, ast.Call) and ast.unparse(inner.func) == wanted.callee:
                    given = inner.args[wanted.skip :]
                    shape = ["*" if isinstance(a, ast.Starred) else "_" for a in given]
                    return shape + [f"{k.arg}=" if k.arg else "**" for k in inner.keywords]
        raise LookupError(f"{wanted.trainer}: {wanted.callee}(…) is not in {wanted.function}")


def imported_by(tree: ast.Module) -> dict[str, str]:
    """Return name → imported dotted name of a module."""
    return {
        alias.asname or alias.name: f"{node.module}.{alias.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module and not node.level
        for alias in node.names
    }


def open_trainer(name: str, checkouts: Path | None) -> Files | None:
    """Parse a trainer from its checkout or installed package; return None if it is missing."""
    trainer = TRAINERS[name]
    if trainer.checkout is None:
        package = trainer.parts[0].partition("/")[0]
        spec = importlib.util.find_spec(package)
        if spec is None or spec.origin is None:
            return None
        root = Path(spec.origin).parent.parent
        return Files(root, trainer, f"{package} {importlib.metadata.version(package)}")
    root = (checkouts or Path()) / trainer.checkout
    if checkouts is None or not root.is_dir():
        return None
    detail = subprocess.run(
        ["git", "-C", str(root), "log", "-1", "--format=%h of %cs", "--abbrev=9"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return Files(root, trainer, f"{trainer.checkout} {detail.stdout.strip()}")


def record_of(name: str, files: Files, pages: list[Page]) -> dict[str, Any]:
    """Return the record of one trainer."""
    names, signatures = {}, {}
    for page in pages:
        if name not in page.trainers:
            continue
        for word in names_of(page):
            if (file := files.find(word)) is not None:
                names[word] = file
        for base, methods in overridden(page).items():
            for method in methods:
                if (found := files.method(f"{base}.{method}")) is not None:
                    signatures[f"{base}.{method}"] = found[1]
    return {
        "source": files.source,
        "names": dict(sorted(names.items())),
        "signatures": dict(sorted(signatures.items())),
        "calls": {call.ours: files.call(call) for call in CALLS if call.trainer == name},
        "interfaces": {theirs: files.public_methods(theirs) for theirs in INTERFACES.get(name, ())},
    }


def main(arguments: list[str]) -> None:
    """Update the record of all or some trainers from the checkouts in DIRECTORY."""
    if not arguments or not set(arguments[1:]) <= set(TRAINERS):
        sys.exit(
            "python -m scripts.trainer_signatures DIRECTORY [TRAINER…]; trainers: "
            + ", ".join(TRAINERS)
        )
    pages = trainer_pages()
    recorded = json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else {}
    for name in arguments[1:] or TRAINERS:
        files = open_trainer(name, Path(arguments[0]))
        if files is None:
            print(f"{name}: not found, its entry is unchanged", file=sys.stderr)
            continue
        recorded[name] = record_of(name, files, pages)
        print(f"{name}: {files.source}, {len(recorded[name]['names'])} names", file=sys.stderr)
    text = json.dumps(dict(sorted(recorded.items())), indent=1, ensure_ascii=False)
    RECORD.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
