"""Checkpoints on disk: headers, packed numbers, synthetic bytes, manifests, folders."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moescope.checkpoints import codes, local, manifest, synthetic
from moescope.checkpoints.form import FORM
from moescope.checkpoints.headers import read_headers, read_tensors, write_tensors
from moescope.errors import UserError
from moescope.files import digest

ARM = os.environ.get("MOESCOPE_ARM_PYTHON", sys.executable)


def tensor(name, dtype, shape, quant=None):
    module, _, parameter = name.rpartition(".")
    return {"name": name, "dtype": dtype, "shape": shape, "module": module,
            "parameter": parameter, "quant": quant}  # fmt: skip


AFFINE = {"mode": "affine", "bits": 4, "group_size": 64}
LAYOUT = {
    "config": {"model_type": "toy", "vocab_size": 96, "num_experts": 4},
    "tensors": [
        tensor("head.weight", "F32", [96, 64]),
        tensor("lm.embed_tokens.weight", "BF16", [96, 64]),
        tensor("lm.experts.biases", "F32", [4, 32, 1], AFFINE),
        tensor("lm.experts.scales", "F32", [4, 32, 1], AFFINE),
        tensor("lm.experts.weight", "U32", [4, 32, 8], AFFINE),
        tensor("lm.gate.tid2eid", "I32", [96, 2]),
        tensor("lm.norm.weight", "F32", [64]),
    ],
}
PINS = {2: "6b1f6a9c3e9362b4717259d82b3e7a4716d06bb4ecbdbfb1c0c45571c6f591e9"}
SOURCE = {"kind": "synthetic", "seed": 5, "shard_bytes": 20_000}


@pytest.fixture
def made(tmp_path):
    folder = tmp_path / "made"
    folder.mkdir()
    synthetic.make(SOURCE, LAYOUT, folder)
    return folder


def test_the_library_reads_what_was_written(made):
    from safetensors import safe_open

    shards = sorted(made.glob("*.safetensors"))
    assert len(shards) > 1
    found = {}
    for shard in shards:
        with safe_open(shard, "numpy") as file:
            # numpy has no bfloat16
            found |= {n: file.get_tensor(n) for n in file.keys() if "embed" not in n}  # noqa: SIM118
    assert (found["lm.norm.weight"] == 1).all()
    assert found["lm.gate.tid2eid"].max() < 4
    assert all(len(set(row)) == 2 for row in found["lm.gate.tid2eid"].tolist())


def test_the_same_seed_gives_the_same_bytes_and_another_does_not(made, tmp_path):
    again, other = tmp_path / "again", tmp_path / "other"
    for folder, seed in ((again, 5), (other, 6)):
        folder.mkdir()
        synthetic.make({**SOURCE, "seed": seed}, LAYOUT, folder)
    assert manifest.entries(made) == manifest.entries(again)
    assert manifest.entries(made) != manifest.entries(other)


def test_a_tensor_is_the_same_however_shards_are_cut(made, tmp_path):
    whole = tmp_path / "whole"
    whole.mkdir()
    synthetic.make({**SOURCE, "shard_bytes": 1 << 30}, LAYOUT, whole)
    assert len(list(whole.glob("*.safetensors"))) == 1
    assert tensor_bytes(whole, "lm.experts.weight") == tensor_bytes(made, "lm.experts.weight")


def tensor_bytes(folder, name):
    shard = folder / read_headers(folder)[name].shard
    data = shard.read_bytes()
    length = int.from_bytes(data[:8], "little")
    first, last = json.loads(data[8 : 8 + length])[name]["data_offsets"]
    return data[8 + length + first : 8 + length + last]


def test_the_bytes_belong_to_the_form(made):
    """Synthetic checkpoints are pins: other bytes are another form (form.FORM), and new keys."""
    assert digest(manifest.entries(made)) == PINS[FORM]


def test_the_head_follows_the_embedding_by_a_step(made):
    head = np.frombuffer(tensor_bytes(made, "head.weight"), np.float32).reshape(96, 64)
    raw = np.frombuffer(tensor_bytes(made, "lm.embed_tokens.weight"), np.uint16)
    rows = (raw.astype(np.uint32) << 16).view(np.float32).reshape(96, 64)
    successors = (rows @ head.T).argmax(1)
    steps = (successors - np.arange(96)) % 96
    assert np.isin(steps, synthetic.STEPS).mean() > 0.95
    assert set(synthetic.STEPS) <= set(steps.tolist())


def test_memory_stays_near_the_pool(tmp_path):
    """A checkpoint much larger than the pools is written without holding it."""
    code = f"""
import tracemalloc
from pathlib import Path
from moescope.checkpoints import synthetic
quant = {AFFINE!r}
words = 8 * synthetic.POOL
tensors = [dict(name=f"lm.e{{i}}.weight", dtype="U32", shape=[words // 2048, 2048],
                module=f"lm.e{{i}}", parameter="weight", quant=quant) for i in range(2)]
tracemalloc.start()
synthetic.make({{"seed": 1, "shard_bytes": 1 << 28}},
               {{"config": {{"vocab_size": 64, "num_experts": 1}}, "tensors": tensors}},
               Path({str(tmp_path)!r}))
print(tracemalloc.get_traced_memory()[1])
"""
    env = {**os.environ, "PYTHONPATH": str(Path(synthetic.__file__).parents[2])}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True,
                            timeout=120, check=True, env=env)  # fmt: skip
    written = sum(path.stat().st_size for path in tmp_path.glob("*.safetensors"))
    pools = 12 * synthetic.POOL
    assert written > 5 * pools
    assert int(result.stdout) < 2.2 * pools


# Shards that are not whole


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda shard, index: shard.write_bytes(shard.read_bytes()[:-7]), "bytes of tensors"),
        (lambda shard, index: shard.write_bytes(shard.read_bytes() + b"x"), "bytes of tensors"),
        (lambda shard, index: shard.write_bytes(b"\xff" * 64), "cut short"),
        (lambda shard, index: shard.write_bytes(b""), "cut short"),
        (lambda shard, index: shard.unlink(), "is not in"),
        (lambda shard, index: index.write_text("{}"), "no weight_map"),
        (lambda shard, index: index.unlink(), "several shards and no"),
    ],
)
def test_a_damaged_checkpoint_is_refused(made, damage, message):
    damage(sorted(made.glob("*.safetensors"))[-1], made / "model.safetensors.index.json")
    with pytest.raises(UserError, match=message):
        read_headers(made)


def test_tensors_csv_gives_back_what_it_was_given(made, tmp_path):
    tensors = read_headers(made)
    write_tensors(tmp_path / "t.csv", tensors)
    assert read_tensors(tmp_path / "t.csv") == tensors
    assert sum(t.bytes for t in tensors.values()) == sum(map(synthetic.size, LAYOUT["tensors"]))


# Manifests and folders


def test_a_changed_file_is_noticed_also_after_a_check(made, tmp_path):
    described = manifest.describe(made, SOURCE)
    seal = tmp_path / "seal.json"
    manifest.check(made, described, seal)
    manifest.check(made, described, seal)
    shard = sorted(made.glob("*.safetensors"))[0]
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(bytes(data))
    os.utime(shard, ns=(1, 1))
    with pytest.raises(UserError, match="sha256 is not the manifest's"):
        manifest.check(made, described, seal)
    shard.write_bytes(bytes(data[:-1]))
    with pytest.raises(UserError, match="the manifest says"):
        manifest.check(made, described, seal)
    shard.unlink()
    with pytest.raises(UserError, match="missing"):
        manifest.check(made, described, seal)


def test_a_local_folder_is_pinned_by_its_digest(made, tmp_path):
    source = {"kind": "local", "path": "made", "digest": "0" * 64}
    with pytest.raises(UserError) as error:
        local.check(source, tmp_path)
    found = digest(manifest.entries(made))
    assert found in str(error.value) and "source.digest" in str(error.value)
    assert local.check({**source, "digest": found}, tmp_path) == made.resolve()
    with pytest.raises(UserError, match="does not exist"):
        local.check({**source, "path": "nowhere"}, tmp_path)


# Packed numbers mean to MLX what they mean here


def in_mlx(parts, mode, bits, group_size, shape):
    """mx.dequantize in the arm's interpreter, as float32."""
    code = f"""
import sys, mlx.core as mx
data = sys.stdin.buffer.read()
arrays, at = [], 0
for shape, kind in {[(list(p.shape), str(p.dtype)) for p in parts]!r}:
    dtype = {{"uint32": mx.uint32, "uint8": mx.uint8, "float32": mx.float32}}[kind]
    n = 1
    for s in shape: n *= s
    size = n * dtype.size
    arrays.append(mx.array(memoryview(data[at:at + size])).view(dtype).reshape(shape))
    at += size
y = mx.dequantize(*arrays, group_size={group_size}, bits={bits}, mode={mode!r}).astype(mx.float32)
sys.stdout.buffer.write(bytes(memoryview(y)))
"""
    result = subprocess.run([ARM, "-c", code], input=b"".join(p.tobytes() for p in parts),
                            capture_output=True, timeout=60, check=True)  # fmt: skip
    return np.frombuffer(result.stdout, np.float32).reshape(shape)


@pytest.mark.parametrize(
    ("mode", "bits", "group_size", "limit"),
    [("affine", 4, 64, 0.1), ("affine", 8, 32, 0.006), ("affine", 6, 64, 0.025),
     ("mxfp4", 4, 32, 0.2), ("nvfp4", 4, 16, 0.15), ("mxfp8", 8, 32, 0.04)],
)  # fmt: skip
def test_quantised_rows_mean_the_same_to_mlx(mode, bits, group_size, limit):
    rows = np.random.default_rng(3).standard_normal((8, 256)).astype(np.float32)
    parts = codes.quantise(rows, mode, bits, group_size)
    back = in_mlx(list(parts.values()), mode, bits, group_size, rows.shape)
    error = np.sqrt(((back - rows) ** 2).mean() / (rows**2).mean())
    assert error < limit


@given(st.sampled_from([2, 3, 4, 5, 6, 8]), st.data())
@settings(max_examples=30)
def test_packing_keeps_every_bit(bits, data):
    values = data.draw(st.lists(st.integers(0, (1 << bits) - 1), min_size=32, max_size=32))
    packed = codes.pack(np.array([values], np.uint8), bits)
    stream = int.from_bytes(packed.tobytes(), "little")
    assert [(stream >> (bits * i)) & ((1 << bits) - 1) for i in range(32)] == values


def test_every_e4m3_code_is_its_own_nearest():
    for code in range(1, 127):
        assert codes.to_e4m3(codes.E4M3_POSITIVE[code : code + 1])[0] == code


@given(st.floats(-1e6, 1e6, width=32))
def test_bfloat16_is_the_nearest(value):
    bits = codes.to_bfloat16(np.array([value], np.float32)).astype(np.uint32)
    back = float((bits << 16).view(np.float32)[0])
    assert abs(back - value) <= abs(value) / 256 + 1e-38
    assert math.isfinite(back)
