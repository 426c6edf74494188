"""A module called with other tensors: the same as torch's `functional_call`, and the module is as it was."""

import copy

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn.utils import parametrizations

from consilience.compute.swapping import call_with


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.again = self.first

    def forward(self, x):
        return self.second(self.again(self.first(x)))


class Clips(nn.Module):
    """Replaces its own weight, as some layers do to bound it."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x):
        self.weight = nn.Parameter(self.weight.detach().clamp(-0.5, 0.5))
        return x @ self.weight


class Reads(nn.Module):
    """Reads its layer's weight by itself."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        return x @ self.inner.weight.T + self.inner.bias


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.LSTM(4, 4, batch_first=True)

    def forward(self, x):
        return self.layer(x.unsqueeze(0))[0][0]


MODULES = {
    "tied": Tied,
    "clips": Clips,
    "reads": Reads,
    "recurrent": Recurrent,
    "spectral": lambda: parametrizations.spectral_norm(nn.Linear(4, 4)).eval(),
    "weight_norm": lambda: parametrizations.weight_norm(nn.Linear(4, 4)),
    "batchnorm": lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval(),
    "one_layer": lambda: nn.Linear(4, 4),
}


@pytest.mark.parametrize("name", MODULES)
def test_outputs_and_gradients_are_those_of_functional_call(name):
    torch.manual_seed(0)
    module, x = MODULES[name](), torch.randn(3, 4)
    given = {name: torch.randn_like(p).abs_().requires_grad_() for name, p in module.named_parameters()}
    given |= {name: torch.rand_like(b) + 1 for name, b in module.named_buffers() if b.is_floating_point()}
    before = {key: (value, value.clone()) for key, value in module.state_dict(keep_vars=True).items()}
    learned = [value for value in given.values() if value.requires_grad]
    for _ in range(2):  # the second call knows the places
        # functional_call does not put back the weights of a layer with two names: it gets a copy
        outputs = functional_call(copy.deepcopy(module), given, (x,)), call_with(module, given, (x,), {})
        assert torch.equal(*outputs)
        if outputs[0].requires_grad and name != "clips":
            right, found = (torch.autograd.grad(out.square().sum(), learned) for out in outputs)
            assert all(map(torch.equal, right, found))
    after = module.state_dict(keep_vars=True)
    assert all(after[key] is value and torch.equal(value, copy) for key, (value, copy) in before.items())


def test_the_module_is_as_it_was_after_an_error():
    module = nn.Linear(4, 4)
    own = module.weight
    with pytest.raises(RuntimeError, match="shapes"):
        call_with(module, {"weight": torch.zeros(2, 3), "bias": torch.zeros(4)}, (torch.zeros(3, 4),), {})
    assert module.weight is own


def test_entries_that_are_not_given_stay():
    module = nn.Linear(4, 4)
    x = torch.randn(3, 4)
    found = call_with(module, {"bias": torch.zeros(4)}, (x,), {})
    torch.testing.assert_close(found, x @ module.weight.T)
