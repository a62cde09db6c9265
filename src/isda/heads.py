"""The final linear layer of a model: found automatically, or specified as a layer or by name."""

import inspect
from collections.abc import Sequence
from typing import Any, TypeAlias, TypeGuard

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter

from isda.criterion import Criterion

__all__ = [
    "Head",
    "LinearLayer",
    "find_head",
    "require_criterion",
    "require_heads",
    "require_model",
    "sizes",
]

Head: TypeAlias = nn.Module | str
"""A layer of the model, or its name as in ``model.named_modules()``."""

LinearLayer: TypeAlias = nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d
"""Layers that a criterion can be attached to; convolutions only if they are 1×1."""

_KINDS = "an nn.Linear or a 1×1 convolution (stride 1, no padding, one group)"


def find_head(model: nn.Module) -> LinearLayer:
    """Final layer of a model: timm's ``get_classifier()``, or else the last linear layer.

    Linear layers are ``nn.Linear`` and 1×1 convolutions. A second layer of the same kind with the
    same number of outputs, such as an auxiliary classifier, is ambiguous and raises an error.
    """
    inner = _unwrap(model)
    if callable(getattr(inner, "get_classifier", None)):
        classifier = inner.get_classifier()
        if isinstance(classifier, nn.Module) and _is_linear(classifier):
            return classifier
    layers = {
        name: module
        for name, module in inner.named_modules()
        if isinstance(module, LinearLayer) and "original_module" not in name.split(".")  # of peft
    }
    linear = {name: module for name, module in layers.items() if _is_linear(module)}
    wide = ""
    if layers and list(layers)[-1] not in linear:
        name, layer = layers.popitem()
        wide = f"; {name or 'it'} ({layer}) is not linear per pixel: only 1×1 convolutions qualify"
    if not linear:
        raise ValueError(
            f"model must end in a linear layer, {_KINDS}; found none in {type(inner).__name__}"
            f"{wide}; the order of the arguments is attach(model, criterion)"
        )
    last = list(linear.values())[-1]
    _require_no_adapter(inner, last)
    outputs = _num_outputs(last)
    candidates = [
        name
        for name, module in linear.items()
        if isinstance(module, nn.Linear) == isinstance(last, nn.Linear)
        and _num_outputs(module) == outputs
    ]
    if len(candidates) > 1:
        others = [name for name, module in linear.items() if isinstance(module, nn.Linear)]
        others = [name for name in others if name not in candidates]
        also = f"; other linear layers: {', '.join(others[-4:])}" if others else ""
        raise ValueError(
            f"model must have one final linear layer, found {len(candidates)} with {outputs} "
            f"outputs ({', '.join(candidates[-4:])}{also}){wide}; pass head= with the name of one "
            "of them, or with a list of names if the model adds their outputs"
        )
    return last


def require_heads(model: nn.Module, head: Head | Sequence[Head] | None) -> tuple[LinearLayer, ...]:
    """The layers specified by ``head=``: one, or several whose outputs are summed."""
    if head is None:
        given: Sequence[Head] = [find_head(model)]
    else:
        given = head if isinstance(head, list | tuple) else [head]  # type: ignore[list-item]
    heads = tuple(_require_head(model, each) for each in given)
    if not heads or len({*map(id, heads)}) < len(heads):
        raise ValueError(f"head must specify one or more distinct layers, got {head!r}")
    if len({_num_outputs(each) for each in heads}) > 1 or len({*map(type, heads)}) > 1:
        raise ValueError(
            "the outputs of the head layers are summed, so the layers must be of the same type and "
            f"have the same number of outputs, got {', '.join(map(str, heads))}"
        )
    return heads


def require_model(model: Any) -> None:
    """Raise ValueError if a criterion cannot be attached to the model."""
    if not isinstance(model, nn.Module):
        raise ValueError(f"model must be an nn.Module, got {type(model).__name__}")
    if isinstance(model, torch.jit.ScriptModule):
        raise ValueError(
            "model must be a Python module, got the output of torch.jit.script or "
            "torch.jit.trace, which does not support hooks: attach to the original model"
        )


def require_criterion(criterion: Any, heads: Sequence[LinearLayer]) -> None:
    """Raise ValueError for a loss that cannot be called with the features and weight of a layer."""
    if isinstance(criterion, type) or not callable(criterion):
        raise ValueError(
            f"criterion must be a loss module, not a class, got {criterion!r}; pass options such "
            "as lambda_0= by keyword"
        )
    try:
        call = inspect.signature(criterion.forward)
        call.bind("features", "weight", "target", bias=None, logits=None)
    except (AttributeError, TypeError):
        name = type(criterion).__name__
        if isinstance(criterion, nn.CrossEntropyLoss):
            fix = "leave it out; weight, label_smoothing and ignore_index are options of attach"
        elif isinstance(criterion, nn.BCEWithLogitsLoss):
            fix = (
                "use isda.ISDABCEWithLogitsLoss(num_features, num_classes) for multi-label targets"
            )
        elif isinstance(criterion, nn.Module) and _is_linear(criterion):
            fix = "pass the layer as head="
        else:
            fix = "a loss that takes only logits cannot be attached"
        raise ValueError(
            "criterion must support the call criterion(features, weight, target, bias=, logits=), "
            f"which {name} does not: {fix}"
        ) from None
    built_in = isinstance(criterion, Criterion) and type(criterion).forward.__module__.startswith(
        "isda."
    )
    if built_in and (criterion.num_features, criterion.num_classes) != sizes(heads):
        features, classes = sizes(heads)
        raise ValueError(
            f"criterion must be for {features} features and {classes} classes, like the attached "
            f"layer, got {type(criterion).__name__} for {criterion.num_features} and "
            f"{criterion.num_classes}; after adding classes, call its grow() first"
        )


def sizes(heads: Sequence[LinearLayer]) -> tuple[int, int]:
    """Total number of features of all layers, and number of classes."""
    return sum(map(_num_inputs, heads)), _num_outputs(heads[0])


def _require_head(model: nn.Module, head: Head) -> LinearLayer:
    if isinstance(head, str):
        layers = {**dict(model.named_modules()), **dict(_unwrap(model).named_modules())}
        if head not in layers:
            names = [name for name, module in layers.items() if _is_linear(module)]
            raise ValueError(
                f"head must be the name of a layer, got {head!r}; the last linear layers are "
                f"{', '.join(names[-4:]) or 'none'}"
            )
        layer = layers[head]
    elif isinstance(head, nn.Module):
        layer = head
    else:
        raise ValueError(f"head must be a layer, its name, or a list of these, got {head!r}")
    if not any(layer is module for module in model.modules()):
        raise ValueError(f"head must be a module of the model, got {layer}")
    if not _is_linear(layer):
        raise ValueError(f"head must be {_KINDS}, got {layer}")
    _require_no_adapter(model, layer)
    if isinstance(layer.weight, UninitializedParameter) or layer.weight.is_meta:
        raise ValueError(
            f"head must have an initialised weight, got {layer}: before attach, run one batch "
            "through a lazy model, or call to_empty() on a model on the meta device and "
            "initialise it"
        )
    return layer


def _require_no_adapter(model: nn.Module, layer: nn.Module) -> None:
    """Raise ValueError if a layer is part of one that peft has adapted."""
    for adapted in model.modules():
        if hasattr(adapted, "base_layer") and any(part is layer for part in adapted.modules()):
            raise ValueError(
                f"head must not be part of an adapter such as LoRA, got {layer}: its output is "
                "only a part of the logits. Train the whole layer instead; with peft, list it in "
                "modules_to_save"
            )


def _unwrap(model: nn.Module) -> Any:
    """The model inside the wrappers of DistributedDataParallel and ``torch.compile``."""
    inner: Any = model
    while isinstance(inner, nn.Module):
        wrapped = inner._modules.get("_orig_mod", inner._modules.get("module"))
        if wrapped is None or len(inner._modules) > 1:
            break
        inner = wrapped
    return inner


def _num_inputs(head: LinearLayer) -> int:
    return head.in_features if isinstance(head, nn.Linear) else head.in_channels


def _num_outputs(head: LinearLayer) -> int:
    return head.out_features if isinstance(head, nn.Linear) else head.out_channels


def _is_linear(module: nn.Module) -> TypeGuard[LinearLayer]:
    if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        simple = (module.kernel_size, module.stride, module.groups)
        ones = (1,) * len(module.kernel_size)
        no_padding = module.padding in ("valid", (0,) * len(ones))
        return simple == (ones, ones, 1) and no_padding
    return isinstance(module, nn.Linear)
