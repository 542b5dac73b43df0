"""Published runs as workloads, with what was measured and what the planner says."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.config.layout import parse_layout, under
from shoal.config.sections import Config
from shoal.models.shape import resolve_shape
from shoal.plan.cluster import load_cluster
from shoal.plan.step_time import Software, step_time
from shoal.plan.workload import Workload

TABLES = Path(__file__).with_name("published.toml")
# Both keep the residual stream in 16 bits and compute whole layers again; Megatron-LM fuses scale, mask and
# softmax of plain attention, and sends 16-bit gradients.


@dataclass(frozen=True)
class Run:
    table: str
    name: str
    gpu: str
    workload: Workload
    software: Software
    measured_s: float
    fitted: bool

    def error(self) -> float:
        """Return predicted / measured - 1."""
        return step_time(self.workload, software=self.software).total / self.measured_s - 1


def runs() -> Iterator[Run]:
    for name, table in tomllib.loads(TABLES.read_text()).items():
        for values in table["rows"]:
            yield _run(name, table, table | dict(zip(table["columns"], values, strict=True)))


def _run(name: str, table: dict[str, Any], row: dict[str, Any]) -> Run:
    megatron = row["software"] == "megatron"
    layout = parse_layout(row["layout"])
    config = Config.model_validate(
        {
            "model": {
                "n_layers": row["layers"],
                "d_model": row["width"],
                "n_heads": row["heads"],
                "max_seq_len": row["seq_len"],
                "attention_dropout": 0.1 if megatron else 0.0,
            },
            "train": {
                "global_batch_size": row["batch"],
                "micro_batch_size": row["micro"],
                "seq_len": row["seq_len"],
                "recompute": row["recompute"],
                "compile": "off",
            },
            "precision": {"reduce_dtype": row.get("reduce", "fp32")},
        }
    )
    config = under(config, layout)
    shape = resolve_shape(config.model, row["vocab_size"])
    nodes = max(1, row["gpus"] // 8)
    cluster = load_cluster(row["gpus"] // nodes, row["gpu"], nodes)
    workload = Workload(config, shape, layout, cluster, row["dtype"])
    software = Software(
        2,
        True,
        score_accesses=(4.0, 5.0),
        compiled_loss=False,
        buckets=bool(row.get("overlap")),
        chunks=row.get("chunks", 0),
    )
    return Run(name, row["name"], row["gpu"], workload, software, _seconds(row), row["name"] in table["fit"])


def _seconds(row: dict[str, Any]) -> float:
    tokens, layers, width = row["batch"] * row["seq_len"], row["layers"], row["width"]
    if "seconds" in row:
        return row["seconds"]
    if "tokens_per_s" in row:
        return tokens / row["tokens_per_s"]
    share = 1 + row["seq_len"] / 6 / width
    if "tflops" in row:
        flops = 96 * tokens * layers * width**2 * (share + row["vocab_size"] / 16 / layers / width)
        return flops / row["tflops"] / 1e12 / row["gpus"]
    flops = 72 * tokens * layers * width**2 * (share + row["vocab_size"] / 12 / layers / width)
    return flops / row["mfu"] / 312e12 / row["gpus"]


def row_of(run: Run) -> str:
    """Return a run's row of the table in docs/published-runs.md."""
    predicted_s = step_time(run.workload, software=run.software).total
    mark = " (fitted)" if run.fitted else ""
    return (
        f"| {run.name}{mark} | {run.workload.layout} | {run.workload.cluster.world_size:,} | "
        f"{run.measured_s:.3f} | {predicted_s:.3f} | {100 * run.error():+.1f} % |"
    )


if __name__ == "__main__":
    table = ""
    for each in runs():
        if each.table != table:
            table = each.table
            print(f"\n**{table}** ({each.gpu})\n\n| run | layout | GPUs | measured s | predicted s | error |")
            print("| --- | --- | ---: | ---: | ---: | ---: |")
        print(row_of(each))
