"""Where the CUDA kernels' copies begin: at multiples of their size, whatever the shape.

A device faults at an address that is no multiple of an access's size; so does the shim.
"""

import dataclasses
import random
import re
import subprocess
import sys

import mlx.core as mx

from kernels import on_cpu
from moescope.kernels import cuda, reference, samples, shim, source
from moescope.kernels.common import check
from moescope.kernels.layout import Geometry, block_launch, cut, down_launch, first_launch
from moescope.kernels.spec import Router, Shared
from moescope.kernels.weights import Format, Unsupported

CASES = {"check_any_element": ["affine4g64", "qwen3_next", "float16"]}
FORMS = [
    *samples.FORMATS.values(),
    *(Format("affine", bits, group, "bfloat16") for bits in (6, 8) for group in (32, 128)),
]
KINDS = 260  # of stages, in one program
PROGRAM = """
static u8 stage_bytes[1 << 18] __attribute__((aligned(128)));
static u8 memory[1 << 20] __attribute__((aligned(128)));
static int failures;
template <class P, int D, int U, class PANEL>
static void expect(const u8* at, const u8* w, const u8* s, int step, int end, int scales_at) {
  const int first = step * 4 * PANEL::CHUNK, limit = min(end * 4 * PANEL::CHUNK, int(PANEL::ROW));
  const int ahead = step * 128 / P::GROUP * PANEL::EACH;
  for (int r = 0; r < 8; ++r) {
    for (int i = 0; i < PANEL::WIDE; ++i)
      failures += at[r * PANEL::STRIDE + PANEL::crossed(r, i)] !=
                  (first + i < limit ? w[r * PANEL::ROW + first + i] : 0);
    for (int i = 0; i < PANEL::SCALES; ++i) {
      const u8 have = at[scales_at + r * PANEL::SCALE_STRIDE + PANEL::late(r, step) + i];
      if (ahead + i < PANEL::SCALE_ROW) failures += have != s[r * PANEL::SCALE_ROW + ahead + i];
      else failures += !PANEL::COVERED && have != 0;  // covered: the next row's
    }
  }
}
template <class A, class B, int D, int U, int APART>
static void walk(int parts, int each) {
  typedef Stage<A, B, D, U, APART> S;
  typedef typename S::PA PA;
  typedef typename S::PB PB;
  for (int part = 0; part < parts; ++part) {
    const int begin = part * each, end = min(begin + each, (D + 127) / 128);
    for (int step = begin; step < begin + each; step += U) {
      if (step > begin && step < begin + each - 2 * U) continue;  // the first, the last two
      const int row = 8 * (part * 3 + 1);
      const u8* const m = memory;
      const Rows a = {m + row % 16 * PA::ROW, m + 4096 + row % 16 * PA::SCALE_ROW,
                      m + 8192 + row % 16 * PA::SCALE_ROW};
      const Rows b = {m + 12288 + row % 16 * PB::ROW, m + 16384 + row % 16 * PB::SCALE_ROW,
                      m + 20480 + row % 16 * PB::SCALE_ROW};
      memset(stage_bytes, 0x5a, S::SIZE);
      for (int lane = 0; lane < 32; ++lane)
        S::template fetch<false>(stage_bytes, a, b, step, end, lane);
      const u8* const at_b = stage_bytes + S::AT_B;
      expect<A, D, U, PA>(stage_bytes, a.w, a.s, step, end, PA::AT_SCALES);
      expect<B, D, U, PB>(at_b, b.w, b.s, step, end, PB::AT_SCALES);
      if (A::BIAS) expect<A, D, U, PA>(stage_bytes, a.w, a.b, step, end, PA::AT_BIASES);
      if (B::BIAS) expect<B, D, U, PB>(at_b, b.w, b.b, step, end, PB::AT_BIASES);
    }
  }
}
"""


def _specs(seed):
    """Blocks of all kinds of shape: widths and hidden sizes in groups' multiples, no others."""
    dice = random.Random(seed)
    while True:
        form, down = dice.choice(FORMS), dice.choice(FORMS)
        down = form if dice.random() < 0.6 else down
        unit = max(form.group, down.group, 32)
        hidden = unit * dice.randint(1, 7200 // unit)
        width = unit * dice.randint(1, dice.choice((15, 64, 460)) * 32 // unit)
        k = dice.randint(1, dice.choice((4, 8, 24)))
        gated = dice.random() < 0.8
        router = Router(64, k, 64)
        spec = samples.block(form, 64, k, hidden, width, down, gated, router)
        if dice.random() < 0.4:
            shared = unit * dice.randint(1, 4096 // unit)
            spec = dataclasses.replace(spec, shared=Shared(shared, spec.gate, form, down))
        geometry = Geometry(
            warps=dice.choice((0, 0, 3, 8, 16, 32)),
            steps=dice.choice((0, 0, 1, 2, 3, 8)),
            stages=dice.choice((0, 2, 3, 5)),
            cores=dice.choice((0, 0, 67)),
        )
        device = dice.choice(((132, 232448), (108, 166912), (84, 101376), (20, 101376)))
        try:
            check(spec)
        except Unsupported:
            continue
        yield spec, geometry, device


def _stages(spec, geometry, device):
    """The kinds of stage of a block, by one launch and by two: (A, B, columns, steps a stage,
    parts, steps of a part), as the bodies name them."""
    plan = cut(spec)
    fit = (spec, plan, geometry, *device)
    pairs = [block_launch(*fit), (first_launch(*fit), down_launch(*fit))]
    gate, shared = spec.gate or spec.up, spec.shared
    for first, second in filter(None, pairs):
        if first:
            yield gate, spec.up, spec.hidden, first.batch, plan.warps, plan.each
            if shared:
                kind = (shared.gate or shared.up, shared.up, spec.hidden)
                yield *kind, first.extra, plan.warps, plan.each
        if second:
            yield spec.down, spec.down, spec.width, second.batch, plan.split, plan.down_each
            if shared:
                kind = (shared.down, shared.down, shared.width)
                yield *kind, second.extra, plan.shared_split, plan.shared_each


def check_every_shape():
    """Copies of many blocks' stages: none askew, and each brings what it should."""
    found = {}
    for spec, _ in (samples.cases() | samples.shapes()).values():
        found |= dict.fromkeys(_stages(spec, Geometry(), (132, 232448)))
    blocks = 0
    for one in _specs(17):
        if len(found) >= KINDS:
            break
        found |= dict.fromkeys(_stages(*one))
        blocks += 1
    names = {form: f"F{i}" for i, form in enumerate({f for kind in found for f in kind[:2]})}
    calls = [
        f"walk<{names[a]}, {names[b]}, {columns}, {batch}, {0 if parts == 1 else each}>"
        f"({parts}, {each});"
        for a, b, columns, batch, parts, each in found
    ]
    header = [cuda.MATH, "#define UNROLL 8", source.text("formats.cuh"), source.text("matvec.cuh")]
    header += [source.projection(name, form) for form, name in names.items()]
    body = ["for (int i = 0; i < (1 << 20); ++i) memory[i] = u8(i * 2654435761u >> 13) | 1;"]
    body += [*calls, "*(int*)out = failures;"]
    text = ("\n".join([*header, PROGRAM]), "if (threadIdx.x == 0) {\n" + "\n".join(body) + "\n}")
    run = shim.compile_text("cuda", *text, {}, "out uint32")
    failures = int.from_bytes(shim.call(run, {}, 4, 1, 32), "little")
    assert failures == 0, failures
    odd = sum(parts > 1 and each % 2 for *_, parts, each in found)
    assert odd > 20, odd
    return {"blocks": blocks, "stages": len(found), "parts of odd steps": odd}


def check_lfm2_moe():
    """Two warps a row, seven steps each, stages of four: the second's scales begin at byte 28."""
    mx.random.seed(12)
    spec, arrays = samples.shapes()["lfm2-moe-6l"]
    spec = dataclasses.replace(
        spec,
        hidden=128,
        out=128,
        router=dataclasses.replace(spec.router, experts=6, logits=6),
    )
    assert (cut(spec).split, cut(spec).down_each) == (2, 7)
    tensors = samples.tensors_of(spec, {k: v[:6] for k, v in arrays.items()})
    x, dynamic = samples.inputs_of(spec)
    once = shim.one_launch_later(spec, tensors, x, *dynamic)
    two = shim.block("cuda", spec, tensors, x, *dynamic)
    picks = (two["chosen"], two["weights"])
    found = samples.distance(two["y"], reference.block(spec, tensors, x, picks=picks))
    assert found["finite"] and found["nrms"] <= 5e-4, found
    assert mx.array_equal(once(True, 5, 1), two["y"]).item()
    return found


def check_any_element(name):
    """What changes from call to call may be a view, and begin at any element of a buffer."""
    mx.random.seed(13)
    spec, arrays = samples.cases()[name]
    spec = on_cpu.small(spec)
    tensors = samples.tensors_of(spec, arrays)
    x, dynamic = samples.inputs_of(spec)
    once = shim.one_launch_later(spec, tensors, x, *dynamic, shifted=True)
    want = shim.block("cuda", spec, tensors, x, *dynamic)
    have = shim.block("cuda", spec, tensors, x, *dynamic, shifted=True)
    assert have["middle"] == want["middle"]
    assert mx.array_equal(have["y"], want["y"]).item()
    assert mx.array_equal(once(False, 0, 1), want["y"]).item()


def check_views_among_weights_are_copied():
    """Weights whose address is no multiple of 16 bytes; what lies well stays the same array."""
    whole = [mx.arange(24, dtype=mx.uint32), mx.arange(40, dtype=mx.uint32)[1:].reshape(3, 13)]
    whole += [mx.ones((1,))]
    words = mx.array([0x7F00, 1, 0x7F04, 1, 0x7F08, 1], mx.uint32)
    kept, moved, single = cuda.realigned(whole, words)
    assert kept is whole[0] and single is whole[2]
    assert moved is not whole[1] and mx.array_equal(moved, whole[1]).item()


def check_shared_arrays_declare_what_they_are_read_as():
    """An array in shared memory is only as aligned as it says."""
    text = "\n".join(p.read_text() for p in sorted(source.SOURCES.glob("*.body")))
    read = re.findall(r"\(const (uint4|uint2|float4|float2)\*\)\s*\(?(\w+)", text)
    read += [("uint4", "operand")]  # by way of a pointer
    sizes = {"uint4": 16, "float4": 16, "uint2": 8, "float2": 8}
    declared = dict(
        (name, int(size or 4))
        for size, name in re.findall(r"(?:alignas\((\d+)\) )?__shared__ \w+ (\w+)\[", text)
    )
    seen = {name for _, name in read if name in declared}
    assert {"sums", "keys", "operand"} <= seen, seen
    for kind, name in read:
        assert declared.get(name, 16) >= sizes[kind], name


def check_misplaced_accesses_are_noticed():
    """The shim stops at what a GPU would fault on, and says where: so passing says something."""
    accesses = {
        "load16((const u8*)x + 4);": "a load of 16 bytes",
        "*(float2*)(rings + 4) = float2{1.f, 2.f};": "an access as 'struct float2'",
        "const volatile u32 v = *(const u32*)((const u8*)x + 2);": "an access as",
        "copy8(rings, (const u8*)x + 4, false);": "a copy from global memory of 8 bytes",
        "copy16(rings + 8, x, true);": "a copy to shared memory of 16 bytes",
    }
    for access, said in accesses.items():
        code = (
            "import mlx.core as mx\n"
            "from moescope.kernels import shim\n"
            "given = {'x': mx.zeros((16,), mx.uint32)}\n"
            f"body = 'DYNAMIC_SHARED(rings);\\n{access}'\n"
            "run = shim.compile_text('cuda', '', body, given, 'out uint32')\n"
            "shim.call(run, given, 64, 1, 32)\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, timeout=60, check=False, text=True
        )
        assert done.returncode != 0, access
        assert said in done.stderr and ".cc:" in done.stderr, (access, done.stderr)
