"""A Mac as a host, on any system: its commands' documented outputs through a fake runner, the
platform said to be darwin. Nothing here ran on a Mac; docs/metal.md says what to check there.
"""

import json
import os
import platform
import re
import subprocess
import sys
import textwrap
import time
from types import SimpleNamespace

import psutil  # noqa: F401 (before the platform is faked: it looks at it once)
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moescope import doctor as package
from moescope import run as runner
from moescope.doctor import host as doctor_host
from moescope.doctor import study as doctor_study
from moescope.measure import bench, cpu, guard, host, macos
from moescope.measure.mac_probe import MacProbe
from moescope.runtimes import process
from moescope.study import machine

COOL = "Note: No thermal warning level has been recorded\n" \
       "Note: No performance warning level has been recorded\n"  # fmt: skip
HOT = """2026-08-20 05:08:37 -0700 CPU Power notify
\tCPU_Scheduler_Limit \t= 100
\tCPU_Available_CPUs \t= 12
\tCPU_Speed_Limit \t= 62
"""
SETTINGS = """System-wide power settings:
Currently in use:
 standby              1
 powernap             1
 networkoversleep     0
 lowpowermode         0
 sleep                0 (sleep prevented by sharingd)
"""
ANSWERS = {
    "sysctl": "machdep.cpu.brand_string: Apple M3 Ultra\nhw.model: Mac15,14\n"
    "hw.memsize: 549755813888\nhw.physicalcpu: 32\nhw.perflevel0.physicalcpu: 24\n"
    "hw.perflevel1.physicalcpu: 8\nhw.perflevel0.l2cachesize: 16777216\n"
    "iogpu.wired_limit_mb: 0\nkern.hv_vmm_present: 0\nkern.osproductversion: 26.5.1\n",
    "ioreg": '+-o AGXAcceleratorG15X  <class AGXAcceleratorG15X>\n    {\n'
    '      "gpu-core-count" = 80\n      "PerformanceStatistics" = {"In use system memory"=123456,'
    '"Device Utilization %"=7,"Renderer Utilization %"=6}\n    }\n',
    "pmset -g": SETTINGS,
    "pmset -g batt": "Now drawing from 'AC Power'\n",
    "pmset -g therm": COOL,
    "notifyutil": "com.apple.system.thermalpressurelevel 0\n",
    "ps": "    1     0   3:20.50 /sbin/launchd\n"
    "  400     1  12:00.25 /Applications/Big App/Big App\n"
    "  500     1   0:00.00 python\n  501   500   1:00:01.00 /opt/x/bench\n",
}  # fmt: skip
LOW = SETTINGS.replace("lowpowermode         0", "lowpowermode         1")


class Mac:
    """Answers as a Mac's commands do."""

    def __init__(self):
        self.answers = dict(ANSWERS)
        self.asked = []

    def __call__(self, *command):
        self.asked.append(command)
        return self.answers.get(" ".join(command)) or self.answers.get(command[0], "")


@pytest.fixture
def mac(monkeypatch):
    """This process takes itself for one on a Mac."""
    fake = Mac()
    monkeypatch.setattr(macos, "ask", fake)
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    monkeypatch.setattr(platform, "machine", lambda: "arm64")
    monkeypatch.setattr(platform, "mac_ver", lambda: ("26.5.1", ("", "", ""), "arm64"))
    return fake


# Parsers.


@pytest.mark.parametrize(
    ("text", "throttled", "limit"),
    [
        (COOL, False, None),
        (HOT, True, 62),
        (COOL + HOT.replace("62", "100"), False, 100),
        ("", None, None),
        ("Thermal Warning Level = 1\n", True, None),
        ("CPU_Scheduler_Limit = 80\nCPU_Speed_Limit = 100\n", True, 100),
    ],
)
def test_heat(text, throttled, limit):
    found = macos.parse_therm(text)
    assert (found["throttled"], found["speed_limit"]) == (throttled, limit)


@pytest.mark.parametrize(
    ("text", "level"),
    [
        ("com.apple.system.thermalpressurelevel 0\n", "nominal"),
        ("com.apple.system.thermalpressurelevel 2\n", "heavy"),
        ("com.apple.system.thermalpressurelevel 9\n", None),
        ("notifyutil: command not found", None),
    ],
)
def test_thermal_pressure(text, level):
    assert macos.parse_pressure(text) == level


@pytest.mark.parametrize(
    ("settings", "mode"),
    [
        (SETTINGS, "automatic"),
        (LOW, "low"),
        (SETTINGS + " powermode            2\n", "high"),
        ("nothing", None),
    ],
)
def test_power_modes(settings, mode):
    assert macos.parse_power(settings, "")["mode"] == mode


def test_processes_have_cpu_seconds_and_names_without_folders():
    found = macos.parse_processes(
        ANSWERS["ps"] + " 7 1 2-01:00:00 old\n 8 1 0:01,50 x\n8 bad line\n"
    )
    assert [(p.pid, p.parent, p.used_s, p.name) for p in found] == [
        (1, 0, 200.5, "launchd"),
        (400, 1, 720.25, "Big App"),
        (500, 1, 0.0, "python"),
        (501, 500, 3601.0, "bench"),
        (7, 1, 2 * 86400 + 3600.0, "old"),
        (8, 1, 1.5, "x"),
    ]


@given(st.integers(8 << 30, 1 << 40), st.integers(1, 1 << 20))
def test_a_wired_limit_wins(memory, limit):
    assert macos.working_set(memory, limit) == limit << 20
    assert macos.working_set(memory, None) == macos.working_set(memory, 0) < memory


def test_a_mute_mac_is_described_as_unknown():
    found = macos.probe(lambda *command: "")
    assert {found[name] for name in ("cpu", "memory", "gpu_memory", "power_mode")} == {None}
    found = macos.health(lambda *command: "")
    assert found["thermal"]["throttled"] is None and found["thermal"]["pressure"] is None
    assert macos.objections(found) == []


def test_commands_that_fail_hang_or_are_missing(tmp_path, monkeypatch):
    monkeypatch.setattr(macos, "LIMIT_S", 60)
    assert macos.ask("no-such-command-here") == ""
    # sysctl says what it knows, and fails for one unknown name.
    assert macos.ask("sh", "-c", "echo hw.memsize: 8; exit 1") == "hw.memsize: 8\n"
    assert macos.ask("printf", r"1 1 0:00.01 \377x\n") == "1 1 0:00.01 \ufffdx\n"
    monkeypatch.setattr(macos, "LIMIT_S", 0.2)
    begin = time.monotonic()
    assert macos.ask("sleep", "60") == ""
    assert time.monotonic() - begin < 50


# The host's facts.


def test_a_mac_is_described_without_names_and_without_what_changes(mac):
    found = host.describe("metal")
    assert found["cpu"] == "Apple M3 Ultra" and found["model"] == "Mac15,14"
    assert found["distribution"] == "macos 26.5.1" and found["virtualisation"] == "none"
    assert found["memory"] == 512 << 30 and found["last_level_cache"] == 16 << 20
    assert (found["performance_cores"], found["efficiency_cores"]) == (24, 8)
    assert found["power_mode"] == "automatic" and found["power_source"] == "mains"
    assert found["gpu"] == {
        "name": "Apple M3 Ultra",
        "cores": 80,
        "memory": 384 << 30,
        "wired_limit_set": False,
    }
    text = json.dumps(found)
    assert platform.node() not in text and os.path.expanduser("~") not in text
    # One Mac stays one host while it grows warm: records and journals compare all facts.
    mac.answers["notifyutil"] = "com.apple.system.thermalpressurelevel 1"
    mac.answers["pmset -g therm"] = HOT
    mac.answers["ioreg"] = ANSWERS["ioreg"].replace('%"=7', '%"=99')
    assert host.describe("metal") == found
    mac.answers["sysctl"] = ANSWERS["sysctl"].replace("limit_mb: 0", "limit_mb: 65536")
    limited = host.describe("metal")["gpu"]
    assert limited["memory"] == 64 << 30 and limited["wired_limit_set"] is True


def test_a_mac_without_answers_is_still_described(mac):
    mac.answers.clear()
    found = host.describe("metal")
    assert found["system"] == "darwin" and found["cpu"] == "arm64" and found["memory"] > 0
    assert "power_mode" not in found and found["gpu"] == {"wired_limit_set": False}


def test_the_machine_class_is_the_chip_and_its_memory(mac, monkeypatch):
    monkeypatch.setattr(machine, "_ask", lambda *command: "Apple M3 Ultra\n")
    monkeypatch.setattr(machine, "_memory_bytes", lambda: 512 << 30)
    found = machine.detect()
    assert (found.name, found.backend) == ("apple-m3-ultra-512g", "metal")


def test_a_checkpoint_beyond_the_gpus_ceiling_is_not_admitted(mac, monkeypatch):
    said = []
    params = {"shape": {"prompt": 512, "generate": 128}, "machine": {"backend": "metal"}}
    task = SimpleNamespace(params=params, subject="big", say=said.append)
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(total=512 << 30))
    bench._admit(task, 300 << 30, {}, 1)
    with pytest.raises(bench.NotAdmitted, match=r"326.4 GiB are allowed .* device's 384.0 GiB"):
        bench._admit(task, 350 << 30, {}, 1)
    params["machine"]["backend"] = "cpu"
    bench._admit(task, 350 << 30, {}, 1)


# The guard.


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({}, None),
        ({"notifyutil": "com.apple.system.thermalpressurelevel 1"}, None),
        (
            {"notifyutil": "com.apple.system.thermalpressurelevel 2"},
            "the chip is throttled (thermal pressure heavy)",
        ),
        ({"pmset -g therm": HOT}, "the chip is throttled (speed limit 62 %)"),
        (
            {"pmset -g": LOW},
            "Low Power Mode is on; switch it off (sudo pmset -a lowpowermode 0)",
        ),
        (
            {"pmset -g batt": "Now drawing from 'Battery Power'\n -InternalBattery-0 (id=1)\t85%;"},
            "the Mac runs on its battery; connect it",
        ),
        ({"ioreg": ANSWERS["ioreg"].replace('%"=7', '%"=60')}, "others use 60% of the GPU"),
    ],
)
def test_what_speaks_against_a_run_is_one_line(change, why):
    fake = Mac()
    fake.answers |= change
    reading = MacProbe(fake).read(set(), True)
    assert reading.why == why


def test_the_gpus_use_is_nobodys_once_our_processes_are_up():
    fake = Mac()
    fake.answers["ioreg"] = ANSWERS["ioreg"].replace('%"=7', '%"=97')
    probe = MacProbe(fake)
    assert probe.read(set(), True).why == "others use 97% of the GPU"
    probe.settle(set())
    fake.asked.clear()
    assert probe.read(set(), True).why is None
    assert not any(command[0] == "ioreg" for command in fake.asked)


def test_commands_are_asked_rarely():
    fake, now = Mac(), [0.0]
    probe = MacProbe(fake, period_s=2.0, clock=lambda: now[0])
    readings = []
    for _ in range(8):
        readings.append(probe.read(set(), False))
        now[0] += 0.25
    once = len(fake.asked)
    fake.answers["pmset -g therm"] = HOT
    readings.append(probe.read(set(), False))
    assert len(fake.asked) == 2 * once and once == 5
    assert MacProbe.summary(readings) == {
        "mac": {
            "throttled": True,
            "pressure": "nominal",
            "speed_limit": 62,
            "power_modes": ["automatic"],
            "power_sources": ["ac"],
        }
    }
    mute = MacProbe(lambda *command: "").read(set(), False)
    assert MacProbe.summary([mute])["mac"]["throttled"] is None
    assert MacProbe.summary([])["mac"]["power_modes"] == []


SETTINGS_OF_THE_GUARD = {
    "idle_s": 0.05,
    "max_foreign_cpu": 1000,
    "max_wait_s": 0.3,
    "sample_s": 0.02,
    "max_busy_fraction": 0.2,
}


def test_the_guard_of_a_mac_waits_rejects_and_logs(mac, monkeypatch):
    monkeypatch.setattr(cpu, "_read_by_psutil", lambda pids: {})
    found = guard.probes(SETTINGS_OF_THE_GUARD, "metal")
    assert [probe.name for probe in found] == ["cpu", "mac"]
    found[1].period_s = 0.0
    said = []
    with guard.Guard(SETTINGS_OF_THE_GUARD, found, said.append) as watching:
        assert not watching.gate("r00-a").waited_out
        with watching.watch("r00-a") as quiet:
            time.sleep(0.1)
        mac.answers["pmset -g"] = LOW
        assert watching.gate("r00-b").waited_out
        with watching.watch("r00-b") as slowed:
            time.sleep(0.1)
    assert quiet.why is None and quiet.facts["mac"]["power_modes"] == ["automatic"]
    assert slowed.why.startswith("disturbed in") and "Low Power Mode is on" in slowed.why
    assert any("Low Power Mode is on" in line for line in said)
    one, two = [line for line in watching.lines if line["event"] == "watch"]
    assert (one["rejected"], two["rejected"]) == (False, True)
    assert two["mac"]["power_modes"] == ["low"] and two["mac"]["pressure"] == "nominal"
    json.dumps(watching.lines)


def test_other_systems_have_no_probe_of_a_mac():
    assert [probe.name for probe in guard.probes({}, "cpu")] == ["cpu"]


def table(mac, **used):
    rows = {"ours": (500, 1, 0.0), "other": (400, 1, 0.0), "clang": (600, 1, 0.0)}
    mac.answers["ps"] = "".join(
        f"{rows[name][0]} {rows[name][1]} 0:{seconds:05.2f} /bin/{name}\n"
        for name, seconds in used.items()
    )


def test_on_a_mac_the_total_says_how_much_and_ps_says_who(mac, monkeypatch):
    now, busy = [0.0], [0.0]
    monkeypatch.setattr(cpu, "_read_by_psutil", lambda pids: {})
    table(mac, ours=0, other=0)
    probe = cpu.CpuProbe(0.25, total=lambda: cpu.Total(busy[0], 0.0, now[0]), clock=lambda: now[0])
    # Short processes have come and gone: ps has not seen them, the total has.
    now[0], busy[0] = 1.0, 0.9
    table(mac, ours=0, other=0.4)
    reading = probe.read({500}, False)
    assert reading.why == "foreign CPU use" and reading.foreign_cpu == pytest.approx(0.9)
    assert reading.who == "other"
    # Quiet again: nobody is asked.
    now[0], asked = 2.0, len(mac.asked)
    assert probe.read({500}, False).why is None and len(mac.asked) == asked
    now[0] = 3.0
    table(mac, ours=0, other=0.4, clang=0)
    assert probe.read({500}, True).why == "compiling: clang"


def test_on_a_mac_what_our_commands_used_is_ours_after_they_ended(mac):
    """psutil says there nothing of children that were waited for; the kernel says it of ours."""
    own = {os.getpid()}
    before = cpu.read_processes(own)
    spin = "import time\nend = time.process_time() + 0.3\nwhile time.process_time() < end: pass"
    child = subprocess.Popen([sys.executable, "-c", spin])
    time.sleep(0.15)
    assert child.pid in {pid for pid, _ in cpu.read_processes(own)}
    child.wait()
    assert cpu.consumed(before, cpu.read_processes(own)) >= 0.29


# Processes, without what only Linux has.


def test_processes_are_waited_for_without_pidfd_and_waitid(monkeypatch):
    for name in ("pidfd_open", "waitid"):
        monkeypatch.delattr(os, name, raising=False)
    env = dict(os.environ)
    good = process.run(["sh", "-c", "echo hello; exit 3"], env, 60)
    assert (good.status, good.timed_out, good.stdout) == (3, False, "hello\n")
    assert good.peak_memory > 0
    late = process.run(["sleep", "60"], env, 0.1)
    assert late.timed_out and late.status == 137 and late.seconds < 50
    killed = process.run(["sh", "-c", "kill -9 $$"], env, 60)
    assert (killed.status, killed.timed_out) == (137, False)


# The doctor.


def test_the_doctor_says_what_the_guard_will_reject(mac):
    def finding():
        return next(one for one in doctor_host.quiet() if one.what == "mac")

    assert finding().found == "thermal pressure nominal, power mode automatic, on ac"
    assert finding().todo == ""
    mac.answers["pmset -g"] = LOW
    assert "Low Power Mode is on" in finding().todo and "runs are rejected" in finding().todo


def test_the_doctor_of_a_mac_asks_for_xcode_and_clang(mac, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert doctor_host.backend() == "metal"
    found = {finding.what: finding for finding in package.doctor(root=tmp_path)}
    assert found["xctrace"].ok and "need Xcode" in found["xctrace"].todo
    assert found["system"].ok and "MLX for Metal" in found["system"].found
    missing = next(iter(doctor_host.compiler()))
    assert "no clang++" in missing.found and missing.todo == "xcode-select --install"
    script = tmp_path / "xcrun"
    script.write_text("#!/bin/sh\necho xctrace version 26.0\n")
    script.chmod(0o755)
    found = {finding.what: finding for finding in package.doctor(root=tmp_path)}
    assert found["xctrace"].found == "xctrace version 26.0" and not found["xctrace"].todo


def test_the_doctor_compares_with_what_the_gpu_may_use(mac, monkeypatch):
    free = SimpleNamespace(available=500 << 30)
    monkeypatch.setattr("psutil.virtual_memory", lambda: free)
    assert doctor_study._free_memory("metal") == (384 << 30, "the memory that the GPU may use")
    free.available = 3 << 30
    assert doctor_study._free_memory("metal") == (3 << 30, "memory")


def test_sizes_of_processes_are_bytes_on_a_mac(mac, monkeypatch):
    """macOS says bytes where Linux says KiB."""
    usage = SimpleNamespace(ru_maxrss=7 << 20)
    monkeypatch.setattr(runner.resource, "getrusage", lambda who: usage)
    assert runner._peak_memory() == 7 << 20
    ended = process.run([sys.executable, "-c", "pass"], dict(os.environ), 20)
    monkeypatch.setattr(sys, "platform", "linux")
    assert runner._peak_memory() == 7 << 30
    same = process.run([sys.executable, "-c", "pass"], dict(os.environ), 20)
    assert same.peak_memory / ended.peak_memory == pytest.approx(1024, rel=0.2)


def test_the_pages_snippets_run(mac, root, monkeypatch, capsys):
    """The host's facts and five seconds of guard, as docs/metal.md has them."""
    text = (root / "docs" / "metal.md").read_text()
    facts, watch, _ = (
        textwrap.dedent(code) for code in re.findall(r"<<'E'\n(.*?)\n +E\n", text, re.DOTALL)
    )
    exec(compile(facts, "docs/metal.md", "exec"), {})
    printed = json.loads(capsys.readouterr().out)
    assert (
        printed["record"]["cpu"] == "Apple M3 Ultra" and printed["now"]["power"]["source"] == "ac"
    )
    sleep = time.sleep
    monkeypatch.setattr(time, "sleep", lambda seconds: sleep(seconds / 20))
    monkeypatch.setattr(cpu, "_read_by_psutil", lambda pids: {})
    monkeypatch.setitem(guard.DEFAULTS, "max_foreign_cpu", 1000)
    exec(compile(watch, "docs/metal.md", "exec"), {})
    line = json.loads(capsys.readouterr().out)
    assert line["event"] == "watch" and line["mac"]["pressure"] == "nominal"
    assert line["rejected"] is False and "mean_foreign_cpu" in line
