"""Federations, and streams of their examples."""

from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import consilience as cs
from consilience.core import keys
from consilience.core.errors import CheckpointError, DataError
from consilience.data import Dataset, Federation
from consilience.data.cohort import Info
from consilience.engines.states import InMemory
from support.runs import Power, cut
from support.scenarios import blobs, linear

RAGGED = (7, 3, 4, 12, 5)
TRAIN = cs.SGD(lr=0.1, momentum=0.5, batch_size=4)
HERE = cs.Simulator(device="cpu", chunk=2, workers=1)


def held(sizes: Any = RAGGED) -> Federation:
    owner = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    owner = owner[torch.randperm(len(owner), generator=torch.Generator().manual_seed(0))]
    return Federation.from_owner(Dataset(torch.zeros(len(owner), 1), torch.arange(len(owner)) % 2), owner, how="toy")


def test_clients_have_names_of_their_own() -> None:
    with pytest.raises(DataError, match="two clients have the same name, 'a': give every client its own"):
        Federation.from_owner(held().data, held().data.y, names=("a", "a"))
    with pytest.raises(DataError, match="1 name for 5 clients"):
        replace(held(), names=("a",))


def test_clients_are_found_by_name_or_number() -> None:
    federation = Federation.from_owner(held().data, held().data.y, names=("Chur", "Bern"))
    assert (federation.number("Bern"), federation.number(1), held().number("3")) == (1, 1, 3)
    assert len(federation.client("Chur")) == int(federation.sizes[0])
    with pytest.raises(DataError, match="there is no client 'chur'; did you mean 'Chur'"):
        federation.number("chur")
    with pytest.raises(DataError, match=r"there is no client 2: clients have numbers 0\.\.1"):
        federation.client(2)


def test_joint_data_are_named_after_all_silos() -> None:
    def named(names: str, **options: Any) -> str:
        made = {name: Dataset(torch.ones(2, 1), torch.ones(2), note=name, **options) for name in names}
        return Federation.from_silos(made).data.name

    assert named("abc") == "a, b and c"
    assert named("abcde") == "5 silos"
    assert named("abc", name="heart") == "heart"
    parts = {name: Dataset(torch.ones(2, 1), torch.ones(2), name=name, note=name) for name in "ab"}
    joint = Federation.from_silos(parts)
    assert (joint.data.name, joint.data.note) == ("a and b", "")
    assert repr(joint) == "Federation(a and b: 2 clients, 4 examples, silos)"


def test_a_list_of_silos_has_numbers_for_names() -> None:
    silo = (torch.ones(2, 1), torch.ones(2))
    federation = Federation.from_silos([silo, silo])
    assert (federation.names, federation.sizes.tolist(), federation.data.name) == (None, [2, 2], "2 silos")
    with pytest.raises(DataError, match="takes a dict of data sets by name, or a list, not a Dataset"):
        Federation.from_silos(Dataset.of(silo))  # type: ignore[arg-type]


def test_an_empty_set_has_owners_only_if_they_are_named_or_counted() -> None:
    nothing = Dataset(torch.zeros(0, 1), torch.zeros(0, dtype=torch.int64), name="ward")
    with pytest.raises(DataError, match="ward has no examples: pass the number of clients"):
        Federation.from_owner(nothing, [])
    assert Federation.from_owner(nothing, [], clients=2).sizes.tolist() == [0, 0]
    assert Federation.from_owner(nothing, [], names=("a", "b", "c")).sizes.tolist() == [0, 0, 0]


def rows(fed: Federation, client: int, round: int) -> list[int]:
    (offset,), (size,) = (part.tolist() for part in fed.part(torch.tensor([client]), round))
    return fed.order[offset : offset + size].tolist()


def frozen(fed: Federation, round: int) -> Federation:
    """What clients hold in one round, as a federation of its own."""
    own = [torch.tensor(rows(fed, client, round)) for client in range(len(fed))]
    offsets = torch.tensor([0, *(len(part) for part in own)]).cumsum(0)
    return replace(fed, order=torch.cat(own), offsets=offsets, steps=1)


@settings(max_examples=15, deadline=None)
@given(sizes=st.lists(st.integers(1, 60), min_size=1, max_size=5), steps=st.integers(1, 12), round=st.integers(1, 50))
def test_parts_are_equal_up_to_one_and_never_larger_where_there_are_fewer_examples(
    sizes: list[int], steps: int, round: int
) -> None:
    sizes = sorted((n + steps for n in sizes), reverse=True)
    fed = held(sizes).stream(steps)
    everyone = torch.arange(len(sizes))
    parts = [fed.part(everyone, r) for r in range(1, steps + 1)]
    starts, counts = (torch.stack(column) for column in zip(*parts, strict=True))
    assert bool((counts.diff(dim=1) <= 0).all())
    assert bool((counts.max(0).values - counts.min(0).values <= 1).all())
    assert bool((counts >= 1).all())
    assert torch.equal(starts[0], fed.offsets[:-1])
    assert torch.equal(starts[1:], (starts + counts)[:-1])
    assert torch.equal((starts + counts)[-1], fed.offsets[1:])
    again = fed.part(everyone, round)
    assert torch.equal(again[0], starts[(round - 1) % steps])
    assert torch.equal(again[1], counts[(round - 1) % steps])


def test_the_parts_of_a_client_are_disjoint_and_together_everything() -> None:
    whole = held()
    fed = whole.stream(3, seed=2)
    for client in range(len(fed)):
        parts = [rows(fed, client, round) for round in (1, 2, 3)]
        assert sorted(chain(*parts)) == sorted(whole.indices(client).tolist())
        assert [rows(fed, client, round) for round in (4, 5, 6)] == parts
    assert torch.equal(fed.sizes, whole.sizes)
    counts, before = fed.label_counts(), whole.label_counts()
    assert counts is not None
    assert before is not None
    assert torch.equal(counts, before)
    assert fed.how == "toy, in 3 steps"


def test_the_parts_of_a_stream_are_alike() -> None:
    data = Dataset(torch.zeros(4000, 1), torch.arange(4000) // 500 % 2)
    fed = Federation.from_owner(data, torch.arange(4000) // 2000).stream(4)
    means = [float(data.y[rows(fed, client, round)].double().mean()) for client in (0, 1) for round in (1, 2, 3, 4)]
    assert max(abs(mean - 0.5) for mean in means) < 0.1


def test_the_seed_alone_decides_a_stream() -> None:
    first, again, other = held().stream(3, seed=1), held().stream(3, seed=1), held().stream(3, seed=2)
    assert torch.equal(first.order, again.order)
    assert not torch.equal(first.order, other.order)


def test_one_step_is_no_stream() -> None:
    whole = held()
    for fed in (whole.stream(1), replace(whole.stream(3).stream(1), order=whole.order)):
        assert (fed.steps, fed.how) == (1, "toy")
        assert torch.equal(fed.order, whole.order)
    assert whole.stream(2).stream(3).how == "toy, in 3 steps"


def test_a_client_with_too_few_examples_is_named() -> None:
    fed = replace(held(), names=tuple("abcde"))
    with pytest.raises(DataError, match=r"a stream of 5 steps .* 2 of 5 have fewer, among them 'b' with 3"):
        fed.stream(5)
    with pytest.raises(DataError, match="steps must be at least 1, got 0"):
        fed.stream(0)


def test_what_is_kept_of_a_stream_is_a_stream_and_what_is_held_out_is_not() -> None:
    fed = held((20, 8, 12)).stream(4)
    kept, out = fed.split(0.25, seed=3)
    assert (kept.steps, kept.how, kept.sizes.tolist()) == (4, "toy, in 4 steps", [15, 6, 9])
    assert (out.steps, out.how, out.sizes.tolist()) == (1, "toy", [5, 2, 3])
    with pytest.raises(DataError, match="among them '1' with 3"):
        fed.split(0.7)
    assert fed.to("cpu").steps == 4


@pytest.mark.parametrize("sizes", [(8, 4, 12), (9, 4, 12), (7, 4)])
def test_the_pooled_client_sees_the_union_of_the_parts_where_sizes_allow_it(sizes: tuple[int, ...]) -> None:
    fed = held(sizes).stream(4)
    pooled = fed.pooled()
    assert (len(pooled), pooled.steps, pooled.how) == (1, 4, "toy, in 4 steps, pooled")
    for round in range(1, 5):
        union = [row for client in range(len(sizes)) for row in rows(fed, client, round)]
        assert sorted(rows(pooled, 0, round)) == sorted(union)


def test_the_pooled_client_is_shuffled_anew_where_the_union_is_no_part() -> None:
    fed = held((5, 5, 5, 5)).stream(4)  # 8 examples in the first step, 4 in each of the others
    pooled, again = fed.pooled(), fed.pooled()
    parts = [rows(pooled, 0, round) for round in range(1, 5)]
    assert [len(part) for part in parts] == [5] * 4
    assert sorted(chain(*parts)) == list(range(20))
    assert torch.equal(pooled.order, again.order)
    assert not torch.equal(pooled.order, fed.order)


def options(**more: Any) -> dict[str, Any]:
    return {"engine": HERE, "progress": False, "cohort": 3} | more


def test_a_run_over_a_stream_is_a_run_over_its_parts_round_by_round() -> None:
    task, whole = linear(RAGGED)
    fed, algorithm = whole.stream(3, seed=1), cs.FedAvg(TRAIN)
    server = algorithm.start(task, Info(task.initial(), torch.tensor(0), torch.tensor(5), torch.tensor(fed.examples)))
    for number in range(1, 6):
        ids = keys.sample(keys.key(0, purpose="cohort", round=number), len(fed), 3)
        with HERE.open(algorithm, task, frozen(fed, number), seed=0, cohort=3, rounds=1) as session:
            states = InMemory(lambda _: None)
            session.settle(server, states, ids, number)
            share = session.round(server, states, ids, number).share
        server = algorithm.fuse(server, share.update)
    run = cs.fit(algorithm, task, fed, rounds=5, **options())
    torch.testing.assert_close(run.posterior.mean, algorithm.posterior(server).mean)
    assert not torch.allclose(run.posterior.mean, cs.fit(algorithm, task, whole, rounds=5, **options()).posterior.mean)


def test_a_stream_that_was_cut_and_resumed_is_the_same_run(tmp_path: Path) -> None:
    task, fed, _ = blobs()
    fed = fed.stream(4)
    out = cs.runs.Storage(tmp_path / "cut", checkpoint_every=2)
    whole = cs.fit(cs.FedAvg(TRAIN), task, fed, rounds=5, **options())
    with pytest.raises(Power):
        cs.fit(cs.FedAvg(TRAIN), task, fed, rounds=5, out=out, callbacks=[cut(4)], **options())
    resumed = cs.fit(cs.FedAvg(TRAIN), task, fed, rounds=5, out=out, resume=True, **options())
    assert torch.equal(whole.posterior.mean, resumed.posterior.mean)
    for a, b in zip(whole.history, resumed.history, strict=True):
        assert {**a, "seconds": 0} == {**b, "seconds": 0}


def test_another_stream_is_not_resumed(tmp_path: Path) -> None:
    task, fed, _ = blobs()
    fed = fed.stream(4)
    cs.fit(cs.FedAvg(TRAIN), task, fed, rounds=2, out=tmp_path / "run", **options())
    with pytest.raises(CheckpointError, match=r"federation\.steps is 4 there and 3 here"):
        cs.fit(cs.FedAvg(TRAIN), task, replace(fed, steps=3), rounds=3, out=tmp_path / "run", resume=True, **options())
