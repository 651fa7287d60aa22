"""A block in one launch whose weights are all sent for at once, by the copy engine, and stay.

A variant of the bench (``cubins_build.py``: ``resident=WHEN``), for shapes like 8 of 128 at 2048 x
768, where a multiprocessor's share of the weights fits its shared memory. The kernels' ring has two
stages, so of a short run a stage is sent for when the one before it has come; here nothing waits
for that, and the loads go past the multiprocessor's load unit. Affine, 4 bits, groups of 64,
bfloat16, compute capability 9.0. The order of every sum is the kernels' own, so the bits are. Not
measured yet.

Weights lie as in memory. Gate's rows and up's (in the second half: eight rows and the next eight)
are 64 bytes apart modulo 128, and odd rows read theirs in the other order: a quarter of a warp's
reads then meets in no bank. What comes out of odd rows is exchanged in the end.
"""

import re
from pathlib import Path

from moescope.kernels.layout import Cut, Launch, down_warps
from moescope.kernels.source import each_chooses
from moescope.kernels.spec import Spec

WHEN = ("soon", "sync", "late")  # the second half's orders: at once, after the choice, after a tile
PIECES = dict(
    re.findall(
        r"^//: (\w+)\n(.*?)(?=^//: |\Z)",
        (Path(__file__).parent / "resident.cuh").read_text(encoding="utf-8"),
        re.M | re.S,
    )
)
SCALES = 512  # bytes of a warp's scales and biases of a tile

# Where a timeline's points are in this text (see timeline.py).
POINTS = {
    "chosen": ("#pragma unroll\nfor (int n = 0; n < TURNS; ++n) {", ""),
    "first stage": ("const bool odd = g & 1;", "if (n == 0) "),
    "second half's stage": ("const int row = lane >> 2;\nconst bool odd = row & 1;", ""),
}

# What is replaced: from a line to before another, by what.
GIVEN = "u8* const given = rings + RESIDENT_BYTES + down_part * GIVEN_BYTES;"
AFTER_CHOICE = "if (SEND_DOWN == 1 || (SEND_DOWN == 2 && mine == 0)) send_down();"
FETCH = "const auto fetch = [&](int at) {"
SEND = "#pragma unroll 1\nfor (; sent_for < STAGES - 1; ++"
LOGITS = "#if ROUTER_SELECT == 0 && ROUTER_SCORE"
HANDED = "#if !ONE_LAUNCH\n#if SHARED_WEIGHT == 2"
PARTS = (
    ("const int group = warp / WARPS", "const int group = warp / WARPS", PIECES["BEGIN"]),
    ("const auto fetch_down =", FETCH, "#endif"),
    (FETCH, "int sent_for = 0;", ""),
    ("int sent_for = 0;", "constexpr int OCTETS", ""),
    (LOGITS, LOGITS, "__syncthreads();"),
    (SEND, "#elif ROUTER_SELECT == 0", PIECES["SEND"]),
    (SEND, "#endif\nif (warp == 0)", ""),
    (HANDED, HANDED, AFTER_CHOICE),
    ("float a = 0.f, b = 0.f;\nfor (int unit", "a += shuffle_xor(a, 1);", PIECES["FIRST"]),
    ("u8* const given = rings +", "#define RING(at)", GIVEN),
    ("for (int unit = 0; unit < down_units", "#pragma unroll\nfor (int j = 0;", PIECES["SECOND"]),
)


def fits(spec: Spec, plan: Cut, how: Launch) -> bool:
    """Whether the variant is written for this block."""
    forms = {(f.mode, f.bits, f.group) for f in (spec.gate, spec.up, spec.down) if f}
    return (
        forms == {("affine", 4, 64)}
        and spec.dtype == "bfloat16"
        and spec.gate is not None
        and spec.shared is None
        and each_chooses(spec.router)
        and (plan.each, plan.split, how.sets, how.whole) == (4, 1, 1, True)
        and spec.hidden == plan.warps * plan.each * 128
        and plan.warps >= 2
        and spec.width == plan.down_each * 128
        and spec.out <= how.blocks * 16
        and how.warps == how.groups * plan.warps
        and how.warps >= down_warps(spec, plan)
    )


def block(
    spec: Spec, plan: Cut, how: Launch, text: tuple[str, str], when: str, language: str = ""
) -> tuple[str, str, int]:
    """Header, body and bytes of dynamic shared memory, from the text of a block in one launch.

    when: one of WHEN; language: in place of CUDA's copies. Raises SystemExit where the variant is
    not written for the block, or the kernels' text no longer has a line that it needs.
    """
    if not fits(spec, plan, how):
        raise SystemExit(f"resident: not written for {spec.label}")
    most = -(-spec.router.top_k * (spec.width // 8) // how.blocks)
    turns = -(-most // how.groups)  # of a group of warps
    rows, down = spec.hidden * 4, spec.width * 4  # bytes of eight rows
    tile, down_tile = (-(-(2 * each + 64) // 128) * 128 for each in (rows, down))
    k = spec.router.top_k
    size = most * tile + k * (down_tile + spec.width) + how.warps * turns * SCALES
    values = {
        "PLACES": most,
        "TURNS": turns,
        "EIGHT_ROWS": rows,
        "DOWN_EIGHT": down,
        "TILE_PLACE": tile,
        "DOWN_PLACE": down_tile,
        "SCALES_PLACE": SCALES,
        "DOWN_SCALES_PLACE": spec.width,
        "SEND_DOWN": WHEN.index(when),
        "RESIDENT_BYTES": -(-size // 128) * 128,
    }
    defines = "\n".join(f"#define {name} {value}" for name, value in values.items())
    (header, body), at = text, 0
    for begin, end, new in PARTS:
        first = body.find(begin, at)
        last = body.find(end, first)
        if first < 0 or last < 0:
            raise SystemExit(f"resident: the kernels' text has no {begin!r} up to {end!r}")
        lines = [line.strip() for line in new.strip().splitlines()]
        body = "\n".join([body[:first].rstrip("\n"), *lines, body[last:]])
        at = first
    header = "\n".join([header, defines, language or PIECES["CUDA"], PIECES["ROWS"]])
    return header, body, values["RESIDENT_BYTES"] + how.given
