"""record.json: the analysis and what it stands on, every number with the files behind it.

Numbers stand in Figures, except what the study itself declares (DECLARED): those were given, not
measured. The audit holds the record to this.
"""

from typing import Any

from ..errors import UserError
from ..files import sha256_file
from ..task import Task, ingredients
from ..verdict.results import Results
from ..verdict.statistics import figure

SCHEMA = "moescope/record/1"
ANALYSIS = "moescope/analysis/1"

# Where a record may hold numbers without a source: what the study declares.
DECLARED = ("study", "method", "pins")
# Keys whose number is a bound of the study, wherever they stand.
BOUNDS = ("than",)

RATES = ("decode_rate", "token_ms", "prefill_rate", "tool_rate")
RATES += ("build_ms", "build_share", "cpu_ms", "peak_memory")
ARM = ("role", "runtime", "env", "patches", "absent", "void", *RATES)
ARM += ("same_tokens_every_round", "same_tokens", "against", "longer", "removes", "bound")
ARM += ("perfetto", "cold")


def assemble(task: Task) -> dict[str, Any]:
    """The record of one study on one machine class.

    Reads only upstream results. Raises UserError if the analysis is not among them.
    """
    results = Results(task)
    names = [name.partition("/")[2] for name in task.upstream if name.startswith("analyse/")]
    found = results.json("analyse", names[0], "analysis.json", ANALYSIS) if names else None
    if found is None:
        raise UserError("the analysis is not among the upstream results", f"record/{task.subject}")
    analysis = found.value
    checkpoints = analysis["checkpoints"]
    by_arm = {
        part: {
            name: {arm: entry[part] for arm, entry in checkpoint["arms"].items() if entry[part]}
            for name, checkpoint in checkpoints.items()
        }
        for part in ("scopes", "kernels", "operations", "ceiling")
    }
    return {
        "schema": SCHEMA,
        "study": analysis["study"],
        "machine": analysis["machine"],
        "key": task.key,
        "measured": _measured(results, checkpoints),
        "synthetic": [name for name, entry in checkpoints.items() if entry["synthetic"]],
        "reference": analysis["reference"],
        "claims": analysis["claims"],
        "answers": analysis["answers"],
        "crossover": analysis["crossover"],
        "host": _hosts(results, checkpoints),
        "pins": _pins(task, results),
        "checkpoints": {name: _checkpoint(task, results, name, analysis) for name in checkpoints},
        "method": _method(task, analysis),
        "results": {name: _result(entry) for name, entry in checkpoints.items()},
        "attribution": {"scopes": by_arm["scopes"], "kernels": by_arm["kernels"]},
        "sweep": {name: entry["sweep"] for name, entry in checkpoints.items()},
        "dispatch": {name: entry["dispatch"] for name, entry in checkpoints.items()},
        "operations": by_arm["operations"],
        "ceilings": {
            name: {"bandwidths": entry["bandwidths"], "arms": by_arm["ceiling"][name]}
            for name, entry in checkpoints.items()
        },
        "parity": {name: _parity(results, name) for name in checkpoints},
        "comparability": analysis["comparability"],
        "rejected": {name: entry["rejected"] for name, entry in checkpoints.items()},
        "not_measured": analysis["not_measured"],
        "files": _files(task, results),
    }


# What environment.json says beside the host: processes and arms of one checkpoint.
NO_HOST = ("schema", "bandwidth", "processes", "starts", "admission")
NO_HOST += ("pinned_to", "not_applicable", "unsupported", "failed")


def _measured(results: Results, checkpoints: dict[str, Any]) -> dict[str, str]:
    """When the first and the last run began; the record has no other date."""
    found = [results.runs(name) for name in checkpoints]
    started = sorted(run["started"] for runs in found if runs for run in runs.value)
    return {"first": started[0], "last": started[-1]}


def _hosts(results: Results, checkpoints: dict[str, Any]) -> list[dict[str, Any]]:
    """What each checkpoint was measured on; checkpoints with the same host share an entry."""
    hosts: list[dict[str, Any]] = []
    for name in checkpoints:
        found = results.json("measure", name, "environment.json", "moescope/host/1")
        if found is None:
            continue
        facts = {key: value for key, value in found.value.items() if key not in NO_HOST}
        same = next((host for host in hosts if host["as_written"] == facts), None)
        if same is None:
            hosts.append({"as_written": facts, "checkpoints": [name], "file": found.file})
        else:
            same["checkpoints"].append(name)
    return [
        {
            "checkpoints": host["checkpoints"],
            "facts": {
                path: figure([value], _unit(path), [host["file"]]) if _is_number(value) else value
                for path, value in _leaves(host["as_written"])
            },
        }
        for host in hosts
    ]


def _leaves(value: Any, path: str = "") -> list[tuple[str, Any]]:
    if isinstance(value, dict):
        return [leaf for k, v in value.items() for leaf in _leaves(v, f"{path}.{k}".lstrip("."))]
    if isinstance(value, list):
        return [(path, ", ".join(str(item) for item in value))]
    return [] if value is None else [(path, value)]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


# The last name of a host's fact -> its unit, by the whole name or by how it ends.
HOST_UNITS = {"memory": "bytes", "last_level_cache": "bytes", "_mhz": "MHz", "_w": "W"}
HOST_UNITS |= {"cores": "count", "cores_physical": "count", "_cores": "count"}


def _unit(path: str) -> str:
    last = path.rpartition(".")[2]
    ends = (unit for end, unit in HOST_UNITS.items() if end[0] == "_" and last.endswith(end))
    unit = HOST_UNITS.get(last) or next(ends, None)
    if unit is None:
        raise UserError(
            f"the host's {path!r} is a number whose unit record/assemble.py does not know"
        )
    return unit


def _pins(task: Task, results: Results) -> dict[str, Any]:
    runtimes = {}
    for name, folder in task.upstream.items():
        stage, _, subject = name.partition("/")
        if stage != "build":
            continue
        pin = dict(ingredients(folder)["params"]["runtime"])
        if pin["kind"] == "command":
            runtimes[subject] = _command(pin, results, subject)
            continue
        found = results.json("build", subject, "manifest.json", "moescope/environment/1")
        made = found.value if found else {}
        runtimes[subject] = {
            **{key: pin[key] for key in sorted(pin)},
            "python": made.get("python"),
            "platform": made.get("platform"),
            "packages": made.get("packages", {}),
            "library_sha256": (made.get("library") or {}).get("sha256"),
            "file": found.file if found else None,
        }
    sources = {}
    for name, folder in task.upstream.items():
        stage, _, subject = name.partition("/")
        if stage == "fetch":
            source = dict(ingredients(folder)["params"]["source"])
            sources[subject] = {"key": folder.name, **source}
    return {"runtimes": runtimes, "checkpoints": sources}


def _command(pin: dict[str, Any], results: Results, subject: str) -> dict[str, Any]:
    """A runtime that is a command: its commit and framework, how it was built, what it prints."""
    found = results.json("build", subject, "manifest.json", "moescope/binary/1")
    made = found.value if found else {}
    framework = made.get("framework") or {}
    binaries = made.get("binaries") or {}
    library = made.get("library") or next(iter(binaries.values()), {})
    named = {framework["name"]: framework["value"]} if framework else {}
    return {
        "kind": "command",
        "preset": pin["preset"],
        **{key: pin["source"][key] for key in ("url", "commit", "env") if key in pin["source"]},
        "denominator": pin["invoke"]["denominator"],
        "python": made.get("python"),
        "platform": made.get("platform"),
        "packages": named | made.get("packages", {}),
        "library_sha256": library.get("sha256"),
        **{
            key: made[key]
            for key in ("submodules", "build", "toolchain", "binaries", "lacking")
            if key in made
        },
        "file": found.file if found else None,
    }


def _checkpoint(
    task: Task, results: Results, name: str, analysis: dict[str, Any]
) -> dict[str, Any]:
    entry = analysis["checkpoints"][name]
    kept = {key: entry[key] for key in ("role", "synthetic", "dense", "family", "model_type")}
    kept |= {"recipe": entry["recipe"], "compare": entry["compare"]}
    found = results.json("inspect", name, "architecture.json", "moescope/architecture/1")
    manifest = results.json("fetch", name, "manifest.json", "moescope/manifest/1")
    kept["size"] = figure([manifest.value["bytes"]], "bytes", [manifest.file]) if manifest else None
    if found is None:
        return {**kept, "facts": {}, "groups": [], "bytes_per_token": {}, "config_path": {}}
    facts, file = found.value, [found.file]
    names = ("layers", "moe_layers", "experts", "top_k", "shared_experts", "hidden")
    names += ("expert_width", "shared_width", "vocab")
    return {
        **kept,
        "facts": {
            key: figure([facts[key]], "count", file) for key in names if _is_number(facts.get(key))
        }
        | {
            f"attention.{key}": figure([value], "count", file)
            for key, value in sorted((facts.get("attention") or {}).items())
            if _is_number(value)
        },
        "groups": [_group(group, file) for group in facts["quantization"]["groups"]],
        "bytes_per_token": {
            term: figure([size], "bytes/token", file)
            for term, size in facts["bytes"]["per_token"].items()
            if _is_number(size)
        },
        "config_path": facts.get("config_path", {}),
    }


def _group(group: dict[str, Any], file: list[str]) -> dict[str, Any]:
    """One line of the quantisation map: how a kind of tensor is stored."""
    form = group["dtype"]
    if group.get("mode"):
        form = f"{group['mode']} {group['bits']}-bit, groups of {group['group_size']}"
    return {
        "group": group["group"],
        "format": form,
        "tensors": figure([group["tensors"]], "tensors", file),
        "bytes": figure([group["bytes"]], "bytes", file),
    }


def _method(task: Task, analysis: dict[str, Any]) -> dict[str, Any]:
    """How it was measured, as the study declares it."""
    guard: dict[str, Any] = {}
    trace: dict[str, Any] = {}
    compared: int | None = None
    for name, folder in task.upstream.items():
        params = ingredients(folder)["params"]
        if name.startswith("measure/"):
            guard = params.get("guard", guard)
        elif name.startswith("trace/"):
            trace = params.get("trace", trace)
        elif name.startswith("parity/"):
            compared = params["shape"]["generate"]
    return {
        "shape": analysis["shape"],
        "rounds": analysis["rounds"],
        "limits": analysis["limits"],
        "guard": guard,
        "trace": trace,
        "parity": {"generate": compared},
        "rule": analysis["rule"],
    }


def _result(entry: dict[str, Any]) -> dict[str, Any]:
    return {
        "runs": entry["runs"],
        "noise": entry["noise"],
        "detection": entry["detection"],
        "drift": entry["drift"],
        "arms": {
            name: {key: arm[key] for key in ARM if key in arm}
            for name, arm in entry["arms"].items()
        },
    }


def _parity(results: Results, name: str) -> dict[str, Any]:
    """Each arm's tokens and logits against the reference's."""
    found = results.json("parity", name, "parity.json", "moescope/parity/1")
    if found is None:
        return {}
    return {
        "repetition_excused": bool(found.value.get("repetition_excused")),
        "arms": {
            arm: {key: _sourced(value, key, [found.file]) for key, value in entry.items()}
            for arm, entry in found.value["arms"].items()
        },
    }


# parity.json's numbers -> their units.
PARITY_UNITS = {"top1_agreement": "share", "perplexity_ratio": "ratio"}
PARITY_UNITS |= dict.fromkeys(("max_abs_logit", "logit_gap"), "logits")
PARITY_UNITS |= dict.fromkeys(("decided", "decided_mismatches", "tokens"), "tokens")
PARITY_UNITS |= dict.fromkeys(("first_divergence", "longest_loop", "period"), "tokens")


def _sourced(value: Any, key: str, file: list[str]) -> Any:
    """The same value with each number made a Figure."""
    if _is_number(value):
        if key not in PARITY_UNITS:
            raise UserError(f"{file[0]}: the unit of {key!r} is not known")
        return figure([value], PARITY_UNITS[key], file)
    if isinstance(value, dict):
        return {name: _sourced(item, name, file) for name, item in value.items()}
    if isinstance(value, list):
        return [_sourced(item, key, file) for item in value]
    return value


def _files(task: Task, results: Results) -> dict[str, str]:
    """Path -> sha256 of every file of the upstream results; what a job cost is no data."""
    paths = [
        path
        for folder in task.upstream.values()
        for path in folder.iterdir()
        if path.is_file() and path.name != "cost.json" and not path.name.startswith(".")
    ]
    return {results.named(path): sha256_file(path) for path in sorted(paths)}
