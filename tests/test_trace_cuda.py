"""The CUDA instruments as a whole, around a worker that answers with traces of an H200."""

import csv
import gzip
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

import gpu_traces
from moescope.files import sha256_file
from moescope.runtimes.client import WorkerError
from moescope.trace import align, cuda, kernels

TOKENS = 4


@pytest.fixture(scope="module")
def recorded():
    events = gpu_traces.recorded("qwen3-moe")
    return events, align.by_ranges(events)[0]


class Arm:
    """A worker by script. graphs: how kernels look with CUDA graphs on."""

    pid = 1

    def __init__(self, recorded, settings, graphs=lambda events: events, order=lambda e: e, busy=1):
        self.events, self.step = recorded
        self.settings, self.graphs, self.order, self.busy = settings, graphs, order, busy
        self.asked = []

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
        return {"moe_layers": ["a"] * 4}

    def decode(self, prompt, tokens, patches):
        return {"token_s": [0.002] * (tokens - 1)}

    def bandwidth(self):
        return {"size": 1, "read": {"value": 4e12, "min": 3.9e12, "max": 4.1e12, "n": 7}}

    def start(self):
        self.asked.append("start")

    def send(self, do, *, deadline, **given):
        self.sent = given

    def receive(self, do, *, deadline):
        return self.ask(do, 1, **self.sent)

    def kernels(self, prompt, tokens, save, patches, calls="all", order=False, forced=False):
        assert Path(save).is_absolute()
        if order:
            assert self.settings["MLX_USE_CUDA_GRAPHS"] == "0" and calls == "all"
            found = self.order(gpu_traces.in_order(self.events, self.step.step, tokens))
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
def context(tmp_path, recorded):
    made = []

    def build(**how):
        task = SimpleNamespace(
            params={"trace": {"passes": 2, "tokens": TOKENS}},
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
            arm={"name": "lm"},
            patches=[],
            worker=worker,
            bench=SimpleNamespace(prompt=[1, 2], loading=lambda arm: {"path": "x"}),
            guard=SimpleNamespace(own=lambda pid: None, settle=lambda: None),
            guarded=lambda name, call: call(),
            made=made,
        )

    return build


def read(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def test_everything_adds_up_and_every_kernel_has_its_term(context, recorded):
    here = context()
    found = cuda.measure(here)
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
    assert terms["profiler_cost"] == [pytest.approx(1 / 99, rel=0.02)] * 2
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
    assert read(out / "calls.csv")[0]["call"] == "cudaGraphLaunch"
    assert sum(int(row["launches"]) for row in read(out / "timeline.csv")) == len(step.launches)
    drawn = here.task.work / found["timeline"]["file"]
    assert sha256_file(drawn) == found["timeline"]["sha256"]
    assert json.loads(gzip.decompress(drawn.read_bytes()))["traceEvents"]
    assert found["bandwidth"]["read"]["value"] == 4e12
    assert found["not_measured"] == []


def test_plain_and_profiled_passes_alternate_and_come_after_a_discarded_one(context):
    here = context()
    cuda.measure(here)
    bare, watched, order = here.made
    assert bare.settings == {} and watched.settings == {"MOESCOPE_BEFORE_MLX": "cupti"}
    assert bare.asked[:6] == ["start", "load", "decode", "decode", "decode", "bandwidth"]
    assert watched.asked[:7] == ["start", "load", "decode", *["kernels"] * 4]
    assert order.asked == ["load", "decode", "kernels", "close"]
    assert not (here.task.work / "tmp" / f"events-{here.task.key}").exists()


def test_without_ranges_the_table_decides_and_the_record_says_so(context):
    here = context(order=lambda events: replace(events, ranges=None))
    found = cuda.measure(here)
    terms = json.loads((here.task.out / "terms.json").read_text())
    assert terms["method"] == "table" and terms["unclassified"] == [0, 0]
    assert "not heard" in found["not_measured"][0]


def test_an_alignment_that_fails_leaves_the_forced_pass_alone(context):
    def other_mlx(events):
        steps = {n: [*of[:-3], ("Sort", "m", "head"), *of[-3:]] for n, of in events.steps.items()}
        return replace(events, steps=steps)

    here = context(order=other_mlx)
    found = cuda.measure(here)
    terms = json.loads((here.task.out / "terms.json").read_text())
    assert terms["method"] == "forced"
    assert terms["terms"].keys() == terms["forced_terms"].keys()
    assert "by ranges" in found["not_measured"][0] and "by table" in found["not_measured"][0]
    assert {row["term"] for row in read(here.task.out / "kernels.csv")} == terms["terms"].keys()
    assert terms["sum_ms"] == [pytest.approx(terms["busy_ms"][0])]


def test_kernels_that_differ_under_cuda_graphs_are_not_labelled_by_force(context):
    def one_less(events):
        last = max(kernel.launch for kernel in events.kernels)
        return replace(
            events, kernels=[k for k in events.kernels if k.node != 1 or k.launch == last]
        )

    here = context(graphs=one_less)
    found = cuda.measure(here)
    terms = json.loads((here.task.out / "terms.json").read_text())
    assert terms["method"] == "forced"
    assert "launches are missing" in found["not_measured"][-1]


def test_a_host_without_cupti_has_no_kernels_and_says_why(context, monkeypatch):
    def refuse(self, **_):
        raise WorkerError("unsupported", "the environment has no cupti-python")

    monkeypatch.setattr(Arm, "kernels", refuse)
    here = context()
    assert cuda.measure(here) == {"not_measured": ["kernels: the environment has no cupti-python"]}
    assert list(here.task.out.iterdir()) == []


def test_weights_that_fit_once_are_measured_one_process_after_the_other(context, monkeypatch):
    real, up = Arm.load, []

    def load(self, **given):
        up.append(self)
        alive = [arm for arm in up if "close" not in arm.asked]
        if len(alive) > 1:
            raise WorkerError("out_of_memory", "twice is too much")
        return real(self, **given)

    monkeypatch.setattr(Arm, "load", load)
    here = context()
    cuda.measure(here)
    terms = json.loads((here.task.out / "terms.json").read_text())
    assert len(terms["wall_ms"]) == len(terms["busy_ms"]) == 2


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
