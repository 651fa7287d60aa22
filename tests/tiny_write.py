"""Fill a layout with random numbers and write it as a checkpoint; runs in the arm's interpreter.

Standard input: {"folder", "seed", "layout": the worker's reply}. Quantised modules are made from a
random matrix by mx.quantize, so that the packed bytes mean what the runtime reads in them.
"""

import json
import sys
from pathlib import Path

import mlx.core as mx

TYPES = {"F32": mx.float32, "BF16": mx.bfloat16, "F16": mx.float16, "I32": mx.int32}
OFFSETS = ("bias", "biases", "sinks", "attn_sink", "base")


def plain(name: str, tensor: dict, experts: int) -> mx.array:
    shape, dtype = tensor["shape"], TYPES[tensor["dtype"]]
    if tensor["dtype"] == "I32":
        rows = mx.arange(shape[0])[:, None] + mx.arange(shape[1])[None]
        return (rows % experts).astype(dtype)
    if name.endswith("_scale") or name.endswith("per_expert_scale"):
        return mx.ones(shape, dtype)
    noise = mx.random.normal(shape) * (0.1 if len(shape) > 1 else 0.02)
    one = len(shape) == 1 and not name.endswith(OFFSETS)
    return (noise + 1 if one else noise).astype(dtype)


def main() -> None:
    request = json.load(sys.stdin)
    folder = Path(request["folder"])
    tensors = request["layout"]["tensors"]
    config = request["layout"]["config"]
    inner = config.get("text_config", config)
    experts = next((inner[key] for key in inner if key in ("n_routed_experts", "num_experts")), 1)
    mx.random.seed(request["seed"])
    weights: dict[str, mx.array] = {}
    shapes = {tensor["name"]: tensor for tensor in tensors}
    for name, tensor in shapes.items():
        quant = tensor["quant"]
        if quant is None:
            weights[name] = plain(name, tensor, experts)
        elif tensor["parameter"] == "weight":
            *lead, packed = tensor["shape"]
            full = mx.random.normal((*lead, packed * 32 // quant["bits"])) * 0.1
            dtype = shapes[f"{tensor['module']}.scales"]["dtype"]
            parts = mx.quantize(full.astype(TYPES.get(dtype, mx.float32)), **quant)
            for key, value in zip(("weight", "scales", "biases"), parts, strict=False):
                weights[f"{tensor['module']}.{key}"] = value
    assert set(weights) == set(shapes), set(weights) ^ set(shapes)
    folder.mkdir(parents=True)
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    index = {"metadata": {}, "weight_map": dict.fromkeys(weights, "model.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(config))


main()
