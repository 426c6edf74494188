"""FedSEP with learned precisions and AdaGrad at the server: tags of made-up questions, by user."""

import torch

from consilience.data import Dataset, Federation
from consilience.data.loaders.stack_overflow import FIRST
from consilience.engines.simulator import Simulator
from consilience.models import bag_of_words
from consilience.optim import SGD
from consilience.recipes.base import seeded
from consilience.recipes.fedep import Benchmark
from consilience.server.optimizers import AdaGrad
from consilience.studies.setting import Setting
from consilience.tasks.supervised import MultiLabel

WORDS, TAGS, CLIENTS, QUESTIONS, TESTED, LENGTH = 600, 50, 400, 30, 4000, 20


def setting(seed: int, quick: bool) -> Setting:
    """Questions of users who care for a few tags each; the test set is of other users."""
    clients, tested = (20, 200) if quick else (CLIENTS, TESTED)
    made = torch.Generator().manual_seed(seed)
    said = torch.distributions.Dirichlet(torch.full((TAGS, WORDS), 0.02))
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        words = said.sample()
    owner = torch.arange(clients * QUESTIONS) // QUESTIONS
    train = _questions(clients, owner, words, made)
    test = _questions(tested, torch.arange(tested), words, made)
    network = seeded(seed, lambda: bag_of_words((LENGTH,), TAGS, WORDS))
    return Setting(MultiLabel(network), Federation.from_owner(train, owner), test)


def _questions(users: int, owner: torch.Tensor, words: torch.Tensor, made: torch.Generator) -> Dataset:
    """Questions with two of the five tags that their user cares for, and words of these tags; tag i is taken with a
    probability of about 1/(i + 5). A third of the words say nothing."""
    popular = (1 / (torch.arange(TAGS) + 5.0)).expand(users, -1)
    cares = torch.multinomial(popular, 5, generator=made)
    chosen = torch.rand(len(owner), 5, generator=made).argsort(1)[:, :2]
    tags = cares[owner].gather(1, chosen)
    y = torch.zeros(len(owner), TAGS, dtype=torch.uint8).scatter_(1, tags, 1)
    spoken = words[tags].mean(1) * 2 / 3 + 1 / (3 * WORDS)
    return Dataset(FIRST + torch.multinomial(spoken, LENGTH, replacement=True, generator=made), y, name="tags")


TAGS_BY_USER = Benchmark(
    name="fedep-tags", title="Made-up tags by user, AdaGrad at the server",
    text="Logistic regression from the frequencies of 600 words to 50 tags; 400 users of 30 questions who care for "
    "five tags each, 10 a round. Most users are silent on most tags and words.",
    setting=setting, train=SGD(lr=50.0, momentum=0.9, epochs=5, batch_size=30),
    server=AdaGrad(lr=2.0, eps=1e-5, eps_inside_root=True), rounds=300, switch=150, cohort=10, kappa=1.0, s0=1e-6,
    names="FedAvg FedSEP(I) FedSEP(M) FedSEP(L) FedSEP(V)", shrink=1e-6, laplace_batch=30, laplace_epochs=2,
    ngvi_epochs=5, ngvi_samples=2, metrics=("micro_f1", "macro_f1"), every=25, window=50,
    engine=Simulator(workers=1, threads=1),
)  # fmt: skip

RECIPE = TAGS_BY_USER.recipe(3)
