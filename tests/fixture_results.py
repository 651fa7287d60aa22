"""A results folder as the stages write it, made up from a seed: for tests of analysis and record.

Three checkpoints of two models (one of them under two recipes) and a dense control; a reference,
its null arm, a candidate, interventions; rejected runs. Times are drawn with a drift over the
rounds and a noise per run, so that the statistics have something to do.
"""

import hashlib
import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moescope.files import canonical, digest, read_json, write_json, write_text
from moescope.study.fingerprint import fingerprints
from moescope.task import INGREDIENTS, Task

MACHINE = {"name": "test-cpu-2c-8g", "backend": "cpu"}
SHAPE = {"prompt": 32, "generate": 33}
LIMITS = {"conservation": 0.02, "unclassified": 0.01, "profiler_cost": 0.03}
LIMITS_PARITY = {"decided_gap": 2.0, "loop_period": 8, "loop_tokens": 24}
RUNTIMES = {
    "mlx-vlm": {"name": "mlx-vlm", "kind": "python", "package": "mlx-vlm", "env": "mlx-vlm-0.7.10"},
    "mlx-lm": {"name": "mlx-lm", "kind": "python", "package": "mlx-lm", "env": "mlx-lm-0.32.2"},
}
VERSIONS = {
    "mlx-vlm": {"mlx": "0.32.4", "mlx-lm": "0.32.2", "mlx-vlm": "0.7.10"},
    "mlx-lm": {"mlx": "0.32.4", "mlx-lm": "0.32.2"},
}
# name -> (role, model_type, recipe, experts, top_k, ms per token, shares of the terms)
CHECKPOINTS: dict[str, dict[str, Any]] = {
    "inkling-affine": {
        "role": "subject",
        "model_type": "inkling",
        "recipe": "experts-only affine 4-bit g64",
        "experts": 256,
        "top_k": 6,
        "token_ms": 6.0,
    },
    "inkling-nvfp4": {
        "role": "subject",
        "model_type": "inkling",
        "recipe": "nvfp4",
        "experts": 256,
        "top_k": 6,
        "token_ms": 8.0,
    },
    "qwen3-moe": {
        "role": "control",
        "model_type": "qwen3_moe",
        "recipe": "affine 4-bit g64",
        "experts": 128,
        "top_k": 8,
        "token_ms": 4.0,
    },
    "qwen3-dense": {
        "role": "control",
        "model_type": "qwen3",
        "recipe": "affine 4-bit g64",
        "experts": 0,
        "top_k": 0,
        "token_ms": 3.0,
    },
}
MOE_SHARES = {
    "router": 0.07,
    "expert_gather": 0.38,
    "activation": 0.05,
    "combine": 0.06,
    "shared_expert": 0.05,
    "attention": 0.24,
    "norm": 0.05,
    "head": 0.07,
    "sampler": 0.01,
    "other": 0.02,
}
DENSE_SHARES = {"attention": 0.45, "norm": 0.1, "head": 0.2, "sampler": 0.05, "other": 0.2}


def _arm(name: str, runtime: str, role: str, patches: tuple[str, ...] = (), on=None) -> dict:
    return {
        "name": name,
        "runtime": runtime,
        "role": role,
        "env": {},
        "patches": list(patches),
        "checkpoints": on if on is not None else list(CHECKPOINTS),
    }


ARMS = {
    "vlm": _arm("vlm", "mlx-vlm", "reference"),
    "vlm-null": _arm("vlm-null", "mlx-vlm", "null"),
    "lm": _arm("lm", "mlx-lm", "candidate", on=["qwen3-moe", "qwen3-dense"]),
    "skip-experts": _arm("skip-experts", "mlx-vlm", "intervention", ("skip_experts",)),
    "skip-moe": _arm("skip-moe", "mlx-vlm", "intervention", ("skip_moe",)),
    "top-k-1": _arm("top-k-1", "mlx-vlm", "intervention", ("top_k=1",)),
    "top-k-2": _arm("top-k-2", "mlx-vlm", "intervention", ("top_k=2",)),
    "top-k-4": _arm("top-k-4", "mlx-vlm", "intervention", ("top_k=4",)),
}
CLAIMS = [
    {
        "name": "gather-dominates",
        "says": "The expert gather is the dominant term of a decode step.",
        "of": "wall",
        "all": [
            {"quantity": "lead.expert_gather", "is": ">", "than": 0.0},
            {"quantity": "saved.skip-experts", "is": ">", "than": 0.5},
        ],
    },
    {
        "name": "bound-by-experts",
        "says": "Most of a decode step's cost grows with the number of experts read.",
        "of": "wall",
        "all": [{"quantity": "fixed_share", "is": "<", "than": 0.5}],
    },
    {
        "name": "router-is-cheap",
        "says": "The router costs less than a tenth of a decode step.",
        "of": "wall",
        "all": [{"quantity": "share.router", "is": "<", "than": 0.1}],
    },
    {
        "name": "gather-dominates-gpu",
        "says": "The expert gather is the largest part of the GPU's busy time.",
        "of": "gpu",
        "all": [{"quantity": "gpu_lead.expert_gather", "is": ">", "than": 0.0}],
    },
]


@dataclass
class Tree:
    """A results folder under ``root``; ``edit_run`` may change each run before it is written."""

    root: Path
    seed: int = 1
    rounds: int = 5
    noise: float = 0.004
    drift: float = 1.4
    slow: dict[str, float] = field(default_factory=lambda: {"lm": 1.12})
    edit_run: Callable[[dict[str, Any]], None] = lambda run: None
    scopes_sum: float = 0.998
    bandwidth: float | None = None
    kernels: bool = False
    sliced: dict[str, int] = field(default_factory=dict)
    parity_void: dict[tuple[str, str], str] = field(
        default_factory=lambda: {
            ("qwen3-dense", "lm"): "repetition loop: 4 tokens repeated over 28 tokens"
        }
    )
    keys: dict[str, str] = field(default_factory=dict)

    def make(self) -> "Tree":
        self.random = random.Random(self.seed)
        for runtime in RUNTIMES:
            self._build(runtime)
        for name in CHECKPOINTS:
            self._fetch(name)
            self._inspect(name)
            self._measure(name)
            for arm in ("vlm", "lm"):
                if name in ARMS[arm]["checkpoints"]:
                    self._warmup(name, arm)
                    self._trace(name, arm)
            self._parity(name)
        return self

    # Running the stages under test, as the framework does.

    def analyse(
        self,
        claims: list[dict] | None = None,
        answers: list[dict] | None = None,
        experts: dict[str, dict] | None = None,
        crossover: dict | None = None,
    ) -> Path:
        """experts: arm -> checkpoint -> the kernels that its experts are to run."""
        params = {
            "study": {
                "name": "embedded",
                "title": "Is the expert gather the dominant term?",
                "question": "Is the expert gather the dominant term of a decode step here?",
                "session": 1,
            },
            "machine": MACHINE,
            "checkpoints": {
                name: {"role": entry["role"], "kind": "synthetic"}
                for name, entry in CHECKPOINTS.items()
            },
            "arms": {
                name: arm | ({"experts": experts[name]} if name in (experts or {}) else {})
                for name, arm in ARMS.items()
            },
            "shape": SHAPE,
            "rounds": {"count": self.rounds, "warmup": 1} | self.sliced,
            "limits": {**LIMITS, "parity": LIMITS_PARITY},
            "claims": CLAIMS if claims is None else claims,
            **({"answers": answers} if answers else {}),
            **({"crossover": crossover} if crossover else {}),
        }
        from moescope.verdict import analyse

        code = fingerprints("verdict.analyse")
        return self._run("analyse", "embedded", params, list(self.keys), code, analyse.run)

    def record(self, templates: Path) -> Path:
        from moescope.record import stage
        from moescope.study.fingerprint import data_fingerprint

        target = self.root / "templates"
        target.mkdir(exist_ok=True)
        for path in templates.glob("*.j2"):
            (target / path.name).write_text(path.read_text())
        params = {
            "templates": {path.name: data_fingerprint(path) for path in sorted(target.glob("*.j2"))}
        }
        code = fingerprints("record.stage")
        subject = f"embedded@{MACHINE['name']}"
        return self._run("record", subject, params, list(self.keys), code, stage.run)

    def folder(self, name: str) -> Path:
        """The folder of a result: "stage/subject"."""
        stage, subject = name.split("/", 1)
        stage = "records" if stage == "record" else stage
        return self.root / "results" / stage / subject / self.keys[name]

    def _run(self, stage, subject, params, upstream, code, run) -> Path:
        keys = {name: self.keys[name] for name in upstream if not name.startswith("record/")}
        if stage == "analyse":
            keys = {name: key for name, key in keys.items() if not name.startswith("analyse/")}
        out = self.root / "work" / "tmp" / stage
        out.mkdir(parents=True, exist_ok=True)
        folder = self._ingredients(stage, subject, params, keys, code)
        paths = {name: self.folder(name) for name in keys}
        task = Task(stage, subject, folder.name, params, paths, out, self.root / "work", self.root)
        run(task)
        for path in out.iterdir():
            path.replace(folder / path.name)
        return folder

    def _ingredients(self, stage, subject, params, upstream, code=None) -> Path:
        found = {
            "stage": stage,
            "subject": subject,
            "params": params,
            "upstream": upstream,
            "code": code or {},
        }
        self.keys[f"{stage}/{subject}"] = key = digest(found)[:12]
        folder = self.folder(f"{stage}/{subject}")
        write_json(folder / "ingredients.json", {"schema": INGREDIENTS, "key": key, **found})
        return folder

    # One method a stage.

    def _build(self, name: str) -> None:
        params = {"runtime": {**RUNTIMES[name], "lock": _hash(name)}, "machine": MACHINE}
        folder = self._ingredients("build", name, params, {})
        write_json(
            folder / "manifest.json",
            {
                "schema": "moescope/environment/1",
                "kind": "python",
                "package": RUNTIMES[name]["package"],
                "python": "3.11.7",
                "platform": "linux-x86_64",
                "packages": VERSIONS[name],
                "library": {"path": "lib/libmlx.so", "sha256": _hash("libmlx")},
            },
        )

    def _fetch(self, name: str) -> None:
        entry = CHECKPOINTS[name]
        source = {
            "kind": "synthetic",
            "layout": "mlx-vlm-0.7.10",
            "layout_lock": _hash("mlx-vlm"),
            "package": "mlx-vlm",
            "seed": 2,
            "dtype": "float32",
            "config": {"model_type": entry["model_type"], "hidden_size": 512},
            "quantization": None,
        }
        folder = self._ingredients("fetch", name, {"source": source}, {})
        files = [{"path": "model-00001.safetensors", "bytes": 7_340_032, "sha256": _hash(name)}]
        write_json(
            folder / "manifest.json",
            {
                "schema": "moescope/manifest/1",
                "kind": "synthetic",
                "source": source,
                "files": files,
                "bytes": 7_340_032,
            },
        )
        write_json(folder / "config.json", {"model_type": entry["model_type"]})
        write_text(
            folder / "tensors.csv",
            "name,dtype,shape,bytes,shard\nembed.weight,F32,2048x512,4194304,1\n",
        )

    def _inspect(self, name: str) -> None:
        entry = CHECKPOINTS[name]
        folder = self._ingredients(
            "inspect", name, {}, {f"fetch/{name}": self.keys[f"fetch/{name}"]}
        )
        dense = not entry["experts"]
        per_token = {
            "router": 0 if dense else 524_288,
            "expert_gather": 0 if dense else 5_308_416,
            "shared_expert": 0 if dense else 884_736,
            "attention": 2_359_296,
            "norm": 18_432,
            "head": 2_359_296,
            "other": 2_048,
        }
        write_json(
            folder / "architecture.json",
            {
                "schema": "moescope/architecture/1",
                "model_type": entry["model_type"],
                "family": entry["model_type"],
                "package_families": {
                    "mlx-vlm": entry["model_type"],
                    "mlx-lm": None if entry["model_type"] == "inkling" else entry["model_type"],
                },
                "config_path": {"num_experts": "text_config.n_routed_experts"},
                "layers": 4,
                "moe_layers": 0 if dense else 4,
                "experts": entry["experts"],
                "top_k": entry["top_k"],
                "shared_experts": 0 if dense else 1,
                "hidden": 512,
                "expert_width": 0 if dense else 256,
                "shared_width": 256,
                "vocab": 2048,
                "attention": {"heads": 8, "kv_heads": 2, "head_dim": 64},
                "dense": dense,
                "quantization": {
                    "groups": [
                        {
                            "group": "attention" if dense else "experts",
                            "mode": "affine",
                            "bits": 4,
                            "group_size": 64,
                            "dtype": "U32",
                            "tensors": 12,
                            "bytes": 5_000_000,
                        },
                        {
                            "group": "norm",
                            "mode": None,
                            "bits": None,
                            "group_size": None,
                            "dtype": "F32",
                            "tensors": 9,
                            "bytes": 18_432,
                        },
                    ],
                    "recipe": entry["recipe"],
                    "fingerprint": _hash(entry["recipe"])[:12],
                },
                "bytes": {
                    "total": 7_340_032,
                    "per_token": {**per_token, "total": sum(per_token.values())},
                },
                "memory": {"predicted": 9_000_000},
                "compare": _hash(entry["model_type"] + entry["recipe"])[:12],
            },
        )

    def _warmup(self, name: str, arm: str) -> None:
        folder = self._ingredients("warmup", f"{name}.{arm}", {"arm": ARMS[arm]}, {})
        write_json(
            folder / "warmup.json",
            {
                "schema": "moescope/warmup/1",
                "load_s": 0.41,
                "first_pass": {"prefill_s": 0.9, "decode_s": 1.2},
                "second_pass": {"prefill_s": 0.2, "decode_s": 0.3},
                "first_use_s": 1.6,
                "cache_before": {"files": 0, "bytes": 0},
                "cache": {"files": 3, "bytes": 12_000},
            },
        )

    def _measure(self, name: str) -> None:
        arms = [arm for arm, entry in ARMS.items() if name in entry["checkpoints"]]
        absent = {}
        if not CHECKPOINTS[name]["experts"]:
            why = "the model has no routed experts"
            absent = {arm: why for arm in arms if ARMS[arm]["patches"]}
        params = {"checkpoint": name, "arms": {arm: ARMS[arm] for arm in arms}, "session": 1}
        folder = self._ingredients("measure", name, params, {})
        rows = []
        for number in range(self.rounds):
            host = 1 + (self.drift - 1) * self.random.random()
            present = [arm for arm in arms if arm not in absent]
            for position in range(len(present)):
                arm = present[(position + number) % len(present)]
                rows += self._runs(name, arm, number, position, host)
        for row in rows:
            self.edit_run(row)
        write_runs(folder / "runs.jsonl", rows)
        write_text(folder / "guard.jsonl", '{"schema":"moescope/guard/1","cores":0.1}\n')
        host = {
            "schema": "moescope/host/1",
            "system": "Linux 6.1",
            "machine": "x86_64",
            "cpu": "Test CPU @ 2.0GHz",
            "cores": 2,
            "memory": 8 * 2**30,
            "backend": "cpu",
            "processes": [{"index": 0, "arms": arms, "load_s": 0.4 + len(name) / 100}],
            "starts": 1,
            "not_applicable": absent,
            "unsupported": {},
        }
        if self.bandwidth:
            rates = (self.bandwidth, self.bandwidth * 0.9)
            read, copy = (
                {"value": rate, "min": rate * 0.97, "max": rate * 1.01, "n": 5} for rate in rates
            )
            host["bandwidth"] = {"size": 1 << 28, "read": read, "copy": copy}
        write_json(folder / "environment.json", host)

    def _runs(self, name, arm, number, position, host) -> list[dict[str, Any]]:
        entry = CHECKPOINTS[name]
        patches = ARMS[arm]["patches"]
        token = entry["token_ms"] / 1e3 * self.slow.get(arm, 1.0)
        gather = MOE_SHARES["expert_gather"] * token
        if patches == ["skip_experts"]:
            token -= gather
        elif patches == ["skip_moe"]:
            token *= 0.5
        elif patches:
            token -= gather * (1 - int(patches[0].removeprefix("top_k=")) / entry["top_k"])
        token *= host * self.random.gauss(1, self.noise)
        rows = []
        if (name, arm, number) == ("qwen3-moe", "vlm", 2):
            why = "another process used 1.4 cores during the run"
            rows.append(self._line(name, arm, number, position, 1, token * 1.4, why))
        return [*rows, self._line(name, arm, number, position, len(rows) + 1, token, None)]

    def _line(self, name, arm, number, position, attempt, token, why) -> dict[str, Any]:
        forwards = SHAPE["generate"] - 1
        row = {
            "schema": "moescope/run/1",
            "id": f"r{number:02d}-{arm}" + (f"-try{attempt}" if attempt > 1 else ""),
            "checkpoint": name,
            "arm": arm,
            "round": number,
            "position": position,
            "attempt": attempt,
            "started": f"2026-11-29T12:{number:02d}:{position:02d}Z",
            "env": {},
            "patches": ARMS[arm]["patches"],
            "valid": why is None,
            "why": why,
        }
        return row | {
            "prompt_tokens": SHAPE["prompt"],
            "generated_tokens": SHAPE["generate"],
            "prefill_s": token * 9 * self.random.gauss(1, self.noise),
            "decode_s": token * forwards,
            "forwards": forwards,
            "token_s": [token] * forwards,
            "build_s": token * forwards * 0.31,
            "tokens_sha256": _hash(f"{name} {ARMS[arm]['patches']}"),
            "finite": True,
            "peak_memory": 9_100_000,
            "tool_rate": (forwards + 1) / (token * forwards),
            "process": {"index": number, "versions": VERSIONS[ARMS[arm]["runtime"]]},
            "guard": {
                "waited_s": 0.2,
                "waited_out": False,
                "samples": 4,
                "busy_fraction": 0.0,
                "peak_foreign_cpu": 0.04,
                "load1": 0.8,
            },
        }

    def _trace(self, name: str, arm: str) -> None:
        params = {"checkpoint": name, "arm": ARMS[arm], "trace": {"passes": 3, "tokens": 8}}
        folder = self._ingredients("trace", f"{name}.{arm}", params, {})
        shares = MOE_SHARES if CHECKPOINTS[name]["experts"] else DENSE_SHARES
        wall = CHECKPOINTS[name]["token_ms"] / 1e3 * 8 * 1.5
        passes = []
        for _ in range(3):
            this = wall * self.random.gauss(1, 0.02)
            terms = {term: this * share * self.scopes_sum for term, share in shares.items()}
            guard = {"attempts": 1, "busy_fraction": 0.0, "rejected": False}
            passes.append({"wall_s": this, "tokens": 8, "terms_s": terms, "guard": guard})
        write_json(
            folder / "scopes.json",
            {
                "schema": "moescope/scopes/1",
                "tokens": 8,
                "passes": passes,
                "plain_token_s": CHECKPOINTS[name]["token_ms"] / 1e3,
            },
        )
        rows = ["term,primitive,count"]
        for term in shares:
            rows += [f"{term},Multiply,12", f"{term},QuantizedMatmul,8"]
        rows.append("attention,AsType,2")
        write_text(folder / "operations.csv", "\n".join(rows) + "\n")
        write_json(
            folder / "trace.json",
            {
                "schema": "moescope/trace/1",
                "operations": {"total": 20 * len(shares) + 2, "astype": 2, "gather": 12},
                "instruments": ["scopes", "graph"],
                "not_measured": [],
                "moe_layers": 4,
                "conservation": {"worst": 0.002, "limit": 0.02},
                "same_tokens": True,
            },
        )
        if self.kernels:
            self._kernels(folder, name, arm)
            trace = read_json(folder / "trace.json")
            drawn = {"file": "timelines/abc.json.gz", "sha256": _hash("drawn"), "steps": [7, 8]}
            if arm == "vlm" and "router" in shares:
                trace["sweep"] = {"schema": "moescope/sweep/1", "top_k": 8, "file": "sweep.csv"}
            write_json(folder / "trace.json", trace | {"timeline": drawn})

    def _kernels(self, folder: Path, name: str, arm: str) -> None:
        """kernels.csv, modules.csv, terms.json, calls.csv, timeline.csv, as the CUDA instruments
        write them."""
        shares = MOE_SHARES if CHECKPOINTS[name]["experts"] else DENSE_SHARES
        launches = {term: 4.0 * (index + 1) for index, term in enumerate(shares)}
        rows = ["arm,kernel,term,primitives,launches_per_token,ms_per_token,bytes_per_token,share"]
        for term, share in shares.items():
            kernel = f'"void mlx::core::cu::kernel_{term}<float, 4>(float*, int)"'
            made = "GatherQMM" if term == "expert_gather" else "Some"
            rows.append(f"{arm},{kernel},{term},{made},{launches[term]:g},{share:g},,{share:g}")
        rows.append(f"{arm},event_signal_kernel,synchronisation,-,1,0.05,,0.05")
        write_text(folder / "kernels.csv", "\n".join(rows) + "\n")
        rows = ["arm,module,term,launches_per_token,ms_per_token,share"]
        for term, share in {**shares, "synchronisation": 0.05}.items():
            # What waits has no module; of each other term two thirds are in one of its modules.
            parts = {"": 1.0} if term == "synchronisation" else {".big": 2 / 3, ".small": 1 / 3}
            for part, of in parts.items():
                module = f"model.layers.*.{term}{part}" if part else "-"
                ms, count = share * of, launches.get(term, 1.0) * of
                rows.append(f"{arm},{module},{term},{count:.6g},{ms:.6g},{ms / 1.05:.6g}")
        write_text(folder / "modules.csv", "\n".join(rows) + "\n")
        write_text(
            folder / "calls.csv",
            "call,thread,count,ms\ncudaGraphLaunch,loop,16,1.5\ncudaGraphAddNode,loop,900,0.8\n",
        )
        spans = ["start_us,end_us,term,launches"]
        for index, term in enumerate(shares):
            spans.append(f"{index * 50},{index * 50 + 40},{term},3")
        write_text(folder / "timeline.csv", "\n".join(spans) + "\n")
        if arm == "vlm" and "router" in shares:
            rows = [
                "top_k,kernel,launches_per_token,per_layer,ms_per_token,gather_ms_per_token,why"
            ]
            for k in range(1, 10):
                kernel = "gather_qmv_kernel" if k < 8 else "qmm_sm80_kernel"
                rows.append(f"{k},{kernel},8,2,{0.03 * k:g},{0.035 * k:g},")
            rows.append("10,,,,,,not applicable: too many")
            write_text(folder / "sweep.csv", "\n".join(rows) + "\n")
        passes = [self.random.gauss(1, 0.01) for _ in range(3)]
        experts = [
            {"kernel": "kernel_expert_gather", "launches": 64, "launches_per_token": 8.0,
             "per_layer": 2.0, "helper": False},
            {"kernel": "copy_g_nd", "launches": 32, "launches_per_token": 4.0, "per_layer": 1.0,
             "helper": True},
        ]  # fmt: skip
        uneven = [{"term": "router", "kernel": "kernel_router", "launches_per_token": 4.5}]
        write_json(
            folder / "terms.json",
            {
                "schema": "moescope/terms/1",
                "method": "ranges",
                "carried_over": ["as they are"],
                "steps": 8,
                "wall_ms": [3.0, 3.02, 2.99],
                "profiler_cost": [0.011, 0.008, 0.013],
                "all_profiler_cost": [0.02, 0.05, 0.04],
                "busy_ms": [1.05 * x for x in passes],
                "model_busy_ms": [x for x in passes],
                "sum_ms": [1.05 * x for x in passes],
                "busy_share": [0.35 * x for x in passes],
                "host_gap_ms": [1.95, 1.96, 1.94],
                "overlapping_ms": [0.02, 0.02, 0.02],
                "launches": [60.0, 60.0, 60.0],
                "terms": {
                    term: {
                        "ms": [share * x for x in passes],
                        "launches": [launches.get(term, 1.0)] * 3,
                    }
                    for term, share in {**shares, "synchronisation": 0.05}.items()
                },
                "unclassified": [0.0, 0.0, 0.0],
                "window": {
                    "difference": {"ms": 1.01, "launches": 59.0, "all_ms": 1.15},
                    "window": {"ms": 1.0, "launches": 59.0, "all_ms": 1.05},
                },
                "window_disagreement": 0.01,
                "all_window_disagreement": 0.095,
                "forced_terms": {
                    term: {"ms": share * 1.01, "launches": launches[term]}
                    for term, share in shares.items()
                },
                "instruments_disagreement": 0.112,
                "all_instruments_disagreement": 0.15,
                "alone_disagreement": 0.013,
                "alone_terms": {
                    term: {"ms": share * 1.2, "launches": launches[term]}
                    for term, share in shares.items()
                },
                "overlap_disagreement": 0.108,
                "cpu_ms": {
                    "plain": [3.3, 3.4, 3.2],
                    "watched": {"process": 5.0, "loop": 2.9},
                },
                "launches_disagreement": 0.0,
                "host": {
                    "ms": {"build": 0.8, "encode": 1.9, "wait": 0.3},
                    "idle_ms": {"build": 0.5, "encode": 1.4, "wait": 0.05},
                },
                "path": {
                    "steps": 8,
                    "moe_layers": 4 if "router" in shares else 0,
                    "experts": experts if "router" in shares else [],
                    "uneven": uneven,
                },
                "dropped": 0,
            },
        )

    def _parity(self, name: str) -> None:
        arms = {}
        for arm, entry in ARMS.items():
            if name not in entry["checkpoints"] or entry["role"] == "intervention":
                continue
            arms[arm] = {
                "greedy": {
                    "identical": True,
                    "first_divergence": None,
                    "logit_gap": None,
                    "tokens_sha256": _hash(name),
                },
                "forced": {
                    "top1_agreement": 1.0,
                    "max_abs_logit": 0.00021,
                    "decided": 21,
                    "decided_mismatches": 0,
                    "tokens": 33,
                    "perplexity_ratio": 1.0000012,
                },
                "finite": True,
                "repetition": {"longest_loop": 3, "period": 1},
                "void": self.parity_void.get((name, arm)),
            }
        folder = self._ingredients("parity", name, {"shape": SHAPE, "limits": LIMITS_PARITY}, {})
        write_json(
            folder / "parity.json",
            {
                "schema": "moescope/parity/1",
                "reference": "vlm",
                "repetition_excused": False,
                "arms": arms,
            },
        )


def write_runs(path: Path, rows: list[dict[str, Any]]) -> None:
    """A runs.jsonl with its trailer."""
    body = "".join(canonical(row) + "\n" for row in rows)
    trailer = {
        "schema": "moescope/run-trailer/1",
        "runs": len(rows),
        "valid": sum(row["valid"] for row in rows),
        "sha256": hashlib.sha256(body.encode()).hexdigest(),
    }
    write_text(path, body + canonical(trailer) + "\n")


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The runs of a runs.jsonl, without its trailer."""
    return [json.loads(line) for line in path.read_text().splitlines()][:-1]


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
