"""A trained module as weights, as a graph, and as a folder of transformers."""

from __future__ import annotations

import copy
from importlib.util import find_spec

import pytest
import torch
from torch import nn

import consilience as cs
from consilience.core.errors import ConfigError, TaskError
from consilience.models import add_lora, transformer
from consilience.runs.export import export_module
from support.runs import TRAIN, fit
from support.scenarios import blobs


class Net(nn.Module):
    """A module with a buffer, a frozen parameter and dropout."""

    def __init__(self):
        super().__init__()
        self.frozen = nn.Linear(2, 2).requires_grad_(False)
        self.drop, self.out = nn.Dropout(0.5), nn.Linear(2, 3)
        self.register_buffer("scale", torch.tensor([0.1, 0.7]))

    def forward(self, x):
        return self.out(self.drop(self.frozen(x) * self.scale))


@pytest.fixture
def run():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = Net()
    _, train, _ = blobs()
    return fit(cs.FedAvg(TRAIN), cs.Classification(module), train, rounds=1)


@pytest.mark.parametrize("precision", ["float32", "float64"])
def test_the_weights_load_into_the_users_module(precision):
    torch.manual_seed(0)
    module, (_, train, test) = Net(), blobs()
    engine = cs.Simulator(device="cpu", chunk=4, workers=1, precision=precision)
    run = fit(cs.FedEP(cs.inference.Identity(TRAIN)), cs.Classification(module), train, rounds=1, engine=engine)
    mine = copy.deepcopy(module).eval()
    mine.load_state_dict(run.state_dict(), strict=True)
    assert all(value.dtype == torch.float32 for value in run.state_dict().values())
    x = test.data.x[:5]
    found = run.predict(x.to(run.task.dtype), point=True).float()
    torch.testing.assert_close(mine(x).softmax(-1), found, rtol=1e-5, atol=1e-5)
    assert torch.equal(run.state_dict()["frozen.weight"], module.frozen.weight)


@pytest.mark.parametrize("how", [{"bf16": True}, {"dtype": torch.float64}], ids=["bf16", "float64"])
def test_buffers_are_released_as_they_were(how):
    task = cs.Classification(Net())
    released = task.prepare(**how).release(task.initial())
    assert released.scale.dtype == torch.float32
    assert torch.equal(released.scale, task.module.scale)


def test_statistics_of_batchnorm_leave_a_run_in_the_modules_type():
    torch.manual_seed(0)
    module, (_, train, test) = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 3)), blobs()
    engine = cs.Simulator(device="cpu", chunk=4, workers=1, precision="float64")
    task = cs.Classification(module, batch_norm="averaged")
    run = fit(cs.FedAvg(TRAIN), task, train, rounds=1, engine=engine)
    mine = copy.deepcopy(module).eval()
    mine.load_state_dict(run.state_dict(), strict=True)
    assert run.state_dict()["1.running_mean"].dtype == torch.float32
    found = run.predict(test.data.x[:5].double(), point=True).float()
    torch.testing.assert_close(mine(test.data.x[:5]).softmax(-1), found, rtol=1e-5, atol=1e-5)


def test_a_graph_takes_batches_of_any_size(run, tmp_path):
    x = torch.randn(4, 2)
    path = run.export(tmp_path / "deep" / "model.pt2", x[:1])
    graph = torch.export.load(path).module()
    for rows in (1, 3, 4):
        torch.testing.assert_close(graph(x[:rows]), run.model(x[:rows]))


class Pair(nn.Module):
    def forward(self, left, right=None):
        return left if right is None else left - right


@pytest.mark.parametrize("as_names", [False, True])
def test_an_example_may_be_a_tuple_or_a_dict(tmp_path, as_names):
    left, right = torch.randn(3, 2), torch.randn(3, 2)
    example = {"right": right, "left": left} if as_names else (left, right)
    graph = torch.export.load(export_module(Pair(), tmp_path / "pair.pt2", example)).module()
    again = graph(left=left[:2], right=right[:2]) if as_names else graph(left[:2], right[:2])
    torch.testing.assert_close(again, left[:2] - right[:2])


def test_a_transformer_with_adapters_is_exported(tmp_path):
    module = add_lora(transformer((6,), 9, width=8, depth=1, heads=2), rank=2)
    ids = torch.randint(9, (2, 6))
    graph = torch.export.load(export_module(module, tmp_path / "text.pt2", ids)).module()
    torch.testing.assert_close(graph(ids.repeat(2, 1)), module(ids.repeat(2, 1)))


def test_what_cannot_be_exported_is_said_in_one_sentence(run, tmp_path):
    class Dependent(nn.Module):
        def forward(self, x):
            return x if x.sum() > 0 else -x

    with pytest.raises(ConfigError, match=r"must be \.pt2"):
        run.export(tmp_path / "model.bin", torch.randn(2, 2))
    with pytest.raises(ConfigError, match="must be a batch"):
        run.export(tmp_path / "model.pt2", [1.0, 2.0])
    with pytest.raises(TaskError, match="cannot make a graph of Dependent"):
        export_module(Dependent(), tmp_path / "model.pt2", torch.randn(2, 2))


@pytest.mark.skipif(find_spec("onnxscript") is not None, reason="the extra onnx is installed")
def test_without_its_packages_onnx_is_refused_in_one_sentence(run, tmp_path):
    with pytest.raises(ConfigError, match=r"pip install 'consilience\[onnx\]'"):
        run.export(tmp_path / "model.onnx", torch.randn(2, 2))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # the exporter's
def test_onnx_computes_what_the_module_does_for_batches_of_any_size(run, tmp_path):
    onnx = pytest.importorskip("onnx")
    reference = pytest.importorskip("onnx.reference")
    pytest.importorskip("onnxscript")
    model, x = onnx.load(run.export(tmp_path / "model.onnx", torch.randn(2, 2))), torch.randn(5, 2)
    found = reference.ReferenceEvaluator(model).run(None, {model.graph.input[0].name: x.numpy()})[0]
    torch.testing.assert_close(torch.from_numpy(found), run.model(x).detach())


def test_a_module_without_save_pretrained_is_refused(run, tmp_path):
    with pytest.raises(TaskError, match="Net has no save_pretrained"):
        run.save_pretrained(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("method", [cs.FedAvg(TRAIN), cs.algorithms.FedEx(TRAIN)], ids=["FedAvg", "FedEx"])
def test_a_peft_module_is_saved_by_itself(method, tmp_path):
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    base = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 3))
    module = peft.get_peft_model(copy.deepcopy(base), peft.LoraConfig(r=2, target_modules=["0"]))
    _, train, test = blobs()
    run = fit(method, cs.Classification(module), train, rounds=2)
    if run.network.main.offsets:
        with pytest.raises(TaskError, match="has no save_pretrained"):  # a merged Sequential is no peft module
            run.save_pretrained(tmp_path / "adapters")
        return
    run.save_pretrained(tmp_path / "adapters")
    loaded = peft.PeftModel.from_pretrained(base, tmp_path / "adapters")
    x = test.data.x[:5]
    torch.testing.assert_close(loaded(x), run.model(x), rtol=1e-5, atol=1e-6)
