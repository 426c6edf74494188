"""FedJAX's federated averaging with its compiled loop over clients."""

import sys

import fedjax
import jax
import jax.numpy as jnp
from common import Job, Turns
from fedjax.algorithms import fed_avg


def convolved(x, weight, bias, border=0):
    out = jax.lax.conv_general_dilated(x, weight, (1, 1), [(border, border)] * 2)
    return jax.nn.relu(out + bias[:, None, None])


def pooled(x):
    return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 1, 2, 2), (1, 1, 2, 2), "VALID")


def logits(name, weights, x):
    """The network of PyTorch, whose weights are in PyTorch's order and layout."""
    pairs = list(zip(weights[::2], weights[1::2], strict=True))
    if name == "W2":
        x = pooled(convolved(convolved(x, *pairs[0]), *pairs[1]))
        pairs = pairs[2:]
    elif name == "W4":
        x = pooled(convolved(pooled(convolved(x, *pairs[0], border=2)), *pairs[1]))
        pairs = pairs[2:]
    x = x.reshape(x.shape[0], -1)
    for weight, bias in pairs[:-1]:
        x = jax.nn.relu(x @ weight.T + bias)
    return x @ pairs[-1][0].T + pairs[-1][1]


def main():
    job = Job.of(sys.argv[1])

    def loss(weights, batch, rng):
        chosen = jax.nn.log_softmax(logits(job.name, weights, batch["x"]))
        return -jnp.take_along_axis(chosen, batch["y"][:, None], 1).mean()

    method = fed_avg.federated_averaging(
        jax.grad(loss), fedjax.optimizers.sgd(job.lr), fedjax.optimizers.sgd(1.0),
        fedjax.ShuffleRepeatBatchHParams(batch_size=job.batch_size, num_epochs=1),
    )  # fmt: skip
    state = method.init([jnp.asarray(value) for value in job.initial])
    turns = Turns(lambda: state.params)
    turns.wait()
    made = {}
    for cohort in job.cohorts.tolist():
        for client in cohort:
            if client not in made:
                x, y = job.client(client)
                made[client] = fedjax.ClientDataset({"x": x, "y": y})
        rng = jax.random.PRNGKey(0)
        state, _ = method.apply(state, [(client, made[client], rng) for client in cohort])
        jax.block_until_ready(state.params)
        turns.done()


main()
