"""The device that kernels would run on: its language, its name, its width."""

import ctypes
from dataclasses import dataclass

import mlx.core as mx


@dataclass(frozen=True)
class Device:
    """language: "cuda" or "metal"; name as the driver gives it; cores: multiprocessors (CUDA)."""

    language: str
    name: str
    cores: int


def current() -> Device | None:
    """MLX's default device, None if it is the CPU."""
    if mx.default_device().type != mx.DeviceType.gpu:
        return None
    info = mx.device_info()
    if mx.metal.is_available():
        return Device("metal", str(info.get("device_name", "")), 0)
    if mx.cuda.is_available():
        return Device("cuda", str(info.get("device_name", "")), _multiprocessors())
    return None


def _multiprocessors() -> int:
    """From the driver, which MLX has loaded already; an H200's where it does not say."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        count, device = ctypes.c_int(), ctypes.c_int()
        driver.cuInit(0)
        driver.cuDeviceGet(ctypes.byref(device), 0)
        if driver.cuDeviceGetAttribute(ctypes.byref(count), 16, device) == 0 and count.value > 0:
            return count.value
    except OSError:
        pass
    return 132
