"""The parity stage: are an arm's tokens right? Each arm against the reference.

Twice: greedily, as it is measured, up to the first token that differs; and teacher-forced, both
on the reference's tokens, where one early difference does not hide all that follows.
"""

import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import UserError
from ..files import write_json
from ..measure import bench as benches
from ..measure import guard as guards
from ..runtimes.client import Worker, WorkerError
from ..task import Task, ingredients

SCHEMA = "moescope/parity/1"
LOCK_LIMIT_S = 3600.0


def run(task: Task) -> None:
    """Writes parity.json (moescope/parity/1). All arms run at the same time: nothing is timed."""
    params = task.params
    arms, shape = params["arms"], params["shape"]
    (reference,) = (name for name, arm in arms.items() if arm["role"] == "reference")
    runtimes = [arm["runtime"] for arm in arms.values()]
    bench = benches.open_bench(task, runtimes, shape["prompt"])
    synthetic = ingredients(task.one("fetch"))["params"]["source"]["kind"] == "synthetic"
    backend = params["machine"]["backend"]
    scratch = task.work / "tmp"
    scratch.mkdir(parents=True, exist_ok=True)
    with (
        guards.locked(f"parity {task.subject}", backend, LOCK_LIMIT_S, task.say),
        tempfile.TemporaryDirectory(dir=scratch, prefix="parity.") as folder,
    ):
        seen, unsupported = _decode(bench, task, reference, Path(folder))
        judge = Judge(seen[reference], params["limits"], shape["generate"], synthetic)
        found = {name: judge.compare(one) for name, one in seen.items()}
    found |= {name: {"void": f"unsupported: {why}"} for name, why in unsupported.items()}
    for name in arms:
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
    bench: benches.Bench, task: Task, reference: str, folder: Path
) -> tuple[dict[str, Seen], dict[str, str]]:
    """What each arm did, and the arms whose runtime does not know the model (arm -> why)."""
    arms: dict[str, dict[str, Any]] = dict(task.params["arms"])
    generate = task.params["shape"]["generate"]
    unsupported: dict[str, str] = {}
    with ExitStack() as stack:
        workers: dict[str, Worker] = {}
        for name, arm in arms.items():
            workers[name] = worker = bench.worker(arm)
            stack.callback(worker.close)
            with benches.explained(name, bench, task):
                worker.start()
        for name, worker in workers.items():
            with benches.explained(name, bench, task):
                worker.wait_ready()

        def ask(do: str, limit_s: float, more: dict[str, Any]) -> dict[str, dict[str, Any]]:
            """A request to all arms that are left; ``more`` has arguments by arm."""
            replies = benches.ask_all(workers, do, limit_s, more)
            for name, reply in replies.items():
                if isinstance(reply, WorkerError):
                    if do == "load" and reply.kind == "unsupported" and name != reference:
                        unsupported[name] = reply.message
                        workers.pop(name).close()
                        continue
                    with benches.explained(name, bench, task):
                        raise reply
            return {name: replies[name] for name in workers}

        ask("load", benches.LOAD_LIMIT_S, {name: bench.loading(arms[name]) for name in workers})
        given = {
            name: {"prompt": bench.prompt, "patches": arms[name].get("patches", [])}
            for name in workers
        }
        greedy = ask(
            "decode",
            benches.FIRST_LIMIT_S,
            {name: one | {"tokens": generate} for name, one in given.items()},
        )
        continuation = greedy[reference]["tokens"]
        forced = ask(
            "forced",
            benches.FIRST_LIMIT_S,
            {
                name: one | {"continuation": continuation, "save": str(folder / f"{name}.npy")}
                for name, one in given.items()
            },
        )
    seen = {}
    for name in workers:
        logits = np.load(folder / f"{name}.npy", mmap_mode="r")
        if logits.shape != (len(continuation), forced[name]["vocab"]):
            raise UserError(f"the forced pass wrote logits of shape {logits.shape}", f"arm {name}")
        seen[name] = Seen(
            greedy[name]["tokens"],
            greedy[name]["tokens_sha256"],
            bool(greedy[name]["finite"] and forced[name]["finite"] and sound(logits)),
            logits,
        )
    return seen, unsupported


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
