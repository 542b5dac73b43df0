"""Workloads on paper."""

from __future__ import annotations

from typing import Any

from shoal.config.layout import parse_layout, under
from shoal.config.load import load_config
from shoal.models.shape import resolve_shape
from shoal.plan.cluster import Cluster, DeviceSpec
from shoal.plan.link_cost import Link
from shoal.plan.workload import Workload

VOCAB_SIZE = 50_257


def workload(
    preset: str,
    layout: str = "1",
    dtype: str = "fp32",
    *,
    kind: Any = "cpu",
    num_microbatches: int = 1,
    vocab_size: int = VOCAB_SIZE,
    **sections: dict[str, Any],
) -> Workload:
    """Return a preset under a layout, with some fields of its sections replaced.

    The global batch follows from the number of micro-batches of a rank.
    """
    cut = parse_layout(layout)
    config = under(load_config(preset, sections), cut)
    batch = config.train.micro_batch_size * num_microbatches * cut.batch_parts
    config = config.model_copy(update={"train": config.train.model_copy(update={"global_batch_size": batch})})
    device = DeviceSpec("paper", kind, 80e9, {}, 1e12, 1e10)
    link = Link(1e-6, 1e10)
    cluster = Cluster(device, cut.world_size, 1, link, link)
    return Workload(config, resolve_shape(config.model, vocab_size), cut, cluster, dtype)
