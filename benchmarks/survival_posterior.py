"""The reference posterior of a survival study: Cox's model stratified by hospital, sampled for long by NUTS.

    pip install -e '.[survival]' numpyro
    python benchmarks/survival_posterior.py         # minutes on a CPU

The data are the study `liver`: 349 patients of six hospitals. The density is the product of all hospitals' partial
likelihoods, with ties by Efron, and of the prior N(0, 1) of each coefficient. Mean, standard deviation and covariance
of the draws go to src/consilience/recipes/survival_posterior.json, unless the chains disagree or are too short, which
is judged as in `heart_posterior.py`.
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

from consilience.recipes.survival_setting import federation

CHAINS, WARMUP, DRAWS, SEED, STUDY = 4, 2000, 25_000, 0, "liver"
OUT = Path(__file__).parents[1] / "src" / "consilience" / "recipes" / "survival_posterior.json"


def design() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Features [N, P], the rows of the E events, and their weights of risk [E, N]: 1 for patients at risk in the same
    hospital, and 1 − r/d for the d events at the same time, of which an event is number r."""
    sites = federation(STUDY)
    pooled, site = sites.data[sites.order], sites.owner().numpy()
    x, (time, event) = pooled.x.numpy(), pooled.y.numpy().T
    rows, weights = np.flatnonzero(event > 0), []
    for i in rows:
        at_risk = ((site == site[i]) & (time >= time[i])).astype(float)
        tied = np.flatnonzero((site == site[i]) & (time == time[i]) & (event > 0))
        at_risk[tied] -= np.flatnonzero(tied == i)[0] / len(tied)
        weights.append(at_risk)
    return x, rows, np.stack(weights)


def model(x: jax.Array, rows: jax.Array, weights: jax.Array):
    theta = numpyro.sample("theta", dist.Normal(jnp.zeros(x.shape[1]), 1.0).to_event(1))
    eta = x @ theta
    numpyro.factor("partial likelihood", (eta[rows] - jnp.log(weights @ jnp.exp(eta))).sum())


def short(values: np.ndarray) -> list[float]:
    """Six significant digits."""
    return [float(f"{value:.6g}") for value in values]


def main():
    numpyro.enable_x64()
    mcmc = MCMC(
        NUTS(model, dense_mass=True),
        num_warmup=WARMUP,
        num_samples=DRAWS,
        num_chains=CHAINS,
        chain_method="sequential",
        progress_bar=False,
    )
    mcmc.run(jax.random.PRNGKey(SEED), *map(jnp.asarray, design()))
    draws = np.asarray(mcmc.get_samples(group_by_chain=True)["theta"])
    divergences = int(mcmc.get_extra_fields()["diverging"].sum())
    flat = draws.reshape(-1, draws.shape[-1])
    mean, covariance = flat.mean(0), np.cov(flat, rowvar=False)
    r_hat = float(split_gelman_rubin(draws).max())
    ess = float(min(effective_sample_size(draws).min(), effective_sample_size((draws - mean) ** 2).min()))
    print(f"r_hat {r_hat:.5f}, ess {ess:.0f}, {divergences} divergences")
    if not (r_hat < 1.005 and ess > 10_000 and divergences == 0):
        raise SystemExit("not converged: nothing written")
    lines = {
        "command": "python benchmarks/survival_posterior.py",
        "study": STUDY,
        "sampler": {"name": "numpyro NUTS", "version": numpyro.__version__},
        "chains": CHAINS,
        "warmup": WARMUP,
        "draws": DRAWS,
        "seed": SEED,
        "prior_precision": 1.0,
        "r_hat": round(r_hat, 6),
        "ess": round(ess),
        "features": list(federation(STUDY).data.features),
        "mean": short(mean),
        "sd": short(np.sqrt(np.diag(covariance))),
    }
    head = "".join(f"{json.dumps(key)}: {json.dumps(value)},\n" for key, value in lines.items())
    rows = ",\n".join(json.dumps(short(row)) for row in covariance)
    OUT.write_text(f'{{\n{head}"covariance": [\n{rows}\n]\n}}\n', encoding="utf-8")
    print(f"wrote {OUT}")


if __name__ == "__main__":
    main()
