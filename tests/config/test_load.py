"""Presets, TOML files and overrides become one configuration, and mistakes are named."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.config import rules
from shoal.config.load import config_from_toml, differences, load_config, preset_names, to_toml
from shoal.config.sections import Config, Model, Train
from shoal.errors import ConfigError


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_loads_and_obeys_the_rules(name):
    config = load_config(name)
    rules.check(config, 1)
    assert config != Config()


@pytest.mark.parametrize("name", preset_names())
def test_a_stored_configuration_loads_back_to_the_same_object(name):
    config = load_config(name, {"data": {"datasets": ('a "quoted"\\path\n', "b"), "weights": (1.0, 0.5)}})
    assert config_from_toml(to_toml(config), "stored") == config


@settings(deadline=None)
@given(st.text())
def test_any_path_survives_being_stored(path):
    config = Config(data={"datasets": (path,)})
    assert config_from_toml(to_toml(config), "stored") == config


def test_overrides_win_over_the_file_and_the_file_over_defaults(tmp_path):
    file = tmp_path / "my.toml"
    file.write_text("[model]\nn_layers = 3\nd_model = 96\n")
    config = load_config(str(file), {"model": {"n_layers": 5}})
    assert (config.model.n_layers, config.model.d_model, config.model.n_heads) == (5, 96, 12)
    assert differences(config, Config()) == [("model.n_layers", 5, 12), ("model.d_model", 96, 768)]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[modle]\nn_layers = 3", r"line 1: unknown section \[modle\]\n  hint: did you mean 'model'\?"),
        ("[model]\nn_layer = 3", r"line 2: unknown key model.n_layer\n  hint: did you mean 'n_layers'\?"),
        ("[train]\nsteps = 3\n[model]\n'steps' = 3", "my.toml, line 4: unknown key model.steps"),
        ("model.layers-of = 3", "my.toml, line 1: unknown key model.layers-of"),
        ("[model]\nn_layers = 0", r"my.toml: model.n_layers = 0: input should be greater than 0"),
        ('[model]\nn_layers = "many"', r"model.n_layers = 'many': input should be a valid integer"),
        ("[precision]\nloss_scale = 0", "precision.loss_scale = 0: input should be greater than 0"),
        ("[model]\ndropout = 1.0", "model.dropout = 1.0: input should be less than 1"),
        ('[model]\nstyle = "gpt3"', "model.style = 'gpt3': input should be 'gpt2' or 'llama'"),
        ("model = 3", r"model must be a section: write \[model\]"),
        ("[model", "my.toml is not valid TOML"),
    ],
)
def test_a_mistake_in_a_file_is_named(tmp_path, text, words):
    file = tmp_path / "my.toml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(str(file))
    import re

    assert re.search(words, str(caught.value)), str(caught.value)


def test_an_unknown_preset_names_the_nearest():
    with pytest.raises(ConfigError, match="'gpt2-medum' is neither a TOML file nor a preset") as caught:
        load_config("gpt2-medum")
    assert caught.value.hint == "did you mean 'gpt2-medium'?"


def test_a_missing_or_strange_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"no\.toml cannot be read: No such file"):
        load_config(str(tmp_path / "no.toml"))
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not UTF-8 text"):
        load_config(str(tmp_path / "binary.toml"))


@pytest.mark.parametrize(
    ("train", "world_size", "words", "hint"),
    [
        (
            {"global_batch_size": 10, "micro_batch_size": 2},
            4,
            "= 10 does not divide among 4 data-parallel ranks",
            "= 8 or 16",  # 12 would leave a share that the micro-batch does not divide
        ),
        (
            {"global_batch_size": 3, "micro_batch_size": 1},
            4,
            "= 3 does not divide among 4 data-parallel ranks",
            "= 4",
        ),
        (
            {"global_batch_size": 32, "micro_batch_size": 5},
            2,
            "= 5 does not divide a rank's share of 16",
            "= 4 or 8",
        ),
    ],
)
def test_batches_that_do_not_divide_name_the_nearest_that_do(train, world_size, words, hint):
    config = Config(train=Train(**train))
    with pytest.raises(ConfigError, match=words) as caught:
        rules.check(config, world_size)
    assert hint in caught.value.hint
    for name, values in re.findall(r"train\.(\w+) = ([\d or]+)", caught.value.hint):
        for value in values.split(" or "):
            rules.check(Config(train=Train(**train | {name: int(value)})), world_size)  # accepted


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        (
            {"model": {"max_seq_len": 64}, "train": {"seq_len": 65}},
            "train.seq_len = 65 is longer than model.max_seq",
        ),
        ({"eval": {"seq_len": 2000}}, "eval.seq_len = 2000 is longer than model.max_seq_len = 1024"),
        ({"optimizer": {"lr": 1e-5}, "schedule": {"min_lr": 1e-4}}, "min_lr = 0.0001 is above the peak"),
        (
            {"train": {"steps": 5}, "schedule": {"warmup_steps": 6}},
            "warmup_steps = 6 is a warm-up of 6 steps, longer than the schedule, which ends at step 5",
        ),
        (
            {"train": {"steps": 5}, "schedule": {"warmup_steps": 6, "decay_steps": 9}},
            "warmup_steps = 6 is a warm-up of 6 steps, longer than the run of 5 steps",
        ),
        (
            {"train": {"steps": 100}, "schedule": {"warmup_fraction": 0.5, "decay_steps": 400}},
            "warmup_fraction = 0.5 is a warm-up of 200 steps, longer than the run of 100 steps",
        ),
        (
            {"train": {"recompute": "selective", "recompute_offload": True}},
            "recompute_offload = true with train.recompute = selective: only the inputs of the chunks of",
        ),
        ({"train": {"recompute_offload": True}}, "recompute_offload = true with train.recompute = none"),
        ({"data": {"datasets": ("a",), "weights": (1.0, 2.0)}}, r"data.weights has 2 values for 1 dataset"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(sections, words):
    with pytest.raises(ConfigError, match=words):
        rules.check(Config.model_validate(sections), 1)


def test_sections_are_frozen_and_documented():
    with pytest.raises(ValueError, match="frozen"):
        Model().n_layers = 3
    for section in Config.model_fields.values():
        for name, field in section.annotation.model_fields.items():
            assert field.description, name


@pytest.mark.parametrize(
    "given",
    [
        {"model": {"max_seq_len": 64}, "train": {"seq_len": 65}},
        {"optimizer": {"lr": 1e-5}, "schedule": {"min_lr": 1e-4}},
        {"train": {"steps": 50}, "schedule": {"warmup_steps": 60}},
        {"train": {"steps": 100}, "schedule": {"warmup_fraction": 0.5, "decay_steps": 400}},
    ],
)
def test_each_value_in_a_hint_is_accepted(given):
    with pytest.raises(ConfigError) as caught:
        rules.check(Config(**given), 1)
    found = re.findall(r"(\w+)\.(\w+) = ([\d.e-]+)", caught.value.hint)
    assert found
    for section, name, value in found:
        rules.check(Config(**given | {section: given.get(section, {}) | {name: float(value)}}), 1)


def test_a_key_of_another_section_is_found_there():
    with pytest.raises(ConfigError, match=r"unknown key train.lr") as caught:
        config_from_toml("[train]\nlr = 1e-3\n", "my.toml")
    assert caught.value.hint == "did you mean optimizer.lr?"
