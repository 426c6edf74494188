"""Engines run algorithms: they know records, not methods."""

from consilience.engines.distributed import Distributed
from consilience.engines.placing import place_states
from consilience.engines.plan import Plan
from consilience.engines.ranks import ALONE, Alone, Ranks
from consilience.engines.session import Engine, Opener, RoundResult, Session
from consilience.engines.simulator import PRECISIONS, Precision, Simulator
from consilience.engines.states import InMemory, States, fresh_states
from consilience.engines.template import check_hidden, template_of
from consilience.engines.work import Share, chunks, part_of, refused_clients

__all__ = [
    "ALONE", "PRECISIONS", "Alone", "Distributed", "Engine", "InMemory", "Opener", "Plan", "Precision", "Ranks",
    "RoundResult", "Session", "Share", "Simulator", "States", "check_hidden", "chunks", "fresh_states",
    "part_of", "place_states", "refused_clients", "template_of",
]  # fmt: skip
