"""What this process holds of a model: its layers with their weights, optimizers and gradients, and what they weigh.

Of a layer that several ranks of this process hold (replicas), the first stands for all, unless all are asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer

from vpipe.errors import UserError
from vpipe.runtime.engine import Engine
from vpipe.runtime.job import Stats
from vpipe.runtime.surroundings import follow
from vpipe.runtime.updates.update import LossScale
from vpipe.runtime.updates.weights import count_bytes


class HeldLayer(NamedTuple):
    """A layer on one rank; a loss with parameters counts as the layer after the last."""

    layer: int
    rank: int
    is_first: bool
    """Whether this rank is the first of those that hold it."""
    module: nn.Module
    optimizer: Optimizer | None


class StageOptimizers(dict[int, Optimizer]):
    """Stage → optimizer, to look at."""

    def __setitem__(self, stage: int, optimizer: Optimizer) -> None:
        raise UserError(
            f"the optimizer of stage {stage} cannot be replaced: the stage steps its own; change its param_groups, or "
            "give Pipeline(optimizer=...)"
        )


class Holdings:
    """The side of a pipeline that is about layers and weights; ``engines`` are the ranks of this process."""

    engines: list[Engine]
    num_updates: int
    keeps_names = False
    """Whether ``state_dict`` has the names of the module that was cut, instead of ``"<layer>.<name>"``."""

    def held_layers(self) -> Iterator[HeldLayer]:
        """All layers of this process's ranks, each with its module and optimizer; then those of further replicas."""
        others: list[HeldLayer] = []
        for engine in self.engines:
            for index, stage in engine.stages.items():
                is_first = engine.flow.layout.leader(index) == engine.rank
                for layer, module in stage.owned.items():
                    held = HeldLayer(layer, engine.rank, is_first, module, engine.updater.optimizers.get(index))
                    if is_first:
                        yield held
                    else:
                        others.append(held)
        yield from others

    def stepped_by(self, optimizer: Optimizer) -> tuple[int, Mapping[str, nn.Parameter]] | None:
        """The stage that an optimizer steps and its parameters by name, on the first rank that holds it."""
        for engine in self.engines:
            for stage, own in engine.updater.optimizers.items():
                if own is optimizer and engine.flow.layout.leader(stage) == engine.rank:
                    return stage, engine.stages[stage].weights.parameters
        return None

    def modules(self) -> dict[int, nn.Module]:
        """Layer → module, of the layers that this process holds; a loss with a state comes after the last."""
        found: dict[int, nn.Module] = {}
        for held in self.held_layers():
            found.setdefault(held.layer, held.module)
        return dict(sorted(found.items()))

    @property
    def optimizers(self) -> dict[int, Optimizer]:
        """Stage → optimizer, of the stages that this process holds (replica 0 of each, where it holds several)."""
        found: dict[int, Optimizer] = {}
        for engine in self.engines:
            ranks_of = engine.flow.layout.placement.ranks_of
            for stage, optimizer in engine.updater.optimizers.items():
                if engine.rank == ranks_of[stage][0] or stage not in found:
                    found[stage] = optimizer
        return StageOptimizers(sorted(found.items()))

    def parameters(self) -> dict[str, nn.Parameter]:
        """``"<layer>.<name>"`` → parameter, of the layers that this process holds."""
        modules = self.modules()
        return {f"{layer}.{name}": p for layer in modules for name, p in modules[layer].named_parameters()}

    def set_learning_rate(self, rate_of_update: Callable[[float], float]) -> None:
        """Let update ``n`` use ``rate_of_update(n)``. Updates are counted as the first stage makes them: a stage that
        makes twice as many asks for the rates of halves."""
        for engine in self.engines:
            engine.updater.learning_rate = rate_of_update

    @property
    def loss_scale(self) -> LossScale:
        """What losses are multiplied by now; the same on every rank."""
        return self.engines[0].updater.scaler

    @property
    def stats(self) -> Stats:
        """Updates, norm and loss scale; asking waits for the device."""
        updater, scale = self.engines[0].updater, self.loss_scale
        return Stats(self.num_updates, updater.num_skipped, updater.last_norm, scale.value, scale.good_steps)

    @contextmanager
    def annotated(self) -> Iterator[None]:
        """While it is open, actions appear under their names in a torch.profiler trace."""
        for engine in self.engines:
            engine.annotates = True
        try:
            yield
        finally:
            for engine in self.engines:
                engine.annotates = False

    def _updates_made(self) -> dict[int, int]:
        return {stage: number for engine in self.engines for stage, number in engine.updater.num_updates.items()}

    def state_dict(self) -> dict[str, Tensor]:
        """``"<layer>.<name>"`` → parameter or buffer, of the layers that this process holds; of a module that was cut,
        by its own names."""
        return {
            told: tensor
            for layer, module in self.modules().items()
            for told, tensor in self._named(layer, module).items()
        }

    def _named(self, layer: int, module: nn.Module) -> dict[str, Tensor]:
        own: dict[str, str] = module.own_names() if self.keeps_names else {}  # type: ignore[operator]
        return {own.get(name, f"{layer}.{name}"): tensor for name, tensor in module.state_dict().items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load what this process holds; what belongs to other stages is passed over."""
        for held in self.held_layers():
            names = zip(held.module.state_dict(), self._named(held.layer, held.module), strict=True)
            held.module.load_state_dict({name: state[told] for name, told in names if told in state})

    def gradients(self) -> dict[str, Tensor]:
        """``"<layer>.<name>"`` → accumulated gradient, of the layers that this process holds."""
        return {name: p.grad for name, p in self.parameters().items() if p.grad is not None}

    def zero_grad(self) -> None:
        for held in self.held_layers():
            held.module.zero_grad()

    def _lead_replicas(self) -> None:
        """Let replicas of this process train as the first does, which is the one that the user sees: by its modes, its
        weights (a teacher that follows between steps) and the settings of its optimizer (a learning rate)."""
        if len(self.engines) == 1:
            return
        modules, optimizers = self.modules(), self.optimizers
        for held in self.held_layers():
            if held.module is not modules[held.layer]:
                follow(modules[held.layer], held.module)
        for engine in self.engines:
            for stage, optimizer in engine.updater.optimizers.items():
                for group, leading in zip(optimizer.param_groups, optimizers[stage].param_groups, strict=True):
                    group |= {name: setting for name, setting in leading.items() if name != "params"}

    def weights_of(self, rank: int) -> dict[str, int]:
        """Bytes of the weights and optimizer states of a rank of this process, and the most versions of a stage."""
        engine = next(engine for engine in self.engines if engine.rank == rank)
        stages = engine.stages.values()
        states = [state for made in engine.updater.optimizers.values() for state in made.state.values()]
        return {
            "weights": count_bytes([p for stage in stages for p in stage.weights.parameters.values()]),
            "versions": max(getattr(stage.weights, "most_versions", 1) for stage in stages),
            "optimizer": count_bytes([t for state in states for t in state.values() if isinstance(t, Tensor)]),
        }
