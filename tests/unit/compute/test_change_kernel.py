"""The kernel for weighted changes against plain code: interpreted on a CPU, as it is on a GPU."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton comes with torch for GPUs, and with the development tools")
from consilience.compute.kernels.change import weighted_change

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1, 2048, 5000])
def test_the_kernel_gives_the_changes_of_plain_code_to_the_bit(dtype, size):
    made = torch.Generator().manual_seed(0)
    trained, start, weight = (
        torch.randn(*s, generator=made, dtype=dtype).to(DEVICE) for s in ((3, size), (size,), (3, 1))
    )
    wanted = (trained - start) * weight
    assert torch.equal(weighted_change(trained, start, weight), wanted)
