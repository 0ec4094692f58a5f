"""Mutants of the recipe (rates, groups, the scale of losses, pruning, receipts, averages, the best checkpoint), which fast tests of
tests/train are to kill; ``mutants.py`` runs them."""

from __future__ import annotations

import os
import sys
from multiprocessing.connection import Connection
from pathlib import Path

ROOT = Path(__file__).parents[2]
RATES, RESUMES, POLICIES = "parts: ends_where", "parts: resumed_run_uses", "parts: policies or formula or polynomial"
OWN, GROUPS, FROZEN = (
    "optimizers: users_optimizer",
    "optimizers: every_cut_and_after_a_resume",
    "recipe: trains_from_then_on and 1f1b",
)
AVERAGES, MOVED, EXPORTED = (
    "recipe: averages_are_torchs and sgd",
    "recipe: averages_are_the_same",
    "recipe: exports_take",
)
CLIPPED, BEST, SETTLES, LOOKS = (
    "recipe: own_norms",
    "recipe: best_checkpoint_is_kept",
    "recipe: no_better",
    "recipe: looked_at",
)
DIES, BACK, SKIP, FAILS = (
    "sound: died_ends",
    "sound: half_the_rate",
    "sound: newest_sound",
    "checkpoint: costs_a_checkpoint",
)
PLANNED = "recipe: plan_of_a_run"

MUTANTS: dict[str, list[tuple[str, str, str]]] = {
    "train/rates": [
        ("whole = iteration - batch + feed", "whole = iteration + feed", PLANNED),
        ("if most < 0 else min(whole, most)", "if most < 0 else most", PLANNED),
        ("per_update = training.gradient_accumulation /", "per_update = 1 /", PLANNED),
        ("return self._lowered * self._rate(place)", "return self._rate(place)", BACK),
        ("place = self._places[number] + (at - number) *", "place = self._places[number] + 0 *", RATES),
        (" or done in thaws(training)", "", "recipe: trains_from_then_on and pipedream"),
        (
            "interval > 0 and done % interval == 0",
            "interval > 0 and done % interval == 1",
            "recipe: trains_from_then_on and pipedream",
        ),
        ("return self._first + self._count * num_iterations //", "return self._first + num_iterations //", PLANNED),
        ("return epoch + 1 + epochs, batch", "return epoch + epochs, batch", RATES),
    ],
    "runtime/updates/optimizing": [
        ('(update if self.policy == "polynomial" else update + 1)', "update", POLICIES),
        (
            "(rate.total - update) / max(1.0, rate.total - rate.warmup)",
            "(rate.total - update) / max(1.0, rate.total)",
            POLICIES,
        ),
        ("(update - rate.warmup) / max(1.0", "update / max(1.0", POLICIES),
        ("sum(update >= place", "sum(update > place", POLICIES),
        ("max(update + 1, anchor)", "max(update, anchor)", POLICIES),
        ("** rate.degree", "** 0.5", POLICIES),
        ("max(self.lowest, self.peak *", "max(0.0, self.peak *", POLICIES),
        ("rate * group.get(RATE_PART, 1.0)", "rate", OWN),
        ('if whole and group.get("lr", whole) != whole:', "if False:", OWN),
        ("RATE_PART: part}", "RATE_PART: 1.0}", GROUPS),
        ('float(group["lr"]) / float(whole))', 'float(group["lr"]))', OWN),
    ],
    "train/groups": [
        (
            "layer, own = first.get((number, name), (number, name))",
            "layer, own = number, name",
            "optimizers: tied_weight",
        ),
        ("parameter.dim() < 2 if", "parameter.dim() <= 2 if", GROUPS),
        ("iteration >= getattr(parameter, FROZEN)", "iteration > getattr(parameter, FROZEN)", FROZEN),
        ("decay ** (num_layers - 1 - layer)", "decay ** (num_layers - layer)", "recipe: rates_of_layers"),
        ("place = max(place for place", "place = min(place for place", CLIPPED),
        ("if number not in found:", "if False:", "optimizers: wrong_are_refused"),
        ('options.get("learning_rate", 1.0) * decay', "decay", "recipe: rates_of_layers"),
        ("inf if frozen is True else frozen", "frozen", FROZEN),
    ],
    "runtime/updates/update": [
        ("max(1.0, self.value / 2)", "self.value / 2", "recipe: scale_of_losses"),
        ("self.good_steps + 1 if finite else 0", "self.good_steps + 1", "recipe: scale_of_losses"),
        ("self.value * 2, 0", "self.value * 2, self.good_steps", "recipe: scale_of_losses"),
        ("+ (not finite)", "+ 0", SKIP.replace("newest_sound", "any_rank")),
        ("| {REST: self._options.clip_norm}", "| {REST: None}", CLIPPED),
        ("(totals[group] + 1e-6)", "totals[group]", CLIPPED),
    ],
    "runtime/updates/agreement": [
        ("getattr(parameter, CLIP, REST)", "REST", CLIPPED),
        ("if of == group]", "]", CLIPPED),
    ],
    "train/soundness": [
        ("self.streak + 1 if wrong else 0", "self.streak + 1 if wrong else self.streak", "sound: waits_for_a_finite"),
        ("self.streak >= training.nan_limit", "self.streak > training.nan_limit", DIES),
        ("told if sound else nan", "told", "recipe: best_is_sound"),
        ("0 < patience <= best.since", "0 < patience < best.since", SETTLES),
        ("found if found.metric == metric else Best(metric)", "found if found.metric else Best(metric)", SETTLES),
    ],
    "rundir/manifest": [
        ("if better and isfinite(value):", "if better:", "recipe: best_is_sound"),
        ("value < self.value\n", "value <= self.value\n", BEST),
        ('self.metric.endswith("per_second")', "False", LOOKS),
        ("since=self.since + 1", "since=self.since", SETTLES),
    ],
    "train/checkpoints/writer": [
        ("kept[: -place.keep]:", "kept[: -place.keep - 1]:", BEST),
        ("if old == sound or (", "if (", SKIP),
        ("name.iteration == save.standing.best.iteration", "name.iteration < 0", BEST),
        ("> (place.epoch, save.standing.iteration)", "> (place.epoch, -1)", "recipe: waits_for_the_receipts"),
        ("or found[2] != save.line.run:", "or True:", "recipe: waits_for_the_receipts"),
        ("if not bool(torch.isfinite(tensors[key]).all()):", "if False:", "sound: not_saved"),
        ("            shutil.rmtree(self._partial(save), ignore_errors=True)", "            pass", FAILS),
        (
            "for process in range(self._place.num_processes):\n            told",
            "for process in range(1):\n            told",
            "recipe: waits_for_the_receipts",
        ),
        ("            save.problem = in_words(error)", "            raise", FAILS),
        ("            save.remark = in_words(error)", "            raise", "checkpoint: fails or pruned"),
    ],
    "runtime/updates/averages": [
        ("AVERAGE not in self.state.get(parameter, ())", "True", AVERAGES),
        ("part: Any = 1 - decay", "part: Any = decay", AVERAGES),
        ("begun[parameter] = parameter.detach().clone()", "begun[parameter] = parameter.detach()", AVERAGES),
        ("            parameter.data = weight", "            pass", EXPORTED),
        (".copy_(average)", ".copy_(parameter)", EXPORTED),
        ("begun[parameter] = parameter", "begun[parameter] = 0 * parameter", AVERAGES),
    ],
    "train/checkpoints/manager": [
        ("if training.ema or not k.endswith", "if True or not k.endswith", MOVED),
        (
            "good_steps=standing.good_steps) if same",
            "good_steps=0) if same",
            "checkpoint: resume_is_exact and fp16 or loss_scale",
        ),
        ("held.optimizer if same else None, found", "held.optimizer, found", "checkpoint: another_optimizer"),
        ("if not found.manifest.standing.sound and path != named:", "if False:", SKIP),
        ("self._gone_back_to.add(found.path)", "pass", "sound: in_vain"),
    ],
    "train/checkpoints/export": [("None if trained else kept", "kept", EXPORTED)],
    "train/evaluation": [("with averaged(session.pipeline):", "if True:", EXPORTED)],
    "train/trainer": [
        ("self.soundness.describe(), self.lowered / 2", "self.soundness.describe(), self.lowered", BACK),
        ("waits = self.soundness.streak and", "waits = False and", "sound: waits_for_a_finite"),
        ('ends or better.kind != "evaluation"', "True", LOOKS),
        ("if self._thaws and self._ends_update(self.iteration):", "if self._thaws:", "recipe: thaws_where"),
    ],
    "runtime/moves/layer_state": [
        (
            "            optimizer.state.pop(parameter, None)  # what",
            "            pass  # what",
            "recipe: goes_back_is_frozen",
        )
    ],
}
"""File of ``src/vpipe`` → (text that stands in it once, what stands there instead, a part of tests/train and which of its tests:
pytest's ``-k``)."""


def names() -> list[str]:
    return [f"recipe/{file}:{number}" for file, found in MUTANTS.items() for number in range(len(found))]


def mutant(name: str) -> tuple[Path, str, str, list[str]]:
    """Its file within vpipe, the text, what stands there instead, and pytest's words."""
    file, _, number = name.removeprefix("recipe/").partition(":")
    old, new, killer = MUTANTS[file][int(number)]
    part, _, those = killer.partition(": ")
    return Path(f"{file}.py"), old, new, [f"tests/train/test_train_{part}.py", "-k", those]


def hunt(folder: str, chosen: list[str], pipe: Connection) -> None:
    """Tell the first test that notices the change; nothing where none does."""
    import pytest

    class First:
        """Notes the test that fails first."""

        name = ""

        def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
            self.name = self.name or report.nodeid * report.failed

    sys.path[:0] = [folder]
    os.environ["PYTHONPATH"] = folder  # for processes that tests start
    os.chdir(ROOT)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(1, 2)
    first, words = (
        First(),
        ["-x", "-q", "-n", "0", "-p", "no:cacheprovider", "-m", "not slow", "--basetemp", f"{folder}/tests"],
    )
    pytest.main([*words, *chosen], plugins=[first])
    pipe.send(first.name)  # tests that are not found kill nothing
    pipe.close()
    os._exit(0)
