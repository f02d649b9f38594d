"""What this rank's GPU draws. NVML answers through the package nvidia-ml-py; without it power is not told."""

from __future__ import annotations

import math
import threading
import time

import torch

from train.device import Device

EVERY_S = 1.0
"""NVML's figure is itself the mean of the last second (Ampere and later: nvmlDeviceGetPowerUsage)."""


class PowerMeter:
    """Reads the power once a second in a thread, as an answer can take milliseconds."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.read: list[float] = []
        self.last = math.nan
        if device.kind == "cuda":
            threading.Thread(target=self._work, name="power", daemon=True).start()

    def watts(self) -> float:
        """Return the mean since the last call, or what was read last; nan where nothing could be read."""
        taken, self.read = self.read, []
        if taken:
            self.last = sum(taken) / len(taken)
        return self.last

    def _work(self) -> None:
        while True:
            try:
                self.read.append(torch.cuda.power_draw(self.device.name) / 1000)
            except Exception:  # noqa: BLE001 -- no nvidia-ml-py, a driver that does not say: power is not told
                return
            time.sleep(EVERY_S)
