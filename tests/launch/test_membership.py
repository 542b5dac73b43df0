"""What is known of the others after a pause: a process that stood still blames nobody."""

import json
import time

from shoal.launch.membership import Membership


class Store:
    """One other party, that never changes its status; calls `during` whenever it is read."""

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
        found.append((time.monotonic() - members.reached, members.silent_s(0)))
        if len(found) == 2:
            time.sleep(0.5)

    members = Membership(lambda: Store(during), ["status0"], None, {}, 0.02)
    members.start()
    while len(found) < 3:
        time.sleep(0.01)
    pause, silence = found[1][0], time.monotonic() - members.reached
    members.leave(5)
    assert silence < 0.5
    assert found[2][1] < 0.4
    assert pause < 0.4
