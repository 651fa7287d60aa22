"""The parity stage: are an arm's tokens right? Each arm against the reference.

Twice: greedily, as it is measured, up to the first token that differs; and teacher-forced, both
on the reference's tokens, where one early difference does not hide all that follows.
"""

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import UserError
from ..files import write_json
from ..measure import bench as benches
from ..measure import guard as guards
from ..runtimes.client import WorkerError
from ..task import Task, ingredients

SCHEMA = "moescope/parity/1"
LOCK_LIMIT_S = 3600.0


def run(task: Task) -> None:
    """Writes parity.json (moescope/parity/1)."""
    params = task.params
    arms = params["arms"]
    (reference,) = (name for name, arm in arms.items() if arm["role"] == "reference")
    runtimes = [arm["runtime"] for arm in arms.values()]
    bench = benches.open_bench(task, runtimes, params["shape"]["prompt"])
    synthetic = ingredients(task.one("fetch"))["params"]["source"]["kind"] == "synthetic"
    backend = params["machine"]["backend"]
    scratch = task.work / "tmp"
    scratch.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {}
    with (
        guards.locked(f"parity {task.subject}", backend, LOCK_LIMIT_S, task.say),
        tempfile.TemporaryDirectory(dir=scratch, prefix="parity.") as folder,
    ):
        judge: Judge | None = None
        for name in sorted(arms, key=lambda name: name != reference):
            with benches.explained(name, bench, task):
                try:
                    seen = _decode(bench, arms[name], params["shape"], judge, Path(folder))
                except WorkerError as refused:
                    if refused.kind != "unsupported" or name == reference:
                        raise
                    found[name] = {"void": f"unsupported: {refused.message}"}
                    task.say(f"{name}: unsupported: {refused.message}")
                    continue
            if judge is None:
                judge = Judge(seen, params["limits"], params["shape"]["generate"], synthetic)
            found[name] = judge.compare(seen)
            task.say(f"{name}: {_told(found[name], name == reference)}")
    parity = {
        "schema": SCHEMA,
        "reference": reference,
        "repetition_excused": judge.excused,
        "arms": {name: found[name] for name in arms},
    }
    write_json(task.out / "parity.json", parity)


@dataclass(frozen=True)
class Seen:
    """What an arm did: its greedy tokens; its logits [len(continuation), vocab] (float32) over the
    reference's tokens; whether each pass saw only finite logits."""

    tokens: list[int]
    tokens_sha256: str
    finite: bool
    logits: np.ndarray


def _decode(
    bench: benches.Bench,
    arm: dict[str, Any],
    shape: dict[str, int],
    judge: "Judge | None",
    folder: Path,
) -> Seen:
    patches = arm.get("patches", [])
    save = folder / f"{arm['name']}.npy"
    with bench.worker(arm) as worker:
        worker.ask("load", benches.LOAD_LIMIT_S, **bench.loading(arm))
        given = {"prompt": bench.prompt, "patches": patches}
        greedy = worker.ask("decode", benches.FIRST_LIMIT_S, **given, tokens=shape["generate"])
        continuation = judge.reference.tokens if judge else greedy["tokens"]
        forced = worker.ask(
            "forced", benches.FIRST_LIMIT_S, **given, continuation=continuation, save=str(save)
        )
    logits = np.load(save, mmap_mode="r")
    if logits.shape != (len(continuation), forced["vocab"]):
        raise UserError(f"the forced pass wrote logits of shape {logits.shape}")
    return Seen(
        greedy["tokens"],
        greedy["tokens_sha256"],
        bool(greedy["finite"] and forced["finite"] and sound(logits)),
        logits,
    )


class Judge:
    """Compares what arms did with what the reference did.

    limits: decided_gap (logits), loop_period, loop_tokens. synthetic: the weights are random, so
    that text that repeats itself is no sign of a fault unless the reference's does not.
    """

    def __init__(self, reference: Seen, limits: dict[str, Any], generate: int, synthetic: bool):
        self.reference, self.limits, self.generate = reference, limits, generate
        self.excused = synthetic and self._loops(reference.tokens)

    def compare(self, arm: Seen) -> dict[str, Any]:
        """An arm's entry of parity.json; the reference's own is a comparison with itself."""
        loop = longest_loop(arm.tokens, self.limits["loop_period"])
        return {
            "greedy": self._greedy(arm),
            "forced": self._forced(arm) if arm.finite and self.reference.finite else None,
            "finite": arm.finite,
            "repetition": loop,
            "void": self._void(arm),
        }

    def _greedy(self, arm: Seen) -> dict[str, Any]:
        first = first_divergence(self.reference.tokens, arm.tokens)
        gap = None
        if first is not None and first < min(len(arm.tokens), len(self.reference.logits)):
            row = self.reference.logits[first]
            if arm.tokens[first] < len(row):
                gap = _finite(row[self.reference.tokens[first]] - row[arm.tokens[first]])
        return {
            "identical": first is None,
            "first_divergence": first,
            "logit_gap": gap,
            "tokens_sha256": arm.tokens_sha256,
        }

    def _forced(self, arm: Seen) -> dict[str, Any]:
        width = min(arm.logits.shape[1], self.reference.logits.shape[1])
        ours = np.asarray(arm.logits[:, :width], np.float64)
        theirs = np.asarray(self.reference.logits[:, :width], np.float64)
        same = ours.argmax(axis=1) == theirs.argmax(axis=1)
        two = np.partition(theirs, -2, axis=1)[:, -2:]
        decided = two[:, 1] - two[:, 0] >= self.limits["decided_gap"]
        perplexity = [perplexity_of(rows, self.reference.tokens) for rows in (ours, theirs)]
        return {
            "top1_agreement": float(same.mean()),
            "max_abs_logit": _finite(difference(ours, theirs).max()),
            "decided": int(decided.sum()),
            "decided_mismatches": int((decided & ~same).sum()),
            "perplexity_ratio": _finite(perplexity[0] / perplexity[1]),
            "tokens": len(same),
        }

    def _void(self, arm: Seen) -> str | None:
        if len(arm.tokens) != self.generate:
            return f"{len(arm.tokens)} tokens generated, not {self.generate}"
        if not arm.finite:
            return "NaN or Inf in the logits"
        if self._loops(arm.tokens) and not self.excused:
            loop = longest_loop(arm.tokens, self.limits["loop_period"])
            return (
                f"the text repeats itself: {loop['longest_loop']} tokens with period "
                f"{loop['period']}"
            )
        return None

    def _loops(self, tokens: list[int]) -> bool:
        loop = longest_loop(tokens, self.limits["loop_period"])
        return loop["longest_loop"] >= self.limits["loop_tokens"]


def first_divergence(reference: list[int], tokens: list[int]) -> int | None:
    """Index of the first token that differs, or where the shorter list ends; None if equal."""
    for index, (one, other) in enumerate(zip(reference, tokens, strict=False)):
        if one != other:
            return index
    return None if len(reference) == len(tokens) else min(len(reference), len(tokens))


def longest_loop(tokens: list[int], most: int) -> dict[str, int | None]:
    """The longest tail that repeats with a period of at most ``most``: {"longest_loop", "period"}.

    The length counts all tokens of the tail, whole periods or not; a tail shorter than two
    periods is no loop. Of equal lengths the smallest period is given.
    """
    best: dict[str, int | None] = {"longest_loop": 0, "period": None}
    for period in range(1, most + 1):
        length = period
        while length < len(tokens) and tokens[-1 - length] == tokens[-1 - length + period]:
            length += 1
        length = min(length, len(tokens))
        if length >= 2 * period and length > best["longest_loop"]:
            best = {"longest_loop": length, "period": period}
    return best


def sound(logits: np.ndarray) -> bool:
    """No NaN and no +inf; -inf is how a model masks tokens."""
    return not bool(np.isnan(logits).any() or np.isposinf(logits).any())


def difference(ours: np.ndarray, theirs: np.ndarray) -> np.ndarray:
    """Absolute differences; two tokens that are both masked do not differ."""
    with np.errstate(invalid="ignore"):
        return np.where(ours == theirs, 0.0, np.abs(ours - theirs))


def perplexity_of(logits: np.ndarray, tokens: list[int]) -> float:
    """exp of the mean negative log probability; logits [n, vocab], row i predicts token i."""
    shifted = logits - logits.max(axis=1, keepdims=True)
    logprobs = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return float(np.exp(-logprobs[np.arange(len(tokens)), tokens].mean()))


def _finite(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None


def _told(entry: dict[str, Any], reference: bool) -> str:
    if entry["void"]:
        return f"void: {entry['void']}"
    if reference:
        return "finite"
    greedy, forced = entry["greedy"], entry["forced"]
    where = greedy["first_divergence"]
    same = "identical" if where is None else f"differs from token {where} on"
    return f"{same}; top-1 agreement {forced['top1_agreement']:.3f}" if forced else same
