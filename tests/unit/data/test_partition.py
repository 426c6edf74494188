import time
import zlib
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from consilience.core.errors import DataError
from consilience.data import Dataset, allocation, partition


def labelled(examples=400, classes=10, seed=0):
    generator = torch.Generator().manual_seed(seed)
    y = torch.cat([torch.arange(classes), torch.randint(classes, (examples,), generator=generator)])[:examples]
    groups = {"coarse": y // 2, "writer": torch.arange(examples) % 7}
    return Dataset(torch.arange(examples).float()[:, None], y, groups=groups, name="toy")


PARTITIONERS = {
    "iid": lambda data, clients, seed: partition.iid(data, clients, seed=seed),
    "quantity": lambda data, clients, seed: partition.quantity(data, clients, alpha=0.3, seed=seed),
    "dirichlet": lambda data, clients, seed: partition.dirichlet(data, clients, alpha=0.1, seed=seed),
    "balanced": lambda data, clients, seed: partition.dirichlet(data, clients, alpha=0.1, seed=seed, balanced=True),
    "mixtures": lambda data, clients, seed: partition.mixtures(data, clients, alpha=0.1, seed=seed),
    "shards": lambda data, clients, seed: partition.shards(data, clients, shards_per_client=2, seed=seed),
    "one_label": lambda data, clients, seed: partition.one_label(data, clients, seed=seed),
    "sc_dir": lambda data, clients, seed: partition.sc_dir(data, clients, clusters=3, alpha=0.2, seed=seed),
    "pachinko": lambda data, clients, seed: partition.pachinko(data, clients, seed=seed),
}
every_partitioner = pytest.mark.parametrize("divide", PARTITIONERS.values(), ids=PARTITIONERS)


def assert_exact(fed):
    assert torch.equal(fed.order.sort().values, torch.arange(len(fed.data)))
    assert int(fed.sizes.sum()) == len(fed.data)


@every_partitioner
@settings(max_examples=8, deadline=None)
@given(
    examples=st.integers(40, 300), classes=st.integers(3, 12), clients=st.integers(12, 20), seed=st.integers(-5, 2**63)
)
def test_every_example_has_exactly_one_owner(divide, examples, classes, clients, seed):
    fed = divide(labelled(examples, classes), clients, seed)
    assert_exact(fed)
    assert len(fed) == clients
    assert int(fed.sizes.min()) >= 1
    assert fed.how


@every_partitioner
def test_the_seed_alone_decides(divide):
    data = labelled()
    torch.manual_seed(1)
    first = divide(data, 15, 3)
    torch.manual_seed(2)
    again, other = divide(data, 15, 3), divide(data, 15, 4)
    assert torch.equal(first.order, again.order)
    assert torch.equal(first.offsets, again.offsets)
    assert not (torch.equal(first.order, other.order) and torch.equal(first.offsets, other.offsets))


@settings(max_examples=15, deadline=None)
@given(
    examples=st.integers(10, 200),
    clients=st.integers(1, 20),
    alpha=st.floats(1e-8, 1e8),
    seed=st.integers(0, 1000),
    share=st.floats(0, 1),
    divide=st.sampled_from([partition.dirichlet, partition.quantity]),
)
def test_every_client_has_the_minimum_for_any_alpha(examples, clients, alpha, seed, share, divide):
    clients = min(clients, examples)
    minimum = int(share * (examples // clients))
    fed = divide(labelled(examples, 5), clients, alpha=alpha, seed=seed, minimum=minimum)
    assert_exact(fed)
    assert int(fed.sizes.min()) >= minimum


def test_filling_up_takes_from_the_largest_only():
    owner = allocation.fill_up(
        np.random.default_rng(0), torch.tensor([0] * 9 + [1] * 6 + [2] * 2).numpy(), clients=5, minimum=2
    )
    sizes = torch.from_numpy(owner).bincount().tolist()
    assert (sorted(sizes[:2]), sizes[2:]) == ([5, 6], [2, 2, 2])


def test_dirichlet_approaches_iid_for_large_alpha_and_concentrates_labels_for_small():
    even, skewed = (partition.dirichlet(labelled(10_000), 10, alpha=a).label_counts().double() for a in (1e7, 0.01))
    assert float((even / even.mean(0) - 1).abs().max()) < 0.03
    assert float((skewed.max(0).values / skewed.sum(0)).mean()) > 0.85


def test_dirichlet_shares_have_the_variance_of_a_dirichlet():
    alpha, clients = 0.5, 4
    shares = []
    for seed in range(60):
        fed = partition.dirichlet(labelled(1000, 10), clients, alpha=alpha, seed=seed, minimum=0)
        counts = fed.label_counts().double()
        shares.append(counts / counts.sum(0))
    p = 1 / clients
    expected = p * (1 - p) / (clients * alpha + 1)
    assert float(torch.stack(shares).var()) == pytest.approx(expected, rel=0.12)


def test_the_plain_dirichlet_is_fixed_by_its_seed():
    data = Dataset(torch.zeros(500, 1), torch.arange(500) * 7919 % 97 % 10)
    fed = partition.dirichlet(data, 8, alpha=0.1)
    assert fed.sizes.tolist() == [126, 64, 7, 82, 74, 74, 70, 3]
    assert zlib.crc32(fed.order.numpy().tobytes()) == 11813431
    assert fed.how == "Dirichlet over labels, α = 0.1"


@settings(max_examples=15, deadline=None)
@given(
    examples=st.integers(20, 300),
    classes=st.integers(1, 12),
    clients=st.integers(1, 20),
    alpha=st.floats(1e-8, 1e8),
    seed=st.integers(0, 1000),
)
def test_a_client_with_a_fair_share_gets_nothing_of_the_following_classes(examples, classes, clients, alpha, seed):
    fed = partition.dirichlet(labelled(examples, classes), clients, alpha=alpha, seed=seed, minimum=0, balanced=True)
    assert_exact(fed)
    counts = fed.label_counts()
    before = counts.cumsum(1) - counts
    assert not counts[before * clients >= examples].any()


def test_balanced_shares_follow_the_dirichlet_among_clients_that_are_not_full():
    log_shares = torch.tensor([[0.6, 0.3, 0.1], [0.9, 0.06, 0.04]]).double().log().numpy()
    counts = allocation.share_out_balanced(log_shares, torch.tensor([100, 50]).numpy())
    assert counts.tolist() == [[60, 30, 10], [0, 30, 20]]


def test_balanced_clients_are_nearer_in_size():
    data = labelled(10_000)
    spread = [
        float(partition.dirichlet(data, 10, alpha=0.5, seed=seed, balanced=balanced).sizes.double().std())
        for balanced in (False, True)
        for seed in range(10)
    ]
    assert sum(spread[10:]) < 0.8 * sum(spread[:10])
    assert partition.dirichlet(data, 10, alpha=0.5, balanced=True).how == "Dirichlet over labels, balanced, α = 0.5"


def test_quantity_skews_sizes_but_not_labels():
    data = labelled(20_000, 4)
    fed = partition.quantity(data, 5, alpha=0.5, seed=1)
    assert int(fed.sizes.max()) > 2 * int(fed.sizes.min())
    mix = fed.label_counts() / fed.sizes[:, None]
    big = fed.sizes > 1000
    assert float((mix[big] - 0.25).abs().max()) < 0.1


def test_shards_hold_few_labels():
    fed = partition.shards(labelled(1000), 50, shards_per_client=2)
    assert fed.sizes.tolist() == [20] * 50
    assert int((fed.label_counts() > 0).sum(1).max()) <= 4


def test_one_label_is_one_label_and_sizes_are_near():
    data = replace(labelled(400), y=torch.arange(400).clamp(max=300) // 100)  # the last label occurs a hundred times
    fed = partition.one_label(data, 40)
    assert (fed.label_counts() > 0).sum(1).tolist() == [1] * 40
    assert int(fed.sizes.max()) - int(fed.sizes.min()) <= 1


def test_one_label_leaves_no_client_empty_when_labels_are_rare():
    data = replace(labelled(20), y=torch.tensor([0] * 17 + [1, 2, 9]))
    fed = partition.one_label(data, 20)
    assert fed.sizes.tolist() == [1] * 20


def test_super_clusters_share_no_label():
    fed = partition.sc_dir(labelled(1000), 12, clusters=5, alpha=0.5)
    holds = (fed.label_counts() > 0).double()
    together = holds @ holds.T > 0  # clients with a label in common
    clusters = {tuple(holds[together[k]].amax(0).tolist()) for k in range(12)}
    assert all(sum(cluster) <= 2 for cluster in clusters)
    assert sum(sum(cluster) for cluster in clusters) == 10


def test_mixtures_are_clients_of_one_size_with_labels_of_their_own():
    fed = partition.mixtures(labelled(10_000), 10, alpha=0.1)
    assert set(fed.sizes.tolist()) == {1000}
    even = partition.mixtures(labelled(10_000), 10, alpha=1e7)
    first = [(f.label_counts().double() / 1000).max(1).values[:5].mean() for f in (fed, even)]  # clients to draw
    assert first[0] > 0.5
    assert first[1] < 0.15


def test_pachinko_gives_equal_sizes_and_few_coarse_labels():
    data = labelled(4000, 40)
    fed = partition.pachinko(data, 30)
    assert set(fed.sizes.tolist()) == {133, 134}
    even = partition.pachinko(data, 30, alpha=1e6, beta=1e6)
    assert float((fed.label_counts() > 0).sum(1).double().mean()) < 20
    assert float((even.label_counts() > 0).sum(1).double().mean()) > 35


def test_drawing_in_bulk_follows_the_law_of_drawing_one_by_one():
    rng = np.random.default_rng(0)
    weights, stock = torch.tensor([6.0, 3.0, 1.0]).log().numpy(), torch.tensor([2, 2, 9]).numpy()
    bulk = torch.stack([torch.from_numpy(allocation.draw_counts(rng, 4, weights, stock)) for _ in range(1000)])
    single = []
    for _ in range(1000):
        left = stock.copy()
        for _ in range(4):
            p = torch.from_numpy(weights).exp().numpy() * (left > 0)
            left[rng.choice(3, p=p / p.sum())] -= 1
        single.append(torch.from_numpy(stock - left))
    difference = bulk.double().mean(0) - torch.stack(single).double().mean(0)
    assert float(difference.abs().max()) < 0.1


def test_groups_are_clients_by_name():
    data = replace(labelled(70), group_names={"writer": tuple("abcdefg")})
    fed = partition.by_group(data, "writer")
    assert_exact(fed)
    assert fed.names == tuple("abcdefg")
    assert fed.how == "by writer"
    assert (fed.client(3).groups["writer"] == 3).all()


def test_groups_without_names_are_called_by_their_number():
    data = replace(labelled(4), groups={"speaker": torch.tensor([500, -3, 500, 20])})
    fed = partition.by_group(data, "speaker")
    assert fed.names == ("-3", "20", "500")
    assert fed.sizes.tolist() == [1, 1, 2]


def test_small_groups_are_dropped_with_their_examples():
    column = torch.tensor([0, 2, 2, 2, 3, 3])
    data = replace(labelled(6), groups={"site": column}, group_names={"site": tuple("abcd")})
    assert partition.by_group(data, "site").sizes.tolist() == [1, 0, 3, 2]
    assert partition.by_group(data, "site", minimum=1).names == ("a", "c", "d")
    fed = partition.by_group(data, "site", minimum=2)
    assert_exact(fed)
    assert fed.names == ("c", "d")
    assert fed.data.x[:, 0].tolist() == [1, 2, 3, 4, 5]
    assert fed.how == "by site with at least 2 examples"
    with pytest.raises(DataError, match="no site of toy has 9 examples; the largest has 3"):
        partition.by_group(data, "site", minimum=9)


@pytest.mark.parametrize(
    ("divide", "message"),
    [
        (lambda d: partition.iid(d, 0), "clients must be at least 1, got 0"),
        (lambda d: partition.iid(d, 41), "toy has 40 examples, too few for 41 clients"),
        (lambda d: partition.dirichlet(d, 5, alpha=0.0), "alpha must be a positive number, got 0"),
        (lambda d: partition.dirichlet(d, 5, alpha=float("nan")), "alpha must be a positive number, got nan"),
        (lambda d: partition.dirichlet(d, 5, alpha=1.0, minimum=9), "too few for 5 clients of at least 9 each"),
        (lambda d: partition.quantity(d, 5, alpha=-1.0), "alpha must be a positive number, got -1"),
        (lambda d: partition.quantity(d, 5, alpha=1.0, minimum=-1), "minimum must be at least 0, got -1"),
        (lambda d: partition.shards(d, 10, shards_per_client=5), "shards_per_client must lie between 1 and 4"),
        (lambda d: partition.one_label(d, 9), "each of the 10 labels in toy, got 9 clients"),
        (lambda d: partition.sc_dir(d, 5, clusters=6), "clusters must lie between 1 and 5 for the 10 labels"),
        (lambda d: partition.pachinko(d, 5, beta=0), "beta must be a positive number, got 0"),
        (lambda d: partition.pachinko(d, 5, coarse="corse"), "no group 'corse'; did you mean 'coarse'"),
        (lambda d: partition.by_group(d, "writers"), "no group 'writers'; did you mean 'writer'"),
        (lambda d: partition.by_group(replace(d, groups={}), "writer"), "no group 'writer'; it has none"),
        (
            lambda d: partition.by_group(replace(d, group_names={"writer": ("a",)}), "writer"),
            r"ids 0\.\.6 of group 'writer' in toy exceed its 1 name",
        ),
    ],
)
def test_bad_arguments_get_a_sentence(divide, message):
    with pytest.raises(DataError, match=message):
        divide(labelled(40))


@pytest.mark.parametrize("name", ["dirichlet", "mixtures", "shards", "one_label", "sc_dir", "pachinko"])
@pytest.mark.parametrize("y", [torch.zeros(40, 2), torch.zeros(40)])
def test_partitions_by_label_need_labels(name, y):
    data = replace(labelled(40), y=y)
    with pytest.raises(DataError, match=rf"{name} divides by class label, but a target of toy is (2 )?float32:"):
        PARTITIONERS[name](data, 10, 0)


def test_ten_thousand_clients_take_less_than_a_second():
    data = Dataset(torch.zeros(30_000, 1), torch.zeros(30_000, dtype=torch.int64))
    for divide in (lambda: partition.iid(data, 10_000), lambda: partition.quantity(data, 10_000, alpha=0.1)):
        start = time.perf_counter()
        divide()
        assert time.perf_counter() - start < 1
