"""Documents that do not see each other, under the kernel that only a GPU has."""

import pytest
import torch

from shoal import scoring
from shoal.models.documents import document_ids
from shoal.models.init import build_decoder
from shoal.parallel.compile import compile_blocks
from tests.models.tiny import STYLES, tiny_shape, tokens

EOD = 7


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@STYLES
@pytest.mark.parametrize("compiled", [False, True])
def test_the_gpus_kernel_gives_the_cpus_logits_and_gradients(style, compiled):
    shape = tiny_shape(style, n_heads=2, n_kv_heads=1 if style == "llama" else 0, max_seq_len=300)
    stream = tokens(batch=2, time=300)
    results = []
    for device in ("cpu", "cuda"):
        model = build_decoder(shape, seed=1, device=device)
        if compiled and device == "cuda":
            compile_blocks(model)
        logits = model(stream.to(device), documents_bt=document_ids(stream, EOD).to(device))
        scoring.loss_sum(logits, stream.to(device)).backward()
        gradients = [p.grad.cpu() for p in model.parameters()]
        results.append([logits[..., :50].detach().cpu(), *gradients])
    for ours, expected in zip(results[1], results[0], strict=True):
        assert (ours - expected).norm() <= 1e-4 * max(1.0, expected.norm())
