"""Plans that the printed reports are tried on, and names that try to be more than text."""

from __future__ import annotations

from lowtide.chain import Chain, Disk, StepCost, Working
from lowtide.plan import Plan, Receipt
from lowtide.planners.choose import choose

HOSTILE = (
    "[red]bold[/red]日本語\x1b]0;title\x07\x1b[31mred\nline\r\ttab <script>alert(1)</script> & \"quoted\" 'twice' "
    "$x^{\\frac$ \u202eturned\u2066 \ud800 \x9b31m" + "long" * 40
)


def rollout(length: int = 400) -> Chain:
    step = StepCost(4608, 6656, cotangent=4608, working=Working(4608, 4608, 9216))
    return Chain.equal(step, length)


def network(layers: int = 9, name: str = "layer") -> Chain:
    """Layers that get smaller and slower."""
    steps = [
        StepCost(1000 * (layers - k), 5000 * (layers - k), forward=1.0 + k, backward=2.0 + k) for k in range(layers)
    ]
    return Chain.of(steps, [f"{name} {k}" for k in range(layers)])


def on_disk(length: int = 60) -> Plan:
    chain = Chain.equal(StepCost(65_536, 327_680, forward=1e-3, backward=2e-3), length)
    return choose(chain, "2MiB", disk=Disk(2e-9, 1e-9))


def untimed() -> Plan:
    """A plan whose steps take no time."""
    return choose(Chain.equal(StepCost(10, 100, forward=0.0, backward=0.0), 30), base=5)


def measured(peak: int, held: int = 1_000) -> Receipt:
    """A run that climbed to `peak` and came down to what stays."""
    curve = tuple(peak * k // 200 for k in range(201)) + tuple(
        held + (peak - held) * k // 50 for k in range(50, -1, -1)
    )
    return Receipt(380, 400, 400, 2, peak, 0, 1.5, held, curve)
