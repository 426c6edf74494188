"""Where and how networks compute."""

from dataclasses import dataclass

import torch

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Execution:
    """A device, the type of weights and losses, and whether code is compiled.

    With `bf16` networks compute in bfloat16, while weights, losses and updates stay in `dtype`. `chunk` is the largest
    cohort, which fixes the compiled sizes. `even` says that all clients of a cohort take all steps together.
    """

    device: torch.device = CPU
    dtype: torch.dtype = torch.float32
    compiled: bool = False
    bf16: bool = False
    chunk: int = 0
    even: bool = False

    @property
    def on_gpu(self) -> bool:
        return self.compiled and self.device.type == "cuda"

    @property
    def precision(self) -> torch.dtype:
        return torch.bfloat16 if self.bf16 else self.dtype
