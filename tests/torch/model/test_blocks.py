"""Which submodules are taken for blocks, and what one forward shows of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lowtide.torch.model.blocks import Survey
from lowtide.torch.state.stand_in import StandIn, original, standing_in
from tests.torch.models import MODELS, Model, model
from tests.torch.odd_blocks import WIDTH, Mlp
from tests.torch.odd_models import Net, in_a_row, odd, on_x, row_of


def survey(made: Model) -> Survey:
    found = Survey(made.module, made.loss or (lambda output: getattr(output, "loss", output)))
    torch.manual_seed(0)
    found.run(made.args, made.kwargs)
    return found


def blocks(made: Model) -> list[str]:
    return [block.name for block in survey(made).blocks()]


EXPECTED = {
    "gpt2": [f"transformer.h.{k}" for k in range(3)],
    "llama": [f"model.layers.{k}" for k in range(3)],
    "bert": [f"bert.encoder.layer.{k}" for k in range(3)],
    "vit": [f"vit.layers.{k}" for k in range(3)],
    "t5": [f"{part}.block.{k}" for part in ("encoder", "decoder") for k in range(3)],
    "resnet": [f"resnet.encoder.stages.{k}" for k in range(2)],
}


@pytest.mark.parametrize("name", MODELS)
def test_the_layers_of_models_are_their_blocks(name: str) -> None:
    found = blocks(model(name))
    assert [block for block in found if block.startswith(EXPECTED[name][0].rpartition(".")[0])], found
    assert [block for block in found if any(block == each or block.startswith(f"{each}.") for each in EXPECTED[name])]
    for each in EXPECTED[name]:
        assert any(block == each or block.startswith(f"{each}.") for block in found), found


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "vit", "t5"])
def test_each_layer_is_one_block_with_children(name: str) -> None:
    found = {block.name: block for block in survey(model(name)).blocks()}
    for each in EXPECTED[name]:
        assert not found[each].is_row
        assert found[each].children


def test_a_forward_keeps_no_tape_and_gives_what_autograd_would_save() -> None:
    made = row_of(Mlp)
    found = survey(made)
    first, second, _ = [block.call for block in found.blocks()]
    # What gelu is given and gives, and the mask: of a batch of 32.
    assert first.tape > 32 * WIDTH * 4 * (4 + 4)
    assert found.tape >= 3 * first.tape
    assert (first.needs, second.needs) == ((False,), (True,))
    assert not first.given  # it was there before
    assert second.given == first.returned
    assert [shape for shape, _ in first.packs if shape == (32, 4 * WIDTH)]


def test_rows_of_layers_are_one_block() -> None:
    assert [(block.name, block.is_row) for block in survey(odd("vgg")).blocks()] == [(".", True)]
    assert [(block.name, block.is_row) for block in survey(odd("nested")).blocks()] == [(".", True)]


def test_an_entry_that_is_called_by_others_is_no_row() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.row = nn.Sequential(Mlp(), Mlp(), Mlp())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.row(x) + self.row[0](x)
            return y

    assert blocks(on_x(Twice())) == ["row.1", "row.2"]


def test_a_row_with_a_forward_of_its_own_is_no_row() -> None:
    class Reversed(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for part in reversed(list(self)):
                x = part(x)
            return x

    assert blocks(on_x(Reversed(Mlp(), Mlp(), Mlp()))) == ["2", "1", "0"]


def test_what_wraps_one_model_is_looked_through() -> None:
    class Around(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.inner(x)
            return y

    made = on_x(Around(Around(Net(in_a_row))))
    assert blocks(made) == [f"inner.inner.blocks.{k}" for k in range(3)]


def test_several_of_a_class_are_blocks_without_a_list() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = Mlp(), Mlp(), Mlp()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.c(self.b(self.a(x)))
            return y

    assert blocks(on_x(Named())) == ["a", "b", "c"]


def test_small_ones_are_not_worth_a_decision() -> None:
    class Tiny(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + (x[:1, :1] * self.w).exp()

    assert blocks(on_x(Net(in_a_row, [Mlp(), Tiny(), Mlp(), Tiny()]))) == ["blocks.0", "blocks.2"]


def test_many_that_are_called_twice_are_counted() -> None:
    def twice(blocks: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
        for block in (*blocks, *blocks):
            x = block(x)
        return x

    found = survey(on_x(Net(twice, [Mlp() for _ in range(7)])))
    assert found.blocks() == []
    names = ", ".join(f"blocks.{k}" for k in range(5))
    assert f"called more than once, and so left as they are: {names} and 2 more" in found.notes


def test_a_module_that_fails_is_left_as_it_was() -> None:
    class Fails(Mlp):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise KeyError("inside")

    made = on_x(Net(in_a_row, [Mlp(), Fails()]))
    with pytest.raises(KeyError, match="inside"):
        survey(made)
    assert not any("forward" in part.__dict__ for part in made.module.modules())


# --- standing in


class Doubles(StandIn):
    """Gives twice what the module would."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it."""
        return 2 * original(self.module)(*args, **kwargs)


def test_one_stands_in_and_leaves_no_trace() -> None:
    module, x = nn.Linear(3, 3), torch.ones(1, 3)
    expected, before = module(x), dict(module.__dict__)
    with standing_in([Doubles(module)]):
        assert torch.equal(module(x), 2 * expected)
    assert module.__dict__ == before
    with pytest.raises(ZeroDivisionError), standing_in([Doubles(module)]):
        _ = 1 / 0
    assert module.__dict__ == before


def test_a_forward_of_the_object_itself_is_put_back() -> None:
    module, x = nn.Linear(3, 3), torch.ones(1, 3)
    own = lambda x: x + 1  # noqa: E731  (an attribute, as people set them)
    module.forward = own  # type: ignore[method-assign]
    stand_in = Doubles(module)
    assert stand_in.__wrapped__ is own
    stand_in.install()
    assert torch.equal(module(x), 2 * (x + 1))
    stand_in.remove()
    assert module.forward is own
    stand_in.remove()  # once is enough
    assert module.forward is own


def test_the_last_one_stands_in_and_the_one_before_comes_back() -> None:
    module, x = nn.Linear(3, 3), torch.ones(1, 3)
    expected = module(x)
    first = Doubles(module)
    first.install()
    second = Doubles(module)
    second.install()
    first.remove()  # does not stand in any more
    assert module.forward is second
    assert torch.equal(module(x), 2 * expected)  # neither stands in for the other
    second.remove()
    assert module.forward is first


def test_one_that_others_have_wrapped_stands_in_no_more() -> None:
    module, x = nn.Linear(3, 3), torch.ones(1, 3)
    expected = module(x)

    class Once(Doubles):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return super().__call__(*args, **kwargs) if self.is_on else self.original(*args, **kwargs)

    stand_in = Once(module)
    stand_in.install()
    wrapped = module.forward
    module.forward = lambda x: wrapped(x) + 1  # type: ignore[method-assign, assignment]
    assert torch.equal(module(x), 2 * expected + 1)
    stand_in.remove()  # what they made of it is theirs
    assert torch.equal(module(x), expected + 1)
