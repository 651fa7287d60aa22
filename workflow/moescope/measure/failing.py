"""What an arm failed of, from what its worker raised."""

from ..runtimes.client import WorkerError
from . import admission
from .failed import KINDS

COARSE = {"no_backend": "unsupported", "no_kernel": "unsupported", "killed": "crash"}
COARSE |= {"not_permitted": "failed", "protocol": "crash"}


def failure(error: WorkerError) -> dict[str, str]:
    """{"kind": one of KINDS, "why": one line without paths}.

    A worker often knows its own end only as a crash or a failure; its last words may say more.
    """
    kind = error.kind
    if kind in ("crash", "failed"):
        said = f"{error.message}\n{getattr(error, 'tail', '')}"
        status = getattr(error, "status", None)
        seen = admission.classify(status, said)
        # A crash that mentions something unsupported is still a crash.
        if seen == "out_of_memory" or (kind == "failed" and seen != "failed"):
            kind = seen
    kind = COARSE.get(kind, kind)
    why = admission.scrub(" ".join(error.message.split()))
    return {"kind": kind if kind in KINDS else "failed", "why": why}
