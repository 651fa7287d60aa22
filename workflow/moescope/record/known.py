"""What the fused kernels know of their crossover, taken from a record with where it comes from.

``workflow/moescope/kernels/crossover.json`` holds the widest expert that is fused, per device and
MLX. An entry of the kind ``measured`` is made from a record, by rule and not by hand, so that it
can be made again and compared.
"""

import json
from itertools import takewhile
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..files import read_json, write_text
from .assemble import SCHEMA
from .crossover import place

TABLE = Path("workflow/moescope/kernels/crossover.json")
TABLE_SCHEMA = "moescope/crossover/1"
KEY = ("language", "device", "mlx")  # one entry for each
OVER, PATCH, FORCED = "expert_width", "fused", {"MOESCOPE_FUSED": "force"}


def enter(root: Path, folder: Path) -> dict[str, Any]:
    """Put a record's crossover into the table in the place of what stood there for its device and
    MLX; returns the entry. Raises UserError if the record gives none."""
    if not (root / folder / "record.json").is_file():
        raise UserError("the study has no record yet; make it first", folder.as_posix())
    made = entry(read_json(root / folder / "record.json", SCHEMA))
    table = read_json(root / TABLE, TABLE_SCHEMA)
    others = [one for one in table["entries"] if [one[k] for k in KEY] != [made[k] for k in KEY]]
    table["entries"] = [made, *others]
    write_text(root / TABLE, json.dumps(table, indent=2, ensure_ascii=False) + "\n")
    return made


def entry(record: dict[str, Any]) -> dict[str, Any]:
    """The table's entry that a record supports, by the token's time.

    ``max_width``: the widest up to which the arm is the faster one at every width measured, by the
    record's rule; up to the crossing, where the next width is slower. What is «no effect» is no
    win, and beyond what was measured nothing is known.
    """
    subject = f"{record['study']['name']}@{record['machine']['name']}"
    arm, found = _arm(record, subject)
    series = found["wall"]
    known = [point for point in series["points"] if point["ratio"]]
    if not known:
        raise UserError(f"no ratio of {arm} is known", subject)
    wins = list(takewhile(lambda point: point["effect"] == "faster", known))
    least, after = known[0]["at"]["value"], known[len(wins) : len(wins) + 1]
    width = wins[-1]["at"]["value"] if wins else least - 1
    beyond = next((one for one in series["crossings"] if one["at"]["value"] >= width), None)
    if not after:
        says = f"above 1 from {least} to {width}, the widest measured"
    elif not wins:
        if any(point["effect"] == "faster" for point in known):
            raise UserError(
                f"{arm} is not the faster one at {least} and is so at wider ones, which no widest "
                "expert says",
                subject,
            )
        says = f"not above 1 from {least} to {known[-1]['at']['value']}"
    elif after[0]["effect"] == "slower" and beyond:
        width = int(beyond["at"]["value"])
        says = f"above 1 from {least} on, and crosses 1 at {place(beyond, known)}"
    else:
        says = f"above 1 from {least} to {width}, "
        says += f"{after[0]['effect']} at {after[0]['at']['value']}"
    runtime = record["results"][known[0]["checkpoint"]]["arms"][arm]["runtime"]
    mlx = record["pins"]["runtimes"][runtime]["packages"].get("mlx")
    device = record["machine"].get("gpu")
    for what, value in (("machine names no gpu", device), ("runtime names no mlx", mlx)):
        if value is None:
            raise UserError(f"the record's {what}, by which the kernels know the entry", subject)
    return {
        "device": device,
        "language": record["machine"]["backend"],
        "mlx": mlx,
        "max_width": width,
        "about": {
            "kind": "measured",
            "source": f"record {subject}: decode rate ÷ the gather path's is {says}",
            "record": subject,
            "arm": arm,
            "measured": dict(record["measured"]),
            "measurements": {point["checkpoint"]: _key(point["ratio"]) for point in known},
        },
    }


def _arm(record: dict[str, Any], subject: str) -> tuple[str, dict[str, Any]]:
    """The one arm of the record's crossover over the width that fuses wherever it can."""
    asked = record["crossover"]
    if asked is None or asked["over"] != OVER:
        raise UserError(
            f"the record has no crossover over {OVER}; the study asks for none", subject
        )
    if asked["refused"]:
        raise UserError(f"the record gives no crossover: {asked['refused']}", subject)
    fused = {}
    for arm, found in asked["arms"].items():
        on = [result["arms"][arm] for result in record["results"].values()]
        if all(one["patches"] == [PATCH] and one["env"] == FORCED for one in on):
            fused[arm] = found
    if len(fused) != 1:
        raise UserError(
            f"one arm of the crossover is to have the patch {PATCH} and MOESCOPE_FUSED=force "
            f"alone, which no table decides over; found {', '.join(fused) or 'none'}",
            subject,
        )
    return next(iter(fused.items()))


def _key(ratio: dict[str, Any]) -> str:
    """The key of the measurement that a ratio is of: results/measure/<checkpoint>/<key>/."""
    return Path(ratio["files"][0]).parent.name


def unsupported(root: Path) -> list[str]:
    """Entries of the table that are called measured and that no committed record gives."""
    if not (root / TABLE).is_file():
        return []
    lines = []
    for one in read_json(root / TABLE, TABLE_SCHEMA)["entries"]:
        if one["about"]["kind"] != "measured":
            continue
        subject = one["about"].get("record", "")
        records = sorted((root / "results/records" / subject).glob("*/record.json"))
        if not any(_gives(path, one) for path in records):
            lines.append(
                f"{TABLE.as_posix()}: no committed record {subject} gives the entry of "
                f"{one['device']} with MLX {one['mlx']}; run `snakemake crossover` for its study"
            )
    return lines


def _gives(path: Path, wanted: dict[str, Any]) -> bool:
    try:
        return entry(read_json(path, SCHEMA)) == wanted
    except UserError:
        return False
