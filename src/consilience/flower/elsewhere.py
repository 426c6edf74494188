"""Clients' states where the clients are, and what the server knows of them."""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

from consilience.core.records import Tree
from consilience.engines.states import States
from consilience.flower.letters import NOTHING, Token


class Elsewhere(States):
    """States that clients keep on their own disks. The server knows the token of the work that each client's state
    came from, and, of methods whose states can be followed, a mirror of the states themselves: what is gathered here,
    else fresh ones."""

    def __init__(self, mirror: States, clients: int, kept: deque[Tensor]) -> None:
        super().__init__(mirror._fresh, mirror.device)
        self._mirror, self._kept = mirror, kept
        self.tokens = torch.zeros(clients, 2, dtype=torch.int64)

    def token(self, client: int) -> Token:
        """The work whose state a client goes on from; NOTHING if the server has to send it one."""
        return Token(*self.tokens[client].tolist())

    def kept(self, client: int) -> list[Token]:
        """The states that a checkpoint may go back to."""
        return [Token(*saved[client].tolist()) for saved in self._kept]

    def accept(self, client: int, token: Token, state: Tree, round: int) -> None:
        """A client's update was taken: its new state is the one of `token`, here mirrored if it is known."""
        self.tokens[client] = torch.tensor(token)
        if state is not None:
            self.commit(torch.tensor([client]), state, round)

    def send_again(self, client: int, state: Tree, round: int) -> None:
        """A client has lost its state, and will be sent this one."""
        self.accept(client, NOTHING, state, round)

    def __contains__(self, client: int) -> bool:
        return client in self._mirror

    def _read(self, client: int, like: Tree) -> Tree:
        return self._mirror._read(client, like)

    def _write(self, client: int, state: Tree, round: int) -> None:
        self._mirror._write(client, state, round)

    def snapshot(self) -> Tree:
        """(tokens, those of the checkpoint before, the mirror's)."""
        return self.tokens.clone(), tuple(self._kept)[-1:], self._mirror.snapshot()

    def restore(self, saved: Tree) -> None:
        """Back to a snapshot."""
        tokens, before, mirrored = saved
        self.tokens = tokens.clone()
        self._kept.clear()
        self._kept.extend((*before, tokens))
        self._mirror.restore(mirrored)

    def forget(self, saved: Tree) -> None:
        """`saved` is in a checkpoint."""
        self._kept.append(saved[0])
        self._mirror.forget(saved[2])
