"""Commits as pins: a bare mirror of each repository, a work tree of one's own for each build.

``work/mirrors/<name>-<hash>.git`` holds what was fetched. A build's tree is checked out from it,
and nothing else ever touches that tree. The user's own clones are only read.
"""

import contextlib
import hashlib
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

from ..errors import UserError

FETCH_LIMIT_S = 1800
LOCAL_LIMIT_S = 300
HEX40 = re.compile(r"[0-9a-f]{40}")


def mirror_folder(url: str, work: Path) -> Path:
    """Where the mirror of a URL stands, below ``work``."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", url.rstrip("/").removesuffix(".git").split("/")[-1])
    return work / "mirrors" / f"{name or 'repository'}-{_short(url)}.git"


def fetch(url: str, work: Path, commit: str | None = None) -> Path:
    """A bare mirror that has ``commit`` (without one: that is up to date); nothing is fetched that
    is already there. Raises UserError if the repository or the commit cannot be had.
    """
    from filelock import FileLock

    folder = mirror_folder(url, work)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock", timeout=FETCH_LIMIT_S):
        if commit is not None and has(folder, commit):
            _keep(folder, commit)
            return folder
        if not (folder / "HEAD").is_file():
            shutil.rmtree(folder, ignore_errors=True)
            _git(["init", "--quiet", "--bare", str(folder)], LOCAL_LIMIT_S)
        # Only branches and tags: pull requests and other refs may be many.
        specs = ["+refs/heads/*:refs/heads/*", "+refs/tags/*:refs/tags/*"]
        done = _git(
            ["-C", str(folder), "fetch", "--quiet", "--prune", "--no-auto-gc", url, *specs],
            FETCH_LIMIT_S,
            check=False,
        )
        if done.returncode:
            raise UserError(f"git cannot fetch {url}: {_last(done.stderr)}")
        if commit is not None and not has(folder, commit):
            # A commit that no branch holds any more can often still be asked for by its name.
            _git(
                ["-C", str(folder), "fetch", "--quiet", "--no-auto-gc", url, commit],
                FETCH_LIMIT_S,
                check=False,
            )
            if not has(folder, commit):
                raise UserError(
                    f"{url} has no commit {commit}; was its branch rewritten? Pin another commit "
                    "(snakemake pin) or name a mirror that has it"
                )
        if commit is not None:
            _keep(folder, commit)
    return folder


def _keep(folder: Path, commit: str) -> None:
    """Name a commit, so that it survives a clean-up: the work trees borrow the mirror's objects."""
    _git(["-C", str(folder), "update-ref", f"refs/moescope/{commit}", commit], LOCAL_LIMIT_S)


def has(folder: Path, commit: str) -> bool:
    """Whether a mirror holds a commit, with all that it needs."""
    if not (folder / "HEAD").is_file():
        return False
    found = _git(
        ["-C", str(folder), "rev-parse", "--quiet", "--verify", f"{commit}^{{tree}}"],
        LOCAL_LIMIT_S,
        check=False,
    )
    return found.returncode == 0


def resolve(url: str, ref: str, work: Path) -> str:
    """The 40-hex commit of a branch, a tag or an abbreviated commit. Raises UserError."""
    folder = fetch(url, work, ref if HEX40.fullmatch(ref) else None)
    # A branch wins over a tag of the same name; a tag is followed to its commit.
    for name in (f"refs/heads/{ref}", f"refs/tags/{ref}", ref):
        found = _git(
            ["-C", str(folder), "rev-parse", "--quiet", "--verify", f"{name}^{{commit}}"],
            LOCAL_LIMIT_S,
            check=False,
        )
        if found.returncode == 0:
            return found.stdout.strip()
    raise UserError(f"{url} has no branch, tag or commit {ref!r}")


def show(folder: Path, commit: str, path: str) -> str:
    """A file's text at a commit, from the mirror, without a checkout. Raises UserError."""
    found = _git(["-C", str(folder), "show", f"{commit}:{path}"], LOCAL_LIMIT_S, check=False)
    if found.returncode:
        raise UserError(f"commit {commit[:12]} has no file {path}")
    return found.stdout


def framework_pin(folder: Path, commit: str, framework: dict[str, Any]) -> str:
    """The framework's pin at a commit: the one group of ``framework["pattern"]`` in its file.

    Raises UserError if the file is missing, or the pattern matches nothing or different things.
    """
    text = show(folder, commit, framework["file"])
    found = dict.fromkeys(re.findall(framework["pattern"], text))
    if len(found) != 1:
        what = "nothing" if not found else f"{len(found)} different pins ({', '.join(found)})"
        raise UserError(
            f"{framework['pattern']!r} finds {what} in {framework['file']} at {commit[:12]}; "
            "mend the pattern (its one group is the pin)"
        )
    return next(iter(found))


def checkout(url: str, commit: str, tree: Path, work: Path, submodules: bool = True) -> list[dict]:
    """A clean work tree of a commit; what stands there already is kept if it is just that.

    Returns the submodules: [{"path", "commit"}]. Raises UserError.
    """
    mirror = fetch(url, work, commit)
    if not _stands(tree, commit):
        shutil.rmtree(tree, ignore_errors=True)
        tree.parent.mkdir(parents=True, exist_ok=True)
        _git(
            ["clone", "--quiet", "--shared", "--no-checkout", str(mirror.resolve()), str(tree)],
            LOCAL_LIMIT_S,
        )
        # Submodules may be named relative to where the repository really is.
        _git(["-C", str(tree), "remote", "set-url", "origin", url], LOCAL_LIMIT_S)
        _git(["-C", str(tree), "checkout", "--quiet", "--detach", commit], LOCAL_LIMIT_S)
    found = []
    if submodules and (tree / ".gitmodules").is_file():
        # git refuses submodules from local paths unless told so; the study named a local one.
        allow = ["-c", "protocol.file.allow=always"] if Path(url).exists() else []
        done = _git(
            [*allow, "-C", str(tree), "submodule", "update", "--init", "--recursive", "--quiet"],
            FETCH_LIMIT_S,
            check=False,
        )
        if done.returncode:
            raise UserError(f"git cannot fetch a submodule of {url}: {_last(done.stderr)}")
        status = _git(["-C", str(tree), "submodule", "status", "--recursive"], LOCAL_LIMIT_S)
        for line in status.stdout.splitlines():
            hexes, path = line[1:].split()[:2]
            found.append({"path": path, "commit": hexes})
    dirt = changes(tree, untracked=False)
    if dirt:
        raise UserError(f"the tree differs from commit {commit[:12]} after checkout: {dirt[0]}")
    return found


def changes(tree: Path, untracked: bool = True) -> list[str]:
    """What differs from the commit in a work tree and its submodules, as git's short status."""
    flag = "normal" if untracked else "no"
    status = _git(
        ["-C", str(tree), "status", "--porcelain", f"--untracked-files={flag}"], LOCAL_LIMIT_S
    )
    return status.stdout.splitlines()


def _stands(tree: Path, commit: str) -> bool:
    if not (tree / ".git").is_dir():
        return False
    with contextlib.suppress(UserError):
        head = _git(["-C", str(tree), "rev-parse", "HEAD"], LOCAL_LIMIT_S).stdout.strip()
        return head == commit and not changes(tree, untracked=False)
    return False


def _git(
    arguments: list[str], limit: float, check: bool = True
) -> subprocess.CompletedProcess[str]:
    """git without the caller's repository (a hook sets GIT_DIR), prompts or line-end changes."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    env |= {
        name: value
        for name, value in os.environ.items()
        if name.startswith(("GIT_SSL", "GIT_SSH", "GIT_HTTP", "GIT_ASKPASS", "GIT_PROXY"))
    }
    env |= {"GIT_TERMINAL_PROMPT": "0", "GIT_LFS_SKIP_SMUDGE": "1", "LC_ALL": "C"}
    command = [
        "git", "-c", "core.autocrlf=false", "-c", "core.hooksPath=/dev/null",
        "-c", "advice.detachedHead=false", *arguments,
    ]  # fmt: skip
    try:
        done = subprocess.run(
            command, env=env, capture_output=True, text=True, timeout=limit,
            stdin=subprocess.DEVNULL, errors="replace",
        )  # fmt: skip
    except FileNotFoundError:
        raise UserError("git is not installed; a runtime from a commit needs it") from None
    except subprocess.TimeoutExpired:
        raise UserError(f"git {arguments[0]} did not finish within {limit:.0f} s") from None
    if check and done.returncode:
        raise UserError(f"git {' '.join(arguments[:4])}: {_last(done.stderr)}")
    return done


def _last(text: str) -> str:
    lines = [line for line in text.strip().splitlines() if line.strip()]
    return " ".join(lines[-3:])[-400:] or "it said nothing"


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:10]
