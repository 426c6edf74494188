"""Small transformers."""

import pytest
import torch

import consilience as cs
from consilience.core.errors import ConfigError
from consilience.models import MODELS, transformer, vit


@pytest.fixture(autouse=True)
def _seeded():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


def test_a_position_sees_nothing_after_it():
    module = transformer((10,), 7, width=16, depth=2, heads=4)
    ids = torch.randint(7, (3, 10))
    later = ids.clone()
    later[:, 6:] = (later[:, 6:] + 1) % 7
    before, after = module(ids), module(later)
    assert before.shape == (3, 10, 7)
    torch.testing.assert_close(before[:, :6], after[:, :6])
    assert not torch.allclose(before[:, 6:], after[:, 6:])


def test_short_rows_and_bytes_are_token_ids_too():
    module = transformer((10,), 7, width=16, depth=1)
    ids = torch.randint(7, (2, 4))
    torch.testing.assert_close(module(ids.to(torch.uint8)), module(ids))


def test_a_vit_takes_images_patch_by_patch():
    module = vit((3, 8, 12), 5, patch=4, width=16, depth=1)
    assert module(torch.randn(2, 3, 8, 12)).shape == (2, 5)
    assert module.positions.shape == (6, 16)
    x = torch.randn(1, 3, 8, 12)
    seen = {}
    module.patches.register_forward_hook(lambda _, args, out: seen.update(x=args[0]))
    module(x)
    torch.testing.assert_close(seen["x"][0, 4], x[0, :, 4:8, 4:8].reshape(-1))  # row 1, column 1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: transformer((3, 4), 7), "rows of token ids"),
        (lambda: transformer((4,), 7, width=10, heads=4), "cannot be divided into 4 heads"),
        (lambda: vit((1, 28, 28), 10, patch=5), "patches of 5×5"),
        (lambda: vit((28,), 10), "vit"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def test_clients_together_have_the_gradients_of_clients_alone():
    images = torch.randn(3, 4, 1, 8, 8)
    task = cs.Classification(vit((1, 8, 8), 3, width=8, depth=1, heads=2, dropout=0.1)).prepare(dtype=torch.float64)
    batch = cs.data.Batch(images.double(), torch.arange(12).view(3, 4) % 3, torch.ones(3, 4).double(), torch.arange(3))
    theta = task.initial() + 0.1 * torch.randn(3, task.size, dtype=torch.float64)
    together, _ = task.gradient()(theta, batch)
    for k in range(3):
        alone, _ = task.gradient()(theta[k : k + 1], cs.core.records.rows(batch, slice(k, k + 1)))
        torch.testing.assert_close(together[k : k + 1], alone, rtol=1e-9, atol=1e-9)


def test_both_are_in_the_list():
    assert (MODELS["transformer"], MODELS["vit"]) == (transformer, vit)
