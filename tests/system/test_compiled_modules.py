"""Compiled cohorts of modules that passes change give the results of plain code, or plain code is used."""

import pytest
import torch
from torch import nn

import consilience as cs
from consilience.core.records import rows
from consilience.data.cohort import Cohort
from support.zoo import Attention, Encoder, Recurrent, masked

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")]  # the compiler's


class DropPath(nn.Module):
    """Stochastic depth as timm has it: memory that a random function fills."""

    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x):
        branch = self.layer(x).tanh()
        if self.training:
            branch = branch * branch.new_empty(len(x), 1).bernoulli_(0.8).div_(0.8)
        return self.head(x + branch)


class Breaking(nn.Module):
    """A module that the compiler cannot have in one graph."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x):
        torch._dynamo.graph_break()
        return self.layer(x)


def norm():
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3))


def adapted():
    layers = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    return cs.models.add_lora(layers, rank=2, targets=["0"], also=["2"])


def vectors(n):
    return torch.randn(n, 4)


def sequences(n):
    return torch.randn(n, 3, 4)


COMPILED = {
    "scaled_dot_product_attention": (Attention, sequences, {}),
    "TransformerEncoder": (lambda: Encoder(layers=1), masked(4), {}),
    "BatchNorm, estimated": (norm, vectors, {}),
    "BatchNorm, averaged": (norm, vectors, {"batch_norm": "averaged"}),
    "stochastic depth": (DropPath, vectors, {}),
    "LoRA": (adapted, vectors, {}),
}
PLAIN = {
    "graph break": (Breaking, vectors, {}),
    "LSTM": (lambda: Recurrent(nn.LSTM, num_layers=2, dropout=0.2), sequences, {}),
    "GRU": (lambda: Recurrent(nn.GRU), sequences, {}),
    "RNN": (lambda: Recurrent(nn.RNN), sequences, {}),
}


def both(case):
    """A gradient's (compiled, plain) results for two clients whose batch has padding, and the compiled function."""
    make, inputs, options = case
    torch.manual_seed(0)
    module, x = make(), inputs(7)
    fed = cs.Federation.from_owner(cs.Dataset(x, torch.arange(7) % 3), torch.tensor([0, 0, 0, 0, 1, 1, 1]))
    (_, batch), *_rest = Cohort(
        fed, torch.arange(2), round=1, round_size=2, seed=0, dtype=torch.float64, static=True
    ).epoch(0, 4)
    task = cs.Classification(module, **options)
    task.check(fed.data)
    plain, fast = (task.prepare(dtype=torch.float64, compile=compile, chunk=2) for compile in (False, True))
    theta = plain.initial() + 0.1 * torch.randn(2, plain.size, dtype=torch.float64)
    gradient = fast.gradient()
    alone = [plain.gradient()(*rows((theta, batch), slice(k, k + 1))) for k in range(2)]
    return gradient(theta, batch), tuple(map(torch.cat, zip(*alone, strict=True))), gradient


def said(caplog):
    """Our own lines in the log, without the compiler's."""
    return [record.getMessage() for record in caplog.records if record.name == "consilience"]


@pytest.mark.parametrize("case", COMPILED.values(), ids=COMPILED.keys())
def test_compiled_gradients_are_those_of_plain_code(case, caplog):
    found, wanted, gradient = both(case)
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-11)
    (graph,) = gradient.graphs.values()
    assert graph.run is not graph.plain
    assert not said(caplog)


@pytest.mark.parametrize("case", PLAIN.values(), ids=PLAIN.keys())
def test_a_module_that_cannot_be_compiled_runs_as_plain_code_and_the_log_says_so_once(case, caplog):
    found, wanted, gradient = both(case)
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-11)
    (graph,) = gradient.graphs.values()
    assert graph.run is graph.plain
    (line,) = said(caplog)
    assert line.startswith("cohorts of 2 cannot be compiled (")
    assert line.endswith("): plain code is used")
    assert "\n" not in line


def test_an_error_of_the_module_itself_is_not_the_compiler_s():
    class Failing(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x):
            if x.dim() == 2 and self.training:
                raise ValueError("no training today")
            return self.layer(x)

    task = cs.Classification(Failing()).prepare(compile=True, chunk=2)
    x, y, key = torch.randn(2, 3, 4), torch.zeros(2, 3, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match="no training today"):
        task.gradient()(task.initial().expand(2, -1), cs.data.Batch(x, y, torch.ones(2, 3), key))
