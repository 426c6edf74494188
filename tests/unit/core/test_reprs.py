"""Objects in a notebook: short, escaped, without tensors."""

from html.parser import HTMLParser
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import vmap

import consilience as cs
from consilience.core import guards
from consilience.studies.comparison import Comparison, Row
from support.scenarios import NAMES, blobs, linear

HERE = cs.Simulator(device="cpu", chunk=4, workers=1)
TRAIN = cs.SGD(lr=0.1, batch_size=4)
HOSTILE = "<script>alert('x')</script>"
SCORES = {"accuracy": 0.5, "nll": 1.25}


class Tags(HTMLParser):
    """Which tags a piece of HTML has; that they are all closed; and its text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.open: list[str] = []
        self.text = ""
        self.feed(html)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.names.add(tag)
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data + " "


def html(value: Any) -> Tags:
    return Tags(value._repr_html_())


def large() -> dict[str, Any]:
    """Objects with many clients, classes and parameters, all of whose names are long."""
    clients, classes = 300, 50
    y = torch.arange(600) % classes
    names = tuple(f"class {i} {'x' * 300}" for i in range(classes))
    data = cs.Dataset(torch.zeros(600, 3, 4), y, classes=names, name="n" * 500, note="o" * 5000)
    who = [f"client {i} {'y' * 300}" for i in range(clients)]
    federation = cs.Federation.from_owner(data, torch.arange(600) % clients, names=who, how="h" * 5000)
    task = cs.Classification(nn.Sequential(nn.Flatten(), *[nn.Linear(12, 12) for _ in range(40)]))
    scored = [{"name": name, "examples": 2, "metrics": SCORES} for name in who]
    return {
        "data": data,
        "federation": federation,
        "task": task,
        "evaluation": cs.evaluation.Evaluation(SCORES, SCORES, scored, None, None),
        "gaussian": cs.Gaussian(torch.ones(20, 100_000), torch.ones(20, 100_000)),
        "full": cs.Gaussian(torch.ones(300), torch.eye(300)),
        "point": cs.Point(torch.ones(100_000)),
        "mixture": cs.core.Mixture.of(torch.ones(9, 100_000)),
        "run": cs.runs.Run(
            cs.FedAvg(TRAIN), task, federation, None, None, history=[{"round": r} for r in range(1, 301)]
        ),  # type: ignore[arg-type]
    }


@pytest.mark.parametrize(("name", "value"), large().items())
def test_large_objects_have_short_reprs_without_tensors(name: str, value: Any) -> None:
    shown = repr(value)
    assert len(shown) < 500
    assert "\n" not in shown
    assert "tensor" not in shown
    if hasattr(value, "_repr_html_"):
        assert len(value._repr_html_()) < 2000
        html(value)


def test_beliefs_say_their_kind_their_size_and_their_scale() -> None:
    eta = torch.zeros(4)
    assert repr(cs.Gaussian(eta, torch.tensor([1.0, 2, 3, 40]))) == "Gaussian(4 parameters, diagonal precision 1 to 40)"
    assert repr(cs.Gaussian(eta, torch.tensor([2.5]))) == "Gaussian(4 parameters, scalar precision 2.5)"
    assert repr(cs.Gaussian(eta, 3 * torch.eye(4))) == "Gaussian(4 parameters, full precision 3)"
    sites = cs.Gaussian(torch.zeros(20, 1200), torch.full((20, 1), -1.0))
    assert repr(sites) == "Gaussian(20 × 1,200 parameters, scalar precision -1)"
    assert repr(cs.Point(torch.tensor([-1.0, 2]))) == "Point(2 parameters, -1 to 2)"
    assert repr(cs.core.Mixture.of(torch.zeros(4, 7))) == "Mixture(4 networks of 7 parameters, weights 0.25)"


def test_to_look_at_an_improper_gaussian_is_not_to_guard_it() -> None:
    with guards.watch() as acted:
        repr(cs.Gaussian(torch.zeros(4), -torch.ones(4)))
    assert not acted


def test_beliefs_without_values_still_have_a_repr() -> None:
    assert repr(cs.Point(torch.zeros(0))) == "Point(0 parameters, …)"
    assert repr(cs.Point(torch.zeros(3, device="meta"))) == "Point(3 parameters, …)"
    seen = []
    vmap(lambda theta: seen.append(repr(cs.Point(theta))) or theta)(torch.zeros(2, 3))  # type: ignore[func-returns-value]
    assert seen == ["Point(3 parameters, …)"]


def test_a_federation_says_who_is_in_it_and_few_clients_have_a_table_of_labels() -> None:
    _, federation = linear()
    assert repr(federation) == "Federation(plane: 5 clients, 28 examples)"
    assert all(name in html(federation).text for name in (*NAMES, "1 to 12 a client"))
    _, few, _ = blobs(clients=3)
    shown = html(few).text.split()
    counts = few.label_counts()
    assert counts is not None
    table = [str(n) for row in counts.tolist() for n in row]
    assert [word for word in shown[shown.index("blue") + 1 :] if word.isdigit()] == [
        cell for k in range(3) for cell in (str(k), *table[3 * k : 3 * k + 3])
    ]
    _, many, _ = blobs(clients=30)
    assert "blue" not in html(many).text


def test_data_sets_and_tasks_say_what_they_are() -> None:
    data = cs.Dataset(
        torch.zeros(7, 28, 28, dtype=torch.uint8), torch.zeros(7, dtype=torch.int64), classes=("a", "b"), name="d"
    )
    assert repr(data) == "Dataset(d: 7 examples, x 28 × 28 uint8, y int64, 2 classes)"
    assert "28 × 28 uint8" in html(data).text
    task, _, _ = blobs()
    assert repr(task) == "Classification(Sequential, 51 parameters)"
    assert "51 in 4 tensors" in html(task).text


def test_a_run_says_its_method_its_data_and_its_last_scores(tmp_path: Any) -> None:
    task, federation, test = blobs()
    options: dict[str, Any] = {"rounds": 3, "engine": HERE, "progress": False, "evaluate_every": 2}
    run = cs.fit(cs.FedAvg(TRAIN), task, federation, test=test, out=tmp_path / "run", **options)
    accuracy = run.history[-1]["eval"]["accuracy"]
    assert repr(run).startswith(f"Run(FedAvg on blobs: 3 rounds, accuracy {accuracy:.4f}"[:-2])
    assert repr(run).endswith(f"in {tmp_path / 'run'})")
    shown = html(run).text
    assert all(part in shown for part in ("FedAvg", "6 clients", "51 parameters", "scores, round 3", str(tmp_path)))
    silent = cs.fit(cs.FedAvg(TRAIN), task, federation, **options)
    assert repr(silent) == "Run(FedAvg on blobs: 3 rounds)"
    assert "scores" not in html(silent).text


def test_an_evaluation_is_a_table_of_scores() -> None:
    found = cs.evaluation.Evaluation(SCORES, {"accuracy": 0.75}, [], None, None)
    assert repr(found) == "Evaluation(accuracy 0.5000, NLL 1.250; marginal accuracy 0.7500)"
    assert html(found).text.split() == [
        *("accuracy", "NLL", "point", "model", "0.5000", "1.250", "posterior", "average", "0.7500", "–")
    ]


def test_a_comparison_is_its_table() -> None:
    rows = [Row("FedAvg", "accuracy", 0.9, 0.01, 3), Row("FedEP", "accuracy", 0.95, 0.02, 3, paper=0.96)]
    comparison = Comparison("Two methods", rows=rows)
    assert repr(comparison) == "Comparison(Two methods: FedAvg, FedEP; 0 stored runs)"
    assert all(part in html(comparison).text for part in ("Two methods", "0.950 ± 0.020 (paper 0.96"))
    assert "Nothing" in html(Comparison("Nothing")).text


def test_names_are_text_wherever_they_appear() -> None:
    y = torch.tensor([0, 1])
    data = cs.Dataset(torch.zeros(2, 3), y, classes=(HOSTILE, "b"), groups={HOSTILE: y}, name=HOSTILE, note=HOSTILE)
    federation = cs.Federation.from_owner(data, y, names=[HOSTILE, "b"], how=HOSTILE)
    task = cs.Classification(nn.Linear(3, 2))
    run = cs.runs.Run(
        cs.FedAvg(TRAIN), task, federation, None, None, [{"round": 1, "eval": {HOSTILE: 1.0}}], out=HOSTILE
    )  # type: ignore[arg-type]
    scored = cs.evaluation.Evaluation({HOSTILE: 1.0}, None, [], None, None)
    rows = [Row(HOSTILE, HOSTILE, 0.9, 0.01, 3)]
    for value in (data, federation, run, scored, Comparison(HOSTILE, rows=rows)):
        found = html(value)
        assert "script" not in found.names
        assert "<script" in found.text
