"""A local step that is traced and compiled as a whole, on a CPU: on a GPU it is recorded, too."""

import pytest
import torch
from torch import nn

import consilience as cs
from consilience import optim
from consilience.compute import traced, vectorize
from consilience.compute.execution import Execution
from consilience.compute.traced import by_parts, together
from consilience.core.gaussian import Gaussian
from consilience.core.records import tree_map
from consilience.data.batch import Batch

CLIENTS = 3
NETWORK = nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Dropout(0.3), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16, 3))


def refuse(*args):
    raise AssertionError("the traced step was not used")


@pytest.fixture
def uncompiled(monkeypatch):
    """The graphs that the compiler is given, which run as they are."""
    graphs = []

    def keep(graph, like):
        graphs.append(graph)
        return graph

    monkeypatch.setattr(torch._inductor, "compile", keep)
    monkeypatch.setattr(traced, "SMALL", 8)  # parts of 72, 4, 48 and 3 entries
    return graphs


def problem(chain, monkeypatch, module=NETWORK):
    """(the traced step, the same by plain code, arguments)."""
    monkeypatch.setattr(Execution, "on_gpu", property(lambda self: self.compiled))
    torch.manual_seed(0)
    task = cs.Classification(module).prepare("cpu", torch.float64, compile=True, chunk=CLIENTS, even=True)
    gradient = task.gradient()
    step = gradient._traced(chain.advance, chain.probed, refuse)
    made = torch.Generator().manual_seed(0)
    x = torch.randn(CLIENTS, 5, 2, 6, 6, generator=made, dtype=torch.float64)
    batch = Batch(x, torch.randint(3, (CLIENTS, 5), generator=made), torch.ones(x.shape[:2]).double(), torch.arange(3))
    theta = task.initial().repeat(CLIENTS, 1)
    noise = torch.randn(theta.shape, generator=made, dtype=torch.float64) if chain.noisy else None
    prior = Gaussian(torch.randn(theta.shape[1], generator=made).double(), torch.rand(theta.shape[1]).double())
    kept = chain.memory(theta), prior, None, None
    return step, step.plain, (theta, batch, (), (), kept, (torch.full((CLIENTS, 1), 5.0).double(), noise, chain.lr))


@pytest.mark.parametrize(
    "chain",
    [
        optim.SGD(lr=0.1, momentum=0.9, weight_decay=0.01), optim.Adam(lr=0.01), optim.AMSGrad(lr=0.01),
        optim.RMSprop(lr=0.01), optim.SGLD(lr=0.01), optim.SGHMC(lr=0.01), optim.IVON(lr=0.1), optim.SAM(lr=0.1),
    ],
    ids=lambda chain: type(chain).__name__,
)  # fmt: skip
def test_traced_steps_are_those_of_plain_code(chain, monkeypatch, uncompiled):
    step, plain, args = problem(chain, monkeypatch)
    found, wanted = (tree_map(torch.clone, args[:5]) for _ in range(2))
    for _ in range(3):
        torch.testing.assert_close(step(*found, args[5]), plain(*wanted, args[5]))
    torch.testing.assert_close(found[0], wanted[0])
    torch.testing.assert_close(found[4][0], wanted[4][0])
    assert len(uncompiled) == 1  # one graph for all steps


@pytest.mark.parametrize("small", [8, 60, 1000])
def test_nothing_of_the_size_of_theta_is_made(small, monkeypatch, uncompiled):
    monkeypatch.setattr(traced, "SMALL", small)
    step, _, args = problem(cs.SGD(lr=0.1, momentum=0.9), monkeypatch)
    step(*args)
    shapes = [node.meta["val"].shape for node in uncompiled[0].graph.nodes if node.target is torch.ops.aten.cat.default]
    assert args[0].shape not in shapes or small == 1000  # one part: its gradient is joined


def test_the_compiler_understands_a_traced_step(monkeypatch):
    step, plain, args = problem(cs.SGD(lr=0.1, momentum=0.9), monkeypatch)
    found, wanted = (tree_map(torch.clone, args[:5]) for _ in range(2))
    for _ in range(2):
        torch.testing.assert_close(step(*found, args[5]), plain(*wanted, args[5]))
    torch.testing.assert_close(found[0], wanted[0])


def test_a_step_that_cannot_be_traced_or_is_wrong_is_not_used(monkeypatch, uncompiled, caplog):
    class Curious(nn.Module):
        def forward(self, x):
            return x.flatten(1)[:, :3] * (2.0 if bool(x.sum() > 0) else 1.0)

    monkeypatch.setattr(torch._inductor, "compile", lambda graph, like: lambda *args: 2 * graph(*args))
    step, _, args = problem(cs.SGD(), monkeypatch)
    step.instead = lambda *args: "instead"
    assert step(*args) == "instead"
    assert "differs from plain code by 1 of its norm" in caplog.text
    module = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Flatten(), nn.Linear(64, 3), Curious())
    step, _, args = problem(cs.SGD(), monkeypatch, module)
    step.instead = lambda *args: "instead"
    assert step(*args) == "instead"
    assert "cannot be compiled as a whole" in caplog.text


@pytest.mark.parametrize("method", [cs.FedEP(), cs.SCAFFOLD(), cs.algorithms.Ditto()], ids=lambda method: method.name)
def test_rounds_of_traced_steps_are_those_of_plain_code(method, monkeypatch, uncompiled):
    monkeypatch.setattr(Execution, "on_gpu", property(lambda self: self.compiled))
    monkeypatch.setattr(torch, "compile", lambda fn, **options: fn)
    made = torch.Generator().manual_seed(0)
    data = cs.Dataset(
        torch.randn(60, 2, 6, 6, generator=made), torch.randint(3, (60,), generator=made), classes=tuple("abc")
    )
    federation, found, steps = cs.Federation.from_owner(data, torch.arange(60) % 6), [], []

    def unrecorded(step, device):
        steps.append(step)
        return step

    monkeypatch.setattr(vectorize, "Replay", unrecorded)
    for compile in (False, True):
        torch.manual_seed(0)
        engine = cs.Simulator(device="cpu", chunk=3, workers=1, threads=1, compile=compile, precision="float64")
        run = cs.fit(method, cs.Classification(NETWORK), federation, rounds=2, engine=engine, progress=False)
        found.append(run.posterior.mean)
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-12)
    assert steps
    assert all(code is not step.instead for step in steps for code in step.codes.values())


def test_small_neighbours_are_moved_together(monkeypatch):
    monkeypatch.setattr(traced, "SMALL", 10)
    assert together([20, 3, 4, 30, 5, 40]) == [20, 7, 30, 5, 40]
    seen = []
    theta, g = torch.zeros(2, 100), torch.arange(200.0).view(2, 100)

    def advance(theta, g, memory, n):
        seen.append(g.shape[1])
        memory[0].add_(1)
        theta.sub_(g / n)

    steps = torch.zeros(2, 1)
    by_parts(advance, [20, 7, 73])(theta, g, (steps,), torch.full((2, 1), 2.0))
    assert seen == [20, 7, 73]
    torch.testing.assert_close(theta, -g / 2)
    assert steps.tolist() == [[1], [1]]


def test_the_gradient_of_a_linear_layer_is_made_in_its_own_order(monkeypatch, uncompiled):
    step, _, args = problem(cs.SGD(lr=0.1), monkeypatch)
    step(*args)
    made = [n.meta["val"] for n in uncompiled[0].graph.nodes if n.target is torch.ops.aten.bmm.default]
    assert (CLIENTS, 3, 16) in [tuple(product.shape) for product in made]
    assert (CLIENTS, 16, 3) not in [tuple(product.shape) for product in made]
