"""`shoal plan` as a user meets it: the answer, the tables, files, and bad input in sentences."""

import json
import subprocess
import sys
import time

import pytest

from shoal.cli.app import app
from shoal.config.load import load_config
from shoal.errors import EXIT_FAILED, InputError
from shoal.plan import command as module
from shoal.plan import here
from shoal.plan.cluster import load_cluster

H100 = ("--gpu", "h100", "--gpus", "8")
ONE = ("gpt2", "--gpu", "h100", "--gpus", "1")


def planned(capsys, *arguments):
    """Run `shoal plan` in this process; return the exit status and what it prints."""
    status = app(["plan", *map(str, arguments)], result_action="return_value", print_error=False)
    return status, capsys.readouterr().out


def told(*arguments):
    with pytest.raises(InputError) as raised:
        app(["plan", *map(str, arguments)], result_action="return_value", exit_on_error=False)
    return str(raised.value)


def test_the_first_line_answers_how_long_it_takes(capsys, data):
    status, screen = planned(capsys, "gpt2", "--data", data, "--epochs", "1000", *H100)
    first = screen.splitlines()[0]
    assert status == 0
    assert first.startswith("gpt2 fits on 8 x h100 and takes ")
    assert "a step, " in first
    assert "tokens/s; MFU" in first
    for words in ("parameters ", "checkpoint ", "at the peak, ", "time of a step: ", "layouts: "):
        assert words in screen


def test_epochs_and_tokens_set_the_steps(data, capsys, tmp_path):
    config = load_config("gpt2", {"train": {"seq_len": 16, "global_batch_size": 8}})
    windows = (module.open_dataset(data).split("train").num_tokens - 1) // 16
    options = module.PlanOptions(epochs=2)
    steps = module._with_length(config, options, [module.open_dataset(data)]).train.steps
    assert (steps - 1) * 8 < 2 * windows <= steps * 8
    options = module.PlanOptions(tokens=1e6)
    assert module._with_length(config, options, []).train.steps == -(-(10**6) // (16 * 8))


def test_a_layout_that_does_not_fit_is_status_1_with_its_table(capsys):
    status, screen = planned(capsys, "gpt2-8b", "--layout", "dp8", "--gpu", "v100-32", "--gpus", "8")
    assert status == EXIT_FAILED
    assert screen.startswith("gpt2-8b does not fit on 8 x v100-32: dp8, micro-batch 1 needs ")
    assert "optimizer" in screen


def test_lines_of_tables_fit_80_columns(monkeypatch, capsys):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "80")
    _, screen = planned(capsys, "gpt2-xl", *H100)
    rows = [line for line in screen.splitlines() if "█" in line or "times:" in line]
    assert len(rows) > 8
    assert max(map(len, rows)) <= 80


def test_json_and_picture(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    files = tmp_path / "plan.json", tmp_path / "memory.png"
    assert planned(capsys, "gpt2", *H100, "--json", files[0], "--plot", files[1])[0] == 0
    found = json.loads(files[0].read_text())
    assert found["parameters"]["total"] == 124_475_904
    assert found["ranked"][0]["layout"] == found["layout"]
    assert found["time"]["step_s"] == pytest.approx(found["ranked"][0]["step_s"])
    assert sum(found["memory"]["peak"]["bytes"].values()) == found["memory"]["total_bytes"]
    assert all(one["count"] and one["reason"] for one in found["rejected"])
    assert files[1].read_bytes().startswith(b"\x89PNG")


def test_apply_changes_the_lines_of_the_choice_alone(capsys, tmp_path):
    mine = tmp_path / "mine.toml"
    mine.write_text(
        "# my run\n[model]\nn_layers = 4\n\n[train]\nsteps = 7 # few\nmicro_batch_size = 3  # too many\n"
        "global_batch_size = 64\n\n[parallel]\ntp = 3\n\n[eval]\nevery = 0\n"
    )
    assert planned(capsys, mine, *H100, "--apply", mine)[0] == 0
    text = mine.read_text()
    assert text.startswith("# my run\n[model]\nn_layers = 4\n")
    assert "steps = 7 # few" in text
    assert "# too many" in text
    config = load_config(str(mine))
    assert (config.train.steps, config.eval.every) == (7, 0)
    assert config.parallel.tp != 3  # which 8 devices cannot have
    assert 64 % config.train.micro_batch_size == 0
    new = tmp_path / "new.toml"
    assert planned(capsys, "gpt2", *H100, "--apply", new)[0] == 0
    assert load_config(str(new)).model == load_config("gpt2").model


def test_apply_takes_out_a_split_for_another_number_of_stages(capsys, tmp_path):
    mine = tmp_path / "mine.toml"
    mine.write_text("[parallel]\npp = 2\nsplit = [\n  3, 9,  # layers\n]\nzero = 0\n")
    assert planned(capsys, mine, "--gpu", "h100", "--gpus", "1", "--apply", mine)[0] == 0
    assert (load_config(str(mine)).parallel.pp, load_config(str(mine)).parallel.split) == (1, ())
    mine.write_text("[parallel]\npp = 2\nsplit = [3, 9]\n")
    fixed = ("--parallel.pp", 2, "--parallel.schedule", "1f1b")
    assert planned(capsys, mine, "--gpu", "h100", "--gpus", "2", *fixed, "--apply", mine)[0] == 0
    assert "split = [3, 9]" in mine.read_text()


def test_apply_says_how_to_train(capsys, tmp_path):
    new = tmp_path / "new.toml"
    _, screen = planned(capsys, "gpt2", "--gpu", "h100", "--gpus", 8, "--nodes", 4, "--apply", new)
    assert screen.splitlines()[-1].endswith(f"shoal train {new} --nproc 8 --nnodes 4 --rdzv HOST:29500")
    _, screen = planned(capsys, "gpt2", *H100, "--apply", new)
    assert screen.splitlines()[-1] == f"written; train with: shoal train {new} --nproc 8"
    small = ("--layout", "1", "--gpu", "rtx3090", "--gpus", 1)
    status, screen = planned(capsys, "gpt2-8b", *small, "--apply", new)
    assert status == EXIT_FAILED
    assert screen.splitlines()[-1] == f"written to {new}, although it does not fit"


def test_apply_leaves_a_file_that_it_cannot_edit(tmp_path, capsys):
    mine = tmp_path / "mine.toml"
    mine.write_text("train = { micro_batch_size = 4, global_batch_size = 64 }\n")
    before = mine.read_text()
    assert "cannot be edited line by line\n  hint: write these by hand: parallel.tp = " in told(
        mine, *H100, "--apply", mine
    )
    assert mine.read_text() == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("gpt2", "--gpu", "h1000"), "unknown device 'h1000'\n  hint: did you mean 'h100'?"),
        (("gpt2", "--gpu", "v100"), "unknown device 'v100'\n  hint: use v100-16 or v100-32"),
        (("gpt2", "--gpus", "-3"), "--gpus -3: must be at least 1"),
        (("gpt2", "--nodes", "2"), "--nodes and --link need the device"),
        (("gpt2", "--epochs", "1"), "--epochs needs a dataset"),
        (("gpt2", "--tokens", "-5"), "--tokens -5: must be above 0"),
        (("gpt2", "--tokens", "nan"), "--tokens nan: must be above 0"),
        (("gpt2", "--tokens", "5", "--epochs", "1"), "set the same value"),
        (("gpt2", *H100, "--layout", "dp3"), "--layout dp3 is for 3 devices, and the cluster has 8"),
        (("gpt2", *H100, "--layout", "pp8+interleaved"), "over 16 pipeline stages leaves a stage without"),
        (("gpt2", *H100, "--parallel.pp", "16"), "does not divide the 8 devices"),
        ((*ONE, "--parallel.zero", "0", "--parallel.offload"), "has the settings that are given"),
        (("gpt2", "--cluster", "/no/such.toml"), "/no/such.toml cannot be read"),
        (("gpt2", "--cluster", "c.toml", "--gpus", "8"), "--cluster and --gpus both describe the cluster"),
        (("gpt2", "--cluster", "c.toml", "--link", "1gbit"), "leave --link out, and write it into c.toml"),
        (("fcn-r",), "model.network = fcn-r: decoders alone are planned"),
        (("gpt2", *H100, "--json", "/no/folder/x.json"), "there is no such folder"),
        (
            ("gpt2-xl", "--gpu", "rtx3090", "--gpus", "1", "--parallel.no-offload"),
            "no layout of 1 device is legal and fits",
        ),
    ],
)
def test_bad_input_is_a_sentence(arguments, message):
    assert message in told(*arguments)


def test_no_torch_is_loaded(tmp_path):
    script = "import sys; from shoal.cli.app import app; app(sys.argv[1:], result_action='return_value')\n"
    script += "sys.exit('torch' in sys.modules)"
    arguments = ["plan", "gpt2", *H100, "--json", str(tmp_path / "plan.json")]
    done = subprocess.run([sys.executable, "-c", script, *arguments], check=False, timeout=60)
    assert done.returncode == 0


def test_a_model_of_1t_parameters_on_3072_gpus_is_planned_in_under_a_second(capsys):
    settings = {"n_layers": 128, "d_model": 25600, "n_heads": 160, "max_seq_len": 2048}  # of Megatron-LM's 1T
    words = [word for name, value in settings.items() for word in (f"--model.{name}", value)]
    words += ["--train.seq_len", 2048, "--train.global_batch_size", 3072, "--train.micro_batch_size", 1]
    words += ["--train.recompute", "full", "--gpu", "a100-80", "--gpus", 8, "--nodes", 384]
    planned(capsys, "gpt2", *words, "--layout", "pp64*zero1x6*tp8+sp")
    began = time.process_time()
    _, screen = planned(capsys, "gpt2", *words, "--layout", "pp64*zero1x6*tp8+sp")
    assert time.process_time() - began < 1
    assert "parameters" in screen
    assert "1,008,0" in screen or "1,007,9" in screen  # thousand million


def test_this_machine_is_its_processor_where_no_gpu_is_wanted(monkeypatch):
    monkeypatch.setattr(here, "load_machine", lambda: None)
    monkeypatch.setattr(here, "physical_cores", lambda: 4)
    monkeypatch.setattr(here, "cpu_flags", lambda: {"avx2"})
    monkeypatch.setattr(here, "usable_memory", lambda: 8 * 10**9)
    cluster = here.this_machine("cpu")
    assert (cluster.world_size, cluster.device.kind, cluster.device.memory_bytes) == (4, "cpu", 2e9)
    assert set(cluster.device.flops) == {"fp32"}
    for cores, table in ((2, "cpu-2"), (8, "cpu-8"), (32, "cpu-32")):
        monkeypatch.setattr(here, "physical_cores", lambda cores=cores: cores)
        device, known = here.processor(0), load_cluster(1, table).device
        assert device.memory_bytes_per_s == pytest.approx(known.memory_bytes_per_s)
        assert device.memory_share == known.memory_share
    monkeypatch.setattr(here, "physical_cores", lambda: 4)
    assert here.this_machine("cpu", 2).device.memory_bytes == 4e9


def test_gpus_are_found_by_the_driver_and_named_as_in_the_table(monkeypatch, tmp_path):
    for number in range(4):
        (tmp_path / f"000{number}").mkdir()
        (tmp_path / f"000{number}/information").write_text("Model: \t NVIDIA A100-SXM4-40GB\nIRQ: 1\n")
    monkeypatch.setattr(here.importlib.util, "find_spec", lambda name: None)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    names = here.gpu_names(tmp_path)
    assert names == ["NVIDIA A100-SXM4-40GB"] * 4
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,2")
    assert len(here.gpu_names(tmp_path)) == 2
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert here.gpu_names(tmp_path) == []
    monkeypatch.setattr(here, "load_machine", lambda: None)
    monkeypatch.setattr(here, "gpu_names", lambda: names)
    assert here.this_machine("auto").device.name == "a100-40"
    assert here.this_machine("auto").world_size == 4
    with pytest.raises(InputError, match="5 processes, but this machine has 4 GPUs"):
        here.this_machine("auto", 5)
    monkeypatch.setattr(here, "gpu_names", lambda: ["NVIDIA H100 NVL"])  # 94 GB, and not 80
    with pytest.raises(InputError, match="is not in the planner's table"):
        here.this_machine("auto")
    monkeypatch.setattr(here, "gpu_names", list)
    with pytest.raises(InputError, match="does not name this machine's GPUs"):
        here.this_machine("cuda")
    monkeypatch.setattr(here, "_GPU_NODES", (tmp_path,))  # of a driver that hides its names
    with pytest.raises(InputError, match="does not name this machine's GPUs"):
        here.this_machine("auto")
    monkeypatch.setattr(here, "gpu_names", lambda: ["Quadro X"])
    with pytest.raises(InputError, match="Quadro X is not in the planner's table"):
        here.this_machine("auto")
