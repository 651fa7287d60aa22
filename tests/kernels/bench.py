"""The bench's variants of the kernels' text: what they replace is there, and nothing else goes."""

import difflib
import sys
from pathlib import Path

from moescope.kernels import cuda, layout, samples

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))
import timeline
import without

CORES, MEMORY = 132, 232448


def _body() -> str:
    spec = samples.block()
    plan = layout.cut(spec)
    return cuda.whole_block(
        spec, plan, layout.block_launch(spec, plan, layout.Geometry(), CORES, MEMORY)
    )[1]


def check_timeline():
    """Every point of time is noted, and the text is otherwise as it was."""
    body, stamped = _body(), timeline.stamped(_body())
    for number in range(len(timeline.NAMES)):
        assert f"STAMP({number})" in stamped, timeline.NAMES[number]
    lost = [
        line for line in difflib.ndiff(body.splitlines(), stamped.splitlines()) if line[0] == "-"
    ]
    assert not lost, lost


def check_without():
    """Each part can go by itself and after all the others; few lines change."""
    body = every = _body()
    for part in without.PARTS:
        alone = without.removed(body, part)
        changed = [
            line for line in difflib.ndiff(body.splitlines(), alone.splitlines()) if line[0] in "+-"
        ]
        most = 250 if part == "choice" else 90  # which is one piece of text
        assert 0 < len(changed) < most, (part, len(changed))
        every = without.removed(every, part)
    assert "DownRouted::fetch" in body and "Routed::fetch" not in every
    assert "rows16<" in body and "rows16<A_ROWS, UP" not in every and "rows16<DOWN," not in every
