"""LoRA layers."""

import pytest
import torch
from torch import nn

import consilience as cs
from consilience.core.errors import ConfigError, TaskError
from consilience.models import LoRALinear, add_lora, merge_lora, transformer
from consilience.models.lora import adapters


@pytest.fixture(autouse=True)
def _seeded():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


def mlp():
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))


def trained(module):
    return [name for name, p in module.named_parameters() if p.requires_grad]


def stirred(module):
    """The module with other adapters than B = 0."""
    with torch.no_grad():
        for name, p in module.named_parameters():
            if "lora_" in name:
                p += torch.randn_like(p)
    return module


def test_an_adapted_module_starts_as_the_module_and_leaves_it_unchanged():
    plain, x = mlp(), torch.randn(4, 5)
    adapted = add_lora(plain, rank=2)
    torch.testing.assert_close(adapted(x), plain(x))
    assert all(p.requires_grad for p in plain.parameters())
    assert not any(isinstance(layer, LoRALinear) for layer in plain.modules())


def test_only_adapters_are_trained_and_what_also_names():
    assert trained(add_lora(mlp(), rank=2)) == ["0.lora_A", "0.lora_B", "2.lora_A", "2.lora_B"]
    assert trained(add_lora(mlp(), rank=2, train_a=False)) == ["0.lora_B", "2.lora_B"]
    assert trained(add_lora(mlp(), targets=["0"], also=["2"])) == ["0.lora_A", "0.lora_B", "2.weight", "2.bias"]


def test_attention_is_adapted_by_default_and_patterns_choose_others():
    module = transformer((6,), 9, width=8, depth=2, heads=2)
    layers = [found.layer for found in adapters(add_lora(module, rank=2))]
    assert layers == [f"blocks.{i}.attention.{name}" for i in range(2) for name in ("q", "k", "v", "out")]
    assert [a.layer for a in adapters(add_lora(module, targets=["blocks.1.mlp.*"]))] == [
        "blocks.1.mlp.0",
        "blocks.1.mlp.2",
    ]
    assert [a.layer for a in adapters(add_lora(module, targets=["head"]))] == ["head"]
    assert [a.layer for a in adapters(add_lora(nn.Linear(3, 2)))] == [""]


def test_merged_layers_are_linear_and_compute_the_same():
    x = torch.randn(4, 5)
    for module in (stirred(add_lora(mlp(), rank=2)), stirred(add_lora(nn.Linear(5, 3), rank=2))):
        merged = merge_lora(module)
        torch.testing.assert_close(merged(x), module(x))
        assert not any(isinstance(layer, LoRALinear) for layer in merged.modules())
        assert all(p.requires_grad for p in merged.parameters())
    merged.load_state_dict(nn.Linear(5, 3).state_dict(), strict=True)


def test_a_layer_called_out_is_no_attention():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.inside, self.out = nn.Linear(3, 4), nn.Linear(4, 2)

    assert [found.layer for found in adapters(add_lora(Net()))] == ["inside", "out"]


def test_what_cannot_be_adapted_is_refused():
    with pytest.raises(TaskError, match="has LoRA layers already"):
        add_lora(add_lora(mlp()))
    with pytest.raises(TaskError, match="no linear layer of Sequential is called"):
        add_lora(mlp(), targets=["attention"])
    with pytest.raises(ConfigError, match="rank"):
        add_lora(mlp(), rank=0)


def test_frozen_weights_are_not_in_the_vector_and_offsets_are_added_to_them():
    task = cs.Classification(add_lora(mlp(), rank=2)).prepare(dtype=torch.float64)
    assert task.size == 2 * (5 + 8) + 2 * (8 + 3)
    x, offset = torch.randn(4, 5, dtype=torch.float64), torch.randn(8, 5, dtype=torch.float64)
    moved = task.with_frozen({"0.base_layer.weight": offset})
    released = moved.release(task.initial())
    expected = task.module[0].base_layer.weight + offset
    torch.testing.assert_close(released[0].base_layer.weight.double(), expected.double(), rtol=1e-6, atol=1e-6)
    assert not torch.allclose(moved.predict(task.initial(), x), task.predict(task.initial(), x))
    assert not task.main.offsets


@pytest.mark.slow
def test_adapters_of_peft_are_found():
    peft = pytest.importorskip("peft")
    module = peft.get_peft_model(mlp(), peft.LoraConfig(r=2, lora_alpha=6, target_modules=["0"]))
    (found,) = adapters(module)
    names = dict(module.named_parameters())
    assert names[found.weight].shape == found.shape == (8, 5)
    assert (names[found.a].shape, names[found.b].shape) == ((2, 5), (8, 2))
    assert (found.rank, found.scaling) == (2, 3.0)
