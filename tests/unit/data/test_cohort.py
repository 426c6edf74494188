import pytest
import torch
from torch import nn

from consilience.algorithms.shared.one_shot import own_start
from consilience.core.gaussian import Gaussian
from consilience.data import Compose, Crop, Dataset, Federation, Flip
from consilience.data.cohort import Cohort
from consilience.tasks.supervised import Classification

SIZES = [63, 33, 21, 20, 19, 7, 2, 1, 1]


def federation(sizes=SIZES, features=3):
    """Client ids are in another order than sizes, and every example is its own number in x[:, 0]."""
    made = torch.Generator().manual_seed(0)
    total = sum(sizes)
    owner = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))[torch.randperm(total, generator=made)]
    x = torch.randn(total, features, generator=made)
    x[:, 0] = torch.arange(total)
    return Federation.from_owner(Dataset(x, torch.arange(total) % 4), owner)


def cohort(ids=None, fed=None, **settings):
    fed = fed or federation()
    ids = torch.arange(len(fed)) if ids is None else torch.tensor(ids)
    ids = ids[fed.sizes[ids].argsort(descending=True, stable=True)]
    settings = {"round": 3, "round_size": len(ids), "seed": 5, "dtype": torch.float64} | settings
    return Cohort(fed, ids, **settings)


def seen(group, epoch, size):
    """The examples of each client in the order of their batches, by their number; padding left out."""
    rows = [[] for _ in range(len(group))]
    for k, batch in group.epoch(epoch, size):
        for row, x, w in zip(rows[:k], batch.x, batch.w, strict=True):
            row.extend(x[w > 0, 0].long().tolist())
    return rows


every = pytest.mark.parametrize("size", [1, 7, 1000])
padded = pytest.mark.parametrize("static", [False, True])


@padded
@every
def test_every_example_appears_once_an_epoch_at_its_own_client(size, static):
    group = cohort(static=static)
    for client, row in zip(group.ids.tolist(), seen(group, 0, size), strict=True):
        assert sorted(row) == sorted(group.federation.indices(client).tolist())


@padded
@every
def test_clients_with_a_batch_left_are_a_prefix(size, static):
    group = cohort(static=static)
    sizes = group.federation.sizes[group.ids]
    ks = []
    for step, (k, batch) in enumerate(group.epoch(0, size)):
        expected = (sizes - step * size).clamp(0, size)
        assert k == int((expected > 0).sum())
        assert torch.equal(batch.w.sum(1).long(), expected[:k])
        assert {len(part) for part in (batch.x, batch.y, batch.w, batch.key)} == {k}
        ks.append(k)
    assert ks == sorted(ks, reverse=True)
    assert ks[0] == len(group)
    assert len(ks) == -(-63 // size)


@padded
@pytest.mark.parametrize("size", [1, 7, 20, 10_000])
def test_copies_are_shuffled_together_and_each_example_occurs_as_often(size, static):
    group, copies = cohort(static=static), 3
    rows, ks = [[] for _ in group.ids], []
    for k, batch in group.epoch(0, size, copies=copies):
        ks.append(k)
        for row, x, w in zip(rows[:k], batch.x, batch.w, strict=True):
            row.extend(x[w > 0, 0].long().tolist())
            assert torch.equal(batch.y, batch.x[..., 0].long() % 4)
    for client, row in zip(group.ids.tolist(), rows, strict=True):
        assert sorted(row) == sorted(copies * group.federation.indices(client).tolist())
    assert len(ks) == -(-copies * 63 // size)
    assert len(set(rows[0][:63])) < 63  # an epoch after another would show every example once before the second time


def test_one_copy_is_an_epoch():
    for (k, a), (other, b) in zip(cohort().epoch(2, 7), cohort().epoch(2, 7, copies=1), strict=True):
        assert k == other
        assert torch.equal(a.x, b.x)
        assert torch.equal(a.key, b.key)


def test_copies_of_an_image_are_augmented_on_their_own():
    x = torch.arange(2 * 3 * 40 * 40, dtype=torch.float32).view(2, 3, 40, 40)
    fed = Federation.from_owner(Dataset(x, torch.zeros(2, dtype=torch.int64)), torch.zeros(2, dtype=torch.int64))
    group = cohort([0], fed, dtype=torch.float32, augment=Crop(8))
    seen = torch.cat([batch.x[0, :, 0, 0, 0] for _, batch in group.epoch(0, 5, copies=10)])
    assert len(seen) == 20
    assert len(seen.unique()) > 15


def test_labels_belong_to_their_inputs_and_real_examples_come_before_padding():
    for _, batch in cohort(static=True).epoch(0, 20):
        assert torch.equal(batch.y, batch.x[..., 0].long() % 4)
        assert bool((batch.w.diff(dim=1) <= 0).all())
        assert bool(((batch.w == 0) | (batch.w == 1)).all())


@every
def test_static_batches_have_one_size_and_the_same_weighted_content(size):
    plain, static = cohort(), cohort(static=True)
    shapes = set()
    for (k, a), (other, b) in zip(plain.epoch(2, size), static.epoch(2, size), strict=True):
        shapes.add(b.x.shape[1:])
        width = a.x.shape[1]
        assert k == other
        assert torch.equal(a.w, b.w[:, :width])
        assert torch.equal(a.x * a.w.unsqueeze(-1), b.x[:, :width] * a.w.unsqueeze(-1))
        assert torch.equal(a.key, b.key)
        assert not b.w[:, width:].any()
    assert shapes == {(min(size, 63), 3)}


def test_static_batches_do_not_depend_on_who_is_in_the_cohort():
    shapes = {batch.x.shape[1] for ids in ([0], [5, 6], [8]) for _, batch in cohort(ids, static=True).epoch(0, 50)}
    assert shapes == {50}


@padded
@pytest.mark.parametrize("ids", [[3], [0, 3, 8]])
def test_a_client_s_batches_do_not_depend_on_its_cohort(ids, static):
    everyone, few = cohort(static=static), cohort(ids, static=static)
    for epoch in range(2):
        there = dict(zip(everyone.ids.tolist(), seen(everyone, epoch, 6), strict=True))
        here = dict(zip(few.ids.tolist(), seen(few, epoch, 6), strict=True))
        for client in ids:
            assert here[client] == there[client]
    place = {group: group.ids.tolist().index(3) for group in (everyone, few)}
    keys = [[int(b.key[place[g]]) for k, b in g.epoch(0, 6) if k > place[g]] for g in (everyone, few)]
    assert keys[0] == keys[1]
    assert len(set(keys[0])) == len(keys[0])  # another key each step


def test_epochs_rounds_seeds_and_clients_shuffle_differently():
    fed = federation([50, 50, 50])
    orders = [
        seen(cohort([0], fed), 0, 50)[0],
        seen(cohort([0], fed), 1, 50)[0],
        seen(cohort([0], fed, round=4), 0, 50)[0],
        seen(cohort([0], fed, seed=6), 0, 50)[0],
    ]
    assert len({tuple(order) for order in orders}) == 4
    places = [
        [fed.indices(client).tolist().index(i) for i in seen(cohort([client], fed), 0, 50)[0]] for client in range(3)
    ]
    assert len({tuple(place) for place in places}) == 3


@padded
@every
def test_the_mean_is_that_over_all_examples_of_a_client(size, static):
    group = cohort(static=static)
    fed = group.federation

    def mean_of_squares(theta, batch, *, shared):
        value = (batch.x - theta.unsqueeze(1)).square() * shared[0]
        return (value * batch.w.unsqueeze(-1)).sum(1) / batch.w.sum(1, keepdim=True)

    theta = torch.randn(len(group), 3, dtype=torch.float64)
    value = group.mean(mean_of_squares, theta, size, shared=(2.0,))
    for k, client in enumerate(group.ids.tolist()):
        x = fed.data.x[fed.indices(client)].double()
        torch.testing.assert_close(value[k], 2 * (x - theta[k]).square().mean(0), rtol=1e-12, atol=1e-12)


def test_the_mean_of_gradients_is_the_gradient_of_all_examples():
    task = Classification(nn.Linear(3, 4)).prepare(dtype=torch.float64)
    group = cohort()
    theta = torch.randn(len(group), task.size, dtype=torch.float64)
    gradient = task.gradient()
    small, large = (group.mean(gradient, theta, size) for size in (7, 1000))
    torch.testing.assert_close(small, large, rtol=1e-12, atol=1e-12)


def test_own_arguments_of_a_mean_may_be_records():
    group = cohort()
    prior = Gaussian(torch.randn(len(group), 2).double(), torch.ones(len(group), 1).double())

    def means(theta, batch, q, *, shared):
        assert len(q.eta) == len(theta) == len(batch.w)
        return q.mean

    theta = torch.zeros(len(group), 2, dtype=torch.float64)
    torch.testing.assert_close(group.mean(means, theta, 20, prior), prior.mean)


def test_a_limit_cuts_epochs_short_but_leaves_a_mean_one_batch():
    group = cohort(limit=3)
    assert len(list(group.epoch(0, 10))) == 3
    assert list(group.epoch(1, 10)) == []
    ones = group.mean(lambda theta, batch, *, shared: theta, torch.ones(len(group), 2).double(), 10)
    assert ones.shape == (len(group), 2)
    assert bool((ones > 0).all())


def test_noise_depends_on_client_round_and_tag_only():
    everyone, few = cohort(), cohort([2, 7])
    noise = dict(zip(everyone.ids.tolist(), everyone.noise(len(everyone), 4, 2, tag="a"), strict=True))
    for client, row in zip(few.ids.tolist(), few.noise(2, 4, 2, tag="a"), strict=True):
        assert torch.equal(row, noise[client])
    assert torch.equal(everyone.noise(3, 4, 2, tag="a"), everyone.noise(9, 4, 2, tag="a")[:3])
    assert torch.equal(everyone.noise(3, 5, tag="a"), cohort().noise(3, 5, tag="a"))
    others = [everyone.noise(1, 5, tag="b"), cohort(round=4).noise(1, 5, tag="a"), cohort(seed=6).noise(1, 5, tag="a")]
    for other in others:
        assert not torch.equal(other, everyone.noise(1, 5, tag="a"))
    rows = everyone.noise(9, 5, tag="a")
    assert len({tuple(row) for row in rows.tolist()}) == 9
    assert rows.dtype == torch.float64


def test_n_is_a_column_of_sizes():
    group = cohort([6, 0, 3])
    assert group.ids.tolist() == [0, 3, 6]
    assert group.n.tolist() == [[63.0], [20.0], [2.0]]


def test_augmentation_acts_in_epochs_with_the_batch_s_key_and_not_in_means():
    class Shift:
        """Adds a number made of the key, and remembers nothing."""

        def __call__(self, x, key):
            return x + (key % 7).view(-1, 1, 1)

        def evaluation(self, x):
            return x

    plain, changed = cohort(), cohort(augment=Shift())
    for (_, a), (_, b) in zip(plain.epoch(0, 20), changed.epoch(0, 20), strict=True):
        assert torch.equal(b.x, a.x + (a.key % 7).view(-1, 1, 1))

    def total(theta, batch, *, shared):
        return (batch.x.sum(-1) * batch.w).sum(1, keepdim=True) / batch.w.sum(1, keepdim=True)

    theta = torch.zeros(len(plain), 1, dtype=torch.float64)
    assert torch.equal(plain.mean(total, theta, 20), changed.mean(total, theta, 20))


def test_an_epoch_can_be_run_again_and_touches_no_global_generator():
    before = torch.get_rng_state()
    group = cohort()
    assert seen(group, 1, 20) == seen(group, 1, 20)
    group.noise(2, 3, tag="a")
    assert torch.equal(torch.get_rng_state(), before)


def test_means_see_inputs_as_evaluation_does():
    images = torch.arange(6 * 36.0).view(6, 1, 6, 6)
    fed = Federation.from_owner(Dataset(images, torch.zeros(6, dtype=torch.int64)), torch.tensor([0, 0, 0, 0, 1, 1]))
    crop = Compose((Crop(4), Flip()))
    both = Cohort(fed, torch.tensor([0, 1]), round=1, round_size=2, seed=0, augment=crop)

    def average(theta, batch, shared):
        return (batch.x * batch.w[..., None, None, None]).sum(1) / batch.w.sum(1)[..., None, None, None]

    expected = torch.stack([crop.evaluation(images[rows]).mean(0) for rows in (slice(4), slice(4, 6))])
    torch.testing.assert_close(both.mean(average, torch.zeros(2, 1), 3), expected)


@padded
@every
@pytest.mark.parametrize("round", [1, 3, 5])
def test_a_cohort_of_a_stream_is_that_of_a_federation_that_holds_the_part(size, static, round):
    stream = federation([63, 33, 21, 20, 19, 7, 3]).stream(3, seed=1)
    offsets, sizes = stream.part(torch.arange(len(stream)), round)
    rows = [stream.order[i : i + n] for i, n in zip(offsets.tolist(), sizes.tolist(), strict=True)]
    bounds = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
    by_hand = Federation(stream.data, torch.cat(rows), bounds)
    part, alone = (cohort(fed=fed, round=round, static=static) for fed in (stream, by_hand))
    assert torch.equal(part.ids, alone.ids)
    assert torch.equal(part.n, alone.n)
    assert part.n[:, 0].tolist() == sizes[part.ids].tolist()
    for (k, a), (other, b) in zip(part.epoch(1, size), alone.epoch(1, size), strict=True):
        assert k == other
        for name in ("x", "y", "w", "key"):
            assert torch.equal(getattr(a, name), getattr(b, name))
    total = lambda theta, batch, *, shared: batch.x.sum(-1).mean(1, keepdim=True)  # noqa: E731
    theta = torch.zeros(len(part), 1, dtype=torch.float64)
    assert torch.equal(part.mean(total, theta, size), alone.mean(total, theta, size))


def test_static_batches_of_a_stream_have_one_size_in_all_rounds():
    stream = federation([11, 4]).stream(3)
    assert {b.x.shape[1] for r in (1, 2, 3) for _, b in cohort(fed=stream, round=r, static=True).epoch(0, 50)} == {4}
    assert [cohort(fed=stream, round=r).n[0].item() for r in (1, 2, 3)] == [4, 4, 3]


def label_counts_by_hand(fed, rows):
    return torch.bincount(fed.data.y[rows], minlength=4).double()


def test_label_counts_are_those_of_every_client():
    for group in (cohort(), cohort([2, 7, 4]), cohort([8]), cohort(static=True)):
        counts = group.label_counts(4)
        assert counts.dtype == torch.float64
        for client, row in zip(group.ids.tolist(), counts, strict=True):
            assert torch.equal(row, label_counts_by_hand(group.federation, group.federation.indices(client)))
        assert torch.equal(counts.sum(1, keepdim=True), group.n)
    assert cohort().label_counts(6)[:, 4:].abs().sum() == 0  # outputs that no label has


@pytest.mark.parametrize("round", [1, 4])
def test_label_counts_of_a_stream_are_those_of_the_part(round):
    stream = federation([63, 33, 21, 7, 3]).stream(3, seed=1)
    group = cohort(fed=stream, round=round)
    offsets, sizes = stream.part(group.ids, round)
    for row, start, size in zip(group.label_counts(4), offsets.tolist(), sizes.tolist(), strict=True):
        assert torch.equal(row, label_counts_by_hand(stream, stream.order[start : start + size]))
    parts = sum(cohort(fed=stream, round=r).label_counts(4) for r in (1, 2, 3))
    assert torch.equal(parts, cohort(fed=stream.stream(1)).label_counts(4))


@pytest.mark.parametrize("y", [torch.zeros(6), torch.zeros(6, 1), torch.zeros(6, 2, dtype=torch.uint8)], ids=str)
def test_there_are_no_label_counts_without_classes(y):
    fed = Federation.from_owner(Dataset(torch.zeros(6, 3), y), torch.tensor([0, 0, 0, 0, 1, 1]))
    assert cohort(fed=fed).label_counts(2) is None


def test_a_glimpse_is_of_the_first_clients_inputs():
    for group in (cohort(), cohort([5, 8]), cohort(fed=federation([9, 4]).stream(3), round=2)):
        offset, size = group.federation.part(group.ids[:1], group.round)
        held = group.federation.order[int(offset) : int(offset + size)]
        seen = group.glimpse(2)[:, 0].long().tolist()
        assert seen == held[:2].tolist()
        assert group.glimpse().dtype == torch.float64
        assert len(group.glimpse(1000)) == int(size)
    assert cohort([8]).glimpse().shape == (1, 3)  # who has one example shows one


def network():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(3, 400), nn.ReLU(), nn.Linear(400, 4, bias=False), nn.LayerNorm(4))
        nn.init.uniform_(module[0].weight, 0.5, 1.0)
        return Classification(module).prepare(dtype=torch.float64)


def test_a_clients_own_start_depends_on_seed_round_and_client_only():
    task, everyone, few = network(), cohort(), cohort([2, 7])
    starts = dict(zip(everyone.ids.tolist(), own_start(task, everyone), strict=True))
    for client, theta in zip(few.ids.tolist(), own_start(task, few), strict=True):
        assert torch.equal(theta, starts[client])
    assert len({tuple(theta.tolist()) for theta in starts.values()}) == len(starts)
    for other in (cohort(round=4), cohort(seed=6)):
        assert not (own_start(task, other)[:, :1200] == own_start(task, everyone)[:, :1200]).any()


def test_an_own_start_is_drawn_like_the_modules_weights_and_keeps_its_vectors():
    task, group = network(), cohort()
    sizes = [shape.numel() for shape in task.main.shapes]
    parts = zip(task.initial().split(sizes), own_start(task, group).split(sizes, dim=1), task.main.shapes, strict=True)
    for initial, started, shape in parts:
        if len(shape) == 1:  # biases, and the scales of a norm
            assert torch.equal(started, initial.expand(len(group), -1))
        else:
            assert started.std().item() == pytest.approx(initial.std().item(), rel=0.05)
            assert started.mean().item() == pytest.approx(initial.mean().item(), abs=0.05 * initial.std().item())
