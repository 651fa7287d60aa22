"""One launch without one of its parts, for a bench: a wrong result, and what the part costs.

A part's cost is what the launch gains, not what the part takes: what runs beside it goes on.
"""

import re

_TOUCH = (
    "{ a += as_float(*(const u32*)(stage + lane * 16)); "
    "b += as_float(*(const u32*)(stage + lane * 16 + 4)); }"
)
# Part -> what goes, as patterns in the block's body, and what takes its place.
PARTS: dict[str, tuple[tuple[str, str], ...]] = {
    # Experts by the logits' low bits: other ones each time. Where every warp chooses for itself.
    "choice": (
        (
            r"\{\nconstexpr int PER = CLASSES == 3 .*?choose\(\);\n#endif\nwarp_barrier\(\);\n\}",
            "{\nconst u32 apart = ROUTER_E / ROUTER_K;\nif (lane < ROUTER_K) {\n"
            "const u32 low = as_bits(to_float(logits[lane * apart])) >> 16;\n"
            "chosen[lane] = lane * apart + low % apart;\n}\nwarp_barrier();\n}",
        ),
    ),
    "operand": ((r"(?<=for \(int o = early); (?=o < )", " + (1 << 20); "),),
    "weights": ((r"\b(Routed|DownRouted)::fetch(_weights|_scales)?<\w+>\([^;]*;", ";"),),
    "first": (
        (r"(?<=if \(routed\) )rows16<A_ROWS[^;]*;", _TOUCH),
        (r"\bwhole16<A_ROWS[^;]*;", _TOUCH),
    ),
    "second": ((r"\brows16<DOWN,[^;]*;", _TOUCH),),
    "words": (
        (r"if \(!ONE_LAUNCH \|\| warp_all\(there\)\) break;", "break;"),
        (
            r"for \(u32 turn = 0; !warp_all\(there\); \+\+turn\)",
            "for (u32 turn = 0; false; ++turn)",
        ),
    ),
}


def removed(body: str, part: str) -> str:
    """A one-launch block's body without a part. Raises SystemExit where its lines are not there."""
    for pattern, text in PARTS[part]:
        body, count = re.subn(pattern, lambda _, text=text: text, body, flags=re.DOTALL)
        if not count:
            raise SystemExit(f"the kernels' text has no {pattern!r}, which is {part}")
    return body
