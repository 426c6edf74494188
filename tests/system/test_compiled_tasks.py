"""Compiled code of tasks gives the results of plain code."""

import os
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap

import consilience as cs
from consilience.compute.products import MatmulConv2d, PixelGroupNorm, PixelMean, use_kernels, use_matmul_convolutions
from consilience.compute.vectorize import Cohorts
from consilience.core.records import rows
from consilience.models import resnet18
from consilience.tasks import fisher
from consilience.tasks.supervised import Classification
from support.games import batch_of, game, weights
from support.problems import EXACT, dropout_mlp, mlp, net, problem

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"


def penalised(task, theta, batch):
    """Features, dropout and data loss: all that compiled code must understand."""
    features, output = task.features_one(theta, batch.x, batch.key)
    return (task.likelihood.losses(output, batch.y) * batch.w).sum() / batch.w.sum() + features.square().mean()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # the compiler's own
@pytest.mark.parametrize("around", [True, False])  # gradients around vmap, as on a GPU, or inside
def test_compiled_cohorts_give_the_same_and_compile_once_a_size(around, monkeypatch):
    monkeypatch.setattr(Cohorts, "on_gpu", around)
    task, theta, batch = problem("classification", 8, (4,), dropout_mlp(), size=9, dtype=torch.float32)
    compiled = Classification(dropout_mlp()).prepare(compile=True, chunk=8)

    def check(clients):
        some = rows((theta, batch), slice(clients))
        for got, wanted in zip(compiled.gradient(penalised)(*some), task.gradient(penalised)(*some), strict=True):
            assert got.shape == wanted.shape
            torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-6)

    for clients in (1, 5):
        check(clients)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for clients in (1, 5, 6, 7, 8):  # 5 to 8 are filled up to the same 8
            check(clients)
    assert sorted(compiled.gradient(penalised).graphs) == [(1, 2), (8, 2)]


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # the compiler's own
@pytest.mark.parametrize("around", [True, False])
def test_compiled_games_give_the_same_gradient(around, caplog, monkeypatch):
    """The penalty is a gradient inside of a loss that a GPU differentiates around `vmap`, a CPU inside of it."""
    monkeypatch.setattr(Cohorts, "on_gpu", around)
    many = [batch_of(key=k) for k in range(3)]
    batch = cs.data.Batch(*(torch.stack([getattr(one, name) for one in many]) for name in ("x", "y", "w", "key")))
    found = []
    for compile in (False, True):
        task = game(dropout=0.4, generators=1, discriminators=1).prepare(dtype=torch.float64, compile=compile, chunk=3)
        found.append(task.gradient()(torch.stack([weights(task, k) for k in range(3)]), batch))
    for plain, compiled in zip(*found, strict=True):
        torch.testing.assert_close(plain, compiled, rtol=1e-9, atol=1e-12)
    assert "not used" not in caplog.text


@pytest.mark.parametrize(("module", "shape"), [(mlp, (4,)), (net, (1, 5, 5))])
def test_both_rules_of_fisher_information_can_be_compiled(module, shape):
    task, theta, batch = problem("classification", 3, shape, module())

    def information(theta, batch):
        return vmap(lambda *one: fisher.diagonal(task.networks, task.likelihood, *one))(theta, batch)

    compiled = torch.compile(information, backend="eager", fullgraph=True, dynamic=False)
    torch.testing.assert_close(compiled(theta, batch), task.fisher(theta, batch), **EXACT)
    with torch._dynamo.config.patch(error_on_recompile=True):
        compiled(theta, batch)


def penalty(module):
    """One client's gradient penalty, mean (‖∂D/∂x‖ − 1)², as a function of its weights."""

    def loss(values, x):
        g = grad(lambda at: functional_call(module, values, (at,)).sum())(x)
        return (g.flatten(1).norm(dim=1) - 1).square().mean()

    return loss


def test_a_gradient_penalty_with_products_is_one_graph():
    torch.manual_seed(0)
    layers = nn.Sequential(nn.ConvTranspose2d(2, 2, 4, 2, 1), nn.Tanh(), nn.Conv2d(2, 1, 5, 2, 2)).double()
    products = use_matmul_convolutions(layers)
    own = {name: torch.randn(3, *p.shape, dtype=p.dtype) for name, p in products.named_parameters()}
    cohort, x = vmap(grad(penalty(products))), torch.randn(3, 2, 2, 3, 3, dtype=torch.float64)
    with torch.no_grad():
        found = torch.compile(cohort, backend="aot_eager", fullgraph=True, dynamic=False)(own, x)
    torch.testing.assert_close(found, cohort(own, x), **EXACT)


def test_a_resnet_of_kernels_is_the_same_resnet():
    """As in compiled code for a GPU: convolutions that gather, norms and means over pixels; interpreted without one."""
    pytest.importorskip("triton", reason="Triton comes with torch for GPUs, and with the development tools")
    torch.manual_seed(0)
    plain = resnet18((3, 8, 8), 5, width=4).to(DEVICE)
    mine = use_kernels(use_matmul_convolutions(resnet18((3, 8, 8), 5, width=4).to(DEVICE)))
    mine.load_state_dict(plain.state_dict())
    kinds = {type(layer) for layer in mine.modules()}
    assert {PixelGroupNorm, PixelMean, MatmulConv2d} <= kinds
    assert not {nn.Conv2d, nn.GroupNorm, nn.AdaptiveAvgPool2d} & kinds
    x = torch.randn(2, 3, 8, 8, device=DEVICE)
    tolerance = {"rtol": 0.02, "atol": 0.02} if GPU else {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(mine(x), plain(x), **tolerance)


COMPILE = """
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from consilience.compute import kernels

KINDS = {torch.bfloat16: "*bf16", torch.float32: "*fp32", int: "i32", float: "fp32"}

def compile(kernel, grid, *args, num_warps, num_stages=3, **constants):
    names = kernel.arg_names
    kinds = dict.fromkeys(constants, "constexpr")
    kinds |= {name: KINDS[getattr(a, "dtype", type(a))] for name, a in zip(names, args)}
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if kinds[name][0] == "*"}
    source = ASTSource(kernel, {name: kinds[name] for name in names}, constants, aligned)
    options = {"num_warps": num_warps, "num_stages": num_stages}
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    print(kernel.__name__, made.metadata.shared)

kernels.convolution.launch = kernels.norm.launch = compile
images, few = (torch.empty(2, 2, 8, 8, c, dtype=torch.bfloat16) for c in (64, 3))
kernel, first = (torch.empty(2, 64, 3, 3, c, dtype=torch.bfloat16) for c in (64, 3))
weight = torch.empty(2, 64, dtype=torch.bfloat16)
kernels.convolve(images, kernel, 1, 1)
kernels.convolve(few, first, 1, 1)
kernels.convolve_images_grad(images, kernel, 16, 16, 2, 1)
kernels.convolve_kernels_grad(images, images, 3, 3, 1, 1)
kernels.convolve_kernels_grad(images, few, 3, 3, 1, 1)
_, means, scales = kernels.normalise(images, weight, weight, 2, 1e-5, True)
kernels.normalise_grad(images, images, weight, weight, means, scales, True)
"""


def test_kernels_can_be_compiled_for_an_h200(tmp_path):
    """Without a GPU: the compiler is stricter than the interpreter; a multiprocessor has 227 kB of shared memory."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    made = [line.split() for line in done.stdout.splitlines()]
    assert [name for name, _ in made] == ["_gather"] * 3 + ["_kernels_grad"] * 2 + ["_norm", "_norm_grad"]
    assert all(int(shared) <= 227 * 1024 for _, shared in made)
