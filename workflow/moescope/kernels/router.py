"""The router in MLX operations: the reference that the kernels' router answers to.

Step by step what the families' own routers do, with their roundings and their order of equals:
``argpartition`` sorts by (value, index) on every backend (a full stable sort on CUDA and Metal, an
``nth_element`` with the index as second key on CPU).
"""

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from .spec import Router


def route(router: Router, logits: Any, small: dict[str, Any], token: Any = None) -> tuple[Any, Any]:
    """Chosen experts [top_k] and weights [top_k (+ shared)] for one token.

    logits: [router.logits] in the activations' type; small: see ``spec.Tensors``; token: its id,
    for a table. Weights are in the type that the model's own steps give them.
    """
    logits = logits.reshape(-1)
    k = router.top_k
    if router.select == "sparsemixer":
        return _sparsemixer(logits, k, router.jitter)
    values = logits if router.rounded else logits.astype(mx.float32)
    score = _score(router, values[: router.experts])
    if router.select == "table":
        chosen = small["table"][token.reshape(-1)[0]].astype(mx.uint32)
    else:
        choice = score.astype(mx.float32) + small["choice_bias"] if router.bias else score
        if router.high:
            chosen = mx.argpartition(choice, kth=-k)[-k:]
        else:
            chosen = mx.argpartition(-choice, kth=k - 1)[:k]
        score = choice if router.weigh_choice else score
    return chosen, _weights(router, score, chosen, logits, small)


def _score(router: Router, values: Any) -> Any:
    if router.score == "softmax":
        return mx.softmax(values, precise=True)
    if router.score == "sigmoid":
        return mx.sigmoid(values)
    if router.score == "sqrt_softplus":
        return mx.sqrt(nn.softplus(values))
    return values


def _weights(router: Router, score: Any, chosen: Any, logits: Any, small: dict[str, Any]) -> Any:
    picked = mx.take(score, chosen)
    if router.weight == "logsigmoid":
        both = mx.concatenate([mx.take(logits, chosen), logits[-router.shared :]])
        lp = -mx.logaddexp(mx.zeros_like(both).astype(mx.float32), -both.astype(mx.float32))
        weights = mx.exp(lp - mx.logsumexp(lp)) * small["route_factor"]
        return weights.astype(logits.dtype)
    if router.weight == "sum":
        picked = picked / (picked.sum(keepdims=True) + router.epsilon)
    elif router.weight == "softmax":
        picked = mx.softmax(picked, precise=True)
    elif router.weight == "softmax_loose":
        picked = mx.softmax(picked)
    if router.factor != 1.0:
        picked = picked * router.factor
    if router.expert_factor:
        picked = picked * small["expert_factor"][chosen].astype(picked.dtype)
    return picked


def _sparsemixer(gates: Any, k: int, jitter: float) -> tuple[Any, Any]:
    masked, chosen, weights = gates, [], []
    for _ in range(k):
        top, at = masked.max(), mx.argmax(masked, keepdims=True)
        far = (top - gates) / mx.maximum(mx.abs(gates), top) > 2 * jitter
        band = mx.softmax(mx.where(far, -mx.inf, masked), precise=True)
        weights.append(mx.take(band, at))
        chosen.append(at)
        masked = mx.put_along_axis(masked, at, mx.array(-mx.inf, masked.dtype), axis=-1)
    return mx.concatenate(chosen), mx.concatenate(weights)
