"""Where a launch's time goes: the multiprocessor's clock at points of a one-launch block's text."""

_STAGE = "fetch(at + STAGES - 1);\nconst u8* const stage = ring"
_SUMMED = "if (WARPS == 1) warp_barrier();\nelse group_barrier(1 + group"
# Name, the line that it stands before (or after: "+"), and when.
POINTS = (
    ("loads sent", "+const uint4 early_octet = octet_at(early);", ""),
    ("operand", "#if ONE_LAUNCH || ROUTER_EACH\n__syncthreads();", ""),
    ("chosen", "+#if ONE_LAUNCH || ROUTER_EACH\n__syncthreads();\n#endif", ""),
    ("sent for", "u8* const mid = (u8*)scratch + SCRATCH_HEAD + which * MID_PLACE;", ""),
    ("first stage", _STAGE, "if (at == 0) "),
    ("first stage multiplied", _SUMMED, "if (n == 0) "),
    ("second stage", _STAGE, "if (at == 1) "),
    ("second stage multiplied", _SUMMED, "if (n == 1) "),
    ("first half", "#if MEET_FIRST", ""),
    ("words there", "const bool down_live = gives<2>(lane);", ""),
    ("second half's stage", "#if !DOWN_AT_ONCE", "if (at == 0) "),
    ("second half multiplied", "if ((lane & 3) == 0) {\nparts[turn][warp][g] = a;", ""),
)
NAMES = (*(name for name, _, _ in POINTS), "end")
BYTES_AT, LONGS = 1 << 20, 16  # in the scratch; a warp's numbers, of which two are its times
ROWS = 160 * 32  # warps of a launch; of two launches, by turns
END = BYTES_AT + 2 * ROWS * LONGS * 4

_BEGIN = "u32* const chosen = choices[ROUTER_EACH && !CHOOSER ? warp : 0];"
_CLOCK = 'asm volatile("mov.u32 %%0, %%%s;" : "=r"(%s) :: "memory");'


def stamped(body: str) -> str:
    """A block's body that notes the points (those that a warp does not pass stay 0).

    Raises SystemExit where the text no longer has a point's line.
    """
    begin = (
        f"u32 stamps[{len(NAMES)}] = {{}}, began, entered, left;\n"
        f"{_CLOCK % ('globaltimer_lo', 'entered')}\n{_CLOCK % ('clock', 'began')}\n"
        f"#define STAMP(i) {{ u32 now; {_CLOCK % ('clock', 'now')} stamps[i] = now - began; }}\n"
    )
    edits = [(_BEGIN, begin + _BEGIN)]
    for number, (_, line, when) in enumerate(POINTS):
        stamp, after = f"{when}STAMP({number})", line.startswith("+")
        line = line.removeprefix("+")
        edits.append((line, f"{line}\n{stamp}" if after else f"{stamp}\n{line}"))
    for old, new in edits:
        if old not in body:
            raise SystemExit(f"the kernels' text has no {old!r} to note the time at")
        body = body.replace(old, new)
    end = (
        f"STAMP({len(POINTS)})",
        _CLOCK % ("globaltimer_lo", "left"),
        "if (lane == 0) {",
        f"u32* to = (u32*)scratch + {BYTES_AT // 4};",
        f"to += (which * {ROWS} + blockIdx.x * 32 + warp) * {LONGS};",
        f"for (int i = 0; i < {len(NAMES)}; ++i) to[i] = stamps[i];",
        f"to[{LONGS - 2}] = entered;",
        f"to[{LONGS - 1}] = left;",
        "}",
    )
    return "\n".join([body, *end, ""])
