"""Kernels of a binary, from Nsight Systems: the commands, and what is read from its SQLite export.

The same command runs twice, at two lengths; what the longer has more, divided by the tokens it has
more, is a token's share: load, warm-up and prefill cancel. CUDA graphs must be traced by node: an
export that knows graphs only as wholes is refused, since it hides the kernels.

Tables and columns: NVIDIA's "SQLite schema reference" of Nsight Systems; all times are nanoseconds.
"""

import json
import re
import sqlite3
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from ..errors import UserError
from .events import demangle

DATA = ("cuda_names.json",)

KERNELS = "CUPTI_ACTIVITY_KIND_KERNEL"
GRAPHS = "CUPTI_ACTIVITY_KIND_GRAPH_TRACE"
RUNTIME = "CUPTI_ACTIVITY_KIND_RUNTIME"
COPIES = ("CUPTI_ACTIVITY_KIND_MEMCPY", "CUPTI_ACTIVITY_KIND_MEMSET")
PUSH_POP = 59  # NvtxPushPopRange
PRIMITIVE = re.compile(r"^(\w+)::eval_gpu$")
# Process ids stand in bits 24 to 47 of a global thread or process id.
PROCESS_MASK = 0xFFFFFF << 24


@dataclass(frozen=True)
class Launch:
    """One kernel. start, end: ns. name: demangled. primitive: of MLX, by the NVTX range around the
    launch, where launches were made one by one. node: its graph node, None outside graphs."""

    name: str
    start: int
    end: int
    stream: int
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    node: int | None = None
    primitive: str | None = None


@dataclass(frozen=True)
class Trace:
    """One export. launches: in order of their start. calls: CUDA API call -> (count, ns)."""

    launches: list[Launch]
    calls: dict[str, tuple[int, int]]
    copies: tuple[int, int]  # count, ns
    streams: int
    version: str | None = None
    warnings: list[str] = field(default_factory=list)

    @property
    def busy(self) -> int:
        """ns in which at least one kernel ran."""
        return union((launch.start, launch.end) for launch in self.launches)


def profile_command(nsys: str, report: Path, argv: Sequence[str]) -> list[str]:
    """Record a command into ``report``.nsys-rep, each graph's kernels one by one."""
    return [
        nsys, "profile", "--trace=cuda,nvtx", "--cuda-graph-trace=node", "--sample=none",
        "--cpuctxsw=none", "--stats=false", "--force-overwrite=true", f"--output={report}",
        *argv,
    ]  # fmt: skip


def export_command(nsys: str, report: Path, database: Path) -> list[str]:
    """Export ``report``.nsys-rep into an SQLite file."""
    return [
        nsys, "export", "--type=sqlite", "--force-overwrite=true", "--quiet=true",
        f"--output={database}", f"{report}.nsys-rep",
    ]  # fmt: skip


def read(path: Path, process: int | None = None) -> Trace:
    """Read an export; with ``process`` (an id) only that process's records.

    Raises UserError if it is no export, holds no kernel, or knows graphs only as wholes.
    """
    try:
        with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as database:
            return _Export(database, path.name, process).trace()
    except sqlite3.DatabaseError as error:
        raise UserError(f"not an SQLite export of nsys: {error}", path.name) from None


class _Export:
    def __init__(self, database: sqlite3.Connection, where: str, process: int | None):
        database.row_factory = sqlite3.Row
        self.database, self.where, self.process = database, where, process
        tables = self._rows("SELECT name FROM sqlite_master WHERE type = 'table'")
        self.tables = {row["name"] for row in tables}
        self.columns = {
            table: {row["name"] for row in self._rows(f"PRAGMA table_info({table})")}
            for table in self.tables
        }
        self.strings = {}
        if "StringIds" in self.tables:
            self.strings = {r["id"]: r["value"] for r in self._rows("SELECT * FROM StringIds")}

    def trace(self) -> Trace:
        self._refuse_whole_graphs()
        ranges = self._primitives()
        calls_of = self._calls_by_correlation() if ranges else {}
        launches = [self._launch(row, ranges, calls_of) for row in self._of(KERNELS)]
        if not launches:
            raise UserError(
                "the export holds no kernel; did the command reach the GPU, and was it traced "
                "with --trace=cuda?",
                self.where,
            )
        launches.sort(key=lambda launch: (launch.start, launch.end))
        copies = [row["end"] - row["start"] for table in COPIES for row in self._of(table)]
        return Trace(
            launches=launches,
            calls=self._calls(),
            copies=(len(copies), sum(copies)),
            streams=len({launch.stream for launch in launches}),
            version=self._version(),
            warnings=self._warnings(),
        )

    def _refuse_whole_graphs(self) -> None:
        whole = len(self._of(GRAPHS))
        if whole:
            raise UserError(
                f"{whole} CUDA graphs were traced as wholes, which hides their kernels; record "
                "again with --cuda-graph-trace=node",
                self.where,
            )
        launched = sum(
            count for name, (count, _) in self._calls().items() if name == "cudaGraphLaunch"
        )
        nodes = any(row["graphNodeId"] for row in self._of(KERNELS)) if self._has_nodes else False
        if launched and not nodes:
            raise UserError(
                f"{launched} CUDA graphs were launched and no kernel belongs to a graph node; "
                "record again with --cuda-graph-trace=node",
                self.where,
            )

    @property
    def _has_nodes(self) -> bool:
        return "graphNodeId" in self.columns.get(KERNELS, set())

    def _launch(
        self,
        row: sqlite3.Row,
        ranges: dict[int, "_Ranges"],
        calls_of: dict[tuple[int, int], tuple[int, int]],
    ) -> Launch:
        keys = set(row.keys())
        name = next(
            (
                short_name(self.strings[row[key]])
                for key in ("mangledName", "demangledName", "shortName", "nameId")
                if key in keys and row[key] in self.strings
            ),
            "(unnamed)",
        )
        primitive = None
        node = row["graphNodeId"] or None if "graphNodeId" in keys else None
        if ranges and node is None:
            pid = (row["globalPid"] or 0) & PROCESS_MASK if "globalPid" in keys else 0
            call = calls_of.get((pid, row["correlationId"]))
            if call is not None and call[0] in ranges:
                primitive = ranges[call[0]].at(call[1])
        grid, block = (
            tuple(row[f"{kind}{axis}"] if f"{kind}{axis}" in keys else 0 for axis in "XYZ")
            for kind in ("grid", "block")
        )
        return Launch(name, row["start"], row["end"], row["streamId"], grid, block, node, primitive)

    def _primitives(self) -> dict[int, "_Ranges"]:
        """Thread -> the ranges that MLX opens around each primitive."""
        found: dict[int, list[tuple[int, int, str]]] = defaultdict(list)
        columns = self.columns.get("NVTX_EVENTS", set())
        for row in self._of("NVTX_EVENTS"):
            if "eventType" in columns and row["eventType"] != PUSH_POP:
                continue
            text = row["text"] if "text" in columns and row["text"] else None
            if text is None and "textId" in columns:
                text = self.strings.get(row["textId"])
            match = PRIMITIVE.match(text or "")
            if match and row["end"] is not None:
                found[row["globalTid"]].append((row["start"], row["end"], match[1]))
        return {thread: _Ranges(ranges) for thread, ranges in found.items()}

    def _calls_by_correlation(self) -> dict[tuple[int, int], tuple[int, int]]:
        return {
            (row["globalTid"] & PROCESS_MASK, row["correlationId"]): (
                row["globalTid"],
                row["start"],
            )
            for row in self._of(RUNTIME)
        }

    def _calls(self) -> dict[str, tuple[int, int]]:
        totals: dict[str, list[int]] = defaultdict(lambda: [0, 0])
        for row in self._of(RUNTIME):
            # Names carry the version of the API's structure: cudaGraphLaunch_v10000.
            name = re.sub(r"_v\d+$|_ptsz$", "", self.strings.get(row["nameId"], "(unnamed)"))
            totals[name][0] += 1
            totals[name][1] += row["end"] - row["start"]
        return {name: (count, ns) for name, (count, ns) in sorted(totals.items())}

    def _version(self) -> str | None:
        for table in ("META_DATA_EXPORT", "META_DATA_CAPTURE"):
            for row in self._of(table):
                if "VERSION" in str(row["name"]).upper():
                    return f"{row['name']} {row['value']}"
        return None

    def _warnings(self) -> list[str]:
        columns = self.columns.get("DIAGNOSTIC_EVENT", set())
        if not {"severity", "text"} <= columns:
            return []
        return [str(row["text"]) for row in self._of("DIAGNOSTIC_EVENT") if row["severity"] > 1]

    def _of(self, table: str) -> list[sqlite3.Row]:
        if table not in self.tables:
            return []
        rows = self._rows(f"SELECT * FROM {table}")
        if self.process is None:
            return rows
        for column in ("globalPid", "globalTid"):
            if column in self.columns[table]:
                wanted = self.process << 24
                return [row for row in rows if (row[column] or 0) & PROCESS_MASK == wanted]
        return rows

    def _rows(self, query: str) -> list[sqlite3.Row]:
        return self.database.execute(query).fetchall()


def short_name(name: str) -> str:
    """A kernel's name as in-process traces give it: no return type, no parameters, no namespace of
    MLX's; mangled names are demangled."""
    if name.startswith("_Z"):
        return demangle(name)
    name = name.replace("(anonymous namespace)::", "")
    depth, start, end = 0, 0, len(name)
    for at, letter in enumerate(name):
        depth += (letter == "<") - (letter == ">")
        if depth == 0 and letter == " ":
            start = at + 1
        elif depth == 0 and letter == "(":
            end = at
            break
    return re.sub(r"\bmlx::core::(cu::)?", "", name[start:end])


class _Ranges:
    """The ranges of one thread; they nest, so the latest one open at a time is the innermost."""

    def __init__(self, ranges: list[tuple[int, int, str]]):
        self.ranges = sorted(ranges)
        self.starts = [start for start, _, _ in self.ranges]

    def at(self, time: int) -> str | None:
        for index in range(bisect_right(self.starts, time) - 1, -1, -1):
            _, end, name = self.ranges[index]
            if end >= time:
                return name
            if index < len(self.ranges) - 64:
                return None
        return None


def union(intervals: Iterable[tuple[int, int]]) -> int:
    """The length of what the intervals cover; kernels of a graph overlap."""
    total, last = 0, None
    for start, end in sorted(intervals):
        if last is None or start >= last:
            total += max(0, end - start)
            last = end if last is None else max(last, end)
        elif end > last:
            total += end - last
            last = end
    return total


@dataclass(frozen=True)
class PerToken:
    """What one token costs, by the difference of two lengths. Times in seconds.

    kernels: name -> (launches, seconds). busy: union of the kernels' intervals; total: their sum,
    which is larger where kernels overlap. calls: CUDA API call -> (count, seconds).
    uneven: kernels whose launches per token are no whole number, with that number.
    """

    tokens: int
    kernels: dict[str, tuple[float, float]]
    calls: dict[str, tuple[float, float]]
    busy_s: float
    total_s: float
    uneven: dict[str, float]


def difference(long: Trace, short: Trace, tokens: int) -> PerToken:
    """Divide what ``long`` has more than ``short`` by the ``tokens`` that it generated more.

    Raises UserError if the longer run has less of what each token must have.
    """
    if tokens < 1:
        raise UserError(f"the two lengths differ by {tokens} tokens; the first must be longer")
    counts, times = _totals(long), _totals(short)
    kernels = {}
    for name in sorted({*counts, *times}):
        launches = counts.get(name, (0, 0))[0] - times.get(name, (0, 0))[0]
        spent = counts.get(name, (0, 0))[1] - times.get(name, (0, 0))[1]
        if launches > 0:
            kernels[name] = (launches / tokens, spent / tokens / 1e9)
    if not kernels:
        raise UserError(
            f"{tokens} more tokens launched no more kernels; were the two runs of the same length?"
        )
    calls = {}
    for name in sorted({*long.calls, *short.calls}):
        one, two = long.calls.get(name, (0, 0)), short.calls.get(name, (0, 0))
        if one[0] > two[0]:
            calls[name] = ((one[0] - two[0]) / tokens, (one[1] - two[1]) / tokens / 1e9)
    uneven = {
        name: launches
        for name, (launches, _) in kernels.items()
        if abs(launches - round(launches)) > 1e-9
    }
    return PerToken(
        tokens=tokens,
        kernels=kernels,
        calls=calls,
        busy_s=(long.busy - short.busy) / tokens / 1e9,
        total_s=sum(spent for _, spent in kernels.values()),
        uneven=uneven,
    )


def _totals(trace: Trace) -> dict[str, tuple[int, int]]:
    found: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for launch in trace.launches:
        found[launch.name][0] += 1
        found[launch.name][1] += launch.end - launch.start
    return {name: (count, ns) for name, (count, ns) in found.items()}


# Terms by the order of launches, for a binary that exports no module graph.


# What the primitives do whose kernels are called in more ways than a table of names can know.
PRIMITIVES = {
    "GatherMM": "gather", "GatherQMM": "gather",
    "Matmul": "matmul", "AddMM": "matmul", "QuantizedMatmul": "matmul", "QQMatmul": "matmul",
    "RMSNorm": "norm", "LayerNorm": "norm", "RoPE": "rope",
    "ScaledDotProductAttention": "attention",
    "Softmax": "softmax", "LogSumExp": "softmax", "ArgReduce": "sampler", "Arange": "arange",
    "Sort": "sort", "ArgSort": "sort", "Partition": "sort", "ArgPartition": "sort",
    "Gather": "index", "GatherAxis": "index", "Scatter": "index", "ScatterAxis": "index",
    "Reduce": "reduce",
}  # fmt: skip


def kind(name: str, grid: tuple[int, int, int] = (0, 0, 0), primitive: str | None = None) -> str:
    """The kind of a kernel by its name (``cuda_names.json``, in order); "other" if none fits.

    The tiled matrix kernels serve experts and dense layers alike: as a gather, one row of blocks
    stands in grid z for each pair of token and expert. primitive: what MLX was evaluating, where
    its ranges were recorded; it decides whose a matrix kernel is, and what an unknown one is.
    """
    by_name = next((found for found, pattern in _names() if pattern.search(name)), "other")
    if by_name in ("matmul_gemm", "matmul", "gather", "other") and primitive in PRIMITIVES:
        return PRIMITIVES[primitive]
    if by_name == "matmul_gemm":
        return "gather" if grid[2] > 1 else "matmul"
    return by_name


@cache
def _names() -> list[tuple[str, re.Pattern[str]]]:
    rows = json.loads(Path(__file__).with_name("cuda_names.json").read_text())
    return [(found, re.compile(pattern)) for found, pattern in rows]


@dataclass(frozen=True)
class Step:
    """One decode step in order of launches, the mean of ``count`` equal ones.

    rows: (kernel, kind, term, seconds). layers: expert clusters found. others: steps of another
    sequence that were left out. primitives: of MLX, one a row, None where no range was recorded.
    """

    rows: list[tuple[str, str, str, float]]
    count: int
    layers: int
    others: int
    primitives: tuple[str | None, ...] = ()

    def terms(self) -> dict[str, float]:
        """term -> seconds per token."""
        found: dict[str, float] = defaultdict(float)
        for _, _, term, seconds in self.rows:
            found[term] += seconds
        return dict(found)


# Launches that may lie between the gathers of one layer: activation, index kernels, casts.
CLUSTER_GAP = 12


def decode_step(trace: Trace) -> Step:
    """The decode step that occurs most often, its launches assigned to terms by their order.

    A step ends with the sampler's kernel. Launches should have been made one by one
    (MLX_USE_CUDA_GRAPHS=0): in graphs, independent kernels change places, and no range stands
    around a launch that says what a kernel of unknown name does. Raises UserError if no sequence
    occurs at least three times.
    """
    steps: list[list[Launch]] = [[]]
    for launch in trace.launches:
        steps[-1].append(launch)
        if kind(launch.name, launch.grid, launch.primitive) == "sampler":
            steps.append([])
    sequences = Counter(map(_sequence, filter(None, steps[:-1])))
    # Of equally frequent ones the longer: a warm-up of trivial steps is not what is meant.
    best = max(sequences, key=lambda s: (sequences[s], len(s)), default=())
    count = sequences.get(best, 0)
    if count < 3:
        raise UserError(
            f"no sequence of kernels between two samplings occurs three times ({len(steps) - 1} "
            "steps found); record with MLX_USE_CUDA_GRAPHS=0 and a longer run"
        )
    members = [s for s in steps[:-1] if _sequence(s) == best]
    seconds = [sum(s[i].end - s[i].start for s in members) / count / 1e9 for i in range(len(best))]
    kinds = [kind(*launch) for launch in best]
    terms, layers = assign(kinds)
    rows = [
        (name, found, term, spent)
        for (name, *_), found, term, spent in zip(best, kinds, terms, seconds, strict=True)
    ]
    primitives = tuple(primitive for *_, primitive in best)
    return Step(rows, count, layers, len(steps) - 1 - count, primitives)


def _sequence(step: list[Launch]) -> tuple[tuple[str, tuple[int, int, int], str | None], ...]:
    return tuple((launch.name, launch.grid, launch.primitive) for launch in step)


def assign(kinds: Sequence[str]) -> tuple[list[str], int]:
    """Terms of a step's launches by their order, and how many expert clusters there are.

    A layer is read as: attention up to its attention kernel and the projection behind it, a norm,
    then the block. In a block with a cluster of gathers: what comes before is the router, what
    lies between the gathers the activation, what follows the combination, dense matrix kernels
    there a shared expert. A block without one is a dense layer ("other"). After the last block's
    norm come head and sampler.
    """
    terms = ["other"] * len(kinds)
    clusters = _clusters(kinds)
    in_cluster = {i: c for c, (first, last) in enumerate(clusters) for i in range(first, last + 1)}
    segments = _segments(kinds)
    attends = [any(kinds[i] == "attention" for i in segment) for segment in segments]
    last_attention = max((i for i, yes in enumerate(attends) if yes), default=-1)
    state = "attention"
    for number, segment in enumerate(segments):
        gathers = [i for i in segment if i in in_cluster]
        later = any(attends[number:])
        if state == "attention" and later:
            for i in segment:
                terms[i] = "attention"
            if attends[number]:
                state = "block"
        elif gathers:
            first, last = gathers[0], gathers[-1]
            for i in segment:
                if i < first:
                    terms[i] = "expert_gather" if kinds[i] == "arange" else "router"
                elif i <= last:
                    moves = kinds[i] in ("gather", "expert_kernel", "arange", "index", "copy")
                    terms[i] = "expert_gather" if moves else "activation"
                else:
                    terms[i] = "shared_expert" if kinds[i] == "matmul" else "combine"
            state = "attention"
        elif number > last_attention and any(kinds[i] == "sampler" for i in segment):
            _tail(kinds, segment, terms)
        elif (
            state == "block"
            and number + 1 < len(segments)
            and _block_follows(segments, number, in_cluster, attends)
        ):
            for i in segment:
                terms[i] = "router"
        else:
            state = "attention" if any(kinds[i] == "matmul" for i in segment) else state
    for i, found in enumerate(kinds):
        if found == "norm":
            terms[i] = "norm"
    return terms, len(clusters)


def _tail(kinds: Sequence[str], segment: list[int], terms: list[str]) -> None:
    """The last segment: the first matrix kernel is the head, what follows the sampler's."""
    head = next((i for i in segment if kinds[i] == "matmul"), None)
    for i in segment:
        if head is not None and i <= head:
            terms[i] = "head"
        else:
            terms[i] = "sampler"


def _block_follows(
    segments: list[list[int]], number: int, in_cluster: dict[int, int], attends: list[bool]
) -> bool:
    """Whether the next segment with work is one of gathers (a router with a norm of its own)."""
    for later in range(number + 1, len(segments)):
        if attends[later]:
            return False
        if any(i in in_cluster for i in segments[later]):
            return True
    return False


def _segments(kinds: Sequence[str]) -> list[list[int]]:
    """Positions between norms; a norm belongs to no segment."""
    segments: list[list[int]] = [[]]
    for i, found in enumerate(kinds):
        if found == "norm":
            segments.append([])
        else:
            segments[-1].append(i)
    return [segment for segment in segments if segment]


def _clusters(kinds: Sequence[str]) -> list[tuple[int, int]]:
    """(first, last) of each group of expert kernels that no norm interrupts."""
    clusters: list[list[int]] = []
    interrupted = True
    for i, found in enumerate(kinds):
        if found == "norm":
            interrupted = True
        elif found in ("gather", "expert_kernel"):
            if interrupted or i - clusters[-1][1] > CLUSTER_GAP:
                clusters.append([i, i])
            clusters[-1][1] = i
            interrupted = False
    return [(first, last) for first, last in clusters]


def kernel_rows(per_token: PerToken, step: Step | None = None) -> list[dict[str, Any]]:
    """Rows of kernels.csv, largest first: kernel, term, primitives (of MLX, where its ranges were
    recorded), launches and ms per token, share of busy.

    A kernel that serves several terms (by ``step``) is split by its share of time in each; without
    a step the term is "other".
    """
    split: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(lambda: [0, 0.0]))
    primitives: dict[tuple[str, str], set[str]] = defaultdict(set)
    if step:
        for (name, _, term, _), primitive in zip(step.rows, step.primitives, strict=True):
            primitives[name, term] |= {primitive} - {None}
    for name, _, term, seconds in step.rows if step else ():
        split[name][term][0] += 1
        split[name][term][1] += seconds
    rows = []
    for name, (launches, seconds) in per_token.kernels.items():
        parts = split.get(name) or {"other": [1, 1.0]}
        count = sum(part[0] for part in parts.values())
        time = sum(part[1] for part in parts.values())
        for term, (n, spent) in parts.items():
            share = spent / time if time else n / count
            rows.append(
                {
                    "kernel": name,
                    "term": term,
                    "primitives": " ".join(sorted(primitives[name, term])),
                    "launches_per_token": launches * n / count,
                    "ms_per_token": seconds * share * 1e3,
                    "share_of_busy": seconds * share / per_token.busy_s if per_token.busy_s else 0,
                }
            )
    return sorted(rows, key=lambda row: (-row["ms_per_token"], row["kernel"], row["term"]))
