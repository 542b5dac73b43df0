"""Growth of this process in the second step of training, beside its prediction: FOLDER PRESET RECOMPUTE SIZE.

Prints {"predicted", "grown"} in bytes. Grown is the most anonymous memory since the baseline, which is taken
in this process after a step of a tiny model has loaded all libraries. Each large tensor is mapped by itself
and unmapped when it is freed, so that what the C library keeps does not count.
"""

from __future__ import annotations

import ctypes
import gc
import json
import sys
from pathlib import Path

_M_MMAP_THRESHOLD, _MAPPED = -3, 64 << 10
SEQ_LEN = 256


def fields() -> dict[str, int]:
    """Return what the kernel says of this process, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    pairs = (line.split(":", 1) for line in lines if line.endswith("kB"))
    return {name: int(value.split()[0]) * 1024 for name, value in pairs}


def main() -> None:
    folder, preset, how, size = Path(sys.argv[1]), *sys.argv[2:4], int(sys.argv[4])
    ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _MAPPED)
    import torch.distributed as dist

    from shoal.config.load import load_config
    from shoal.data.synthetic import write_dataset
    from shoal.plan.memory import memory_of
    from shoal.runtime.process import join
    from shoal.runtime.stop import Stop
    from shoal.train.job import build_job
    from shoal.train.request import Request
    from shoal.train.step import agree, forward_backward, update
    from tests.plan.workloads import workload

    settings = {"recompute": how, "micro_batch_size": size, "seq_len": SEQ_LEN, "compile": "off"}
    planned = workload(preset, train=settings)
    runtime = {"device": "cpu", "threads": 1}
    process = join(load_config("tiny", {"runtime": runtime}).runtime)

    def take_steps(config, name):
        config = config.model_copy(
            update={"data": config.data.model_copy(update={"datasets": (str(folder / name),)})}
        )
        write_dataset(folder / name, config, 2)
        run_dir = folder / f"run-{name}"
        run_dir.mkdir()
        job = build_job(
            Request(config, run_dir), process, Stop(process, run_dir, config.runtime, launched=False)
        )
        for step in (1, 2):
            batch = job.task.batch(step)
            update(job, agree(job, batch, forward_backward(job, batch)))
        job.task.close()

    tiny = {"seq_len": 16, "micro_batch_size": 1, "global_batch_size": 1, "compile": "off", "recompute": how}
    small = load_config(
        "tiny", {"train": tiny, "precision": {"dtype": "fp32"}, "model": {"style": planned.shape.style}}
    )
    take_steps(small, "tiny")
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the most so far is what there is now
    before = fields()
    model = planned.config.model.model_copy(update={"vocab_size": planned.shape.vocab_size})
    precision = planned.config.precision.model_copy(update={"dtype": "fp32"})
    take_steps(planned.config.model_copy(update={"model": model, "precision": precision}), "large")
    after = fields()
    grown = after["VmHWM"] - after["RssFile"] - after["RssShmem"] - before["RssAnon"]
    print(json.dumps({"predicted": memory_of(planned)[0].peak_bytes, "grown": grown}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
