"""What one MoE block computes, in the terms that a kernel is made from.

Two blocks with equal specs run the same compiled kernels; whatever differs from layer to layer
(weights, a layer's own factors) is an array, never part of the spec.
"""

from dataclasses import dataclass, field
from typing import Any

from .weights import Format, Projection


@dataclass(frozen=True)
class Router:
    """From ``logits`` numbers a token to ``top_k`` of ``experts`` and their weights.

    select: "top_k"; "table" (deepseek_v4's first layers: a row of experts for each token id);
    "given" (the model's own router ran); "sparsemixer" (phimoe).
    score: "logit", "softmax", "sigmoid", "sqrt_softplus": what is ranked (``bias`` added to it
    first) and gathered (``weigh_choice``: with the bias). high: among equals the higher index wins
    (``argpartition(g, -k)[-k:]``), else the lower (``argpartition(-g, k - 1)[:k]``).
    weight: "score", "sum" (divided by their sum plus epsilon), "softmax", "softmax_loose" (in the
    activations' own type), "logsigmoid" (inkling: a softmax over log-sigmoids, ``shared`` logits
    beside the chosen ones); then times ``factor``, then times the expert's own factor
    (``expert_factor``). rounded: every step rounds to the activations' type, as the model's does.
    """

    experts: int
    top_k: int
    logits: int
    select: str = "top_k"
    score: str = "logit"
    bias: bool = False
    weigh_choice: bool = False
    high: bool = True
    weight: str = "score"
    epsilon: float = 0.0
    factor: float = 1.0
    rounded: bool = True
    jitter: float = 0.0
    shared: int = 0
    expert_factor: bool = False


@dataclass(frozen=True)
class Shared:
    """The expert that every token passes. weight: "one", "gate" (a logit of its own, through a
    sigmoid) or "router" (the router weighs each of its ``Router.shared`` equal parts)."""

    width: int
    gate: Format | None
    up: Format
    down: Format
    weight: str = "one"


@dataclass(frozen=True)
class Spec:
    """One fused block. dtype: "bfloat16" or "float16"; hidden, out: the experts' input and output.

    activation: "swiglu", "swiglu_clamped" (limit), "geglu" (tanh form), "swiglu_oai" (limit,
    alpha), "relu2" (no gate). scaled: each projection has a factor per expert (nvfp4's global
    scale, inkling's scales). biased: each projection has a bias per expert.
    """

    dtype: str
    hidden: int
    width: int
    out: int
    gate: Format | None
    up: Format
    down: Format
    activation: str
    router: Router
    limit: float = 0.0
    alpha: float = 0.0
    scaled: bool = False
    biased: bool = False
    shared: Shared | None = None

    @property
    def label(self) -> str:
        """As "8 of 128, 2048 x 768, affine4g64"."""
        forms = dict.fromkeys(f.label for f in (self.gate, self.up, self.down) if f)
        return (
            f"{self.router.top_k} of {self.router.experts}, {self.hidden} x {self.width}, "
            + "/".join(forms)
        )

    def expert_bytes(self) -> float:
        """Bytes of the chosen (and fused shared) experts' weights that one token reads."""
        each = self.hidden * self.width
        forms = [f for f in (self.gate, self.up) if f]
        total = self.router.top_k * each * sum(f.bytes_per_weight() for f in forms)
        total += self.router.top_k * self.width * self.out * self.down.bytes_per_weight()
        if self.shared:
            forms = [f for f in (self.shared.gate, self.shared.up, self.shared.down) if f]
            total += self.shared.width * self.hidden * sum(f.bytes_per_weight() for f in forms)
        return total


@dataclass(frozen=True)
class Tensors:
    """A block's arrays. small: by name, float32 unless said otherwise: choice_bias [experts],
    route_factor [1], expert_factor [experts] (on the weights), gate_factor, up_factor and
    down_factor [experts] (on a projection's output), table [vocabulary, top_k] (int32)."""

    gate: Projection | None
    up: Projection
    down: Projection
    shared_gate: Projection | None = None
    shared_up: Projection | None = None
    shared_down: Projection | None = None
    small: dict[str, Any] = field(default_factory=dict)
