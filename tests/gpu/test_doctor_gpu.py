"""What `shoal doctor` measures on a CUDA device."""

from __future__ import annotations

import pytest
import torch

from shoal.doctor import links

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]


def test_ranks_add_up_over_nccl_and_the_back_end_is_nccl():
    finding = links.check_backend()
    assert (finding.status, finding.fact.split(":")[0]) == ("ok", "nccl"), finding


def test_copies_between_host_and_gpu_are_measured():
    assert "GB/s to the GPU" in links.check_copy_rate().fact
