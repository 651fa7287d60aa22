"""The bench's variants of the kernels' text: what they replace is there, and nothing else goes."""

import dataclasses
import difflib
import sys
from pathlib import Path

import mlx.core as mx

from moescope.kernels import cuda, layout, samples, shim
from moescope.kernels.common import dynamic_names, static_inputs
from moescope.kernels.router import route
from moescope.kernels.spec import Router

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))
import timeline
import variants
import without

CORES, MEMORY = 132, 232448
BLOCKS = 13


def _body() -> str:
    spec = samples.block()
    plan = layout.cut(spec)
    return cuda.whole_block(
        spec, plan, layout.block_launch(spec, plan, layout.Geometry(), CORES, MEMORY)
    )[1]


def check_timeline():
    """Every point of time is noted, and the text is otherwise as it was."""
    body, stamped = _body(), timeline.stamped(_body())
    for number in range(len(timeline.NAMES)):
        assert f"STAMP({number})" in stamped, timeline.NAMES[number]
    lost = [
        line for line in difflib.ndiff(body.splitlines(), stamped.splitlines()) if line[0] == "-"
    ]
    assert not lost, lost


def check_without():
    """Each part can go by itself and after all the others; few lines change."""
    body = every = _body()
    for part in without.PARTS:
        alone = without.removed(body, part)
        changed = [
            line for line in difflib.ndiff(body.splitlines(), alone.splitlines()) if line[0] in "+-"
        ]
        assert 0 < len(changed) < 90, (part, len(changed))
        every = without.removed(every, part)
    assert "rows16<" in body and "rows16<A_ROWS, UP" not in every and "rows16<DOWN," not in every


LOGITS = {
    "apart": lambda n: mx.random.normal((n,)) * 2,
    "near": lambda n: mx.random.normal((n,)) * 0.003,  # rounding makes one score of many logits
    "few near": lambda n: mx.where(
        mx.arange(n) < 8, mx.array([5, 1, 7, 3, 0, 6, 2, 4] * (n // 8)) * 1e-3, -1
    ),
    "equal": lambda n: mx.zeros((n,)),
}


def _cancelling(tensors):
    """Each odd expert the negative of the one before: what is left shows the order of a sum."""

    def pairs(p, factor):
        at = mx.arange(p.experts)
        sign = mx.where(at % 2 == 1, factor, 1).astype(p.scales.dtype).reshape(-1, 1, 1)
        parts = {n: getattr(p, n)[at // 2 * 2] for n in ("weight", "scales", "biases")}
        parts |= {n: parts[n] * sign for n in ("scales", "biases")}
        return dataclasses.replace(p, **parts)

    halves = {
        "gate": pairs(tensors.gate, 1),
        "up": pairs(tensors.up, 1),
        "down": pairs(tensors.down, -1),
    }
    return dataclasses.replace(tensors, **halves)


def _guessing(spec, plan, pair):
    """Texts that guess: as the kernels' otherwise, and shorter."""
    header, body = cuda.whole_block(spec, plan, pair, cuda.MATH)
    yield header, variants.soon(pair[0], variants.guess(body))
    pair = variants.one_stage(spec, plan, pair)
    header, body = variants.single(*cuda.whole_block(spec, plan, pair, cuda.MATH))
    yield header, variants.short(spec, pair[0], variants.guess(body))


def check_guess():
    """Weights sent for by the logits' order give the kernels' bits: where the order is the
    scores', where it is not, and where the experts are not; in a shorter text too."""
    mx.random.seed(7)
    found = set()
    for high in (True, False):
        router = Router(128, 8, 128, score="softmax", high=high, weight="sum")
        spec = samples.block(experts=128, top_k=8, hidden=1024, width=128, router=router)
        spec = dataclasses.replace(spec, out=16 * (BLOCKS - 1))
        assert variants.fits(spec)
        tensors = _cancelling(samples.tensors_of(spec))
        x, _ = samples.inputs_of(spec)
        plan = layout.cut(spec)
        pair = layout.block_launch(spec, plan, layout.Geometry(), BLOCKS, shim.MEMORY)
        first, second = static_inputs(spec, tensors, False)
        ones = mx.full((cuda.place_bytes(spec) // 2,), 0xFFFFFFFF, mx.uint32)
        scratch = mx.concatenate([mx.zeros((cuda.SCRATCH_HEAD // 4,), mx.uint32), ones])
        runs = None
        for name, make in LOGITS.items():
            logits = make(128).astype(x.dtype).reshape(1, 1, -1)
            expected = shim.one_launch(spec, tensors, x, logits, blocks=BLOCKS)
            inputs = {"x": x, "logits": logits, "scratch": scratch} | first | second
            names = dynamic_names(spec)
            assert names == ["x", "logits"], names
            if runs is None:
                runs = [
                    shim.compile_text("cuda", *text, inputs, f"out {spec.dtype}")
                    for text in _guessing(spec, plan, pair)
                ]
            for run in runs:
                for late, schedule in ((False, 0), (True, 5)):
                    how = (BLOCKS, pair[0].warps * 32, late, schedule, True, 2)
                    out = shim.array_of(shim.call(run, inputs, spec.out * 2, *how), mx.bfloat16)
                    assert mx.array_equal(out, expected).item(), (name, high, late)
            chosen = route(router, logits, {})[0].tolist()
            values = logits.reshape(-1).tolist()
            ascending = sorted(range(128), key=lambda i: (values[i], i))
            best = ascending[-8:] if high else sorted(range(128), key=lambda i: -values[i])[:8]
            same = set(best) == set(chosen)
            found.add(
                "as guessed" if best == chosen else "other order" if same else "other experts"
            )
    assert found == {"as guessed", "other order", "other experts"}, found
