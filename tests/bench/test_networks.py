"""`shoal bench networks`: the clock, what a row must agree with, and what a failing framework costs."""

import json
from dataclasses import replace
from importlib import resources
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from shoal.bench import environments, networks
from shoal.bench.frameworks import harness, with_pytorch
from shoal.bench.networks import Cell, NetworksOptions, Row, command, judged, measure, parse
from shoal.bench.samples import draw, random_samples
from shoal.errors import InputError, ShoalError
from shoal.networks.description import names, read
from shoal.networks.modules import Network

TINY = """
input = [2, 6, 6]
classes = 3
[[layers]]
kind = "conv"
out = 4
kernel = 3
padding = 1
bias = false
[[layers]]
kind = "residual"
body = [{ kind = "batch_norm" }, { kind = "relu" }]
[[layers]]
kind = "max_pool"
kernel = 2
stride = 2
[[layers]]
kind = "flatten"
[[layers]]
kind = "linear"
out = "classes"
"""
CELL = Cell("net", "pytorch", "default", 4, 1)


class Fake:
    """A framework whose steps take 2 s of a clock that it turns itself, when asked for or when waited for."""

    def __init__(self, *, waits):
        self.now, self.asked, self.waits = 0.0, 0, waits

    def step(self, batch):
        self.asked += 1
        return batch

    def wait(self):
        if self.waits:
            self.now, self.asked = self.now + 2 * self.asked, 0

    def read(self, loss):
        self.now, self.asked = self.now + 2 * self.asked, 0
        return float(loss)


def test_samples_are_the_seconds_of_each_step_after_the_warm_up():
    fake = Fake(waits=True)
    samples, reads, total, losses = harness.timed(fake, [1, 2, 3], warmup=2, steps=5, clock=lambda: fake.now)
    assert (samples, reads, total) == ([2.0] * 5, [0.0] * 5, 10.0)
    assert losses == [1, 2, 3, 1, 2, 3, 1]


@pytest.mark.parametrize("siblings", ["{even}-{odd}", "{even},{odd}"])
def test_a_thread_has_a_core_of_its_own_while_there_are_some(tmp_path, siblings):
    for cpu in range(4):
        folder = tmp_path / f"cpu{cpu}/topology"
        folder.mkdir(parents=True)
        text = siblings.format(even=cpu // 2 * 2, odd=cpu // 2 * 2 + 1)
        (folder / "thread_siblings_list").write_text(f"{text}\n")
    assert sorted(range(4), key=lambda cpu: harness.place_of(cpu, str(tmp_path))) == [0, 2, 1, 3]
    assert sorted(range(4), key=lambda cpu: harness.place_of(cpu, str(tmp_path / "none"))) == [0, 1, 2, 3]


def row(**changed):
    facts = {"parameters": 8, "loss": 1.0, "gradient_norm": 2.0, "samples": [1.0, 1.0], "reads": [0.0, 0.0]}
    return Row(CELL, "done", **{**facts, "total_s": 2.0, **changed})


def test_a_loop_that_does_not_wait_for_its_device_is_rejected():
    fake = Fake(waits=False)
    samples, reads, total, _ = harness.timed(fake, [1], warmup=1, steps=2, clock=lambda: fake.now)
    samples = [sample + 0.01 for sample in samples]  # asking takes time, too
    measured = row(samples=samples, reads=reads, total_s=total + 0.02)
    found = judged(measured, SimpleNamespace(num_parameters=8), None, 2)
    assert found.status == "rejected"
    assert found.reason.startswith("reading the losses takes 4 s of 4.02 s: its steps end before")


def test_a_read_that_is_interrupted_costs_no_row():
    measured = row(samples=[1.0] * 3, reads=[0.0, 2.0, 0.01], total_s=5.01)
    assert judged(measured, SimpleNamespace(num_parameters=8), None, 3).status == "done"


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"parameters": 9}, "9 parameters, and the description has 8"),
        ({"loss": float("inf")}, "loss inf"),
        ({"loss": 1.002}, "loss 1.002 on the same weights and samples, pytorch has 1"),
        ({"gradient_norm": float("nan")}, "gradient_norm nan"),
        ({"samples": [1.0]}, "1 samples and 2 reads of 2 steps"),
        ({"reads": [0.0]}, "2 samples and 1 reads of 2 steps"),
        ({"samples": [2.0, 0.0]}, "the shortest 0 s"),
        ({"total_s": 1.999}, "steps and reads take 2 s, and all together 1.999 s"),
        ({"total_s": 2.001}, "steps and reads take 2 s, and all together 2.001 s"),
    ],
)
def test_a_row_that_computes_something_else_or_does_not_add_up_is_rejected(changed, reason):
    resolved = SimpleNamespace(num_parameters=8)
    assert judged(row(loss=1.0005), resolved, row(), 2).status == "done"
    found = judged(row(**changed), resolved, row(), 2)
    assert (found.status, reason in found.reason) == ("rejected", True)


@pytest.mark.parametrize(
    ("stdout", "stderr", "status", "reason"),
    [
        ('{"event": "error", "error": "ImportError: no jax"}', "", 1, "ImportError: no jax"),
        ("", "Fatal Python error\nSegmentation fault", -11, "status -11: Segmentation fault"),
        ("[1]\nnoise\n{}", "", 0, "status 0: it printed nothing"),
    ],
)
def test_a_framework_that_fails_costs_its_row_with_the_reason(stdout, stderr, status, reason):
    found = parse(CELL, stdout, stderr, status)
    assert (found.status, found.reason) == ("failed", reason)


@pytest.fixture
def tiny(tmp_path):
    (tmp_path / "tiny.toml").write_text(TINY)
    return NetworksOptions(
        (str(tmp_path / "tiny.toml"),), modes=("default",), batch_sizes=(4,), threads=(1,), steps=3, warmup=1
    )


def test_pytorch_computes_what_the_description_means_and_a_hang_costs_one_row(tiny, tmp_path, monkeypatch):
    rows = []
    measure(tiny, [], rows.append)
    (one,) = rows
    assert one.status == "done", one.reason
    resolved = read(tiny.networks[0]).resolve()
    files = networks.write_inputs(resolved, draw(tiny.networks[0], None, 4, 4), tmp_path)
    weights, data = (dict(np.load(files[name])) for name in ("weights", "data"))
    network = Network(resolved)
    network.load_state_dict({name: torch.from_numpy(array) for name, array in weights.items()})
    inputs, targets = (torch.from_numpy(data[name][:4]) for name in ("inputs", "targets"))
    loss = torch.nn.functional.cross_entropy(network(inputs), targets)
    loss.backward()
    norm = torch.stack([weight.grad.norm() for weight in network.parameters()]).norm()
    assert one.loss == pytest.approx(loss.item(), rel=1e-5)
    assert one.gradient_norm == pytest.approx(norm.item(), rel=1e-5)
    assert len(one.losses) == 4
    assert one.losses[0] == pytest.approx(one.loss, rel=1e-5)  # the first step begins at the same weights
    assert one.versions["torch"] == torch.__version__

    hangs = tmp_path / "hangs"
    hangs.write_text("#!/bin/sh\nexec sleep 60\n")
    hangs.chmod(0o755)
    again = []
    measure(
        replace(tiny, batch_sizes=(4, 8), pythons={"pytorch": str(hangs)}, limit_s=0.2), rows, again.append
    )
    assert [(found.cell.batch, found.status, found.reason) for found in again] == [
        (8, "failed", "no end within 0.2 s")
    ]


@pytest.mark.proof
def test_a_small_gpt_is_the_same_in_the_adapter(tiny, tmp_path):
    text = resources.files("shoal.networks").joinpath("gpt2-s.toml").read_text()
    for given, small in (("768", "16"), ("3072", "64"), ("= 12", "= 2"), ("1024", "6"), ("50257", "50")):
        text = text.replace(given, small)
    (tmp_path / "gpt.toml").write_text(text)
    rows = []
    measure(replace(tiny, networks=(str(tmp_path / "gpt.toml"),)), [], rows.append)
    resolved = read(str(tmp_path / "gpt.toml")).resolve()
    weights, data = (
        dict(np.load(file))
        for file in networks.write_inputs(resolved, random_samples(resolved, 4), tmp_path).values()
    )
    network = Network(resolved)
    network.load_state_dict({name: torch.from_numpy(array) for name, array in weights.items()})
    inputs, targets = (torch.from_numpy(data[name][:4]) for name in ("inputs", "targets"))
    loss = torch.nn.functional.cross_entropy(network(inputs.long()).flatten(0, 1), targets.flatten())
    assert rows[0].status == "done", rows[0].reason
    assert rows[0].loss == pytest.approx(loss.item(), rel=1e-5)


def test_a_layer_that_an_adapter_lacks_is_the_reason_of_its_row():
    with pytest.raises(NotImplementedError, match="this adapter has no layer of kind swish"):
        with_pytorch.build({"kind": "swish", "settings": {}, "before": [1]})


def test_no_framework_gets_a_gpu_that_others_do_not_use(tiny, tmp_path):
    script = tmp_path / "script"
    told = '{\\"event\\": \\"error\\", \\"error\\": \\"GPUs: ${CUDA_VISIBLE_DEVICES-all}.\\"}'
    script.write_text(f'#!/bin/sh\necho "{told}"\n')
    script.chmod(0o755)
    rows = []
    measure(replace(tiny, pythons={"pytorch": str(script)}), [], rows.append)
    assert rows[0].reason == "GPUs: ."


@pytest.mark.proof
def test_on_a_gpu_an_adapter_sees_it_computes_there_and_waits(tiny, tmp_path, monkeypatch):
    script = tmp_path / "script"
    told = '{\\"event\\": \\"error\\", \\"error\\": \\"GPUs: ${CUDA_VISIBLE_DEVICES-all}.\\"}'
    script.write_text(f'#!/bin/sh\necho "{told}"\n')
    script.chmod(0o755)
    rows = []
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    on_gpu = replace(tiny, device="cuda")
    measure(replace(on_gpu, pythons={"pytorch": str(script)}), [], rows.append)
    assert rows[0].reason == "GPUs: all."
    if not torch.cuda.is_available():
        measure(on_gpu, [], rows.append)
        assert rows[1].status == "failed"
        assert "CUDA" in rows[1].reason
    adapter = with_pytorch.Adapter.__new__(with_pytorch.Adapter)
    waited = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waited.append(True))
    for device in ("cpu", "cuda"):
        adapter.device = torch.device(device)
        adapter.wait()
    assert waited == [True]


def test_a_framework_that_was_not_tried_on_a_gpu_is_refused_there(tiny, monkeypatch):
    monkeypatch.setattr(networks, "ON_GPU", ("pytorch",))
    with pytest.raises(InputError, match="jax was not tried on a GPU"):
        command(replace(tiny, frameworks=("pytorch", "jax"), device="cuda"), None, listing=False)


def test_a_record_is_continued_and_another_one_is_refused(tiny, tmp_path, monkeypatch, capsys):
    output = tmp_path / "record.json"
    measured = []
    monkeypatch.setattr(
        networks, "run_adapter", lambda cell, *_: measured.append(cell) or made_up(cell, tiny)
    )
    assert command(tiny, output, listing=False) == 0
    assert command(replace(tiny, batch_sizes=(4, 8)), output, listing=False) == 0
    assert [cell.batch for cell in measured] == [4, 8]
    held = json.loads(output.read_text())
    assert (held["name"], [one["cell"]["batch"] for one in held["rows"]]) == ("networks", [4, 8])
    with pytest.raises(InputError, match="is the record of other measurements"):
        command(replace(tiny, steps=4), output, listing=False)
    output.write_text(
        '{"name": "networks", "options": {"steps": 3, "warmup": 1, "device": "cpu"}, "rows": [1]}'
    )
    with pytest.raises(InputError, match="is not a record of shoal bench networks"):
        command(tiny, output, listing=False)


def made_up(cell, options):
    parameters, steps = read(cell.network).resolve().num_parameters, options.steps
    times = {"samples": [1.0] * steps, "reads": [0.0] * steps, "total_s": float(steps)}
    return replace(row(parameters=parameters, **times), cell=cell)


def test_a_record_is_of_one_machine_and_its_rows_of_one_network(tiny, tmp_path, monkeypatch):
    output, measured = tmp_path / "record.json", []
    monkeypatch.setattr(
        networks, "run_adapter", lambda cell, *_: measured.append(cell) or made_up(cell, tiny)
    )
    command(tiny, output, listing=False)
    file = tmp_path / "tiny.toml"
    file.write_text(TINY.replace("kernel = 2", "kernel = 1"))  # as many parameters, another network
    command(tiny, output, listing=False)
    command(tiny, output, listing=False)
    assert len(measured) == 2
    held = json.loads(output.read_text())
    assert len(held["rows"]) == 1
    output.write_text(json.dumps(held | {"machine": {**held["machine"], "physical_cores": 999}}))
    with pytest.raises(InputError, match="is the record of other measurements"):
        command(tiny, output, listing=False)


def test_without_a_row_of_pytorch_nothing_is_shown_to_compute_the_same(tiny, monkeypatch):
    monkeypatch.setattr(networks, "run_adapter", lambda cell, *_: made_up(cell, tiny))
    rows = []
    measure(replace(tiny, frameworks=("jax",)), [], rows.append)
    assert [(found.status, found.reason[:23]) for found in rows] == [("rejected", "nothing to compare with")]


def test_the_list_names_each_network_with_its_size(capsys):
    assert command(NetworksOptions(()), None, listing=True) == 0
    shown = capsys.readouterr().out
    for name in names():
        assert f"{read(name).resolve().num_parameters:,}" in shown
        assert name in shown
        assert read(name).source[:20] in shown


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"frameworks": ("pytorhc",)}, "unknown framework 'pytorhc'"),
        ({"pythons": {"tensorflow2": "x"}}, "unknown framework 'tensorflow2'"),
        ({"pythons": {"jax": ""}}, "--python jax names no Python"),
        ({"modes": ("fast",)}, "unknown mode 'fast'"),
        ({"batch_sizes": (0,)}, "must be above 0"),
        ({"workers": (0,)}, "must be above 0"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_the_first_row(tiny, changed, message):
    with pytest.raises(InputError, match=message):
        command(replace(tiny, **changed), None, listing=False)


@pytest.mark.proof
def test_a_framework_that_is_not_installed_costs_its_rows_and_nothing_else(tiny, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    rows = []
    measure(replace(tiny, frameworks=("jax", "pytorch")), [], rows.append)
    assert [(found.cell.framework, found.status) for found in rows] == [
        ("pytorch", "done"),
        ("jax", "failed"),
    ]
    assert "jax is not installed: shoal bench frameworks --install jax" in rows[1].reason


def test_environments_are_made_listed_and_removed(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(environments.venv, "create", lambda folder, with_pip: folder.mkdir())
    ran, status = [], SimpleNamespace(returncode=1, stderr="No matching distribution")
    monkeypatch.setattr(environments.subprocess, "run", lambda words, **_: ran.append(words) or status)
    with pytest.raises(ShoalError, match="pip could not install jax: No matching distribution"):
        environments.command(("jax",), ())
    assert environments.python_of("jax", {}) is None
    status.returncode = 0
    assert environments.command(("jax",), ()) == 0
    assert "jax==0.10.2" in ran[-1]
    assert (
        environments.python_of("jax", {}) == str(tmp_path / "shoal/frameworks/jax/bin/python") == ran[-1][0]
    )
    assert environments.python_of("jax", {"jax": "mine"}) == "mine"
    environments.command(("jax",), ())
    assert len(ran) == 2  # it is there
    environments.command((), ("jax",))
    assert environments.python_of("jax", {}) is None
    with pytest.raises(InputError, match="pytorch runs in Shoal's own environment"):
        environments.command(("pytorch",), ())


def test_adapters_import_nothing_of_shoal():
    for file in (networks._ADAPTERS).glob("*.py"):
        assert "import shoal" not in file.read_text()
        assert "from shoal" not in file.read_text()
