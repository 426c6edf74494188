"""The pictures of concepts.md, computed with the library: python scripts/pictures.py [folder]."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from torch import Tensor, nn

import consilience as cs
from consilience.metrics import reliability
from consilience.models import mlp

# Mid-tones: all have a contrast of 3 or more to white and to the dark theme's slate.
INK, BLUE, ORANGE, GREEN, PURPLE = "#808080", "#3987d8", "#d9762a", "#2f9e63", "#a06cd5"
STYLE = {
    "axes.edgecolor": INK, "axes.labelcolor": INK, "axes.spines.right": False, "axes.spines.top": False,
    "axes.titlecolor": INK, "axes.titlesize": 10, "figure.facecolor": "none", "axes.facecolor": "none",
    "font.size": 10, "legend.frameon": False, "legend.labelcolor": INK, "savefig.facecolor": "none",
    "svg.fonttype": "none", "svg.hashsalt": "consilience", "text.color": INK, "xtick.color": INK, "ytick.color": INK,
}  # fmt: skip
GRID = torch.linspace(-1.5, 4.5, 201)
NAMES = ("north", "south", "west")
METHOD = cs.FedEP(cs.inference.Newton(), damping=1.0, prior=0.5)
ENGINE = cs.Simulator(device="cpu", chunk=20, workers=1)


def one_weight() -> tuple[cs.MultiLabel, cs.Federation]:
    """Three clients that learn p(y = 1 | x) = σ(θ x): one weight, so that a density over it can be drawn."""
    generator = torch.Generator().manual_seed(3)
    silos = {}
    for name, count, centre in zip(NAMES, (14, 10, 6), (0.6, -0.5, 1.2), strict=True):
        x = centre + torch.randn(count, 1, generator=generator)
        y = (torch.rand(count, 1, generator=generator) < (1.4 * x).sigmoid()).float()
        silos[name] = cs.Dataset(x, y, name=name)
    module = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(module.weight)
    return cs.MultiLabel(module), cs.Federation.from_silos(silos)


def likelihood(task: cs.Task, data: cs.Dataset) -> Tensor:
    """p(D|θ) for every θ of the grid."""
    everything = torch.arange(len(data))
    x, y = data.inputs(everything), data.targets(everything)
    log = torch.stack([-task.likelihood.losses(task.apply_one(theta.view(1), x), y).sum() for theta in GRID])
    return (log - log.max()).exp()


def normalised(density: Tensor) -> Tensor:
    """The same with an integral of 1."""
    return density / torch.trapezoid(density, GRID)


def curve(q: cs.Gaussian) -> Tensor:
    """The density of a proper factor on the grid."""
    return q.log_prob(GRID.unsqueeze(1)).exp().detach()


def factor(axes: Axes, density: Tensor, colour: str, label: str, dashed: bool = False, fill: bool = False) -> None:
    """A line, or a line over a shade."""
    axes.plot(GRID, density, color=colour, label=label, linestyle="--" if dashed else "-", linewidth=1.8)
    if fill:
        axes.fill_between(GRID, density, color=colour, alpha=0.18, linewidth=0)


def finished(axes: Axes, x: str = "weight θ", y: str = "density", title: str = "") -> None:
    """Labels that need no grid."""
    axes.set(xlabel=x, ylabel=y, title=title)
    axes.legend(fontsize=9, handlelength=1.6)


def sheet(columns: int = 1, width: float = 5.6, height: float = 2.7) -> tuple[Figure, list[Axes]]:
    """A figure with a row of axes."""
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, list(figure.subplots(1, columns, squeeze=False)[0])


def federation_picture() -> Figure:
    """Who holds what, at two strengths of skew, and who takes part in one round."""
    data = cs.load("digits").train
    figure, panels = sheet(2, 8.0, 3.3)
    for axes, alpha in zip(panels, (10.0, 0.1), strict=True):
        federation = cs.partition.dirichlet(data, clients=12, alpha=alpha, seed=1)
        counts = federation.label_counts()
        assert counts is not None
        chosen = set(torch.randperm(12, generator=torch.Generator().manual_seed(2))[:4].tolist())
        for colour, ids in ((BLUE, sorted(chosen)), (INK, sorted(set(range(12)) - chosen))):
            held = [(client, digit, int(counts[client, digit])) for client in ids for digit in range(10)]
            x, y, size = zip(*(dot for dot in held if dot[2]), strict=True)
            axes.scatter(x, y, [1.3 * s for s in size], colour, alpha=0.75, linewidths=0)
        axes.set(xlabel="client", ylabel="digit", title=f"Dirichlet, α = {alpha:g}", yticks=range(10))
        axes.set(xticks=range(0, 12, 2), xlim=(-0.8, 11.8), ylim=(-0.8, 9.8))
    handles = [Line2D([], [], color=c, marker="o", linestyle="", alpha=0.75) for c in (BLUE, INK)]
    figure.legend(handles, ["in this round's cohort", "not in it"], loc="outside lower center", ncols=2, fontsize=9)
    return figure


def belief_pictures() -> dict[str, Figure]:
    """One step of EP on one weight: cavity, tilted, site and fuse; then damping, and what predictions make of it."""
    task, federation = one_weight()
    run = cs.fit(METHOD, task, federation, rounds=1, engine=ENGINE, progress=False)
    q, sites = run.posterior, run.states.gather(torch.arange(3)).factor
    assert isinstance(q, cs.Gaussian)
    client = 2
    old = cs.Gaussian(sites.eta[client], sites.lam[client])
    cavity = q / old
    cohort = cs.data.Cohort(federation, torch.tensor([client]), round=2, round_size=3, seed=0)
    found = METHOD.infer(task, cs.Gaussian(cavity.eta.view(1, 1), cavity.lam.view(1, 1, 1)), q.mean, cohort)
    tilted = cs.Gaussian(found.eta[0], found.lam[0])
    seen = likelihood(task, federation.client(client))
    site = tilted / cavity
    fused = cavity * site
    everyone = likelihood(task, federation.data) * curve(METHOD.before(q.eta))

    pictures = {}
    figure, (axes,) = sheet()
    for number, (name, colour) in enumerate(zip(NAMES, (ORANGE, GREEN, PURPLE), strict=True)):
        factor(axes, curve(cs.Gaussian(sites.eta[number], sites.lam[number])), colour, f"site of {name}")
    factor(axes, curve(q), BLUE, "global belief q: prior × sites", fill=True)
    finished(axes)
    pictures["factors"] = figure

    figure, (axes,) = sheet()
    factor(axes, curve(q), BLUE, "q: everybody", fill=True)
    factor(axes, curve(old), PURPLE, "what west put in")
    factor(axes, curve(cavity), ORANGE, "cavity: q without it")
    finished(axes)
    pictures["cavity"] = figure

    figure, (axes,) = sheet()
    factor(axes, curve(cavity), ORANGE, "cavity")
    factor(axes, normalised(seen), INK, "what west's data say", dashed=True)
    factor(axes, normalised(seen * curve(cavity)), GREEN, "their product", fill=True)
    factor(axes, curve(tilted), PURPLE, "tilted: the Gaussian for it", dashed=True)
    finished(axes)
    pictures["tilted"] = figure

    figure, (axes,) = sheet()
    factor(axes, normalised(seen), INK, "what west's data say", dashed=True)
    factor(axes, curve(old), ORANGE, "west's site, before")
    factor(axes, curve(site), PURPLE, "west's site, after: tilted / cavity", fill=True)
    finished(axes)
    pictures["site"] = figure

    figure, (axes,) = sheet()
    factor(axes, curve(q), INK, "q, before", dashed=True)
    factor(axes, curve(fused), BLUE, "q, after: cavity × new site", fill=True)
    factor(axes, normalised(everyone), ORANGE, "exact posterior of all data", dashed=True)
    finished(axes)
    pictures["fuse"] = figure

    figure, (axes,) = sheet()
    start, far = curve(METHOD.before(q.eta)), cs.Gaussian(found.eta[0] * 0, METHOD.before(q.eta).lam)
    factor(axes, start, INK, "q", dashed=True)
    for strength, colour in ((0.25, ORANGE), (0.5, GREEN), (1.0, BLUE)):
        factor(axes, curve(far * (q / far) ** strength), colour, f"δ = {strength:g}")
    finished(axes)
    pictures["damping"] = figure
    pictures["marginal"] = marginal_picture(task, federation)
    return pictures


def marginal_picture(task: cs.Task, federation: cs.Federation) -> Figure:
    """Predictions of the mean weight, of draws, and of their average, after six examples."""
    alone = cs.Federation.from_silos({"west": federation.client(2)})
    run = cs.fit(METHOD, task, alone, rounds=2, engine=ENGINE, progress=False)
    assert isinstance(run.posterior, cs.Gaussian)
    x = torch.linspace(-5, 5, 121).unsqueeze(1)
    figure, (axes,) = sheet()
    for number, theta in enumerate(run.posterior.sample(12)):
        label = "draws" if not number else None
        axes.plot(x, run.task.predict(theta, x), color=INK, linewidth=0.7, alpha=0.7, label=label)
    axes.plot(x, run.predict(x, point=True), color=ORANGE, linewidth=2, label="point: the mean weight")
    axes.plot(x, run.predict(x, samples=1000), color=BLUE, linewidth=2, label="marginal: average over draws")
    finished(axes, "x", "p(y = 1 | x)")
    return figure


def calibration_picture() -> Figure:
    """The same network after enough and after too much training on a few digits with wrong labels among them."""
    data = cs.load("digits")
    generator = torch.Generator().manual_seed(0)
    few = data.train[torch.randperm(len(data.train), generator=generator)[:300]]
    wrong = torch.rand(len(few), generator=generator) < 0.25
    few.y[wrong] = torch.randint(10, (int(wrong.sum()),), generator=generator)
    federation = cs.partition.iid(few, clients=3)
    torch.manual_seed(0)
    task = cs.Classification(mlp((1, 8, 8), 10, hidden=[64]))
    figure, panels = sheet(2, 8.0, 3.2)
    for axes, rounds in zip(panels, (8, 250), strict=True):
        method = cs.FedAvg(cs.SGD(lr=0.1, epochs=2))
        run = cs.fit(method, task, federation, rounds=rounds, engine=ENGINE, progress=False)
        prediction = run.predict(data.test.inputs(torch.arange(len(data.test))), point=True)
        bins(axes, prediction, data.test.y)
        scores = run.evaluate(data.test).point
        verdict = "too sure" if prediction.amax(1).mean() > scores["accuracy"] else "too modest"
        title = f"{rounds} rounds: {verdict}, accuracy {scores['accuracy']:.2f}, ECE {scores['ece']:.2f}"
        finished(axes, "confidence", "share that is right", title)
    return figure


def bins(axes: Axes, prediction: Tensor, y: Tensor) -> None:
    """A reliability diagram: accuracy by confidence, with the number of predictions as opacity."""
    found = reliability(prediction, y)
    width = 1 / len(found.count)
    most = max(found.count)
    for number, (count, accuracy) in enumerate(zip(found.count, found.accuracy, strict=True)):
        if count:
            shade = 0.25 + 0.6 * (count / most) ** 0.5
            axes.bar((number + 0.5) * width, accuracy, 0.9 * width, color=BLUE, alpha=shade, linewidth=0)
    axes.plot([0, 1], [0, 1], color=ORANGE, linestyle="--", label="calibrated")
    axes.set(xlim=(0, 1), ylim=(0, 1.02))


def main(arguments: Sequence[str]) -> None:
    """Draw all of them."""
    folder = Path(arguments[0]) if arguments else Path(__file__).parents[1] / "docs" / "images"
    with mpl.rc_context(STYLE):
        pictures = {"federation": federation_picture(), **belief_pictures(), "calibration": calibration_picture()}
        for name, figure in pictures.items():
            figure.savefig(folder / f"concept-{name}.svg", metadata={"Date": None, "Creator": None})
            print(folder / f"concept-{name}.svg")


if __name__ == "__main__":
    main(sys.argv[1:])
