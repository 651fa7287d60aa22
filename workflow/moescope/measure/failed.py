"""An arm that failed, as files hold it and as the record words it."""

# Kinds of a bad end; what admission tells apart more finely falls into one of them.
KINDS = ("out_of_memory", "timeout", "crash", "unsupported", "failed")


def told(found: dict[str, str]) -> str:
    """For {"kind", "why"}: "failed (out of memory): decode: the worker ended with 137"."""
    kind = found["kind"].replace("_", " ")
    return f"failed: {found['why']}" if kind == "failed" else f"failed ({kind}): {found['why']}"
