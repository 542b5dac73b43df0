"""The outer step by identities in float64, and what is exchanged for it."""

from concurrent.futures import Future

import pytest
import torch

from shoal.comm.thread_transport import run_ranks
from shoal.config.sections import Sync
from shoal.strategies.codecs import Int8, Plain
from shoal.strategies.outer import (
    OuterSgd,
    average,
    due,
    fragments_of,
    mix,
    outer_sgd,
    pack,
    round_weight,
    unpack,
)
from shoal.strategies.rounds import InFlightFragment
from tests.strategies.replica_groups import parameters, sea, sgd_of, together

__all__ = ["sea"]  # a fixture
TARGETS = (1.0, -3.0, 8.0)  # each replica pulls its weight towards another value
RATE = 0.25  # the inner learning rate's peak


def constant(step):
    return 1.0


def halving(step):
    return 0.5 ** (step // 2)


def train(
    make_sea,
    settings,
    replicas=2,
    steps=6,
    names=("blocks.0.up", "blocks.1.up"),
    rate_at=constant,
    left_out=(),
    momentum=0.0,
):
    """Let replicas descend (w - target)^2 / 2 by SGD; return each one's weights after each step.

    `momentum` is the inner one; `left_out` holds (replica, step).
    """
    sea = make_sea(replicas)

    def work(replica):
        weights = parameters(**{name.replace(".", "__"): [0.5, -2.0] for name in names})
        inner = sgd_of(weights, momentum)
        sync = sea.sync(replica, weights, steps, settings, rate_at, inner)
        trace = []
        for step in range(sync.start(0) + 1, steps + 1):
            for weight in weights.values():
                weight.grad = weight.detach() - TARGETS[replica]
            if (replica, step) not in left_out:
                sync.take_step(inner.step, RATE * rate_at(step))
            sync.after_step(step)
            trace.append({name: weight.detach().clone() for name, weight in weights.items()})
        sync.close()
        return trace

    return together(replicas, work), sea


def test_averaging_after_every_sgd_step_is_all_reduce_sgd(sea):
    traces, _ = train(sea, Sync(strategy="model_averaging", every=1), replicas=3, steps=4)
    weight = torch.tensor([0.5, -2.0], dtype=torch.float64)
    for step in range(4):
        weight -= 0.25 * sum(weight - target for target in TARGETS) / 3
        for trace in traces:
            torch.testing.assert_close(trace[step]["blocks.0.up"], weight, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize(
    ("settings", "lr", "momentum", "nesterov"),
    [
        (Sync(strategy="block_momentum", every=2), 1.0, 0.5, False),  # 1 - 1/2
        (Sync(strategy="diloco", every=2, lr=0.5, momentum=0.25), 0.5, 0.25, True),
        (Sync(strategy="diloco", every=3, lr=0.5, momentum=0.0), 0.5, 0.0, True),
    ],
)
def test_the_outer_step_is_the_recursion_of_the_papers(sea, settings, lr, momentum, nesterov):
    """All values are sums of powers of two, so every order of additions is exact."""
    traces, _ = train(sea, settings)
    anchor, velocity = 0.5, 0.0
    for first in range(0, 6, settings.every):
        ends = []
        for target in TARGETS[:2]:
            weight = anchor
            for _ in range(settings.every):
                weight -= 0.25 * (weight - target)
            ends.append(weight)
        gradient = anchor - (ends[0] + ends[1]) / 2
        velocity = momentum * velocity + gradient
        anchor -= lr * (gradient + momentum * velocity if nesterov else velocity)
        for trace in traces:
            assert trace[first + settings.every - 1]["blocks.1.up"][0].item() == anchor


@pytest.mark.parametrize("strategy", ["diloco", "block_momentum"])
@pytest.mark.parametrize("follows", [True, False])
def test_momentum_follows_the_inner_rate_or_not_as_the_papers_have_it(sea, strategy, follows):
    """Rates are powers of two, and so are a round's weights: 1, 1 / 2 and 1 / 4 in the end."""
    settings = Sync(
        strategy=strategy, every=2, lr=0.5, momentum=0.25, momentum_follows_lr=follows, warmup_steps=1
    )
    traces, _ = train(sea, settings, steps=7, rate_at=lambda step: halving(step - 2))
    anchor, velocity = traces[0][0]["blocks.0.up"][0].item(), 0.0
    for steps in ((2,), (3, 4), (5, 6), (7,)):
        rates = [halving(step - 2) for step in steps]
        unit = sum(rates) / 2 if follows else 1.0
        ends = []
        for target in TARGETS[:2]:
            weight = anchor
            for rate in rates:
                weight -= RATE * rate * (weight - target)
            ends.append(weight)
        gradient = (anchor - sum(ends) / 2) / unit
        velocity = 0.25 * velocity + gradient
        anchor -= 0.5 * unit * (gradient + 0.25 * velocity if strategy == "diloco" else velocity)
        for trace in traces:
            assert trace[steps[-1] - 1]["blocks.1.up"][0].item() == pytest.approx(anchor, abs=1e-14)


def test_a_round_goes_as_far_as_its_rates():
    def is_in(*steps):
        return lambda step: float(step in steps)

    assert round_weight(constant, 8, 4, 0, 0) == 1
    assert round_weight(halving, 3, 2, 1, 0) == (0.5 + 0.5) / 2
    assert round_weight(constant, 10, 4, 0, 0) == 0.5  # the run ends before the round does
    assert round_weight(constant, 6, 4, 2, 3) == 0.75  # the rest is warm-up
    assert round_weight(constant, 1, 4, 2, 0) == 0.25
    assert round_weight(is_in(4, 9), 8, 4, 0, 0) == 0  # the round before has 4, the next one 9


def test_where_nothing_was_learned_nothing_moves():
    anchor, momentum = torch.tensor([2.0]), torch.tensor([3.0])
    OuterSgd(0.7, 0.9, nesterov=True).step(anchor, momentum, torch.zeros(1), 0.0)
    assert (anchor.item(), momentum.item()) == (2, 3)


def test_in_warm_up_replicas_take_the_step_of_their_mean_gradient_and_momentum_stays(sea):
    settings = Sync(strategy="diloco", every=2, lr=0.5, momentum=0.25, warmup_steps=2)
    traces, there = train(sea, settings)
    averaged, _ = train(sea, Sync(strategy="model_averaging", every=1), steps=2)  # for SGD it is the same
    assert same([trace[:2] for trace in traces], averaged)
    assert [found["step"] for found in there.rounds] == [1, 2, 4, 6]
    anchor, velocity = averaged[0][-1]["blocks.0.up"][0].item(), 0.0
    for step in (4, 6):
        ends = [target + (anchor - target) * 0.75**2 for target in TARGETS[:2]]
        gradient = anchor - sum(ends) / 2
        velocity = 0.25 * velocity + gradient
        anchor -= 0.5 * (gradient + 0.25 * velocity)
        assert all(trace[step - 1]["blocks.0.up"][0].item() == anchor for trace in traces)


def test_in_warm_up_a_replica_that_leaves_a_step_out_follows_the_others(sea):
    settings = Sync(strategy="diloco", every=2, warmup_steps=2)
    traces, _ = train(sea, settings, steps=3, left_out={(1, 1), (0, 2), (1, 2)}, momentum=0.5)
    assert same(traces[:1], traces[1:])
    alone = 0.5 - 0.25 * (0.5 - TARGETS[0])
    assert traces[0][0]["blocks.0.up"][0].item() == alone
    assert traces[0][1]["blocks.0.up"][0].item() == alone  # nobody had a gradient


def test_warm_up_is_exact_though_rounds_are_rounded(sea):
    settings = {"strategy": "diloco", "every": 4, "warmup_steps": 2, "block": 2}
    plain, _ = train(sea, Sync(**settings), steps=4)
    rounded, _ = train(sea, Sync(**settings, int8=True), steps=4)
    assert same([trace[:3] for trace in plain], [trace[:3] for trace in rounded])
    assert not same([trace[3:] for trace in plain], [trace[3:] for trace in rounded])


def test_in_warm_up_a_stream_takes_steps_of_the_whole_model(sea):
    settings = Sync(strategy="streaming_diloco", every=4, fragments=2, overlap=1, warmup_steps=2)
    traces, there = train(sea, settings, steps=5)
    averaged, _ = train(sea, Sync(strategy="model_averaging", every=1), steps=2)
    assert same([trace[:2] for trace in traces], averaged)
    assert [found["step"] for found in there.rounds] == [1, 2, 5, 5, 5]  # and what left after 4


def test_between_agreements_replicas_are_apart(sea):
    (first, second), there = train(sea, Sync(strategy="diloco", every=3))
    apart = [not torch.equal(a["blocks.0.up"], b["blocks.0.up"]) for a, b in zip(first, second, strict=True)]
    assert apart == [True, True, False, True, True, False]
    size = 4 * 8
    assert there.rounds == [{"step": 3 * n, "round": n, "replicas": 2, "sent_bytes": size} for n in (1, 2)]


def test_a_rate_of_one_without_momentum_is_averaging(sea):
    plain, _ = train(sea, Sync(strategy="model_averaging", every=2))
    outer, _ = train(sea, Sync(strategy="diloco", every=2, lr=1.0, momentum=0.0))
    assert same(plain, outer)


def test_streaming_in_one_piece_without_overlap_is_diloco(sea):
    whole, _ = train(sea, Sync(strategy="diloco", every=2))
    streamed, _ = train(sea, Sync(strategy="streaming_diloco", every=2, fragments=1, overlap=0))
    assert same(whole, streamed)


def test_the_last_step_ends_with_all_agreed_though_no_round_is_due(sea):
    traces, _ = train(sea, Sync(strategy="streaming_diloco", every=4, fragments=2, overlap=1), steps=7)
    assert all(torch.equal(weight, traces[1][-1][name]) for name, weight in traces[0][-1].items())


def test_one_replica_takes_outer_steps_by_itself(sea):
    settings = Sync(strategy="diloco", every=2, lr=0.5, momentum=0.0)
    ((*_, last),), there = train(sea, settings, replicas=1, steps=2)
    assert there.rounds == [{"step": 2, "round": 1, "replicas": 1, "sent_bytes": 0}]
    moved = 0.5 - (0.5 - 0.25 * (0.5 - 1)) * 0.75 - 0.25  # by two steps towards 1
    assert last["blocks.0.up"][0].item() == 0.5 - 0.5 * moved


def test_fragments_agree_in_turn_and_half_of_what_was_learned_meanwhile_is_kept(sea):
    traces, there = train(
        sea, Sync(strategy="streaming_diloco", every=4, fragments=2, overlap=1, lr=1.0, momentum=0.0), steps=6
    )
    assert [round["step"] for round in there.rounds] == [3, 5, 6, 6]  # left after 2, 4; the last ones at once
    early = traces[0][1]["blocks.1.up"], traces[1][1]["blocks.1.up"]  # after step 2, when it left
    mean = (early[0] + early[1]) / 2
    for replica, start in enumerate(early):
        learned = start - 0.25 * (start - TARGETS[replica])
        torch.testing.assert_close(
            traces[replica][2]["blocks.1.up"], (learned + mean) / 2, rtol=1e-14, atol=0
        )


@pytest.mark.parametrize(("fragments", "fragment"), [(2, 2), (2, -1), (10**12, 1), (0, 0)])
def test_a_fragment_that_no_checkpoint_has_is_refused(sea, fragments, fragment):
    settings = Sync(strategy="streaming_diloco", every=4, fragments=2, overlap=1)
    sync = sea(1).sync(0, parameters(blocks__0__up=[1.0]), 8, settings)
    with pytest.raises(ValueError, match=f"fragment {fragment} of {fragments}"):
        sync.expect({"rounds": 1, "momentum": True, "fragments": fragments, "flight": [fragment, 2]})


def test_a_fragment_under_way_keeps_who_took_part(sea):
    settings = Sync(strategy="streaming_diloco", every=4, fragments=2, overlap=2)
    there, weights = sea(1), parameters(blocks__0__up=[1.0], blocks__1__up=[1.0])
    sync = there.sync(0, weights, 8, settings)
    facts = {"replicas": 3, "sent_bytes": 64}
    tensors = sync.expect({"rounds": 4, "momentum": True, "fragments": 2, "flight": [1, 2], "facts": facts})
    for tensor in tensors.values():
        tensor.fill_(1.0)
    sync.start(3)
    assert sync.state()["facts"] == facts
    sync.after_step(4)
    assert there.rounds == [{"step": 4, "round": 5, **facts}]


def test_a_mean_that_comes_as_the_wait_for_it_ends_is_taken():
    class Late(Future):
        def result(self, timeout=None):
            if not self.done():
                self.set_result(torch.ones(1))
                raise TimeoutError
            return super().result(timeout)

    assert InFlightFragment(0, 0, Late()).wait().item() == 1


def same(left, right):
    return all(
        torch.equal(weight, b[name])
        for one, other in zip(left, right, strict=True)
        for a, b in zip(one, other, strict=True)
        for name, weight in a.items()
    )


def test_defaults_are_those_of_the_papers():
    assert outer_sgd(Sync(strategy="model_averaging"), 4) == OuterSgd(1.0, 0.0, nesterov=False)
    assert outer_sgd(Sync(strategy="block_momentum"), 4) == OuterSgd(1.0, 0.75, nesterov=False)
    assert outer_sgd(Sync(strategy="block_momentum"), 1) == OuterSgd(1.0, 0.0, nesterov=False)
    for strategy in ("diloco", "streaming_diloco"):
        assert outer_sgd(Sync(strategy=strategy), 4) == OuterSgd(0.7, 0.9, nesterov=True)


def test_fragments_take_every_nth_block_and_leave_nothing_out():
    names = ["embed.weight", "positions.weight", *(f"blocks.{n}.up" for n in range(5)), "norm.weight"]
    assert fragments_of(names, 2, decoder=True) == [
        ["embed.weight", "positions.weight", "blocks.0.up", "blocks.2.up", "blocks.4.up"],
        ["blocks.1.up", "blocks.3.up", "norm.weight"],
    ]
    of_network = ["blocks.first.weight", "blocks.first.bias", "1.body.0.weight", "c.weight"]
    assert fragments_of(of_network, 2, decoder=False) == [
        ["blocks.first.weight", "blocks.first.bias", "c.weight"],
        ["1.body.0.weight"],
    ]


def test_each_fragment_is_due_once_in_every_round_or_all_are():
    assert [due(step, 6, 3, all_now=step == 9) for step in range(1, 10)] == [
        [], [1], [], [2], [], [0], [], [1], [0, 1, 2],
    ]  # fmt: skip


def test_without_overlap_weights_become_the_anchor():
    weights, anchor = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 5.0])
    mix(weights, anchor, 0)
    assert torch.equal(weights, anchor)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_an_average_is_the_same_on_all_ranks_and_sends_two_nths(size):
    values = torch.arange(60, dtype=torch.float64)

    def work(transport):
        mean = average(transport, values * (transport.rank + 1), Plain(torch.float64))
        return mean, transport.traffic.num_bytes

    for mean, sent in run_ranks(size, work):
        torch.testing.assert_close(mean, values * (size + 1) / 2, rtol=1e-15, atol=0)
        assert sent == 2 * (size - 1) * values.nbytes // size


def test_eight_bits_cost_a_quarter_and_err_by_at_most_a_step_of_the_scale():
    torch.manual_seed(1)
    tensors = [[torch.randn(100, 7), torch.randn(50) * 1e-4] for _ in range(3)]
    codec = Int8(64)

    def work(transport):
        flat = pack(tensors[transport.rank], codec)
        mean = average(transport, flat, codec)
        return unpack(mean, tensors[0], codec), transport.traffic.num_bytes, flat.nbytes

    results = run_ranks(3, work)
    for number, expected in enumerate(sum(of_rank[n] for of_rank in tensors) / 3 for n in (0, 1)):
        largest = max(of_rank[number].abs().max() for of_rank in tensors)
        for means, sent, plain in results:
            assert torch.equal(means[number], results[0][0][number])
            assert (means[number] - expected).abs().max() <= largest / 127  # half a step, twice
            assert sent < 0.27 * plain * 4 / 3 + 400


def test_a_value_has_the_same_bits_wherever_it_stands():
    """Ranks of a tensor-parallel replica hold norms alike, beside other parts of the rest."""
    torch.manual_seed(2)
    shared = [torch.randn(40) for _ in range(3)]

    def work(transport, codec, before):
        tensors = [torch.randn(before), shared[transport.rank], torch.randn(11)]
        return unpack(average(transport, pack(tensors, codec), codec), tensors, codec)[1]

    for codec in (Plain(torch.float32), Int8(16)):
        first, second = (run_ranks(3, lambda t, n=n, c=codec: work(t, c, n))[0] for n in (5, 77))
        assert torch.equal(first, second)


def test_values_in_their_own_format_are_packed_without_padding():
    assert pack([torch.ones(3), torch.ones(2)], Plain(torch.float32)).numel() == 5
