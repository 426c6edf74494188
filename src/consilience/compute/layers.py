"""Layers that keep state, made fit for clients that train side by side, or refused with a sentence."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.instancenorm import _InstanceNorm

from consilience.core import keys
from consilience.core.errors import TaskError


class KeyedDropout(nn.Module):
    """Dropout whose mask is a hash of (client's key, layer, position): the same for a client trained alone or in a
    cohort, and free of any generator's state. The key arrives as a buffer that the task replaces at each call.
    A layer called twice in one pass drops the same positions twice."""

    key: Tensor

    def __init__(self, rate: float, layer: int, channelwise: bool) -> None:
        super().__init__()
        self.rate, self.layer, self.channelwise = rate, layer, channelwise
        self.register_buffer("key", torch.zeros((), dtype=torch.int64), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Zero a share `rate` of the entries (or whole channels) and scale the others up."""
        shape = x.shape[:2] + (1,) * (x.dim() - 2) if self.channelwise else x.shape
        draw = keys.uniform(keys.mix(self.key ^ (self.layer + 1)), shape.numel(), dtype=torch.float32)
        kept = (draw.view(shape) >= self.rate).to(x.dtype)
        return x * kept / (1 - self.rate) if self.rate < 1 else x * kept


class FrozenBatchNorm(nn.Module):
    """BatchNorm with fixed statistics: an affine map per channel whose weight and bias are still learned."""

    mean: Tensor
    var: Tensor

    def __init__(self, layer: _BatchNorm) -> None:
        super().__init__()
        mean, var = layer.running_mean, layer.running_var
        self.register_buffer("mean", torch.zeros(layer.num_features) if mean is None else mean.clone())
        self.register_buffer("var", torch.ones(layer.num_features) if var is None else var.clone())
        self.weight, self.bias, self.eps = layer.weight, layer.bias, layer.eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise by the stored mean and variance."""
        return nn.functional.batch_norm(x, self.mean, self.var, self.weight, self.bias, eps=self.eps)


class Tap:
    """A hook that stays on a layer, shut until it is used: it notes the layer's input and can add to its output.
    To register a hook when one is needed would be plainer, but compiled code cannot."""

    def __init__(self) -> None:
        self.used = False
        self.input: Tensor | None = None
        self.offset: Tensor | None = None

    def __call__(self, layer: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        """What the layer returns from now on."""
        if not self.used:
            return output
        self.input = args[0]
        if self.offset is None or self.offset.shape != output.shape:
            return output
        return output + self.offset.to(output.dtype)

    def open(self, offset: Tensor | None) -> None:
        """Take note from now on; `offset` is added to outputs of its shape."""
        self.used, self.offset = True, offset

    def close(self) -> Tensor | None:
        """The last input since `open`, None without any."""
        seen, self.used, self.input, self.offset = self.input, False, None, None
        return seen


def with_taps(module: nn.Module, names: list[str]) -> tuple[nn.Module, dict[str, Tap]]:
    """A copy (of all but the parameters) whose layers `names` have taps."""
    tapped = copy.deepcopy(module, {id(p): p for p in module.parameters()})
    taps = {name: Tap() for name in names}
    for name, tap in taps.items():
        tapped.get_submodule(name).register_forward_hook(tap)
    return tapped, taps


class MatmulConv2d(nn.Module):
    """The same convolution as a matrix product of the 3×3 (or other) neighbourhoods of every pixel.

    For a cohort, a convolution with K different kernels is one with K groups, which GPU libraries do badly: most of
    the time goes into changing layouts. The product becomes a batched one, which they do well, and the compiler
    fuses the gathering of neighbourhoods. Uncompiled, or on a CPU, the plain convolution is faster. A layer that
    `gathers` has `kernels` do both at once.
    """

    gathers = False

    def __init__(self, layer: nn.Conv2d) -> None:
        super().__init__()
        self.weight, self.bias = layer.weight, layer.bias
        self.kernel, self.stride, self.dilation = layer.kernel_size, layer.stride, layer.dilation
        self.padding = layer.padding

    @staticmethod
    def can_replace(layer: nn.Module) -> bool:
        """Ungrouped convolutions with zeros around a number of pixels wide."""
        return (
            type(layer) is nn.Conv2d
            and layer.groups == 1
            and layer.padding_mode == "zeros"
            and not isinstance(layer.padding, str)
        )

    @property
    def can_gather(self) -> bool:
        """Whether it is of the kind that `kernels` have: the same along both axes."""
        return self.dilation == (1, 1) and len({*self.stride}) == len({*self.padding}) == 1

    def forward(self, x: Tensor) -> Tensor:
        """Images [B, C, H, W]."""
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
    """The same GroupNorm for images whose channels lie side by side in memory, as `kernels` leave them, and the ReLU
    after it, if there is one, in the same pass. Moments are float32."""

    def __init__(self, layer: nn.GroupNorm, relu: bool = False) -> None:
        super().__init__()
        self.weight, self.bias, self.groups, self.eps = layer.weight, layer.bias, layer.num_groups, layer.eps
        self.relu = relu

    def forward(self, x: Tensor) -> Tensor:
        """Examples [B, C, ...]."""
        from consilience.compute.kernels import normalise

        images = x.movedim(1, -1)
        channels = images.shape[-1]
        weight = x.new_ones(channels) if self.weight is None else self.weight
        bias = x.new_zeros(channels) if self.bias is None else self.bias
        pixels = images.reshape(1, len(x), -1, 1, channels)
        out: Tensor = normalise(pixels, weight.unsqueeze(0), bias.unsqueeze(0), self.groups, self.eps, self.relu)[0]
        return out.view(images.shape).movedim(-1, 1)


class PixelMean(nn.Module):
    """The mean over all pixels: `AdaptiveAvgPool2d(1)`, which `vmap` does client by client for such images."""

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
        """Ungrouped ones that double height and width with a 4×4 kernel."""
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
    """The module with every convolution that has one in its matrix form; changed in place."""
    return _replace(module, _as_product)


def use_kernels(module: nn.Module) -> nn.Module:
    """A module with matrix convolutions, which now gather, and norms that suit them; changed in place."""
    for layer in list(module.modules()):
        if isinstance(layer, MatmulConv2d):
            layer.gathers = layer.can_gather
        if type(layer) is nn.Sequential:
            _join_norms(layer)
    return _replace(module, _for_pixels)


def _join_norms(layers: nn.Sequential) -> None:
    """Every norm with a ReLU after it, as one layer."""
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
    """Whether somebody's hooks are on a layer, such as those of `torch.nn.utils.weight_norm`: it stays as it is."""
    return bool(layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks)


def _replace(module: nn.Module, other: Callable[[nn.Module], nn.Module | None]) -> nn.Module:
    if not _watched(module) and (new := other(module)) is not None:
        return new
    for parent in list(module.modules()):
        for name, child in parent.named_children():
            if not _watched(child) and (new := other(child)) is not None:
                setattr(parent, name, new)
    return module


def _swap(module: nn.Module, kind: type, make: Callable[[Any], nn.Module]) -> nn.Module:
    module = copy.deepcopy(module)
    if isinstance(module, kind):
        return make(module)
    made: dict[Any, nn.Module] = {}  # a layer that stands in two places stays one layer
    for name, layer in list(module.named_modules(remove_duplicate=False)):
        if isinstance(layer, kind):
            parent, _, attribute = name.rpartition(".")
            if layer not in made:
                made[layer] = make(layer)
            setattr(module.get_submodule(parent), attribute, made[layer])
    return module


def freeze_batchnorm(module: nn.Module) -> nn.Module:
    """A copy whose BatchNorm layers keep their present statistics for ever (for pretrained networks)."""
    return _swap(module, _BatchNorm, FrozenBatchNorm)


def replace_batchnorm(module: nn.Module, groups: int = 2) -> nn.Module:
    """A copy with GroupNorm in place of every BatchNorm: no statistics over the batch, so it federates."""

    def group_norm(layer: _BatchNorm) -> nn.Module:
        fitting = next(g for g in range(min(groups, layer.num_features), 0, -1) if layer.num_features % g == 0)
        return nn.GroupNorm(fitting, layer.num_features, eps=layer.eps, affine=layer.affine)

    return _swap(module, _BatchNorm, group_norm)


def with_keyed_dropout(module: nn.Module) -> tuple[nn.Module, list[str]]:
    """A copy for training with every dropout keyed, and the names of the buffers that take the key."""
    names = [name for name, layer in module.named_modules() if isinstance(layer, _DropoutNd) and layer.p > 0]
    if not names:
        return module, []
    count = iter(range(len(names)))

    def keyed(layer: _DropoutNd) -> nn.Module:
        if layer.p == 0:
            return nn.Identity()
        return KeyedDropout(layer.p, next(count), not isinstance(layer, nn.Dropout))

    return _swap(module, _DropoutNd, keyed), [f"{name}.key" if name else "key" for name in names]


def trains_otherwise(module: nn.Module, x: Tensor) -> bool:
    """Whether a module computes something else in training, beside its dropout layers: `F.dropout`, or an `if
    self.training`. Pass a copy: it is left in training mode."""
    with torch.no_grad(), torch.random.fork_rng(devices=()):
        here = module(x)
        for layer in module.train().modules():
            if isinstance(layer, _DropoutNd):
                layer.eval()
        try:
            there = module(x)
        except Exception:  # as of a detector that wants boxes, too
            return True
    if not isinstance(there, Tensor) or there.shape != here.shape:
        return True
    return bool((there - here).norm() > 1e-3 * here.norm())  # fused and plain attention differ by less


def check_layers(module: nn.Module) -> None:
    """Refuse layers whose training depends on more than (parameters, one client's batch)."""
    for name, layer in module.named_modules():
        where = f"layer {name!r} ({type(layer).__name__})"
        if isinstance(layer, nn.modules.lazy.LazyModuleMixin):
            raise TaskError(f"{where} has no shape yet: call the module once on an example before making a task")
        if isinstance(layer, _BatchNorm | _InstanceNorm) and layer.track_running_stats:
            raise TaskError(
                f"{where} keeps running statistics of its batches, which clients cannot share: use "
                "consilience.models.replace_batchnorm(model) for GroupNorm in its place, or "
                "consilience.models.freeze_batchnorm(model) to keep its present statistics fixed"
            )
        if isinstance(layer, _BatchNorm):
            raise TaskError(f"{where} mixes the examples of a batch: use consilience.models.replace_batchnorm(model)")
        if isinstance(layer, nn.AlphaDropout | nn.FeatureAlphaDropout):
            raise TaskError(f"{where} has no keyed form: use nn.Dropout")
        inner = getattr(layer, "dropout", 0.0)
        if isinstance(layer, nn.RNNBase | nn.MultiheadAttention) and inner:
            raise TaskError(f"{where} drops units inside a fused kernel, which cannot be keyed: set its dropout to 0")
