"""What a claim can speak of: the quantities, and how each is read from an analysis.

The study's validator asks ``exists`` before any job starts; ``evaluate`` gives the figure.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .statistics import Figure

Reader = Callable[[dict[str, Any], str, str], "Figure"]

TERMS = (
    "router",
    "expert_gather",
    "activation",
    "combine",
    "shared_expert",
    "attention",
    "norm",
    "head",
    "sampler",
    "other",
    "host_gap",
)

# The whole MoE block.
BLOCK = ("router", "expert_gather", "activation", "combine", "shared_expert")

# Pattern -> what it is. <term>, <arm>, <candidate> and <intervention> stand for names.
PATTERNS = {
    "share.<term>": "the term's share of the instrumented pass's wall time",
    "lead.<term>": "the term's share of that wall time less the largest other term's",
    "saved.<intervention>": "1 - time per token of the intervention / of its base arm, by rounds",
    "ratio.<arm>": "decode rate of the arm / of the reference, by rounds",
    "prefill_ratio.<arm>": "prefill rate of the arm / of the reference, by rounds",
    "gain.<candidate>": "time per token that the arm saves / that skipping the whole MoE block "
    "saves, by rounds",
    "expert_cost": "ms per token that one more routed expert costs (slope of the top_k sweep)",
    "fixed_share": "share of the token that does not depend on top_k (intercept of the sweep)",
    "operations.total": "primitives in the graph of one decoded token",
    "operations.astype": "conversions of type among them",
    "gpu_share.<term>": "the term's share of the GPU's busy time",
    "gpu_lead.<term>": "the term's share of the GPU's busy time less the largest other term's",
    "busy": "share of the token's wall time in which the GPU is busy",
    "launches": "kernels launched per token",
    "ceiling_share.<term>": "rate at which the term reads its bytes, or the kernels of a fused "
    "block theirs in their own time / bandwidth measured here",
    "copy_share.<term>": "the same rate / bandwidth of a copy measured here, whose read and "
    "written bytes both count",
    "gpu_ms.<term>": "GPU time of the term per token",
    "gpu_launches.<term>": "kernels that the term launches per token",
    "decode_rate.<arm>": "tokens decoded per second",
    "token_ms.<arm>": "time per decoded token",
    "prefill_rate.<arm>": "prompt tokens read per second",
    "cpu_ms.<arm>": "processor time of the host per decoded token, all threads of the process",
    "graph_launches": "CUDA graphs launched per token, in the last profiled pass",
    "graph_updates": "CUDA graphs updated per token, in the last profiled pass",
    "graph_instantiations": "CUDA graphs instantiated per token, in the last profiled pass",
    "synchronisation_ms": "time per token in which the GPU runs MLX's synchronisation alone",
}

# What a claim about wall time, or about the GPU's, may not stand on.
OF_WALL = ("share", "lead", "saved", "ratio", "prefill_ratio", "gain", "expert_cost", "fixed_share")
OF_GPU = ("gpu_share", "gpu_lead", "gpu_ms", "gpu_launches")


def misplaced(quantity: str, of: str) -> bool:
    """Does a quantity speak of the other time than a claim's ``of``, "wall" or "gpu"?"""
    return quantity.partition(".")[0] in {"wall": OF_GPU, "gpu": OF_WALL}[of]


FORCED = "forced"  # the method of a kernel trace whose terms are of the forced pass alone
SYNCHRONISATION = "synchronisation"  # MLX's own; no term of the model's

# What an answer may name beside these: the kernels of the experts, with launches and times.
PATH = "path"


class NotMeasuredError(Exception):
    """The analysis has no such figure; the message says why, for the record's readers."""


def refused(name: str, arms: dict[str, str], besides: tuple[str, ...] = ()) -> str | None:
    """Why this is no quantity of a study with these arms (name -> role), and what is allowed; or
    None. Of a quantity that is known, the names that may follow it are told. besides: what else is
    allowed there."""
    if name in besides:
        return None
    names = {"term": list(TERMS), "arm": list(arms)}
    for role in ("candidate", "intervention"):
        names[role] = [arm for arm, of in arms.items() if of == role]
    head = name.partition(".")[0]
    for pattern in PATTERNS:
        before, _, kind = pattern.partition("<")
        if not kind:
            if name == pattern:
                return None
        elif before == f"{head}.":
            allowed, kind = names[kind[:-1]], kind[:-1]
            if name.removeprefix(before) in allowed:
                return None
            of = f"allowed after {before!r}: {', '.join(allowed)}"
            return f"{name!r} is no quantity of this study; " + (
                of if allowed else f"it has no {kind}"
            )
    alike = [pattern for pattern in PATTERNS if pattern.partition(".")[0] == head]
    return f"{name!r} is no quantity; allowed: {', '.join(alike or (*besides, *PATTERNS))}"


def evaluate(analysis: dict[str, Any], checkpoint: str, quantity: str, arm: str) -> "Figure":
    """The figure of a quantity on a checkpoint; ``arm`` is whose terms, busy share and so on.

    Raises NotMeasuredError with the reason, KeyError for a quantity that does not exist.
    """
    subject = analysis["checkpoints"][checkpoint]
    head, _, name = quantity.partition(".")
    return _READERS[head](subject, arm, name)


def _arm(subject: dict[str, Any], arm: str) -> dict[str, Any]:
    found = subject["arms"].get(arm)
    if found is None:
        raise NotMeasuredError(f"the arm {arm} is not measured on this checkpoint")
    if found["absent"]:
        raise NotMeasuredError(f"the arm {arm}: {found['absent']}")
    if found["void"]:
        raise NotMeasuredError(f"the arm {arm} is void: {found['void']}")
    return found


def _terms(subject: dict[str, Any], arm: str, part: str, term: str) -> dict[str, Any]:
    found = _arm(subject, arm)[part]
    if found is None:
        raise NotMeasuredError(
            f"the arm {arm} has no instrumented pass"
            if part == "scopes"
            else f"the arm {arm} has no kernel trace"
        )
    if found["refused"]:
        raise NotMeasuredError(f"attribution of {arm} refused: {found['refused']}")
    if term not in found["terms"]:
        raise NotMeasuredError(_missing(term, arm, subject["arms"][arm], found, part))
    return found["terms"][term]


def _missing(term: str, arm: str, entry: dict[str, Any], found: dict[str, Any], part: str) -> str:
    """Why a pass has no such term: it is not there, or the pass cannot tell."""
    forced = part == "kernels" and found["method"] == FORCED
    if term == SYNCHRONISATION:
        if forced:
            return f"synchronisation of {arm} is not known by the forced pass"
        return f"the trace of {arm} does not take synchronisation apart"
    if term in BLOCK and any(patch.partition("=")[0] == "fused" for patch in entry["patches"]):
        return f"the term {term} of {arm} is inside its fused kernels, or is not there"
    where = "the forced pass of " if forced else ""
    return f"the term {term} does not occur in {where}{arm}"


def _of_scopes(key: str) -> Reader:
    return lambda subject, arm, term: _terms(subject, arm, "scopes", term)[key]


def _of_kernels(key: str) -> Reader:
    return lambda subject, arm, term: _terms(subject, arm, "kernels", term)[key]


def _of_trace(key: str) -> Reader:
    def read(subject: dict[str, Any], arm: str, _: str) -> "Figure":
        found = _arm(subject, arm)["kernels"]
        if found is None or found[key] is None:
            raise NotMeasuredError(f"the arm {arm} has no kernel trace")
        return found[key]

    return read


def _of_graphs(key: str) -> Reader:
    def read(subject: dict[str, Any], arm: str, _: str) -> "Figure":
        found = _arm(subject, arm)["kernels"]
        if found is None or found["graphs"].get(key) is None:
            raise NotMeasuredError(f"the arm {arm} has no trace of CUDA's calls")
        return found["graphs"][key]

    return read


def _of_arm(key: str) -> Reader:
    def read(subject: dict[str, Any], _: str, name: str) -> "Figure":
        found = _arm(subject, name).get(key)
        if found is None:
            raise NotMeasuredError(f"the runs of {name} do not carry it")
        return found

    return read


def _synchronisation(subject: dict[str, Any], arm: str, _: str) -> "Figure":
    """0 where the trace takes it apart and found none: then busy time is the model's alone. The
    forced pass does not tell."""
    traced = _arm(subject, arm)["kernels"]
    told = traced and not traced["refused"] and traced["method"] != FORCED
    if told and SYNCHRONISATION not in traced["terms"]:
        busy, model = traced["busy_ms"], traced["model_busy_ms"]
        if busy and model and abs(busy["value"] - model["value"]) <= 1e-6 * busy["value"]:
            return busy | {"value": 0.0, "min": 0.0, "max": 0.0}
    return _terms(subject, arm, "kernels", SYNCHRONISATION)["ms"]


def _against(key: str) -> Reader:
    def read(subject: dict[str, Any], _: str, name: str) -> "Figure":
        found = _arm(subject, name)["against"]
        if key == "gain" and found and found["gain"] is None and found["gain_of"]:
            raise NotMeasuredError(f"not every round has {found['gain_of']} saving time")
        if found is None or found[key] is None:
            raise NotMeasuredError(f"no paired rounds of {name}")
        return found[key]

    return read


def _of_sweep(key: str) -> Reader:
    def read(subject: dict[str, Any], arm: str, _: str) -> "Figure":
        if subject["sweep"] is None:
            raise NotMeasuredError("no top_k sweep on this checkpoint")
        return subject["sweep"][key]

    return read


def _operations(subject: dict[str, Any], arm: str, name: str) -> "Figure":
    found = _arm(subject, arm)["operations"]
    if found is None or name not in found["counts"]:
        raise NotMeasuredError(f"the arm {arm} has no exported decode graph")
    return found["counts"][name]


def _ceiling(share: str) -> Reader:
    def read(subject: dict[str, Any], arm: str, term: str) -> "Figure":
        entry = _arm(subject, arm)
        found = entry["ceiling"]
        if found is None:
            raise NotMeasuredError(f"what {arm} reads of its weights is not known")
        if term in found["unknown"]:
            raise NotMeasuredError(found["unknown"][term])
        if term not in found["terms"]:
            _terms(subject, arm, "kernels" if entry["kernels"] else "scopes", term)
            raise NotMeasuredError(f"the term {term} of {arm} reads no weights of its own")
        if found["terms"][term][share] is None:
            raise NotMeasuredError("no bandwidth was measured on this host beside the arm's trace")
        return found["terms"][term][share]

    return read


_READERS = {
    "share": _of_scopes("share"),
    "lead": _of_scopes("lead"),
    "saved": _against("saved"),
    "ratio": _against("decode"),
    "prefill_ratio": _against("prefill"),
    "gain": _against("gain"),
    "expert_cost": _of_sweep("expert_cost"),
    "fixed_share": _of_sweep("fixed_share"),
    "operations": _operations,
    "gpu_share": _of_kernels("share"),
    "gpu_lead": _of_kernels("lead"),
    "busy": _of_trace("busy"),
    "launches": _of_trace("launches"),
    "ceiling_share": _ceiling("share"),
    "copy_share": _ceiling("copy_share"),
    "gpu_ms": _of_kernels("ms"),
    "gpu_launches": _of_kernels("launches"),
    "decode_rate": _of_arm("decode_rate"),
    "token_ms": _of_arm("token_ms"),
    "prefill_rate": _of_arm("prefill_rate"),
    "cpu_ms": _of_arm("cpu_ms"),
    "graph_launches": _of_graphs("launches"),
    "graph_updates": _of_graphs("updates"),
    "graph_instantiations": _of_graphs("instantiations"),
    "synchronisation_ms": _synchronisation,
}
