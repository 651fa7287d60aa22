"""Exports of Nsight Systems, written by its documented schema."""

import random
import sqlite3
from pathlib import Path

SCHEMA = """
CREATE TABLE StringIds (id INTEGER PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE META_DATA_EXPORT (name TEXT, value TEXT);
INSERT INTO META_DATA_EXPORT VALUES ('EXPORT_SCHEMA_VERSION', '3.14.1');
CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (
  start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL,
  contextId INTEGER NOT NULL, streamId INTEGER NOT NULL, correlationId INTEGER,
  globalPid INTEGER, demangledName INTEGER NOT NULL, shortName INTEGER NOT NULL,
  mangledName INTEGER, gridX INTEGER NOT NULL, gridY INTEGER NOT NULL, gridZ INTEGER NOT NULL,
  blockX INTEGER NOT NULL, blockY INTEGER NOT NULL, blockZ INTEGER NOT NULL, graphNodeId INTEGER);
CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (
  start INTEGER NOT NULL, end INTEGER NOT NULL, eventClass INTEGER NOT NULL, globalTid INTEGER,
  correlationId INTEGER, nameId INTEGER NOT NULL, returnValue INTEGER NOT NULL);
CREATE TABLE CUPTI_ACTIVITY_KIND_MEMCPY (
  start INTEGER NOT NULL, end INTEGER NOT NULL, streamId INTEGER, bytes INTEGER, copyKind INTEGER);
CREATE TABLE NVTX_EVENTS (
  start INTEGER NOT NULL, end INTEGER, eventType INTEGER NOT NULL, text TEXT, textId INTEGER,
  globalTid INTEGER, domainId INTEGER);
"""
GRAPH_TABLE = """CREATE TABLE CUPTI_ACTIVITY_KIND_GRAPH_TRACE (
  start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER, contextId INTEGER,
  streamId INTEGER, correlationId INTEGER, globalPid INTEGER, graphId INTEGER,
  graphExecId INTEGER)"""

# One decode layer of a qwen3_moe as MLX launches it: (kernel, grid z, primitive, ns).
NORM = ("rms_norm_small<__nv_bfloat16, 4>", 1, "RMSNorm", 2000)
QMV = ("qmv_kernel<8, 16, 64, true, false>", 1, "QuantizedMatmul", 5000)
GATHER = ("qmm_sm80_kernel<64, cutlass::bfloat16_t>", 8, "GatherQMM", 20000)
SDPA = ("kernel_sdpav_1pass<__nv_bfloat16, 128>", 1, "SDPA", 9000)
ROPE = ("rope_single<__nv_bfloat16>", 1, "RoPE", 2000)
ADD = ("binary_vv<mlx::core::cu::Add>", 1, "Add", 1000)
SOFTMAX = ("softmax<float>", 1, "Softmax", 2500)
SORT = ("block_sort_kernel<float>", 1, "ArgPartition", 8000)
ARANGE = ("arange<unsigned int>", 1, "Arange", 1000)
SILU = ("CompiledSigmoidMultiplyMultiply_V_contiguous<unsigned int, 4>", 1, "Compiled", 1500)
SUM = ("col_reduce_looped<__nv_bfloat16>", 1, "Reduce", 1800)
ARGMAX = ("arg_reduce_general<__nv_bfloat16>", 1, "ArgReduce", 4000)
LOGSUM = ("logsumexp<float>", 1, "LogSumExp", 3000)
LAYER = [
    (NORM, "norm"), (QMV, "attention"), (QMV, "attention"), (QMV, "attention"),
    (NORM, "norm"), (NORM, "norm"), (ROPE, "attention"), (ROPE, "attention"),
    (SDPA, "attention"), (QMV, "attention"), (ADD, "attention"),
    (NORM, "norm"), (QMV, "router"), (SOFTMAX, "router"), (SORT, "router"),
    (ARANGE, "expert_gather"), (GATHER, "expert_gather"), (ARANGE, "expert_gather"),
    (GATHER, "expert_gather"), (SILU, "activation"), (ARANGE, "expert_gather"),
    (GATHER, "expert_gather"), (ADD, "combine"), (SUM, "combine"), (ADD, "combine"),
]  # fmt: skip
TAIL = [(NORM, "norm"), (QMV, "head"), (LOGSUM, "sampler"), (ADD, "sampler"), (ARGMAX, "sampler")]
LAYERS = 4
PID = 4242


def step_kernels(layers=LAYERS):
    return [row for _ in range(layers) for row in LAYER] + TAIL


def full(name):
    """As nsys writes it, with a return type, parameters and namespaces."""
    return f"void mlx::core::cu::{name}(const float *, (anonymous namespace)::Shape)"


class Export:
    """Writes an export as nsys would: load, warm-up, prefill, then ``tokens`` decode steps."""

    def __init__(self, path: Path, graphs=False, noise=0.0, seed=0):
        path.unlink(missing_ok=True)
        self.path, self.graphs, self.noise = path, graphs, noise
        self.random = random.Random(seed)
        self.database = sqlite3.connect(path)
        self.database.executescript(SCHEMA)
        self.ids: dict[str, int] = {}
        self.clock = self.host = 1_000_000
        self.correlation = 0

    def text(self, value: str) -> int:
        if value not in self.ids:
            self.ids[value] = len(self.ids) + 1
            self.database.execute("INSERT INTO StringIds VALUES (?, ?)", (self.ids[value], value))
        return self.ids[value]

    def call(self, name: str, ns: int = 800) -> int:
        self.correlation += 1
        self.database.execute(
            "INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (?, ?, 0, ?, ?, ?, 0)",
            (self.host, self.host + ns, (PID << 24) + 7, self.correlation, self.text(name)),
        )
        self.host += ns
        return self.correlation

    def kernel(self, row, correlation, node=None):
        name, z, _, ns = row
        ns = int(ns * (1 + self.random.uniform(-self.noise, self.noise)))
        start = self.clock
        self.clock += ns + 500
        self.database.execute(
            "INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES "
            "(?, ?, 0, 1, 7, ?, ?, ?, ?, NULL, 256, 1, ?, 32, 8, 1, ?)",
            (start, start + ns, correlation, PID << 24, self.text(full(name)),
             self.text(name.split("<")[0]), z, node),
        )  # fmt: skip

    def step(self, rows):
        if self.graphs:
            correlation = self.call("cudaGraphLaunch_v10000", 3000)
            for node, (row, _) in enumerate(rows, 1):
                self.kernel(row, correlation, node)
            return
        for row, _ in rows:
            begin = self.host
            correlation = self.call("cudaLaunchKernelExC_v11060")
            self.kernel(row, correlation)
            self.database.execute(
                "INSERT INTO NVTX_EVENTS VALUES (?, ?, 59, ?, NULL, ?, 0)",
                (begin - 50, self.host + 50, f"{row[2]}::eval_gpu", (PID << 24) + 7),
            )
            self.host += 100
        self.database.execute(
            "INSERT INTO NVTX_EVENTS VALUES (?, ?, 59, NULL, ?, ?, 0)",
            (begin - 900, self.host, self.text("gpu::eval"), (PID << 24) + 7),
        )

    def write(self, tokens: int, other=None):
        for _ in range(3):
            self.kernel(("load_copy_v", 1, "Copy", 70000), self.call("cudaMemcpyAsync"))
        self.step([(row, term) for row, term in step_kernels() for _ in range(2)])  # prefill
        for _ in range(tokens):
            self.step(step_kernels())
        if other:
            self.database.execute(other)
        self.database.commit()
        self.database.close()
        return self.path
