"""What a step closes over: tensors that need a gradient and that it neither made nor was given.

They are found in the first taped step's graph. Every leaf of it, and every node older than the step, must belong to
a captured tensor; leaves name their tensor, older nodes are matched with the tensors that the step was seen to pass
to torch's functions. Later steps are walked too (`Walk`): one that reaches something never seen is refused, because its
gradient would be lost.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from itertools import count, islice
from typing import Any, TypeGuard

import numpy as np
import torch
from torch.autograd.graph import GradientEdge, Node, _engine_run_backward, get_gradient_edge
from torch.overrides import TorchFunctionMode

from lowtide.errors import CheckpointError
from lowtide.torch.memory.tracker import tensors_of
from lowtide.torch.state.generators import state_of
from lowtide.torch.state.samples import is_gone, sample_of
from lowtide.torch.state.structure import NUMBERS, is_plain_object

# --- tensors, and where their gradients arrive

_sequence_number: Callable[[], int] = torch._C._autograd._get_sequence_nr  # the number that the next node will get


def now() -> int:
    """A mark in the order in which this thread makes nodes: later ones have it or more."""
    return _sequence_number()


def has_gradient(leaf: Any) -> TypeGuard[torch.Tensor]:
    """Whether it is a tensor that needs a gradient."""
    return isinstance(leaf, torch.Tensor) and leaf.requires_grad


def is_differentiable(leaf: Any) -> TypeGuard[torch.Tensor]:
    """Whether gradients can flow through it at all."""
    return isinstance(leaf, torch.Tensor) and (leaf.is_floating_point() or leaf.is_complex())


def edge_of(tensor: torch.Tensor) -> GradientEdge:
    """Where the tensor's gradient arrives; unlike the tensor it keeps no values alive."""
    node = tensor.grad_fn
    if node is not None:
        return GradientEdge(node, tensor.output_nr)
    if tensor.layout is torch.strided:
        return get_gradient_edge(tensor)
    with torch.enable_grad():  # of a sparse leaf there are no views, from which torch would know
        above: Any = tensor.clone().grad_fn
    return GradientEdge(above.next_functions[0][0], 0)


def is_cut_off(edge: Any) -> bool:
    """Whether the leaf whose gradient arrives there was detached in place since (`h.detach_()`)."""
    return not edge.node.variable.requires_grad


def edges_of(leaves: list[Any]) -> list[GradientEdge | None]:
    """Where the gradient of each leaf enters the graph that made it; None where none does."""
    return [edge_of(leaf) if has_gradient(leaf) else None for leaf in leaves]


def edge_set(leaves: list[Any]) -> set[GradientEdge]:
    """Where the leaves' gradients arrive."""
    return {edge_of(leaf) for leaf in leaves if has_gradient(leaf)}


def gradients(
    roots: list[Any], wanted: list[Any], cotangents: list[torch.Tensor], *, keep: bool
) -> tuple[torch.Tensor | None, ...]:
    """`torch.autograd.grad` with None for what is not reached, without its checks of every single root.

    They take longer than a small step, and what is checked, shapes and dtypes, is known to be right here.
    """
    results: tuple[torch.Tensor | None, ...] = _engine_run_backward(
        tuple(roots), tuple(cotangents), keep, False, tuple(wanted), allow_unreachable=True, accumulate_grad=False
    )
    return results


def strangers(roots: Iterable[GradientEdge], known: set[GradientEdge], since: int) -> list[GradientEdge]:
    """Leaves and nodes older than `since` that the graph below `roots` reaches without passing a known edge."""
    found: list[GradientEdge] = []
    seen: set[Node] = set()
    stack = [edge for edge in roots if edge not in known]
    while stack:
        edge = stack.pop()
        node = edge.node
        following = node.next_functions
        if not following or node._sequence_nr() < since:
            found.append(edge)
            continue
        if node in seen:
            continue
        seen.add(node)
        for below, number in following:
            if below is not None:
                further = GradientEdge(below, number)
                if further not in known:
                    stack.append(further)
    return found


def _references(leaf: Any) -> int:
    return sys.getrefcount(leaf.variable)


# To a tensor that nobody but its graph holds.
_FEWEST = _references(edge_of(torch.zeros((), requires_grad=True).sin()).node.next_functions[0][0])


def is_out_of_reach(node: Any) -> bool:
    """Whether a gradient arrives there at a leaf that nobody holds, made by a step inside: it can be lost."""
    return hasattr(node, "variable") and _references(node) <= _FEWEST


# --- a result pulled back by itself, from zeros: nobody's gradients or hooks are touched

_ONE = torch.ones(())


class _Seed(torch.autograd.Function):
    """Pulls zeros into its arguments; those that are not handed to a list as well are held by nobody else."""

    @staticmethod
    def forward(ctx: Any, held: list[torch.Tensor] | None, *outputs: torch.Tensor) -> torch.Tensor:
        ctx.held = held
        ctx.forms = [(output.shape, output.stride(), output.dtype, output.device) for output in outputs]
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> Any:
        made = [_zeros(*form) for form in ctx.forms]
        if ctx.held is not None:
            ctx.held.extend(made)
        return None, *made


def _zeros(shape: torch.Size, strides: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if 0 in strides:
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.empty_strided(shape, strides, dtype=dtype, device=device).zero_()


def seed_of(result: Any, held: list[torch.Tensor] | None = None) -> torch.Tensor | None:
    """A root from which to pull the result back, which does not hold it; None if nothing in it has a gradient.

    Args:
        result: what is pulled back.
        held: where its gradients are put, as those of a caller who keeps them.
    """
    roots = [tensor for tensor in tensors_of(result) if tensor.requires_grad]
    return _Seed.apply(held, *roots) if roots else None  # type: ignore[no-untyped-call]  # torch's own


def pulled(
    seed: torch.Tensor, wanted: list[torch.Tensor], since: int
) -> tuple[tuple[torch.Tensor | None, ...], tuple[torch.Tensor | None, ...]]:
    """Gradients of what is wanted, and of everything else that the graph made since then comes from."""
    others = strangers([edge_of(seed)], {edge_of(tensor) for tensor in wanted}, since)
    captured = Captured()
    captured.targets = [edge.node.variable for edge in others if hasattr(edge.node, "variable")]
    with captured.without_hooks():
        results = gradients([seed], [*wanted, *others], [_ONE], keep=False)
    return results[: len(wanted)], results[len(wanted) :]


# --- hooks of tensors that turn out to have no gradient


class _Spared:
    """A hook that is not called where there is no gradient, which autograd calls with None behind a Function."""

    def __init__(self, hook: Callable[..., Any]) -> None:
        self._hook = hook

    def __call__(self, grad: torch.Tensor | None) -> Any:
        return None if grad is None else self._hook(grad)


class _SparedOnce:
    """A hook for when a gradient has been added up, not called if nothing was added since it was spared."""

    def __init__(self, hook: Callable[..., Any]) -> None:
        self._hook = hook
        self._untouched: Any = None

    def spare(self, tensor: torch.Tensor) -> None:
        """A backward is about to end at the tensor without a gradient for it."""
        self._untouched = _mark_of(tensor.grad)

    def __call__(self, tensor: torch.Tensor) -> Any:
        untouched, self._untouched = self._untouched, None
        return None if untouched == _mark_of(tensor.grad) else self._hook(tensor)


def _mark_of(grad: torch.Tensor | None) -> tuple[int, int]:
    return (0, 0) if grad is None else (id(grad), grad._version)


def spare_hooks(tensor: torch.Tensor) -> None:
    """See to it that hooks of a tensor, for which a backward has found no gradient, are not called because of that.

    In the plain loop nothing would lead to it. Where another part of the graph has a gradient for it, they are called.
    """
    hooks: Any = tensor._backward_hooks
    for key, hook in (hooks or {}).items():
        if not isinstance(hook, _Spared):
            hooks[key] = _Spared(hook)
    after: Any = getattr(tensor, "_post_accumulate_grad_hooks", None)
    for key, hook in (after or {}).items():
        if not isinstance(hook, _SparedOnce):
            after[key] = hook = _SparedOnce(hook)
        hook.spare(tensor)


# --- the first step: what it is seen to use

# What a step can only do with grad, so that it must have it also where no tape is kept.
_BACKWARDS = frozenset({torch.autograd.backward, torch.Tensor.backward})
_NEEDING_GRAD = frozenset({torch.autograd.grad, torch.Tensor.register_hook}) | _BACKWARDS


class Watch(TorchFunctionMode):
    """Sees what a step hands to torch's functions: generators, and tensors that were there before it began.

    `needs_grad` tells whether it differentiated something or registered a hook; `graded` has the leaves whose gradients
    it added to, by a backward of its own.
    """

    def __init__(self) -> None:
        super().__init__()
        self.since = now()
        self.needs_grad = False
        self.tensors: dict[int, torch.Tensor] = {}
        self.graded: dict[int, torch.Tensor] = {}
        # With the state that each had when it was first met.
        self.generators: dict[int, tuple[torch.Generator, Any]] = {}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        self.needs_grad |= func in _NEEDING_GRAD
        if func in _BACKWARDS:
            self._see_backward(args[0])
        for value in (*args, *kwargs.values()):
            for item in value if isinstance(value, tuple | list) else (value,):
                if isinstance(item, torch.Tensor):
                    node = item.grad_fn
                    if node is not None and node._sequence_nr() < self.since:
                        self.tensors[id(item)] = item
                elif isinstance(item, torch.Generator) and id(item) not in self.generators:
                    self.generators[id(item)] = (item, state_of(item))
        return func(*args, **kwargs)

    def _see_backward(self, roots: Any) -> None:
        edges = {edge_of(tensor) for tensor in tensors_of(roots) if tensor.requires_grad}
        leaves = (getattr(edge.node, "variable", None) for edge in strangers(edges, set(), 0))
        self.graded.update({id(leaf): leaf for leaf in leaves if leaf is not None})


# --- what is captured


class Captured:
    """The captured tensors, and which node each one's gradient arrives at.

    A captured tensor that was computed from another one needs care: the gradient of a stretch would run through it
    into the other, and the same would happen again outside the loop. While a stretch is taped, an alias takes its
    place; so it does for one that was computed and has hooks.
    """

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self.names: list[str] = []
        self.edges: list[GradientEdge] = []  # where their gradients arrive
        self._aliases: dict[int, torch.Tensor] = {}
        self.targets: list[torch.Tensor] = []
        self._versions: list[int] = []

    def add(self, tensor: torch.Tensor, name: str) -> None:
        """Capture one tensor."""
        edge = edge_of(tensor)
        if edge not in self.edges:
            self.edges.append(edge)
            self.tensors.append(tensor)
            self.names.append(name)

    def learn(self, roots: list[GradientEdge], given: set[GradientEdge], watch: Watch, names: dict[int, str]) -> None:
        """Capture what the first step's graph reaches beside what it was given, or say what cannot be captured.

        `names` are those under which the step holds tensors, by identity.
        """
        candidates = {edge_of(tensor): tensor for tensor in watch.tensors.values()}
        for edge in strangers(roots, given.union(self.edges), watch.since):
            if is_out_of_reach(edge.node):
                continue
            tensor = candidates.get(edge, getattr(edge.node, "variable", None))
            if tensor is None:
                raise CheckpointError(
                    f"the step uses a tensor computed before the loop (by {edge.node.name()}) that reaches it out of "
                    "sight, through a custom autograd Function; name it: captures=(tensor,)"
                )
            unnamed = f"a tensor of shape {tuple(tensor.shape)} that the step closes over"
            self.add(tensor, names.get(id(tensor), unnamed))

    def settle(self) -> None:
        """No more captures."""
        for tensor in self.tensors:
            # A hook for the whole gradient, or a gradient that is kept, must not see each stretch's own.
            hooked = bool(tensor._backward_hooks) or tensor.retains_grad
            if tensor.grad_fn is not None and (hooked or self._depends(tensor)):
                self._aliases[id(tensor)] = tensor.detach().requires_grad_()
        self.targets = [self._aliases.get(id(tensor), tensor) for tensor in self.tensors]
        self.edges = [edge_of(target) for target in self.targets]
        self._versions = [tensor._version for tensor in self.tensors]

    def changed(self) -> list[str]:
        """Names of captured tensors that were changed in place since `settle`."""
        rows = zip(self.names, self.tensors, self._versions, strict=True)
        return [name for name, tensor, version in rows if tensor._version != version]

    def _depends(self, tensor: torch.Tensor) -> bool:
        """Whether the history of a captured tensor leads to another one."""
        assert tensor.grad_fn is not None
        others = {edge.node for edge in self.edges} - {tensor.grad_fn}
        seen: set[Node] = set()
        stack: list[Node] = [tensor.grad_fn]
        while stack:
            node = stack.pop()
            if node in others:
                return True
            if node not in seen:
                seen.add(node)
                stack += [below for below, _ in node.next_functions if below is not None]
        return False

    def in_place_of(self, others: dict[int, torch.Tensor] | None = None) -> Any:
        """Inside, aliases (or `others`, by the identity of what they replace) stand in for dependent tensors."""
        aliases = self._aliases if others is None else others
        return _Substituting(aliases) if aliases else nullcontext()

    @property
    def dependent(self) -> bool:
        """Whether some captured tensors were computed from other ones."""
        return bool(self._aliases)

    @contextmanager
    def without_hooks(self) -> Iterator[None]:
        """Inside, hooks on captured tensors are silent: they are for the whole gradient, not for each stretch's."""
        hooked = [tensor for tensor in self.targets if tensor._backward_hooks]
        if not hooked:
            yield
            return
        held = [tensor._backward_hooks for tensor in hooked]
        for tensor in hooked:
            tensor._backward_hooks = None
        try:
            yield
        finally:
            for tensor, hooks in zip(hooked, held, strict=True):
                tensor._backward_hooks = hooks


class _Substituting(TorchFunctionMode):
    """Hands torch's functions another tensor in place of each one that is a key."""

    def __init__(self, aliases: dict[int, torch.Tensor]) -> None:
        super().__init__()
        self._aliases = aliases

    def _swap(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._aliases.get(id(value), value)
        if type(value) in (tuple, list):
            return type(value)(self._swap(item) for item in value)
        return value

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        swapped = {name: self._swap(value) for name, value in (kwargs or {}).items()}
        return func(*(self._swap(value) for value in args), **swapped)


# --- later steps: do they reach anything else

_HIDDEN: Any = object()
_MOST_DEPTH = 3  # of containers and objects in a context
_MOST_FOUND = 100  # of each
_calls = count()


class Walk:
    """Which steps of one loop have their graphs walked, and what a walk refuses.

    A walk takes about as long as a small step, so it is done where a step made another number of nodes than those seen
    so far, and else at one step in `EVERY`, others at each call of a loop; with `always`, at every step.
    """

    EVERY = 64

    def __init__(self, always: bool) -> None:
        self._turn = next(_calls)
        self._every = 1 if always else self.EVERY
        self.node_counts: set[int] = set()

    def always(self) -> None:
        """Walk every step from here on."""
        self._every = 1

    def next_due(self, k: int, last: int) -> int:
        """The first step from k on whose turn it is; the first two and the last always have one."""
        return k if k < 2 else min(k + -(k + self._turn) % self._every, last)

    @staticmethod
    def check(k: int, results: list[Any], ends: set[GradientEdge], since: int, begun: int) -> None:
        """Refuse step k, which ran, if the graph of its results since `since` reaches anything but `ends`.

        `begun` is the sequence number at which the loop began.
        """
        for edge in strangers(edge_set(results), ends, since):
            node = edge.node
            if is_out_of_reach(node):
                continue
            variable = getattr(node, "variable", None)
            if variable is None and node._sequence_nr() >= begun:
                raise CheckpointError(
                    f"step {k:,} uses a tensor that an earlier step computed ({node.name()}) and put where it is not "
                    "part of the loop's state, so its gradient would be lost; make it part of the carry (where objects "
                    "count only if they are dataclasses, or registered as pytrees), or an attribute of a module, or "
                    "compute it before the loop"
                )
            what = "computed before the loop" if variable is None else f"of shape {tuple(variable.shape)}"
            raise CheckpointError(
                f"step {k:,} uses a tensor {what} ({node.name()}) that the first step did not touch, so its gradient "
                "would be lost; use it in the first step too, or name it: captures=(tensor,)"
            )


# --- the graph of a step

# Its nodes and how they follow on each other, with the numbers in them; and samples of the tensors that they saved.
Graph = tuple[tuple[Any, ...], tuple[Any, ...]]
_PARTLY_FILLED = ("Rrelu", "CtcLoss")  # nodes of operations that save tensors of which they leave parts unfilled


def as_it_was_packed(tensor: torch.Tensor) -> torch.Tensor:
    """A hook for saved tensors, to be unpacked with; it is one behind which `graph_of` may look."""
    return tensor


def graph_of(
    results: Iterable[GradientEdge | None],
    ends: set[GradientEdge],
    since: int,
    sample: Callable[[torch.Tensor], Any] = sample_of,
) -> Graph:
    """What tells the graph of a step.

    Args:
        results: where gradients enter; None where none does.
        ends: where they come out.
        since: the sequence number from which on nodes are the step's own.
        sample: what is noted of tensors that can be read where they are. Samples of those on a device, or with gaps,
            would be tensors too, which no budget has room for.
    """
    roots = list(results)
    nodes = _nodes_of(roots, ends, since)
    numbers = {node: place for place, node in enumerate(nodes)}

    def number(node: Node | None, k: int) -> int | None:
        return None if node is None else -1 if GradientEdge(node, k) in ends else numbers[node]

    rows, samples = [], []
    for node, below in nodes.items():
        own, tensors = _saved_in(node)
        rows.append((_name_of(node), own, tuple(number(b, k) for b, k in below)))
        samples += [sample(tensor) if _can_be_read(tensor, node) else 0 for tensor in tensors]
    return (*(None if edge is None else number(edge.node, edge.output_nr) for edge in roots), *rows), tuple(samples)


def _nodes_of(roots: list[GradientEdge | None], ends: set[GradientEdge], since: int) -> dict[Node, Any]:
    """The nodes of a graph in their order, each with the edges that follow on it."""
    nodes: dict[Node, Any] = {}
    stack = [edge.node for edge in reversed(roots) if edge is not None and edge not in ends]
    while stack:
        node = stack.pop()
        if node not in nodes:
            nodes[node] = below = node.next_functions if node._sequence_nr() >= since else ()
            stack += [b for b, k in reversed(below) if b is not None and GradientEdge(b, k) not in ends]
    return nodes


def _can_be_read(tensor: torch.Tensor | None, node: Node) -> TypeGuard[torch.Tensor]:
    if tensor is None or not tensor.is_cpu or node.name().startswith(_PARTLY_FILLED):
        return False
    return tensor.layout is torch.strided and tensor.is_contiguous() and not is_gone(tensor)


def same_graph(one: Graph, other: Graph) -> bool:
    """Whether two graphs are the same. What is behind somebody's hooks was not looked at, and may be anything."""
    same = one[0] == other[0] or (len(one[0]) == len(other[0]) and all(map(_same_row, one[0], other[0])))
    return same and all(then == now or not then or not now for then, now in zip(one[1], other[1], strict=False))


def _same_row(one: Any, other: Any) -> bool:
    if one == other or not isinstance(one, tuple) or not isinstance(other, tuple):
        return bool(one == other)
    numbers = dict(other[1])
    same = all(numbers.get(name, value) == value for name, value in one[1])
    return same and (one[0], one[2]) == (other[0], other[2])


def _name_of(node: Node) -> str:
    name = node.name()
    return "reshape" if name in _VIEWS else name


# A reshape leaves one or the other of these, depending on who watches.
_VIEWS = frozenset({"ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0"})


def _saved_in(node: Any) -> tuple[tuple[Any, ...], list[torch.Tensor | None]]:
    """Numbers that an operation was given, or a custom Function has put into its context, and tensors that it saved.

    None stands for a tensor behind a hook of somebody's, which to look at would run.
    """
    attributes, found = getattr(node, "__dict__", None), list[tuple[str, Any]]()
    for name, value in () if attributes is None else list(attributes.items()):
        found += _within(name, value)
    for name in _saved_by(type(node)) if attributes is None else ("_saved_tensors",):
        raw = getattr(node, f"_raw{name}", None)
        rows = raw if isinstance(raw, tuple) else (raw,)
        value = _HIDDEN
        if all(map(_may_be_looked_at, rows)):
            with suppress(RuntimeError):  # a tensor that was changed in place since: the backward will say so
                value = getattr(node, name if attributes is None else "saved_tensors")
        found += [(name, None)] * len(rows) if value is _HIDDEN else _within(name.removeprefix("_saved_"), value)
    numbers = tuple((name, value) for name, value in found if isinstance(value, str))
    return numbers, [value for _, value in found if not isinstance(value, str)]


def _within(name: str, value: Any, depth: int = 0) -> list[tuple[str, Any]]:
    """Numbers, in words, and tensors that a value is or has in it, each with a name."""
    if isinstance(value, torch.Tensor):
        return [(name, value)]
    if type(value) in NUMBERS or isinstance(value, np.generic):
        return [(name, repr(value))]
    inside = islice(_inside(value), _MOST_FOUND) if depth < _MOST_DEPTH else ()
    return [each for k, part in enumerate(inside) for each in _within(f"{name}.{k}", part, depth + 1)]


def _inside(value: Any) -> Iterable[Any]:
    """What is in a container or an object that a custom Function has put into its context."""
    if isinstance(value, tuple | list):
        return value
    attributes = getattr(value, "__dict__", {}) if is_plain_object(type(value)) else {}
    return (value if isinstance(value, dict) else attributes).values()


def _may_be_looked_at(raw: Any) -> bool:
    """Whether to look at what was saved runs no hook of somebody's."""
    return getattr(raw, "unpack_hook", None) in (None, as_it_was_packed)


_saved_names: dict[type, tuple[str, ...]] = {}  # by torch's own classes of nodes


def _saved_by(kind: type) -> tuple[str, ...]:
    """The names under which an operation's node has what it saved."""
    if kind not in _saved_names:
        _saved_names[kind] = tuple(name for name in dir(kind) if name.startswith("_saved_"))
    return _saved_names[kind]
