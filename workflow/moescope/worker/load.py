"""Loading a checkpoint with the runtime's own loader: weights, no tokenizer, no foreign code."""

import gc
import importlib
import importlib.machinery
import json
import sys
import time
from pathlib import Path
from typing import Any

from .state import Refusal, State, check_package


def run(state: State, package: str, path: str, seed: int | None = None) -> dict[str, Any]:
    """Load ``path``; what was loaded before is dropped first.

    seed: of MLX's random numbers, which decoding does not use. seconds: the loader alone, weights
    evaluated; import_s: importing the package. Refuses with ``unsupported`` when the package is not
    installed, does not know the model type, or the checkpoint brings its own code.
    """
    check_package(package)
    folder = Path(path)
    config = _config(folder)
    if "model_file" in config:
        raise Refusal("unsupported", f"{path} brings its own code (model_file); it is not run")
    state.model = state.package = None
    gc.collect()
    started = time.perf_counter()
    try:
        load_model = _loader(package)
    except ModuleNotFoundError as error:
        raise Refusal("unsupported", f"{package} is not installed here: {error}") from None
    imported = time.perf_counter()
    import mlx.core as mx
    from mlx.utils import tree_flatten

    mx.clear_cache()
    mx.reset_peak_memory()
    if seed is not None:
        mx.random.seed(seed)
    try:
        loaded = load_model(folder)
    except ValueError as error:
        if "not supported" not in str(error).lower():
            raise
        raise Refusal("unsupported", str(error)) from None
    mx.synchronize()
    seconds = time.perf_counter() - imported
    state.model = loaded[0] if package == "mlx-lm" else loaded
    state.package = package
    from .modules import survey

    sites = survey(state)
    return {
        "seconds": seconds,
        "import_s": imported - started,
        "parameters_bytes": sum(p.nbytes for _, p in tree_flatten(state.root.parameters())),
        "model_type": config.get("model_type"),
        "layers": len(sites.layers),
        "moe_layers": [block.path for block in sites.blocks]
        + [path.rpartition(".")[0] for path in sites.foreign],
        "routing": _routing(sites),
        "peak_memory": mx.get_peak_memory(),
    }


def _routing(sites: Any) -> dict[str, int] | None:
    """{"top_k", "most": the largest top_k that every block allows}; None without experts."""
    if not sites.blocks:
        return None
    limits = [b.experts if b.lookup is None else b.top_k for b in sites.blocks]
    return {"top_k": max(b.top_k for b in sites.blocks), "most": min(limits)}


class _WithoutTorch(importlib.machinery.PathFinder):
    """Finds modules as Python does, but not PyTorch: transformers imports it where it is there,
    which takes seconds in each process, and neither runtime decodes with it."""

    @classmethod
    def find_spec(cls, name: str, path: Any = None, target: Any = None) -> Any:
        return None if name == "torch" else super().find_spec(name, path, target)


def _loader(package: str) -> Any:
    """The package's load_model; its generator is imported too, as it costs as much."""
    sys.meta_path[:] = [
        _WithoutTorch if finder is importlib.machinery.PathFinder else finder
        for finder in sys.meta_path
    ]
    name = package.replace("-", "_")
    importlib.import_module(f"{name}.generate")
    return importlib.import_module(f"{name}.utils").load_model


def _config(folder: Path) -> dict[str, Any]:
    try:
        return json.loads((folder / "config.json").read_text())
    except FileNotFoundError:
        raise Refusal("failed", f"{folder} has no config.json") from None
    except ValueError as error:
        raise Refusal("failed", f"{folder / 'config.json'} is not JSON: {error}") from None
