"""Compiled and recorded steps on a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import consilience as cs
from consilience.compute.replay import Replay, Step
from consilience.data import Compose, Crop, Flip
from consilience.data.batch import Batch
from consilience.data.cohort import take
from consilience.models import resnet18
from consilience.tasks.supervised import Classification

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("clients", [7, 6, 4, 3, 2, 1])
def test_compiled_convolutions_and_dropout_on_a_gpu_are_those_of_plain_code(clients):
    module = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Dropout2d(0.2), nn.Flatten(), nn.Linear(8 * 36, 10))
    made = torch.Generator().manual_seed(0)
    x = torch.randn(clients, 5, 1, 8, 8, generator=made, dtype=torch.float64)
    y = torch.randint(10, (clients, 5), generator=made)
    batch = Batch(x, y, torch.ones(clients, 5, dtype=torch.float64), torch.arange(clients))
    batch = Batch(*(leaf.cuda() for leaf in (batch.x, batch.y, batch.w, batch.key)))
    gradients = []
    for compile in (False, True):
        task = Classification(module).prepare("cuda", torch.float64, compile=compile, chunk=7)
        theta = task.initial().repeat(clients, 1)
        # A result must outlive the next.
        gradients.append([task.gradient()(theta * scale, batch)[0] for scale in (1, 2, 3)])
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", ["FedAvg", "FedEP", "SCAFFOLD", "FedPA", "MOON"])
def test_replayed_rounds_on_a_gpu_are_those_of_plain_code(name):
    """Ragged clients, crops and flips, two chunks a round: recorded steps against uncompiled ones, in float64."""
    made = torch.Generator().manual_seed(0)
    x, y = torch.randn(150, 3, 8, 8, generator=made), torch.randint(4, (150,), generator=made)
    owner = torch.arange(150).sqrt().long() % 9
    federation = cs.Federation.from_owner(cs.Dataset(x, y, classes=tuple("abcd")), owner)
    network = nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 16, 4))
    task, found = cs.Classification(network, augment=Compose((Crop(6), Flip()))), []
    for compile in (False, True):
        engine = cs.Simulator(device="cuda", chunk=5, compile=compile, precision="float64")
        run = cs.fit(getattr(cs.algorithms, name)(), task, federation, rounds=4, progress=False, engine=engine)
        found.append(run.posterior.mean)
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("when", ["before it is recorded", "while it is recorded"])
def test_a_step_with_too_little_memory_to_be_recorded_is_taken_as_it_comes(when, caplog):
    recorded = []

    def gradient(theta, batch, shared):
        recorded.append(torch.cuda.is_current_stream_capturing())
        g = 2 * theta + batch
        if recorded[-1] if when == "while it is recorded" else len(recorded) == 1:
            torch.empty(2**45, dtype=torch.uint8, device="cuda")
        return g, theta.sum(1)

    def advance(theta, g, rate):
        theta -= rate * g

    replay = Replay(Step(gradient, advance), torch.device("cuda"))
    theta, batch = torch.ones(3, 4, device="cuda"), torch.full((3, 1), 0.5, device="cuda")
    losses = [float(replay(theta, batch, (), (), (), (0.1,))[0]) for _ in range(3)]
    assert losses == pytest.approx([4, 3, 2.2])
    assert len(caplog.messages) == 1
    assert not replay.graphs
    other = torch.ones(2, 4, device="cuda")
    replay(other, batch[:2], (), (), (), (0.1,))
    torch.testing.assert_close(other, torch.full_like(other, 0.75))
    assert len(replay.graphs) == (when == "before it is recorded")


def test_no_step_on_a_gpu_waits_for_the_host():
    made = torch.Generator().manual_seed(0)
    x, y = torch.randint(256, (60, 3, 8, 8), generator=made).byte(), torch.randint(4, (60,), generator=made)
    data = cs.Dataset(x, y, classes=tuple("abcd"), scale=torch.tensor(0.01))
    federation = cs.Federation.from_owner(data, torch.arange(60) % 4).to("cuda")
    augment, network = Compose((Crop(6), Flip())), nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(128, 4))
    task = cs.Classification(network, augment=augment).prepare("cuda", compile=True, bf16=True, chunk=4)
    chain = cs.SGD(lr=0.1, momentum=0.9, epochs=3, batch_size=5)

    def cohort(round):
        options = {"round": round, "round_size": 4, "seed": 0, "static": True, "augment": augment}
        return cs.data.Cohort(federation, torch.arange(4), **options, take=task.once(take))

    first, second = chain(task, task.initial(), cohort(1)), cohort(2)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        other = chain(task, task.initial(), second)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert bool(other.isfinite().all())
    assert not torch.equal(first, other)


def test_learning_curves_in_bfloat16_are_those_of_float32_on_a_gpu():
    made = torch.Generator().manual_seed(0)
    x, y = torch.randn(400, 3, 8, 8, generator=made), torch.randint(4, (400,), generator=made)
    x += 0.4 * torch.randn(4, 3, 8, 8, generator=made)[y]
    federation = cs.Federation.from_owner(cs.Dataset(x, y, classes=tuple("abcd")), torch.arange(400) % 8)
    torch.manual_seed(0)
    task = cs.Classification(resnet18((3, 8, 8), 4, width=16))
    losses = []
    for precision in ("float32", "bf16"):
        engine = cs.Simulator(device="cuda", chunk=8, compile=True, precision=precision)
        run = cs.fit(cs.FedAvg(), task, federation, rounds=6, progress=False, engine=engine)
        losses.append(torch.tensor([line["loss"] for line in run.history]))
    torch.testing.assert_close(*losses, rtol=0.05, atol=0.02)
