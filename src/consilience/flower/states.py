"""The server's knowledge of client states that are on the clients' own disks."""

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from consilience.core.errors import CheckpointError
from consilience.core.records import Tree, rows, stack
from consilience.engines.states import States
from consilience.flower.messages import NO_STATE, Token


class RemoteStates(States):
    """States on the clients' disks. The server knows the token of each client's state. For methods whose states follow
    from the updates it also has a copy of the states in `mirror`; for others, `gather` returns fresh states.

    `saved` are the tokens in the checkpoints on the server's disk. `known` says whether states follow from updates.
    Tokens mean nothing in another `experiment`. `parts` says which clients' parts are in the server's state."""

    def __init__(
        self, mirror: States, clients: int, saved: deque[Tensor], known: bool = True, experiment: str = ""
    ) -> None:
        super().__init__(mirror.gather, mirror.device)
        self._mirror, self._saved, self.known = mirror, saved, known
        self._experiment = torch.tensor(list(experiment.encode()), dtype=torch.uint8)
        self.tokens = torch.zeros(clients, 2, dtype=torch.int64)
        self.parts = torch.ones(clients, dtype=torch.bool)

    def token(self, client: int) -> Token:
        """The token of a client's state; `NO_STATE` if the server has to send one."""
        return Token(*self.tokens[client].tolist())

    def kept(self, client: int) -> list[Token]:
        """The tokens of the states to which a checkpoint may go back."""
        return [Token(*saved[client].tolist()) for saved in self._saved if client < len(saved)]

    def accept(self, client: int, token: Token, state: Tree, round: int) -> None:
        """Record that a client's update was accepted. Its new state is that of `token`, and equals `state` if the
        server can know it."""
        self.tokens[client] = torch.tensor(token)
        if state is not None:
            self.commit(torch.tensor([client]), state, round)

    def send_again(self, client: int, state: Tree, round: int) -> None:
        """Record that a client has lost its state, and that the next request must bring this one."""
        self.accept(client, NO_STATE, state, round)

    def admit(self, client: int, state: Tree, round: int) -> None:
        """Record that a client's part is in the server's state from now on: that of this fresh state, which the next
        request brings. The client may be the one after the last."""
        if client == len(self.tokens):
            self.tokens = torch.cat([self.tokens, torch.tensor([NO_STATE])])
            self.parts = torch.cat([self.parts, torch.tensor([True])])
        self.parts[client] = True
        self.send_again(client, state, round)

    def remove(self, client: int) -> None:
        """Record that a client's part is not in the server's state any more. Nothing of its state is kept."""
        self.parts[client] = False
        self.tokens[client] = torch.tensor(NO_STATE)
        self._mirror.remove(client)

    def __contains__(self, client: int) -> bool:
        return client in self._mirror

    def _read(self, client: int, like: Tree) -> Tree:
        return rows(self._mirror.gather(torch.tensor([client])), 0)

    def _write(self, client: int, state: Tree, round: int) -> None:
        self._mirror.commit(torch.tensor([client]), stack([state]), round)

    def snapshot(self) -> Tree:
        """(tokens, tokens of the checkpoints that are kept beside this one, the mirror's snapshot, the experiment, the
        clients whose parts are in the server's state)."""
        others = (self._saved.maxlen or 1) - 1
        before = tuple(self._saved)[-others:]
        return self.tokens.clone(), before, self._mirror.snapshot(), self._experiment, self.parts.clone()

    def restore(self, saved: Tree) -> None:
        tokens, before, mirrored, experiment, parts = saved
        if not torch.equal(experiment, self._experiment):
            raise CheckpointError(
                "the list of sites is of another experiment than the checkpoint: restore sites.json from a backup"
            )
        self.tokens, self.parts = tokens.clone(), parts.clone()
        self._saved.clear()
        self._saved.extend((*before, tokens))
        self._mirror.restore(mirrored)

    def forget(self, saved: Tree, spared: Sequence[Tree] = ()) -> None:
        self._saved.append(saved[0])
        self._mirror.forget(saved[2])
