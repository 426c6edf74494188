"""FedEx-LoRA: exact aggregation of low-rank adapters (Singhal et al., 2025)."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from consilience.algorithms.base import algorithm
from consilience.algorithms.shared import averaging
from consilience.algorithms.shared.averaging import Averaging
from consilience.core import Point, TaskError, Tree, Weighted, record
from consilience.core.records import static, to, tree_map
from consilience.data import Batch, Cohort, Info
from consilience.models.lora import adapters
from consilience.tasks.layout import MAIN
from consilience.tasks.task import Task


@record
class Residual:
    """What is added to the frozen weight [out, in] of every adapted layer. A layer is (the weight's name, where A and B
    begin in θ, the rank, the scaling s, whether the module stores the weight as [in, out])."""

    values: tuple[Tensor, ...]
    layers: tuple[tuple[str, int, int, int, float, bool], ...] = static()

    def by_name(self) -> dict[str, Tensor]:
        pairs = zip(self.layers, self.values, strict=True)
        return {name: value.mT if transposed else value for (name, *_, transposed), value in pairs}

    def products(self, theta: Tensor) -> tuple[Tensor, ...]:
        """s B A of every layer, for vectors [..., P]."""
        found = []
        for value, (_, at_a, at_b, rank, scaling, _) in zip(self.values, self.layers, strict=True):
            (rows, columns), clients = value.shape, theta.shape[:-1]
            a = theta[..., at_a : at_a + rank * columns].reshape(*clients, rank, columns)
            b = theta[..., at_b : at_b + rank * rows].reshape(*clients, rows, rank)
            found.append(scaling * (b @ a))
        return tuple(found)


@record
class Server(averaging.Server):
    """The residual that averaging has left in each adapted weight so far."""

    residual: Residual


@record
class Message:
    """The global weights w, with the adapters A and B, and the residual."""

    w: Tensor
    residual: Residual


@record
class Update:
    """The change of w, and s ΔB ΔA of every adapted layer."""

    w: Point
    products: tuple[Tensor, ...]


@algorithm
class FedEx(Averaging):
    """FedAvg of adapters W₀ + s B A, with W₀ ← W₀ + s (Σ p_k B_k A_k − B̄ Ā), B̄ = Σ p_k B_k and Ā = Σ p_k A_k.

    The mean of the clients' weights is W₀ + s Σ p_k B_k A_k, and averaged adapters give W₀ + s B̄ Ā instead. The server
    adds the difference to W₀. With ΔB_k and ΔA_k, the changes of a round, it is s (Σ p_k ΔB_k ΔA_k − Σ p_k ΔB_k ·
    Σ p_k ΔA_k). This sum is dense and additive: clients send s ΔB_k ΔA_k, which has the size of W₀, and the server
    needs their sum alone. The task is a module of `models.add_lora` or of peft. A layer whose A is frozen needs no
    correction."""

    def adapt(self, task: Task, seed: int) -> Task:
        found = adapters(task.module)
        paired = {name for pair in found for name in (pair.a, pair.b)}
        for name in task.main.names:
            if "lora_" in name and name not in paired:
                raise TaskError(f"{name} adapts no linear layer of the form W₀ + s B A, so FedEx cannot correct it")
        if not found:
            raise TaskError(f"{type(task.module).__name__} has no LoRA layers: use models.add_lora(module), or peft")
        return task

    def start(self, task: Task, info: Info) -> Server:
        base, names = super().start(task, info), task.main.names
        pairs = [pair for pair in adapters(task.module) if pair.a in names and pair.b in names]
        layers = tuple(
            (p.weight, *(task.slice(MAIN, name).start for name in (p.a, p.b)), p.rank, p.scaling, p.transposed)
            for p in pairs
        )
        residual = Residual(tuple(info.initial.new_zeros(p.shape) for p in pairs), layers)
        return Server(base.model, base.memory, info.before.residual if isinstance(info.before, Server) else residual)

    def message(self, server: Server, ids: Tensor) -> Message:
        return Message(server.model.theta, server.residual)

    def loss(self, task: Task, theta: Tensor, batch: Batch, residual: Residual) -> Tensor:
        """One client's loss with the corrected W₀."""
        return task.with_frozen(residual.by_name()).loss_one(theta, batch)

    def local(self, task: Task, message: Message, state: None, cohort: Cohort) -> tuple[Weighted, None]:
        moved = self.train(task, message.w, cohort, shared=(message.residual,), loss=self.loss) - message.w
        return Weighted.of(Update(Point(moved), message.residual.products(moved)), cohort.n), None

    def fuse(self, server: Server, update: Weighted) -> Server:
        mean: Update = update.mean
        missed: Tree = tree_map(Tensor.sub, mean.products, server.residual.products(mean.w.theta))
        values = tree_map(Tensor.add, server.residual.values, missed)
        moved: Server = super().fuse(server, Weighted(mean.w, update.weight.new_ones(1)))
        return replace(moved, residual=replace(server.residual, values=values))

    def network(self, task: Task, server: Server) -> Task:
        return task.with_frozen(to(server.residual, task.device).by_name())
