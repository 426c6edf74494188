"""One exchange: clients train alone and send their networks once. What can a server make of them?

python examples/one_shot.py [--quick]
"""

import argparse

import torch

import consilience as cs
from consilience.models import mlp

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--quick", action="store_true", help="one seed, few epochs")
quick = parser.parse_args().quick
data = cs.load("digits")


def setting(seed: int) -> cs.studies.Setting:
    """Five clients with different labels."""
    federation = cs.partition.dirichlet(data.train, clients=5, alpha=0.5, seed=seed)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return cs.studies.Setting(cs.Classification(mlp((1, 8, 8), 10, hidden=[32])), federation, data.test)


def alone(run: cs.runs.Run, at: cs.studies.Setting) -> dict[str, float]:
    """How good the clients' own networks are on all digits, on average: the networks of an ensemble."""
    if not isinstance(run.posterior, cs.core.Mixture):
        return {}
    members = [cs.evaluate(run.network, cs.Point(theta), at.test) for theta in run.posterior.theta]
    return {"each alone": sum(one.point["accuracy"] for one in members) / len(members)}


train = cs.optim.AMSGrad(lr=0.01, epochs=2 if quick else 20, batch_size=32)
methods = {
    "FedAvg, one round": cs.FedAvg(train),  # averages weights that mean different things at different clients
    "PFNM": cs.PFNM(train),  # finds out which neurons are the same; one network, as wide as needed
    "Ensemble": cs.algorithms.Ensemble(train),  # keeps all five networks
    "Ensemble by class": cs.algorithms.Ensemble(train, by_class=True),  # and trusts each where it has data
}
engine = cs.Simulator(device="cpu", chunk=5, workers=1)
seeds = 1 if quick else 3
cs.compare(methods, setting, seeds=seeds, rounds=1, measure=alone, engine=engine, progress=False).print()
