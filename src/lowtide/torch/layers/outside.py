"""Things outside of layers that measuring moves: counters and iterators that are the user's own, and are not put back.

Measuring runs every layer a few times. What a layer keeps in modules is put back afterwards, and so are random numbers.
If anything else has moved, each layer is run a few times more, from the same state and with the same random numbers. If
it then computes something else, or gradients would flow through it otherwise, the row would no longer do what it does
plainly, and the caller is told. That something moves is nothing by itself: a progress bar does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from lowtide.torch.memory.tracker import copied, detached, tensors_of
from lowtide.torch.state.ambient import aside
from lowtide.torch.state.capture import edge_set, edges_of, graph_of, now, same_graph
from lowtide.torch.state.generators import Randomness
from lowtide.torch.state.hidden import left_as_it_was
from lowtide.torch.state.samples import sample_of
from lowtide.torch.state.surroundings import Finds, Things, moved

_RUNS = 4  # of each layer, to see whether it does the same each time
_Layers = list[Callable[[Any], Any]]


class Outside:
    """What layers can see outside, as it is now."""

    def __init__(self, layers: _Layers) -> None:
        self._layers = layers
        finds = Finds(layers)
        self._randomness = Randomness(finds.generators)
        self._things = Things(finds, [module for found in finds.modules for module in found.modules()])
        self._look = self._things.look()

    def difference(self, x: Any) -> str:
        """After the layers have been measured with this input: which layer does not do what it did, in words."""
        names = moved(self._look, self._things.look())
        if not names:
            return ""
        with aside(self._layers):
            state = x
            for k, layer in enumerate(self._layers):
                state, differs = self._run(layer, state)
                if differs:
                    return (
                        f"layer {k:,} ({_name_of(layer)}) {differs} each time it runs. Measuring the layers has run it "
                        f"a few times, and has moved {_some(names)}, which is outside of modules and is not put back"
                    )
        return ""

    def _run(self, layer: Callable[[Any], Any], state: Any) -> tuple[Any, str]:
        """Run a layer a few times; returns the state after it, and how the runs differ, if they do."""
        start, result, first = self._randomness.mark(), None, None
        for _ in range(_RUNS):
            self._randomness.restore(start)
            with left_as_it_was([layer]):
                given, since = copied(state), now()
                result = layer(given)
            tensors = tensors_of(result)
            graph = graph_of(edges_of(list(tensors)), edge_set(list(tensors_of(given))), since)
            # On a device a sample is a tensor; what a device computes in this way is compared in reruns alone.
            samples = [sample for tensor in tensors if isinstance(sample := sample_of(tensor.detach()), int)]
            if first is None:
                first = graph, samples
            elif first[1] != samples:
                return result, "computes something else"
            elif not same_graph(first[0], graph):
                return result, "computes the same, but gradients flow through it in another way"
        return detached(result), ""


def _name_of(layer: Any) -> str:
    return type(layer).__name__ if isinstance(layer, nn.Module) else getattr(layer, "__qualname__", repr(layer))


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3:,} more" if len(names) > 3 else "")
