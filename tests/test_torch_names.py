"""Private names of torch that vpipe stands on, each with a test: what a new torch may take away is found here first.

The first test reads the sources: a private attribute, or a string that is one, which neither the house defines nor the
table has, fails; so does a name of the table that nobody uses. So the table is whole.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

HOUSE = Path(__file__).parents[1] / "src" / "vpipe"
OTHERS = {"_asdict", "_replace", "_fields", "_exit", "_init_weights", "_ready", "_guard", "_program", "__i"}
"""Private names that are not torch's: of named tuples, of ``os``, of transformers, and the house's own: of an engine, which the
threaded one and the order of work ask, and the beginning of a dunder."""


def linear() -> Any:
    """The graph node of a Linear with bias."""
    return nn.Linear(3, 2)(torch.ones(4, 3, requires_grad=True)).grad_fn


def foreach() -> bool:
    tensors = [torch.ones(2), torch.ones(3)]
    torch._foreach_mul_(tensors, 2.0)
    torch._foreach_div_(tensors, 4.0)
    torch._foreach_copy_(tensors, [torch.full((2,), 3.0), torch.full((3,), 4.0)])
    return [float(norm) for norm in torch._foreach_norm(tensors)] == [float(tensor.norm()) for tensor in tensors]


def scheduled() -> bool:
    made = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    before = hasattr(made.step, "_wrapped_by_lr_sched")
    torch.optim.lr_scheduler.LambdaLR(made, lambda number: 1.0)
    return not before and hasattr(made.step, "_wrapped_by_lr_sched")


def groups() -> bool:
    from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype as grouped

    found = grouped([[torch.ones(1), torch.ones(1).double(), torch.zeros(1)]], with_indices=True)
    return sorted(places for _, places in found.values()) == [[0, 2], [1]]


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


def has(node: Any, names: str, *, tensors: str = "") -> bool:
    """Whether a node says ``names``, and of each of ``tensors`` what it is and which hook unpacks it."""
    for name in tensors.split():
        raw = getattr(node, f"_raw_saved_{name}")
        if (
            not isinstance(getattr(node, f"_saved_{name}"), torch.Tensor)
            or getattr(raw, "unpack_hook", None) is not None
        ):
            return False
    return all(hasattr(node, f"_saved_{name}") for name in names.split())


def products() -> bool:
    x = torch.ones(2, 3, requires_grad=True)
    y = torch.ones(3, 2, requires_grad=True)
    forms = "mat2_sym_sizes mat2_sym_strides"
    return (
        has(linear(), f"alpha beta mat1_sym_sizes mat1_sym_strides {forms}", tensors="mat1 mat2")
        and has((x @ y).grad_fn, f"self_sym_sizes self_sym_strides {forms}", tensors="self mat2")
        and has(torch.bmm(x[None], y[None]).grad_fn, "", tensors="self mat2")
        and linear()._saved_mat2_sym_sizes == (3, 2)
        and linear()._saved_mat2_sym_strides == (1, 3)
        and linear()._saved_alpha == 1 == linear()._saved_beta
    )


def norm() -> bool:
    node: Any = nn.LayerNorm(3)(torch.ones(2, 3)).grad_fn
    return has(node, "weight bias", tensors="input result1 result2") and tuple(node._saved_normalized_shape) == (3,)


def convolution() -> bool:
    node: Any = nn.Conv1d(2, 4, 3)(torch.ones(1, 2, 5)).grad_fn
    while "Convolution" not in type(node).__name__:
        node = node.next_functions[0][0]
    forms = "weight stride padding dilation transposed output_padding groups"
    return has(node, forms, tensors="input") and tuple(node._saved_bias_sym_sizes_opt) == (4,)


def embedding() -> bool:
    node: Any = nn.Embedding(5, 2, padding_idx=1)(torch.tensor([0, 1])).grad_fn
    facts = (node._saved_weight_sym_argsize_0, node._saved_padding_idx, node._saved_scale_grad_by_freq)
    return has(node, "sparse", tensors="indices") and facts == (5, 1, False) and node._saved_sparse is False


def own_function() -> bool:
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            return x * 2

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            return gradients[0] * 2

    node: Any = Double.apply(torch.ones(1, requires_grad=True)).grad_fn
    return type(node)._forward_cls is Double and len(node._raw_saved_tensors) == 1


def storages() -> bool:
    tensor, other = torch.ones(4), torch.ones(4)
    views = {view.untyped_storage()._cdata for view in (tensor, tensor[1:], tensor.view(2, 2))}
    return len(views) == 1 and other.untyped_storage()._cdata not in views


def tracers() -> bool:
    from torch._subclasses import FakeTensorMode
    from torch.utils._python_dispatch import TorchDispatchMode

    fake: Any = FakeTensorMode()
    return fake._mode_key is not None and getattr(TorchDispatchMode(), "_mode_key", None) is None


def told_to_skip() -> bool:
    weight = nn.Parameter(torch.zeros(1))
    fused: Any = torch.optim.Adam([weight], fused=True)
    return fused._step_supports_amp_scaling is True and not hasattr(
        torch.optim.SGD([weight]), "_step_supports_amp_scaling"
    )


def module_hooks() -> bool:
    module: Any = nn.Linear(1, 1)
    empty = not any(getattr(module, name) for name in HOOKS)
    module.register_forward_hook(lambda *_: None, with_kwargs=True, always_call=True)
    module.register_forward_pre_hook(lambda *_: None, with_kwargs=True)
    module.register_full_backward_hook(lambda *_: None)
    module.register_full_backward_pre_hook(lambda *_: None)
    return empty and all(getattr(module, name) for name in HOOKS)


def module_parts() -> bool:
    module = nn.Sequential(nn.Linear(1, 1, bias=False))
    return list(module._modules) == ["0"] and list(module[0]._parameters) == ["weight", "bias"]


def one_group() -> bool:
    """Of NCCL alone, whose communicators are ended together; who has none is not asked."""
    if not dist.is_nccl_available():
        return True
    return hasattr(dist.ProcessGroupNCCL, "_group_start") and hasattr(dist.ProcessGroupNCCL, "_group_end")


def compiler() -> bool:
    return find_spec("torch._dynamo") is not None and "__dynamo_disable" in inspect.getsource(torch._compile)


HOOKS = (
    *("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
    *("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_backward_hooks", "_backward_pre_hooks"),
)

TABLE: tuple[tuple[str, Callable[[], bool], str], ...] = (
    (
        "a batch of tensors in one call: clipping, norms, copies",
        foreach,
        "_foreach_mul_ _foreach_div_ _foreach_norm _foreach_copy_",
    ),
    (
        "in which order torch adds norms of several number formats",
        groups,
        "_foreach_utils _group_tensors_by_device_and_dtype",
    ),
    ("whether an optimizer's kernels can be told to skip", told_to_skip, "_step_supports_amp_scaling"),
    ("optimizers without an import of the compiler", compiler, "_dynamo __dynamo_disable"),
    ("the tensors of any value", pytree, "_pytree"),
    ("a mode that sees every operator", dispatch, "_python_dispatch"),
    ("the caller's modes, given to the threads of ranks", dispatch, "_len_torch_dispatch_stack _get_dispatch_stack_at"),
    (
        "the caller's modes, given to the threads of ranks",
        lambda: callable(torch._C._push_on_torch_dispatch_stack),
        "_push_on_torch_dispatch_stack",
    ),
    (
        "the caller's modes, given to the threads of ranks",
        lambda: callable(torch._C._pop_torch_dispatch_stack),
        "_pop_torch_dispatch_stack",
    ),
    ("which modes are torch's own tracers", tracers, "_mode_key"),
    (
        "the caller's modes, given to the threads of ranks",
        functions,
        "_len_torch_function_stack _get_function_stack_at _push_on_torch_function_stack _pop_torch_function_stack",
    ),
    (
        "the caller's switch, given to the threads of ranks",
        lambda: torch._C._is_multithreading_enabled() is True,
        "_is_multithreading_enabled",
    ),
    ("the caller's hooks, given to the threads of ranks", saved_tensors, "_top_saved_tensors_default_hooks _autograd"),
    ("a profile of all threads", profiler, "_profiler _ExperimentalConfig"),
    (
        "where a graph ends in a weight",
        lambda: isinstance(linear().next_functions[0][0], torch._C._functions.AccumulateGrad),
        "_functions",
    ),
    ("torch's core, of which the others are parts", lambda: hasattr(torch, "_C"), "_C"),
    ("casts that are forgotten after an update", autocast, "_is_any_autocast_enabled _autocast_supported_devices"),
    ("a backward for some inputs, without what is around it", backward, "_engine_run_backward"),
    ("a backward without what is around it", engine, "_execution_engine"),
    (
        "a view of a result that is no view for autograd",
        lambda: torch.ops.aten._unsafe_view.default(torch.ones(4), [2, 2]).shape == (2, 2),
        "_unsafe_view",
    ),
    (
        "the same, called without the way to it",
        lambda: torch.ops.aten._unsafe_view.default._op(torch.ones(4), [2, 2]).shape == (2, 2),
        "_op",
    ),
    (
        "the store of a group that somebody else made",
        lambda: callable(dist.distributed_c10d._get_default_store),
        "_get_default_store",
    ),
    ("a group's own sends and receives", lambda: callable(dist.ProcessGroup._get_backend), "_get_backend"),
    ("groups of NCCL that are ended together", one_group, "_group_start _group_end"),
    (
        "the names of groups, counted anew in each epoch",
        lambda: isinstance(dist.distributed_c10d._world.group_count, int),
        "_world",
    ),
    (
        "what a product's node has saved for its weight gradient",
        products,
        "_saved_ _raw_saved_ _sym_sizes _sym_strides _saved_alpha _saved_beta",
    ),
    ("what a norm's node has saved for its weight gradient", norm, "_saved_weight _saved_bias _saved_normalized_shape"),
    ("what a convolution's node has saved for its weight gradient", convolution, "_saved_bias_sym_sizes_opt"),
    (
        "what an embedding's node has saved for its weight gradient",
        embedding,
        "_saved_padding_idx _saved_scale_grad_by_freq _saved_sparse _saved_weight_sym_argsize_0",
    ),
    ("the Function of a node, and its hooks", own_function, "_forward_cls _raw_saved_tensors"),
    ("norms that count batches", lambda: issubclass(nn.BatchNorm1d, nn.modules.batchnorm._NormBase), "_NormBase"),
    ("which tensors share memory", storages, "_cdata"),
    ("whether a tensor was changed in place", lambda: torch.ones(1).add_(1)._version == 1, "_version"),
    (
        "hooks on a weight",
        lambda: nn.Linear(1, 1).weight._post_accumulate_grad_hooks is None,
        "_post_accumulate_grad_hooks",
    ),
    (
        "hooks on a weight, and on a module",
        lambda: nn.Linear(1, 1).weight._backward_hooks is None and module_hooks(),
        "_backward_hooks",
    ),
    (
        "a module's hooks, which cannot leave their process",
        module_hooks,
        "_forward_hooks _forward_pre_hooks _backward_pre_hooks _forward_hooks_with_kwargs _forward_hooks_always_called _forward_pre_hooks_with_kwargs",
    ),
    ("what a module holds itself, replaced without its setters", module_parts, "_modules _parameters"),
    (
        "the same of its buffers",
        lambda: set(nn.BatchNorm1d(2)._buffers) == {"running_mean", "running_var", "num_batches_tracked"},
        "_buffers",
    ),
    (
        "how long a communicator waits",
        lambda: hasattr(torch._C._distributed_c10d.Backend.Options, "_timeout"),
        "_timeout",
    ),
    ("whether a learning-rate scheduler turns an optimizer", scheduled, "_wrapped_by_lr_sched"),
)
"""(What it is for, whether this torch still has it and it still means what we take it for, private names.)"""

CHECKS = {name: check for _, check, names in TABLE for name in names.split()}


def own_names(tree: ast.Module) -> set[str]:
    """What a module of the house defines: functions, classes, arguments, variables, attributes of its own objects."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.arg):
            found.add(node.arg)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and of_self(node):
            found.add(node.attr)
    return found


def of_self(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")


def is_private(name: str) -> bool:
    return re.fullmatch(r"_\w*[A-Za-z]\w*", name) is not None and not name.endswith("__")


def private_names(tree: ast.Module, house: set[str]) -> Iterator[tuple[int, str]]:
    """(line, name) of what a module takes from others under a private name: attributes (of ``self`` such that no class of
    the house has), strings that are such names or begin one, and imports."""
    own = own_names(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
            parts = [*module.split("."), *(part for alias in node.names for part in alias.name.split("."))]
            found = parts if "torch" in parts[:1] or (not module and "torch" in parts) else []
        elif isinstance(node, ast.Attribute):
            found = [] if node.attr in (house if of_self(node) else own) else [node.attr]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value not in house:
            parts = node.value.split(".")
            found = parts if len(parts) == 1 or parts[0] == "torch" else []
        else:
            continue
        yield from ((node.lineno, name) for name in found if is_private(name) and name not in OTHERS)


def test_every_private_name_is_in_the_table() -> None:
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(HOUSE.rglob("*.py"))}
    house = set().union(*map(own_names, trees.values()))
    used = [(path, *found) for path, tree in trees.items() for found in private_names(tree, house)]
    unknown = [f"{path.relative_to(HOUSE)}:{line}: {name}" for path, line, name in used if name not in CHECKS]
    assert not unknown, "private names of torch without a test in TABLE:\n" + "\n".join(unknown)
    unused = CHECKS.keys() - {name for _, _, name in used}
    assert not unused, f"in TABLE, and no longer used: {unused}"


def test_a_private_name_is_found_however_it_is_reached() -> None:
    text = """
import torch._a
from torch.b import _c
class Thing:
    def __init__(self, x):
        self._own, self.x = x, x.untyped_storage()._d
        getattr(x, "_e"), getattr(x, f"_f_{x}"), x._own, self._g, __import__("torch._h")
"""
    tree = ast.parse(text)
    assert {name for _, name in private_names(tree, own_names(tree))} == {"_a", "_c", "_d", "_e", "_f_", "_g", "_h"}


@pytest.mark.parametrize("name", CHECKS)
def test_torch_still_has(name: str) -> None:
    assert CHECKS[name]()
