"""Layers that keep state: dropout, norms over batches, and layers that are refused."""

import pytest
import torch
from torch import nn

from consilience.compute.layers import KeyedDropout, freeze_batchnorm, replace_batchnorm, with_keyed_dropout
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
        (nn.BatchNorm1d(4), ["BatchNorm1d", "replace_batchnorm", "freeze_batchnorm"]),
        (nn.SyncBatchNorm(4), ["SyncBatchNorm", "replace_batchnorm"]),
        (nn.BatchNorm1d(4, track_running_stats=False), ["BatchNorm1d", "mixes the examples"]),
        (nn.InstanceNorm2d(4, track_running_stats=True), ["InstanceNorm2d", "running statistics"]),
        (nn.LazyLinear(3), ["LazyLinear", "has no shape yet"]),
        (nn.AlphaDropout(0.5), ["AlphaDropout", "nn.Dropout"]),
        (nn.LSTM(4, 4, num_layers=2, dropout=0.5), ["LSTM", "dropout to 0"]),
        (nn.MultiheadAttention(4, 2, dropout=0.1), ["MultiheadAttention", "dropout to 0"]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_layers_that_cannot_be_trained_side_by_side_are_refused_by_name(layer, words):
    with pytest.raises(TaskError, match=r"layer '1\.inner'") as error:
        Classification(nn.Sequential(nn.Linear(2, 4), nn.ModuleDict({"inner": layer})))
    assert all(word in str(error.value) for word in words)


@pytest.mark.parametrize(
    "layer", [nn.InstanceNorm1d(4), nn.LSTM(4, 4), nn.GroupNorm(2, 4), nn.LayerNorm(4), nn.Dropout(0.5)]
)
def test_layers_without_statistics_are_accepted(layer):
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


def test_a_frozen_network_predicts_like_the_original_in_evaluation_also_when_that_is_trained_further():
    module, x = normed(), torch.randn(4, 2, 5, 5)
    task, expected = Classification(freeze_batchnorm(module)), module.eval()(x)
    module.train()(x + 100)
    torch.testing.assert_close(task.apply_one(task.initial(), x), expected)


def dropped(layer, x, key):
    """One keyed layer on x."""
    keyed, names = with_keyed_dropout(nn.Sequential(layer))
    return torch.func.functional_call(keyed, dict.fromkeys(names, key), (x,))


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_dropout_keeps_its_share_and_scales_it_up(rate):
    out = dropped(nn.Dropout(rate), torch.ones(200, 200), client_keys(1)[0])
    kept = out != 0
    assert abs(float(kept.double().mean()) - (1 - rate)) < 5 * (rate * (1 - rate) / 40_000) ** 0.5
    torch.testing.assert_close(out[kept], torch.full_like(out[kept], 1 / (1 - rate)))


def test_dropout_of_everything_gives_zeros_and_dropout_of_nothing_is_removed():
    assert torch.equal(dropped(nn.Dropout(1.0), torch.ones(3, 3), client_keys(1)[0]), torch.zeros(3, 3))
    keyed, names = with_keyed_dropout(nn.Sequential(nn.Dropout(0.0), nn.Linear(2, 2), nn.Dropout(0.5)))
    assert names == ["2.key"]
    assert not isinstance(keyed[0], KeyedDropout)


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
    keyed, names = with_keyed_dropout(nn.Sequential(nn.Identity(), nn.Dropout(0.5), nn.Dropout(0.5)))
    both = torch.func.functional_call(keyed, dict.fromkeys(names, key[0]), (x,))
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


def test_a_dropout_layer_in_two_places_acts_in_both():
    keyed, _ = with_keyed_dropout(dropout_net())
    assert isinstance(keyed[2], KeyedDropout)
    assert keyed[2] is keyed[5]
    first, last = nn.Dropout(0.5), nn.Linear(1, 1)
    shared = nn.Sequential(nn.Identity(), first, nn.Flatten(0), nn.Unflatten(0, (-1, 1)), first, last)
    task = Regression(shared)
    theta = torch.tensor([1.0, 0.0])
    out = task.apply_one(theta, torch.ones(400, 1), client_keys(1)[0])
    assert sorted(out.unique().tolist()) == [0.0, 4.0]  # both scale by 2; the same positions fall twice


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


class Forgetful(nn.Module):
    """Dropout by a function, not by a layer."""

    def __init__(self, rate):
        super().__init__()
        self.layer, self.rate = nn.Linear(3, 2), rate

    def forward(self, x):
        return nn.functional.dropout(self.layer(x), self.rate, training=self.training)


class Failing(Forgetful):
    def forward(self, x):
        return self.layer(x, None) if self.training else self.layer(x)


@pytest.mark.parametrize(("module", "logged"), [(Forgetful(0.1), True), (Forgetful(0.0), False), (Failing(0.0), True)])
def test_a_forward_that_differs_or_fails_in_training_is_logged_once(module, logged, caplog):
    task, data = Classification(module), Dataset(torch.randn(4, 3), torch.tensor([0, 1, 0, 1]))
    before = torch.random.get_rng_state()
    task.check(data)
    task.check(data)
    found = [record.message.partition(" in training")[0] for record in caplog.records]
    assert found == [f"{type(module).__name__} computes something else"] * logged
    assert torch.equal(before, torch.random.get_rng_state())


@pytest.mark.parametrize(
    "module",
    [
        nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 2)),
        nn.Sequential(nn.Unflatten(1, (1, 3)), nn.TransformerEncoderLayer(3, 1, 4, dropout=0.0), nn.Flatten()),
    ],
)
def test_dropout_layers_and_fused_kernels_are_not_logged(module, caplog):
    Classification(module).check(Dataset(torch.randn(4, 3), torch.tensor([0, 1, 0, 1])))
    assert not caplog.records
