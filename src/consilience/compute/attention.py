"""Attention and linear layers of a cohort: clients become a further batch axis of a few large products."""

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from consilience.compute.passes import Pass, differentiated_around, handles, in_cohort
from consilience.compute.randomness import dropped


@handles(F.linear)
def linear(run: Pass, func: Any, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """One product of all rows: with weights of several clients, further axes of x would copy the weights. Where the
    gradient is taken around the cohort, weights are the first factor, so that their gradient has the layout of θ: to
    transpose it takes longer than the product."""
    around = in_cohort(weight) and differentiated_around(weight)
    if not around and (x.dim() <= 2 or not in_cohort(x, weight)):
        return F.linear(x, weight, bias)
    rows = x.reshape(-1, x.shape[-1])
    if around:
        out = (weight @ rows.mT).mT
        out = out if bias is None else out + bias
    else:
        out = F.linear(rows, weight, bias)
    return out.reshape(*x.shape[:-1], -1)


@handles(torch.matmul, Tensor.__matmul__)
def _matmul(run: Pass, func: Any, a: Tensor, b: Tensor) -> Tensor:
    """As in `linear`, for the product of a sequence with a matrix of weights."""
    if a.dim() <= 2 or b.dim() != 2 or not in_cohort(a, b):
        return torch.matmul(a, b)
    return torch.matmul(a.reshape(-1, a.shape[-1]), b).reshape(*a.shape[:-1], -1)


def _mask(q: Tensor, k: Tensor, attn_mask: Tensor | None, is_causal: bool) -> Tensor | None:
    """What is added to the scores: 0, or −∞ where a query must not see a key."""
    if is_causal:
        seen = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()
        attn_mask = seen if attn_mask is None else _additive(attn_mask, q) + _additive(seen, q)
    return None if attn_mask is None else _additive(attn_mask, q)


def _additive(mask: Tensor, like: Tensor) -> Tensor:
    if mask.dtype != torch.bool:
        return mask.to(like.dtype)
    return torch.zeros(mask.shape, dtype=like.dtype, device=like.device).masked_fill(~mask, float("-inf"))


def _attend(
    run: Pass, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, rate: float, scale: float | None
) -> tuple[Tensor, Tensor]:
    """(softmax(q kᵀ scale + mask) v, the probabilities before dropout)."""
    scores = (q * (q.shape[-1] ** -0.5 if scale is None else scale)) @ k.mT
    if mask is not None:
        scores = scores + mask
    shares = scores.softmax(-1)
    if mask is not None:
        shares = shares.masked_fill((mask == float("-inf")).all(-1, keepdim=True), 0.0)  # a query that sees no key
    kept = dropped(run, shares, rate) if rate else shares
    return kept @ v, shares


@handles(F.scaled_dot_product_attention)
def _attention(
    run: Pass,
    func: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if not dropout_p and not in_cohort(query, key, value, attn_mask):
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    if enable_gqa:
        times = query.shape[-3] // key.shape[-3]
        key, value = (t.repeat_interleave(times, -3) for t in (key, value))
    return _attend(run, query, key, value, _mask(query, key, attn_mask, is_causal), dropout_p, scale)[0]


@handles(F.multi_head_attention_forward)
def _multi_head(
    run: Pass,
    func: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Tensor | None,
    in_proj_bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    training: bool = True,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Tensor | None = None,
    k_proj_weight: Tensor | None = None,
    v_proj_weight: Tensor | None = None,
    static_k: Tensor | None = None,
    static_v: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """torch's own function, of inputs [length, batch, width] or [length, width]."""
    single = query.dim() == 2
    if single:
        query, key, value = (t.unsqueeze(1) for t in (query, key, value))
        key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
    length, batch, width = query.shape
    weights: Any = (q_proj_weight, k_proj_weight, v_proj_weight)
    if in_proj_weight is not None and not use_separate_proj_weight:
        weights = in_proj_weight.chunk(3)
    biases = (None,) * 3 if in_proj_bias is None else in_proj_bias.chunk(3)
    given = zip((query, key, value), weights, biases, strict=True)
    q, k, v = (linear(run, F.linear, t, w, b) for t, w, b in given)
    if bias_k is not None and bias_v is not None:
        k, v = torch.cat([k, bias_k.expand(1, batch, -1)]), torch.cat([v, bias_v.expand(1, batch, -1)])
    if add_zero_attn:
        k, v = (torch.cat([t, torch.zeros_like(t[:1])]) for t in (k, v))
    mask = _merged(attn_mask, key_padding_mask, q, batch, num_heads, extra=len(k) - len(key))
    q, k, v = (t.reshape(len(t), batch, num_heads, -1).permute(1, 2, 0, 3) for t in (q, k, v))
    rate = dropout_p if training else 0.0
    if need_weights or rate or in_cohort(q, k, v, mask):
        out, shares = _attend(run, q, k, v, mask, rate, None)
    else:
        out, shares = F.scaled_dot_product_attention(q, k, v, mask), q
    out = linear(run, F.linear, out.permute(2, 0, 1, 3).reshape(length, batch, width), out_proj_weight, out_proj_bias)
    seen = (shares.mean(1) if average_attn_weights else shares) if need_weights else None
    return (out.squeeze(1), None if seen is None else seen.squeeze(0)) if single else (out, seen)


def _merged(
    attn_mask: Tensor | None, padding: Tensor | None, like: Tensor, batch: int, heads: int, extra: int
) -> Tensor | None:
    """Both masks of `nn.MultiheadAttention` as one that is added; True hides a key there. `extra` keys are all seen."""
    found = None
    if attn_mask is not None:
        found = _additive(~attn_mask if attn_mask.dtype == torch.bool else attn_mask, like)
        found = found.view(batch, heads, *found.shape[-2:]) if found.dim() == 3 else found
    if padding is not None:
        hidden = _additive(~padding if padding.dtype == torch.bool else padding, like)[:, None, None, :]
        found = hidden if found is None else found + hidden
    return found if found is None or not extra else F.pad(found, (0, extra))
