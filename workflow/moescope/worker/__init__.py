"""What runs inside an arm's own interpreter: MLX, the runtime, and the standard library only.

``python -m moescope.worker`` reads requests and writes replies, one JSON value a line. Each command
is a module of this package with a function ``run(state, **arguments) -> dict``.
"""
