"""What is trained, on what, and how: OurGPipe's sections ``model``, ``dataset`` and ``training``, with its defaults.

The text under each field is its documentation: ``docs/config.md``, the JSON schema and the comments of
``vpipe train --print-config`` are made from it.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from vpipe.config.base import Count, FloatList, Interval, LayerCount, PlainName, Section, Size, Text, worded


class ModelConfig(Section):
    """What is trained."""

    name: PlainName
    """Which model: gpt, gpt2, llama, bert, translation, cpm-medium, cpm-large, huggingface, emulated, or a registered
    one."""
    hidden_size: Size | None = worded(None, "a whole number, at least 1, or null")
    """Width of a layer's output; null: the model's own (512 of gpt, 1024 of bert, 2560 of cpm-large)."""
    num_layers: LayerCount | None = worded(None, "a whole number, at least 1, at most 16384, or null")
    """Number of transformer layers (per side, for an encoder-decoder); null: the model's own."""
    num_heads: Size | None = worded(None, "a whole number, at least 1, or null")
    """Attention heads per layer; null: the model's own."""
    sequence_length: Size = 128
    """Tokens per sequence; longer documents are cut."""
    vocab_size: Annotated[int, Field(ge=-1, le=2**26)] = worded(
        -1, "-1 (ask the data set) or a whole number, at least 1"
    )
    """Number of token ids; -1 asks the data set."""
    config: Text | dict[str, Any] | None = worded(None, "a path, a mapping or null")
    """For name: huggingface. The model's configuration: a directory or JSON file, or its keys written here (model_type
    and sizes). Nothing is downloaded."""
    directory: Text | None = worded(None, "a path or null")
    """For name: huggingface. Directory with config.json and safetensors to start from; null: random weights."""
    split_head: bool | Literal["auto"] = False
    """Cut the projection onto the vocabulary into a shard for each rank: of models whose head outweighs several layers.
    Needs two stages a rank (zb-v, interleaved) to balance; auto: where the ranks then work more alike."""
    compile: bool = False
    """Compile each layer with torch.compile, on the rank that owns it; not with schedules that split the backward."""
    extra: dict[str, Any] = Field(default_factory=dict)
    """Options of this model alone. gpt: head_size, ff_low_rank, dropout; llama: num_kv_heads, intermediate_size,
    rms_norm_eps, rope_theta."""


class DatasetConfig(Section):
    """What it is trained on."""

    name: PlainName
    """Which data set: code_search_net, bert, translation, text, chid, synthetic, or a registered one."""
    path: Text | None = worded(None, "a path or null")
    """File or directory of the data, relative to this file; null lets the data set say where it looks."""
    batch_size: Count = 64
    """Sequences per iteration and data-parallel replica; cut into training.num_microbatches units."""
    max_tokens: Count | None = worded(None, "a whole number, at least 1, or null")
    """Batches of about this many tokens instead of batch_size sequences, for data whose sequences differ in length."""
    num_workers: Annotated[int, Field(ge=0, le=256)] = 0
    """Background workers that prepare batches ahead; 0 prepares them in the training loop."""
    test_size: Annotated[float, Field(ge=0, lt=1)] = 0.1
    """Share of the data that is held out for evaluation where the data set has no split of its own."""
    split_seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Decides which examples are held out; training.seed does not."""
    read_by: Literal["each", "one"] = "each"
    """Who reads: each rank that needs the data, by itself (their units are compared); or one, which sends them to the
    others: for data that two processes do not read alike."""
    may_differ: bool = False
    """Whether a run may go on from a checkpoint that was trained on other data."""
    extra: dict[str, Any] = Field(default_factory=dict)
    """Options of this data set alone, such as tokenizer or language."""


class TrainingConfig(Section):
    """How it is trained. One iteration is one batch: num_microbatches units; an update follows gradient_accumulation
    iterations (synchronous schedules), or as many units as the options of an asynchronous one say."""

    learning_rate: Annotated[float, Field(gt=0, le=1e6)] = 1e-4
    """Peak learning rate."""
    epochs: Count = 2
    """Passes over the training data."""
    num_microbatches: Count = 4
    """Units into which one batch is cut; each travels the pipeline by itself."""
    gradient_accumulation: Count = 1
    """Iterations whose gradients are averaged before one update."""
    max_iterations: Interval = worded(-1, "-1 (no limit) or a whole number, at least 1")
    """Iterations of the whole run, over all epochs; -1 runs all epochs to their end."""
    profile_iteration: Interval = worded(-1, "-1 (never) or a whole number, at least 0")
    """Iteration (counted from 0) that is recorded with torch.profiler into profiler_<scheduler>/rank<N>; -1 none."""
    exit_after_profile: bool = False
    """End the run after the profiled iteration."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Decides initial weights, dropout and the order of the data."""
    optimizer: Text = worded("adam", "sgd, adam, adamw, adafactor, lamb, lars, or a registered one")
    """Which optimizer updates the weights: sgd, adam, adamw, adafactor, lamb (as its paper; optimizer_options:
    {as_apex: true} as apex' FusedLAMB), lars, or one that a plugin registers."""
    optimizer_options: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the optimizer by their names, such as {betas: [0.9, 0.95]} or, of sgd, {momentum: 0.9}; a registered
    one gets these and lr. The rate itself is learning_rate."""
    parameter_groups: Annotated[tuple[dict[str, Any], ...], Field(strict=False, max_length=1000)] = worded(
        (), "a list of mappings, each with match, and options of the optimizer, learning_rate or frozen", strict=False
    )
    """What is otherwise for some parameters: match is a pattern of names (`<layer>.<name>`, or Hugging Face's own),
    several with |, or `vectors` for those of fewer than two dimensions; then options of the optimizer (weight_decay,
    …), learning_rate as a part of that of all, layer_decay (0.9: that of each layer is 0.9 of the next one's, the last
    has all), gradient_clipping (by the norm of this group alone), frozen: true, or frozen: 1000, until that many
    iterations are done. --print-config shows which parameters fall where."""
    ema: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Decay of a moving average of the weights, such as 0.999, made after each update: evaluations and `vpipe export`
    take it, checkpoints hold both; 0 keeps none."""
    weight_decay: Annotated[float, Field(ge=0, le=1e3)] = 0.0
    """Pull of the weights towards zero (decoupled in adamw and lamb)."""
    learning_rate_policy: Literal["constant", "linear", "polynomial", "cosine", "step", "inverse_sqrt"] = "constant"
    """How the learning rate moves after warm-up. Counted in updates, over epochs and resumes."""
    warmup: Annotated[float, Field(ge=0, le=1e9)] = worded(
        0.0, "a number, at least 0: below 1 a share of all updates, else updates"
    )
    """The learning rate rises from 0 during this part of the run: below 1 a share of all updates, else updates."""
    learning_rate_degree: Annotated[float, Field(gt=0, le=100)] = 0.5
    """For polynomial: the rate is learning_rate x (1 - progress)^degree, as BERT's."""
    learning_rate_steps: Annotated[FloatList, Field(max_length=1000)] = worded(
        (), "a list of rising numbers above 0: below 1 a share of all updates, else updates", strict=False
    )
    """For step: where the rate is multiplied by learning_rate_factor; below 1 a share of all updates, else updates."""
    learning_rate_factor: Annotated[float, Field(gt=0, le=1)] = 0.1
    """For step: what the rate is multiplied by at each of learning_rate_steps."""
    minimum_learning_rate: Annotated[float, Field(ge=0, le=1e6)] = 0.0
    """The learning rate never falls below this after warm-up."""
    gradient_clipping: Annotated[float, Field(ge=0, le=1e9)] = 0.0
    """Largest global norm of the gradient over all stages (per stage in asynchronous schedules); 0 does not clip."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Number format of the computation; weights are kept and updated in fp32."""
    loss_scale: Literal["dynamic"] | Annotated[float, Field(gt=0, le=2.0**40)] = worded(
        "dynamic", "dynamic, or a number above 0"
    )
    """For fp16: factor on the loss, agreed by all stages; dynamic halves it on overflow and raises it slowly."""
    on_nan: Literal["stop", "skip", "roll-back"] = "stop"
    """What follows when the loss or a gradient is not finite nan_limit times in a row (each such update is skipped):
    the run ends with exit code 65; it goes on; or it goes back to its latest checkpoint with half the learning rate,
    three times at most."""
    nan_limit: Count = 3
    """For on_nan: how many times."""
    patience: Annotated[int, Field(ge=0, le=2**31)] = 0
    """The run ends when the metric of checkpoint.best was not better so many times in a row; 0 never."""
    evaluation_interval: Interval = worded(0, "-1 (never), 0 (after each epoch) or a whole number of iterations")
    """Iterations between two evaluations on held-out data; 0 evaluates after each epoch, -1 never."""
    evaluation_batches: Interval = worded(16, "-1 (all) or a whole number, at least 1")
    """Batches of one evaluation; -1 takes all held-out data."""
