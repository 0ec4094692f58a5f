"""What torch says of the accelerators of this machine."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from vpipe.runtime.device import own_memory
from vpipe.train.reporting.peaks import device_name


def offered() -> dict[str, Any]:
    """The facts of the accelerators that torch finds, if it finds any."""
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if found is None:
        return {}
    first, number = torch.device(found.type, 0), torch.accelerator.device_count()
    memory = own_memory(first)
    backends = dist.Backend.default_device_backend_map
    vendor: Any = torch.cuda.nccl
    return {
        "kind": found.type,
        "number": number,
        "torch": torch.__version__,
        "vendor": ".".join(map(str, vendor.version())) if torch.version.cuda else "",
        "devices": f"{number} × {device_name(first)}",
        "memory": f"{memory / 2**30:.1f} GiB" if memory else "n/a",
        "backend": backends.get(found.type, "none"),
    }
