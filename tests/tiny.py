"""Tiny models of every family, and a worker to load them: for the worker's tests only.

A checkpoint is written by the arm's own interpreter: the worker's layout says which tensors there
are, MLX fills and quantises them. Nothing here imports MLX.
"""

import copy
import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from moescope.runtimes.client import Worker

ROOT = Path(__file__).resolve().parents[1]
HIDDEN, VOCAB, EXPERTS, TOP_K, WIDTH = 128, 256, 8, 2, 64
ATTENTION = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
BASE = {
    "hidden_size": HIDDEN,
    "vocab_size": VOCAB,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
    "num_hidden_layers": 2,
}
EXPERT = {"num_experts_per_tok": TOP_K, "norm_topk_prob": True}
LINEAR = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 2,
}
ROPE = {
    "type": "default",
    "mrope_section": [2, 1, 1],
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.25,
}

CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3": {**BASE, **ATTENTION, "intermediate_size": 128, "tie_word_embeddings": False},
    "qwen3_moe": {
        **BASE,
        **ATTENTION,
        **EXPERT,
        "intermediate_size": 128,
        "num_experts": EXPERTS,
        "moe_intermediate_size": WIDTH,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "tie_word_embeddings": False,
    },
    "olmoe": {
        **BASE,
        **EXPERT,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "intermediate_size": WIDTH,
        "num_experts": EXPERTS,
        "tie_word_embeddings": False,
    },
    "mixtral": {
        **BASE,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": WIDTH,
        "num_local_experts": EXPERTS,
        "num_experts_per_tok": TOP_K,
    },
    "phimoe": {
        **BASE,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": WIDTH,
        "num_local_experts": EXPERTS,
        "num_experts_per_tok": TOP_K,
        "original_max_position_embeddings": 256,
        "rope_scaling": {
            "type": "longrope",
            "short_factor": [1.0] * 16,
            "long_factor": [1.0] * 16,
            "short_mscale": 1.0,
            "long_mscale": 1.0,
        },
    },
    "lfm2_moe": {
        **EXPERT,
        "hidden_size": HIDDEN,
        "vocab_size": VOCAB,
        "max_position_embeddings": 512,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 3,
        "intermediate_size": 128,
        "moe_intermediate_size": WIDTH,
        "num_experts": EXPERTS,
        "use_expert_bias": True,
        "num_dense_layers": 1,
        "norm_eps": 1e-5,
        "conv_bias": False,
        "conv_L_cache": 3,
        "rope_theta": 10000.0,
        "layer_types": ["conv", "full_attention", "conv"],
    },
    "dots1": {
        **BASE,
        **ATTENTION,
        **EXPERT,
        "intermediate_size": 128,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": WIDTH,
        "n_routed_experts": EXPERTS,
        "n_shared_experts": 1,
        "routed_scaling_factor": 1.0,
        "scoring_func": "noaux_tc",
    },
    "gpt_oss": {
        "hidden_size": HIDDEN,
        "vocab_size": VOCAB,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000,
        "num_hidden_layers": 2,
        "num_local_experts": EXPERTS,
        "num_experts_per_tok": TOP_K,
        "intermediate_size": WIDTH,
        **ATTENTION,
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "qwen3_next": {
        **BASE,
        **ATTENTION,
        **EXPERT,
        **LINEAR,
        "intermediate_size": 128,
        "num_experts": EXPERTS,
        "decoder_sparse_step": 1,
        "shared_expert_intermediate_size": WIDTH,
        "mlp_only_layers": [],
        "moe_intermediate_size": WIDTH,
        "partial_rotary_factor": 0.25,
    },
    "qwen3_5_moe": {
        "text_config": {
            "model_type": "qwen3_5_moe_text",
            "hidden_size": HIDDEN,
            "vocab_size": VOCAB,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 512,
            **ATTENTION,
            **LINEAR,
            "num_hidden_layers": 2,
            "intermediate_size": 128,
            "num_experts": EXPERTS,
            "num_experts_per_tok": TOP_K,
            "shared_expert_intermediate_size": WIDTH,
            "moe_intermediate_size": WIDTH,
            "rope_parameters": ROPE,
        },
        "vision_config": {
            "model_type": "qwen3_5_moe",
            "depth": 1,
            "hidden_size": 64,
            "intermediate_size": 64,
            "out_hidden_size": HIDDEN,
            "num_heads": 2,
            "deepstack_visual_indexes": [],
        },
    },
    "nemotron_h": {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": 128,
        "max_position_embeddings": 512,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "attention_bias": False,
        "mamba_num_heads": 4,
        "mamba_head_dim": 32,
        "mamba_proj_bias": False,
        "ssm_state_size": 32,
        "conv_kernel": 4,
        "n_groups": 2,
        "mlp_bias": False,
        "layer_norm_epsilon": 1e-5,
        "use_bias": False,
        "use_conv_bias": True,
        "hybrid_override_pattern": ["M", "E", "*", "E"],
        "moe_intermediate_size": WIDTH,
        "moe_shared_expert_intermediate_size": WIDTH,
        "n_group": 1,
        "topk_group": 1,
        "n_routed_experts": EXPERTS,
        "n_shared_experts": 1,
        **EXPERT,
        "routed_scaling_factor": 2.5,
    },
    "gemma4_text": {
        "hidden_size": HIDDEN,
        "vocab_size": VOCAB,
        "vocab_size_per_layer_input": VOCAB,
        "rms_norm_eps": 1e-6,
        "num_hidden_layers": 2,
        "intermediate_size": 128,
        **ATTENTION,
        "global_head_dim": 32,
        "num_global_key_value_heads": 1,
        "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 0,
        "sliding_window": 16,
        "sliding_window_pattern": 2,
        "attention_k_eq_v": True,
        "use_double_wide_mlp": False,
        "enable_moe_block": True,
        "num_experts": EXPERTS,
        "top_k_experts": TOP_K,
        "moe_intermediate_size": WIDTH,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "deepseek_v4": {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": 128,
        "moe_intermediate_size": WIDTH,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "n_shared_experts": 1,
        "n_routed_experts": EXPERTS,
        "num_experts_per_tok": TOP_K,
        "routed_scaling_factor": 1.5,
        "q_lora_rank": 64,
        "qk_rope_head_dim": 16,
        "head_dim": 64,
        "compress_ratios": [0, 4, 128, 0],
        "num_hash_layers": 1,
        "sliding_window": 32,
        "o_groups": 2,
        "o_lora_rank": 64,
        "index_n_heads": 4,
        "index_head_dim": 32,
        "index_topk": 16,
        "num_nextn_predict_layers": 0,
        "hc_mult": 4,
        "max_position_embeddings": 512,
    },
    "inkling": {
        "vocab_size": VOCAB,
        "eos_token_id": [1],
        "text_config": {
            "model_type": "inkling",
            "hidden_size": HIDDEN,
            "num_hidden_layers": 2,
            "vocab_size": VOCAB,
            "rms_norm_eps": 1e-6,
            **ATTENTION,
            "swa_num_attention_heads": 4,
            "swa_num_key_value_heads": 2,
            "swa_head_dim": 32,
            "sliding_window_size": 16,
            "d_rel": 8,
            "rel_extent": 32,
            "sconv_kernel_size": 4,
            "dense_mlp_idx": 0,
            "intermediate_size": WIDTH,
            "dense_intermediate_size": 128,
            "n_routed_experts": EXPERTS,
            "num_experts_per_tok": TOP_K,
            "n_shared_experts": 2,
            "route_scale": 8.0,
            "layer_types": ["hybrid_sliding", "hybrid"],
            "max_position_embeddings": 512,
        },
        "vision_config": {"n_layers": 1},
        "audio_config": {},
    },
}
VLM_ONLY = ("deepseek_v4", "inkling")
MODELS = [("mlx-lm", family) for family in CONFIGS if family not in VLM_ONLY]
MODELS += [("mlx-vlm", family) for family in CONFIGS]
AFFINE = {"mode": "affine", "bits": 4, "group_size": 64}
MXFP4 = {"mode": "mxfp4", "bits": 4, "group_size": 32}
NVFP4 = {"mode": "nvfp4", "bits": 4, "group_size": 16}
LIMIT_S = 300.0
PROMPT = [3, 5, 7, 11, 13, 17, 19, 23, 29, 31]


def config(family: str) -> dict[str, Any]:
    """The family's config.json."""
    return {"model_type": family, **copy.deepcopy(CONFIGS[family])}


def arm_python() -> Path:
    """The interpreter that has MLX; it is never left out silently."""
    name = os.environ.get("MOESCOPE_ARM_PYTHON")
    if not name:
        raise RuntimeError(
            "MOESCOPE_ARM_PYTHON is not set: it names the interpreter of an environment with MLX,"
            " mlx-lm and mlx-vlm (tests/conftest.py makes one if it may)"
        )
    return Path(name)


@contextmanager
def worker(log: Path) -> Iterator[Worker]:
    """A real worker process under the arm's interpreter."""
    with Worker(arm_python(), dict(os.environ), ROOT, log) as process:
        yield process


def write(folder: Path, layout: dict[str, Any], seed: int = 0) -> Path:
    """Write a layout (the worker's reply) as a checkpoint of random weights."""
    request = {"folder": str(folder), "seed": seed, "layout": layout}
    subprocess.run(
        [arm_python(), ROOT / "tests" / "tiny_write.py"],
        input=json.dumps(request).encode(),
        check=True,
        timeout=LIMIT_S,
    )
    return folder


def checkpoint(
    process: Worker,
    folder: Path,
    package: str,
    family: str,
    quantization: dict[str, Any] | None = None,
    **arguments: Any,
) -> Path:
    """A checkpoint of a family in affine 4-bit, or as ``quantization`` says."""
    layout = process.ask(
        "layout",
        LIMIT_S,
        package=package,
        config=config(family),
        quantization=quantization or {"default": AFFINE},
        **arguments,
    )
    return write(folder, layout)


def probe(checkpoints: list[tuple[str, Path]]) -> list[dict[str, Any]]:
    """The findings of tiny_probe.py for (package, checkpoint) pairs."""
    requests = [{"package": package, "path": str(path)} for package, path in checkpoints]
    result = subprocess.run(
        [arm_python(), ROOT / "tests" / "tiny_probe.py"],
        input=json.dumps(requests).encode(),
        env={**os.environ, "PYTHONPATH": str(ROOT / "workflow")},
        stdout=subprocess.PIPE,
        check=True,
        timeout=900,
    )
    return json.loads(result.stdout)
