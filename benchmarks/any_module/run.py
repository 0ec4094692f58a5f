"""Which classes of other people's libraries are cut, into how many pieces, and are they equal to the plain module?

Needs nothing beside vpipe for torch's own modules; torchvision and timm are tried where they can be imported."""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
import common
import torch
from torch import Tensor, nn

Make = Callable[[], nn.Module]
Example = dict[str, Tensor]


def without_dropout(module: nn.Module) -> nn.Module:
    """Dropout draws by unit and layer in a pipeline, and one after the other in a plain module."""
    for each in module.modules():
        for name in ("p", "drop_prob", "drop_path_rate", "drop_rate"):
            if isinstance(getattr(each, name, None), float):
                setattr(each, name, 0.0)
    return module


def picture(rows: int = 2, size: int = 64) -> Example:
    return {"x": torch.randn(rows, 3, size, size, generator=torch.Generator().manual_seed(1))}


def own() -> Iterator[tuple[str, Make, Example]]:
    numbers = torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(1))
    layer = nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True)
    yield "torch TransformerEncoder", lambda: nn.TransformerEncoder(copy.deepcopy(layer), 4), {"src": numbers}
    yield (
        "torch Transformer",
        lambda: nn.Transformer(16, 2, 2, 2, 32, 0.0, batch_first=True),
        {"src": numbers, "tgt": numbers.flip(1)},
    )


def import_torchvision() -> Any:
    """The package, also where its own operators were built for another torch."""
    if "torchvision" not in sys.modules:
        library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        KEPT.append(library)
    import torchvision

    return torchvision


KEPT: list[Any] = []


def torchvision_models() -> Iterator[tuple[str, Make, Example]]:
    torchvision = import_torchvision()

    for name in torchvision.models.list_models(module=torchvision.models):
        size = 299 if "inception" in name else 224 if name.startswith(("vit", "maxvit")) else 64
        yield (
            f"torchvision {name}",
            lambda name=name: torchvision.models.get_model(name, weights=None),
            picture(2, size),
        )
    for name in torchvision.models.list_models(module=torchvision.models.segmentation):
        make = torchvision.models.get_model
        yield (
            f"torchvision {name}",
            lambda name=name, make=make: make(name, weights=None, weights_backbone=None),
            picture(2, 64),
        )


def timm_models() -> Iterator[tuple[str, Make, Example]]:
    import_torchvision()
    import timm

    seen = set()
    for name in timm.list_models():
        family = name.split("_")[0].rstrip("0123456789")
        if family in seen:
            continue
        seen.add(family)
        size = timm.models.get_pretrained_cfg(name)
        pixels = size.input_size[-1] if size is not None else 224
        yield f"timm {name}", lambda name=name: timm.create_model(name), picture(2, pixels)


SOURCES = {"torch": own, "torchvision": torchvision_models, "timm": timm_models}


def tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from tensors(each)
    elif isinstance(value, tuple | list):
        for each in value:
            yield from tensors(each)


def loss_of(output: Any) -> Tensor:
    return torch.stack([each.float().square().mean() for each in tensors(output) if each.is_floating_point()]).sum()


def tried(make: Make, example: Example) -> dict[str, Any]:
    """How a class fares: pieces, the heaviest one's share of the weights, and what differs from the plain module."""
    from vpipe.models.huggingface.module import cut_module
    from vpipe.models.model import run

    torch.manual_seed(0)
    module = without_dropout(make()).train()
    if "x" in example:  # whatever its forward calls a picture
        example = {next(iter(__import__("inspect").signature(module.forward).parameters)): example["x"]}
    plain = copy.deepcopy(module)
    try:
        layers, tied = cut_module(module, example)
    except Exception as error:
        return {"pieces": 1, "why": " ".join(str(error).split())[:160] or type(error).__name__}
    expected = loss_of(plain(**example))
    expected.backward()
    modules = [layer.build() for layer in layers]
    found = loss_of(run(layers, modules, example))
    found.backward()
    gradients: dict[str, Tensor] = {}
    for part in modules:
        names = part.own_names()  # type: ignore[operator]
        for name, parameter in part.named_parameters():
            if parameter.grad is not None:
                full = names.get(name, name)
                gradients[full] = gradients[full] + parameter.grad if full in gradients else parameter.grad
    differ = [
        name
        for name, parameter in plain.named_parameters()
        if parameter.grad is not None and (name not in gradients or not torch.equal(gradients[name], parameter.grad))
    ]
    sizes = [sum(parameter.numel() for parameter in part.parameters()) for part in modules]
    why = "" if torch.equal(found, expected) else "the loss differs"
    if differ:
        why = f"{len(differ)} gradients differ, first {differ[0]}" + (f"; {why}" if why else "")
    return {"pieces": len(layers), "heaviest": max(sizes) / max(1, sum(sizes)), "why": why, "tied": len(tied)}


def main() -> None:
    def more(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--sources", nargs="+", choices=SOURCES, default=list(SOURCES))
        parser.add_argument("--only", default="", help="classes whose name has this")
        parser.add_argument("--most-parameters", type=float, default=100e6, help="leave out what is larger")

    arguments = common.options(__doc__ or "", more=more)
    torch.set_num_threads(1)
    rows: dict[str, Any] = {}
    for source in arguments.sources:
        try:
            classes = list(SOURCES[source]())
        except ImportError as error:
            print(f"{source} is left out: {error}", file=sys.stderr)
            continue
        for name, make, example in classes[: 5 if arguments.quick else None]:
            if arguments.only not in name:
                continue
            try:
                with torch.device("meta"):
                    size = sum(parameter.numel() for parameter in make().parameters())
                if size > arguments.most_parameters:
                    continue
            except Exception:
                size = 0
            try:
                rows[name] = tried(make, example)
            except Exception as error:
                rows[name] = {"pieces": 0, "why": f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"}
            row = rows[name]
            state = "equal" if row["pieces"] > 1 and not row["why"] else row["why"] or "one piece"
            print(f"{name:44}{row['pieces']:4}  {row.get('heaviest', 1):5.0%}  {state}", file=sys.stderr, flush=True)
    common.finish(arguments, {"rows": rows}, table)


def table(result: dict[str, Any]) -> str:
    rows = result["rows"].values()
    cut = [row for row in rows if row["pieces"] > 1]
    return f"{len(rows)} classes, {len(cut)} cut, {sum(not row['why'] for row in cut)} of them equal to the bit"


if __name__ == "__main__":
    main()
