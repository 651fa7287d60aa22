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
from moescope.trace import align, cuda

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

    def kernels(self, prompt, tokens, save, patches, calls="launches", order=False, forced=False):
        assert Path(save).is_absolute()
        if order:
            assert self.settings["MLX_USE_CUDA_GRAPHS"] == "0" and calls == "all"
            found = self.order(gpu_traces.in_order(self.events, self.step.step, tokens))
        elif forced:
            found = gpu_traces.forced(self.step, tokens)
        else:
            found = self.graphs(gpu_traces.with_graphs(self.step.launches, tokens))
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
    assert bare.asked == ["load", "decode", "decode", "decode", "bandwidth", "close"]
    assert watched.asked[:4] == ["load", "decode", "kernels", "kernels"]
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
