"""What is known of the others after a pause: a process that stood still blames nobody."""

import json
import time

from shoal.runtime.boards import Boards


class Store:
    """One other party, that never changes its board; calls `during` whenever it is read."""

    def __init__(self, during):
        self.during = during

    def check(self, keys):
        return True

    def multi_get(self, keys):
        self.during()
        return [json.dumps({"state": "training"}).encode() for _ in keys]


def test_after_a_pause_silence_is_counted_anew_before_what_was_read_counts_as_fresh():
    found = []

    def during():
        found.append((time.monotonic() - boards.reached, boards.silent_s(0)))
        if len(found) == 2:
            time.sleep(0.5)

    boards = Boards(lambda: Store(during), ["board0"], None, {}, 0.02)
    boards.start()
    while len(found) < 3:
        time.sleep(0.01)
    pause, silence = found[1][0], time.monotonic() - boards.reached
    boards.leave(5)
    assert silence < 0.5
    assert found[2][1] < 0.4
    assert pause < 0.4
