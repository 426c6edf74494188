"""Batch: the examples of one step, padded to a common size."""

from torch import Tensor

from consilience.core.records import Tree, record


@record
class Batch:
    """Examples of each client: x and y, trees of [K, B, ...]; w [K, B] is 0 for padding; key [K] for dropout."""

    x: Tree
    y: Tree
    w: Tensor
    key: Tensor

    @property
    def size(self) -> int:
        """B, the number of rows, with those of weight 0."""
        return self.w.shape[-1]

    def mean(self, values: Tensor) -> Tensor:
        """The mean of values [B, ...] over one client's examples; padding has weight 0."""
        share = self.w / self.w.sum().clamp_min(1e-12)
        return (values * share.view(-1, *[1] * (values.dim() - 1))).sum(0)
