"""The record's tables about kernels: how far a trace may be trusted, the sweep of dispatch, the
host beside the GPU, and the answers to the study's questions."""

from typing import Any

from ..verdict.modules import LEAST
from .numbers import ABSENT, show
from .tables import NO_BOUND, TERM_NAMES, Record, code, columns, greedy, traced, unsteady
from .writers import Table, plain


def bars(record: Record) -> Table:
    """Each bar of each kernel trace, met or not, and what explains a miss."""
    rows = []
    for checkpoint, arm, found in traced(record):
        for bar in found["bars"]:
            by = ", ".join(
                f"{plain(one['name'])} {_shown(one['figure'], bar['than'])}" for one in bar["by"]
            )
            why = f"{plain(bar['why'])} ({by})" if bar["why"] and by else plain(bar["why"] or "")
            if not why:
                why = ABSENT if bar["met"] else "no measurement here explains it"
            rows.append(
                [
                    code(checkpoint),
                    code(arm),
                    plain(bar["bar"]),
                    f"{bar['than'] * 100:g} %",
                    _beside(bar["figure"], bar["than"]),
                    "met" if bar["met"] else "**not met**",
                    why,
                ]
            )
    head = ["checkpoint", "arm", "bar", "at most", "measured", "", "explained by"]
    table = columns(rows, head, 3)
    table.numbers -= {5, 6}
    return table


def _beside(figure: dict[str, Any], than: float) -> str:
    """A share; with more digits where rounding would hide on which side of its bar it lies."""
    percent, limit = figure["value"] * 100, f"{than * 100:g}"
    return f"{percent:.4g} %" if f"{percent:.2g}" == limit else show(figure)


def _shown(figure: dict[str, Any], than: float) -> str:
    return f"{show(figure)} ms/token" if figure["unit"] == "ms/token" else _beside(figure, than)


def proofs(record: Record) -> list[str]:
    """Arms that declare the kernels of their experts, and whether the trace shows them."""
    lines = []
    for checkpoint, arms in record["attribution"]["kernels"].items():
        for arm, found in arms.items():
            claimed = found["path"]["claimed"]
            if not claimed:
                continue
            void = record["results"][checkpoint]["arms"][arm]["void"]
            proved = "proved by the forced pass" if found["path"]["by_forced"] else "proved"
            says = {True: proved, False: f"**not taken**: {plain(void or '')}"}
            state = says.get(found["path"]["proved"], "not proved, see below")
            patterns = " or ".join(code(pattern) for pattern in claimed)
            lines.append(f"{code(arm)} on {code(checkpoint)} is to run {patterns}: {state}.")
    return lines


def modules(found: dict[str, Any]) -> Table:
    """A kernel trace's time by module: the large ones, and the rest in one line."""
    rows = [[_module(row), _term(row["term"]), *_sums(row)] for row in found["modules"]["rows"]]
    if rest := found["modules"]["rest"]:
        text = f"{show(rest['modules'])} more, below {LEAST * 100:g} % each"
        rows.append([text, ABSENT, *_sums(rest)])
    head = ["module", "term", "launches/token", "ms/token", "share of busy"]
    return columns(rows, head, 2)


def others(record: Record, checkpoint: str) -> list[str]:
    """What the term «other» consists of, in each trace in which it is large."""
    lines = []
    for name, arm, found in traced(record):
        other = (found["modules"] or {}).get("other")
        if name == checkpoint and other and not found["refused"]:
            largest = ", ".join(f"{_module(r)} {show(r['share'])}" for r in other["largest"])
            lines.append(
                f"In {code(arm)} the term other takes {show(other['share'])} of the GPU's busy "
                f"time; its largest modules: {largest}."
            )
    return lines


def _module(row: dict[str, Any]) -> str:
    return "outside modules" if row["module"] == "-" else code(row["module"])


def _term(name: str) -> str:
    return TERM_NAMES.get(name, plain(name))


def _sums(row: dict[str, Any]) -> list[str]:
    return [show(row[what]) for what in ("launches", "ms", "share")]


def dispatch(record: Record) -> Table:
    """The kernels of the expert gather for each number of experts."""
    rows = []
    for checkpoint, found in record["dispatch"].items():
        for k, point in (found or {"points": {}})["points"].items():
            mark = " (the model's)" if k == found["own"] else ""
            for row in point["kernels"]:
                rows.append(
                    [
                        code(checkpoint),
                        f"{plain(k)}{mark}",
                        code(row["kernel"]),
                        show(row["launches"]),
                        show(row["per_layer"]),
                        show(row["ms"]),
                        show(point["gather_ms"]),
                    ]
                )
            if point["why"]:
                rows.append([code(checkpoint), plain(k), plain(point["why"]), *[ABSENT] * 4])
    head = ["checkpoint", "top_k", "kernel of the products", "launches/token", "per MoE layer"]
    return columns(rows, [*head, "their ms/token", "expert gather ms/token"], 3)


def cliffs(record: Record) -> list[str]:
    """Between which numbers of experts the kernel changes."""
    lines = []
    for checkpoint, found in record["dispatch"].items():
        if not found:
            continue
        known = [k for k, point in found["points"].items() if point["kernels"]]
        if not found["changes"] and known:
            lines.append(
                f"{code(checkpoint)}: the same kernel from top_k {plain(known[0])} to "
                f"{plain(known[-1])}."
            )
        for change in found["changes"]:
            one, two = (
                " and ".join(code(name) for name in change[side]) for side in ("before", "after")
            )
            lines.append(
                f"{code(checkpoint)}: between top_k {plain(change['from'])} and "
                f"{plain(change['to'])} the kernel changes from {one} to {two}."
            )
    return lines


def host_costs(record: Record) -> Table:
    """The host's processor time and CUDA graphs per token, beside the wall."""
    rows = []
    for checkpoint, arm, found in traced(record):
        entry = record["results"][checkpoint]["arms"][arm]
        cpu, graphs = found["cpu"], found["graphs"]
        rows.append(
            [
                code(checkpoint),
                code(arm),
                show(found["wall_ms"]),
                show(cpu["plain"] or entry.get("cpu_ms")),
                show(cpu["watched"]),
                show(cpu["loop"]),
                show(found["launches"]),
                *(show(graphs.get(what)) for what in ("launches", "updates", "instantiations")),
            ]
        )
    head = ["checkpoint", "arm", "wall ms/token", "processor ms/token, all threads"]
    head += ["the same, in one traced pass", "of the loop's thread, in it", "kernels/token"]
    head += [
        f"graph {what}/token, in one pass" for what in ("launches", "updates", "instantiations")
    ]
    kept = [i for i in range(len(head)) if i < 3 or any(row[i] != ABSENT for row in rows)]
    return columns([[row[i] for i in kept] for row in rows], [head[i] for i in kept], 2)


def answers(record: Record) -> Table:
    """The questions in their order, and what of this record answers each."""
    rows = [
        [
            str(number),
            plain(found["asks"]),
            "; ".join([*_answer(found), *_tokens(found, record)]) or ABSENT,
        ]
        for number, found in enumerate(record["answers"], 1)
    ]
    return Table(["", "asked", "answered by"], rows)


def _tokens(found: dict[str, Any], record: Record) -> list[str]:
    """Whether the candidates that a question asks the rate of keep the reference's tokens."""
    parts, varying = [], unsteady(record)
    for entry in found["by"]:
        head, _, arm = entry["quantity"].partition(".")
        known = [name for name, at in entry["checkpoints"].items() if at["figure"]]
        texts = []
        for name in known if head == "ratio" else []:
            shown = record["results"][name]["arms"].get(arm)
            parity = record["parity"].get(name, {}).get("arms", {}).get(arm)
            if shown and parity and shown["role"] == "candidate":
                own = " (where the reference's own vary)" if code(name) in varying else ""
                texts.append(f"{code(name)} {greedy(parity)}{own}")
        if texts:
            parts.append(f"greedy tokens of {code(arm)}: {', '.join(texts)}")
    return parts


def _known(at: dict[str, Any]) -> str:
    marks = [
        "forced pass" if at.get("forced") else "",
        "kernels not proved" if at.get("unproved") else "",
        NO_BOUND.get(at.get("no_bound"), ""),
    ]
    told = "; ".join(filter(None, marks))
    return show(at["figure"]) + (f" ({told})" if told else "")


def _answer(found: dict[str, Any]) -> list[str]:
    parts = [f"{plain(claim['says'])} **{claim['verdict']}**" for claim in found["claims"]]
    for entry in found["by"]:
        known = {name: at for name, at in entry["checkpoints"].items() if at["figure"]}
        values = [f"{code(name)} {_known(at)}" for name, at in known.items()]
        if known and found.get("named"):
            values += [
                f"{code(name)} not measured ({plain(at['why'])})"
                for name, at in entry["checkpoints"].items()
                if not at["figure"]
            ]
        if not known:
            why = dict.fromkeys(plain(at["why"]) for at in entry["checkpoints"].values())
            values = [f"not measured: {', '.join(why)}"]
        parts.append(f"{code(entry['quantity'])}: {', '.join(values)}")
    for name, path in found["paths"].items():
        kernels = [
            f"{code(row['kernel'])} {show(row['launches'])} launches/token, {show(row['ms'])} ms"
            for row in path["kernels"]
        ]
        if kernels:
            footing = " by the forced pass" if path["by_forced"] else ""
            parts.append(f"{code(name)} runs{footing} {', '.join(kernels)}")
        elif found.get("named"):
            parts.append(f"{code(name)}: {plain(path['why'])}")
    if (
        found["paths"]
        and not found.get("named")
        and not any(path["kernels"] for path in found["paths"].values())
    ):
        why = dict.fromkeys(plain(path["why"]) for path in found["paths"].values())
        parts.append(f"kernels: {', '.join(why)}")
    if found["not_measured"]:
        parts.append(f"not measured: {plain(found['not_measured'])}")
    return parts
