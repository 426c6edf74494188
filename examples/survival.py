"""Cox's model at six hospitals: hazard ratios for all and for each hospital, survival curves, and a report.

    pip install 'consilience[survival]'
    python examples/survival.py [--quick] [--out runs/survival]

349 patients with primary biliary cirrhosis, of whom 61 died or needed a new liver (the PBC-3 trial).
"""

import argparse
from pathlib import Path

import torch
from torch import nn

import consilience as cs
from consilience.inference import Newton
from consilience.recipes.survival_setting import federation

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--quick", action="store_true", help="a few rounds")
parser.add_argument("--out", type=Path, default=Path("runs/survival"))
options = parser.parse_args()

hospitals = federation("liver")  # a client for each hospital; y has the time in days and whether there was an event
train, test = hospitals.split(0.25, seed=0)
model = nn.Linear(hospitals.data.x.shape[1], 1, bias=False)  # the baseline hazard takes the place of a constant
engine = cs.Simulator(precision="float64", workers=1)

# One posterior for all. Every hospital is a stratum with a baseline hazard of its own.
together = cs.fit(
    cs.FedEP(Newton(), damping=1.0, prior=1.0), cs.Cox(model), train, rounds=8, engine=engine, test=test, progress=False
)
print(together.coefficients())

# Coefficients of its own for every hospital, around a common mean.
method = cs.PartialPooling(Newton(), damping=1.0, prior=1.0, tau=0.3)
rounds = 10 if options.quick else 40
personal = cs.fit(
    method, cs.Cox(model), train, rounds=rounds, engine=engine, test=test, out=options.out, progress=False
)
print(personal.coefficients(client="2"))
print(personal.coefficients(newcomer=True))

# Survival of the first test patient of hospital 2 after one and two years, with a 95 % band.
curves = personal.survival(test.client("2").x[:1], client="2", times=[365.0, 730.0])
for year, at, low, high in zip((1, 2), curves.mean[0], curves.lower[0], curves.upper[0], strict=True):
    print(f"survival after {year} years: {at:.2f} ({low:.2f} to {high:.2f})")

# One baseline for all hospitals: hazards in intervals, whose likelihood adds up over patients.
times = torch.arange(1, 11) * 180.0
task = cs.DiscreteHazards(cs.models.ProportionalHazards(model.in_features, len(times)), times=times, link="cloglog")
common = cs.fit(
    cs.FedEP(Newton(), damping=1.0, prior=0.01), task, train, rounds=8, engine=engine, test=test, progress=False
)
print(common.coefficients())
print(cs.write_report(options.out))
