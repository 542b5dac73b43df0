"""What joins ranks, judged from made-up hardware: files as Linux has them, nvidia-smi's own words."""

from __future__ import annotations

import subprocess

import pytest

from shoal.doctor import links, machine

# Two processors with two GPUs each: NVLink in pairs, the processors' own link between them.
TOPOLOGY = """\
\t\x1b[4mGPU0\tGPU1\tGPU2\tGPU3\tmlx5_0\tCPU Affinity\x1b[0m
GPU0\t X \tNV4\tSYS\tSYS\tPIX\t0-31
GPU1\tNV4\t X \tSYS\tSYS\tPIX\t0-31
GPU2\tSYS\tSYS\t X \tNV4\tSYS\t32-63
GPU3\tSYS\tSYS\tNV4\t X \tSYS\t32-63
mlx5_0\tPIX\tPIX\tSYS\tSYS\t X

Legend:
  X    = Self
"""


def add_port(root, state="4: ACTIVE"):
    port = root / "class/infiniband/mlx5_0/ports/1"
    port.mkdir(parents=True)
    for name, text in (("state", state), ("link_layer", "InfiniBand"), ("rate", "200 Gb/sec (4X HDR)")):
        (port / name).write_text(f"{text}\n")


def test_a_small_dev_shm_comes_with_the_containers_option():
    assert links.check_shared_memory(8 * 10**9).status == "ok"
    finding = links.check_shared_memory(64 * 10**6)
    assert (finding.status, finding.fact) == ("warning", "0.1 GB")
    assert "--shm-size" in finding.advice


def test_pinned_memory_matters_where_there_is_infiniband():
    assert links.check_memlock(8 * 2**20, infiniband=False).status == "ok"
    assert links.check_memlock(-1, infiniband=True).status == "ok"
    finding = links.check_memlock(8 * 2**20, infiniband=True)
    assert (finding.status, "ulimit -l unlimited" in finding.advice) == ("warning", True)


def test_infiniband_ports_are_told_with_state_and_rate(tmp_path):
    assert links.check_infiniband(tmp_path).fact == "none"
    add_port(tmp_path)
    finding = links.check_infiniband(tmp_path)
    assert (finding.status, finding.fact) == ("ok", "mlx5_0:1 ACTIVE InfiniBand 200 Gb/sec (4X HDR)")


def test_infiniband_without_an_active_port_is_a_warning(tmp_path):
    add_port(tmp_path, state="1: DOWN")
    assert links.check_infiniband(tmp_path).status == "warning"


def test_gpudirect_needs_its_module_where_gpus_and_infiniband_are(tmp_path):
    assert links.check_gpudirect(8, tmp_path).status == "ok"
    add_port(tmp_path)
    assert links.check_gpudirect(0, tmp_path).status == "ok"
    finding = links.check_gpudirect(8, tmp_path)
    assert (finding.status, "modprobe nvidia_peermem" in finding.advice) == ("warning", True)
    (tmp_path / "module/nvidia_peermem").mkdir(parents=True)
    assert links.check_gpudirect(8, tmp_path).status == "ok"


def test_paths_between_gpus_are_told_and_far_ones_warned_of():
    finding = links.check_gpu_paths(TOPOLOGY)
    assert finding.fact == "NV4: GPU0-GPU1, GPU2-GPU3; SYS: GPU0-GPU2, GPU0-GPU3, GPU1-GPU2, GPU1-GPU3"
    assert finding.status == "warning"
    near = "\n".join(line for line in TOPOLOGY.splitlines() if not line.startswith(("GPU2", "GPU3")))
    assert links.check_gpu_paths(near).status == "ok"
    assert links.check_gpu_paths("").fact == "none"


def test_slow_copies_between_host_and_gpu_are_a_warning():
    assert links.check_copy_rate((55e9, 50e9)).status == "ok"
    finding = links.check_copy_rate((55e9, 2e9))
    assert (finding.status, "2.0 GB/s from it" in finding.fact) == ("warning", True)


@pytest.mark.parametrize(
    ("facts", "status", "words"),
    [
        ({"gpus": 8, "nccl_error": ""}, "ok", "nccl: on GPUs it is the fastest over any link"),
        ({"gpus": 8, "nccl_error": "no socket"}, "warning", "gloo: NCCL's probe failed: no socket"),
        ({"gpus": 0, "infiniband": True}, "ok", "gloo: "),
        ({"gpus": 0, "infiniband": False, "ip_to_others": False}, "ok", "gloo: "),
        (
            {"gpus": 0, "infiniband": True, "ip_to_others": False, "torch_has_mpi": True},
            "ok",
            "mpi: only native InfiniBand joins these CPU hosts",
        ),
        (
            {"gpus": 0, "infiniband": True, "ip_to_others": False, "torch_has_mpi": False},
            "warning",
            "this torch lacks MPI",
        ),
    ],
)
def test_the_back_end_is_chosen_with_its_reason(facts, status, words):
    finding = links.check_backend(**facts)
    assert finding.status == status
    assert words in finding.fact


def test_nccls_probe_gives_the_ranks_last_words(monkeypatch):
    monkeypatch.setattr(links, "run_ranks", lambda command, ranks: [(0, "{}", "")] * ranks)
    assert links.probe_nccl(8) == ""
    monkeypatch.setattr(links, "run_ranks", lambda command, ranks: [(1, "", "...\nncclSystemError")])
    assert links.probe_nccl(1) == "ncclSystemError"

    def hang(command, ranks):
        raise subprocess.TimeoutExpired(command, machine.START_LIMIT_S)

    monkeypatch.setattr(links, "run_ranks", hang)
    assert "did not meet in time" in links.probe_nccl(2)
