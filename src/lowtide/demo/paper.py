"""The example that only plans: a rollout of a million steps in 64 MiB, played action by action, and VGG-16's layers."""

from __future__ import annotations

from collections.abc import Callable

from lowtide.actions import Backward
from lowtide.chain import Chain, StepCost, Working
from lowtide.demo.contest import PLAIN, ResultRow, Tool, with_lowtide
from lowtide.plan import Bill, Plan
from lowtide.planners.choose import choose, least_budget
from lowtide.report.usual_tools import peers
from lowtide.simulate import Ledger
from lowtide.sizes import format_size

BUDGET = "64MiB"
NOTHING_RAN = "on paper"


def rollout(*, quick: bool) -> Plan:
    """The plan of a rollout whose steps have a state of 64 KiB and a tape of 320 KiB each."""
    return choose(Chain.equal(StepCost(64 * 1024, 320 * 1024), 20_000 if quick else 1_000_000), BUDGET)


def played(plan: Plan, tell: Callable[[int], None]) -> tuple[int, Bill]:
    """The number of actions and the bill, from playing them; `tell` is called from time to time with the steps done."""
    ledger, length = Ledger(plan.chain), len(plan.chain)
    front, count = length, 0
    for action in plan.actions():
        ledger.play(action)
        count += 1
        if isinstance(action, Backward):
            front = action.start
        if count % 500 == 0:
            tell(length - front)
    return count, ledger.close()


def verdict(plan: Plan, count: int, bill: Bill) -> str:
    """The result of playing the plan, in a sentence."""
    agrees = "is the one predicted" if bill == plan.bill else f"is NOT the one predicted: {bill}"
    return f"{count:,} actions played on paper: every one was legal, and the bill {agrees}."


def rows(example: str, plan: Plan) -> list[ResultRow]:
    """The result rows of keeping all tapes, of snapshots at equal distances, and of the plan."""
    chain = plan.chain
    base = round(len(chain) ** 0.5)
    tools = [(Tool(f"every {base:,} steps"), choose(chain, base=base)), (with_lowtide(f"budget={BUDGET}"), plan)]
    whole = chain.plain_tape
    made = [ResultRow(example, PLAIN.name, whole, whole, None, 1.0, NOTHING_RAN, PLAIN.kind)]
    return made + [
        ResultRow(example, tool.name, each.bill.peak_memory, whole, None, each.time_factor, NOTHING_RAN, tool.kind)
        for tool, each in tools
    ]


def limit(chain: Chain) -> str:
    """The least budget that works, in a sentence."""
    return f"The least budget that works is {format_size(least_budget(chain))}; less is refused before anything runs."


def layers() -> str:
    """Segments with equal numbers of layers beside a plan with the same peak, for VGG-16, in a sentence."""
    chain = vgg16()
    usual = min(peers(chain), key=lambda peer: peer.peak)
    planned = choose(chain, usual.peak)
    return (
        f"VGG-16, batch 32, in {format_size(usual.peak)} instead of {format_size(chain.plain_tape)}: {usual.name}, "
        f"{usual.time_factor - 1:.0%} extra time; a plan, {planned.time_factor - 1:.0%}."
    )


def vgg16() -> Chain:
    """VGG-16's features as a chain on paper: thirteen convolutions with ReLUs, and five poolings.

    Times are in 10^12 multiply-adds.
    """
    batch, side, width, float_bytes = 32, 224, 3, 4
    steps, names = [], []
    for block, (count, channels) in enumerate([(2, 64), (2, 128), (3, 256), (3, 512), (3, 512)], start=1):
        for k in range(1, count + 1):
            came = batch * width * side**2 * float_bytes
            goes = batch * channels * side**2 * float_bytes
            work = batch * side**2 * width * channels * 9 / 1e12
            # The convolution keeps its input, the ReLU its output, which is the next step's input.
            steps.append(_layer(came, came, goes, work))
            names.append(f"conv{block}_{k}")
            width = channels
        came = batch * width * side**2 * float_bytes
        goes = came // 4
        indices = 2 * goes  # eight bytes for each output
        steps.append(_layer(came, came + indices, goes, came / 1e12))
        names.append(f"pool{block}")
        side //= 2
    return Chain.of(steps, names)


def _layer(came: int, tape: int, goes: int, work: float) -> StepCost:
    working = Working(advance=came + goes, tape=goes, backward=came + goes)
    return StepCost(came, tape, work, 2 * work, cotangent=came, working=working)
