"""Descriptions of networks: sizes of the literature, and what a wrong file is answered with."""

# ruff: noqa: E501
from importlib import resources

import pytest
import torch

from shoal.errors import ConfigError
from shoal.networks.description import names, parse, read

SIZES = {  # parameters, multiply-adds of one sample
    "alexnet-r": (89_578, 12_298_240),
    "alexnet-s": (62_378_344, 1_131_457_664),
    "fcn-r": (14_205_962, 14_198_784),
    "fcn-s": (117_997_696, 117_964_800),
    "fcn-s-4": (122_194_048, 122_159_104),
    "gpt2-s": (124_439_808, 1024 * (12 * 12 * 768**2 + 768 * 50_257) + 12 * 2 * 1024**2 * 768),
    "lstm": (6_182_672, 32 * (2 * 4 * 256 * 512 + 256 * 10_000)),
    "resnet-50": (25_557_032, 4_089_184_256),
    "resnet-56": (853_018, 125_485_696),
}
HEAD = 'input = [3, 8, 8]\nclasses = 4\n\n[[layers]]\nkind = "relu"\n\n[[layers]]\n'
END = '\n[[layers]]\nkind = "flatten"\n[[layers]]\nkind = "linear"\nout = "classes"\n'


def test_networks_have_the_parameters_of_the_literature():
    found = {name: read(name).resolve() for name in names()}
    assert {name: (one.num_parameters, one.multiply_adds) for name, one in found.items()} == SIZES


def test_floor_pooling_has_the_parameters_that_the_file_says():
    text = resources.files("shoal.networks").joinpath("alexnet-r.toml").read_text().replace("ceil = true", "")
    assert parse(text, "floor").resolve().num_parameters == 85_098


@pytest.mark.parametrize(
    ("side", "kernel", "stride", "padding", "up", "windows"),
    [
        (54, 3, 2, 0, True, 27),
        (54, 3, 2, 0, False, 26),
        (32, 3, 2, 0, True, 16),
        (5, 2, 2, 1, True, 3),
        (7, 7, 1, 3, False, 7),
    ],
)
def test_windows_along_a_side_are_those_of_torch(side, kernel, stride, padding, up, windows):
    layer = f'kind = "max_pool"\nkernel = {kernel}\nstride = {stride}\npadding = {padding}\n'
    layer += f"ceil = {str(up).lower()}\n"
    text = f"input = [1, {side}, {side}]\nclasses = 2\n[[layers]]\n{layer}{END}"
    (pool, *_) = parse(text, "test").resolve().layers
    assert pool.after == (1, windows, windows)
    module = torch.nn.MaxPool2d(kernel, stride, padding, ceil_mode=up)
    assert module(torch.zeros(1, 1, side, side)).shape[1:] == pool.after


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        (HEAD + 'kind = "convolution"' + END, "test, line 7: layer 1: unknown kind 'convolution'", "conv"),
        (HEAD + 'kind = "conv"\nout = 2' + END, "line 7: layer 1 (conv): kernel = None", "at least 1"),
        (HEAD + 'kind = "conv"\nout = 2\nkernel = 3\nstrides = 2' + END, "unknown key strides", "stride"),
        (HEAD + 'kind = "conv"\nout = -2\nkernel = 3' + END, "out = -2", "at least 1"),
        (HEAD + 'kind = "linear"\nout = 3\nbias = 1' + END, "bias = 1", "true or false"),
        (HEAD + 'kind = "conv"\nout = 2\nkernel = 9' + END, "test, line 7: layer 1 (conv): its kernel of 9 is larger", ""),
        (HEAD + 'kind = "lstm"\nout = 3' + END, "it takes steps and features, and its input is 3 x 8 x 8", ""),
        (HEAD + 'kind = "flatten"\n', "ends in an output of 192 for 4 classes", 'out = "classes"'),
        (HEAD + 'kind = "residual"\nbody = [{ kind = "conv", out = 5, kernel = 1 }]' + END, "5 x 8 x 8, its shortcut 3 x 8 x 8", ""),
        (HEAD + 'kind = "relu"\nname = "A b"' + END, "name = 'A b'", "use a-z"),
        (HEAD + 'kind = "repeat"\ntimes = 20000\nbody = [{ kind = "relu" }]' + END, "more than 10,000 layers", ""),
        ("input = [3, 8]\ntokens = 3\nclasses = 4\nlayers = [3]", "test, line 1: input = [3, 8], tokens = 3", "or tokens"),
        ("input = [3, 8]\nclasses = 4\nlayers = [3]", "unknown kind 3", ""),
        ("input = [3, 8]\nclasses = 4\nlayer = []", "test, line 3: unknown key layer", "layers"),
        (HEAD + 'kind = "relu"\nname = "a..b"' + END, "name = 'a..b'", "use a-z"),
        (HEAD + 'kind = "relu"\nname = "0"' + END, "the name 0 is that of two layers", "has its number"),
        (HEAD + 'kind = "relu"\nname = "a.b"\n[[layers]]\nkind = "relu"\nname = "a"' + END, "the name a is that", "of its own"),
        (HEAD + 'kind = "relu"\nname = "a"\n[[layers]]\nkind = "relu"\nname = "a.b"' + END, "the name a.b is that", "of its own"),
        (HEAD + 'kind = "subsample"\nout = 2' + END, "line 7: layer 1 (subsample): it adds channels: out is below the 3", ""),
        ('input = [8]\nclasses = 4\n[[layers]]\nkind = "embedding"\nout = 2' + END, "line 3: layer 0 (embedding): it takes token ids", ""),
        ('tokens = 8\nclasses = 4\n[[layers]]\nkind = "embedding"\nout = 2' + END, "ends in an output of 4 for 4 classes", 'out = "classes"'),
        (HEAD + 'kind = "residual"\n' + "".join(f'[[layers{".body" * n}]]\nkind = "residual"\n' for n in range(1, 80)) + END, "nested more than 32 deep", ""),
        ('tokens = 8\nclasses = 4\n[[layers]]\nkind = "embedding"\nout = 6\n[[layers]]\nkind = "attention"\nheads = 4\n[[layers]]\nkind = "unembedding"', "line 6: layer 1 (attention): its 4 heads do not divide 6 features", ""),
        ('tokens = 8\nclasses = 4\n[[layers]]\nkind = "embedding"\nout = 2\n[[layers]]\nkind = "linear"\nout = 3\n[[layers]]\nkind = "unembedding"', "line 9: layer 2 (unembedding): it needs an embedding of 3 features", ""),
        (HEAD + 'kind = "attention"\nheads = 2' + END, "(attention): it takes steps and features", ""),
        ("classes = ", "not valid TOML", ""),
        ("input = [9999999]\nclasses = 4\nlayers = [{}]", "input = [9999999]", "features"),
        ('input = [1048576]\nclasses = 1048576\n[[layers]]\nkind = "linear"\nout = "classes"', "more than 2^38", ""),
    ],
)  # fmt: skip
def test_a_wrong_description_is_answered_with_file_line_and_what_is_allowed(text, message, hint):
    with pytest.raises(ConfigError) as caught:
        parse(text, "test").resolve()
    assert message in caught.value.message
    assert hint in (caught.value.hint or "")


def test_a_file_of_ones_own_is_read(tmp_path):
    (tmp_path / "mine.toml").write_text(HEAD + 'kind = "conv"\nout = 2\nkernel = 3' + END)
    assert read(str(tmp_path / "mine.toml")).resolve().num_parameters == 2 * 28 + 4 * 73
    with pytest.raises(ConfigError, match="'resnet-65' is neither a network nor a TOML file"):
        read("resnet-65")
    with pytest.raises(ConfigError, match=r"none\.toml"):
        read(str(tmp_path / "none.toml"))
