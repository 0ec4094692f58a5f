"""From the config's words to what enforces them: ``parallel.priority`` and ``use_orion_scheduler``, on a device.

use_orion_scheduler   device   backend
true                  any      OrionClients (or an error: Orion is never replaced by a silent nothing)
false                 cuda     StreamPriorities
false                 cpu      Turnstile: the threads of this process take turns in the policy's order
"""

from __future__ import annotations

import torch

from vpipe.compat.priorities.order import Backend, Turnstile, policy
from vpipe.compat.priorities.orion import OrionClients


def priority_backend(
    priority: str, *, use_orion: bool = False, num_microbatches: int = 1, device: torch.device | None = None
) -> Backend:
    """What a rank's worker threads ask before each action; ``close`` it at the end of the run."""
    chosen = policy(priority)
    if use_orion:
        return OrionClients(chosen, num_microbatches, (device.index or 0) if device is not None else 0)
    if device is not None and device.type == "cuda":
        from vpipe.compat.priorities.cuda import StreamPriorities

        return StreamPriorities(chosen, num_microbatches, device)
    return Turnstile(chosen)
