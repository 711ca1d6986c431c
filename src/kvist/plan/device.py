"""Accelerators and CPUs with their memory and bandwidth, and a measurement of the machine at hand."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from kvist.base.errors import UsageError
from kvist.base.machine import processors, total_memory

MIB = 2**20


@dataclass(frozen=True, slots=True)
class Device:
    """``memory`` bytes that an application can get, ``bandwidth`` bytes per second, and where both come from."""

    name: str
    memory: int | None
    bandwidth: float | None
    source: str
    status: str = "assumed"


_NVIDIA = "nominal vendor figure, not re-checked; memory as the driver shows it"
_VENDOR = "nominal vendor figure, not re-checked"
# (name, memory in MiB, bandwidth in GB/s, source). CPUs have the memory that their owner put in.
_TABLE: tuple[tuple[str, int | None, float, str], ...] = (
    ("t4", 15360, 320, _NVIDIA),
    ("v100-16gb", 16384, 900, _NVIDIA),
    ("v100-32gb", 32768, 900, _NVIDIA),
    ("a10", 23028, 600, _NVIDIA),
    ("l4", 23034, 300, _NVIDIA),
    ("l40s", 46068, 864, _NVIDIA),
    ("a6000", 49140, 768, _NVIDIA),
    ("rtx-3090", 24576, 936, _NVIDIA),
    ("rtx-4090", 24564, 1008, _NVIDIA),
    ("rtx-5090", 32607, 1792, _NVIDIA),
    ("a100-40gb", 40960, 1555, _NVIDIA),
    ("a100-80gb", 81920, 2039, _NVIDIA),
    ("h100-pcie", 81559, 2039, _NVIDIA),
    ("h100", 81559, 3350, _NVIDIA),
    ("h200", 143771, 4800, _NVIDIA),
    ("b200", 183359, 8000, _NVIDIA),
    ("mi250x", 131072, 3277, _VENDOR),
    ("mi300x", 196592, 5300, _VENDOR),
    ("mi325x", 262144, 6000, _VENDOR),
    ("mi355x", 294912, 8000, _VENDOR),
    ("gaudi3", 131072, 3700, _VENDOR),
    ("tpu-v5e", 16384, 819, _VENDOR),
    ("tpu-v5p", 97280, 2765, _VENDOR),
    ("m2-ultra", 196608, 800, _VENDOR),
    ("m3-max", 131072, 400, _VENDOR),
    ("m4-max", 131072, 546, _VENDOR),
    ("epyc-9654", None, 460.8, "12 channels of DDR5-4800"),
    ("epyc-9755", None, 576.0, "12 channels of DDR5-6000"),
    ("xeon-8592", None, 358.4, "8 channels of DDR5-5600"),
    ("xeon-6980p", None, 844.8, "12 channels of MRDIMM-8800"),
    ("ryzen-7950x", None, 83.2, "2 channels of DDR5-5200"),
)
DEVICES = {
    name: Device(name, None if memory is None else memory * MIB, rate * 1e9, source)
    for name, memory, rate, source in _TABLE
}


def find_device(name: str) -> Device:
    """The device called ``name``; ``this`` measures the machine. UsageError lists what is known."""
    lower = name.lower().replace("_", "-").replace(" ", "-")
    if lower == "this":
        return measure()
    device = DEVICES.get(lower)
    if device is None:
        raise UsageError(f"unknown device {name!r}: use this, or one of {', '.join(DEVICES)}")
    return device


def last_level_cache() -> int:
    """Bytes of the largest cache that the operating system names; 32 MiB when it names none."""
    sizes = []
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text().strip()
        if text.endswith("K") and text[:-1].isdigit():
            sizes.append(int(text[:-1]) * 1024)
    return max(sizes, default=32 * MIB)


def measure() -> Device:
    """The machine at hand: its memory, and the rate at which its processors together read a set beyond their cache."""
    import numpy as np

    threads = processors()
    size = min(max(4 * last_level_cache(), 256 * MIB), 2**30)
    parts = [np.ones(size // 4 // threads, np.float32) for _ in range(threads)]
    best = float("inf")
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(8):
            begin = time.perf_counter()
            # A dot product with itself: one read of each element, and arithmetic that keeps up with memory.
            list(pool.map(np.dot, parts, parts))
            best = min(best, time.perf_counter() - begin)
    rate = sum(part.nbytes for part in parts) / best
    told = f"{threads} threads read {size / MIB:.0f} MiB, best of 8"
    return Device("this", total_memory(), rate, told, "measured")
