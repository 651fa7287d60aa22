"""What the fused kernels know of their crossover, taken from a record with where it comes from.

``workflow/moescope/kernels/crossover.json`` holds the widest expert that is fused, per device and
MLX. An entry of the kind ``measured`` is made from a record, by rule and not by hand, so that it
can be made again and compared.
"""

import json
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..files import read_json, write_text
from .assemble import SCHEMA
from .crossover import place
from .numbers import show

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

    ``max_width``: below the first crossing from faster to slower; the widest expert measured, where
    every one is faster. Beyond what was measured nothing is known, so nothing is fused there.
    """
    subject = f"{record['study']['name']}@{record['machine']['name']}"
    arm, found = _arm(record, subject)
    series = found["wall"]
    known = [point for point in series["points"] if point["ratio"]]
    crossing = next(iter(series["crossings"]), None)
    if crossing is not None and crossing["becomes"] == "faster":
        where = f"{show(crossing['at'], spread=False)}"
        raise UserError(
            f"{arm} is slower up to {where} and faster from there on, which no widest expert says",
            subject,
        )
    if crossing is not None:
        width = int(crossing["at"]["value"])
        says = f"crosses 1 at {place(crossing, known)}"
    elif series["side"] in ("faster", "never slower"):
        width = known[-1]["at"]["value"]
        says = f"does not fall below 1 from {known[0]['at']['value']} to {width}"
    elif series["side"] == "slower":
        width = known[0]["at"]["value"] - 1
        says = f"is below 1 from {known[0]['at']['value']} to {known[-1]['at']['value']}"
    else:
        raise UserError(f"{arm} is the faster one nowhere, or its ratio is not known", subject)
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
            "source": f"record {subject}: decode rate ÷ the gather path's {says}",
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
