"""Where client states are kept: on the device, on the host, or in files; by one process, or by several ranks."""

from pathlib import Path

import torch
from torch import Tensor

from consilience.core.errors import ConfigError
from consilience.core.records import Tree, nbytes
from consilience.engines.ranks import Ranks
from consilience.engines.sharded import Peers, Sharded
from consilience.engines.states import Fresh, InMemory, OnDisk, States

DEVICE_SHARE = 0.4  # of a GPU's free memory that client states may take


def place_states(
    fresh: Fresh,
    clients: int,
    device: torch.device,
    memory: int,
    folder: Path | None,
    ranks: Ranks,
    run: str,
    keep: int,
    saved: Tree = None,
) -> States:
    """States on the device while they take little of its memory, else on the host, else in files.

    States that need more than `memory` bytes go to files in `folder`, at the latest for a checkpoint, which could not
    hold them all. There they are sealed with the id of the `run`, and `keep` checkpoints may name them. So do those of
    several ranks, which each write their own, and those of a checkpoint, `saved`, that names files. A rank keeps up to
    `memory` bytes of its own states out of files until a checkpoint is due."""
    expected = nbytes(fresh(torch.tensor([0]))) * clients
    each = -(-expected // ranks.size)
    if device.type != "cuda" or ranks.any(each >= DEVICE_SHARE * torch.cuda.mem_get_info(device)[0]):
        device = torch.device("cpu")
    on_host = device.type == "cpu"
    filed = expected > memory or isinstance(saved, Tensor) or (isinstance(ranks, Peers) and expected > 0)
    if folder is None and expected > memory and on_host:
        raise ConfigError(
            f"the client states need {expected / 2**30:.1f} GiB, more than state_memory ({memory / 2**30:.1f} GiB): "
            "pass out= so that they can be kept in files"
        )
    local: States
    if folder is None or not filed:
        local = InMemory(fresh, device)
    else:
        share, room = (ranks.rank, ranks.size), memory if on_host else each
        local = OnDisk(fresh, folder, room=room, device=device, run=run, keep=keep, share=share)
    return Sharded(local, fresh, ranks) if isinstance(ranks, Peers) else local
