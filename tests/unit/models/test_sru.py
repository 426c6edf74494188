"""SRU: its recursion by hand, both directions, and clients side by side."""

import pytest
import torch
from torch import nn

import consilience as cs
from consilience.models import SRU


def test_the_recursion():
    torch.manual_seed(0)
    layer, x = SRU(3, 3), torch.randn(2, 4, 3)
    cell = layer.cells[0][0]
    nn.init.normal_(cell.state)
    nn.init.normal_(cell.bias)
    out, last = layer(x)
    w, w_f, w_r = cell.products.weight.chunk(3)
    c = torch.zeros(2, 3)
    for t in range(4):
        f = torch.sigmoid(x[:, t] @ w_f.T + cell.state[0] * c + cell.bias[0])
        r = torch.sigmoid(x[:, t] @ w_r.T + cell.state[1] * c + cell.bias[1])
        c = f * c + (1 - f) * (x[:, t] @ w.T)
        torch.testing.assert_close(out[:, t], r * c + (1 - r) * x[:, t])
    torch.testing.assert_close(last[0], c)


def test_the_other_direction_is_that_of_the_reversed_sequence():
    torch.manual_seed(0)
    both, x = SRU(3, 4, bidirectional=True), torch.randn(2, 5, 3)
    one = SRU(3, 4)
    one.cells[0][0].load_state_dict(both.cells[0][1].state_dict())
    torch.testing.assert_close(both(x)[0][..., 4:], one(x.flip(1))[0].flip(1))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.head = SRU(3, 4, layers=2, bidirectional=True), nn.Linear(8, 2)

    def forward(self, x):
        return self.head(self.layer(x)[0].mean(1))


@pytest.mark.slow
def test_clients_learn_side_by_side_also_by_gradients_of_single_examples():
    torch.manual_seed(0)
    fed = cs.partition.iid(cs.Dataset(torch.randn(20, 5, 3), torch.arange(20) % 2), clients=4)
    task = cs.Classification(Net())
    for method in (cs.FedAvg(), cs.FedEP(cs.inference.Laplace())):
        found = [
            cs.fit(
                method, task, fed, rounds=2, progress=False,
                engine=cs.Simulator(device="cpu", chunk=chunk, workers=1, precision="float64"),
            ).posterior.mean
            for chunk in (1, 4)
        ]  # fmt: skip
        torch.testing.assert_close(*found, rtol=1e-10, atol=1e-12)
