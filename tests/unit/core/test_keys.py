import itertools

import pytest
import torch
from scipy import stats

from consilience.core import keys

SEED = 20_240


def numbers(count, purpose="test", **where):
    return keys.uniform(keys.key(SEED, purpose=purpose, **where), count)


def correlation(a, b):
    return float(torch.corrcoef(torch.stack([a, b]))[0, 1])


def test_keys_are_the_same_every_time():
    assert int(keys.key(1, purpose="a", round=2, client=3)) == int(keys.key(1, purpose="a", round=2, client=3))
    # A fixed value: another one would silently change every run there ever was.
    assert int(keys.key(0, purpose="client", round=1, client=2)) == -8204568938900455537


def test_seed_round_client_and_purpose_each_make_another_key():
    places = itertools.product(range(-2, 2), ["a", "b", "ab", "ba"], range(4), range(4))
    found = {int(keys.key(seed, purpose=p, round=r, client=c)) for seed, p, r, c in places}
    assert len(found) == 4 * 4 * 4 * 4
    seeds = [0, 1, 2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 1, -(2**62)]
    assert len({int(keys.key(seed, purpose="a")) for seed in seeds}) == len(seeds)


def test_a_vector_of_clients_gives_the_keys_of_each():
    clients = torch.tensor([5, 0, 17, 3])
    together = keys.key(1, purpose="a", round=4, client=clients)
    assert together.tolist() == [int(keys.key(1, purpose="a", round=4, client=int(c))) for c in clients]


def test_streams_of_a_vector_of_keys_are_those_of_each_key():
    key = keys.key(1, purpose="a", client=torch.arange(6).view(2, 3))
    together = keys.bits(key, 7)
    assert together.shape == (2, 3, 7)
    for i, j in itertools.product(range(2), range(3)):
        assert torch.equal(together[i, j], keys.bits(key[i, j], 50)[:7])  # a longer stream begins with the shorter


def test_fold_makes_a_further_key_for_each_purpose():
    key = keys.key(1, purpose="a", client=torch.arange(50))
    folded = torch.cat([key, *(keys.fold(key, f"epoch {e} {s}") for e in range(20) for s in range(20))])
    assert len(folded.unique()) == 50 * 401
    assert torch.equal(keys.fold(key, "x")[7], keys.fold(key[7], "x"))


def test_mix_is_the_finaliser_of_splitmix64():
    # The reference sequence of SplitMix64 seeded with 1234567.
    state = 1234567 + torch.arange(3) * keys._signed(0x9E3779B97F4A7C15)
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert [value % 2**64 for value in keys.mix(state).tolist()] == expected


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_uniform_numbers_are_uniform_in_the_half_open_interval(dtype):
    u = keys.uniform(keys.key(SEED, purpose="bf16"), 51_200, dtype)
    assert u.dtype == dtype
    assert 0 <= float(u.min()) <= float(u.max()) < 1
    counts = (u.double() * 256).long().bincount(minlength=256)
    assert stats.chisquare(counts.numpy()).pvalue > 1e-3


def test_the_first_number_of_neighbouring_clients_is_uniform():
    u = keys.uniform(keys.key(SEED, purpose="first", client=torch.arange(50_000)), 1)[:, 0]
    assert stats.kstest(u.numpy(), "uniform").pvalue > 1e-3


def test_every_bit_is_a_fair_coin():
    values = keys.bits(keys.key(SEED, purpose="bits", client=torch.arange(100)), 200).flatten()
    for bit in range(64):
        ones = int(((values >> bit) & 1).sum())
        assert stats.binomtest(ones, len(values)).pvalue > 1e-5


def test_pairs_of_neighbouring_positions_fill_the_square_evenly():
    u = numbers(100_000).view(-1, 2)
    cells = (u * 16).long() @ torch.tensor([16, 1])
    assert stats.chisquare(cells.bincount(minlength=256).numpy()).pvalue > 1e-3


@pytest.mark.parametrize("what", ["client", "round"])
def test_neighbours_are_independent(what):
    bound = 5 / 20_000**0.5
    for i in range(5):
        a, b = numbers(20_000, **{what: i}), numbers(20_000, **{what: i + 1})
        assert abs(correlation(a, b)) < bound
        assert abs(correlation(a[1:], b[:-1])) < bound


def test_positions_and_purposes_are_independent():
    u, bound = numbers(20_000), 5 / 20_000**0.5
    assert all(abs(correlation(u[lag:], u[:-lag])) < bound for lag in (1, 2, 7, 64))
    assert abs(correlation(u, numbers(20_000, "another purpose"))) < bound


def test_permutations_of_ragged_clients_are_permutations():
    sizes = torch.tensor([333, 100, 17, 2, 1])
    key = keys.key(1, purpose="shuffle", client=torch.arange(5))
    shuffle = keys.permutations(key, sizes, 333)
    for row, size in zip(shuffle, sizes.tolist(), strict=True):
        assert row[:size].sort().values.tolist() == list(range(size))
    assert torch.equal(shuffle[1, :100], keys.permutations(key[1:2], sizes[1:2], 100)[0]), (
        "a cohort's width is no matter"
    )


def test_all_permutations_are_equally_likely():
    clients = 24_000
    key = keys.key(SEED, purpose="shuffle", client=torch.arange(clients))
    shuffle = keys.permutations(key, torch.full((clients,), 4), 4)
    code = shuffle @ torch.tensor([64, 16, 4, 1])
    _, counts = code.unique(return_counts=True)
    assert len(counts) == 24
    assert stats.chisquare(counts.numpy()).pvalue > 1e-3


SAMPLES = [(10, 3), (10, 10), (10, 12), (1, 1), (1000, 999), (342_477, 10), (70_000, 35_000), (70_000, 35_001)]


@pytest.mark.parametrize(("population", "count"), SAMPLES)
def test_a_sample_is_ascending_without_replacement(population, count):
    chosen = keys.sample(keys.key(1, purpose="cohort"), population, count)
    assert len(chosen) == min(population, count)
    assert bool((chosen.diff() > 0).all())
    assert 0 <= int(chosen.min()) <= int(chosen.max()) < population


def test_in_a_large_population_all_are_sampled_equally_often():
    rounds, population, count = 20, 100_000, 20_000
    chosen = torch.cat([keys.sample(keys.key(SEED, purpose="c", round=r), population, count) for r in range(rounds)])
    times = chosen.bincount(minlength=population).double()
    share = count / population
    assert float(times.var()) == pytest.approx(rounds * share * (1 - share), rel=0.02)
    assert stats.chisquare(chosen.div(1000, rounding_mode="floor").bincount().numpy()).pvalue > 1e-3


def test_all_are_sampled_equally_often():
    rounds, population, count = 400, 20, 7
    chosen = torch.cat([keys.sample(keys.key(SEED, purpose="c", round=r), population, count) for r in range(rounds)])
    frequency = chosen.bincount(minlength=population) / rounds
    expected = count / population
    spread = (expected * (1 - expected) / rounds) ** 0.5
    assert float((frequency - expected).abs().max()) < 4 * spread


@pytest.mark.parametrize("shape", [(), (1,), (5,), (16,), (3, 40)])
def test_a_row_of_noise_depends_on_its_key_alone(shape):
    key = keys.key(1, purpose="noise", client=torch.arange(6))
    together = keys.normal(key, *shape, dtype=torch.float64, device="cpu")
    assert together.shape == (6, *shape)
    for k in range(6):
        alone = keys.normal(key[k : k + 1], *shape, dtype=torch.float64, device="cpu")
        assert torch.equal(together[k], alone[0])
    assert torch.equal(keys.normal(key.flip(0), *shape, dtype=torch.float64, device="cpu"), together.flip(0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_noise_is_standard_normal_and_independent_between_clients(dtype):
    key = keys.key(SEED, purpose="noise", client=torch.arange(3))
    noise = keys.normal(key, 20_000, dtype=dtype, device="cpu")
    assert noise.dtype == dtype
    for row in noise:
        assert stats.kstest(row.numpy(), "norm").pvalue > 1e-3
    off = torch.corrcoef(noise) - torch.eye(3, dtype=dtype)
    assert float(off.abs().max()) < 5 / 20_000**0.5


def test_short_rows_of_noise_are_standard_normal_over_clients():
    noise = keys.normal(
        keys.key(SEED, purpose="short", client=torch.arange(5000)), 2, dtype=torch.float64, device="cpu"
    )
    for column in noise.T:
        assert stats.kstest(column.numpy(), "norm").pvalue > 1e-3
    assert abs(correlation(*noise.T)) < 5 / 5000**0.5


def test_the_global_generator_is_neither_read_nor_moved():
    def everything():
        key = keys.key(1, purpose="a", client=torch.arange(3))
        return (
            keys.uniform(key, 4),
            keys.permutations(key, torch.tensor([4, 3, 2]), 4),
            keys.sample(key[0], 10, 3),
            keys.normal(key, 5, dtype=torch.float32, device="cpu"),
            torch.rand(3, generator=keys.generator(key[0])),
        )

    torch.manual_seed(0)
    before = torch.get_rng_state()
    first = everything()
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(1)
    assert all(torch.equal(a, b) for a, b in zip(first, everything(), strict=True))


def test_a_seeded_block_draws_by_seed_and_purpose_and_restores_the_global_generator():
    def drawn(seed, purpose="networks"):
        with keys.seeded(seed, purpose=purpose):
            return torch.rand(3)

    before = torch.get_rng_state()
    assert torch.equal(drawn(1), drawn(1))
    assert not torch.equal(drawn(1), drawn(2))
    assert not torch.equal(drawn(1), drawn(1, "other"))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_integers_are_the_same_on_every_device():
    clients = torch.arange(5)
    key, there = (keys.key(1, purpose="a", client=c) for c in (clients, clients.cuda()))
    assert torch.equal(keys.bits(key, 100), keys.bits(there, 100).cpu())
    assert torch.equal(keys.uniform(key, 100), keys.uniform(there, 100).cpu())
