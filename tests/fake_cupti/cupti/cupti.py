"""Two launches for each 1000 ns between flushes, at most 40; each with its API call and kernel."""

import time
from enum import IntEnum
from types import SimpleNamespace


class ActivityKind(IntEnum):
    MEMCPY, MEMSET, KERNEL, DRIVER, RUNTIME = 1, 2, 3, 4, 5
    CONCURRENT_KERNEL, MARKER, OVERHEAD = 10, 12, 17


class RuntimeApiTraceCbid(IntEnum):
    cudaMalloc_v3020 = 20
    cudaLaunchKernelExC_v11060 = 430
    cudaGraphLaunch_v10000 = 311


class DriverApiTraceCbid(IntEnum):
    cuLaunchKernelEx = 652


class CallbackDomain(IntEnum):
    DRIVER_API, RUNTIME_API = 1, 2


class ActivityOverheadKind(IntEnum):
    CUPTI_BUFFER_FLUSH = 65536


enabled: set[int] = set()
disabled: set[tuple[str, int]] = set()
_completed = None
_last = 0
_number = 0


def get_timestamp():
    return time.perf_counter_ns()


def activity_register_callbacks(requested, completed):
    global _completed
    size, most = requested()
    assert size >= 1 << 20 and most == 0
    _completed = completed


def activity_enable(kind):
    enabled.add(int(kind))


def activity_disable(kind):
    enabled.remove(int(kind))


def activity_enable_runtime_api(number, on):
    (disabled.discard if on else disabled.add)(("runtime", number))


def activity_enable_driver_api(number, on):
    (disabled.discard if on else disabled.add)(("driver", number))


def activity_get_num_dropped_records(context, stream, address):
    pass


def get_callback_name(domain, number):
    table = RuntimeApiTraceCbid if domain == CallbackDomain.RUNTIME_API else DriverApiTraceCbid
    return table(number).name


def activity_flush_all(flag):
    global _last, _number
    now, records = get_timestamp(), []
    for i in range(min(40, (now - _last) // 1000)):
        _number += 1
        at = now - 1000 * (40 - i)
        launch = RuntimeApiTraceCbid.cudaLaunchKernelExC_v11060
        other = RuntimeApiTraceCbid.cudaMalloc_v3020
        for call in (launch, other):
            if ActivityKind.RUNTIME in enabled and ("runtime", call) not in disabled:
                records.append(
                    SimpleNamespace(
                        kind=5, cbid=call, start=at, end=at + 300, thread_id=1,
                        correlation_id=_number,
                    )
                )  # fmt: skip
        records.append(
            SimpleNamespace(
                kind=10, name="_Z6kernelv", start=at + 400, end=at + 900, stream_id=7,
                grid_x=8, grid_y=1, grid_z=1, block_x=32, block_y=8, block_z=1,
                graph_id=0, graph_node_id=0, correlation_id=_number,
            )
        )  # fmt: skip
    _last = now
    _completed(records)
