import pytest
import torch

from consilience.core.errors import ConfigError
from consilience.core.records import Addressed, Point, add, check, leaves, pack, tree_map, unpack
from consilience.server.optimizers import AdaGrad, Adam, Moments, Momentum, Yogi

EXACT = {"rtol": 1e-12, "atol": 1e-12}


def directions(count=4):
    made = torch.Generator().manual_seed(0)
    return [torch.randn(5, generator=made).double() for _ in range(count)]


def run(optimiser, start, steps):
    value, memory = Point(start), optimiser.start(Point(start))
    for direction in steps:
        value, memory = optimiser.step(value, Point(direction), memory)
    return value.theta, memory


@pytest.mark.parametrize(("lr", "momentum"), [(1.0, 0.0), (0.3, 0.0), (0.3, 0.9)])
def test_momentum_is_torchs_sgd_up_the_direction(lr, momentum):
    theta = torch.nn.Parameter(torch.ones(5).double())
    reference = torch.optim.SGD([theta], lr=lr, momentum=momentum)
    for direction in directions():
        theta.grad = -direction
        reference.step()
    got, _ = run(Momentum(lr, momentum), torch.ones(5).double(), directions())
    torch.testing.assert_close(got, theta.detach(), **EXACT)


def test_the_default_is_plain_averaging_without_memory():
    got, memory = run(Momentum(), torch.ones(5).double(), directions())
    torch.testing.assert_close(got, 1 + sum(directions()), **EXACT)
    assert list(leaves(memory)) == []


def adam(v, d):
    return 0.97 * v + 0.03 * d * d


def yogi(v, d):
    return v - 0.03 * d * d * (1 if v > d * d else -1 if v < d * d else 0)


def adagrad(v, d):
    return v + d * d


@pytest.mark.parametrize(
    ("optimiser", "second"),
    [
        (Adam(lr=0.1, beta1=0.8, beta2=0.97, eps=0.01, accumulator=0.5), adam),
        (Yogi(lr=0.1, beta1=0.8, beta2=0.97, eps=0.01, accumulator=0.5), yogi),
        (AdaGrad(lr=0.1, beta1=0.8, eps=0.01, accumulator=0.5), adagrad),
    ],
)
def test_adaptive_steps_are_those_of_the_formulas(optimiser, second):
    got, _ = run(optimiser, torch.ones(5).double(), directions(3))
    for i in range(5):
        x, m, v = 1.0, 0.0, optimiser.accumulator
        for direction in directions(3):
            d = float(direction[i])
            m = 0.8 * m + 0.2 * d
            v = second(v, d)
            x = x + 0.1 * m / (v**0.5 + 0.01)
        torch.testing.assert_close(float(got[i]), x, **EXACT)


def test_adagrad_has_no_momentum_by_default():
    got, _ = run(AdaGrad(lr=1.0, eps=1e-9), torch.zeros(5).double(), directions(1))
    torch.testing.assert_close(got, directions(1)[0].sign(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("optimiser", [Momentum(0.5, 0.9), Adam(), Yogi(), AdaGrad()])
def test_nested_records_move_leaf_by_leaf(optimiser):
    a, b = torch.randn(4).double(), torch.randn(2, 2).double()
    value = Addressed(Point(a), (b, None))
    direction = tree_map(lambda leaf: leaf.sin(), value)
    memory = optimiser.start(value)
    moved = value
    for _ in range(3):
        moved, memory = optimiser.step(moved, direction, memory)
    check(moved, value)
    for leaf, (_, got) in zip((a, b), leaves(moved), strict=True):
        alone, _ = run(optimiser, leaf, [leaf.sin()] * 3)
        torch.testing.assert_close(got, alone, **EXACT)


@pytest.mark.parametrize("optimiser", [Momentum(), Momentum(0.5, 0.9), Adam(), Yogi(), AdaGrad()])
def test_memories_can_be_stored_and_keep_their_form(optimiser):
    value = Addressed(torch.ones(3), torch.ones(2, 2))
    memory = optimiser.start(value)
    assert isinstance(memory, Moments)
    _, later = optimiser.step(value, value, memory)
    check(unpack(pack(later)), memory)


def test_a_step_changes_nothing_in_place():
    value, direction = Point(torch.ones(3)), Point(torch.full((3,), 2.0))
    optimiser = Adam()
    memory = optimiser.start(value)
    optimiser.step(value, direction, memory)
    assert torch.equal(add(value, direction).theta, torch.full((3,), 3.0))
    assert torch.equal(memory.first.theta, torch.zeros(3))


@pytest.mark.parametrize(
    ("make", "settings", "message"),
    [
        (Momentum, {"lr": 0.0}, "lr must be above 0, got 0.0"),
        (Momentum, {"momentum": 1.0}, "momentum must be below 1, got 1.0"),
        (Adam, {"lr": float("nan")}, "lr must be .*, got nan"),
        (Yogi, {"lr": float("inf")}, "lr must be finite, got inf"),
        (Adam, {"eps": 0.0}, "eps must be above 0, got 0.0"),
        (Yogi, {"beta1": 1.0}, "beta1 must be below 1, got 1.0"),
        (AdaGrad, {"accumulator": -0.1}, "accumulator must be at least 0, got -0.1"),
        (Yogi, {"beta2": -0.5}, "beta2 must be at least 0, got -0.5"),
    ],
)
def test_settings_out_of_range_are_refused(make, settings, message):
    with pytest.raises(ConfigError, match=message):
        make(**settings)
