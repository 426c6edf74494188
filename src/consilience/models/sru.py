"""The simple recurrent unit: a recurrent layer whose products do not wait for each other (Lei et al., 2018)."""

import torch
from torch import Tensor, nn

from consilience.compute.scan import gated_scan


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
        ends: list[Tensor] = []
        for ways in self.cells:
            x, last = _layer(x, *ways)  # type: ignore[misc]
            ends += last
        return x, torch.stack(ends)


def _layer(x: Tensor, *cells: "_Cell") -> tuple[Tensor, tuple[Tensor, ...]]:
    """(outputs of all directions of a layer, the last state of each). Both are one recurrence: the sequence of the
    second one is reversed."""
    found = [cell.products(x).flip(-2) if cell.backwards else cell.products(x) for cell in cells]
    new, forget, reset = (torch.cat(parts, -1) for parts in zip(*(part.chunk(3, -1) for part in found), strict=True))
    (v_forget, v_reset), (b_forget, b_reset) = (
        torch.cat([getattr(cell, name) for cell in cells], -1) for name in ("state", "bias")
    )
    c = gated_scan(new, forget + b_forget, v_forget)
    before = torch.cat([torch.zeros_like(c[..., :1, :]), c[..., :-1, :]], -2)
    r = (reset + v_reset * before + b_reset).sigmoid()
    sums, shares = c.chunk(len(cells), -1), r.chunk(len(cells), -1)
    outputs = []
    for cell, state, share in zip(cells, sums, shares, strict=True):
        state, share = (state.flip(-2), share.flip(-2)) if cell.backwards else (state, share)
        outputs.append(torch.lerp(cell.skip(x), state, share))
    return torch.cat(outputs, -1), tuple(state[..., -1, :] for state in sums)


class _Cell(nn.Module):
    """The weights of one direction of one layer."""

    def __init__(self, inputs: int, hidden: int, backwards: bool) -> None:
        super().__init__()
        self.backwards = backwards
        self.products = nn.Linear(inputs, 3 * hidden, bias=False)
        self.skip = nn.Identity() if inputs == hidden else nn.Linear(inputs, hidden, bias=False)
        self.state = nn.Parameter(torch.zeros(2, hidden))
        self.bias = nn.Parameter(torch.zeros(2, hidden))
