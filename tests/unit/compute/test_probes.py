"""State, randomness and mixed examples are found by structure, whatever the size of their effect."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

import consilience as cs
from consilience.compute import probes
from consilience.core import TaskError

DATA = cs.Dataset(torch.randn(4, 3, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 0, 1]))


class Layer(nn.Module):
    """A linear layer and something else, given as a function of (the module, its output)."""

    def __init__(self, further):
        super().__init__()
        self.layer, self.further = nn.Linear(3, 2), further
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        return self.further(self, self.layer(x))


def in_place(module, out):
    module.count += 1
    return out


def replaced(module, out):
    module.count = module.count + 1
    return out


STATE = [in_place, replaced]


@pytest.mark.parametrize("further", STATE)
def test_a_buffer_written_in_forward_is_refused(further):
    with pytest.raises(TaskError, match="changes its buffer 'count'"):
        cs.Classification(Layer(further)).check(DATA)


DRAWS = {
    "torch.randn": lambda module, out: out + 1e-9 * torch.randn(out.shape),
    "torch.rand_like": lambda module, out: out + torch.rand_like(out),
    "normal_": lambda module, out: out + torch.empty(out.shape).normal_(),
    "bernoulli_ ignored result": lambda module, out: out * _filled(out),
    "new_empty": lambda module, out: out * out.new_empty(len(out), 1).bernoulli_(0.5),
    "torch.bernoulli": lambda module, out: out * torch.bernoulli(torch.full_like(out, 0.5)),
    "torch.normal": lambda module, out: torch.normal(out, 1.0),
    "torch.randint": lambda module, out: out + torch.randint(0, 9, out.shape),
    "F.dropout": lambda module, out: F.dropout(out, 0.5, module.training),
    "F.rrelu": lambda module, out: F.rrelu(out, training=module.training),
    "F.gumbel_softmax": lambda module, out: F.gumbel_softmax(out, hard=True),
    "exponential_": lambda module, out: out + torch.empty_like(out).exponential_(),
}


def _filled(out):
    noise = torch.empty(out.shape)
    noise.bernoulli_(0.5)
    return noise


@pytest.mark.parametrize("further", DRAWS.values(), ids=DRAWS.keys())
def test_numbers_drawn_in_forward_follow_the_run_s_seed(further):
    torch.manual_seed(0)
    module = Layer(further)
    fed = cs.partition.iid(DATA, clients=2, seed=0)

    def run(seed, chunk):
        engine = cs.Simulator(device="cpu", chunk=chunk, workers=1, precision="float64")
        run = cs.fit(cs.FedAvg(), cs.Classification(module), fed, rounds=2, seed=seed, engine=engine, progress=False)
        return run.posterior.mean

    state = torch.get_rng_state()
    first = run(0, 2)
    torch.testing.assert_close(run(0, 1), first, rtol=1e-10, atol=1e-10)
    assert torch.equal(run(0, 2), first)
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(run(1, 2), first)


def test_randomness_without_a_keyed_form_is_refused_by_name():
    module = Layer(lambda module, out: out + torch.multinomial(torch.ones(len(out), 3), 1))
    with pytest.raises(TaskError, match="draws random numbers by multinomial"):
        cs.Classification(module).check(DATA)


class Mixed(nn.Module):
    """The mean of the batch enters every example, with a tiny factor."""

    def __init__(self, factor):
        super().__init__()
        self.layer, self.factor = nn.Linear(3, 2), factor

    def forward(self, x):
        return self.layer(x + self.factor * x.mean(0))


@pytest.mark.parametrize(("factor", "mixes"), [(1.0, True), (1e-9, True), (0.0, True)])
def test_examples_that_mix_are_found_whatever_the_size_of_the_effect(factor, mixes):
    task = cs.Classification(Mixed(factor))
    task.check(DATA)
    assert task.mixes == mixes
    assert task.pads == (not mixes)


@pytest.mark.parametrize(
    "module", [nn.Linear(3, 2), nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2))]
)
def test_layers_and_batchnorm_do_not_mix(module):
    task = cs.Classification(module)
    task.check(DATA)
    assert task.pads


def test_tokens_that_mix_are_found():
    embedding = nn.Embedding(5, 2)
    assert not probes.mixes(embedding, torch.tensor([[1], [2]]))
    assert probes.mixes(lambda ids: embedding(ids) + 1e-9 * embedding(ids).mean(0), torch.tensor([[1], [2]]))


def test_a_module_that_mixes_gives_the_same_result_for_every_chunk():
    fed = cs.Federation.from_owner(cs.Dataset(torch.randn(9, 3), torch.randint(2, (9,))), [0, 0, 0, 0, 0, 1, 1, 1, 2])
    torch.manual_seed(0)
    task = cs.Classification(Mixed(1.0))
    found = [
        cs.fit(cs.FedAvg(cs.SGD(batch_size=4)), task, fed, rounds=2, engine=cs.Simulator(chunk=chunk), progress=False)
        for chunk in (1, 3)
    ]
    assert torch.equal(found[0].posterior.mean, found[1].posterior.mean)
