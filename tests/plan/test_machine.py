"""Measured rates: stored, read with limits, used where the device is this machine; laws fitted to times."""

import dataclasses
import itertools
import json
import weakref
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from shoal.comm.silent_transport import SilentTransport
from shoal.comm.torch_transport import TorchTransport
from shoal.config.layout import Layout
from shoal.config.load import load_config
from shoal.errors import InputError
from shoal.models.decoder import Block
from shoal.models.shape import resolve_shape
from shoal.plan import here, machine, measure_machine
from shoal.plan.cluster import load_cluster
from shoal.plan.link_cost import Link
from shoal.plan.machine import Machine, load_machine, rates_of, save_machine
from shoal.plan.measure_machine import fit_law
from shoal.plan.rates import BACKWARD, COLLECTIVES, KERNELS, Law
from shoal.plan.step_time import step_time
from shoal.plan.workload import Workload
from shoal.runtime.device import select_device
from tests import commands

LAWS = {
    "product": Law(2e-11, 0.0, 1e-6),
    "memory": Law(0.0, 1e-10, 1e-6),
    "norm backward": Law(0.0, 2e-10, 0.0),
}
MEASURED = Machine(
    "CPU", "cpu", 2, 8 << 30, {"1": {"fp32": LAWS}, "2": {"fp32": LAWS}}, {"all_reduce": Link(1e-4, 1e9)}, 0.5
)


def test_what_was_stored_is_read_again(tmp_path):
    save_machine(MEASURED, tmp_path)
    assert load_machine(tmp_path) == MEASURED


def test_nothing_measured_is_none(tmp_path):
    assert load_machine(tmp_path) is None


def test_the_rates_measured_here_count_for_this_machine(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cluster = MEASURED.cluster(2)
    config = load_config("tiny")
    workload = Workload(config, resolve_shape(config.model, 256), Layout(), MEASURED.cluster(1), "fp32")
    before = step_time(workload).total
    save_machine(MEASURED)
    assert rates_of(cluster.device, 2, "fp32").law("product") == LAWS["product"]
    assert step_time(workload).total != before
    assert cluster.device.memory_bytes == 4 << 30


def test_processes_beyond_the_measured_ones_share_the_cores():
    """Four cores: as many processes start their calls at once, and any number shares operations and bytes."""
    alone = {"product": Law(1e-11, 1e-11, 1e-6), "memory": Law(0.0, 5e-11, 1e-6)}
    measured = dataclasses.replace(MEASURED, devices=4, laws={"1": {"fp32": alone}, "2": {"fp32": LAWS}})
    for processes, work, calls in ((2, 1, 1), (4, 2, 1), (16, 8, 4)):
        law = measured.rates(processes, "fp32").law("product")
        assert law == pytest.approx((work * 2e-11, 0.0, calls * 1e-6))
        assert measured.cluster(processes).device.flops["fp32"] == pytest.approx(5e10 / work)
        assert measured.cluster(processes).device.memory_bytes_per_s == pytest.approx(1e10 / work)
    assert measured.rates(1, "fp32").laws == alone
    gpus = dataclasses.replace(measured, kind="cuda", devices=8)
    assert gpus.rates(8, "fp32").laws == LAWS


def test_a_measured_gpu_has_the_tables_peaks_and_copies_and_its_own_rates(tmp_path, monkeypatch):
    monkeypatch.setattr(here, "gpu_names", lambda: ["NVIDIA H100 80GB HBM3"] * 2)
    table = load_cluster(2, "h100", 1)
    measured = Machine("NVIDIA H100 80GB HBM3", "cuda", 2, 79 << 30, {"1": {"bf16": LAWS}}, {}, 0.8, 2e10)
    monkeypatch.setattr(here, "load_machine", lambda: measured)
    cluster = here.this_machine("auto")
    assert cluster.device == dataclasses.replace(table.device, name=machine.HERE, memory_bytes=79 << 30)
    assert (cluster.inside, cluster.across) == (table.inside, table.across)
    assert measured.rates(2, "bf16").laws == LAWS
    other = dataclasses.replace(measured, name="NVIDIA X1")
    monkeypatch.setattr(here, "load_machine", lambda: other)
    monkeypatch.setattr(here, "gpu_names", lambda: ["NVIDIA X1"] * 2)
    device = here.this_machine("auto").device
    assert (device.host_bytes_per_s, device.memory_bytes_per_s) == (2e10, 1e10)
    assert device.flops == pytest.approx({"bf16": 5e10})
    save_machine(other, tmp_path)
    assert load_machine(tmp_path) == other


def test_copies_to_the_device_are_timed(monkeypatch):
    monkeypatch.setattr(measure_machine, "_COPIED_BYTES", 1 << 20)
    monkeypatch.setattr(measure_machine, "_COPYING_S", 0.01)
    assert 1e7 < measure_machine.host_copies(select_device("cpu", 0, 1)) < 1e13


@pytest.mark.parametrize(
    "change",
    [
        {"version": 9},
        {"laws": {"1": {"fp32": {"product": [1, 2]}}}},
        {"laws": {"1": {"fp32": {"product": [1e-9, -1.0, 0], "memory": [0, 1, 0]}}}},
        {"laws": {"1": {"fp32": {"magic": [0, 0, 0], "product": [0, 0, 0], "memory": [0, 1, 0]}}}},
        {"links": {"all_reduce": [1e-4, 0]}},
        {"links": {"all_gather": [1e-4, float("nan")]}},
        {"links": {"all_to_all": [1e-4, 1e9]}},
        {"kind": "tpu"},
        {"overlap": None},
    ],
)
def test_another_file_is_refused(tmp_path, change):
    file = save_machine(MEASURED, tmp_path)
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(InputError, match="is not a file of measured rates"):
        load_machine(tmp_path)


def test_a_large_file_is_refused(tmp_path):
    (tmp_path / "machine.json").write_bytes(b" " * ((1 << 20) + 1))
    with pytest.raises(InputError, match="bytes: not a file"):
        load_machine(tmp_path)


def test_each_kernel_is_measured_forward_and_backward(monkeypatch):
    sizes = {
        "_PRODUCTS": ((8, 16, 16), (16, 16, 32)),
        "_ATTENTION": ((1, 1, 8, 8), (1, 2, 16, 8)),
        "_ELEMENTS": (1 << 13, 1 << 14),
        "_LOGITS": ((8, 64), (16, 64)),
        "_UPDATED": ((1 << 8, 4), (1 << 10, 2)),
    }
    for name, value in sizes.items():
        monkeypatch.setattr(measure_machine, name, value)
    device = select_device("cpu", 0, 1)
    for dtype in (torch.float32, torch.bfloat16):
        laws = measure_machine._laws(SilentTransport(0, 1), device, dtype, 0.05)
        assert laws.keys() >= {*KERNELS, "product" + BACKWARD, "loss" + BACKWARD, "layer full" + BACKWARD}
        assert all(max(law) > 0 for law in laws.values())


@pytest.mark.parametrize(("recompute", "calls"), [("none", (1, 1)), ("selective", (1, 2)), ("full", (2, 2))])
def test_the_measured_layer_is_computed_again_as_a_trained_one_is(recompute, calls):
    case = measure_machine._layer(torch.float32, recompute)
    with (
        patch.object(Block, "forward", autospec=True, side_effect=Block.forward) as whole,
        patch.object(Block, "_run", autospec=True, side_effect=Block._run) as inside,
    ):
        case.act().sum().backward()
    assert (case.kernel, whole.call_count, inside.call_count) == (f"layer {recompute}", *calls)


def test_measured_calls_keep_their_results_and_their_backward_passes_wait_for_all_of_them():
    seen = []

    def case(number):
        leaf = torch.ones(4, requires_grad=True)

        def act():
            seen.append(f"call {number}")
            y = leaf * 2
            y.register_hook(lambda _: seen.append(f"back {number}"))
            return y

        return measure_machine._Case("add", 0, 1, 1, act, (leaf,))

    copies = [case(number) for number in range(3)]
    samples = measure_machine._backward(copies, select_device("cpu", 0, 1), 0.0)
    assert len(samples) == 3
    assert seen == ["call 0", "call 1", "call 2", "back 0", "call 0", "back 1", "call 1", "back 2"]
    results = []

    def fresh_result():
        y = torch.ones(4)
        results.append(weakref.ref(y))
        return y

    fresh = [dataclasses.replace(copies[0], act=fresh_result)] * 3
    turn = measure_machine._turns(fresh)
    for _ in range(5):
        turn()
    assert [one() is not None for one in results] == [False, False, True, True, True]


def exchanges_of(seconds):
    transport, on = TorchTransport(), select_device("cpu", dist.get_rank(), 2)
    links = measure_machine._links(transport, on, seconds)
    return links, measure_machine._overlap(transport, on, links["all_reduce"], seconds)


def test_each_collective_has_a_link_of_its_own_and_computing_hides_a_part(pool):
    links, overlap = pool.run(exchanges_of, 2, 0.1)[0]
    assert links.keys() == set(COLLECTIVES)
    assert all(1e7 < link.bytes_per_s < 1e12 and 0 <= link.latency_s < 1 for link in links.values())
    assert 0 <= overlap <= 1


def links_of_noise():
    with patch.object(measure_machine, "_added", side_effect=itertools.cycle((3.0, 2.0, 1.0))):
        return measure_machine._links(TorchTransport(), select_device("cpu", dist.get_rank(), 2), 0.0)


def test_noise_leaves_no_collective_without_a_link(pool):
    links = pool.run(links_of_noise, 2)[0]
    assert links.keys() == set(COLLECTIVES)
    assert links["all_reduce"] == Link(0.0, measure_machine._EXCHANGED[-1])


@pytest.mark.proof
def test_the_command_measures_this_machine_and_plans_with_it():
    done = commands.run("plan", "tiny", "--measure", "--runtime.device", "cpu", timeout=300)
    assert done.returncode == 0, done.stderr
    found = load_machine()
    assert found.links.keys() == set(COLLECTIVES)
    assert {*KERNELS} <= found.laws["2"]["fp32"].keys()


def test_a_law_is_found_again_from_its_times():
    law = Law(2e-11, 3e-10, 5e-6)
    rows = [
        (f, b, c, law.seconds(f, b, c))
        for f, b, c in ((1e9, 1e6, 1), (1e6, 1e7, 1), (1e5, 1e3, 2), (1e8, 1e7, 1))
    ]
    assert fit_law(rows) == pytest.approx(law)


def test_no_term_of_a_law_is_negative():
    rows = [(1e9, 1e6, 1, 1.0), (2e9, 1e6, 1, 2.2), (4e9, 1e6, 1, 4.0)]
    assert min(fit_law(rows)) >= 0
    assert fit_law(rows).seconds(2e9, 1e6) == pytest.approx(2.05, rel=0.1)
