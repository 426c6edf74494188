"""Attacks of one registered site on FedEP's posterior, by finite updates of the right shape."""

from __future__ import annotations

import logging
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from attacking import Outcome, attack


def _world(folder: str) -> Any:
    """Five sites in memory with linear data, from the tests of the version under attack."""
    import consilience as cs

    logging.getLogger("consilience").setLevel(logging.ERROR)
    sys.path.insert(0, str(Path(cs.__file__).parents[2] / "tests"))
    from support.flower_grid import PRIOR, World

    return World.linear(cs.FedEP(cs.inference.Newton(diagonal=True), prior=PRIOR), Path(folder))


def _sends(eta: float = 0.0, lam: float = 0.0) -> Any:
    import consilience as cs

    return lambda delivery: delivery.with_update(lambda delta: cs.Gaussian(delta.eta + eta, delta.lam + lam))


def _outcome(folder: str, rounds: int = 30, always: Any = None, faults: dict[int, Any] | None = None) -> Outcome:
    """The distance of q from the posterior of an honest run and from the product of the sites, and who was rejected."""
    from consilience.core.errors import ConsilienceError

    attacked, honest = _world(f"{folder}/attacked"), _world(f"{folder}/honest")
    from support.flower_grid import BAD, unhurried

    attacked.always = {} if always is None else {BAD: always}
    attacked.faults = {(round, BAD): fault for round, fault in (faults or {}).items()}
    with unhurried():
        wanted = honest.serve(rounds).server.q
        try:
            run = attacked.serve(rounds)
        except ConsilienceError as error:
            return Outcome(f"the run ended: {error}"[:150], False)
    q, product = run.server.q, attacked.method.before(run.server.q.eta)
    for site in range(len(attacked.names)):
        product = product * run.states.gather(torch.tensor([site])).factor.product()
    apart, off = float((q / product).norm / q.norm), float((q.mean - wanted.mean).norm() / wanted.mean.norm())
    precision = float((q.lam / wanted.lam).max())
    rejections = sum(len(line["rejected"]) for line in run.history)
    text = (
        f"after {rounds} rounds q is {apart:.2g} of its length from the product of the sites, its mean {off:.2g} from "
        f"the honest one, its precision up to {precision:.2g} times the honest one; {rejections} updates rejected"
    )
    return Outcome(text, apart < 1e-6 and off < 0.5 and precision < 10)


@attack("Δλ − 1000 once")
def negative_once() -> Outcome:
    with tempfile.TemporaryDirectory() as folder:
        return _outcome(folder, faults={2: _sends(lam=-1000.0)})


@attack("Δλ − 1000 in every round")
def negative_always() -> Outcome:
    with tempfile.TemporaryDirectory() as folder:
        return _outcome(folder, always=_sends(lam=-1000.0))


@attack("Δλ − 10⁶, then “my state is lost”")
def negative_then_lost() -> Outcome:
    from consilience.flower.messages import TrainReply, encode

    def lost(delivery: Any) -> Any:
        return delivery.reply(encode(TrainReply(status="lost", reason="gone")))

    with tempfile.TemporaryDirectory() as folder:
        return _outcome(folder, faults={2: _sends(lam=-1e6), 3: lost})


@attack("Δλ + 10⁶ once")
def positive_once() -> Outcome:
    with tempfile.TemporaryDirectory() as folder:
        return _outcome(folder, faults={2: _sends(lam=1e6)})


@attack("Δη + 10⁸ once")
def shift_once() -> Outcome:
    with tempfile.TemporaryDirectory() as folder:
        return _outcome(folder, faults={2: _sends(eta=1e8)})


@attack("Δη + 10⁸ in every round")
def shift_always() -> Outcome:
    with tempfile.TemporaryDirectory() as folder:
        return _outcome(folder, always=_sends(eta=1e8))
