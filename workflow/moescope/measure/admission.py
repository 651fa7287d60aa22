"""Whether a checkpoint fits before it is loaded, and what a failure was when it ended badly.

Pure functions: what is known goes in, a decision with its numbers comes out.
"""

import re
from dataclasses import asdict, dataclass
from typing import Any

# Of the memory that the device may use, what weights, cache and temporaries may take together.
SHARE = 0.85
GIB = 1 << 30

# Exit statuses as a shell shows them.
KILLED, ABORTED, FAULTED, TERMINATED = 137, 134, 139, 143

KINDS = (
    "out_of_memory",
    "timeout",
    "no_backend",
    "no_kernel",
    "unsupported",
    "not_permitted",
    "killed",
    "crash",
    "failed",
)

# Text -> kind, tried in order, without regard to case. What allocators, MLX, CUDA, Metal, the
# loaders of mlx-lm and mlx-vlm, and Rust say. A sentence that names memory wins over all others,
# since it is often followed by an abort.
SIGNS: tuple[tuple[str, str], ...] = (
    ("out_of_memory", r"out of memory|outofmemory|\[malloc|std::bad_alloc|MemoryError"),
    ("out_of_memory", r"cudaErrorMemoryAllocation|CUDA_ERROR_OUT_OF_MEMORY|NV_ERR_NO_MEMORY"),
    (
        "out_of_memory",
        r"(cannot|unable to|failed to|attempting to) allocate|allocation of \d+ bytes",
    ),
    ("out_of_memory", r"insufficient memory|kIOGPUCommandBufferCallbackErrorOutOfMemory"),
    (
        "no_backend",
        r"no (metal|cuda|gpu|rocm) (back-?end|device|support)|cannot find a (cuda|metal)",
    ),
    (
        "no_backend",
        r"(cuda|metal|gpu).{0,30} not available|no gpu (was )?found|CUDA driver version",
    ),
    (
        "no_kernel",
        r"no kernel image|unable to load (kernel|function)|no implementation for problem",
    ),
    ("no_kernel", r"\[metal::Device\]|no ptx|nvrtc|not covered by|device kernel image is invalid"),
    ("unsupported", r"model type \S+ (is )?not supported|unsupported (model|architecture|quant)"),
    ("unsupported", r"parameters not in model|missing \d+ parameters|unknown (model|architecture)"),
    ("unsupported", r"no module named|unrecognized arguments|unexpected argument|unknown option"),
    ("unsupported", r"is not supported|not implemented|NotImplementedError|only supports"),
    ("not_permitted", r"ERR_NVGPUCTRPERM|INSUFFICIENT_PRIVILEGES|operation not permitted"),
)


@dataclass(frozen=True)
class Admission:
    """The decision on one checkpoint. Sizes in bytes; ``room`` is what it had to fit into."""

    admitted: bool
    predicted: int
    room: int
    host: int
    why: str | None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def room(
    host: int,
    device: int | None = None,
    cap: int | None = None,
    share: float = SHARE,
    apart: bool = False,
) -> tuple[int, str]:
    """Bytes that a run may use, and what set the limit.

    host: the memory of the host. device: of the GPU, or the largest working set that it
    recommends (Metal), None if it shares the host's without a limit of its own. cap: the user's
    own limit, taken as it is; the rest is for the system: ``share`` of the others. apart: the
    device's memory is its own, so the host's is no limit of what lies there.
    """
    limits = {f"{share:.0%} of the host's {host / GIB:.1f} GiB": int(host * share)}
    if device is not None and apart:
        limits = {}
    if device is not None:
        limits[f"{share:.0%} of the device's {device / GIB:.1f} GiB"] = int(device * share)
    if cap is not None:
        limits[f"the cap of {cap / GIB:.1f} GiB"] = cap
    what = min(limits, key=lambda name: limits[name])
    return limits[what], what


def admit(
    predicted: int,
    host: int,
    device: int | None = None,
    cap: int | None = None,
    share: float = SHARE,
    apart: bool = False,
) -> Admission:
    """Whether a checkpoint whose run is predicted to need ``predicted`` bytes may be started."""
    limit, what = room(host, device, cap, share, apart)
    why = None
    if predicted > limit:
        why = (
            f"needs about {predicted / GIB:.1f} GiB, {limit / GIB:.1f} GiB are allowed here "
            f"({what}); skipped before launch"
        )
    return Admission(why is None, predicted, limit, host, why)


def predict(architecture: dict[str, Any], prompt: int, generate: int) -> int:
    """Bytes that a run needs: what the inspection predicts, else the weights, plus the cache.

    architecture: architecture.json. The cache is layers x 2 x kv_heads x head_dim x positions in
    two bytes; temporaries are taken as 5 % of the weights, 512 MiB at least.
    """
    predicted = architecture.get("memory", {}).get("predicted")
    if predicted is not None:
        return int(predicted)
    weights = int(architecture["bytes"]["total"])
    attention = architecture.get("attention", {})
    heads, width = attention.get("kv_heads") or 0, attention.get("head_dim") or 0
    cache = architecture["layers"] * 2 * heads * width * (prompt + generate) * 2
    return weights + cache + max(weights // 20, GIB // 2)


def predict_from(weights: int, config: dict[str, Any], prompt: int, generate: int) -> int:
    """The same from a checkpoint's bytes and config.json, before it is inspected or downloaded.

    Keys are looked for at the top and below text_config; what is not found counts as nothing.
    """

    def key(*names: str) -> int:
        for level in (config, config.get("text_config") or {}):
            for name in names:
                if isinstance(level.get(name), int):
                    return level[name]
        return 0

    heads = key("num_key_value_heads", "num_attention_heads")
    width = key("head_dim")
    if not width and key("num_attention_heads"):
        width = key("hidden_size") // key("num_attention_heads")
    architecture = {
        "bytes": {"total": weights},
        "layers": key("num_hidden_layers"),
        "attention": {"kv_heads": heads, "head_dim": width},
    }
    return predict(architecture, prompt, generate)


def classify(status: int | None, text: str, timed_out: bool = False) -> str:
    """The kind (one of KINDS) of a process's bad end.

    status: as a shell shows it, None if it never started. text: what it printed. A time-out is
    never taken for lack of memory; SIGKILL that nobody here sent is.
    """
    if timed_out:
        return "timeout"
    # A process that a signal ended may have warned of anything before.
    doubtful = ("unsupported", "not_permitted") if status is not None and status > 128 else ()
    for kind, pattern in SIGNS:
        if kind not in doubtful and re.search(pattern, text, re.IGNORECASE):
            return kind
    if status is None:
        return "failed"
    if status == KILLED:
        return "out_of_memory"
    if status == TERMINATED:
        return "killed"
    if status in (ABORTED, FAULTED) or status > 128:
        return "crash"
    return "failed"


def explain(kind: str, status: int | None, text: str) -> str:
    """One line for the record: the kind in words, the status, and the sentence that decided."""
    words = {
        "out_of_memory": "ran out of memory",
        "timeout": "did not end within the time limit",
        "no_backend": "has no back-end for this device",
        "no_kernel": "has no kernel for this device or shape",
        "unsupported": "does not support this checkpoint or option",
        "not_permitted": "was not permitted what it asked for",
        "killed": "was ended by somebody else",
        "crash": "crashed",
        "failed": "failed",
    }[kind]
    sentence = _deciding(kind, text)
    shown = f" (status {status})" if status is not None else ""
    return f"{words}{shown}" + (f": {sentence}" if sentence else "")


def _deciding(kind: str, text: str) -> str:
    """The line that decided, else the last one; paths are cut to their last part."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    patterns = [pattern for known, pattern in SIGNS if known == kind]
    for line in lines:
        if any(re.search(pattern, line, re.IGNORECASE) for pattern in patterns):
            return scrub(line)
    return scrub(lines[-1]) if lines else ""


def scrub(line: str) -> str:
    """Paths cut to their last part, 300 characters at most."""
    return re.sub(r"(?:/[\w.@+-]+)+/([\w.@+-]+)", r"\1", line)[:300]
