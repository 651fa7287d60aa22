"""Why a job is stale and what it will cost, in words.

A stale job is compared with the nearest earlier result of the same stage and subject: the one
whose ingredients differ in the fewest places.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..files import read_json
from ..task import INGREDIENTS
from .plan import Job, Plan, folder


def explain(plan: Plan) -> str:
    """The stale jobs with their reasons, then what the run will cost as far as is known."""
    stale = plan.stale()
    if not stale:
        return f"{plan.record.subject}: nothing to do; the record is {plan.record.folder}"
    lines = [f"{plan.record.subject}: {len(stale)} of {len(list(plan))} jobs are stale"]
    if plan.unpinned:
        keys = ", ".join(plan.unpinned.values())
        lines.append(f"not pinned yet, so nothing of it can run: {keys}; run `snakemake pin`")
    names = {job.name for job in stale}
    known = [(job, *_nearest(plan.root, job)) for job in stale]
    for job, earlier, _cost in known:
        lines.append(f"\n{job.name}  {job.key}")
        lines += [f"  {reason}" for reason in _reasons(job, earlier, names)]
    lines += ["", *_costs(plan, known)]
    return "\n".join(lines)


def differences(old: Any, new: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """The leaves in which two JSON values differ: (path, old or None, new or None)."""
    if isinstance(old, dict) and isinstance(new, dict):
        for name in sorted({*old, *new}):
            below = f"{path}.{name}" if path else name
            yield from differences(old.get(name), new.get(name), below)
    elif old != new:
        yield path, old, new


def _nearest(root: Path, job: Job) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """(ingredients, cost) of the earlier result that differs least, or (None, None)."""
    best: tuple[int, str, dict[str, Any], Path] | None = None
    for path in sorted((root / folder(job.stage, job.subject, "")).glob("*/ingredients.json")):
        found = read_json(path, INGREDIENTS)
        count = sum(1 for _ in differences(_leaves(found), _leaves(job.ingredients)))
        candidate = (count, path.parent.name, found, path)
        if best is None or candidate[:2] < best[:2]:
            best = candidate
    if best is None:
        return None, None
    cost = best[3].with_name("cost.json")
    return best[2], read_json(cost) if cost.is_file() else None


def _leaves(ingredients: dict[str, Any]) -> dict[str, Any]:
    return {name: ingredients[name] for name in ("params", "upstream", "code")}


def _reasons(job: Job, earlier: dict[str, Any] | None, stale: set[str]) -> list[str]:
    if earlier is None:
        return ["no earlier result"]
    reasons = []
    for path, old, new in differences(earlier["params"], job.params):
        reasons.append(f"{path}: {_short(old)} -> {_short(new)}")
    for name in sorted({*earlier["upstream"], *job.upstream}):
        old, new = earlier["upstream"].get(name), job.upstream.get(name)
        if old == new:
            continue
        if new is None:
            reasons.append(f"no longer reads {name}")
        else:
            why = "is stale too" if name in stale else "has another result"
            reasons.append(f"reads {name}, which {why}: {old or 'new'} -> {new}")
    changed = [name for name, _old, _new in differences(earlier["code"], job.code)]
    if changed:
        reasons.append(f"its code changed: {', '.join(changed)}")
    return reasons or ["its files are incomplete; they are made again"]


def _short(value: Any) -> str:
    if value is None:
        return "(absent)"
    text = json.dumps(value, ensure_ascii=False)
    if isinstance(value, str) and len(value) == 64:
        text = f'"{value[:12]}..."'
    return text if len(text) <= 80 else f"{text[:77]}..."


def _costs(plan: Plan, known: list[tuple[Job, Any, Any]]) -> list[str]:
    """Seconds and memory from the nearest earlier results, bytes from their manifests."""
    seconds = sum(cost["seconds"] for _job, _earlier, cost in known if cost)
    memory = max((cost["peak_memory"] for _job, _earlier, cost in known if cost), default=0)
    unknown = [job.name for job, _earlier, cost in known if cost is None]
    lines = ["cost, from the nearest earlier runs:"]
    if seconds:
        lines.append(f"  about {seconds:.0f} s; at most {memory / 2**30:.1f} GiB in one process")
    if unknown:
        lines.append(f"  no earlier run of {len(unknown)}: {', '.join(unknown[:6])}"
                     + (", ..." if len(unknown) > 6 else ""))  # fmt: skip
    lines += _bytes(plan, known)
    return lines


def _bytes(plan: Plan, known: list[tuple[Job, Any, Any]]) -> list[str]:
    """What must be downloaded or made: weights that no earlier result left in work/."""
    measured = {"warmup", "measure", "trace", "parity", "inspect", "fetch"}
    wanted = {
        name.split("/", 1)[1]
        for job, _earlier, _cost in known
        if job.stage in measured
        for name in (*job.upstream, job.name)
        if name.startswith("fetch/")
    }
    lines = []
    for checkpoint in sorted(wanted):
        job = plan.job("fetch", checkpoint)
        kind = job.params["source"]["kind"]
        if kind == "local" or (plan.root / "work" / "checkpoints" / job.key).is_dir():
            continue
        size = _size(plan.root, job)
        verb = "download" if kind == "hub" else "make"
        amount = f"{size / 1e9:.2f} GB" if size is not None else "an unknown number of bytes"
        lines.append(f"  {verb} {checkpoint}: {amount}")
    return lines


def _size(root: Path, job: Job) -> int | None:
    """Bytes by this result's manifest, else by the nearest earlier one's."""
    for path in (root / job.folder, *sorted((root / "results/fetch" / job.subject).glob("*"))):
        manifest = path / "manifest.json"
        if manifest.is_file():
            return read_json(manifest)["bytes"]
    return None
