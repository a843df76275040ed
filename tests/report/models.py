"""Plans of whole models that the reports are tried on: twelve transformer blocks with five forms each."""

from __future__ import annotations

from dataclasses import replace

from lowtide.chain import Chain, Role, StepCost, TapeOption, Working
from lowtide.forms import RERUN, Form, LeanForm, Way, lean_form
from lowtide.plan import Knob, Plan, Receipt
from lowtide.planners.blocks import Blocks, block_frontier, choose_blocks, least_peak

MIB = 1 << 20
PARAMETERS, OPTIMIZER, INPUTS = 324 * MIB, 648 * MIB, 2 * MIB
IN_PARTS = Form((("attn", Way(rerun=True)), ("mlp", Way(lean=LeanForm(1048576, 0)))))
HELD = PARAMETERS + OPTIMIZER + INPUTS
NOTES = (
    "transformer.wte is called once and is no repeated block: it runs as it is.",
    "All 12 blocks of transformer.h.",
)


def outside(beside: int, forward: float = 0.0, backward: float = 0.0) -> StepCost:
    """A step that is no block."""
    return StepCost(1, 1, forward, backward, working=Working(0, HELD, HELD + beside))


def block(k: int) -> StepCost:
    """A block, each a little larger and slower than the one before; gradients gather on the way back."""
    tape, gradients = 72 * MIB + 4096 * k, max(12 - k, 0) * 20 * MIB
    seconds = 0.006 + 0.0001 * k
    options = (
        TapeOption(tape * 3 // 5, 0.0004 + 0.00001 * k, "", HELD + gradients + 4 * MIB, lean_form(45298483, 524288)),
        TapeOption(tape * 2 // 5, 0.0010 + 0.00002 * k, "", HELD + gradients + 6 * MIB, lean_form(30198988, 1048576)),
        TapeOption(tape // 4, 0.0021 + 0.00001 * k, "", HELD + gradients + 30 * MIB, IN_PARTS),
        TapeOption(3 * MIB, seconds, "", HELD + gradients + tape, RERUN),
    )
    working = Working(0, HELD + MIB, HELD + gradients + 3 * MIB)
    return StepCost(1, tape, seconds, 2 * seconds, working=working, options=options)


def gpt(blocks: int = 12, name: str = "transformer.h") -> Chain:
    """What happens in a training step, in the order of the forward."""
    steps = [
        ("(optimizer step)", Role.OPTIMIZER, outside(324 * MIB, 0.0, 0.009)),
        ("(outside)", Role.BETWEEN, outside(300 * MIB, 0.001, 0.002)),
        *((f"{name}.{k}", Role.BLOCK, block(k)) for k in range(blocks)),
        ("(outside)", Role.BETWEEN, outside(90 * MIB, 0.004, 0.008)),
        ("(loss)", Role.LOSS, outside(150 * MIB, 0.001, 0.001)),
    ]
    names, roles, costs = zip(*steps, strict=True)
    chain = Chain.of(costs, names, roles)
    return replace(chain, parameters=PARAMETERS, gradients=PARAMETERS)


def model_plan(chain: Chain, share: float = 0.4, margin: int = 16 * MIB, unit: str = "s") -> Plan:
    """The plan for a peak that lies so far between the least and the largest."""
    least, most = least_peak(chain), block_frontier(chain)[0].peak
    peak = least + int(share * (most - least)) + margin
    options = choose_blocks(chain, peak, margin=margin)
    return Plan.make(chain, Knob("peak", peak), Blocks(options, OPTIMIZER, INPUTS, margin, NOTES, unit))


def measured_model(plan: Plan, share: float = 0.99) -> Receipt:
    """A step that took so much of the predicted peak."""
    made = int(share * plan.bill.peak_memory) - HELD
    curve = tuple(made * k // 120 for k in (*range(100), *range(99, -1, -1)))
    return Receipt(peak_memory=made, seconds=0.31, held=324 * MIB, curve=curve)  # runs of blocks are not counted
