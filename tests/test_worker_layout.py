"""Layouts of checkpoints: what they list loads strictly through the runtimes' own loaders."""

import json
from collections import Counter

import psutil
import pytest

import tiny
from moescope.runtimes.client import WorkerError
from tiny import AFFINE, LIMIT_S, MODELS, MXFP4, NVFP4, PROMPT


@pytest.fixture(scope="module")
def worker(tmp_path_factory):
    with tiny.worker(tmp_path_factory.mktemp("log") / "worker.log") as process:
        yield process


def layout(worker, package, family, quantization=None, **arguments):
    config = arguments.pop("config", None) or tiny.config(family)
    return worker.ask(
        "layout", LIMIT_S, package=package, config=config, quantization=quantization, **arguments
    )


def recipes(result):
    """Module path -> its rule, of quantised modules."""
    return {tensor["module"]: tensor["quant"] for tensor in result["tensors"] if tensor["quant"]}


def loads(worker, package, path):
    worker.ask("load", LIMIT_S, package=package, path=str(path))
    return worker.ask("decode", LIMIT_S, prompt=PROMPT, tokens=4)


@pytest.mark.parametrize(("package", "family"), MODELS)
def test_every_family_loads_from_its_layout(worker, tmp_path, package, family):
    """Names, shapes and types are right: the loader is strict, and it decodes."""
    path = tiny.checkpoint(worker, tmp_path / "c", package, family)
    loaded = worker.ask("load", LIMIT_S, package=package, path=str(path))
    assert loaded["model_type"] == family
    settings = tiny.config(family)
    settings = settings.get("text_config", settings)
    layers = settings.get("num_hidden_layers", len(settings.get("hybrid_override_pattern", "")))
    assert loaded["layers"] == layers
    experts = {"qwen3": 0, "lfm2_moe": 2, "dots1": 1, "nemotron_h": 2}.get(family, layers)
    assert len(loaded["moe_layers"]) == experts
    files = json.loads((path / "model.safetensors.index.json").read_text())["weight_map"]
    assert not any("vision" in name or "audio" in name for name in files)
    weights = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    assert 0 < weights - loaded["parameters_bytes"] < 40_000  # the header
    assert loaded["peak_memory"] >= loaded["parameters_bytes"]
    assert worker.ask("decode", LIMIT_S, prompt=PROMPT, tokens=3)["finite"]


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3"])
def test_mlx_vlm_reads_what_is_laid_out_for_mlx_lm(worker, tmp_path, family):
    rules = {"default": AFFINE, "overrides": [{"match": "*.gate", **AFFINE, "bits": 8}]}
    rules = rules if family == "qwen3_moe" else {"default": AFFINE}
    path = tiny.checkpoint(worker, tmp_path / "c", "mlx-lm", family, rules)
    tokens = {package: loads(worker, package, path)["tokens"] for package in ("mlx-lm", "mlx-vlm")}
    assert tokens["mlx-lm"] == tokens["mlx-vlm"]


def test_fp4_experts_under_an_affine_default(worker, tmp_path):
    rules = {"default": AFFINE, "overrides": [{"match": "*.switch_mlp.*", **MXFP4}]}
    result = layout(worker, "mlx-vlm", "deepseek_v4", rules)
    found = recipes(result)
    modes = Counter((rule["mode"], "switch_mlp" in path) for path, rule in found.items())
    assert modes.pop(("mxfp4", True)) == 4 * 3
    assert set(modes) == {("affine", False)}
    tensors = {tensor["name"]: tensor for tensor in result["tensors"]}
    experts = "language_model.model.layers.1.ffn.switch_mlp.up_proj"
    assert tensors[f"{experts}.weight"]["shape"] == [8, 64, 128 * 4 // 32]
    assert tensors[f"{experts}.weight"]["dtype"] == "U32"
    assert tensors[f"{experts}.scales"]["dtype"] == "U8"
    assert tensors[f"{experts}.scales"]["shape"] == [8, 64, 128 // 32]
    assert f"{experts}.biases" not in tensors
    written = result["config"]["quantization"]
    assert {key: written[key] for key in AFFINE} == AFFINE
    assert written[experts] == MXFP4
    assert loads(worker, "mlx-vlm", tiny.write(tmp_path / "c", result))["finite"]


def test_only_experts_quantised(worker, tmp_path):
    rules = {"default": None, "overrides": [{"match": "*.switch_mlp.*", **AFFINE}]}
    result = layout(worker, "mlx-vlm", "inkling", rules)
    assert len(recipes(result)) == 2 * 3
    assert all("switch_mlp" in path for path in recipes(result))
    assert loads(worker, "mlx-vlm", tiny.write(tmp_path / "c", result))["finite"]


def test_nvfp4(worker, tmp_path):
    result = layout(worker, "mlx-vlm", "inkling", {"default": NVFP4})
    assert {rule["mode"] for rule in recipes(result).values()} == {"nvfp4"}
    assert len(recipes(result)) > 6
    assert loads(worker, "mlx-vlm", tiny.write(tmp_path / "c", result))["finite"]


def test_without_quantization(worker, tmp_path):
    result = layout(worker, "mlx-lm", "qwen3_moe")
    assert recipes(result) == {}
    assert result["config"] == tiny.config("qwen3_moe")
    assert loads(worker, "mlx-lm", tiny.write(tmp_path / "c", result))["finite"]


def test_the_last_override_wins_and_keep_keeps(worker):
    rules = {
        "default": AFFINE,
        "overrides": [
            {"match": "*.mlp.*", **MXFP4},
            {"match": "*.gate", "keep": True},
            {"match": "*.layers.1.*.up_proj", **NVFP4},
        ],
    }
    found = recipes(layout(worker, "mlx-lm", "qwen3_moe", rules))
    assert "model.layers.0.mlp.gate" not in found
    assert found["model.layers.0.mlp.switch_mlp.up_proj"] == MXFP4
    assert found["model.layers.1.mlp.switch_mlp.up_proj"] == NVFP4
    assert found["model.layers.1.self_attn.q_proj"] == AFFINE


def test_what_cannot_be_quantised_stays(worker):
    config = tiny.config("qwen3_moe") | {"moe_intermediate_size": 96}  # not a multiple of 64
    found = recipes(layout(worker, "mlx-lm", "", {"default": AFFINE}, config=config))
    assert "model.layers.0.mlp.switch_mlp.up_proj" in found
    assert "model.layers.0.mlp.switch_mlp.down_proj" not in found
    gates = recipes(layout(worker, "mlx-lm", "dots1", {"default": AFFINE}))
    assert "model.layers.1.mlp.gate" not in gates  # has no to_quantized


def test_an_override_that_matches_nothing(worker):
    rules = {"default": AFFINE, "overrides": [{"match": "*.experts.*", **MXFP4}]}
    with pytest.raises(WorkerError, match=r"\*\.experts\.\*") as error:
        layout(worker, "mlx-lm", "qwen3_moe", rules)
    assert error.value.kind == "not_applicable"


def test_dtype_is_of_all_but_what_the_family_keeps(worker, tmp_path):
    result = layout(worker, "mlx-lm", "lfm2_moe", {"default": AFFINE}, dtype="bfloat16")
    types = {tensor["name"]: tensor["dtype"] for tensor in result["tensors"]}
    layer = "model.layers.1"
    assert types[f"{layer}.operator_norm.weight"] == "BF16"
    assert types[f"{layer}.feed_forward.switch_mlp.up_proj.scales"] == "BF16"
    assert types[f"{layer}.feed_forward.switch_mlp.up_proj.weight"] == "U32"
    assert types[f"{layer}.feed_forward.expert_bias"] == "F32"
    assert loads(worker, "mlx-lm", tiny.write(tmp_path / "c", result))["finite"]
    table = layout(worker, "mlx-vlm", "deepseek_v4", None, dtype="bfloat16")["tensors"]
    types = {tensor["name"].partition("layers.0.")[2]: tensor["dtype"] for tensor in table}
    assert types["ffn.gate.tid2eid"] == "I32"
    assert types["attn.attn_sink"] == "F32"
    assert types["attn_norm.weight"] == "BF16"


def test_a_large_model_takes_no_memory(worker):
    """Qwen3-30B-A3B's shape: 61 GB in bfloat16, and its layout is a matter of seconds."""
    config = tiny.config("qwen3_moe") | {
        "hidden_size": 2048,
        "num_hidden_layers": 48,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "vocab_size": 151936,
        "head_dim": 128,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
    }
    result = layout(worker, "mlx-lm", "", {"default": AFFINE}, config=config, dtype="bfloat16")
    sizes = {"BF16": 2, "U32": 4}
    total = 0
    for tensor in result["tensors"]:
        size = sizes[tensor["dtype"]]
        for length in tensor["shape"]:
            size *= length
        total += size
    assert 17e9 < total < 17.3e9  # 30.5e9 weights at 4.5 bits
    assert psutil.Process(worker.pid).memory_info().rss < 1.5e9


@pytest.mark.parametrize(
    ("package", "family", "changes", "kind"),
    [
        ("mlx-lm", "deepseek_v4", {}, "unsupported"),
        ("mlx-vlm", "qwen3", {"model_type": "no_such_family"}, "unsupported"),
        ("mlx-lm", "qwen3", {"hidden_size": None}, "failed"),
    ],
)
def test_what_it_refuses(worker, package, family, changes, kind):
    with pytest.raises(WorkerError) as error:
        layout(worker, package, family, config=tiny.config(family) | changes)
    assert error.value.kind == kind
