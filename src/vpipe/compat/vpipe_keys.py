"""The keys of VPipe's experiment files: what became of each, and what each ``model_type`` stands for."""

from __future__ import annotations

from typing import Any

UNITS = 32
"""Units per iteration: the fixed number of a ``bsp`` update in VPipe, and how asynchronous runs are counted here."""
STEP_EPOCHS = 30
"""VPipe's ``step`` policy divided the rate by ten every thirty epochs."""
WARMUP = 0.01
"""What ``lr_warmup: true`` means: BERT's share of all updates."""

RENAMED = {
    "data_dir": "dataset.path",
    "distributed_backend": "parallel.backend",
    "epochs": "training.epochs",
    "learning_rate": "training.learning_rate",
    "log_directory": "observe.directory",
    "machines": "launch.machines",
    "weight_decay": "training.weight_decay",
    # What VPipe's scripts took from their command line or fixed in code:
    "hidden_size": "model.hidden_size",
    "max_iterations": "training.max_iterations",
    "num_heads": "model.num_heads",
    "num_layers": "model.num_layers",
    "optimizer": "training.optimizer",
    "seed": "training.seed",
    "sequence_length": "model.sequence_length",
    "vocab_size": "model.vocab_size",
}
READ = (
    "batch_size", "config_file", "container", "learning_rate_policy", "lr_warmup", "macrobatch", "model_type",
    "momentum", "no_input_pipelining", "num_microbatches", "partition", "print_frequency", "recompute", "sync_mode",
    "synthetic_data", "verbose_frequency",
)  # fmt: skip
MEANINGLESS = {
    "directory": "names code that vpipe never imports; model_type chooses the model",
    "module": "names code that vpipe never imports; model_type chooses the model",
    "compress_activations": "was read by nothing, and boundary tensors are not compressed here",
    "compress_in_gpu": "was read by nothing, and boundary tensors are not compressed here",
}
KEYS = (*RENAMED, *READ, *MEANINGLESS)

FAMILIES: dict[str, dict[str, Any]] = {
    "bert": {
        "model": {"name": "bert", "hidden_size": 1024, "num_layers": 24, "vocab_size": 30522},
        "dataset": {"name": "bert"},
        "training": {"optimizer": "lamb", "parameter_groups": [{"match": "vectors", "weight_decay": 0.0}]},
    },
    "translation": {
        "model": {"name": "translation", "hidden_size": 512, "num_layers": 6, "num_heads": 8},
        "dataset": {"name": "translation"},
        "training": {"optimizer": "adam", "optimizer_options": {"betas": [0.9, 0.98]}},
    },
    "gpt": {
        "model": {"name": "cpm-medium", "hidden_size": 1024, "num_layers": 24, "vocab_size": 30000},
        "dataset": {"name": "chid"},
        "training": {"optimizer": "adam"},
    },
}
"""What each ``model_type`` stands for. Sizes are those of the models that VPipe shipped."""
LARGE_GPT = {"name": "cpm-large", "hidden_size": 2560, "num_layers": 32, "num_heads": 32}
TIED = ("bert", "translation", "cpm-medium", "cpm-large")
"""Models whose head is their embedding, unless they are told otherwise."""
