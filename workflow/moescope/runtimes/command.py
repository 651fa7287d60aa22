"""A command seen as a worker: asked to load and to decode like the workers of Python runtimes.

``CommandWorker`` has the surface of ``client.Worker``. Each decode is a process of its own, which
measures several runs where the tool can ("many") and the study asks for it: they are one decode
then, with the mean of their times. What the tool times is converted to forwards timed; its own rate
stands beside it.
"""

import json
import re
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from ..errors import UserError
from ..files import canonical, sha256_text
from ..measure import admission
from . import binary, output, process
from .client import THREAD_VARIABLES, WorkerDied, WorkerError, usable_cores

# Never inherited by a measured command: they would change what an arm is.
STEERING = re.compile(
    r"^(MLX_(?!PTX_CACHE_DIR$)|MLXCEL_|MOESCOPE_|HF_HUB_|HF_TOKEN$|PYTHON(?!PATH$))"
)
# The short run that stands for loading.
TRIAL_PROMPT, TRIAL_TOKENS = list(range(1, 17)), 4


class CommandWorker:
    """A command runtime's tool, with an arm's variables, as a context manager.

    tool: a ``binary.Tool``. log: where the tool's output goes. settings: the arm's variables; they
    win over everything. batch: runs that the process of a decode measures, by default what the
    runtime says; more than one only where the tool can.
    """

    def __init__(
        self,
        tool: binary.Tool,
        log: Path | None = None,
        settings: dict[str, str] | None = None,
        batch: int | None = None,
    ):
        batch = batch or tool.invoke.get("runs_per_process", 1)
        if batch > 1 and tool.invoke["runs"] != "many":
            raise UserError(
                f"{batch} runs in one process: the preset {tool.manifest['preset']} measures one; "
                "a preset with `runs: many` is needed"
            )
        self.tool, self.log, self.batch = tool, log, batch
        self.settings = settings or {}
        self.model: Path | None = None
        self.ready: dict[str, Any] = {}
        self._process: process.Process | None = None
        self._asked: tuple[str, dict[str, Any]] | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._tail = ""

    @property
    def pid(self) -> int | None:
        """Of the running process; there is none between the runs."""
        return self._process.pid if self._process else None

    @property
    def alive(self) -> bool:
        return self._folder is not None

    def __enter__(self) -> Self:
        self.start()
        self.wait_ready()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def start(self) -> None:
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="moescope-command-")

    def wait_ready(self, timeout: float = 0.0) -> dict[str, Any]:
        """What a worker's first line says: versions, device (not known here), the tool's hash."""
        manifest = self.tool.manifest
        framework = manifest.get("framework") or {}
        versions = {"command": manifest["preset"]}
        if "commit" in manifest:
            versions["commit"] = manifest["commit"]
        if framework:
            versions[framework["name"]] = framework["value"]
        if "packages" in manifest:
            package = manifest["package"]
            versions[package] = manifest["packages"][package]
        # Here, so that it stands in every run.
        versions["binary_sha256"] = self.tool.sha256
        self.ready = {
            "ready": True,
            "pid": None,
            "versions": versions,
            "device": None,
            "library_sha256": self.tool.sha256,
        }
        return self.ready

    def ask(self, do: str, timeout: float, **arguments: Any) -> dict[str, Any]:
        """Like ``client.Worker.ask``: raises WorkerError or WorkerDied; kinds as in admission."""
        deadline = time.monotonic() + timeout
        self.send(do, deadline=deadline, **arguments)
        return self.receive(do, deadline=deadline)

    def send(self, do: str, *, deadline: float, **arguments: Any) -> None:
        """Start what a request needs; a decode starts its process here."""
        if self._folder is None:
            raise WorkerDied("crash", "the worker has ended")
        self._asked = (do, arguments)
        if do in ("decode", "graph", "profile"):
            if arguments.get("patches"):
                patches = ", ".join(arguments["patches"])
                raise WorkerError(
                    "not_applicable",
                    f"{patches}: a command cannot be patched; give the arm variables instead",
                )
            if self.model is None:
                raise WorkerError("failed", f"{do} before load")
        if do == "load":
            self.model = self._checked(Path(arguments["path"]))
            self._start_process(TRIAL_PROMPT, TRIAL_TOKENS, {}, batch=1)
        elif do == "decode":
            self._start_process(arguments["prompt"], arguments["tokens"], {})
        elif do in ("graph", "profile"):
            self._instrument(do, arguments["prompt"])
        elif do != "quit":
            raise WorkerError("not_applicable", f"a command has no {do}")

    def receive(self, do: str, *, deadline: float) -> dict[str, Any]:
        """The result of the request sent last."""
        asked = self._asked[0] if self._asked else ""
        if do != asked:
            raise WorkerError("failed", f"{do} was not asked")
        if do == "load":
            return self._load(deadline)
        if do == "decode":
            return self._decode(deadline)
        if do in ("graph", "profile"):
            return self._insight(do, deadline)
        return {}

    def close(self, patient: bool = True) -> None:
        if self._process is not None:
            self._process.__exit__()
            self._process = None
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def stderr_tail(self) -> str:
        return self._tail

    @property
    def env(self) -> dict[str, str]:
        """The whole environment of the command: the tool's, then the arm's variables."""
        return self.environment() | self.settings

    # Requests.

    def _checked(self, path: Path) -> Path:
        if not (path / "config.json").is_file():
            raise WorkerError("failed", f"{path.name} holds no config.json")
        return path

    def _load(self, deadline: float) -> dict[str, Any]:
        """A short run, since each process loads for itself: what cannot run here says so now, with
        the kind of its end. seconds: as the tool prints them, if it does.
        """
        try:
            ended = self._end("a short run", deadline)
            (run,) = output.runs(ended.text, self.tool.invoke)
        except WorkerError:
            self.model = None
            raise
        except UserError as error:
            self.model = None
            raise WorkerError("failed", str(error)) from None
        path = self.model
        described = json.loads((path / "config.json").read_text())
        return {
            "seconds": run.get("load_s"),
            "import_s": None,
            "parameters_bytes": sum(f.stat().st_size for f in path.glob("*.safetensors")),
            "model_type": described.get("model_type"),
            "layers": None,
            "moe_layers": [],
            "peak_memory": run.get("peak_memory", ended.peak_memory),
        }

    def _decode(self, deadline: float) -> dict[str, Any]:
        ended = self._end("decode", deadline)
        try:
            found = output.runs(ended.text, self.tool.invoke)
        except UserError as error:
            raise WorkerError("failed", str(error)) from None
        if len(found) != self.batch:
            raise WorkerError("failed", f"{self.batch} runs were asked for, {len(found)} printed")
        return self._result(found, ended)

    def _result(self, runs: list[dict[str, Any]], ended: process.Ended) -> dict[str, Any]:
        """One decode of the runs of a process: the means of their times, and each in "passes"."""
        invoke, run = self.tool.invoke, runs[0]
        for name in ("prompt_tokens", "generated_tokens", "forwards"):
            if len({one[name] for one in runs}) > 1:
                counts = ", ".join(str(one[name]) for one in runs)
                raise WorkerError("failed", f"runs of one process differ in {name}: {counts}")
        tokens = _tokens(run.get("tokens") or [], self.batch)
        rates = [one["tool_rate"] for one in runs if "tool_rate" in one]
        peaks = [one["peak_memory"] for one in runs if "peak_memory" in one]
        passes = [{key: one[key] for key in ("prefill_s", "decode_s")} for one in runs]
        argv = " ".join(invoke["argv"])
        return {
            "prompt_tokens": run["prompt_tokens"],
            "generated_tokens": run["generated_tokens"],
            "prefill_s": statistics.fmean(one["prefill_s"] for one in runs),
            "decode_s": statistics.fmean(one["decode_s"] for one in runs),
            "forwards": run["forwards"],
            "token_s": None,
            "build_s": None,
            "tokens": tokens,
            "tokens_sha256": None if tokens is None else sha256_text(canonical(tokens)),
            "finite": None,
            "peak_memory": max(peaks) if peaks else ended.peak_memory,
            "tool_rate": statistics.harmonic_mean(rates) if rates else None,
            "load_s": run.get("load_s"),
            "paths": run.get("paths", []),
            "phases": run.get("phases", []),
            "binary_sha256": self.tool.sha256,
            "process_s": ended.seconds,
            **({"passes": passes} if self.batch > 1 else {}),
            "counted": [
                f for f in ("prompt_tokens", "generated_tokens") if f not in invoke["asked"]
            ],
            "same_prompt": "{prompt_ids}" in argv or "{prompt_file}" in argv,
        }

    def _instrument(self, name: str, prompt: list[int]) -> None:
        instrument = self.tool.invoke["instruments"].get(name)
        if instrument is None:
            raise WorkerError("not_applicable", f"the preset has no instrument {name}")
        self._start_process(prompt, instrument["generate"], instrument["env"], batch=1)

    def _insight(self, name: str, deadline: float) -> dict[str, Any]:
        """The operations of one decode step by primitive, or the lines that the tool prints."""
        instrument = self.tool.invoke["instruments"][name]
        ended = self._end(name, deadline)
        if instrument["reads"] == "dot":
            path = self._words([], 0)["file"]
            if not Path(path).is_file():
                raise WorkerError(
                    "failed", "the tool wrote no graph; does this pin know the variable?"
                )
            return operations(Path(path).read_text(errors="replace")) | {
                "caveat": instrument["caveat"]
            }
        text = output.plain(ended.text)
        keep = instrument["keep"] or r"(?m)^(.*)$"
        return {"lines": re.findall(keep, text), "caveat": instrument["caveat"]}

    # The process.

    def command(
        self,
        prompt: list[int],
        tokens: int,
        extra: dict[str, str] | None = None,
        batch: int | None = None,
    ) -> tuple[list[str], dict[str, str]]:
        """(command line, environment) of a process that decodes, as ``decode`` starts it."""
        if self._folder is None or self.model is None:
            raise WorkerError("failed", "a command line before load")
        words = self._words(prompt, tokens, batch)
        if "{prompt_file}" in " ".join(self.tool.invoke["argv"]):
            Path(words["prompt_file"]).write_text(json.dumps(prompt))
        Path(words["file"]).unlink(missing_ok=True)
        added = {name: binary.fill(value, words) for name, value in (extra or {}).items()}
        return command_line(self.tool, words), self.env | added

    def _start_process(
        self, prompt: list[int], tokens: int, extra: dict[str, str], batch: int | None = None
    ) -> None:
        argv, env = self.command(prompt, tokens, extra, batch)
        try:
            self._process = process.Process(argv, env)
        except OSError as error:
            raise WorkerDied("crash", f"{Path(argv[0]).name}: {error.strerror}") from None

    def _end(self, doing: str, deadline: float) -> process.Ended:
        running, self._process = self._process, None
        if running is None:
            raise WorkerError("failed", f"{doing}: no process")
        with running:
            ended = running.wait(max(0.0, deadline - time.monotonic()))
        self._tail = ended.text.strip()[-4000:]
        if self.log is not None:
            self.log.parent.mkdir(parents=True, exist_ok=True)
            with open(self.log, "a") as file:
                file.write(ended.text.rstrip() + "\n")
        if not ended.good:
            kind = admission.classify(ended.status, ended.text, ended.timed_out)
            status = None if ended.timed_out else ended.status  # that of our own kill
            message = f"{doing}: {admission.explain(kind, status, ended.text)}"
            if kind in ("no_backend", "no_kernel", "unsupported"):
                raise WorkerError("unsupported", message)
            raise WorkerDied(kind, message, ended.status, self._tail)
        return ended

    def _words(self, prompt: list[int], tokens: int, batch: int | None = None) -> dict[str, str]:
        return {
            **self.tool.invoke["options"],
            **self.tool.words,
            "model": str(self.model),
            "prompt": str(len(prompt)),
            "prompt_ids": ",".join(map(str, prompt)),
            "prompt_file": str(Path(self._folder.name) / "prompt.json"),
            "generate": str(tokens),
            "runs": str(batch or self.batch),
            "file": str(Path(self._folder.name) / "instrument.out"),
        }

    def environment(self) -> dict[str, str]:
        """The tool's variables, without the arm's: nothing that steers the framework is
        inherited, nothing is downloaded, thread counts are those of the machine."""
        kept = {k: v for k, v in self.tool.env.items() if not STEERING.match(k)}
        return {
            **kept,
            **dict.fromkeys(THREAD_VARIABLES, str(usable_cores())),
            "HF_HUB_OFFLINE": "1",
            "PYTHONHASHSEED": "0",
            **self.tool.invoke["env"],
        }


def command_line(tool: binary.Tool, words: dict[str, str]) -> list[str]:
    """The command line for a shape; optional flags only where the tool knows them."""
    invoke = tool.invoke
    argv = [binary.fill(word, words) for word in invoke["argv"]]
    lacking = {flag for item in tool.manifest.get("lacking", []) for flag in item["flags"]}
    for flags in invoke["optional"]:
        if not lacking & set(flags["argv"]):
            argv += [binary.fill(word, words) for word in flags["argv"]]
    return argv


def _tokens(tokens: list[int], runs: int) -> list[int] | None:
    """The tokens of one of ``runs`` equal runs; those of all where they differ, None for none."""
    size, rest = divmod(len(tokens), runs)
    if not tokens:
        return None
    return tokens[:size] if not rest and tokens == tokens[:size] * runs else tokens


def phase_marks(lines: Iterable[str]) -> dict[str, dict[str, int]]:
    """label -> {"monotonic_ns", "boottime_ns"} of lines such as
    ``decode_start monotonic_ns=12 boottime_ns=34``; a clock that is "na" is left out."""
    marks: dict[str, dict[str, int]] = {}
    for line in lines:
        label, _, rest = line.partition(" ")
        marks[label] = {name: int(ns) for name, ns in re.findall(r"(\w+_ns)=(\d+)", rest)}
    return marks


def operations(dot: str) -> dict[str, Any]:
    """A graph in MLX's DOT form as a histogram.

    Returns {"operations": [{"primitive", "term", "count"}], "total", "astype"}. The term is always
    "other": a binary's graph names no modules. One label line is one node (ids repeat).
    """
    labels = re.findall(r"\[label\s*=\s*\"([^\"]+)\"[^\]]*shape\s*=\s*rectangle", dot)
    counts = Counter(labels)
    if not counts:
        raise WorkerError("failed", "the graph holds no primitive")
    rows = [
        {"primitive": name, "term": "other", "count": count}
        for name, count in sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    ]
    return {"operations": rows, "total": sum(counts.values()), "astype": counts.get("AsType", 0)}
