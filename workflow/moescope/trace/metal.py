"""GPU work on a Mac, from Instruments: the commands, and what is read from xctrace's XML exports.

A Metal System Trace holds command buffers and the intervals in which their encoders ran. It names
no kernel: MLX labels nothing in release builds and puts many kernels into one encoder. So times are
per command buffer and token, and kernel names are *derived* from MLX's dispatch rules, and say so.

The XML gives each value once, with an ``id``, and then refers to it (``ref``), also to values
inside earlier ones; ``<sentinel/>`` is an empty cell; a second ``<node>`` may leave out the schema.
All times are nanoseconds.
"""

import json
import re
import xml.etree.ElementTree as ET
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from ..errors import UserError
from .nsys import union

DATA = ("metal_names.json",)

TEMPLATE = "Metal System Trace"
INTERVALS = "metal-gpu-intervals"
SUBMISSIONS = "metal-application-command-buffer-submissions"
TABLES = (INTERVALS, SUBMISSIONS)
SUBMISSION = "CommandBufferSubmission"


def record_command(
    trace: Path, argv: Sequence[str], env: dict[str, str], limit_s: float
) -> list[str]:
    """Record a command. xctrace starts it with a bare environment: variables are given by name."""
    return [
        "xcrun", "xctrace", "record", "--template", TEMPLATE, "--output", str(trace),
        "--time-limit", f"{int(limit_s * 1000)}ms", "--no-prompt", "--target-stdout", "-",
        *(word for name, value in sorted(env.items()) for word in ("--env", f"{name}={value}")),
        "--launch", "--", *argv,
    ]  # fmt: skip


def attach_command(trace: Path, pid: int, limit_s: float) -> list[str]:
    """Record a process that runs already, until it is interrupted (SIGINT) or the limit is over."""
    return [
        "xcrun", "xctrace", "record", "--template", TEMPLATE, "--output", str(trace),
        "--time-limit", f"{int(limit_s * 1000)}ms", "--no-prompt", "--attach", str(pid),
    ]  # fmt: skip


def contents_command(trace: Path, output: Path) -> list[str]:
    """Export the table of contents: which process was launched, which tables there are."""
    return ["xcrun", "xctrace", "export", "--input", str(trace), "--toc", "--output", str(output)]


def export_command(trace: Path, table: str, output: Path) -> list[str]:
    """Export one table."""
    xpath = f'/trace-toc/run[@number="1"]/data/table[@schema="{table}"]'
    return [
        "xcrun", "xctrace", "export", "--input", str(trace), "--xpath", xpath,
        "--output", str(output),
    ]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Cell:
    """A value: its text (numbers and times in ns), how Instruments shows it, a process's id."""

    text: str
    shown: str = ""
    pid: int | None = None

    @property
    def number(self) -> int:
        return int(self.text.replace(",", ""))


@dataclass(frozen=True)
class Interval:
    """One encoder on the GPU. buffer: its command buffer. depth: 0 for the outermost."""

    start: int
    end: int
    channel: str
    label: str
    buffer: str
    depth: int


@dataclass(frozen=True)
class Submission:
    """One command buffer handed over by the process; encode_ns: time spent in its encoders."""

    start: int
    buffer: str
    encoders: int
    encode_ns: int


@dataclass(frozen=True)
class Trace:
    """What one run did: GPU intervals of its process, and its command buffers."""

    intervals: list[Interval]
    submissions: list[Submission]
    notes: list[str] = field(default_factory=list)

    @property
    def busy(self) -> int:
        """ns in which at least one encoder ran; encoders overlap and nest."""
        return union((i.start, i.end) for i in self.intervals)

    @property
    def span(self) -> int:
        """ns from the first start to the last end."""
        return max(i.end for i in self.intervals) - min(i.start for i in self.intervals)


def rows(path: Path, table: str) -> Iterator[dict[str, Cell | None]]:
    """The rows of an exported table: column mnemonic -> value, None for an empty cell.

    Reads piece by piece (exports reach gigabytes). Raises UserError for another table, a reference
    to nothing, or a row that does not fit the schema.
    """
    columns: list[str] = []
    seen: dict[str, Cell] = {}
    depth, node = 0, None
    try:
        for event, element in ET.iterparse(path, events=("start", "end")):
            if event == "start":
                depth += element.tag == "row"
                node = element if element.tag == "node" else node
                continue
            if element.tag == "schema":
                name = element.get("name")
                if name != table:
                    raise UserError(f"this is the table {name!r}, expected {table!r}", path.name)
                columns = [col.findtext("mnemonic") or "" for col in element.findall("col")]
            elif element.tag == "row":
                depth -= 1
                yield _row(element, columns, seen, path.name)
                # What was read is dropped from the tree, or a long trace fills the memory.
                element.clear()
                if node is not None:
                    node.clear()
            elif depth and element.get("id") is not None:
                seen[element.get("id")] = _cell(element, seen)
    except ET.ParseError as error:
        raise UserError(f"not XML: {error}", path.name) from None
    if not columns:
        raise UserError("no table in it; was it exported with --xpath?", path.name)


def _row(
    element: ET.Element, columns: list[str], seen: dict[str, Cell], where: str
) -> dict[str, Cell | None]:
    if len(element) != len(columns):
        raise UserError(
            f"a row has {len(element)} cells, the schema {len(columns)} columns; the format of "
            "this version of xctrace is not known",
            where,
        )
    found: dict[str, Cell | None] = {}
    for column, child in zip(columns, element, strict=True):
        reference = child.get("ref")
        if reference is not None:
            if reference not in seen:
                raise UserError(f"a cell refers to {reference}, which is nowhere", where)
            found[column] = seen[reference]
        elif child.tag == "sentinel":
            found[column] = None
        else:
            found[column] = seen.get(child.get("id", "")) or _cell(child, seen)
    return found


def _cell(element: ET.Element, seen: dict[str, Cell]) -> Cell:
    pid = None
    if element.tag == "process":
        inner = element.find("pid")
        if inner is not None:
            value = seen.get(inner.get("ref", "")) or Cell(inner.text or "")
            pid = int(value.text)
    text = (element.text or "").strip()
    return Cell(text or element.get("fmt", ""), element.get("fmt", ""), pid)


def recorded(contents: Path) -> tuple[int, str]:
    """(process id, name) of the process that was recorded, from the table of contents."""
    root = _parse(contents)
    for process in root.iter("process"):
        if process.get("type") in ("launched", "attached") and process.get("pid"):
            return int(process.get("pid")), process.get("name", "")
    target = root.find(".//target/process")
    if target is not None and target.get("pid"):
        return int(target.get("pid")), target.get("name", "")
    raise UserError(
        "the trace is of no one process; record with --launch or --attach", contents.name
    )


def read(contents: Path, intervals: Path, submissions: Path) -> Trace:
    """Read the exports of one trace; only the process that was recorded counts.

    Raises UserError if the process ran nothing on the GPU.
    """
    pid, name = recorded(contents)
    notes = []
    sent = []
    for row in rows(submissions, SUBMISSIONS):
        kind = row.get("event-type")
        if _pid(row) == pid and (kind is None or kind.text == SUBMISSION):
            sent.append(
                Submission(
                    start=_number(row, "start"),
                    buffer=_text(row, "cmdbuffer-id"),
                    encoders=_number(row, "num-encoders"),
                    encode_ns=_number(row, "encoder-time"),
                )
            )
    buffers = {submission.buffer for submission in sent if submission.buffer}
    found, foreign = [], 0
    for row in rows(intervals, INTERVALS):
        state = row.get("state")
        if state is not None and state.text != "Active":
            continue
        owner, buffer = _pid(row), _text(row, "cmdbuffer-id")
        # Some rows name no process; their command buffer tells whose they are.
        if owner != pid and not (owner is None and buffer in buffers):
            foreign += 1
            continue
        start = _number(row, "start")
        found.append(
            Interval(
                start=start,
                end=start + _number(row, "duration"),
                channel=_text(row, "channel-name"),
                label=_text(row, "event-label"),
                buffer=buffer,
                depth=_number(row, "event-depth"),
            )
        )
    if not found:
        raise UserError(
            f"{name} ({pid}) ran nothing on the GPU in this trace; {foreign} intervals are other "
            "processes'. Did it use the Metal back-end, and did the recording last long enough?",
            intervals.name,
        )
    if foreign:
        notes.append(f"{foreign} GPU intervals belong to other processes")
    unknown = len({i.buffer for i in found} - buffers)
    if unknown and buffers:
        notes.append(f"{unknown} command buffers on the GPU have no submission in the trace")
    found.sort(key=lambda i: (i.start, i.end))
    sent.sort(key=lambda s: s.start)
    return Trace(found, sent, notes)


@dataclass(frozen=True)
class PerToken:
    """What one token costs, by the difference of two lengths. Times in seconds.

    busy: some encoder ran. idle: none ran, between the first and the last of the run. encode:
    the host's time between opening and closing its encoders.
    """

    tokens: int
    busy_s: float
    idle_s: float
    command_buffers: float
    encoders: float
    intervals: float
    encode_s: float


def difference(long: Trace, short: Trace, tokens: int) -> PerToken:
    """Divide what ``long`` has more than ``short`` by the tokens that it generated more."""
    if tokens < 1:
        raise UserError(f"the two lengths differ by {tokens} tokens; the first must be longer")
    busy = long.busy - short.busy
    if busy <= 0:
        raise UserError(f"{tokens} more tokens took no more GPU time; same length twice?")
    return PerToken(
        tokens=tokens,
        busy_s=busy / tokens / 1e9,
        idle_s=(long.span - short.span - busy) / tokens / 1e9,
        command_buffers=(len(long.submissions) - len(short.submissions)) / tokens,
        encoders=_sum(long, short, "encoders") / tokens,
        intervals=(len(long.intervals) - len(short.intervals)) / tokens,
        encode_s=_sum(long, short, "encode_ns") / tokens / 1e9,
    )


def _sum(long: Trace, short: Trace, name: str) -> int:
    one, two = (sum(getattr(s, name) for s in trace.submissions) for trace in (long, short))
    return one - two


def _pid(row: dict[str, Cell | None]) -> int | None:
    cell = row.get("process")
    return cell.pid if cell is not None else None


def _text(row: dict[str, Cell | None], name: str) -> str:
    cell = row.get(name)
    return cell.text if cell is not None else ""


def _number(row: dict[str, Cell | None], name: str) -> int:
    cell = row.get(name)
    return cell.number if cell is not None and cell.text else 0


def _parse(path: Path) -> ET.Element:
    try:
        return ET.parse(path).getroot()
    except ET.ParseError as error:
        raise UserError(f"not XML: {error}", path.name) from None


# Names of dispatches, derived.


def quantised_name(
    shape: tuple[int, int, int],
    mode: str,
    bits: int,
    group_size: int,
    dtype: str,
    gather: bool,
    global_scale: bool = False,
) -> str:
    """The kernel that MLX's Metal back-end takes for a quantised product at decode.

    shape: (rows of x, K, N) of one product, weights transposed; dtype: of the activations. Rules:
    ``metal_names.json``. Raises UserError for more than one row (prefill takes other kernels).
    """
    rows_of_x, k, n = shape
    if rows_of_x != 1:
        raise UserError(f"{rows_of_x} rows: only decode (one row) is derived")
    rules = _rules()
    tail = f"{rules['types'][dtype]}_gs_{group_size}_b_{bits}"
    scale = "_hgs" if global_scale else ""
    if not gather and k in (64, 128) and bits & (bits - 1) == 0:
        return f"{mode}_qmv_quad_{tail}_d_{k}_batch_0"
    fast = n % 8 == 0 and k % (rules["pack_factor"][str(bits)] * 2 * 32) == 0
    kind = f"{'gather_' if gather else ''}qmv{'_fast' if fast else ''}"
    return f"{mode}_{kind}_{tail}{scale}" + ("" if gather else "_batch_0")


def derived_dispatches(weights: Iterable[dict[str, Any]], dtype: str) -> list[dict[str, Any]]:
    """Which kernels the quantised weights of a model take at decode, and how often a token.

    weights: {"module", "shape": of the packed weight, "mode", "bits", "group_size"}; three
    dimensions are experts, whose product is a gather. Returns rows of {"kernel", "modules" (their
    names without layer numbers), "dispatches_per_token", "derived": True}, the most frequent first.
    Attention, norms and the elementwise kernels are not derived: their choice depends on more.
    """
    found: dict[str, dict[str, Any]] = {}
    for weight in weights:
        *_, n, packed = weight["shape"]
        k = packed * 32 // weight["bits"]
        gather = len(weight["shape"]) == 3
        name = quantised_name(
            (1, k, n), weight["mode"], weight["bits"], weight["group_size"], dtype, gather
        )
        row = found.setdefault(name, {"modules": set(), "dispatches_per_token": 0})
        row["modules"].add(re.sub(r"\.\d+\.", ".*.", weight["module"]))
        row["dispatches_per_token"] += 1
    return [
        {"kernel": name, "modules": sorted(row["modules"]),
         "dispatches_per_token": row["dispatches_per_token"], "derived": True}
        for name, row in sorted(
            found.items(), key=lambda item: (-item[1]["dispatches_per_token"], item[0])
        )
    ]  # fmt: skip


@cache
def _rules() -> dict[str, Any]:
    return json.loads(Path(__file__).with_name("metal_names.json").read_text())
