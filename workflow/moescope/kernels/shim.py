"""The kernels' text on a CPU: compiled as C++ over a thin layer of its language, run lane by lane.

For tests. It shows that unpacking, addressing, routing, reductions and rounding are right and that
no thread waits for one that never comes; it cannot show speed, memory order between threads, a
compiler's own arithmetic (contraction, fast exponentials) or what a real device refuses.
"""

import ctypes
import hashlib
import os
import subprocess
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import mlx.core as mx

from . import cuda, metal, source
from .common import check, dynamic_names, static_inputs
from .layout import Geometry, block_launch, cut, down_launch, first_launch
from .spec import Spec, Tensors

FOLDER = Path(__file__).parent / "shim"
LIMIT_S = 120
POOL = ThreadPoolExecutor(2)  # of compilers
FLAGS = (
    *("-std=c++17", "-O0", "-w", "-fPIC", "-ffp-contract=off"),
    *("-fsanitize=alignment", "-fno-sanitize-recover=alignment"),
)
MEMORY = 227 * 1024
TYPES = {
    mx.bfloat16: {"cuda": "__nv_bfloat16", "metal": "bfloat16_t"},
    mx.float16: {"cuda": "__half", "metal": "half"},
    mx.float32: {"cuda": "float", "metal": "float"},
    mx.uint32: {"cuda": "unsigned", "metal": "uint"},
    mx.int32: {"cuda": "int", "metal": "int"},
    mx.uint8: {"cuda": "unsigned char", "metal": "uchar"},
}


def compile_text(*text: Any) -> Any:
    """A function (void** inputs, void* output, int blocks, int threads, int late, int schedule,
    int together) from a kernel's text, given as to ``library``."""
    return ctypes.CDLL(str(library(*text))).run


def library(language: str, header: str, body: str, inputs: dict[str, Any], output: str) -> Path:
    """A kernel's text compiled.

    output: name and type of the kernel's output, as "out bfloat16". Raises subprocess errors with
    the compiler's message, TimeoutExpired after two minutes.
    """
    name, kind = output.split()
    pointers = [f"const {TYPES[a.dtype][language]}* {n}" for n, a in inputs.items()]
    casts = [
        f"  const auto {n} = (const {TYPES[a.dtype][language]}*)given[{i}];"
        for i, (n, a) in enumerate(inputs.items())
    ]
    out = TYPES[getattr(mx, kind)][language]
    parameters = ", ".join([*pointers, f"{out}* {name}"])
    lines = [
        f'#include "{language}.h"',
        header,
        f"static void kernel({parameters}) {{\n{body}\n}}",
        "static void** given;",
        "static void* to;",
        "static void one() {",
        *casts,
        f"  const auto {name} = ({out}*)to;",
        f"  kernel({', '.join([*inputs, name])});",
        "}",
        'extern "C" void run(void** inputs, void* output, int blocks, int threads, int late,'
        " int schedule, int together) {",
        "  given = inputs;",
        "  to = output;",
        "  lanes::run_blocks(blocks, threads, late, schedule, together, one);",
        "}",
    ]
    text = "\n".join(lines)
    stamp = hashlib.sha256((text + _headers() + " ".join(FLAGS)).encode()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"moescope-shim-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    made = folder / f"{stamp}.so"
    if not made.exists():
        fresh = folder / f"{stamp}.{os.getpid()}"
        code = folder / f"{stamp}.cc"  # stays: what is misaligned is reported by its lines
        fresh.write_text(text, encoding="utf-8")
        fresh.replace(code)
        whole, half = f"{fresh}.so", f"{fresh}.o"
        _compiler(*FLAGS, f"-I{FOLDER}", "-c", str(code), "-o", half)
        _compiler("-shared", half, "-o", whole)  # apart: else it wants the checks' own library
        Path(half).unlink()
        Path(whole).replace(made)
    return made


def _compiler(*arguments: str) -> None:
    done = subprocess.run(
        ["g++", *arguments], text=True, capture_output=True, timeout=LIMIT_S, check=False
    )
    if done.returncode:
        raise RuntimeError(f"the shim does not compile:\n{done.stderr[:4000]}")


def _headers() -> str:
    return "".join(p.read_text(encoding="utf-8") for p in sorted(FOLDER.glob("*.h")))


def call(
    run: Any,
    inputs: dict[str, Any],
    size: int,
    blocks: int,
    threads: int,
    late: bool = False,
    schedule: int = 0,
    together: bool = False,
    calls: int = 1,
    shifted: tuple[str, ...] = (),
) -> bytearray:
    """Run a compiled kernel over bytes of the inputs; the output's bytes start as 0xff.

    late: asynchronous copies land when they are waited for (else at once); schedule: 0 for threads
    in turn, else the seed of a random order in which some stay behind; together: all blocks at
    once (they wait for each other), else one after the other; shifted: inputs that begin one
    element past where an array of their own would (multiples of 16 bytes, and no more).
    """
    buffers = []
    for name, array in inputs.items():
        flat = mx.contiguous(array).reshape(-1).view(mx.uint8)
        mx.eval(flat)
        data = bytes(memoryview(flat))
        holder = (ctypes.c_char * (len(data) + 64))()
        at = (16 - ctypes.addressof(holder)) % 32 + (array.itemsize if name in shifted else 0)
        ctypes.memmove(ctypes.addressof(holder) + at, data, len(data))
        buffers.append((holder, ctypes.addressof(holder) + at))
    pointers = (ctypes.c_void_p * len(buffers))(*(address for _, address in buffers))
    raw = (ctypes.c_char * (size + 64))()
    at = -ctypes.addressof(raw) % 32
    ctypes.memset(ctypes.addressof(raw), 0xFF, size + 64)
    to = ctypes.c_void_p(ctypes.addressof(raw) + at)
    for _ in range(calls):
        run(pointers, to, blocks, threads, int(late), schedule, int(together))
    return bytearray(ctypes.string_at(ctypes.addressof(raw) + at, size))


def array_of(data: bytes | bytearray, dtype: Any) -> Any:
    """Bytes as a flat array."""
    return mx.array(memoryview(data).cast("B").tolist(), mx.uint8).view(dtype)


def block(
    language: str,
    spec: Spec,
    tensors: Tensors,
    *dynamic: Any,
    chosen: Geometry | None = None,
    blocks: int = 3,
    whole: bool = True,
    late: bool = False,
    schedule: int = 0,
    shifted: bool = False,
    memory: int = MEMORY,
) -> dict[str, Any]:
    """Both halves of a block on the CPU: {"y" [out], "chosen", "weights", "middle": bytes}.

    dynamic: the inputs that ``dynamic_names`` lists; blocks: on CUDA; whole: the second half too;
    late, schedule: see ``call``; shifted: the dynamic inputs are; memory: bytes of shared
    memory that a block of the second half may have (CUDA).
    """
    check(spec)
    chosen = chosen or Geometry(prefetch=0)
    prefetch = language == "cuda" and chosen.prefetch > 0
    first, second = static_inputs(spec, tensors, prefetch)
    first = dict(zip(dynamic_names(spec), dynamic, strict=True)) | first
    shared = spec.shared
    if language == "cuda":
        plan = cut(spec)
        rows = cuda.prefetch_rows(spec, chosen) if prefetch else 0
        one = first_launch(spec, plan, chosen, blocks, MEMORY)
        two = down_launch(spec, plan, chosen, blocks, memory)
        halves = (
            cuda.first_half(spec, plan, one, rows, cuda.MATH),
            cuda.second_half(spec, plan, two, cuda.MATH),
        )
        at = source.middle(spec)
        size = at["MID_BYTES"]
        launches = ((one.blocks, one.threads), (two.blocks, two.threads))
        offsets = (at["MID_CHOSEN"], at["MID_WEIGHT"])
        kind = "uint32"
    else:
        groups = chosen.warps or 2
        halves = metal.halves(spec, groups, "\n")
        size = metal.middle_size(spec) * 4
        rows = spec.router.top_k * spec.width + (shared.width if shared else 0)
        launches = (
            (-(-rows // metal.ROWS // groups) + 1, groups * 32),
            (-(-(spec.out // metal.ROWS) // groups), groups * 32),
        )
        offsets = (4 * rows, 4 * rows + 128)
        kind = "float32"
    middle_type = mx.zeros((1,), getattr(mx, kind))
    texts = [(*halves[0], first, f"middle {kind}")]
    if whole:
        texts.append((*halves[1], {"middle": middle_type} | second, f"out {spec.dtype}"))
    runs = [f.result() for f in [POOL.submit(compile_text, language, *text) for text in texts]]
    views = tuple(dynamic_names(spec)) if shifted else ()
    middle = call(runs[0], first, size, *launches[0], late, schedule, shifted=views)
    k = spec.router.top_k
    found = {
        "chosen": array_of(middle[offsets[0] : offsets[0] + 4 * k], mx.uint32),
        "weights": array_of(middle[offsets[1] : offsets[1] + 4 * k], mx.float32),
        "middle": bytes(middle),
    }
    if whole:
        second = {"middle": array_of(middle, getattr(mx, kind))} | second
        out = call(runs[1], second, spec.out * 2, *launches[1], late, schedule)
        found["y"] = array_of(out, getattr(mx, spec.dtype))
    return found


def one_launch(
    spec: Spec,
    tensors: Tensors,
    *dynamic: Any,
    chosen: Geometry | None = None,
    blocks: int = 3,
    late: bool = False,
    schedule: int = 0,
    calls: int = 1,
) -> Any:
    """The block's output [out] by CUDA's kernel of one launch, all blocks at once on the CPU.

    calls: how often, over one counter; the last call's output.
    """
    return one_launch_later(spec, tensors, *dynamic, chosen=chosen, blocks=blocks)(
        late, schedule, calls
    )


def one_launch_later(
    spec: Spec,
    tensors: Tensors,
    *dynamic: Any,
    chosen: Geometry | None = None,
    blocks: int = 3,
    shifted: bool = False,
    memory: int = MEMORY,
) -> Callable[[bool, int, int], Any]:
    """``one_launch`` as a function (late, schedule, calls); the compiler begins at once, beside.

    memory: bytes of shared memory that a block may have.
    """
    check(spec)
    plan = cut(spec)
    pair = block_launch(spec, plan, chosen or Geometry(), blocks, memory)
    first, second = static_inputs(spec, tensors, False)
    ones = mx.full((cuda.place_bytes(spec) // 2,), 0xFFFFFFFF, mx.uint32)
    scratch = mx.concatenate([mx.zeros((cuda.SCRATCH_HEAD // 4,), mx.uint32), ones])
    inputs = dict(zip(dynamic_names(spec), dynamic, strict=True))
    inputs |= {"scratch": scratch} | first | second
    text = cuda.whole_block(spec, plan, pair, cuda.MATH)
    compiled = POOL.submit(compile_text, "cuda", *text, inputs, f"out {spec.dtype}")

    views = tuple(dynamic_names(spec)) if shifted else ()

    def run(late: bool, schedule: int, calls: int) -> Any:
        how = (pair[0].blocks, pair[0].threads, late, schedule, True, calls, views)
        out = call(compiled.result(), inputs, spec.out * 2, *how)
        return array_of(out, getattr(mx, spec.dtype))

    return run
