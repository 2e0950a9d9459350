"""What this process uses of its machine, for the heartbeat."""

from __future__ import annotations

import contextlib
import importlib
import time
from typing import Any

import psutil

from ..types import GpuUsage, ResourceUsage

CPU_SECONDS = 0.1
"""Over a shorter time, a share of a processor says nothing."""


class ResourceProbe:
    """Samples CPU, memory and, when ``nvidia-ml-py`` is installed, every GPU."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._cpu_percent = self._process.cpu_percent()
        self._cpu_at = time.monotonic()
        self._memory_total = psutil.virtual_memory().total
        self._nvml, self._gpus = _open_gpus()

    def sample(self) -> ResourceUsage:
        """The usage since the last sample."""
        return ResourceUsage(
            cpu_percent=self._cpu(),
            memory_used_bytes=self._process.memory_info().rss,
            memory_total_bytes=self._memory_total,
            gpus=tuple(self._gpu(index) for index in range(len(self._gpus))),
        )

    def _cpu(self) -> float:
        now = time.monotonic()
        if now - self._cpu_at >= CPU_SECONDS:
            self._cpu_at = now
            self._cpu_percent = self._process.cpu_percent()
        return self._cpu_percent

    def _gpu(self, index: int) -> GpuUsage:
        nvml, handle = self._nvml, self._gpus[index]
        try:
            memory = nvml.nvmlDeviceGetMemoryInfo(handle)
            return GpuUsage(
                index,
                float(nvml.nvmlDeviceGetUtilizationRates(handle).gpu),
                int(memory.used),
                int(memory.total),
                float(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)),
            )
        except nvml.NVMLError:
            return GpuUsage(index)


def _open_gpus() -> tuple[Any, list[Any]]:
    with contextlib.suppress(ImportError):
        nvml = importlib.import_module("pynvml")
        try:
            nvml.nvmlInit()
            count = nvml.nvmlDeviceGetCount()
            return nvml, [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(count)]
        except nvml.NVMLError:
            pass
    return None, []
