"""Runs what cubins_build.py built: checks, then times. Standard library and the CUDA driver only.

    python3 FOLDER/cubins_run.py [SHAPE ...]

Times are of chains over layers with other experts each time, so that weights come from memory, as
one CUDA graph; µs per launch from start to start, launch gaps included. "cold": the same where
each launch comes after cold.cu, whose own time is taken off. "share": what the bytes
would take at this session's copy rate, over the time of both halves. Of a shape's variants, whether
one launch gives the first one's bits. "timeline": clocks of the
multiprocessor, minimum, tenths 1, 5 and 9, maximum over the warps of the last launch.
"""

import base64
import ctypes as c
import json
import math
import statistics
import struct
import sys
from pathlib import Path

import timeline

HERE = Path(__file__).parent
ROUNDS = 8
driver = c.CDLL("libcuda.so.1")


def check(code, what=""):
    """Stop on an error of the driver, with its words."""
    if code:
        text = c.c_char_p()
        driver.cuGetErrorString(code, c.byref(text))
        raise RuntimeError(f"{what}: {code} {text.value}")


class Gpu:
    """One context and stream."""

    def __init__(self):
        device, context = c.c_int(), c.c_void_p()
        self.stream = c.c_void_p()
        check(driver.cuInit(0))
        check(driver.cuDeviceGet(c.byref(device), 0))
        check(driver.cuDevicePrimaryCtxRetain(c.byref(context), device))
        check(driver.cuCtxSetCurrent(context))
        check(driver.cuStreamCreate(c.byref(self.stream), 1))
        self.functions, self.seed = {}, 0
        count = c.c_int()
        check(driver.cuDeviceGetAttribute(c.byref(count), 16, device))
        self.count = count.value  # multiprocessors

    def function(self, cubin, shared=0):
        """The kernel of a cubin, its dynamic shared memory allowed."""
        if cubin not in self.functions:
            data = (HERE / f"{cubin}.cubin").read_bytes()
            module, function = c.c_void_p(), c.c_void_p()
            check(driver.cuModuleLoadData(c.byref(module), data), cubin)
            check(driver.cuModuleGetFunction(c.byref(function), module, b"kernel"), cubin)
            self.functions[cubin] = function, data
        function = self.functions[cubin][0]
        check(driver.cuFuncSetAttribute(function, 8, shared), f"{shared} bytes of shared memory")
        return function

    def launch(self, function, blocks, threads, shared, arguments):
        """One launch; arguments are ctypes values."""
        pointers = [c.cast(c.pointer(a), c.c_void_p) for a in arguments]
        array = (c.c_void_p * len(pointers))(*pointers)
        check(
            driver.cuLaunchKernel(
                function, blocks, 1, 1, threads, 1, 1, shared, self.stream, array, None
            ),
            "launch",
        )

    def half(self, half, buffers, output):
        """One half of a block."""
        function = self.function(half["cubin"], half["shared"])
        pointers = [c.c_uint64(buffers[name]) for name in half["inputs"]] + [c.c_uint64(output)]
        self.launch(function, half["blocks"], half["threads"], half["shared"], pointers)

    def cold(self):
        """Leaves nothing else in the instruction caches."""
        values = [c.c_uint64(0), c.c_float(0.5), c.c_float(0.25)]
        self.launch(self.function("cold"), self.count, 128, 0, values)

    def allocate(self, size):
        pointer = c.c_uint64()
        check(driver.cuMemAlloc_v2(c.byref(pointer), c.c_size_t(size + 256)), f"{size} bytes")
        return pointer.value

    def free(self, pointer):
        check(driver.cuMemFree_v2(c.c_uint64(pointer)))

    def random(self, size, kind):
        """A buffer of random words (fill.cu says which kinds)."""
        pointer = self.allocate(size)
        self.seed += 1
        values = [c.c_uint64(pointer), c.c_uint64(size // 4), c.c_uint(self.seed), c.c_int(kind)]
        self.launch(self.function("fill"), 1056, 256, 0, values)
        return pointer

    def upload(self, data):
        pointer = self.allocate(len(data))
        check(driver.cuMemcpyHtoD_v2(c.c_uint64(pointer), data, c.c_size_t(len(data))))
        return pointer

    def download(self, pointer, size):
        data = c.create_string_buffer(size)
        check(driver.cuMemcpyDtoH_v2(data, c.c_uint64(pointer), c.c_size_t(size)), "download")
        return data.raw

    def wait(self):
        check(driver.cuStreamSynchronize(self.stream), "run")

    def graph(self, work):
        """What ``work`` launches, as one graph to launch again."""
        graph, ready = c.c_void_p(), c.c_void_p()
        check(driver.cuStreamBeginCapture_v2(self.stream, 0))
        work()
        check(driver.cuStreamEndCapture(self.stream, c.byref(graph)))
        check(driver.cuGraphInstantiateWithFlags(c.byref(ready), graph, c.c_ulonglong(0)))
        return lambda: check(driver.cuGraphLaunch(ready, self.stream))

    def times(self, work, count):
        """Milliseconds of ``count`` runs after one that is not counted."""
        first, last, found = c.c_void_p(), c.c_void_p(), []
        for event in (first, last):
            check(driver.cuEventCreate(c.byref(event), 0))
        for _ in range(count + 1):
            check(driver.cuEventRecord(first, self.stream))
            work()
            check(driver.cuEventRecord(last, self.stream))
            self.wait()
            took = c.c_float()
            check(driver.cuEventElapsedTime(c.byref(took), first, last))
            found.append(took.value)
        return found[1:]


def floats(data, dtype):
    """Bytes of bfloat16 or float16 as floats."""
    if dtype == "float16":
        return list(struct.unpack(f"<{len(data) // 2}e", data))
    halves = struct.unpack(f"<{len(data) // 2}H", data)
    return [struct.unpack("<f", struct.pack("<I", h << 16))[0] for h in halves]


def rounded(values, dtype):
    """Floats rounded once to the type, to nearest even."""
    if dtype == "float16":
        return list(struct.unpack(f"<{len(values)}e", struct.pack(f"<{len(values)}e", *values)))
    words = [struct.unpack("<I", struct.pack("<f", v))[0] for v in values]
    words = [(w + 0x7FFF + (w >> 16 & 1)) & 0xFFFF0000 for w in words]
    return [struct.unpack("<f", struct.pack("<I", w))[0] for w in words]


def run_check(gpu, case):
    """One small block against the reference; the same bits three times, and by two launches."""
    buffers = {name: gpu.upload(base64.b64decode(text)) for name, text in case["data"].items()}
    buffers["middle"] = gpu.upload(b"\xff" * case["middle"])
    buffers["scratch"] = gpu.upload(b"\0" * 512 + b"\xff" * 2 * (case["middle"] + 128))
    size = len(case["exact"]) * 2
    results = set()
    for halves in (case["halves"],) * 3 + (case["again"],):
        out = gpu.upload(b"\xff" * size)
        for half in halves:
            gpu.half(half, buffers, buffers["middle"] if half is not halves[-1] else out)
        gpu.wait()
        results.add(gpu.download(out, size))
    middle = gpu.download(buffers["scratch"], case["middle"] + 512)
    at, k = case["chosen_at"] + 512, case["top_k"]
    chosen = sorted(struct.unpack(f"<{k}I", middle[at : at + 4 * k]))
    want = rounded(case["exact"], case["dtype"])
    have = floats(results.pop(), case["dtype"])
    error = sum((a - b) ** 2 for a, b in zip(have, want, strict=True))
    error = math.sqrt(error / sum(b * b for b in want))
    differ = sum(a != b for a, b in zip(have, want, strict=True)) / len(want)
    same = "same bits" if not results else "NOT THE SAME BITS"
    experts = "experts as MLX" if chosen == case["chosen"] else f"experts {chosen}"
    print(f"{case['name']}: nrms {error:.1e}, {differ:.2%} differ, {same}, {experts}", flush=True)


def spread(values):
    """Minimum, tenths 1, 5 and 9, maximum."""
    values = sorted(values)
    return " ".join(str(values[(len(values) - 1) * tenth // 10]) for tenth in (0, 1, 5, 9, 10))


def print_timeline(stamps, half):
    """The points that a chain's last launch's warps have noted; what one has not passed is 0.
    Before: when the launch before was left."""
    warps, form = half["threads"] // 32, f"<{timeline.LONGS}I"

    def rows_of(turn):
        places = [
            timeline.BYTES_AT + (turn * timeline.ROWS + block * 32 + warp) * timeline.LONGS * 4
            for block in range(half["blocks"])
            for warp in range(warps)
        ]
        rows = [struct.unpack_from(form, stamps, place) for place in places]
        return [row for row in rows if row[-2]]  # the warp that only chooses has noted nothing

    before, rows = sorted(map(rows_of, (0, 1)), key=lambda rows: max(row[-2] for row in rows))
    first = min(row[-2] for row in rows)
    print(f"  before, ns: {max(row[-1] for row in before) - first}")
    print(f"  enter, ns: {spread([row[-2] - first for row in rows])}")
    print(f"  leave, ns: {spread([row[-1] - first for row in rows])}")
    for number, name in enumerate(half["points"]):
        if passed := [row[number] for row in rows if row[number]]:
            print(f"  {name}, clocks: {spread(passed)} ({len(passed)} warps)")


def run_shape(gpu, shape, rate):
    """Every variant of one shape."""
    layers = shape["layers"]
    many = {}
    kinds = {"w": 0, "s": 1, "b": 1, "logits": 3}
    for name, size in shape["sizes"].items():
        if name in ("middle", "scratch"):
            continue
        kind = kinds.get(name.rpartition("_")[2], 2)
        count = layers if "_" in name else layers * ROUNDS if name == "logits" else 1
        many[name] = [gpu.random(max(size, 256), kind) for _ in range(count)]
    many["middle"] = [gpu.allocate(shape["middle"])]
    out = gpu.allocate(shape["out"])
    gpu.wait()
    floor = shape["bytes"] / rate * 1e6

    def chain(halves, cold=False):
        for i in range(layers * ROUNDS):
            buffers = {name: given[i % len(given)] for name, given in many.items()}
            if cold:
                gpu.cold()
            for half, target in halves:
                gpu.half(half, buffers, target)

    def each(*given):
        work = gpu.graph(lambda: chain(*given))
        return [t * 1e3 / (layers * ROUNDS) for t in gpu.times(work, 5)]

    first_bits, between = None, statistics.median(each((), True))
    for variant in shape["variants"]:
        places = b"\0" * 512 + b"\xff" * 2 * (shape["middle"] + 128)
        halves = variant["halves"]
        timed = halves[0] if halves[0]["points"] else None
        if timed:
            places = places.ljust(timeline.END, b"\0")
        many["scratch"] = [gpu.upload(places)]
        pair = list(zip(halves, [many["middle"][0], out][-len(halves) :], strict=True))
        parts = [("both", pair)]
        parts += [("first", pair[:1]), ("second", pair[1:])] if pair[1:] else []
        found = {}
        for name, halves in parts:
            found[name] = each(halves)
        stamps = [gpu.download(many["scratch"][0], timeline.END)] if timed else []
        found["cold"] = [t - between for t in each(pair, True)]
        stamps += [gpu.download(many["scratch"][0], timeline.END)] if timed else []
        for half, target in pair:
            gpu.half(half, {name: given[0] for name, given in many.items()}, target)
        gpu.wait()
        bits = gpu.download(out, shape["out"])
        first_bits = first_bits or bits
        both = found["both"]
        text = " ".join(f"{n} {statistics.median(t):.2f}" for n, t in found.items())
        how = [
            f"{h['threads'] // 32} warps, {h['stages']} x {h['steps']}" for h in variant["halves"]
        ]
        print(
            f"{shape['name']} [{variant['variant']}] ({'; '.join(how)}): {text} µs "
            f"({min(both):.2f} to {max(both):.2f}), floor {floor:.2f}, "
            f"share {floor / statistics.median(both):.3f}, "
            f"{'the same bits' if bits == first_bits else 'OTHER BITS'}",
            flush=True,
        )
        for name, noted in zip(("warm", "cold"), stamps, strict=False):
            print(f"  {name}")
            print_timeline(noted, timed)
    for given in many.values():
        for pointer in given:
            gpu.free(pointer)


def main():
    """Copy rate, checks, shapes."""
    gpu = Gpu()
    manifest = json.loads((HERE / "manifest.json").read_text())
    size = 4 << 30
    a, b = gpu.random(size, 0), gpu.allocate(size)
    copy = lambda: check(  # noqa: E731
        driver.cuMemcpyDtoDAsync_v2(c.c_uint64(b), c.c_uint64(a), c.c_size_t(size), gpu.stream)
    )
    rates = [2 * size / t * 1e3 for t in gpu.times(copy, 7)]
    print("copy, TB/s:", " ".join(f"{r / 1e12:.3f}" for r in rates), flush=True)
    gpu.free(a)
    gpu.free(b)
    for case in manifest["checks"]:
        run_check(gpu, case)
    for shape in manifest["shapes"]:
        if not sys.argv[1:] or shape["name"] in sys.argv[1:]:
            run_shape(gpu, shape, statistics.median(rates))


if __name__ == "__main__":
    main()
