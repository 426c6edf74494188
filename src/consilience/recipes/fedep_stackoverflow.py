"""FedSEP at clients that rarely take part twice: the tags of Stack Overflow's questions, by user."""

import torch

from consilience.data import partition
from consilience.data.loaders import stackoverflow
from consilience.data.loaders.files import data_root
from consilience.models import bag_of_words
from consilience.optim import SGD
from consilience.recipes.base import published, seeded
from consilience.recipes.fedep import Benchmark
from consilience.server.optimizers import AdaGrad
from consilience.studies.setting import Setting
from consilience.tasks.supervised import MultiLabel

BATCH, WORDS, TAGS, TESTED = 100, 10_000, 500, 10_000
CLIENTS, ALL_CLIENTS = 10_000, 342_477

# The paper sums its loss over a batch and averages it over tags; ours is averaged over a batch and summed over tags, so
# the paper's is a fifth of ours. The mean follows the same path with a fifth of the paper's client lr (50 → 10) and
# precisions, which are in units of the loss, five times as large. AdaGrad steps the mean, in the same units for both.
LOSS = BATCH / TAGS

# c = 1e-8 per example makes the precision of q, c · N, about 1 in the paper's units. This recipe reads a part of the
# users, so each example counts for several; otherwise cavities would be too weak.
SHARE = CLIENTS / ALL_CLIENTS


def setting(seed: int, quick: bool) -> Setting:
    """Questions by user as bags of words; the test set is the same users' later questions."""
    clients, words, tags = (50, 200, 20) if quick else (CLIENTS, WORDS, TAGS)
    data = stackoverflow(data_root(None), clients=clients, words=words, tags=tags)
    every = max(1, len(data.test) // (200 if quick else TESTED))
    network = seeded(seed, lambda: bag_of_words(data.train.x.shape[1:], len(data.train.classes), words))
    return Setting(
        MultiLabel(network),
        partition.by_group(data.train, "client", minimum=1),
        data.test[torch.arange(0, len(data.test), every)[:TESTED]],
    )


PAPER = {
    "FedAvg": {"best precision": 0.752, "best recall": 0.139, "best micro_f1": 0.233, "best macro_f1": 0.080},
    "FedPA": {"best precision": 0.747, "best recall": 0.199, "best micro_f1": 0.308, "best macro_f1": 0.116},
    "FedSEP(I)": {"best recall": 0.251, "best micro_f1": 0.370, "best macro_f1": 0.136},
    "FedSEP(M)": {"best recall": 0.087, "best micro_f1": 0.143, "best macro_f1": 0.027},
    "FedSEP(L)": {"best recall": 0.259, "best micro_f1": 0.378, "best macro_f1": 0.140},
    "FedSEP(V)": {"best recall": 0.280, "best micro_f1": 0.398, "best macro_f1": 0.153},
}

STACK_OVERFLOW = Benchmark(
    name="fedep-stackoverflow", title="Stack Overflow's tags by user",
    text="Logistic regression from the frequencies of 10,000 words to 500 tags at 10,000 of the 342,477 users, 10 a "
    "round. A user rarely takes part twice, so only methods without client state make sense.",
    setting=setting, train=SGD(lr=50 * LOSS, momentum=0.9, epochs=5, batch_size=BATCH),
    server=AdaGrad(lr=5.0, eps=1e-5, eps_inside_root=True), rounds=1500, switch=800, cohort=10,
    kappa=1 / (LOSS * SHARE), s0=1e-8, names="FedAvg FedPA FedSEP(I) FedSEP(M) FedSEP(L) FedSEP(V)",
    shrink=1e-6, laplace_batch=BATCH, ngvi_epochs=10, ngvi_samples=10,
    metrics=("precision", "recall", "micro_f1", "macro_f1"), paper=published(PAPER),
)  # fmt: skip

RECIPE = STACK_OVERFLOW.recipe(1)
