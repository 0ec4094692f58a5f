"""What devices are called and can do: the one file in which vendors and their products stand.

The rest of vpipe knows ``torch.accelerator`` alone (but for ``priorities.cuda``, which orders the streams of a GPU). A
device that is not in the table trains all the same; only its MFU is ``n/a``.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

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


def device_name(weights: Iterable[Tensor]) -> str:
    """What a rank computes on: where its weights are, whatever else the machine has."""
    device = next((tensor.device for tensor in weights), torch.device(CPU))
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
