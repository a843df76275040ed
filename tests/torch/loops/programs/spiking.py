"""Spiking networks, as the tutorials of snnTorch, SpikingJelly and norse write them."""

from __future__ import annotations

from typing import Any

import snntorch
import torch
from snntorch import surrogate
from snntorch import utils as snntorch_utils
from snntorch.functional import quant
from spikingjelly.activation_based import functional as jelly_functional
from spikingjelly.activation_based import layer as jelly_layer
from spikingjelly.activation_based import neuron as jelly_neuron
from spikingjelly.activation_based import surrogate as jelly_surrogate
from torch import nn
from torch.nn import functional as F  # noqa: N812  (as everybody does)

from tests.torch.loops.programs.program import For, Scan, program
from tests.torch.state.partners import norse


def _spikes(length: int, *shape: int) -> torch.Tensor:
    return (torch.rand(length, *shape) < 0.5).float()


# --- snnTorch: hidden state in the neurons

_HIDDEN_NEURONS: dict[str, Any] = {
    "Leaky": lambda **k: snntorch.Leaky(beta=0.9, **k),
    "Leaky, reset to zero": lambda **k: snntorch.Leaky(beta=0.9, reset_mechanism="zero", **k),
    "Leaky, no reset": lambda **k: snntorch.Leaky(beta=0.9, reset_mechanism="none", **k),
    "Leaky, learned beta and threshold": lambda **k: snntorch.Leaky(
        beta=0.9, learn_beta=True, learn_threshold=True, **k
    ),
    "Leaky, beta of each neuron": lambda **k: snntorch.Leaky(beta=torch.rand(6), learn_beta=True, **k),
    "Leaky, inhibition": lambda **k: snntorch.Leaky(beta=0.9, inhibition=True, **k),
    "Leaky, surrogate atan": lambda **k: snntorch.Leaky(beta=0.9, spike_grad=surrogate.atan(), **k),
    "Leaky, surrogate sigmoid": lambda **k: snntorch.Leaky(beta=0.9, spike_grad=surrogate.sigmoid(slope=10), **k),
    "Leaky, straight through": lambda **k: snntorch.Leaky(
        beta=0.9, spike_grad=surrogate.straight_through_estimator(), **k
    ),
    "Leaky, state quantised": lambda **k: snntorch.Leaky(beta=0.9, state_quant=quant.state_quant(num_bits=4), **k),
    "Synaptic": lambda **k: snntorch.Synaptic(alpha=0.8, beta=0.9, **k),
    "Synaptic, learned alpha": lambda **k: snntorch.Synaptic(alpha=0.8, beta=0.9, learn_alpha=True, **k),
    "Alpha": lambda **k: snntorch.Alpha(alpha=0.9, beta=0.8, **k),
    "Lapicque": lambda **k: snntorch.Lapicque(beta=0.9, **k),
}


def _hidden_neuron(name: str, make: Any) -> None:
    @program(f"snnTorch: {name}, hidden")
    def make_loop(length: int) -> For:
        net = nn.Sequential(nn.Linear(4, 6), make(init_hidden=True), nn.Linear(6, 3), make_last(name))
        snntorch_utils.reset(net)
        return For(net, (_spikes(length, 6 if "inhib" in name else 2, 4),), [net])


def make_last(name: str) -> nn.Module:
    if "Synaptic" in name:
        return snntorch.Synaptic(alpha=0.8, beta=0.9, init_hidden=True, output=True)
    return snntorch.Leaky(beta=0.8, init_hidden=True, output=True)


for _name, _make in _HIDDEN_NEURONS.items():
    _hidden_neuron(_name, _make)


# --- snnTorch: state by hand


class Tutorial5(nn.Module):
    """Two layers of leaky neurons, as in the fifth tutorial."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.lif1 = nn.Linear(4, 8), snntorch.Leaky(beta=0.95)
        self.fc2, self.lif2 = nn.Linear(8, 3), snntorch.Leaky(beta=0.95)

    def forward(self, mems: Any, x: torch.Tensor) -> Any:
        mem1, mem2 = mems
        spk1, mem1 = self.lif1(self.fc1(x), mem1)
        spk2, mem2 = self.lif2(self.fc2(spk1), mem2)
        return (mem1, mem2), (spk2, mem2)


@program("snnTorch: tutorial 5, init_leaky")
def _(length: int) -> Scan:
    net = Tutorial5()
    return Scan(net, (net.lif1.init_leaky(), net.lif2.init_leaky()), _spikes(length, 2, 4), [net])


@program("snnTorch: tutorial 5, reset_mem")
def _(length: int) -> Scan:
    net = Tutorial5()
    return Scan(net, (net.lif1.reset_mem(), net.lif2.reset_mem()), _spikes(length, 2, 4), [net])


@program("snnTorch: tutorial 5, zeros")
def _(length: int) -> Scan:
    net = Tutorial5()
    return Scan(net, (torch.zeros(2, 8), torch.zeros(2, 3)), _spikes(length, 2, 4), [net])


@program("snnTorch: convolutional net with pooling")
def _(length: int) -> For:
    grad = surrogate.fast_sigmoid(slope=25)
    net = nn.Sequential(
        nn.Conv2d(1, 3, 3),
        nn.MaxPool2d(2),
        snntorch.Leaky(beta=0.5, spike_grad=grad, init_hidden=True),
        nn.Flatten(),
        nn.Linear(27, 3),
        snntorch.Leaky(beta=0.5, spike_grad=grad, init_hidden=True, output=True),
    )
    snntorch_utils.reset(net)
    return For(net, (torch.rand(length, 2, 1, 8, 8),), [net])


@program("snnTorch: static image, no inputs over time")
def _(length: int) -> For:
    net = nn.Sequential(nn.Linear(4, 6), snntorch.Leaky(beta=0.5, init_hidden=True, output=True))
    snntorch_utils.reset(net)
    image = torch.rand(2, 4)
    return For(lambda: net(image), (), [net], length=length)


@program("snnTorch: image encoded as rates at every step")
def _(length: int) -> For:
    net = nn.Sequential(nn.Linear(4, 6), snntorch.Leaky(beta=0.5, init_hidden=True, output=True))
    snntorch_utils.reset(net)
    image = torch.rand(2, 4)
    return For(lambda: net(torch.bernoulli(image)), (), [net], length=length)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 6)
        self.lif = snntorch.RLeaky(beta=0.9, linear_features=6)

    def forward(self, state: Any, x: torch.Tensor) -> Any:
        spk, mem = self.lif(self.fc(x), *state)
        return (spk, mem), spk


@program("snnTorch: RLeaky, init_rleaky")
def _(length: int) -> Scan:
    net = Recurrent()
    return Scan(net, net.lif.init_rleaky(), _spikes(length, 2, 4), [net])


@program("snnTorch: RLeaky, hidden")
def _(length: int) -> For:
    net = nn.Sequential(nn.Linear(4, 6), snntorch.RLeaky(beta=0.9, linear_features=6, init_hidden=True))
    snntorch_utils.reset(net)
    return For(net, (_spikes(length, 2, 4),), [net])


@program("snnTorch: RSynaptic, hidden")
def _(length: int) -> For:
    net = nn.Sequential(nn.Linear(4, 6), snntorch.RSynaptic(alpha=0.8, beta=0.9, linear_features=6, init_hidden=True))
    snntorch_utils.reset(net)
    return For(net, (_spikes(length, 2, 4),), [net])


@program("snnTorch: SLSTM")
def _(length: int) -> Scan:
    cell = snntorch.SLSTM(4, 6, learn_threshold=True)

    def step(state: Any, x: torch.Tensor) -> Any:
        spk, syn, mem = cell(x, *state)
        return (syn, mem), spk

    return Scan(step, cell.init_slstm(), _spikes(length, 2, 4), [cell])


@program("snnTorch: SLSTM, hidden")
def _(length: int) -> For:
    cell = snntorch.SLSTM(4, 6, init_hidden=True)
    snntorch_utils.reset(cell)
    return For(cell, (_spikes(length, 2, 4),), [cell])


@program("snnTorch: SConv2dLSTM")
def _(length: int) -> Scan:
    cell = snntorch.SConv2dLSTM(1, 2, 3, max_pool=2)

    def step(state: Any, x: torch.Tensor) -> Any:
        spk, syn, mem = cell(x, *state)
        return (syn, mem), spk

    return Scan(step, cell.init_sconv2dlstm(), torch.rand(length, 2, 1, 8, 8), [cell])


@program("snnTorch: population coding and recorded spikes")
def _(length: int) -> For:
    net = nn.Sequential(nn.Linear(4, 10), snntorch.Leaky(beta=0.9, init_hidden=True, output=True))
    snntorch_utils.reset(net)

    def step(x: torch.Tensor) -> Any:
        spk, mem = net(x)
        return spk.view(2, 5, 2).sum(-1), mem

    return For(step, (_spikes(length, 2, 4),), [net])


# --- SpikingJelly

_JELLY_NEURONS: dict[str, Any] = {
    "IFNode": lambda: jelly_neuron.IFNode(v_threshold=0.3),
    "IFNode, soft reset": lambda: jelly_neuron.IFNode(v_threshold=0.3, v_reset=None),
    "IFNode, detached reset": lambda: jelly_neuron.IFNode(v_threshold=0.3, detach_reset=True),
    "LIFNode": lambda: jelly_neuron.LIFNode(tau=2.0, v_threshold=0.3),
    "LIFNode, no decay of input": lambda: jelly_neuron.LIFNode(tau=2.0, decay_input=False),
    "LIFNode, surrogate ATan": lambda: jelly_neuron.LIFNode(
        tau=2.0, v_threshold=0.3, surrogate_function=jelly_surrogate.ATan()
    ),
    "LIFNode, stores its potentials": lambda: jelly_neuron.LIFNode(tau=2.0, store_v_seq=True),
    "ParametricLIFNode": lambda: jelly_neuron.ParametricLIFNode(init_tau=2.0, v_threshold=0.3),
    "QIFNode": lambda: jelly_neuron.QIFNode(),
    "EIFNode": lambda: jelly_neuron.EIFNode(),
    "IzhikevichNode": lambda: jelly_neuron.IzhikevichNode(),
    "KLIFNode": lambda: jelly_neuron.KLIFNode(tau=2.0),
}


def _jelly_neuron(name: str, make: Any) -> None:
    @program(f"SpikingJelly: {name}")
    def make_loop(length: int) -> For:
        net = nn.Sequential(jelly_layer.Linear(4, 6), make(), jelly_layer.Linear(6, 3), jelly_neuron.LIFNode(tau=2.0))
        jelly_functional.reset_net(net)
        return For(net, (_spikes(length, 2, 4) * 2,), [net])


for _name, _make in _JELLY_NEURONS.items():
    _jelly_neuron(_name, _make)


@program("SpikingJelly: image encoded by PoissonEncoder")
def _(length: int) -> For:
    from spikingjelly.activation_based import encoding

    net = nn.Sequential(jelly_layer.Linear(4, 6, bias=False), jelly_neuron.LIFNode(tau=2.0, v_threshold=0.3))
    jelly_functional.reset_net(net)
    encoder, image = encoding.PoissonEncoder(), torch.rand(2, 4)
    return For(lambda: net(encoder(image)), (), [net], length=length)


@program("SpikingJelly: convolutions with BatchNorm and dropout")
def _(length: int) -> For:
    net = nn.Sequential(
        jelly_layer.Conv2d(1, 3, 3, bias=False),
        jelly_layer.BatchNorm2d(3),
        jelly_neuron.IFNode(v_threshold=0.3),
        jelly_layer.MaxPool2d(2),
        jelly_layer.Flatten(),
        jelly_layer.Dropout(0.5),
        jelly_layer.Linear(27, 3),
        jelly_neuron.IFNode(v_threshold=0.3),
    )
    jelly_functional.reset_net(net)
    return For(net, (torch.rand(length, 2, 1, 8, 8),), [net])


@program("SpikingJelly: synapse with memory")
def _(length: int) -> For:
    net = nn.Sequential(jelly_layer.Linear(4, 6), jelly_layer.SynapseFilter(tau=10.0, learnable=True))
    jelly_functional.reset_net(net)
    return For(net, (_spikes(length, 2, 4),), [net])


@program("SpikingJelly: recurrent container")
def _(length: int) -> For:
    net = jelly_layer.ElementWiseRecurrentContainer(
        jelly_neuron.IFNode(v_reset=None, v_threshold=0.3), lambda x, y: x + y
    )
    net = nn.Sequential(nn.Linear(4, 6), net)
    jelly_functional.reset_net(net)
    return For(net, (_spikes(length, 2, 4),), [net])


@program("SpikingJelly: linear recurrent container")
def _(length: int) -> For:
    net = jelly_layer.LinearRecurrentContainer(
        jelly_neuron.LIFNode(tau=2.0, v_threshold=0.3), in_features=4, out_features=4
    )
    jelly_functional.reset_net(net)
    return For(net, (_spikes(length, 2, 4),), [net])


@program("SpikingJelly: spiking LSTM cell")
def _(length: int) -> Scan:
    from spikingjelly.activation_based import rnn

    cell = rnn.SpikingLSTMCell(4, 6, v_threshold=0.2) if _takes_threshold(rnn) else rnn.SpikingLSTMCell(4, 6)

    def step(state: Any, x: torch.Tensor) -> Any:
        h, c = cell(x, state)
        return (h, c), h

    return Scan(step, (torch.zeros(2, 6), torch.zeros(2, 6)), _spikes(length, 2, 4), [cell])


def _takes_threshold(rnn: Any) -> bool:
    import inspect

    return "v_threshold" in inspect.signature(rnn.SpikingLSTMCell.__init__).parameters


@program("SpikingJelly: recorded potentials")
def _(length: int) -> For:
    net = nn.Sequential(jelly_layer.Linear(4, 6), jelly_neuron.IFNode(v_threshold=0.3))
    jelly_functional.reset_net(net)
    return For(lambda x: (net(x), net[1].v), (_spikes(length, 2, 4),), [net])


# --- norse

_NORSE_CELLS: dict[str, Any] = {
    "LIFCell": lambda: norse.LIFCell(),
    "LIFCell, other parameters": lambda: norse.LIFCell(p=norse.LIFParameters(v_th=torch.tensor(0.3), alpha=100.0)),
    "LIFBoxCell": lambda: norse.LIFBoxCell(),
    "LIFRecurrentCell": lambda: norse.LIFRecurrentCell(6, 6),
    "LICell": lambda: norse.LICell(),
    "LIBoxCell": lambda: norse.LIBoxCell(),
    "LIFAdExCell": lambda: norse.LIFAdExCell(),
    "LIFExCell": lambda: norse.LIFExCell(),
    "LSNNCell": lambda: norse.LSNNCell(),
    "LSNNRecurrentCell": lambda: norse.LSNNRecurrentCell(6, 6),
    "IzhikevichCell": lambda: norse.IzhikevichCell(norse.functional.izhikevich.tonic_spiking),
}


def _norse_cell(name: str, make: Any) -> None:
    @program(f"norse: {name}, state None")
    def make_loop(length: int) -> Scan:
        fc, cell = nn.Linear(4, 6), make()

        def step(state: Any, x: torch.Tensor) -> Any:
            z, state = cell(10 * fc(x), state)
            return state, z

        return Scan(step, None, _spikes(length, 2, 4), [fc, cell])

    @program(f"norse: {name}, initial_state")
    def make_given(length: int) -> Scan:
        fc, cell = nn.Linear(4, 6), make()

        def step(state: Any, x: torch.Tensor) -> Any:
            z, state = cell(10 * fc(x), state)
            return state, z

        given = getattr(cell, "initial_state", getattr(cell, "state_fallback", None))
        return Scan(step, given(torch.zeros(2, 6)), _spikes(length, 2, 4), [fc, cell])


for _name, _make in _NORSE_CELLS.items():
    _norse_cell(_name, _make)


def _sequential() -> Any:
    return norse.SequentialState(nn.Linear(4, 6), norse.LIFCell(), nn.Linear(6, 3), norse.LICell())


@program("norse: SequentialState, state None")
def _(length: int) -> Scan:
    net = _sequential()

    def step(state: Any, x: torch.Tensor) -> Any:
        y, state = net(x, state)
        return state, y

    return Scan(step, None, _spikes(length, 2, 4) * 5, [net])


@program("norse: SequentialState kept in a module")
def _(length: int) -> For:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.state = _sequential(), None

        def forward(self, x: torch.Tensor) -> Any:
            y, self.state = self.net(x, self.state)
            return y

    net = Net()
    return For(net, (_spikes(length, 2, 4) * 5,), [net])


@program("norse: MNIST tutorial, two states in two variables")
def _(length: int) -> Scan:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.l1, self.l2 = norse.LIFRecurrentCell(4, 6), norse.LILinearCell(6, 3)

        def forward(self, states: Any, x: torch.Tensor) -> Any:
            s1, so = states
            z, s1 = self.l1(x, s1)
            v, so = self.l2(F.relu(z), so)
            return (s1, so), v

    net = Net()
    return Scan(net, (None, None), _spikes(length, 2, 4) * 5, [net])
