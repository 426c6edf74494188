"""The reference posterior of heart disease: logistic regression on all 920 patients, sampled for long by NUTS.

    pip install -e . numpyro
    python benchmarks/heart_posterior.py           # a minute on a CPU

The parameters are 29 weights, then the intercept, as in torch's nn.Linear(29, 1); each has the prior N(0, 1).
Mean, standard deviation and covariance of the draws go to src/consilience/recipes/heart_posterior.json, unless the
chains disagree or are too short. `r_hat` is the largest of all parameters (split chains); `ess` is the smallest
effective number of draws of all parameters and their squared deviations, since both mean and variance are wanted.
"""

from __future__ import annotations

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.diagnostics import effective_sample_size, split_gelman_rubin
from numpyro.infer import MCMC, NUTS

from consilience.data import HEART_FEATURES, heart_disease

CHAINS, WARMUP, DRAWS, SEED = 4, 2000, 25_000, 0
OUT = Path(__file__).parents[1] / "src" / "consilience" / "recipes" / "heart_posterior.json"


def design() -> tuple[np.ndarray, np.ndarray]:
    """Features with a last column of ones [920, 30], and outcomes [920]."""
    data = heart_disease()
    x = data.x.double().numpy()
    return np.column_stack([x, np.ones(len(x))]), data.y.numpy()


def model(x: jax.Array, y: jax.Array):
    theta = numpyro.sample("theta", dist.Normal(jnp.zeros(x.shape[1]), 1.0).to_event(1))
    numpyro.sample("y", dist.Bernoulli(logits=x @ theta), obs=y)


def sample(seed: int) -> tuple[np.ndarray, int]:
    """Draws [chains, draws, 30], and how many of their trajectories diverged."""
    numpyro.enable_x64()
    x, y = design()
    # The codes of a one-hot column and the intercept are strongly correlated: adapt a full mass matrix.
    mcmc = MCMC(
        NUTS(model, dense_mass=True),
        num_warmup=WARMUP,
        num_samples=DRAWS,
        num_chains=CHAINS,
        chain_method="sequential",
        progress_bar=False,
    )
    mcmc.run(jax.random.PRNGKey(seed), jnp.asarray(x), jnp.asarray(y))
    draws = np.asarray(mcmc.get_samples(group_by_chain=True)["theta"])
    assert draws.dtype == np.float64
    return draws, int(mcmc.get_extra_fields()["diverging"].sum())


def short(values: np.ndarray) -> list[float]:
    """Six significant digits."""
    return [float(f"{value:.6g}") for value in values]


def main():
    draws, divergences = sample(SEED)
    flat = draws.reshape(-1, draws.shape[-1])
    mean, covariance = flat.mean(0), np.cov(flat, rowvar=False)
    r_hat = float(split_gelman_rubin(draws).max())
    ess = float(min(effective_sample_size(draws).min(), effective_sample_size((draws - mean) ** 2).min()))
    print(f"r_hat {r_hat:.5f}, ess {ess:.0f}, {divergences} divergences")
    if not (r_hat < 1.005 and ess > 10_000 and divergences == 0):
        raise SystemExit("not converged: nothing written")
    lines = {
        "command": "python benchmarks/heart_posterior.py",
        "sampler": {"name": "numpyro NUTS", "version": numpyro.__version__},
        "chains": CHAINS,
        "warmup": WARMUP,
        "draws": DRAWS,
        "seed": SEED,
        "prior_precision": 1.0,
        "r_hat": round(r_hat, 6),
        "ess": round(ess),
        "features": [*HEART_FEATURES, "intercept"],
        "mean": short(mean),
        "sd": short(np.sqrt(np.diag(covariance))),
    }
    head = "".join(f"{json.dumps(key)}: {json.dumps(value)},\n" for key, value in lines.items())
    rows = ",\n".join(json.dumps(short(row)) for row in covariance)
    OUT.write_text(f'{{\n{head}"covariance": [\n{rows}\n]\n}}\n', encoding="utf-8")
    print(f"wrote {OUT}")


if __name__ == "__main__":
    main()
