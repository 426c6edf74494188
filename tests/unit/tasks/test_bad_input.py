"""Inputs and modules that do not fit get one sentence with the way out, before the first round."""

import pytest
import torch
from torch import nn

import consilience as cs
from consilience import cli
from consilience.core.errors import DataError, TaskError

X, Y = torch.randn(6, 4), torch.arange(6) % 3


class One(nn.Module):
    """A linear layer; its output may be changed."""

    def __init__(self, change=lambda out: out):
        super().__init__()
        self.layer, self.change = nn.Linear(4, 3), change

    def forward(self, x, mask=None):
        return self.change(self.layer(x))


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x, z):
        return self.layer(x) + self.layer(z)


def words():
    return nn.Sequential(nn.Embedding(9, 4), nn.Flatten(), nn.Linear(16, 3))


def fitted(module, x, y=Y):
    data = cs.Dataset(x, y, name="ward 3")
    fed = cs.Federation.from_owner(data, torch.arange(len(data)) % 2)
    engine = cs.Simulator(device="cpu", chunk=2, workers=1)
    return cs.fit(cs.FedAvg(), cs.Classification(module), fed, rounds=1, engine=engine, progress=False)


IDS = torch.ones(6, 4, dtype=torch.int64)
FAR = torch.cat([IDS[:5], IDS[:1] * 9])
NAN = torch.full((6, 4), float("nan"))

INPUTS = {
    "unknown key": (One, {"x": X, "z": X}, "has the key 'z', and One.forward takes x, mask: rename the key or leave"),
    "missing key": (Two, {"x": X}, "Two.forward needs 'z', and x of ward 3 has the keys x: add the key"),
    "short tuple": (Two, (X,), "takes x, z, and x of ward 3 has 1 entry: make x a tuple, or a dict"),
    "long tuple": (Two, (X, X, X), "takes x, z, and x of ward 3 has 3 entries: make x a tuple"),
    "no tuple": (Two, X, "has 1 entry: make x a tuple"),
    "mask without an argument": (
        Two, (cs.Ragged(list(X), mask="m", lengths="n"),),
        "x of ward 3 with its masks and lengths has 3 entries",
    ),
    "integers to a linear layer": (One, IDS, "the module needs real ones: convert x by .float()"),
    "bytes to a linear layer": (One, IDS.byte(), "the module needs real ones: convert x by .float()"),
    "real numbers to an embedding": (words, X, "the module needs whole ones, as token ids are: convert x by .long()"),
    "ids that an embedding does not have": (words, IDS * 9, "an embedding needs more rows than its largest id"),
    "such an id in a later row": (words, FAR, "x has the number 9 in row 5, which the module cannot take (IndexError"),
    "negative ids": (words, torch.cat([IDS[:4], -IDS[:2]]), "x has the number -1 in row 4"),
    "an id in a row of its own length": (
        lambda: nn.Sequential(nn.Embedding(9, 3), nn.Flatten()),
        cs.Ragged([[1]] * 5 + [[12]]), "x has the number 12 in row 5",
    ),
    "another shape": (One, torch.randn(6, 5), "of shape (5,): make module(x[:2]) work first (RuntimeError: mat1 and"),
    "another number of axes": (
        lambda: nn.Sequential(nn.Conv2d(3, 2, 3), nn.Flatten(), nn.Linear(32, 3)), torch.randn(6, 6, 6, 3),
        "of shape (6, 6, 3): make module(x[:2]) work first",
    ),
    "nan in x": (One, NAN, "ward 3: x holds values that are not finite; fill or drop them first"),
    "nan in a mask": (One, {"x": X, "mask": NAN}, "ward 3: x.mask holds values that are not finite"),
    "a mask with other rows": (One, {"x": X, "mask": X[:5]}, "x.x has 6 rows but x.mask has 5"),
}  # fmt: skip


def sentence(error):
    assert "\n" not in str(error.value)
    assert "Traceback" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(("module", "x", "expected"), INPUTS.values(), ids=INPUTS.keys())
def test_inputs_that_do_not_fit_get_a_sentence(module, x, expected):
    with pytest.raises(DataError) as error:
        fitted(module(), x)
    assert expected in sentence(error)


OUTPUTS = {
    "text": (lambda out: "text", "it returns str: return the logits alone"),
    "None": (lambda out: None, "it returns NoneType: return the logits alone"),
    "a list": (lambda out: [out, out], "it returns list: return the logits alone"),
    "a dict": (lambda out: {"out": out}, "it returns dict: return the logits alone"),
    "a tuple": (lambda out: (out, out), "it returns tuple: return the logits alone"),
    "one number": (lambda out: out.sum(), "it returns a tensor of shape []"),
    "classes": (lambda out: out.argmax(1, keepdim=True).expand(-1, 3), "type torch.int64, which have no gradient"),
    "nan": (lambda out: out * float("nan"), "the module returns nan for the first examples, before any step"),
}


@pytest.mark.parametrize(("change", "expected"), OUTPUTS.values(), ids=OUTPUTS.keys())
def test_outputs_that_do_not_fit_get_a_sentence(change, expected):
    with pytest.raises(TaskError) as error:
        fitted(One(change), X)
    assert expected in sentence(error)


def test_lengths_that_do_not_fit_get_a_sentence():
    class Last(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x, lengths):
            return self.layer(x.gather(1, (lengths - 1).view(-1, 1, 1).expand(-1, 1, 4)).squeeze(1))

    with pytest.raises(DataError) as error:
        fitted(Last(), (torch.randn(6, 5, 4), torch.tensor([1, 2, 3, 4, 5, 9])))
    assert "ward 3: x.1 has the number 9 in row 5, which the module cannot take" in sentence(error)


OWN = """
import consilience as cs
import torch

def data():
    x, y = {"x": torch.randn(8, 4), "z": torch.randn(8, 4)}, torch.arange(8) % 2
    made = cs.Dataset(x, y, name="ward 3")
    return cs.Data(made, made)

class Module(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)

    def forward(self, x):
        return self.layer(x)

def model():
    return Module()
"""
CONFIG = """
[data]
name = "own.py:data"

[partition]
name = "iid"
clients = 2

[model]
name = "own.py:model"

[algorithm]
name = "FedAvg"

[run]
rounds = 1
"""


def test_a_config_gets_the_same_sentence(tmp_path, capsys, monkeypatch):
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "run.toml").write_text(CONFIG)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["consilience", "run", "run.toml", "--out", "out"])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 2
    said = capsys.readouterr().err
    assert "has the key 'z', and Module.forward takes x: rename the key or leave it out" in said
    assert "Traceback" not in said
