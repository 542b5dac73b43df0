"""Tiny models under layouts, and their comparison with one process."""

import numpy as np

from shoal.config.layout import settings_of
from tests.train.ranks import tiny_config

# What each of the two decoder styles, dropout and recompute is tried with differs from layout to layout, so
# that all of them meet somewhere; `make test` has every third, `make proof` the matrix, and PROOF.
PLAIN = {"n_layers": 4, "n_heads": 4, "dropout": 0.0, "attention_dropout": 0.0}
LLAMA = PLAIN | {"style": "llama", "n_kv_heads": 2}
MODELS = {
    "gpt2": PLAIN,
    "gpt2-dropout": PLAIN | {"dropout": 0.1, "attention_dropout": 0.1},
    "llama": LLAMA,
    "llama-dropout": LLAMA | {"dropout": 0.1, "attention_dropout": 0.1},
}
CASES = [
    ("zero1x2", "gpt2-dropout", "none"),
    ("zero3x2", "gpt2", "full"),
    ("tp2", "gpt2-dropout", "full"),
    ("zero3x2*tp2+sp", "llama-dropout", "offload"),
    ("tp2+sp", "llama-dropout", "none"),
    ("pp2", "gpt2-dropout", "none"),
    ("pp2+zero_bubble", "llama", "none"),
    ("pp2+interleaved", "gpt2-dropout", "offload"),
    ("tp2", "llama", "selective"),
    ("dp2*zero2x2", "llama-dropout", "none"),
    ("pp2*zero2x2", "gpt2", "none"),
    ("dp2*tp2", "gpt2-dropout", "none"),
    ("pp2*tp2+sp", "llama", "full"),
]
PROOF = ("zero2x2", "tp4", "pp2+gpipe", "pp4", "zero1x2*tp2", "pp2*dp2", "pp2+interleaved*zero3x2")


def values_of(data, layout, model, recompute="none", **sections):
    """Return a configuration; a learning rate at which five steps do not multiply rounding errors."""
    again = (
        {"recompute": "full", "recompute_offload": True}
        if recompute == "offload"
        else {"recompute": recompute}
    )
    train = {"micro_batch_size": 2, "global_batch_size": 8, "steps": 5} | again
    evaluation = {"every": 5, "sequences": 7, "prompt": "Once", "sample_tokens": 5}
    sections = {"eval": evaluation, **sections}
    return tiny_config(
        data,
        model=MODELS[model],
        train=train | sections.pop("train", {}),
        parallel=settings_of(layout),
        optimizer={"lr": 1e-3},
        schedule={"min_lr": 1e-4},
        **sections,
    )


def check(ranks, reference):
    """Judge losses, norms, validation and, of the weights, that all are there and finite."""
    got = ranks[0]
    assert got["steps"] == [1, 2, 3, 4, 5]
    np.testing.assert_allclose(got["losses"], reference["losses"], rtol=2e-6)
    np.testing.assert_allclose(got["norms"], reference["norms"], rtol=2e-6)
    samples = [[line["sample"] for line in run["lines"] if "sample" in line] for run in (got, reference)]
    assert samples[0] == samples[1] != []
    validation = [
        [line["validation_loss"] for line in run["lines"] if "validation_loss" in line]
        for run in (got, reference)
    ]
    np.testing.assert_allclose(*validation, rtol=2e-6)
    weights = {name: weight for rank in ranks for name, weight in rank["weights"].items()}
    assert weights.keys() == reference["weights"].keys()
    for name, weight in weights.items():
        assert weight.shape == reference["weights"][name].shape
        assert np.isfinite(weight).all()
