"""torch.compile changes the speed: neither names nor, but for rounding, the curve. One test here compiles."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest
import torch

from shoal import scoring
from shoal.config.load import load_config, validate
from shoal.config.sections import Model
from shoal.errors import ConfigError
from shoal.models.documents import block_mask, document_ids
from shoal.models.init import build_decoder
from shoal.models.shape import resolve_shape
from shoal.parallel import compile as compiling
from shoal.runtime.compiler import missing_compiler
from shoal.runtime.device import Device
from tests.cases import every
from tests.train.ranks import run_training, tiny_config


def graphs_compiled():
    """Return how many graphs were compiled in this process (private; seen with torch 2.11 to 2.13)."""
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"]


def kernels_found_and_made():
    """Return how many graphs' kernels were in the folder and how many not (private; torch 2.11 to 2.13)."""
    from torch._dynamo.utils import counters

    return np.array([counters["inductor"][f"fxgraph_cache_{kind}"] for kind in ("hit", "miss")])


def trained_and_graphs(run_dir, values, halted):
    """Train whole, in two parts, and two steps more, as a new process would, with nothing compiled in memory.

    Returns the first two results, how many graphs they took, and what the last one's kernels cost.
    """
    before = graphs_compiled()
    whole = run_training(run_dir / "whole", values)
    run_training(run_dir / "parts", halted)
    resumed = run_training(run_dir / "parts", values)
    graphs = graphs_compiled() - before
    torch._dynamo.reset()
    kernels = kernels_found_and_made()
    run_training(run_dir / "whole", values | {"train": {**values["train"], "steps": 6}})
    return whole, resumed, graphs, kernels_found_and_made() - kernels


@pytest.mark.proof
def test_compiled_training_compiles_once_and_resumes_bit_for_bit(pool, data, tmp_path):
    model, length = {"dropout": 0.0}, {"steps": 4}
    values = tiny_config(data, model=model, train=length | {"compile": "on"}, eval={"every": 2})
    halted = values | {"runtime": {**values["runtime"], "stop_after": 2}}
    whole, resumed, graphs, kernels = pool.run(trained_and_graphs, 1, tmp_path, values, halted, timeout=300)[
        0
    ]
    assert graphs == 3  # a layer and two of the loss: 2 layers, 4 micro-steps, 3 starts, evaluation between
    hits, misses = kernels
    assert hits >= 3  # all from the run's folder
    assert misses == 0
    assert whole["losses"] == resumed["losses"]
    assert whole["norms"] == resumed["norms"]
    eager = pool.run(run_training, 1, tmp_path / "eager", tiny_config(data, model=model, train=length))[0]
    np.testing.assert_allclose(whole["losses"], eager["losses"], rtol=2e-6)
    assert whole["weights"].keys() == eager["weights"].keys()
    for name, weight in whole["weights"].items():
        assert np.array_equal(weight, resumed["weights"][name]), name
    assert any((tmp_path / "whole/compiled").iterdir())


@pytest.mark.parametrize(
    ("mode", "apart"),
    every(
        3,
        [
            *(("none", False), ("none", True), ("full", False)),
            *(("selective", True), ("selective", False), ("full", True)),
        ],
    ),
)
def test_all_layers_and_steps_share_one_graph(monkeypatch, mode, apart):
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))  # traces, no kernels
    torch._dynamo.reset()
    shape = resolve_shape(Model(n_layers=3, d_model=32, n_heads=2, max_seq_len=16, dropout=0.1), 50)
    models = [build_decoder(shape, 1, "cpu") for _ in range(2)]
    compiling.compile_blocks(models[1])
    before, losses = graphs_compiled(), []
    for step in range(3):
        tokens = torch.randint(0, 50, (2, 16), generator=torch.Generator().manual_seed(step))
        documents = document_ids(tokens, step) if apart else None
        for model in models:
            model.set_recompute(mode, 2, offload=True)
            logits = model(tokens, dropout_keys_b=torch.tensor([step, 7]), documents_bt=documents)
            loss = scoring.loss_sum(logits, tokens)
            loss.backward()
            losses.append(loss.item())
            with torch.no_grad():
                model(tokens[:1, :9])  # as evaluation does: other shapes, no gradients
    assert graphs_compiled() - before == 1
    assert losses[0::2] == pytest.approx(losses[1::2], rel=1e-6)
    for plain, compiled in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(plain.grad, compiled.grad)


@torch.no_grad()  # flex attention has no backward pass on a CPU
def test_tiles_of_documents_pass_through_one_graph(monkeypatch):
    shape = resolve_shape(Model(n_layers=3, d_model=32, n_heads=2, max_seq_len=300), 50)
    model = build_decoder(shape, 1, "cpu")
    streams = [torch.randint(0, 50, (2, 300), generator=torch.Generator().manual_seed(n)) for n in range(3)]
    inputs = [(stream, document_ids(stream, end)) for end, stream in enumerate(streams)]
    plain = [model(stream, documents_bt=ids) for stream, ids in inputs]
    monkeypatch.setattr("shoal.models.documents.dense_mask", block_mask)
    torch._dynamo.reset()
    before = graphs_compiled()
    for block in model.blocks.values():
        block.forward = torch.compile(block.forward, dynamic=False, backend="eager")
    for (stream, ids), expected in zip(inputs, plain, strict=True):
        torch.testing.assert_close(model(stream, documents_bt=ids), expected, atol=1e-5, rtol=0)
    assert graphs_compiled() - before == 1


def decision(source, *, device="cpu", world_size=1, threads=1, vocab_size=50257, **train):
    config = load_config(source, {"train": train}) if isinstance(source, str) else validate(source, "test")
    process = SimpleNamespace(
        device=Device(torch.device(device), backend="", name=""),
        world_size=world_size,
        threads=threads,
        any=lambda flag: flag,
    )
    return compiling.decide(config, resolve_shape(config.model, vocab_size), process)


@pytest.fixture
def compiler(monkeypatch):
    monkeypatch.setattr(compiling, "missing_compiler", lambda device: None)


@pytest.mark.usefixtures("compiler")
def test_auto_compiles_what_is_long_enough_and_says_why():
    short = decision("gpt2", steps=1, global_batch_size=8)
    assert not short.on
    assert "compiling pays from about" in short.reason
    assert decision("gpt2", steps=1000).on
    assert decision("gpt2", steps=1000, device="cuda").on
    assert not decision("gpt2", steps=1000, compile="off").on
    assert decision("gpt2", steps=1, compile="on").on


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_auto_leaves_small_runs_as_they_are(data, device):
    assert not decision("quickstart", device=device, vocab_size=2048).on
    assert not decision(tiny_config(data), device=device).on


def test_without_a_compiler_auto_goes_on_and_on_is_refused(monkeypatch):
    monkeypatch.setattr(compiling, "missing_compiler", lambda device: "there is no C++ compiler (g++)")
    auto = decision("gpt2", steps=1000)
    assert not auto.on
    assert "it would pay, but there is no C++ compiler" in auto.reason
    with pytest.raises(ConfigError, match=r"train.compile = on, but there is no C\+\+ compiler") as caught:
        decision("gpt2", compile="on")
    assert "train.compile = off" in caught.value.hint


def test_documents_on_a_gpu_need_a_compiler(monkeypatch):
    monkeypatch.setattr(compiling, "missing_compiler", lambda device: "the package triton is not installed")
    values = tiny_config("data", data={"reset_documents": True}, train={"compile": "off"})
    assert not decision(values).on
    with pytest.raises(ConfigError, match=r"data\.reset_documents = true .* triton is not installed"):
        decision(values, device="cuda")


def test_a_missing_compiler_is_seen(tmp_path):
    cpu = torch.device("cpu")
    assert "no C++ compiler" in missing_compiler(cpu, {"PATH": str(tmp_path)})
    assert "no C++ compiler (own-c++)" in missing_compiler(cpu, {"PATH": str(tmp_path), "CXX": "own-c++"})


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("setting", ["off", "auto"])
def test_the_loss_is_compiled_on_every_gpu_and_the_blocks_where_it_pays(setting):
    on_gpu, on_cpu = (decision("tiny", device=device, compile=setting, steps=1) for device in ("cuda", "cpu"))
    assert (on_gpu.on, on_gpu.loss) == (False, True)
    assert (on_cpu.on, on_cpu.loss) == (False, False)


def test_without_a_compiler_the_loss_of_a_gpu_is_not_compiled(monkeypatch):
    monkeypatch.setattr(compiling, "missing_compiler", lambda device: "triton is not there")
    assert not decision("tiny", device="cuda", compile="off").loss


def compiled_as_decided(run_dir, values):
    """Train as decided on a GPU, with the compiler's work noted instead of done; return what it was given."""
    given = set()

    def note(run, **_):
        return lambda *args: (given.add(run.__name__), run(*args))[1]

    decided = compiling.Compilation(False, "train.compile = off", loss=True)
    with patch("torch.compile", note), patch("shoal.train.job.decide", lambda *_: decided):
        run_training(run_dir, values)
    return given


def test_a_job_computes_with_the_compiled_loss_where_that_is_the_decision(pool, data, tmp_path):
    values = tiny_config(data, train={"steps": 2, "compile": "off"})
    assert pool.run(compiled_as_decided, 1, tmp_path, values) == [{"_log_total", "_to_gradient"}]
