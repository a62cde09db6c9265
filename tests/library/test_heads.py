"""Which layer is attached, and the errors if there is none."""

import copy
import re

import pytest
import torch
from torch import Tensor, nn

import isda
from isda import attach
from isda.heads import find_head

C = 5


class Backwards(nn.Module):
    """The head is registered before the body, so that it is not the last linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, C)
        self.body = nn.Linear(4, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).relu())


class Timm(Backwards):
    def get_classifier(self) -> nn.Module:
        return self.head


class Wrapper(nn.Module):
    """Like DistributedDataParallel, but without a process group."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x)


def test_classifier_of_timm():
    model = Timm()
    assert find_head(model) is model.head
    assert find_head(Wrapper(model)) is model.head
    assert find_head(torch.compile(Wrapper(model))) is model.head
    model.get_classifier = nn.Identity  # no linear layer
    for other in (model, Backwards()):
        assert find_head(other) is other.body  # falls back to the last one


def test_a_model_with_a_submodule_called_module():
    """Not a wrapper, because it has its own head."""

    class Model(Backwards):
        def __init__(self) -> None:
            super().__init__()
            self.module = Timm()
            self.classifier = nn.Linear(8, 3)

    model = Model()
    assert find_head(model) is model.classifier


@pytest.mark.parametrize("name", ["resnetv2_50x1_bit", "dpn48b"])
def test_timm_models_with_a_convolution_as_head(name):
    timm = pytest.importorskip("timm")
    model = timm.create_model(name, num_classes=C)
    criterion = attach(model, lambda_0=1.0, ramp="constant", covariance="diagonal")
    x, target = torch.randn(2, 3, 64, 64), torch.tensor([1, 4])
    features = model.forward_head(model.forward_features(x), pre_logits=True).flatten(1)
    head = model.get_classifier()
    explicit = isda.ISDALoss(
        features.shape[1], C, lambda_0=1.0, ramp="constant", covariance="diagonal"
    )
    expected = explicit(features, head.weight.flatten(1), target, bias=head.bias)
    torch.testing.assert_close(criterion(model(x), target), expected, rtol=1e-3, atol=1e-4)


def test_last_layer_is_a_convolution():
    body = nn.Sequential(nn.Conv2d(3, C, 3), nn.Flatten(), nn.Linear(8, C))
    model = nn.Sequential(body, nn.Conv2d(4, C, 1))
    assert find_head(model) is model[-1]
    with pytest.raises(ValueError, match=r"found 2 with 5 outputs \(0, 1\); pass head= with"):
        find_head(nn.Sequential(nn.Conv2d(3, C, 1), nn.Conv2d(C, C, 1)))


def test_head_by_name():
    model = Backwards()
    for wrapped in (model, Wrapper(model), torch.compile(model)):
        assert attach(wrapped, head="head").heads == (model.head,)
    assert attach(Wrapper(model), head="module.head").heads == (model.head,)


class NoBias(nn.Module):
    def forward(self, features: Tensor, weight: Tensor, target: Tensor, *, logits: Tensor): ...


class NoLogits(nn.Module):
    def forward(self, features: Tensor, weight: Tensor, target: Tensor, *, bias: Tensor): ...


def test_a_subclass_with_a_forward_of_its_own_may_have_other_sizes():
    """For example because it first projects the features to fewer dimensions."""

    class Projected(isda.ISDALoss):
        def forward(self, features, weight, target, *, bias=None, logits=None):
            return super().forward(features[:, :3], weight[:, :3], target, logits=logits)

    model = nn.Linear(8, C)
    criterion = attach(model, Projected(3, C, ramp="constant"))
    assert criterion(model(torch.randn(2, 8)), torch.tensor([1, 4])) > 0


def mistakes() -> dict:
    model = Backwards()
    lazy = nn.Sequential(nn.Linear(4, 8), nn.LazyLinear(C))
    return {
        "unknown name": (
            lambda: attach(model, head="fc"),
            "head must be the name of a layer, got 'fc'; the last linear layers are head, body",
        ),
        "no layer": (
            lambda: attach(model, head=[]),
            "head must specify one or more distinct layers, got []",
        ),
        "one layer twice": (
            lambda: attach(model, head=["head", "head"]),
            "head must specify one or more distinct layers, got ['head', 'head']",
        ),
        "different heads": (
            lambda: attach(model, head=["head", "body"]),
            "the outputs of the head layers are summed, so the layers must be of the same type",
        ),
        "stride": (
            lambda: attach(m := nn.Sequential(nn.Conv2d(3, 4, 1, stride=2)), head=m[0]),
            "head must be an nn.Linear or a 1×1 convolution (stride 1, no padding, one group), got",
        ),
        "padding": (
            lambda: attach(m := nn.Sequential(nn.Conv2d(3, 4, 1, padding=1)), head=m[0]),
            "head must be an nn.Linear or a 1×1 convolution (stride 1, no padding, one group), got",
        ),
        "lazy": (lambda: attach(lazy), "run one batch through a lazy model"),
        "swapped": (
            lambda: attach(nn.CrossEntropyLoss(), model),
            "found none in CrossEntropyLoss; the order of the arguments is attach(model",
        ),
        "swapped, attached": (
            lambda: attach(isda.ISDALoss(8, C), model),
            "found none in ISDALoss; the order of the arguments is attach(model",
        ),
        "head of another type": (
            lambda: attach(model, head=2),
            "head must be a layer, its name, or a list of these, got 2",
        ),
        "several heads": (
            lambda: attach(nn.ModuleDict({"low": nn.Linear(4, C), "high": nn.Linear(8, C)})),
            "(low, high); pass head= with the name of one of them, or with a list of names if the "
            "model adds their outputs",
        ),
        "head before a backbone that ends in convolutions": (
            lambda: attach(
                nn.ModuleDict(
                    {"head": nn.Linear(8, C), "a": nn.Conv2d(4, 8, 1), "b": nn.Conv2d(8, 8, 1)}
                )
            ),
            "found 2 with 8 outputs (a, b; other linear layers: head); pass head= with the name",
        ),
        "class as criterion": (
            lambda: attach(model, isda.ISDALoss),
            "criterion must be a loss module, not a class, got <class 'isda.loss.ISDALoss'>",
        ),
        "criterion of another size": (
            lambda: attach(nn.Linear(8, C), isda.ISDALoss(9, C)),
            "for 8 features and 5 classes, like the attached layer, got ISDALoss for 9 and 5",
        ),
        "option as criterion": (
            lambda: attach(model, 0.5),
            "not a class, got 0.5; pass options such as lambda_0= by keyword",
        ),
        "no module": (lambda: attach("resnet18"), "model must be an nn.Module, got str"),
        "cross entropy": (
            lambda: attach(model, nn.CrossEntropyLoss()),
            "which CrossEntropyLoss does not: leave it out; weight, label_smoothing and",
        ),
        "no bias": (lambda: attach(model, NoBias()), "which NoBias does not: a loss that takes"),
        "no logits": (
            lambda: attach(model, NoLogits()),
            "criterion must support the call criterion(features, weight, target, bias=, logits=)",
        ),
        "binary": (
            lambda: attach(model, nn.BCEWithLogitsLoss()),
            "which BCEWithLogitsLoss does not: use isda.ISDABCEWithLogitsLoss(num_features, num_cl",
        ),
        "layer": (
            lambda: attach(model, model.head),
            "which Linear does not: pass the layer as head=",
        ),
        "function": (
            lambda: attach(model, torch.nn.functional.cross_entropy),
            "which function does not: a loss that takes only logits cannot be attached",
        ),
    }


@pytest.mark.parametrize("name", mistakes())
def test_mistakes_are_named(name):
    make, message = mistakes()[name]
    with pytest.raises(ValueError, match=re.escape(message)):
        make()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:FutureWarning")
def test_scripted_models():
    """torch.jit.script does not support hooks; the advice in the error message works."""
    model = Backwards()
    criterion = attach(model, head="head", ramp="constant")
    with pytest.raises(AttributeError, match=r"torch\.jit\.script: call criterion\.remove\(\)"):
        torch.jit.script(model)
    copied = copy.deepcopy(model)
    criterion.remove()
    with pytest.raises(AttributeError, match="before copying the model"):
        torch.jit.script(copied)  # still has its hook
    scripted = torch.jit.script(copy.deepcopy(model))
    with pytest.raises(ValueError, match="attach to the original model"):
        attach(scripted)


def test_swapped_arguments_of_the_criterion():
    model = nn.Linear(4, C)
    criterion = attach(model, ramp="constant")
    x, target = torch.randn(3, 4), torch.tensor([0, 1, 2])
    with pytest.raises(ValueError, match=r"got torch\.int64; the order .* criterion\(logits, targ"):
        criterion(target, model(x))
    with pytest.raises(TypeError, match="target must be a tensor, got list"):
        criterion(model(x), [0, 1, 2])
    with pytest.raises(TypeError, match="covariance_index must be a tensor, got list"):
        criterion(model(x), target, covariance_index=[0, 1, 2])


def test_data_parallel_is_refused():
    """Replicas run in threads, each with a part of the batch."""
    model = nn.Linear(4, C)
    _criterion = attach(model, ramp="constant")
    replica = model._replicate_for_data_parallel()
    replica.weight, replica.bias = model.weight.detach(), model.bias.detach()
    with pytest.raises(ValueError, match="use DistributedDataParallel"):
        replica(torch.randn(3, 4))


@pytest.mark.parametrize("number", [0, 7])
def test_sharded_weight_without_a_way_to_gather_it(number):
    """DeepSpeed ZeRO-3 leaves an empty tensor, FSDP1 a part of the weight."""
    model = nn.Linear(4, C)
    criterion = attach(model, ramp="constant")
    logits = model(torch.randn(3, 4))
    model.weight.data = torch.empty(number)
    with pytest.raises(ValueError, match=rf"has shape \({number},\) outside of its forward pass"):
        criterion(logits, torch.tensor([0, 1, 2]))


class Adapted(nn.Module):
    """Like a layer with LoRA in peft."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.base_layer = layer
        self.lora_A = nn.ModuleDict({"default": nn.Linear(layer.in_features, 2, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(2, layer.out_features, bias=False)})

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.lora_B["default"](self.lora_A["default"](x))


class Saved(nn.Module):
    """Like a layer in modules_to_save of peft, which trains a copy of it."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.original_module = layer
        self.modules_to_save = nn.ModuleDict({"default": nn.Linear(layer.in_features, C)})

    def forward(self, x: Tensor) -> Tensor:
        return self.modules_to_save["default"](x)


def test_layers_that_peft_adapts():
    model = nn.Sequential(Adapted(nn.Linear(4, 8)), nn.ReLU(), nn.Linear(8, C))
    assert find_head(model) is model[2]
    model[2] = Adapted(model[2])
    for head in (None, "2.base_layer", ["2.base_layer", "2.lora_B.default"]):
        with pytest.raises(ValueError, match=r"head must not be part of an adapter .*modules_to_s"):
            attach(model, head=head)
    model[2] = Saved(model[2].base_layer)
    assert find_head(model) is model[2].modules_to_save["default"]


def test_a_last_convolution_that_is_not_1x1_is_named():
    last = nn.Conv2d(4, C, 3)
    shown = re.escape(
        "; 1 (Conv2d(4, 5, kernel_size=(3, 3), stride=(1, 1))) is not linear per pixel: only 1×1"
    )
    with pytest.raises(ValueError, match=f"found none in Sequential{shown}"):
        attach(nn.Sequential(nn.Conv2d(3, 4, 3), last))
    with pytest.raises(ValueError, match=f"found none in Conv2d{shown.replace('1', 'it', 1)}"):
        attach(last)
    inner = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 1))
    shown = shown.replace("1", "2", 1)
    with pytest.raises(ValueError, match=rf"found 2 with 4 outputs .*{shown}.*; pass head="):
        attach(nn.Sequential(*inner, last))
