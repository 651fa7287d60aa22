"""Fused decode-MoE kernels as a library: ``report = fuse(model)``, ``unfuse(model)``.

Runs where the model runs: MLX, mlx-lm or mlx-vlm, and the standard library. See docs/kernels.md.
"""

from .parity import probe
from .patch import Fused, Report, fuse, unfuse

__all__ = ["Fused", "Report", "fuse", "probe", "unfuse"]
