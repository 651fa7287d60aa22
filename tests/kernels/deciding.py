"""The gate, the geometry, the cut: all that needs no device."""

import contextlib
import dataclasses
import itertools
import json
import os
import re
import subprocess
import tempfile
from pathlib import Path

import mlx.core as mx

from moescope.errors import UserError
from moescope.kernels import cuda, device, fuse, gate, layout, parity, patch, samples, shim
from moescope.kernels.common import dynamic_names, static_inputs
from moescope.kernels.device import Device
from moescope.kernels.layout import (
    Geometry,
    block_launch,
    cut,
    down_launch,
    first_launch,
    first_stage,
    tiles,
)

H200 = Device("cuda", "NVIDIA H200", 132, 232448, 90)


@contextlib.contextmanager
def environment(**values):
    """Environment variables for the time of a check."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _refused(call):
    try:
        call()
    except UserError as error:
        return str(error)
    raise AssertionError("not refused")


def _table(entries):
    folder = Path(tempfile.mkdtemp())
    file = folder / "crossover.json"
    file.write_text(json.dumps({"schema": gate.SCHEMA, "entries": entries}))
    return file


def check_crossover_is_measured_or_carried():
    """Exact device and MLX: as recorded. Anything else: the nearest, marked as carried."""
    entry = {"device": "NVIDIA H200", "language": "cuda", "mlx": "0.32.4", "max_width": 5000,
             "about": {"kind": "measured", "source": "record a"}}  # fmt: skip
    other = entry | {"mlx": "0.31.0", "max_width": 3000}
    other["about"] = {"kind": "measured", "source": "record b"}
    table = _table([other, entry])
    found = gate.crossover(H200, "0.32.4", table)
    assert (found.max_width, found.kind, found.source) == (5000, "measured", "record a")
    found = gate.crossover(H200, "0.33.0", table)
    assert (found.max_width, found.kind) == (5000, "carried")
    assert "MLX 0.32.4" in found.source
    found = gate.crossover(dataclasses.replace(H200, name="NVIDIA GB10"), "0.32.4", table)
    assert found.kind == "carried" and "NVIDIA H200" in found.source
    bad = _table([])
    bad.write_text('{"schema": "moescope/crossover/9", "entries": []}')
    assert "schema" in _refused(lambda: gate.crossover(H200, "0.32.4", bad))


def check_the_plan_and_the_gate_read_the_table_alike():
    """A result's key holds the width that the gate will find."""
    from moescope.study.crossover import asks, widest

    about = {"kind": "measured", "source": "record a"}
    rows = [("NVIDIA H200", "0.32.4", 5000), ("NVIDIA H200", "0.31.0", 3000),
            ("NVIDIA GB10", "0.33.0", 900)]  # fmt: skip
    table = _table(
        [{"device": d, "language": "cuda", "mlx": m, "max_width": w, "about": about}
         for d, m, w in rows]
    )  # fmt: skip
    for name in ("NVIDIA H200", "NVIDIA GB10", "NVIDIA B200"):
        for mlx in ("0.31.0", "0.32.4", "0.33.0", "0.40.0"):
            here = dataclasses.replace(H200, name=name)
            assert widest("cuda", name, mlx, table) == gate.crossover(here, mlx, table).max_width
    assert len(widest("cuda", None, "0.32.4", table)) == 3
    assert widest("metal", "Apple M1", "0.32.4", table) is None
    for env in ({gate.MODE: "force"}, {gate.MODE: "off"}, {gate.WIDTH: "9"}):
        assert not asks(["fused"], env)
    assert asks(["fused"], {}) and asks(["fused"], {gate.MODE: "on"}) and not asks([], {})


def check_committed_table():
    """Every entry says where it comes from; a measured one names its record."""
    data = json.loads(gate.TABLE.read_text())
    for entry in data["entries"]:
        about = entry["about"]
        assert set(entry) == {"device", "language", "mlx", "max_width", "about"}
        assert about["kind"] in ("measured", "carried")
        assert entry["language"] in ("cuda", "metal")
        assert about["source"] and entry["max_width"] > 0
        if about["kind"] == "measured":
            assert "record" in about["source"]


def check_variables():
    """on, off, force, a width: in this order of strength."""
    spec = samples.block(width=6400)
    with environment(MOESCOPE_FUSED="off"):
        assert gate.declined(spec, H200, "0.32.4") == "MOESCOPE_FUSED=off"
    with environment(MOESCOPE_FUSED="on", MOESCOPE_FUSED_MAX_WIDTH="6000"):
        assert "6400" in gate.declined(spec, H200, "0.32.4")
    with environment(MOESCOPE_FUSED="force", MOESCOPE_FUSED_MAX_WIDTH="6000"):
        assert gate.declined(spec, H200, "0.32.4") is None
    with environment(MOESCOPE_FUSED_MAX_WIDTH="6400"):
        assert gate.declined(spec, H200, "0.32.4") is None
    metal = Device("metal", "Apple M1 Ultra")
    assert "crossover 4096 (carried" in gate.declined(spec, metal, "0.32.4")
    with environment(MOESCOPE_FUSED="maybe"):
        assert "on, off or force" in _refused(gate.mode)
    with environment(MOESCOPE_FUSED_MAX_WIDTH="wide"):
        assert "MOESCOPE_FUSED_MAX_WIDTH" in _refused(gate.width_limit)


MALFORMED = {
    gate.MODE: ("maybe", "on, off or force"),
    gate.WIDTH: ("wide", "an expert width"),
    cuda.LAUNCHES: ("3", "1 or 2"),
    layout.VARIABLE: ("warps=0", "warps (1 to 32)"),
    parity.VARIABLE: ("yes", "1"),
    cuda.INLINE: ("2", "1"),
}
CASES = {"check_malformed_variables_come_first": list(MALFORMED)}


class _Untouchable:
    """A model that nobody may look at."""

    def __getattribute__(self, name):
        raise AssertionError(f"{name} was asked for")


def check_malformed_variables_come_first(name):
    """Each is refused by its name before anything else, whatever the model has."""
    value, allowed = MALFORMED[name]
    for backend in (None, "reference"):
        with environment(**{name: value}):
            message = _refused(lambda backend=backend: fuse(_Untouchable(), backend))
        assert message.startswith(f"{name}: ") and "\n" not in message, message
        assert f'"{value}" is not allowed' in message and allowed in message, message


def check_unknown_variables():
    """A misspelt one is told, and no known one is."""
    with environment(MOESCOPE_FUSED_WIDTH="1"):
        message = _refused(lambda: fuse(_Untouchable(), "reference"))
    assert message.startswith("MOESCOPE_FUSED_WIDTH: no such variable; there are MOESCOPE_FUSED, ")
    assert set(MALFORMED) == set(patch.VARIABLES)
    assert "warps is given twice" in _refused(lambda: layout.geometry("warps=16,warps=8"))


def check_widths_are_numbers():
    """Digits that are none to int() too."""
    for value in ("-1", "1e3", "\u00b2"):
        with environment(MOESCOPE_FUSED_MAX_WIDTH=value):
            assert "MOESCOPE_FUSED_MAX_WIDTH" in _refused(gate.width_limit)
    assert "MOESCOPE_FUSED_GEOMETRY" in _refused(lambda: layout.geometry("warps=\u00b2"))


def check_switches():
    """Variables that are on or off."""
    for value, want in (("1", True), ("", False), ("0", False), ("off", False), ("OFF", False)):
        with environment(MOESCOPE_FUSED_PARITY=value, MOESCOPE_FUSED_INLINE=value):
            assert parity.wanted() is want and cuda.inline() is want
    assert not parity.wanted() and not cuda.inline()


def check_cores_that_the_device_has():
    """One launch waits for itself: with more blocks than fit, for ever."""
    with environment(MOESCOPE_FUSED_GEOMETRY="cores=132"):
        assert patch.settings(H200).cores == 132
    with environment(MOESCOPE_FUSED_GEOMETRY="cores=133"):
        message = _refused(lambda: patch.settings(H200))
        assert "MOESCOPE_FUSED_GEOMETRY" in message
        assert "cores=133 is not allowed: NVIDIA H200 has 132 multiprocessors" in message
        assert patch.settings(None).cores == 133 == patch.settings(Device("metal", "M1")).cores
    spec = samples.block(experts=4, top_k=2, hidden=512, width=128)
    tensors = samples.tensors_of(spec)
    assert "132" in _refused(lambda: cuda.build(spec, tensors, Geometry(cores=133), H200))
    held, device.current = device.current, lambda: H200
    try:
        with environment(MOESCOPE_FUSED_GEOMETRY="cores=200"):
            assert "132" in _refused(lambda: fuse(_Untouchable()))
    finally:
        device.current = held


def check_geometry_variable():
    """Keys and ranges are checked, and named."""
    assert layout.geometry("warps=16,stages=2,prefetch=0") == Geometry(
        warps=16, stages=2, prefetch=0
    )
    assert layout.geometry("") == Geometry()
    for text in ("warps=0", "stages=1", "sgy=8", "warps", "warps=x"):
        message = _refused(lambda text=text: layout.geometry(text))
        assert "MOESCOPE_FUSED_GEOMETRY" in message and "warps (1 to 32)" in message


def check_cut_covers_every_step():
    """Each column is in exactly one part, for every sample and for odd sizes."""
    specs = [spec for spec, _ in samples.cases().values()]
    specs += [samples.block(hidden=h, width=w) for h in (128, 2880, 7168) for w in (96, 1408, 2880)]
    for spec in specs:
        plan = cut(spec)
        count = layout.steps(spec.hidden)
        assert (plan.warps - 1) * plan.each < count <= plan.warps * plan.each
        count = layout.steps(spec.width)
        if plan.joint:
            assert plan.joint * plan.down_each == spec.router.top_k * count
        else:
            assert (plan.split - 1) * plan.down_each < count <= plan.split * plan.down_each
        if spec.shared:
            count = layout.steps(spec.shared.width)
            assert plan.shared_split * plan.shared_each >= count
        assert layout.down_warps(spec, plan) <= 32


def check_launches_fit():
    """Every sample fits an H200; most fit a device with 99 KiB, with smaller stages."""
    left = []
    for name, (spec, _) in samples.cases().items():
        plan = cut(spec)
        for memory in (232448, 101376):
            for make in (first_launch, down_launch):
                how = make(spec, plan, Geometry(), 132, memory)
                if how is None:
                    left.append((name, memory))
                    continue
                assert how.stages >= 2 and how.warps <= 32
                assert how.ring_bytes <= memory
        one = first_launch(spec, plan, Geometry(), 132, 232448)
        assert one.blocks <= sum(tiles(spec))
        assert one.stage == first_stage(spec, one.batch, one.extra)
    assert not [item for item in left if item[1] == 232448], left


def check_plan_does_not_depend_on_the_device():
    """What decides the order of sums is the shape alone."""
    spec = samples.block()
    plan = cut(spec)
    for cores in (48, 108, 132):
        assert cut(spec) == plan
        first_launch(spec, plan, Geometry(), cores, 101376)


def check_bytes():
    """Bytes a token by hand: 8 of 128, 2048 x 768, affine 4 bits in groups of 64."""
    want = 8 * 3 * 2048 * 768 * (0.5 + 4 / 64)
    assert samples.block().expert_bytes() == want
    assert samples.block().label == "8 of 128, 2048 x 768, affine4g64"


def check_shared_memory_is_asked_for_in_full():
    """Static and dynamic memory together above 48 KiB: a request that MLX lifts the limit for."""
    from moescope.kernels.cuda import requested

    assert requested(20000, 8000) == 20000
    assert requested(40000, 12000) > 48000
    assert requested(200000, 12000) == 200000
    for spec, _ in samples.cases().values():
        plan = cut(spec)
        one = first_launch(spec, plan, Geometry(), 132, 232448)
        beside = layout.first_static(spec, one.warps)
        assert requested(one.ring_bytes, beside) + beside <= 232448


def _one_launches():
    """Blocks of one launch of several kinds: short runs near a device's limit, routers, sets."""
    kinds = samples.cases()
    found = [kinds[n] for n in ("affine4g64", "float16", "qwen3_next", "inkling", "gpt_oss")]
    found.append((samples.block(samples.FORMATS["affine4g32"], hidden=5632), {}))
    found.append((samples.block(experts=32, top_k=4, hidden=4224, width=1280), {}))
    for spec, arrays in found:
        plan = cut(spec)
        for cores, memory in ((132, 232448), (108, 166912), (84, 101376)):
            if pair := block_launch(spec, plan, Geometry(), cores, memory):
                yield spec, arrays, plan, pair, memory


def check_static_memory_is_counted_in_full():
    """What a kernel's text declares as shared, by its compiler, and the rings fit the device."""
    seen = {}
    for spec, arrays, plan, pair, memory in _one_launches():
        how = pair[0]
        shape = (spec, how.warps, how.sets, how.groups, how.beside)
        if shape not in seen:
            seen[shape] = _declared(spec, arrays, plan, pair)
        counted = layout.block_static(spec, plan, how.warps, how.sets)
        assert seen[shape] <= counted, (spec.label, seen[shape], counted)
        assert counted + how.ring_bytes <= memory, spec.label
    return {"texts": len(seen)}


def _declared(spec, arrays, plan, pair):
    few = dataclasses.replace(spec, router=dataclasses.replace(spec.router, experts=1))
    first, second = static_inputs(spec, samples.tensors_of(few, arrays), False)
    x, dynamic = samples.inputs_of(spec)
    inputs = dict(zip(dynamic_names(spec), [x, *dynamic], strict=True))
    inputs |= {"scratch": mx.zeros((1,), mx.uint32)} | first | second
    text = cuda.whole_block(spec, plan, pair, cuda.MATH)
    made = shim.library("cuda", *text, inputs, f"out {spec.dtype}")
    names = subprocess.run(
        ["nm", "-S", made], text=True, capture_output=True, timeout=60, check=True
    ).stdout
    # The function's own, but for the rings; 16 bytes apart at worst.
    own = re.findall(r"^\w+ (\w+) [bB] _ZZL6kernel.*(?<!rings)$", names, re.M)
    sizes = [int(size, 16) for size in own]
    assert len(sizes) >= 6
    return sum(-(-size // 16) * 16 for size in sizes)


def check_first_stages_are_the_first_halfs():
    """Where every warp sends for a stage of the first half, every block has a tile for each."""
    found = {True: 0, False: 0}
    for top_k, width, cores in itertools.product((1, 2, 3, 8), (64, 128, 192, 768), range(1, 150)):
        spec = samples.block(experts=8, top_k=top_k, width=width)
        plan = cut(spec)
        for chosen in (Geometry(), Geometry(warps=4)):
            pair = block_launch(spec, plan, chosen, cores, 232448)
            begins = cuda.begins_first(spec, plan, pair[0])
            found[begins] += 1
            values = cuda.first_values(spec, plan, pair[0], 0)
            soon, late = values["SOON_TILES"], values["ROUTED_TILES"] - values["SOON_TILES"]
            runs = [soon + late] if values["JOINT_RUNS"] else [soon, late]
            blocks = pair[0].blocks
            each = [
                sum((b + 1) * run // blocks - b * run // blocks for run in runs)
                for b in range(blocks)
            ]
            assert not begins or min(each) >= pair[0].groups, (top_k, width, cores, chosen)
    assert min(found.values()) > 100, found


def _launched(spec, launches):
    """(kernel's name, names of its inputs, its inputs) of three calls, without a device."""
    made = []

    def kernel(name, input_names, **_):
        def call(inputs, output_shapes, output_dtypes, **_):
            made.append((name.rsplit("_", 1)[0], input_names, inputs))
            return [mx.zeros(s, d) for s, d in zip(output_shapes, output_dtypes, strict=True)]

        return call

    before = getattr(mx.fast, "cuda_kernel", None)
    mx.fast.cuda_kernel = kernel
    cuda._kernel.cache_clear()
    os.environ[cuda.LAUNCHES] = launches
    try:
        run = cuda.build(spec, samples.tensors_of(spec), Geometry(), H200)
        x, dynamic = samples.inputs_of(spec)
        made.clear()
        for _ in range(3):
            assert run(x.shape, x, *dynamic).shape == x.shape
    finally:
        mx.fast.cuda_kernel = before
        cuda._kernel.cache_clear()
        del os.environ[cuda.LAUNCHES]
    return made


def check_one_launch_or_two():
    """One takes its arrays by their addresses, two scratches in turn; two name them all."""
    spec = samples.block(experts=4, top_k=2, hidden=512, width=128)
    one = _launched(spec, "1")
    assert [name for name, _, _ in one] == ["moescope_moe"] * 3
    assert {tuple(names) for _, names, _ in one} == {("x", "logits", "scratch")}
    scratches = [inputs[2] for _, _, inputs in one]
    assert scratches[0] is scratches[2] and scratches[0] is not scratches[1]
    ends = scratches[0][cuda.SCRATCH_HEAD // 4 :]
    assert ends.size * 4 == 2 * cuda.place_bytes(spec)
    assert mx.all(ends == 0xFFFFFFFF).item() and mx.all(scratches[0][:4] == 0).item()
    two = _launched(spec, "2")
    assert [name for name, _, _ in two] == ["moescope_gate_up", "moescope_down"] * 3
    assert "gate_w" in two[0][1] and "down_w" in two[1][1]
    # What stands for an array is a few elements at its own address.
    assert max(a.size for _, _, inputs in two for a in inputs) <= 4096 + spec.hidden
    try:
        _launched(spec, "3")
    except UserError as error:
        assert cuda.LAUNCHES in str(error)
    else:
        raise AssertionError("3 launches were taken")


def check_both_halves_fit_one_launch():
    """Every kind of block: rings and operand within the device's memory."""
    for name, (spec, _) in samples.cases().items():
        plan = cut(spec)
        for memory in (232448, 166912, 101376):
            pair = block_launch(spec, plan, Geometry(), 132, memory)
            if pair is None:
                assert memory < 232448, name
                continue
            one, two = pair
            fixed = layout.block_static(spec, plan, one.warps, one.sets)
            assert one.ring_bytes + fixed <= memory, name
            assert one.warps == two.warps <= 32 and one.groups <= 14 and one.stages >= 2, name
            assert one.blocks <= 132 and one.groups * plan.warps <= one.warps, name


def check_addresses_are_stored_in_order():
    """The PTX's stores: argument i at eight bytes times i of the last."""
    text = cuda.addresses_ptx("name", 3)
    assert ".entry name(.param .u64 p0, .param .u64 p1, .param .u64 p2, .param .u64 p3)" in text
    lines = [line for line in text.splitlines() if "[p" in line or "st." in line]
    assert lines[0] == "ld.param.u64 %rd0, [p3];"
    for i in range(3):
        assert lines[1 + 2 * i] == f"ld.param.u64 %rd1, [p{i}];"
        assert lines[2 + 2 * i] == f"st.global.u64 [%rd0+{8 * i}], %rd1;"


def check_studies_shapes_are_samples():
    """The experts of every checkpoint of studies/ are among the blocks that a GPU checks."""
    studies = Path(__file__).parents[2] / "studies" / "checkpoints"
    blocks = (samples.cases() | samples.shapes()).values()
    known = {(s.router.experts, s.router.top_k, s.hidden, s.width) for s, _ in blocks}
    keys = (
        ("num_experts", "n_routed_experts", "num_local_experts"),
        ("num_experts_per_tok", "top_k_experts"),
        ("hidden_size",),
        ("moe_intermediate_size", "intermediate_size"),
    )
    seen = 0
    for file in sorted(studies.glob("*.yaml")):
        text = file.read_text()
        found = [
            next((int(m[1]) for k in each if (m := re.search(rf"^ +{k}: (\d+)", text, re.M))), 0)
            for each in keys
        ]
        if found[0]:
            assert tuple(found) in known, (file.name, found)
            seen += 1
    assert seen >= 11
