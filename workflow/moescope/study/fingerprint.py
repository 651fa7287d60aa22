"""Fingerprints of code: hashes of syntax trees, so that a comment or a format is no new key.

A stage's code is its module and what that imports of moescope, directly or not, at the top or
inside a function. The data that a module reads counts too: a text constant that names a file or
a folder beside the module ("families.json", "presets") makes that part of it.
"""

import ast
import hashlib
import json
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]
NAME = PACKAGE.name


# These bring back what a committed manifest then checks by hash, so how they do it cannot change
# a result: they are no part of the stages that import them.
CHECKED = frozenset({"checkpoints.materialise", "runtimes.environments"})


# A table that decides for some arms and not for others: what it decides is an ingredient of these
# (study.crossover).
DECIDING = frozenset({"kernels/crossover.json"})


def fingerprints(*roots: str) -> dict[str, str]:
    """Module name -> 12 hex digits, for the roots and all that they import of moescope.

    Names are relative to the package ("measure.guard"); data files appear as
    "measure/prompts.json". Raises ModuleNotFoundError for a root that does not exist.
    """
    found: dict[str, str] = {}
    waiting = list(roots)
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        path = _path(name)
        if path is None:
            raise ModuleNotFoundError(f"no module {NAME}.{name}")
        tree_hash, imports, data = _module(path)
        found[name] = tree_hash
        waiting += (module for module in imports if module not in CHECKED)
        for file in data:
            named = file.relative_to(PACKAGE).as_posix()
            if named not in DECIDING:
                found[named] = data_fingerprint(file)
    return dict(sorted(found.items()))


def data_fingerprint(path: Path) -> str:
    """12 hex digits of a data file: JSON by its value, other text by its lines."""
    text = path.read_text().replace("\r\n", "\n")
    if path.suffix == ".json":
        text = json.dumps(json.loads(text), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def tree_text(source: str) -> str:
    """A syntax tree as text: the same for every Python that can parse the source.

    ``ast.dump`` changes between Python versions (empty fields, new fields), so nodes are written
    here: class, then the fields that hold something; docstrings and positions are left out.
    """
    return _read(source)[0]


# Nodes that say what a module stands on.
NAMING = (ast.Import, ast.ImportFrom, ast.Constant)
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def _read(source: str) -> tuple[str, list[ast.AST]]:
    """The tree as text, and its nodes of the kinds NAMING, in one walk: a dry run does many."""
    parts: list[str] = []
    naming: list[ast.AST] = []
    _write(ast.parse(source), parts.append, naming)
    return "".join(parts), naming


def _write(node: object, put: Callable[[str], None], naming: list[ast.AST]) -> None:
    if isinstance(node, ast.AST):
        kind = type(node)
        if kind in NAMING:
            naming.append(node)
        put(f"{kind.__name__}(")
        for field in _fields(kind):
            value = getattr(node, field, None)
            if field == "body" and kind in DOCUMENTED:
                value = _without_docstring(value)
            if value is None or value == []:
                continue
            put(f"{field}=")
            _write(value, put, naming)
        put(")")
    elif isinstance(node, list):
        put("[")
        for item in node:
            _write(item, put, naming)
            put(",")
        put("]")
    else:
        put(repr(node))


@cache
def _fields(kind: type[ast.AST]) -> tuple[str, ...]:
    """Without the context of a name, which is what its place says."""
    return tuple(sorted(field for field in kind._fields if field != "ctx"))


def _without_docstring(body: list[ast.stmt]) -> list[ast.stmt]:
    first = body[0] if body else None
    if (
        isinstance(first, ast.Expr)
        and isinstance(first.value, ast.Constant)
        and isinstance(first.value.value, str)
    ):
        return body[1:]
    return body


@cache
def _module(path: Path) -> tuple[str, tuple[str, ...], tuple[Path, ...]]:
    """(hash, modules imported of this package, data files named) of one source file."""
    text, naming = _read(path.read_text())
    here = path.relative_to(PACKAGE).with_suffix("").parts
    package = here[:-1]
    imports: set[str] = set()
    data: set[Path] = set()
    for node in naming:
        if isinstance(node, ast.ImportFrom):
            imports.update(_imported(node, package))
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name == NAME or alias.name.startswith(f"{NAME}."):
                    imports.add(alias.name.removeprefix(NAME).lstrip("."))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            data.update(_data(path.parent, node.value))
    known = tuple(sorted(name for name in imports if name and _path(name)))
    return hashlib.sha256(text.encode()).hexdigest()[:12], known, tuple(sorted(data))


def _data(folder: Path, text: str) -> list[Path]:
    """The data files that a text constant names, if it is a name beside the module."""
    if text.partition("/")[0] not in _names(folder) or not re.fullmatch(r"[\w-][\w./-]*", text):
        return []
    named = folder / text
    if named.is_file():
        return [named] if named.suffix not in (".py", ".pyc") else []
    if named.is_dir() and not any(named.glob("*.py")):
        return [file for file in sorted(named.rglob("*")) if file.is_file()]
    return []


@cache
def _names(folder: Path) -> frozenset[str]:
    return frozenset(path.name for path in folder.iterdir())


def _imported(node: ast.ImportFrom, package: tuple[str, ...]) -> set[str]:
    if node.level:
        base = package[: len(package) - node.level + 1]
    elif node.module and node.module.split(".")[0] == NAME:
        base = ()
    else:
        return set()
    module = (node.module or "").split(".") if node.module else []
    if not node.level:
        module = module[1:]
    full = [*base, *module]
    # "from .x import y": y may be a module of package x or a name in module x.
    return {".".join(full), *(".".join([*full, alias.name]) for alias in node.names)}


def _path(name: str) -> Path | None:
    """The source file of a module, or None (the package's own __init__ files count)."""
    base = PACKAGE.joinpath(*name.split(".")) if name else PACKAGE
    for path in (base.with_suffix(".py"), base / "__init__.py"):
        if path.is_file():
            return path
    return None
