"""Predicted memory: what can be said without a model, and a run of another framework."""

import json
import time

import pytest

from shoal.models.counts import count_parameters
from shoal.plan.memory import CATEGORIES, memory_of, worst
from shoal.plan.weights import groups_of
from tests.plan.workloads import workload
from tests.shared import SHARED

MIB = 1 << 20


@pytest.fixture(scope="module")
def golden():
    file = SHARED / "goldens" / "gpt2_345m.json"
    if not file.exists():
        pytest.skip("no folder `shared` with goldens beside the checkout (SHOAL_SHARED names one)")
    return json.loads(file.read_text())


def of_the_golden(row):
    return workload(
        "megatron-345m",
        f"tp{row['tp']}" if row["tp"] > 1 else "1",
        "fp16",
        kind="cuda",
        model={"pad_vocab_multiple": row.get("pad_multiple", 128 * row["tp"])},
    )


def test_parameters_of_a_rank_are_those_that_megatron_printed(golden):
    for row in golden["parameters"]:
        planned = of_the_golden(row)
        (stages,) = planned.stages_of_ranks
        groups = groups_of(planned.shape, planned.layout, stages)
        assert sum(group.numel * count for group, count in groups) == row["per_rank"]


def test_peak_of_megatrons_runs_is_within_five_percent_under_their_rules(golden):
    for row in golden["memory_mib"]:
        (memory,) = memory_of(of_the_golden(row), "megatron_2020")
        assert memory.allocated / MIB == pytest.approx(row["allocated"], rel=0.02)
        assert memory.peak_bytes / MIB == pytest.approx(row["max_allocated"], rel=0.05)
        if row["tp"] == 1:
            assert memory.reserved_bytes / MIB == pytest.approx(row["reserved"], rel=0.05)


@pytest.mark.parametrize("preset", ["tiny", "tiny-llama", "gpt2-8b", "llama-1b"])
def test_weights_of_one_rank_are_all_parameters(preset):
    planned = workload(preset)
    (memory,) = memory_of(planned)
    assert memory.moments[0].bytes["weights"] == 4 * count_parameters(planned.shape).total


@pytest.mark.parametrize("layout", ["tp4", "pp4", "pp2+interleaved", "zero3x4", "pp2*zero2x2"])
def test_ranks_together_have_the_parameters_and_what_is_held_twice(layout):
    planned = workload("gpt2", layout, num_microbatches=4)
    shape, cut = planned.shape, planned.layout
    copies = cut.tp * cut.dp_shard
    held = sum(memory.moments[0].bytes["weights"] for memory in memory_of(planned)) * copies
    twice = shape.padded_vocab_size * shape.d_model if cut.pp > 1 else 0  # the tied embedding of the ends
    blocks = shape.n_layers * (4 * shape.d_model + 2 * shape.d_model)  # norms and biases of whole width
    norms = blocks + 2 * shape.d_model + shape.max_seq_len * shape.d_model
    replicated = norms * (cut.tp - 1)
    assert held == 4 * (count_parameters(shape).total + twice + replicated)


def test_the_peak_is_the_largest_moment_and_its_categories_add_up():
    memory = worst(workload("gpt2", "tp2", "bf16", kind="cuda", train={"micro_batch_size": 16}))
    assert memory.peak.total == max(moment.total for moment in memory.moments) == memory.total_bytes
    assert set(memory.peak.bytes) == set(CATEGORIES)
    assert sum(memory.peak.bytes.values()) == memory.total_bytes
    assert memory.allocated < memory.peak_bytes < memory.reserved_bytes < memory.total_bytes


def test_the_first_rank_of_a_pipeline_holds_most_activations():
    first, *_, last = memory_of(workload("llama-1b", "pp4", num_microbatches=8))
    assert first.peak.bytes["activations"] > last.peak.bytes["activations"]
    assert last.peak.bytes["logits"] > 0 == first.peak.bytes["logits"]


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "interleaved", "zero_bubble"])
def test_only_gpipe_holds_more_with_more_micro_batches(schedule):
    few, many = (
        memory_of(workload("gpt2", f"pp4+{schedule}", num_microbatches=n))[0].peak.bytes["activations"]
        for n in (16, 64)
    )
    assert (many > 2 * few) is (schedule == "gpipe")


def test_recompute_trades_activations_for_layer_inputs():
    found = [
        worst(workload("gpt2", train={"recompute": how, "micro_batch_size": 16})).peak_bytes
        for how in ("none", "selective", "full")
    ]
    assert found == sorted(found, reverse=True)
    assert found[0] > 1.5 * found[2]


def test_offloaded_state_is_in_host_memory():
    plain, offloaded = (
        worst(workload("gpt2", "zero3x2", "bf16", kind="cuda", parallel={"offload": on}))
        for on in (False, True)
    )
    state = ("weights", "optimizer")
    assert all(plain.peak.bytes[name] > 0 == offloaded.peak.bytes[name] for name in state)
    assert plain.host_bytes == 0
    assert offloaded.host_bytes >= sum(plain.moments[0].bytes[name] for name in (*state, "gradients"))


def test_a_formula_takes_milliseconds():
    planned = [workload("gpt2-8b", "tp8*dp64", "bf16", kind="cuda"), workload("llama-1b", "pp2+interleaved")]
    for one in planned:
        worst(one)
        began = time.perf_counter()
        for _ in range(20):
            worst(one)
        assert (time.perf_counter() - began) / 20 < 0.01


def test_a_model_of_1t_parameters_on_3072_devices_takes_under_a_second():
    """Narayanan et al. 2021, table 1, last row: 128 layers of width 25,600, tp 8, pp 64, dp 6."""
    model = {"n_layers": 128, "d_model": 25_600, "n_heads": 160, "max_seq_len": 2048}
    settings = {"micro_batch_size": 1, "seq_len": 2048, "recompute": "full"}
    began = time.perf_counter()
    planned = workload(
        "gpt2", "pp64*dp6*tp8", "bf16", kind="cuda", num_microbatches=512, model=model, train=settings
    )
    found = memory_of(planned)
    assert time.perf_counter() - began < 1.0
    assert len(found) == 64
    assert count_parameters(planned.shape).total == pytest.approx(1.008e12, rel=0.001)
    assert found[1].allocated > 16 * 1.008e12 / 512 * 0.9  # of 16 bytes a parameter between steps
