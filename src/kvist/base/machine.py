"""What this machine has: processors and memory, read from the operating system. No torch."""

from __future__ import annotations

import os
from pathlib import Path

MOST_THREADS = 1024  # that kernels can be told to use


def processors() -> int:
    """Processors that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def available_memory() -> int | None:
    """Bytes that a new allocation can use without swapping, the control group's limit included; None when unknown."""
    found = [value for value in (_meminfo("MemAvailable"), _group_room()) if value is not None]
    return min(found) if found else None


def total_memory() -> int | None:
    """Bytes of memory of the machine, or of the control group when it is smaller; None when unknown."""
    found = [value for value in (_meminfo("MemTotal"), _group_limit()) if value is not None]
    return min(found) if found else None


def _meminfo(field: str) -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return _sysconf_pages(field)
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":")), None)


def _sysconf_pages(field: str) -> int | None:
    name = "SC_PHYS_PAGES" if field == "MemTotal" else "SC_AVPHYS_PAGES"
    try:
        return os.sysconf(name) * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return None


def _group_number(name: str) -> int | None:
    try:
        text = Path("/sys/fs/cgroup", name).read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _group_limit() -> int | None:
    return _group_number("memory.max")


def _group_room() -> int | None:
    limit, used = _group_limit(), _group_number("memory.current")
    if limit is None or used is None:
        return None
    # The page cache counts as used, but is given back before anything fails.
    reclaimable = 0
    try:
        for line in Path("/sys/fs/cgroup/memory.stat").read_text().splitlines():
            if line.startswith(("inactive_file ", "active_file ")):
                reclaimable += int(line.split()[1])
    except OSError:
        pass
    return max(0, limit - used + reclaimable)
