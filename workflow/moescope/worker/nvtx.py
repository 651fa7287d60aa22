"""MLX's own NVTX ranges, heard from inside the process: which primitive is being evaluated when.

MLX's CUDA backend puts a range named "<Primitive>::eval_gpu" around the evaluation of each
primitive. NVTX calls go through a table of function pointers inside libmlx.so. Its place is read
from the library's symbols and relocations, and two entries are pointed at functions of ours. That
is the exact link between a primitive and its launches, since a launch's CUDA call falls into the
range; where the library has no such symbols, there is none (``listening`` yields None).
"""

import ctypes
import importlib.util
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

GLOBALS = "nvtxGlobals_v3"
PUSH, POP = "nvtxDomainRangePushEx_impl_init_v3", "nvtxDomainRangePop_impl_init_v3"
MESSAGE_TYPE, MESSAGE, ASCII = 32, 40, 1  # nvtxEventAttributes_v2: offsets; a char string

SYMTAB, RELA, RELATIVE = 2, 4, 8  # section types; R_X86_64_RELATIVE (aarch64: 1027)
RELATIVE_AARCH64 = 1027

Slots = dict[str, int]


def slots(library: Path) -> Slots | None:
    """Offsets, from the library's load address, of the pointers to NVTX's push and pop."""
    with open(library, "rb") as file:
        header = file.read(64)
        if header[:5] != b"\x7fELF\x02":
            return None
        (at,) = struct.unpack_from("<Q", header, 40)
        size, count = struct.unpack_from("<HH", header, 58)
        file.seek(at)
        table = file.read(size * count)
        sections = [struct.unpack_from("<IIQQQQIIQQ", table, i * size) for i in range(count)]

        def content(section: tuple) -> bytes:
            file.seek(section[4])
            return file.read(section[5])

        symbols: dict[str, tuple[int, int]] = {}
        for section in sections:
            if section[1] == SYMTAB:
                names = content(sections[section[6]])
                for name, _, _, _, value, length in struct.iter_unpack("<IBBHQQ", content(section)):
                    for wanted in (GLOBALS, PUSH, POP):
                        if names.startswith(wanted.encode() + b"\0", name):
                            symbols[wanted] = (value, length)
        if len(symbols) < 3:
            return None
        start, length = symbols[GLOBALS]
        found: Slots = {}
        for section in sections:
            if section[1] != RELA:
                continue
            for offset, info, target in struct.iter_unpack("<QQq", content(section)):
                if start <= offset < start + length and info in (RELATIVE, RELATIVE_AARCH64):
                    for wanted in (PUSH, POP):
                        if target == symbols[wanted][0]:
                            found[wanted] = offset
        return found if len(found) == 2 else None


def library() -> Path | None:
    """libmlx.so of this interpreter's MLX."""
    spec = importlib.util.find_spec("mlx")
    for folder in spec.submodule_search_locations or () if spec else ():
        for path in Path(folder).glob("lib/libmlx.so"):
            return path.resolve()
    return None


def _base(path: Path) -> int | None:
    """Where the library is loaded in this process."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and fields[5] == str(path) and int(fields[2], 16) == 0:
            return int(fields[0].split("-")[0], 16)
    return None


_kept: list[object] = []  # another thread may still be in one of ours when we put theirs back


@contextmanager
def listening(now: Callable[[], int]) -> Iterator[list[tuple[str | None, int]] | None]:
    """A list that fills with (name, time) at each begin and (None, time) at each end of a range.

    Call it after MLX has evaluated something: NVTX sets up its table at its first use. now: the
    clock. Yields None where the library cannot be listened to.
    """
    path = library()
    found = slots(path) if path else None
    base = _base(path) if found else None
    if base is None:
        yield None
        return
    heard: list[tuple[str | None, int]] = []

    @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
    def push(domain: int, event: int) -> int:
        kind = ctypes.c_int.from_address(event + MESSAGE_TYPE).value
        text = ctypes.c_char_p.from_address(event + MESSAGE).value if kind == ASCII else b"?"
        heard.append(((text or b"?").decode(errors="replace"), now()))
        return 0

    @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
    def pop(domain: int) -> int:
        heard.append((None, now()))
        return 0

    _kept.extend((push, pop))
    entries = {name: ctypes.c_void_p.from_address(base + at) for name, at in found.items()}
    before = {name: entry.value for name, entry in entries.items()}
    entries[PUSH].value = ctypes.cast(push, ctypes.c_void_p).value
    entries[POP].value = ctypes.cast(pop, ctypes.c_void_p).value
    try:
        yield heard
    finally:
        for name, entry in entries.items():
            entry.value = before[name]
