"""Random chains, and the same chains in the words of the exhaustive search."""

from __future__ import annotations

from hypothesis import strategies as st

from lowtide.chain import Chain, StepCost, TapeOption, Working
from tests.planners.exhaustive import Step

small = st.integers(0, 3)


@st.composite
def step_costs(draw: st.DrawFn) -> StepCost:
    state = draw(st.integers(1, 4))
    tape = state + draw(st.integers(0, 4))
    seconds = st.sampled_from([0.25, 0.5, 1.0])
    form = st.builds(TapeOption, st.integers(state, tape), seconds, backward=st.one_of(st.none(), st.integers(0, 7)))
    return StepCost(
        state,
        tape,
        forward=float(draw(st.integers(1, 4))),
        backward=0.0,
        cotangent=draw(small),
        working=Working(draw(small), draw(small), draw(small)),
        options=tuple(draw(st.lists(form, max_size=2))),
    )


def chains(most: int) -> st.SearchStrategy[Chain]:
    return st.lists(step_costs(), min_size=1, max_size=most).map(Chain.of)


def in_words_of_search(chain: Chain) -> list[Step]:
    return [
        Step(
            step.state,
            tuple(
                (entry.tape, entry.extra, step.working.backward if entry.backward is None else entry.backward)
                for entry in step.menu
            ),
            step.forward,
            step.working.advance,
            step.working.tape,
            step.cotangent,
        )
        for step in (chain[k] for k in range(len(chain)))
    ]
