"""Records as `shoal bench` writes them, with made-up times."""

import json

import numpy as np

HEAD = {
    "date": "2026-11-24",
    "commit": "9af360d0000000000000000000000000000000aa",
    "clean": True,
    "load": {"before": [0.1, 0.2, 0.3], "after": [1.5, 0.9, 0.4]},
    "machine": {"device": "CPU (made up)", "bf16_in_hardware": True, "physical_cores": 4, "system": "Linux"},
    "versions": {"python": "3.11.7", "torch": "2.13.0", "shoal": "0.1.0"},
}
SPEED = {"pytorch default": 1.0, "pytorch tuned": 1.04, "jax tuned": 1.4}
THREADS = {1: 1.0, 2: 1.9, 4: 2.6, 8: 2.65}


def samples(seconds, count=20, noise=0.02, seed=0):
    return (seconds * np.random.default_rng(seed).normal(1, noise, count).clip(0.5, 1.5)).tolist()


def network_row(network="fcn-r", label="pytorch default", batch=128, threads=4, **changed):
    framework, mode = label.split()
    batch_s = 0.01 + 0.001 * batch
    seconds = batch_s / SPEED.get(label, 1.0) / THREADS[threads]
    found = {
        "cell": {
            "network": network,
            "framework": framework,
            "mode": mode,
            "batch": batch,
            "threads": threads,
        },
        "status": "done",
        "reason": "",
        "samples": samples(seconds, seed=batch + threads + len(label)),
        "losses": (2.3 * 0.97 ** np.arange(25) * (1 + 1e-5 * len(label))).tolist(),
        "versions": {framework: "1.2.3"},
        "layers": "abc",
        "peak_bytes": 512_000_000,
        "sensors": {"cpu_mhz": [2600.0, None, 2500.0], "mean_cpu_watts": 65.0, "seconds": [0.0, 1.0, 2.0]},
    }
    return found | changed


def networks(rows=None):
    if rows is None:
        grid = [(n, b, t) for n in ("fcn-r", "resnet-56") for b in (32, 128, 512) for t in (1, 2, 4, 8)]
        rows = [network_row(n, label, b, t) for n, b, t in grid for label in SPEED]
        failed = network_row(
            label="mxnet default", status="failed", reason="mxnet is not installed", samples=[]
        )
        wrong = network_row(
            label="jax default", status="rejected", reason="loss 3 on the same weights, pytorch has 2"
        )
        rows += [failed, wrong]
    return {"name": "networks", **HEAD, "options": {"steps": 20, "warmup": 5}, "rows": rows}


def gradsync_cell(strategy="allreduce", workers=2, seconds=0.2, sent=57e6, **changed):
    points = [(step, step * seconds) for step in range(0, 41, 5)]
    found = {
        "network": "fcn-r",
        "workers": workers,
        "link": "1gbit",
        "delays_in_transport": False,
        "layout": "",
        "strategy": strategy,
        "sync": {},
        "global_batch_size": 128,
        "status": "done",
        "seconds_a_step": seconds,
        "bytes_a_step": sent,
        "communication_share": 0.3,
        "counted": strategy != "allreduce",
        "step_s": samples(seconds, 40, seed=workers),
        "skip": 2,
        "period": 1,
        "curve": [
            {"step": step, "seconds": at, "loss": 2.7 * 0.97**step + 0.1 * len(strategy)}
            for step, at in points
        ],
    }
    return found | changed


def gradsync():
    cells = [gradsync_cell(workers=1, sent=0.0, link="local", seconds=0.3)]
    for workers in (2, 4):
        cells += [
            gradsync_cell("allreduce", workers, 0.36 / workers),
            gradsync_cell("onebit", workers, 0.2 / workers, 2.2e6),
            gradsync_cell("diloco:every=20", workers, 0.26 / workers, 2.8e6, period=20),
        ]
    refused = {"network": "fcn-r", "workers": 2, "link": "1gbit", "strategy": "tree_update:block=7"}
    cells.append(
        {**refused, "global_batch_size": 128, "status": "refused", "reason": "sync.block is not read"}
    )
    return {"name": "gradsync", **HEAD, "asked": {"steps": 40, "workers": [1, 2, 4]}, "cells": cells}


def collectives():
    rows = [
        {
            "size": size,
            "count": size // 4,
            "algorithm": name,
            "time_s": 1e-4 + size / rate,
            "algbw_bytes_per_s": size / (1e-4 + size / rate),
            "busbw_bytes_per_s": size / (1e-4 + size / rate),
            "wrong": 0,
            "formula_s": None,
        }
        for size in (1024, 65536, 4194304, 268435456)
        for name, rate in (("ring", 1e9), ("chunked_ring", 2e9), ("backend", 1.5e9))
    ]
    links = {"ring": {"latency_s": 1e-4, "bytes_per_s": 1e9}, "backend": None}
    head = {"name": "collectives", **HEAD, "ranks": 2, "transport": "torch", "dtype": "float32"}
    return {**head, "links": links, "rows": rows}


def write(folder, **records):
    """Write records as NAME.json; return their paths."""
    for name, record in records.items():
        (folder / f"{name}.json").write_text(json.dumps(record))
    return [folder / f"{name}.json" for name in records]
