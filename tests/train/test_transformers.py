"""The first 20 steps equal a plain transformers training loop's."""

import numpy as np
import pytest
import torch

from shoal.train.loop import train
from shoal.train.metrics import read_metrics
from tests.models.hf import decoder_from_hf, random_gpt2, random_llama
from tests.tiny_dataset import VOCAB_SIZE, random_dataset
from tests.train.ranks import make_job, tiny_config

STEPS, WARMUP, PEAK, LOW = 20, 4, 3e-3, 3e-4
LLAMA = {"style": "llama", "n_kv_heads": 2, "d_ff": 80}
SHAPE = {"n_layers": 3, "d_model": 48, "n_heads": 4, "max_seq_len": 32}


def our_run(run_dir, values, hf_model):
    job = make_job(run_dir, values)
    bare = job.model.parts[0]
    with torch.no_grad():
        for name, weight in decoder_from_hf(hf_model).named_parameters():
            bare.get_parameter(name).copy_(weight)
    train(job)
    batches = [job.task.loader.batch(step).data for step in range(1, STEPS + 1)]
    lines = [line for line in read_metrics(run_dir / "metrics.jsonl") if "loss" in line]
    return [(line["loss"], line["grad_norm"]) for line in lines], batches


def their_run(model, batches):
    """Return (loss, norm) of each step of the loop that anybody would write with transformers."""
    model.train()
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimiser = torch.optim.AdamW(groups, lr=PEAK, betas=(0.9, 0.95), eps=1e-8)

    def factor(done):
        step = done + 1
        if step <= WARMUP:
            return step / WARMUP
        cosine = (1 + np.cos(np.pi * (step - WARMUP) / (STEPS - WARMUP))) / 2
        return (LOW + (PEAK - LOW) * cosine) / PEAK

    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, factor)
    curve = []
    for tokens in batches:
        tokens = torch.from_numpy(tokens)
        optimiser.zero_grad()
        logits = model(input_ids=tokens[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        schedule.step()
        curve.append((loss.item(), norm.item()))
    return curve


@pytest.mark.parametrize("style", ["gpt2", "llama"])
def test_twenty_steps_equal_a_transformers_loop(pool, tmp_path, style):
    if style == "gpt2":
        model, hf_model = {}, random_gpt2(vocab_size=VOCAB_SIZE)
    else:
        model, hf_model = LLAMA, random_llama(vocab_size=VOCAB_SIZE, rms_norm_eps=1e-5)
    values = tiny_config(
        random_dataset(tmp_path / "data"),
        model={**SHAPE, **model},
        train={"steps": STEPS, "global_batch_size": 8, "micro_batch_size": 4, "seq_len": 32},
        optimizer={"lr": PEAK},
        schedule={"warmup_steps": WARMUP, "min_lr": LOW},
    )
    ours, batches = pool.run(our_run, 1, tmp_path / "run", values, hf_model)[0]
    np.testing.assert_allclose(ours, their_run(hf_model, batches), rtol=1e-5)
