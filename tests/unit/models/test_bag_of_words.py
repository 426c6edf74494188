import pytest
import torch
from torch.func import functional_call, grad, vmap

from consilience.core.errors import ConfigError
from consilience.models import bag_of_words
from consilience.tasks.supervised import MultiLabel


def texts(rows=6, length=9, vocabulary=4, seed=0):
    """Ids of words within and beyond the vocabulary, unknown ones, and padding at the end."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, vocabulary + 4, (rows, length), generator=generator)
    ends = torch.arange(rows).unsqueeze(1)  # the first text is empty
    return ids.masked_fill(torch.arange(length) >= ends, 0).to(torch.int16)


def frequencies(ids, vocabulary):
    """Naive: a loop over the words of every text."""
    rows = []
    for text in ids.tolist():
        tokens = [token for token in text if token != 0]
        rows.append([tokens.count(2 + word) / max(len(tokens), 1) for word in range(vocabulary)])
    return torch.tensor(rows, dtype=torch.float64)


def test_bag_of_words_counts_every_token_also_unknown_ones():
    module = bag_of_words((9,), 3, vocabulary=4).double()
    ids = texts()
    expected = frequencies(ids, 4)
    assert 0 < float(expected.sum(1).max()) <= 1
    torch.testing.assert_close(module[0](ids), expected)
    torch.testing.assert_close(module(ids), module[1](expected))


def test_bag_of_words_has_the_same_gradient_under_vmap():
    module = bag_of_words((9,), 3, vocabulary=4).double()
    generator = torch.Generator().manual_seed(1)
    weights = {n: torch.randn(5, *p.shape, generator=generator).double() for n, p in module.named_parameters()}
    ids = torch.stack([texts(seed=s) for s in range(5)])

    def loss(one, x):
        return functional_call(module, one, (x,)).square().sum()

    together = vmap(grad(loss))(weights, ids)
    for k in range(5):
        alone = {n: w[k].clone().requires_grad_() for n, w in weights.items()}
        gradients = torch.autograd.grad(loss(alone, ids[k]), list(alone.values()))
        for name, gradient in zip(alone, gradients, strict=True):
            torch.testing.assert_close(together[name][k], gradient)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_bag_of_words_follows_the_tasks_dtype_and_has_the_fast_fisher(dtype):
    task = MultiLabel(bag_of_words((9,), 3, vocabulary=4)).prepare(dtype=dtype)
    assert task.networks.only_linear
    assert task.apply_one(task.initial(), texts()).dtype == dtype


def test_bag_of_words_refuses_images():
    with pytest.raises(ConfigError, match=r"rows of token ids, got examples of shape \(1, 28, 28\)"):
        bag_of_words((1, 28, 28), 10)
