"""Bag of words: texts as the frequencies of their words."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from consilience.core.errors import ConfigError
from consilience.data.loaders.stack_overflow import FIRST, PADDING, UNKNOWN


class Frequencies(nn.Module):
    """Token ids [B, L] to x_v = (times that word v occurs) / (tokens in the text), [B, vocabulary].

    Ids are 0 after the end, 1 for unknown words, 2 + v for word v; words beyond the vocabulary are unknown. Unknown
    words count as tokens, so x sums to the share of known ones (Reddi et al., 2021; TFF's later baselines divide by
    the known ones alone). An empty text is all zeros."""

    one: Tensor

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.vocabulary = vocabulary
        self.register_buffer("one", torch.ones(()), persistent=False)  # follows the task's dtype

    def forward(self, ids: Tensor) -> Tensor:
        ids = ids.long()
        tokens = (ids != PADDING).to(self.one.dtype)
        ids = ids.masked_fill(ids >= FIRST + self.vocabulary, UNKNOWN)
        counts = tokens.new_zeros((ids.shape[0], FIRST + self.vocabulary)).scatter_add(1, ids, tokens)
        return counts[:, FIRST:] / tokens.sum(1, keepdim=True).clamp_min(1)


def bag_of_words(inputs: Sequence[int], outputs: int, vocabulary: int = 10_000) -> nn.Module:
    """Logistic regression on the frequencies of the most frequent words, for token ids as "stackoverflow" has them."""
    if len(inputs) != 1:
        raise ConfigError(f"bag_of_words needs rows of token ids, got examples of shape {tuple(inputs)}")
    return nn.Sequential(Frequencies(vocabulary), nn.Linear(vocabulary, outputs))
