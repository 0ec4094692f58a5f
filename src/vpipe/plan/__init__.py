"""From measured layer costs to a certified plan: partition × keep, recompute or swap × schedule.

    costs ──▶ (packing inside partition, both counting bytes by memory) ──▶ planner ──▶ plan.json

Nothing here imports torch except ``profile`` and ``transfer``, which measure.

Words: docs/glossary.md.
"""
