"""What a round costs depends on its cohort, and not on the number of clients."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import consilience as cs
from consilience.models import logistic
from consilience.runs.rounds import Rounds

CLIENTS = 100_003
METHODS = {
    "FedAvg": cs.FedAvg(cs.SGD(batch_size=1)),
    "FedEP": cs.FedEP(cs.inference.Identity(cs.SGD(batch_size=1), scale=0.5)),
    "SCAFFOLD": cs.SCAFFOLD(cs.SGD(batch_size=1)),
}


class Largest(TorchDispatchMode):
    """The largest tensor that an operation makes or changes, in numbers; views of the data do not count."""

    def __init__(self) -> None:
        super().__init__()
        self.size, self.name = 0, ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if not func.is_view:
            for leaf in tree_leaves(found):
                if isinstance(leaf, torch.Tensor) and leaf.numel() > self.size:
                    self.size, self.name = leaf.numel(), str(func)
        return found


@pytest.mark.parametrize("memory", [8 << 30, 0], ids=["in memory", "in files"])
@pytest.mark.parametrize("algorithm", METHODS.values(), ids=list(METHODS))
def test_no_operation_of_a_round_is_as_large_as_the_number_of_clients(
    algorithm: Any, memory: int, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, str]] = []
    one_round = Rounds._round

    def watched(self: Rounds, number: int, setup: float) -> Any:
        with Largest() as largest:
            line = one_round(self, number, setup)
        seen.append((largest.size, largest.name))
        return line

    monkeypatch.setattr(Rounds, "_round", watched)
    made = torch.Generator().manual_seed(0)
    data = cs.Dataset(torch.randn(CLIENTS, 4, generator=made), torch.randint(2, (CLIENTS,), generator=made))
    federation = cs.Federation.from_owner(data, torch.arange(CLIENTS))
    torch.manual_seed(0)
    run = cs.fit(
        algorithm,
        cs.Classification(logistic((4,), 2)),
        federation,
        rounds=4,
        cohort=20,
        out=cs.runs.Storage(tmp_path / "run", checkpoint_every=2, state_memory=memory),
        engine=cs.Simulator(device="cpu", chunk=10, workers=1),
        progress=False,
    )
    assert [line["clients"] for line in run.history] == [20] * 4
    assert max(seen)[0] < CLIENTS / 100, seen
