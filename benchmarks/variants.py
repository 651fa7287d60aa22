"""Variants of a block in one launch, to be measured (``cubins_build.py``), with the kernels' bits.

guess: sends for its weights by a guess, the greatest logits' experts. For routers whose choice is
the greatest of a rounded softmax: the logits' order is the softmax's, but where rounding makes one
value of two, and there MLX goes by the index. So every warp chooses by the logits, which is over
much sooner, and sends for its weights; one warp makes the softmax and the choice as MLX does
meanwhile. Where the experts are others, all warps send anew; where they come in another order, the
last sum goes by MLX's.
short: a warp's first stage is the first half's, and the text has nothing else there.
single: the second half's part of a warp is one stage, so that nothing is sent for in it.
soon: a warp sends for its second stage at the block's barrier, not when the first is there.
"""

import dataclasses

from moescope.kernels.layout import Cut, Launch, cut, down_stage, tiles
from moescope.kernels.source import each_chooses
from moescope.kernels.spec import Spec

NAMES = {"guess", "short", "single", "soon"}
GUESS = """
{
constexpr int PER = CLASSES == 3 ? 4 : CLASSES;
u32 key[PER];
#pragma unroll
for (int i = 0; i < PER; ++i) {
const u32 at = u32(i * 32 + lane);
key[i] = at < u32(ROUTER_E) ? key_of(early_guess[i], at) : 0u;
}
const auto sort = [&](int i, int j) {
const u32 k = key[i];
key[i] = max(k, key[j]);
key[j] = min(k, key[j]);
};
if (PER > 1) sort(0, 1);
if (PER > 2) sort(2, 3), sort(0, 2), sort(1, 3), sort(1, 2);
#pragma unroll
for (int r = 0; r < ROUTER_K; ++r) {
const u32 best = warp_max(key[0]);
const bool won = key[0] == best;
#pragma unroll
for (int i = 0; i < PER; ++i) key[i] = won ? i + 1 < PER ? key[i + 1] : 0u : key[i];
if (lane == 0) chosen[ROUTER_HIGH ? ROUTER_K - 1 - r : r] = index_of(best);
}
warp_barrier();
}
"""
EARLY = """
float early_guess[CLASSES == 3 ? 4 : CLASSES];
#pragma unroll
for (int i = 0; i < int(sizeof early_guess / 4); ++i)
early_guess[i] = i * 32 + lane < ROUTER_E ? to_float(logits[i * 32 + lane]) : 0.f;
"""
SETTLE = """
u32 slot = ROUTER_K;
for (int i = 0; i < ROUTER_K; ++i)
if (lane < ROUTER_K && chosen[i] == exact[lane]) slot = u32(i);
const bool right = warp_all(lane >= ROUTER_K || slot < ROUTER_K);
if (lane < ROUTER_K) order[lane] = right ? slot : u32(lane);
if (lane == 0) wrong = !right;
"""
AGAIN = """
if (!wrong) break;
wait_copies<0>();
if (lane < ROUTER_K) chosen[lane] = exact[lane];
warp_barrier();
sent_for = 0;
settled = true;
}
"""
SEND = "#pragma unroll 1\nfor (; sent_for < STAGES - 1; ++sent_for) fetch(sent_for);\n"
SYNC = "#if ONE_LAUNCH || ROUTER_EACH\n__syncthreads();\n#endif\n"
CHOICE = "{\nconstexpr int PER = CLASSES == 3 ? 4 : CLASSES;"
WEIGH = "if (warp == 0) {\n#if ROUTER_WEIGHT == WEIGHT_LOGSIGMOID"
FETCH = "const auto fetch = [&](int at) {"


def fits(spec: Spec) -> bool:
    """Whether the variant is for this block's router."""
    router = spec.router
    plain = router.score == "softmax" and router.rounded and not router.bias
    return each_chooses(router) and plain and spec.shared is None


def guess(body: str) -> str:
    """The body of a block in one launch, for a router that fits. Raises SystemExit where the text
    no longer has a line that is replaced."""

    def part(begin: str, end: str, after: int = 0) -> tuple[int, int]:
        first = body.find(begin, after)
        last = body.find(end, first)
        if first < 0 or last < 0:
            raise SystemExit(f"guess: the kernels' text has no {begin!r} up to {end!r}")
        return first, last

    choice, send = part(CHOICE, SEND)
    exact = body[choice:send].replace("chosen[", "exact[")
    exact = exact.replace("#pragma unroll\nfor (int r = 0;", "#pragma unroll 1\nfor (int r = 0;")
    operand, _ = part("if (early >= 0) {", SYNC, send)
    weigh, sync = part(WEIGH, SYNC, operand)
    opening = "if (warp == 0) {\n"
    weighed = body[weigh + len(opening) : sync].replace("chosen[lane]", "exact[lane]")
    body = "".join(
        (
            body[:choice].rstrip("\n"),
            GUESS,
            body[send + len(SEND) : operand],
            "#pragma unroll 1\nfor (bool settled = false;;) {\n",
            SEND,
            "if (settled) break;\n",
            body[operand:weigh],
            opening + exact + SETTLE.lstrip("\n") + weighed,
            SYNC.rstrip("\n") + AGAIN,
            body[sync + len(SYNC) :],
        )
    )
    tables = "__shared__ u32 exact[32], order[32];\n__shared__ bool wrong;\n"
    edits = (
        ("__shared__ float weight[32];\n", "__shared__ float weight[32];\n" + tables),
        (
            "const uint4 early_octet = octet_at(early);\n",
            "const uint4 early_octet = octet_at(early);" + EARLY,
        ),
        (
            "parts[turn][mates + k * SPLIT + i][lane]",
            "parts[turn][mates + order[k] * SPLIT + i][lane]",
        ),
        ("const u32 expert = chosen[k];", "const u32 expert = exact[k];"),
        (
            "((u32*)(mid + MID_CHOSEN))[lane] = chosen[lane];",
            "((u32*)(mid + MID_CHOSEN))[lane] = exact[lane];",
        ),
    )
    for old, new in edits:
        if old not in body:
            raise SystemExit(f"guess: the kernels' text has no {old!r}")
        body = body.replace(old, new)
    return body


def short(spec: Spec, how: Launch, body: str) -> str:
    """A shorter text, where every warp's first stage is the first half's."""
    count = sum(tiles(spec)) // how.blocks
    if how.stages != 2 or count < how.groups or how.warps != how.groups * cut(spec).warps:
        raise SystemExit("short: a warp's first stage may be the second half's")
    first = body.find(FETCH)
    last = body.find("int sent_for = 0;", first)
    down = (
        "#if ONE_LAUNCH\nelse fetch_down(at - before, ring + at % STAGES * STAGE_BYTES);\n#endif\n"
    )
    begin = body[first:last].replace("const auto fetch =", "const auto begin_with =")
    if down not in begin or SEND not in body:
        raise SystemExit("short: the kernels' text has another fetch")
    body = body[:last] + begin.replace(down, "") + body[last:]
    return body.replace(SEND, SEND.replace(" fetch(sent_for)", " begin_with(sent_for)"))


def one_stage(spec: Spec, plan: Cut, pair: tuple[Launch, Launch]) -> tuple[Launch, Launch]:
    """Both halves, the second with all of a warp's steps in a stage (see single)."""
    if plan.down_each > 8 or spec.shared or spec.out // 16 > pair[0].blocks:
        raise SystemExit("single: a warp has more than a stage's steps")
    stage = max(pair[0].stage, down_stage(spec, plan.down_each, 1))
    first, second = (dataclasses.replace(how, stage=stage) for how in pair)
    return first, dataclasses.replace(second, batch=plan.down_each)


def single(header: str, body: str) -> tuple[str, str]:
    """Header and body of a block of such halves."""
    wait = "wait_copies<STAGES - 2>();\nwarp_barrier();\nFETCH(at + STAGES - 1);"
    rows = "static_assert(!CROSSED || APIECE % 2 == 0"  # said of lanes that copy whole rows alone
    if wait not in body or rows not in header:
        raise SystemExit("single: the kernels' text has another second half")
    header = header.replace(rows, rows.replace("!CROSSED", "!ROWS || !CROSSED"))
    return header, body.replace(wait, "wait_copies<0>();\nwarp_barrier();")


def soon(how: Launch, body: str) -> str:
    """A body whose warps have two stages on their way from the block's barrier on."""
    if how.stages != 2:
        raise SystemExit("soon: of a ring of two stages")
    mid = "u8* const mid = (u8*)scratch + SCRATCH_HEAD + which * MID_PLACE;"
    edits = (
        (mid, "if (before > 1) {\nfetch(1);\nsent_for = 2;\n}\n" + mid),
        (
            "wait_copies<STAGES - 2>();",
            "if (sent_for - 1 > at) wait_copies<1>();\nelse wait_copies<0>();",
        ),
        (
            "fetch(at + STAGES - 1);",
            "if (sent_for <= at + 1) {\nfetch(at + 1);\nsent_for = at + 2;\n}",
        ),
    )
    for old, new in edits:
        if old not in body:
            raise SystemExit(f"soon: the kernels' text has no {old!r}")
        body = body.replace(old, new, 1)  # the first half's, which stands first
    return body
