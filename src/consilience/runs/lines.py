"""A round's line of metrics, and warnings about rejected updates."""

import logging
from typing import Any

import torch

from consilience.core.records import Tree, leaves
from consilience.engines.work import Share
from consilience.runs.run import Run

rejections = logging.getLogger("consilience.rejections")


def metrics_line(number: int, share: Share, bytes_down: int, seconds: float, run: Run) -> dict[str, Any]:
    """The line of metrics.jsonl, without scores. Clients' notes are averaged with the weights of their examples."""
    n = run.federation.sizes[torch.tensor(share.accepted, dtype=torch.int64)].double()
    notes = {name: float((value.double() * n).sum() / n.sum()) for name, value in share.notes.items()}
    name = run.federation.name
    return {
        **dict.fromkeys(("round", "seconds", "clients")),  # in this order, and never a note's
        **notes,
        "round": number,
        "seconds": seconds,
        "clients": len(share.accepted),
        "bytes_down": bytes_down,
        "bytes_up": share.bytes_up,
        "rejected": [{"client": name(c), "reason": reason} for c, reason in share.rejected.items()],
        "guards": {guard: count for guard, count in share.guards.items() if count},
        **run.algorithm.facts(run.server),
    }


def warn_of_rejected(number: int, share: Share, run: Run) -> None:
    """Log every rejected update; one warning where all were rejected, and none where so they were the round before."""
    if share.accepted:
        for client, reason in share.rejected.items():
            who = run.federation.name(client)
            rejections.warning("round %d: the update of client %r was rejected: %s", number, who, reason)
    elif share.rejected and (not run.history or run.history[-1]["clients"]):
        reason = next(iter(share.rejected.values()))
        rejections.warning(
            "round %d: the update of every client was rejected, and nothing is learned: %s", number, reason
        )


def not_finite(server: Tree) -> str | None:
    """The name of the first tensor of a server state that has a value that is not finite."""
    return next((name for name, leaf in leaves(server) if not bool(leaf.isfinite().all())), None)
