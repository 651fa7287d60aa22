"""The study's needs: its machine, its environments, its checkpoints, disk and memory."""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..files import read_json
from ..measure.schedule import processes
from ..study.plan import Plan
from . import host
from .finding import Finding, ask, gib

HUB_LIMIT_S = 10
ENVIRONMENT_BYTES = 1 << 30  # a runtime's environment on CPU; CUDA's libraries come on top
CUDA_BYTES = 5 << 30
SPARE_BYTES = 1 << 30
DRIVERS = {"12": 525, "13": 580}  # the oldest for each CUDA


def machine(plan: Plan) -> Iterator[Finding]:
    """Whether this host is of the study's machine class."""
    wanted, found = plan.machine, host.backend()
    if wanted.backend == "cpu" or wanted.backend == found:
        yield Finding(True, "machine", f"{wanted.name} ({wanted.backend})")
    else:
        yield Finding(
            False,
            "machine",
            f"the study is for {wanted.name} ({wanted.backend}), this host has {found}",
            "measure there, and render the record anywhere; or "
            "take `machine` out of the study to have this host's found",
        )


def locks(plan: Plan) -> Iterator[Finding]:
    """Whether the locked environments hold MLX for the machine's backend."""
    wanted = {"cpu": ("mlx-cpu", "mlx-metal"), "cuda": ("mlx-cuda",), "metal": ("mlx-metal",)}
    for name in sorted({env for env in map(_environment, plan.study.runtimes.values()) if env}):
        path = plan.root / "envs" / f"{name}.txt"
        if not path.is_file():
            yield Finding(
                False,
                "lock",
                f"envs/{name}.txt is missing",
                f"uv pip compile --universal --generate-hashes envs/{name}.in -o envs/{name}.txt",
            )
            continue
        parts = re.findall(r"^(mlx-[a-z0-9-]+)==", path.read_text(), re.MULTILINE)
        fits = [part for part in parts if part.startswith(wanted[plan.machine.backend])]
        if not fits:
            held = ", ".join(p for p in parts if p.startswith(("mlx-cpu", "mlx-cuda", "mlx-metal")))
            yield Finding(
                False,
                "lock",
                f"envs/{name}.txt has {held or 'no MLX backend'}, the "
                f"machine's is {plan.machine.backend}",
                "name an environment for this backend in the study",
            )
            continue
        yield Finding(True, "lock", f"envs/{name}.txt: {', '.join(fits)}")
        yield from _driver_for(fits)


def _driver_for(parts: list[str]) -> Iterator[Finding]:
    cuda = next((part.removeprefix("mlx-cuda-") for part in parts if "cuda" in part), None)
    needed = DRIVERS.get(cuda or "")
    version = ask("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    found = re.match(r"\d+", version)
    if needed and found and int(found[0]) < needed:
        yield Finding(
            False,
            "driver",
            f"{version.splitlines()[0]}; CUDA {cuda} needs {needed} or newer",
            "update the driver, or use an environment of an older CUDA",
        )


def sources(plan: Plan) -> Iterator[Finding]:
    """Whether each checkpoint can be had: here already, in its folder, or on the Hub."""
    for name, checkpoint in plan.study.checkpoints.items():
        source, job = checkpoint.source, plan.job("fetch", name)
        what = f"checkpoint {name}"
        here = plan.root / "work" / "checkpoints" / job.key
        if source.kind == "synthetic":
            continue
        if source.kind == "local":
            path = plan.root / Path(source.path).expanduser()
            yield Finding(
                path.is_dir(),
                what,
                f"{source.path}: {'here' if path.is_dir() else 'missing'}",
                "" if path.is_dir() else "mend checkpoints.*.source.path",
            )
        elif here.is_dir():
            yield Finding(True, what, "downloaded already")
        else:
            yield hub(what, source.repo, source.revision)


def hub(what: str, repo: str, revision: str) -> Finding:
    """Whether a revision of a repository can be reached, in words that tell the cases apart."""
    from huggingface_hub import HfApi, constants, get_hf_file_metadata, get_token
    from huggingface_hub import errors as known

    where = constants.ENDPOINT
    if constants.HF_HUB_OFFLINE:
        return Finding(
            False,
            what,
            "not downloaded, and HF_HUB_OFFLINE is set",
            "unset HF_HUB_OFFLINE once, or give the folder as a local source",
        )
    token = "a token is set" if get_token() else "no token is set"
    try:
        found = HfApi(endpoint=where).model_info(
            repo, revision=revision, files_metadata=True, timeout=HUB_LIMIT_S
        )
        # The list of files is public where the files are gated: ask for one, without its body.
        url = f"{where}/{repo}/resolve/{revision}/config.json"
        get_hf_file_metadata(url, timeout=HUB_LIMIT_S, endpoint=where)
    except known.GatedRepoError:
        todo = f"accept its terms at {where}/{repo} and set HF_TOKEN to a token of that account"
        return Finding(False, what, f"{repo} is gated; {token}", todo)
    except known.RevisionNotFoundError:
        todo = "the revision is gone or mistyped: pin another"
        return Finding(False, what, f"{repo} has no revision {revision[:12]}", todo)
    except known.RepositoryNotFoundError:
        todo = "check its name; a private repository needs HF_TOKEN of an account that may read it"
        return Finding(False, what, f"{repo} is not there, or not for us; {token}", todo)
    except Exception as error:  # whatever the HTTP library raises: no network, a proxy, a 5xx
        text = " ".join(str(error).split())[:160]
        todo = "check the network and proxy; a mirror goes into HF_ENDPOINT"
        return Finding(False, what, f"{where} does not answer: {text}", todo)
    size = sum(file.size or 0 for file in found.siblings or ())
    return Finding(True, what, f"{repo} at {revision[:12]}, {gib(size)}")


def disk(plan: Plan) -> Iterator[Finding]:
    """Free bytes against the weights and environments that are still to be made."""
    needed = SPARE_BYTES
    for name in plan.study.checkpoints:
        job = plan.job("fetch", name)
        if not (plan.root / "work" / "checkpoints" / job.key).is_dir():
            needed += _weights(plan, name) or 0
    made = {path.name.rsplit("-", 1)[0] for path in (plan.root / "work" / "envs").glob("*-*/")}
    each = ENVIRONMENT_BYTES + (CUDA_BYTES if plan.machine.backend == "cuda" else 0)
    needed += each * len({*map(_environment, plan.study.runtimes.values())} - made - {None})
    free = shutil.disk_usage(plan.root).free
    unknown = [name for name in plan.study.checkpoints if _weights(plan, name) is None]
    note = f" (besides {', '.join(unknown)}, not fetched yet)" if unknown else ""
    yield Finding(
        free >= needed,
        "disk",
        f"{gib(free)} free, about {gib(needed)} needed{note}",
        ""
        if free >= needed
        else "make room, or put work/ on another disk (a symbolic link will do)",
    )


def memory(plan: Plan) -> Iterator[Finding]:
    """Memory against the largest checkpoint, once for each process that loads it."""
    needs: dict[str, int] = {}
    for name in plan.study.checkpoints:
        weights = _weights(plan, name)
        if weights is not None:
            arms = plan.job("measure", name).params["arms"]
            needs[name] = len(processes(arms)) * weights
    if not needs:
        yield Finding(
            True, "memory", "the checkpoints' sizes are not known before they are fetched"
        )
        return
    largest = max(needs, key=needs.__getitem__)
    needed = needs[largest] + SPARE_BYTES
    free, where = _free_memory(plan.machine.backend)
    yield Finding(
        free >= needed,
        "memory",
        f"{gib(free)} of {where} available, about {gib(needed)} needed for {largest}",
        ""
        if free >= needed
        else "close what else runs, take a smaller checkpoint or a larger machine; arms with "
        "the same runtime and variables share a process",
    )


def _weights(plan: Plan, name: str) -> int | None:
    """Bytes of a checkpoint, from its committed manifest; else from any earlier one's."""
    job = plan.job("fetch", name)
    folder = plan.root / job.folder
    for path in (folder / "manifest.json", *sorted(folder.parent.glob("*/manifest.json"))):
        if path.is_file():
            return int(read_json(path)["bytes"])
    return None


def _free_memory(backend: str) -> tuple[int, str]:
    if backend == "cuda":
        from ..measure import gpu as nvidia

        asked = nvidia.driver()
        (uuid,) = nvidia.in_use(asked)
        total, used = asked.facts(uuid)["memory"], asked.state(uuid).memory_used
        if total is not None and used is not None:
            return total - used, "the GPU's memory"
    import psutil

    from ..measure.host import device_memory

    free, ceiling = psutil.virtual_memory().available, device_memory(backend)
    if ceiling is not None and ceiling < free:
        return ceiling, "the memory that the GPU may use"
    return free, "memory"


def _environment(runtime: Any) -> str | None:
    """The name of a runtime's locked environment, if it has one."""
    return getattr(runtime, "env", None) or getattr(getattr(runtime, "source", None), "env", None)
