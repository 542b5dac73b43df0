"""Rows that are given up: nothing more is read or computed for them, and nobody else notices.

All happens on one thread: what else would come at some time comes out of the model's own calls.
"""

from __future__ import annotations

import pytest

from shoal.infer.generate import Engine, GeneratedRow, generate
from shoal.infer.sampling import Sampling
from shoal.infer.serve import batcher as batcher_module
from shoal.infer.serve.batcher import Batcher, Ticket
from tests.models.hf import decoder_from_hf, random_gpt2

GREEDY = Sampling(temperature=0)
PROMPTS = {"a": [5, 9], "b": list(range(20, 32)), "c": [7, 8, 9]}


@pytest.fixture(scope="module")
def model():
    return decoder_from_hf(random_gpt2())


class RecordedBatcher:
    """A batcher whose model's calls are noted, and answered by what a test wants to happen just then."""

    def __init__(self, model, rows, monkeypatch):
        monkeypatch.setattr("shoal.infer.generate._PREFILL", 4)
        monkeypatch.setattr(batcher_module, "_READ_BESIDE", 4)
        self.engine = Engine(model, rows, 40)
        self.batcher = Batcher(self.engine, None, 8, lambda: None)
        self.read, self.told, self.steps, self.open = [], {}, 0, 0
        self.tickets, self.then = {}, {}
        for name in ("read", "step"):
            setattr(self.engine, name, self._noting(name, getattr(self.engine, name)))

    def _noting(self, name, honest):
        def call(tokens):
            if name == "read":
                self.read += tokens
            else:
                self.steps += 1
            answer = honest(tokens)
            self.then.pop((name, len(self.read) if name == "read" else self.steps), lambda: None)()
            return answer

        return call

    def submit(self, name, max_tokens=6):
        self.told[name] = []
        self.open += 1
        ticket = Ticket(
            GeneratedRow(PROMPTS[name], max_tokens), GREEDY, lambda found: self._deliver(name, found)
        )
        self.tickets[name] = ticket
        self.batcher.submit([ticket])

    def _deliver(self, name, found):
        self.told[name].append(found)
        if found is None:
            self._less()

    def cancel(self, name):
        self.batcher.cancel([self.tickets[name]])
        self._less()

    def _less(self):
        self.open -= 1
        if not self.open:
            self.batcher.close()


def alone(model, name, max_tokens=6):
    return [
        token for _, token in generate(model, [GeneratedRow(PROMPTS[name], max_tokens)], GREEDY, None)
    ] + [None]


def test_a_row_that_is_given_up_while_it_waits_is_not_read(model, monkeypatch):
    recorded = RecordedBatcher(model, 1, monkeypatch)
    for name in "abc":
        recorded.submit(name)
    recorded.then["step", 2] = lambda: recorded.cancel("b")
    recorded.batcher.run()
    assert recorded.read == PROMPTS["a"] + PROMPTS["c"]
    assert recorded.told == {"a": alone(model, "a"), "b": [], "c": alone(model, "c")}


def test_a_row_that_is_given_up_while_it_is_read_is_not_read_on(model, monkeypatch):
    recorded = RecordedBatcher(model, 2, monkeypatch)
    for name in "abc":
        recorded.submit(name, 8)
    recorded.then["read", 2 + 8] = lambda: recorded.cancel("b")  # two parts of its three
    recorded.batcher.run()
    assert recorded.read == PROMPTS["a"] + PROMPTS["b"][:8] + PROMPTS["c"]
    assert recorded.told == {"a": alone(model, "a", 8), "b": [], "c": alone(model, "c", 8)}


@pytest.mark.parametrize("given_up", ["a", "c"])  # the first of the live rows, and the last
def test_a_live_row_that_is_given_up_gets_no_more_tokens(model, monkeypatch, given_up):
    recorded = RecordedBatcher(model, 2, monkeypatch)
    kept = {"a": "c", "c": "a"}[given_up]
    recorded.submit(given_up, 30)
    recorded.submit(kept, 6)
    recorded.then["step", 4] = lambda: recorded.cancel(given_up)
    recorded.batcher.run()
    got = recorded.told[given_up]
    assert got == alone(model, given_up, 30)[: len(got)]
    assert len(got) <= 5  # that of the step under way is the last
    assert recorded.told[kept] == alone(model, kept)
    assert recorded.steps <= 8  # not the 30 of the row that was given up
    assert recorded.engine.live == 0 or recorded.told[kept][-1] is None


def test_room_of_a_row_that_was_given_up_is_for_the_next(model, monkeypatch):
    recorded = RecordedBatcher(model, 1, monkeypatch)
    recorded.submit("a", 30)
    recorded.submit("c", 6)
    recorded.then["step", 3] = lambda: recorded.cancel("a")
    recorded.batcher.run()
    assert recorded.told["c"] == alone(model, "c")
    assert recorded.read == PROMPTS["a"] + PROMPTS["c"]
