"""StudentHead: a classifier by class densities, multivariate Student t."""

import torch
from torch import Tensor, nn


class StudentHead(nn.Module):
    """Logits log π_c + log t_ν(x; m_c, s_c Ψ) of features x [..., d], without what all classes share: a head in place
    of a linear layer. `whiten` is x ↦ R (x − x̄) with RᵀR = Ψ⁻¹, `mean` has R (m_c − x̄), `scale` is ν s_c, `degrees`
    ν."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.whiten = nn.Linear(features, features)
        self.mean = nn.Parameter(torch.zeros(classes, features))
        self.scale = nn.Parameter(torch.ones(classes))
        self.degrees = nn.Parameter(torch.ones(1))
        self.log_prior = nn.Parameter(torch.zeros(classes))

    def forward(self, x: Tensor) -> Tensor:
        """log π_c − d/2 log s_c − (ν + d)/2 log(1 + δ_c / (ν s_c)), δ_c the squared whitened distance to the mean."""
        d = self.mean.shape[1]
        distance = (self.whiten(x).unsqueeze(-2) - self.mean).square().sum(-1)
        tails = (self.degrees + d) / 2 * torch.log1p(distance / self.scale)
        return self.log_prior - d / 2 * self.scale.log() - tails
