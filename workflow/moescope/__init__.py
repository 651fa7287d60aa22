"""moescope: where the decode time of mixture-of-experts models goes on MLX, with evidence."""

__version__ = "0.1.0"
