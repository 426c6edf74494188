"""Marginals of single weights, as the report shows them."""

import json
import math

import pytest
import torch
from torch import nn

import consilience as cs
from consilience.evaluation.weights import marginals


def plane() -> cs.Classification:
    return cs.Classification(nn.Linear(2, 3)).prepare(dtype=torch.float64)


def test_marginals_are_those_of_every_kind_of_precision() -> None:
    task = plane()
    mean = torch.linspace(-2, 2, task.size, dtype=torch.float64)
    kinds = {
        "diagonal": torch.linspace(1, 9, task.size, dtype=torch.float64),
        "scalar": torch.tensor([4.0], dtype=torch.float64),
        "full": torch.diag(torch.linspace(1, 9, task.size, dtype=torch.float64)) + 0.1,
    }
    for kind, precision in kinds.items():
        q = cs.Gaussian.of(mean, precision)
        found = marginals(task, q)
        assert found is not None, kind
        assert json.loads(json.dumps(found)) == found
        assert found["weights"] == task.size == 9
        assert found["known"] == pytest.approx(float((mean.abs() > 2 * q.variance.sqrt()).double().mean()))
        assert [t["name"] for t in found["tensors"]] == ["weight", "bias"]
        for name in ("sd", "ratio"):
            edges, whole = found["edges"][name], found["all"][name]
            assert sorted(edges) == edges
            assert (len(edges), sum(whole)) == (31, 9)
            parts = [tensor[name] for tensor in found["tensors"]]
            assert [sum(column) for column in zip(*parts, strict=True)] == whole
        assert found["edges"]["sd"][0] < math.log10(float(q.variance.sqrt().min()))
        shown = {example["name"]: (example["mean"], example["sd"]) for example in found["examples"]}
        assert len(shown) == 8
        assert shown["weight[0, 0]"] == pytest.approx((mean[0].item(), q.variance[0].sqrt().item()))
        assert shown["bias[2]"] == pytest.approx((mean[8].item(), q.variance[8].sqrt().item()))


def test_at_most_twelve_parameters_are_listed_and_they_are_the_largest() -> None:
    task = cs.Classification(nn.Sequential(*[nn.Linear(4, 4) for _ in range(8)]))
    found = marginals(task, cs.Gaussian.of(task.initial(), torch.ones(1)))
    assert found is not None
    names = [tensor["name"] for tensor in found["tensors"]]
    assert (len(names), found["of_tensors"]) == (12, 16)
    assert [name for name in names if name.endswith("weight")] == [f"{i}.weight" for i in range(8)]


def test_appended_networks_count_and_have_no_names_of_their_own() -> None:
    task = cs.Classification(nn.Linear(2, 2)).extend(other=nn.Linear(1, 1, bias=False))
    found = marginals(task, cs.Gaussian.of(task.initial(), torch.ones(task.size)))
    assert found is not None
    assert sum(found["all"]["sd"]) == 7
    assert sum(sum(tensor["sd"]) for tensor in found["tensors"]) == 6
    assert found["examples"][-1]["name"] == "weight 6"


def test_a_posterior_that_has_diverged_has_no_marginals() -> None:
    task = plane()
    assert marginals(task, cs.Gaussian.of(torch.full((9,), math.nan), torch.ones(1))) is None
    half = torch.where(torch.arange(9) < 5, 1.0, math.nan)
    found = marginals(task, cs.Gaussian.of(half, torch.ones(9)))
    assert found is not None
    assert sum(found["all"]["ratio"]) == 5
