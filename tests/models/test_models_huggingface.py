"""Hugging Face models, cut: loss and every gradient equal the untouched model's to the bit."""

from __future__ import annotations

import copy
import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from models_reference import assert_close, assert_same_bits, loss_and_gradients
from torch import Tensor, nn

import vpipe
from vpipe.errors import UserError
from vpipe.models.model import Model, build

transformers = pytest.importorskip("transformers")

from huggingface_cases import CASES, original, random_batch  # noqa: E402

from vpipe.models import huggingface as hf  # noqa: E402
from vpipe.models.huggingface.part import hub_name  # noqa: E402

QUICK = ("gpt2", "llama", "mixtral", "vit")


def families(names: Any = CASES) -> list[Any]:
    return [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in names]


def task_of(model: Model) -> Any:
    part = model.layers[0].build()
    return part.frame.task


def their_loss_and_gradients(reference: nn.Module, theirs: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
    reference.zero_grad()
    loss = reference(**theirs).loss
    loss.backward()
    named = reference.named_parameters(remove_duplicate=False)
    return loss.detach(), {key: p.grad for key, p in named if p.grad is not None}


def compare(model: Model, modules: list[nn.Module], reference: nn.Module) -> None:
    """Loss and gradients of our layers equal those of the library's forward and backward, to the bit; only the order
    in which three and more owners of a tied weight are added is not the library's."""
    inputs, targets, theirs = random_batch(modules[0].frame.task, reference)
    expected, gradients = their_loss_and_gradients(reference, theirs)
    loss, ours = loss_and_gradients(model, modules, inputs, targets)
    assert torch.equal(loss, expected)
    mine = {hub_name(modules[layer].paths, name): gradient for (layer, name), gradient in ours.items()}
    many = {hub_name(modules[i].paths, n) for tied in model.tied if len(tied.owners) > 2 for i, n in tied.owners}
    exact = set(mine) - many
    assert_same_bits({key: mine[key] for key in exact}, {key: gradients[key] for key in exact})
    assert_close({key: mine[key] for key in mine}, {key: gradients[key] for key in mine}, 1e-6)
    values = dict(reference.named_parameters(remove_duplicate=False))
    missing = set(gradients) - set(mine)
    assert all(any(values[key] is values[other] for other in mine) for key in missing), missing


def trained_alike(name: str, model: Model, cut: nn.Module, reference: nn.Module, **how: Any) -> None:
    """Two steps in a pipeline against a plain loop of torch: same loss, same weights, to the bit."""
    for module in model.build():
        module.zero_grad()
    inputs, targets, theirs = random_batch(task_of(model), hf.architectures.inner_model(reference))
    pipe = vpipe.Pipeline(
        model.layers, model.loss, num_microbatches=1, optimizer=lambda p: torch.optim.SGD(p, lr=0.1), tied=model.tied,
        **how,
    )  # fmt: skip
    plain = torch.optim.SGD([p for p in reference.parameters() if p.requires_grad], lr=0.1)
    for _ in range(2):
        expected, _ = their_loss_and_gradients(reference, theirs)
        plain.step()
        loss = pipe.train_step(inputs, targets)
        assert loss == expected.item()
    assert_same_bits(dict(cut.named_parameters()), dict(reference.named_parameters()))


@pytest.mark.parametrize("name", families())
def test_a_cut_model_equals_the_untouched_one_and_trains_like_it(name: str) -> None:
    reference = original(name)
    before = {key: sorted(vars(module)) for key, module in reference.named_modules()}
    cut = copy.deepcopy(reference)
    model = hf.layers(cut)
    later = {owner for weight in model.tied for owner in weight.owners[1:]}
    seen = [
        id(parameter)
        for index, module in enumerate(model.build())
        for key, parameter in module.named_parameters()
        if (index, key) not in later
    ]
    assert sorted(seen) == sorted(id(parameter) for parameter in cut.parameters())
    assert model.num_parameters == sum(p.numel() for p in reference.parameters())
    compare(model, model.build(), reference)
    trained_alike(name, model, cut, original(name), schedule="1f1b", num_ranks=2)
    hooks = ("_output_capturing_hooks_installed",)  # the library puts it there in its own forward
    after = {key: [n for n in sorted(vars(module)) if n not in hooks] for key, module in cut.named_modules()}
    assert after == before


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["gpt2", "llama", "mistral", "qwen2", "gemma3_text", "bert", "deberta", "t5", "bart", "opt", "gptj", "gpt_neo"],
)
def test_eager_attention_too(name: str) -> None:
    reference = original(name, attn_implementation="eager")
    model = hf.layers(copy.deepcopy(reference))
    compare(model, model.build(), reference)


@pytest.mark.rotates(12)
@pytest.mark.parametrize("name", families())
def test_a_config_and_a_directory_give_the_same_model(name: str, tmp_path: Path) -> None:
    reference = original(name)
    reference.save_pretrained(tmp_path, max_shard_size="8KB" if name == "gpt2" else "1GB")
    assert (tmp_path / "model.safetensors.index.json").exists() == (name == "gpt2")
    model = pickle.loads(pickle.dumps(hf.from_directory(tmp_path)))  # noqa: S301
    compare(model, model.build(), reference)

    model = build("huggingface", {"config": CASES[name]}, seed=7)
    whole = model.build()
    elsewhere: Model = pickle.loads(pickle.dumps(model))  # noqa: S301
    last = elsewhere.layers[-1].build()
    assert_same_bits(dict(last.named_parameters()), dict(whole[-1].named_parameters()))
    for weight in model.tied:
        first, *others = [whole[layer].get_parameter(key) for layer, key in weight.owners]
        assert all(torch.equal(first, other) for other in others)
    fresh = original(name)
    state = {hub: part.state_dict()[key] for part in whole for key, hub in hf.hub_names(part).items()}
    loaded = fresh.load_state_dict(state, strict=False)
    named = dict(fresh.named_parameters(remove_duplicate=False))
    kept = {id(named[key]) for key in state if key in named}
    assert not loaded.unexpected_keys
    assert all(id(named[key]) in kept for key in loaded.missing_keys if key in named)
    compare(model, whole, fresh)


@pytest.mark.slow
def test_a_value_that_later_layers_add_reaches_them() -> None:
    """What the code makes between two blocks from results of earlier pieces: every piece that makes it reads them."""

    class SkippingForCausalLM(transformers.LlamaForCausalLM):
        def forward(self, input_ids: Any = None, labels: Any = None) -> Any:
            start = self.model.embed_tokens(input_ids) * 2
            made = start
            for layer in self.model.layers:
                angles = self.model.rotary_emb(made, torch.arange(made.shape[1])[None])
                made = layer(made, position_embeddings=angles) + start
            logits = self.lm_head(self.model.norm(made))
            loss = self.loss_function(logits, labels, self.config.vocab_size) if labels is not None else None
            return transformers.modeling_outputs.CausalLMOutput(loss=loss, logits=logits)

    torch.manual_seed(3)
    reference = SkippingForCausalLM(transformers.AutoConfig.for_model(**CASES["llama"])).train()
    model = hf.layers(copy.deepcopy(reference))
    assert sum("model.embed_tokens" in layer.reads for layer in model.layers) > 1
    inputs, targets, theirs = random_batch(task_of(model), reference)
    expected, gradients = their_loss_and_gradients(reference, theirs)
    modules = model.build()
    loss, found = loss_and_gradients(model, modules, inputs, targets)
    assert torch.equal(loss, expected)
    mine = {hub_name(modules[layer].paths, name): gradient for (layer, name), gradient in found.items()}
    summed = "model.embed_tokens.weight"  # every piece that reads it doubles it for itself: other brackets
    assert_same_bits(
        {k: v for k, v in mine.items() if k != summed}, {k: v for k, v in gradients.items() if k != summed}
    )
    assert_close(mine, gradients, 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "microbatches"), [("zb-h1", 1), ("interleaved", 2), ("gpipe", 2)])
@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_other_schedules(name: str, schedule: str, microbatches: int) -> None:
    """Untied models, with more units than one: the plain loop accumulates over the units."""
    reference = original(name)
    cut = copy.deepcopy(reference)
    model = hf.layers(cut)
    inputs, targets, theirs = random_batch(task_of(model), reference)
    pipe = vpipe.Pipeline(model.layers, model.loss, num_microbatches=microbatches, schedule=schedule, num_ranks=2,
                          optimizer=lambda p: torch.optim.AdamW(p, lr=0.01))  # fmt: skip
    plain = torch.optim.AdamW(reference.parameters(), lr=0.01)
    for _ in range(2):
        pipe.train_step(inputs, targets)
        plain.zero_grad()
        for unit in range(microbatches):
            rows = slice(unit * 4 // microbatches, (unit + 1) * 4 // microbatches)
            part = {key: value[rows] if isinstance(value, Tensor) else value for key, value in theirs.items()}
            (reference(**part).loss / microbatches).backward()
        plain.step()
    assert_same_bits(dict(cut.named_parameters()), dict(reference.named_parameters()))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "targets"), [("llama", ["q_proj", "v_proj"]), ("gpt2", ["c_attn"]), ("bert", ["query"])]
)
def test_lora_models_train(name: str, targets: list[str]) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=targets, lora_dropout=0.0, init_lora_weights=False)
    cut = peft.get_peft_model(original(name), config).train()
    reference = copy.deepcopy(cut)
    frozen = {key: value.clone() for key, value in cut.named_parameters() if not value.requires_grad}
    trained_alike(name, hf.layers(cut), cut, reference, schedule="1f1b", num_ranks=2)
    now = dict(cut.named_parameters())
    assert frozen
    assert all(torch.equal(now[key], value) for key, value in frozen.items())
    assert any("lora" in key for key in now)


def test_a_model_in_eval_mode_trains_in_eval_mode() -> None:
    """As ``from_pretrained`` gives it: containers draw no dropout of their own either."""
    reference = original("bart", dropout=0.5).eval()
    model = hf.layers(copy.deepcopy(reference), sequence_length=9)
    inputs, targets, _ = random_batch(task_of(model), reference)
    pipe = vpipe.Pipeline(model.layers, model.loss, num_ranks=2, num_microbatches=1, tied=model.tied)
    assert pipe.train_step(inputs, targets, update=False) == pipe.evaluate(inputs, targets)


@pytest.mark.slow
def test_an_example_gives_the_models_own_loss() -> None:
    """A head that no task of ours knows: the forward's own arguments, its own loss, other lengths than the example's."""
    torch.manual_seed(3)
    config = transformers.AutoConfig.for_model(**{**CASES["bert"], "num_labels": 3})
    reference = transformers.BertForSequenceClassification(config).train()
    tokens = torch.randint(3, 41, (4, 9))
    mask = torch.ones_like(tokens)
    mask[1, 6:] = 0
    batch = {"input_ids": tokens, "attention_mask": mask, "labels": torch.tensor([0, 2, 1, 1])}
    model = hf.layers(copy.deepcopy(reference), example=batch)
    shorter = {"input_ids": tokens[:3, :7], "attention_mask": mask[:3, :7], "labels": batch["labels"][:3]}
    for inputs in (batch, shorter):
        expected, _ = their_loss_and_gradients(reference, inputs)
        loss, _ = loss_and_gradients(model, model.build(), inputs, inputs["labels"])
        assert torch.equal(loss, expected)
    assert model.count(batch["labels"]) == 4


@pytest.mark.slow
def test_what_cannot_be_cut_is_refused_in_a_sentence() -> None:
    class DecidingForCausalLM(transformers.LlamaForCausalLM):
        def forward(self, input_ids: Any = None, **kwargs: Any) -> Any:
            made = self.model(input_ids, **kwargs).last_hidden_state
            made = made * 2 if made.sum() > 0 else made
            return transformers.modeling_outputs.CausalLMOutput(logits=self.lm_head(made))

    class RandomForCausalLM(transformers.LlamaForCausalLM):
        def forward(self, input_ids: Any = None, **kwargs: Any) -> Any:
            start = nn.functional.dropout(self.model.embed_tokens(input_ids), 0.5)
            made = self.model(inputs_embeds=start, **kwargs).last_hidden_state
            return transformers.modeling_outputs.CausalLMOutput(logits=self.lm_head(made + start))

    class FlatForCausalLM(transformers.LlamaPreTrainedModel):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.embed, self.head = nn.Embedding(41, 16), nn.Linear(16, 41)

        def forward(self, input_ids: Any = None) -> Any:
            return transformers.modeling_outputs.CausalLMOutput(logits=self.head(self.embed(input_ids)))

    config = transformers.AutoConfig.for_model(**CASES["llama"])
    for kind, words in ((DecidingForCausalLM, "looks at values that"), (RandomForCausalLM, "dropout, which is random")):
        with pytest.raises(UserError, match=words) as caught:
            hf.layers(kind(config).train())
        assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match="no list of blocks"):
        hf.layers(FlatForCausalLM(config))
    found = transformers.AutoConfig.for_model(**CASES["bert"])
    tokens = torch.ones(2, 5, dtype=torch.long)
    for kind, words in (
        (transformers.BertModel, "no head: take a class for the task, such as BertFor.* .config: architectures.$"),
        (transformers.BertForQuestionAnswering, "give its labels too, .*: start_positions, end_positions$"),
    ):
        with pytest.raises(UserError, match=words):
            hf.layers(kind(found), example={"input_ids": tokens, "attention_mask": tokens})


@pytest.mark.slow
def test_new_weights_are_spread_as_the_librarys() -> None:
    for name in ("gpt2", "llama", "bert", "t5"):
        reference = dict(original(name).named_parameters())
        for part in build("huggingface", {"config": CASES[name]}).build():
            for key, parameter in part.named_parameters():
                if parameter.numel() > 200 and not key.endswith("bias"):
                    expected = reference.get(hub_name(part.paths, key))
                    if expected is not None:
                        assert parameter.std().item() == pytest.approx(expected.std().item(), rel=0.25), (name, key)


@pytest.mark.slow
def test_only_the_owner_allocates() -> None:
    model = build("huggingface", {"config": {"model_type": "llama"}}, vocab_size=100)  # 7 billion parameters
    assert model.num_parameters > 6e9
    assert model.vocab_size == 100


@pytest.mark.slow
def test_bf16_keeps_the_angles_exact() -> None:
    block = build("huggingface", {"config": CASES["llama"], "dtype": "bfloat16"}).layers[1].build()
    assert {p.dtype for p in block.parameters()} == {torch.bfloat16}
    assert block.rotary_emb.inv_freq.dtype == torch.float32


@pytest.mark.slow
def test_errors_are_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CASES["gpt2"]))
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text("{")
    cases: list[tuple[dict[str, Any], str]] = [
        ({"config": {"model_type": "lama"}}, "model_type 'lama' is not .*did you mean"),
        ({"config": {"model_type": "gpt2", "n_layr": 2}}, r"model\.config\.n_layr is not .*did you mean 'n_layer'"),
        ({"config": str(tmp_path / "nowhere")}, "nowhere does not exist"),
        ({"config": str(broken)}, "is not JSON"),
        ({"directory": str(tmp_path)}, r"has no model\.safetensors"),
        ({"config": CASES["gpt2"], "dtype": "int8"}, "not a floating type"),
        ({"config": CASES["gpt2"], "sequence_length": 99}, "99 but the gpt2 config has 32 positions"),
        ({"config": {**CASES["bart"], "encoder_layerdrop": 0.1}}, "set encoder_layerdrop to 0"),
        ({}, r"model\.config is missing"),
    ]
    for section, words in cases:
        with pytest.raises(UserError, match=words) as caught:
            build("huggingface", section)
        assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match="has 50 tokens but the gpt2 config has vocab_size 41"):
        build("huggingface", {"config": CASES["gpt2"]}, vocab_size=50)


@pytest.mark.slow
def test_a_checkpoint_of_another_model_is_named(tmp_path: Path) -> None:
    original("gpt2").save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**CASES["gpt2"], "n_layer": 4}))
    with pytest.raises(UserError, match=r"has no tensor 'transformer\.h\.3\.ln_1\.weight'"):
        hf.from_directory(tmp_path).build()
    (tmp_path / "config.json").write_text(json.dumps({**CASES["gpt2"], "n_positions": 16}))
    with pytest.raises(UserError, match=r"shape \(32, 16\) but config\.json asks for \(16, 16\)"):
        hf.from_directory(tmp_path).build()
    (tmp_path / "model.safetensors").write_bytes(b"not a file of tensors")
    with pytest.raises(UserError, match="cannot be read"):
        hf.from_directory(tmp_path)


@pytest.mark.slow
def test_transformers_is_imported_only_when_asked_for() -> None:
    code = "import sys, vpipe.models.model as c, vpipe.models.huggingface; c.build('gpt', vocab_size=9); "
    done = subprocess.run([sys.executable, "-c", code + "assert 'transformers' not in sys.modules"], check=False)
    assert done.returncode == 0
