"""A user's own function in PyTorch: `lowtide plan module:name`."""

from __future__ import annotations

import json

import pytest

from lowtide import Plan
from tests.cli.running import Runner

NETS = """
    import torch
    from torch import nn
    import lowtide.torch as lt

    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(10, 8), lt.spiking.LIF(tau=20.0), nn.Linear(8, 2), lt.spiking.Expon(tau=10.0))
    deep = nn.Sequential(*[nn.Linear(16, 16) for _ in range(6)])
    weight = torch.eye(8, requires_grad=True)

    def step(h, x):
        h = torch.tanh(h @ weight + x)
        return h, h.sum()

    def make():
        return step, torch.zeros(4, 8), torch.randn(50, 4, 8)

    def endless():
        return (lambda h, _: (torch.tanh(h @ weight), None)), torch.zeros(4, 8)

    def layers():
        return deep, torch.randn(4, 16)

    def pure(x, y):
        return (x @ weight * y).sum()

    def make_net():
        return net

    class Body(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(16, 16)
            self.blocks = deep

        def forward(self, x):
            return self.blocks(self.head(x))

    class Clock(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Parameter(torch.ones(3))
            self.x = torch.ones(3)

        def forward(self):
            self.x = torch.sin(self.x * self.a)
            return self.x

    body, clock = Body(), Clock()

    def first_half():
        return lt.plan_scan(*make(), base=5)
"""


@pytest.fixture
def nets(lowtide: Runner) -> Runner:
    lowtide.file("nets.py", NETS)
    return lowtide


def planned(run: Runner, *arguments: str) -> Plan:
    code, out, err = run("plan", *arguments, "--json")
    assert (code, err) == (0, "")
    return Plan.from_json(out)


def test_a_loop_that_a_function_returns(nets: Runner) -> None:
    plan = planned(nets, "nets:make", "--budget", "4KiB")
    assert len(plan.chain) == 50
    assert plan.chain[0].state == 4 * 8 * 4
    assert plan.bill.peak_memory <= 4096
    assert str(plan.knob) == "budget=4 KiB"
    assert planned(nets, "nets:make", "--base", "7").knob.value == 7
    assert planned(nets, "nets:make", "--checkpoints", "3").bill.peak_snapshots <= 3
    code, out, _ = nets("plan", "nets:make")
    assert code == 0
    assert out.startswith("chain     50 equal steps, state 128 B")


def test_a_loop_without_inputs(nets: Runner) -> None:
    assert len(planned(nets, "nets:endless", "--steps", "30").chain) == 30
    assert len(planned(nets, "nets:clock", "--steps", "12").chain) == 12
    assert len(planned(nets, "nets:Clock", "--steps", "12").chain) == 12


def test_layers(nets: Runner) -> None:
    plan = planned(nets, "nets:layers", "--budget", "10KiB")
    assert plan.bill.plain_runs == 0  # all tapes fit
    assert planned(nets, "nets:deep", "--input", "float32[4,16]").chain.names == plan.chain.names
    assert planned(nets, "nets:body.blocks", "--input", "float32[4, 16]").chain.names == plan.chain.names


def test_a_step_with_its_inputs(nets: Runner) -> None:
    chain = planned(nets, "nets:net", "--input", "float32[4,10]", "--steps", "20").chain
    assert len(chain) == 20
    assert chain[0].state == 4 * (8 + 2) * 4  # voltages and outputs
    assert len(planned(nets, "nets:make_net", "--input", "float32[4,10]", "--steps", "20").chain) == 20
    two = planned(nets, "nets:pure", "--input", "float32[4,8]", "--input", "float32[]", "--steps", "9")
    assert len(two.chain) == 9


def test_a_million_steps_allocate_no_inputs(nets: Runner) -> None:
    plan = planned(nets, "nets:net", "--input", "float32[64,10]", "--steps", "1000000", "--budget", "1MiB")
    assert len(plan.chain) == 1_000_000
    assert plan.bill.peak_memory <= 2**20


@pytest.mark.filterwarnings("ignore:planning ran the function")  # what the step sees is noted in a list
def test_inputs_of_other_types(nets: Runner) -> None:
    nets.file(
        "types_.py",
        """
        import torch
        from torch import nn
        seen = []
        table = nn.Embedding(5, 3)

        def step(k, x, b):
            seen.append((k.dtype, k.sum().item(), x.dtype, x.std().item() > 0, b.dtype))
            return table(k).sum() + x.sum().float() * b.sum()

        def look():
            raise ValueError(seen[0])
        """,
    )
    inputs = ["--input", "int64[4]", "--input", "bfloat16[50]", "--input", "bool[2]"]
    assert len(planned(nets, "types_:step", *inputs, "--steps", "3").chain) == 3
    said = nets.refused("plan", "types_:look")
    assert "ValueError: (torch.int64, 0, torch.bfloat16, True, torch.bool)" in said


def test_a_plan_and_a_chain_as_they_are(nets: Runner) -> None:
    assert planned(nets, "nets:first_half").knob.value == 5
    nets.file(
        "paper.py",
        """
        from lowtide import Chain, StepCost
        chain = Chain.equal(StepCost(1, 5), 100)
        """,
    )
    assert planned(nets, "paper:chain", "--budget", "20").bill.peak_memory <= 20
    disk = planned(nets, "paper.py:chain", "--budget", "20", "--disk-write", "1GB", "--disk-read", "2GB")
    assert disk.schedule.disk is not None


def test_what_the_code_prints_stays_out_of_the_answer(nets: Runner) -> None:
    nets.file("talks.py", "from nets import make\nprint('hello')\n")
    code, out, err = nets("plan", "talks:make", "--json")
    assert (code, err) == (0, "hello\n")
    assert len(Plan.from_json(out).chain) == 50


def test_the_frontier_of_a_function(nets: Runner) -> None:
    code, out, _ = nets("plan", "nets:make", "--sweep", "--points", "3")
    assert code == 0
    assert "50 equal steps" in out
    assert "1.000x" in out


def test_a_budget_that_cannot_work(nets: Runner) -> None:
    code, out, err = nets("plan", "nets:make", "--budget", "1")
    assert (code, out) == (1, "")
    assert "no plan fits budget=1 B: the least that works is" in err


def test_what_is_saved_is_what_is_printed(nets: Runner) -> None:
    code, out, err = nets("plan", "nets:make", "--budget", "4KiB", "--save", "plan.json", "--report", "new/plan.html")
    assert code == 0
    assert str(Plan.from_json((nets.folder / "plan.json").read_text())) == out.rstrip("\n")
    page = (nets.folder / "new" / "plan.html").read_text()
    assert page.startswith("<!")
    assert err.splitlines() == [
        f"wrote plan.json ({(nets.folder / 'plan.json').stat().st_size:,} bytes)",
        f"wrote new/plan.html ({(nets.folder / 'new' / 'plan.html').stat().st_size:,} bytes)",
    ]


def test_a_file_with_neighbours_and_dataclasses(lowtide: Runner) -> None:
    lowtide.file("deep/sizes_.py", "WIDTH = 8")
    lowtide.file(
        "deep/torch.py",  # stands in nobody's place
        """
        from __future__ import annotations
        from dataclasses import dataclass

        @dataclass
        class Case:
            width: int

        def make():
            import torch
            from sizes_ import WIDTH
            case = Case(WIDTH)
            w = torch.eye(case.width, requires_grad=True)
            return (lambda h, x: (torch.tanh(h @ w + x), h)), torch.zeros(case.width), torch.zeros(5, case.width)
        """,
    )
    assert len(planned(lowtide, "deep/torch.py:make").chain) == 5


def test_a_package(lowtide: Runner) -> None:
    lowtide.file("pack/__init__.py", "")
    lowtide.file(
        "pack/part.py",
        "class Holder:\n    from lowtide import Chain, StepCost\n    chain = Chain.equal(StepCost(1, 5), 7)",
    )
    assert json.loads(lowtide("plan", "pack.part:Holder.chain", "--json")[1])["chain"]["length"] == 7
