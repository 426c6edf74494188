"""Your own module and one CSV file a silo: five methods, one table, one report page.

    python examples/own_silos.py [--quick] [--out runs/own-silos]

The three files in examples/silos are made up: 400 people at three places that differ in age and in how many are ill.
One has decimal commas, one lacks a column, and all have gaps, categories and numbers of patients.
"""

import argparse
from pathlib import Path

import torch
from torch import nn

import consilience as cs

SILOS = Path(__file__).parent / "silos"
TABLES = cs.Federation.from_tables({path.stem: path for path in sorted(SILOS.glob("*.csv"))})


class Net(nn.Module):
    """Any module without BatchNorm; a row of outputs for each row of inputs."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.hidden, self.out = nn.Linear(features, 16), nn.Linear(16, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.tanh(self.hidden(x)))


def setting(seed: int) -> cs.studies.Setting:  # another split and other initial weights for every seed
    train, test = TABLES.split(0.25, seed=seed)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return cs.studies.Setting(cs.Classification(Net(len(TABLES.data.features))), train, test)


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--quick", action="store_true", help="one seed, a few rounds")
parser.add_argument("--out", type=Path, default=Path("runs/own-silos"))
options = parser.parse_args()
sgd = cs.SGD(lr=0.3, epochs=5, batch_size=32)
ep = cs.FedEP(cs.inference.Identity(sgd, scale=0.5), damping=1.0)  # scale: the precision that an example brings
methods = [cs.FedAvg(sgd), cs.FedProx(sgd, mu=0.1), ep, cs.LocalOnly(sgd), cs.Pooled(sgd)]
size = {"seeds": 1, "rounds": 3} if options.quick else {"seeds": 3, "rounds": 12}
engine = cs.Simulator(device="cpu", chunk=3, workers=1)  # left out, the fastest way is found by timing
table = cs.compare(methods, setting, out=options.out, engine=engine, progress=False, **size)
table.print()
print(cs.write_report(options.out))
