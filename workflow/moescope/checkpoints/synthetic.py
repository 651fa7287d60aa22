"""Checkpoints made from a family's config and a seed: real structure, invented weights.

The runtime's own model code says which tensors there are (worker command ``layout``). Their bytes
are cut from two pools of random numbers (Philox, keyed by the seed) at places keyed by seed and
tensor, so they are the same on every machine, in any order and however shards are cut. Only whole
numbers, single float32 operations and square roots are used: these are exact everywhere.

The weights must decode healthily. Projections keep the variance of what passes through them, the
embedding outweighs what the layers add, and token i's embedding is in the head's rows i + 1 and
i + 2. So greedy text walks on through the vocabulary and never falls into a loop; which of the two
steps it takes is near enough to a tie that the layers have a say; routing changes with each token.
Where the head is the embedding, random signs in the last norm keep a token from naming itself, and
the layers decide alone.
"""

import hashlib
import json
import math
import os
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from ..errors import UserError
from ..files import write_json
from ..runtimes.client import usable_cores
from . import codes
from .headers import INDEX, WIDTHS

STEPS = (1, 2)  # from a token to those that may follow it
ALIGNED = 12.0  # their logits, before noise of deviation 1 and the layers
POOL = 1 << 23  # 64-bit draws in each pool: 64 MiB of words, 32 MiB of normal values
CHUNK = 1 << 18  # values at a time: what a core keeps near it
THREADS = 16
EMBEDDINGS = ("embed_tokens", "embeddings", "embed", "word_embeddings", "wte")
HEADS = ("lm_head", "head", "unembed", "output")
EXPERT_COUNTS = ("n_routed_experts", "num_local_experts", "num_experts")
ONES = ("weight", "scale", "gamma", "D", "layer_scalar")  # of one axis


def make(source: dict[str, Any], layout: dict[str, Any], folder: Path) -> None:
    """Write config.json, the tokenizer, the shards and their index into an empty folder.

    layout: the worker's reply {"tensors": [...], "config": {...}}. Memory stays near the pools and
    a few pieces per thread, whatever the size.
    """
    config, tensors = layout["config"], layout["tensors"]
    write_json(folder / "config.json", config)
    _tokenizer(folder, _key(config, ("vocab_size",)))
    maker = Maker(source["seed"], config, tensors)
    shards = _shards(tensors, source["shard_bytes"])
    index: dict[str, str] = {}
    with ThreadPoolExecutor(min(THREADS, usable_cores())) as pool:
        for number, shard in enumerate(shards, 1):
            name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            _write_shard(folder / name, shard, maker, pool)
            index |= {tensor["name"]: name for tensor in shard}
    total = sum(map(size, tensors))
    write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": index})


def size(tensor: dict[str, Any]) -> int:
    """Bytes of a tensor of the layout."""
    return WIDTHS[tensor["dtype"]] * math.prod(tensor["shape"])


@dataclass(frozen=True)
class Piece:
    """Part of a tensor: ``start`` counts elements."""

    tensor: str
    start: int
    values: np.ndarray


class Maker:
    """The values of each tensor, by what it is."""

    def __init__(self, seed: int, config: dict[str, Any], tensors: list[dict[str, Any]]):
        self.seed = seed
        self.experts = _key(config, EXPERT_COUNTS, 1)
        self.by_name = {tensor["name"]: tensor for tensor in tensors}
        leaves = {_leaf(tensor) for tensor in tensors}
        self.tied = not leaves & set(HEADS)
        self.depth = 1 + max((_layer(tensor["name"]) for tensor in tensors), default=0)
        self._lock = threading.Lock()
        self._kept: dict[str, np.ndarray] = {}
        self.words, self.normals = _pools(seed)

    def pieces(self, tensor: dict[str, Any]) -> Iterator[Callable[[], list[Piece]]]:
        """Calls that make a tensor's values piece by piece, in any order, in any thread.

        A quantised table's ``weight`` brings its scales and biases along.
        """
        name, count = tensor["name"], math.prod(tensor["shape"])
        if self._is_table(tensor):
            if tensor["parameter"] == "weight":
                rows = tensor["shape"][0]
                step = max(1, CHUNK // self._width(tensor))
                for start in range(0, rows, step):
                    yield _call(self._table, tensor, start, min(start + step, rows))
            return
        packed = tensor["quant"] is not None
        if packed and tensor["parameter"] == "weight":
            fill = self._words
        elif packed:
            fill = self._scales
        elif tensor["dtype"].startswith(("I", "U")):
            fill = self._choices
        else:
            fill = self._plain
        for start in range(0, count, CHUNK):
            yield _call(_piece, name, start, fill, tensor, start, min(start + CHUNK, count))

    def _is_table(self, tensor: dict[str, Any]) -> bool:
        leaf = _leaf(tensor)
        known = leaf in EMBEDDINGS or (leaf in HEADS and not self.tied)
        return known and len(tensor["shape"]) == 2 and tensor["parameter"] != "bias"

    def _width(self, tensor: dict[str, Any]) -> int:
        bits = tensor["quant"]["bits"] if tensor["quant"] else 32
        return tensor["shape"][-1] * 32 // bits

    def _table(self, tensor: dict[str, Any], start: int, stop: int) -> list[Piece]:
        """Rows of the embedding or the head, quantised if it is."""
        rows, module, quant = self._rows(tensor, start, stop), tensor["module"], tensor["quant"]
        parts = codes.quantise(rows, **quant) if quant else {"weight": rows}
        pieces = []
        for parameter, values in parts.items():
            part = self.by_name[f"{module}.{parameter}"]
            values = _cast(values, part["dtype"])
            pieces.append(Piece(part["name"], start * part["shape"][-1], values.reshape(-1)))
        return pieces

    def _rows(self, tensor: dict[str, Any], start: int, stop: int) -> np.ndarray:
        total, width = tensor["shape"][0], self._width(tensor)
        index = np.arange(start, stop)
        if _leaf(tensor) in HEADS:
            rows = self._windows(tensor["module"], index, total, width)
            rows *= np.float32(1 / math.sqrt(width))
            for step in STEPS:
                before = self._windows("embedding", (index - step) % total, total, width)
                before *= np.float32(ALIGNED / width)
                rows += before
            return rows
        scale = 1 / math.sqrt(width) if self.tied else self._loudness
        return self._windows("embedding", index, total, width) * np.float32(scale)

    @property
    def _loudness(self) -> float:
        """Of an embedding, so that what all layers add together is smaller."""
        return 3 * math.sqrt(self.depth)

    def _windows(self, name: str, index: np.ndarray, total: int, width: int) -> np.ndarray:
        """Rows of normal values, each from a place of the pool of its own."""
        places = self._places(name, total) % np.uint64(POOL - width)
        return sliding_window_view(self.normals, width)[places[index].astype(np.int64)]

    def _places(self, name: str, total: int) -> np.ndarray:
        with self._lock:
            if name not in self._kept:
                self._kept[name] = self._raw(f"rows:{name}", total)
            return self._kept[name]

    def _words(self, tensor: dict[str, Any], start: int, stop: int) -> np.ndarray:
        """Random codes: the pool from a place of the tensor's own, changed in each piece."""
        place, flip = self._raw(f"{tensor['name']}:{start}", 2)
        place = int(place % np.uint64(2 * POOL - CHUNK))
        words = self.words[place : place + stop - start] ^ np.uint32(flip & np.uint64(0xFFFFFFFF))
        if tensor["quant"]["mode"] == "mxfp8":
            words &= np.uint32(0xBFBFBFBF)  # magnitudes below 2, and no NaN
        return words

    def _scales(self, tensor: dict[str, Any], start: int, stop: int) -> np.ndarray:
        """What gives a projection unit gain."""
        quant = tensor["quant"]
        gain = 1 / math.sqrt(self._width(self.by_name[f"{tensor['module']}.weight"]))
        if quant["mode"] == "affine":
            top = (1 << quant["bits"]) - 1
            scale = gain / math.sqrt(((top + 1) ** 2 - 1) / 12)
            value = scale if tensor["parameter"] == "scales" else -scale * top / 2
            one = _cast(np.array([value], np.float32), tensor["dtype"])
        elif quant["mode"] == "nvfp4":
            one = codes.to_e4m3(np.array([gain / codes.E2M1_STD]))
        else:
            # mxfp8's codes stay below 2, where their deviation is about 0.6
            deviation = codes.E2M1_STD if quant["mode"] == "mxfp4" else 0.6
            one = codes.to_e8m0(np.array([gain / deviation]))
        return np.repeat(one, stop - start)

    def _choices(self, tensor: dict[str, Any], start: int, stop: int) -> np.ndarray:
        """A table of experts by token: each row names different ones."""
        index = np.arange(start, stop)
        row, column = index // tensor["shape"][-1], index % tensor["shape"][-1]
        return _cast((row * 7 + column * 31) % self.experts, tensor["dtype"])

    def _plain(self, tensor: dict[str, Any], start: int, stop: int) -> np.ndarray:
        spread, middle = self._distribution(tensor)
        if spread:
            place = int(self._raw(f"{tensor['name']}:{start}", 1)[0] % np.uint64(POOL - CHUNK))
            values = self.normals[place : place + stop - start] * np.float32(spread)
            values += np.float32(middle)
        else:
            values = np.full(stop - start, middle, np.float32)
        if self.tied and self._is_last_norm(tensor):
            odd = self._raw(f"{tensor['name']}:{start}", stop - start) & np.uint64(1)
            values[odd.astype(bool)] *= np.float32(-1)
        return _cast(values, tensor["dtype"])

    def _distribution(self, tensor: dict[str, Any]) -> tuple[float, float]:
        """(deviation, mean) of an unquantised tensor's values."""
        shape, last = tensor["shape"], tensor["parameter"]
        if last in ("bias", "ape") or "bias" in last:
            return 0.02, 0.0
        if len(shape) >= 2:
            inputs = math.prod(shape[1:]) if "conv" in tensor["module"] else shape[-1]
            return 1 / math.sqrt(inputs), 0.0
        if last == "A_log":
            return 0.2, 0.5
        if _leaf(tensor) == "embed_norm":
            return 0.0, self._loudness
        if last.endswith(ONES):
            return 0.0, 1.0
        return 0.02, 0.0

    def _is_last_norm(self, tensor: dict[str, Any]) -> bool:
        return (
            "norm" in _leaf(tensor)
            and ".layers." not in tensor["name"]
            and (tensor["parameter"] == "weight")
        )

    def _raw(self, name: str, count: int) -> np.ndarray:
        return _draws(self.seed, name, count)


@lru_cache(maxsize=1)
def _pools(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """2 * POOL random 32-bit words, and POOL nearly normal float32 values of deviation 1: of each
    64-bit draw, the sum of its four 16-bit parts."""
    draws = _draws(seed, "normals", POOL)
    normals = np.empty(POOL, np.float32)
    for start in range(0, POOL, CHUNK):
        parts = draws[start : start + CHUNK].view("<u2").reshape(-1, 4)
        total = parts.sum(axis=1, dtype=np.int32) - 2 * 0xFFFF
        normals[start : start + CHUNK] = total * np.float32(math.sqrt(12) / (2 * 65536))
    return _draws(seed, "words", POOL).view("<u4"), normals


def _draws(seed: int, name: str, count: int) -> np.ndarray:
    """64-bit draws of a bit generator that numpy never changes."""
    key = hashlib.sha256(f"{seed}:{name}".encode()).digest()[:16]
    return np.random.Philox(key=int.from_bytes(key, "little")).random_raw(count)


def _call(function: Callable[..., list[Piece]], *arguments: Any) -> Callable[[], list[Piece]]:
    return lambda: function(*arguments)


def _piece(name: str, start: int, fill: Callable[..., np.ndarray], *arguments: Any) -> list[Piece]:
    return [Piece(name, start, fill(*arguments))]


def _leaf(tensor: dict[str, Any]) -> str:
    return tensor["module"].rpartition(".")[2]


def _layer(name: str) -> int:
    parts = pairwise(name.split("."))
    numbers = [int(after) for part, after in parts if part == "layers" and after.isdigit()]
    return max(numbers, default=0)


def _cast(values: np.ndarray, dtype: str) -> np.ndarray:
    if dtype == "BF16":
        return codes.to_bfloat16(values)
    kinds = {"F32": "<f4", "F16": "<f2", "U8": "u1", "U32": "<u4", "I32": "<i4", "I64": "<i8"}
    if dtype not in kinds:
        raise UserError(f"no synthetic values of type {dtype}; allowed: BF16, {', '.join(kinds)}")
    return values.astype(kinds[dtype], copy=False)


def _shards(tensors: list[dict[str, Any]], limit: int) -> list[list[dict[str, Any]]]:
    """Tensors in order, cut where a shard would pass the limit; a module's stay together, and
    one that is larger stands alone."""
    modules: dict[str, list[dict[str, Any]]] = {}
    for tensor in tensors:
        modules.setdefault(tensor["module"], []).append(tensor)
    shards: list[list[dict[str, Any]]] = [[]]
    filled = 0
    for module in modules.values():
        extra = sum(map(size, module))
        if shards[-1] and filled + extra > limit:
            shards.append([])
            filled = 0
        shards[-1] += module
        filled += extra
    return shards


def _write_shard(
    path: Path, shard: list[dict[str, Any]], maker: Maker, pool: ThreadPoolExecutor
) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "mlx"}}
    offset = 0
    for tensor in shard:
        end = offset + size(tensor)
        header[tensor["name"]] = {
            "dtype": tensor["dtype"], "shape": tensor["shape"], "data_offsets": [offset, end],
        }  # fmt: skip
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb", buffering=0) as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + offset)

        def put(make: Callable[[], list[Piece]]) -> None:
            for piece in make():
                first, end = header[piece.tensor]["data_offsets"]
                at = first + piece.start * piece.values.itemsize
                data = memoryview(piece.values).cast("B")
                if at + len(data) > end:
                    raise AssertionError(f"{piece.tensor}: a piece leaves its tensor")
                _write_at(file.fileno(), data, 8 + len(text) + at)

        jobs = (make for tensor in shard for make in maker.pieces(tensor))
        for done in pool.map(put, jobs):
            assert done is None


def _write_at(handle: int, data: memoryview, offset: int) -> None:
    while data:
        written = os.pwrite(handle, data, offset)
        data, offset = data[written:], offset + written


def _tokenizer(folder: Path, vocab: int) -> None:
    """Words t0, t1, ...: enough for a tool that wants a tokenizer; arms decode by token ids."""
    model = {"type": "WordLevel", "vocab": {f"t{i}": i for i in range(vocab)}, "unk_token": "t0"}
    write_json(folder / "tokenizer.json", {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [],
        "normalizer": None, "pre_tokenizer": {"type": "WhitespaceSplit"}, "post_processor": None,
        "decoder": None, "model": model,
    })  # fmt: skip
    write_json(folder / "tokenizer_config.json", {
        "tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "t0", "eos_token": "t1",
        "pad_token": "t2",
    })  # fmt: skip


def _key(config: dict[str, Any], names: tuple[str, ...], default: Any = None) -> Any:
    inner = config.get("text_config") or {}
    for name in names:
        for level in (config, inner):
            if level.get(name) is not None:
                return level[name]
    if default is None:
        raise UserError(f"{' or '.join(names)} is missing in the config of a synthetic checkpoint")
    return default
