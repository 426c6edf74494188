"""Layers in the forms that are fast for cohorts on a GPU: convolutions as matrix products, norms over pixels."""

from collections.abc import Callable

import torch
from torch import Tensor, nn


class MatmulConv2d(nn.Module):
    """The same convolution as a matrix product of the 3×3 (or other) neighbourhoods of every pixel.

    For a cohort, a convolution with K different kernels is one with K groups, which is slow in GPU libraries: most of
    the time goes into changes of layout. The product becomes a batched one, which is fast, and the compiler fuses the
    gathering of neighbourhoods. Uncompiled, or on a CPU, the plain convolution is faster. With `gathers` one of our
    `kernels` gathers and multiplies at once.
    """

    gathers = False

    def __init__(self, layer: nn.Conv2d) -> None:
        super().__init__()
        self.weight, self.bias = layer.weight, layer.bias
        self.kernel, self.stride, self.dilation = layer.kernel_size, layer.stride, layer.dilation
        self.padding = layer.padding

    @staticmethod
    def can_replace(layer: nn.Module) -> bool:
        """Whether a layer is an ungrouped convolution with zeros as padding, of a given width."""
        return (
            type(layer) is nn.Conv2d
            and layer.groups == 1
            and layer.padding_mode == "zeros"
            and not isinstance(layer.padding, str)
        )

    @property
    def can_gather(self) -> bool:
        """Whether `kernels` can compute it: stride and padding are the same along both axes, without dilation."""
        return self.dilation == (1, 1) and len({*self.stride}) == len({*self.padding}) == 1

    def forward(self, x: Tensor) -> Tensor:
        return self._gathered(x) if self.gathers else self._written_out(x)

    def _gathered(self, x: Tensor) -> Tensor:
        from consilience.compute.kernels import convolve  # Triton comes with torch for GPUs only

        images, kernel = x.permute(0, 2, 3, 1), self.weight.permute(0, 2, 3, 1)
        how = self.stride[0], int(self.padding[0])
        out: Tensor = convolve(images.unsqueeze(0), kernel.unsqueeze(0), *how).squeeze(0)
        return (out if self.bias is None else out + self.bias).permute(0, 3, 1, 2)

    def _written_out(self, x: Tensor) -> Tensor:
        (tall, wide), (down, right), (dy, dx) = self.kernel, self.stride, self.dilation
        top, left = (int(p) for p in self.padding)
        x = nn.functional.pad(x, (left, left, top, top)).permute(0, 2, 3, 1)
        rows = (x.shape[1] - dy * (tall - 1) - 1) // down + 1
        columns = (x.shape[2] - dx * (wide - 1) - 1) // right + 1
        shifted = [
            x[:, dy * i : dy * i + down * (rows - 1) + 1 : down, dx * j : dx * j + right * (columns - 1) + 1 : right]
            for i in range(tall)
            for j in range(wide)
        ]
        around = torch.cat(shifted, -1).flatten(0, 2)  # [B · rows · columns, tall · wide · C]
        kernel = self.weight.permute(2, 3, 1, 0).flatten(0, 2)
        out = around @ kernel if self.bias is None else around @ kernel + self.bias
        return out.reshape(-1, rows, columns, kernel.shape[1]).permute(0, 3, 1, 2)


class PixelGroupNorm(nn.Module):
    """The same GroupNorm for images whose channels are contiguous in memory, as `kernels` leave them; with `relu`, the
    ReLU after it in the same pass. Moments are float32."""

    def __init__(self, layer: nn.GroupNorm, relu: bool = False) -> None:
        super().__init__()
        self.weight, self.bias, self.groups, self.eps = layer.weight, layer.bias, layer.num_groups, layer.eps
        self.relu = relu

    def forward(self, x: Tensor) -> Tensor:
        from consilience.compute.kernels import normalise

        images = x.movedim(1, -1)
        channels = images.shape[-1]
        weight = x.new_ones(channels) if self.weight is None else self.weight
        bias = x.new_zeros(channels) if self.bias is None else self.bias
        pixels = images.reshape(1, len(x), -1, 1, channels)
        out: Tensor = normalise(pixels, weight.unsqueeze(0), bias.unsqueeze(0), self.groups, self.eps, self.relu)[0]
        return out.view(images.shape).movedim(-1, 1)


class PixelMean(nn.Module):
    """The mean over all pixels: `AdaptiveAvgPool2d(1)`, which `vmap` runs client by client for such images."""

    def forward(self, x: Tensor) -> Tensor:
        """Images [B, C, H, W] to [B, C, 1, 1]."""
        return x.mean((-2, -1), keepdim=True)


class MatmulConvTranspose2d(nn.Module):
    """The same transposed convolution (kernel 4, stride 2, padding 1) as a matrix product, as in `MatmulConv2d`.

    The product gives every pixel 16 numbers a channel, one for each tap of the kernel; tap t of row p belongs to row
    2p − 1 + t of the result. So row 2p is tap 1 of p plus tap 3 of p − 1, row 2p + 1 is tap 2 of p plus tap 0 of p + 1,
    and columns likewise: shifts and sums, which the compiler fuses.
    """

    def __init__(self, layer: nn.ConvTranspose2d) -> None:
        super().__init__()
        self.weight, self.bias = layer.weight, layer.bias

    @staticmethod
    def can_replace(layer: nn.Module) -> bool:
        """Whether a layer is an ungrouped one that doubles height and width with a 4×4 kernel."""
        return (
            type(layer) is nn.ConvTranspose2d
            and layer.groups == 1
            and (layer.kernel_size, layer.stride, layer.padding) == ((4, 4), (2, 2), (1, 1))
            and (layer.dilation, layer.output_padding) == ((1, 1), (0, 0))
        )

    def forward(self, x: Tensor) -> Tensor:
        """Images [B, C, H, W] to [B, C', 2H, 2W]."""
        pixels, kernel = x.permute(0, 2, 3, 1), self.weight.permute(0, 2, 3, 1)
        taps = (pixels.flatten(0, 2) @ kernel.flatten(1)).reshape(*pixels.shape[:3], *kernel.shape[1:])
        out = _doubled(_doubled(taps, 1), 2)
        return (out if self.bias is None else out + self.bias).permute(0, 3, 1, 2)


def _doubled(taps: Tensor, axis: int) -> Tensor:
    """The four taps (dimension 3) of n pixels along `axis` added up to 2n pixels."""
    t0, t1, t2, t3 = taps.unbind(3)
    others = taps.shape[axis] - 1
    border = torch.zeros_like(t0.narrow(axis, 0, 1))
    even = t1 + torch.cat([border, t3.narrow(axis, 0, others)], axis)
    odd = t2 + torch.cat([t0.narrow(axis, 1, others), border], axis)
    return torch.stack([even, odd], axis + 1).flatten(axis, axis + 1)


def _as_product(layer: nn.Module) -> nn.Module | None:
    if MatmulConv2d.can_replace(layer):
        return MatmulConv2d(layer)  # type: ignore[arg-type]
    if MatmulConvTranspose2d.can_replace(layer):
        return MatmulConvTranspose2d(layer)  # type: ignore[arg-type]
    return None


def use_matmul_convolutions(module: nn.Module) -> nn.Module:
    """The module with its convolutions as matrix products, where they have that form; changed in place."""
    return _replace(module, _as_product)


def use_kernels(module: nn.Module) -> nn.Module:
    """A module of matrix products with our kernels for its convolutions and norms; changed in place."""
    for layer in list(module.modules()):
        if isinstance(layer, MatmulConv2d):
            layer.gathers = layer.can_gather
        if type(layer) is nn.Sequential:
            _join_norms(layer)
    return _replace(module, _for_pixels)


def _join_norms(layers: nn.Sequential) -> None:
    """Join every norm and the ReLU after it."""
    for i in range(len(layers) - 1):
        norm, relu = layers[i], layers[i + 1]
        if type(norm) is nn.GroupNorm and type(relu) is nn.ReLU and not (_watched(norm) or _watched(relu)):
            layers[i], layers[i + 1] = PixelGroupNorm(norm, relu=True), nn.Identity()


def _for_pixels(layer: nn.Module) -> nn.Module | None:
    if type(layer) is nn.GroupNorm:
        return PixelGroupNorm(layer)
    one = type(layer) is nn.AdaptiveAvgPool2d and layer.output_size in (1, (1, 1))
    return PixelMean() if one else None


def _watched(layer: nn.Module) -> bool:
    """Whether a layer has hooks, such as those of `torch.nn.utils.weight_norm`: such a layer is not replaced."""
    return bool(layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks)


def _replace(module: nn.Module, other: Callable[[nn.Module], nn.Module | None]) -> nn.Module:
    if not _watched(module) and (new := other(module)) is not None:
        return new
    for parent in list(module.modules()):
        for name, child in parent.named_children():
            if not _watched(child) and (new := other(child)) is not None:
                setattr(parent, name, new)
    return module
