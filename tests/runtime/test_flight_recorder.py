"""The recorder: what a rank did last, read from outside while it runs, is stopped, or is dead."""

import logging
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from shoal.diagnosis.views import read_recorder
from shoal.errors import ShoalError
from shoal.runtime import flight_recorder
from shoal.runtime.flight_recorder import (
    SLOTS,
    UNRECORDED,
    FlightRecorder,
    Issued,
    label,
    mark,
    recorder_path,
)
from shoal.runtime.recording import recorded

ABOUT = ("", [0, 1])


def view_of(run_dir, rank):
    return read_recorder(recorder_path(run_dir, rank), rank)


@contextmanager
def recording(tmp_path):
    """A world of one rank whose operations are recorded; yields a function that reads them."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        with recorded(FlightRecorder(tmp_path, 0)):
            yield lambda: view_of(tmp_path, 0)
    finally:
        dist.destroy_process_group()


@pytest.fixture
def view(tmp_path):
    with recording(tmp_path) as read:
        yield read


def issue(recorder, number, name="all_reduce"):
    for _ in range(number):
        recorder.record(name, lambda: Issued("0", "", torch.zeros(2, 3), lambda: ABOUT))


def test_the_last_operations_are_kept_and_all_are_counted(tmp_path):
    recorder = FlightRecorder(tmp_path, 3)
    issue(recorder, SLOTS + 10)
    view = view_of(tmp_path, 3)
    assert (view.rank, view.state, view.pid) == (3, "running", os.getpid())
    assert [op.seq for op in view.operations] == list(range(11, SLOTS + 11))
    assert view.channels["0 "].seq == SLOTS + 10
    assert view.channels["0 "].ranks == [0, 1]


def test_an_operation_tells_shape_dtype_caller_and_words(tmp_path):
    recorder = FlightRecorder(tmp_path, 0)
    label("gradient bucket 5")
    issue(recorder, 2)
    first, second = view_of(tmp_path, 0).operations
    assert (first.name, first.tensor) == ("all_reduce", "[2, 3] float32")
    assert first.caller.startswith("issue at test_flight_recorder.py:")
    assert (first.words, second.words) == ("gradient bucket 5", "")


def test_the_heartbeat_tells_phase_and_step_and_moves(tmp_path):
    recorder = FlightRecorder(tmp_path, 0)
    flight_recorder.install(recorder)
    try:
        mark("data", 7)
        before = view_of(tmp_path, 0)
        mark("forward")
        after = view_of(tmp_path, 0)
    finally:
        flight_recorder.install(None)
    assert (before.phase, before.step) == ("data", 7)
    assert (after.phase, after.step) == ("forward", 7)
    assert after.beats > before.beats


@pytest.mark.parametrize("ranks", [[0], [0, 1, 2, 3], [1, 5, 9], [0, 1, 4, 5]])
def test_ranks_of_a_group_are_read_back(tmp_path, ranks):
    FlightRecorder(tmp_path, 0).record("barrier", lambda: Issued("g", "", None, lambda: ("tp", ranks)))
    channel = view_of(tmp_path, 0).channels["g "]
    assert (channel.description, channel.ranks) == ("tp", ranks if ranks != [0, 1, 4, 5] else [])


def test_a_slot_that_is_being_written_is_left_out(tmp_path):
    recorder = FlightRecorder(tmp_path, 0)
    issue(recorder, 2)
    path = recorder_path(tmp_path, 0)
    raw = bytearray(path.read_bytes())
    end = raw.index(b",1]", raw.index(b"[1,0,1,"))  # the number at the end of the first slot
    raw[end + 1 : end + 2] = b"0"
    path.write_bytes(raw)
    assert [op.seq for op in view_of(tmp_path, 0).operations] == [2]


def test_no_ring_and_half_a_ring_are_no_view(tmp_path):
    for content in (None, b"", b"[1"):
        if content is not None:
            (tmp_path / "recorder").write_bytes(content)
        assert read_recorder(tmp_path / "recorder", 0) is None


def test_a_folder_that_cannot_be_written_is_said(tmp_path):
    (tmp_path / "ranks").write_text("")
    with pytest.raises(ShoalError, match="cannot be written"):
        FlightRecorder(tmp_path, 0)


def test_a_killed_process_leaves_its_ring(tmp_path):
    code = f"""
    import os, signal
    from pathlib import Path
    from shoal.runtime.flight_recorder import Issued, FlightRecorder
    recorder = FlightRecorder(Path({str(tmp_path)!r}), 0)
    recorder.mark("forward", 3)
    recorder.record("all_reduce", lambda: Issued("0", "", None, lambda: ("", [0, 1])))
    os.kill(os.getpid(), signal.SIGKILL)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)])
    assert done.returncode == -signal.SIGKILL
    view = view_of(tmp_path, 0)
    assert (view.phase, view.step, view.operations[0].name) == ("forward", 3, "all_reduce")


def test_every_public_function_is_recorded_once(view):
    x, y = torch.zeros(4), torch.zeros(4)
    calls = {
        "all_reduce": lambda: dist.all_reduce(x),
        "broadcast": lambda: dist.broadcast(x, 0),
        "reduce": lambda: dist.reduce(x, 0),
        "all_gather": lambda: dist.all_gather([y], x),
        "gather": lambda: dist.gather(x, [y], 0),
        "scatter": lambda: dist.scatter(x, [y], 0),
        "reduce_scatter": lambda: dist.reduce_scatter(y, [x]),
        "all_to_all": lambda: dist.all_to_all_single(y, x),
        "barrier": dist.barrier,
    }
    for name, call in calls.items():
        before = len(view().operations)
        call()
        new = view().operations[before:]
        assert [op.name for op in new] == [name]
        assert " at test_flight" in new[0].caller  # of 64 bytes
        assert new[0].tensor == ("" if name in ("all_to_all", "barrier") else "[4] float32")
    before = len(view().operations)
    dist.all_gather_into_tensor(y, x)
    assert [op.name for op in view().operations[before:]] == ["all_gather"]


def test_an_error_in_the_recording_ends_it_with_one_warning_and_nothing_else(view, monkeypatch, caplog):
    monkeypatch.setattr(logging.getLogger("shoal"), "propagate", True)
    dist.all_reduce(torch.zeros(1))
    monkeypatch.setattr("shoal.runtime.flight_recorder._call_site", lambda: 1 / 0)
    x = torch.ones(4)
    for _ in range(3):
        dist.all_reduce(x)
    assert x.tolist() == [1, 1, 1, 1]
    assert view().phase == UNRECORDED
    assert len(view().operations) == 1
    warnings = {id(record): record.levelname for record in caplog.records}  # a logger may show one twice
    assert list(warnings.values()) == ["WARNING"]
    assert "no longer recorded" in caplog.text


def run_engines(run_dir):
    """Use every engine of the house on this rank; return what the recorder says of each. Collective."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from shoal.parallel.tensor import Axis

    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("axis",))
    seen = {}

    def fsdp():
        model = fully_shard(torch.nn.Linear(4, 4, bias=False), mesh=mesh)
        model.set_gradient_divide_factor(1.0)
        model.set_force_sum_reduction_for_comms(True)
        model(torch.ones(2, 4)).sum().backward()

    def tensor():
        axis = Axis(mesh, lambda _: nullcontext())
        axis.scatter_sequence(axis.gather_sequence(axis.all_reduce(torch.ones(2, 4, 4))))

    def p2p():
        made = dist.P2POp(*((dist.isend, torch.ones(3), 1) if rank == 0 else (dist.irecv, torch.ones(3), 0)))
        for work in dist.batch_isend_irecv([made]):
            work.wait()

    def objects():
        dist.all_gather_object([None, None], "a" * (rank + 1))

    with recorded(FlightRecorder(run_dir, rank)):
        for engine in (fsdp, tensor, p2p, objects):
            before = view_of(run_dir, rank).operations
            engine()
            after = view_of(run_dir, rank)
            new = after.operations[len(before) :]
            seen[engine.__name__] = [(op.name, op.tensor, after.channels[op.channel].ranks) for op in new]
    return seen


def test_every_engine_of_the_house_is_recorded_alike_on_all_ranks(pool, tmp_path):
    first, second = pool.run(run_engines, 2, tmp_path)
    assert [name for name, *_ in first["fsdp"]] == ["all_gather", "reduce_scatter"]
    assert [name for name, *_ in first["tensor"]] == ["all_reduce", "all_gather", "reduce_scatter"]
    assert [name for name, *_ in first["objects"]] == ["all_gather", "all_gather"]
    assert first["p2p"] == [("send", "[3] float32", [0, 1])]
    assert second["p2p"] == [("recv", "[3] float32", [0, 1])]
    del first["p2p"], second["p2p"]
    assert first == second


def wait_for_the_other(run_dir):
    """Rank 1 comes late; say on rank 0 whether its recorder told that it waited, and tells it still."""
    if dist.get_rank() == 1:
        time.sleep(1)
        dist.all_reduce(torch.zeros(1))
        return None
    seen = []
    with recorded(FlightRecorder(run_dir, 0)):
        look = threading.Timer(0.5, lambda: seen.append(view_of(run_dir, 0).waiting))
        look.start()
        dist.all_reduce(torch.zeros(1))
        look.join()
        return [*seen, view_of(run_dir, 0).waiting]


def test_a_rank_that_waits_for_another_is_seen_to(pool, tmp_path):
    assert pool.run(wait_for_the_other, 2, tmp_path)[0] == [True, False]


def test_leaving_puts_everything_back(tmp_path):
    methods = dict(vars(dist.ProcessGroup))
    with recording(tmp_path) as view:
        assert vars(dist.ProcessGroup)["allreduce"] is not methods["allreduce"]
        dist.all_reduce(torch.zeros(1))
        issued = view().channels
    assert dict(vars(dist.ProcessGroup)) == methods
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    dist.all_reduce(torch.zeros(1))
    dist.destroy_process_group()
    assert view_of(tmp_path, 0).channels == issued


def test_an_operation_of_a_known_shape_is_recorded_in_few_calls(tmp_path):
    """Functions of Python and C that one operation with a wait calls: some 38, none of the system."""
    recorder, x, calls = FlightRecorder(tmp_path, 0), torch.zeros(2, 3), []

    def record():
        recorder.record("all_reduce", lambda: Issued("0", "", x, lambda: ABOUT))
        recorder.wait(1)
        recorder.wait(-1)

    record()  # spells its texts
    before = sys.getprofile()
    sys.setprofile(lambda frame, event, what: calls.append((event, getattr(what, "__name__", ""))))
    try:
        record()
    finally:
        sys.setprofile(before)
    assert sum(event in ("call", "c_call") for event, _ in calls) <= 40, calls
    known = "__new__ get pop _getframe next time encode ljust __exit__ setprofile"
    assert {name for event, name in calls if event == "c_call"} <= {*known.split()}


class OnGpu(torch.Tensor):
    """A tensor that says it lies on a GPU."""

    is_cuda = True


@pytest.fixture
def stream(monkeypatch):
    """A GPU's stream, as far as it is asked for a moment and whether that has come."""
    stream = SimpleNamespace(reached=False)
    stream.record_event = lambda: SimpleNamespace(query=lambda: stream.reached)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    return stream


def test_a_rank_whose_gpu_waits_is_one_that_waits_although_its_program_goes_on(view, stream):
    dist.all_reduce(torch.ones(2).as_subclass(OnGpu))
    mark("forward", 3)
    assert view().waiting
    beats = view().beats
    time.sleep(2 * flight_recorder._ASK_S)
    assert (view().waiting, view().beats) == (True, beats)  # and no progress
    stream.reached = True
    until = time.monotonic() + 30
    while view().waiting and time.monotonic() < until:  # though the main thread says nothing
        time.sleep(0.05)
    assert not view().waiting


def test_a_wait_on_the_host_is_over_when_it_returns(view, stream):
    dist.all_reduce(torch.ones(2))
    assert not view().waiting


def test_a_gpu_that_fails_ends_the_recording_and_is_not_taken_for_a_hang(tmp_path, caplog):
    recorder = FlightRecorder(tmp_path, 0)

    def broken():
        raise RuntimeError("device-side assert")

    recorder.wait_until(broken)
    view = view_of(tmp_path, 0)
    assert (view.phase, view.waiting) == (UNRECORDED, False)
