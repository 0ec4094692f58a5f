"""Hugging Face models, cut at their layer container without rewriting them.

The blocks, norms, embeddings and heads are the library's own modules; only the loop that called them is replaced,
because a pipeline is that loop. Three ways in:

    layers(model)                         an untouched model object that is already in memory
    from_config({"model_type": "gpt2"})   new weights; each rank builds the layers it owns
    from_directory("path/to/checkpoint")  weights of a local directory; each rank reads the tensors it owns

Nothing is ever downloaded, and no code of a checkpoint is run. ``transformers`` is imported when a model is asked
for: it takes seconds to load.

Words: docs/glossary.md.
"""

from __future__ import annotations

from vpipe.models.huggingface.entry import from_config, from_directory, huggingface, layers
from vpipe.models.huggingface.part import hub_names

__all__ = ["from_config", "from_directory", "hub_names", "huggingface", "layers"]
