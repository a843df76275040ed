"""Models on paper: the bytes of a real step, no values, and nothing left behind."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn import functional
from transformers import MixtralConfig, MixtralForCausalLM

import lowtide.torch as lt
from lowtide.errors import InputError
from lowtide.torch.memory.tracker import Log, storage_bytes, watching
from lowtide.torch.paper.on_paper import on_paper
from tests.torch.models import MODELS, Model, model


class Seen(NamedTuple):
    """What a piece of code made: bytes more after it, bytes at its worst moment, and of all storages."""

    now: int
    peak: int
    sizes: list[int]


def seen(function: Callable[[], Any]) -> Seen:
    """Run it and let go of its result."""
    log = Log()
    with watching(log):
        function()
    return Seen(*log.level(0, len(log.events)), list(log.sizes.values()))


def step(model: nn.Module, inputs: dict[str, Any]) -> Seen:
    """A forward and a backward."""
    return seen(lambda: model(**inputs).loss.backward())


def everything(model: nn.Module) -> dict[str, Any]:
    """All that modules have, by identity."""
    rows = [(name, module, vars(module)) for name, module in model.named_modules()]
    found = {f"{name}.{key}": id(value) for name, _, row in rows for key, value in row.items()}
    for name, module, _ in rows:
        found |= {f"{name}.{key}": id(value) for key, value in module._parameters.items()}
        found |= {f"{name}.{key}": id(value) for key, value in module._buffers.items()}
    return found


@pytest.mark.untraced
@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("name", MODELS)
def test_a_step_takes_the_bytes_of_a_real_one(name: str, device: str) -> None:
    made, real = model(name, device=device), model(name)
    before, values = everything(made.module), {key: t.clone() for key, t in made.module.state_dict().items()}
    drawn = torch.get_rng_state(), random.getstate(), str(np.random.get_state())  # noqa: NPY002
    with on_paper(made.module, (), made.kwargs) as (args, inputs):
        assert args == ()
        assert all(isinstance(parameter, FakeTensor) for parameter in made.module.parameters())
        assert storage_bytes(list(made.module.parameters())) == storage_bytes(list(real.module.parameters()))
        paper = step(made.module, inputs)
        assert all(parameter.grad is not None for parameter in made.module.parameters())
    assert torch.equal(drawn[0], torch.get_rng_state())
    assert drawn[1:] == (random.getstate(), str(np.random.get_state()))  # noqa: NPY002
    assert everything(made.module) == before
    assert all(parameter.grad is None for parameter in made.module.parameters())
    if device == "cpu":
        assert all(torch.equal(t, values[key]) for key, t in made.module.state_dict().items())
    assert paper == step(real.module, real.kwargs)


def checkpointed(made: Model) -> Model:
    """The model with every entry of its module lists checkpointed."""
    for module in list(made.module.modules()):
        for part in module if isinstance(module, nn.ModuleList) else ():
            part.forward = partial(lt.checkpoint, part.forward)
    return made


@pytest.mark.long
@pytest.mark.parametrize("name", MODELS)
def test_checkpointed_blocks_take_the_bytes_of_real_ones(name: str) -> None:
    made = checkpointed(model(name))
    with on_paper(made.module, (), made.kwargs) as (_, inputs):
        paper = step(made.module, inputs)
    real = step(made.module, made.kwargs)
    assert paper[:2] == real[:2]
    assert real.peak < step(model(name).module, made.kwargs).peak


def test_a_model_without_values_needs_no_memory() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2**20, 2**20), nn.GELU(), nn.Linear(2**20, 1))
        x = torch.empty(2**10, 2**20, requires_grad=True)
    with on_paper(model, (x,)) as (args, _):
        assert args[0].requires_grad
        assert seen(lambda: model(*args).sum().backward()).peak > 2**42
        assert args[0].grad is not None
    assert x.grad is None


def test_what_is_shared_stays_shared() -> None:
    model: Any = nn.Module()
    flat = torch.zeros(10)
    model.one, model.two = nn.Parameter(flat[:4]), nn.Parameter(flat[4:].view(2, 3))
    model.tied = model.one
    model.list = [flat, {"a": flat}, "words"]
    model.register_buffer("none", None)
    wide = torch.zeros(1000, 1000)
    with on_paper(model, (wide, [wide[2:5], wide.t()])) as ((whole, (rows, turned)), _):
        assert model.tied is model.one
        assert storage_bytes([model.one, model.two]) == 40
        assert (model.two.storage_offset(), model.two.shape) == (4, (2, 3))
        assert model.list[1]["a"] is model.list[0]
        assert (storage_bytes([whole, rows, turned]), rows.storage_offset(), turned.stride()) == (
            4_000_000,
            2000,
            (1, 1000),
        )
        assert isinstance(whole, FakeTensor)
        assert model.list[2] == "words"
    assert model.list[0] is flat


def test_a_storage_that_is_no_whole_number_of_numbers() -> None:
    bytes_ = torch.arange(7, dtype=torch.uint8)
    with on_paper(nn.Identity(), (bytes_, bytes_[:4].view(torch.int32))) as ((short, word), _):
        assert torch.equal(short, bytes_)
        assert word.item() == bytes_[:4].view(torch.int32).item()


def test_all_is_put_back_after_an_error() -> None:
    resnet: Any = model("resnet").module
    before = everything(resnet)

    def spoil() -> None:
        resnet.register_buffer("more", torch.zeros(3))
        resnet.counter = 3
        del resnet.classifier
        raise KeyError

    with pytest.raises(KeyError), on_paper(resnet):
        spoil()
    assert everything(resnet) == before
    assert "more" not in resnet.state_dict()


def test_a_default_device_around_does_not_matter() -> None:
    model = Says(lambda x: x + torch.ones(3))
    with torch.device("meta"), on_paper(model, (torch.zeros(2, 3, requires_grad=True),)) as (args, _):
        assert model(*args).device.type == "cpu"


def test_arguments_may_be_fake() -> None:
    with FakeTensorMode():
        x, places = torch.ones(2, 3, requires_grad=True), torch.zeros(4, dtype=torch.long)
    assert isinstance(x, FakeTensor)
    model = Says(lambda x, places: x.sum() + places.sum())
    with on_paper(model, (x,), {"places": places}) as (args, kwargs):
        assert args[0].fake_mode is not x.fake_mode
        model(*args, **kwargs).backward()
        assert args[0].grad is not None


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize(
    ("sizes", "dtype"),
    [
        ({"num_layers": 2, "dropout": 0.1}, torch.float32),
        ({"bidirectional": True, "batch_first": True}, torch.float32),
        ({"bias": False}, torch.bfloat16),
        ({}, torch.float64),
    ],
    ids=["layers", "both ways", "bfloat16", "float64"],
)
def test_recurrent_layers_keep_what_real_ones_keep(
    kind: type[nn.LSTM], sizes: dict[str, Any], dtype: torch.dtype
) -> None:
    model, x = kind(24, 40, dtype=dtype, **sizes), torch.randn(7, 9, 24, dtype=dtype)

    def run(x: torch.Tensor) -> Seen:
        return seen(lambda: model(x)[0].sum().backward())

    with on_paper(model, (x,)) as (args, _):
        assert all(isinstance(weight, FakeTensor) for weight in model._flat_weights)
        paper = run(*args)
    # The libraries that run an LSTM layer as one operation are not the same on all machines.
    assert paper.peak == pytest.approx(run(x).peak, rel=0.02 if kind is nn.LSTM else 0)


def test_a_recurrent_layer_that_is_not_trained_keeps_nothing() -> None:
    model, x = nn.LSTM(24, 40).eval(), torch.randn(7, 9, 24)
    with torch.no_grad(), on_paper(model, (x,)) as (args, _):
        assert seen(lambda: model(*args)) == seen(lambda: model(x))


def experts() -> Model:
    """Words that are sent to some of the experts, whose products are made group by group, in float32."""
    sizes = {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = MixtralConfig(
        vocab_size=97, num_key_value_heads=2, num_local_experts=4, output_router_logits=True, **sizes
    )
    words = torch.randint(1, 97, (2, 12))
    return Model(MixtralForCausalLM(config).train(), {"input_ids": words, "labels": words, "use_cache": False})


def test_experts_take_the_bytes_of_real_ones() -> None:
    made = experts()
    with on_paper(made.module, (), made.kwargs) as (_, inputs):
        paper = step(made.module, inputs)
    assert paper[:2] == step(made.module, made.kwargs)[:2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_of_groups_have_the_shapes_of_real_ones(dtype: torch.dtype) -> None:
    rows, weights = torch.randn(8, 16, dtype=dtype), torch.randn(2, 16, 24, dtype=dtype)
    ends = torch.tensor([3, 8], dtype=torch.int32)
    for a, b, offsets in (
        (rows, weights, ends),
        (weights.mT, rows.t(), ends),
        (rows.t(), torch.randn(8, 24, dtype=dtype), ends),
        (weights.mT, weights, None),
    ):
        real = torch._grouped_mm(a, b, offs=offsets)
        with on_paper(nn.Identity(), (a.requires_grad_(), b.requires_grad_())) as (given, _):
            paper = torch._grouped_mm(given[0], given[1], offs=offsets)
            assert isinstance(paper, FakeTensor)
            assert (paper.shape, paper.dtype) == (real.shape, real.dtype)
        a.requires_grad_(False), b.requires_grad_(False)


def test_products_of_groups_that_do_not_fit_are_refused() -> None:
    given = torch.zeros(8, 16, requires_grad=True), torch.zeros(2, 20, 24), torch.tensor([3, 8], dtype=torch.int32)
    with pytest.raises((RuntimeError, ValueError)), on_paper(nn.Identity(), given) as (args, _):
        torch._grouped_mm(args[0], args[1], offs=args[2])


def test_numbers_are_counted_as_far_as_they_are_asked_for() -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        places = x.detach().argmax(-1)
        assert torch.bincount(places, minlength=7).shape == (7,)
        assert torch.bincount(places, minlength=7).dtype is torch.long
        assert torch.bincount(places, x[:, 0], 7).dtype is torch.float
        assert torch.bincount(places, x[:, 0].half(), 7).dtype is torch.double
        return torch.bincount(places)

    model = Says(forward)
    with pytest.raises(InputError, match="looks at values"), on_paper(model, (torch.zeros(5, 3),)):
        model(torch.zeros(5, 3).cos_().add_(model.scale.detach()))


class Says(nn.Module):
    """A module that does as it is told."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


# --- values


def test_masks_and_positions_have_values() -> None:
    def forward(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        assert not isinstance(mask, FakeTensor)
        assert mask.all()
        assert torch.arange(4, device="cuda")[-1].item() == 3
        assert torch.rand([]) < 1
        assert mask.nonzero().shape == (6, 2)
        x = x * mask.to(x.dtype)
        assert isinstance(x, FakeTensor)
        return x

    mask = torch.ones(2, 3, dtype=torch.bool)
    with on_paper(Says(forward), (torch.zeros(2, 3, requires_grad=True), mask)) as (args, _):
        Says(forward)(*args)
        args[1].zero_()
    assert mask.all()


def test_what_is_large_has_no_values() -> None:
    def forward(mask: torch.Tensor) -> torch.Tensor:
        square = mask[:, None] & mask[None, :]
        assert not isinstance(mask, FakeTensor)
        assert isinstance(square, FakeTensor)
        assert isinstance(torch.zeros(5000, 5000), FakeTensor)
        assert not isinstance(mask.expand(10**6, -1), FakeTensor)  # a view
        return square

    mask = torch.ones(5000, dtype=torch.bool)
    with on_paper(Says(forward), (mask, torch.zeros(50_000))) as ((mask, fractions), _):
        assert forward(mask).shape == (5000, 5000)
        assert isinstance(fractions, FakeTensor)


def test_what_a_fake_tensor_is_put_into_has_no_values_any_more() -> None:
    model: Any = Says(lambda x: x)
    model.register_buffer("mean", torch.zeros(3))
    model.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(x: torch.Tensor) -> torch.Tensor:
        assert model.mean.sum() == 0
        same = model.mean.mul_(0.9).add_(x.detach().mean(0))
        assert same.untyped_storage()._cdata == model.mean.untyped_storage()._cdata
        model.count += 1
        product: torch.Tensor = x * model.mean
        return product

    model.function = forward
    with on_paper(model, (torch.zeros(2, 3, requires_grad=True),)) as (args, _):
        assert seen(lambda: model(*args)).sizes == [4, 1, 12, 24]  # the sum, whether it is 0, a mean, the product
        assert model.count.item() == 1
        with pytest.raises(RuntimeError):
            model.mean.sum().item()
    assert model.count.item() == 0
    assert torch.equal(model.mean, torch.zeros(3))


def test_a_checkpointed_function_may_change_buffers() -> None:
    class Moving(nn.Module):
        mean: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(300))
            self.norm = nn.BatchNorm1d(300)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.mean.lerp_(x.detach().mean(0), 0.1)
            normed: torch.Tensor = self.norm(x * self.mean)
            return normed.exp()

    model, x = Moving(), torch.randn(20, 300, requires_grad=True)

    def run(x: torch.Tensor) -> Seen:
        return seen(lambda: lt.checkpoint(model, x).sum().backward())

    with on_paper(model, (x,)) as (args, _):
        paper = run(*args)
    assert paper == run(x)
    assert model.norm.num_batches_tracked is not None
    assert model.norm.num_batches_tracked.item() == 1


# --- what cannot be done


class Inner(nn.Module):
    """Looks at values."""

    def __init__(self, look: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.look = look

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.look(x)
        return x


@pytest.mark.parametrize(
    "look",
    [
        lambda x: x.sum().item(),
        lambda x: bool((x > 0).any()),
        lambda x: x[x > 0],
        lambda x: x.detach().numpy(),
        lambda x: x.tolist(),
        lambda x: x.data_ptr(),
    ],
    ids=["item", "any", "mask", "numpy", "tolist", "data_ptr"],
)
def test_looking_at_values_is_refused_with_the_place(look: Callable[[torch.Tensor], Any]) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Sequential(Inner(look)))
    said = r"1\.0 \(Inner\), line \d+ of test_on_paper.py, looks at values of a tensor.*on_paper.*attention_mask=None"
    with pytest.raises(InputError, match=said), on_paper(model, (torch.zeros(2, 3),)) as (args, _):
        model(*args)
    assert type(model[0].weight) is nn.Parameter


def test_a_loss_outside_the_model_that_looks_is_refused_too() -> None:
    model = nn.Linear(3, 1)
    with (
        pytest.raises(InputError, match=r"what was done with the model, line \d+ of test_on_paper.py, looks"),
        on_paper(model, (torch.zeros(2, 3),)) as (args, _),
    ):
        float(model(*args).sum())


@torch.library.custom_op("lowtide_tests::unknown", mutates_args=())
def unknown(x: torch.Tensor) -> torch.Tensor:
    """Has no form for tensors without values."""
    return x.clone()


def test_operations_that_need_values_are_refused() -> None:
    model = Says(lambda x: unknown(x))
    with pytest.raises(InputError, match=r"cannot run on paper.*lowtide_tests"), on_paper(model) as _:
        model(model.scale)


def test_any_other_error_is_the_one_it_is_with_the_place() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(4, 4))
    with (
        pytest.raises(RuntimeError, match="same reduction dim") as caught,
        on_paper(model, (torch.zeros(2, 3),)) as (x, _),
    ):
        model(*x)
    assert caught.value.__notes__[0].startswith("1 (Linear)")
    assert caught.value.__notes__[0].endswith("plan without on_paper")


class Wrapped(torch.Tensor):
    """Of another kind."""

    @classmethod
    def __torch_dispatch__(cls, *_: Any) -> Any:
        raise NotImplementedError


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: nn.LazyLinear(3).weight, "no shape yet"),
        (lambda: torch.eye(3).to_sparse(), "layout torch.sparse_coo"),
        (lambda: torch.Tensor._make_subclass(Wrapped, torch.zeros(3)), "a Wrapped is no plain tensor"),
    ],
    ids=["lazy", "sparse", "subclass"],
)
@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_tensors_that_cannot_be_had_are_refused(wrong: Callable[[], torch.Tensor], message: str) -> None:
    with pytest.raises(InputError, match=message), on_paper(nn.Identity(), (wrong(),)):
        pass


@pytest.mark.filterwarnings("ignore:.torch.jit.trace. is deprecated")
@pytest.mark.filterwarnings("ignore:.torch.jit.trace_method. is deprecated")
def test_scripted_modules_are_refused() -> None:
    scripted = torch.jit.trace(nn.Linear(3, 3), torch.zeros(2, 3))
    with pytest.raises(InputError, match=r"torch\.jit"), on_paper(nn.Sequential(scripted)):
        pass


def test_attention_takes_the_kernel_that_keeps_no_probabilities() -> None:
    heads = tuple(torch.zeros(2, 2, 300, 8, requires_grad=True) for _ in range(3))
    model = Says(partial(functional.scaled_dot_product_attention, is_causal=True))
    with on_paper(model, heads) as (args, _):
        assert seen(lambda: model(*args).sum().backward()).peak < 2 * 2 * 300 * 300 * 4
