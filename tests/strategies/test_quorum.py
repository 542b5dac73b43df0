"""Who takes part in a round when replica groups come late, fall silent, fail in the middle, or come back."""

import json
import threading
import time

import pytest
import torch

from shoal.config.sections import Sync
from shoal.errors import InputError, ShoalError, StoppedError
from shoal.strategies import quorum
from shoal.strategies.quorum import NotInQuorum, Progress
from tests.cases import every
from tests.strategies.replica_groups import parameters, sea, sgd_of, together

__all__ = ["sea"]  # a fixture
DILOCO = Sync(strategy="diloco", every=2)
STREAMING = Sync(strategy="streaming_diloco", every=4, fragments=2, overlap=1)


@pytest.fixture
def impatient(monkeypatch):
    """Leave replica groups out after a second and a half."""
    monkeypatch.setattr(quorum, "LOST_S", 1.5)


def fall_silent(client):
    """Leave what a power cut leaves: a status that no longer changes."""
    client._membership.leave(5)


def nothing(record, transport):
    return None


def begin(sea):
    """Return the clients of all replicas, begun."""
    found = [sea.client(replica) for replica in range(sea.replicas)]
    together(sea.replicas, lambda replica: found[replica].enter(Progress(0, 0), nothing))
    return found


def test_a_replica_that_falls_silent_is_left_out_and_the_record_says_who_came(sea, impatient):
    there = sea(3)
    found = begin(there)
    fall_silent(found[2])
    began = time.monotonic()
    records = together(2, lambda replica: found[replica].agree(Progress(0, 2), nothing)[0])
    assert time.monotonic() - began < 10
    assert [record.present for record in records] == [[0, 1], [0, 1]]
    again = together(2, lambda replica: found[replica].agree(Progress(1, 4), nothing)[0])
    assert again[0].number == 2  # at once: nobody waits for it any more


def test_one_that_wakes_up_finds_itself_left_out(sea, impatient):
    there = sea(2)
    first, second = begin(there)
    fall_silent(second)
    assert first.agree(Progress(0, 2), nothing)[0].present == [0]
    with pytest.raises(NotInQuorum, match=r"went on without this one, number 1: it was not heard for 1\.5 s"):
        second.agree(Progress(0, 2), nothing)


@pytest.mark.parametrize("state", ["lost", "restarting"])
def test_one_that_its_launcher_knows_to_be_gone_is_not_waited_for_by_those_who_train(sea, state):
    there = sea(2)
    first, second = begin(there)
    fall_silent(second)
    there.store.set("status1", json.dumps({"state": state}))
    began = time.monotonic()
    assert first.agree(Progress(0, 2), nothing)[0].present == [0]
    assert time.monotonic() - began < 5


def test_where_all_were_lost_at_once_the_first_one_back_waits_for_the_one_that_is_ahead(sea):
    there = sea(2)
    for replica, client in enumerate(begin(there)):
        fall_silent(client)
        there.store.set(f"status{replica}", json.dumps({"state": "restarting"}))

    def come_back(replica):
        time.sleep(replica)
        return there.client(replica).enter(Progress(3 * replica, 5 + replica, None, str(replica)), nothing)

    first, second = together(2, come_back)
    assert first == second
    assert (first.members.keys(), first.joiners.keys()) == ({"1"}, {"0"})
    assert first.progress.step == 6


@pytest.mark.parametrize("joining", [False, True])
def test_a_stop_ends_the_wait_for_others(sea, joining):
    there, asked = sea(3), threading.Event()
    if joining:
        fall_silent(begin(there)[2])  # and the others form no quorum, which the third one waits for
    threading.Timer(0.3, asked.set).start()
    with pytest.raises(StoppedError, match="stopped before the other replicas came"):
        there.client(2, stopped=asked.is_set).enter(Progress(0, 0), nothing)
    assert json.loads(there.store.get("status2"))["state"] == "lost"


def test_an_exchange_that_fails_for_one_counts_for_nobody_and_is_done_again(sea):
    there = sea(3)
    found = begin(there)
    tries = [0, 0, 0]

    def work(replica):
        def exchange(record, transport):
            tries[replica] += 1
            if replica == 1 and tries[1] == 1:
                raise RuntimeError("Connection closed by peer")
            return record.number

        return found[replica].agree(Progress(0, 2), exchange)[1]

    assert together(3, work) == [2, 2, 2]
    assert tries == [2, 2, 2]


def test_replicas_wait_at_the_beginning_for_all_but_not_forever(sea):
    there = sea(2)
    record = there.client(0, patience_s=1).enter(Progress(0, 0), nothing)
    assert record.present == [0]
    until = time.monotonic() + 10
    while json.loads(there.store.get("status0"))["state"] != "training":  # what those who come later go by
        assert time.monotonic() < until
        time.sleep(0.05)


def test_replicas_with_other_settings_are_refused_by_name(sea):
    there = sea(2)
    found = [there.client(0, "one plan"), there.client(1, "another")]
    caught = []

    def work(replica):
        try:
            found[replica].enter(Progress(0, 0), nothing)
        except InputError as error:
            caught.append(str(error))

    threads = [threading.Thread(target=work, args=(replica,), daemon=True) for replica in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(caught) == 2
    assert all(
        "replicas 0 and 1 have other" in words or "replicas 1 and 0 have other" in words for words in caught
    )


def test_there_is_nobody_to_join_when_all_have_ended(sea):
    there = sea(2)
    for client in begin(there):
        client.leave()
    with pytest.raises(ShoalError, match="all other replicas have ended"):
        there.client(1).enter(Progress(0, 0), nothing)


def train(there, replica, weights, steps, settings):
    """Return a replica's sync, and what takes its steps to a number, by SGD with momentum."""
    inner = sgd_of(weights, momentum=0.5)
    sync = there.sync(replica, weights, steps, settings, inner=inner)

    def descend(begin_at, until, pause=None):
        for step in range(begin_at + 1, until + 1):
            if pause:
                pause(step)
            for weight in weights.values():
                weight.grad = weight.detach() - replica
            sync.take_step(inner.step, 0.125)
            sync.after_step(step)

    return sync, descend


@pytest.mark.parametrize(
    "settings",
    every(
        2,
        [
            STREAMING,
            DILOCO,
            DILOCO.model_copy(update={"warmup_steps": 11}),
            STREAMING.model_copy(update={"warmup_steps": 9}),
        ],
    ),
    ids=["streaming", "diloco", "in warm-up", "at its end"],
)
def test_a_replica_that_comes_back_joins_in_the_next_round_with_anchor_momentum_and_step(sea, settings):
    """The third one falls in step 5 of 20, and is back while the others are in step 9."""
    there, steps, joined_at = sea(3), 20, 9 if settings.warmup_steps else 10
    back = threading.Event()
    ends = {}

    def run(replica):
        weights = parameters(blocks__0__up=[0.5], blocks__1__up=[-2.0])
        sync, descend = train(there, replica, weights, steps, settings)
        begin_at = sync.start(0)
        if replica == 2:
            descend(begin_at, 4)
            fall_silent(sync._quorum)
            there.store.set("status2", json.dumps({"state": "lost"}))
            weights = parameters(blocks__0__up=[99.0], blocks__1__up=[99.0])  # of an old checkpoint, say
            until = time.monotonic() + 20
            while all(facts["replicas"] == 3 for facts in there.rounds):
                assert time.monotonic() < until
                time.sleep(0.01)
            sync, descend = train(there, 2, weights, steps, settings)
            back.set()
            begin_at = sync.start(0)
            assert begin_at == joined_at
        else:
            pause = lambda step: step == 9 and (back.wait(20), time.sleep(1))  # noqa: E731
            descend(begin_at, joined_at, pause)
            begin_at = joined_at
        descend(begin_at, steps)
        sync.close()
        ends[replica] = {name: tensor.clone() for name, tensor in sync.tensors().items()}
        ends[replica] |= {name: weight.detach() for name, weight in weights.items()}
        return sync.state()["rounds"]

    assert len({*together(3, run)}) == 1
    for replica in (1, 2):
        assert ends[replica].keys() == ends[0].keys()
        for name, tensor in ends[0].items():
            assert torch.equal(tensor, ends[replica][name]), name
    present = [facts["replicas"] for facts in there.rounds]
    assert present[0] == 3
    assert 2 in present
    assert present[-1] == 3


def test_where_nobody_trains_the_one_that_is_ahead_tells_the_others(sea):
    there = sea(2)

    def run(replica):
        weights = parameters(blocks__0__up=[float(replica)])
        sync = there.sync(replica, weights, 10, DILOCO)
        if replica == 1:  # resumed from a checkpoint after three rounds
            tensors = sync.expect({"rounds": 3, "momentum": True, "fragments": 1, "flight": None})
            for tensor in tensors.values():
                tensor.fill_(7.0)
        step = sync.start(7 if replica else 2)
        return step, weights["blocks.0.up"].item(), sync.tensors()["momentum.blocks.0.up"].item()

    assert together(2, run) == [(7, 7.0, 7.0), (7, 1.0, 7.0)]


@pytest.mark.parametrize("flight", [None, [1, 2]])
def test_a_longer_warm_up_than_before_begins_at_the_anchor(sea, flight):
    """Both were stopped in the middle of a round, apart from each other."""
    there, steps = sea(2), 8
    settings = STREAMING.model_copy(update={"warmup_steps": 5})

    def run(replica):
        weights = parameters(blocks__0__up=[2.0 * replica], blocks__1__up=[2.0 * replica])
        sync, descend = train(there, replica, weights, steps, settings)
        tensors = sync.expect({"rounds": 1, "momentum": True, "fragments": 2, "flight": flight})
        for name, tensor in tensors.items():
            tensor.fill_(1.0 if name.startswith("anchor") else 0.25)
        descend(sync.start(3), 4)
        found = {name: weight.item() for name, weight in weights.items()}
        descend(4, steps)
        sync.close()
        return found

    mean_gradient = 1 - (0 + 1) / 2
    assert together(2, run) == [dict.fromkeys(("blocks.0.up", "blocks.1.up"), 1 - 0.125 * mean_gradient)] * 2


@pytest.mark.parametrize(
    ("ahead", "behind"),
    [
        (Progress(1, 26, (1, 25), "a"), Progress(1, 24, None, "a")),  # stopped while a fragment was under way
        (
            Progress(0, 1000, None, "a"),
            Progress(0, 0, None, "b"),
        ),  # resumed what another strategy trained
        (Progress(2, 30, None, "a"), Progress(2, 29, None, "b")),
    ],
)
def test_who_knows_something_else_joins_the_one_that_is_ahead(sea, ahead, behind):
    there = sea(3)
    places = (behind, ahead, Progress(ahead.rounds, ahead.step - 1, ahead.flight, ahead.digest))
    records = together(3, lambda replica: there.client(replica).enter(places[replica], nothing))
    assert records[0].members.keys() == {"1", "2"}
    assert records[0].joiners.keys() == {"0"}
    assert records[0].progress == ahead


def test_one_in_another_round_is_left_out_and_means_are_of_like_things(sea):
    there = sea(2)
    first, second = begin(there)
    found = []

    def work(replica):
        if replica == 0:
            assert first.agree(Progress(1, 50, (2, 50)), nothing)[0].present == [0]
            return
        with pytest.raises(NotInQuorum, match="it was in another round"):
            second.agree(Progress(0, 25, (1, 25)), lambda *there: found.append(there))

    together(2, work)
    assert not found


def test_a_fragment_under_way_at_one_only_is_told_to_the_other(sea):
    """The first was stopped one step after its fragment left, the other one before, at the same anchors."""
    there, steps = sea(2), 8
    settings = Sync(strategy="streaming_diloco", every=4, fragments=2, overlap=2, lr=1.0, momentum=0.0)

    def run(replica):
        weights = parameters(blocks__0__up=[1.0], blocks__1__up=[2.0])
        sync, descend = train(there, replica, weights, steps, settings)
        flight = None if replica else [1, 2]
        tensors = sync.expect({"rounds": 0, "momentum": False, "fragments": 2, "flight": flight})
        for name, tensor in tensors.items():
            tensor.fill_(0.25 if name.startswith("incoming") else 1.0)
        begin_at = sync.start(1 if replica else 3)
        descend(begin_at, steps)
        sync.close()
        return begin_at, {name: tensor.tolist() for name, tensor in sync.tensors().items()}

    (first, left), (second, right) = together(2, run)
    assert (first, second) == (3, 3)
    assert left == right


def test_what_nobody_reads_any_more_is_removed_from_the_store(sea):
    there = sea(2)
    found = begin(there)
    for number in range(3):
        place = Progress(number, 2 * number + 2)
        together(2, lambda replica, place=place: found[replica].agree(place, nothing))
    for number in range(2):
        for key in (f"here{number}.0", f"here{number}.1", f"done{number}", f"verdict{number}"):
            assert not there.store.check([key]), key
        assert there.store.check([f"record{number}"])  # for those who come too late
    assert there.store.check(["here3.0", "here3.1", "record3"])
