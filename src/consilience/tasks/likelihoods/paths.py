"""−log p(labels) of CTC: the sum over all paths of frames that give the labels."""

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from consilience.compute.compiler import compiling
from consilience.core import TaskError
from consilience.metrics.scores import at_least_float32
from consilience.tasks.likelihoods.decoding import BLANK

NEVER = -1e30  # the logarithm of 0, finite so that gradients are


def ctc_loss(log_probs: Tensor, exists: Tensor, y: Tensor) -> Tensor:
    """−log p(y) [B] as by `ctc`, computed by torch's own kernels for all examples of a cohort together. These wait for
    the lengths on a GPU, and the compiler does not know them: compiled and recorded code takes `ctc`."""
    if compiling() or (log_probs.is_cuda and torch.cuda.is_current_stream_capturing()):
        return ctc(log_probs, exists, y)
    loss: Tensor = _Torch.apply(at_least_float32(log_probs), exists.sum(-1), y.clamp_min(BLANK))[0]  # type: ignore[no-untyped-call]
    return loss.to(log_probs.dtype)


class _Torch(torch.autograd.Function):
    """(loss [..., B], its gradient [..., B, T, V]) of log probabilities [..., B, T, V], lengths [..., B] and labels
    [..., B, S], padded by 0. As torch has it, the gradient is right for log probabilities that sum to 1."""

    @staticmethod
    def forward(log_probs: Tensor, lengths: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        flat = log_probs.reshape(-1, *log_probs.shape[-2:]).transpose(0, 1)
        labels = labels.reshape(-1, labels.shape[-1])
        with torch.enable_grad():
            flat = flat.detach().requires_grad_()
            counts = (labels != BLANK).sum(-1)
            loss = F.ctc_loss(flat, labels, lengths.reshape(-1), counts, blank=BLANK, reduction="none")
            (g,) = torch.autograd.grad(loss.sum(), flat)
        loss, impossible = loss.detach(), loss.isinf()
        g = g.masked_fill(impossible.unsqueeze(-1), 0.0).transpose(0, 1)
        return loss.masked_fill(impossible, -NEVER).view(lengths.shape), g.reshape(log_probs.shape)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(output[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor, None, None]:
        (g,) = ctx.saved_tensors
        return _Once.apply(grad, g), None, None  # type: ignore[no-untyped-call]

    @staticmethod
    def vmap(info: Any, dims: tuple[int | None, ...], *inputs: Tensor) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
        wide = [
            x.expand(info.batch_size, *x.shape) if dim is None else x.movedim(dim, 0)
            for x, dim in zip(inputs, dims, strict=True)
        ]
        return _Torch.apply(*wide), (0, 0)  # type: ignore[no-untyped-call]


class _Once(torch.autograd.Function):
    """grad · g for a g that depends on the same weights in a way that nobody knows."""

    generate_vmap_rule = True

    @staticmethod
    def forward(grad: Tensor, g: Tensor) -> Tensor:
        return grad[..., None, None] * g

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        raise TaskError("torch's CTC has no second derivatives: take a method that needs gradients alone")


def ctc(log_probs: Tensor, exists: Tensor, y: Tensor) -> Tensor:
    """−log p(y) [B] from log probabilities [B, T, V] of frames, of which some `exist` [B, T]; at least 1e30 / 2 where y
    cannot be. The forward recursion over blank, y_1, blank, y_2, …, blank, which runs in `vmap` as torch's does not."""
    labels = y.clamp_min(BLANK)
    count = (labels != BLANK).sum(-1, keepdim=True)
    states = torch.stack([torch.full_like(labels, BLANK), labels], -1).flatten(1)
    states = torch.cat([states, torch.full_like(labels[:, :1], BLANK)], -1)  # [B, 2 S + 1]
    other = torch.cat([torch.full_like(states[:, :2], BLANK), states[:, :-2]], -1)
    skips = torch.where((states != BLANK) & (states != other), 0.0, NEVER).to(log_probs.dtype)
    each = log_probs.gather(-1, states.unsqueeze(1).expand(-1, log_probs.shape[1], -1))
    alpha = (
        torch.where(torch.arange(states.shape[1], device=y.device) == 0, 0.0, NEVER).to(each).expand(each[:, 0].shape)
    )
    for t in range(each.shape[1]):
        by_one = F.pad(alpha, (1, 0), value=NEVER)[:, :-1]
        by_two = F.pad(alpha, (2, 0), value=NEVER)[:, :-2] + skips
        # Before the first frame, the path is at the first blank: from there it may go to the first label.
        moved = torch.stack([alpha, by_one, by_two]).logsumexp(0).clamp_min(NEVER) + each[:, t]
        alpha = torch.where(exists[:, t : t + 1], moved, alpha)
    ends = alpha.gather(-1, torch.cat([2 * count, (2 * count - 1).clamp_min(0)], -1))
    empty = torch.cat([torch.zeros_like(count), torch.where(count > 0, 0, 1)], -1).bool()  # without labels, one end
    return -torch.where(empty, NEVER, ends).logsumexp(-1)
