"""Described networks under the trainer of GPTs: replicas agree, runs resume, what cannot work is refused."""

import functools

import numpy as np
import pytest
import torch
import torch.distributed as dist
from rich.console import Console
from safetensors.torch import load_file
from torch.nn import functional

from shoal.checkpoint.manifest import step_name
from shoal.config.load import load_config, validate
from shoal.data.prepare.examples import prepare_examples
from shoal.data.prepare.images import RANDOM
from shoal.data.prepare.options import PrepareOptions
from shoal.errors import ConfigError, DataError, InputError
from shoal.infer.load import load_text_model
from shoal.models.init import initialise
from shoal.networks.description import names, parse, read
from shoal.networks.modules import Network
from shoal.parity.command import parity
from shoal.runtime.rank_info import ReplicaGroupInfo
from shoal.tasks.choose import open_task
from shoal.train.request import Request
from shoal.train.saving import resume
from shoal.train.step import agree, forward_backward, update
from tests.cases import every
from tests.pool import RankError
from tests.shared import SHARED
from tests.tiny_dataset import random_dataset
from tests.train.conftest import apart
from tests.train.ranks import TINY, make_job, run_training

__all__ = ["apart"]  # a fixture

DIGITS = SHARED / "data" / "mnist"
NETWORKS = ("fcn-r", "lstm")
_HIDDEN = '[[layers]]\nkind = "linear"\nout = {}\ngain = 4\n[[layers]]\nkind = "sigmoid"\n'
_HEAD = '[[layers]]\nkind = "linear"\nout = "classes"\n'
_IMAGES = "input = [1, 28, 28]\nclasses = 10\n"
NARROW = _IMAGES + '[[layers]]\nkind = "flatten"\n' + "".join(map(_HIDDEN.format, (48, 32, 16))) + _HEAD
NORMED = f"""{_IMAGES}
[[layers]]
kind = "conv"
out = 4
kernel = 3
stride = 4
bias = false
[[layers]]
kind = "residual"
body = [{{ kind = "batch_norm" }}, {{ kind = "relu" }}]
[[layers]]
kind = "global_avg_pool"
{_HEAD}"""
SYNCS = [  # `make test` tries every third of the pairs with one of two networks
    *({"strategy": name} for name in ("central_serial", "central_parallel", "device_sharded", "tree_update")),
    {"strategy": "allreduce", "algorithm": "chunked_ring"},
]


def values_of(network, data, **sections):
    """Return a tiny configuration without what only decoders, or only text, have."""
    values = {name: section for name, section in TINY.items() if name != "model"}
    train = {key: value for key, value in TINY["train"].items() if network == "lstm" or key != "seq_len"}
    return values | {
        "model": {"network": str(data.get(f"narrow {network}", network))},
        "data": {"datasets": [str(data[network])]},
        "train": train | {"micro_batch_size": 2} | sections.pop("train", {}),
        "eval": {"every": 5, "sequences": 7},
        "optimizer": {"lr": 1e-3},
        "schedule": {"min_lr": 1e-4},
        **sections,
    }


def prepared(folder, source, **options):
    return prepare_examples(PrepareOptions((str(source),), folder, **options), Console(quiet=True)).path


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    images = prepared(folder / "images", RANDOM, limit=400, split="8,1,1")
    (folder / "narrow.toml").write_text(NARROW)
    (folder / "normed.toml").write_text(NORMED)
    narrow = {"narrow fcn-r": folder / "narrow.toml", "narrow normed": folder / "normed.toml"}
    return narrow | {"fcn-r": images, "normed": images, "lstm": random_dataset(folder / "walk")}


@pytest.fixture(scope="module")
def plain(pool, data, tmp_path_factory):
    """Return a function that gives the run of four plain replicas."""
    folder = tmp_path_factory.mktemp("plain")
    return functools.cache(
        lambda network: pool.run(run_training, 4, folder / network, values_of(network, data))[0]
    )


def curves(run):
    validation = [line for line in run["lines"] if "validation_loss" in line]
    return run["losses"], run["norms"], [line["validation_loss"] for line in validation], validation


@pytest.mark.parametrize("network", every(2, NETWORKS))
def test_any_number_of_replicas_trains_as_one_does(pool, data, tmp_path, network):
    runs = [
        pool.run(run_training, size, tmp_path / str(size), values_of(network, data))[0] for size in (1, 2, 4)
    ]
    one, *others = map(curves, runs)
    for several in others:
        for ours, theirs in zip(one[:3], several[:3], strict=True):
            np.testing.assert_allclose(theirs, ours, rtol=2e-6)
        assert several[3][0]["validation_accuracy"] == one[3][0]["validation_accuracy"]
    unit = {"fcn-r": "examples", "lstm": "tokens"}[network]
    assert runs[0]["lines"][0][unit] == 16 * (1 if network == "fcn-r" else 16)
    assert runs[0]["lines"][0][f"{unit}_per_s"] > 0


@pytest.mark.parametrize(
    ("sync", "network"), every(3, [(sync, network) for network in NETWORKS for sync in SYNCS])
)
def test_strategies_of_then_train_as_plain_replicas_do(pool, data, plain, tmp_path, network, sync):
    ranks = pool.run(run_training, 4, tmp_path, values_of(network, data, sync=sync))
    assert all(line["sync_bytes"] > 0 for line in ranks[0]["lines"] if "loss" in line)
    assert not any("sync_bytes" in line for line in plain(network)["lines"])  # the back end's: nobody counts
    for ours, theirs in zip(curves(plain(network))[:3], curves(ranks[0])[:3], strict=True):
        np.testing.assert_allclose(theirs, ours, rtol=2e-6)
    for rank in ranks:
        assert all(np.array_equal(w, ranks[0]["weights"][name]) for name, w in rank["weights"].items())


@pytest.mark.parametrize("network", every(2, NETWORKS))
def test_replicas_that_train_apart_agree_on_all_layers(apart, data, tmp_path, network):
    sync = {"strategy": "streaming_diloco", "every": 2, "overlap": 0, "fragments": 2, "int8": True}
    first, second = apart(tmp_path, values_of(network, data, sync=sync))
    assert first["losses"] != second["losses"]
    for name, weight in first["weights"].items():
        assert np.array_equal(weight, second["weights"][name]), name
    agreed = [line["step"] for line in first["lines"] if "round" in line]
    assert agreed == [1, 2, 3, 4, 5, 5]  # a part after each step, both at the end


@pytest.mark.parametrize("network", every(2, reversed(NETWORKS)))
def test_resume_is_bitwise_equal(pool, data, tmp_path, network):
    values = values_of(network, data)
    whole = pool.run(run_training, 2, tmp_path / "whole", values)[0]
    halted = values | {"runtime": values["runtime"] | {"stop_after": 3}}
    assert not pool.run(run_training, 2, tmp_path / "parts", halted)[0]["done"]
    parts = pool.run(run_training, 2, tmp_path / "parts", values)[0]
    assert parts["losses"] == whole["losses"]
    for name, weight in whole["weights"].items():
        assert np.array_equal(weight, parts["weights"][name]), name
    if network == "lstm":
        return
    with pytest.raises(InputError, match=r"holds the network .*narrow\.toml: only decoders generate text"):
        load_text_model(tmp_path / "parts", "cpu")


def test_pictures_are_learnt_and_accuracy_is_the_share_of_right_answers(pool, data, tmp_path):
    train = {"steps": 160, "global_batch_size": 32, "micro_batch_size": 32}
    rest = {"optimizer": {"lr": 1e-2}, "eval": {"every": 0, "sequences": 40}}
    run = pool.run(run_training, 1, tmp_path, values_of("fcn-r", data, train=train, **rest))[0]
    (test,) = [line for line in run["lines"] if "test_loss" in line]
    right = test["test_accuracy"] * 40
    assert right == pytest.approx(round(right), abs=1e-4)
    assert right > 37
    assert test["test_loss"] < 0.5 < 2 < run["losses"][0]


@pytest.mark.proof
@pytest.mark.skipif(not DIGITS.is_dir(), reason=f"needs the digits of {DIGITS}")
def test_fcn_r_learns_digits(pool, tmp_path):
    digits = {"fcn-r": prepared(tmp_path / "digits", DIGITS, split="8,1,1")}
    train = {"steps": 60, "global_batch_size": 64, "micro_batch_size": 64}
    values = values_of("fcn-r", digits, train=train, eval={"every": 60, "sequences": 1000})
    run = pool.run(run_training, 1, tmp_path / "run", values, timeout=300)[0]
    (found,) = [line for line in run["lines"] if "validation_loss" in line]
    assert found["validation_accuracy"] > 0.8


@pytest.mark.parametrize(
    ("network", "sections", "message", "hint"),
    [
        (
            "fcn-r",
            {"model": {"network": "fcn-r"}, "parallel": {"tp": 2}},
            "model.network = fcn-r under tp2: tp, pp and zero know how to cut decoders only",
            "use replicas of the whole network, dp2",
        ),
        (
            "lstm",
            {"parallel": {"zero": 2}},
            "model.network = lstm under zero2x2: tp, pp and zero know how to cut decoders only",
            "use replicas of the whole network, dp2",
        ),
        (
            "lstm",
            {"model": {"network": "lstm", "n_layers": 3}},
            "model.n_layers = 3 with model.network = lstm, which does not read it",
            "leave it out (model.n_layers = 12)",
        ),
        (
            "lstm",
            {"model": {"network": "lstm", "vocab_size": 99}},
            "model.vocab_size = 99 is not the data's 257",
            "leave it at 0 to take the data's",
        ),
        (
            "fcn-r",
            {"model": {"network": "fcn-r"}, "train": {"seq_len": 32}},
            "train.seq_len = 32 with model.network = fcn-r, which does not read it",
            "leave it out (train.seq_len = 256)",
        ),
        (
            "lstm",
            {"train": {"recompute": "full"}},
            "train.recompute = full with model.network = lstm, which does not read it",
            "leave it out (train.recompute = none)",
        ),
        (
            "lstm",
            {"train": {"compile": "on"}},
            "train.compile = on with model.network = lstm: only a decoder's blocks are compiled",
            "use train.compile = off (or auto)",
        ),
        (
            "lstm",
            {"optimizer": {"name": "muon"}},
            "optimizer.name = muon with model.network = lstm: it updates a decoder's blocks",
            "use optimizer.name = adamw or sgd",
        ),
        (
            "lstm",
            {"model": {"network": "lstm", "batch_statistics": "synchronised"}},
            "synchronised with model.network = lstm, which has no batch normalisation",
            "leave model.batch_statistics out",
        ),
        *(
            (
                "fcn-r",
                {"model": {"network": "resnet-56", "batch_statistics": "synchronised"}, "sync": sync},
                f"model.network = resnet-56 and sync.strategy = {sync['strategy']}: it is for networks with",
                "use model.batch_statistics = replica",
            )
            for sync in ({"strategy": "async_sgd"}, {"strategy": "block_momentum", "every": 2})
        ),
    ],
)
def test_what_only_decoders_have_is_refused_by_name(data, tmp_path, network, sections, message, hint):
    config = validate(values_of(network, data, **sections), "test")
    with pytest.raises(ConfigError) as caught:
        Request(config, tmp_path).check(2)
    assert message in caught.value.message
    assert hint in caught.value.hint


def test_any_network_can_be_trained_apart(data, tmp_path):
    for network in NETWORKS:
        sync = {"strategy": "streaming_diloco", "every": 2, "overlap": 0, "fragments": 2}
        config = validate(values_of(network, data, sync=sync), "test")
        request = Request(config, tmp_path)
        request.check(2)  # as the launcher does
        request.on(ReplicaGroupInfo(1, 2, 1, "127.0.0.1", 1, "mark", 1)).check(1)


def test_a_network_has_as_many_fragments_as_layers_with_weights(data, tmp_path):
    for network, layers in (("normed", 3), ("fcn-r", 4)):
        for fragments in (layers, layers + 1):
            sync = {"strategy": "streaming_diloco", "every": 5, "overlap": 0, "fragments": fragments}
            config = validate(values_of(network, data, sync=sync), "test")
            request = Request(config, tmp_path)
            if fragments == layers:
                request.check(2)
                continue
            with pytest.raises(ConfigError, match=f"layers with weights of .* = {layers}, sync.every = 5"):
                request.check(2)


def test_layers_with_names_train_apart(apart, data, tmp_path):
    file = tmp_path / "named.toml"
    file.write_text(NARROW.replace("gain = 4\n", 'gain = 4\nname = "blocks.first"\n', 1))
    sync = {"strategy": "streaming_diloco", "every": 4, "overlap": 0, "fragments": 4}
    first, second = apart(tmp_path / "run", values_of("fcn-r", data | {"narrow fcn-r": file}, sync=sync))
    assert all(np.array_equal(weight, second["weights"][name]) for name, weight in first["weights"].items())


def test_data_of_the_wrong_kind_is_refused(data, tmp_path):
    swapped = {"fcn-r": data["lstm"], "lstm": data["fcn-r"]}
    for network in NETWORKS:
        with pytest.raises(DataError, match="and this run takes"):
            Request(validate(values_of(network, swapped), "test"), tmp_path).check(1)


@pytest.mark.parametrize("network", NETWORKS)
def test_presets_name_the_networks(data, network):
    config = load_config(network, {"data": {"datasets": (str(data[network]),)}})
    task = open_task(config)
    assert task.config.model.network == network
    with pytest.raises(InputError, match="parity compares ways to cut a decoder"):
        parity(config, "dp2")


def test_each_network_has_a_preset_that_trains_it(data, tmp_path):
    for network in names():
        shape = tuple(read(network).input) or None
        source = (
            data["lstm"]
            if shape is None
            else prepared(tmp_path / network, pictures(tmp_path, network, shape))
        )
        config = load_config(network, {"data": {"datasets": (str(source),)}})
        Request(config, tmp_path).check(1)


def test_a_resume_with_another_description_of_the_same_weights_is_rejected(pool, data, tmp_path, monkeypatch):
    file = tmp_path / "net.toml"
    file.write_text(NARROW)
    values = values_of("fcn-r", data | {"narrow fcn-r": file})
    halted = values | {"runtime": values["runtime"] | {"stop_after": 1}}
    pool.run(run_training, 1, tmp_path / "run", halted)
    file.write_text(NARROW.replace("sigmoid", "relu"))
    with pytest.raises(RankError, match="belongs to another run: layers of its network was"):
        pool.run(run_training, 1, tmp_path / "run", values)
    with pytest.raises(RankError, match="with other layers"):
        pool.run(train_from, 1, tmp_path / "new", values, tmp_path / "run")
    moved = tmp_path / "moved.toml"
    moved.write_text(NARROW)
    file.unlink()
    same = values | {"model": {"network": str(moved)}}
    assert pool.run(run_training, 1, tmp_path / "run", same)[0]["steps"] == [1, 2, 3, 4, 5]
    assert pool.run(train_from, 1, tmp_path / "other", same, tmp_path / "run")[0]["done"]
    monkeypatch.chdir(tmp_path)
    config = validate(values | {"model": {"network": "moved.toml"}}, "test")
    assert open_task(config).config.model.network == str(moved)


def train_from(run_dir, values, init):
    return run_training(run_dir, values, init=init)


def pictures(folder, name, shape):
    """Write three examples of two classes."""
    rng = np.random.default_rng(0)
    np.savez(folder / f"{name}.npz", x=rng.normal(size=(30, *shape)).astype(np.float32), y=np.arange(30) % 2)
    return folder / f"{name}.npz"


def test_replicas_normalise_by_their_own_batches_and_save_the_mean_of_their_statistics(pool, data, tmp_path):
    values = values_of("normed", data)
    ranks = pool.run(run_training, 2, tmp_path / "whole", values)
    assert ranks[0]["done"]
    found = saved_statistics(tmp_path / "whole", 5)
    assert set(found) == {"1.body.0.running_mean", "1.body.0.running_var"}
    assert found["1.body.0.running_var"].min() != 1
    halted = values | {"runtime": values["runtime"] | {"stop_after": 3}}
    pool.run(run_training, 2, tmp_path / "parts", halted)
    assert not torch.equal(saved_statistics(tmp_path / "parts", 3)["1.body.0.running_mean"], torch.zeros(4))
    parts = pool.run(run_training, 2, tmp_path / "parts", values)
    assert parts[0]["lines"][-1] == ranks[0]["lines"][-1]  # test loss and accuracy, with the statistics


def of_replicas(description, inputs, targets):
    """Return logits, gradients and statistics of a synchronised network, with a share of the batch a rank."""
    network = Network(parse(description, "test").resolve(), synchronised=True)
    initialise(network, 1)
    network.double().train()
    for norm in network._norms().values():
        norm.running_mean, norm.running_var = norm.running_mean.double(), norm.running_var.double()
    logits = []
    for step_inputs, step_targets in zip(inputs, targets, strict=True):  # micro-batches of all replicas
        rank, size = dist.get_rank(), dist.get_world_size()
        x, y = step_inputs.tensor_split(size)[rank], step_targets.tensor_split(size)[rank]
        logits.append(network(x))
        functional.cross_entropy(logits[-1], y, reduction="sum").backward()
    gradients = {name: weight.grad for name, weight in network.named_parameters()}
    for gradient in gradients.values():
        dist.all_reduce(gradient)
    return torch.cat(logits).detach(), gradients, network.running_statistics()


@pytest.mark.parametrize("steps", [1, 3])
def test_synchronised_statistics_are_those_of_one_process_with_the_whole_batch(pool, steps):
    torch.manual_seed(0)
    inputs = 3 + torch.randn(steps, 8, 1, 28, 28, dtype=torch.float64)
    targets = torch.randint(0, 10, (steps, 8))
    (one,) = pool.run(of_replicas, 1, NORMED, inputs, targets)
    two = pool.run(of_replicas, 2, NORMED, inputs, targets)
    logits = torch.cat([part.view(steps, 4, 10) for part, *_ in two], dim=1).view(-1, 10)
    torch.testing.assert_close(logits, one[0], rtol=1e-12, atol=1e-12)
    for _, gradients, statistics in two:
        for ours, theirs in ((gradients, one[1]), (statistics, one[2])):
            assert ours.keys() == theirs.keys()
            for name in ours:
                torch.testing.assert_close(ours[name], theirs[name], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    "sync",
    every(2, [{}, *SYNCS[1:], {"strategy": "bf16"}]),
    ids=lambda sync: "-".join(sync.values()) or "allreduce",
)
def test_synchronised_replicas_train_as_one_process_does(pool, data, tmp_path, sync):
    def run(size, statistics):
        values = values_of("normed", data, train={"micro_batch_size": 16 // size}, sync=sync)
        values["model"] |= {"batch_statistics": statistics}
        return pool.run(run_training, size, tmp_path / f"{size}-{statistics}", values)[0]

    one, two, apart = run(1, "synchronised"), run(2, "synchronised"), run(2, "replica")
    tolerance = 1e-2 if sync == {"strategy": "bf16"} else 1e-5
    np.testing.assert_allclose(two["losses"], one["losses"], rtol=tolerance)
    np.testing.assert_allclose(two["norms"], one["norms"], rtol=tolerance)
    difference = np.abs(np.subtract(apart["norms"], one["norms"]) / one["norms"]).max()
    assert difference > 1e-3  # each replica's own statistics give something else
    found = [saved_statistics(tmp_path / f"{size}-synchronised", 5) for size in (1, 2)]
    for name in found[0]:
        torch.testing.assert_close(found[1][name], found[0][name], rtol=tolerance, atol=1e-5)


def overflowing(run_dir, values):
    """Train with a gradient that is not finite in step 2; return the statistics after each step."""
    job, seen = make_job(run_dir, values), []
    for step in (1, 2, 3):
        batch = job.task.batch(step)
        loss = forward_backward(job, batch)
        if step == 2:
            next(iter(job.model.named_weights().values())).grad.fill_(torch.inf)
        update(job, agree(job, batch, loss))
        (part,) = job.model.parts
        seen.append({name: tensor.clone() for name, tensor in part.running_statistics().items()})
    return seen, job.skipped


@pytest.mark.parametrize(
    "sections",
    [{"guard": {"nonfinite": "skip"}}, {"precision": {"dtype": "fp16", "initial_scale": 2.0**10}}],
    ids=("guard", "fp16"),
)
def test_a_step_that_is_left_out_leaves_no_trace_in_the_statistics(pool, data, tmp_path, sections):
    for (first, second, third), skipped in pool.run(
        overflowing, 2, tmp_path, values_of("normed", data, **sections)
    ):
        assert skipped == 1
        assert all(torch.equal(first[name], second[name]) for name in first)
        assert not any(torch.equal(second[name], third[name]) for name in first)


def statistics_at_the_start(run_dir, values, parent):
    job = make_job(run_dir, values, init=parent)
    resume(job)
    return {name: tensor for part in job.model.parts for name, tensor in part.running_statistics().items()}


def test_a_run_that_starts_from_weights_has_their_statistics_too(pool, data, tmp_path):
    values = values_of("normed", data)
    pool.run(run_training, 1, tmp_path / "parent", values)
    found = pool.run(statistics_at_the_start, 1, tmp_path / "run", values, tmp_path / "parent")[0]
    saved = saved_statistics(tmp_path / "parent", 5)
    assert found.keys() == saved.keys()
    assert all(torch.equal(tensor, saved[name]) for name, tensor in found.items())


def saved_statistics(run, step):
    """Return the running statistics in a checkpoint."""
    folder = run / "checkpoints" / step_name(step) / "statistics"
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
