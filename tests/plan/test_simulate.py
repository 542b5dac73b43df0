"""Predicted memory beside that of simulated steps, of ranks that hold tensors, and of real processes."""

import json
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

from benchmarks.memory import peak_bytes
from benchmarks.plan_memory import LIMIT, cases, compare
from shoal.config.layout import parse_layout, settings_of
from shoal.config.load import validate
from shoal.models.init import build_decoder
from shoal.models.loss import CrossEntropy
from shoal.models.shape import resolve_shape
from shoal.plan.cluster import Cluster, DeviceSpec
from shoal.plan.link_cost import Link
from shoal.plan.memory import memory_of
from shoal.plan.simulate import simulate
from shoal.plan.workload import Workload
from shoal.runtime.mesh import local
from shoal.train.loop import train
from tests.cases import every
from tests.plan.workloads import workload
from tests.proof.layouts import ALL
from tests.train.ranks import make_job, tiny_config

BETWEEN = ("weights", "gradients", "optimizer")
ODD = {"d_model": 40, "n_heads": 4, "d_ff": 148, "max_seq_len": 8}  # 40 rows over 3 ranks


def held(memory):
    """Return what is held between steps."""
    return {name: memory.moments[0].bytes[name] for name in BETWEEN}


def error_of(planned, pp_rank):
    """Return how far the predicted peak is off, relative to the simulated one."""
    predicted = memory_of(planned)[pp_rank].peak_bytes
    seen = simulate(planned, pp_rank * planned.layout.dp * planned.layout.tp).peak_bytes
    return predicted / seen - 1


@pytest.mark.parametrize("layout", every(6, ["zero2x3", *ALL.split(", "), "pp4+interleaved"]))
def test_what_is_held_between_steps_is_exact(layout):
    style = "gpt2" if len(layout) % 2 else "llama"
    train = {"micro_batch_size": 1, "seq_len": 8}
    cut = parse_layout(layout)
    model = {**ODD, "style": style, "n_layers": max(2, cut.stages)}
    planned = workload("tiny", layout, num_microbatches=cut.pp, vocab_size=509, model=model, train=train)
    predicted = memory_of(planned)
    for pp_rank in {0, cut.pp - 1}:
        assert held(predicted[pp_rank]) == held(simulate(planned, pp_rank * cut.dp * cut.tp))


@pytest.mark.parametrize(("name", "layout"), every(3, [("muon", "pp2"), ("muon", "dp2"), ("sgd", "zero3x2")]))
def test_state_of_other_optimisers_is_exact(name, layout):
    planned = workload("tiny", layout, num_microbatches=2, vocab_size=509, optimizer={"name": name})
    for memory in memory_of(planned):
        assert held(memory) == held(simulate(planned, memory.pp_rank))


@pytest.mark.parametrize("layout", every(2, ["dp2", "zero3x2", "tp2"]))
def test_sgd_adds_the_decay_to_a_gradient_of_its_own_where_torch_cannot_fuse_it(layout):
    few = {"micro_batch_size": 1, "seq_len": 16}  # tokens take next to nothing
    sections = {"model": {"n_layers": 2}, "train": few, "optimizer": {"name": "sgd"}}
    planned = workload("gpt2", layout, vocab_size=509, **sections)
    (predicted,) = (m.total for m in memory_of(planned)[0].moments if m.name == "optimiser step")
    (seen,) = (moment.total for moment in simulate(planned).moments if moment.name == "optimiser")
    assert predicted == pytest.approx(seen, rel=1e-3)


def held_by_rank(run_dir, values):
    """Take a step and return the bytes of this rank's tensors."""
    job = make_job(run_dir, values)
    train(job)
    weights = job.model.named_weights().values()
    state = [job.optimiser.state_of(weight).values() for weight in weights]
    return {
        "weights": sum(local(weight).nbytes for weight in weights),
        "gradients": sum(local(weight.grad).nbytes for weight in weights),
        "optimizer": sum(local(tensor).nbytes for one in state for tensor in one),
    }


@pytest.mark.parametrize(
    "layout", every(2, ["dp2", "zero1x2", "zero3x2", "tp2+sp", "pp2+interleaved", "pp2", "dp2*tp2"])
)
def test_ranks_hold_what_is_predicted(pool, tmp_path, data, layout):
    cut = parse_layout(layout)
    sections = {"train": {"steps": 1}, "schedule": {"warmup_steps": 0}, "parallel": settings_of(cut)}
    values = tiny_config(data, model={"n_layers": 4}, **sections)
    found = pool.run(held_by_rank, cut.world_size, tmp_path, values)
    config = validate(values, "test")
    vocab_size = json.loads((data / "manifest.json").read_text())["vocab_size"]
    link = Link(1e-6, 1e9)
    cluster = Cluster(DeviceSpec("cpu", "cpu", 1e9, {}, 1e9, 1e9), cut.world_size, 1, link, link)
    planned = Workload(config, resolve_shape(config.model, vocab_size), cut, cluster, "fp32")
    for memory in memory_of(planned):
        assert held(memory) == found[memory.pp_rank * cut.dp * cut.tp]


@pytest.mark.parametrize(
    ("style", "how", "vocab_size"),
    every(
        2,
        [
            ("gpt2", "none", 512),
            ("llama", "none", 512),
            ("llama", "selective", 512),
            ("gpt2", "selective", 512),
            ("gpt2", "full", 512),
            ("llama", "full", 512),
            ("llama", "none", 20_000),
            ("gpt2", "none", 20_000),
        ],
    ),
)
def test_simulated_passes_need_what_real_ones_do(style, how, vocab_size):
    """Of a small vocabulary the peak is in the blocks, of a large one at the embedding."""
    model = {"style": style, "n_layers": 2, "d_model": 256, "max_seq_len": 256}
    train = {"micro_batch_size": 2, "seq_len": 256, "recompute": how}
    planned = workload("tiny", model=model, train=train, vocab_size=vocab_size)
    decoder = build_decoder(planned.shape, 1, "cpu")
    decoder.set_recompute(how, 1)
    tokens = torch.randint(0, vocab_size, (2, 257), generator=torch.Generator().manual_seed(1))

    def passes():
        decoder.zero_grad(set_to_none=True)
        CrossEntropy()(decoder(tokens[:, :-1]), tokens[:, 1:]).backward()

    passes()
    decoder.zero_grad(set_to_none=True)
    real = peak_bytes(passes)
    for memory in (simulate(planned), memory_of(planned)[0]):
        between = memory.moments[0].bytes
        moments = [moment.total for moment in memory.moments if moment.name != "optimiser step"]
        assert max(moments) - between["weights"] - between["optimizer"] == pytest.approx(real, rel=0.01)


@pytest.mark.parametrize(
    ("preset", "layout", "dtype", "how", "size"),
    every(
        3,
        [
            ("gpt2", "1", "fp32", "none", 4),
            ("gpt2", "dp2", "bf16", "full", 1),
            ("gpt2", "zero2x2", "fp32", "full", 16),
            ("gpt2-medium", "zero3x4", "bf16", "selective", 4),
            ("gpt2", "zero3x4", "fp32", "full", 1),
            ("gpt2", "tp2+sp", "bf16", "none", 4),
            ("llama-160m", "tp2", "fp32", "selective", 16),
            ("llama-160m", "dp2*tp2", "bf16", "full", 1),
        ],
    ),
)
def test_peak_is_within_five_percent_of_the_simulated_one(preset, layout, dtype, how, size):
    settings = {"recompute": how, "micro_batch_size": size, "seq_len": 1024}
    planned = workload(preset, layout, dtype, model={"n_layers": 2}, train=settings)
    assert abs(error_of(planned, 0)) < LIMIT


@pytest.mark.parametrize("schedule", every(4, ["interleaved", "1f1b", "gpipe", "zero_bubble"]))
def test_peak_of_each_pipeline_rank_is_within_five_percent(schedule):
    settings = {"micro_batch_size": 2, "seq_len": 1024}
    planned = workload(
        "gpt2", f"pp2+{schedule}", "fp32", num_microbatches=4, model={"n_layers": 4}, train=settings
    )
    for pp_rank in (0, 1):
        assert abs(error_of(planned, pp_rank)) < LIMIT


@pytest.mark.proof
def test_a_peak_at_the_end_of_a_forward_pass_is_that_of_autocasts_copies():
    """Few tokens and all recomputed, so that copies of weights are most of what a first stage adds."""
    model, train = {"n_layers": 4, "max_seq_len": 64}, {"recompute": "full", "seq_len": 64}
    planned = workload(
        "gpt2",
        "pp2",
        "bf16",
        num_microbatches=4,
        vocab_size=512,
        model=model,
        train=train | {"micro_batch_size": 1},
    )
    assert memory_of(planned)[0].peak.name == "forward"
    for pp_rank in (0, 1):
        assert abs(error_of(planned, pp_rank)) < 0.01


@pytest.mark.parametrize("dtype", every(2, ["bf16", "fp32"]))
def test_peak_with_plain_attention_and_dropout_is_within_five_percent(dtype):
    model = {"n_layers": 2, "dropout": 0.1, "attention_dropout": 0.1}
    planned = workload("gpt2", "1", dtype, model=model, train={"micro_batch_size": 4})
    assert abs(error_of(planned, 0)) < LIMIT


def test_a_rank_of_512_is_simulated_and_predicted():
    """Two layers of the 8.3B model, of which make proof takes all 72."""
    planned = workload("gpt2-8b", "dp64*tp8", "bf16", model={"n_layers": 2}, train={"recompute": "full"})
    (memory,) = memory_of(planned)
    seen = simulate(planned, 511)
    assert held(memory) == held(seen)
    assert memory.peak_bytes == pytest.approx(seen.peak_bytes, rel=LIMIT)
    assert not dist.is_initialized()


@pytest.mark.proof
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("case", list(cases(quick=True)), ids=lambda case: "-".join(case[:3]))
def test_a_case_of_the_record_is_within_five_percent(case):
    rows = compare(case)
    assert rows
    assert [row for row in rows if abs(row["error"]) > LIMIT or not row["exact"]] == []


@pytest.mark.proof
@pytest.mark.alone
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("preset", "how", "size"), [("gpt2", "none", 2), ("gpt2", "full", 8), ("llama-160m", "selective", 2)]
)
def test_growth_of_a_process_is_within_ten_percent(tmp_path, preset, how, size):
    command = [sys.executable, "-m", "tests.plan.growth", str(tmp_path), preset, how, str(size)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    grown = json.loads(done.stdout.splitlines()[-1])
    assert grown["predicted"] == pytest.approx(grown["grown"], rel=0.1), grown
