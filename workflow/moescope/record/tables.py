"""The record's tables: from record.json to rows of text."""

from typing import Any

from ..verdict.blocking import LEAST
from ..verdict.blocks import alike
from ..verdict.ceiling import PATTERNS
from ..verdict.kernels import FORCED
from .numbers import ABSENT, bound, show
from .writers import Table, plain

Record = dict[str, Any]

TERM_NAMES = {
    "router": "router",
    "expert_gather": "expert gather",
    "activation": "activation",
    "combine": "combine",
    "shared_expert": "shared expert",
    "attention": "attention",
    "norm": "norm",
    "head": "head",
    "sampler": "sampler",
    "other": "other",
    "host_gap": "host gap",
    "synchronisation": "synchronisation",
    "unclassified": "unclassified",
}
FORCED_PASS = " (forced pass)"
# Whose time a rate of the experts is of, where both are shown.
OWN_TIME, WHOLE_TERM = ", the fused kernels alone", ", the whole term"
# What a figure of an arm that removes work is, where it bounds nothing (verdict.claims).
NO_BOUND = {
    "longer": "no bound since the token is longer",
    "outdone": "no bound since the candidate is faster than without the block",
}


def code(text: object) -> str:
    """Text from data set as code."""
    return "`" + str(text).replace("`", "'").replace("|", "\\|") + "`"


def struck(text: str, void: object) -> str:
    return f"~~{text}~~" if void and text != ABSENT else text


def columns(rows: list[list[str]], head: list[str], first: int) -> Table:
    """A table whose columns from ``first`` on hold numbers."""
    return Table(head, rows, set(range(first, len(head))))


def hosts(record: Record) -> Table:
    many = len(record["host"]) > 1
    rows = []
    for host in record["host"]:
        for key, value in host["facts"].items():
            text = show(value) if isinstance(value, dict) else plain(value)
            where = [", ".join(host["checkpoints"])] if many else []
            rows.append([*where, plain(key.replace("_", " ")), text])
    return Table([*(["checkpoints"] if many else []), "fact", "value"], rows)


def runtimes(record: Record) -> Table:
    rows = []
    for name, pin in record["pins"]["runtimes"].items():
        packages = ", ".join(
            f"{key} {value[:12]}"
            for key, value in pin["packages"].items()
            if key in ("mlx", "mlx-lm", "mlx-vlm") or key.startswith("mlx-")
        )
        lock = pin.get("lock") or pin.get("commit") or ""
        rows.append(
            [
                code(name),
                plain(pin["kind"]),
                plain(packages or pin.get("package") or pin.get("preset", "")),
                plain(pin["python"] or ""),
                code(lock[:12]) if lock else ABSENT,
                code(pin["library_sha256"][:12]) if pin["library_sha256"] else ABSENT,
            ]
        )
    return Table(
        ["runtime", "kind", "packages", "Python", "lock or commit", "library or binary (sha256)"],
        rows,
    )


def sources(record: Record) -> Table:
    rows = []
    for name, entry in record["checkpoints"].items():
        source = record["pins"]["checkpoints"].get(name, {})
        rows.append(
            [
                code(name),
                entry["role"],
                plain(entry["model_type"] or ABSENT),
                _source(source),
                plain(entry["recipe"] or ABSENT),
                show(entry["size"]),
                show(entry["bytes_per_token"].get("total")),
            ]
        )
    head = ["checkpoint", "role", "family", "source", "recipe", "size", "read per token"]
    return columns(rows, head, 5)


def _source(source: dict[str, Any]) -> str:
    kind = source.get("kind")
    if kind == "hub":
        return f"{plain(source['repo'])} at {code(source['revision'][:12])}"
    if kind == "local":
        return f"local folder, sha256 {code(source['digest'][:12])}"
    if kind == "synthetic":
        return (
            f"synthetic, seed {source['seed']}, {plain(source['dtype'])}, "
            f"code of {plain(source['layout'])}"
        )
    return ABSENT


FACTS = {
    "layers": "layers",
    "moe_layers": "MoE layers",
    "experts": "experts",
    "top_k": "top_k",
    "shared_experts": "shared experts",
    "hidden": "hidden",
    "expert_width": "expert width",
    "vocab": "vocabulary",
}


def shapes(record: Record) -> Table:
    rows = [
        [code(name), *(_count(entry["facts"].get(key)) for key in FACTS)]
        for name, entry in record["checkpoints"].items()
    ]
    return columns(rows, ["checkpoint", *FACTS.values()], 1)


def _count(figure: dict[str, Any] | None) -> str:
    return ABSENT if figure is None else f"{figure['value']:g}"


def quantisation(record: Record) -> Table:
    rows = [
        [
            code(name),
            plain(group["group"].replace("_", " ")),
            plain(group["format"]),
            show(group["tensors"]).removesuffix(" tensors"),
            show(group["bytes"]),
        ]
        for name, entry in record["checkpoints"].items()
        for group in entry["groups"]
    ]
    return columns(rows, ["checkpoint", "tensors of", "stored as", "tensors", "bytes"], 3)


def speeds(result: dict[str, Any]) -> Table:
    """Decode and prefill of the arms that are no interventions."""
    rows = []
    for name, arm in result["arms"].items():
        if arm["role"] == "intervention" or arm["absent"]:
            continue
        void, against = arm["void"], arm["against"]
        rows.append(
            [
                code(name),
                arm["role"],
                str(arm["decode_rate"]["n"]) if arm["decode_rate"] else ABSENT,
                struck(show(arm["decode_rate"]), void),
                struck(show(arm["token_ms"]), void),
                struck(show(arm["cpu_ms"]), void),
                _ratio(arm, against, "decode"),
                struck(show(arm["prefill_rate"]), void),
                _ratio(arm, against, "prefill"),
                show(arm["peak_memory"], spread=False),
            ]
        )
    head = ["arm", "role", "n", "decode tokens/s", "ms/token", "host CPU ms/token"]
    head += ["decode ÷ reference", "prefill tokens/s", "prefill ÷ reference", "peak memory"]
    # Runs of before have no processor time, and those of commands show none.
    kept = [i for i in range(len(head)) if i != 5 or any(row[i] != ABSENT for row in rows)]
    return columns([[row[i] for i in kept] for row in rows], [head[i] for i in kept], 2)


def _ratio(arm: dict[str, Any], against: dict[str, Any] | None, name: str) -> str:
    if arm["void"]:
        return "void"
    if against is None or against[name] is None:
        return ABSENT
    if arm["role"] == "null":
        return f"{show(against[name])}, noise"
    decision = against[f"{name}_decision"]
    effect = "«no effect»" if decision["effect"] == "no effect" else decision["effect"]
    if decision["effect"] == "effect":
        effect = "**slower**" if against[name]["max"] < 1 else "**faster**"
    return f"{show(against[name])}, {effect}"


def timed_processor(record: Record) -> bool:
    """Did any run say what it cost the host's processor?"""
    return any(
        arm.get("cpu_ms")
        for result in record["results"].values()
        for arm in result["arms"].values()
    )


def notes(record: Record, checkpoint: str) -> list[str]:
    """What a reader must know about one checkpoint's speeds."""
    result, lines = record["results"][checkpoint], []
    if result["runs"]["valid"]:
        counted = show(result["runs"]["valid"])
        lines.append(f"Runs: {counted} used, {show(result['runs']['rejected'])} rejected.")
        if result["runs"]["not_quiet"]["value"]:
            lines.append(
                f"**{show(result['runs']['not_quiet'])} of them began on a host that was not "
                "quiet**, after the longest wait that the study allows."
            )
    noise = result["noise"]
    if noise and noise["decode"]:
        lines.append(
            f"Noise: the null arm's decode ratio ranges over {show(noise['decode'])}, at most "
            f"{show(noise['decode_floor'])} from 1 (prefill {show(noise['prefill_floor'])}). A "
            f"slowdown below about {show(noise['decode_resolution'])} cannot be told from it."
        )
    if noise and noise["decode"] and not noise["decode"]["min"] <= 1 <= noise["decode"]["max"]:
        side = "slower" if noise["decode"]["max"] < 1 else "faster"
        lines.append(
            f"**One-sided noise**: the null arm, which is the reference again, was {side} than it "
            "in every round: a difference of about that size means nothing here."
        )
    if found := result["detection"]:
        lines.append(
            f"What the rule finds at this noise, in {plain(found['of'])} experiments of "
            f"{plain(found['rounds'])} rounds, drawn from the reference and null arm of "
            f"{show(found['drawn_from'])} rounds (each run's noise on its own): «no effect» in "
            f"{show(found['no_effect'])} where nothing differs; a slowdown of "
            f"{plain(found['slowdown'])} found in {show(found['detected'])}."
        )
    if not noise:
        lines.append("Noise: the null arm has no paired round here, so no difference is decided.")
    drift = result["drift"]
    if drift and drift["flag"]:
        lines.append(
            f"**Drift**: the reference itself was {show(drift['moved'])} faster in its fastest "
            "round than in its slowest. Ratios are paired by round and do not feel it; rates do."
        )
    absent: dict[str, list[str]] = {}
    for name, arm in result["arms"].items():
        if arm["absent"]:
            absent.setdefault(arm["absent"], []).append(code(name))
    for reason, names in absent.items():
        lines.append(f"No speed here of {', '.join(names)}: {plain(reason)}.")
    for name, arm in result["arms"].items():
        if arm["void"]:
            lines.append(f"{code(name)} is **void**: {plain(arm['void'])}.")
        if arm["same_tokens_every_round"] is False:
            lines.append(f"{code(name)} gave different tokens in different rounds.")
        if arm["against"] and arm["against"]["drifts"]:
            lines.append(
                f"**Drifting arm**: the ratio of {code(name)} moves one way through all rounds, by "
                "more than the noise; its median is not to be trusted."
            )
    return lines


def refusals(record: Record) -> list[str]:
    return [
        f"{code(one)} with {code(two)}: refused, {plain(entry['why'])}."
        for entry in record["comparability"]["refused"]
        for one, two in [entry["pair"]]
    ]


def arms(record: Record) -> Table:
    first = next(iter(record["results"].values()))
    rows = []
    for name, arm in first["arms"].items():
        change = [*arm["patches"], *(f"{key}={value}" for key, value in arm["env"].items())]
        text = code(" ".join(change)) if change else ABSENT
        rows.append([code(name), arm["role"], code(arm["runtime"]), text])
    return Table(["arm", "role", "runtime", "patches and environment"], rows)


_SLICED = (
    " Within a round, after every arm's prefill, the arms decode in turn, in {slices} slices each, "
    "so that all of them see the same speeds of the host; each arm has a process of its own. The "
    "first forward of a slice is not timed: it ends in the pause before it. A disturbed round "
    "is done again by all arms. Commands cannot be paused: their runs are whole, after the round's "
    "slices."
)

_PINNED = (
    " After the warm-up the main threads of all arms' processes (with MLX's CPU backend, which "
    "computes in another, all their threads) run on one CPU, the same for all, and the controller "
    "on the others; commands run on any."
)


def method(record: Record) -> list[str]:
    """How it was measured, a line each."""
    method = record["method"]
    shape, rounds, guard = method["shape"], method["rounds"], method["guard"]
    trace, limits = method["trace"], method["limits"]
    slices = rounds.get("slices", 1)
    timed = shape["generate"] - 1 - (slices if slices > 1 else 0)
    lines = [
        f"Shape: exactly {shape['prompt']} prompt token ids, exactly {shape['generate']} "
        "generated, greedy, batch 1, no chat template, end of sequence never looked at. A run "
        "with another number of tokens is void.",
        f"Decode rate: {timed} forwards ÷ their time; the first token belongs to "
        "the prefill. The tools divide by other counts; the table below gives both.",
        f"Rounds: {rounds['count']}, each visiting every arm once and starting one arm later, "
        f"after {rounds['warmup']} discarded warm-up in the same process."
        + (_SLICED.format(slices=slices) if slices > 1 else "")
        + (_PINNED if rounds.get("pinned") else ""),
        f"Parity: {method['parity']['generate']} greedy tokens of the same prompt, and as many led "
        "along the reference's, in a pass of their own that is not timed.",
        f"Decision rule, fixed before the numbers: {method['rule']}",
        "Claims: a condition holds if its whole range satisfies it, fails if the whole range "
        "violates it. A claim is supported if all its conditions hold, refuted if all fail, "
        "otherwise unresolved; over several checkpoints they must agree.",
    ]
    if guard.get("enabled"):
        disturbed = f"{guard['max_busy_fraction'] * 100:g} % disturbed samples"
        lines.append(
            f"Quiet host: a lock, {guard['idle_s']:g} s of idleness before each run (other "
            f"processes below {guard['max_foreign_cpu']:g} cores), a sample every "
            f"{guard['sample_s']:g} s during it; a run with more than {disturbed} is rejected "
            f"and repeated, {guard['attempts']} attempts at most."
        )
    else:
        lines.append("Quiet host: the guard was **off**; other processes were not watched.")
    if trace:
        lines.append(
            f"Instrumented pass: {trace['passes']} passes of {trace['tokens']} tokens after the "
            "prompt, outside every timed run."
        )
    lines.append(
        f"Limits: terms add up to the pass's wall within {limits['conservation'] * 100:g} %, "
        f"unclassified time below {limits['unclassified'] * 100:g} %, the profiler's cost on the "
        f"kernels' time below {limits['profiler_cost'] * 100:g} %; beyond them an attribution is "
        "refused."
    )
    return lines


def denominators(record: Record) -> Table:
    rows = []
    for name, result in record["results"].items():
        for arm, entry in result["arms"].items():
            if entry["role"] in ("reference", "candidate") and entry["tool_rate"]:
                rows.append(
                    [
                        code(name),
                        code(arm),
                        struck(show(entry["decode_rate"]), entry["void"]),
                        struck(show(entry["tool_rate"]), entry["void"]),
                    ]
                )
    head = ["checkpoint", "arm", "forwards timed ÷ time (used here)", "the tool's own convention"]
    return columns(rows, head, 2)


def bounds(record: Record) -> Table:
    """What the token's time is spent on, as far as each instrument can say."""
    rows = []
    for name, result in record["results"].items():
        for arm, entry in result["arms"].items():
            if entry["role"] not in ("reference", "candidate") or not entry["token_ms"]:
                continue
            if entry["void"]:
                continue
            kernels = record["attribution"]["kernels"][name].get(arm)
            ceiling = record["ceilings"][name]["arms"].get(arm)
            sweep = record["sweep"][name] if entry["role"] == "reference" else None
            rows.append(
                [
                    code(name),
                    code(arm),
                    show(entry["token_ms"]),
                    show(entry["build_ms"]),
                    show(entry["build_share"]),
                    show(kernels["busy"]) if kernels else ABSENT,
                    show(kernels["launches"]) if kernels else ABSENT,
                    show(sweep["fixed_share"]) if sweep else ABSENT,
                    show(ceiling["whole"]["share"]) if ceiling else ABSENT,
                ]
            )
    head = ["checkpoint", "arm", "ms/token", "host builds the graph, ms/token", "of the token"]
    head += ["GPU busy", "launches/token", "independent of top_k", "of the memory's ceiling"]
    # Columns that no arm fills say nothing; what is missing stands under «not measured».
    kept = [i for i in range(len(head)) if i < 5 or any(row[i] != ABSENT for row in rows)]
    return columns([[row[i] for i in kept] for row in rows], [head[i] for i in kept], 2)


def bounded(record: Record) -> list[str]:
    """The resource that bounds each traced arm's token, and why that is said."""
    return [
        f"{code(arm)} on {code(name)}: bounded by **{entry['bound']['resource']}**; "
        f"{plain(entry['bound']['why'])}.{_blocked(record['attribution']['kernels'][name][arm])}"
        for name, result in record["results"].items()
        for arm, entry in result["arms"].items()
        if entry["bound"] and not entry["void"]
    ]


def _blocked(traced: dict[str, Any]) -> str:
    """Which calls of the loop's thread wait for the GPU, where they take much of the token."""
    calls = [
        f"{show(row['ms'])} ms/token in {code(row['call'])}, {show(row['share'])} of the profiled "
        "pass"
        for row in traced["blocking"] or []
    ]
    return f" The thread that decodes spends {'; '.join(calls)}." if calls else ""


def blocked(record: Record) -> str | None:
    """From which share on a line of bounded names such calls; None if none does."""
    found = any(
        record["attribution"]["kernels"][name][arm]["blocking"]
        for name, result in record["results"].items()
        for arm, entry in result["arms"].items()
        if entry["bound"] and not entry["void"]
    )
    return f"{LEAST * 100:g} %" if found else None


def terms(record: Record, checkpoint: str) -> list[tuple[str, Table]]:
    """(caption, table): a token's terms by the arms' instrumented passes in one table or, where
    kernels were traced, by both instruments in a table for each arm."""
    scopes = record["attribution"]["scopes"][checkpoint]
    kernels = record["attribution"]["kernels"][checkpoint]
    arms = [
        arm
        for arm in dict.fromkeys([*scopes, *kernels])
        if not record["results"][checkpoint]["arms"][arm]["void"]
    ]
    found = []
    for group in [[arm] for arm in arms] if kernels else [arms]:
        parts: list[tuple[list[str], list[str], dict[str, Any]]] = []
        for arm in group:
            if arm in scopes and not scopes[arm]["refused"]:
                heads = [f"{code(arm)} ms/token", f"{code(arm)} share"]
                parts.append((heads, ["ms", "share"], scopes[arm]["terms"]))
            if arm in kernels and not kernels[arm]["refused"]:
                heads = ["GPU ms/token", "launches/token", "share of GPU time"]
                keys = ["ms", "launches", "share"]
                if kernels[arm]["method"] == FORCED:
                    heads = [f"{head}, one forced pass" for head in heads]
                else:
                    heads.append("share in one forced pass")
                    keys.append("forced_share")
                if any(part["alone_ms"] for part in kernels[arm]["terms"].values()):
                    heads.append("by themselves in one pass, ms/token")
                    keys.append("alone_ms")
                parts.append((heads, keys, kernels[arm]["terms"]))
        if parts:
            found.append((f"Arm {code(group[0])}" if len(group) < len(arms) else "", _terms(parts)))
    return found


def _terms(parts: list[tuple[list[str], list[str], dict[str, Any]]]) -> Table:
    rows = [
        [
            name,
            *(
                show(terms[term][key]) if term in terms else ABSENT
                for _, keys, terms in parts
                for key in keys
            ),
        ]
        for term, name in TERM_NAMES.items()
        if any(term in terms for *_, terms in parts)
    ]
    return columns(rows, ["term", *(head for heads, *_ in parts for head in heads)], 1)


def instrument(record: Record) -> Table:
    """How far the instrumented pass may be trusted."""
    rows = []
    for checkpoint, arms in record["attribution"]["scopes"].items():
        for arm, found in arms.items():
            rows.append(
                [
                    code(checkpoint),
                    code(arm),
                    show(found["wall_ms"]),
                    show(found["plain_ms"]),
                    show(record["results"][checkpoint]["arms"][arm]["token_ms"]),
                    show(found["slowed"]),
                    show(found["sum"]),
                    _use(found, record["results"][checkpoint]["arms"][arm]["same_tokens"]),
                ]
            )
    head = ["checkpoint", "arm", "instrumented ms/token", "plain ms/token, alone"]
    head += ["the rounds' ms/token", "slowed by", "terms ÷ wall", "attribution"]
    table = columns(rows, head, 2)
    table.numbers.discard(7)
    return table


def _use(found: dict[str, Any], same_tokens: bool | None) -> str:
    """Whether an attribution is used, and with which reservation."""
    if found["refused"]:
        return f"refused: {plain(found['refused'])}"
    doubts = ["the host was not quiet"] if found["disturbed"] else []
    if same_tokens is False:
        doubts.append("it generated other tokens than the plain pass")
    return "used" + (f", but {' and '.join(doubts)}" if doubts else "")


def kernels(found: dict[str, Any], most: int = 20) -> Table:
    rows = [
        [
            code(row["kernel"][:90]),
            TERM_NAMES.get(row["term"], plain(row["term"])),
            plain(row["primitives"]),
            show(row["launches"]),
            show(row["ms"]),
            show(row["share"]),
            show(row["bytes"]),
        ]
        for row in found["kernels"][:most]
    ]
    head = ["kernel", "term", "primitives", "launches/token", "ms/token"]
    head.append("share of the pass" if found["method"] == FORCED else "share of busy")
    head.append("weights read per token")
    kept = len(head) - all(row[-1] == ABSENT for row in rows)
    return columns([row[:kept] for row in rows], head[:kept], 3)


def passes(found: dict[str, Any]) -> str:
    """Of which passes a kernel trace's tables are."""
    if found["method"] == FORCED:
        return "of one forced pass"
    several = any(part["ms"]["n"] > 1 for part in found["terms"].values())
    return "medians over the passes that have each" if several else "of one pass"


def traced(record: Record) -> list[tuple[str, str, dict[str, Any]]]:
    """(checkpoint, arm, kernel trace) of all that were traced and are not void."""
    return [
        (checkpoint, arm, found)
        for checkpoint, arms in record["attribution"]["kernels"].items()
        for arm, found in arms.items()
        if not record["results"][checkpoint]["arms"][arm]["void"]
    ]


def expert_kernels(record: Record) -> Table:
    """The kernels that the routed experts took: the proof of the arm's path."""
    rows = []
    for checkpoint, arm, found in traced(record):
        for row in found["path"]["experts"]:
            rows.append(
                [
                    code(checkpoint),
                    code(arm),
                    code(row["kernel"]) + _under(row, found),
                    show(row["launches"]),
                    show(row["per_layer"]),
                    show(row["ms"]),
                ]
            )
    head = ["checkpoint", "arm", "kernel of the experts", "launches/token", "per MoE layer"]
    table = columns(rows, [*head, "ms/token"], 3)
    table.empty = "no trace names kernels of routed experts."
    return table


def _under(row: dict[str, Any], found: dict[str, Any]) -> str:
    if row["under"] != "expert_gather":
        return f" (counted as {TERM_NAMES.get(row['under'], plain(row['under']))})"
    return FORCED_PASS if found["path"]["by_forced"] else ""


def uneven(record: Record) -> list[str]:
    """Launch counts that are no whole multiple of MoE layers times tokens."""
    return [
        f"{code(row['kernel'])} ({TERM_NAMES.get(row['term'], plain(row['term']))}) of "
        f"{code(arm)} on {code(checkpoint)}: {show(row['launches'])} launches per token."
        for checkpoint, arm, found in traced(record)
        for row in found["path"]["uneven"]
    ]


def kernel_instrument(record: Record) -> Table:
    """What each kernel trace rests on, and what it cost the host."""
    rows = []
    for checkpoint, arm, found in traced(record):
        window = found["window"]
        rows.append(
            [
                code(checkpoint),
                code(arm),
                plain(found["method"] or ABSENT),
                show(found["checks"]["profiler_wall_cost"]),
                show(window["window"]["ms"]) if window else ABSENT,
                show(window["difference"]["ms"]) if window else ABSENT,
                f"refused: {plain(found['refused'])}" if found["refused"] else "used",
            ]
        )
    head = ["checkpoint", "arm", "owners of launches by", "profiler's cost on the wall"]
    table = columns(rows, [*head, "GPU ms by window", "by two lengths", "attribution"], 3)
    table.numbers.discard(6)
    return table


def perfetto(record: Record) -> list[str]:
    """The traces of one step that were not committed, by their hash."""
    return [
        f"{code(arm)} on {code(checkpoint)}: {code('work/' + drawn['file'])}, sha256 "
        f"{code(drawn['sha256'])}"
        for checkpoint, arm, _ in traced(record)
        for drawn in [record["results"][checkpoint]["arms"][arm]["perfetto"]]
        if drawn
    ]


def busy(record: Record) -> Table:
    """The GPU's time of a token and the rest of it, over the passes."""
    names = ("wall_ms", "busy_ms", "host_gap_ms")
    rows = [
        [code(checkpoint), code(arm), *(show(found[name]) for name in names), show(found["busy"])]
        for checkpoint, arm, found in traced(record)
    ]
    head = ["checkpoint", "arm", "wall ms/token", "GPU busy", "GPU idle", "busy ÷ wall"]
    return columns(rows, head, 2)


PHASES = {"build": "building the graph", "encode": "encoding", "wait": "waiting"}


def host_loop(record: Record) -> Table:
    """What the host's loop does in one pass, and how long the GPU idles meanwhile."""
    rows = []
    for checkpoint, arm, found in traced(record):
        host = found["host"]
        phases = [show(host[what].get(phase)) for phase in PHASES for what in ("ms", "idle_ms")]
        if host["ms"]:
            rows.append([code(checkpoint), code(arm), *phases])
    head = ["checkpoint", "arm"]
    for name in PHASES.values():
        head += [f"{name}, ms/token", "GPU idle meanwhile"]
    return columns(rows, head, 2)


def cuda_calls(found: dict[str, Any], most: int = 8) -> Table:
    rows = [
        [code(row["call"]), plain(row["thread"]), show(row["count"]), show(row["ms"])]
        for row in found["calls"][:most]
    ]
    return columns(rows, ["call", "thread", "calls/token", "ms/token"], 2)


def interventions(record: Record) -> Table:
    rows = []
    for checkpoint, result in record["results"].items():
        traced = record["attribution"]["kernels"].get(checkpoint, {})
        for arm, entry in result["arms"].items():
            against, removes = entry["against"], entry["removes"]
            if entry["role"] != "intervention" or entry["absent"]:
                continue
            change = [*entry["patches"], *(f"{k}={v}" for k, v in entry["env"].items())]
            terms = ", ".join(TERM_NAMES[term] for term in removes["terms"]) if removes else ABSENT
            rows.append(
                [
                    code(checkpoint),
                    code(arm),
                    code(" ".join(change)) if change else ABSENT,
                    struck(show(entry["token_ms"]), entry["void"]),
                    _ratio(entry, against, "decode"),
                    show(against["saved"]) if against else ABSENT,
                    terms,
                    show(removes["scopes_share"]) if removes else ABSENT,
                    _marked(removes["gpu_share"], traced.get(against["base"]))
                    if removes
                    else ABSENT,
                ]
            )
    head = ["checkpoint", "arm", "change", "ms/token", "decode ÷ base", "time saved"]
    head += ["terms removed", "their share by scopes", "their share of GPU time"]
    kept = [i for i in range(len(head)) if i < 8 or any(row[i] != ABSENT for row in rows)]
    table = columns([[row[i] for i in kept] for row in rows], [head[i] for i in kept], 3)
    table.numbers.discard(6)
    table.empty = "the study has no intervention here."
    return table


def candidates(record: Record) -> Table:
    """Candidates beside their base arm: what they save, and their MoE blocks by kernels."""
    rows = []
    for checkpoint, result in record["results"].items():
        traced = record["attribution"]["kernels"].get(checkpoint, {})
        ceilings = record["ceilings"].get(checkpoint, {}).get("arms", {})
        for arm, entry in result["arms"].items():
            against = entry["against"]
            if entry["role"] != "candidate" or not against or not against.get("gain"):
                continue
            row = [code(checkpoint), code(arm), _ratio(entry, against, "decode")]
            row.append(show(against["gain"]))
            pair = traced.get(against["base"]), traced.get(arm)
            row += [_arrow([_at(one, key) for one in pair]) for key in ("launches", "busy_ms")]
            # Two instruments say different things of one block: without both traces there is none,
            # nor where one's terms are refused.
            usable = all(one and not one["refused"] for one in pair)
            *blocks, forced = alike(*pair) if usable else (None, None, False)
            for key in ("launches", "ms"):
                cells = [_at(block, key) for block in blocks]
                row.append(_arrow(cells) + (FORCED_PASS if forced and all(cells) else ""))
            # Without a kernel trace the terms of a ceiling are of the instrumented pass.
            rate = _at(ceilings.get(arm), "terms", "expert_gather") if pair[1] else None
            for of in ("share", "copy_share"):
                marks = _fallen_back(traced.get(arm)) + ("" if _at(rate, "of") else " (whole term)")
                row.append(show(_at(rate, of)) + (marks if _at(rate, of) else ""))
            rows.append(row)
    head = ["checkpoint", "arm", "decode ÷ base", "of what skipping the block saves"]
    head += ["launches/token", "GPU busy ms/token", "launches of the block", "its ms/token"]
    head += ["its experts' rate, of the read ceiling", "of the copy"]
    return columns(rows, head, 2)


def _arrow(pair: list[dict[str, Any] | None]) -> str:
    """Base → candidate by medians; a dash where one of them is not known."""
    return " → ".join(show(one, spread=False) for one in pair) if all(pair) else ABSENT


def _marked(share: dict[str, Any] | None, traced: dict[str, Any] | None) -> str:
    return show(share) + (_fallen_back(traced) if share else "")


def _fallen_back(traced: dict[str, Any] | None) -> str:
    """A mark for figures of terms that stand on the forced pass alone."""
    return FORCED_PASS if traced and traced["method"] == FORCED else ""


def _at(value: Any, *path: str) -> Any:
    for key in path:
        value = value.get(key) if value else None
    return value


def sweeps(record: Record) -> Table:
    rows = []
    for checkpoint, sweep in record["sweep"].items():
        if sweep is None:
            continue
        points = ", ".join(
            f"{k}: {show(point['ms'], spread=False)}" for k, point in sweep["points"].items()
        )
        rows.append(
            [
                code(checkpoint),
                points,
                show(sweep["expert_cost"]),
                show(sweep["fixed_ms"]),
                show(sweep["fixed_share"]),
                show(sweep["misfit"]),
            ]
        )
    head = ["checkpoint", "top_k: ms/token", "ms per expert", "fixed ms/token"]
    return columns(rows, [*head, "fixed share", "largest misfit"], 2)


def operations(found: dict[str, Any], most: int = 4) -> Table:
    """The decode graph of one arm: primitives by term, the most frequent named."""
    rows = []
    for term, primitives in found["by_term"].items():
        named = [f"{plain(name)} {show(count)}" for name, count in list(primitives.items())[:most]]
        rest = len(primitives) - most
        rows.append([TERM_NAMES[term], ", ".join(named) + (", …" if rest > 0 else "")])
    return Table(["term", "primitives per token, the most frequent"], rows)


def operation_counts(record: Record) -> Table:
    names = list(
        dict.fromkeys(
            key
            for arms in record["operations"].values()
            for found in arms.values()
            for key in found["counts"]
        )
    )
    rows = [
        [code(checkpoint), code(arm), *(show(found["counts"].get(name)) for name in names)]
        for checkpoint, arms in record["operations"].items()
        for arm, found in arms.items()
    ]
    head = [
        {"astype": "AsType", "per_moe_layer": "per MoE layer"}.get(name, name) for name in names
    ]
    return columns(rows, ["checkpoint", "arm", *(plain(name) for name in head)], 2)


def ceilings(record: Record) -> Table:
    """Achieved rates: of the whole token, and of terms that read at least a hundredth of it."""
    rows = []
    for checkpoint, found in record["ceilings"].items():
        for arm, ceiling in found["arms"].items():
            if record["results"][checkpoint]["arms"][arm]["role"] == "null":
                continue
            least = ceiling["whole"]["bytes"]["value"] / 100
            parts = {"whole token": ceiling["whole"]}
            for term, part in ceiling["terms"].items():
                if part["bytes"]["value"] < least:
                    continue
                own = part.get("of") == "kernels"
                parts[TERM_NAMES[term] + (OWN_TIME if own else "")] = part
                if part.get("by_term"):
                    parts[TERM_NAMES[term] + WHOLE_TERM] = part["by_term"]
            traced = record["attribution"]["kernels"].get(checkpoint, {}).get(arm)
            mark = _fallen_back(traced) if traced else " (instrumented pass)"
            for name, part in parts.items():
                name += mark if part is not ceiling["whole"] else ""
                figures = (show(part[key]) for key in ("bytes", "achieved", "share", "copy_share"))
                rows.append([code(checkpoint), code(arm), name, *figures])
    head = ["checkpoint", "arm", "part", "bytes read per token", "achieved", "of the ceiling"]
    head += ["of the copy"]
    if all(row[5] == ABSENT for row in rows):
        return columns([row[:5] for row in rows], head[:5], 3)
    return columns(rows, head, 3)


def bandwidths(record: Record) -> Table:
    """The measured bandwidths, each with the arms whose shares are of it."""
    rows = []
    for checkpoint, found in record["ceilings"].items():
        roles = {arm: record["results"][checkpoint]["arms"][arm]["role"] for arm in found["arms"]}
        by_arm = {
            arm: ceiling["bandwidths"]
            for arm, ceiling in found["arms"].items()
            if roles[arm] != "null"  # as in the table of ceilings
        }
        for rates in [rates for rates in by_arm.values() if rates] or [found["bandwidths"]]:
            arms = ", ".join(code(arm) for arm, own in by_arm.items() if own == rates)
            row = [code(checkpoint), arms or ABSENT, *(show(rates.get(way)) for way in PATTERNS)]
            if rates and row not in rows:
                rows.append(row)
    return columns(rows, ["checkpoint", "arms", *PATTERNS], 2)


def parity(record: Record) -> Table:
    rows = []
    for checkpoint, found in record["parity"].items():
        for arm, entry in found.get("arms", {}).items():
            if record["results"][checkpoint]["arms"][arm]["absent"]:
                continue
            void = _voids(entry, record["results"][checkpoint]["arms"][arm]["void"])
            if arm == record["reference"]:
                itself = ["the reference itself", *[ABSENT] * 4, void]
                rows.append([code(checkpoint), code(arm), *itself])
                continue
            forced = entry.get("forced") or {}
            rows.append(
                [
                    code(checkpoint),
                    code(arm),
                    greedy(entry),
                    show(forced.get("top1_agreement")),
                    _plain_count(forced.get("max_abs_logit")),
                    _decided(forced),
                    _plain_count(forced.get("perplexity_ratio")),
                    void,
                ]
            )
    head = ["checkpoint", "arm", "greedy tokens", "top-1 agreement", "largest logit difference"]
    head += ["decided mismatches", "perplexity ratio", "void"]
    table = columns(rows, head, 3)
    table.numbers.discard(7)
    return table


def _decided(forced: dict[str, Any]) -> str:
    """Mismatches of how many tokens at which the reference's choice is decided."""
    count, of = forced.get("decided_mismatches"), forced.get("decided")
    if count is None or of is None:
        return ABSENT if count is None else f"{_plain_count(count)}, of how many is not known"
    if not of["value"]:
        return f"none of {_plain_count(forced.get('tokens'))} tokens is decided"
    return f"{_plain_count(count)} of {_plain_count(of)}"


def _voids(entry: dict[str, Any], void: str | None) -> str:
    """What speaks against using the arm's speed, in this pass or elsewhere (void); that nothing
    does is no verdict on its tokens."""
    if void := entry.get("void") or void:
        return f"**void**: {plain(void)}"
    seen = "no" if entry.get("finite") else "no, logits not seen"
    why = entry.get("not_compared")
    return f"{seen}; not compared: {plain(why)}" if why else seen


def greedy(entry: dict[str, Any]) -> str:
    """An arm's greedy tokens beside the reference's, in words."""
    found = entry.get("greedy")
    if not found:
        return "not compared"
    if found.get("identical"):
        return "identical"
    at, gap = found.get("first_divergence"), found.get("logit_gap")
    text = f"differ at token {_plain_count(at)}" if at else "differ"
    return text + (f", logit gap there {_plain_count(gap)}" if gap else "")


def unsteady(record: Record) -> list[str]:
    """Checkpoints on which the reference itself does not give the same tokens every time."""
    own = record["reference"]
    return [
        code(name)
        for name, result in record["results"].items()
        if name in record["parity"] and result["arms"][own]["same_tokens_every_round"] is False
    ]


def fused(record: Record) -> list[str]:
    """Arms whose patches put several terms of the MoE block into one kernel."""
    found = {
        code(name): None
        for result in record["results"].values()
        for name, arm in result["arms"].items()
        if any(patch.partition("=")[0] == "fused" for patch in arm["patches"]) and not arm["absent"]
    }
    return list(found)


def excused(record: Record) -> list[str]:
    """Checkpoints whose reference repeats itself on random weights, so that a loop voids no arm."""
    return [
        code(name) for name, found in record["parity"].items() if found.get("repetition_excused")
    ]


def _plain_count(figure: dict[str, Any] | None) -> str:
    return ABSENT if figure is None else f"{figure['value']:.4g}"


def cold(record: Record) -> Table:
    rows = [
        [
            code(checkpoint),
            code(arm),
            show(entry["cold"]["load"]),
            show(entry["cold"]["kept"]),
            show(entry["cold"]["first_use"]),
        ]
        for checkpoint, result in record["results"].items()
        for arm, entry in result["arms"].items()
        if entry["cold"]
    ]
    names = ["checkpoint", "arm", "load", "compiled files kept before"]
    return columns(rows, [*names, "first use, beyond a warm pass"], 2)


def rejected(record: Record) -> Table:
    """Runs that are not used, gathered by arm and reason."""
    found: dict[tuple[str, str, str], list[str]] = {}
    for checkpoint, entries in record["rejected"].items():
        for entry in entries:
            key = (checkpoint, entry["arm"], entry["why"])
            found.setdefault(key, []).append(code(entry["run"]))
    rows = [
        [code(checkpoint), code(arm), ", ".join(runs), plain(why)]
        for (checkpoint, arm, why), runs in found.items()
    ]
    return Table(["checkpoint", "arm", "runs", "why"], rows)


def files(record: Record) -> Table:
    rows = [[code(path), code(digest)] for path, digest in record["files"].items()]
    return Table(["file", "sha256"], rows)


def conditions(claim: dict[str, Any]) -> list[str]:
    """One line a checkpoint: its verdict, each condition with its figure, what settled it."""
    if not claim["checkpoints"]:
        return ["It speaks of MoE subjects, and no checkpoint here is one: nothing tests it."]
    lines = []
    for checkpoint, found in claim["checkpoints"].items():
        parts = []
        for entry in found["conditions"]:
            name = code(entry["quantity"])
            if entry["figure"] is None:
                parts.append(f"{name} {plain(entry['why'])}")
                continue
            asked = f"{plain(entry['is'])} {bound(entry['quantity'], entry['than'])}"
            of_work = entry.get("of_work")
            footing = " by the forced pass alone" if entry.get("forced") else ""
            if of_work:
                footing += f", {show(of_work)} without synchronisation"
            if entry.get("unproved"):
                footing += ", of an arm whose kernels are not proved"
            if entry.get("drifts"):
                footing += ", drifting one way through the rounds"
            if entry.get("no_bound"):
                footing += f", {NO_BOUND[entry['no_bound']]}"
            if by_term := entry.get("by_term"):
                footing += f" in its kernels' own time, {show(by_term)} in the whole term's"
                state = entry.get("by_term_state")
                if state != entry["state"]:
                    footing += f", by which it {'is unclear' if state == 'unclear' else state}"
            figure = f"{show(entry['figure'])}{footing}"
            parts.append(f"{name} is {figure}, claimed {asked}: {entry['state']}")
        settled = ", ".join(code(name) for name in found["settled_by"])
        tail = f" Settled by {settled}." if settled else ""
        lines.append(f"{code(checkpoint)}: **{found['verdict']}**. {'; '.join(parts)}.{tail}")
    return lines


def headline(claim: dict[str, Any]) -> str:
    """The claim, what it speaks of, and how the checkpoints differ where they do."""
    text = f"**{plain(claim['says'])}** (Of {speaks_of(claim)}, arm {code(claim['arm'])}.)"
    by_verdict: dict[str, list[str]] = {}
    for name, found in claim["checkpoints"].items():
        by_verdict.setdefault(found["verdict"], []).append(code(name))
    if len(by_verdict) > 1:
        parts = [f"{verdict} on {', '.join(names)}" for verdict, names in by_verdict.items()]
        text += f" The checkpoints differ: {'; '.join(parts)}."
    return text


def largest(record: Record) -> list[str]:
    """For each checkpoint's reference: its two largest terms and what taking experts away saves."""
    lines = []
    for checkpoint, arms in record["attribution"]["scopes"].items():
        found = arms.get(record["reference"])
        if found is None or found["refused"]:
            continue
        if record["results"][checkpoint]["arms"][record["reference"]]["void"]:
            continue
        order = sorted(found["terms"].items(), key=lambda item: -item[1]["share"]["value"])
        named = [f"{TERM_NAMES[term]} {show(part['share'])}" for term, part in order[:3]]
        text = f"{code(checkpoint)}: {', '.join(named)}"
        gpu = record["attribution"]["kernels"][checkpoint].get(record["reference"])
        if gpu and not gpu["refused"]:
            term = gpu["largest"]
            text += (
                f"; of the GPU's time {TERM_NAMES[term]} "
                f"{show(gpu['terms'][term]['share'], spread=False)}{_fallen_back(gpu)}"
            )
        for arm, entry in record["results"][checkpoint]["arms"].items():
            if entry["patches"] == ["skip_experts"] and entry["against"]:
                if entry["longer"]:
                    text += f"; {code(arm)} makes the token {show(entry['longer'])} longer"
                else:
                    text += f"; {code(arm)} saves {show(entry['against']['saved'])} of the token"
        lines.append(text + ".")
    return lines


def speaks_of(claim: dict[str, Any]) -> str:
    return "the token's wall time" if claim["of"] == "wall" else "the GPU's time"
