"""Models that are hard to split into blocks, or hard to run again: small, each made fresh from a seed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from transformers import AlbertConfig, AlbertForMaskedLM

from tests.torch.models import Model, Size
from tests.torch.odd_blocks import (
    WIDTH,
    AddsInPlace,
    Counts,
    Dataclasses,
    Dicts,
    Keywords,
    KnownStates,
    Loud,
    Mlp,
    Neighbours,
    Pairs,
    ReluFirst,
    Routed,
    Scales,
    States,
)
from tests.torch.odd_shapes import Bare, Dictionary, Recurrent, SparseWords, Tied, Towers, UNet, Unlike

BATCH = 32


def mean_square(output: Any) -> torch.Tensor:
    """The loss where models give one tensor."""
    loss: torch.Tensor = output.square().mean()
    return loss


def on_x(module: nn.Module, *shape: int, needs_grad: bool = False) -> Model:
    """A model that is called with random numbers."""
    x = torch.randn(*(shape or (BATCH, WIDTH)), requires_grad=needs_grad)
    return Model(module.train(), {}, (x,), mean_square)


class Net(nn.Module):
    """Three blocks in a list; `call` says how they are run."""

    def __init__(self, call: Callable[..., Any], blocks: list[nn.Module] | None = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks or [Mlp() for _ in range(3)])
        self.call = call

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As told."""
        return self.call(self.blocks, *args, **kwargs)


def in_a_row(blocks: nn.ModuleList, x: Any) -> Any:
    """One after the other."""
    for block in blocks:
        x = block(x)
    return x


def row_of(make: Callable[[], nn.Module], count: int = 3) -> Model:
    """Blocks of a kind in a list, one after the other."""
    return on_x(Net(in_a_row, [make() for _ in range(count)]))


def if_positive(blocks: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    """Other blocks for other values."""
    for k in range(0, len(blocks) - 1, 2):
        x = blocks[k](x) if x.sum() > 0 else blocks[k + 1](x)
    return x


def as_many_as_it_says(blocks: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    """As many blocks as a value says."""
    for k in range(2 + int(x.detach().abs().max().item() > 0)):
        x = blocks[k](x)
    return x


def three_times(blocks: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    """One block three times."""
    for _ in range(3):
        x = blocks[0](x)
    return x


def shared_in_a_list() -> Model:
    """The list has the same block three times."""
    block = Mlp()
    return on_x(Net(in_a_row, [block, block, block]))


def some_shared() -> Model:
    """One is called twice, the others once."""
    blocks = [Mlp() for _ in range(3)]
    return on_x(Net(in_a_row, [*blocks, blocks[1]]))


def albert() -> Model:
    """All layers are one."""
    size = Size()
    config = AlbertConfig(
        vocab_size=size.words,
        embedding_size=size.width,
        hidden_size=size.width,
        intermediate_size=4 * size.width,
        num_hidden_layers=3,
        num_attention_heads=2,
        max_position_embeddings=size.tokens,
        hidden_dropout_prob=0.1,
        attention_probs_dropout_prob=0.1,
    )
    return Model(AlbertForMaskedLM(config).train(), size.text())


def frozen(*which: int) -> Model:
    """Some blocks have no parameter that requires a gradient."""
    made = row_of(Mlp, 4)
    for k in which:
        made.module.blocks[k].requires_grad_(False)  # type: ignore[index]
    return made


def one_without_grad(blocks: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    """The first is run without a tape."""
    with torch.no_grad():
        x = blocks[0](x)
    return in_a_row(blocks[1:], x)  # type: ignore[no-any-return]


def one_unused(blocks: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    """What the second gives is thrown away."""
    x = blocks[0](x)
    blocks[1](x)
    out: torch.Tensor = blocks[2](x)
    return out


def one_detached(blocks: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    """What the second gives is used without its gradient."""
    x = blocks[0](x)
    out: torch.Tensor = blocks[2](x + blocks[1](x).detach())
    return out


def copied_first(blocks: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    """Something that may be written over."""
    return in_a_row(blocks, x * 1)  # type: ignore[no-any-return]


def with_keywords(blocks: nn.ModuleList, x: torch.Tensor, *, scale: torch.Tensor) -> torch.Tensor:
    """Other keywords for each."""
    x = blocks[0](x, scale=scale)
    x = blocks[1](x, scale=scale, flip=True)
    out: torch.Tensor = blocks[2](x, scale=scale, mask=torch.arange(WIDTH) % 2 == 0)
    return out


def pairs() -> Model:
    x, y = torch.randn(BATCH, WIDTH), torch.randn(BATCH, WIDTH, requires_grad=True)
    return Model(Net(in_a_row, [Pairs() for _ in range(3)]), {}, ((x, y),), lambda out: mean_square(out[0] + out[1]))


def dicts() -> Model:
    states = {"x": torch.randn(BATCH, WIDTH), "depth": 0}
    return Model(Net(in_a_row, [Dicts() for _ in range(3)]), {}, (states,), lambda out: mean_square(out["x"]))


def dataclasses(kind: Any) -> Model:
    blocks: list[nn.Module] = [Dataclasses() for _ in range(3)]
    return Model(
        Net(in_a_row, blocks), {}, (kind(torch.randn(BATCH, WIDTH)),), lambda out: mean_square(out.x) * out.depth
    )


def on_a_graph(blocks: nn.ModuleList, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
    """Every block gets the edges."""
    for block in blocks:
        x = block(x, edges)
    return x


def graph() -> Model:
    """With a sparse argument."""
    edges = (torch.rand(BATCH, BATCH) < 0.1).float().to_sparse()
    blocks: list[nn.Module] = [Neighbours() for _ in range(3)]
    return Model(Net(on_a_graph, blocks), {}, (torch.randn(BATCH, WIDTH), edges), mean_square)


def keywords() -> Model:
    scale = torch.rand(WIDTH, requires_grad=True)
    x = torch.randn(BATCH, WIDTH)
    return Model(Net(with_keywords, [Keywords() for _ in range(3)]), {"scale": scale}, (x,), mean_square)


def vgg() -> Model:
    """Nothing but an `nn.Sequential`."""
    layers: list[nn.Module] = []
    channels = 3
    for wider in (8, 8, 16, 16):
        layers += [nn.Conv2d(channels, wider, 3, padding=1), nn.BatchNorm2d(wider), nn.ReLU(inplace=True)]
        channels = wider
        if wider == 16:
            layers.append(nn.MaxPool2d(2))
    layers += [nn.Flatten(), nn.Linear(16 * 16, 16), nn.ReLU(inplace=True), nn.Dropout(), nn.Linear(16, 10)]
    return on_x(nn.Sequential(*layers), 4, 3, 16, 16)


def nested() -> Model:
    """Sequentials of sequentials."""
    return on_x(
        nn.Sequential(
            nn.Linear(WIDTH, WIDTH),
            nn.Sequential(nn.Sequential(Mlp(), nn.Tanh()), nn.Sequential(Mlp(), nn.Tanh())),
            nn.Sequential(Mlp(), Mlp(), Mlp()),
            nn.Linear(WIDTH, 4),
        )
    )


def torchs_own() -> Model:
    """Torch's transformer."""
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 4 * WIDTH, 0.1, batch_first=True, norm_first=True)
    return on_x(nn.TransformerEncoder(layer, 3, enable_nested_tensor=False), 4, 8, WIDTH)


def with_their_extras(blocks: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    """The attributes are part of the loss."""
    out: torch.Tensor = in_a_row(blocks, x)
    for block in blocks:
        assert isinstance(block, Routed)
        out = out + block.extra
    return out


def all_states(blocks: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    """Every block's result is part of the loss."""
    row = []
    for block in blocks:
        x = block(x)
        row.append(x)
    return torch.stack(row)


def gradient_inside(blocks: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    """With a gradient penalty."""
    with torch.enable_grad():
        x = x.clone().requires_grad_()
        y = in_a_row(blocks, x)
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    out: torch.Tensor = y + slope.square().mean()
    return out


def normed(wrap: Callable[[nn.Linear], nn.Module]) -> Model:
    """Weights that are computed from others."""

    def make() -> nn.Module:
        block = Mlp()
        block.up = wrap(block.up)  # type: ignore[assignment]
        return block

    return row_of(make)


def half(dtype: torch.dtype) -> Model:
    """In another precision."""
    made = row_of(Mlp)
    made.module.to(dtype)
    return made._replace(args=(made.args[0].to(dtype),))


def in_eval() -> Model:
    """Trained in eval mode: no dropout."""
    made = row_of(Mlp)
    made.module.eval()
    return made


def lazy() -> Model:
    """Parameters that know their shapes since a first call."""
    made = row_of(lambda: nn.Sequential(nn.LazyLinear(64), nn.GELU(), nn.LazyLinear(WIDTH)))
    made.module(*made.args)
    return made


def scripted() -> Model:
    """Blocks in TorchScript, as some still have them; to the compiler it is deprecated."""
    return row_of(lambda: torch.jit.trace(Mlp(dropout=0.0), torch.randn(BATCH, WIDTH)))


def words(module: nn.Module) -> Model:
    return Model(module.train(), {}, (torch.randint(50, (4, 9)),))


net = partial(Net, in_a_row)

ODD: dict[str, Callable[[], Model]] = {
    "unlike": lambda: on_x(Unlike()),
    "bare": lambda: on_x(Bare()),
    "one layer": lambda: on_x(nn.Linear(WIDTH, WIDTH)),
    "if": lambda: on_x(Net(if_positive, [Mlp() for _ in range(6)])),
    "a count from data": lambda: on_x(Net(as_many_as_it_says)),
    "item": lambda: row_of(Scales),
    "three times": lambda: on_x(Net(three_times)),
    "shared": shared_in_a_list,
    "some shared": some_shared,
    "albert": albert,
    "first frozen": lambda: frozen(0),
    "middle frozen": lambda: frozen(1, 2),
    "last frozen": lambda: frozen(3),
    "all but the last frozen": lambda: frozen(0, 1, 2),
    "without grad": lambda: on_x(Net(one_without_grad)),
    "unused": lambda: on_x(Net(one_unused)),
    "detached": lambda: on_x(Net(one_detached)),
    "relu in place": lambda: on_x(Net(copied_first, [ReluFirst() for _ in range(3)])),
    "adds in place": lambda: on_x(Net(copied_first, [AddsInPlace() for _ in range(3)])),
    "tuples": pairs,
    "dicts": dicts,
    "dataclasses": lambda: dataclasses(States),
    "known dataclasses": lambda: dataclasses(KnownStates),
    "keywords": keywords,
    "x with a gradient": lambda: on_x(net(), BATCH, WIDTH, needs_grad=True),
    "vgg": vgg,
    "nested": nested,
    "dictionary": lambda: on_x(Dictionary()),
    "u-net": lambda: on_x(UNet(), 4, 4, 16, 16),
    "towers": lambda: on_x(Towers()),
    "lstm": lambda: on_x(Recurrent(cell=False), 6, 8, WIDTH),
    "lstm cell": lambda: on_x(Recurrent(cell=True), 6, 8, WIDTH),
    "torch's own": torchs_own,
    "tied": lambda: words(Tied()),
    "counts": lambda: row_of(Counts),
    "extras": lambda: on_x(Net(with_their_extras, [Routed() for _ in range(3)])),
    "all states": lambda: on_x(Net(all_states)),
    "loud": lambda: row_of(Loud),
    "gradient inside": lambda: on_x(Net(gradient_inside)),
    "graph": graph,
    "sparse": lambda: words(SparseWords()),
    "spectral norm": lambda: normed(spectral_norm),
    "weight norm": lambda: normed(weight_norm),
    "double": lambda: half(torch.float64),
    "bfloat16": lambda: half(torch.bfloat16),
    "in eval": in_eval,
    "lazy": lazy,
    "scripted": scripted,
}


def odd(name: str, *, seed: int = 0) -> Model:
    """The one of that name, the same for the same seed; leaves the random numbers as they are."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return ODD[name]()
