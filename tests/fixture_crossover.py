"""A results folder of a crossover study: checkpoints that differ in their experts' width alone."""

from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import fixture_results
from fixture_results import Tree, _arm
from moescope.files import read_json, write_json

ARM = "lm"  # the fixture traces the reference vlm and this one
ASKED = {"over": "expert_width", "arms": [ARM]}
MACHINE = {"name": "test-gpu-x1", "backend": "cuda", "gpu": "Test GPU"}
FORCE = {"MOESCOPE_FUSED": "force"}


@dataclass
class Series(Tree):
    """widths: expert width -> (decode rate of the arm ÷ of its base, the same of the block's GPU
    time), or None in place of the latter where the arm has no kernel trace there."""

    kernels: bool = True
    noise: float = 0.001
    widths: dict[int, tuple[float, float | None]] = field(default_factory=dict)

    def make(self) -> "Series":
        super().make()
        for width, (_, gpu) in self.widths.items():
            name = f"w{width}"
            path = self.folder(f"inspect/{name}") / "architecture.json"
            write_json(path, read_json(path) | {"expert_width": width})
            folder = self.folder(f"trace/{name}.{ARM}")
            if gpu is None:
                for table in ("kernels", "modules", "calls", "timeline"):
                    (folder / f"{table}.csv").unlink()
                (folder / "terms.json").unlink()
                continue
            base = read_json(self.folder(f"trace/{name}.vlm") / "terms.json")["terms"]
            terms = read_json(folder / "terms.json")
            for term, entry in terms["terms"].items():
                entry["ms"] = [ms / gpu for ms in base[term]["ms"]]
            write_json(folder / "terms.json", terms)
        return self

    def _runs(self, name, arm, number, position, host) -> list[dict[str, Any]]:
        token = 0.004 / (self.widths[int(name[1:])][0] if arm == ARM else 1.0)
        token *= host * self.random.gauss(1, self.noise)
        return [self._line(name, arm, number, position, 1, token, None)]


@contextmanager
def series(root: Path, widths: dict[int, tuple[float, float | None]], **more: Any):
    """A made Series; analyse and record it inside of the context."""
    checkpoints = {
        f"w{width}": {
            "role": "subject",
            "model_type": "qwen3_moe",
            "recipe": "affine 4-bit g64",
            "experts": 8,
            "top_k": 4,
            "token_ms": 4.0,
        }
        for width in widths
    }
    names = list(checkpoints)
    arms = {
        "vlm": _arm("vlm", "mlx-vlm", "reference", on=names),
        "vlm-null": _arm("vlm-null", "mlx-vlm", "null", on=names),
        ARM: _arm(ARM, "mlx-vlm", "candidate", ("fused",), on=names) | {"env": FORCE},
    }
    with ExitStack() as stack:
        for name, value in (("CHECKPOINTS", checkpoints), ("ARMS", arms), ("MACHINE", MACHINE)):
            stack.enter_context(mock.patch.object(fixture_results, name, value))
        yield Series(root, widths=widths, **more).make()
