"""Should a hospital take part? Four real hospitals (UCI heart disease): together, joining, without labels, leaving."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from consilience.algorithms import Algorithm, FedEP, PartialPooling
from consilience.core.text import listing
from consilience.data import Federation
from consilience.figures.panels import Curve, Heat, Panel, Panels
from consilience.inference import Newton
from consilience.metrics import spread
from consilience.recipes.base import Options, Recipe, finished, rows_of
from consilience.recipes.personal_members import halves
from consilience.recipes.personal_setting import Table, hospitals, learn, names, scored, without
from consilience.runs import Run, changes
from consilience.runs.coefficients import Coefficients, to_json
from consilience.studies.comparison import Comparison
from consilience.studies.scores import paired_test

ALONE, SHARED, OWN = "alone", "one model for all", "partial pooling"
LABELLED = (5, 10, 20, 40)
SHOWN = 20  # labelled patients, in the finding
DRAWS = 100  # of a posterior, for predictions
OVERLAP = 1 / 3  # test patients for each training patient
TEXT = (
    "Cleveland, Hungary, Switzerland and Long Beach each hold the records of their own patients, with different "
    "shares of disease and different missing columns. The model is Bayesian logistic regression on 29 features. "
    "“alone”: every hospital by itself. “one model for all”: FedEP, which equals the posterior of all records in one "
    "place. “partial pooling”: every hospital has weights of its own around a common mean, and the federation learns "
    "how far they differ. Scores at home are those of a quarter of every hospital's patients; a seed is another random "
    "split. “m = 20”: three hospitals train with all their patients, and the fourth joins with 20 labelled patients of "
    "its own; half of its patients are the test data. “m = 0” is a hospital without labels. Coverage is that of sets "
    "that should contain the truth for 90 % of the patients; half of the patients train the model for them, a quarter "
    "calibrates. Coefficients are those of risk factors that are numbers (per 9 years of age, 18 mmHg, 50 mg/dl, 25 "
    "beats per minute) or yes or no, from all patients. Splits share patients, so standard deviations over splits say "
    "less than they would for new patients."
)


def methods() -> dict[str, tuple[Algorithm, int]]:
    """Methods and their rounds. PartialPooling whose common mean is fixed at 0 is every hospital alone."""
    own = PartialPooling(Newton(), damping=1.0, prior=1.0, tau=0.1**0.5, parts="all")
    return {
        ALONE: (PartialPooling(Newton(), damping=1.0, prior=1e10, tau=1.0, parts="all", learn=False), 2),
        SHARED: (FedEP(Newton(), damping=1.0, prior=1.0), 6),
        OWN: (own, 15),
    }


@dataclass
class Study:
    """The scores of all splits, and the change of every hospital's NLL where one is forgotten, by (left, hospital)."""

    options: Options
    table: Table = field(default_factory=Table)
    forgotten: dict[tuple[str, str], list[float]] = field(default_factory=dict)

    @property
    def labelled(self) -> tuple[int, ...]:
        """Numbers of labelled patients that a hospital joins with."""
        return (SHOWN,) if self.options.quick else LABELLED

    def split(self, seed: int) -> None:
        """All questions on one random split."""
        train, test = hospitals().split(0.25, seed=seed)
        for label, method in methods().items():
            self.options.tell(label, seed)
            run = learn(method, train)
            self.home(label, run, test)
            self.join(label, method, seed)
            if label == OWN:
                self.leave(run, test)
                self.sets(method, seed)

    def home(self, label: str, run: Run, test: Federation) -> None:
        """Every hospital's own patients, predicted by the posterior that it would use."""
        probs, y = [], []
        for name in names(test):
            own = test.client(name)
            probs.append(run.predict(own.x, client=name, samples=DRAWS))
            y.append(own.y)
            self.table.add(label, scored(probs[-1], own.y, "nll"), hospital=name)
        self.table.add(label, scored(torch.cat(probs), torch.cat(y), "accuracy", "nll", "auroc"))

    def join(self, label: str, method: tuple[Algorithm, int], seed: int) -> None:
        """Every hospital in turn joins the three others, or has no labels (m = 0)."""
        found: dict[int, list[dict[str, float]]] = {}
        for name in names(everyone := hospitals()):
            run = learn(method, without(everyone, name))
            test, pool = halves(everyone.client(name), seed)
            versions = {m: run.join(name, pool[:m]).predict(test.x, client=name, samples=DRAWS) for m in self.labelled}
            if label != ALONE:
                versions[0] = run.predict(test.x, samples=DRAWS)
            for m, probs in versions.items():
                found.setdefault(m, []).append(scored(probs, test.y, "nll"))
        for m in sorted(found):
            self.table.add_mean(label, found[m], f", m = {m}")

    def leave(self, run: Run, test: Federation) -> None:
        """Every hospital in turn is forgotten; the others refine their factors for two rounds."""
        for name in names(run.federation):
            for row in changes(run, run.forget(name, rounds=2), test).rows:
                change = row["after"]["nll"] - row["before"]["nll"]
                self.forgotten.setdefault((name, row["client"]), []).append(change)

    def sets(self, method: tuple[Algorithm, int], seed: int) -> None:
        """Coverage and size of 90 % sets at every hospital, and of naive sets, which take the model to be right."""
        rest, test = hospitals().split(0.25, seed=seed)
        train, held = rest.split(1 / 3, seed=seed)
        run = learn(method, train)
        run.calibrate(held, samples=DRAWS)
        found = run.evaluate(test, samples=DRAWS)
        assert found.marginal is not None
        for label, prefix in (("calibrated sets", ""), ("naive sets", "naive_")):
            for name, scores in ((None, found.marginal), *((c["name"], c["metrics"]) for c in found.clients)):
                shown = {metric: scores[prefix + metric] for metric in ("coverage", "set_size")}
                self.table.add(label, shown, hospital=name)

    @property
    def shown(self) -> dict[tuple[str, str], list[float]]:
        """The scores of the table. The figure has those of all numbers of labelled patients."""
        hidden = {f"nll, m = {m}" for m in self.labelled if m != SHOWN}
        return {key: values for key, values in self.table.scores.items() if key[1] not in hidden}

    @property
    def finding(self) -> str:
        """What was found, in words."""
        joins = {label: self.table.scores[label, f"nll, m = {SHOWN}"] for label in (ALONE, SHARED, OWN)}
        mean = {label: spread(values)[0] for label, values in joins.items()}
        wins = sum(
            own < min(alone, shared) for own, alone, shared in zip(joins[OWN], joins[ALONE], joins[SHARED], strict=True)
        )
        predicts = "predicts" if mean[OWN] < min(mean[ALONE], mean[SHARED]) else "does not predict"
        own = [entry for entry in self.at_home() if entry["method"] == OWN]
        cases, better = (sum(entry[key] for entry in own) for key in ("n", "better"))
        lose = [
            f"{entry['client']} (+{entry['difference']:.3f}, in {entry['n'] - entry['better']} of {entry['n']} splits)"
            for entry in own
            if entry["difference"] > 0
        ]
        return (
            f"A hospital that joins with {SHOWN} patients of its own {predicts} better with partial pooling (NLL "
            f"{mean[OWN]:.3f}) than alone ({mean[ALONE]:.3f}) and than with one model for all ({mean[SHARED]:.3f}), in "
            f"{wins} of {len(joins[OWN])} splits. At home, together is better than alone in {better} of {cases} cases "
            f"of a hospital and a split; on average it is worse for {listing(lose) if lose else 'no hospital'}."
        )

    def at_home(self) -> list[dict[str, Any]]:
        """Each method's NLL minus that of every hospital alone, with an interval over splits."""
        entries = []
        for name in names(hospitals()):
            alone = self.table.by_hospital[ALONE, name, "nll"]
            for label in (SHARED, OWN):
                pairs = list(zip(self.table.by_hospital[label, name, "nll"], alone, strict=True))
                found = paired_test(pairs, overlap=OVERLAP)
                better = sum(together < own for together, own in pairs)
                shown = {key: found[key] for key in ("difference", "low", "high", "n")}
                entries.append(
                    {"method": label, "versus": ALONE, "client": name, "metric": "nll", "better": better, **shown}
                )
        return entries

    def figures(self) -> list[Panels]:
        few = [0, *self.labelled]
        curves = []
        for label in (ALONE, SHARED, OWN):
            known = [m for m in few if (label, f"nll, m = {m}") in self.table.scores]
            found = [spread(self.table.scores[label, f"nll, m = {m}"]) for m in known]
            low, high = ([mean + sign * (sd or 0.0) for mean, sd in found] for sign in (-1, 1))
            curves.append(Curve(label, list(map(float, known)), [mean for mean, _ in found], low, high))
        joins = (
            "NLL at a hospital that joins the three others, over its number of labelled patients; a mean over the four "
            "hospitals. Bands are one standard deviation over splits. Without labels, partial pooling predicts with "
            "the belief about a new hospital."
        )
        everyone = names(hospitals())
        cells = [[float(round(1000 * spread(self.forgotten[left, name])[0])) for name in everyone] for left in everyone]
        leaves = (
            "The change of 1,000 times the NLL at each hospital (column) when a hospital (row) is forgotten, mean over "
            "splits. The hospital that was forgotten is predicted as a new one; above 0 is worse."
        )
        return [
            Panels("A hospital joins", joins, [Panel("NLL", curves, x_label="labelled patients of its own")]),
            Panels(
                "A hospital is forgotten",
                leaves,
                [Panel("change of the NLL × 1,000", heat=Heat(cells, everyone, everyone))],
            ),
        ]


def risk_factors(method: tuple[Algorithm, int]) -> list[Coefficients]:
    """The coefficients of the risk factors that are numbers or yes or no, for all hospitals together and for each, from
    all patients; the surest one first. A category's coefficient says nothing without that of another."""
    run = learn(method, hospitals())
    everyone = run.coefficients()
    rows = [row for row, name in enumerate(everyone.names) if "=" not in name and "missing" not in name]
    rows.sort(key=lambda row: -float(everyone.sign[row]))
    found = [everyone, *(run.coefficients(name) for name in names(hospitals()))]
    chosen = tuple(everyone.names[row] for row in rows)
    return [replace(one, names=chosen, mean=one.mean[rows], sd=one.sd[rows]) for one in found]


def run(options: Options) -> Comparison:
    """All questions on each split."""
    study, start = Study(options), time.perf_counter()
    for seed in range(options.seeds):
        study.split(seed)
    return finished(
        "hospitals", "Should a hospital take part?", TEXT, options, rows_of(study.shown), study.figures(), start,
        finding=study.finding, at_clients=study.at_home(), per_client=study.table.per_client(), over="splits",
        coefficients=to_json(risk_factors(methods()[OWN])),
    )  # fmt: skip


RECIPE = Recipe("hospitals", "Four real hospitals: what each of them gains", run, seeds=3, quick_seeds=1)
