"""What ``fuse`` leaves to the model's own path, and that it loses nothing of what it takes."""

import copy
import functools
import importlib

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from kernels.patching import CONFIGS, PACKAGES, in_a_thread, model_of
from moescope.kernels import families, fuse, unfuse, weights
from moescope.kernels.classes import class_of, known
from moescope.kernels.common import static_inputs
from moescope.kernels.sites import sites

INLINE = ["qwen3_moe", "olmoe", "mixtral", "phimoe", "lfm2_moe", "gpt_oss", "qwen3_next"]
BY_MODULE = ["mlx-lm dots1", "mlx-vlm nemotron_h", "mlx-vlm deepseek_v4"]
SCALES = ["weight_scale_2", "weight_global_scale"]
CASES = {
    "check_float32_router": INLINE,
    "check_float32_gate_routes_by_itself": BY_MODULE,
    "check_factors_of_nvfp4": [f"{name} {shape}" for name in SCALES for shape in ("one", "each")],
    "check_subclasses_are_left": [
        f"{package} {family}"
        for family in CONFIGS
        if family not in ("qwen3", "gemma4_text")
        for package in PACKAGES.get(family, ["mlx-lm", "mlx-vlm"])
    ],
}
LAYERS = ("gate_proj", "up_proj", "down_proj", "fc1", "fc2")


def reasons(model):
    """Of a model of which nothing is fused."""
    report = fuse(model, backend="reference")
    assert not report.fused, str(report)
    return {reason for _, reason in report.left}


def blocks(model):
    """The model's blocks of experts, by class."""
    return [m for _, m in model.named_modules() if class_of(m) in families.BLOCKS]


def arguments(block):
    """What a block's call takes after x."""
    return (mx.array([[5]], mx.int32),) if type(block).__name__ == "DeepseekV4MoE" else ()


def token(model, dtype):
    """One token's activations; tests' models are 128 wide."""
    return mx.random.normal((1, 1, 128)).astype(dtype)


def differs(model, dtype=mx.float32):
    """Fuses the model; how far its first block then is from its own path, and the report."""
    block = blocks(model)[0]
    x = token(model, dtype)
    own = block(x, *arguments(block))
    mx.eval(own)
    report = fuse(model, backend="reference")
    assert report.fused and not report.left, str(report)
    got = block(x, *arguments(block))
    assert got.dtype == own.dtype and got.shape == own.shape
    a, b = got.astype(mx.float32), own.astype(mx.float32)
    return (mx.sqrt(mx.mean((a - b) ** 2) / mx.mean(b**2))).item(), report


def switch_of(block):
    """A block's switch layer."""
    return block.switch_mlp if "switch_mlp" in block else block.experts


def subclass(module, **fields):
    """Gives this object a subclass of its class, as a user would define one."""
    kind = type(module)
    fields = {"__module__": "users_own", **fields}
    object.__setattr__(module, "__class__", type("Own" + kind.__name__, (kind,), fields))


# --- types ---------------------------------------------------------------------------------------


def check_float32_router(family):
    """Logits in float32 would be rounded on the way to the kernels: other experts."""
    model = model_of("mlx-lm", family, mx.bfloat16)
    for block in blocks(model):
        name = "gate" if "gate" in block else "router"
        bias = "bias" in block[name]
        block[name] = nn.Linear(128, 8, bias=bias)  # as it is initialised: float32
    assert reasons(model) == {"float32 router logits with bfloat16 activations"}


def check_float32_gate_routes_by_itself(text):
    """Where the router is a module, it makes its choice and the kernels take that."""
    package, family = text.split()
    model = model_of(package, family, mx.bfloat16)
    for block in blocks(model):
        block.gate.weight = block.gate.weight.astype(mx.float32)
    error, report = differs(model, mx.bfloat16)
    assert {b.spec.router.select for b in report.fused} == {"given"}
    assert error < 0.05, error


def check_float32_router_of_gemma4():
    """By its scale, and by its factors of experts, which make the weights float32."""
    for name, want in (
        ("scale", "float32 router logits with bfloat16 activations"),
        ("per_expert_scale", "its own path gives float32 for bfloat16 activations"),
    ):
        model = model_of("mlx-vlm", "gemma4_text", mx.bfloat16)
        for _, module in model.named_modules():
            if type(module).__name__ == "Router":
                module[name] = module[name].astype(mx.float32)
        assert reasons(model) == {want}


def check_float32_latents():
    """nemotron_h's narrower space in float32; its way out may be, as the model's own sum is."""
    model = model_of("mlx-lm", "nemotron_h", mx.bfloat16, moe_latent_size=64)
    for block in blocks(model):
        block.fc1_latent_proj = nn.Linear(128, 64, bias=False)
    assert reasons(model) == {"float32 experts' input with bfloat16 activations"}
    model = model_of("mlx-lm", "nemotron_h", mx.bfloat16, moe_latent_size=64)
    for block in blocks(model):
        block.fc2_latent_proj = nn.Linear(64, 128, bias=False)
    error, _ = differs(model, mx.bfloat16)
    assert error < 0.05, error


def check_float32_shared_gate():
    """qwen3_next's logit of the shared expert."""
    model = model_of("mlx-lm", "qwen3_next", mx.bfloat16)
    for block in blocks(model):
        block.shared_expert_gate = nn.Linear(128, 1, bias=False)
    assert reasons(model) == {"float32 shared expert's gate with bfloat16 activations"}


def check_float32_shared_expert():
    """It stays apart, and the sum is float32 as the model's is."""
    model = model_of("mlx-lm", "dots1", mx.bfloat16)
    for block in blocks(model):
        shared = block.shared_experts
        shared.gate_proj = nn.Linear(128, 64, bias=False)
        shared.up_proj = nn.Linear(128, 64, bias=False)
        shared.down_proj = nn.Linear(64, 128, bias=False)
    error, report = differs(model, mx.bfloat16)
    assert report.fused[0].left == ("shared expert: unquantised float32 weights",)
    assert error < 0.05, error


def check_float32_biases():
    """Of a projection and of its groups: the model's own path goes on in float32."""
    model = model_of("mlx-lm", "gpt_oss", mx.bfloat16)
    for block in blocks(model):
        block.experts.up_proj.bias = block.experts.up_proj.bias.astype(mx.float32)
    assert reasons(model) == {"float32 bias with bfloat16 activations"}
    model = model_of("mlx-lm", "qwen3_moe", mx.bfloat16)
    for block in blocks(model):
        layer = block.switch_mlp.down_proj
        layer.biases = layer.biases.astype(mx.float32)
    assert reasons(model) == {"float32 biases with bfloat16 activations"}


def check_routers_sizes():
    """A router with logits for more experts than there are."""
    model = model_of("mlx-lm", "mixtral", mx.bfloat16)
    for block in blocks(model):
        block.gate = nn.Linear(128, 9, bias=False)
        block.gate.set_dtype(mx.bfloat16)
    assert reasons(model) == {"9 router logits where 8 are read"}


def check_blocks_that_take_no_token():
    """A router for another hidden size, whether or not the block's own path is asked."""
    for package, family, name in (("mlx-vlm", "inkling", "gate_weight"), ("mlx-lm", "mixtral", "")):
        model = model_of(package, family)
        for block in blocks(model):
            if name:
                block[name] = block[name][:, :64]
            else:
                block.gate = nn.Linear(64, 8, bias=False)
        assert all(text.startswith("it takes no token: [") for text in reasons(model))


def check_outputs_of_another_size():
    """Experts that write fewer numbers than they read, in a block that has no way back."""
    model = model_of("mlx-lm", "mixtral")
    for block in blocks(model):
        down = block.switch_mlp.down_proj
        for name in ("weight", "scales", "biases"):
            down[name] = down[name][:, :64]
    assert reasons(model) == {"its own path gives 64 numbers where 128 are written"}


# --- global scales -------------------------------------------------------------------------------


def scaled(layer, name, scale):
    """A switch layer's or a linear's weights as nvfp4 with mlx-vlm's global scale."""
    nvfp4 = importlib.import_module("mlx_vlm.quantization.nvfp4")
    full = mx.dequantize(layer.weight, layer.scales, layer.biases, 32, 4)
    layer.weight, layer.scales = mx.quantize(full.astype(mx.float32), 16, 4, mode="nvfp4")
    layer.biases, layer.group_size, layer.mode = None, 16, "nvfp4"
    many = layer.weight.ndim == 3
    kind = nvfp4.ScaledQuantizedSwitchLinear if many else nvfp4.ScaledQuantizedLinear
    return kind(layer, scale, name)


def with_scales(model, name, scale_of):
    """The experts' layers with a global scale each, as ``scale_of(experts, rows)`` makes it."""
    for block in blocks(model):
        switch = switch_of(block)
        for layer in LAYERS:
            if layer in switch:
                shape = switch[layer].weight.shape
                switch[layer] = scaled(switch[layer], name, scale_of(shape[0], shape[1]))
    return model


def check_factors_of_nvfp4(text):
    """mlx-vlm's two names: one multiplies, the other divides; a number, or one for each expert."""
    name, shape = text.split()

    def scale(experts, rows):
        each = mx.random.uniform(0.5, 2.0, (experts, 1))
        return mx.array(1.75) if shape == "one" else mx.broadcast_to(each, (experts, rows))

    for family in ("qwen3_moe", "nemotron_h"):
        error, report = differs(with_scales(model_of("mlx-vlm", family), name, scale))
        assert report.fused[0].spec.scaled and error < 2e-5, (family, error)


def check_factors_in_another_thread():
    """They are made of the scales in ``fuse``, for the reference and for the kernels' inputs."""
    model = model_of("mlx-vlm", "qwen3_moe")
    mx.eval(with_scales(model, "weight_scale_2", lambda *_: mx.array(2.0)).parameters())
    block, x = blocks(model)[0], token(model, mx.float32)
    own = block(x)
    mx.eval(own)

    def inputs():
        site = sites(model, mx.float32)[0][0]
        return static_inputs(site.spec, site.tensors, False)

    first, second = in_a_thread(inputs)
    mx.eval(first["up_global"], second["down_global"])
    assert in_a_thread(lambda: fuse(model, backend="reference")).fused
    assert mx.allclose(block(x), own, atol=1e-4).item()


def check_factors_that_do_not_fit():
    """A factor for each row, for three of eight experts; activations that are quantised too."""
    rows = with_scales(
        model_of("mlx-vlm", "qwen3_moe"),
        "weight_scale_2",
        lambda experts, rows: mx.random.uniform(0.5, 2.0, (experts, rows)),
    )
    assert reasons(rows) == {"a global scale for each row"}
    three = with_scales(
        model_of("mlx-vlm", "qwen3_moe"), "weight_scale_2", lambda *_: mx.array([1.0, 2.0, 3.0])
    )
    assert all("[reshape]" in text for text in reasons(three))
    both = with_scales(model_of("mlx-vlm", "qwen3_moe"), "weight_scale_2", lambda *_: mx.array(2.0))
    for block in blocks(both):
        block.switch_mlp.up_proj._quantize_activations = True
    assert reasons(both) == {"activations quantised as weights are"}


def check_factor_of_a_shared_expert():
    """The kernels have no factor for it: it stays apart."""
    model = model_of("mlx-vlm", "dots1")
    for block in blocks(model):
        for name in ("gate_proj", "up_proj", "down_proj"):
            block.shared_experts[name] = scaled(
                block.shared_experts[name], "weight_scale_2", mx.array(3.0)
            )
    error, report = differs(model)
    assert report.fused[0].spec.shared is None
    assert report.fused[0].left == ("shared expert: a shared expert with a global scale",)
    assert error < 2e-5, error


def check_a_scale_that_its_layer_ignores():
    """mlx-vlm's plain quantised layer has no global scale, whatever has been put on it."""
    model = model_of("mlx-vlm", "qwen3_moe")
    for block in blocks(model):
        block.switch_mlp.up_proj.global_scale = mx.full((8,), 5.0)
    error, report = differs(model)
    assert not report.fused[0].spec.scaled and error < 2e-5, error


# --- classes -------------------------------------------------------------------------------------


def check_subclasses_are_left(text):
    """A block with a call of its own, its router with one, and its activation with one."""
    package, family = text.split()
    model = model_of(package, family)
    for block in blocks(model):
        own = type(block).__call__
        subclass(block, __call__=lambda self, *args, own=own: own(self, *args) * 2)
    assert len(reasons(model)) == 1 and "class users_own.Own" in reasons(model).pop()
    model = model_of(package, family)
    for block in blocks(model):
        switch = switch_of(block)
        switch.activation = copy.copy(switch.activation)  # one object serves all by default
        subclass(switch.activation)
    assert "activation of class users_own.Own" in reasons(model).pop()
    model = model_of(package, family)
    for block in blocks(model):
        subclass(switch_of(block))
    assert "experts of class users_own.Own" in reasons(model).pop()
    model = model_of(package, family)
    gates = [b.gate for b in blocks(model) if "gate" in b]
    for gate in gates:
        subclass(gate)
    if gates and "Linear" not in class_of(gates[0]):  # a linear is called, whatever its class
        assert "router of class users_own.Own" in reasons(model).pop()


def check_subclasses_of_gemma4s_parts():
    """Its layer, its router, its experts: which of them has another class is named."""
    for name in ("DecoderLayer", "Router", "Experts"):
        for package in ("mlx-lm", "mlx-vlm"):
            model = model_of(package, "gemma4_text")
            for _, module in model.named_modules():
                if type(module).__name__ == name:
                    subclass(module)
            found = reasons(model)
            assert len(found) == 1 and f"users_own.Own{name}" in found.pop()


def check_calls_put_over_a_class():
    """A call that something else has set on the package's own class, by that one's name too."""
    model = model_of("mlx-lm", "qwen3_moe")
    kind = type(blocks(model)[0])
    own = kind.__call__
    for name in (lambda call: call, functools.wraps(own)):
        kind.__call__ = name(lambda self, x: own(self, x))
        try:
            found = reasons(model)
        finally:
            kind.__call__ = own
        assert found == {
            "a block of class mlx_lm.models.qwen3_moe.Qwen3MoeSparseMoeBlock with another call"
        }
    assert fuse(model, backend="reference").fused


def check_every_class_is_the_packages():
    """The tables name classes that are there, and that are called as their package has it."""
    tables = [
        families.BLOCKS,
        families.SWITCHES,
        families.ACTIVATIONS,
        families.SHARED,
        families.SIGMOID_GATES,
        families.GEMMA_ROUTERS,
        families.GEMMA_EXPERTS,
        {families.DEEPSEEK_GATE, families.INKLING_SWITCH},
        weights.LAYERS,
    ]
    for table in tables:
        for name in table:
            home, _, kind = name.rpartition(".")
            kind = getattr(importlib.import_module(home), kind)
            assert known(kind.__new__(kind), table, "this") == name


def check_qwen3_5_of_mlx_vlm():
    """A class of its own, and so is its shared expert's."""
    error, report = differs(model_of("mlx-vlm", "qwen3_5_moe"))
    assert report.fused[0].spec.shared.weight == "gate" and error < 2e-5, error


def check_gemma4_with_vision():
    """The text layers of mlx-vlm's gemma4 are of other classes than gemma4_text's."""
    text = importlib.import_module("mlx_vlm.models.gemma4_text.language")
    layer = importlib.import_module("mlx_vlm.models.gemma4.language")
    model = model_of("mlx-vlm", "gemma4_text")
    for _, module in list(model.named_modules()):
        if type(module) in (text.DecoderLayer, text.Router, text.Experts, text.GeGLU):
            kind = getattr(layer, type(module).__name__)
            object.__setattr__(module, "__class__", kind)
    report = fuse(model, backend="reference")
    assert len(report.fused) == 2 and not report.left, str(report)


def check_a_namesake_is_no_block():
    """Modules of other models that are only called like a block are not reported."""
    sam = importlib.import_module("mlx_vlm.models.sam3.sam_components")
    model = nn.Module()
    model.block = sam.MLPBlock.__new__(sam.MLPBlock)
    nn.Module.__init__(model.block)
    report = fuse(model, backend="reference")
    assert not report.fused and not report.left


def _lora(package):
    home = "mlx_lm.tuner.lora" if package == "mlx-lm" else "mlx_vlm.trainer.peft.lora_layers"
    return importlib.import_module(home)


def _adapted(layer, kind):
    adapted = kind.from_base(layer, r=4, scale=2.0)
    adapted.lora_b = mx.random.normal(adapted.lora_b.shape) * 0.1
    return adapted


def check_adapters_on_experts():
    """LoRA: its layer is not the layer that it wraps."""
    for package in ("mlx-lm", "mlx-vlm"):
        lora = _lora(package)
        for layer in ("gate_proj", "up_proj", "down_proj"):
            model = model_of(package, "qwen3_moe")
            for block in blocks(model):
                base = block.switch_mlp[layer]
                block.switch_mlp[layer] = _adapted(base, lora.LoRASwitchLinear)
            assert reasons(model) == {f"a layer of class {lora.__name__}.LoRASwitchLinear"}


def check_adapters_on_routers_and_shared_experts():
    """A router that is called keeps its adapter; a shared expert with one stays apart."""
    lora = _lora("mlx-lm")
    model = model_of("mlx-lm", "qwen3_next")
    for block in blocks(model):
        block.gate = _adapted(block.gate, lora.LoRALinear)
        block.shared_expert_gate = _adapted(block.shared_expert_gate, lora.LoRALinear)
        block.shared_expert.up_proj = _adapted(block.shared_expert.up_proj, lora.LoRALinear)
    error, report = differs(model)
    assert report.fused[0].left == ("shared expert: a layer of class mlx_lm.tuner.lora.LoRALinear",)
    assert error < 2e-5, error


def check_adapters_of_dora():
    """On a shared expert's layer, which is one linear."""
    dora = importlib.import_module("mlx_lm.tuner.dora")
    model = model_of("mlx-lm", "dots1")
    for block in blocks(model):
        layer = block.shared_experts.down_proj
        block.shared_experts.down_proj = _adapted(layer, dora.DoRALinear)
    error, report = differs(model)
    assert report.fused[0].left == ("shared expert: a layer of class mlx_lm.tuner.dora.DoRALinear",)
    assert error < 2e-5, error


def check_a_shared_expert_of_another_class():
    """Its arithmetic is its own; it is called beside the kernels."""
    model = model_of("mlx-lm", "dots1")
    for block in blocks(model):
        shared = block.shared_experts
        own = type(shared).__call__
        subclass(shared, __call__=lambda self, x, own=own: own(self, x) * 3)
    error, report = differs(model)
    assert "a shared expert of class users_own.OwnDots1MLP" in report.fused[0].left[0]
    assert error < 2e-5, error


def check_quantised_inputs():
    """MLX's layer that quantises its input: no plain quantised layer."""
    model = model_of("mlx-lm", "dots1")
    for block in blocks(model):
        plain = nn.Linear(128, 64, bias=False)
        plain.weight = mx.random.normal((64, 128)) * 0.1
        block.shared_experts.up_proj = plain.to_quantized(16, 4, "nvfp4", quantize_input=True)
    left = fuse(model, backend="reference").fused[0].left
    assert left == ("shared expert: a layer of class mlx.nn.layers.quantized.QQLinear",)


# --- parts that do not go together ---------------------------------------------------------------


def check_parts_of_experts():
    """An activation for experts without a gate; biases on some; scales of another format."""
    for family, change, want in (
        (
            "qwen3_moe",
            lambda s: setattr(s, "activation", nn.ReLU2()),
            "activation relu2 with a gate",
        ),
        ("gpt_oss", lambda s: s.up_proj.pop("bias"), "biases on some of the projections only"),
        (
            "qwen3_moe",
            lambda s: setattr(s.up_proj, "global_scale", mx.ones((8,))),
            "a global scale with mode affine",
        ),
    ):
        model = model_of("mlx-lm", family)
        for block in blocks(model):
            change(switch_of(block))
        assert reasons(model) == {want}


def check_experts_on_several_devices():
    """The block itself sums over them."""
    for package, family in (("mlx-lm", "qwen3_moe"), ("mlx-vlm", "deepseek_v4")):
        model = model_of(package, family)
        for block in blocks(model):
            block.sharding_group = object()
        assert reasons(model) == {"experts spread over several devices"}


def check_inklings_shared_experts_and_biases():
    """Its router weighs shared experts; its scales come after a bias."""
    model = model_of("mlx-vlm", "inkling")
    for block in blocks(model):
        block.n_shared = 0
    assert reasons(model) == {"no shared experts among the router's"}
    model = model_of("mlx-vlm", "inkling")
    for block in blocks(model):
        for name in ("gate_proj", "up_proj", "down_proj"):
            layer = block.switch_mlp[name]
            layer.bias = mx.zeros(layer.weight.shape[:2])
    assert reasons(model) == {"biases before a factor for each expert"}


def check_shared_experts_that_stay_apart():
    """By limit, activation, biases and width; what is called beside the kernels is right."""
    for package, family, dtype, config, limit, want in (
        ("mlx-vlm", "deepseek_v4", mx.float32, {}, 0.25, "a shared expert with limit 0.25"),
        ("mlx-vlm", "deepseek_v4", mx.float32, {}, 0.0, "a shared expert with swiglu"),
        ("mlx-lm", "dots1", mx.float32, {"mlp_bias": True}, None, "a shared expert with biases"),
        (
            "mlx-lm",
            "qwen3_next",
            mx.bfloat16,
            {"shared_expert_intermediate_size": 48},
            None,
            "rows of 48 weights are no multiple of 32",
        ),
    ):
        model = model_of(package, family, dtype, **config)
        for block in blocks(model):
            if limit is not None:
                block.shared_experts.swiglu_limit = limit
        error, report = differs(model, dtype)
        assert {b.left for b in report.fused} == {(f"shared expert: {want}",)}
        assert error < (2e-5 if dtype == mx.float32 else 0.05), error


# --- what changes the arithmetic -----------------------------------------------------------------


def check_softmax_by_token():
    """deepseek_v4's table with softmax scores: its module routes, and hands on its choice."""
    model = model_of("mlx-vlm", "deepseek_v4", scoring_func="softmax")
    error, report = differs(model)
    assert report.fused[0].spec.router.select == "given"
    assert report.fused[-1].spec.router.select == "top_k"
    assert error < 2e-5, error


def check_odd_groups():
    """dots1 drops groups wherever ``n_group`` is not ``topk_group``, one group too."""
    model = model_of("mlx-lm", "dots1", n_group=2, topk_group=1)
    error, report = differs(model)
    assert report.fused[0].spec.router.select == "given" and error < 2e-5
    model = model_of("mlx-lm", "dots1")
    for block in blocks(model):
        block.gate.topk_group = 0
    for block in fuse(model, backend="reference").fused:
        assert block.spec.router.select == "given"


def check_a_shared_expert_that_is_switched_off():
    """The attribute that the block asks says whether there is one."""
    model = model_of("mlx-lm", "dots1")
    for block in blocks(model):
        block.n_shared_experts = None
    error, report = differs(model)
    assert report.fused[0].spec.shared is None and error < 2e-5, error
    model = model_of("mlx-lm", "nemotron_h")
    for block in blocks(model):
        block.config.n_shared_experts = None
    error, report = differs(model)
    assert report.fused[0].spec.shared is None and error < 2e-5, error


def check_a_layer_in_two_places():
    """A block that two paths lead to is fused once."""
    model = model_of("mlx-lm", "qwen3_moe")
    model.layers[1].mlp = model.layers[0].mlp
    error, report = differs(model)
    assert len(report.fused) == 1 and error < 2e-5
    kind = type(model.layers[0].mlp)
    assert unfuse(model) == 1 and type(model.layers[0].mlp) is kind.__mro__[1]


def check_nothing_is_changed_by_looking():
    """What ``fuse`` looks at while it decides stays as it was, the very arrays."""
    for package, family in (("mlx-vlm", "inkling"), ("mlx-vlm", "deepseek_v4")):
        model = model_of(package, family)
        before = {path: sorted(m) for path, m in model.named_modules()}
        arrays = tree_flatten(model.parameters())
        fuse(model, backend="reference")
        unfuse(model)
        assert {path: sorted(m) for path, m in model.named_modules()} == before
        after = tree_flatten(model.parameters())
        assert all(x[0] == y[0] and x[1] is y[1] for x, y in zip(arrays, after, strict=True))
