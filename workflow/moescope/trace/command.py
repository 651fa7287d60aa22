"""The kernel side of an arm that is a command: nsys on CUDA, xctrace on Metal, each at two lengths.

Called by the trace stage like a backend's own instruments; what it returns joins trace.json. On
CUDA it writes the kernels.csv and terms.json of traces in process; the terms come from the order of
launches, since a binary shows no graph of modules. What the profiler costs on the GPU cannot be
seen from outside; what it costs in wall time is measured.
"""

import csv
import io
import os
import shutil
import statistics
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import UserError
from ..files import sha256_file, write_json, write_text
from ..measure import admission
from ..runtimes import output, process
from . import derived, metal, nsys
from .nsys import PerToken, Step

if TYPE_CHECKING:
    from ..runtimes.command import CommandWorker
    from .stage import Context

TERMS = "moescope/terms/1"
SHORTER = 8  # tokens of the shorter run; the longer has trace.tokens more, 32 at least
LONGER = 32
LIMIT_S = 3600.0
EXPORT_LIMIT_S = 1800.0
ASK_S = 60.0
GRAPHS_OFF = {"MLX_USE_CUDA_GRAPHS": "0"}
UNCLASSIFIED = "unclassified"
ENCODERS = "all encoders (a Metal System Trace names no kernel)"
EXPERTS = ("gather", "expert_kernel")
COLUMNS = ("arm", "kernel", "term", "primitives", "launches_per_token", "ms_per_token",
           "bytes_per_token", "share")  # fmt: skip


class NotMeasured(Exception):
    """A profiler that is missing, not permitted or fails; the text joins the record."""


def measure(context: "Context") -> dict[str, Any]:
    """Profile the command at two lengths, beside as many plain runs as the study has passes."""
    backend = context.task.params["machine"]["backend"]
    folder = context.task.work / "traces" / context.task.key
    folder.mkdir(parents=True, exist_ok=True)
    more = max(context.task.params["trace"]["tokens"], LONGER)
    try:
        with context.worker() as worker:
            worker.ask("load", LIMIT_S, **context.bench.loading(context.arm))
            run = Profiled(context, worker, folder, more)
            return run.on_cuda() if backend == "cuda" else run.on_metal()
    except NotMeasured as why:
        return {"not_measured": [f"kernels: {why}"]}


def xctrace_is_there() -> None:
    """Raises NotMeasured without Xcode; its command line tools alone have no xctrace."""
    program = shutil.which("xcrun")
    if program is None:
        raise NotMeasured("xcrun (Xcode) is not in PATH")
    if not process.run([program, "xctrace", "version"], os.environ, ASK_S).good:
        raise NotMeasured("xcrun finds no xctrace: it comes with Xcode, not with its tools")


class Profiled:
    """One arm's runs. more: tokens that the longer run has more."""

    def __init__(self, context: "Context", worker: "CommandWorker", folder: Path, more: int):
        self.context, self.worker, self.folder, self.more = context, worker, folder, more
        self.lengths = {"short": SHORTER, "long": SHORTER + more}
        self.walls: dict[str, float] = {}

    def on_cuda(self) -> dict[str, Any]:
        """Writes kernels.csv and terms.json (moescope/terms/1)."""
        program = shutil.which("nsys")
        if program is None:
            raise NotMeasured("nsys (Nsight Systems) is not in PATH")
        plain = self.plain()
        long, short = (self._nsys(program, name, {}) for name in ("long", "short"))
        per_token = nsys.difference(long, short, self.more)
        not_measured = ["the profiler's own cost on GPU time: a command can only be timed outside"]
        step = None
        try:
            step = nsys.decode_step(self._nsys(program, "order", GRAPHS_OFF))
        except (NotMeasured, UserError) as why:
            not_measured.append(f"the term of each kernel: {why}")
        self._write(per_token, step, plain)
        if per_token.uneven:
            names = ", ".join(sorted(per_token.uneven)[:4])
            not_measured.append(
                f"whole launches a token: {len(per_token.uneven)} kernels ({names})"
            )
        return {
            "instruments": ["nsys"],
            "not_measured": not_measured,
            "profiler": {"nsys": long.version, "warnings": long.warnings[:5]},
            "reports": self._reports("*.nsys-rep"),
        }

    def on_metal(self) -> dict[str, Any]:
        """Command buffers, busy and idle GPU time a token, and kernels that are derived.

        Writes kernels.csv and terms.json too: one row for all encoders, with no term, since the
        trace names no kernel; the record has the busy share, and refuses an attribution by terms.

        Instruments' own services compute beside the run, so the guard is asked only before it.
        """
        xctrace_is_there()
        plain = self.plain()
        long, short = (self._xctrace(name) for name in ("long", "short"))
        per_token = metal.difference(long, short, self.more)
        self._write_metal(per_token, plain)
        return {
            "instruments": ["xctrace"],
            "not_measured": [
                "times of single kernels: a Metal System Trace shows command buffers only",
                *(f"trace: {note}" for note in long.notes),
            ],
            "derived_dispatches": derived.dispatches(self.context.task.one("fetch")),
            "command_buffers": {
                **asdict(per_token),
                "wall_ms": plain,
                "profiled_wall_ms": [self.walls["long"]],
            },
        }

    def _write_metal(self, per_token: metal.PerToken, plain: list[float]) -> None:
        out, wall = self.context.task.out, statistics.median(plain)
        busy, encoders = per_token.busy_s * 1e3, per_token.encoders
        row = {"arm": self.context.arm["name"], "kernel": ENCODERS, "term": UNCLASSIFIED,
               "primitives": "", "launches_per_token": encoders, "ms_per_token": busy,
               "bytes_per_token": "", "share": 1.0}  # fmt: skip
        write_text(out / "kernels.csv", _csv([row]))
        terms = {
            "schema": TERMS,
            "method": None,
            "steps": per_token.tokens,
            "wall_ms": plain,
            "profiled_wall_ms": [self.walls["long"]],
            "profiler_wall_cost": [self.walls["long"] / wall - 1],
            "busy_ms": [busy],
            "busy_share": [busy / wall],
            "host_gap_ms": [wall - busy],
            "launches": [encoders],
            "terms": {UNCLASSIFIED: {"ms": [busy], "launches": [encoders]}},
            "sum_ms": [busy],
            "unclassified": [1.0],
            "calls": {},
        }
        write_json(out / "terms.json", terms)

    def plain(self) -> list[float]:
        """ms a token of unprofiled runs of the longer length."""
        given = {"prompt": self.context.bench.prompt, "patches": self.context.patches}
        tokens = self.lengths["long"]
        found = []
        for number in range(self.context.task.params["trace"]["passes"]):
            reply = self.context.guarded(
                f"plain {number}",
                lambda: self.worker.ask("decode", LIMIT_S, **given, tokens=tokens),
            )
            found.append(reply["decode_s"] / reply["forwards"] * 1e3)
        return found

    def _nsys(self, program: str, name: str, extra: dict[str, str]) -> nsys.Trace:
        report = self.folder / name
        database = report.with_suffix(".sqlite")
        argv, env = self._command(name, extra)
        self._profile(name, nsys.profile_command(program, report, argv), env)
        self._run(name, nsys.export_command(program, report, database), env, EXPORT_LIMIT_S)
        try:
            return nsys.read(database)
        finally:
            database.unlink(missing_ok=True)

    def _xctrace(self, name: str) -> metal.Trace:
        bundle = self.folder / f"{name}.trace"
        shutil.rmtree(bundle, ignore_errors=True)
        argv, env = self._command(name, {})
        own = self.worker.tool.invoke["env"] | self.worker.settings
        given = {key: env[key] for key in (*own, "TMPDIR", "HOME", "PATH") if key in env}
        record = metal.record_command(bundle, argv, given, LIMIT_S)
        self.context.guard.gate(f"profiled {name}")
        self._printed(name, self._run(name, record, env, LIMIT_S).text)
        return self._exported(name, bundle, env)

    def _exported(self, name: str, bundle: Path, env: dict[str, str]) -> metal.Trace:
        files = [self.folder / f"{name}-{what}.xml" for what in ("toc", *metal.TABLES)]
        self._run(name, metal.contents_command(bundle, files[0]), env, EXPORT_LIMIT_S)
        for table, path in zip(metal.TABLES, files[1:], strict=True):
            self._run(name, metal.export_command(bundle, table, path), env, EXPORT_LIMIT_S)
        try:
            return metal.read(*files)
        finally:
            for path in files:
                path.unlink(missing_ok=True)

    def _command(self, name: str, extra: dict[str, str]) -> tuple[list[str], dict[str, str]]:
        tokens = self.lengths.get(name, self.lengths["long"])
        return self.worker.command(self.context.bench.prompt, tokens, extra, batch=1)

    def _profile(self, name: str, argv: list[str], env: dict[str, str]) -> None:
        """Run under the profiler on a quiet host; its decode's ms a token go to ``walls``."""

        def once() -> dict[str, Any]:
            return {"text": self._run(name, argv, env, LIMIT_S).text}

        self._printed(name, self.context.guarded(f"profiled {name}", once)["text"])

    def _printed(self, name: str, text: str) -> None:
        try:
            (run,) = output.runs(text, self.worker.tool.invoke)
        except UserError as why:
            raise NotMeasured(f"the run under the profiler printed no result: {why}") from None
        self.walls[name] = run["decode_s"] / run["forwards"] * 1e3

    def _run(self, name: str, argv: list[str], env: dict[str, str], limit: float) -> process.Ended:
        # By its path: the arm's own PATH may not have it.
        ended = process.run([shutil.which(argv[0]) or argv[0], *argv[1:]], env, limit)
        if not ended.good:
            kind = admission.classify(ended.status, ended.text, ended.timed_out)
            why = admission.explain(kind, ended.status, ended.text)
            raise NotMeasured(f"{Path(argv[0]).name} ({name}) {why}")
        return ended

    def _reports(self, pattern: str) -> list[dict[str, Any]]:
        return [
            {"file": path.relative_to(self.context.task.work).as_posix(),
             "bytes": path.stat().st_size, "sha256": sha256_file(path)}
            for path in sorted(self.folder.glob(pattern))
        ]  # fmt: skip

    def _write(self, per_token: PerToken, step: Step | None, plain: list[float]) -> None:
        out, arm = self.context.task.out, self.context.arm["name"]
        rows = [
            {
                **row,
                "term": row["term"] if step else UNCLASSIFIED,
                "arm": arm,
                "bytes_per_token": "",
                "share": row.pop("share_of_busy"),
            }
            for row in nsys.kernel_rows(per_token, step)
        ]
        write_text(out / "kernels.csv", _csv(rows))
        write_json(out / "terms.json", summarise(per_token, step, plain, self.walls, rows))


def summarise(
    per_token: PerToken,
    step: Step | None,
    plain: list[float],
    walls: dict[str, float],
    rows: list[dict[str, Any]],
) -> dict[str, Any]:
    """The content of terms.json. Lists hold one value: there is one pair of profiled runs."""
    wall = statistics.median(plain)
    busy = per_token.busy_s * 1e3
    terms: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        entry = terms.setdefault(row["term"], {"ms": [0.0], "launches": [0.0]})
        entry["ms"][0] += row["ms_per_token"]
        entry["launches"][0] += row["launches_per_token"]
    total = sum(entry["ms"][0] for entry in terms.values())
    launches = sum(count for count, _ in per_token.kernels.values())
    found: dict[str, Any] = {
        "schema": TERMS,
        "method": "order" if step else None,
        "steps": per_token.tokens,
        "wall_ms": plain,
        "profiled_wall_ms": [walls["long"]],
        "profiler_wall_cost": [walls["long"] / wall - 1],
        "busy_ms": [busy],
        "busy_share": [busy / wall],
        "host_gap_ms": [wall - busy],
        "overlapping_ms": [per_token.total_s * 1e3 - busy],
        "launches": [launches],
        "terms": dict(sorted(terms.items())),
        "sum_ms": [total],
        "unclassified": [terms.get(UNCLASSIFIED, {"ms": [0.0]})["ms"][0] / total],
        "calls": {
            name: {"count": count, "ms": seconds * 1e3}
            for name, (count, seconds) in per_token.calls.items()
        },
    }
    if step:
        one = sum(seconds for *_, seconds in step.rows) * 1e3
        found["window"] = {
            "difference": {"ms": total, "launches": launches},
            "window": {"ms": one, "launches": len(step.rows)},
        }
        found["window_disagreement"] = abs(total / one - 1)
        found["path"] = _path(step, rows)
    return found


def _path(step: Step, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """As in process: which kernels the routed experts' products ran, in the steps of the launches'
    order; MoE terms' launches that are not whole multiples of the layers seen there."""
    counts: dict[str, int] = {}
    for name, kind, term, _ in step.rows:
        if kind in EXPERTS and term == "expert_gather":
            base = name.partition("<")[0]
            counts[base] = counts.get(base, 0) + 1
    moe = ("router", "expert_gather", "activation", "combine")
    return {
        "steps": step.count,
        "moe_layers": step.layers,
        "experts": [
            {"kernel": name, "launches": count * step.count, "launches_per_token": count,
             "per_layer": count / step.layers}
            for name, count in sorted(counts.items(), key=lambda item: (-item[1], item[0]))
        ],
        "uneven": [
            {key: row[key] for key in ("term", "kernel", "launches_per_token")}
            for row in rows
            if step.layers and row["term"] in moe
            and abs(row["launches_per_token"] / step.layers % 1) > 1e-9
        ],
    }  # fmt: skip


def _csv(rows: list[dict[str, Any]]) -> str:
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(COLUMNS)
    for row in rows:
        table.writerow(
            f"{row[name]:.6g}" if isinstance(row[name], float) else row[name] for name in COLUMNS
        )
    return text.getvalue()
