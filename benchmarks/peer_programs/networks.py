"""The networks of W1 to W5 as plain PyTorch modules."""

import torch
from torch import nn


def network(name):
    if name == "W1":
        return nn.Sequential(nn.Flatten(), nn.Linear(784, 200), nn.ReLU(), nn.Linear(200, 10))
    if name == "W2":
        return nn.Sequential(
            nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
            nn.Linear(9216, 128), nn.ReLU(), nn.Linear(128, 62),
        )  # fmt: skip
    if name == "W3":
        return nn.Sequential(nn.Flatten(), nn.Linear(784, 10))
    if name == "W5":
        return nn.Sequential(
            nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
            nn.Linear(12544, 128), nn.ReLU(), nn.Linear(128, 10),
        )  # fmt: skip
    return nn.Sequential(
        nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10),
    )  # fmt: skip


def load(module, weights):
    """The module with these weights, arrays in the order of its parameters."""
    with torch.no_grad():
        for parameter, value in zip(module.parameters(), weights, strict=True):
            parameter.copy_(torch.tensor(value))
    return module


def weights(module):
    return [parameter.detach().cpu().numpy() for parameter in module.parameters()]


def finish(device):
    """Wait until a GPU has done what it was asked for."""
    if device == "cuda":
        torch.cuda.synchronize()
