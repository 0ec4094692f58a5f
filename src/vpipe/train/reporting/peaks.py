"""What devices are called, and what they can do at most."""

from __future__ import annotations

import torch

CPU = "cpu"

PEAK_FLOPS: dict[str, dict[str, float]] = {
    name: dict(zip(("fp32", "bf16", "fp16", "tf32"), [peak * 1e12 for peak in peaks], strict=False))
    for names, *peaks in (
        ("A100/A800", 19.5, 312, 312, 156),
        ("H100/H200/GH200", 66.9, 989.4, 989.4, 494.7),
        ("H100 PCIe", 51.2, 756, 756, 378),
        ("H100 NVL/H200 NVL", 60, 835.5, 835.5, 417.5),
        ("H20", 44, 148, 148, 74),
        ("B200", 80, 2250, 2250, 1125),
        ("GB200", 80, 2500, 2500, 1250),
        ("T4", 8.1, 0, 65),
        ("V100", 15.7, 0, 125),
        ("A10", 31.2, 125, 125, 62.5),
        ("A40", 37.4, 149.7, 149.7, 74.8),
        ("RTX A6000", 38.7, 154.8, 154.8, 77.4),
        ("L4", 30.3, 121, 121, 60),
        ("L40S", 91.6, 362, 362, 183),
        ("RTX 3090", 35.6, 71, 71, 35.6),
        ("RTX 4090", 82.6, 165.2, 165.2, 82.6),
        ("MI250X", 47.9, 383, 383),
        ("MI300A", 122.6, 980.6, 980.6, 490.3),
        ("MI300X/MI325X", 163.4, 1307.4, 1307.4, 653.7),
    )
    for name in names.split("/")
}
"""Dense peaks from the vendors' data sheets, by a part of the device's name; 0 where a device has none. (tf32: fp32
where ``torch.set_float32_matmul_precision`` allows it.)"""


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
            peaks = PEAK_FLOPS[name]
            rounds = precision == "fp32" and torch.get_float32_matmul_precision() != "highest"
            return (peaks.get("tf32") if rounds else None) or peaks.get(precision) or None
    return None
