"""Loading, the measured pass, and teacher-forced logits: the rules that a record relies on."""

import json
import math
import os
import struct
import subprocess
import time

import numpy
import pytest

import tiny
from moescope.runtimes.client import WorkerError
from tiny import LIMIT_S, PROMPT

MODELS = [("mlx-lm", "qwen3_moe"), ("mlx-vlm", "qwen3_moe"), ("mlx-vlm", "inkling")]
M = 9


@pytest.fixture(scope="module")
def worker(tmp_path_factory):
    with tiny.worker(tmp_path_factory.mktemp("log") / "worker.log") as process:
        yield process


@pytest.fixture(scope="module")
def checkpoints(worker, tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints")
    return {model: tiny.checkpoint(worker, folder / "-".join(model), *model) for model in MODELS}


@pytest.fixture(params=MODELS, ids="-".join)
def loaded(request, worker, checkpoints):
    worker.ask("load", LIMIT_S, package=request.param[0], path=str(checkpoints[request.param]))
    return worker


def decode(worker, tokens=M, prompt=PROMPT, **arguments):
    return worker.ask("decode", LIMIT_S, prompt=prompt, tokens=tokens, **arguments)


def forced(worker, path, continuation, prompt=PROMPT, **arguments):
    result = worker.ask(
        "forced", LIMIT_S, prompt=prompt, continuation=continuation, save=str(path), **arguments
    )
    return result, numpy.load(path)


def test_the_pass_counts_what_it_times(loaded):
    decode(loaded)
    result = decode(loaded)
    assert result["prompt_tokens"] == len(PROMPT)
    assert result["generated_tokens"] == len(result["tokens"]) == M
    assert result["forwards"] == len(result["token_s"]) == M - 1
    assert all(seconds > 0 for seconds in result["token_s"])
    assert result["decode_s"] == pytest.approx(sum(result["token_s"]))
    assert result["tool_rate"] == pytest.approx(M / result["decode_s"])
    assert 0 < result["build_s"] < result["decode_s"]
    assert result["prefill_s"] > 0
    assert result["peak_memory"] > 0
    assert result["finite"] is True


def test_processor_seconds_are_those_of_the_intervals(loaded):
    """Steps that mostly sleep use little of the wall time, and no pass more than all cores."""
    plain = decode(loaded)
    assert 0 < plain["cpu_s"] <= plain["decode_s"] * os.cpu_count() * 1.05
    asleep = decode(loaded, patches=["delay_step=50ms"])
    assert 0 < asleep["cpu_s"] < asleep["decode_s"] / 2


def sliced(worker, slices, tokens=M, prompt=PROMPT, patches=()):
    arguments = {"prompt": prompt, "tokens": tokens, "slices": slices, "patches": list(patches)}
    worker.ask("sliced", LIMIT_S, step="start", **arguments)
    for _ in slices:
        worker.ask("sliced", LIMIT_S, step="more")
    return worker.ask("sliced", LIMIT_S, step="end")


@pytest.mark.parametrize("slices", [[8], [3, 3, 2], [2, 2, 2, 2]])
def test_a_pass_in_slices_decodes_the_same_tokens(loaded, slices):
    whole, parts = decode(loaded), sliced(loaded, slices)
    assert parts["tokens"] == whole["tokens"]
    assert parts["tokens_sha256"] == whole["tokens_sha256"]
    assert parts["generated_tokens"] == M and parts["slices"] == len(slices)
    assert parts["forwards"] == len(parts["token_s"]) == M - 1 - len(slices)
    assert parts["decode_s"] == pytest.approx(sum(parts["token_s"]))
    assert 0 < parts["build_s"] < parts["decode_s"] and parts["cpu_s"] > 0
    # By the tools' convention: all tokens over the intervals between them.
    assert parts["tool_rate"] == pytest.approx(
        M / (parts["decode_s"] / parts["forwards"] * (M - 1))
    )
    assert parts["finite"] is True and parts["peak_memory"] > 0


@pytest.mark.alone
def test_slices_time_the_steps_between_the_pauses_only(loaded):
    """With a long delay in each step: no interval holds a pause, none is short of a step."""
    delay, pause, working = 0.04, 1.0, 0.0
    patches = [f"delay_step={delay * 1000:g}ms"]
    decode(loaded, M, patches=patches)
    start = {"step": "start", "prompt": PROMPT, "tokens": 8, "slices": [4, 3], "patches": patches}
    loaded.ask("sliced", LIMIT_S, **start)
    for _ in range(2):
        time.sleep(pause)
        begin = time.monotonic()
        loaded.ask("sliced", LIMIT_S, step="more")
        working += time.monotonic() - begin
    result = loaded.ask("sliced", LIMIT_S, step="end")
    assert result["forwards"] == 5
    assert all(seconds >= delay * 0.98 for seconds in result["token_s"])
    # A host that stands still lengthens both; a pause would be in one.
    assert result["decode_s"] <= working
    assert 5 * delay * 0.98 <= result["build_s"] <= result["decode_s"]
    # The patch is gone.
    assert min(decode(loaded)["token_s"]) < delay


def test_a_pass_that_is_given_up_leaves_the_model_as_it_was(loaded):
    plain = decode(loaded)["tokens"]
    start = {"step": "start", "prompt": PROMPT, "tokens": M, "slices": [4, 4]}
    loaded.ask("sliced", LIMIT_S, **start, patches=["skip_experts"])
    assert sliced(loaded, [4, 4])["tokens"] == plain
    loaded.ask("sliced", LIMIT_S, **start, patches=["skip_experts"])
    loaded.ask("sliced", LIMIT_S, step="drop")
    assert decode(loaded)["tokens"] == plain


@pytest.mark.parametrize("slices", [[], [1, 7], [4, 3], [8, 1]])
def test_slices_that_do_not_make_the_pass_are_refused(loaded, slices):
    with pytest.raises(WorkerError, match="in parts of 2 or more"):
        sliced(loaded, slices)


def test_steps_out_of_order_are_refused(loaded):
    for step in ("more", "end"):
        with pytest.raises(WorkerError, match="no pass is held"):
            loaded.ask("sliced", LIMIT_S, step=step)
    start = {"step": "start", "prompt": PROMPT, "tokens": 5, "slices": [4], "patches": []}
    loaded.ask("sliced", LIMIT_S, **start)
    with pytest.raises(WorkerError, match="1 slices left"):
        loaded.ask("sliced", LIMIT_S, step="end")
    loaded.ask("sliced", LIMIT_S, step="more")
    with pytest.raises(WorkerError, match="all slices are done"):
        loaded.ask("sliced", LIMIT_S, step="more")
    loaded.ask("sliced", LIMIT_S, step="drop")


def test_the_same_prompt_gives_the_same_tokens(loaded):
    first, second, other = decode(loaded), decode(loaded), decode(loaded, prompt=PROMPT[::-1])
    assert first["tokens"] == second["tokens"]
    assert first["tokens_sha256"] == second["tokens_sha256"]
    assert len(first["tokens_sha256"]) == 64
    assert first["tokens"] != other["tokens"]
    assert first["tokens_sha256"] != other["tokens_sha256"]


def test_greedy_is_what_the_forced_logits_prefer(loaded, tmp_path):
    """Row i of the forced logits predicts token i: the argmax is the greedy token, all along."""
    tokens = decode(loaded)["tokens"]
    result, logits = forced(loaded, tmp_path / "logits.npy", tokens)
    assert result == {"finite": True, "vocab": 256}
    assert logits.shape == (M, 256)
    assert logits.dtype == numpy.float32
    assert logits.argmax(axis=-1).tolist() == tokens
    assert [path.name for path in tmp_path.iterdir()] == ["logits.npy"]


@pytest.mark.parametrize("length", [1, 2, 3])
def test_forced_logits_after_a_short_prompt(loaded, tmp_path, length):
    """Another continuation than the greedy one, and prompts whose prefill is one token long: the
    rows must be those of the same tokens taken as part of a longer prompt."""
    prompt, continuation = PROMPT[:length], [40, 41, 42, 43]
    _, rows = forced(loaded, tmp_path / "rows.npy", continuation, prompt)
    for count in range(4):
        longer = prompt + continuation[:count]
        _, row = forced(loaded, tmp_path / "row.npy", [7], longer)
        assert numpy.allclose(row[0], rows[count], rtol=1e-3, atol=1e-3)
    assert not numpy.allclose(rows[0], rows[1], rtol=1e-3, atol=1e-3)


@pytest.mark.alone
def test_the_window_is_exactly_the_forwards_after_the_first_token(loaded):
    """With a long delay in each step, the seconds say how many steps lie within: M - 1 in the
    decode window and as many graphs built; the one in flight after it is outside."""
    delay = 0.06
    patches = [f"delay_step={delay * 1000:g}ms"]
    # Before the first token: the prompt but its last token, that token, and the step after it.
    steps = {"build_s": 4, "decode_s": 4, "prefill_s": 3}
    plain, quickest = decode(loaded, 5), dict.fromkeys(steps, float("inf"))
    # The quickest of some: other programs only add time.
    for number in range(12):
        run = decode(loaded, 5, patches=patches)
        assert run["tokens"] == plain["tokens"]
        quickest = {name: min(least, run[name]) for name, least in quickest.items()}
        if number >= 2 and all(quickest[name] < (n + 1) * delay for name, n in steps.items()):
            break
    for name, count in steps.items():
        assert count * delay <= quickest[name] < (count + 1) * delay, name


def test_the_end_of_sequence_token_is_not_looked_at(worker, checkpoints):
    model = ("mlx-vlm", "inkling")
    path = checkpoints[model]
    worker.ask("load", LIMIT_S, package=model[0], path=str(path))
    tokens = decode(worker)["tokens"]
    settings = json.loads((path / "config.json").read_text())
    kept = settings["eos_token_id"]
    settings["eos_token_id"] = sorted(set(tokens))
    (path / "config.json").write_text(json.dumps(settings))
    try:
        worker.ask("load", LIMIT_S, package=model[0], path=str(path))
        assert decode(worker)["tokens"] == tokens
    finally:
        (path / "config.json").write_text(json.dumps({**settings, "eos_token_id": kept}))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_numbers_that_are_none(worker, checkpoints, tmp_path, value):
    model = ("mlx-lm", "qwen3_moe")
    path = tmp_path / "broken"
    path.mkdir()
    for file in checkpoints[model].iterdir():
        data = bytearray(file.read_bytes())
        if file.name.endswith(".safetensors"):
            length = int.from_bytes(data[:8], "little")
            header = json.loads(data[8 : 8 + length])
            start = 8 + length + header["model.norm.weight"]["data_offsets"][0]
            data[start : start + 4] = struct.pack("<f", value)
        (path / file.name).write_bytes(data)
    worker.ask("load", LIMIT_S, package=model[0], path=str(path))
    assert decode(worker)["finite"] is False
    result, _ = forced(worker, tmp_path / "logits.npy", [1, 2, 3])
    assert result["finite"] is False


@pytest.mark.parametrize(
    "arguments",
    [
        {"tokens": 1},
        {"tokens": 2.5},
        {"prompt": []},
        {"prompt": [1, -2]},
        {"prompt": ["a"]},
        {"prompt": "abc"},
    ],
)
def test_what_the_pass_refuses(worker, checkpoints, arguments):
    worker.ask("load", LIMIT_S, package="mlx-lm", path=str(checkpoints[MODELS[0]]))
    with pytest.raises(WorkerError) as error:
        decode(worker, **arguments)
    assert error.value.kind == "failed"


def test_code_in_a_checkpoint_is_not_run(worker, checkpoints, tmp_path):
    """mlx_vlm would import the file that model_file names, without being asked."""
    marker = tmp_path / "ran"
    settings = json.loads((checkpoints[MODELS[1]] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**settings, "model_file": "evil.py"}))
    (tmp_path / "evil.py").write_text(f"open({str(marker)!r}, 'w')")
    for package in ("mlx-lm", "mlx-vlm"):
        with pytest.raises(WorkerError, match="own code") as error:
            worker.ask("load", LIMIT_S, package=package, path=str(tmp_path))
        assert error.value.kind == "unsupported"
    assert not marker.exists()


def test_a_failed_load_leaves_no_model(worker, checkpoints, tmp_path):
    worker.ask("load", LIMIT_S, package="mlx-lm", path=str(checkpoints[MODELS[0]]))
    (tmp_path / "config.json").write_text(json.dumps(tiny.config("qwen3_moe")))
    with pytest.raises(WorkerError):
        worker.ask("load", LIMIT_S, package="mlx-lm", path=str(tmp_path))
    with pytest.raises(WorkerError, match="send load first"):
        decode(worker)


def test_a_model_type_that_the_package_does_not_know(worker, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(tiny.config("deepseek_v4")))
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", 2) + b"{}")
    with pytest.raises(WorkerError, match="deepseek_v4") as error:
        worker.ask("load", LIMIT_S, package="mlx-lm", path=str(tmp_path))
    assert error.value.kind == "unsupported"


def test_loading_a_runtime_imports_no_torch_where_there_is_one(tmp_path):
    """transformers would, and it takes seconds; nothing of it is used."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise SystemExit('torch was imported')")
    code = (
        "import importlib.util, sys; from moescope.worker import load; load._loader('mlx-vlm');"
        "import transformers; assert not transformers.utils.is_torch_available();"
        "assert importlib.util.find_spec('numpy') and 'torch' not in sys.modules; print('ok')"
    )
    path = f"{tiny.ROOT / 'workflow'}:{tmp_path}"
    done = subprocess.run(
        [tiny.arm_python(), "-c", code],
        env={"PYTHONPATH": path, "PYTHONSAFEPATH": "1", "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.stdout == "ok\n", done.stderr
