"""Metrics beside metrics.jsonl: every line arrives, and nothing that a sink does reaches training."""

import importlib.util
import json
import sys
import threading
import time
import types

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from shoal.config.load import validate
from shoal.errors import ConfigError
from shoal.train import sinks
from shoal.train.request import Request
from shoal.train.sinks import Sinks
from tests.train.ranks import run_training, tiny_config


def fake_wandb(calls):
    """A module like wandb that writes down what is asked of it."""
    run = types.SimpleNamespace(
        log=lambda values, step: calls.append(("log", step, values)), finish=lambda: calls.append(("finish",))
    )
    return types.SimpleNamespace(
        Settings=dict, init=lambda **options: calls.append(("init", options)) or run, __spec__=True
    )


def fake_trackio(calls):
    """A module like trackio, which keeps its run for the thread that made it."""
    local = threading.local()

    def init(**options):
        local.run = True
        calls.append(("init", options))

    def log(values, step):
        assert local.run
        calls.append(("log", step, values))

    return types.SimpleNamespace(init=init, log=log, finish=lambda: calls.append(("finish",)), __spec__=True)


@pytest.fixture
def wandb(monkeypatch):
    calls = []
    monkeypatch.setitem(sys.modules, "wandb", fake_wandb(calls))
    return calls


@pytest.fixture
def trackio(monkeypatch):
    calls = []
    monkeypatch.setitem(sys.modules, "trackio", fake_trackio(calls))
    return calls


def open_sinks(run_dir, *names, step=0):
    config = validate({"train": {"sinks": list(names), "project": "tides"}}, "test")
    opened = Sinks(names, config, run_dir)
    opened.start(step)
    return opened


def tensorboard_scalars(run_dir):
    """Return {tag: {step: value}} of the event files of a run, as TensorBoard shows them."""
    reader = EventAccumulator(str(run_dir / "tensorboard"))
    reader.Reload()
    return {tag: {e.step: e.value for e in reader.Scalars(tag)} for tag in reader.Tags()["scalars"]}


def test_tensorboard_shows_what_metrics_jsonl_says_after_a_resume_too(pool, data, tmp_path):
    values = tiny_config(data, train={"sinks": ["tensorboard"], "steps": 6}, runtime={"stop_after": 3})
    pool.run(run_training, 2, tmp_path, values)
    pool.run(run_training, 2, tmp_path, {**values, "runtime": {"device": "cpu", "threads": 1}})
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    shown = tensorboard_scalars(tmp_path)
    losses = {line["step"]: line["loss"] for line in lines if "loss" in line}
    assert list(losses) == [1, 2, 3, 4, 5, 6]
    assert shown["train/loss"] == pytest.approx(losses)
    names = {"train/grad_norm", "train/lr", "speed/tokens_per_s", "test/loss", "time/save_held_s"}
    assert names | {"time/data_s", "memory/peak_bytes", "memory/most_peak_bytes_rank"} <= set(shown)


@pytest.mark.parametrize(
    ("name", "grouped"),
    [
        ("loss", "train/loss"), ("loss_scale", "train/loss_scale"), ("tokens", "train/tokens"),
        ("validation_loss", "validation/loss"), ("test_perplexity", "test/perplexity"),
        ("tokens_per_s_per_device", "speed/tokens_per_s_per_device"), ("mfu_measured", "speed/mfu_measured"),
        ("step_ms", "speed/step_ms"), ("forward_ms", "time/forward_ms"), ("forward_s", "time/forward_s"),
        ("seconds", "time/seconds"), ("least_busy_ms_rank", "time/least_busy_ms_rank"),
        ("reserved_bytes", "memory/reserved_bytes"), ("sync_bytes", "sync/bytes"),
    ],
)  # fmt: skip
def test_figures_have_the_name_of_their_group(name, grouped):
    assert sinks.grouped(name) == grouped


def test_tensorboard_shows_a_sample_as_text(tmp_path):
    opened = open_sinks(tmp_path, "tensorboard")
    opened.put({"step": 5, "sample": "Once upon a time"})
    opened.close()
    reader = EventAccumulator(str(tmp_path / "tensorboard"))
    reader.Reload()
    (event,) = reader.Tensors("train/sample/text_summary")
    assert (event.step, event.tensor_proto.string_val[0]) == (5, b"Once upon a time")


def test_a_resumed_run_hides_what_was_written_after_its_step(tmp_path):
    for begin, end, loss in ((0, 4, 1.0), (2, 3, 2.0)):
        opened = open_sinks(tmp_path, "tensorboard", step=begin)
        for step in range(begin + 1, end + 1):
            opened.put({"step": step, "loss": loss})
        opened.close()
    assert tensorboard_scalars(tmp_path)["train/loss"] == {1: 1.0, 2: 1.0, 3: 2.0}


def test_several_sinks_get_every_figure_of_every_line(tmp_path, wandb, trackio):
    opened = open_sinks(tmp_path, "wandb", "trackio", "wandb")
    for step in (1, 2):
        opened.put({"step": step, "loss": 2.0 / step, "applied": True, "mfu": None})
    opened.close()
    for calls in (wandb, trackio):
        (_, options), *logged, last = calls
        assert options["project"] == "tides"
        assert options["config"]["train"]["seed"] == 1234
        assert logged == [
            ("log", 1, {"train/loss": 2.0, "train/applied": True}),
            ("log", 2, {"train/loss": 1.0, "train/applied": True}),
        ]
        assert last == ("finish",)


def test_a_run_folder_keeps_its_name_at_a_service_and_another_gets_another(tmp_path, wandb):
    for folder in ("first", "first", "copies/first"):
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        open_sinks(tmp_path / folder, "wandb").close()
    names = [call[1]["id"] for call in wandb if call[0] == "init"]
    assert names[0] == names[1] != names[2]
    assert names[0].startswith("first-")


class Broken:
    """A sink that fails when made, or at its second line."""

    def __init__(self, when):
        self.when, self.lines = when, 0
        if when == "made":
            raise ConnectionError("no route to host")

    def write(self, step, values):
        self.lines += 1
        if self.lines == 2:
            raise ConnectionError("no route to host")

    def close(self):
        pass


@pytest.mark.parametrize("when", ["made", "second line"])
def test_a_sink_that_fails_warns_once_and_the_others_go_on(tmp_path, monkeypatch, caplog, trackio, when):
    monkeypatch.setattr(sinks, "_Wandb", lambda config, name: Broken(when))
    with caplog.at_level("WARNING", logger="shoal"):
        opened = open_sinks(tmp_path, "wandb", "trackio")
        for step in range(1, 3000):
            opened.put({"step": step, "loss": 1.0})
            time.sleep(0 if step % 100 else 0.002)
        opened.close()
    assert [record.message for record in caplog.records] == [
        "warning: wandb gets no more metrics (ConnectionError: no route to host); "
        "training continues, and metrics.jsonl has everything"
    ]
    assert [call[1] for call in trackio if call[0] == "log"] == list(range(1, 3000))


class Stuck:
    """A sink that hangs in its first line until it is let go."""

    free = threading.Event()

    def write(self, step, values):
        self.free.wait()

    def close(self):
        pass


def test_a_sink_that_hangs_costs_no_time_and_bounded_memory(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(sinks, "_Wandb", lambda config, name: Stuck())
    monkeypatch.setattr(sinks, "_CLOSE_S", 0.1)
    opened = open_sinks(tmp_path, "wandb")
    start = time.perf_counter()
    for step in range(5000):
        opened.put({"step": step, "loss": 1.0})
    assert (time.perf_counter() - start) / 5000 < 1e-3
    with caplog.at_level("WARNING", logger="shoal"):
        opened.close()
    Stuck.free.set()
    assert "warning: wandb did not finish in 0.1 s and is abandoned" in caplog.text
    left_out = int(caplog.text.split("could not keep up: ")[1].split()[0])
    assert 3990 <= left_out <= 4000


def test_a_missing_package_is_a_sentence_before_anything_starts(monkeypatch, data, tmp_path):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "trackio" else find(name))
    config = validate(tiny_config(data, train={"sinks": ["trackio"]}), "test")
    with pytest.raises(ConfigError, match="names trackio, which is not installed") as caught:
        Request(config, tmp_path).check(1)
    assert caught.value.hint == "pip install 'shoal[trackio]'"
