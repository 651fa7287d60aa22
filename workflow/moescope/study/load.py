"""Reading a study: from YAML or from what Snakemake merged, to a validated Study.

Every complaint is one line: the key, what stands there, what is allowed.
"""

import math
import re
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ..errors import UserError
from ..runtimes.spec import CommandRuntime, resolve
from ..verdict import quantities
from . import patches
from .schema import AmbientRuntime, Arm, PythonRuntime, Study, SyntheticSource


def read_yaml(path: Path) -> dict[str, Any]:
    """A file's mapping. Raises UserError, also for a key that stands twice, of which YAML would
    silently keep the last."""
    import yaml

    try:
        loader = yaml.SafeLoader(path.read_text())
        node = loader.get_single_node()
        _once(node, path.name)
        value = None if node is None else loader.construct_document(node)
    except FileNotFoundError:
        raise UserError("the study does not exist", where=str(path)) from None
    except OSError as error:
        raise UserError(f"cannot be read: {error.strerror}", where=str(path)) from None
    except UnicodeDecodeError:
        raise UserError("not a text in UTF-8; save it as that", where=str(path)) from None
    except RecursionError:
        raise UserError("not YAML: nested too deep, or in itself", where=str(path)) from None
    except yaml.YAMLError as error:
        raise UserError(f"not YAML: {' '.join(str(error).split())}", where=str(path)) from None
    if not isinstance(value, dict):
        raise UserError("not a mapping of keys to values", where=str(path))
    return value


def _once(node: Any, where: str) -> None:
    """Raises UserError if a key stands twice in a mapping of this tree of YAML."""
    if not isinstance(getattr(node, "value", None), list):
        return
    lines: dict[str, int] = {}
    for item in node.value:
        key, value = item if isinstance(item, tuple) else (None, item)
        _once(value, where)
        if key is None or not isinstance(key.value, str) or key.tag == "tag:yaml.org,2002:merge":
            continue
        line = key.start_mark.line + 1
        if key.value in lines:
            raise UserError(
                f"{key.value}: stands twice, in lines {lines[key.value]} and {line}; put the "
                "entries of both under one",
                where,
            )
        lines[key.value] = line


def load(config: dict[str, Any], where: str, root: Path) -> Study:
    """A validated study, or a UserError with one line for each thing that is wrong."""
    config = _with_files(config, where, root)
    try:
        study = Study.model_validate(config)
    except ValidationError as error:
        lines = [_line(item, where) for item in error.errors()]
        raise UserError("\n".join(dict.fromkeys(lines))) from None
    lines = [f"{where}: {line}" for line in _inconsistencies(study, root)]
    if lines:
        raise UserError("\n".join(lines))
    return study


def _with_files(config: dict[str, Any], where: str, root: Path) -> dict[str, Any]:
    """The study with each checkpoint that is given as a path put in its place.

    Studies of one model share its file so: ``moe: studies/checkpoints/moe.yaml``, from the
    repository's root.
    """
    checkpoints = config.get("checkpoints")
    if not isinstance(checkpoints, dict):
        return config
    found = {
        name: _checkpoint(value, f"{where}: checkpoints.{name}", root)
        if isinstance(value, str)
        else value
        for name, value in checkpoints.items()
    }
    return config | {"checkpoints": found}


def _checkpoint(name: str, where: str, root: Path) -> dict[str, Any]:
    try:
        path = (root / name).resolve()
        inside, there = path.is_relative_to(root.resolve()), path.is_file()
    except (OSError, ValueError):  # no file can have such a name
        inside, there = True, False
    if not inside:
        raise UserError(f"{name!r} is outside the repository; give a file in it", where)
    if not there:
        raise UserError(f"{name!r} is no file; give a path from the repository's root", where)
    checkpoint = read_yaml(path)
    source = checkpoint.get("source")
    if isinstance(source, dict) and source.get("kind") == "hub" and not source.get("revision"):
        raise UserError(f"{name} has no revision; a shared checkpoint has to give one", where)
    return checkpoint


# What pydantic calls by its classes, in a study's words.
SHAPES = {
    "model_type": "a mapping of keys to values",
    "dict_type": "a mapping of keys to values",
    "list_type": "a list",
}
EXPERTS = "must be a pattern in quotes, a list of patterns, or either of them by checkpoint"


def _line(item: dict[str, Any], where: str) -> str:
    # A union's tag (hub, python, ...) appears in pydantic's location but not in the file.
    tags = {"hub", "local", "synthetic", "python", "ambient", "command", "git"}
    path = [str(part) for part in item["loc"]]
    path = [part for i, part in enumerate(path) if not (part in tags and i in (2, 3, 4))]
    key = ".".join(path) or "study"
    if path[0:1] == ["arms"] and path[2:3] == ["experts"]:
        return f"{where}: {'.'.join(path[:3])}: {EXPERTS}"
    given = item.get("input")
    stands = f"{given!r}" if not isinstance(given, dict | list) else type(given).__name__
    kind = item["type"]
    if kind == "missing":
        return f"{where}: {key}: missing; it must be given"
    if kind == "unknown_key":
        return f"{where}: {key}: {item['msg']}"
    if kind == "string_type":
        return f"{where}: {key}: {stands} is not a text; put it in quotes"
    if kind == "string_pattern_mismatch":
        return f"{where}: {key}: {stands} is not allowed; {_pattern(item['ctx']['pattern'])}"
    if kind in SHAPES:
        or_file = (
            ", or the path of a file" if path[:1] == ["checkpoints"] and len(path) == 2 else ""
        )
        return f"{where}: {key}: {stands} is not allowed; it must be {SHAPES[kind]}{or_file}"
    if kind == "too_short":
        has, least = item["ctx"]["actual_length"], item["ctx"]["min_length"]
        entries = f"{has or 'no'} {'entries' if has > 1 else 'entry'}"
        return f"{where}: {key}: has {entries}; give {least} or more"
    if kind == "finite_number":
        return f"{where}: {key}: {stands} is not allowed; it must be a finite number"
    if kind == "literal_error":
        return f"{where}: {key}: {stands} is not allowed; allowed: {item['ctx']['expected']}"
    if kind in ("union_tag_invalid", "union_tag_not_found"):
        allowed = item["ctx"].get("expected_tags", "a known kind")
        return f"{where}: {key}.kind: {item['ctx'].get('tag')!r} is not allowed; allowed: {allowed}"
    message = item["msg"].removeprefix("Value error, ")
    return f"{where}: {key}: {stands}: {message[0].lower()}{message[1:]}"


def _pattern(pattern: str) -> str:
    known = {
        r"^[0-9a-f]{40}$": "a revision is 40 hex digits in quotes (a branch or a tag is no pin)",
        r"^[0-9a-f]{64}$": "a sha256 is 64 hex digits in quotes",
        r"^[a-z0-9][a-z0-9-]*$": "a name is lower-case letters, digits and hyphens",
        r"^[\w.-]+/[\w.-]+$": "a Hub repository is owner/name",
    }
    return known.get(pattern, f"it must match {pattern}")


def _inconsistencies(study: Study, root: Path) -> list[str]:
    """What the single fields cannot see: names that refer to nothing, two references, ..."""
    lines = []
    most = (study.shape.generate - 1) // 2
    if study.rounds.slices > max(most, 1):
        lines.append(
            f"rounds.slices: {study.rounds.slices} slices of {study.shape.generate - 1} tokens; a "
            f"slice has two at least, so {most} are the most"
        )
    for name, runtime in study.runtimes.items():
        if isinstance(runtime, PythonRuntime):
            lines += _environment(root, runtime.env, f"runtimes.{name}.env")
        elif isinstance(runtime, AmbientRuntime) and runtime.package not in runtime.pins:
            lines.append(f"runtimes.{name}.pins: {runtime.package} has no version; give one")
        elif isinstance(runtime, CommandRuntime):
            lines += _command(root, runtime, f"runtimes.{name}")
    for name, checkpoint in study.checkpoints.items():
        if isinstance(checkpoint.source, SyntheticSource):
            source = checkpoint.source
            lines += _environment(root, source.layout, f"checkpoints.{name}.source.layout")
            lines += _plain(source.config, f"checkpoints.{name}.source.config")
            if "model_type" not in source.config:
                lines.append(f"checkpoints.{name}.source.config: model_type is missing")
    for name, arm in study.arms.items():
        if arm.runtime not in study.runtimes:
            allowed = ", ".join(study.runtimes)
            lines.append(
                f"arms.{name}.runtime: {arm.runtime!r} is no runtime of this study; "
                f"allowed: {allowed}"
            )
        lines += _checkpoints(f"arms.{name}.checkpoints", arm.checkpoints, study)
    lines += _patches(study)
    references = study.role("reference")
    if len(references) != 1:
        found = ", ".join(references) or "none"
        lines.append(f"arms: exactly one arm has the role reference; found {found}")
        return lines
    reference = study.arms[references[0]]
    if reference.checkpoints is not None:
        lines.append(
            f"arms.{references[0]}.checkpoints: the reference is measured on all; remove the key"
        )
    nulls = study.role("null")
    if len(nulls) != 1:
        found = ", ".join(nulls) or "none"
        lines.append(
            "arms: exactly one arm has the role null (the reference a second time: the noise "
            f"floor); found {found}"
        )
    for name, arm in study.arms.items():
        same = _setting(arm) == _setting(reference)
        if arm.role == "null" and not same:
            lines.append(
                f"arms.{name}: the null arm must have the reference's runtime, env and patches"
            )
        elif arm.role in ("candidate", "intervention") and same:
            lines.append(
                f"arms.{name}: has the reference's runtime, env and patches; change one of them "
                "(the reference a second time is the null arm)"
            )
    lines += _claims(study)
    lines += _experts(study)
    lines += _answers(study)
    lines += _crossover(study)
    return lines


def _setting(arm: Arm) -> tuple:
    return arm.runtime, arm.env, arm.patches


def _checkpoints(key: str, names: list[str] | None, study: Study) -> list[str]:
    """A list of checkpoints that names none, one twice, or one that is not there."""
    if names is None:
        return []
    if not names:
        return [f"{key}: the list is empty; name a checkpoint, or leave the key out for all"]
    twice = [name for name in dict.fromkeys(names) if names.count(name) > 1]
    lines = [f"{key}: {name!r} is given twice" for name in twice]
    return lines + _unknown(key, names, "checkpoint", study.checkpoints)


def _unknown(key: str, names: Iterable[str], what: str, known: Collection[str]) -> list[str]:
    """A line for each name that the study does not have, with those that it has."""
    allowed = ", ".join(known)
    return [
        f"{key}: {name!r} is no {what} of this study; "
        + (f"allowed: {allowed}" if allowed else f"it has no {what}")
        for name in dict.fromkeys(names)
        if name not in known
    ]


def _roles(study: Study) -> dict[str, str]:
    return {name: arm.role for name, arm in study.arms.items()}


def _plain(value: Any, key: str) -> list[str]:
    """A checkpoint's config becomes JSON, which has neither infinities nor NaN."""
    if isinstance(value, float) and not math.isfinite(value):
        return [f"{key}: {value} is not allowed; it must be a finite number"]
    items = value.items() if isinstance(value, dict) else ()
    items = enumerate(value) if isinstance(value, list) else items
    return [line for name, inner in items for line in _plain(inner, f"{key}.{name}")]


def _patches(study: Study) -> list[str]:
    """Patches that the worker would refuse, hours later."""
    lines = []
    known = patches.known()
    for name, arm in study.arms.items():
        runtime = study.runtimes.get(arm.runtime)
        if arm.patches and isinstance(runtime, CommandRuntime):
            lines.append(
                f"arms.{name}.patches: {arm.runtime} is a command, whose insides cannot be "
                "changed; remove the key, or use a runtime of another kind"
            )
            continue
        for patch in arm.patches:
            kind, _, value = patch.partition("=")
            if kind not in known:
                lines.append(
                    f"arms.{name}.patches: {patch!r} is no patch; allowed: "
                    f"{', '.join(patches.spelt(known))}"
                )
            elif re.fullmatch(known[kind], value) is None:
                (spelt,) = patches.spelt({kind: known[kind]})
                lines.append(f"arms.{name}.patches: {patch!r} is not allowed; it is {spelt}")
        kinds = [patch.partition("=")[0] for patch in arm.patches]
        lines += [
            f"arms.{name}.patches: {kind!r} is given twice"
            for kind in dict.fromkeys(kinds)
            if kinds.count(kind) > 1
        ]
        lines += [
            f"arms.{name}.patches: {patch!r} after {fused!r} changes nothing of a decoded token, "
            "which the fused kernels make; put it before, or leave one out"
            for fused, patch in patches.passed_over(arm.patches)
        ]
    return lines


def _command(root: Path, runtime: CommandRuntime, key: str) -> list[str]:
    try:
        resolved = resolve(runtime, key)
    except UserError as error:
        return [str(error)]
    source = resolved["source"]
    return _environment(root, source["env"], f"{key}.source.env") if "env" in source else []


def _environment(root: Path, env: str, key: str) -> list[str]:
    names = sorted(path.stem for path in (root / "envs").glob("*.txt"))
    if env in names:
        return []
    return [f"{key}: {env!r} has no file envs/{env}.txt; allowed: {', '.join(names)}"]


def _experts(study: Study) -> list[str]:
    """Declared kernels of experts that no trace would ever prove."""
    lines = []
    for name, arm in study.arms.items():
        if arm.experts is None:
            continue
        if arm.role not in ("reference", "candidate"):
            lines.append(
                f"arms.{name}.experts: an arm with the role {arm.role} is not traced, so nothing "
                "would prove it; allowed on: reference, candidate"
            )
        by = arm.experts if isinstance(arm.experts, dict) else ()
        lines += _unknown(f"arms.{name}.experts", by, "checkpoint", study.checkpoints)
    return lines


def _answers(study: Study) -> list[str]:
    lines = []
    claims = [claim.name for claim in study.claims]
    for index, answer in enumerate(study.answers):
        key = f"answers.{index}"
        for quantity in answer.by:
            if why := quantities.refused(quantity, _roles(study), (quantities.PATH,)):
                lines.append(f"{key}: {why}")
        lines += _unknown(key, answer.claims, "claim", claims)
        lines += _checkpoints(f"{key}.checkpoints", answer.checkpoints, study)
        lines += _unknown(f"{key}.arm", [answer.arm] if answer.arm else [], "arm", study.arms)
    return lines


def _crossover(study: Study) -> list[str]:
    if study.crossover is None:
        return []
    lines = []
    candidates = study.role("candidate")
    if not candidates:
        lines.append("crossover: the study has no arm with the role candidate to compare")
    arms = study.crossover.arms or []
    for name in sorted({name for name in arms if arms.count(name) > 1}):
        lines.append(f"crossover.arms: {name!r} is given twice")
    for name in arms:
        if candidates and name not in candidates:
            lines.append(
                f"crossover.arms: {name!r} is no candidate of this study; allowed: "
                f"{', '.join(candidates)}"
            )
    names = study.crossover.checkpoints
    if wrong := _checkpoints("crossover.checkpoints", names, study):
        return lines + wrong
    subjects = [name for name, entry in study.checkpoints.items() if entry.role == "subject"]
    if len(set(names or subjects)) < 2:
        lines.append("crossover: a series has two different checkpoints at least")
        return lines
    for name in (arms or candidates) if not lines else ():
        if sum(name in study.arms_on(checkpoint) for checkpoint in set(names or subjects)) < 2:
            lines.append(f"crossover: {name} is measured on fewer than two of its checkpoints")
    return lines


def _claims(study: Study) -> list[str]:
    lines = []
    names = [claim.name for claim in study.claims]
    for name in sorted({name for name in names if names.count(name) > 1}):
        lines.append(f"claims: the name {name!r} is given twice")
    for index, claim in enumerate(study.claims):
        key = f"claims.{index} ({claim.name})"
        for condition in claim.all:
            if why := quantities.refused(condition.quantity, _roles(study)):
                lines.append(f"{key}: {why}")
            elif quantities.misplaced(condition.quantity, claim.of):
                other = "wall time" if claim.of == "gpu" else "the GPU's time"
                lines.append(
                    f"{key}: {condition.quantity} speaks of {other}, the claim of {claim.of}"
                )
        lines += _checkpoints(f"{key}.checkpoints", claim.checkpoints, study)
        if claim.checkpoints is None and not any(
            checkpoint.role == "subject" for checkpoint in study.checkpoints.values()
        ):
            lines.append(f"{key}: no checkpoint has the role subject; name some in checkpoints")
        lines += _unknown(f"{key}.arm", [claim.arm] if claim.arm else [], "arm", study.arms)
    return lines
