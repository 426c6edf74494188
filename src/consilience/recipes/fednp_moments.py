"""FedNP's inner step alone: how near the ways to a tilted Gaussian's moments come, and what they cost."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import torch
from torch import Tensor

from consilience.figures.panels import Curve, Panel, Panels
from consilience.inference.sigmoid_moments import WAYS, How, quadrature, sigmoid_moments
from consilience.metrics import spread
from consilience.recipes.base import Options, Recipe, finished
from consilience.studies.compare import Comparison, Row

EXACT = "exact"
TEXT = (
    "z ~ N(m, s) meets σ(f z): four ways to the mean and variance of what results, in float32, for f ~ U(−3, 3), "
    "m ~ N(0, 1), s ~ U(0.05, 3), and for a wider range, f ~ U(−6, 6), s ~ U(0.05, 10). “negative_share” is how often "
    "a variance is negative; errors are medians of the absolute differences from 4,001 trapezoids in float64. “ms” is "
    "the time of all cases of a seed at once, moments and gradients, the median of repeats. “printed” is the paper's "
    "closed form as it stands, “corrected” the same without its misprints, “derivative” takes both moments from one "
    "approximation of log Z. The paper's Table 6 compares updates within training on a GPU, 306 ms with its closed "
    "form and 639 ms by quadrature with 100 points; here the step is timed alone, on the CPU."
)


@dataclass(frozen=True)
class Span:
    """Where cases come from: |f| ≤ slope, s ≤ variance."""

    suffix: str
    slope: float
    variance: float

    def draw(self, seed: int, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """f, m and s in float64."""
        made = torch.Generator().manual_seed(seed)
        f, s = torch.rand(2, count, generator=made, dtype=torch.float64)
        m = torch.randn(count, generator=made, dtype=torch.float64)
        return self.slope * (2 * f - 1), m, 0.05 + (self.variance - 0.05) * s


SPANS = (Span("", 3.0, 3.0), Span(", wide", 6.0, 10.0))


def moments(how: How, f: Tensor, m: Tensor, s: Tensor) -> Tensor:
    """Mean and variance [2, cases], computed in the precision of training."""
    return torch.stack(sigmoid_moments(f.float(), m.float(), s.float(), how)).double()


def exact(f: Tensor, m: Tensor, s: Tensor) -> Tensor:
    """The same by brute force."""
    pull, lost = quadrature(f, m, s, nodes=4001, reach=20.0)
    return torch.stack([m + s * pull, s * (1 - lost)])


def milliseconds(how: How, f: Tensor, m: Tensor, s: Tensor, repeats: int) -> float:
    """Moments and their gradients in f, m and s; the median time, without the first."""
    inputs = f.float().requires_grad_(), m.float().requires_grad_(), s.float().requires_grad_()
    taken = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        mean, var = sigmoid_moments(*inputs, how)
        torch.autograd.grad((mean + var).sum(), inputs)
        taken.append(1000 * (time.perf_counter() - start))
    return statistics.median(taken[1:])


def run(options: Options) -> Comparison:
    """All ways on the same cases."""
    start = time.perf_counter()
    count, repeats = (500, 5) if options.quick else (2000, 30)
    rows: list[Row] = []
    for span in SPANS:
        cases = [span.draw(seed, count) for seed in range(options.seeds)]
        truth = [exact(*case) for case in cases]
        for method in WAYS:
            scores: dict[str, list[float]] = {"negative_share": [], "mean_error": [], "var_error": [], "ms": []}
            for seed, (case, wanted) in enumerate(zip(cases, truth, strict=True)):
                if options.announce is not None:
                    options.announce(method + span.suffix, seed)
                found = moments(method, *case)
                mean_error, var_error = (found - wanted).abs().median(1).values.tolist()
                scores["negative_share"].append(float((found[1] < 0).double().mean()))
                scores["mean_error"].append(mean_error)
                scores["var_error"].append(var_error)
                if not span.suffix:  # the range makes no difference to the time
                    scores["ms"].append(milliseconds(method, *case, repeats))
            rows += [
                Row(method, metric + span.suffix, *spread(values), len(values))
                for metric, values in scores.items()
                if values
            ]
    title = "The moments of a Gaussian times a sigmoid"
    return finished("fednp-moments", title, TEXT, options, rows, [figure(SPANS[1].draw(0, count))], start)


def figure(case: tuple[Tensor, Tensor, Tensor]) -> Panels:
    """The variance of one cavity as f grows, and errors by |f|."""
    f = torch.linspace(0.3, 6, 58, dtype=torch.float64)
    cavity = torch.full_like(f, -1.0), torch.full_like(f, 2.0)
    shown = {EXACT: exact(f, *cavity)} | {method: moments(method, f, *cavity) for method in WAYS}
    variances = [Curve(method, f.tolist(), found[1].tolist()) for method, found in shown.items()]
    edges = torch.linspace(0, 6, 13, dtype=torch.float64)
    middles, part = (edges[1:] + edges[:-1]) / 2, torch.bucketize(case[0].abs(), edges[1:-1])
    wanted = exact(*case)
    panels = [Panel("Variance", variances, x_label="f")]
    for index, title in enumerate(("Error of the mean", "Error of the variance")):
        curves = []
        for method in WAYS:
            error = (moments(method, *case)[index] - wanted[index]).abs()
            medians = [float(error[part == bin_].median()) for bin_ in range(len(middles))]
            curves.append(Curve(method, middles.tolist(), medians))
        panels.append(Panel(title, curves, x_label="|f|", log=True))
    caption = (
        "Left: the variance that is left of N(−1, 2) as f grows; below 0 there is no Gaussian. Centre and right: the "
        "median error by |f| over the wider range of cases."
    )
    return Panels("Four ways to two moments", caption, panels)


RECIPE = Recipe("fednp-moments", "FedNP's tilted moments: four ways, their errors and their cost", run)
