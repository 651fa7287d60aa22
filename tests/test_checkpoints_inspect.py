"""Inspection: families, recipes and bytes a token, from configs and headers alone."""

import copy
import json
import math
import re
import subprocess
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tiny
from moescope.checkpoints import accounting, families
from moescope.checkpoints.headers import WIDTHS, Tensor, write_tensors
from moescope.checkpoints.inspect import describe, run
from moescope.errors import UserError
from moescope.files import read_json, write_json
from moescope.task import Task
from tiny import AFFINE, LIMIT_S, MODELS, MXFP4, NVFP4

EXPERTS = "*.switch_mlp.*"


@pytest.fixture(scope="module")
def layouts(tmp_path_factory):
    """(package, family) -> (config, tensors) in affine 4-bit, by the runtimes' own model code."""
    with tiny.worker(tmp_path_factory.mktemp("log") / "worker.log") as process:

        def lay(package, family, quantization, **arguments):
            reply = process.ask(
                "layout",
                LIMIT_S,
                package=package,
                config=arguments.pop("config", None) or tiny.config(family),
                quantization=quantization,
                **arguments,
            )
            return reply["config"], {
                entry["name"]: tensor(entry["dtype"], entry["shape"]) for entry in reply["tensors"]
            }

        lay.all = {model: lay(*model, {"default": AFFINE}) for model in MODELS}
        yield lay


def tensor(dtype, shape):
    return Tensor(dtype, tuple(shape), math.prod(shape) * WIDTHS[dtype], "model.safetensors")


def moe(layers=2, experts=8, top_k=2, hidden=64, width=64, rule=AFFINE, dtype="BF16", tied=False):
    """A qwen3_moe checkpoint as MLX writes it: (config, tensors). rule: None or affine."""
    tensors = {}

    def matrix(path, *shape):
        if rule is None:
            tensors[f"{path}.weight"] = tensor(dtype, shape)
            return
        packed, groups = shape[-1] * rule["bits"] // 32, shape[-1] // rule["group_size"]
        tensors[f"{path}.weight"] = tensor("U32", (*shape[:-1], packed))
        for part in ("scales", "biases"):
            tensors[f"{path}.{part}"] = tensor(dtype, (*shape[:-1], groups))

    matrix("model.embed_tokens", 256, hidden)
    if not tied:
        matrix("lm_head", 256, hidden)
    tensors["model.norm.weight"] = tensor(dtype, (hidden,))
    for layer in range(layers):
        at = f"model.layers.{layer}"
        for part in "qkvo":
            matrix(f"{at}.self_attn.{part}_proj", hidden, hidden)
        tensors[f"{at}.input_layernorm.weight"] = tensor(dtype, (hidden,))
        matrix(f"{at}.mlp.gate", experts, hidden)
        for part in ("gate_proj", "up_proj"):
            matrix(f"{at}.mlp.switch_mlp.{part}", experts, width, hidden)
        matrix(f"{at}.mlp.switch_mlp.down_proj", experts, hidden, width)
    config = {
        "model_type": "qwen3_moe",
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "vocab_size": 256,
        "num_experts": experts,
        "num_experts_per_tok": top_k,
        "moe_intermediate_size": width,
        "num_attention_heads": 4,
    }
    if rule:
        config["quantization"] = dict(rule)
    return config, tensors


# Families


@pytest.mark.parametrize("model", MODELS, ids=lambda model: "-".join(model))
def test_every_family_of_the_runtimes(layouts, model):
    config, tensors = layouts.all[model]
    found = describe(config, tensors)
    inner = config.get("text_config", config)
    assert found["family"] in (model[1], "gemma4")
    assert found["package_families"][model[0]] == found["family"]
    experts = {"qwen3": [], "lfm2_moe": [1, 2], "dots1": [1], "nemotron_h": [1, 3]}
    moe_layers = experts.get(model[1], list(range(inner.get("num_hidden_layers", 0))))
    assert found["moe_layer_ids"] == moe_layers
    assert found["dense"] == (not moe_layers)
    if moe_layers:
        assert (found["experts"], found["top_k"]) == (tiny.EXPERTS, tiny.TOP_K)
        assert found["expert_width"] == tiny.WIDTH
        assert found["config_path"]["experts"].rpartition(".")[0] in (
            ("text_config",) if "text_config" in config else ("",)
        )
    assert (found["hidden"], found["vocab"]) == (tiny.HIDDEN, tiny.VOCAB)
    label = "affine 4-bit g64" if moe_layers else "dense affine 4-bit g64"
    assert found["quantization"]["recipe"] == label
    sizes = sum(tensor.bytes for tensor in tensors.values())
    assert found["bytes"]["total"] == sizes
    assert sum(group["bytes"] for group in found["quantization"]["groups"]) == sizes
    assert sum(group["tensors"] for group in found["quantization"]["groups"]) == len(tensors)


@pytest.mark.parametrize("model", MODELS, ids=lambda model: "-".join(model))
def test_shared_widths_are_those_of_the_headers(layouts, model):
    config, tensors = layouts.all[model]
    found = describe(config, tensors)
    widths = {
        tensor.shape[0]
        for name, tensor in tensors.items()
        if re.search(r"\.shared_experts?\.up_proj\.weight$", name)
    }
    if found["family"] == "gemma4":  # the dense MLP beside the experts is every token's
        widths = {128}
    assert widths == ({found["shared_width"]} if found["shared_experts"] else set())


def test_what_no_pattern_names_is_known(layouts):
    """Hyper-connections, a short convolution and a scalar: nothing else is "other"."""
    other = set()
    for config, tensors in layouts.all.values():
        architecture = families.resolve(config)
        other |= {
            re.sub(r"\.\d+\.", ".N.", name).removeprefix("language_model.")
            for name in tensors
            if accounting.group_of(name, architecture) == "other"
        }
    hyper = {
        f"model.layers.N.{at}_hc.{p}" for at in ("attn", "ffn") for p in ("base", "fn", "scale")
    }
    hyper |= {f"model.hc_head.{parameter}" for parameter in ("base", "fn", "scale")}
    assert other == hyper | {"model.layers.N.layer_scalar", "model.layers.N.mlp_sconv.conv.weight"}


def test_packages_have_model_code_for_the_families_said():
    """families.json against the packages' own folders."""
    code = (
        "import importlib.util as u, json, pathlib;"
        "print(json.dumps({n: sorted(p.stem for p in "
        "(pathlib.Path(u.find_spec(n).origin).parent / 'models').iterdir()) "
        "for n in ('mlx_lm', 'mlx_vlm')}))"
    )
    found = json.loads(
        subprocess.run(
            [tiny.arm_python(), "-c", code], capture_output=True, check=True, timeout=30
        ).stdout
    )
    table = json.loads(families.TABLE.read_text())["families"]
    assert len([entry for entry in table.values() if not entry.get("dense")]) >= 13
    for family, entry in table.items():
        for package in families.PACKAGES:
            types = entry.get("model_types", [family])
            has = any(kind in found[package.replace("-", "_")] for kind in types)
            assert has == (package in entry["packages"]), (family, package)


# Keys at two levels

KEYS = ["num_experts", "num_experts_per_tok", "hidden_size", "vocab_size", "num_hidden_layers"]


@given(st.sets(st.sampled_from(KEYS)), st.sets(st.sampled_from(KEYS)))
def test_a_key_is_found_at_either_level(nested, both):
    config, _ = moe()
    inner = {key: config[key] for key in nested | both}
    outer = {key: value for key, value in config.items() if key not in nested or key in both}
    found = families.resolve({**outer, "text_config": inner})
    assert found == families.resolve(config)
    at = found.paths["top_k"]
    assert at.startswith("text_config.") == ("num_experts_per_tok" in nested | both)


@pytest.mark.parametrize("key", KEYS)
def test_two_levels_that_differ_are_an_error(key):
    config, _ = moe()
    config["text_config"] = {key: config[key] + 1}
    with pytest.raises(UserError, match=rf"{key} is \d+ and text_config\.{key} is \d+"):
        families.resolve(config)


def test_null_counts_as_absent():
    config, _ = moe()
    config["text_config"] = dict.fromkeys(KEYS)
    assert families.resolve(config).paths["experts"] == "num_experts"


def test_an_unknown_family_shows_what_looks_like_counts():
    config = {
        "model_type": "qwen9_moe",
        "text_config": {"n_experts": 64, "moe_topk": 4, "hidden_size": 512},
        "quantization": {"model.experts": {"bits": 4}},
    }
    with pytest.raises(UserError) as error:
        families.resolve(config)
    message = str(error.value)
    assert "'qwen9_moe'" in message
    assert "text_config.n_experts = 64, text_config.moe_topk = 4" in message
    assert "qwen3_moe" in message
    assert "hidden_size" not in message


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_experts": None, "n_routed": 3}, "num_experts is missing"),
        ({"num_experts_per_tok": "2"}, "num_experts_per_tok is '2'"),
        ({"num_experts_per_tok": 9}, "is 9, of 8 experts"),
        ({"hidden_size": True}, "hidden_size is True"),
    ],
)
def test_keys_that_are_missing_or_odd(change, message):
    config, _ = moe()
    with pytest.raises(UserError, match=message):
        families.resolve({**config, **change})


def test_sparse_layers_by_step_and_exception():
    config, _ = moe(layers=6)
    found = families.resolve({**config, "decoder_sparse_step": 2, "mlp_only_layers": [3]})
    assert found.moe_layers == (1, 5)


# Config against headers


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_experts": 16}, "headers have 8, num_experts is 16"),
        ({"num_hidden_layers": 3}, "headers have 2, num_hidden_layers is 3"),
        ({"mlp_only_layers": [0]}, "experts in layers 0,1, the config says 1"),
        ({"moe_intermediate_size": 32}, "headers have 64, moe_intermediate_size is 32"),
        ({"vocab_size": 300}, "headers have 256, vocab_size is 300"),
        ({"hidden_size": 128}, "headers have 64, hidden_size is 128"),
        ({"quantization": {"bits": 8, "group_size": 64}}, "config says affine 8-bit g64, the head"),
        ({"quantization": {"bits": 8, "group_size": 32}}, "headers have 32, hidden_size is 64"),
        ({"quantization": MXFP4}, "config says mxfp4, the headers hold affine 2-bit g128 or 4-bit"),
        ({"quantization": {**AFFINE, "lm_head": False}}, "lm_head: the headers hold quantised"),
        ({"quantization": None}, "config says that there are none"),
        ({"quantization": {**MXFP4, "group_size": 64}}, "mxfp4 is 4-bit in groups of 32"),
        ({"quantization": {**AFFINE, "mode": "int4"}}, "mode is 'int4'"),
        ({"quantization_config": {**AFFINE, "bits": 8}}, "quantization_config differ"),
    ],
)
def test_a_config_that_disagrees_is_an_error(change, message):
    config, tensors = moe(hidden=64)
    with pytest.raises(UserError, match=message):
        describe({**config, **change}, tensors)


def test_an_entry_for_a_module_without_scales_is_an_error():
    config, tensors = moe(rule=None)
    config["quantization"] = {**AFFINE, "model.layers.0.self_attn.q_proj": dict(AFFINE)}
    with pytest.raises(UserError, match=r"q_proj: .*headers hold BF16 without scales"):
        describe(config, tensors)


# Recipes


@pytest.mark.parametrize(
    ("quantization", "label"),
    [
        ({"default": NVFP4}, "nvfp4"),
        (
            {"default": None, "overrides": [{"match": EXPERTS, **AFFINE}]},
            "experts-only affine 4-bit g64",
        ),
        (
            {"default": AFFINE, "overrides": [{"match": EXPERTS, **MXFP4}]},
            "mxfp4 experts under affine 4-bit g64",
        ),
        (
            {"default": AFFINE, "overrides": [{"match": "*lm_head", "keep": True}]},
            "affine 4-bit g64, head float32",
        ),
        (
            {"default": AFFINE, "overrides": [{"match": "*down_proj", **AFFINE, "bits": 6}]},
            "affine 4-bit g64, experts also affine 6-bit g64, shared experts also affine 6-bit g64",
        ),
        (None, "float32"),
    ],
)  # fmt: skip
def test_labels(layouts, quantization, label):
    config, tensors = layouts("mlx-vlm", "inkling", quantization)
    assert describe(config, tensors)["quantization"]["recipe"] == label


def test_a_router_of_its_own_rule_is_named(layouts):
    rules = {"default": AFFINE, "overrides": [{"match": "*.gate", **AFFINE, "bits": 8}]}
    config, tensors = layouts("mlx-lm", "qwen3_moe", rules)
    label = describe(config, tensors)["quantization"]["recipe"]
    assert label == "affine 4-bit g64, router affine 8-bit g64"


def test_published_mxfp4_blocks():
    """gpt_oss as its makers publish it: uint8 blocks beside their scales."""
    config = {
        "model_type": "gpt_oss", "num_hidden_layers": 1, "hidden_size": 64, "vocab_size": 256,
        "num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 64,
        "num_attention_heads": 4, "quantization_config": {"quant_method": "mxfp4"},
    }  # fmt: skip
    at = "model.layers.0.mlp.experts"
    tensors = {
        "model.embed_tokens.weight": tensor("BF16", (256, 64)),
        "lm_head.weight": tensor("BF16", (256, 64)),
        f"{at}.gate_up_proj_blocks": tensor("U8", (8, 128, 2, 16)),
        f"{at}.gate_up_proj_scales": tensor("U8", (8, 128, 2)),
        f"{at}.gate_up_proj_bias": tensor("BF16", (8, 128)),
    }
    found = describe(config, tensors)
    assert found["quantization"]["recipe"] == "experts-only mxfp4"
    assert found["bytes"]["per_token"]["expert_gather"] == (8 * 128 * 34 + 8 * 128 * 2) // 4


def test_published_deepseek_v4():
    """Four-bit experts one by one and float8 for the rest, each beside "scale"."""
    config = {
        **tiny.config("deepseek_v4"), "num_hidden_layers": 1, "vocab_size": 32,
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    }  # fmt: skip
    at = "layers.0"
    tensors = {
        "embed.weight": tensor("BF16", (32, 128)),
        "head.weight": tensor("BF16", (32, 128)),
        "norm.weight": tensor("BF16", (128,)),
        "hc_head_fn": tensor("F32", (4, 512)),
        f"{at}.attn_norm.weight": tensor("BF16", (128,)),
        f"{at}.attn.wq_a.weight": tensor("F8_E4M3", (256, 128)),
        f"{at}.attn.wq_a.scale": tensor("F8_E8M0", (2, 1)),
        f"{at}.ffn.gate.weight": tensor("BF16", (8, 128)),
        f"{at}.ffn.gate.bias": tensor("F32", (8,)),
        f"{at}.ffn.gate.tid2eid": tensor("I64", (32, 2)),
        f"{at}.ffn.shared_experts.w2.weight": tensor("F8_E4M3", (128, 64)),
        f"{at}.ffn.shared_experts.w2.scale": tensor("F8_E8M0", (1, 1)),
        "mtp.0.attn.wq_a.weight": tensor("BF16", (256, 128)),
    }
    for expert in range(8):
        for name, rows, columns in (("w1", 64, 128), ("w2", 128, 64), ("w3", 64, 128)):
            base = f"{at}.ffn.experts.{expert}.{name}"
            tensors[f"{base}.weight"] = tensor("I8", (rows, columns // 2))
            tensors[f"{base}.scale"] = tensor("F8_E8M0", (rows, columns // 32))
    found = describe(config, tensors)
    assert found["quantization"]["recipe"].startswith("mxfp4 experts under fp8 8-bit g128")
    read = found["bytes"]["per_token"]
    assert read["expert_gather"] == 2 * (3 * 64 * 64 + 64 * 4 * 2 + 128 * 2)
    assert read["head"] == 32 * 128 * 2
    assert read["router"] == 8 * 128 * 2 + 8 * 4 + 2 * 8


def test_published_inkling():
    """Stacked nvfp4 experts with a scale of scales, towers, names of the makers'."""
    config = tiny.config("inkling")
    config["text_config"] |= {"num_hidden_layers": 1, "layer_types": ["hybrid"]}
    at = "model.llm.layers.0"
    tensors = {
        "model.llm.embed.weight": tensor("BF16", (256, 128)),
        "model.llm.unembed.weight": tensor("BF16", (256, 128)),
        "model.llm.norm.weight": tensor("BF16", (128,)),
        "model.llm.embed_norm.weight": tensor("BF16", (128,)),
        "model.visual.layers.linear_0.weight": tensor("BF16", (64, 64)),
        "model.audio.encoder.weight": tensor("BF16", (64, 64)),
        f"{at}.attn.wq_du.weight": tensor("BF16", (128, 128)),
        f"{at}.mlp.gate.weight": tensor("BF16", (10, 128)),
        f"{at}.mlp.shared_experts.shared_w2_weight": tensor("BF16", (2, 128, 64)),
        f"{at}.mlp.experts.w13_weight": tensor("U8", (8, 128, 64)),
        f"{at}.mlp.experts.w13_weight.scale": tensor("F8_E4M3", (8, 128, 8)),
        f"{at}.mlp.experts.w13_weight.scale2": tensor("F32", (8,)),
        f"{at}.mlp.experts.w13_weight.input_amax": tensor("F32", (1,)),
        f"{at}.mlp.experts.w2_weight": tensor("U8", (8, 128, 32)),
        f"{at}.mlp.experts.w2_weight.scale": tensor("F8_E4M3", (8, 128, 4)),
        f"{at}.mlp.experts.w2_weight.scale2": tensor("F32", (8,)),
    }
    found = describe(config, tensors)
    assert found["quantization"]["recipe"] == "experts-only nvfp4"
    total = sum(t.bytes for t in tensors.values())
    experts = 8 * (128 * 64 + 128 * 8 + 4 + 128 * 32 + 128 * 4 + 4)
    skipped = 2 * 64 * 64 * 2 + (256 - 1) * 128 * 2 + experts * 3 // 4
    assert abs(found["bytes"]["per_token"]["total"] - (total - skipped)) <= 4


def test_bytes_of_no_known_format_are_refused():
    config, tensors = moe()
    name = next(name for name in tensors if name.endswith("q_proj.weight"))
    module = name.rpartition(".")[0]
    for parameter in ("scales", "biases"):
        tensors.pop(f"{module}.{parameter}", None)
    tensors[name] = tensor("F8_E4M3", (128, 128))
    with pytest.raises(UserError, match="without scales"):
        describe(config, tensors)
    tensors[f"{module}.weight_scale_inv"] = tensor("F32", (3, 3))
    with pytest.raises(UserError, match="no format is known"):
        describe(config, tensors)
    tensors[f"{module}.weight_scale_inv"] = tensor("F32", (1, 1))
    groups = describe(config, tensors)["quantization"]["groups"]
    assert {"fp8"} <= {row["mode"] for row in groups if row["group"] == "attention"}


def test_what_may_be_compared(layouts):
    """The same model by either package, yes; another recipe, type or size, no."""
    same = [describe(*layouts.all[package, "qwen3_moe"]) for package in ("mlx-lm", "mlx-vlm")]
    assert same[0]["compare"] == same[1]["compare"]
    marks = {
        describe(*moe(**change))["compare"]
        for change in ({}, {"rule": None}, {"dtype": "F32"}, {"top_k": 3}, {"layers": 3},
                       {"rule": {**AFFINE, "bits": 8}}, {"tied": True})
    }  # fmt: skip
    assert len(marks) == 7


# Bytes a token


SIZES = {
    "layers": st.integers(1, 4),
    "experts": st.integers(2, 24),
    "hidden": st.sampled_from([64, 128, 192]),
    "width": st.sampled_from([64, 256]),
    "rule": st.sampled_from([None, AFFINE, {**AFFINE, "bits": 8}]),
    "tied": st.booleans(),
}


@settings(max_examples=60)
@given(st.fixed_dictionaries(SIZES), st.data())
def test_accounting(sizes, data):
    """All bytes have a group; experts by top_k / experts, tables by one row, the head once."""
    top_k = data.draw(st.integers(1, sizes["experts"]))
    config, tensors = moe(**sizes, top_k=top_k)
    found = describe(config, tensors)
    total = sum(tensor.bytes for tensor in tensors.values())
    groups = found["quantization"]["groups"]
    assert sum(group["bytes"] for group in groups) == found["bytes"]["total"] == total

    per_token = dict(found["bytes"]["per_token"])
    assert per_token.pop("total") == sum(per_token.values())
    experts = sum(group["bytes"] for group in groups if group["group"] == "experts")
    assert per_token["expert_gather"] * sizes["experts"] == experts * top_k
    embedding = sum(group["bytes"] for group in groups if group["group"] == "embedding")
    assert per_token["other"] * 256 == embedding
    assert per_token["head"] == embedding  # a head of its own has the same shape
    for term, group in (("router", "router"), ("attention", "attention"), ("norm", "norm")):
        expected = sum(entry["bytes"] for entry in groups if entry["group"] == group)
        assert per_token[term] == expected > 0

    every = describe({**config, "num_experts_per_tok": sizes["experts"]}, tensors)
    left = total - (0 if sizes["tied"] else embedding)
    assert every["bytes"]["per_token"]["total"] == left + embedding // 256


def test_top_k_scales_the_experts_alone():
    read = [describe(*moe(experts=8, top_k=k))["bytes"]["per_token"] for k in range(1, 9)]
    steps = {b["expert_gather"] - a["expert_gather"] for a, b in pairwise(read)}
    assert len(steps) == 1
    assert len({entry["total"] - entry["expert_gather"] for entry in read}) == 1


def test_towers_and_prediction_heads_are_not_read():
    config, tensors = moe()
    plain = describe(config, tensors)
    more = {
        "vision_tower.blocks.0.attn.q_proj.weight": tensor("BF16", (64, 64)),
        "audio_tower.layers.0.mlp.weight": tensor("BF16", (64, 64)),
        "mtp.layers.0.mlp.switch_mlp.up_proj.weight": tensor("BF16", (4, 64, 64)),
        "model.layers.2.self_attn.q_proj.weight": tensor("BF16", (64, 64)),  # after the last layer
    }
    found = describe(config, tensors | more)
    assert found["bytes"]["per_token"] == plain["bytes"]["per_token"]
    assert found["bytes"]["total"] == plain["bytes"]["total"] + sum(t.bytes for t in more.values())
    assert found["compare"] == plain["compare"]


def test_a_table_of_experts_by_token_is_read_by_row(layouts):
    config, tensors = layouts.all["mlx-vlm", "deepseek_v4"]
    found = describe(config, tensors)
    table = next(tensor for name, tensor in tensors.items() if name.endswith("tid2eid"))
    rest = sum(
        tensor.bytes
        for name, tensor in tensors.items()
        if ".gate." in name and not name.endswith("tid2eid")
    )
    assert table.shape[0] == tiny.VOCAB
    assert found["bytes"]["per_token"]["router"] == rest + table.bytes // tiny.VOCAB


def test_experts_one_by_one():
    """As published, before MLX stacks them: the same bytes a token."""
    config, stacked = moe(rule=None)
    single = {}
    for name, found in stacked.items():
        if ".switch_mlp." in name:
            for index in range(8):
                one = name.replace("switch_mlp", f"experts.{index}")
                single[one] = tensor("BF16", found.shape[1:])
        else:
            single[name] = found
    assert describe(config, single)["bytes"] == describe(config, stacked)["bytes"]
    missing = {name: found for name, found in single.items() if ".experts.7." not in name}
    with pytest.raises(UserError, match="headers have 7, num_experts is 8"):
        describe(config, missing)


def test_memory_says_what_it_includes():
    memory = describe(*moe())["memory"]
    position = 2 * 2 * 4 * 16 * 2  # keys and values, layers, heads, width, bfloat16
    assert memory["cache_per_position"] == position
    assert memory["predicted"] == memory["weights"] + 4096 * position + (512 << 20)
    assert "4096 positions" in memory["includes"]


def test_the_stage_writes_what_it_finds(tmp_path):
    config, tensors = moe()
    fetched, out = tmp_path / "fetch", tmp_path / "out"
    fetched.mkdir()
    out.mkdir()
    write_json(fetched / "config.json", config)
    write_tensors(fetched / "tensors.csv", tensors)
    upstream = {"fetch/c": fetched}
    run(Task("inspect", "c", "0" * 12, {}, upstream, out, tmp_path, tmp_path))
    written = read_json(out / "architecture.json", "moescope/architecture/1")
    assert written == json.loads(json.dumps(describe(config, tensors)))
    again = copy.deepcopy(dict(reversed(tensors.items())))
    assert describe(config, again) == describe(config, tensors)
