"""Every recipe at its small size, as a user runs it."""

import json
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

import consilience as cs
from consilience.recipes import RECIPES
from consilience.recipes.fedep_stackoverflow import BATCH, LOSS, STACK_OVERFLOW, TAGS
from consilience.tasks.likelihoods import Bernoulli
from consilience.tasks.supervised import MultiLabel, Supervised
from support import quick
from support.published import write_addresses, write_tff_emnist, write_tff_questions, write_tiny_images

WRITTEN = {
    "fedep-emnist62": write_tff_emnist,
    "fedep-stackoverflow": write_tff_questions,
    "fednp-tinyimagenet": write_tiny_images,
    "sotu": write_addresses,
    "sotu-lora": write_addresses,
}


@pytest.fixture
def reproduce(tmp_path, sketched):
    """A recipe in this test's folder: (exit code, stdout, stderr)."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield lambda name: quick.reproduce(name, tmp_path / "out")
    torch.set_num_threads(threads)


# They run in test_cli.py, test_fedep_exact.py, test_fednp_toy.py, test_fednp_toy_published.py, test_hospital_sets.py,
# test_hospitals.py, test_personal_hospitals.py, test_sa_ode.py and test_survival.py.
ELSEWHERE = {
    "fedep-linear",
    "fedep-toy",
    "fednp-moments",
    "fednp-toy",
    "fednp-toy-published",
    "hospital-methods",
    "hospital-sets",
    "hospitals",
    "personal-hospitals",
    "sa-ode",
    "survival",
}
# The code of another recipe with other data, or with another number of clients.
SAME = {
    "fednp-cifar100-50",
    "fednp-cifar100-100",
    "fednp-fmnist-labels",
    "fednp-latent-dirichlet",
    "sa-cifar100",
    "sa-fmnist-tenth",
}
SAME |= {"personal-permuted"}


@pytest.mark.parametrize("name", [name for name in RECIPES if name not in ELSEWHERE | SAME])
def test_every_recipe_runs_gives_finite_numbers_and_has_no_client_rejected(
    name, reproduce, tmp_path, monkeypatch, caplog
):
    if name in WRITTEN:
        WRITTEN[name](tmp_path / "data")
        monkeypatch.setenv("CONSILIENCE_DATA", str(tmp_path / "data"))
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    code, out, err = reproduce(name)
    if "needs the file" in err:
        pytest.skip(err.strip())
    assert code == 0, err
    quick.assert_finite(name, json.loads(out))
    assert (tmp_path / "out" / "report.html").exists()
    assert "rejected" not in caplog.text


NEEDS_NOTHING = {
    "after2023",
    "epgan-toy",
    "fedep-hospitals",
    "fedep-linear",
    "fedep-tags",
    "fedep-toy",
    "fednp-moments",
    "fednp-toy",
    "fednp-toy-published",
    "hospital-methods",
    "hospital-sets",
    "hospitals",
    "personal-hospitals",
    "sa-ode",
    "survival",
}


@pytest.mark.parametrize("name", [name for name in RECIPES if name not in NEEDS_NOTHING])
def test_without_its_data_a_recipe_says_one_sentence_and_writes_nothing(name, reproduce, tmp_path, monkeypatch):
    monkeypatch.setenv("CONSILIENCE_DATA", str(tmp_path / "nothing"))
    code, out, err = reproduce(name)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert "needs the file" in err
    assert not list(tmp_path.iterdir())


# Stack Overflow: the paper's figures and the scale of its loss


def test_the_papers_figures_stand_beside_rows_that_the_recipe_has(reproduce, tmp_path, monkeypatch):
    write_tff_questions(tmp_path / "data")
    monkeypatch.setenv("CONSILIENCE_DATA", str(tmp_path / "data"))
    _, out, _ = reproduce("fedep-stackoverflow")
    rows = {(row["method"], row["metric"]) for row in json.loads(out)["rows"]}
    assert set(STACK_OVERFLOW.paper) <= rows
    assert {method for method, _ in rows} == set(STACK_OVERFLOW.names.split())


class PaperLoss(Bernoulli):
    """Summed over a batch of 100 and averaged over the tags; the library then takes the mean over the batch."""

    def losses(self, output, y):
        return BATCH * F.binary_cross_entropy_with_logits(output, y, reduction="none").mean(-1)


def questions(clients=4):
    made = torch.Generator().manual_seed(0)
    x = torch.rand(clients * BATCH, 6, generator=made)
    y = (torch.rand(len(x), TAGS, generator=made) < 0.01).float()
    return cs.Federation.from_owner(cs.Dataset(x, y), torch.arange(len(x)) % clients)


@pytest.mark.parametrize("name", ["FedAvg", "FedPA", "FedSEP(I)"])
def test_a_method_takes_the_same_way_on_the_papers_loss_with_the_papers_steps(name):
    torch.manual_seed(0)
    module, federation, ends = nn.Linear(6, TAGS), questions(), []
    ours = replace(STACK_OVERFLOW, switch=2)
    paper = replace(
        ours,
        train=replace(ours.train, lr=50),
        kappa=ours.kappa * LOSS,
    )
    for benchmark, task in ((ours, MultiLabel(module)), (paper, Supervised(module, PaperLoss()))):
        engine = cs.Simulator(device="cpu", chunk=4, workers=1, threads=1, precision="float64")
        method = replace(benchmark, names=name).methods()[name]
        run = cs.fit(method, task, federation, rounds=4, cohort=2, engine=engine, progress=False)
        ends.append(run.posterior.mean)
    torch.testing.assert_close(*ends, rtol=1e-6, atol=1e-9)
    began = torch.cat([p.detach().flatten() for p in module.parameters()])
    assert float((ends[0] - began).abs().max()) > 0.1
