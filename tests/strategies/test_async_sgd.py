"""Asynchronous SGD on ranks that are threads: which gradients count, who waits, what travels."""

import math
import threading
import time

import pytest
import torch

from shoal.comm.thread_transport import run_ranks
from shoal.errors import ShoalError
from shoal.strategies.async_sgd import Message, Server, StalenessBound
from tests.strategies.asynchronous import (
    MOMENTUM,
    PLAIN,
    RATE,
    SHAPES,
    gradient,
    make,
    train,
    update_of,
    weights,
)
from tests.strategies.replica_groups import parameters

WHOLE = sum(8 * math.prod(shape) for shape in SHAPES.values())


def same(left, right, **tolerance):
    for name, weight in left.items():
        torch.testing.assert_close(weight.detach(), right[name].detach(), **tolerance)


def test_one_worker_is_the_optimiser_bit_for_bit():
    plain = weights()
    optimiser = torch.optim.SGD(plain.values(), lr=RATE, momentum=0.9)
    for step in range(1, 6):
        for name, weight in plain.items():
            weight.grad = gradient(name, weight, step)
        optimiser.step()

    def work(transport):
        named, whole, sync = make(transport, StalenessBound(4, 0, 5), MOMENTUM)
        assert sync.start(0) == 0
        train(named, sync, 5)
        return named, whole.state()

    found, state = run_ranks(1, work)[0]
    same(found, plain, rtol=0, atol=0)
    for name, weight in plain.items():
        assert torch.equal(state[f"{name}.momentum_buffer"], optimiser.state[weight]["momentum_buffer"])


@pytest.mark.parametrize("size", [2, 3, 5])
def test_in_step_n_workers_are_one_of_the_mean_gradient(size):
    """With SGD each worker's gradient counts 1/n; 5 ranks share 3 weights, so some serve none."""
    plain = weights()
    for step in range(1, 5):
        grads = {
            name: sum(gradient(name, weight, step, w) for w in range(size)) / size
            for name, weight in plain.items()
        }
        with torch.no_grad():
            for name, weight in plain.items():
                weight -= RATE * grads[name]

    def work(transport):
        named, _, sync = make(transport, StalenessBound(0, 0, 4))
        sync.start(0)
        train(named, sync, 4, transport.rank)
        sync.close()
        return named

    for found in run_ranks(size, work):
        same(found, plain, rtol=1e-13, atol=1e-13)


def test_gradients_count_in_the_order_of_their_arrival_with_momentum():
    """The recursion written out: m <- 0.9 m + g, w <- w - rate/2 m, gradient after gradient."""
    share = parameters(w=[1.0, -2.0])
    server = Server(share, MOMENTUM, 2, StalenessBound(2, 0, 9))
    server.begin(0)
    values, momentum = share["w"].detach().clone(), torch.zeros(2, dtype=torch.float64)
    arrivals = [(0, 1), (0, 2), (1, 1), (0, 3), (1, 2), (1, 3)]
    for number, (worker, step) in enumerate(arrivals, start=1):
        gradient = torch.tensor([0.3 * number, 1.0 / number], dtype=torch.float64)
        rate = RATE * step
        momentum = 0.9 * momentum + gradient
        values = values - rate / 2 * momentum
        [(to, _, answer)] = server.take(worker, step, rate, gradient)
        assert to == worker
        torch.testing.assert_close(answer, values, rtol=1e-15, atol=1e-15)
    assert server.take(0, 4, math.nan, torch.empty(0))[0][2].equal(
        answer
    )  # left out: it counts as a step only


def test_a_server_answers_when_it_has_what_the_bound_asks_for():
    server = Server(parameters(w=[0.0]), PLAIN, 3, StalenessBound(2, 6, 9))
    server.begin(0)

    def take(worker, step):
        return [to for to, *_ in server.take(worker, step, RATE, torch.ones(1, dtype=torch.float64))]

    assert [take(0, 1), take(0, 2), take(1, 1), take(0, 3)] == [[0], [0], [1], []]  # nothing of worker 2 yet
    assert take(1, 2) == [1]
    assert take(2, 1) == [0, 2]
    assert [take(0, 4), take(2, 2), take(1, 3)] == [[], [0, 2], [1]]


def test_what_is_saved_has_all_gradients_up_to_its_step_and_no_other():
    """Worker 1 is late at each step; step 4 is saved. A momentum of 1 is the sum of all gradients."""
    kept = {}
    summing = update_of(torch.optim.SGD, momentum=1.0)

    def work(transport):
        named, whole, sync = make(transport, StalenessBound(3, 4, 6), summing)
        sync.start(0)
        for step in range(1, 5):
            time.sleep(0.01 * transport.rank)
            for weight in named.values():
                weight.grad = torch.full_like(weight, 10.0**step)
            sync.take_step(None, 1.0)
            sync.after_step(step)
        kept[transport.rank] = {name: w.detach().clone() for name, w in named.items()}
        state = {key: value.clone() for key, value in whole.state().items()}
        train(named, sync, 2, transport.rank, start=4)
        sync.close()
        return state

    saved, other = run_ranks(2, work)
    same(kept[0], kept[1], rtol=0, atol=0)
    assert all((buffer == 22220).all() for buffer in saved.values())
    assert not any(buffer.any() for buffer in other.values())  # only the first worker saves


def test_a_worker_runs_ahead_by_the_bound_waits_there_and_nowhere_else():
    """The other worker is a fake one that has stopped; then it takes a step."""
    steps = []

    def real(transport):
        named, _, sync = make(transport, StalenessBound(2, 0, 9), named=parameters(a=[1.0], b=[2.0]))
        sync.start(0)
        for step in range(1, 4):
            train(named, sync, 1, start=step - 1)
            steps.append(step)

    def fake(transport):
        head = torch.empty(len(Message._fields), dtype=torch.float64)
        for step, numel in ((0, 2), (1, 1), (2, 1), (3, 1)):  # first what all begin from
            transport.recv(head, 0)
            assert (head[1], head[4]) == (step, numel)
            transport.recv(torch.empty(numel, dtype=torch.float64), 0)
        time.sleep(0.3)
        before = list(steps)
        for message in (Message(0, 1, 9, RATE, 1), Message(1, 3, 1, 0.0, 1)):  # a gradient, an answer
            transport.send(torch.tensor(message, dtype=torch.float64), 0)
            transport.send(torch.ones(1, dtype=torch.float64), 0)
        return before

    assert run_ranks(2, lambda t: fake(t) if t.rank else real(t))[1] == [1, 2]
    assert steps == [1, 2, 3]


def test_what_travels_is_gradients_once_and_weights_once():
    def work(transport):
        named, _, sync = make(transport, StalenessBound(2, 0, 3))
        sync.start(0)
        train(named, sync, 3, transport.rank)
        sync.close()
        served = sum(8 * w.numel() for w in sync._shares[transport.rank].values())
        begun = 0 if transport.rank else (transport.size - 1) * (40 + WHOLE)  # all begin alike
        return transport.traffic.num_bytes - begun, served

    for size in (2, 3):
        found = run_ranks(size, work)
        heads = (size - 1) * 40
        for sent, served in found:
            assert sent == 3 * (WHOLE - served + (size - 1) * served + 2 * heads) + heads
        assert sum(sent - 7 * heads for sent, _ in found) == 3 * 2 * (size - 1) * WHOLE  # by all n ranks


def test_a_stop_asked_of_one_ends_all_after_the_same_step():
    def work(transport):
        named, _, sync = make(transport, StalenessBound(2, 0, 99))
        sync.start(0)
        for step in range(1, 100):
            time.sleep(0.003 * transport.rank)
            train(named, sync, 1, transport.rank, start=step - 1)
            if sync.stopping(step, asked=transport.rank == 2 and step == 5):
                break
        sync.close()
        return step, named

    found = run_ranks(3, work)
    assert [step for step, _ in found] == [9, 9, 9]  # told with step 6, which others may be 2 ahead of
    same(found[0][1], found[2][1], rtol=0, atol=0)


def test_all_begin_from_what_the_first_worker_has():
    looked = threading.Barrier(2)  # before a gradient changes it

    def work(transport):
        named, whole, sync = make(transport, StalenessBound(2, 0, 9), MOMENTUM)
        state = whole.state()
        for number, tensor in enumerate([*named.values(), *state.values()]):
            tensor.detach().fill_(number + 100 * transport.rank)
        step = sync.start(0 if transport.rank else 7)
        found = [t.detach().mean().item() for t in named.values()]
        moments = [t.mean().item() for t in sync._server.state()]
        looked.wait(10)
        train(named, sync, 2, transport.rank, start=step)
        sync.close()
        return step, found, sorted(sync._shares[transport.rank]), moments

    order = {name: 3.0 + number for number, name in enumerate(SHAPES)}
    for step, found, names, moments in run_ranks(2, work):
        assert (step, found) == (7, [0.0, 1.0, 2.0])
        assert moments == [order[name] for name in names]


def test_a_lost_worker_ends_the_others_with_a_sentence():
    def work(transport):
        named, _, sync = make(transport, StalenessBound(1, 0, 9))
        sync.start(0)
        if transport.rank == 0:
            train(named, sync, 9)

    with pytest.raises(
        ShoalError, match="worker 1 is lost, and with it the newest weights of its share"
    ) as caught:
        run_ranks(2, work, timeout_s=0.5)
    assert "all go on from the first worker's newest checkpoint" in caught.value.hint
