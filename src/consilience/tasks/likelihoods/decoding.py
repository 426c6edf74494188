"""Labels from the frames of CTC: the most probable path, and a beam of prefixes with or without a lexicon."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

BLANK = 0
LEAST = 1e-5  # labels less probable than this in a frame do not lengthen a prefix

Labels = tuple[int, ...]


def greedy(probs: Tensor) -> list[list[int]]:
    """The labels of each example's most probable path, for probabilities [N, T, V]."""
    found = []
    for path in probs.argmax(-1).tolist():
        before = [BLANK, *path[:-1]]
        found.append([label for label, last in zip(path, before, strict=True) if label not in (BLANK, last)])
    return found


@dataclass
class _Node:
    """Words that begin alike."""

    further: dict[int, _Node] = field(default_factory=dict)
    is_word: bool = False


class Lexicon:
    """Words of labels, separated by the label `space`: which label may follow a prefix."""

    def __init__(self, words: Iterable[Sequence[int]], space: int) -> None:
        self.space, self._root = space, _Node()
        for word in words:
            node = self._root
            for label in word:
                node = node.further.setdefault(label, _Node())
            node.is_word = True
        self._nodes: dict[Labels, _Node | None] = {(): self._root}

    def allows(self, prefix: Labels) -> bool:
        """Whether words may begin with these labels."""
        return self._node(prefix) is not None

    def ends(self, prefix: Labels) -> bool:
        """Whether these labels are whole words."""
        node = self._node(prefix)
        return not prefix or (node is not None and node.is_word)

    def _node(self, prefix: Labels) -> _Node | None:
        if prefix not in self._nodes:
            before, label = self._node(prefix[:-1]), prefix[-1]
            if before is None:
                self._nodes[prefix] = None
            elif label == self.space:
                self._nodes[prefix] = self._root if before.is_word else None
            else:
                self._nodes[prefix] = before.further.get(label)
        return self._nodes[prefix]


def prefix_beam(probs: Sequence[Sequence[float]], width: int, lexicon: Lexicon | None = None) -> list[int]:
    """The most probable labels of frames [T][V], each the sum over its paths, among the `width` best prefixes after
    every frame (Graves & Jaitly, 2014). With a lexicon, labels are whole words of it."""
    beam: dict[Labels, tuple[float, float]] = {(): (1.0, 0.0)}  # paths that end in a blank, and in the last label
    for frame in probs:
        likely = [(label, p) for label, p in enumerate(frame) if label != BLANK and p > LEAST]
        grown: dict[Labels, list[float]] = {}
        for prefix, (blank, label) in beam.items():
            total, last = blank + label, prefix[-1] if prefix else BLANK
            own = grown.setdefault(prefix, [0.0, 0.0])
            own[0] += total * frame[BLANK]
            own[1] += label * frame[last] if prefix else 0.0
            for following, p in likely:
                longer = (*prefix, following)
                if lexicon is None or lexicon.allows(longer):
                    grown.setdefault(longer, [0.0, 0.0])[1] += (blank if following == last else total) * p
        best = sorted(grown.items(), key=lambda entry: -sum(entry[1]))[:width]
        scale = sum(best[0][1]) or 1.0
        beam = {prefix: (blank / scale, label / scale) for prefix, (blank, label) in best}
    ranked = sorted(beam, key=lambda prefix: -sum(beam[prefix]))
    if lexicon is None:
        return list(ranked[0])
    whole = next((prefix for prefix in ranked if lexicon.ends(prefix)), ranked[0])
    while not lexicon.ends(whole):  # all are cut short inside of a word, which is dropped
        whole = whole[:-1]
    return list(whole)
