"""The CUDA instruments as a whole, around a worker that answers with traces of an H200."""

import csv
import gzip
import json
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

import gpu_traces
from moescope.files import sha256_file, sha256_text
from moescope.measure import gpu
from moescope.runtimes.client import WorkerDied, WorkerError
from moescope.trace import align, cuda, kernels, stage

TOKENS = 4


@pytest.fixture(scope="module")
def recorded():
    events = gpu_traces.recorded("qwen3-moe")
    return events, align.by_ranges(events)[0]


class Arm:
    """A worker by script. graphs: how kernels look with CUDA graphs on."""

    pid = 1
    routing = None

    def __init__(self, recorded, settings, graphs=lambda events: events, order=lambda e: e, busy=1):
        self.events, self.step = recorded
        self.settings, self.graphs, self.order, self.busy = settings, graphs, order, busy
        self.asked, self.swept = [], []

    @staticmethod
    def other(events, k):
        """Another kernel below eight experts; more than nine are refused."""
        if k > 9:
            raise WorkerError("not_applicable", f"top_k={k} is too much")
        name = "_ZN3mlx4core2cu17gather_qmv_kernelILi8EEEvv"
        if k < 8:
            ran = [replace(x, name=name) if "qmm_sm80" in x.name else x for x in events.kernels]
            events = replace(events, kernels=ran)
        return events

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        self.asked.append("close")

    def ask(self, do, limit, **given):
        self.asked.append(do)
        return getattr(self, do)(**given)

    def load(self, **_):
        if self.settings and self.busy == 0:
            raise WorkerError("out_of_memory", "twice is too much")
        return {"moe_layers": ["a"] * 4, "routing": self.routing}

    def decode(self, prompt, tokens, patches):
        return {
            "token_s": [0.002] * (tokens - 1),
            "decode_s": 0.002 * (tokens - 1),
            "forwards": tokens - 1,
            "cpu_s": 0.003 * (tokens - 1),
            "tokens": list(range(tokens)),
        }

    def scopes(self, prompt, tokens, passes, patches):
        text = json.dumps(list(range(tokens + 1)), separators=(",", ":"))
        one = {
            "wall_s": 0.004 * tokens,
            "terms_s": {"router": 0.001 * tokens, "norm": 0.003 * tokens},
            "tokens_sha256": sha256_text(text),
        }
        return {"passes": [one] * passes}

    def graph(self, prompt, patches):
        return {"operations": [{"term": "norm", "primitive": "Sum", "count": 2}], "total": 2,
                "astype": 0}  # fmt: skip

    def wait_ready(self):
        return {}

    def bandwidth(self):
        return {"size": 1, "read": {"value": 4e12, "min": 3.9e12, "max": 4.1e12, "n": 7}}

    def start(self):
        self.asked.append("start")

    def send(self, do, *, deadline, **given):
        self.sent = given

    def receive(self, do, *, deadline):
        return self.ask(do, 1, **self.sent)

    def kernels(
        self, prompt, tokens, save, patches, calls="all", order=False, forced=False, steps=None
    ):
        assert Path(save).is_absolute()
        if self.settings.get("MLX_USE_CUDA_GRAPHS") == "0" and not forced:
            assert calls == "all"
            found = gpu_traces.in_order(self.events, self.step.step, tokens)
            exported = {n: of for n, of in found.steps.items() if n in (steps or found.steps)}
            found = self.order(replace(found, steps=exported))
            if not order:
                found = replace(found, ranges=None, steps={})
            if patches:
                self.swept.append(patches)
                found = self.other(found, int(patches[0].removeprefix("top_k=")))
        elif forced:
            found = gpu_traces.forced(self.step, tokens)
        else:
            found = self.graphs(gpu_traces.with_graphs(self.step.launches, tokens))
            if calls == "none":
                slower = [replace(k, end=k.start + k.ns * 99 // 100) for k in found.kernels]
                found = replace(found, kernels=slower, calls=[])
        gpu_traces.save(found, Path(save))
        times = [mark.time for mark in found.marks if mark.what == "token"]
        return {"token_ns": times}


@pytest.fixture
def context(tmp_path, recorded, monkeypatch):
    made = []

    def build(settings=(), fits=True, **how):
        settings = dict(settings)
        monkeypatch.setattr(cuda, "_fits", lambda context, times: fits)
        task = SimpleNamespace(
            params={"trace": {"passes": 2, "tokens": TOKENS}, **settings},
            out=tmp_path / "out",
            work=tmp_path / "work",
            key="k" * 12,
            say=lambda text: None,
        )
        task.out.mkdir(exist_ok=True)

        def worker(**settings):
            made.append(Arm(recorded, settings, **how))
            return made[-1]

        return SimpleNamespace(
            task=task,
            arm={"name": "lm", "role": "reference"},
            patches=[],
            worker=worker,
            bench=SimpleNamespace(prompt=[1, 2], loading=lambda arm: {"path": "x"}),
            guard=SimpleNamespace(own=lambda pid: None, settle=lambda: None),
            guarded=lambda name, call: call() | {"guard": {}},
            made=made,
        )

    return build


def measure(here):
    """The whole stage but the bench; what the instrument adds to trace.json."""
    found = stage.Found(TOKENS)
    stage._together(here, cuda.Instrument, found)
    assert len(found.passes) == len(found.plain) == 2
    assert found.counts["total"] == 2 and found._same_tokens()
    return {"not_measured": found.not_measured, "instruments": found.instruments, **found.more}


def read(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def test_everything_adds_up_and_every_kernel_has_its_term(context, recorded):
    here = context()
    found = measure(here)
    out = here.task.out
    terms = json.loads((out / "terms.json").read_text())
    assert terms["schema"] == "moescope/terms/1"
    assert (terms["method"], terms["carried_over"]) == ("ranges", ["order"])
    _, step = recorded
    each = sum(kernel.ns for kernel in step.launches) / 1e6
    assert terms["busy_ms"] == [pytest.approx(each)] * 2
    assert terms["sum_ms"] == [pytest.approx(each)] * 2
    assert terms["unclassified"] == [0, 0]
    assert terms["wall_ms"] == [pytest.approx(2.0)] * 2
    for busy, gap, share in zip(
        terms["busy_ms"], terms["host_gap_ms"], terms["busy_share"], strict=True
    ):
        assert busy + gap == pytest.approx(2.0) and share == pytest.approx(busy / 2.0)
    assert terms["launches"] == [len(step.launches)] * 2
    assert terms["profiler_cost"] == [pytest.approx(1 / 99, rel=0.02)] * cuda.PAIRS
    wall = [profiled / 2.0 - 1 for profiled in terms["profiled_wall_ms"]]
    assert terms["profiler_wall_cost"] == pytest.approx(wall)
    assert terms["window_disagreement"] == pytest.approx(0, abs=1e-9)
    assert terms["instruments_disagreement"] == pytest.approx(0, abs=1e-9)
    assert terms["path"]["experts"][0]["kernel"] == "qmm_sm80_kernel"
    assert terms["path"]["uneven"] == []
    table = read(out / "kernels.csv")
    assert sum(float(row["ms_per_token"]) for row in table) == pytest.approx(each, rel=1e-4)
    assert {row["arm"] for row in table} == {"lm"}
    assert sum(float(row["share"]) for row in table) == pytest.approx(1, rel=1e-4)
    by_term = {}
    for row in table:
        by_term[row["term"]] = by_term.get(row["term"], 0) + float(row["ms_per_token"])
    assert by_term.keys() == terms["terms"].keys()
    for term, entry in terms["terms"].items():
        assert by_term[term] == pytest.approx(entry["ms"][0], rel=1e-3)
    modules = read(out / "modules.csv")
    of_modules = {term: 0.0 for term in by_term}
    for row in modules:
        of_modules[row["term"]] += float(row["ms_per_token"])
    assert of_modules == pytest.approx(by_term, rel=1e-3)
    launched = {row["module"]: float(row["launches_per_token"]) for row in modules}
    assert launched["model.layers.*.self_attn.q_norm"] == 4 and launched["model.norm"] == 1
    assert sum(launched.values()) <= len(step.launches)
    assert read(out / "calls.csv")[0]["call"] == "cudaGraphLaunch"
    assert sum(int(row["launches"]) for row in read(out / "timeline.csv")) == len(step.launches)
    drawn = here.task.work / found["timeline"]["file"]
    assert sha256_file(drawn) == found["timeline"]["sha256"]
    assert json.loads(gzip.decompress(drawn.read_bytes()))["traceEvents"]
    assert found["bandwidth"]["read"]["value"] == 4e12
    assert found["not_measured"] == []


def test_processes_start_together_and_take_turns_where_time_is_taken(context):
    here = context()
    measure(here)
    plain, watched, alone = here.made
    assert plain.settings == {} and watched.settings == {"MOESCOPE_BEFORE_MLX": "cupti"}
    first = ["start", "load", "decode"]
    turns = ["decode", "scopes"] * 2
    assert plain.asked == [*first, "scopes", "graph", *turns, "bandwidth", "close"]
    # Two turns of three, and short pairs up to five in all.
    assert watched.asked == [*first, *["kernels"] * 6, *["kernels"] * 6, "close"]
    assert alone.asked == [*first, "kernels", "kernels", "kernels", "close"]
    assert not (here.task.work / "tmp" / f"events-{here.task.key}").exists()


def test_instruments_are_compared_on_the_same_steps_and_by_kernels_alone(context, recorded):
    here = context()
    measure(here)
    terms = json.loads((here.task.out / "terms.json").read_text())
    assert terms["alone_terms"].keys() == terms["forced_terms"].keys() == terms["terms"].keys()
    for name in ("alone", "overlap", "instruments", "all_instruments", "launches"):
        assert terms[f"{name}_disagreement"] == pytest.approx(0, abs=1e-9)
    assert len(terms["profiler_cost"]) == len(terms["all_profiler_cost"]) == cuda.PAIRS
    assert terms["cpu_ms"]["plain"] == [pytest.approx(3.0)] * 2
    assert terms["model_busy_ms"] == terms["busy_ms"]


def sweeping(context, monkeypatch, most, **settings):
    monkeypatch.setattr(Arm, "routing", {"top_k": 8, "most": most})
    here = context(**settings)
    return here, measure(here)


def test_the_sweep_tells_for_each_top_k_which_kernel_the_gather_runs(context, monkeypatch):
    here, found = sweeping(context, monkeypatch, 128)
    assert found["sweep"] == {
        "schema": "moescope/sweep/1", "top_k": 8, "most": 128, "guard": {}, "file": "sweep.csv",
    }  # fmt: skip
    rows = read(here.task.out / "sweep.csv")
    assert [int(row["top_k"]) for row in rows] == list(range(1, 11))
    kinds = {int(row["top_k"]): row["kernel"] for row in rows}
    assert {kinds[k] for k in range(1, 8)} == {"gather_qmv_kernel"}
    assert kinds[8] == kinds[9] == "qmm_sm80_kernel" and kinds[10] == ""
    assert rows[-1]["why"] == "not applicable: top_k=10 is too much"
    each = here.made[2].step.launches
    products = [k.ns for k in each if "qmm_sm80" in k.name]
    assert float(rows[7]["ms_per_token"]) == pytest.approx(sum(products) / 1e6, rel=1e-4)
    assert float(rows[7]["gather_ms_per_token"]) > float(rows[7]["ms_per_token"])
    assert all(float(row["per_layer"]) == 3 for row in rows[:-1])
    assert here.made[2].swept == [[f"top_k={k}"] for k in (*range(1, 8), 9, 10)]


def test_a_sweep_ends_where_the_model_does_and_can_be_left_out(context, monkeypatch):
    here, _ = sweeping(context, monkeypatch, 8)
    rows = read(here.task.out / "sweep.csv")
    assert [int(row["top_k"]) for row in rows] == list(range(1, 10))
    assert rows[-1]["why"] == "the model allows 8 at most"
    off = {"trace": {"passes": 2, "tokens": TOKENS, "sweep": False}}
    here, found = sweeping(context, monkeypatch, 128, settings=off)
    assert "sweep" not in found and here.made[-1].swept == []


def test_a_sweep_whose_process_dies_costs_the_sweep_alone(context, monkeypatch):
    def die(events, k):
        raise WorkerDied("crash", f"top_k={k}: gone")

    monkeypatch.setattr(Arm, "other", staticmethod(die))
    here, found = sweeping(context, monkeypatch, 128)
    (row,) = read(here.task.out / "sweep.csv")
    assert row["why"] == "top_k=1: gone" and "kernels" in found["instruments"]


def test_without_ranges_the_table_decides_and_the_record_says_so(context):
    here = context(order=lambda events: replace(events, ranges=None))
    found = measure(here)
    terms = json.loads((here.task.out / "terms.json").read_text())
    assert terms["method"] == "table" and terms["unclassified"] == [0, 0]
    assert "not heard" in found["not_measured"][0]


def test_an_alignment_that_fails_leaves_the_forced_pass_alone(context):
    def other_mlx(events):
        steps = {n: [*of[:-3], ("Sort", "m", "head"), *of[-3:]] for n, of in events.steps.items()}
        return replace(events, steps=steps)

    here = context(order=other_mlx)
    found = measure(here)
    terms = json.loads((here.task.out / "terms.json").read_text())
    assert terms["method"] == "forced"
    assert terms["terms"].keys() == terms["forced_terms"].keys()
    assert "by ranges" in found["not_measured"][0] and "by table" in found["not_measured"][0]
    assert {row["term"] for row in read(here.task.out / "kernels.csv")} == terms["terms"].keys()
    assert not (here.task.out / "modules.csv").exists()
    assert terms["sum_ms"] == [pytest.approx(terms["busy_ms"][0])]


def test_kernels_that_differ_under_cuda_graphs_are_not_labelled_by_force(context):
    def fewer(events):
        last = max(kernel.launch for kernel in events.kernels)
        return replace(
            events, kernels=[k for k in events.kernels if k.node % 9 or k.launch == last]
        )

    here = context(graphs=fewer)
    found = measure(here)
    terms = json.loads((here.task.out / "terms.json").read_text())
    assert terms["method"] == "forced"
    assert "launches are missing" in found["not_measured"][-1]


def test_a_kernel_that_only_cuda_graphs_ran_is_unclassified_and_the_rest_is_not(context):
    def one_more(events):
        first = [kernel for kernel in events.kernels if kernel.node == 1]
        more = [replace(k, name="copy_of_its_own", node=999) for k in first]
        return replace(events, kernels=[*events.kernels, *more])

    here = context(graphs=one_more)
    found = measure(here)
    terms = json.loads((here.task.out / "terms.json").read_text())
    assert terms["method"] == "ranges" and found["not_measured"] == []
    assert terms["carried_over"] == ["occurrence, but for copy_of_its_own"]
    assert terms["terms"]["unclassified"]["launches"] == [1, 1]
    assert 0 < terms["unclassified"][0] < 0.02
    assert terms["path"]["experts"][0]["kernel"] == "qmm_sm80_kernel"
    assert terms["path"]["uneven"] == []


def test_a_host_without_cupti_has_no_kernels_and_says_why(context, monkeypatch):
    def refuse(self, **_):
        raise WorkerError("unsupported", "the environment has no cupti-python")

    monkeypatch.setattr(Arm, "kernels", refuse)
    here = context()
    found = measure(here)
    assert found["not_measured"] == ["kernels: the environment has no cupti-python"]
    assert found["instruments"] == ["scopes", "graph"]
    assert list(here.task.out.iterdir()) == []
    assert not (here.task.work / "tmp" / f"events-{here.task.key}").exists()


@pytest.mark.parametrize("known", [True, False], ids=["known before", "found out"])
def test_weights_that_fit_once_are_measured_one_process_after_the_other(
    context, monkeypatch, known
):
    real, up = Arm.load, []

    def load(self, **given):
        up.append(self)
        alive = [arm for arm in up if "close" not in arm.asked]
        if len(alive) > 1:
            raise WorkerError("out_of_memory", "twice is too much")
        return real(self, **given)

    monkeypatch.setattr(Arm, "load", load)
    here = context(fits=not known)
    found = measure(here)
    terms = json.loads((here.task.out / "terms.json").read_text())
    assert len(terms["wall_ms"]) == len(terms["busy_ms"]) == 2
    assert found["instruments"].count("scopes") == 1


def test_memory_that_runs_out_in_a_first_pass_is_no_end_either(context, monkeypatch):
    real = Arm.decode

    def decode(self, **given):
        if len([arm for arm in here.made if "close" not in arm.asked]) > 1:
            raise WorkerError("out_of_memory", "no room for the cache")
        return real(self, **given)

    monkeypatch.setattr(Arm, "decode", decode)
    here = context()
    found = measure(here)
    assert "kernels" in found["instruments"] and found["instruments"].count("graph") == 1


def test_the_gpu_s_memory_decides_how_many_processes_start(tmp_path, monkeypatch):
    (tmp_path / "model.safetensors").write_bytes(b"x" * 1000)
    here = SimpleNamespace(bench=SimpleNamespace(weights=tmp_path))
    monkeypatch.setattr(gpu, "describe", lambda: {"memory": 4286})
    assert cuda._fits(here, 3)
    monkeypatch.setattr(gpu, "describe", lambda: {"memory": 4285})
    assert not cuda._fits(here, 3)


def test_kernels_of_real_cuda_graphs_get_the_terms_of_the_traced_order():
    order, events = gpu_traces.recorded("qwen3-moe"), gpu_traces.graphs_on()
    assert all(kernel.graph for kernel in events.kernels)
    assert len({call.name for call in events.calls}) == 1  # a few launches of whole graphs
    found = cuda.attribute(order)
    first, last = min(order.steps), max(order.steps)
    steps, labels, ways = cuda.labelled(events, found, first, last)
    # Graphs run kernels in another order than they were added; the n-th of a kind is the n-th.
    assert set(ways) == {"occurrence"}
    window = kernels.window(events, steps, labels)
    terms = kernels.by_term(window)
    assert kernels.UNCLASSIFIED not in terms
    alone = [label.term for step in found.steps.values() for label in step.labels]
    for term, entry in terms.items():
        assert entry["launches"] == pytest.approx(alone.count(term) / len(found.steps))
    path = kernels.path(window, gpu_traces.FAMILIES["qwen3-moe"])
    assert path["uneven"] == []
    assert path["experts"][0]["kernel"] == "qmm_sm80_kernel"
    assert path["experts"][0]["per_layer"] == 3
    # The head is one product, whatever runs around it: 151936 x 2048 at 4 bits with scales.
    (head,) = [k for k, label, _ in window.kernels if label.term == "head"][:1]
    assert 151936 * 2048 * 4.5 / 8 / (head.ns / 1e9) == pytest.approx(1.0e12, rel=0.2)
    assert sum(entry["ms"] for entry in terms.values()) == pytest.approx(
        window.busy / window.steps / 1e6
    )


def test_the_cost_of_recording_is_told_by_kernels_that_both_passes_ran():
    events = gpu_traces.graphs_on()
    slower = replace(events, kernels=[replace(k, end=k.end + k.ns) for k in events.kernels])
    assert kernels.recording_cost([slower, events], [events, events]) == [1.0, 0.0]
    twice = [k for k in events.kernels if k.name == events.kernels[0].name]
    more = replace(events, kernels=[*events.kernels, *twice])
    assert kernels.recording_cost([more], [events]) == [pytest.approx(0)]
    with pytest.raises(ValueError, match="no kernel in common"):
        kernels.recording_cost([events], [replace(events, kernels=[])])


def test_a_process_that_never_gets_ready_leaves_the_other_instruments(context, monkeypatch):
    def wait_ready(self):
        if self.settings:
            raise WorkerDied("crash", "start: the worker ended with 1: no cupti-python")

    monkeypatch.setattr(Arm, "wait_ready", wait_ready)
    here = context()
    found = measure(here)
    assert found["not_measured"] == ["kernels: start: the worker ended with 1: no cupti-python"]
    assert found["instruments"] == ["scopes", "graph"]
    assert all(arm.asked[-1] == "close" for arm in here.made)


def test_records_that_cannot_be_worked_out_are_kept(context, monkeypatch):
    def fail(*_):
        raise ValueError("no such kernel")

    monkeypatch.setattr(cuda, "write", fail)
    here = context()
    with pytest.raises(ValueError, match="no such kernel"):
        measure(here)
    kept = here.task.work / "tmp" / f"events-{here.task.key}"
    assert len(list(kept.glob("*.json.gz"))) == 15


def test_what_is_compiled_at_first_use_is_compiled_by_one_process(context, monkeypatch):
    real, order = Arm.decode, []

    def decode(self, **given):
        order.append(len(self.settings))
        if not self.settings:
            time.sleep(0.2)
        order.append(len(self.settings))
        return real(self, **given)

    monkeypatch.setattr(Arm, "decode", decode)
    measure(context())
    assert order[:2] == [0, 0], "the others wait for the plain process"
    assert {1, 2} <= set(order[2:])
