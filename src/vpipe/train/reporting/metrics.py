"""What a run achieved, in OurGPipe's keys: time, tokens, throughput, MFU.

Warm-up and profiled iterations are left out. MFU is the model's FLOPs over the dense peak of the number format really
used; where the peak of a device is not known it is ``n/a``, not a guess.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vpipe.runtime.vendors import CPU, peak_flops


@dataclass
class Metrics:
    """Adds up iterations."""

    num_devices: int
    parameters: int
    flops_per_token: float
    precision: str
    warmup_iterations: int
    device: str = CPU
    _iterations: list[tuple[float, float, float, bool]] = field(default_factory=list)

    def add(self, seconds: float, tokens: float, samples: float, counts: bool = True) -> None:
        """One iteration; ``counts`` is false for a profiled one."""
        counts = counts and len(self._iterations) >= self.warmup_iterations
        self._iterations.append((seconds, tokens, samples, counts))

    def summary(self) -> dict[str, Any]:
        """OurGPipe's summary; rates are null where every iteration was left out."""
        effective = [(s, t, n) for s, t, n, counts in self._iterations if counts]
        seconds = sum(s for s, _, _ in effective)
        tokens, samples = sum(t for _, t, _ in effective), sum(n for _, _, n in effective)
        rate = tokens / seconds if seconds else None
        peak = peak_flops(self.device, self.precision)
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
            "mfu": rate * self.flops_per_token / (peak * self.num_devices) if peak and rate is not None else "n/a",
            "model_params": self.parameters,
            "flops_per_token": self.flops_per_token,
            "num_gpus": self.num_devices if self.device != CPU else 0,
            "device_name": self.device,
            "dtype": self.precision,
        }
