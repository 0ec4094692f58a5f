"""What an update costs on a processor: Adam's three ways, which of them have the bits of the plain loop, and the
copy of its weights that an asynchronous stage makes for a version."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
import common

WAYS: dict[str, dict[str, bool]] = {
    "Adam(ps)": {},
    "Adam(ps, foreach=True)": {"foreach": True},
    "Adam(ps, fused=True)": {"fused": True},
}


def table(result: dict[str, Any]) -> str:
    lines = [f"{result['parameters']} parameters, {result['numbers']} numbers; ms of processor (median, quartiles)"]
    for name, row in result["rows"].items():
        facts, equal = row["ms"], row.get("equal")
        said = "" if equal is None else "   bits of the plain loop" if equal else "   other bits than the plain loop"
        lines.append(f"{name:40}{facts['median']:7.3f} ({facts['low']:.3f}–{facts['high']:.3f}){said}")
    return "\n".join(lines)


def main() -> None:
    arguments = common.options(__doc__ or "")
    import torch

    from vpipe.models.model import build
    from vpipe.runtime.assembly import keep_freed_memory

    torch.set_num_threads(1)
    keep_freed_memory()  # as every pipeline does
    repeats = 10 if arguments.quick else 100
    section = {"hidden_size": 128, "num_layers": 6, "num_heads": 4, "sequence_length": 64, "vocab_size": 512}
    weights = [p for layer in build("gpt", section).build()[:4] for p in layer.parameters()]

    def timed(call: Callable[[], Any]) -> dict[str, float]:
        found = []
        for _ in range(repeats):
            begin = time.process_time()
            call()
            found.append((time.process_time() - begin) * 1e3)
        return common.summary(found)

    def trained(way: dict[str, bool]) -> tuple[list[Any], Any]:
        """The weights after five updates with the same gradients, and the optimizer."""
        generator = torch.Generator().manual_seed(0)
        mine = [p.detach().clone().requires_grad_() for p in weights]
        optimizer = torch.optim.Adam(mine, lr=1e-3, **way)  # type: ignore[arg-type]
        for _ in range(5):
            for p in mine:
                p.grad = torch.randn(p.shape, generator=generator)
            optimizer.step()
        return [p.detach().clone() for p in mine], optimizer

    plain = trained({})[0]
    rows: dict[str, Any] = {}
    for name, way in WAYS.items():
        found, optimizer = trained(way)
        equal = all(torch.equal(a, b) for a, b in zip(plain, found, strict=True))
        rows[name] = {"ms": timed(optimizer.step), "equal": equal}
    rows["a version, parameter by parameter"] = {"ms": timed(lambda: [p.detach().clone() for p in weights])}
    result = {
        "question": "updates",
        "parameters": len(weights),
        "numbers": sum(p.numel() for p in weights),
        "rows": rows,
    }
    common.finish(arguments, result, table)


if __name__ == "__main__":
    main()
