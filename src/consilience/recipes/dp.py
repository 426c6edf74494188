"""The cost of privacy: accuracy on MNIST against ε, at 6,000 clients of ten images each."""

from consilience.algorithms import Algorithm, FedAvg, Private
from consilience.data import load, partition
from consilience.engines.simulator import Simulator
from consilience.models import mlp
from consilience.optim import SGD
from consilience.recipes.base import Options, Recipe, compared, seeded
from consilience.studies import Comparison, Setting
from consilience.tasks.supervised import Classification

NAME, TITLE = "dp-mnist", "MNIST at 6,000 clients with differential privacy"
TEXT = (
    "6,000 clients hold ten images each, 300 take part in each of 100 rounds; an MLP with 32 hidden units. “clipped” "
    "bounds each client's update and adds no noise. ε protects clients, not single images, at δ = 1e-5, for secret "
    "sampling of the clients of a round. One clip for all levels of noise was chosen once on images held out of the "
    "training data."
)
NOISE = (0.5, 1.0, 2.0, 4.0, 8.0)
CLIP = 0.5


def methods() -> dict[str, Algorithm]:
    """FedAvg, clipped FedAvg, and clipped FedAvg with growing noise."""
    plain = FedAvg(SGD(lr=0.3, epochs=2, batch_size=10))
    levels = {"clipped": 0.0} | {f"noise {noise:g}": noise for noise in NOISE}
    private = {
        name: Private(plain, CLIP, noise=noise, noise_from="seed", sampling="secret") for name, noise in levels.items()
    }
    return {"FedAvg": plain, **private}


def setting(seed: int, quick: bool) -> Setting:
    """An iid partition; the quick size has 60 clients."""
    data = load("mnist")
    train, test = (part[:: 100 if quick else 1] for part in (data.train, data.test))
    module = seeded(seed, lambda: mlp(train.x.shape[1:], 10, (32,)))
    return Setting(Classification(module), partition.iid(train, len(train) // 10, seed=seed), test)


def run(options: Options) -> Comparison:
    """Compare all levels of noise."""
    return compared(
        NAME, TITLE, TEXT, options, methods(), lambda seed: setting(seed, options.quick),
        rounds=3 if options.quick else 100, cohort=10 if options.quick else 300,
        evaluate_every=1 if options.quick else 10,
        engine=Simulator(chunk=10, workers=1, threads=1) if options.quick else Simulator(),
    )  # fmt: skip


RECIPE = Recipe(NAME, TITLE, run)
