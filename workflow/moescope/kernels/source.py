"""Kernel text: constants of a spec before the shared sources, includes expanded, comments gone.

A kernel's text is built and hashed by MLX at every call, so it carries nothing that it can do
without.
"""

import hashlib
import math
import re
from functools import cache
from pathlib import Path

from .spec import Router, Spec
from .weights import CHUNK, Format

STEP = 128  # columns that a warp takes at once

SOURCES = Path(__file__).parent / "sources"

TYPES = {"bfloat16": 1, "float16": 2}
SCORES = {"logit": 0, "softmax": 1, "sigmoid": 2, "sqrt_softplus": 3}
SELECTS = {"top_k": 0, "table": 1, "given": 2, "sparsemixer": 3}
WEIGHTS = {"score": 0, "sum": 1, "softmax": 2, "softmax_loose": 3, "logsigmoid": 4}
SHARED_WEIGHTS = {"one": 0, "gate": 1, "router": 2}
ACTIVATIONS = {"swiglu": 0, "swiglu_clamped": 1, "geglu": 2, "swiglu_oai": 3, "relu2": 4}
CODES = {
    ("affine", 4): "Affine4",
    ("affine", 6): "Affine6",
    ("affine", 8): "Affine8",
    ("mxfp4", 4): "E2M1",
    ("nvfp4", 4): "E2M1",
    ("mxfp8", 8): "E4M3",
    ("dense", 16): "Dense16",
}


@cache
def text(name: str) -> str:
    """A source file with its own includes of other source files expanded, comments removed."""
    raw = (SOURCES / name).read_text(encoding="utf-8")

    def include(match: re.Match[str]) -> str:
        return text(match[1])

    raw = re.sub(r'^#include "([\w.]+)"$', include, raw, flags=re.M)
    lines = (re.sub(r"\s*//.*$", "", line).strip() for line in raw.splitlines())
    return "\n".join(line for line in lines if line)


def digest(*parts: str) -> str:
    """Ten hex digits: what a kernel's name ends in."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:10]


def number(value: float) -> str:
    """A float32 constant."""
    return f"{float(value)!r}f".replace("inff", "INFINITY")


def defines(values: dict[str, object]) -> str:
    """One #define a line."""
    return "\n".join(f"#define {name} {value}" for name, value in values.items())


def projection(name: str, form: Format) -> str:
    """A format as the type that the sources take."""
    scale = 0
    if form.mode == "affine":
        scale = TYPES[form.scale]
    elif form.mode in ("mxfp4", "mxfp8"):
        scale = 3
    elif form.mode == "nvfp4":
        scale = 4
    group = form.group if form.mode != "dense" else CHUNK
    return (
        f"struct {name} {{ typedef {CODES[form.mode, form.bits]} W; "
        f"static constexpr int GROUP = {group}, SCALE = {scale}; "
        f"static constexpr bool BIAS = {'true' if form.mode == 'affine' else 'false'}; }};"
    )


def kept(router: Router) -> dict[str, int]:
    """Which of a top-k's values the weights are made of (CUDA), each in shared memory."""
    scored = router.select == "top_k" and router.weight != "logsigmoid"
    by_choice = router.bias and router.weigh_choice
    return {
        "SCORE_KEPT": int(scored and not by_choice),
        "CHOICE_KEPT": int(scored and by_choice),
        "LOGIT_KEPT": int(router.select == "top_k" and router.weight == "logsigmoid"),
    }


def each_chooses(router: Router) -> bool:
    """Whether every warp chooses for itself (CUDA): four experts a lane at most."""
    return router.select == "top_k" and router.experts <= 128


def by_logits(router: Router) -> bool:
    """Whether a softmax's choice is made by the logits (CUDA), see choose.body."""
    plain = router.score == "softmax" and not router.bias and router.weight != "logsigmoid"
    return each_chooses(router) and plain and router.experts > router.top_k


def choice_values(router: Router, dtype: str) -> dict[str, object]:
    """How the choice is made (CUDA). By logits, where the greatest are surely the greatest scores:
    the last chosen and the next are more than ``LOGIT_GAP`` apart, or both beyond
    ``LOGIT_COARSE``, where logits that differ at all differ by more; and the last is within
    ``LOGIT_REACH`` of the greatest, so that its score is a normal number.

    Scores v < w round to two values if w - v is more than w's last place, at most 2^-7 w in
    bfloat16 and 2^-10 w in float16: if their logits differ by -log(1 - 2^-7) = 0.00785, or
    0.00098. Logits of the same types beyond 2 are 2^-6, or 2^-9, apart. What a fast exponential
    errs by, 2^-13 at most here, is in the margin. Unrounded scores keep the order from there on.
    """
    if not by_logits(router):
        return {"BY_LOGITS": 0}
    kind = TYPES[dtype] if router.rounded else 0
    gap = {0: 2.0**-10, 1: 0.0082, 2: 0.0012}[kind]
    reach = 13 * math.log(2) - math.log(router.experts) if kind == 2 else 80.0
    return {
        "BY_LOGITS": 1,
        "LOGIT_GAP": number(gap),
        "LOGIT_COARSE": number(2.1 if kind else math.inf),
        "LOGIT_REACH": number(reach),
    }


def router_bytes(router: Router) -> int:
    """Bytes of shared memory of the router on CUDA, but for what it has chosen."""
    if router.select == "given":
        return 0
    if router.select != "top_k":
        return 12 * router.logits
    classes = -(-router.experts // 32)
    arrays = 4 * router.logits * sum(kept(router).values())
    if each_chooses(router):
        return arrays
    return arrays + 128 * classes + 8 * (classes * router.top_k + 1)


def router_values(router: Router, dtype: str) -> dict[str, object]:
    """What router.h and route.body are compiled for."""
    return {
        "ROUTER_E": router.experts,
        "ROUTER_K": router.top_k,
        "ROUTER_LOGITS": max(router.logits, 1),
        "ROUTER_TYPE": TYPES[dtype] if router.rounded else 0,
        "ROUTER_SELECT": SELECTS[router.select],
        "ROUTER_EACH": int(each_chooses(router)),
        "ROUTER_SCORE": SCORES[router.score],
        "ROUTER_BIAS": int(router.bias),
        "ROUTER_WEIGHED": "choice" if router.bias and router.weigh_choice else "score",
        "ROUTER_KEY_16": int(router.rounded and not router.bias),
        "ROUTER_HIGH": "true" if router.high else "false",
        "ROUTER_WEIGHT": WEIGHTS[router.weight],
        "ROUTER_EPSILON": number(router.epsilon),
        "ROUTER_FACTOR": number(router.factor),
        "ROUTER_JITTER": number(2 * router.jitter),
        "ROUTER_SHARED": router.shared,
        "EXPERT_FACTOR": 2 if router.expert_factor else 0,
    }


def block_values(spec: Spec) -> dict[str, object]:
    """Shape and arithmetic of a block, common to both halves."""
    shared = spec.shared
    return {
        "TYPE": TYPES[spec.dtype],
        "HIDDEN": spec.hidden,
        "WIDTH": spec.width,
        "OUT": spec.out,
        "GATED": int(spec.gate is not None),
        "EXPERT_SCALED": int(spec.scaled),
        "EXPERT_BIASED": int(spec.biased),
        "ACTIVATION": ACTIVATIONS[spec.activation],
        "LIMIT": number(spec.limit),
        "ALPHA": number(spec.alpha),
        # Steps at once. With a shared expert's formats the text is long, and has to come too.
        "UNROLL": 2 if shared else 8,
        "SHARED_WIDTH": shared.width if shared else 0,
        "SHARED_WEIGHT": SHARED_WEIGHTS[shared.weight] if shared else 0,
    }


def lift(*forms: Format | None) -> str:
    """By what the operand of projections in these formats is multiplied (formats.cuh)."""
    small = any(f is not None and f.mode in ("mxfp4", "nvfp4", "mxfp8") for f in forms)
    return "LIFTED" if small else "1.f"


def lifts(spec: Spec) -> dict[str, object]:
    """The operands of the first half and of the second (CUDA)."""
    shared = spec.shared
    first = (spec.gate, spec.up) + ((shared.gate, shared.up) if shared else ())
    second = (spec.down,) + ((shared.down,) if shared else ())
    return {"X_LIFT": lift(*first), "MID_LIFT": lift(*second)}


def middle(spec: Spec) -> dict[str, int]:
    """Byte offsets in what the first half hands to the second, and its size.

    A place a slot: activations (a step of 128: upper halves and rests by octets, 512 bytes), then
    octet sums (64 bytes a step); the experts chosen, their weights.
    """
    wide = -(-max(spec.width, spec.shared.width if spec.shared else 0) // STEP) * 512
    sums = (spec.router.top_k + (spec.shared is not None)) * wide
    chosen = sums + sums // 8
    return {
        "SLOT_BYTES": wide,
        "MID_SUMS": sums,
        "MID_CHOSEN": chosen,
        "MID_WEIGHT": chosen + 128,
        "MID_BYTES": chosen + 256,
    }
