"""What a folder of safetensors holds, by the headers of its shards alone.

The format (safetensors' README): eight bytes with the header's length, the header as JSON, then
the tensors' bytes without gaps.
"""

import csv
import io
import json
import math
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ..errors import UserError
from ..files import write_text

INDEX = "model.safetensors.index.json"
MAX_HEADER = 100_000_000  # the format's own limit
WIDTHS = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "U16": 2, "I16": 2,
    "F16": 2, "BF16": 2, "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8,
}  # fmt: skip
COLUMNS = ("name", "dtype", "shape", "bytes", "shard")


@dataclass(frozen=True)
class Tensor:
    """dtype: safetensors' name. shape: elements; bytes: as stored."""

    dtype: str
    shape: tuple[int, ...]
    bytes: int
    shard: str


def read_headers(folder: Path) -> dict[str, Tensor]:
    """Name -> Tensor of all shards; each shard is checked by header, size and index.

    Raises UserError for a shard that is cut short, has a gap or an odd header, for a tensor that
    stands twice, and for an index that names what is not there.
    """
    shards = sorted(folder.glob("*.safetensors"))
    if not shards:
        raise UserError("there is no *.safetensors file", where=str(folder))
    tensors: dict[str, Tensor] = {}
    for shard in shards:
        for name, tensor in _shard(shard).items():
            if name in tensors:
                raise UserError(f"{name} also stands in {tensors[name].shard}", where=shard.name)
            tensors[name] = tensor
    _check_index(folder, tensors)
    return tensors


def write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """tensors.csv, sorted by name; a shape is written "4096x64", a scalar's is empty."""
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(COLUMNS)
    for name, tensor in sorted(tensors.items()):
        shape = "x".join(map(str, tensor.shape))
        rows.writerow((name, tensor.dtype, shape, tensor.bytes, tensor.shard))
    write_text(path, text.getvalue())


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of tensors.csv."""
    with open(path, newline="") as file:
        rows = csv.DictReader(file)
        if tuple(rows.fieldnames or ()) != COLUMNS:
            raise UserError(f"the columns must be {','.join(COLUMNS)}", where=str(path))
        return {
            row["name"]: Tensor(
                row["dtype"],
                tuple(int(size) for size in row["shape"].split("x") if size),
                int(row["bytes"]),
                row["shard"],
            )
            for row in rows
        }


def _shard(path: Path) -> dict[str, Tensor]:
    size = path.stat().st_size
    with open(path, "rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
        if length > MAX_HEADER or 8 + length > size:
            raise UserError("no safetensors header; the file is cut short", where=path.name)
        try:
            header = json.loads(file.read(length))
        except ValueError:
            raise UserError("the safetensors header is not JSON", where=path.name) from None
    header.pop("__metadata__", None)
    return {name: tensor for name, tensor in _entries(path, header, size - 8 - length)}


def _entries(path: Path, header: dict, data: int) -> Iterable[tuple[str, Tensor]]:
    end = 0
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        first, last = entry["data_offsets"]
        shape, dtype = tuple(entry["shape"]), entry["dtype"]
        width = WIDTHS.get(dtype)
        if first != end or (width is not None and last - first != width * math.prod(shape)):
            raise UserError(f"{name}: its bytes do not fit its shape", where=path.name)
        end = last
        yield name, Tensor(dtype, shape, last - first, path.name)
    if end != data:
        raise UserError(f"{data} bytes of tensors, the header says {end}", where=path.name)


def _check_index(folder: Path, tensors: dict[str, Tensor]) -> None:
    path = folder / INDEX
    if not path.is_file():
        if len({tensor.shard for tensor in tensors.values()}) > 1:
            raise UserError(f"several shards and no {INDEX}", where=str(folder))
        return
    try:
        named = json.loads(path.read_text())["weight_map"]
    except (ValueError, KeyError):
        raise UserError("no weight_map in it", where=INDEX) from None
    found = {name: tensor.shard for name, tensor in tensors.items()}
    wrong = sorted(name for name in named if found.get(name) != named[name])
    extra = sorted(found.keys() - named.keys())
    if wrong:
        raise UserError(f"{wrong[0]} is not in {named[wrong[0]]} ({len(wrong)} such)", where=INDEX)
    if extra:
        raise UserError(f"it does not name {extra[0]} ({len(extra)} such)", where=INDEX)
