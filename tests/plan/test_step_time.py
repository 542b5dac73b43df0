"""Step times by phase: what must grow, shrink or stay as settings and layouts change."""

import itertools
import time
from dataclasses import replace

import pytest

from shoal.config.layout import parse_layout, under
from shoal.config.load import load_config
from shoal.errors import ConfigError
from shoal.models.counts import count_parameters
from shoal.models.shape import resolve_shape
from shoal.plan.cluster import load_cluster
from shoal.plan.link_cost import Link
from shoal.plan.rates import BACKWARD, COLLECTIVES, Law, Rates, table_rates
from shoal.plan.step_time import INSIDE, PHASES, run_cost, step_time
from shoal.plan.weights import weight_shapes
from shoal.plan.workload import Workload
from shoal.train import clock


def work(words="1", gpu="a100-80", preset="gpt2", dtype="bf16", gpus=0, **settings):
    layout = parse_layout(words)
    settings = {"train": {"compile": "off", **settings.pop("train", {})}, **settings}
    config = under(load_config(preset, settings), layout)
    cluster = load_cluster(gpus or layout.world_size, gpu)
    return Workload(config, resolve_shape(config.model, 50257), layout, cluster, dtype)


def test_phases_are_those_that_a_run_records():
    assert PHASES == clock.PHASES


def test_a_large_model_comes_near_the_rate_of_its_products():
    step = step_time(work(preset="gpt2-xl", model={"dropout": 0.0, "attention_dropout": 0.0}))
    assert 0.4 < step.mfu < 0.71
    assert step.tokens_per_s == pytest.approx(step.tokens / step.total)


def test_the_total_leaves_out_what_lies_within_other_phases():
    step = step_time(work("dp2*tp2"))
    assert step.phases["tp"] > 0
    assert step.total == pytest.approx(sum(s for n, s in step.phases.items() if n not in INSIDE))


def test_products_of_few_tokens_run_at_a_lower_rate():
    """The same tokens in eight times as many micro-batches take longer."""
    few, many = (step_time(work(train={"micro_batch_size": n})) for n in (1, 8))
    assert few.total > 1.1 * many.total


def test_recompute_adds_a_part_of_the_forward_pass_to_the_backward_pass():
    none, full, selective = (step_time(work(train={"recompute": r})) for r in ("none", "full", "selective"))
    added = full.phases["backward"] - none.phases["backward"]
    assert 0.4 < added / none.phases["forward"] < 1
    assert none.total < selective.total < full.total
    assert full.phases["forward"] == none.phases["forward"]


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_a_layer_takes_the_measured_time_of_python_with_its_recompute(recompute):
    workload = work(train={"recompute": recompute, "micro_batch_size": 1})
    rates = table_rates(workload.cluster.device, "bf16")
    layer = f"layer {recompute}"
    host = {layer: Law(0, 0, 1.0), layer + BACKWARD: Law(0, 0, 3.0)}
    times = [
        step_time(workload, replace(rates, laws=laws)).phases for laws in (rates.laws, rates.laws | host)
    ]
    layers = 12 * workload.num_microbatches
    assert times[1]["forward"] - times[0]["forward"] == pytest.approx(layers)
    assert times[1]["backward"] - times[0]["backward"] == pytest.approx(3 * layers)


def test_longer_chunks_recompute_more():
    """Only the last layer of a chunk is spared its last product."""
    one, four = (step_time(work(train={"recompute": "full", "recompute_layers": n})) for n in (1, 4))
    assert four.total > one.total


def test_tensor_parallel_ranks_compute_less_and_wait():
    one, two, eight = (step_time(work(words, gpus=8)) for words in ("1", "tp2", "tp8"))
    assert one.phases["tp"] == 0 < two.phases["tp"] < eight.phases["tp"]
    computing = [
        sum(s.phases[n] for n in ("forward", "backward")) - s.phases["tp"] for s in (one, two, eight)
    ]
    assert computing[0] > computing[1] > computing[2] > computing[0] / 8


GATHERED = {"all_gather", "reduce_scatter"}


@pytest.mark.parametrize(
    ("words", "used"),
    [("tp2", {"all_reduce"}), ("tp2+sp", GATHERED), ("zero3x2", GATHERED), ("dp2", {"all_reduce"})],
)
def test_each_collective_takes_the_time_of_its_own_measured_link(words, used):
    workload, rates = work(words), table_rates(load_cluster(2, "a100-80").device, "bf16")
    fast = dict.fromkeys(COLLECTIVES, Link(1e-6, 1e11))
    usual = step_time(workload, replace(rates, links=fast)).total
    for name in COLLECTIVES:
        found = step_time(workload, replace(rates, links=fast | {name: Link(1e-6, 1e8)})).total
        assert (found > usual) == (name in used), name


def test_computing_hides_the_measured_part_of_an_exchange():
    workload, rates = work("dp2"), table_rates(load_cluster(2, "a100-80").device, "bf16")
    short = replace(rates, links={"all_reduce": Link(0.0, 1e11)})
    times = [step_time(workload, replace(short, overlap=part)).phases["communication"] for part in (0, 0.5)]
    assert times[1] == pytest.approx(times[0] / 2)


@pytest.mark.parametrize(("gpu", "hidden"), [("a100-80", True), ("cpu-2", False)])
def test_shards_are_exchanged_beside_computing_only_where_there_are_streams(gpu, hidden):
    workload = work("zero3x2", gpu, dtype="bf16" if hidden else "fp32")
    rates = table_rates(workload.cluster.device, workload.dtype)
    times = [step_time(workload, replace(rates, overlap=part)).phases["shard"] for part in (0, 0.5)]
    assert (times[1] < times[0]) == hidden


def test_a_bubble_shrinks_with_micro_batches_and_stages():
    long, short = (step_time(work("pp4*dp2", train={"micro_batch_size": n})).phases["bubble"] for n in (8, 2))
    assert short < long
    plain, interleaved, zero = (
        step_time(work(f"pp4{how}*dp2")).phases["bubble"] for how in ("", "+interleaved", "+zero_bubble")
    )
    assert plain > interleaved > zero > 0


def test_buckets_hide_behind_the_backward_pass_only_as_far_as_it_lasts():
    fast, slow = (
        step_time(replace(w, cluster=replace(w.cluster, inside=Link(1e-6, rate)))).phases["communication"]
        for w in [work("dp4")]
        for rate in (3e11, 1e8)
    )
    gradients = 4 * 124e6
    assert fast < 0.1 * gradients / 3e11 * 1.5 + 1e-3
    assert slow > gradients / 1e8


def test_zero_3_gathers_more_often_than_zero_1():
    slow = [
        replace(w, cluster=replace(w.cluster, inside=Link(1e-5, 1e9)))
        for w in map(work, ("zero1x8", "zero3x8"))
    ]
    one, three = (step_time(w).phases["shard"] for w in slow)
    assert three > 1.5 * one


def test_offloaded_shards_are_copied_for_every_micro_batch_of_zero_3():
    """On one GPU nothing is exchanged, so that all that is waited for are copies to and from host memory."""
    parallel = {"parallel": {"offload": True}}
    waited = {}
    for zero, batch in itertools.product((1, 3), (8, 32)):
        train = {"micro_batch_size": 1, "seq_len": 64, "global_batch_size": batch}
        waited[zero, batch] = step_time(work(f"zero{zero}x1", train=train, **parallel)).phases["shard"]
    assert 0 < waited[1, 8] == pytest.approx(waited[1, 32])
    assert waited[3, 32] == pytest.approx(4 * waited[3, 8])
    assert step_time(work("zero3x1")).phases["shard"] == 0


def test_the_optimiser_updates_only_the_own_shard():
    whole, shard = (step_time(work(words)).phases["optimiser"] for words in ("dp8", "zero1x8"))
    assert whole == pytest.approx(8 * shard, rel=0.1)


def test_an_update_in_place_reads_nothing_in_vain_on_a_processor():
    for gpu, dtype, ratio in (("cpu-2", "fp32", 2 / 3), ("a100-80", "bf16", 1.0)):
        rates = table_rates(load_cluster(1, gpu).device, dtype)
        assert rates.law("optimiser").byte_s == pytest.approx(ratio * rates.law("memory").byte_s)


def test_measured_rates_replace_the_tables():
    law = {"product": Law(1e-10, 0, 0), "memory": Law(0, 1e-9, 0)}
    slow = step_time(work(), Rates(law))
    assert slow.total > 100 * step_time(work()).total


def test_a_format_that_a_gpu_lacks_is_refused():
    with pytest.raises(
        ConfigError, match=r"bf16, which v100-16 does not compute\n  hint: use .* fp32 or fp16"
    ):
        step_time(work(gpu="v100-16"))


def test_the_run_counts_steps_validations_and_checkpoints():
    w = work(train={"steps": 100}, eval={"every": 0}, checkpoint={"every": 10})
    step = step_time(w)
    cost = run_cost(w, step)
    assert cost.hours == pytest.approx(100 * step.total / 3600)
    assert cost.checkpoint_bytes == 12 * 124_475_904
    assert cost.disk_bytes == 3 * cost.checkpoint_bytes
    assert cost.usd is None
    priced = replace(w, cluster=replace(w.cluster, device=replace(w.cluster.device, usd_per_hour=2.0)))
    assert run_cost(priced, step).usd == pytest.approx(2 * cost.hours)
    validated = replace(
        w, config=w.config.model_copy(update={"eval": w.config.eval.model_copy(update={"every": 1})})
    )
    assert run_cost(validated, step).hours > cost.hours


def test_a_trillion_parameters_on_3072_gpus_are_timed_at_once():
    model = {"n_layers": 128, "d_model": 25600, "n_heads": 160, "max_seq_len": 2048}
    train = {"global_batch_size": 3072, "micro_batch_size": 1, "seq_len": 2048}
    w = work("pp64*dp6*tp8", model=model, train=train)
    step_time(w)
    began = time.process_time()
    for _ in range(20):
        step_time(w)
    assert (time.process_time() - began) / 20 < 0.005


def test_shapes_have_as_many_values_as_the_model():
    for preset in ("gpt2", "tiny-llama"):
        shape = work(preset=preset).shape
        total = count_parameters(shape).total
        assert sum(a * (b[0] if b else 1) for a, *b in weight_shapes(shape).values()) == total
