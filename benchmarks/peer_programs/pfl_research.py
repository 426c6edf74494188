"""pfl-research's simulation: on a CPU in two processes, as its distributed runs are, on a GPU in one."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

PROCESSES = 2
DEVICE = json.loads((Path(sys.argv[1]) / "job.json").read_text())["device"]


def other_processes():
    """Start them once, from the first."""
    if DEVICE == "cuda" or "RANK" in os.environ:
        return
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    common = {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(PROCESSES),
        "LOCAL_WORLD_SIZE": str(PROCESSES), "TORCHELASTIC_RUN_ID": "peers", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    os.environ |= common
    for rank in range(1, PROCESSES):
        environment = os.environ | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        subprocess.Popen([sys.executable, *sys.argv], env=environment, stdin=subprocess.DEVNULL)
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0"}


other_processes()

import networks  # noqa: E402
import torch  # noqa: E402
from common import Job, Turns  # noqa: E402
from pfl.aggregate.simulate import SimulatedBackend  # noqa: E402
from pfl.algorithm.base import NNAlgorithmParams  # noqa: E402
from pfl.algorithm.federated_averaging import FederatedAveraging  # noqa: E402
from pfl.callback.base import TrainingProcessCallback  # noqa: E402
from pfl.data.federated_dataset import FederatedDataset  # noqa: E402
from pfl.data.pytorch import PyTorchTensorDataset  # noqa: E402
from pfl.hyperparam.base import NNEvalHyperParams, NNTrainHyperParams  # noqa: E402
from pfl.metrics import Metrics  # noqa: E402
from pfl.model.pytorch import PyTorchModel  # noqa: E402
from torch.nn.functional import cross_entropy  # noqa: E402


class Network(torch.nn.Module):
    def __init__(self, module):
        super().__init__()
        self.inner = module

    def forward(self, x):
        return self.inner(x)

    def loss(self, x, y, eval=False):
        return cross_entropy(self.inner(x), y)

    def metrics(self, x, y, eval=False):
        return {}


class Alternate(TrainingProcessCallback):
    """All processes wait for the first one's turn, else the others would compute in those of other programs."""

    def __init__(self, turns):
        self.turns = turns

    def on_train_begin(self, *, model):
        if self.turns is not None:
            self.turns.wait()
        together()
        return Metrics()

    def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):
        networks.finish(DEVICE)
        if self.turns is not None:
            self.turns.done()
        together()
        return False, Metrics()


def together():
    """Wait for the other processes, if there are any."""
    if torch.distributed.is_initialized():
        torch.distributed.barrier()


def main():
    job = Job.of(sys.argv[1])
    torch.set_num_threads(1)
    module = networks.load(networks.network(job.name), job.initial)
    made = {}

    def dataset(client):
        if client not in made:
            tensors = (torch.from_numpy(array).to(DEVICE) for array in job.client(client))
            made[client] = PyTorchTensorDataset(tuple(tensors))
        return made[client]

    upcoming = iter(job.cohorts.reshape(-1).tolist())
    federated = FederatedDataset(dataset, lambda: next(upcoming))
    model = PyTorchModel(Network(module), torch.optim.SGD, torch.optim.SGD(module.parameters(), lr=1.0))
    turns = Turns(lambda: networks.weights(module)) if os.environ.get("RANK", "0") == "0" else None
    cohort = job.cohorts.shape[1]
    FederatedAveraging().run(
        NNAlgorithmParams(len(job.cohorts), evaluation_frequency=10**9, train_cohort_size=cohort, val_cohort_size=0),
        SimulatedBackend(training_data=federated, val_data=federated),
        model,
        NNTrainHyperParams(local_num_epochs=1, local_learning_rate=job.lr, local_batch_size=job.batch_size),
        NNEvalHyperParams(local_batch_size=None),
        [Alternate(turns)],
        send_metrics_to_platform=False,
    )


main()
