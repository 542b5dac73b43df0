"""Training on a CUDA device does what it does on the CPU; `make gpu-check PART=train` runs these."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

from shoal.config.load import validate
from shoal.config.sections import Model, Optimizer
from shoal.infer.generate import GeneratedRow, generate
from shoal.infer.sampling import Sampling
from shoal.models.dropout import keyed_dropout, site_id
from shoal.models.init import build_decoder
from shoal.models.loss import CrossEntropy
from shoal.models.shape import resolve_shape
from shoal.parallel.apply import apply
from shoal.runtime.rank_info import RankInfo
from shoal.train.loop import train
from shoal.train.metrics import read_metrics
from shoal.train.optimiser import build_optimiser
from tests.gpu.training import DEVICE, make_job, run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("group"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]
STYLES = {"gpt2": {}, "llama": {"style": "llama", "n_heads": 4, "n_kv_heads": 2, "d_ff": 64}}


@pytest.mark.parametrize("style", STYLES)
def test_fp32_training_equals_the_cpu(tmp_path, data, style):
    there, _, _ = run(tmp_path / "gpu", data, model=STYLES[style])
    here, _, _ = run(tmp_path / "cpu", data, "cpu", model=STYLES[style])
    torch.testing.assert_close(there, here, rtol=1e-4, atol=0)


def test_an_lstm_equals_the_cpu(tmp_path, data):
    plain = {
        name: field.default for name, field in Model.model_fields.items()
    }  # of a decoder, it has nothing
    there, _, _ = run(tmp_path / "gpu", data, model=plain | {"network": "lstm"})
    here, _, _ = run(tmp_path / "cpu", data, "cpu", model=plain | {"network": "lstm"})
    torch.testing.assert_close(there, here, rtol=1e-4, atol=0)


def test_training_with_dropout_equals_the_cpu(tmp_path, data):
    model = {"dropout": 0.2, "attention_dropout": 0.2}
    there, _, _ = run(tmp_path / "gpu", data, model=model)
    here, _, _ = run(tmp_path / "cpu", data, "cpu", model=model)
    torch.testing.assert_close(there, here, rtol=1e-4, atol=0)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_half_precision_stays_near_fp32(tmp_path, data, dtype):
    half, lines, _ = run(tmp_path / dtype, data, precision={"dtype": dtype, "initial_scale": 1024.0})
    full, _, _ = run(tmp_path / "fp32", data, precision={"dtype": "fp32"})
    assert lines[-1]["skipped"] == 0
    torch.testing.assert_close(half, full, rtol=3e-2, atol=0)


def test_fp16_overflow_is_skipped_and_lowers_the_scale(tmp_path, data):
    precision = {"dtype": "fp16", "initial_scale": 2.0**40, "hysteresis": 1}
    _, lines, weights = run(tmp_path / "run", data, precision=precision)
    assert not lines[0]["applied"]
    assert lines[-1]["loss_scale"] < 2.0**40
    assert all(weight.isfinite().all() for weight in weights.values())


def test_fused_adamw_takes_the_same_step_as_on_the_cpu():
    shape = resolve_shape(validate({"model": {"n_layers": 1, "d_model": 32, "n_heads": 2}}, "").model, 257)
    models = [build_decoder(shape, 1, device) for device in (DEVICE, "cpu")]
    for model in models:
        optimiser = build_optimiser(dict(model.named_parameters()), Optimizer())
        assert all(group["fused"] for group in optimiser.param_groups)
        generator = torch.Generator().manual_seed(2)
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.device)
        optimiser.step(1e-3)
    for there, here in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(there.detach().cpu(), here.detach(), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_resumed_run_is_bitwise_equal(tmp_path, data, optimizer):
    check_resume(tmp_path, data, {"steps": 6}, optimizer={"name": optimizer}, precision={"dtype": "bf16"})


def test_a_resumed_run_is_bitwise_equal_at_a_long_sequence_with_reproducible_kernels(tmp_path, data):
    sections = {"model": {"d_model": 128, "max_seq_len": 512}, "precision": {"dtype": "bf16"}}
    try:
        check_resume(tmp_path, data, {"seq_len": 512, "steps": 6, "deterministic": True}, **sections)
    finally:
        torch.use_deterministic_algorithms(False)


def check_resume(tmp_path, data, settings, **sections):
    whole, _, straight = run(tmp_path / "whole", data, train=settings, **sections)
    stopped = make_job(tmp_path / "cut", data, train=settings, runtime={"stop_after": 3}, **sections)
    assert not train(stopped)
    resumed, _, weights = run(tmp_path / "cut", data, train=settings, **sections)
    assert torch.equal(resumed, whole)
    assert all(torch.equal(weights[name], straight[name]) for name in straight)


def test_a_checkpoint_of_the_gpu_goes_on_on_the_cpu(tmp_path, data):
    whole, _, _ = run(tmp_path / "whole", data, train={"steps": 6})
    train(make_job(tmp_path / "cut", data, train={"steps": 6}, runtime={"stop_after": 3}))
    resumed, _, _ = run(tmp_path / "cut", data, "cpu", train={"steps": 6})
    torch.testing.assert_close(resumed, whole, rtol=1e-4, atol=0)


@pytest.mark.parametrize("reduce_dtype", ["fp32", "bf16"])
def test_the_exchange_of_gradients_over_nccl_changes_nothing(monkeypatch, tmp_path, data, reduce_dtype):
    bare, _, _ = run(tmp_path / "bare", data)

    def apply_as_one_of_two(task, mesh, process, *settings):
        return apply(task, mesh, dataclasses.replace(process, info=RankInfo(world_size=2)), *settings)

    monkeypatch.setattr("shoal.train.job.apply", apply_as_one_of_two)
    wrapped, _, _ = run(tmp_path / "ddp", data, precision={"reduce_dtype": reduce_dtype})
    torch.testing.assert_close(wrapped, bare, rtol=1e-6 if reduce_dtype == "fp32" else 2e-2, atol=0)


def test_compiled_training_stays_near_eager(tmp_path, data):
    compiled, _, _ = run(tmp_path / "compiled", data, train={"compile": "on"})
    eager, _, _ = run(tmp_path / "eager", data, train={"compile": "off"})
    torch.testing.assert_close(compiled, eager, rtol=1e-4, atol=0)


OFFLOAD = {"recompute": "full", "recompute_offload": True}


@pytest.mark.parametrize("recompute", [{"recompute": "full"}, {"recompute": "selective"}, OFFLOAD])
def test_recompute_changes_nothing(tmp_path, data, recompute):
    again, _, _ = run(tmp_path / "again", data, train=recompute)
    kept, _, _ = run(tmp_path / "kept", data)
    torch.testing.assert_close(again, kept, rtol=1e-6, atol=0)


def test_inputs_of_recompute_in_host_memory_leave_the_gpu():
    shape = resolve_shape(Model(n_layers=6, d_model=256, n_heads=4, max_seq_len=256), 257)
    model, tokens = build_decoder(shape, 1, DEVICE), torch.zeros(8, 256, dtype=torch.long, device=DEVICE)
    kept = []
    for offload in (False, False, True):  # the first time, what the libraries need is taken, too
        model.set_recompute("full", 1, offload=offload)
        before = torch.cuda.memory_allocated()
        hidden = model.hidden(tokens)
        kept.append(torch.cuda.memory_allocated() - before)
        hidden.sum().backward()
        model.zero_grad(set_to_none=True)
        del hidden
    assert kept[2] < kept[1] - 5 * 8 * 256 * 256 * 4  # fp32; of the six inputs, at the most one is there


def test_documents_apart_equal_the_cpu(tmp_path, data):
    sections = {"model": {"max_seq_len": 256}, "train": {"seq_len": 256}, "reset_documents": True}
    there, _, _ = run(tmp_path / "gpu", data, **sections)
    here, _, _ = run(tmp_path / "cpu", data, "cpu", **sections)
    torch.testing.assert_close(there, here, rtol=1e-4, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dropout_masks_are_those_of_the_cpu(dtype):
    x = torch.ones(3, 50, 33, dtype=dtype)
    keys = torch.tensor([1, -7, 1 << 60])
    there = keyed_dropout(x.to(DEVICE), 0.3, keys.to(DEVICE), site_id("a"))
    assert torch.equal(there.cpu(), keyed_dropout(x, 0.3, keys, site_id("a")))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cross_entropy_in_chunks_equals_torch(dtype):
    rows, vocab_size = 3000, 50_304  # more than one chunk
    generator = torch.Generator(DEVICE).manual_seed(0)
    logits = torch.randn(rows, vocab_size, generator=generator, device=DEVICE).mul_(3).to(dtype)
    logits[:, 50_257:] = float("-inf")
    targets = torch.randint(0, 50_257, (rows,), generator=generator, device=DEVICE)
    ours, theirs = logits.clone().requires_grad_(), logits.float().requires_grad_()
    loss, reference = CrossEntropy()(ours, targets), F.cross_entropy(theirs, targets, reduction="sum")
    (loss / rows).backward()
    (reference / rows).backward()
    torch.testing.assert_close(loss, reference, rtol=1e-5, atol=0)
    torch.testing.assert_close(ours.grad.float(), theirs.grad, rtol=2**-7, atol=1e-7)
    assert not ours.grad[:, 50_257:].any()


@pytest.mark.parametrize("style", STYLES)
def test_generated_tokens_are_those_of_the_cpu(style):
    values = {"model": {"n_layers": 2, "d_model": 32, "n_heads": 4, "max_seq_len": 64, **STYLES[style]}}
    shape = resolve_shape(validate(values, "test").model, 257)
    rows = [GeneratedRow([1, 2, 3], 20), GeneratedRow(list(range(10)), 20)]
    there, here = (
        list(generate(build_decoder(shape, 1, device).eval(), rows, Sampling(temperature=0), None))
        for device in (DEVICE, "cpu")
    )
    assert there == here


def shoal(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "shoal", *map(str, arguments)], capture_output=True, text=True, check=False
    )


def test_the_command_trains_on_the_gpu_under_its_launcher(tmp_path, data):
    options = ["--train.steps=4", "--train.seq_len=16", "--max-restarts=1", f"--runtime.device={DEVICE}"]
    done = shoal("train", "tiny", "--data", data, "--run-dir", tmp_path / "run", *options)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len([line for line in read_metrics(tmp_path / "run" / "metrics.jsonl") if "loss" in line]) == 4


def test_more_ranks_than_gpus_are_refused_in_a_sentence(tmp_path, data):
    ranks = torch.cuda.device_count() + 1
    batch = ["--train.global_batch_size", ranks, "--train.micro_batch_size=1", "--max-restarts=0"]
    done = shoal("train", "tiny", "--data", data, "--run-dir", tmp_path / "run", "--nproc", ranks, *batch)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "NCCL cannot join two ranks on one device" in done.stderr
