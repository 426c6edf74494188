"""Attention for a cohort equals torch's own, client by client: values, gradients, masks, and every option."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.func import functional_call, grad, vmap

from consilience.compute import attention  # noqa: F401 - registers its handlers
from consilience.compute.passes import Pass

CLIENTS = 3
EXACT = {"rtol": 1e-10, "atol": 1e-12}


def cohort(fn, *own):
    """`fn` for several clients at once, in evaluation."""

    def one(*args):
        with Pass():
            return fn(*args)

    return vmap(one)(*own)


def draw(*shape):
    return torch.randn(CLIENTS, *shape, dtype=torch.float64)


MASKS = {
    "none": {},
    "causal": {"is_causal": True},
    "boolean": {"attn_mask": torch.tensor([[True, False, True], [True, True, True]])},
    "additive": {"attn_mask": torch.tensor([[0.0, -1.0, 2.0], [0.5, 0.0, -3.0]], dtype=torch.float64)},
    "scaled": {"scale": 0.3},
}


@pytest.mark.parametrize("options", MASKS.values(), ids=MASKS.keys())
def test_attention_of_a_cohort_is_that_of_its_clients(options):
    q, k, v = draw(2, 4, 2, 5), draw(2, 4, 3, 5), draw(2, 4, 3, 5)
    out = cohort(lambda *qkv: F.scaled_dot_product_attention(*qkv, **options), q, k, v)
    for i in range(CLIENTS):
        torch.testing.assert_close(out[i], F.scaled_dot_product_attention(q[i], k[i], v[i], **options), **EXACT)


def test_grouped_queries():
    q, k, v = draw(2, 4, 3, 5), draw(2, 2, 3, 5), draw(2, 2, 3, 5)
    out = cohort(lambda *qkv: F.scaled_dot_product_attention(*qkv, enable_gqa=True), q, k, v)
    torch.testing.assert_close(out[1], F.scaled_dot_product_attention(q[1], k[1], v[1], enable_gqa=True), **EXACT)


def test_a_query_that_sees_no_key_gives_zeros():
    q = draw(1, 1, 2, 4)
    seen = torch.tensor([[False, False], [True, False]])
    out = cohort(lambda t: F.scaled_dot_product_attention(t, t, t, seen), q)
    assert torch.equal(out[:, 0, 0, 0], torch.zeros(CLIENTS, 4, dtype=torch.float64))
    assert bool(out.isfinite().all())


OPTIONS = {
    "plain": ({}, {}),
    "no bias": ({"bias": False}, {}),
    "other widths": ({"kdim": 5, "vdim": 7}, {}),
    "further keys": ({"add_bias_kv": True, "add_zero_attn": True}, {}),
    "padding": ({}, {"key_padding_mask": torch.tensor([[False, False, True], [False, True, True]])}),
    "mask": ({}, {"attn_mask": torch.tensor([[False, True, False], [False, False, True]])}),
    "mask of heads": ({}, {"attn_mask": torch.randn(4, 2, 3, dtype=torch.float64)}),
    "no weights": ({}, {"need_weights": False}),
    "weights of heads": ({}, {"average_attn_weights": False}),
    "batch second": ({"batch_first": False}, {}),
}


@pytest.mark.parametrize(("layer", "call"), OPTIONS.values(), ids=OPTIONS.keys())
def test_multi_head_attention_of_a_cohort_is_that_of_its_clients(layer, call):
    torch.manual_seed(0)
    options = {"batch_first": True, "dtype": torch.float64} | layer
    modules = [nn.MultiheadAttention(8, 2, **options) for _ in range(CLIENTS)]
    weights = {n: torch.stack([m.get_parameter(n).detach() for m in modules]) for n, _ in modules[0].named_parameters()}
    shapes = [(2, 2, 8), (2, 3, options.get("kdim", 8)), (2, 3, options.get("vdim", 8))]
    if not options["batch_first"]:
        shapes = [(length, batch, width) for batch, length, width in shapes]
    inputs = [draw(*shape) for shape in shapes]

    def loss(w, *args):
        out, shares = functional_call(modules[0], w, args, call)
        return out.square().sum(), (out, out if shares is None else shares)

    found, (out, shares) = cohort(grad(loss, has_aux=True), weights, *inputs)
    for i, module in enumerate(modules):
        expected, seen = module(*(t[i] for t in inputs), **call)
        torch.testing.assert_close(out[i], expected, **EXACT)
        if seen is not None:
            torch.testing.assert_close(shares[i], seen, **EXACT)
        expected.square().sum().backward()
        for name, p in module.named_parameters():
            torch.testing.assert_close(found[name][i], p.grad, **EXACT)


def test_inputs_without_a_batch():
    module = nn.MultiheadAttention(8, 2, dtype=torch.float64)
    x = draw(4, 8)
    out, shares = cohort(lambda t: module(t, t, t), x)
    expected, seen = module(x[2], x[2], x[2])
    torch.testing.assert_close((out[2], shares[2]), (expected, seen), **EXACT)


def test_dropout_inside_attention_follows_the_key():
    module = nn.MultiheadAttention(8, 2, dropout=0.5, batch_first=True).train()
    x = torch.randn(2, 3, 8)

    def run(key):
        with Pass(torch.tensor(key)):
            return module(x, x, x)[0]

    assert torch.equal(run(1), run(1))
    assert not torch.equal(run(1), run(2))
    module.eval()
    torch.testing.assert_close(run(1), module(x, x, x)[0])


@pytest.mark.parametrize("product", [torch.matmul, lambda a, b: a @ b], ids=["function", "operator"])
def test_products_with_weights_are_those_of_clients(product):
    for shape in ((2, 3, 5), (3, 5), (5,)):
        x, w = draw(*shape), draw(5, 4)
        torch.testing.assert_close(cohort(product, x, w)[1], x[1] @ w[1], **EXACT)


def test_linear_layers_of_further_axes_are_one_product():
    x, w, b = draw(2, 3, 4, 5), draw(6, 5), draw(6)
    torch.testing.assert_close(cohort(F.linear, x, w, b)[1], F.linear(x[1], w[1], b[1]), **EXACT)
