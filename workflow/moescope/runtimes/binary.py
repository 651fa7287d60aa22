"""A command runtime's pin made into something that can be called, and checked before each use.

A tree is built once per commit, build recipe and host, in ``work/builds/``; what is committed is
the manifest: commit, submodules, the framework's pin, tool versions, each binary's hash, the flags
that the tool knows. A binary that is not the one that was built here is refused.
"""

import os
import platform
import re
import shlex
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..files import digest, read_json, sha256_file, sha256_text, write_json
from ..task import Task, ingredients
from . import environments, git, process

SCHEMA = "moescope/binary/1"
BUILT = "moescope/built/1"
TOOL_LIMIT_S = 60
HELP_LIMIT_S = 180

# What would steer a compiler or the framework from outside the study.
STEERING = re.compile(
    r"^(MLX|MLXCEL|MOESCOPE|PYTHON|CMAKE_|CARGO_(?!HOME$|HTTP_|NET_|REGISTR)|RUSTFLAGS$|RUSTDOCFLAGS$"
    r"|RUSTC_WRAPPER$|(C|CXX|CPP|LD|NVCC_APPEND_|NVCC_PREPEND_|MAKE|M)FLAGS$|MAKELEVEL$|NVCC_FLAGS$)"
)
FLAG = re.compile(r"(?<![\w-])(--?[A-Za-z][\w-]*)")


@dataclass(frozen=True)
class Tool:
    """A command runtime that is ready: the words of its templates, and its variables.

    words: "binary.<name>", "python", "tree" as far as there are any. env: the whole environment.
    manifest: the local one; its binaries' hashes are those of the files that will run.
    """

    words: dict[str, str]
    env: dict[str, str]
    manifest: dict[str, Any]
    invoke: dict[str, Any] = field(repr=False)

    @property
    def sha256(self) -> str:
        """The hash that names this tool in a run: of its first binary, else of MLX's library."""
        binaries = self.manifest.get("binaries")
        if binaries:
            return next(iter(binaries.values()))["sha256"]
        return self.manifest["library"]["sha256"]


def build(task: Task) -> None:
    """The build stage of a command runtime: writes manifest.json (schema moescope/binary/1).

    Raises UserError before anything is measured if the commit, the framework's pin or a flag of the
    command line is not what the study says.
    """
    runtime = task.params["runtime"]
    tool = provide(runtime, task.work, task.root)
    write_json(task.out / "manifest.json", tool.manifest)
    pin = tool.manifest.get("framework")
    task.say(
        f"{runtime['name']}: {runtime['preset']}, {tool.sha256[:12]}"
        + (f", {pin['name']} {pin['value'][:12]}" if pin else "")
    )


def ensure(manifest: Path, work: Path, root: Path) -> Tool:
    """The tool of a build result (its folder), built again if it is missing.

    Raises UserError if a binary is not the one that was built here.
    """
    runtime = ingredients(manifest)["params"]["runtime"]
    committed = read_json(manifest / "manifest.json", SCHEMA)
    tool = _find(runtime, work, root)
    for key in ("commit", "framework", "packages", "library"):
        if tool.manifest.get(key) != committed.get(key):
            raise UserError(
                f"{key} is {tool.manifest.get(key)}, the manifest says {committed.get(key)}; "
                "remove work/builds/ and retry",
                str(manifest / "manifest.json"),
            )
    tool.manifest.update({key: committed[key] for key in ("flags", "lacking", "help_sha256")})
    return tool


def provide(runtime: dict[str, Any], work: Path, root: Path) -> Tool:
    """Build or find a resolved runtime (see ``spec.resolve``) and check its flags."""
    tool = _find(runtime, work, root)
    where = f"runtimes.{runtime['name']}"
    tool.manifest.update(check_flags(tool.invoke, tool.words, tool.env, where))
    return tool


def _find(runtime: dict[str, Any], work: Path, root: Path) -> Tool:
    if runtime["source"]["kind"] == "git":
        words, env, manifest = _from_git(runtime, work)
    else:
        words, env, manifest = _from_python(runtime, work, root)
    return Tool(words, env, manifest, runtime["invoke"])


def check_flags(
    invoke: dict[str, Any], words: dict[str, str], env: dict[str, str], where: str
) -> dict[str, Any]:
    """Ask the tool for its help and hold the command line's flags against it.

    Returns {"flags", "lacking", "help_sha256"}; "lacking" says what follows from each optional flag
    that the tool does not know. Raises UserError if it does not know one that is needed.
    """
    if invoke["help"] is None:
        return {"flags": None, "lacking": [], "help_sha256": None}
    argv = [fill(part, words) for part in invoke["help"]]
    ended = process.run(argv, env, HELP_LIMIT_S)
    name = Path(argv[0]).name if argv[0] != words.get("python") else argv[2]
    if ended.status is None or ended.timed_out:
        why = "did not end in time" if ended.timed_out else ended.stderr
        raise UserError(f"{shlex.join(argv[1:])} of {name}: {why}", where)
    known = set(FLAG.findall(ended.text))
    if not known:
        raise UserError(
            f"{name} {shlex.join(argv[1:])} lists no flags (status {ended.status}): "
            f"{ended.text.strip()[-300:]!r}",
            where,
        )
    gone = [word for word in invoke["argv"] if _is_flag(word) and word not in known]
    gone = [flag for flag in gone if flag != "-m" or "{python}" not in invoke["argv"]]
    if gone:
        near = sorted(flag for flag in known if flag.startswith("--"))
        raise UserError(
            f"{name} does not know {', '.join(gone)} at this pin; it knows {', '.join(near)}. "
            "Pin another commit, or mend the preset's argv",
            where,
        )
    lacking = []
    for flags in invoke["optional"]:
        missing = [word for word in flags["argv"] if _is_flag(word) and word not in known]
        if missing:
            lacking.append({"flags": missing, "so": flags["lacking"]})
    return {
        "flags": sorted(known),
        "lacking": lacking,
        "help_sha256": sha256_text(ended.stdout),
    }


def fill(text: str, words: dict[str, str]) -> str:
    """Replace {name} by its word; other brackets stay. Raises KeyError for an unknown name."""
    return re.sub(r"\{([a-z_][a-z0-9_.]*)\}", lambda match: words[match[1]], text)


def build_folder(runtime: dict[str, Any], work: Path) -> Path:
    """Where a tree is built: named by repository, commit and what the build depends on."""
    source, recipe = runtime["source"], runtime["build"]
    name = git.mirror_folder(source["url"], work).name.rsplit("-", 1)[0]
    made_of = {"source": {k: v for k, v in source.items() if k != "ref"}, "build": recipe}
    return work / "builds" / f"{name}-{source['commit'][:12]}-{digest(made_of)[:8]}"


def _from_git(
    runtime: dict[str, Any], work: Path
) -> tuple[dict[str, str], dict[str, str], dict[str, Any]]:
    from filelock import FileLock

    where = f"runtimes.{runtime['name']}"
    source, recipe = runtime["source"], runtime["build"]
    if source.get("commit") is None:
        raise UserError(
            f"not pinned (ref {source.get('ref')!r}); run `snakemake pin`, which resolves it and "
            "writes the commit into the study",
            f"{where}.source.commit",
        )
    folder = build_folder(runtime, work)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock", timeout=recipe["timeout_s"] + git.FETCH_LIMIT_S):
        if not (folder / "built.json").is_file() or not _present(folder, recipe):
            _build(runtime, folder, work, where)
    built = read_json(folder / "built.json", BUILT)
    for name, binary in built["binaries"].items():
        path = folder / "tree" / binary["path"]
        if sha256_file(path) != binary["sha256"]:
            raise UserError(
                f"{binary['path']} is not the binary that was built here (sha256 "
                f"{binary['sha256'][:12]}... expected); remove {folder.name} from work/builds/ to "
                "build it again, or pin the commit that holds your change",
                f"{where}.build.binaries.{name}",
            )
    _check_pin(built.get("framework"), runtime.get("framework"), where)
    tree = (folder / "tree").resolve()
    words = {f"binary.{n}": str(tree / b["path"]) for n, b in built["binaries"].items()}
    manifest = {
        "schema": SCHEMA,
        "kind": "git",
        "preset": runtime["preset"],
        **{key: value for key, value in built.items() if key not in ("schema", "seconds")},
    }
    return {**words, "tree": str(tree)}, _variables(work, folder.name), manifest


def _from_python(
    runtime: dict[str, Any], work: Path, root: Path
) -> tuple[dict[str, str], dict[str, str], dict[str, Any]]:
    """A command of a Python environment: the environment's manifest, and its interpreter."""
    python = {"name": runtime["name"], **runtime["source"]}
    if "lock" in runtime:
        python["lock"] = runtime["lock"]
    interpreter = environments.provide(python, work, root)
    described = environments.describe(python, interpreter)
    manifest = {**described, "schema": SCHEMA, "preset": runtime["preset"]}
    manifest["framework"] = {"name": "mlx", "value": described["packages"]["mlx"]}
    return {"python": str(interpreter.python)}, interpreter.env, manifest


def _present(folder: Path, recipe: dict[str, Any]) -> bool:
    return all((folder / "tree" / path).is_file() for path in recipe["binaries"].values())


def _build(runtime: dict[str, Any], folder: Path, work: Path, where: str) -> None:
    """Check out, build, and write built.json last."""
    source, recipe = runtime["source"], runtime["build"]
    commit, tree, log = source["commit"], folder / "tree", folder / "build.log"
    try:
        submodules = git.checkout(source["url"], commit, tree, work, source["submodules"])
    except UserError as error:
        raise UserError(str(error), f"{where}.source") from None
    framework = runtime.get("framework")
    pin = None
    if framework:
        mirror = git.mirror_folder(source["url"], work)
        pin = {"name": framework["name"], "value": git.framework_pin(mirror, commit, framework)}
        _check_pin(pin, framework, where)
    env = _variables(work, folder.name) | recipe["env"]
    toolchain = [_version(tool, tree, env) for tool in recipe["tools"]]
    (folder / "built.json").unlink(missing_ok=True)
    log.unlink(missing_ok=True)
    words = {"features": ",".join(recipe["features"]), "tree": str(tree.resolve())}
    left = recipe["timeout_s"]
    seconds = 0.0
    for command in recipe["commands"]:
        argv = [fill(word, words) for word in shlex.split(command)]
        with open(log, "ab") as file:
            file.write(f"$ {shlex.join(argv)}\n".encode())
        ended = process.run(argv, env, left, cwd=tree, log=log)
        seconds += ended.seconds
        left -= ended.seconds
        if ended.status is None:
            raise UserError(
                f"{argv[0]}: {ended.stderr.split(': ')[-1]}; install it, or mend the command",
                f"{where}.build.commands",
            )
        if ended.timed_out:
            limit = recipe["timeout_s"]
            raise UserError(
                f"the build did not end within {limit:g} s ({command!r}); raise build.timeout_s "
                f"or see {_shown(log, work)}",
                f"{where}.build.timeout_s",
            )
        if ended.status:
            tail = " | ".join(log.read_text(errors="replace").strip().splitlines()[-4:])[-500:]
            killed = " (killed; was there memory enough?)" if ended.status == 137 else ""
            raise UserError(
                f"{command!r} ended with {ended.status}{killed}: {tail}; see {_shown(log, work)}",
                f"{where}.build.commands",
            )
    dirt = git.changes(tree, untracked=False)
    if dirt:
        raise UserError(
            f"the build changes files of the commit ({', '.join(dirt[:3])}), so the binary is not "
            "the commit's; build with a locked dependency file (cargo: --locked)",
            f"{where}.build.commands",
        )
    binaries = {}
    for name, path in recipe["binaries"].items():
        found = tree / path
        if not found.is_file() or not found.resolve().is_relative_to(tree.resolve()):
            raise UserError(
                f"the build made no file {path} in its tree; mend the path or the commands"
                f"{_near(tree, path)}",
                f"{where}.build.binaries.{name}",
            )
        binaries[name] = {
            "path": path,
            "sha256": sha256_file(found),
            "bytes": found.stat().st_size,
        }
    write_json(
        folder / "built.json",
        {
            "schema": BUILT,
            "url": source["url"],
            "commit": commit,
            "submodules": submodules,
            **({"framework": pin} if pin else {}),
            "build": {key: recipe[key] for key in ("commands", "features", "env")},
            "toolchain": toolchain,
            "binaries": binaries,
            "platform": f"{platform.system().lower()}-{platform.machine()}",
            "finished": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "seconds": round(seconds, 3),
        },
    )


def _near(tree: Path, path: str) -> str:
    """Files of that name which the build did make, or what is in the folder."""
    found = [p for p in sorted(tree.rglob(Path(path).name))[:3] if p.is_file()]
    found = found or [p for p in sorted((tree / path).parent.glob("*"))[:6] if os.access(p, os.X_OK)
                      and p.is_file()]  # fmt: skip
    names = ", ".join(p.relative_to(tree).as_posix() for p in found)
    return f" (there is {names})" if names else ""


def _check_pin(pin: dict[str, Any] | None, framework: dict[str, Any] | None, where: str) -> None:
    expected = (framework or {}).get("value")
    if expected is not None and (pin or {}).get("value") != expected:
        raise UserError(
            f"the study says {framework['name']} {expected}, the tree at this commit says "
            f"{(pin or {}).get('value')}; run `snakemake pin`, which writes it",
            f"{where}.framework.value",
        )


def _version(tool: str, tree: Path, env: dict[str, str]) -> dict[str, str | None]:
    """The first line that a tool prints of itself; None if there is no such tool."""
    ended = process.run(shlex.split(tool), env, TOOL_LIMIT_S, cwd=tree)
    lines = [line.strip() for line in ended.text.splitlines() if line.strip()]
    return {"tool": tool, "version": lines[0] if ended.good and lines else None}


def _variables(work: Path, name: str) -> dict[str, str]:
    """The caller's variables, less what steers compilers or the framework; caches of one's own."""
    kept = {key: value for key, value in os.environ.items() if not STEERING.match(key)}
    folder = work.resolve() / "cache" / name
    for part in ("tmp", "ptx"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    return {**kept, "TMPDIR": str(folder / "tmp"), "MLX_PTX_CACHE_DIR": str(folder / "ptx")}


def _is_flag(word: str) -> bool:
    return re.fullmatch(r"--?[A-Za-z][\w-]*(=.*)?", word) is not None


def _shown(path: Path, work: Path) -> str:
    return f"work/{path.relative_to(work)}"
