"""A tiny job on a GPU."""

from __future__ import annotations

import torch

from shoal.config.load import validate
from shoal.runtime import process as processes
from shoal.runtime.device import select_device
from shoal.runtime.rank_info import RankInfo
from shoal.runtime.stop import Stop
from shoal.train.job import build_job
from shoal.train.loop import train
from shoal.train.metrics import read_metrics
from shoal.train.request import Request
from tests.train.ranks import tiny_config

DEVICE = "cuda"


def make_job(run_dir, dataset, device=DEVICE, *, reset_documents=False, **sections):
    """Build a tiny job on a device."""
    values = tiny_config(dataset, **sections)
    values["runtime"]["device"] = device
    values["data"]["reset_documents"] = reset_documents
    config = validate(values, "test")
    process = processes.form_groups(RankInfo(), select_device(device, 0, 1), config.runtime)
    run_dir.mkdir(parents=True, exist_ok=True)
    stop = Stop(process, run_dir, config.runtime, launched=False)
    return build_job(Request(config, run_dir), process, stop)


def run(run_dir, dataset, device=DEVICE, **sections):
    """Train; return loss and gradient norm of each step, the metrics lines, and the final weights."""
    job = make_job(run_dir, dataset, device, **sections)
    train(job)
    lines = [line for line in read_metrics(run_dir / "metrics.jsonl") if "loss" in line]
    weights = {name: p.detach().cpu() for name, p in job.model.named_weights().items()}
    return torch.tensor([[line["loss"], line["grad_norm"]] for line in lines]), lines, weights
