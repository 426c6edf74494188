"""The simple recurrent unit: a recurrent layer whose products do not wait for each other (Lei et al., 2018)."""

import torch
from torch import Tensor, nn


class SRU(nn.Module):
    """x̃ = W x; f = σ(W_f x + v_f ⊙ c₋ + b_f); c = f ⊙ c₋ + (1 − f) ⊙ x̃; r = σ(W_r x + v_r ⊙ c₋ + b_r);
    h = r ⊙ c + (1 − r) ⊙ (skip x).

    All products with x are one, over the whole sequence, and steps are elementwise. Inputs and outputs are [B, T, F]
    and [B, T, hidden], or twice as wide if `bidirectional`. `forward` returns (outputs, last states), as nn.GRU does.
    """

    def __init__(self, inputs: int, hidden: int, layers: int = 1, *, bidirectional: bool = False) -> None:
        super().__init__()
        ways = 2 if bidirectional else 1
        widths = [inputs, *[ways * hidden] * (layers - 1)]
        self.cells = nn.ModuleList(
            nn.ModuleList(_Cell(width, hidden, backwards=bool(way)) for way in range(ways)) for width in widths
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        ends = []
        for ways in self.cells:
            found = [cell(x) for cell in ways]  # type: ignore[attr-defined]
            x = torch.cat([out for out, _ in found], -1)
            ends += [end for _, end in found]
        return x, torch.stack(ends)


class _Cell(nn.Module):
    """One direction of one layer."""

    def __init__(self, inputs: int, hidden: int, backwards: bool) -> None:
        super().__init__()
        self.backwards = backwards
        self.products = nn.Linear(inputs, 3 * hidden, bias=False)
        self.skip = nn.Identity() if inputs == hidden else nn.Linear(inputs, hidden, bias=False)
        self.state = nn.Parameter(torch.zeros(2, hidden))
        self.bias = nn.Parameter(torch.zeros(2, hidden))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        new, forget, reset = self.products(x).chunk(3, -1)
        (v_forget, v_reset), (b_forget, b_reset) = self.state, self.bias
        c, kept, outputs = torch.zeros_like(new[:, 0]), self.skip(x), []
        times = range(x.shape[1])
        for t in reversed(times) if self.backwards else times:
            f = (forget[:, t] + v_forget * c + b_forget).sigmoid()
            r = (reset[:, t] + v_reset * c + b_reset).sigmoid()
            c = f * c + (1 - f) * new[:, t]
            outputs.append(r * c + (1 - r) * kept[:, t])
        return torch.stack(outputs[::-1] if self.backwards else outputs, 1), c
