"""The device that kernels would run on: its language, its name, its width."""

import ctypes
from dataclasses import dataclass

import mlx.core as mx


@dataclass(frozen=True)
class Device:
    """language: "cuda" or "metal"; name as the driver gives it. CUDA: cores (multiprocessors),
    shared_memory (bytes a block may have), capability (90 for 9.0)."""

    language: str
    name: str
    cores: int = 0
    shared_memory: int = 0
    capability: int = 0


def current() -> Device | None:
    """MLX's default device, None if it is the CPU."""
    if mx.default_device().type != mx.DeviceType.gpu:
        return None
    info = mx.device_info()
    name = str(info.get("device_name", ""))
    if mx.metal.is_available():
        return Device("metal", name)
    if mx.cuda.is_available():
        cores, memory, major, minor = _attributes(16, 97, 75, 76)
        return Device("cuda", name, cores, memory, major * 10 + minor)
    return None


def _attributes(*which: int) -> list[int]:
    """Attributes of device 0 by their numbers, from the driver, which MLX has loaded already.

    Raises OSError if there is no driver, RuntimeError with its code if it fails.
    """
    driver = ctypes.CDLL("libcuda.so.1")
    device, found = ctypes.c_int(), []
    codes = [driver.cuInit(0), driver.cuDeviceGet(ctypes.byref(device), 0)]
    for number in which:
        value = ctypes.c_int()
        codes.append(driver.cuDeviceGetAttribute(ctypes.byref(value), number, device))
        found.append(value.value)
    if any(codes):
        raise RuntimeError(f"the CUDA driver answers with codes {codes}")
    return found
