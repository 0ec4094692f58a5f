"""Which layers are kept, recomputed or swapped: the convention for ratios, stated once.

    stage of n layers   kept … kept | swapped: int(swap · n) | recomputed: int(recompute · n)

VPipe recomputes the last ``int(r · n)`` layers of a stage; what is swapped lies before them. A set of layer indices
says the same for any layers.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from vpipe.errors import UserError

Chosen = float | Sequence[float] | Collection[int]
"""A ratio for all stages, one for each stage, or a set of layers."""
Bounds = Sequence[tuple[int, int]]


def treated_layers(recompute: Chosen, swap: Chosen, bounds: Bounds) -> tuple[frozenset[int], frozenset[int]]:
    """The layers that are recomputed, and those that are swapped."""
    again = _chosen("recompute", recompute, bounds, [end for _, end in bounds])
    kept = [end - sum(layer in again for layer in range(begin, end)) for begin, end in bounds]
    out = _chosen("swap", swap, bounds, kept)
    if both := sorted(again & out):
        raise UserError(f"layer {both[0]} is both recomputed and swapped; choose one")
    return again, out


def _chosen(name: str, chosen: Chosen, bounds: Bounds, ends: Sequence[int]) -> frozenset[int]:
    """The layers of a set, or of each stage ``int(ratio * n)`` layers that end where ``ends`` says."""
    if isinstance(chosen, set | frozenset):
        return frozenset(int(layer) for layer in chosen)
    ratios = [float(chosen)] * len(bounds) if isinstance(chosen, int | float) else [float(ratio) for ratio in chosen]
    if len(ratios) != len(bounds):
        raise UserError(
            f"{name} has {len(ratios)} ratios, but there are {len(bounds)} stages; give one number, or one a stage"
        )
    found: set[int] = set()
    for stage, (ratio, (begin, end), last) in enumerate(zip(ratios, bounds, ends, strict=True)):
        if not 0 <= ratio <= 1:
            raise UserError(f"the {name} ratio of stage {stage} is {ratio}; it must lie between 0 and 1")
        count = int(ratio * (end - begin))
        if count > last - begin:
            raise UserError(
                f"stage {stage} has {end - begin} layers, of which {end - last} are recomputed and {count} swapped; "
                "the two ratios must not add up to more than 1"
            )
        found |= set(range(last - count, last))
    return frozenset(found)


def stages_with(layers: Collection[int], bounds: Bounds) -> frozenset[int]:
    """The stages that hold any of the layers."""
    return frozenset(stage for stage, (begin, end) in enumerate(bounds) if any(begin <= l < end for l in layers))
