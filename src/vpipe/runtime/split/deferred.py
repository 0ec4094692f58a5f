"""Input gradients now, weight gradients later.

A zero-bubble schedule runs ``I`` as soon as a gradient arrives and fills idle time with ``W``. Autograd computes both
at once. No module is changed for the split; the graph that a forward has left is read (``structure``):

    I   runs autograd for everything but the weights that may wait; hooks take the gradients dy of the products
    W   weight.grad += dy.T @ x      by autograd's own formulas (``products``)

So each contribution is made once, by the one or by the other. What cannot wait is made by ``I``, which is correct on
every stage, only not deferred.

The first unit of a structure runs a plain backward, and what ``W`` would have added is compared with what that gave,
to the bit. A weight for which it is not equal never waits, and a warning says so. A gradient of zeros proves nothing:
such a weight does not wait until a later unit (the second, fourth, eighth …) has shown more.

The products are the ones autograd itself would compute, so the split changes no bit.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from vpipe.runtime.crossing import Roots, run_backward
from vpipe.runtime.split.promise import Promise, accumulate, same
from vpipe.runtime.split.structure import Analysis, Reading, Signature, Structure, read

MOST_STRUCTURES = 256
"""Graphs that never repeat are not worth an analysis each: those beyond this number are not split."""


class Made:
    """A gradient that I has made and that is added in W, because the order of units must be the same for all."""

    __slots__ = ("gradient", "weight")

    def __init__(self, weight: Tensor, gradient: Tensor) -> None:
        self.weight, self.gradient = weight, gradient

    def run(self) -> None:
        """Add the gradient, as autograd does, and call the hooks that wait for that."""
        accumulate(self.weight, self.gradient)
        for hook in (self.weight._post_accumulate_grad_hooks or {}).values():
            hook(self.weight)


class Known:
    """What is known of a structure."""

    def __init__(self, signature: Signature) -> None:
        self._structure = Structure(signature)
        self._analyses: dict[frozenset[int], Analysis] = {}
        self._num_units = 0
        self.proven: set[int] = set()
        self.refused: set[int] = set()
        self.settle()

    def settle(self) -> None:
        """Draw the conclusions from ``proven`` and ``refused``."""
        self.unproven = self.analysis(self.refused).waiting - self.proven
        self.left_out = self.unproven | self.refused

    def analysis(self, left_out: Collection[int]) -> Analysis:
        key = frozenset(left_out)
        if key not in self._analyses:
            self._analyses[key] = self._structure.analyse(key)
        return self._analyses[key]

    def is_due(self) -> bool:
        """Whether this unit should show something: the first, the second, the fourth …"""
        self._num_units += 1
        return bool(self.unproven) and self._num_units & (self._num_units - 1) == 0


class WeightQueue:
    """The weight gradients of a stage that wait for their ``W``; ``names`` are those of its weights."""

    def __init__(self, names: Sequence[str], stashes: bool = False) -> None:
        self._names = names
        self._stashes = stashes
        self._known: dict[Signature, Known] = {}
        self._waiting: dict[int, list[Made | Promise]] = {}
        self._open: list[Made | Promise] = []
        self._weights: list[Tensor] = []
        self._numbers: dict[int, int] = {}
        self._ever: set[int] = set()
        """Weights that some unit has left to W: what I makes of them waits as well, to keep the order of units."""
        self._told: set[int] = set()

    def open(self, microbatch: int, weights: Iterable[Tensor]) -> None:
        """The backwards that follow are the microbatch's I."""
        self._open = self._waiting.setdefault(microbatch, [])
        found = list(weights)
        if len(found) != len(self._weights) or not all(map(operator.is_, found, self._weights)):
            self._weights = found
            self._numbers = {id(weight): number for number, weight in enumerate(found)}

    def backward(self, roots: Roots, gradients: Sequence[Tensor]) -> None:
        """I of one graph."""
        reading = read(roots, self._numbers)
        known = self._known.get(reading.signature)
        if known is None and len(self._known) < MOST_STRUCTURES:
            known = self._known[reading.signature] = Known(reading.signature)
        if known is not None and known.is_due():
            self._rehearse(known, reading, roots, gradients)
            return
        promise = None if known is None else self._promise(known, reading, known.left_out)
        if promise is None:
            self._plain(roots, gradients)
            return
        self._ever |= promise.analysis.waiting
        with self._aside(promise.analysis):
            run_backward(roots, gradients, promise.inputs())
        promise.seal()
        self._open.append(promise)

    def _plain(self, roots: Roots, gradients: Sequence[Tensor]) -> None:
        with self._aside(None):
            run_backward(roots, gradients)

    def _promise(
        self, known: Known, reading: Reading, left_out: Collection[int], rehearsal: bool = False
    ) -> Promise | None:
        """The products that may wait in this unit."""
        while True:
            analysis = known.analysis(left_out)
            if not analysis.products:
                return None
            promise = Promise(analysis, reading, self._weights)
            hooked = [number for number in analysis.waiting if _is_hooked(self._weights[number])]
            blocked = hooked or promise.prepare(rehearsal)
            if not blocked:
                return promise
            left_out = {*left_out, *blocked}

    def _rehearse(self, known: Known, reading: Reading, roots: Roots, gradients: Sequence[Tensor]) -> None:
        """A plain backward, and a look at what W would have added."""
        known.refused.update(_watched(reading, known.analysis(known.refused), self._numbers))
        promise = self._promise(known, reading, known.refused, rehearsal=True)
        if promise is None:
            known.settle()
            self._plain(roots, gradients)
            return
        waiting = promise.analysis.waiting
        with self._aside(None, waiting):
            run_backward(roots, gradients)
            with torch.no_grad():
                wrong, proven = compare(promise, {number: self._weights[number] for number in waiting})
            promise.withdraw()
        known.refused |= wrong
        known.proven |= proven
        known.settle()
        self._tell(wrong - self._told)

    def _tell(self, numbers: Collection[int]) -> None:
        self._told |= set(numbers)
        if numbers:
            names = ", ".join(self._names[number] for number in sorted(numbers))
            warnings.warn(
                f"the gradients of {names} are computed in I and do not wait for W: computed later they would differ "
                "from those of a plain backward",
                stacklevel=2,
            )

    @contextmanager
    def _aside(self, analysis: Analysis | None, compared: Collection[int] = ()) -> Iterator[None]:
        """Around a backward: take away the gradients of weights to which it may add, where what it adds must be seen or
        has to wait. Hooks that wait for the sum are called when it is made."""
        waiting: Collection[int] = () if analysis is None else analysis.waiting
        everything = self._stashes or (analysis is not None and analysis.own_code)
        chosen = range(len(self._weights)) if everything else [*(self._ever.difference(waiting)), *compared]
        found = []
        for number in dict.fromkeys(chosen):
            weight = self._weights[number]
            hooks = weight._post_accumulate_grad_hooks
            found.append((number, weight, weight.grad, dict(hooks or {})))
            weight.grad = None
            if hooks:
                hooks.clear()  # torch keeps the dict itself
        try:
            yield
        finally:
            made = [(number, weight, weight.grad) for number, weight, *_ in found]
            for _, weight, before, hooks in found:
                weight.grad = before
                if hooks:
                    weight._post_accumulate_grad_hooks.update(hooks)
        with torch.no_grad():
            for number, weight, gradient in made:
                if gradient is not None and (self._stashes or number in self._ever):
                    self._open.append(Made(weight, gradient))
                elif gradient is not None:
                    Made(weight, gradient).run()

    def close(self) -> None:
        """The I that was open is over."""
        self._open = []

    def run(self, microbatch: int) -> None:
        """W: add what the microbatch has left, in the order of its backward."""
        # Outside of a backward autograd would record these products, and keep x and dy alive with the gradient.
        with torch.no_grad():
            for waiting in self._waiting.pop(microbatch, ()):
                waiting.run()

    def waited(self) -> set[str]:
        """The names of the weights whose gradients some unit has left to W."""
        return {self._names[number] for number in self._ever}

    def clear(self) -> None:
        """Forget all units: the step has failed."""
        self._waiting.clear()


def _is_hooked(weight: Tensor) -> bool:
    """Whether a hook is to see the gradient when autograd has it."""
    return bool(weight._backward_hooks or weight._post_accumulate_grad_hooks)


def _watched(reading: Reading, analysis: Analysis, numbers: dict[int, int]) -> set[int]:
    """The weights whose accumulators have a hook, which only a further hook can see."""
    found = set()
    for place in analysis.accumulators:
        node = reading.nodes[place]
        for register in (node.register_hook, node.register_prehook):
            handle = register(lambda *_: None)
            if len(handle.hooks_dict_ref()) > 1:
                found.add(numbers[id(node.variable)])
            handle.remove()
    return found


def compare(promise: Promise, weights: Mapping[int, Tensor]) -> tuple[set[int], set[int]]:
    """(weights whose gradient by W is not the one that a plain backward gave, weights for which it is shown to be)."""
    try:
        found = promise.totals()
    except RuntimeError:
        return set(weights), set()
    wrong, proven = promise.wrong_inputs(), set()
    for number, weight in weights.items():
        made, ours = weight.grad, found.get(id(weight))
        if made is None or ours is None:
            wrong |= set() if made is ours else {number}
        elif not same(made, ours):
            wrong.add(number)
        elif made.count_nonzero() and made.isfinite().all():
            proven.add(number)
    return wrong, proven - wrong
