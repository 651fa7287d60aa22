"""Which Metal kernels a checkpoint's quantised products take at decode: derived, never observed."""

from pathlib import Path
from typing import Any

from ..checkpoints import accounting, quantisation
from ..checkpoints.families import resolve
from ..checkpoints.headers import read_tensors
from ..errors import UserError
from ..files import read_json
from . import metal

# Looked up or not run by the decode of text.
NO_PRODUCT = ("embedding", *quantisation.OUTSIDE)


def dispatches(fetch: Path) -> dict[str, Any]:
    """The rows of ``metal.derived_dispatches`` for a fetch result, or why there are none.

    Returns {"rows"} or {"rows": [], "why"}. Every layer's products are counted once a token; a
    product whose weights are not in MLX's packed form is left out.
    """
    config, tensors = read_json(fetch / "config.json"), read_tensors(fetch / "tensors.csv")
    try:
        architecture = resolve(config)
        groups = {name: accounting.group_of(name, architecture) for name in tensors}
        modules = quantisation.modules(tensors, groups, config)
        tied = accounting.is_tied(modules)
        weights = [
            {
                "module": module.path,
                "shape": module.tensors["weight"].shape,
                "mode": module.rule.mode,
                "bits": module.rule.bits,
                "group_size": module.rule.group_size,
            }
            for module in modules
            if module.rule is not None
            and module.tensors["weight"].dtype == "U32"
            and (module.group not in NO_PRODUCT or (module.group == "embedding" and tied))
        ]
        norms = [m.tensors["weight"].dtype for m in modules
                 if m.group == "norm" and "weight" in m.tensors]  # fmt: skip
        dtype = quantisation.FLOATING[norms[0]] if norms else "bfloat16"
        return {"rows": metal.derived_dispatches(weights, dtype)}
    except (UserError, KeyError) as why:
        return {"rows": [], "why": f"the kernels' names could not be derived: {why}"}
