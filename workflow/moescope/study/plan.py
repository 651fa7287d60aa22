"""The plan: every job of a study, the key of its result and what the key is made of.

A key is a short hash of exactly what a result depends on: the stage's parameters, the keys of
the results it reads, and the fingerprint of the code that makes it. Since the key is in the
path, a result is there or it is not; nothing else decides whether a job runs.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ..files import digest, sha256_text
from ..runtimes import spec
from . import crossover
from .fingerprint import data_fingerprint, fingerprints
from .schema import AmbientRuntime, Arm, HubSource, Machine, PythonRuntime, Study, SyntheticSource

# What every arm's process runs: its loop, loading, the measured pass, patches by name.
WORKER = ("worker.__main__", "worker.load", "worker.decode")
# Stage -> the modules that make its result; what these import of moescope belongs to them.
CODE = {
    "fetch": ("checkpoints.fetch",),
    "inspect": ("checkpoints.inspect",),
    "build": ("runtimes.build", "runtimes.environments"),
    "warmup": ("measure.warmup", *WORKER),
    "measure": ("measure.stage", *WORKER, "worker.bandwidth"),
    "trace": ("trace.stage", *WORKER, "worker.scopes", "worker.graph"),
    "parity": ("verdict.parity", *WORKER, "worker.forced"),
    "analyse": ("verdict.analyse",),
    "record": ("record.stage",),
}
# A synthetic checkpoint's bytes also depend on the worker's list of tensors.
SYNTHETIC_CODE = ("checkpoints.synthetic", "worker.__main__", "worker.layout")
# A backend's own instruments, named by the trace stage.
BACKEND_CODE = {
    "cuda": ("trace.cuda", "worker.cupti", "worker.kernels", "worker.bandwidth"),
    "metal": ("trace.metal_worker",),
}
# Commands are built and spoken to by modules of their own, imported by name.
COMMAND_CODE = {"build": ("runtimes.binary",)}
COMMAND_CODE |= dict.fromkeys(("warmup", "measure", "parity"), ("runtimes.command",))
COMMAND_CODE["trace"] = ("runtimes.command", "trace.command")

# Patches that bring code of their own.
PATCH_CODE = {"fused": ("kernels",), "fused_reference": ("kernels",)}

# Stage -> the files that its result must have (others may be there too).
OUTPUTS = {
    "fetch": ("manifest.json", "config.json", "tensors.csv"),
    "inspect": ("architecture.json",),
    "build": ("manifest.json",),
    "warmup": ("warmup.json",),
    "measure": ("runs.jsonl", "guard.jsonl", "environment.json"),
    "trace": ("scopes.json", "operations.csv", "trace.json"),
    "parity": ("parity.json",),
    "analyse": ("analysis.json",),
    "record": ("record.md", "record.html", "record.json"),
}
STAGES = tuple(OUTPUTS)


@dataclass(frozen=True)
class Job:
    """One result: where it stands and what its key is made of."""

    stage: str
    subject: str
    params: dict[str, Any]
    upstream: dict[str, str]  # "stage/subject" -> key
    code: dict[str, str]  # module -> fingerprint

    @cached_property
    def key(self) -> str:
        """12 hex digits of the ingredients' hash; the full hash stands in ingredients.json."""
        return digest(self.ingredients)[:12]

    @property
    def ingredients(self) -> dict[str, Any]:
        return {
            "stage": self.stage,
            "subject": self.subject,
            "params": self.params,
            "upstream": self.upstream,
            "code": self.code,
        }

    @property
    def name(self) -> str:
        return f"{self.stage}/{self.subject}"

    @property
    def folder(self) -> Path:
        """Where the result stands, relative to the repository."""
        return folder(self.stage, self.subject, self.key)

    def done(self, root: Path) -> bool:
        return all((root / path).is_file() for path in self.outputs)

    @property
    def outputs(self) -> list[str]:
        """The files that make the result, relative to the repository."""
        return [str(self.folder / name) for name in (*OUTPUTS[self.stage], "ingredients.json")]


def folder(stage: str, subject: str, key: str) -> Path:
    """results/<stage>/<subject>/<key>; records stand in results/records/."""
    return Path("results") / ("records" if stage == "record" else stage) / subject / key


class Plan:
    """All jobs of a study on a machine class, in the order of the stages."""

    def __init__(
        self,
        study: Study,
        machine: Machine,
        root: Path,
        code: dict[tuple[str, ...], dict[str, str]] | None = None,
    ):
        self.study, self.machine, self.root = study, machine, root
        self._jobs: dict[str, Job] = {}
        # Modules -> fingerprints; taken once a run and passed on to its jobs.
        self.code = code or {}
        # Job -> the study's key that must be pinned before it can run.
        self.unpinned: dict[str, str] = {}
        for checkpoint in study.checkpoints:
            self._fetch(checkpoint)
            self._add("inspect", checkpoint, {}, [f"fetch/{checkpoint}"])
        for runtime in study.runtimes:
            self._build(runtime)
        for checkpoint in study.checkpoints:
            for arm in self._warmed(checkpoint):
                self._warmup(checkpoint, arm)
            self._measure(checkpoint)
            for arm in self._traced(checkpoint):
                self._trace(checkpoint, arm)
            self._parity(checkpoint)
        self._analyse()
        self._record()

    def __iter__(self) -> Iterator[Job]:
        return iter(self._jobs.values())

    def job(self, stage: str, subject: str) -> Job:
        """Raises KeyError for a job that the study does not have."""
        return self._jobs[f"{stage}/{subject}"]

    def stage(self, stage: str) -> list[Job]:
        return [job for job in self if job.stage == stage]

    @property
    def record(self) -> Job:
        (job,) = self.stage("record")
        return job

    def stale(self) -> list[Job]:
        """The jobs whose result is not there, in order."""
        return [job for job in self if not job.done(self.root)]

    def inputs(self, job: Job) -> list[str]:
        """The upstream results that a job reads, each by the file that is written last."""
        return [
            str(folder(*name.split("/", 1), key) / "ingredients.json")
            for name, key in job.upstream.items()
        ]

    # One method a stage: what its result depends on.

    def _fetch(self, name: str) -> None:
        source = self.study.checkpoints[name].source
        params = {"source": _dump(source)}
        code = CODE["fetch"]
        if isinstance(source, SyntheticSource):
            params["source"]["layout_lock"] = self._lock(source.layout)
            code += SYNTHETIC_CODE
        elif isinstance(source, HubSource):
            del params["source"]["branch"]  # where a pin comes from is no part of it
            if source.revision is None:
                self.unpinned[f"fetch/{name}"] = f"checkpoints.{name}.source.revision"
        self._add("fetch", name, params, [], code)

    def _build(self, name: str) -> None:
        runtime = self.study.runtimes[name]
        code = CODE["build"]
        if isinstance(runtime, spec.CommandRuntime):
            params = {"name": name, **spec.resolve(runtime, f"runtimes.{name}")}
            env = params["source"].get("env")
            code += COMMAND_CODE["build"]
            if missing := spec.unpinned(params):
                keys = ", ".join(f"runtimes.{name}.{key}" for key in missing)
                self.unpinned[f"build/{name}"] = keys
        else:
            params = {"name": name, **_dump(runtime)}
            env = runtime.env if isinstance(runtime, PythonRuntime) else None
        if env is not None:
            params["lock"] = self._lock(env)
        self._add("build", name, {"runtime": params, "machine": _dump(self.machine)}, [], code)

    def _warmup(self, checkpoint: str, arm: str) -> None:
        params = {
            "checkpoint": checkpoint,
            "arm": self._arm(arm),
            "shape": _dump(self.study.shape),
            "machine": _dump(self.machine),
            **self._memory(),
            **self._widest([arm]),
        }
        code = self._code_of("warmup", [arm])
        self._add("warmup", f"{checkpoint}.{arm}", params, self._stand(checkpoint, [arm]), code)

    def _measure(self, checkpoint: str) -> None:
        arms = self.study.arms_on(checkpoint)
        warm = [f"warmup/{checkpoint}.{arm}" for arm in self._warmed(checkpoint)]
        params = {
            "checkpoint": checkpoint,
            "arms": {arm: self._arm(arm) for arm in arms},
            "shape": _dump(self.study.shape),
            "rounds": _dump(self.study.rounds),
            "guard": _dump(self.study.guard),
            "machine": _dump(self.machine),
            "session": self.study.study.session,
            **self._memory(),
            **self._widest(arms),
        }
        code = self._code_of("measure", arms)
        if self.study.rounds.slices > 1:
            code += ("worker.sliced",)
        self._add("measure", checkpoint, params, self._stand(checkpoint, arms) + warm, code)

    def _trace(self, checkpoint: str, arm: str) -> None:
        params = {
            "checkpoint": checkpoint,
            "arm": self._arm(arm),
            "shape": _dump(self.study.shape),
            "trace": _dump(self.study.trace),
            "guard": _dump(self.study.guard),
            "limits": _dump(self.study.limits, without=("parity", "memory")),
            "machine": _dump(self.machine),
            "session": self.study.study.session,
            **self._memory(),
            **self._widest([arm]),
        }
        code = self._code_of("trace", [arm]) + BACKEND_CODE.get(self.machine.backend, ())
        self._add("trace", f"{checkpoint}.{arm}", params, self._stand(checkpoint, [arm]), code)

    def _parity(self, checkpoint: str) -> None:
        arms = [
            arm
            for arm in self.study.arms_on(checkpoint)
            if self.study.arms[arm].role != "intervention"
        ]
        params = {
            "checkpoint": checkpoint,
            "arms": {arm: self._arm(arm) for arm in arms},
            "shape": _dump(self.study.shape) | _dump(self.study.parity),
            "limits": _dump(self.study.limits.parity),
            "machine": _dump(self.machine),
            **self._memory(),
            **self._widest(arms),
        }
        code = self._code_of("parity", arms)
        self._add("parity", checkpoint, params, self._stand(checkpoint, arms), code)

    def _analyse(self) -> None:
        study = self.study
        params = {
            "study": _dump(study.study),
            "machine": _dump(self.machine),
            "checkpoints": {
                name: {"role": checkpoint.role, "kind": checkpoint.source.kind}
                for name, checkpoint in study.checkpoints.items()
            },
            "arms": {
                name: {
                    **self._arm(name),
                    "checkpoints": sorted(c for c in study.checkpoints if name in study.arms_on(c)),
                    **self._experts(name),
                }
                for name in study.arms
            },
            "shape": _dump(study.shape),
            "rounds": _dump(study.rounds),
            "limits": _dump(study.limits),
            "claims": [_dump(claim) for claim in study.claims],
            **({"answers": [_dump(answer) for answer in study.answers]} if study.answers else {}),
            **({"crossover": _dump(study.crossover)} if study.crossover else {}),
        }
        self._add("analyse", study.study.name, params, list(self._jobs))

    def _record(self) -> None:
        subject = f"{self.study.study.name}@{self.machine.name}"
        self._add("record", subject, record_params(self.root), list(self._jobs))

    def _add(
        self,
        stage: str,
        subject: str,
        params: dict[str, Any],
        upstream: list[str],
        code: tuple[str, ...] = (),
    ) -> None:
        modules = code or CODE[stage]
        if modules not in self.code:
            self.code[modules] = fingerprints(*modules)
        keys = {name: self._jobs[name].key for name in upstream}
        job = Job(stage, subject, params, keys, self.code[modules])
        self._jobs[job.name] = job

    # What the study says, as ingredients.

    def _arm(self, name: str) -> dict[str, Any]:
        arm: Arm = self.study.arms[name]
        return {"name": name, **_dump(arm, without=("checkpoints", "experts"))}

    def _experts(self, name: str) -> dict[str, Any]:
        """What an arm says of its experts' kernels: judged afterwards, part of no measurement."""
        arm = self.study.arms[name]
        found = {c: arm.experts_on(c) for c in self.study.checkpoints}
        found = {c: patterns for c, patterns in found.items() if patterns}
        return {"experts": found} if found else {}

    def _code_of(self, stage: str, arms: list[str]) -> tuple[str, ...]:
        """The modules of a stage that runs these arms."""
        runtimes = (self.study.runtimes[self.study.arms[arm].runtime] for arm in arms)
        command = any(isinstance(runtime, spec.CommandRuntime) for runtime in runtimes)
        patches = (patch for arm in arms for patch in self.study.arms[arm].patches)
        brought = (module for patch in patches for module in PATCH_CODE.get(patch, ()))
        return (
            CODE[stage] + (COMMAND_CODE[stage] if command else ()) + tuple(dict.fromkeys(brought))
        )

    def _memory(self) -> dict[str, int]:
        cap = self.study.limits.memory
        return {} if cap is None else {"memory": cap}

    def _widest(self, arms: list[str]) -> dict[str, Any]:
        """What the fused kernels' table decides for those of these arms that ask it."""
        found = {}
        for name in arms:
            arm = self.study.arms[name]
            if crossover.asks(arm.patches, arm.env):
                mlx = self._mlx(arm.runtime)
                found[name] = crossover.widest(self.machine.backend, self.machine.gpu, mlx)
        return {"widest_fused": found} if found else {}

    def _mlx(self, runtime: str) -> str:
        """The MLX that a runtime pins."""
        pin = self.study.runtimes[runtime]
        if isinstance(pin, AmbientRuntime):
            return pin.pins["mlx"]
        lock = (self.root / "envs" / f"{pin.env}.txt").read_text()
        return re.search(r"^mlx(?:\[.*\])?==([^\s;]+)", lock, re.M).group(1)

    def _stand(self, checkpoint: str, arms: list[str]) -> list[str]:
        """The checkpoint and the builds that some arms stand on."""
        runtimes = dict.fromkeys(self.study.arms[arm].runtime for arm in arms)
        return [f"fetch/{checkpoint}", *(f"build/{runtime}" for runtime in runtimes)]

    def _traced(self, checkpoint: str) -> list[str]:
        """The null arm is the reference again, an intervention is measured beside its arm."""
        return [
            arm
            for arm in self.study.arms_on(checkpoint)
            if self.study.arms[arm].role in ("reference", "candidate")
        ]

    def _warmed(self, checkpoint: str) -> list[str]:
        return self._traced(checkpoint)

    def _lock(self, env: str) -> str:
        return sha256_text((self.root / "envs" / f"{env}.txt").read_text())


def record_params(root: Path) -> dict[str, Any]:
    """The record depends on its templates too."""
    templates = sorted((root / "templates").glob("*.j2"))
    return {"templates": {path.name: data_fingerprint(path) for path in templates}}


def _dump(model: Any, without: tuple[str, ...] = ()) -> dict[str, Any]:
    return model.model_dump(mode="json", by_alias=True, exclude_none=True, exclude=set(without))
