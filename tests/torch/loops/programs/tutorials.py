"""Spiking networks in the words of tutorials: records, losses at every step, learning rules, steps of other kinds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import snntorch
import torch
from snntorch import functional as snntorch_functional
from snntorch import spikegen, surrogate
from snntorch import utils as snntorch_utils
from spikingjelly.activation_based import encoding as jelly_encoding
from spikingjelly.activation_based import functional as jelly_functional
from spikingjelly.activation_based import layer as jelly_layer
from spikingjelly.activation_based import neuron as jelly_neuron
from spikingjelly.activation_based import rnn as jelly_rnn
from spikingjelly.activation_based import surrogate as jelly_surrogate
from torch import nn
from torch.nn import functional as F  # noqa: N812  (as everybody does)

import lowtide.torch as lt
from tests.torch.loops.programs.program import For, Scan, program
from tests.torch.state.partners import norse


def _spikes(length: int, *shape: int) -> Any:
    return (torch.rand(length, *shape) < 0.5).float()


# --- snnTorch


@program("snnTorch: tutorial 3, currents and potentials recorded one after another")
def _(length: int) -> Scan:
    fc1, lif1 = nn.Linear(4, 6), snntorch.Leaky(beta=0.8)
    fc2, lif2 = nn.Linear(6, 3), snntorch.Leaky(beta=0.8)

    def step(mems: Any, x: torch.Tensor) -> Any:
        cur1 = fc1(x)
        spk1, mem1 = lif1(cur1, mems["mem1"])
        cur2 = fc2(spk1)
        spk2, mem2 = lif2(cur2, mems["mem2"])
        return {"mem1": mem1, "mem2": mem2}, {"spk1": spk1, "cur2": cur2, "spk2": spk2, "mem2": mem2}

    return Scan(step, {"mem1": lif1.init_leaky(), "mem2": lif2.init_leaky()}, _spikes(length, 2, 4), [fc1, fc2])


@program("snnTorch: tutorial 5, the loss of every step is an output")
def _(length: int) -> Scan:
    fc, lif, loss = nn.Linear(4, 3), snntorch.Leaky(beta=0.9, learn_beta=True), nn.CrossEntropyLoss()
    targets = torch.randint(0, 3, (2,))

    def step(mem: torch.Tensor, x: torch.Tensor) -> Any:
        _, mem = lif(fc(x), mem)
        return mem, loss(mem, targets)

    return Scan(step, lif.init_leaky(), _spikes(length, 2, 4), [fc, lif])


@program("snnTorch: regression with a membrane potential, no reset")
def _(length: int) -> Scan:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc_in, self.lif_in = nn.Linear(1, 8), snntorch.Leaky(beta=torch.rand(8), learn_beta=True)
            self.hidden = nn.Linear(8, 8)
            self.lif_hidden = snntorch.Leaky(beta=torch.rand(8), threshold=torch.rand(8), learn_threshold=True)
            self.fc_out = nn.Linear(8, 1)
            self.li_out = snntorch.Leaky(beta=torch.rand(1), learn_beta=True, reset_mechanism="none")

        def forward(self, mems: Any, x: torch.Tensor) -> Any:
            mem_1, mem_2, mem_3 = mems
            spk_1, mem_1 = self.lif_in(self.fc_in(x), mem_1)
            spk_2, mem_2 = self.lif_hidden(self.hidden(spk_1), mem_2)
            _, mem_3 = self.li_out(self.fc_out(spk_2), mem_3)
            return [mem_1, mem_2, mem_3], mem_3

    net = Net()
    return Scan(
        net,
        [neuron.init_leaky() for neuron in (net.lif_in, net.lif_hidden, net.li_out)],
        torch.rand(length, 2, 1),
        [net],
    )


@program("snnTorch: regression with RLeaky, output fed back into all neurons")
def _(length: int) -> Scan:
    fc, lif = nn.Linear(1, 8), snntorch.RLeaky(beta=0.9, all_to_all=True, linear_features=8, learn_beta=True)
    out = nn.Linear(8, 1)

    def step(state: Any, x: torch.Tensor) -> Any:
        spk, mem = lif(fc(x), *state)
        return (spk, mem), out(spk)

    return Scan(step, lif.init_rleaky(), torch.rand(length, 2, 1), [fc, lif, out])


@program("snnTorch: RSynaptic, one to one, state by hand")
def _(length: int) -> Scan:
    fc = nn.Linear(4, 6)
    lif = snntorch.RSynaptic(alpha=0.8, beta=0.9, all_to_all=False, V=torch.rand(6), learn_recurrent=True)

    def step(state: Any, x: torch.Tensor) -> Any:
        state = lif(fc(x), *state)
        return state, state[0]

    return Scan(step, lif.init_rsynaptic(), _spikes(length, 2, 4), [fc, lif])


@program("snnTorch: BatchNorm through time, a norm for each step")
def _(length: int) -> Scan:
    fc, lif = nn.Linear(4, 6), snntorch.Leaky(beta=0.9)
    norms = nn.ModuleList([nn.BatchNorm1d(6) for _ in range(length)])
    for norm in norms:
        norm.register_parameter("bias", None)

    def step(state: Any, x: torch.Tensor) -> Any:
        mem, t = state
        spk, mem = lif(norms[t](fc(x)), mem)
        return (mem, t + 1), spk

    return Scan(step, (lif.init_leaky(), 0), _spikes(length, 5, 4), [fc, norms])


@program("snnTorch: potentials are reset inside of the first step")
def _(length: int) -> For:
    neuron = snntorch.Leaky(beta=0.9, init_hidden=True, output=True)
    net = nn.Sequential(nn.Linear(4, 6), neuron)

    def step(x: torch.Tensor, t: torch.Tensor) -> Any:
        if t == 0:
            neuron.reset_mem()
        return net(x)

    return For(step, (_spikes(length, 2, 4), torch.arange(length)), [net])


@program("snnTorch: latency code as inputs, count loss on the stack")
def _(length: int) -> For:
    net = nn.Sequential(nn.Linear(4, 6), snntorch.Synaptic(alpha=0.7, beta=0.9, init_hidden=True, output=True))
    snntorch_utils.reset(net)
    xs = spikegen.latency(torch.rand(2, 4), num_steps=max(length, 2), tau=5, threshold=0.01)[:length]
    return For(net, (xs,), [net])


@program("snnTorch: deltas of a series as spikes that may be negative")
def _(length: int) -> For:
    net = nn.Sequential(nn.Linear(4, 6), snntorch.Lapicque(R=5.0, C=1e-3, time_step=1e-3, init_hidden=True))
    snntorch_utils.reset(net)
    xs = spikegen.delta(torch.randn(length, 2, 4), threshold=0.3, off_spike=True)
    return For(net, (xs,), [net])


@program("snnTorch: two neurons of one class that share their layer")
def _(length: int) -> For:
    shared, neuron_1 = nn.Linear(4, 4), snntorch.Leaky(beta=0.9, init_hidden=True)
    neuron_2 = snntorch.Leaky(beta=0.7, init_hidden=True, spike_grad=surrogate.triangular())
    net = nn.Sequential(shared, neuron_1, shared, neuron_2)
    snntorch_utils.reset(net)
    return For(net, (_spikes(length, 2, 4),), [net])


@program("snnTorch: potentials are detached every third step")
def _(length: int) -> For:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.lif, self.t = nn.Linear(4, 6), snntorch.Leaky(beta=0.9, init_hidden=True), 0

        def forward(self, x: torch.Tensor) -> Any:
            self.t += 1
            if self.t % 3 == 0:
                self.lif.detach_hidden()
            return self.lif(self.fc(x))

    net = Net()
    snntorch_utils.reset(net)
    return For(net, (_spikes(length, 2, 4),), [net])


@program("snnTorch: rate loss and sparsity of each step")
def _(length: int) -> Scan:
    fc1, fc2, lif1, lif2 = nn.Linear(4, 8), nn.Linear(8, 6), snntorch.Leaky(beta=0.9), snntorch.Leaky(beta=0.9)
    regular = snntorch_functional.l1_rate_sparsity(1e-2)

    def step(state: Any, x: torch.Tensor) -> Any:
        mem1, mem2, penalty = state
        spk1, mem1 = lif1(fc1(x), mem1)
        spk2, mem2 = lif2(fc2(spk1), mem2)
        return (mem1, mem2, penalty + regular(spk1)), (spk2, None)

    start = (lif1.init_leaky(), lif2.init_leaky(), torch.zeros(()))
    return Scan(step, start, _spikes(length, 2, 4), [fc1, fc2])


@program("snnTorch: convolutions with average pooling, potentials of all layers handed on in a list")
def _(length: int) -> Scan:
    convs = nn.ModuleList([nn.Conv2d(1, 2, 3, padding=1), nn.Conv2d(2, 2, 3, padding=1)])
    lifs, head = [snntorch.Leaky(beta=0.9), snntorch.Leaky(beta=0.8)], nn.Linear(8, 3)

    def step(mems: list[torch.Tensor], x: torch.Tensor) -> Any:
        new = []
        for conv, lif, mem in zip(convs, lifs, mems, strict=True):
            x, mem = lif(F.avg_pool2d(conv(x), 2), mem)
            new.append(mem)
        return new, head(x.flatten(1))

    return Scan(step, [lif.init_leaky() for lif in lifs], torch.rand(length, 2, 1, 8, 8), [convs, head])


@program("snnTorch: autoencoder whose latent is sampled")
def _(length: int) -> For:
    encode = nn.Sequential(nn.Linear(4, 6), snntorch.Leaky(beta=0.9, init_hidden=True), nn.Linear(6, 4))
    decode = nn.Sequential(nn.Linear(2, 6), snntorch.Leaky(beta=0.9, init_hidden=True), nn.Linear(6, 4))
    snntorch_utils.reset(encode)
    snntorch_utils.reset(decode)

    def step(x: torch.Tensor) -> Any:
        mean, log_std = encode(x).chunk(2, -1)
        z = mean + torch.randn_like(mean) * log_std.exp()
        return decode(z), (mean, log_std)

    return For(step, (_spikes(length, 2, 4),), [encode, decode])


# --- SpikingJelly

_MORE_NEURONS: dict[str, Callable[[], nn.Module]] = {
    "CUBALIFNode": lambda: jelly_neuron.CUBALIFNode(),
    "LIAFNode": lambda: jelly_neuron.LIAFNode(act=torch.relu, threshold_related=False, tau=2.0),
    "ComplementaryLIFNode": lambda: jelly_neuron.ComplementaryLIFNode(),
    "MPBNLIFNode": lambda: jelly_neuron.MPBNLIFNode(tau=2.0, mpbn=True, out_features=6),
    "OTTTLIFNode": lambda: jelly_neuron.OTTTLIFNode(tau=2.0),
    "SLTTLIFNode": lambda: jelly_neuron.SLTTLIFNode(tau=2.0),
    "SimpleLIFNode": lambda: jelly_neuron.SimpleLIFNode(tau=2.0, decay_input=False),
    "LIFNode with a learned threshold": lambda: jelly_neuron.LIFNode(v_threshold=0.5, detach_reset=True),
}


def _more(name: str, make: Callable[[], nn.Module]) -> None:
    @program(f"SpikingJelly: {name}")
    def make_loop(length: int) -> For:
        net = nn.Sequential(jelly_layer.Linear(4, 6), make())
        jelly_functional.reset_net(net)
        return For(lambda x: _first_of(net(x)), (_spikes(length, 3, 4) * 2,), [net])


def _first_of(y: Any) -> Any:
    return y[0] if isinstance(y, list) else y


for _name, _make in _MORE_NEURONS.items():
    _more(_name, _make)


@program("SpikingJelly: surrogates of several kinds in one net")
def _(length: int) -> For:
    kinds = (jelly_surrogate.PiecewiseQuadratic, jelly_surrogate.SoftSign, jelly_surrogate.LeakyKReLU)
    layers = [m for k in kinds for m in (nn.Linear(4, 4), jelly_neuron.IFNode(0.2, surrogate_function=k()))]
    net = nn.Sequential(*layers)
    jelly_functional.reset_net(net)
    return For(net, (_spikes(length, 2, 4),), [net])


@program("SpikingJelly: several time steps in each step, step mode m")
def _(length: int) -> For:
    net = nn.Sequential(
        jelly_layer.Conv2d(1, 2, 3, padding=1),
        jelly_layer.BatchNorm2d(2),
        jelly_neuron.IFNode(surrogate_function=jelly_surrogate.ATan()),
        jelly_layer.Flatten(),
        jelly_layer.Linear(32, 3),
        jelly_neuron.LIFNode(),
    )
    jelly_functional.set_step_mode(net, "m")
    jelly_functional.reset_net(net)
    return For(lambda x: net(x).mean(0), (torch.rand(length, 3, 2, 1, 4, 4),), [net])


@program("SpikingJelly: MultiStepContainer around a net, in pieces of four")
def _(length: int) -> For:
    net = jelly_layer.MultiStepContainer(
        nn.Sequential(jelly_layer.Linear(4, 6), jelly_neuron.ParametricLIFNode(), jelly_layer.Dropout(0.3))
    )
    jelly_functional.reset_net(net)
    return For(net, (_spikes(length, 4, 2, 4),), [net])


@program("SpikingJelly: reset_net between samples that are the steps")
def _(length: int) -> For:
    net = nn.Sequential(jelly_layer.Linear(4, 6), jelly_neuron.LIFNode(tau=2.0, v_threshold=0.4))
    encoder = jelly_encoding.PoissonEncoder()

    def step(image: torch.Tensor) -> Any:
        rate = torch.zeros(2, 6)
        for _ in range(3):
            rate = rate + net(encoder(image))
        jelly_functional.reset_net(net)
        return rate / 3

    return For(step, (torch.rand(length, 2, 4),), [net])


@program("SpikingJelly: temporal efficient training, a loss at every step", outputs_vary=True)
def _(length: int) -> For:
    net = nn.Sequential(jelly_layer.Linear(4, 6), jelly_neuron.LIFNode(), jelly_layer.Linear(6, 3))
    jelly_functional.reset_net(net)
    target = torch.randint(0, 3, (2,))

    def step(x: torch.Tensor) -> Any:
        out = net(x)
        loss = 0.95 * F.cross_entropy(out, target) + 0.05 * F.mse_loss(out, torch.ones_like(out))
        return loss, out.argmax(-1)

    return For(step, (_spikes(length, 2, 4),), [net])


@program("SpikingJelly: delay line, then a neuron")
def _(length: int) -> For:
    net = nn.Sequential(jelly_layer.Linear(4, 6), jelly_layer.Delay(3), jelly_neuron.IFNode(0.3))
    jelly_functional.reset_net(net)
    return For(net, (_spikes(length, 2, 4),), [net])


@program("SpikingJelly: dropped connections, one mask for the sequence")
def _(length: int) -> For:
    net = nn.Sequential(jelly_layer.DropConnectLinear(4, 6, p=0.4), jelly_neuron.IFNode(0.3))
    jelly_functional.reset_net(net)
    return For(net, (_spikes(length, 2, 4),), [net])


@program("SpikingJelly: NeuNorm over channels")
def _(length: int) -> For:
    net = nn.Sequential(jelly_layer.Conv2d(1, 2, 3, padding=1), jelly_neuron.IFNode(0.2), jelly_layer.NeuNorm(2, 4, 4))
    jelly_functional.reset_net(net)
    return For(net, (torch.rand(length, 2, 1, 4, 4),), [net])


@program("SpikingJelly: two recurrent containers, one in the other")
def _(length: int) -> For:
    inner = nn.Sequential(jelly_layer.Linear(4, 4), jelly_neuron.LIFNode(v_threshold=0.3))
    net = nn.Sequential(
        jelly_layer.ElementWiseRecurrentContainer(nn.Sequential(jelly_layer.Linear(4, 4)), lambda x, y: x - 0.1 * y),
        jelly_layer.LinearRecurrentContainer(inner, in_features=4, out_features=4),
    )
    jelly_functional.reset_net(net)
    return For(net, (_spikes(length, 2, 4),), [net])


@program("SpikingJelly: spiking GRU cell with a dictionary of states")
def _(length: int) -> Scan:
    cell = jelly_rnn.SpikingGRUCell(4, 6)

    def step(state: Any, x: torch.Tensor) -> Any:
        h = cell(x, state["h"])
        return {"h": h}, {"spikes": h, "count": h.sum(-1)}

    return Scan(step, {"h": torch.zeros(2, 6)}, _spikes(length, 2, 4), [cell])


@program(
    "SpikingJelly: monitor records detached spikes",
    outputs_vary=True,
    refused="rerun|records",
    instead=lambda length: _monitored(length, guarded=True),
)
def _(length: int) -> For:
    return _monitored(length, guarded=False)


def _monitored(length: int, *, guarded: bool) -> For:
    net = nn.Sequential(jelly_layer.Linear(4, 6), jelly_neuron.LIFNode(v_threshold=0.3))
    jelly_functional.reset_net(net)
    seen: list[Any] = []

    def record(_: Any, __: Any, y: torch.Tensor) -> None:
        if not (guarded and lt.is_recomputing()):
            seen.append(y.detach().mean().item())

    net[1].register_forward_hook(record)
    return For(net, (_spikes(length, 2, 4),), [net])


@program(
    "SpikingJelly: reward-modulated STDP changes weights by hand",
    refused="changes? .* in place|does not do what it did",
    instead=lambda length: _stdp(length),
)
def _(length: int) -> For:
    fc = jelly_layer.Linear(4, 6, bias=False)
    net = nn.Sequential(fc, jelly_neuron.IFNode(0.3))
    jelly_functional.reset_net(net)

    def step(x: torch.Tensor) -> Any:
        y = net(x)
        with torch.no_grad():
            fc.weight += 0.01 * (y.T @ x)
        return y

    return For(step, (_spikes(length, 2, 4),), [net])


def _stdp(length: int) -> Scan:
    w, node = torch.rand(6, 4), jelly_neuron.IFNode(0.3)
    jelly_functional.reset_net(node)

    def step(w: torch.Tensor, x: torch.Tensor) -> Any:
        y = node(x @ w.T)
        return w + 0.01 * (y.T @ x).detach(), y

    return Scan(step, w, _spikes(length, 2, 4), [node])


@program("SpikingJelly: traces of spikes before and after, as in its learner", outputs_vary=True)
def _(length: int) -> For:
    class Learner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.node = jelly_layer.Linear(4, 6, bias=False), jelly_neuron.IFNode(0.3)
            self.trace_pre: Any = None
            self.trace_post: Any = None
            self.delta_w = torch.zeros(6, 4)

        def forward(self, x: torch.Tensor) -> Any:
            y = self.node(self.fc(x))
            with torch.no_grad():
                pre = 0.0 if self.trace_pre is None else self.trace_pre
                post = 0.0 if self.trace_post is None else self.trace_post
                self.trace_pre, self.trace_post = pre * 0.5 + x, post * 0.5 + y
                self.delta_w += self.trace_post.T @ x - y.T @ self.trace_pre
            return y

    net = Learner()
    jelly_functional.reset_net(net)
    return For(net, (_spikes(length, 2, 4),), [net])


@program("SpikingJelly: parallel spiking neuron over a window of each step")
def _(length: int) -> For:
    net = nn.Sequential(nn.Linear(4, 6), jelly_neuron.PSN(3))
    return For(net, (torch.rand(length, 3, 2, 4),), [net])


@program("SpikingJelly: residual block whose shortcut adds spikes")
def _(length: int) -> For:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv1, self.conv2 = (
                nn.Sequential(
                    jelly_layer.Conv2d(2, 2, 3, padding=1, bias=False),
                    jelly_layer.BatchNorm2d(2),
                    jelly_neuron.IFNode(0.2, detach_reset=True, surrogate_function=jelly_surrogate.ATan()),
                )
                for _ in range(2)
            )

        def forward(self, x: torch.Tensor) -> Any:
            y = self.conv2(self.conv1(x))
            return y + x

    net = nn.Sequential(Block(), Block(), jelly_layer.AdaptiveAvgPool2d((1, 1)), jelly_layer.Flatten())
    jelly_functional.reset_net(net)
    return For(net, (torch.rand(length, 2, 2, 4, 4),), [net])


# --- norse

_MORE_CELLS: dict[str, Callable[[], Any]] = {
    "LIFRefracCell": lambda: norse.LIFRefracCell(),
    "LIFRefracRecurrentCell": lambda: norse.LIFRefracRecurrentCell(6, 6),
    "IAFCell": lambda: norse.IAFCell(),
    "LIFMCRecurrentCell": lambda: norse.LIFMCRecurrentCell(6, 6),
    "IzhikevichRecurrentCell": lambda: norse.IzhikevichRecurrentCell(6, 6, norse.functional.izhikevich.tonic_spiking),
    "LIFAdExRecurrentCell": lambda: norse.LIFAdExRecurrentCell(6, 6),
}


def _more_norse(name: str, make: Callable[[], Any]) -> None:
    @program(f"norse: {name}, state None")
    def make_loop(length: int) -> Scan:
        fc, cell = nn.Linear(4, 6), make()

        def step(state: Any, x: torch.Tensor) -> Any:
            z, state = cell(10 * fc(x), state)
            return state, z

        return Scan(step, None, _spikes(length, 2, 4), [fc, cell])


for _name, _cell in _MORE_CELLS.items():
    _more_norse(_name, _cell)


@program("norse: RegularizationCell counts spikes in a module")
def _(length: int) -> Scan:
    fc, cell, regular = nn.Linear(4, 6), norse.LIFCell(), norse.RegularizationCell()

    def step(state: Any, x: torch.Tensor) -> Any:
        z, state = cell(10 * fc(x), state)
        z, count = regular(z, state)
        return state, (z, count)

    return Scan(step, None, _spikes(length, 2, 4), [fc, cell, regular])


@program("norse: recurrent SequentialState feeding its last output back")
def _(length: int) -> Scan:
    net = norse.RecurrentSequential(nn.Linear(4, 4), norse.LIFCell(), output_modules=-1)

    def step(state: Any, x: torch.Tensor) -> Any:
        y, state = net(5 * x, state)
        return state, y

    return Scan(step, None, _spikes(length, 2, 4), [net])


@program("norse: memory task, LSNN with readout and currents of a Poisson encoder")
def _(length: int) -> Scan:
    class Memory(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = norse.module.encode.PoissonEncoderStep()
            self.lsnn = norse.LSNNRecurrentCell(4, 8, p=norse.LSNNParameters(method="super"))
            self.readout = norse.LILinearCell(8, 2)

        def forward(self, states: Any, x: torch.Tensor) -> Any:
            hidden, out = states
            z, hidden = self.lsnn(self.encoder(x), hidden)
            v, out = self.readout(z, out)
            return (hidden, out), F.log_softmax(v, -1)

    net = Memory()
    return Scan(net, (None, None), torch.rand(length, 2, 4) * 100, [net])


@program("norse: SequentialState with a nested one and its hidden values")
def _(length: int) -> Scan:
    inner = norse.SequentialState(nn.Linear(4, 4), norse.LIFCell())
    net = norse.SequentialState(nn.Linear(4, 4), inner, norse.LICell(), return_hidden=True)

    def step(state: Any, x: torch.Tensor) -> Any:
        hidden, state = net(5 * x, state)
        return state, hidden[-1]

    return Scan(step, None, _spikes(length, 2, 4), [net])


@program("norse: cart-pole policy, action drawn from spikes' readout", outputs_vary=True)
def _(length: int) -> Scan:
    fc, lif, out = nn.Linear(4, 8), norse.LIFRecurrentCell(8, 8), norse.LILinearCell(8, 2)

    def step(state: Any, x: torch.Tensor) -> Any:
        s1, so = state
        z, s1 = lif(fc(50 * torch.relu(torch.cat([x, -x], -1))), s1)
        v, so = out(z, so)
        chances = torch.distributions.Categorical(logits=v)
        action = chances.sample()
        return (s1, so), (action, chances.log_prob(action))

    return Scan(step, (None, None), torch.randn(length, 2, 2), [fc, lif, out])
