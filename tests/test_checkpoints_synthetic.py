"""Synthetic checkpoints under the real runtimes: every family decodes healthily."""

import json
import os
import shutil

import numpy as np
import pytest

import tiny
from moescope.checkpoints import fetch, manifest, materialise, synthetic
from moescope.checkpoints.form import FORM
from moescope.checkpoints.headers import read_headers
from moescope.errors import UserError
from moescope.files import digest, read_json
from moescope.runtimes.environments import Interpreter
from moescope.task import Task

AFFINE = {"mode": "affine", "bits": 4, "group_size": 64}
MXFP4 = {"mode": "mxfp4", "bits": 4, "group_size": 32}
NVFP4 = {"mode": "nvfp4", "bits": 4, "group_size": 16}
MXFP8 = {"mode": "mxfp8", "bits": 8, "group_size": 32}
LAYOUT_ENV = "mlx-vlm-0.7.10"
TOKENS = 64
RECIPES = {
    "affine": {"default": AFFINE},
    "mxfp4 experts": {"default": AFFINE, "overrides": [{"match": "*.switch_mlp.*", **MXFP4}]},
    "affine experts only": {
        "default": None,
        "overrides": [{"match": "*.switch_mlp.*", **AFFINE}],
    },
    "nvfp4": {"default": NVFP4},
    "mxfp8": {"default": MXFP8},
}
MODELS = [(family, "affine") for family in tiny.CONFIGS] + [
    ("deepseek_v4", "mxfp4 experts"),
    ("inkling", "affine experts only"),
    ("inkling", "nvfp4"),
    ("qwen3_moe", "mxfp8"),
]
# The embedding is the head of these: no successor can be built into it.
TIED = ("lfm2_moe", "gemma4_text")
SENSITIVE = ("qwen3_moe", "deepseek_v4", "inkling", "lfm2_moe", "gemma4_text")


@pytest.fixture(scope="module")
def worker(tmp_path_factory):
    with tiny.worker(tmp_path_factory.mktemp("synthetic") / "log") as process:
        yield process


def source(family, recipe, **changes):
    return {
        "kind": "synthetic",
        "layout": LAYOUT_ENV,
        "layout_lock": "0" * 64,
        "package": "mlx-vlm",  # it has all of the families
        "seed": 1,
        "dtype": "float32",
        "config": tiny.config(family),
        "quantization": RECIPES[recipe],
        "shard_bytes": 1 << 30,
        **changes,
    }


def make(worker, folder, asked):
    layout = worker.ask(
        "layout",
        tiny.LIMIT_S,
        **{key: asked[key] for key in ("package", "config", "quantization", "dtype")},
    )
    folder.mkdir()
    synthetic.make(asked, layout, folder)
    return folder


def repeats(tokens):
    """The longest run of tokens that repeats with a period of at most 8."""
    longest = 0
    for period in range(1, 9):
        run = 0
        for token, earlier in zip(tokens[period:], tokens, strict=False):
            run = run + 1 if token == earlier else 0
            longest = max(longest, run + period if run >= period else 0)
    return longest


@pytest.mark.parametrize(("family", "recipe"), MODELS)
def test_a_family_decodes_without_falling_into_a_loop(worker, tmp_path, family, recipe):
    folder = make(worker, tmp_path / "made", source(family, recipe))
    assert read_headers(folder)
    worker.ask("load", tiny.LIMIT_S, package="mlx-vlm", path=str(folder))

    def decode(*patches):
        return worker.ask(
            "decode", tiny.LIMIT_S, prompt=tiny.PROMPT, tokens=TOKENS, patches=list(patches)
        )

    found = decode()
    tokens = found["tokens"]
    assert found["finite"]
    assert repeats(tokens) < 8
    if family in TIED:
        assert len(set(tokens)) > TOKENS / 2
    else:
        steps = np.diff(tokens) % 256
        assert np.isin(steps, synthetic.STEPS).mean() > 0.9
        assert set(synthetic.STEPS) <= set(steps.tolist())
    if family in SENSITIVE:
        # The layers have a say: without the experts it is another text.
        assert decode("skip_experts")["tokens"] != tokens


def test_threads_do_not_change_a_byte(worker, tmp_path, monkeypatch):
    asked = source("inkling", "affine experts only", shard_bytes=200_000)
    found = []
    for cores in (1, 7):
        monkeypatch.setattr(synthetic, "usable_cores", lambda cores=cores: cores)
        found.append(manifest.entries(make(worker, tmp_path / str(cores), asked)))
    assert found[0] == found[1]
    assert sum(entry["path"].endswith(".safetensors") for entry in found[0]) > 2


def test_bfloat16_weights_are_what_the_loader_wants(worker, tmp_path):
    folder = make(worker, tmp_path / "made", source("qwen3", "affine", dtype="bfloat16"))
    worker.ask("load", tiny.LIMIT_S, package="mlx-vlm", path=str(folder))
    found = worker.ask("decode", tiny.LIMIT_S, prompt=tiny.PROMPT, tokens=8)
    assert found["finite"] and len(set(found["tokens"])) == 8


# Without a runtime


def module(path, quant, *shape, dtype="F32"):
    """The tensors of one quantised matrix."""
    *lead, inputs = shape
    sizes = {
        "weight": ("U32", inputs * quant["bits"] // 32),
        "scales": (dtype if quant["mode"] == "affine" else "U8", inputs // quant["group_size"]),
    }
    if quant["mode"] == "affine":
        sizes["biases"] = sizes["scales"]
    return [
        {"name": f"{path}.{part}", "dtype": kind, "shape": [*lead, size], "module": path,
         "parameter": part, "quant": quant}
        for part, (kind, size) in sorted(sizes.items())
    ]  # fmt: skip


SIX = {"mode": "affine", "bits": 6, "group_size": 64}
TABLES = {
    "config": {"vocab_size": 200, "text_config": {"num_experts": 4}},
    "tensors": [
        *module("a.embed_tokens", AFFINE, 200, 128, dtype="BF16"),
        *module("a.layers.0.experts.nv", NVFP4, 4, 64, 128),
        *module("a.layers.0.experts.six", SIX, 4, 64, 128),
        *module("a.layers.1.experts.mx", MXFP4, 4, 64, 128),
        *module("a.layers.1.experts.mx8", MXFP8, 4, 64, 128),
        *module("lm_head", NVFP4, 200, 128),
    ],
}
PINS = {2: "4b058844aa2d8e58d6c659024a3fc18bb79682910640822eb19725e1b7d2c4ea"}


def test_the_bytes_belong_to_the_form(tmp_path):
    """Other bytes are another form: raise form.FORM, so that checkpoints get new keys."""
    synthetic.make({"seed": 7, "shard_bytes": 20_000}, TABLES, tmp_path)
    read_headers(tmp_path)
    assert digest(manifest.entries(tmp_path)) == PINS[FORM]


def test_a_packed_projection_has_unit_gain(tmp_path):
    from test_checkpoints_files import in_mlx

    synthetic.make({"seed": 7, "shard_bytes": 1 << 20}, TABLES, tmp_path)
    for path, quant in (("0.experts.nv", NVFP4), ("0.experts.six", SIX), ("1.experts.mx", MXFP4),
                        ("1.experts.mx8", MXFP8)):  # fmt: skip
        parts = [stored(tmp_path, f"a.layers.{path}.{part}") for part in ("weight", "scales")]
        if quant["mode"] == "affine":
            parts.append(stored(tmp_path, f"a.layers.{path}.biases"))
        values = in_mlx(parts, **quant, shape=(4, 64, 128))
        assert 0.7 < values.std() * np.sqrt(128) < 1.45  # scales are powers of two in mxfp
        assert abs(values.mean()) < 0.1 * values.std()


def stored(folder, name):
    tensor = read_headers(folder)[name]
    data = (folder / tensor.shard).read_bytes()
    length = int.from_bytes(data[:8], "little")
    first, last = json.loads(data[8 : 8 + length])[name]["data_offsets"]
    kind = {"U32": np.uint32, "U8": np.uint8, "F32": np.float32}[tensor.dtype]
    return np.frombuffer(data[8 + length + first : 8 + length + last], kind).reshape(tensor.shape)


# The stage


@pytest.fixture
def task(tmp_path, monkeypatch):
    interpreter = Interpreter(tiny.arm_python(), dict(os.environ))
    monkeypatch.setattr(materialise, "ensure_layout", lambda *arguments: interpreter)
    out = tmp_path / "out"
    out.mkdir()
    params = {"source": source("qwen3_moe", "affine")}
    return Task("fetch", "q", "0123456789ab", params, {}, out, tmp_path / "work", tiny.ROOT)


class Answers:
    """A worker whose layout is known."""

    def __init__(self, *arguments):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        pass

    def ask(self, do, timeout, **arguments):
        assert do == "layout"
        return TABLES


@pytest.fixture
def answered(task, monkeypatch):
    """The stage without a process of its own."""
    monkeypatch.setattr(materialise, "Worker", Answers)
    return task


def test_weights_come_back_as_the_manifest_says(task):
    fetch.run(task)
    described = read_json(task.out / "manifest.json", manifest.SCHEMA)
    folder = task.work / "checkpoints" / task.key
    assert described["form"] == FORM and described["kind"] == "synthetic"
    assert described["bytes"] == sum(p.stat().st_size for p in folder.iterdir())
    assert not list(folder.parent.glob("*.partial"))
    arguments = (described, task.params["source"], folder, task.work, task.root)
    shutil.rmtree(folder)
    assert materialise.ensure(*arguments) == folder
    assert manifest.entries(folder) == described["files"]
    (shard,) = folder.glob("*.safetensors")
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    with pytest.raises(UserError, match="sha256 is not the manifest's"):
        materialise.ensure(*arguments)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "qwen9_moe"}, "Model type qwen9_moe not supported"),
        ({"num_experts": None}, "num_experts"),
    ],
)
def test_a_config_that_the_runtime_refuses_is_one_line(task, change, message):
    config = task.params["source"]["config"]
    config |= change
    task.params["source"]["config"] = {k: v for k, v in config.items() if v is not None}
    with pytest.raises(UserError, match=message) as error:
        fetch.run(task)
    assert error.value.where == "source.config" and "\n" not in str(error.value)
    assert not (task.work / "checkpoints" / task.key).exists()


def test_hashes_are_not_taken_twice(answered, monkeypatch):
    fetch.run(answered)
    described = read_json(answered.out / "manifest.json")
    monkeypatch.setattr(manifest, "sha256_file", lambda path: pytest.fail(f"hashed {path}"))
    folder = answered.work / "checkpoints" / answered.key
    source = answered.params["source"]
    materialise.ensure(described, source, folder, answered.work, answered.root)


def test_a_broken_run_leaves_nothing_that_looks_whole(answered, monkeypatch):
    written = []

    def full(handle, data, offset):
        written.append(len(data))
        raise OSError("no room")

    monkeypatch.setattr(synthetic, "_write_at", full)
    with pytest.raises(OSError, match="no room"):
        fetch.run(answered)
    folder = answered.work / "checkpoints" / answered.key
    assert written and not folder.exists() and not list(answered.out.iterdir())
    monkeypatch.undo()
    monkeypatch.setattr(materialise, "Worker", Answers)
    monkeypatch.setattr(materialise, "ensure_layout", lambda *a: Interpreter(folder, {}))
    fetch.run(answered)
    assert (answered.out / "tensors.csv").is_file()
