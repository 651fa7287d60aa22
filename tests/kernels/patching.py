"""fuse and unfuse on tiny models of every family; the reference stands in for the kernels."""

import contextlib
import copy
import gc
import importlib
import json
import os
import pickle
import threading
import time
import weakref

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map_with_path

from moescope.errors import UserError
from moescope.kernels import fuse, probe, samples, unfuse
from moescope.kernels import patch as patching
from moescope.kernels.families import BLOCKS

CONFIGS = json.loads(os.environ["MOESCOPE_TINY"]) if "MOESCOPE_TINY" in os.environ else {}
PACKAGES = {"deepseek_v4": ["mlx-vlm"], "inkling": ["mlx-vlm"], "qwen3_5_moe": ["mlx-lm"]}
FAMILIES = [f for f in CONFIGS if f != "qwen3"]
BOTH = [f"{p} {f}" for f in FAMILIES for p in PACKAGES.get(f, ["mlx-lm", "mlx-vlm"])]
CASES = {
    "check_family": BOTH,
    "check_another_thread": BOTH,
    "check_a_dropped_model_is_freed_at_once": [
        "mlx-lm qwen3_moe", "mlx-lm nemotron_h", "mlx-vlm qwen3_next", "mlx-vlm gemma4_text",
        "mlx-vlm deepseek_v4", "mlx-vlm inkling",
    ],
}  # fmt: skip
PROMPT = [3, 5, 7, 11, 13, 17, 19, 23, 29, 31]


def model_of(package, family, dtype=mx.float32, bits=4, **changes):
    """A tiny random model, its expert layers quantised."""
    config = {"model_type": family, **CONFIGS[family], **changes}
    mx.random.seed(11)
    if package == "mlx-lm":
        from mlx_lm.utils import _get_classes

        kind, arguments = _get_classes(config)
        model = kind(arguments.from_dict(config))
    else:
        module = importlib.import_module(f"mlx_vlm.models.{family}")
        model = module.Model(module.ModelConfig.from_dict(json.loads(json.dumps(config))))

    def value(path, old):
        if not mx.issubdtype(old.dtype, mx.floating):
            return (
                mx.random.randint(0, 8, old.shape).astype(old.dtype) if "tid2eid" in path else old
            )
        new = mx.random.normal(old.shape) * 0.1 + (1.0 if path.endswith("norm.weight") else 0.0)
        return new.astype(dtype)

    model.update(tree_map_with_path(value, model.parameters()))
    nn.quantize(model, 32, bits, class_predicate=lambda path, m: hasattr(m, "to_quantized")
                and m.weight.shape[-1] % 32 == 0 and "embed" not in path)  # fmt: skip
    model.eval()
    mx.eval(model.parameters())
    return model


def decode(package, model, count=4):
    """Greedy tokens by the package's own generator."""
    if package == "mlx-lm":
        from mlx_lm.generate import generate_step

        steps = generate_step(mx.array(PROMPT), model, max_tokens=count)
    else:
        from mlx_vlm.generate import generate_step

        steps = generate_step(
            mx.array(PROMPT)[None], model, None, None, max_tokens=count, temperature=0.0
        )
    return [int(token) for token, _ in steps][:count]


def _ways(router):
    """Which parts of the kernels' text choose, and which weigh; sizes apart."""
    names = ("select", "score", "bias", "high", "rounded")
    yield "choose", *(getattr(router, name) for name in names)
    names = ("weight", "weigh_choice", "rounded", "expert_factor")
    yield "weigh", *(getattr(router, name) for name in names), router.shared > 0


def check_family(text):
    """In float32: all blocks fused, each call the same to float32's own error; taken back."""
    package, family = text.split()
    model = model_of(package, family)
    before = {path: type(module) for path, module in model.named_modules()}
    names = [name for name, _ in tree_flatten(model.parameters())]
    plain = decode(package, model)
    probe.tallies.clear()
    os.environ["MOESCOPE_FUSED_PARITY"] = "1"
    try:
        report = fuse(model, backend="reference")
    finally:
        del os.environ["MOESCOPE_FUSED_PARITY"]
    assert report.fused and not report.left, str(report)
    tried = {way for router in samples.routers().values() for way in _ways(router)}
    for block in report.fused:
        untried = set(_ways(block.spec.router)) - tried
        assert block.spec.router.select == "given" or not untried, untried
    assert [name for name, _ in tree_flatten(model.parameters())] == names
    for path, module in model.named_modules():
        assert isinstance(module, before[path])
    assert decode(package, model) == plain
    seen = [t for t in probe.tallies.values() if t.calls]
    probe.tallies.clear()
    assert len(seen) == len(report.fused), "a fused block was never called with one token"
    # gemma4's router works its softmax in the activations' type; all else differs by order of sums
    assert max(t.worst for t in seen) < 2e-5, [(t.path, t.worst) for t in seen]
    assert not any(t.unequal or t.not_finite for t in seen)
    assert unfuse(model) >= len(report.fused)
    assert {path: type(module) for path, module in model.named_modules()} == before
    assert decode(package, model) == plain
    return {
        "blocks": len(report.fused),
        "worst": max(t.worst for t in seen),
        "left": report.fused[0].left,
    }


def check_prefill_and_batches_keep_their_path():
    """More than one token, and another type, go the block's own way."""
    model = model_of("mlx-lm", "qwen3_moe", mx.bfloat16)
    block = model.layers[0].mlp
    many = mx.random.normal((1, 3, 128)).astype(mx.bfloat16)
    two = mx.random.normal((2, 1, 128)).astype(mx.bfloat16)
    wants = [block(many), block(two)]
    fuse(model, backend="reference")
    calls = []
    kind = type(block)
    own = kind.__mro__[1].__call__
    kind.__mro__[1].__call__ = lambda self, x: calls.append((x.shape, x.dtype)) or own(self, x)
    try:
        gots = [block(many), block(two)]
        block(many[:, :1])
        block(many[:, :1].astype(mx.float32))
    finally:
        kind.__mro__[1].__call__ = own
    assert calls == [(many.shape, many.dtype), (two.shape, two.dtype), ((1, 1, 128), mx.float32)]
    assert all(mx.array_equal(a, b).item() for a, b in zip(gots, wants, strict=True))
    unfuse(model)
    assert type(block) is kind.__mro__[1]


def check_reasons():
    """What is left says why, by block."""
    three = fuse(model_of("mlx-lm", "qwen3_moe", bits=3), backend="reference")
    assert {reason for _, reason in three.left} == {"affine with 3 bits"}
    assert [path for path, _ in three.left] == ["model.layers.0.mlp", "model.layers.1.mlp"]
    here = fuse(model_of("mlx-lm", "qwen3_moe", mx.bfloat16))
    assert {reason for _, reason in here.left} == {"no CUDA or Metal device"}
    os.environ["MOESCOPE_FUSED"] = "off"
    try:
        off = fuse(model_of("mlx-lm", "olmoe"), backend="reference")
    finally:
        del os.environ["MOESCOPE_FUSED"]
    assert {reason for _, reason in off.left} == {"MOESCOPE_FUSED=off"}
    dense = fuse(model_of("mlx-lm", "qwen3"), backend="reference")
    assert not dense.fused and not dense.left
    text = str(three)
    assert "0 blocks fused, 2 left" in text and "affine with 3 bits" in text


def check_unknown_blocks_are_named():
    """Experts in a block of another kind are reported, not passed over."""
    model = model_of("mlx-lm", "qwen3_moe")
    name = "mlx_lm.models.qwen3_moe.Qwen3MoeSparseMoeBlock"
    kept = BLOCKS.pop(name)
    try:
        report = fuse(model, backend="reference")
    finally:
        BLOCKS[name] = kept
    assert [path for path, _ in report.left] == ["model.layers.0.mlp", "model.layers.1.mlp"]
    assert report.left[0][1] == f"no recogniser for class {name}"


def check_a_block_alone():
    """What is handed over may be the block, its experts, or a list: no module holds them."""
    block = model_of("mlx-lm", "qwen3_moe", mx.bfloat16).layers[0].mlp
    assert fuse(block).left == [("", "activations are neither bfloat16 nor float16")]
    model, reason = nn.Module(), "no recogniser for class mlx_lm.models.switch_layers.SwitchGLU"
    model.many = [block.switch_mlp]
    assert fuse(block.switch_mlp).left == [("", reason)] and fuse(model).left == [("many", reason)]


def check_latent_and_grouped():
    """nemotron_h with a narrower space for its experts, and with groups."""
    latent = model_of("mlx-lm", "nemotron_h", moe_latent_size=64)
    plain = decode("mlx-lm", latent)
    report = fuse(latent, backend="reference")
    assert report.fused and "latent projections" in report.fused[0].left[0]
    assert decode("mlx-lm", latent) == plain
    grouped = model_of("mlx-lm", "nemotron_h", n_group=4, topk_group=2)
    plain = decode("mlx-lm", grouped)
    report = fuse(grouped, backend="reference")
    assert report.fused[0].spec.router.select == "given"
    assert decode("mlx-lm", grouped) == plain


def check_mixed_formats():
    """Gate and up with 4 bits, down with 6, a shared expert beside them."""
    model = model_of("mlx-lm", "dots1", mx.bfloat16)
    block = model.layers[-1].mlp
    down = block.experts.down_proj
    full = mx.dequantize(down.weight, down.scales, down.biases, group_size=32, bits=4)
    down.weight, down.scales, down.biases = mx.quantize(full, 32, 6)
    down.bits = 6
    report = fuse(model, backend="reference")
    assert report.fused[0].spec.down.label == "affine6g32"
    assert report.fused[0].spec.shared is not None
    x = mx.random.normal((1, 1, 128)).astype(mx.bfloat16)
    fused = block(x)
    unfuse(model)
    plain = block(x).astype(mx.float32)
    error = mx.sqrt(mx.mean((fused.astype(mx.float32) - plain) ** 2) / mx.mean(plain**2)).item()
    assert error < 0.05, error


def check_fuse_twice_and_over_other_changes():
    """Fusing again fuses anew; a change over the fused call has to go first."""
    model = model_of("mlx-lm", "olmoe")
    assert len(fuse(model, backend="reference").fused) == 2
    assert len(fuse(model, backend="reference").fused) == 2
    block = model.layers[0].mlp
    under = type(block)
    object.__setattr__(block, "__class__", type("Over", (under,), {}))
    try:
        unfuse(model)
    except UserError as error:
        assert "model.layers.0.mlp" in str(error)
    else:
        raise AssertionError("not noticed")
    object.__setattr__(block, "__class__", under)
    assert unfuse(model) >= 1
    try:
        fuse(model, backend="shim")
    except UserError as error:
        assert "backend" in str(error)
    else:
        raise AssertionError("not refused")


@contextlib.contextmanager
def _no_cycles_collected():
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _falls_to(limit):
    """Whether MLX's memory does: its own threads drop what they last ran a little later."""
    for _ in range(3000):
        if mx.get_active_memory() <= limit:
            return True
        time.sleep(0.01)
    return False


def check_a_dropped_model_is_freed_at_once(text):
    """By its last reference: nothing waits for a collector of cycles."""
    package, family = text.split()
    for parity in ("0", "1"):
        os.environ["MOESCOPE_FUSED_PARITY"] = parity
        try:
            with _no_cycles_collected():
                before = mx.get_active_memory()
                model = model_of(package, family)
                held = mx.get_active_memory() - before
                report = fuse(model, backend="reference")
                decode(package, model)
                objects = dict(model.named_modules())
                refs = [weakref.ref(objects[block.path]) for block in report.fused]
                del model, objects
                assert refs and not any(ref() is not None for ref in refs)
                assert _falls_to(before + held / 20), (before, held, mx.get_active_memory())
        finally:
            del os.environ["MOESCOPE_FUSED_PARITY"]
    probe.tallies.clear()


def in_a_thread(call):
    """What it returns there."""
    found = []
    thread = threading.Thread(target=lambda: found.append(call()))
    thread.start()
    thread.join()
    return found[0]


def check_another_thread(text):
    """A server loads in one and decodes in another: MLX runs what is evaluated, and no other's
    graphs."""
    package, family = text.split()
    model = model_of(package, family)
    plain = decode(package, model)
    assert in_a_thread(lambda: fuse(model, backend="reference")).fused
    assert decode(package, model) == plain


def _types(model):
    return {path: type(module) for path, module in model.named_modules()}


def check_a_build_that_fails_changes_nothing():
    """All or nothing, of a model that was fused before as well."""
    build, built = patching.BUILDERS["reference"], []

    def fails_second(*arguments):
        built.append(arguments)
        if len(built) == 2:
            raise MemoryError("no room")
        return build(*arguments)

    def refused(model):
        built.clear()
        patching.BUILDERS["reference"] = fails_second
        try:
            fuse(model, backend="reference")
        except MemoryError:
            return
        finally:
            patching.BUILDERS["reference"] = build
        raise AssertionError("not raised")

    for package, family in (("mlx-lm", "qwen3_moe"), ("mlx-vlm", "gemma4_text")):
        model = model_of(package, family)
        plain, types = decode(package, model), _types(model)
        refused(model)
        assert _types(model) == types and decode(package, model) == plain
        fuse(model, backend="reference")
        fused = _types(model)
        refused(model)
        assert _types(model) == fused != types
        assert decode(package, model) == plain
        assert unfuse(model) and _types(model) == types


def check_a_change_over_one_block_leaves_all_fused():
    """unfuse takes back all blocks or none; a copy would lose the change."""
    model = model_of("mlx-lm", "olmoe")
    fuse(model, backend="reference")
    for layer in (0, 1):
        block = model.layers[layer].mlp
        under = type(block)
        object.__setattr__(block, "__class__", type("Over", (under,), {}))
        before = _types(model)
        for call, told in (
            (unfuse, f"model.layers.{layer}.mlp"),
            (fuse, f"model.layers.{layer}.mlp"),
            (copy.deepcopy, "before copying"),
        ):
            try:
                call(model)
            except UserError as error:
                assert told in str(error)
            else:
                raise AssertionError("not noticed")
            assert _types(model) == before
        object.__setattr__(block, "__class__", under)
    assert unfuse(model) == 2


def check_a_copy_takes_its_own_path():
    """It has arrays of its own: the kernels would go on with the first model's."""
    for package, family in (("mlx-lm", "olmoe"), ("mlx-vlm", "gemma4_text")):
        model = model_of(package, family)
        fuse(model, backend="reference")
        again = pickle.loads(pickle.dumps(model))
        assert decode(package, again, 8) == decode(package, model, 8)
        fused = next(m for _, m in model.named_modules() if patching.MARK in vars(type(m)))
        assert not unfuse(again) and not unfuse(copy.copy(fused))
        other = copy.deepcopy(model)
        unfuse(model)
        other.update(tree_map_with_path(lambda path, a: a * 0.5 if "scales" in path else a,
                                        other.parameters()))  # fmt: skip
        got = decode(package, other, 8)
        unfuse(other)
        assert got == decode(package, other, 8) != decode(package, model, 8)
        assert _types(other) == _types(model)
