"""The GPU guard over a fake driver and a fake nvidia-smi: who is foreign, what slows or fails."""

import dataclasses
import os
import sys
from types import SimpleNamespace

import pytest

from moescope.errors import UserError
from moescope.measure import gpu, host
from moescope.measure import guard as guards
from moescope.measure.gpu import GpuProbe, GpuReading, Smi, State, in_use

IDLE = State(frozenset(), 600 << 20, 0.0, 345, 2619, 30, 75.0, 0x1)
SMI = """#!/bin/sh
case "$1" in
*uuid*) echo GPU-aaa; echo GPU-bbb ;;
*name,driver*) echo "NVIDIA H200, 580.159.04, 9.0, 143771, 1980, 3201, 700.00" ;;
*clocks_event*) [ -n "$OLD_DRIVER" ] && { echo "not a valid field"; exit 2; }
  echo "1024, 37, 1755, 3201, 41, 310.25, 0x0000000000000044" ;;
*clocks_throttle*) echo "1024, 37, 1755, 3201, 41, [N/A], [N/A]" ;;
*compute-apps*) echo 4242; echo 17 ;;
*) echo "unknown question $1" >&2; exit 3 ;;
esac
"""


class Driver:
    period_s = 0.0

    def __init__(self, state=IDLE):
        self.now = state
        self.asked = 0

    def uuids(self):
        return ["GPU-aaa", "GPU-bbb"]

    def facts(self, uuid):
        return {"name": "Test GPU"}

    def state(self, uuid):
        assert uuid == "GPU-aaa"
        self.asked += 1
        return self.now

    def put(self, **changes):
        self.now = dataclasses.replace(self.now, **changes)


@pytest.fixture(autouse=True)
def visible(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.fixture
def driver():
    return Driver()


def why(probe, own=(5,)):
    return probe.read(set(own), False).why


def test_an_idle_gpu_is_quiet(driver):
    assert why(GpuProbe(driver)) is None


@pytest.mark.parametrize(
    ("before", "expected"),
    [
        ({"pids": frozenset({99})}, "1 other processes on the GPU"),
        ({"memory_used": 3 << 30}, "GPU memory held by no visible process"),
        ({"utilisation": 0.4}, "GPU in use"),
    ],
)
def test_a_gpu_in_use_before_we_start_is_not_quiet(driver, before, expected):
    driver.put(**before)
    probe = GpuProbe(driver)
    assert why(probe) == expected
    driver.now = IDLE
    assert why(probe) is None


def test_our_own_work_is_not_foreign_but_a_newcomer_is(driver):
    probe = GpuProbe(driver)
    driver.put(pids=frozenset({5, 6}), memory_used=90 << 30, utilisation=1.0)
    assert why(probe, (5, 6)) is None
    probe.settle({5, 6})
    assert why(probe, (5, 6)) is None
    driver.put(pids=frozenset({5, 6, 77}))
    assert why(probe, (5, 6)) == "1 other processes on the GPU"


def test_in_a_container_our_processes_have_other_pids(driver):
    probe = GpuProbe(driver)
    driver.put(pids=frozenset({40001, 40002}), memory_used=90 << 30)
    assert why(probe) is None
    probe.settle({5, 6})
    assert why(probe) is None
    driver.put(pids=frozenset({40001, 40002, 40777}))
    assert why(probe) == "1 other processes on the GPU"


def test_who_was_there_before_stays_foreign(driver):
    driver.put(pids=frozenset({99}))
    probe = GpuProbe(driver)
    driver.put(pids=frozenset({99, 40001}))
    probe.settle({5})
    assert why(probe) == "1 other processes on the GPU"


@pytest.mark.parametrize(
    ("reasons", "expected"),
    [
        (0x4, None),
        (0x20, "GPU slowed: software thermal slowdown"),
        (0x48, "GPU slowed: hardware slowdown, hardware thermal slowdown"),
        (0x80, "GPU slowed: hardware power brake"),
    ],
)
def test_heat_and_power_brakes_disturb_a_power_cap_does_not(driver, reasons, expected):
    probe = GpuProbe(driver)
    driver.put(reasons=reasons)
    assert why(probe) == expected


def test_the_driver_is_not_asked_more_often_than_its_period(driver):
    driver.period_s = 100
    probe = GpuProbe(driver)
    for _ in range(5):
        why(probe)
    assert driver.asked == 1


def test_the_summary_gives_ranges(driver):
    states = [dataclasses.replace(IDLE, sm_mhz=mhz, reasons=bits, temperature_c=mhz // 30)
              for mhz, bits in ((1980, 0x0), (1410, 0x4), (1755, 0x2))]  # fmt: skip
    found = GpuProbe.summary([GpuReading(state, None) for state in states])["gpu"]
    assert found["sm_mhz"] == [1410, 1980]
    assert found["temperature_c"] == 66
    assert found["reasons"] == ["application clocks", "software power cap"]
    assert GpuProbe.summary([]) == {"gpu": None}


def test_the_gpu_in_use_is_the_first_visible(driver, monkeypatch):
    assert in_use(driver) == ["GPU-aaa"]
    for visible, expected in (("1", "GPU-bbb"), ("1,0", "GPU-bbb"), ("GPU-b", "GPU-bbb")):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert in_use(driver) == [expected]
    for visible in ("7", "", "none"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        with pytest.raises(UserError, match="CUDA_VISIBLE_DEVICES"):
            in_use(driver)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    driver.uuids = lambda: []
    with pytest.raises(UserError, match="no NVIDIA GPU"):
        in_use(driver)


@pytest.fixture
def smi(tmp_path, monkeypatch):
    program = tmp_path / "nvidia-smi"
    program.write_text(SMI)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("OLD_DRIVER", raising=False)
    return program


def test_nvidia_smi_is_read(smi, monkeypatch):
    asked = Smi()
    assert asked.uuids() == ["GPU-aaa", "GPU-bbb"]
    facts = asked.facts("GPU-aaa")
    assert (facts["name"], facts["driver"]) == ("NVIDIA H200", "580.159.04")
    assert facts["memory"] == 143771 << 20 and facts["max_sm_mhz"] == 1980
    expected = State(frozenset({4242, 17}), 1 << 30, 0.37, 1755, 3201, 41, 310.25, 0x44)
    assert asked.state("GPU-aaa") == expected
    monkeypatch.setenv("OLD_DRIVER", "1")
    old = Smi().state("GPU-aaa")
    assert (old.reasons, old.power_w, old.sm_mhz) == (0, None, 1755)


def test_a_driver_that_fails_or_hangs_is_an_error_not_an_idle_gpu(smi, monkeypatch):
    smi.write_text("#!/bin/sh\necho 'Failed to initialize NVML' ; exit 9\n")
    with pytest.raises(UserError, match="Failed to initialize NVML"):
        Smi().state("GPU-aaa")
    smi.write_text("#!/bin/sh\nexec sleep 30\n")
    monkeypatch.setattr(gpu, "QUERY_LIMIT_S", 0.2)
    with pytest.raises(UserError, match="does not answer"):
        Smi().uuids()
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(UserError, match="no NVIDIA driver answers"):
        Smi()


class Nvml:
    """pynvml of a GPU that shares the host's memory, as on a GB10; lost: it fell off the bus."""

    class NVMLError(Exception):
        pass

    class NVMLError_NotSupported(NVMLError):
        pass

    class NVMLError_NoPermission(NVMLError):
        pass

    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0

    def __init__(self, lost=False, driver=True):
        self.lost, self.driver = lost, driver

    def nvmlInit(self):
        if not self.driver:
            raise self.NVMLError("NVML Shared Library Not Found")

    def __getattr__(self, name):
        answers = {
            "nvmlDeviceGetCount": 1,
            "nvmlDeviceGetHandleByIndex": "handle",
            "nvmlDeviceGetHandleByUUID": "handle",
            "nvmlDeviceGetUUID": b"GPU-aaa",
            "nvmlDeviceGetName": "NVIDIA GB10",
            "nvmlSystemGetDriverVersion": "580.95.05",
            "nvmlDeviceGetCudaComputeCapability": (12, 1),
            "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=3),
            "nvmlDeviceGetComputeRunningProcesses": [SimpleNamespace(pid=7)],
            "nvmlDeviceGetClockInfo": {1: 2418},
            "nvmlDeviceGetMaxClockInfo": {1: 3003},
            "nvmlDeviceGetTemperature": 41,
            "nvmlDeviceGetPowerUsage": 11_530,
            "nvmlDeviceGetCurrentClocksThrottleReasons": 0x21,
        }

        def answer(*of):
            if self.lost and of:
                raise self.NVMLError("GPU is lost")
            found = answers.get(name)
            found = found.get(of[-1]) if isinstance(found, dict) else found
            if found is None:
                raise self.NVMLError_NotSupported("Not Supported")
            return found

        return answer


def test_what_a_gpu_does_not_tell_is_unknown_not_zero(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", Nvml())
    asked = gpu.driver()
    assert isinstance(asked, gpu.Nvml) and asked.uuids() == ["GPU-aaa"]
    state = asked.state("GPU-aaa")
    assert state == State(frozenset({7}), None, 0.03, 2418, None, 41, 11.5, 0x21)
    found = host.describe("cuda")["gpu"]
    assert found["name"] == "NVIDIA GB10" and found["max_sm_mhz"] == 3003
    assert "memory" not in found and "power_limit_w" not in found
    probe = GpuProbe(asked)
    summary = GpuProbe.summary([probe.read({7}, True)])["gpu"]
    assert summary["memory_used"] is None and summary["memory_mhz"] is None
    assert summary["sm_mhz"] == [2418, 2418]
    assert probe.read({7}, True).why == "GPU slowed: software thermal slowdown"
    monkeypatch.setitem(sys.modules, "pynvml", Nvml(lost=True))
    with pytest.raises(UserError, match="NVML does not answer: GPU is lost"):
        gpu.Nvml().state("GPU-aaa")


def test_without_a_driver_the_library_alone_is_no_gpu(smi, monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", Nvml(driver=False))
    assert isinstance(gpu.driver(), Smi)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(UserError, match="NVML does not start and nvidia-smi is not in PATH"):
        gpu.driver()
    assert [probe.name for probe in guards.probes({}, "cpu")] == ["cpu"]
    assert "gpu" not in host.describe("cpu")


def test_the_host_names_its_gpu_without_its_serial(smi, monkeypatch):
    monkeypatch.setattr(gpu, "Nvml", Smi)
    found = host.describe("cuda")["gpu"]
    assert found["name"] == "NVIDIA H200"
    assert "GPU-aaa" not in str(found)
