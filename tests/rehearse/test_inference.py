"""Generation with a KV cache on a fake GPU."""

from __future__ import annotations

import pytest
import torch

from shoal.infer.generate import GeneratedRow, generate
from shoal.infer.sampling import Sampling
from shoal.models.init import build_decoder
from tests.models.tiny import STYLES, tiny_shape
from tests.rehearse.fake_cuda import DEVICE, fake_rank


@STYLES
@pytest.mark.parametrize("sampling", [Sampling(temperature=0), Sampling(top_k=5, top_p=0.9)])
def test_prompts_of_unequal_length_are_continued(style, sampling):
    with fake_rank():
        model = build_decoder(tiny_shape(style), seed=1, device=DEVICE).eval()
        rows = [GeneratedRow([1, 2, 3], 4), GeneratedRow([4], 3, prompt=1)]
        told = list(generate(model, rows, sampling, stop_id=None))
        assert [number for number, _ in told].count(0) == 4
        assert [number for number, _ in told].count(1) == 3


def test_a_cache_on_the_host_is_refused():
    with fake_rank():
        model = build_decoder(tiny_shape("gpt2"), seed=1, device=DEVICE).eval()
        plain = torch.zeros

        def on_host(*size, **options):
            return plain(*size, **options | {"device": "cpu"})

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("shoal.models.cache.torch.zeros", on_host)
            with pytest.raises(RuntimeError, match="device"):
                list(generate(model, [GeneratedRow([1, 2, 3], 2)], Sampling(temperature=0), stop_id=None))
