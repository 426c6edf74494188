"""The places of named parts in θ."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
from torch import nn

import consilience as cs
from consilience.algorithms.shared.parts import places
from consilience.core.errors import TaskError


def task(**layers):
    body, norm, head = nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Linear(2, 2)
    own = {"body": body, "norm": norm, "act": nn.Tanh(), "head": head} | layers
    return cs.Classification(nn.Sequential(OrderedDict(own)), batch_norm="averaged")


def test_a_part_is_a_module_or_a_parameter():
    assert places(task(), ("body.bias",)).tolist() == [6, 7]
    assert places(task(), ("head",)).tolist() == [12, 13, 14, 15, 16, 17]
    assert places(task(), ("head", "body.bias", "head.bias")).tolist() == [6, 7, 12, 13, 14, 15, 16, 17]
    assert places(task(), ()).tolist() == []
    assert places(task(), ("",)).tolist() == list(range(22))


def test_a_norm_layer_has_its_running_averages():
    assert places(task(), ("norm",)).tolist() == [8, 9, 10, 11, 18, 19, 20, 21]


def test_a_name_is_not_a_prefix_of_letters():
    made = task(head2=nn.Linear(2, 2))
    assert len(places(made, ("head",))) == 6


def test_a_shared_parameter_belongs_to_both_modules():
    made = task(body=nn.Linear(2, 2), head=nn.Linear(2, 2))
    module = made.module
    module.head.weight = module.body.weight
    tied = cs.Classification(module, batch_norm="averaged")
    both = (set(places(tied, (part,)).tolist()) for part in ("body", "head"))
    assert set.intersection(*both) == set(range(4))


def test_an_unknown_part_is_refused_with_the_nearest_name():
    with pytest.raises(TaskError, match=r"there is no part 'hed' in the model; did you mean 'head'\?"):
        places(task(), ("hed",))
    with pytest.raises(TaskError, match=r"did you mean 'head\.weight'\?"):
        places(task(), ("head.wait",))


def test_a_part_without_parameters_to_learn_is_refused():
    with pytest.raises(TaskError, match="'act' of the model has no parameters to learn"):
        places(task(), ("act",))
    frozen = nn.Linear(3, 2).requires_grad_(False)
    with pytest.raises(TaskError, match="'body' of the model has no parameters to learn"):
        places(task(body=frozen), ("body",))


def test_places_are_those_of_the_released_module():
    made = task()
    theta = torch.zeros(made.size).index_fill(0, places(made, ("head",)), 1.0)
    released = made.release(theta)
    assert all(bool((p == 1).all()) for p in released.head.parameters())
    assert all(bool((p == 0).all()) for p in released.body.parameters())
