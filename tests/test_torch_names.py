"""Private names of torch that vpipe stands on, each with a test: what a new torch may take away is found here first.

The first test reads the sources: a private name that is not in the table fails, so the table is whole.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

HOUSE = Path(__file__).parents[1] / "src" / "vpipe"
ROOTS = {"torch", "_C", "dist", "_stores", "functional", "Variable"}
"""Names under which the sources hold torch or a part of it."""


def linear() -> Any:
    """The graph node of a Linear with bias."""
    return nn.Linear(3, 2)(torch.ones(4, 3, requires_grad=True)).grad_fn


def foreach() -> bool:
    tensors = [torch.ones(2), torch.ones(3)]
    torch._foreach_mul_(tensors, 2.0)
    torch._foreach_div_(tensors, 4.0)
    torch._foreach_copy_(tensors, [torch.full((2,), 3.0), torch.full((3,), 4.0)])
    return [float(norm) for norm in torch._foreach_norm(tensors)] == [float(tensor.norm()) for tensor in tensors]


def pytree() -> bool:
    from torch.utils._pytree import tree_leaves, tree_map_only

    found = tree_map_only(int, lambda value: value + 1, {"a": [1, "b"]})
    return tree_leaves(found) == [2, "b"]


def dispatch() -> bool:
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Watch():
        torch.ones(1) + 1
        stack = torch._C._len_torch_dispatch_stack()
        mode = torch._C._get_dispatch_stack_at(0)
    return bool(seen) and stack == 1 and isinstance(mode, Watch)


def functions() -> bool:
    number = torch._C._len_torch_function_stack()
    with torch.device("meta"):
        mode = torch._C._get_function_stack_at(number)
        inner = torch._C._len_torch_function_stack()
    torch._C._push_on_torch_function_stack(mode)
    made = torch.ones(1)
    torch._C._pop_torch_function_stack()
    return inner == number + 1 and made.is_meta


def saved_tensors() -> bool:
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return len(hooks) == 2 and torch._C._autograd._top_saved_tensors_default_hooks(True) is None


def autocast() -> bool:
    before = torch._C._is_any_autocast_enabled()
    with torch.autocast("cpu"):
        inside = torch._C._is_any_autocast_enabled()
    return (before, inside) == (False, True) and "cpu" in torch._C._autocast_supported_devices()


def backward() -> bool:
    from torch.autograd.graph import _engine_run_backward

    x = torch.ones(2, requires_grad=True)
    _engine_run_backward(((x * 3).sum(),), (torch.tensor(1.0),), False, False, (), True, accumulate_grad=True)
    return x.grad is not None and x.grad.tolist() == [3.0, 3.0]


def engine() -> bool:
    run: Any = torch.autograd.Variable._execution_engine.run_backward
    x = torch.ones(2, requires_grad=True)
    run(((x * 3).sum(),), (torch.tensor(1.0),), False, False, (), allow_unreachable=True, accumulate_grad=True)
    return x.grad is not None and x.grad.tolist() == [3.0, 3.0]


def profiler() -> bool:
    from torch._C._profiler import _ExperimentalConfig

    return _ExperimentalConfig(profile_all_threads=True) is not None


def optimizer_hooks() -> bool:
    from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
    from torch.optim.optimizer import register_optimizer_step_post_hook as after
    from torch.optim.optimizer import register_optimizer_step_pre_hook as ahead

    optimizer = torch.optim.Adam([nn.Parameter(torch.zeros(1))])
    before = not _global_optimizer_pre_hooks and not _global_optimizer_post_hooks
    handles = [ahead(lambda *_: None), after(lambda *_: None)]
    found = bool(_global_optimizer_pre_hooks) and bool(_global_optimizer_post_hooks)
    for handle in handles:
        handle.remove()
    return before and found and not optimizer._optimizer_step_pre_hooks and not optimizer._optimizer_step_post_hooks


CHECKS: dict[str, Callable[[], bool]] = {
    "_foreach_mul_": foreach,
    "_foreach_div_": foreach,
    "_foreach_norm": foreach,
    "_foreach_copy_": foreach,
    "_nn": lambda: torch._C._nn.flatten_dense_tensors([torch.ones(2), torch.zeros(1, 2)]).tolist() == [1, 1, 0, 0],
    "_global_optimizer_pre_hooks": optimizer_hooks,
    "_global_optimizer_post_hooks": optimizer_hooks,
    "_pytree": pytree,
    "_python_dispatch": dispatch,
    "_len_torch_dispatch_stack": dispatch,
    "_get_dispatch_stack_at": dispatch,
    "_push_on_torch_dispatch_stack": lambda: callable(torch._C._push_on_torch_dispatch_stack),
    "_pop_torch_dispatch_stack": lambda: callable(torch._C._pop_torch_dispatch_stack),
    "_len_torch_function_stack": functions,
    "_get_function_stack_at": functions,
    "_push_on_torch_function_stack": functions,
    "_pop_torch_function_stack": functions,
    "_is_multithreading_enabled": lambda: torch._C._is_multithreading_enabled() is True,
    "_top_saved_tensors_default_hooks": saved_tensors,
    "_autograd": saved_tensors,
    "_profiler": profiler,
    "_ExperimentalConfig": profiler,
    "_functions": lambda: isinstance(linear().next_functions[0][0], torch._C._functions.AccumulateGrad),
    "_C": lambda: hasattr(torch, "_C"),
    "_is_any_autocast_enabled": autocast,
    "_autocast_supported_devices": autocast,
    "_engine_run_backward": backward,
    "_execution_engine": engine,
    "_unsafe_view": lambda: torch.ops.aten._unsafe_view.default(torch.ones(4), [2, 2]).shape == (2, 2),
    "_op": lambda: torch.ops.aten._unsafe_view.default._op(torch.ones(4), [2, 2]).shape == (2, 2),
    "_get_default_store": lambda: callable(dist.distributed_c10d._get_default_store),
    "_get_backend": lambda: callable(dist.ProcessGroup._get_backend),
    "_world": lambda: isinstance(dist.distributed_c10d._world.group_count, int),
    "_saved_mat1": lambda: linear()._saved_mat1.shape == (4, 3),
    "_raw_saved_mat1": lambda: hasattr(linear()._raw_saved_mat1, "unpack_hook"),
    "_NormBase": lambda: issubclass(nn.BatchNorm1d, nn.modules.batchnorm._NormBase),
    "_version": lambda: torch.ones(1).add_(1)._version == 1,
    "_backward_hooks": lambda: nn.Linear(1, 1).weight._backward_hooks is None,
    "_post_accumulate_grad_hooks": lambda: nn.Linear(1, 1).weight._post_accumulate_grad_hooks is None,
    "_buffers": lambda: set(nn.BatchNorm1d(2)._buffers) == {"running_mean", "running_var", "num_batches_tracked"},
}
"""Private name → whether this torch still has it, and it still means what we take it for."""


def private_names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, name) of what the sources take from torch under a private name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            parts = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            yield from ((node.lineno, part) for part in parts if part.startswith("_") and part != "_dynamo")
        elif isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            root = node.value
            while isinstance(root, ast.Attribute):
                root = root.value
            if isinstance(root, ast.Name) and root.id in ROOTS:
                yield node.lineno, node.attr


def test_every_private_name_is_in_the_table() -> None:
    unknown = [
        f"{path.relative_to(HOUSE)}:{line}: {name}"
        for path in sorted(HOUSE.rglob("*.py"))
        for line, name in private_names(ast.parse(path.read_text(encoding="utf-8")))
        if name not in CHECKS
    ]
    assert not unknown, "private names of torch without a test in CHECKS:\n" + "\n".join(unknown)


@pytest.mark.parametrize("name", CHECKS)
def test_torch_still_has(name: str) -> None:
    assert CHECKS[name]()
