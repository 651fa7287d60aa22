"""Builds the CUDA kernels ahead, for a device machine whose time is short.

    PYTHONPATH=workflow python benchmarks/cubins_build.py FOLDER [--variants "" "warps=16" ...]

Arm's interpreter and nvcc, no GPU. Into FOLDER: cubins, cubins_run.py and manifest.json. There
``python3 FOLDER/cubins_run.py`` needs only the driver: seconds for dozens of variants, where a
process with MLX compiles for minutes. A variant is a geometry (see moescope.kernels.layout), and
may hold ``launches=2``, ``down=N`` (warps of the second half), ``timeline`` (of the last launch,
where its time went), ``without=PART`` (see without.py; both of one launch a block) or ``OLD->NEW``
(a replacement in the kernels' text, to try something).
Checks against the float32 reference run first, small shapes of all kinds.
"""

import argparse
import base64
import dataclasses
import json
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import mlx.core as mx
import timeline
import without

from moescope.kernels import cuda, layout, reference, samples, source
from moescope.kernels.common import dynamic_names, static_inputs
from moescope.kernels.router import route
from moescope.kernels.spec import Router, Spec

SHAPES = {
    "8 of 128, 2048 x 768": (samples.block(), 12),
    "6 of 256, 4096 x 2048": (
        samples.block(experts=256, top_k=6, hidden=4096, width=2048),
        3,
    ),
    "2 of 8, 4096 x 14336": (
        samples.block(
            experts=8,
            top_k=2,
            hidden=4096,
            width=14336,
            router=Router(8, 2, 8, high=False, weight="softmax"),
        ),
        3,
    ),
}
TYPES = {
    mx.bfloat16: "__nv_bfloat16",
    mx.float16: "__half",
    mx.float32: "float",
    mx.uint32: "unsigned",
    mx.int32: "int",
    mx.uint8: "unsigned char",
}
H200 = {"cores": 132, "shared_memory": 232448}


class Builder:
    """Collects kernel texts, compiles each once."""

    def __init__(self, folder: Path, arch: str):
        self.folder, self.arch = folder, arch
        self.texts: dict[str, str] = {}

    def add(self, header: str, body: str, inputs: dict[str, Any], output: str, edits: list) -> str:
        """Register a kernel named ``kernel``; returns its cubin's name."""
        name, kind = output.split()
        pointers = [f"const {TYPES[a.dtype]}* {n}" for n, a in inputs.items()]
        pointers.append(f"{kind}* {name}")
        text = "\n".join(
            [
                "#include <cuda_bf16.h>",
                "#include <cuda_fp16.h>",
                header,
                f'extern "C" __global__ void kernel({", ".join(pointers)}) {{',
                body,
                "}",
            ]
        )
        for old, new in edits:
            if old not in text:
                raise SystemExit(f"a variant replaces {old!r}, which is not in the text")
            text = text.replace(old, new)
        stamp = source.digest(text)
        self.texts[stamp] = text
        return stamp

    def compile(self) -> None:
        """All texts, two at a time; stops with the compiler's message."""

        def one(stamp: str) -> None:
            file = self.folder / f"{stamp}.cu"
            file.write_text(self.texts[stamp], encoding="utf-8")
            command = ["nvcc", f"-arch={self.arch}", "-cubin", "-O3", "-std=c++17"]
            done = subprocess.run(
                [*command, "--expt-relaxed-constexpr", "-o", file.with_suffix(".cubin"), file],
                capture_output=True,
                text=True,
                timeout=300,
                check=False,
            )
            if done.returncode:
                raise SystemExit(f"{stamp}: {done.stderr[:2000]}")
            file.unlink()

        with ThreadPoolExecutor(2) as pool:
            list(pool.map(one, self.texts))

    def block(self, spec: Spec, tensors: Any, dynamic: list, variant: str) -> dict[str, Any]:
        """Both kernels of a block: names of their inputs, launches, cubins."""
        items = [item for item in variant.split(",") if item]
        timed = "timeline" in items
        edits = [tuple(item.split("->", 1)) for item in items if "->" in item]
        warps = [int(item[5:]) for item in items if item.startswith("down=")]
        parts = [item[8:] for item in items if item.startswith("without=")]
        if (timed or parts) and "launches=2" in items:
            raise SystemExit(f"variant {variant}: of one launch a block")
        if set(parts) - set(without.PARTS):
            raise SystemExit(f"variant {variant}: without is one of {', '.join(without.PARTS)}")
        words = ("down=", "launches=", "without=")
        kept = [i for i in items if "->" not in i and i != "timeline" and not i.startswith(words)]
        chosen = layout.geometry(",".join(kept))
        layout.DOWN_WARPS, before = (warps or [layout.DOWN_WARPS])[0], layout.DOWN_WARPS
        plan = layout.cut(spec)
        layout.DOWN_WARPS = before
        kind = TYPES[getattr(mx, spec.dtype)]
        if "launches=2" in items:
            one = layout.first_launch(spec, plan, chosen, *H200.values())
            two = layout.down_launch(spec, plan, chosen, *H200.values())
            rows = cuda.prefetch_rows(spec, chosen)
            first, second = static_inputs(spec, tensors, rows > 0)
            first = dict(zip(dynamic_names(spec), dynamic, strict=True)) | first
            middle = {"middle": mx.zeros((1,), mx.uint32)}
            texts = (
                (cuda.first_half(spec, plan, one, rows), first, one, "middle unsigned"),
                (cuda.second_half(spec, plan, two), middle | second, two, f"out {kind}"),
            )
        else:
            pair = layout.block_launch(spec, plan, chosen, *H200.values())
            first, second = static_inputs(spec, tensors, False)
            first = dict(zip(dynamic_names(spec), dynamic, strict=True)) | first
            scratch = {"scratch": mx.zeros((1,), mx.uint32)}
            header, body = cuda.whole_block(spec, plan, pair)
            for part in parts:
                body = without.removed(body, part)
            body = timeline.stamped(body) if timed else body
            text = header, body
            texts = ((text, first | scratch | second, pair[0], f"out {kind}"),)
        halves = []
        for text, inputs, how, output in texts:
            header = text[0] + "\n" + cuda.bounds(how.threads, 1)
            used = [e for e in edits if e[0] in header + text[1]]
            halves.append(
                {
                    "cubin": self.add(header, text[1], inputs, output, used),
                    "inputs": list(inputs),
                    "blocks": how.blocks,
                    "threads": how.threads,
                    "shared": how.ring_bytes,
                    "stages": how.stages,
                    "steps": how.batch,
                    "points": timeline.NAMES if timed else (),
                }
            )
        return {"halves": halves, "arrays": first | second}


def small(spec: Spec) -> Spec:
    """The same kind of block with few experts, so that its weights can travel."""
    experts = min(spec.router.experts, 8)
    router = dataclasses.replace(
        spec.router,
        experts=experts,
        top_k=min(spec.router.top_k, 4),
        logits=experts + spec.router.logits - spec.router.experts,
    )
    hidden, width = (544, 96) if spec.up.group <= 32 else (576, 64)
    if spec.up.group == 128:
        hidden, width = 640, 128
    shared = dataclasses.replace(spec.shared, width=128) if spec.shared else None
    return dataclasses.replace(
        spec, hidden=hidden, out=hidden, width=width, router=router, shared=shared
    )


def packed(array: Any) -> str:
    """An array's bytes, to travel in JSON."""
    flat = mx.contiguous(array).reshape(-1).view(mx.uint8)
    mx.eval(flat)
    return base64.b64encode(bytes(memoryview(flat))).decode()


def main() -> None:
    """Build checks and variants."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--variants", nargs="*", default=["", "launches=2"])
    parser.add_argument("--arch", default="sm_90a")
    args = parser.parse_args()
    shutil.rmtree(args.folder, ignore_errors=True)
    args.folder.mkdir(parents=True)
    builder = Builder(args.folder, args.arch)
    manifest: dict[str, Any] = {"checks": [], "shapes": []}
    for name, (spec, arrays) in samples.cases().items():
        mx.random.seed(31)
        spec = small(spec)
        arrays = {k: v[: spec.router.experts] if v.size > 1 else v for k, v in arrays.items()}
        tensors = samples.tensors_of(spec, arrays)
        x, dynamic = samples.inputs_of(spec)
        made = builder.block(spec, tensors, [x, *dynamic], "")
        data = made.pop("arrays")
        again = builder.block(spec, tensors, [x, *dynamic], "launches=2,prefetch=0")
        made["again"] = again["halves"]
        given = {"shared_logit": dynamic[1]} if len(dynamic) > 1 else {}
        exact = reference.block(spec, tensors, x, dynamic[0], **given)
        chosen, _ = route(spec.router, dynamic[0], arrays)
        manifest["checks"].append(
            made
            | {
                "name": name,
                "dtype": spec.dtype,
                "top_k": spec.router.top_k,
                "middle": source.middle(spec)["MID_BYTES"],
                "chosen_at": source.middle(spec)["MID_CHOSEN"],
                "chosen": sorted(chosen.tolist()),
                "exact": exact.tolist(),
                "data": {k: packed(v) for k, v in data.items() if k != "middle"},
            }
        )
    for name, (spec, layers) in SHAPES.items():
        few = dataclasses.replace(spec, router=dataclasses.replace(spec.router, experts=1))
        tensors = samples.tensors_of(few)
        x, dynamic = samples.inputs_of(spec)
        rows = []
        for variant in args.variants:
            made = builder.block(spec, tensors, [x, *dynamic], variant)
            sizes = {k: v.nbytes for k, v in made.pop("arrays").items()}
            rows.append(made | {"variant": variant})
        experts = spec.router.experts
        for key in sizes:
            if key.endswith(("_w", "_s", "_b")):
                sizes[key] *= experts
        manifest["shapes"].append(
            {
                "name": name,
                "layers": layers,
                "bytes": spec.expert_bytes(),
                "middle": source.middle(spec)["MID_BYTES"],
                "out": spec.out * 2,
                "sizes": sizes,
                "variants": rows,
            }
        )
    for name in ("fill", "cold"):
        text = (Path(__file__).parent / f"{name}.cu").read_text(encoding="utf-8")
        builder.texts[name] = text
    builder.compile()
    (args.folder / "manifest.json").write_text(json.dumps(manifest))
    for name in ("cubins_run.py", "timeline.py"):
        shutil.copy(Path(__file__).parent / name, args.folder)
    size = sum(f.stat().st_size for f in args.folder.iterdir())
    print(f"{args.folder}: {len(builder.texts)} kernels, {size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
