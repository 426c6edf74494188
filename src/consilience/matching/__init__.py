"""Matching the hidden units of different networks, as functions of weight matrices."""

from consilience.matching.beta_bernoulli import BetaBernoulli
from consilience.matching.clusters import Clusterer, Clusters, Known, Units
from consilience.matching.dp_means import DPMeans
from consilience.matching.networks import Matched, Memory, match, slice_of
from consilience.matching.stacks import Stack
from consilience.matching.streams import restart

__all__ = [
    "BetaBernoulli", "Clusterer", "Clusters", "DPMeans", "Known", "Matched", "Memory", "Stack", "Units", "match",
    "restart", "slice_of",
]  # fmt: skip
