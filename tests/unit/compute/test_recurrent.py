"""Recurrent layers of a cohort equal torch's own, client by client, also for gradients of single examples."""

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap

from consilience.compute import recurrent  # noqa: F401 - registers its handlers
from consilience.compute.passes import Pass

CASES = [
    (kind, options)
    for kind in (nn.LSTM, nn.GRU, nn.RNN)
    for options in ({}, {"num_layers": 2, "bidirectional": True}, {"bias": False, "batch_first": True})
] + [(nn.LSTM, {"proj_size": 2, "num_layers": 2}), (nn.RNN, {"nonlinearity": "relu"})]


@pytest.mark.parametrize(("kind", "options"), CASES)
def test_a_cohort_s_layers_are_those_of_its_clients(kind, options):
    torch.manual_seed(0)
    module = kind(3, 4, dtype=torch.float64, **options)
    weights = {name: torch.randn(2, *p.shape, dtype=torch.float64) for name, p in module.named_parameters()}
    x = torch.randn(2, 5, 6, 3, dtype=torch.float64)

    def loss(w, x):
        with Pass():
            out, state = functional_call(module, w, (x,))
        return out.square().sum(), (out, state)

    gradient, found = vmap(grad(loss, has_aux=True))(weights, x)
    for k in range(2):
        own = {name: w[k].clone().requires_grad_() for name, w in weights.items()}
        out, state = functional_call(module, own, (x[k],))
        torch.testing.assert_close(torch.utils._pytree.tree_map(lambda t, k=k: t[k], found), (out, state))
        out.square().sum().backward()
        for name, p in own.items():
            torch.testing.assert_close(gradient[name][k], p.grad)


def test_gradients_of_single_examples():
    module, x = nn.GRU(3, 4, batch_first=True, dtype=torch.float64), torch.randn(5, 6, 3, dtype=torch.float64)
    weights = {name: p.detach() for name, p in module.named_parameters()}

    def loss(w, one):
        with Pass():
            return functional_call(module, w, (one.unsqueeze(0),))[0].square().sum()

    found = vmap(grad(loss), in_dims=(None, 0))(weights, x)
    torch.testing.assert_close(found["weight_hh_l0"].sum(0), grad(lambda w: sum(loss(w, one) for one in x))(weights)[
        "weight_hh_l0"])  # fmt: skip


def test_dropout_between_layers_follows_the_key():
    module, x = nn.LSTM(3, 4, num_layers=2, dropout=0.5).train(), torch.randn(5, 2, 3)

    def run(key):
        with Pass(torch.tensor(key)):
            return module(x)[0]

    assert torch.equal(run(1), run(1))
    assert not torch.equal(run(1), run(2))
    module.eval()
    torch.testing.assert_close(run(1), module(x)[0])


def test_a_packed_sequence_runs_as_it_is():
    module, x = nn.GRU(3, 4), torch.randn(5, 2, 3)
    packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([5, 3]))
    with Pass(torch.tensor(0)):
        out, _ = module(packed)
    torch.testing.assert_close(out.data, module(packed)[0].data)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_packed_sequences_run_as_they_are(kind):
    torch.manual_seed(0)
    module = kind(3, 4, batch_first=True)
    rows = nn.utils.rnn.pack_sequence([torch.randn(5, 3), torch.randn(2, 3)])
    with Pass():
        found = module(rows)[0].data
    assert torch.equal(found, module(rows)[0].data)
