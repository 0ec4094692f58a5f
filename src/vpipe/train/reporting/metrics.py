"""What a run achieved, in OurGPipe's keys: time, tokens, throughput, MFU.

Warm-up and profiled iterations are left out. MFU is the model's FLOPs over the dense peak of the number format really
used; where the peak of a device is not known it is ``n/a``, not a guess.

This is the one file in which vendors and their products stand. The rest of vpipe knows ``torch.accelerator`` alone (but
for ``priorities.cuda``, which orders the streams of a GPU); a device that is not in the table trains all the same.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

CPU = "cpu"

PEAK_FLOPS: dict[str, dict[str, float]] = {
    "A100": {"fp32": 19.5e12, "bf16": 312e12, "fp16": 312e12},
    "A800": {"fp32": 19.5e12, "bf16": 312e12, "fp16": 312e12},
    "H100": {"fp32": 66.9e12, "bf16": 989.4e12, "fp16": 989.4e12},
    "H200": {"fp32": 66.9e12, "bf16": 989.4e12, "fp16": 989.4e12},
    "V100": {"fp32": 15.7e12, "fp16": 125e12},
    "T4": {"fp32": 8.1e12, "fp16": 65e12},
    "A10": {"fp32": 31.2e12, "bf16": 125e12, "fp16": 125e12},
    "L4": {"fp32": 30.3e12, "bf16": 121e12, "fp16": 121e12},
    "L40S": {"fp32": 91.6e12, "bf16": 362e12, "fp16": 362e12},
    "RTX 3090": {"fp32": 35.6e12, "bf16": 71e12, "fp16": 71e12},
    "RTX 4090": {"fp32": 82.6e12, "bf16": 165.2e12, "fp16": 165.2e12},
    "MI250X": {"fp32": 47.9e12, "bf16": 383e12, "fp16": 383e12},
    "MI300X": {"fp32": 163.4e12, "bf16": 1307.4e12, "fp16": 1307.4e12},
}
"""Dense peaks from the vendors' data sheets, by a part of the device's name."""


def device_name(device: torch.device) -> str:
    """What a device is called by its vendor."""
    if device.type == CPU:
        return CPU
    name = getattr(torch.get_device_module(device), "get_device_name", None)
    return str(name(device)) if name is not None else device.type


def peak_flops(device: str, precision: str) -> float | None:
    """The dense peak of one device, or ``None`` where it is not known."""
    words = device.replace("-", " ").split()
    for name in sorted(PEAK_FLOPS, key=len, reverse=True):
        if name in words or (" " in name and name in device):
            return PEAK_FLOPS[name].get(precision)
    return None


@dataclass
class Metrics:
    """Adds up iterations."""

    num_devices: int
    precision: str
    warmup_iterations: int
    _iterations: list[tuple[float, float, float, bool]] = field(default_factory=list)

    def add(self, seconds: float, tokens: float, samples: float, counts: bool = True) -> None:
        """One iteration; ``counts`` is false for a profiled one."""
        counts = counts and len(self._iterations) >= self.warmup_iterations
        self._iterations.append((seconds, tokens, samples, counts))

    def summary(self, parameters: int, flops_per_token: float, device: str = CPU) -> dict[str, Any]:
        """OurGPipe's summary of a model on devices of this name; rates are null where every iteration was left out."""
        effective = [(s, t, n) for s, t, n, counts in self._iterations if counts]
        seconds = sum(s for s, _, _ in effective)
        tokens, samples = sum(t for _, t, _ in effective), sum(n for _, _, n in effective)
        rate = tokens / seconds if seconds else None
        peak = peak_flops(device, self.precision)
        return {
            "total_time_seconds": sum(s for s, *_ in self._iterations),
            "effective_time_seconds": seconds,
            "time_per_iteration_seconds": seconds / len(effective) if effective else None,
            "total_iterations": len(self._iterations),
            "effective_iterations": len(effective),
            "warmup_iterations": min(self.warmup_iterations, len(self._iterations)),
            "total_tokens": round(sum(t for _, t, *_ in self._iterations)),
            "effective_tokens": round(tokens),
            "throughput_tokens_per_second": rate,
            "samples_per_second": samples / seconds if seconds else None,
            "mfu": rate * flops_per_token / (peak * self.num_devices) if peak and rate is not None else "n/a",
            "model_params": parameters,
            "flops_per_token": flops_per_token,
            "num_gpus": self.num_devices if device != CPU else 0,
            "device_name": device,
            "dtype": self.precision,
        }
