"""Made-up runs and comparisons, and checks of the pages that show them."""

import re
from dataclasses import asdict
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import torch

from consilience import metrics
from consilience.evaluation.scores import Entropies
from consilience.figures.panels import Curve, Ellipse, Mark, Panel, Panels
from consilience.figures.pictures import Pictures
from consilience.report import write_report
from consilience.studies.comparison import Comparison, Row
from support.sealed import content, put, put_lines

HOSTILE = "<script>alert('x')</script>"


FEDEP = {"name": "FedEP", "infer": {"name": "Identity", "scale": 0.05}, "damping": None}


class Tags(HTMLParser):
    """Every tag with its attributes, and the text of every heading."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.headings: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1][0] == "h2" and data.strip():
            self.headings.append(data)


def evaluation(seed: int = 0, marginal: bool = True, names: list[str] | None = None) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    probs = torch.softmax(2 * torch.randn(200, 3, generator=generator), dim=1)
    y = torch.randint(3, (200,), generator=generator)
    entropies = Entropies(metrics.entropy(probs), probs.argmax(1) == y, 3, torch.rand(50, generator=generator))
    scored = {
        "metrics": metrics.classification(probs, y),
        "reliability": asdict(metrics.reliability(probs, y)),
        "entropy": entropies.to_json(),
    }
    clients = [{"name": name, "examples": 10, "metrics": scored["metrics"]} for name in names or ["0", "1"]]
    found = {"belief": "Gaussian", "point": scored, "marginal": scored if marginal else None, "clients": clients}
    return {**found, "outside": "letters", "posterior": posterior() if marginal else None}


def posterior(tensors: int = 2, of: int = 2) -> dict[str, Any]:
    """What `evaluation.marginals` writes."""
    bins = {name: [index % 5 for index in range(30)] for name in ("sd", "ratio")}
    return {
        "weights": 1234,
        "known": 0.25,
        "edges": {name: [-2 + 0.1 * index for index in range(31)] for name in bins},
        "all": bins,
        "tensors": [{"name": f"layer{i}.weight", "shape": [5, 2], **bins} for i in range(tensors)],
        "of_tensors": of,
        "examples": [{"name": f"layer0.weight[{i}, 0]", "mean": 0.1 * i, "sd": 0.01 * 3**i} for i in range(8)],
    }


def make_run(
    directory: Path,
    clients: int = 5,
    classes: int = 3,
    rounds: int = 4,
    algorithm: dict[str, Any] | None = None,
    **federation: Any,
) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    counts = [[(3 * k + 5 * c) % 11 + 1 for c in range(classes)] for k in range(clients)]
    fed = {
        "data": "mnist",
        "note": "",
        "how": "Dirichlet over labels, α = 0.1",
        "clients": clients,
        "examples": sum(map(sum, counts)),
        "names": None,
        "sizes": [sum(row) for row in counts],
        "classes": [str(c) for c in range(classes)],
        "label_counts": counts,
    }
    config = {
        "algorithm": algorithm or FEDEP,
        "method": "FedEP(I)",
        "task": {"kind": "classification", "parameters": 159010, "module": "Linear(in_features=3)"},
        "federation": fed | federation,
        "rounds": rounds,
        "cohort": 2,
        "seed": 0,
        "engine": "simulator: vectorised",
        "versions": {"consilience": "0.1.0", "torch": "2.13"},
    }
    put(directory / "run.json", config)
    lines = [
        {
            "round": at,
            "seconds": 0.5,
            "clients": 2,
            "loss": 1 / at,
            "bytes_down": 1_000_000,
            "bytes_up": 2_000_000,
            "rejected": [{"client": "Basel", "reason": "not finite"}] if at == 2 else [],
            "guards": {"precision floor": 3} if at > 2 else {},
            "eval": {"accuracy": 1 - 0.5 / at, "nll": 1 / at},
            "marginal": {"accuracy": 1 - 0.4 / at, "nll": 0.9 / at},
        }
        for at in range(1, rounds + 1)
    ]
    put_lines(directory, lines)
    return directory


def make_comparison(directory: Path) -> Path:
    runs, rows, per_client = [], [], []
    for index, method in enumerate(["FedAvg", "FedEP"]):
        for seed in range(2):
            place = make_run(directory / "runs" / f"{method} {seed}")
            put(place / "evaluation.json", evaluation(seed, marginal=method == "FedEP"))
            runs.append({"method": method, "seed": seed, "directory": f"runs/{method} {seed}"})
        values = {"accuracy": 0.9 + 0.01 * index, "nll": 0.5 - 0.1 * index, "ece": 0.02 + 0.01 * index, "width": 100}
        for metric, mean in values.items():
            paper = 0.925 if metric == "accuracy" and index else None
            rows.append({"method": method, "metric": metric, "mean": mean, "std": 0.003, "paper": paper, "n": 2})
        for client in ("Basel", "Zürich"):
            row = {"method": method, "client": client, "metric": "accuracy", "mean": 0.9, "std": 0.01}
            per_client.append(row)
    found = {
        "title": "Two methods",
        "text": "A paragraph.",
        "command": "consilience reproduce hospitals",
        "seconds": 41.0,
        "rows": rows,
        "per_client": per_client,
        "runs": runs,
    }
    put(directory / "comparison.json", found)
    return directory


def report(directory: Path) -> str:
    path = write_report(directory)
    assert path == directory / "report.html"
    assert not list(directory.glob("*.part"))
    return path.read_text(encoding="utf-8")


def check_page(page: str) -> None:
    """Self-contained, well formed enough, and without two elements of one id."""
    assert page.lstrip().startswith("<!doctype html>")
    parsed = Tags(page)
    for _, attributes in parsed.tags:
        for name in ("src", "href", "xlink:href"):
            value = attributes.get(name) or ""
            assert re.match(r"$|#|data:|\.{1,2}/", value), value
    assert not re.search(r"url\(\s*['\"]?(?!#)", page)
    assert "@import" not in page
    ids = [attributes["id"] for _, attributes in parsed.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    # Every reference inside a figure finds what it points to.
    assert set(re.findall(r'(?:url\(|href=")#([^)"]+)', page)) <= set(ids)


def make_figure(title: str = "Two beliefs", label: str = "product") -> Panels:
    nan = float("nan")
    plane = Panel(
        "In the plane",
        [Curve("FedEP", [0.0, 0.5, 1.0], [1.0, 0.2, 0.0])],
        [Mark("FedEP", 1.0, 0.0), Mark("FedAvg", nan, 0.0), Mark(label, 1.0, 0.0)],
        [
            Ellipse("client", [0.0, 0.0], [[1.0, 0.5], [0.5, 2.0]]),
            Ellipse("lost", [nan, 0.0], [[1.0, 0.0], [0.0, nan]]),
            Ellipse(label, [1.0, 0.0], [[1, 0], [0, 1]], True),
        ],
    )
    curves = [Curve("FedEP", [1, 2, 3], [1.0, 0.0, nan]), Curve("ADF", [1, 2], [1e-3, 1e-12]), Curve(label, [1], [0.5])]
    return Panels(title, "What it shows.", [plane, Panel("Error", curves, x_label="sweep", log=True)])


def with_figures(directory: Path, *figures: Panels | Pictures) -> Path:
    rows = [
        Row(method, "error", mean, 0.1, 200) for method, mean in {"FedAvg": 0.5, "FedEP": 1.1e-7, "ADF": 0.1}.items()
    ]
    Comparison("Beliefs", rows=rows, figures=list(figures), over="draws").save(directory)
    return directory


def section(page: str, title: str) -> str:
    (found,) = re.findall(rf"<section>\n<h2>{title}</h2>.*?</section>", page, re.DOTALL)
    return found


def rewrite(directory: Path, **changes: Any) -> Path:
    path = directory / "comparison.json"
    put(path, {**content(path), **changes})
    return directory


PAIRED = [
    {"method": "FedEP", "versus": "FedAvg", "metric": "accuracy", "difference": 0.02, "low": 0.01, "high": 0.03,
     "p": 0.0004, "n": 5},
    {"method": "FedEP", "versus": "FedAvg", "metric": "nll (marginal)", "difference": -0.1, "low": -0.3, "high": 0.1,
     "p": 0.25, "n": 5},
    {"method": "FedEP", "versus": "FedAvg", "metric": "ece", "difference": 0.1, "low": None, "high": None, "p": None,
     "n": 1},
    {"method": "FedEP", "versus": "FedAvg", "metric": "brier", "difference": None},
]  # fmt: skip
