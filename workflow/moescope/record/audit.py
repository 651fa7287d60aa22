"""The audit: is each committed record exactly what the committed data say?

For every record: the raw files have the hashes it lists, no run file was altered, every number
names files and valid runs, and analysis and rendering give the same bytes again. What the kernels
know as measured must be what a committed record says.
"""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..files import digest, inside, read_json, sha256_file
from ..study.fingerprint import data_fingerprint, fingerprints
from ..study.plan import CODE, OUTPUTS, folder
from ..task import INGREDIENTS, Task
from ..verdict import analyse
from ..verdict.results import read_runs
from ..verdict.statistics import is_figure
from . import stage
from .assemble import BOUNDS, DECLARED, SCHEMA
from .known import unsupported

OTHER_CODE = "was rendered by other code than the present; run `snakemake rerender`"


def audit(root: Path) -> list[str]:
    """What is wrong with the committed records, a line each; empty if all is well.

    A repository without a record is not well: there is nothing that was checked.
    """
    folders = sorted(path for path in (root / "results/records").glob("*/*") if path.is_dir())
    if not folders:
        return ["results/records: no record is committed, so there is nothing to audit"]
    problems: list[str] = []
    for path in folders:
        try:
            problems += _Record(root, path).problems()
        except UserError as error:
            problems.append(_relative(root, str(error)))
    return list(dict.fromkeys([*problems, *unsupported(root)]))


def _relative(root: Path, text: str) -> str:
    """Messages name files by their path in the repository."""
    return text.replace(f"{root.resolve()}/", "").replace(f"{root}/", "")


class _Record:
    def __init__(self, root: Path, path: Path):
        self.root, self.path = root, path
        self.name = path.relative_to(root).as_posix()
        missing = [
            name for name in (*OUTPUTS["record"], "ingredients.json") if not (path / name).is_file()
        ]
        if missing:
            raise UserError(
                f"{', '.join(missing)} is missing; restore it from git, or remove the folder",
                self.name,
            )
        self.ingredients = read_json(path / "ingredients.json", INGREDIENTS)
        self.record = read_json(path / "record.json", SCHEMA)

    def problems(self) -> Iterator[str]:
        yield from (f"{self.name}: {text}" for text in _key_problems(self.path, self.ingredients))
        altered = list(self._files())
        yield from altered
        yield from self._numbers()
        if self._other_code():
            yield f"{self.name}: {OTHER_CODE}"
        elif not altered:
            # With altered data the rendering differs as well; the cause has been named.
            yield from self._again()

    def _files(self) -> Iterator[str]:
        """The raw files that the record lists, and the chain of keys that leads to them."""
        listed = self.record["files"]
        for name, wanted in listed.items():
            try:
                path = inside(self.root, name)
            except UserError as error:
                raise UserError(str(error), f"{self.name}/record.json: files") from None
            if not path.is_file():
                yield f"{name}: is missing, though {self.name} stands on it"
            elif sha256_file(path) != wanted:
                yield f"{name}: was altered; its sha256 is not the one that {self.name} lists"
            elif path.name == "runs.jsonl":
                yield from self._trailer(path)
            elif path.name == "ingredients.json":
                found = read_json(path, INGREDIENTS)
                yield from (f"{name}: {text}" for text in _key_problems(path.parent, found))
        for name, key in self.ingredients["upstream"].items():
            own = (folder(*name.split("/", 1), key) / "ingredients.json").as_posix()
            if own not in listed:
                yield f"{self.name}/record.json: the files of {name} ({key}) are not listed"

    def _trailer(self, path: Path) -> Iterator[str]:
        try:
            read_runs(path)
        except UserError as error:
            yield _relative(self.root, str(error))

    def _numbers(self) -> Iterator[str]:
        """Each number is declared by the study, or a Figure with files and valid runs."""
        runs: dict[str, dict[str, bool]] = {}
        for name in self.record["files"]:
            path = inside(self.root, name)
            if path.name == "runs.jsonl" and path.is_file():
                try:
                    runs[name] = {row["id"]: row["valid"] for row in read_runs(path)}
                except UserError:
                    continue  # named by _files
        for where, value in _numbers(self.record):
            at = f"{self.name}/record.json: {where}"
            if not is_figure(value):
                yield f"{at}: the number {value!r} names no file that it comes from"
                continue
            if not value["files"]:
                yield f"{at}: the figure names no file"
            if not value["min"] <= value["value"] <= value["max"] or value["n"] < 1:
                yield f"{at}: the figure's value is outside its range"
            for file in value["files"]:
                if file not in self.record["files"]:
                    yield f"{at}: the figure's file {file} is not among the record's files"
            read = [file for file in value["files"] if Path(file).name == "runs.jsonl"]
            if any(file not in runs for file in read):
                continue  # missing or altered: named by _files, once
            known = [runs[file] for file in read]
            for run in value.get("runs", []):
                if not any(run in found for found in known):
                    yield f"{at}: no file of the figure has a run {run}"
                elif not any(found.get(run) for found in known):
                    yield f"{at}: the run {run} is not valid"

    def _other_code(self) -> bool:
        templates = {
            path.name: data_fingerprint(path)
            for path in sorted((self.root / "templates").glob("*.j2"))
        }
        old = self._analysis_ingredients()
        return (
            self.ingredients["code"] != fingerprints(*CODE["record"])
            or self.ingredients["params"].get("templates") != templates
            or old["code"] != fingerprints(*CODE["analyse"])
        )

    def _analysis_ingredients(self) -> dict[str, Any]:
        (name,) = (name for name in self.ingredients["upstream"] if name.startswith("analyse/"))
        path = folder(*name.split("/", 1), self.ingredients["upstream"][name])
        return read_json(self.root / path / "ingredients.json", INGREDIENTS)

    def _again(self) -> Iterator[str]:
        """Analysis and record made again from the committed files."""
        for ingredients, run in (
            (self._analysis_ingredients(), analyse.run),
            (self.ingredients, stage.run),
        ):
            kept = self.root / folder(
                ingredients["stage"], ingredients["subject"], ingredients["key"]
            )
            with tempfile.TemporaryDirectory(prefix="moescope-audit-") as out:
                run(_task(self.root, ingredients, Path(out)))
                made = {path.name for path in Path(out).iterdir()}
                there = {path.name for path in kept.iterdir() if not path.name.startswith(".")}
                for name in sorted(made | there - {"ingredients.json", "cost.json"}):
                    where = (kept / name).relative_to(self.root).as_posix()
                    if name not in there:
                        yield f"{where}: is missing; restore it from git"
                    elif name not in made:
                        yield f"{where}: is nothing that the data give; remove it"
                    else:
                        one, two = (kept / name).read_bytes(), (Path(out) / name).read_bytes()
                        if one != two:
                            yield f"{where}: is not what the data give: {_difference(one, two)}"


class _QuietTask(Task):
    def say(self, message: str) -> None:
        pass


def _task(root: Path, ingredients: dict[str, Any], out: Path) -> Task:
    upstream = {
        name: root / folder(*name.split("/", 1), key)
        for name, key in ingredients["upstream"].items()
    }
    return _QuietTask(
        ingredients["stage"],
        ingredients["subject"],
        ingredients["key"],
        ingredients["params"],
        upstream,
        out,
        root / "work",
        root,
    )


def _key_problems(path: Path, ingredients: dict[str, Any]) -> Iterator[str]:
    """A result's key must be that of its ingredients and of its folder."""
    made_of = {k: v for k, v in ingredients.items() if k not in ("schema", "key")}
    if not ingredients["key"] == path.name == digest(made_of)[:12]:
        yield "the key is not that of its ingredients or its folder; restore it from git"


def _numbers(value: Any, where: str = "") -> Iterator[tuple[str, Any]]:
    """(path, value) of each Figure and each bare number that the study does not declare."""
    if is_figure(value):
        yield where, value
    elif isinstance(value, dict):
        for key, item in value.items():
            declared = not where and key in DECLARED
            if not declared and key not in BOUNDS:
                yield from _numbers(item, f"{where}.{key}".lstrip("."))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _numbers(item, f"{where}.{index}")
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield where, value


def _difference(one: bytes, two: bytes) -> str:
    """The first line that differs, shortened around the place."""
    pairs = zip(one.splitlines(), two.splitlines(), strict=False)
    for number, (a, b) in enumerate(pairs, 1):
        if a != b:
            at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), 0)
            cut = slice(max(0, at - 30), at + 50)
            committed, made = (line[cut].decode(errors="replace") for line in (a, b))
            return f"line {number} says {committed!r}, made again it says {made!r}"
    return f"{len(one)} bytes are committed, made again it has {len(two)}"
