"""`shoal advise`: predictions, the sentence that says what to use, what is refused, and one real run."""

import json
import math

import pytest

from shoal.comm.silent_transport import SilentTransport
from shoal.comm.thread_transport import run_ranks
from shoal.config.layout import parse_layout
from shoal.config.load import load_config
from shoal.config.sections import Config, Sync
from shoal.config.sync_rules import STRATEGIES
from shoal.errors import InputError
from shoal.plan import advise, measure
from shoal.plan.advise import AdviseOptions, Basis, Prediction, advice, command, predict, settle
from shoal.plan.cluster import parse_link
from shoal.plan.link_cost import Cost, Link, all_reduce_cost, fit_link
from shoal.plan.measure import (
    compute_time_of_run,
    compute_time_of_step,
    measure_link,
    sustained,
    time_work,
)
from shoal.plan.sync_cost import ComputeTime, Replicas, demand, seconds, step_lines
from tests import commands

SHAPES = {f"blocks.{layer}.weight": (512, 2048) for layer in range(12)}  # 50 MB
WORK_S = {"bf16": 0.05, "int8": 0.1, "onebit": 0.1, "topk": 0.2, "powersgd": 0.05}


def rows_at(mbit, layout="dp4", **settings):
    """Return predictions for a step of 1 s, of which 0.6 s are the backward pass."""
    config = Config.model_validate({"train": {"steps": 1000}, **settings})
    legal, refused = settle(config, parse_layout(layout), config.model.n_layers)
    basis = Basis(Link(1e-4, mbit * 1e6 / 8), ComputeTime(1.0, 0.6), Replicas(4, 4))
    return [*predict(basis, legal, SHAPES, {name: WORK_S.get(name, 0.0) for name in legal}), *refused]


def test_a_format_that_a_strategy_does_not_read_does_not_count_against_it():
    refused = {row.strategy for row in rows_at(1000, precision={"reduce_dtype": "bf16"}) if row.refused}
    assert refused == {row.strategy for row in rows_at(1000) if row.refused}


def test_a_fast_link_wants_all_reduce_and_compression_would_slow_it_down():
    told = advice(rows_at(100_000))
    assert told.startswith("Use allreduce: 1 s. No strategy is faster.")
    assert "Compression would slow you down here: bf16 1.05, int8 1.10, onebit 1.10" in told
    assert "is the first to pay, below" in told


def test_a_slow_link_wants_replicas_that_meet_now_and_then():
    rows = rows_at(10, sync={"rank": 64})
    told = advice(rows)
    assert told.startswith("Use diloco: 1.6 s where allreduce takes 60.8 s, 37.9 times as fast.")
    assert "diloco is faster (" in told
    assert "diloco changes the result: compare losses, or take allreduce, the fastest that does not" in told
    assert "Slower than plain all-reduce here: central_serial, central_parallel, tree_update." in told
    assert "Compression would slow you down" not in told
    assert all(row.relative < 0.7 for row in rows if row.strategy in WORK_S)


def test_the_mildest_strategy_near_the_fastest_is_chosen():
    told = advice(rows_at(100))  # meeting now and then is faster by less than a fifth
    assert told.startswith("Use powersgd: 1.07 s where allreduce takes 6.49 s, 6.1 times as fast.")
    assert "diloco is faster (" in told
    assert "but by less than the 20% that a prediction may be off, and changes the result more." in told


def test_advice_gives_the_reason_for_an_exact_strategy_that_is_not_the_fastest():
    rows = [
        Prediction("allreduce", True, step_s=1.1, relative=1.0),
        Prediction("tree_update", True, step_s=1.0, relative=0.91),
        Prediction("diloco", False, step_s=2.0, relative=1.8),
    ]
    assert advice(rows).startswith(
        "Use allreduce: 1.1 s. tree_update is faster (1 s), but by less than the 20% that a prediction may "
        "be off. Slower than"
    )


def test_what_breaks_even_at_a_bandwidth_takes_as_long_as_all_reduce_there():
    for row in rows_at(1000):
        if row.refused or not 0 < row.below_bytes_per_s < math.inf:
            continue
        times = [
            seconds(
                step_lines(demand(sync, SHAPES, Replicas(4, 4)), ComputeTime(1.0, 0.6), work_s, 1e-4),
                1 / row.below_bytes_per_s,
            )
            for sync, work_s in ((Sync(strategy=row.strategy), row.work_s), (Sync(), 0.0))
        ]
        assert times[0] == pytest.approx(times[1]), row.strategy


def test_every_strategy_has_a_row_and_each_refusal_its_reason():
    rows = {row.strategy: row for row in rows_at(1000, train={"steps": 50}, sync={"every": 100})}
    assert rows.keys() == STRATEGIES.keys()
    assert "sync.every = 100 with train.steps = 50" in rows["diloco"].refused
    assert not rows["onebit"].refused
    parts = {row.strategy: row for row in rows_at(1000, "dp4*tp2")}
    assert "one rank updates whole weights" in parts["tree_update"].refused
    assert not parts["diloco"].refused


def test_strategies_take_the_settings_that_they_read():
    config = Config.model_validate({"sync": {"every": 20, "block": 128, "rank": 8}, "train": {"steps": 1000}})
    legal, _ = settle(config, parse_layout("dp2"), config.model.n_layers)
    assert (legal["diloco"].every, legal["diloco"].block) == (20, Sync().block)  # without int8, no block
    assert (legal["onebit"].block, legal["powersgd"].rank, legal["onebit"].rank) == (128, 8, Sync().rank)


def test_a_compression_that_pays_nowhere_or_hardly_is_told():
    plain = Prediction("allreduce", True, step_s=1.0, relative=1.0)
    lean = Prediction("bf16", False, step_s=0.98, relative=0.98, below_bytes_per_s=125e6)
    told = "Compression would save less than 5 % here: bf16 0.98 times the step; "
    assert told + "bf16 is the first to pay, below 1 Gbit/s." in advice([plain, lean])
    rows = [
        Prediction("allreduce", True, step_s=1.0, relative=1.0),
        Prediction("bf16", False, step_s=2.0, relative=2.0),
    ]
    assert advice(rows).endswith(
        "Compression would slow you down here: bf16 2.00 times the step; it is slower on every link."
    )


@pytest.mark.parametrize(
    ("words", "link"),
    [
        ("100mbit", Link(1e-4, 12.5e6)),
        ("1Gbit,0.2ms", Link(2e-4, 125e6)),
        ("64kbit, 1s", Link(1.0, 8e3)),
        ("2.5gbit,0us", Link(0.0, 312.5e6)),
    ],
)
def test_links_are_read(words, link):
    assert parse_link(words) == link


@pytest.mark.parametrize("words", ["", "fast", "100", "100mb", "0mbit", "100mbit,1", "-1mbit"])
def test_other_words_are_no_link(words):
    with pytest.raises(InputError, match=r"is not a (link rate|latency)\n  hint: write 100mbit"):
        parse_link(words)


@pytest.mark.parametrize(
    ("wish", "message"),
    [
        (AdviseOptions(link="soon"), "'soon' is not a link rate"),
        (AdviseOptions(step_ms=-3.0), "--step-ms -3: must be above 0"),
        (AdviseOptions(seconds=0.0), "--seconds 0: must be above 0"),
        (AdviseOptions(nproc=1), "layout 1 has one replica: there is nothing to synchronise"),
        (AdviseOptions(layout="zero2x4"), "layout zero2x4 has one replica"),
        (AdviseOptions(layout="dp4", hosts=3), "--hosts 3: 4 replicas cannot be divided evenly"),
        (AdviseOptions(layout="dp2*tp2"), "the step of a replica of several ranks"),
    ],
)
def test_what_cannot_be_predicted_is_refused(wish, message):
    with pytest.raises(InputError) as told:
        command(load_config("tiny"), wish)
    assert message in str(told.value)
    assert told.value.hint


def test_a_link_is_measured_within_its_time(monkeypatch):
    """By a clock that shows what the formula says: 13 MB/s, which 64 MB would take 7 s of."""
    link, spent = Link(1e-3, 13e6), []

    def timed(transport, algorithm, tensor):
        spent.append(all_reduce_cost(algorithm, transport.size, tensor.nbytes).seconds(link))
        return spent[-1]

    monkeypatch.setattr(measure, "time_all_reduce", timed)
    found = measure_link(SilentTransport(0, 3), 20.0)
    assert (found.latency_s, found.bytes_per_s) == pytest.approx((1e-3, 13e6))
    assert max(spent) > 1
    assert sum(spent) < 20


def test_what_a_token_bucket_lets_through_at_once_is_no_bandwidth():
    rate, bucket = 6.25e6, 32e3
    costs = [all_reduce_cost("chunked_ring", 2, 1 << power) for power in range(10, 26, 2)]
    times = [2e-4 + max(0.0, cost.num_bytes - bucket) / rate for cost in costs]
    assert fit_link(costs, times).bytes_per_s > 2 * rate
    assert sustained(costs, times).bytes_per_s == pytest.approx(rate, rel=0.01)
    assert sustained([Cost(2, 100), Cost(2, 10_000)], [1.0, 0.5]) is None


def test_the_pace_of_a_run_is_its_steps_without_waiting(tmp_path):
    for rank in range(2):
        (tmp_path / f"ranks/rank-{rank}").mkdir(parents=True)
    lines = [
        {"step": step, "seconds": 9.0 if step == 1 else 2.0, "communication_s": 0.5, "backward_s": 0.8}
        for step in range(1, 8)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    config = load_config("tiny")  # 16 sequences a step, 4 a forward pass
    assert compute_time_of_run(tmp_path, config, 2) == ComputeTime(1.5, 0.4)
    assert compute_time_of_run(tmp_path, config, 4) == ComputeTime(0.75, 0.4)
    assert compute_time_of_step(1.0, config, 2) == ComputeTime(1.0, 0.3)
    with pytest.raises(InputError, match="no step is recorded"):
        compute_time_of_run(tmp_path / "ranks", config, 2)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_work_of_every_strategy_is_timed_on_its_own(strategy):
    shapes = {"embed": (40, 16), "blocks.0.weight": (16, 16), "norm": (16,)}
    took = time_work(Sync(strategy=strategy, every=10), shapes, SilentTransport(0, 4))
    assert (took == 0) == (strategy == "allreduce")
    assert took < 1


def test_a_large_models_work_is_that_of_a_part_in_proportion(monkeypatch):
    seen = []

    class Spy(SilentTransport):
        def _begin(self, sends, receives):
            seen.extend(tensor.numel() for tensor, _ in sends)
            return super()._begin(sends, receives)

    monkeypatch.setattr("shoal.plan.measure._MOST_ELEMENTS", 3000)
    shapes = {f"{layer}": (32, 32) for layer in range(10)}
    time_work(Sync(strategy="bf16"), shapes, Spy(0, 2))
    assert max(seen) == 2 * 2 * 32 * 32  # two of the ten, in bf16


def test_tiny_is_measured_and_advised_on_two_processes(tmp_path):
    file = tmp_path / "advice.json"
    words = ["advise", "tiny", "--nproc", "2", "--seconds", "0.5", "--json", file]
    words += ["--train.seq_len", "16", "--model.n_layers", "1"]
    words += ["--train.steps", "1000", "--sync.every", "20", "--runtime.device", "cpu"]
    done = commands.run(*words, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "dp2: 2 replicas behind the links of 2 hosts" in done.stdout
    assert "Use " in done.stdout
    told = json.loads(file.read_text())
    assert told["layout"] == "dp2"
    assert told["pace"]["step_s"] > told["pace"]["backward_s"] > 0
    rows = {row["strategy"]: row for row in told["rows"]}
    assert rows["allreduce"]["relative"] == 1
    assert rows["diloco"]["sent_bytes"] == pytest.approx(rows["allreduce"]["sent_bytes"] / 20)
    assert rows["onebit"]["work_s"] > 0
    assert told["advice"] in " ".join(done.stdout.split("\n"))


def test_a_known_step_and_link_measure_only_the_work(capsys, monkeypatch):
    asked = []

    def on_ranks(nproc, transport, work, ask, *, runtime):
        asked.append((nproc, ask.link_s, ask.config, runtime.threads))
        return run_ranks(nproc, lambda rank: work(rank, print, ask))[0]

    monkeypatch.setattr(advise, "on_ranks", on_ranks)
    wish = AdviseOptions(layout="dp4", link="100mbit", step_ms=200.0, hosts=2)
    settings = {"model": {"n_layers": 1, "d_model": 32}, "runtime": {"threads": 3}}
    assert command(load_config("tiny", settings), wish) == 0
    printed = capsys.readouterr().out
    assert "2 hosts, 2 replicas on each" in printed
    assert "a link carries 100 Mbit/s" in printed
    assert asked == [(1, 0.0, None, 3)]
