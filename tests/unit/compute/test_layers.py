"""Layers that keep state: dropout, replaced and frozen norms, and modules that are refused."""

import pytest
import torch
from torch import nn

from consilience.compute.layers import freeze_batchnorm, replace_batchnorm
from consilience.compute.passes import Pass
from consilience.core import keys
from consilience.core.errors import TaskError
from consilience.core.records import rows
from consilience.data import Dataset
from consilience.data.batch import Batch
from consilience.tasks.supervised import Classification, Regression


def batch(clients, size, *shape, classes=3, seed=0):
    made = torch.Generator().manual_seed(seed)
    x = torch.randn(clients, size, *shape, generator=made)
    y = torch.randint(classes, (clients, size), generator=made)
    return Batch(x, y, torch.ones(clients, size), client_keys(clients))


def client_keys(clients, step=0):
    return keys.key(step, purpose="dropout", client=torch.arange(clients))


def many(task, clients):
    return task.initial().expand(clients, -1).clone()


@pytest.mark.parametrize(
    ("layer", "words"),
    [
        (nn.BatchNorm1d(4, track_running_stats=False), ["BatchNorm1d", "mixes test examples", "replace_batchnorm"]),
        (nn.InstanceNorm2d(4, track_running_stats=True), ["InstanceNorm2d", "track_running_stats=False"]),
        (nn.LazyLinear(3), ["LazyLinear", "has no shape yet"]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_layers_that_cannot_be_trained_side_by_side_are_refused_by_name(layer, words):
    with pytest.raises(TaskError, match=r"layer '1\.inner'") as error:
        Classification(nn.Sequential(nn.Linear(2, 4), nn.ModuleDict({"inner": layer})))
    assert all(word in str(error.value) for word in words)


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (lambda: torch.jit.trace(nn.Linear(2, 2), torch.ones(1, 2)), "torch.jit"),
        (lambda: nn.Linear(2, 2, dtype=torch.complex64), "parameter 'weight' has type torch.complex64"),
    ],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_modules_that_vmap_cannot_run_are_refused_in_one_sentence(module, words):
    with pytest.raises(TaskError, match=words):
        Classification(module())


@pytest.mark.parametrize(
    "layer",
    [
        nn.InstanceNorm1d(4),
        nn.LSTM(4, 4, num_layers=2, dropout=0.5),
        nn.GroupNorm(2, 4),
        nn.LayerNorm(4),
        nn.AlphaDropout(0.5),
        nn.BatchNorm1d(4),
        nn.MultiheadAttention(4, 2, dropout=0.1),
    ],
)
def test_layers_with_a_form_for_clients_are_accepted(layer):
    Classification(nn.Sequential(nn.Linear(2, 4), layer))


def test_a_lazy_layer_that_has_seen_data_is_accepted():
    module = nn.Sequential(nn.LazyLinear(3))
    module(torch.ones(1, 2))
    assert Classification(module).size == 9


def normed():
    """A network with BatchNorm that has seen data, so that its statistics are not trivial."""
    torch.manual_seed(0)
    shared = nn.BatchNorm2d(6)
    module = nn.Sequential(
        nn.Conv2d(2, 6, 3), shared, nn.ReLU(), nn.Conv2d(6, 6, 1), shared, nn.Flatten(), nn.LazyLinear(3)
    )
    for _ in range(3):
        module(3 + 2 * torch.randn(8, 2, 5, 5))
    return module


@pytest.mark.parametrize(("channels", "asked", "groups"), [(6, 3, 3), (6, 4, 3), (7, 5, 1), (5, 8, 5), (1, 2, 1)])
def test_a_replacement_has_as_many_groups_as_asked_or_the_next_smaller_number_that_fits(channels, asked, groups):
    replaced = replace_batchnorm(nn.BatchNorm1d(channels), groups=asked)
    assert isinstance(replaced, nn.GroupNorm)
    assert replaced.num_groups == groups


@pytest.mark.parametrize("change", [replace_batchnorm, freeze_batchnorm])
def test_a_layer_in_two_places_stays_one_layer_and_the_original_is_left_alone(change):
    module = normed()
    changed = change(module)
    assert isinstance(module[1], nn.BatchNorm2d)
    assert module[1] is module[4]
    assert changed[1] is changed[4]
    assert not any(isinstance(layer, nn.BatchNorm2d) for layer in changed.modules())


@pytest.mark.parametrize("affine", [True, False])
def test_frozen_batchnorm_computes_what_batchnorm_does_in_evaluation(affine):
    torch.manual_seed(1)
    layer = nn.BatchNorm1d(4, affine=affine)
    for _ in range(3):
        layer(torch.randn(10, 4) * 3 + 1)
    x = torch.randn(5, 4)
    frozen = freeze_batchnorm(nn.Sequential(layer))
    torch.testing.assert_close(frozen.train()(x), nn.Sequential(layer).eval()(x))


@pytest.mark.parametrize("change", [replace_batchnorm, freeze_batchnorm])
def test_changed_networks_train(change):
    task = Classification(change(normed()))
    gradient, _ = task.gradient()(many(task, 2), batch(2, 4, 2, 5, 5))
    assert bool((gradient != 0).any(0).all())


class Activated(nn.BatchNorm1d):
    """A subclass that does more than BatchNorm."""

    def forward(self, x):
        return super().forward(x).relu()


@pytest.mark.parametrize("change", [replace_batchnorm, freeze_batchnorm])
def test_a_subclass_that_may_do_more_is_not_swapped(change):
    with pytest.raises(TaskError, match=r"layer '1' \(Activated\) is a subclass of BatchNorm"):
        change(nn.Sequential(nn.Linear(2, 4), Activated(4)))


@pytest.mark.parametrize("change", [replace_batchnorm, freeze_batchnorm])
def test_learned_scale_and_shift_are_kept_and_stay_frozen(change):
    layer = nn.BatchNorm1d(4)
    layer.weight.data.uniform_(1, 2)
    layer.bias.data.uniform_(1, 2)
    layer.requires_grad_(False)
    changed = change(nn.Sequential(layer))[0]
    assert torch.equal(changed.weight, layer.weight)
    assert torch.equal(changed.bias, layer.bias)
    assert not any(p.requires_grad for p in changed.parameters())


def test_a_frozen_network_predicts_like_the_original_in_evaluation_also_when_that_is_trained_further():
    module, x = normed(), torch.randn(4, 2, 5, 5)
    task, expected = Classification(freeze_batchnorm(module)), module.eval()(x)
    module.train()(x + 100)
    torch.testing.assert_close(task.apply_one(task.initial(), x), expected)


def dropped(layer, x, key):
    """One layer on x, in training."""
    with Pass(key):
        return layer.train()(x)


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_dropout_keeps_its_share_and_scales_it_up(rate):
    out = dropped(nn.Dropout(rate), torch.ones(200, 200), client_keys(1)[0])
    kept = out != 0
    assert abs(float(kept.double().mean()) - (1 - rate)) < 5 * (rate * (1 - rate) / 40_000) ** 0.5
    torch.testing.assert_close(out[kept], torch.full_like(out[kept], 1 / (1 - rate)))


def test_dropout_of_everything_gives_zeros():
    assert torch.equal(dropped(nn.Dropout(1.0), torch.ones(3, 3), client_keys(1)[0]), torch.zeros(3, 3))


def test_alpha_dropout_keeps_mean_and_variance():
    x = nn.functional.selu(torch.randn(400, 400))
    out = dropped(nn.AlphaDropout(0.3), x, client_keys(1)[0])
    torch.testing.assert_close(out.mean(), x.mean(), atol=0.02, rtol=0)
    torch.testing.assert_close(out.std(), x.std(), atol=0.02, rtol=0)


def test_a_longer_axis_leaves_the_mask_of_the_others_as_it_is():
    short, long = (dropped(nn.Dropout(0.5), torch.ones(3, length, 4), client_keys(1)[0]) for length in (5, 9))
    assert torch.equal(short, long[:, :5])


@pytest.mark.parametrize(("layer", "shape"), [(nn.Dropout1d, (7,)), (nn.Dropout2d, (4, 5)), (nn.Dropout3d, (2, 3, 4))])
def test_channel_dropout_drops_whole_channels(layer, shape):
    out = dropped(layer(0.4), torch.ones(50, 40, *shape), client_keys(1)[0]).flatten(2)
    assert bool(((out == 0).all(-1) | (out != 0).all(-1)).all())
    kept = float((out[..., 0] != 0).double().mean())
    assert abs(kept - 0.6) < 5 * (0.24 / 2000) ** 0.5


def test_clients_steps_and_layers_drop_different_units():
    x, key = torch.ones(40, 40), client_keys(2)
    masks = [dropped(nn.Dropout(0.5), x, key[0]), dropped(nn.Dropout(0.5), x, key[1])]
    masks.append(dropped(nn.Dropout(0.5), x, client_keys(1, step=1)[0]))
    both = dropped(nn.Sequential(nn.Identity(), nn.Dropout(0.5), nn.Dropout(0.5)), x, key[0])
    for i, a in enumerate(masks):
        for b in masks[:i]:
            agree = float(((a != 0) == (b != 0)).double().mean())
            assert abs(agree - 0.5) < 5 * 0.5 / 40
    assert abs(float((both != 0).double().mean()) - 0.25) < 5 * (0.1875 / 1600) ** 0.5


def dropout_net():
    torch.manual_seed(0)
    again = nn.Dropout(0.3)
    return nn.Sequential(
        nn.Linear(4, 30), nn.ReLU(), again, nn.Linear(30, 30), nn.Tanh(), again, nn.Dropout(0.2), nn.Linear(30, 3)
    )


def test_a_client_drops_the_same_alone_in_a_cohort_and_with_padding():
    task = Classification(dropout_net()).prepare(dtype=torch.float64)
    theta, data = many(task, 3), batch(3, 6, 4)
    data = Batch(data.x.double(), data.y, data.w.double(), data.key)
    beyond = (torch.full((3, 2, 4), 7.0).double(), torch.zeros(3, 2, dtype=torch.int64), torch.zeros(3, 2).double())
    padded = (torch.cat(pair, 1) for pair in zip((data.x, data.y, data.w), beyond, strict=True))
    together = task.gradient()(theta, data)
    for k in range(3):
        alone = task.gradient()(theta[k : k + 1], rows(data, slice(k, k + 1)))
        torch.testing.assert_close(rows(together, slice(k, k + 1)), alone, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(task.gradient()(theta, Batch(*padded, data.key)), together, rtol=1e-12, atol=1e-12)


def test_a_dropout_layer_in_two_places_drops_other_units_in_each():
    again = nn.Dropout(0.5)
    out = dropped(nn.Sequential(again, again), torch.ones(400, 1), client_keys(1)[0])
    assert sorted(out.unique().tolist()) == [0.0, 4.0]
    assert abs(float((out != 0).double().mean()) - 0.25) < 5 * (0.1875 / 400) ** 0.5


def test_steps_drop_different_units_in_a_task_and_touch_no_global_generator():
    task, data = Classification(dropout_net()), batch(2, 6, 4)
    later = Batch(data.x, data.y, data.w, client_keys(2, step=1))
    state = torch.get_rng_state()
    assert not torch.equal(task.gradient()(many(task, 2), data)[1], task.gradient()(many(task, 2), later)[1])
    assert torch.equal(torch.get_rng_state(), state)


def test_nothing_is_dropped_in_prediction():
    module = dropout_net()
    task, x = Classification(module), torch.randn(6, 4)
    expected = module.eval()(x).softmax(-1)
    torch.testing.assert_close(task.predict(task.initial(), x), expected)
    torch.testing.assert_close(task.release(task.initial())(x).softmax(-1), expected)


def test_the_release_has_the_user_s_own_dropout():
    released = Classification(dropout_net()).release(torch.zeros(30 * 5 + 30 * 31 + 31 * 3))
    assert [type(layer) for layer in released] == [type(layer) for layer in dropout_net()]
    assert not any(layer._forward_hooks for layer in released.modules())


class Failing(nn.Module):
    """Fails in training."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x):
        return self.layer(x, None) if self.training else self.layer(x)


def test_a_forward_that_fails_in_training_is_refused():
    data = Dataset(torch.randn(4, 3), torch.tensor([0, 1, 0, 1]))
    with pytest.raises(TaskError, match="Failing fails in training: "):
        Classification(Failing()).check(data)
