"""Rank info, devices, threads and failures, from made-up environments."""

import json
import os
import re

import pytest
import torch

from shoal.config.sections import Runtime
from shoal.errors import ConfigError, InputError, ShoalError
from shoal.runtime import device as devices
from shoal.runtime.failure import first_cause, is_peer_loss, record_failure
from shoal.runtime.files import atomic_write, read_json, write_json
from shoal.runtime.rank_info import RankInfo, read_rank_info


def test_no_launcher_means_no_rank_info():
    assert read_rank_info({}) is None
    assert read_rank_info({"SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_NTASKS": "1"}) is None


def test_a_batch_script_outside_of_srun_has_no_rank_info():
    assert read_rank_info({"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_LOCALID": "0"}) is None


def test_torchruns_variables_are_read():
    env = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    assert read_rank_info(env | {"TORCHELASTIC_RESTART_COUNT": "2"}) == RankInfo(3, 4, 1, 2, 2)


@pytest.mark.parametrize(
    ("node", "tasks", "expected"), [("0", "2(x3),1", 2), ("3", "2(x3),1", 1), ("1", "4,3", 3), ("0", "7", 7)]
)
def test_slurms_variables_are_read(node, tasks, expected):
    env = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "5", "SLURM_NTASKS": "7"}
    env |= {"SLURM_LOCALID": "1", "SLURM_NODEID": node}
    assert read_rank_info(env | {"SLURM_TASKS_PER_NODE": tasks}) == RankInfo(5, 7, 1, expected, 0)


@pytest.mark.parametrize(
    "names",
    [
        [f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")],
        ["PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"],
    ],
)
def test_mpiruns_variables_are_read_before_slurms(names):
    env = dict(zip(names, ("5", "8", "1", "4"), strict=True))
    slurm = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_LOCALID": "0"}
    assert read_rank_info(env | slurm) == RankInfo(5, 8, 1, 4, 0)


@pytest.mark.parametrize(
    "env", [{"RANK": "x", "WORLD_SIZE": "2"}, {"SLURM_STEP_ID": "0", "SLURM_NTASKS": "2"}]
)
def test_garbled_variables_are_refused(env):
    with pytest.raises(InputError, match="the launcher's variables are incomplete or not numbers"):
        read_rank_info(env)


def fake_gpus(monkeypatch, count, capability=(9, 0)):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "NVIDIA Test")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)


def test_each_rank_gets_its_own_gpu_and_nccl(monkeypatch):
    fake_gpus(monkeypatch, 2)
    device = devices.select_device("auto", 1, 2)
    assert (device.torch_device, device.backend) == (torch.device("cuda", 1), "cpu:gloo,cuda:nccl")


def test_fp32_on_a_gpu_means_fp32(monkeypatch):
    fake_gpus(monkeypatch, 1)
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    cudnn.allow_tf32 = True  # as torch begins
    devices.select_device("cuda", 0, 1)
    assert (matmul.allow_tf32, cudnn.allow_tf32) == (False, False)
    assert "tf32" not in {matmul.fp32_precision, cudnn.rnn.fp32_precision, cudnn.conv.fp32_precision}


def test_reproducible_kernels_are_asked_for_and_a_callers_choice_stands(monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    devices.compute_reproducibly(False)
    assert not torch.are_deterministic_algorithms_enabled()
    try:
        devices.compute_reproducibly(True)
        assert torch.are_deterministic_algorithms_enabled()
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
        devices.compute_reproducibly(False)
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


def test_two_nccl_ranks_on_one_gpu_are_refused(monkeypatch):
    fake_gpus(monkeypatch, 1)
    with pytest.raises(ConfigError, match=r"2 ranks on this host, but only 1 CUDA device:") as caught:
        devices.select_device("auto", 0, 2)
    assert "--nproc 1" in caught.value.hint


def test_cuda_asked_for_where_there_is_none_is_refused(monkeypatch):
    fake_gpus(monkeypatch, 0)
    with pytest.raises(ConfigError, match=r"runtime\.device = cuda, but torch sees no CUDA device"):
        devices.select_device("cuda", 0, 1)


def test_bf16_where_the_device_cannot_is_refused(monkeypatch):
    fake_gpus(monkeypatch, 1, capability=(7, 5))
    with pytest.raises(ConfigError, match=r"precision\.dtype = bf16, but NVIDIA Test has no bf16 units"):
        devices.resolve_dtype("bf16", torch.device("cuda", 0))
    assert devices.resolve_dtype("auto", torch.device("cuda", 0)) == torch.float32
    monkeypatch.setattr(devices, "cpu_flags", lambda: {"avx2"})
    assert devices.resolve_dtype("bf16", torch.device("cpu")) == torch.bfloat16  # slowly
    assert devices.resolve_dtype("auto", torch.device("cpu")) == torch.float32
    monkeypatch.setattr(devices, "cpu_flags", lambda: {"amx_bf16"})
    assert devices.resolve_dtype("auto", torch.device("cpu")) == torch.bfloat16


def test_threads_follow_the_setting_then_the_environment_then_the_cores(monkeypatch):
    monkeypatch.setattr(devices, "physical_cores", lambda: 8)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert devices.choose_threads(Runtime(threads=5), 2) == (5, "runtime.threads")
    assert devices.choose_threads(Runtime(), 2) == (3, "OMP_NUM_THREADS")
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert devices.choose_threads(Runtime(), 2) == (4, "8 physical cores / 2 workers")
    assert devices.choose_threads(Runtime(), 16)[0] == 1


def test_the_first_real_cause_is_told_not_its_echo(tmp_path):
    record_failure(tmp_path, 0, 0, RuntimeError("Read error [127.0.0.1]: Connection reset by peer"))
    try:
        raise KeyError("missing")
    except KeyError as error:
        record_failure(tmp_path, 2, 0, error)
    failure = first_cause(tmp_path, 0, {0: 1, 1: -15, 2: 1})
    assert failure.rank == 2
    assert str(failure).splitlines()[-1] == "rank 2: KeyError: 'missing'"
    assert "test_runtime.py" in failure.detail


def test_a_killed_rank_is_named_with_its_signal(tmp_path):
    record_failure(tmp_path, 0, 0, RuntimeError("Connection closed by peer [127.0.0.1]:1234"))
    failure = first_cause(tmp_path, 0, {0: 1, 1: -9})
    assert "rank 1 was killed by signal 9 (SIGKILL)" in failure.sentence


def test_a_report_of_an_earlier_attempt_does_not_count(tmp_path):
    record_failure(tmp_path, 0, 0, ValueError("old"))
    assert "rank 0 ended with status 3" in first_cause(tmp_path, 1, {0: 3}).sentence


def test_a_rank_that_was_told_twice_to_end_explains_nothing(tmp_path):
    """By the user, and by the agent once another one had ended: this is a stop, not an error."""
    assert first_cause(tmp_path, 0, {0: 143, 1: -15}).secondary
    assert first_cause(tmp_path, 0, {0: 143, 1: 3}).rank == 1


def test_an_error_for_people_is_not_retried_and_keeps_its_status(tmp_path):
    record_failure(tmp_path, 0, 0, InputError("bad file", hint="mend it"))
    failure = first_cause(tmp_path, 0, {0: 2})
    assert (failure.fatal, failure.exit_code, failure.detail) == (True, 2, "")
    assert str(failure) == "rank 0: bad file\n  hint: mend it"


def test_only_lost_connections_are_peer_losses():
    assert is_peer_loss(RuntimeError("[pair.cc] Connection closed by peer [::1]"))
    assert not is_peer_loss(RuntimeError("shape mismatch"))
    assert not is_peer_loss(ValueError("connection closed by peer"))


def test_a_file_is_whole_or_absent(tmp_path):
    target = tmp_path / "deep/file.json"
    write_json(target, {"a": 1})
    with pytest.raises(TypeError), atomic_write(target) as file:
        file.write(b"half" + 1)
    assert json.loads(target.read_text()) == {"a": 1}
    assert os.listdir(target.parent) == ["file.json"]


def test_a_full_disk_is_said(tmp_path, monkeypatch):
    def full(fd):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ShoalError, match=re.escape(f"the disk is full: cannot write {tmp_path / 'x'}")):
        write_json(tmp_path / "x", {})
    assert os.listdir(tmp_path) == []


def test_json_that_is_too_large_or_garbled_is_refused(tmp_path, monkeypatch):
    (tmp_path / "x").write_text("{")
    with pytest.raises(InputError, match=r"state .*x is not valid JSON"):
        read_json(tmp_path / "x", "state")
    (tmp_path / "x").write_text("[" * 100_000)
    with pytest.raises(InputError, match="is not valid JSON"):
        read_json(tmp_path / "x", "state")
    with (tmp_path / "x").open("wb") as file:
        file.truncate(65 << 20)
    with pytest.raises(InputError, match="is larger than 64 MiB"):
        read_json(tmp_path / "x", "state")
