"""The search of layouts: complete within the rules, pruned without loss, reasons for what is left out."""

import itertools
import time

import pytest

from shoal.config.layout import Layout, parse_layout
from shoal.config.load import load_config
from shoal.config.sections import Config
from shoal.errors import ConfigError
from shoal.models.shape import resolve_shape
from shoal.plan import search as module
from shoal.plan.cluster import load_cluster
from shoal.plan.memory import CATEGORIES, Moment, RankMemory
from shoal.plan.search import Costs, Plan, check_rules, difference, search, smallest_change, workload_of
from shoal.plan.step_time import PHASES, StepTime
from tests.cases import every

GB = 10**9


def config_of(**settings):
    values = {"model": {"n_layers": 4, "d_model": 64, "n_heads": 4, "vocab_size": 1000, "max_seq_len": 64}}
    values["train"] = {"global_batch_size": 16, "seq_len": 64, "micro_batch_size": 2}
    for section, fields in settings.items():
        values[section] = values.get(section, {}) | fields
    return Config.model_validate(values)


def memory_in(gigabytes):
    """Make a memory formula: bytes grow with the micro-batch, shrink with recompute, zero and tp."""

    def memory(workload):
        layout, train = workload.layout, workload.config.train
        kept = {"none": 4, "selective": 2, "full": 1}[train.recompute]
        parts = dict.fromkeys(CATEGORIES, 0)
        parts["activations"] = int(gigabytes * GB * train.micro_batch_size * kept / layout.tp)
        parts["optimizer"] = int(gigabytes * GB / (layout.dp_shard if layout.zero else 1) / layout.pp)
        return RankMemory(0, (Moment("start", dict.fromkeys(CATEGORIES, 0)), Moment("loss", parts)))

    return memory


def time_of(workload):
    layout, train = workload.layout, workload.config.train
    phases = dict.fromkeys(PHASES, 0.0)
    again = {"none": 1.0, "selective": 1.1, "full": 1.3}[train.recompute]
    phases["forward"] = 1 + 0.2 / train.micro_batch_size
    phases["backward"] = again * (1 + 0.2 / train.micro_batch_size) + 0.1 * (layout.zero == 3)
    phases["shard"] = 0.1 * (layout.zero == 3)
    phases["bubble"] = (layout.pp - 1) / workload.num_microbatches
    phases["communication"] = 0.01 * layout.dp_replicate + 0.02 * (layout.zero == 2)
    phases["optimiser"] = 0.05 / layout.dp_shard
    return StepTime(phases)


def searched(config, gpus=8, gigabytes=1.0, *, fixed=(), best=8, time=time_of):
    shape = resolve_shape(config.model, config.model.vocab_size)
    cluster = load_cluster(gpus, "h100")
    costs = Costs(memory_in(gigabytes), time)
    return search(config, shape, cluster, "bf16", fixed=fixed, costs=costs, best=best)


def every_candidate(config, gpus, gigabytes):
    """Cost all candidates one by one, without any pruning."""
    shape = resolve_shape(config.model, config.model.vocab_size)
    cluster = load_cluster(gpus, "h100")
    sizes = [n for n in range(1, gpus + 1) if gpus % n == 0]
    for tp, pp, shard, zero in itertools.product(sizes, sizes, sizes, range(4)):
        if gpus % (tp * pp * shard) or (zero == 0) != (shard == 1):
            continue
        dp = gpus // tp // pp
        for schedule, sequence, micro, recompute, offload in itertools.product(
            ("gpipe", "1f1b", "interleaved", "zero_bubble"),
            (False, True),
            (1, 2, 4, 8, 16),
            ("none", "selective", "full"),
            (False, True),
        ):
            layout = Layout(pp, dp // shard, shard, tp, zero, sequence, schedule)
            train = {"micro_batch_size": micro, "recompute": recompute}
            workload = workload_of(config, layout, shape, cluster, "bf16", train, offload=offload)
            try:
                check_rules(workload.config, layout, shape)
            except ConfigError:
                continue
            yield Plan(workload, memory_in(gigabytes)(workload), time_of(workload))


def fits(plan):
    return plan.memory.total_bytes <= module.USABLE * plan.workload.cluster.device.memory_bytes


@pytest.mark.parametrize("gigabytes", [1.0, 20.0, 60.0])
def test_pruning_loses_no_candidate(gigabytes):
    best = {}
    for plan in filter(fits, every_candidate(config_of(), 8, gigabytes)):
        layout = plan.workload.layout
        key = (layout.pp, layout.tp, layout.zero, plan.workload.config.parallel.offload)
        best[key] = min(best.get(key, float("inf")), plan.time.total)
    found = searched(config_of(), 8, gigabytes, best=6)
    assert [plan.time.total for plan in found.ranked] == pytest.approx(sorted(best.values())[:6])


def test_each_candidate_is_counted_once():
    """A layout that the rules exclude counts once for all that would divide it further."""
    none, some, all_of_them = (searched(config_of(), 8, gigabytes, best=3) for gigabytes in (1e3, 20.0, 1.0))
    legal = [
        plan
        for plan in every_candidate(config_of(), 8, 1e3)
        if plan.workload.layout.pp > 1 or plan.workload.layout.schedule == "1f1b"
    ]
    assert none.ranked == []
    assert none.num_slower == 0
    assert [one.count for one in none.rejected if one.reason == module.MEMORY] == [len(legal)]
    assert none.num_candidates == some.num_candidates == all_of_them.num_candidates


def test_a_gpu_by_itself_keeps_state_in_host_memory_where_it_does_not_fit():
    def memory(workload):
        held = 0 if workload.config.parallel.offload else 100 * GB
        parts = dict.fromkeys(CATEGORIES, 0) | {"optimizer": held}
        return RankMemory(0, (Moment("between steps", parts),))

    config = config_of()
    shape = resolve_shape(config.model, 1000)
    found = search(config, shape, load_cluster(1, "h100"), "bf16", costs=Costs(memory, time_of))
    words = {str(plan).partition(",")[0] for plan in found.ranked}
    assert words == {"zero1x1", "zero2x1", "zero3x1"}
    assert all(plan.workload.config.parallel.offload for plan in found.ranked)
    on_cpu = search(config, shape, load_cluster(2, "cpu-2"), "fp32", costs=Costs(memory_in(0.001), time_of))
    assert not any(
        plan.workload.config.parallel.offload for plan in on_cpu.ranked
    )  # it changes nothing there


def test_what_the_user_has_given_stays():
    config = config_of(parallel={"tp": 2}, train={"micro_batch_size": 2, "recompute": "full"})
    fixed = {"parallel.tp", "train.micro_batch_size", "train.recompute"}
    found = searched(config, fixed=fixed)
    assert {plan.workload.layout.tp for plan in found.ranked} == {2}
    assert {plan.workload.config.train.micro_batch_size for plan in found.ranked} == {2}
    assert {plan.workload.config.train.recompute for plan in found.ranked} == {"full"}


def test_tp_stays_in_a_node_unless_it_is_asked_for():
    config = config_of(model={"n_heads": 16})
    found = searched(config, 16)
    assert max(plan.workload.layout.tp for plan in found.ranked) <= 8
    assert any(one.sentence.startswith("tp 16 is larger than a node of 8") for one in found.rejected)
    asked = config.model_copy(update={"parallel": config.parallel.model_copy(update={"tp": 16})})
    found = searched(asked, 16, fixed={"parallel.tp"})
    assert {plan.workload.layout.tp for plan in found.ranked} == {16}


def test_rejected_layouts_are_grouped_by_reason():
    found = searched(config_of(model={"n_heads": 2}))
    sentences = [one.sentence for one in found.rejected]
    assert sum("n_heads = 2 is not divisible by parallel.tp" in sentence for sentence in sentences) == 1
    assert sum("leaves a stage without a layer" in sentence for sentence in sentences) == 1
    assert [one.count for one in found.rejected] == sorted(
        (one.count for one in found.rejected), reverse=True
    )


def test_a_layout_that_is_too_large_is_told_by_the_one_that_needs_least():
    found = searched(config_of(), 2, gigabytes=200.0)
    assert found.ranked == []
    memory = next(one for one in found.rejected if one.reason == module.MEMORY)
    assert "micro-batch 1, recompute full needs" in memory.sentence
    assert "most of it" in memory.sentence


def change(config, gpus, gigabytes, fixed=()):
    shape = resolve_shape(config.model, config.model.vocab_size)
    costs = Costs(memory_in(gigabytes), time_of)
    return smallest_change(config, shape, load_cluster(gpus, "h100"), "bf16", fixed=fixed, costs=costs)


def test_the_smallest_change_is_the_one_that_helps():
    assert "use 2 times as many nodes, 2 (then" in change(config_of(), 1, 50.0)
    odd = config_of(model={"n_heads": 1, "n_layers": 1}, train={"global_batch_size": 6})
    assert "use train.global_batch_size = 8 (then zero1x8, micro-batch 1)" in change(odd, 8, 1.0)
    fixed = config_of(parallel={"pp": 8})
    assert "leave parallel.pp to the planner (then" in change(fixed, 8, 1.0, {"parallel.pp"})
    assert change(config_of(), 1, 1e9) == "use a smaller model, or devices with more memory"


def test_the_difference_names_where_time_and_memory_go():
    config = config_of()
    shape, cluster = resolve_shape(config.model, 1000), load_cluster(8, "h100")
    plans = []
    for words in ("dp8", "pp2*dp4"):
        workload = workload_of(config, parse_layout(words), shape, cluster, "bf16")
        plans.append(Plan(workload, memory_in(1.0)(workload), time_of(workload)))
    words = difference(plans[1], plans[0])
    assert words.startswith("bubble +")
    assert words.endswith("0.5 GB less")
    assert difference(plans[0], plans[0]) == "the same within 1 %"


@pytest.mark.parametrize(
    ("preset", "gpus", "gpu"), every(2, [("gpt2-8b", 512, "v100-32"), ("gpt2-xl", 512, "h100")])
)
def test_512_gpus_are_searched_in_seconds(preset, gpus, gpu):
    config = load_config(preset)
    shape, cluster = resolve_shape(config.model, 50257), load_cluster(gpus, gpu)
    dtype = "bf16" if "bf16" in cluster.device.flops else "fp16"
    began = time.process_time()
    found = search(config, shape, cluster, dtype)
    assert found.ranked
    assert found.num_candidates > 1_000
    assert time.process_time() - began < 10


def test_inputs_in_host_memory_that_are_asked_for_are_kept_with_all_recomputed():
    config = config_of(train={"recompute_offload": True})
    found = searched(config, fixed={"train.recompute_offload"})
    settings = {
        (p.workload.config.train.recompute, p.workload.config.train.recompute_offload) for p in found.ranked
    }
    assert settings == {("full", True)}
    none = searched(config, fixed={"train.recompute_offload", "train.recompute"})
    assert none.ranked == []
    assert none.rejected[0].sentence.startswith("train.recompute_offload = true with train.recompute = none")


def test_a_split_that_is_asked_for_leaves_layouts_with_as_many_stages():
    config = config_of(parallel={"split": (1, 3)})
    found = searched(config, fixed={"parallel.split"})
    assert {plan.workload.layout.stages for plan in found.ranked} == {2}
    assert {plan.workload.config.parallel.split for plan in found.ranked} == {(1, 3)}
    assert any("names 2 stages, and dp8 has 1" in one.sentence for one in found.rejected)
    free = searched(config)
    assert {p.workload.config.parallel.split for p in free.ranked if p.workload.layout.stages != 2} == {()}


def test_the_fastest_is_found_where_less_recompute_needs_less_memory():
    """Full recompute makes all of a block's activations again, beside what earlier blocks still hold."""

    def memory(workload):
        how = workload.config.train.recompute
        size = {"none": 200, "selective": 40, "full": 90}[how] * GB
        parts = dict.fromkeys(CATEGORIES, 0) | {"activations": size}
        return RankMemory(0, (Moment("between steps", dict.fromkeys(CATEGORIES, 0)), Moment("loss", parts)))

    config = config_of()
    shape = resolve_shape(config.model, 1000)
    found = search(config, shape, load_cluster(2, "h100"), "bf16", costs=Costs(memory, time_of))
    assert found.ranked
    assert {plan.workload.config.train.recompute for plan in found.ranked} == {"selective"}


def test_a_layout_whose_state_does_not_fit_is_costed_once():
    asked = []

    def memory(workload):
        asked.append((workload.layout, workload.config.parallel.offload))
        parts = dict.fromkeys(CATEGORIES, 0) | {"optimizer": 100 * GB}
        return RankMemory(0, (Moment("between steps", parts),))

    config = config_of()
    shape = resolve_shape(config.model, 1000)
    found = search(config, shape, load_cluster(4, "h100"), "bf16", costs=Costs(memory, time_of))
    assert found.ranked == []
    assert len(asked) == len(set(asked)) < found.num_rejected


def test_what_grows_with_the_micro_batch_is_no_reason_to_leave_smaller_ones_out():
    def memory(workload):
        copies = {"offload": 50 * GB * workload.config.train.micro_batch_size}
        return RankMemory(0, (Moment("between steps", dict.fromkeys(CATEGORIES, 0) | copies),))

    shape = resolve_shape(config_of().model, 1000)
    found = search(config_of(), shape, load_cluster(2, "h100"), "bf16", costs=Costs(memory, time_of))
    assert {plan.workload.config.train.micro_batch_size for plan in found.ranked} == {1}
