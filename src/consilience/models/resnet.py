"""ResNets for small images, with GroupNorm or BatchNorm."""

from collections.abc import Sequence
from typing import Literal

from torch import Tensor, nn

from consilience.core.errors import ConfigError
from consilience.models.gan import need_images

Norm = Literal["group", "batch"]


def _norm(norm: Norm, groups: int, channels: int) -> nn.Module:
    if norm not in ("group", "batch"):
        raise ConfigError(f"norm is 'group' or 'batch', got {norm!r}")
    return nn.GroupNorm(groups, channels) if norm == "group" else nn.BatchNorm2d(channels)


class Block(nn.Module):
    """Two 3×3 convolutions with a skip connection (He et al., 2016)."""

    def __init__(self, before: int, after: int, stride: int, groups: int, norm: Norm) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(before, after, 3, stride, 1, bias=False), _norm(norm, groups, after), nn.ReLU(),
            nn.Conv2d(after, after, 3, 1, 1, bias=False), _norm(norm, groups, after),
        )  # fmt: skip
        self.relu = nn.ReLU()
        self.skip: nn.Module = nn.Identity()
        if stride != 1 or before != after:
            self.skip = nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), _norm(norm, groups, after))

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.layers(x) + self.skip(x))  # type: ignore[no-any-return]


def _stages(
    inputs: Sequence[int], outputs: int, width: int, blocks: Sequence[int], groups: int, norm: Norm
) -> nn.Module:
    """A 3×3 stem, a stage for each number of `blocks`, the mean over the image, and a linear layer. Every stage but the
    first halves the sides and doubles the channels."""
    layers: list[nn.Module] = [nn.Conv2d(inputs[0], width, 3, 1, 1, bias=False), _norm(norm, groups, width), nn.ReLU()]
    before = width
    for stage, count in enumerate(blocks):
        after = width * 2**stage
        layers.append(Block(before, after, 1 if stage == 0 else 2, groups, norm))
        layers += [Block(after, after, 1, groups, norm) for _ in range(count - 1)]
        before = after
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, outputs))


def resnet18(inputs: Sequence[int], outputs: int, width: int = 64, groups: int = 2, norm: Norm = "group") -> nn.Module:
    """ResNet-18 with a 3×3 stem and no first pooling, for images of about 24 to 64 pixels. `norm` is GroupNorm of
    `groups`, or BatchNorm."""
    need_images("resnet18", inputs)
    return _stages(inputs, outputs, width, (2, 2, 2, 2), groups, norm)


def resnet20(inputs: Sequence[int], outputs: int, width: int = 16, groups: int = 2, norm: Norm = "group") -> nn.Module:
    """ResNet-20 for CIFAR's images (He et al., 2016): three stages of three blocks with `width`, 2 and 4 · `width`
    channels, 0.27 million weights. `norm` is GroupNorm of `groups`, or BatchNorm as in the original.

    Where the shape changes, the skip is a 1×1 convolution and a norm, the paper's option B."""
    need_images("resnet20", inputs)
    return _stages(inputs, outputs, width, (3, 3, 3), groups, norm)


def _same(side: int, kernel: int, stride: int) -> tuple[int, int]:
    """Zeros before and after `side` pixels for ⌈side / stride⌉ windows, at most one more after than before."""
    total = max((-(-side // stride) - 1) * stride + kernel - side, 0)
    return total // 2, total - total // 2


def _same_conv(before: int, after: int, kernel: int, stride: int, sides: Sequence[int]) -> list[nn.Module]:
    """A convolution of images of these height and width whose result has ⌈side / stride⌉ pixels along each."""
    (top, bottom), (left, right) = (_same(side, kernel, stride) for side in sides)
    if (top, left) == (bottom, right):
        return [nn.Conv2d(before, after, kernel, stride, (top, left), bias=False)]
    return [nn.ZeroPad2d((left, right, top, bottom)), nn.Conv2d(before, after, kernel, stride, bias=False)]


def _plain_norm(groups: int, channels: int) -> nn.Module:
    return nn.GroupNorm(groups, channels, eps=1e-3, affine=False)


class PreactivationBlock(nn.Module):
    """Two 3×3 convolutions, each after a norm and a ReLU, with a skip connection (He et al., 2016b), for images of
    these height and width. Where the shape changes, the skip is a 1×1 convolution of the block's input and a norm."""

    def __init__(self, before: int, after: int, stride: int, groups: int, sides: Sequence[int]) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            _plain_norm(groups, before), nn.ReLU(), *_same_conv(before, after, 3, stride, sides),
            _plain_norm(groups, after), nn.ReLU(), nn.Conv2d(after, after, 3, 1, 1, bias=False),
        )  # fmt: skip
        self.skip: nn.Module = nn.Identity()
        if stride != 1 or before != after:
            self.skip = nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), _plain_norm(groups, after))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x) + self.skip(x)  # type: ignore[no-any-return]


def resnet18_v2(inputs: Sequence[int], outputs: int, width: int = 64, groups: int = 2) -> nn.Module:
    """ResNet-18 v2 as in FedEP's CIFAR-100 benchmark: a 7×7 stem and a 3×3 pooling, both with stride 2, then four
    stages of two blocks, at 6, 3, 2 and 1 pixels for images of 24.

    The GroupNorm of `groups` has no scale and shift, and its eps is 1e-3. Convolutions start from a normal with
    standard deviation 1/√(inputs of a unit), cut at two deviations, and the last layer from 0, so that all first logits
    are 0."""
    need_images("resnet18_v2", inputs)
    full, half, quarter = ([-(-side // stride) for side in inputs[1:]] for stride in (1, 2, 4))
    pool = nn.MaxPool2d(3, 2, tuple(_same(side, 3, 2)[0] for side in half), ceil_mode=True)
    layers: list[nn.Module] = [*_same_conv(inputs[0], width, 7, 2, full), pool]
    before, sides = width, quarter
    for stage in range(4):
        after, stride = width * 2**stage, 1 if stage == 0 else 2
        layers.append(PreactivationBlock(before, after, stride, groups, sides))
        before, sides = after, [-(-side // stride) for side in sides]
        layers.append(PreactivationBlock(after, after, 1, groups, sides))
    head = nn.Linear(before, outputs)
    last = [_plain_norm(groups, before), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), head]
    module = nn.Sequential(*layers, *last)
    for layer in module.modules():
        if isinstance(layer, nn.Conv2d):
            sd = layer.weight[0].numel() ** -0.5
            nn.init.trunc_normal_(layer.weight, std=sd, a=-2 * sd, b=2 * sd)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    return module


class Residual(nn.Module):
    """x + f(x)."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x)  # type: ignore[no-any-return]


def resnet9(inputs: Sequence[int], outputs: int, width: int = 64, groups: int = 2, norm: Norm = "group") -> nn.Module:
    """ResNet-9 for images of 32 to 96 pixels: the small, fast residual network of DAWNBench (Page, 2018).

    Eight 3×3 convolutions of `width` to 8 · `width` channels, three poolings, two skip connections, one linear layer.
    `norm` is GroupNorm of `groups`, or BatchNorm as in the original. The last pooling takes the maximum over the whole
    image, which at 32 pixels is the original's 4×4. The linear layer has a bias instead of a fixed factor of 1/8."""
    need_images("resnet9", inputs)
    if min(inputs[1:]) < 8:
        raise ConfigError(f"images of {inputs[1]}×{inputs[2]} are too small for resnet9: it needs 8×8 or more")

    def conv(before: int, after: int) -> list[nn.Module]:
        return [nn.Conv2d(before, after, 3, 1, 1, bias=False), _norm(norm, groups, after), nn.ReLU()]

    return nn.Sequential(
        *conv(inputs[0], width), *conv(width, 2 * width), nn.MaxPool2d(2),
        Residual(*conv(2 * width, 2 * width), *conv(2 * width, 2 * width)),
        *conv(2 * width, 4 * width), nn.MaxPool2d(2), *conv(4 * width, 8 * width), nn.MaxPool2d(2),
        Residual(*conv(8 * width, 8 * width), *conv(8 * width, 8 * width)),
        nn.AdaptiveMaxPool2d(1), nn.Flatten(), nn.Linear(8 * width, outputs),
    )  # fmt: skip
