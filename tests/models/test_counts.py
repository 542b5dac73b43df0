from __future__ import annotations

import dataclasses
import subprocess
import sys

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.config.load import load_config, preset_names
from shoal.config.sections import Model
from shoal.models.counts import count_parameters, flops_per_token
from shoal.models.decoder import Decoder
from shoal.models.shape import resolve_shape

MEDIUM = {"n_layers": 24, "d_model": 1024, "n_heads": 16}


def test_gpt2_medium_has_the_published_counts():
    counts = count_parameters(resolve_shape(Model(**MEDIUM), 50257))
    assert (counts.total, counts.decay, counts.no_decay) == (354_871_296, 354_549_760, 321_536)
    unpadded = count_parameters(resolve_shape(Model(**MEDIUM, pad_vocab_multiple=1), 50257))
    assert unpadded.total == 354_823_168


@settings(max_examples=30, deadline=None)
@given(
    style=st.sampled_from(["gpt2", "llama"]),
    n_layers=st.integers(1, 5),
    n_kv_heads=st.integers(1, 4),
    group=st.integers(1, 3),
    half_head=st.integers(1, 9),
    d_ff=st.integers(0, 70),
    vocab_size=st.integers(1, 400),
    tie=st.sampled_from([None, True, False]),
)
def test_counts_equal_the_parameters_of_any_shape(
    style, n_layers, n_kv_heads, group, half_head, d_ff, vocab_size, tie
):
    heads = {"n_heads": n_kv_heads * group, "n_kv_heads": 0 if style == "gpt2" else n_kv_heads}
    model = Model(
        style=style,
        n_layers=n_layers,
        d_model=n_kv_heads * group * half_head * 2,
        d_ff=d_ff,
        tie_embeddings=tie,
        max_seq_len=24,
        **heads,
    )
    shape = resolve_shape(model, vocab_size)
    with torch.device("meta"):
        parameters = list(Decoder(shape).parameters())
    counts = count_parameters(shape)
    assert counts.total == sum(p.numel() for p in parameters)
    assert counts.decay == sum(p.numel() for p in parameters if p.ndim == 2)


def test_flops_equal_three_times_the_products_that_torch_counts_forward():
    from torch.utils.flop_counter import FlopCounterMode

    for style, heads in (("gpt2", {}), ("llama", {"n_kv_heads": 2})):
        shape = resolve_shape(
            Model(style=style, n_layers=2, d_model=64, n_heads=4, max_seq_len=32, **heads), 100
        )
        with torch.device("meta"):
            model = Decoder(dataclasses.replace(shape, attention_dropout=0.1))
            with FlopCounterMode(display=False) as counter:
                keys = torch.zeros(2, dtype=torch.int64)
                model(torch.zeros(2, 32, dtype=torch.int64), dropout_keys_b=keys)
        assert 3 * counter.get_total_flops() == 64 * flops_per_token(shape, 32)


def test_every_preset_loads_into_a_shape_of_its_name():
    expected = {"gpt2": 124, "gpt2-medium": 355, "gpt2-large": 774, "gpt2-xl": 1558, "gpt2-8b": 8314}
    assert set(expected) < set(preset_names())
    for name in preset_names():
        counts = count_parameters(resolve_shape(load_config(name, {}).model, 50257))
        if name in expected:
            assert round(counts.total / 1e6) == expected[name]


def test_counts_do_not_import_torch():
    program = "import sys, shoal.models.counts, shoal.models.shape; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
