"""Weight versions: which tensors a unit's forward and backward read, and where its gradient goes.

A synchronous stage has one version: the module's own parameters. An asynchronous stage updates while units are in
flight. Autograd refuses a backward through weights that an optimizer has changed in place, and assigning ``p.data``
silently mixes versions. So each version is a set of leaf tensors that the module's slots point to while a unit runs:

    version 3 ── leaves ─┐                      the newest version shares its storage with the parameters;
    version 4 ── leaves ─┼─ module slots        an update first moves the parameters to a copy, and only if
    parameters ──────────┘  (in F, R and B)     a unit still needs the old values

So a stage holds as many copies as versions are alive, W_s + 1 for PipeDream, and the optimizer's state once. Of
swapped layers an old version leaves memory when all units that still need it are out, and returns with the first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

from torch import Tensor, UntypedStorage, nn

from vpipe.errors import UserError
from vpipe.runtime.memory.swap import Swappable, worth_moving
from vpipe.runtime.split.promise import accumulate


class Weights:
    """The parameters of one stage."""

    def __init__(self, modules: Mapping[int, nn.Module]) -> None:
        self.parameters: dict[str, nn.Parameter] = {}
        """``"<layer>.<name>"`` → parameter, in the order of layers; a parameter that a layer uses twice appears
        once."""
        for layer, module in modules.items():
            for name, parameter in module.named_parameters():
                self.parameters[f"{layer}.{name}"] = parameter

    def begin(self, uses: Sequence[int]) -> None:
        """A program begins; version ``v`` will be read by ``uses[v]`` units."""

    def read(self, version: int) -> None:
        """The forward, recompute or backward that follows reads this version."""

    def leaves(self, version: int) -> Iterable[Tensor]:
        """The tensors of this version that gather gradients."""
        return self.parameters.values()

    def gather(self, version: int) -> None:
        """A unit's backward at this version is complete: its gradient belongs to the parameters."""

    def before_update(self) -> None:
        """The parameters are about to change."""

    def after_update(self) -> None:
        """The parameters are the next version."""

    def leave(self, version: int) -> list[Swappable]:
        """A unit of this version goes out; what goes with it."""
        return []

    def come_back(self, version: int) -> list[Swappable]:
        """A unit of this version is fetched; what must come with it."""
        return []

    def end(self) -> None:
        """Drained: nothing is in flight, the next unit reads the newest version."""


class VersionedWeights(Weights):
    """Parameters of a stage that updates while units are in flight; old versions of ``swapped`` layers may leave."""

    def __init__(self, modules: Mapping[int, nn.Module], swapped: Collection[int] = ()) -> None:
        super().__init__(modules)
        self._swapped = [name for name in self.parameters if int(name.split(".", 1)[0]) in swapped]
        self._own: set[int] = set()
        """Versions in memory that was taken in this program: that of the first may belong to a user's state dict."""
        self._out: Counter[int] = Counter()
        """Version → how many of its units are out."""
        self._away: dict[int, list[Swappable]] = {}
        names = {id(parameter): name for name, parameter in self.parameters.items()}
        self._slots = [
            (part, slot, names[id(parameter)])
            for module in modules.values()
            for part in module.modules()
            for slot, parameter in part.named_parameters(recurse=False)
        ]
        self._leaves: dict[int, dict[str, Tensor]] = {}
        self._uses: list[int] = []
        self._newest = 0
        self._installed: int | None = None
        self._gathered: set[str] = set()
        """Parameters that units have given gradients since the last update."""
        self.most_versions = 1

    def begin(self, uses: Sequence[int]) -> None:
        self._uses = list(uses)
        self._newest = 0
        self._leaves = {0: self._fresh()}
        self._installed = None
        self._gathered = {name for name, p in self.parameters.items() if p.grad is not None}
        self._own.clear()
        self._out.clear()
        self._away.clear()

    def _fresh(self) -> dict[str, Tensor]:
        """Leaves that share the parameters' storage but not their version counters."""
        return {name: p.data.requires_grad_(p.requires_grad) for name, p in self.parameters.items()}

    def read(self, version: int) -> None:
        if version == self._installed:
            return
        leaves = self._leaves[version]
        for part, slot, name in self._slots:
            part._parameters[slot] = leaves[name]  # type: ignore[assignment]
        self._installed = version

    def leaves(self, version: int) -> Iterable[Tensor]:
        return self._leaves[version].values()

    def gather(self, version: int) -> None:
        for name, leaf in self._leaves[version].items():
            if self.parameters[name].grad is not None and name not in self._gathered:
                raise UserError(
                    f"a layer reads the weight {name} by an alias or in a closure, where it is always the newest, but "
                    "an asynchronous schedule keeps versions; let it read the attribute of the module, or use 1f1b"
                )
            gradient = leaf.grad
            if gradient is None:
                continue
            leaf.grad = None
            self._gathered.add(name)
            parameter = self.parameters[name]
            if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
                accumulate(parameter, _hooked(parameter, gradient))
                _call_hooks(name, parameter)
            elif parameter.grad is None:
                parameter.grad = gradient  # autograd has made it for a leaf of the parameter's form
            else:
                parameter.grad.add_(gradient)
        self._uses[version] -= 1
        self._drop_unused()

    def before_update(self) -> None:
        if self._uses[self._newest] > 0:
            for parameter in self.parameters.values():
                parameter.data = parameter.data.clone()
            self._own.add(self._newest + 1)
        elif self._newest in self._own:
            self._own.add(self._newest + 1)

    def after_update(self) -> None:
        last, self._newest = self._newest, self._newest + 1
        self._gathered.clear()
        leaves = self._leaves[last]
        if self._uses[last] == 0 and all(leaves[n].data_ptr() == p.data_ptr() for n, p in self.parameters.items()):
            self._leaves[self._newest] = self._leaves.pop(last)  # no unit reads the old one
            self._installed = self._newest if self._installed == last else self._installed
        else:
            self._leaves[self._newest] = self._fresh()
        if len(self._uses) <= self._newest:
            self._uses.append(0)
        self._drop_unused()
        self.most_versions = max(self.most_versions, len(self._leaves))

    def _drop_unused(self) -> None:
        for version in [each for each in self._leaves if each != self._newest and self._uses[each] == 0]:
            del self._leaves[version]

    def leave(self, version: int) -> list[Swappable]:
        self._out[version] += 1
        found = {
            version: [Swappable(each, same_object=True) for each in self._storages(version) if worth_moving(each)]
            for version in self._leaves
            if version in self._own and version != self._newest and self._out[version] == self._uses[version]
        }
        fresh = {version: each for version, each in found.items() if version not in self._away}
        self._away |= fresh
        return [swappable for each in fresh.values() for swappable in each]

    def _storages(self, version: int) -> list[UntypedStorage]:
        return [self._leaves[version][name].untyped_storage() for name in self._swapped]

    def come_back(self, version: int) -> list[Swappable]:
        self._out[version] -= 1
        return self._away.pop(version, [])

    def end(self) -> None:
        for part, slot, name in self._slots:
            part._parameters[slot] = self.parameters[name]
        self._leaves = {}
        self._installed = None


def _hooked(parameter: Tensor, gradient: Tensor) -> Tensor:
    """What the hooks of a parameter make of a gradient that autograd gave to one of its versions."""
    for hook in (parameter._backward_hooks or {}).values():
        changed = hook(gradient)
        gradient = gradient if changed is None else changed
    return gradient


def _call_hooks(name: str, parameter: Tensor) -> None:
    """The hooks that wait for a gradient to be complete; versions share memory with the parameter, so its value is not
    theirs to change."""
    before = parameter._version
    for hook in (parameter._post_accumulate_grad_hooks or {}).values():
        hook(parameter)
    if parameter._version != before:
        raise UserError(
            f"a post-accumulate-grad hook of {name} changes the parameter, but units in flight still read its values; "
            "leave updates to the optimizer, or use a synchronous schedule such as 1f1b"
        )


def refuse_sharing(modules: Mapping[int, nn.Module]) -> None:
    """Refuse one parameter that the factories of two layers have built: untied, stages would drift apart."""
    seen: dict[int, tuple[int, str]] = {}
    for layer, module in modules.items():
        for name, parameter in module.named_parameters():
            (first, named), here = seen.setdefault(id(parameter), (layer, name)), (layer, name)
            if (first, named) != here:
                raise UserError(
                    f"the factories of two layers return one parameter ({first}.{named} and {layer}.{name}); give "
                    f"modules instead of factories, or let each factory build its own and declare "
                    f'tied=[TiedWeight((({first}, "{named}"), ({layer}, "{name}")))]'
                )


def count_bytes(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
