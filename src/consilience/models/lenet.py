"""LeNet-5 in its modern form."""

from collections.abc import Sequence

from torch import nn

from consilience.core.errors import ConfigError


def lenet5(inputs: Sequence[int], outputs: int) -> nn.Module:
    """LeNet-5 for images of 28×28 or 32×32 (LeCun et al., 1998), in its common modern form.

    Two 5×5 convolutions (6 and 16 channels), each with ReLU and 2×2 max pooling, then layers of 120 and 84. Images
    below 32 pixels get a border of 2, so 28×28 is the paper's 32×32. The paper has tanh, pooling with weights, a
    second convolution that sees a part of the channels, and radial basis functions at the end.
    """
    if len(inputs) != 3:
        raise ConfigError(f"lenet5 needs images [channels, height, width], got examples of shape {tuple(inputs)}")
    depth, *sides = inputs
    border = 2 if min(sides) < 32 else 0
    height, width = (((side + 2 * border - 4) // 2 - 4) // 2 for side in sides)
    if min(height, width) < 1:
        raise ConfigError(f"images of {sides[0]}×{sides[1]} are too small for lenet5: it needs 12×12 or more")
    return nn.Sequential(
        nn.Conv2d(depth, 6, 5, padding=border),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16 * height * width, 120),
        nn.ReLU(),
        nn.Linear(120, 84),
        nn.ReLU(),
        nn.Linear(84, outputs),
    )
