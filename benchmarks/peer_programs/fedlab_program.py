"""FedLab's standalone simulation."""

import sys
from unittest.mock import MagicMock

import networks
import torch
from common import Job, Turns

try:
    import torchvision  # noqa: F401
except (
    ImportError,
    RuntimeError,
):  # of another build than torch; FedLab imports it for data sets that have no part here
    for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
        del sys.modules[name]
    for name in ("torchvision", "torchvision.datasets", "torchvision.transforms", "torchvision.models"):
        sys.modules[name] = MagicMock()

from fedlab.contrib.algorithm.basic_client import SGDSerialClientTrainer
from fedlab.contrib.algorithm.basic_server import SyncServerHandler
from fedlab.core.standalone import StandalonePipeline


class Quiet:
    def info(self, *words):
        pass


class Data:
    """Loaders over tensors in memory, one for each client."""

    def __init__(self, job):
        self.job = job

    def get_dataloader(self, client, batch_size):
        x, y = self.job.client(client)
        data = torch.utils.data.TensorDataset(torch.from_numpy(x), torch.from_numpy(y))
        return torch.utils.data.DataLoader(data, batch_size=batch_size, shuffle=True)


class Server(SyncServerHandler):
    cohorts = iter(())

    def sample_clients(self):
        return next(self.cohorts).tolist()


class Pipeline(StandalonePipeline):
    turns = None

    def evaluate(self):
        self.turns.done()


def main():
    job = Job.of(sys.argv[1])
    module = networks.load(networks.network(job.name), job.initial)
    clients = len(job.order)
    trainer = SGDSerialClientTrainer(module, clients, logger=Quiet())
    trainer.setup_dataset(Data(job))
    trainer.setup_optim(1, job.batch_size, job.lr)
    server = Server(module, len(job.cohorts), job.cohorts.shape[1] / clients, logger=Quiet())
    server.cohorts = iter(job.cohorts)
    pipeline = Pipeline(server, trainer)
    pipeline.turns = Turns(lambda: networks.weights(server._model))
    pipeline.turns.wait()
    pipeline.main()


main()
