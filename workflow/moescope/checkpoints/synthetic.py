"""Checkpoints made from a family's config and a seed: real structure, invented weights.

The runtime's own model code says which tensors there are (worker command ``layout``); their bytes
come from counters (Philox) keyed by seed and tensor, so they are the same on every machine and in
any order of shards. Large packed tensors are cut from one pool of random words and streamed, so a
checkpoint never needs more memory than the pool and its largest unpacked tensor.

The weights must decode healthily: projections keep the variance of what passes through them, and
where the head is not tied, its row for token i + STEP resembles the embedding of token i. Greedy
text then walks through the vocabulary instead of falling into a loop, routing changes from token
to token, and the layers still move the logits.
"""

import hashlib
import json
import math
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from ..errors import UserError
from ..files import write_json
from . import codes
from .headers import INDEX, WIDTHS

STEP = 387  # odd and not a multiple of small primes, so that it passes through all of a vocabulary
POOL_WORDS = 1 << 24
CHUNK = 1 << 22  # words or values at a time
ROWS = 4096  # rows of an embedding drawn at a time
EMBEDDINGS = ("embed_tokens", "embeddings", "embed", "word_embeddings", "wte")
HEADS = ("lm_head", "head", "unembed", "output")
EXPERT_COUNTS = ("n_routed_experts", "num_local_experts", "num_experts")


def make(source: dict[str, Any], layout: dict[str, Any], folder: Path) -> None:
    """Write config.json, the tokenizer, the shards and their index into an empty folder.

    layout: the worker's reply {"tensors": [...], "config": {...}}.
    """
    config, tensors = layout["config"], layout["tensors"]
    write_json(folder / "config.json", config)
    _tokenizer(folder, _key(config, ("vocab_size",)))
    maker = Maker(source["seed"], config, tensors)
    shards = _shards(tensors, source["shard_bytes"])
    index: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        with open(folder / name, "wb") as file:
            _write_shard(file, shard, maker)
        index |= {tensor["name"]: name for tensor in shard}
    total = sum(map(size, tensors))
    write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": index})


def size(tensor: dict[str, Any]) -> int:
    """Bytes of a tensor of the layout."""
    return WIDTHS[tensor["dtype"]] * math.prod(tensor["shape"])


class Maker:
    """The values of each tensor, by what it is."""

    def __init__(self, seed: int, config: dict[str, Any], tensors: list[dict[str, Any]]):
        self.seed = seed
        self.experts = _key(config, EXPERT_COUNTS, 1)
        self.by_name = {tensor["name"]: tensor for tensor in tensors}
        modules = {tensor["module"].rpartition(".")[2] for tensor in tensors}
        self.tied = not modules & set(HEADS)
        self._pool: np.ndarray | None = None
        self._kept: tuple[str, dict[str, np.ndarray]] = ("", {})

    def values(self, tensor: dict[str, Any]) -> Iterator[np.ndarray]:
        """The tensor's values in order, in pieces, in its own dtype."""
        leaf = tensor["module"].rpartition(".")[2]
        table = leaf in EMBEDDINGS or (leaf in HEADS and not self.tied)
        matrix = len(tensor["shape"]) == 2
        if tensor["quant"]:
            if table and matrix:
                yield _cast(self._quantised_table(tensor)[tensor["parameter"]], tensor["dtype"])
            else:
                yield from self._packed(tensor)
        elif table and matrix and tensor["parameter"] == "weight":
            for rows in self._table_rows(tensor["module"], *tensor["shape"]):
                yield _cast(rows, tensor["dtype"])
        else:
            yield from self._plain(tensor)

    def _packed(self, tensor: dict[str, Any]) -> Iterator[np.ndarray]:
        """A projection's random codes, or the scales and biases that give them unit gain."""
        quant, count = tensor["quant"], math.prod(tensor["shape"])
        if tensor["parameter"] == "weight":
            for words in self._words(tensor["name"], count):
                yield words & np.uint32(0xBFBFBFBF) if quant["mode"] == "mxfp8" else words
            return
        weight = self.by_name[f"{tensor['module']}.weight"]
        gain = 1 / math.sqrt(weight["shape"][-1] * 32 // quant["bits"])
        if quant["mode"] == "affine":
            top = (1 << quant["bits"]) - 1
            scale = gain / math.sqrt(((top + 1) ** 2 - 1) / 12)
            value = scale if tensor["parameter"] == "scales" else -scale * top / 2
            one = _cast(np.array([value], np.float32), tensor["dtype"])
        elif quant["mode"] == "nvfp4":
            one = codes.to_e4m3(np.array([gain / codes.E2M1_STD]))
        else:
            # mxfp8's codes are kept below 2 (see above), where their deviation is about 0.6
            deviation = codes.E2M1_STD if quant["mode"] == "mxfp4" else 0.6
            one = codes.to_e8m0(np.array([gain / deviation]))
        for start in range(0, count, CHUNK):
            yield np.repeat(one, min(CHUNK, count - start))

    def _plain(self, tensor: dict[str, Any]) -> Iterator[np.ndarray]:
        name, shape, dtype = tensor["name"], tensor["shape"], tensor["dtype"]
        count = math.prod(shape)
        if dtype.startswith(("I", "U")):
            # A table of experts by token: each row names different ones.
            index = np.arange(count)
            row, column = index // shape[-1], index % shape[-1]
            yield _cast((row * 7 + column * 31) % self.experts, dtype)
            return
        last = tensor["parameter"]
        if len(shape) >= 2 and last not in ("ape",):
            spread, middle = 1 / math.sqrt(shape[-1]), 0.0
        elif last == "A_log":
            spread, middle = 0.2, 0.5
        elif last == "weight" or last.endswith(("scale", "gamma")) or last in ("D",):
            spread, middle = 0.0, 1.0
        else:
            spread, middle = 0.02, 0.0
        for start in range(0, count, CHUNK):
            values = self._normal(f"{name}:{start}", min(CHUNK, count - start))
            yield _cast(values * np.float32(spread) + np.float32(middle), dtype)

    def _quantised_table(self, tensor: dict[str, Any]) -> dict[str, np.ndarray]:
        module = tensor["module"]
        if self._kept[0] != module:
            quant = tensor["quant"]
            weight = self.by_name[f"{module}.weight"]["shape"]
            parts = [
                codes.quantise(rows, **quant)
                for rows in self._table_rows(module, weight[0], weight[1] * 32 // quant["bits"])
            ]
            self._kept = (
                module,
                {key: np.concatenate([p[key] for p in parts]) for key in parts[0]},
            )
        return self._kept[1]

    def _table_rows(self, module: str, rows: int, width: int) -> Iterator[np.ndarray]:
        """An embedding, or the head: its row i is the embedding's row i - STEP, plus noise."""
        head = module.rpartition(".")[2] in HEADS
        for start in range(0, rows, ROWS):
            stop = min(start + ROWS, rows)
            if not head:
                yield self._embedding(start // ROWS, stop - start, width)
                continue
            wanted = (np.arange(start, stop) - STEP) % rows
            block = np.empty((stop - start, width), np.float32)
            for number in np.unique(wanted // ROWS):
                place = wanted // ROWS == number
                piece = self._embedding(int(number), min(ROWS, rows - int(number) * ROWS), width)
                block[place] = piece[wanted[place] - number * ROWS]
            noise = self._normal(f"{module}:{start}", block.size).reshape(block.shape)
            yield (block + noise / 2) / np.float32(math.sqrt(width))

    def _embedding(self, number: int, rows: int, width: int) -> np.ndarray:
        return self._normal(f"embedding:{number}", rows * width).reshape(rows, width)

    def _normal(self, name: str, count: int) -> np.ndarray:
        """Nearly normal float32 values, deviation 1: four 16-bit draws summed, which is exact."""
        draws = self._generator(name).integers(0, 1 << 16, (4, count), np.uint16)
        total = draws.sum(axis=0, dtype=np.int32) - 2 * 0xFFFF
        return total.astype(np.float32) * np.float32(1 / (2 * 65536 / math.sqrt(12)))

    def _words(self, name: str, count: int) -> Iterator[np.ndarray]:
        """Random uint32 words: the pool from a place of the tensor's own, changed in each turn."""
        if count <= CHUNK:
            yield self._generator(name).integers(0, 1 << 32, count, np.uint32)
            return
        if self._pool is None:
            self._pool = self._generator("pool").integers(0, 1 << 32, POOL_WORDS, np.uint32)
        generator = self._generator(name)
        while count:
            start = int(generator.integers(0, POOL_WORDS - CHUNK))
            flip = generator.integers(0, 1 << 32, dtype=np.uint32)
            piece = self._pool[start : start + min(CHUNK, count)] ^ flip
            count -= len(piece)
            yield piece

    def _generator(self, name: str) -> np.random.Generator:
        key = hashlib.sha256(f"{self.seed}:{name}".encode()).digest()[:16]
        return np.random.Generator(np.random.Philox(key=int.from_bytes(key, "little")))


def _cast(values: np.ndarray, dtype: str) -> np.ndarray:
    if dtype == "BF16":
        return codes.to_bfloat16(values)
    kinds = {"F32": "<f4", "F16": "<f2", "U8": "u1", "U32": "<u4", "I32": "<i4", "I64": "<i8"}
    if dtype not in kinds:
        raise UserError(f"no synthetic values of type {dtype}; allowed: BF16, {', '.join(kinds)}")
    return values.astype(kinds[dtype], copy=False)


def _shards(tensors: list[dict[str, Any]], limit: int) -> list[list[dict[str, Any]]]:
    """Tensors in order, cut where a shard would pass the limit; a larger tensor stands alone."""
    shards: list[list[dict[str, Any]]] = [[]]
    filled = 0
    for tensor in tensors:
        if shards[-1] and filled + size(tensor) > limit:
            shards.append([])
            filled = 0
        shards[-1].append(tensor)
        filled += size(tensor)
    return shards


def _write_shard(file: BinaryIO, shard: list[dict[str, Any]], maker: Maker) -> None:
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
    file.write(struct.pack("<Q", len(text)) + text)
    for tensor in shard:
        for values in maker.values(tensor):
            file.write(values.data)


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
