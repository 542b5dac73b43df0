"""Configurations of dlbench: what they ask for, what is ignored of them, and what is wrong in them."""

import pytest

from shoal.bench import legacy, networks
from shoal.bench.networks import Cell, NetworksOptions
from shoal.cli.app import app
from shoal.errors import InputError

# Written for this test in the format of the files that dlbench came with.
ONE = """\
flag:\t\tmyexperiments\t\t#Flag of current experiment
tools:\t\tcaffe,torch\t\t\t#Tools to benchmark
experiments: #<network type>; <network name>;  <device id>; <device count>;  <batch size>;  <epochs>;  ...
{
\t\tfc;\t\tfcn5;\t\t-1;\t\t2;\t\t1024;\t\t4;\t\t60000;\t\t0.05
#\t\tfc;\t\tfcn5;\t\t-1;\t\t4;\t\t1024;\t\t4;\t\t60000;\t\t0.05

\t\tcnn;\t\talexnet;\t0,1;\t\t2;\t\t512;  \t \t2;\t\t50000;\t\t0.01
\t\tfc;\t\t    fcn5;\t\t-1;\t\t1;\t\t1024;\t\t4;\t\t-1;\t\t0.05
}
host_file:\tNone\t\t#Path to host file or None
cpu_name:\tE5-2630v4\t#CPU model
cuda:\t\t8.0\t\t#CUDA version
"""


def test_a_configuration_names_cells_in_shoals_words():
    config = legacy.parse(ONE, "one.config")
    assert config.frameworks == ("caffe", "pytorch")
    assert legacy.cells(config, ("default",)) == tuple(
        Cell(network, framework, "default", batch, threads)
        for network, batch, counts in (
            ("fcn-r", 1024, (2, 1)),
            ("alexnet-r", 512, (legacy.physical_cores(),)),
        )
        for threads in counts
        for framework in ("pytorch", "caffe")
    )


@pytest.mark.parametrize(
    ("row", "network"),
    [
        ("cnn; resnet", "resnet-56"),
        ("rnn; lstm", "lstm"),
        ("rnn; lstm32", "lstm"),
        ("fc; ffn26752", "fcn-s"),
        ("cnn; alexnet", "alexnet-r"),
    ],
)
def test_each_network_of_dlbench_has_a_name_in_shoal(row, network):
    text = f"tools: cntk\nexperiments:\n{{\n{row}; -1; 1; 64; 2; -1; 0.1;\n}}\ncpu_count: 8\n"
    assert legacy.parse(text, "a").experiments == (legacy.Experiment(network, 0, 8, 64),)


def test_what_is_ignored_is_said_in_a_sentence_each():
    said = list(legacy.ignored(legacy.parse(ONE, "a")))
    starts = (
        "epochs, epoch sizes and",
        "GPUs of 1 experiment are",
        "the number of GPUs",
        "flag, cpu_name, cuda: ",
    )
    assert [sentence.startswith(start) for sentence, start in zip(said, starts, strict=True)] == [True] * 4
    text = "tools: cntk\nexperiments:\n{\nfc; fcn5; -1; 1; 64; 2; -1; 0.1\n}\nhost_file: /hosts\n"
    said = list(legacy.ignored(legacy.parse(text, "a")))
    assert [sentence.split(":")[0] for sentence in said[1:]] == ["host_file is ignored", "pytorch is added"]


def test_a_tool_that_shoal_does_not_run_is_left_out_and_said(monkeypatch):
    monkeypatch.setattr(legacy, "FRAMEWORKS", ("pytorch", "caffe"))
    config = legacy.parse(ONE.replace("caffe,torch", "caffe,mxnet,torch"), "a")
    assert "mxnet is left out: Shoal does not run it" in list(legacy.ignored(config))
    assert {cell.framework for cell in legacy.cells(config, ("default",))} == {"pytorch", "caffe"}


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("caffe,torch", "caffe,theano", r"a, line 2: unknown tool 'theano'.*allowed: caffe, cntk, mxnet"),
        ("flag:", "flags:", r"a, line 1: unknown key 'flags'.*did you mean 'flag'"),
        ("cuda:\t\t8.0", "cuda", r"a, line 13: 'cuda' is neither a setting nor in the block.*key: value"),
        ("}\n", "", r"a, line 4: the block does not end.*end it with }"),
        ("tools:", "#", r"a has no tools"),
        (
            "60000;\t\t0.05\n#",
            "60000\n#",
            r"a, line 5: 7 fields.*write 8, with ; between them: type; network",
        ),
        ("alexnet", "vgg", r"a, line 8: unknown network 'cnn; vgg'.*allowed: fc; fcn5, "),
        ("1024", "0", r"a, line 5: batch size '0'.*give a number of at least 1"),
        ("-1;\t\t2", "-2;\t\t2", r"a, line 5: device id '-2'.*at least 0"),
        ("60000", "all", r"a, line 5: epoch size 'all'.*at least -1"),
        ("0.05", "nan", r"a, line 5: learning rate 'nan'"),
        ("cuda:\t\t8.0", "cpu_count: many", r"a, line 13: cpu_count 'many'"),
    ],
)
def test_an_error_names_file_and_line_and_what_is_allowed(old, new, message):
    with pytest.raises(InputError, match=f"(?s){message}"):
        legacy.parse(ONE.replace(old, new, 1), "a")


def test_a_configuration_without_experiments_is_refused():
    with pytest.raises(InputError, match="a has no experiments"):
        legacy.parse("tools: torch\nexperiments:\n{\n}\n", "a")


def test_the_command_measures_what_the_file_asks_for(tmp_path, monkeypatch, capsys):
    path, seen = tmp_path / "one.config", []
    path.write_text(ONE)
    monkeypatch.setattr(networks, "command", lambda options, output, listing: seen.append(options) or 0)
    assert (
        app(["bench", "networks", "--config", str(path), "--modes", "default"], result_action="return_value")
        == 0
    )
    (options,) = seen
    assert {cell.network for cell in options.cells} == {"fcn-r", "alexnet-r"}
    assert f"{path}: epochs, epoch sizes and learning rates are ignored" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"networks": ("fcn-r",)}, "--config and NETWORK are given"),
        ({"batch_sizes": (8,)}, "--config and --batch-sizes"),
        ({"threads": (2,)}, "--config and --threads"),
    ],
)
def test_options_that_the_file_decides_are_refused(tmp_path, given, message):
    with pytest.raises(InputError, match=message):
        legacy.configured(NetworksOptions(**{"networks": (), **given}), tmp_path / "none")


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(InputError, match=r"none\.config cannot be read: No such file"):
        legacy.configured(NetworksOptions(()), tmp_path / "none.config")
