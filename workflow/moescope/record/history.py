"""The records of a study over time, by date and pin; what must not be joined is kept apart."""

from pathlib import Path
from typing import Any

from ..errors import UserError
from ..files import digest, read_json
from .assemble import SCHEMA
from .numbers import ABSENT, show
from .tables import code
from .writers import Markdown, Table, plain

Record = dict[str, Any]


def history(root: Path, study: str | None = None) -> str:
    """Markdown: for each checkpoint and series a table of its records, oldest first.

    A series is what may stand in one table: the same study, machine class, shape, and a checkpoint
    with the same tensors in the same quantisation. Rates of two sessions are no paired runs, so
    no ratio is taken between rows.
    """
    found, unreadable = [], []
    for path in sorted((root / "results" / "records").glob("*/*/record.json")):
        try:
            record = read_json(path, SCHEMA)
        except UserError as error:
            unreadable.append(str(error).replace(f"{root}/", ""))
            continue
        if study in (None, record["study"]["name"]):
            found.append(record)
    found.sort(key=lambda record: (record["measured"]["last"], record["key"]))
    writer = Markdown()
    if not found and not unreadable:
        return "No record is committed yet; `snakemake --cores 1 record` makes one."
    text = "".join(_study(writer, name, found) for name in _unique(found, _study_name))
    if unreadable:
        text += writer.p("Records that this version cannot read:")
        text += writer.items([plain(line) for line in unreadable])
    return writer.finish(text).rstrip()


def _study_name(record: Record) -> str:
    return record["study"]["name"]


def _unique(records: list[Record], key) -> list[Any]:
    return list(dict.fromkeys(key(record) for record in records))


def _study(writer: Markdown, name: str, records: list[Record]) -> str:
    mine = [record for record in records if record["study"]["name"] == name]
    text = writer.h(2, f"Study {code(name)}")
    series: dict[tuple, list[tuple[Record, str]]] = {}
    for record in mine:
        for checkpoint in record["results"]:
            series.setdefault(_series(record, checkpoint), []).append((record, checkpoint))
    for key, entries in series.items():
        _, machine, shape, checkpoint, _ = key
        recipe = entries[0][0]["checkpoints"][checkpoint]["recipe"] or ABSENT
        title = f"{code(checkpoint)} ({plain(recipe)}) on {code(machine)}, {shape}"
        text += writer.table(_table(entries), title)
        why = _apart(key, series)
        if why:
            text += writer.p(f"Not joined with {', '.join(why)}.")
    return text + writer.p(
        "Rows are sessions of their own: ratios within a row are paired by round, rates of two "
        "rows are not."
    )


def _series(record: Record, checkpoint: str) -> tuple:
    """(study, machine class, shape, checkpoint, its tensors and quantisation)."""
    shape = record["method"]["shape"]
    return (
        record["study"]["name"],
        record["machine"]["name"],
        f"{shape['prompt']} + {shape['generate']} tokens",
        checkpoint,
        record["checkpoints"][checkpoint]["compare"],
    )


def _apart(key: tuple, series: dict[tuple, Any]) -> list[str]:
    """Why other series of the same checkpoint are tables of their own."""
    lines = []
    for other in series:
        if other == key or other[3] != key[3]:
            continue
        differs = [
            f"{what} differs"
            for what, a, b in (
                ("the machine class", key[1], other[1]),
                ("the shape", key[2], other[2]),
                ("the recipe", key[4], other[4]),
            )
            if a != b
        ]
        lines.append(f"the series on {code(other[1])}, {other[2]}: {', '.join(differs)}")
    return lines


def _table(entries: list[tuple[Record, str]]) -> Table:
    rows, before = [], None
    for record, checkpoint in entries:
        result = record["results"][checkpoint]
        arms = result["arms"]
        reference = arms[record["reference"]]
        speed = show(reference["decode_rate"])
        rows.append(
            [
                record["measured"]["last"][:10],
                code(record["key"]),
                _pins(record, before, checkpoint),
                f"~~{speed}~~" if reference["void"] else speed,
                "; ".join(_ratios(arms)) or ABSENT,
                "; ".join(_verdicts(record, checkpoint)) or ABSENT,
            ]
        )
        before = record
    head = ["date", "record", "pins", "reference tokens/s", "ratio to it", "claims"]
    return Table(head, rows, {3})


def _versions(record: Record, checkpoint: str) -> dict[str, str]:
    """What is pinned: the packages of each runtime, and the checkpoint's source."""
    source = {k: v for k, v in record["pins"]["checkpoints"][checkpoint].items() if k != "key"}
    found = {"checkpoint": source.get("revision", digest(source))[:12]}
    for name, pin in record["pins"]["runtimes"].items():
        for package, version in pin["packages"].items():
            # MLX and the runtime; what else is locked follows from these.
            if package in ("mlx", pin.get("package")):
                found[f"{name}: {package}"] = version
        if pin.get("commit"):
            found[f"{name}: commit"] = pin["commit"][:12]
    return found


def _pins(record: Record, before: Record | None, checkpoint: str) -> str:
    """All pins in the first row; afterwards what changed since the row above."""
    now = _versions(record, checkpoint)
    if before is None:
        return plain(", ".join(f"{name} {version}" for name, version in now.items()))
    old = _versions(before, checkpoint)
    changed = [
        f"**{plain(name)}** {plain(old.get(name, ABSENT))} → {plain(now.get(name, ABSENT))}"
        for name in dict.fromkeys([*old, *now])
        if old.get(name) != now.get(name)
    ]
    if not changed and record["study"]["session"] != before["study"]["session"]:
        return f"same, session {record['study']['session']}"
    return ", ".join(changed) or "same"


def _ratios(arms: dict[str, Any]) -> list[str]:
    lines = []
    for name, arm in arms.items():
        if arm["role"] != "candidate" or arm["absent"]:
            continue
        if arm["void"]:
            lines.append(f"{code(name)} void")
        elif arm["against"]:
            effect = arm["against"]["decode_decision"]["effect"]
            lines.append(f"{code(name)} {show(arm['against']['decode'])}, {effect}")
    return lines


def _verdicts(record: Record, checkpoint: str) -> list[str]:
    return [
        f"{plain(claim['name'])} {claim['checkpoints'][checkpoint]['verdict']}"
        for claim in record["claims"]
        if checkpoint in claim["checkpoints"]
    ]
