"""Compiled code draws the same random numbers."""

import pytest
import torch

from consilience.core import keys

pytestmark = pytest.mark.slow


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # the compiler's own
def test_compiled_code_draws_the_same():
    compiled = torch.compile(lambda key: keys.uniform(key, 56, torch.float32), dynamic=False, fullgraph=True)
    key = keys.key(1, purpose="a", client=torch.arange(3))
    for _ in range(50):  # a loop that ran past its end would have spoilt the heap by then
        assert torch.equal(compiled(key), keys.uniform(key, 56, torch.float32))
