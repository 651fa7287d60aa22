"""What the record says of arms that remove work and bound nothing by it."""

from .numbers import show
from .tables import TERM_NAMES, Record, code


def lengthened(record: Record) -> list[str]:
    """Each arm and checkpoint whose token is longer though the arm removes work."""
    lines = []
    for checkpoint, result in record["results"].items():
        for arm, entry in result["arms"].items():
            if not entry["longer"]:
                continue
            terms = (entry["removes"] or {}).get("terms", [])
            removed = " and ".join(TERM_NAMES[term] for term in terms) or "the removed work"
            line = (
                f"{code(arm)} on {code(checkpoint)} removes work, and its token is "
                f"{show(entry['longer'])} **longer** than that of "
                f"{code(entry['against']['base'])}: it bounds nothing from above. Something "
                f"beside the work differs, and what {removed} cost cannot be read from it."
            )
            without = [
                code(name)
                for name, other in result["arms"].items()
                if (other["against"] or {}).get("gain_of") == arm
            ]
            if without:
                line += f" So it gives {', '.join(without)} no bound of what can be saved."
            lines.append(line)
    return lines


def outdone(record: Record) -> list[str]:
    """Each candidate that is faster than the arm without the block it stands beside."""
    return [
        f"{code(arm)} on {code(checkpoint)} saves {show(entry['against']['gain'])} of what "
        f"{code(entry['against']['gain_of'])} saves and is the faster one, by the rule: skipping "
        "the block is no bound there. Something beside the block's work differs between the two, "
        "for example how long they wait."
        for checkpoint, result in record["results"].items()
        for arm, entry in result["arms"].items()
        if entry["against"] and entry["against"]["outdoes"]
    ]
