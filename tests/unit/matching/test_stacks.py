import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from consilience.core.errors import TaskError
from consilience.matching import BetaBernoulli, Stack, match
from support.nets import permuted


def mlp(bias=True):
    return nn.Sequential(nn.Flatten(), nn.Linear(6, 5, bias), nn.ReLU(), nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3))


def cnn():
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(2, 4, 3, padding=1, stride=2), nn.ReLU(), nn.Conv2d(4, 6, 3, bias=False)),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(24, 5),
        nn.Tanh(),
        nn.Linear(5, 3),
    )


MODULES = {
    "mlp": (mlp, (2, 3), [5, 4]),
    "mlp without a bias": (lambda: mlp(bias=False), (2, 3), [5, 4]),
    "cnn": (cnn, (2, 12, 12), [4, 6, 5]),
}
chains = pytest.mark.parametrize(("build", "shape", "widths"), list(MODULES.values()), ids=list(MODULES))


def built(build):
    torch.manual_seed(0)
    return build()


def vector(module):
    return parameters_to_vector(module.parameters()).detach()


def predictor(module):
    def predict(theta, x):
        other = copy.deepcopy(module)
        vector_to_parameters(theta, other.parameters())
        return other(x).detach()

    return predict


def inputs(*shape):
    return torch.randn(7, *shape, generator=torch.Generator().manual_seed(1))


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two, self.three = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x):
        hidden = self.one(x).relu()
        return self.three((x + self.two(hidden)).relu())


class Shuffled(nn.Module):
    """Layers that are registered in another order than that of their use."""

    def __init__(self):
        super().__init__()
        self.last, self.second, self.first = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.last(self.second(self.first(x).relu()).relu())


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two, self.three = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.two.weight = self.one.weight

    def forward(self, x):
        return self.three(self.two(self.one(x).relu()).relu())


@chains
def test_flat_vectors_and_layers_are_the_same(build, shape, widths):
    module = built(build)
    stack, theta = Stack.of(module), vector(module)
    layers = stack.layers(theta)
    parts = [p for layer in layers for p in layer if p is not None]
    for part, parameter in zip(parts, module.parameters(), strict=True):
        assert torch.equal(part, parameter)
    assert torch.equal(stack.flat(layers), theta)
    assert stack.widths == widths
    assert stack.outputs == 3


@chains
def test_a_stack_survives_its_code(build, shape, widths):
    stack = Stack.of(built(build))
    assert stack.with_widths(stack.widths) == stack


@chains
def test_a_module_is_rebuilt_with_other_widths(build, shape, widths):
    module = built(build)
    before = vector(module)
    wider = [2 * width + h for h, width in enumerate(widths)]
    stack = Stack.of(module).with_widths(wider)
    wide = stack.rebuilt(module)
    assert Stack.of(wide) == stack
    assert stack.widths == wider
    assert wide(inputs(*shape)).shape == (7, 3)
    assert torch.equal(vector(module), before)
    assert Stack.of(module).widths == widths
    same = Stack.of(module).rebuilt(module)
    vector_to_parameters(before, same.parameters())
    assert torch.equal(same(inputs(*shape)), module(inputs(*shape)))


def test_a_rebuilt_module_keeps_its_dtype():
    module = built(cnn).double()
    assert {p.dtype for p in Stack.of(module).with_widths([8, 8, 8]).rebuilt(module).parameters()} == {torch.float64}


@chains
def test_permuted_copies_of_a_module_become_one_that_predicts_the_same(build, shape, widths):
    module = built(build)
    stack, theta = Stack.of(module), vector(module)
    copies = [permuted(stack.layers(theta), seed)[0] for seed in range(3)]
    found = match(copies, BetaBernoulli(prior_variance=1e8))
    assert found.widths == widths
    x, predict = inputs(*shape), predictor(module)
    torch.testing.assert_close(predict(stack.flat(found.layers), x), predict(theta, x), rtol=1e-4, atol=1e-5)


@chains
def test_matched_networks_fill_a_rebuilt_module(build, shape, widths):
    module = built(build)
    stack = Stack.of(module)
    torch.manual_seed(1)
    nets = [stack.layers(torch.randn(len(vector(module)))) for _ in range(2)]
    found = match(nets, BetaBernoulli(mass=1e300))
    wide = stack.with_widths(found.widths)
    assert wide.widths == [2 * width for width in widths]
    module = wide.rebuilt(module)
    theta = wide.flat(found.layers)
    vector_to_parameters(theta, module.parameters())
    assert module(inputs(*shape)).shape == (7, 3)
    for (w, _), (w2, _) in zip(wide.layers(theta), found.layers, strict=True):
        assert torch.equal(w, w2)


@chains
def test_chains_pass_the_check(build, shape, widths):
    module = built(build)
    Stack.of(module).check(predictor(module), vector(module), inputs(*shape), "Chain")


@pytest.mark.parametrize(("build", "shape"), [(Residual, (6,)), (Shuffled, (4,))])
def test_what_depends_on_the_order_of_units_is_refused(build, shape):
    module = built(build)
    with pytest.raises(TaskError, match=f"units of {build.__name__} cannot be matched: its predictions depend"):
        Stack.of(module).check(predictor(module), vector(module), inputs(*shape), build.__name__)


def test_channels_that_are_normalised_in_groups_are_refused():
    groups = nn.GroupNorm(2, 4, affine=False)
    module = built(lambda: nn.Sequential(nn.Linear(6, 4), groups, nn.ReLU(), nn.Linear(4, 3)))
    with pytest.raises(TaskError, match="its predictions depend on the order"):
        Stack.of(module).check(predictor(module), vector(module), inputs(6), "Grouped")


def frozen():
    module = mlp()
    module[3].bias.requires_grad_(False)
    return module


def normalised(norm):
    return nn.Sequential(nn.Conv2d(1, 4, 3), norm, nn.Flatten(), nn.Linear(16, 2))


GROUPED = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Conv2d(4, 4, 3, groups=2), nn.Flatten(), nn.Linear(4, 2))
FOREIGN = r"its parameter '1\.weight' belongs to no linear or convolutional layer"
SINGLE = r"has 1 linear or convolutional layer\(s\): it has no hidden units"


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (normalised(nn.GroupNorm(2, 4)), FOREIGN),
        (normalised(nn.BatchNorm2d(4)), FOREIGN),
        (frozen(), r"its parameter '3\.bias' is frozen"),
        (Tied(), "units of Tied cannot be matched: layers share their weights"),
        (nn.Linear(3, 2), SINGLE),
        (nn.Sequential(nn.Conv2d(1, 2, 3)), SINGLE),
        (GROUPED, "ties its channels in groups"),
        (
            nn.Sequential(nn.Linear(3, 4), nn.Linear(5, 2)),
            "a layer of 4 units is followed by one that takes 5 inputs",
        ),
    ],
)
def test_modules_without_matchable_units_are_refused(module, words):
    with pytest.raises(TaskError, match=words):
        Stack.of(module)
