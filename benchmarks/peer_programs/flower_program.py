"""Flower's simulation runtime with FedAvg: as many actors as cores, one core each. It draws the clients itself."""

import os
import sys

os.environ.setdefault("OMP_NUM_THREADS", "1")  # of the actors

import networks
import ray
import torch
from common import Job, Turns
from flwr.client import ClientApp, NumPyClient
from flwr.common import ndarrays_to_parameters, parameters_to_ndarrays
from flwr.server import ServerApp, ServerAppComponents, ServerConfig
from flwr.server.strategy import FedAvg
from flwr.simulation import run_simulation
from torch.nn.functional import cross_entropy

FOLDER = sys.argv[1]
LOADED = {}


def loaded(folder):
    """The job and a module, once in every actor."""
    if folder not in LOADED:
        torch.set_num_threads(1)
        job = Job.of(folder)
        LOADED[folder] = job, networks.network(job.name)
    return LOADED[folder]


class Client(NumPyClient):
    def __init__(self, folder, number):
        self.folder, self.number = folder, number

    def fit(self, parameters, config):
        job, module = loaded(self.folder)
        networks.load(module, parameters)
        optimizer = torch.optim.SGD(module.parameters(), job.lr)
        x, y = map(torch.from_numpy, job.client(self.number))
        for batch in torch.randperm(len(y)).split(job.batch_size):
            optimizer.zero_grad()
            cross_entropy(module(x[batch]), y[batch]).backward()
            optimizer.step()
        return networks.weights(module), len(y), {}


class Alternating(FedAvg):
    """FedAvg, which waits for its turn after every round."""

    latest, turns = None, None

    def evaluate(self, server_round, parameters):
        self.latest = parameters_to_ndarrays(parameters)
        if server_round:
            self.turns.done()
        else:
            self.turns.wait()


def main():
    job, folder = Job.of(FOLDER), FOLDER

    def client_fn(context):
        return Client(folder, int(context.node_config["partition-id"])).to_client()

    def server_fn(context):
        share = job.cohorts.shape[1] / len(job.order)
        strategy = Alternating(
            fraction_fit=share, fraction_evaluate=0.0, min_available_clients=len(job.order),
            initial_parameters=ndarrays_to_parameters(job.initial),
        )  # fmt: skip
        strategy.turns = Turns(lambda: strategy.latest, ray.shutdown)
        return ServerAppComponents(strategy=strategy, config=ServerConfig(num_rounds=len(job.cohorts)))

    run_simulation(
        ServerApp(server_fn=server_fn), ClientApp(client_fn=client_fn), num_supernodes=len(job.order),
        backend_config={
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0}, "init_args": {"num_cpus": os.cpu_count()},
        },
    )  # fmt: skip


main()
