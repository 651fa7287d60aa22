"""What a study may say of a runtime that is a command: where its binary comes from, how it is
built, how it is called and how its output is read. Presets hold all but the pin for known tools.
"""

import re
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    field_validator,
    model_validator,
)

from ..errors import UserError
from ..strict import known_keys
from . import expression

PRESETS = Path(__file__).with_name("presets")

Name = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9-]*$", max_length=48)]
Commit = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{40}$")]
Variable = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
Word = Annotated[str, StringConstraints(pattern=r"^[a-z_][a-z0-9_]*$")]
Relative = Annotated[str, StringConstraints(pattern=r"^[^/\s][^\s]*$")]

# What the template of a command line may name besides the preset's own options.
PLACEHOLDERS = (
    "model", "prompt", "prompt_ids", "prompt_file", "generate", "runs", "python", "tree", "file",
)  # fmt: skip
# What a run must yield, and what it may yield.
REQUIRED = ("prompt_tokens", "generated_tokens", "prefill_s", "decode_s", "forwards")
OPTIONAL = ("tool_rate", "load_s", "peak_memory")
# Lists of words that an output may hold besides the numbers.
LISTS = ("tokens", "paths", "phases")


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _known_keys(cls, data: Any) -> Any:
        return known_keys(cls, data)


class GitSource(Strict):
    """A commit of a repository: ``url`` is anything git can clone, a local mirror included.

    Without ``commit`` the runtime is not pinned yet; ``snakemake pin`` resolves ``ref`` (a branch,
    a tag, an abbreviated commit) and writes it.
    """

    kind: Literal["git"]
    url: str
    commit: Commit | None = None
    ref: str | None = None
    submodules: bool = True

    @field_validator("url")
    @classmethod
    def _no_password(cls, url: str) -> str:
        if re.search(r"://[^/@\s]*:[^/@\s]*@", url):
            raise ValueError("must hold no password; use git's credential helper")
        if url.startswith("-"):
            raise ValueError("must not begin with a hyphen")
        return url


class PythonSource(Strict):
    """A command of a locked Python environment (``envs/<env>.txt``): ``{python} -m ...``."""

    kind: Literal["python"]
    package: Literal["mlx-lm", "mlx-vlm"]
    env: str


class AmbientSource(Strict):
    """A command of the running interpreter, whose packages must have the pinned versions."""

    kind: Literal["ambient"]
    package: Literal["mlx-lm", "mlx-vlm"]
    pins: dict[str, str]


Source = Annotated[GitSource | PythonSource | AmbientSource, Field(discriminator="kind")]


class Build(Strict):
    """How a tree becomes binaries. Commands are run in the tree, in order, without a shell.

    features: joined by commas into {features}. env: on top of what is inherited; what steers
    compilers from outside (RUSTFLAGS, CFLAGS, MAKEFLAGS, MLX_*, ...) is never inherited.
    binaries: name -> path in the tree; a command line calls one as {binary.<name>}.
    tools: commands whose first line of output is the version of a tool.
    """

    commands: Annotated[list[str], Field(min_length=1)]
    features: list[Annotated[str, StringConstraints(pattern=r"^[\w.+-]+$")]] = []
    env: dict[Variable, str] = {}
    timeout_s: Annotated[float, Field(gt=0)] = 3600
    tools: list[str] = []
    binaries: Annotated[dict[Word, Relative], Field(min_length=1)]

    @field_validator("commands", "tools")
    @classmethod
    def _words(cls, commands: list[str]) -> list[str]:
        for command in commands:
            if not shlex.split(command):
                raise ValueError("an empty command")
            _filled([command], ("features", "tree"))
        return commands


class Framework(Strict):
    """The framework's pin inside the tree: the only group of a pattern found in a file.

    ``value`` is written by ``snakemake pin`` and checked when the tree is built, so that a commit
    that moves the pin is told apart from one that does not, with neither the tree nor a network.
    """

    name: Word = "mlx"
    file: Relative
    pattern: str
    value: str | None = None

    @field_validator("pattern")
    @classmethod
    def _one_group(cls, pattern: str) -> str:
        return _pattern(pattern, groups=1)


class Flags(Strict):
    """Flags that are used where the tool knows them; ``lacking``: what follows where not."""

    argv: Annotated[list[str], Field(min_length=1)]
    lacking: str


class Output(Strict):
    """How a tool's output is read: named patterns, JSON lines or CSV.

    patterns: ``once`` are searched in the whole text (the last match counts), ``each`` matches once
    a measured run; their named groups are the values.
    json_lines: lines that begin with ``prefix`` hold one object a run; ``where`` must hold in it.
    csv: the table begins with the line that matches ``header``; one row a run.
    columns: value -> key (dots for nested ones) or column, for json_lines and csv.
    lists: patterns whose every match is kept: tokens (numbers), paths, phases.
    """

    kind: Literal["patterns", "json_lines", "csv"]
    once: list[str] = []
    each: str | None = None
    prefix: str = ""
    where: dict[str, str | int | float] = {}
    header: str | None = None
    columns: dict[Word, str] = {}
    lists: dict[Literal["tokens", "paths", "phases"], str] = {}

    @model_validator(mode="after")
    def _consistent(self) -> "Output":
        for pattern in [*self.once, *([self.each] if self.each else [])]:
            _pattern(pattern, groups=None)
        for pattern in self.lists.values():
            _pattern(pattern, groups=1)
        if self.kind == "patterns" and not (self.once or self.each):
            raise ValueError("patterns need `once` or `each`")
        if self.kind != "patterns" and not self.columns:
            raise ValueError(f"{self.kind} needs `columns`")
        if self.kind == "csv" and self.header is None:
            raise ValueError("csv needs `header`, a pattern for its first line")
        return self

    def values(self) -> set[str]:
        """The names of the values that the output yields."""
        found = set(self.columns)
        for pattern in [*self.once, *([self.each] if self.each else [])]:
            found |= set(re.compile(pattern).groupindex)
        return found


class Instrument(Strict):
    """Another way to call the tool, for insight and never for speed.

    generate: tokens to generate. reads: "dot" (a graph written to {file}) or "text" (its lines).
    """

    env: dict[Variable, str]
    generate: Annotated[int, Field(ge=1)]
    reads: Literal["dot", "text"]
    keep: str | None = None
    caveat: str


class Invoke(Strict):
    """How the tool is called and read; the text of a preset file.

    denominator: in words, what the tool's own rate divides by what.
    fields: arithmetic over the output's values; the required ones are in ``REQUIRED``.
    asked: fields that the tool echoes from its command line instead of counting.
    runs: "one" a process, or "many" if the command line has {runs}. runs_per_process: how many
    then; they are one run of a round, with the mean of their times.
    """

    says: str
    argv: Annotated[list[str], Field(min_length=1)]
    optional: list[Flags] = []
    help: list[str] | None = None
    options: dict[Word, str] = {}
    env: dict[Variable, str] = {}
    runs: Literal["one", "many"] = "one"
    runs_per_process: Annotated[int, Field(ge=1)] = 1
    output: Output
    fields: dict[str, str]
    asked: list[str] = []
    denominator: str
    instruments: dict[Literal["graph", "profile"], Instrument] = {}

    @model_validator(mode="after")
    def _consistent(self) -> "Invoke":
        for name in REQUIRED:
            if name not in self.fields:
                raise ValueError(f"fields.{name} is missing")
        known = self.output.values()
        for name, text in self.fields.items():
            if name not in REQUIRED + OPTIONAL:
                allowed = ", ".join(REQUIRED + OPTIONAL)
                raise ValueError(f"fields.{name} is unknown; allowed: {allowed}")
            unknown = expression.names(text) - known
            if unknown:
                raise ValueError(
                    f"fields.{name}: the output yields no {', '.join(sorted(unknown))}; "
                    f"it yields {', '.join(sorted(known))}"
                )
        if (self.runs == "many") != any("{runs}" in part for part in self.argv):
            raise ValueError("`runs: many` and {runs} in argv belong together")
        if self.runs_per_process > 1 and self.runs != "many":
            raise ValueError("`runs_per_process` above 1 needs `runs: many`")
        unknown = set(self.asked) - set(self.fields)
        if unknown:
            raise ValueError(
                f"asked: {', '.join(sorted(unknown))} is none of the fields: "
                f"{', '.join(self.fields)}"
            )
        allowed = (*PLACEHOLDERS, *self.options)
        flags = (word for flags in self.optional for word in flags.argv)
        extra = (text for one in self.instruments.values() for text in one.env.values())
        for part in self.argv, flags, extra:
            _filled(part, allowed)
        _filled(self.help or (), ("python", "tree"))
        for name, value in self.env.items():
            for word in re.findall(r"\{([a-z_][a-z0-9_.]*)\}", value):
                if word in allowed or word.startswith("binary."):
                    raise ValueError(f"env.{name}: nothing is filled in there; give a fixed value")
        return self

    def placeholders(self) -> set[str]:
        """What the command lines have filled in, among them "binary.<name>"."""
        words = [*self.argv, *(self.help or ()), *(w for f in self.optional for w in f.argv)]
        return {name for word in words for name in re.findall(r"\{([a-z_][a-z0-9_.]*)\}", word)}


class Preset(Strict):
    """A preset file: ``build`` and ``framework`` are defaults that the study may replace."""

    invoke: Invoke
    build: dict[str, Any] = {}
    framework: dict[str, Any] | None = None


class CommandRuntime(Strict):
    """A runtime that is a command. ``build`` and ``framework`` replace the preset's, key by key;
    ``options`` fill the preset's placeholders of the same names; ``runs_per_process`` replaces the
    preset's."""

    kind: Literal["command"]
    preset: Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9._-]*$")]
    source: Source
    build: dict[str, Any] = {}
    framework: dict[str, Any] | None = None
    options: dict[Word, str] = {}
    runs_per_process: Annotated[int, Field(ge=1)] | None = None


def presets() -> list[str]:
    """The names of the presets that there are."""
    return sorted(path.stem for path in PRESETS.glob("*.yaml"))


def preset(name: str) -> Preset:
    """Raises UserError if there is none of that name or it is malformed."""
    import yaml

    path = PRESETS / f"{name}.yaml"
    if not path.is_file():
        raise UserError(f"{name!r} is no preset; allowed: {', '.join(presets())}")
    where = f"presets/{name}.yaml"
    try:
        return Preset.model_validate(yaml.safe_load(path.read_text()))
    except yaml.YAMLError as error:
        raise UserError(f"not YAML: {' '.join(str(error).split())}", where) from None
    except ValueError as error:
        raise UserError(first(error), where) from None


def resolve(runtime: CommandRuntime, where: str) -> dict[str, Any]:
    """The runtime with its preset filled in: what a build's key is made of.

    Returns {"kind", "preset", "source", "build"?, "framework"?, "invoke"}, JSON values only.
    Raises UserError (``where`` is the study's key) for what does not fit together.
    """
    try:
        template = preset(runtime.preset)
    except UserError as error:
        raise UserError(str(error), f"{where}.preset") from None
    unknown = set(runtime.options) - set(template.invoke.options)
    if unknown:
        allowed = ", ".join(template.invoke.options) or "none"
        raise UserError(
            f"{', '.join(sorted(unknown))}: the preset has no such option; allowed: {allowed}",
            f"{where}.options",
        )
    options = {**template.invoke.options, **runtime.options}
    each = runtime.runs_per_process or template.invoke.runs_per_process
    if each > 1 and template.invoke.runs != "many":
        raise UserError(
            f"{each} runs: a process of the preset {runtime.preset} measures one; allowed: 1",
            f"{where}.runs_per_process",
        )
    invoke = template.invoke.model_copy(update={"options": options, "runs_per_process": each})
    resolved: dict[str, Any] = {
        "kind": "command",
        "preset": runtime.preset,
        "source": _dump(runtime.source),
        "invoke": invoke.model_dump(mode="json"),
    }
    if isinstance(runtime.source, GitSource):
        resolved["build"] = _dump(_part(Build, template.build, runtime.build, f"{where}.build"))
        framework = {**(template.framework or {}), **(runtime.framework or {})}
        if framework:
            part = _part(Framework, framework, {}, f"{where}.framework")
            resolved["framework"] = _dump(part)
    elif runtime.build or runtime.framework:
        raise UserError("only a git source is built", f"{where}.build")
    names = resolved.get("build", {}).get("binaries", {})
    filled = invoke.placeholders()
    for name in sorted(filled):
        if name.startswith("binary.") and name.removeprefix("binary.") not in names:
            allowed = ", ".join(names) or "none (this source builds nothing)"
            raise UserError(
                f"the command line calls {{{name}}}; allowed: {allowed}", f"{where}.build.binaries"
            )
    absent = "python" if isinstance(runtime.source, GitSource) else "tree"
    if absent in filled:
        raise UserError(
            f"the preset's command line has {{{absent}}}, which a source of kind "
            f"{runtime.source.kind} does not give; allowed kinds: "
            f"{'git' if absent == 'tree' else 'python, ambient'}",
            f"{where}.source.kind",
        )
    return resolved


def unpinned(resolved: dict[str, Any]) -> list[str]:
    """The keys below the runtime that ``snakemake pin`` must fill before anything runs."""
    missing = []
    source = resolved["source"]
    if source["kind"] == "git" and source.get("commit") is None:
        missing.append("source.commit")
    if "framework" in resolved and resolved["framework"].get("value") is None:
        missing.append("framework.value")
    return missing


def _part(model: type[Strict], base: dict[str, Any], over: dict[str, Any], where: str) -> Strict:
    try:
        return model.model_validate({**base, **over})
    except ValueError as error:
        raise UserError(first(error), where) from None


def _dump(model: Strict) -> dict[str, Any]:
    return model.model_dump(mode="json", exclude_none=True)


def first(error: ValueError) -> str:
    """One line of a pydantic complaint."""
    from pydantic import ValidationError

    if not isinstance(error, ValidationError):
        return str(error)
    item = error.errors()[0]
    key = ".".join(str(part) for part in item["loc"])
    message = item["msg"].removeprefix("Value error, ")
    if isinstance(item.get("input"), str | int | float | None) and item["type"] != "missing":
        message = f"{item['input']!r}: {message[0].lower()}{message[1:]}"
    return f"{key}: {message[0].lower()}{message[1:]}" if key else message


def _filled(words: Iterable[str], allowed: Iterable[str]) -> None:
    """Raises ValueError for a {placeholder} that nothing fills; {binary.<name>} is checked later.

    Brackets around what cannot be a name (JSON, a regular expression) are left alone.
    """
    for word in words:
        for name in re.findall(r"\{([a-z_][a-z0-9_.]*)\}", word):
            if name not in allowed and not name.startswith("binary."):
                raise ValueError(
                    f"{word!r}: {{{name}}} is unknown; allowed: "
                    f"{', '.join(f'{{{one}}}' for one in sorted(allowed))}"
                )


def _pattern(text: str, groups: int | None) -> str:
    try:
        compiled = re.compile(text)
    except re.error as error:
        raise ValueError(f"{text!r} is no regular expression: {error}") from None
    if groups is not None and compiled.groups != groups:
        raise ValueError(f"{text!r} has {compiled.groups} groups; it must have {groups}")
    return text
