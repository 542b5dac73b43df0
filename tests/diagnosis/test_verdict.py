"""Diagnoses of made-up views: who holds a job up, and how it is told."""

import json

import pytest

from shoal.diagnosis.verdict import HangDiagnosis, conclude
from shoal.diagnosis.views import Channel, Operation, RankView
from shoal.runtime.failure import Failure

STACK = """\
Thread 0x01 (most recent call first):
  File "/x/shoal/data/loader.py", line 88 in batch
  File "/usr/lib/python3.11/threading.py", line 975 in run

Current thread 0x02 (most recent call first):
  File "{innermost}"
  File "/x/shoal/data/ahead.py", line 30 in get
  File "/x/shoal/train/loop.py", line 27 in train
"""


def rank(number, *plan, groups=None, **facts):
    """A rank that issued a plan of (channel, name, shape, step[, words]) in `groups` of ranks."""
    groups = groups or {"world": (0, 1, 2, 3)}
    counts, operations = {}, []
    for moment, (channel, name, shape, step, *words) in enumerate(plan):
        counts[channel] = counts.get(channel, 0) + 1
        site = {"loss": "step.py:45", "stop": "stop.py:77"}.get(name, "allreduce.py:39")
        spoken = "all_reduce" if name in ("loss", "stop") else name
        spelled = (f"{shape} float32", f"{name} at {site}", words[0] if words else "")
        operations.append(Operation(channel, counts[channel], step, moment, spoken, *spelled))
    channels = {
        name: Channel(counts.get(name, 0), "" if name == "world" else name, list(groups[name]))
        for name in groups
        if name in counts
    }
    return RankView(number, channels=channels, operations=operations, **facts)


def training(number, steps, *extra, **facts):
    """A rank that has done whole steps of one bucket and two agreements, and then `extra`."""
    groups = facts.pop("groups", {"world": (0, 1, 2, 3), "control": (0, 1, 2, 3)})
    plan = [op for step in range(1, steps + 1) for op in (BUCKET(step), LOSS(step), STOP(step))]
    return rank(number, *plan, *extra, groups=groups, **facts)


def BUCKET(step, shape="[64]"):
    return ("world", "all_reduce", shape, step, "gradient bucket 0")


def LOSS(step, shape="[1]"):
    return ("control", "loss", shape, step)


def STOP(step):
    return ("control", "stop", "[1]", step)


def judged(*views):
    return HangDiagnosis(views).judge()


@pytest.mark.parametrize(
    ("innermost", "where"),
    [
        ('/usr/lib/python3.11/threading.py", line 327 in wait', "batch at loader.py:88"),
        ('/x/shoal/data/mine.py", line 5 in own', "own at mine.py:5"),
    ],
)
def test_who_sleeps_in_the_loader_is_named_with_the_line(innermost, where):
    stack = STACK.replace('{innermost}"', innermost)
    waiting = [training(n, 6, BUCKET(7), step=7, waiting=True) for n in (0, 1, 2)]
    verdict = judged(*waiting, training(3, 6, step=7, phase="data", stack=stack))
    assert verdict.ranks == (3,)
    assert verdict.sentence == (
        f"rank 3 is in data of step 7, {where}; ranks 0-2 wait in all_reduce 7, gradient bucket 0"
    )


@pytest.mark.parametrize("behind", [0, 1, 2, 3])
def test_another_shape_is_named_at_its_number(behind):
    views = [training(n, 6, BUCKET(7, "[8]" if n == behind else "[64]"), step=7) for n in range(4)]
    verdict = judged(*views)
    assert verdict.ranks == (behind,)
    assert (
        f"rank {behind} issued all_reduce 7 of [8] float32 (gradient bucket 0, all_reduce at allreduce.py:39)"
        in verdict.sentence
    )


def test_of_two_ranks_the_one_with_the_unheard_of_shape_is_named():
    verdict = judged(
        training(0, 6, BUCKET(7, "[8]"), step=7, groups=PAIR), training(1, 6, BUCKET(7), step=7, groups=PAIR)
    )
    assert verdict.ranks == (0,)


PAIR = {"world": (0, 1), "control": (0, 1)}


def test_a_skipped_operation_that_shows_in_the_next_ones_shape():
    """Rank 1 left the loss out; its next operation in the group meets the others' loss."""
    views = [
        training(0, 6, BUCKET(7), LOSS(7, "[2]"), STOP(7), step=7, groups=PAIR),
        training(1, 6, BUCKET(7), STOP(7), step=7, groups=PAIR),
    ]
    verdict = judged(*views)
    assert verdict.ranks == (1,)
    assert verdict.sentence.startswith(
        "rank 1 skipped all_reduce 13 in group control of [2] float32 (loss at"
    )


def test_a_skipped_operation_that_nothing_but_the_order_shows():
    """Everybody waits for everybody, and all shapes agree: rank 1 is past a place that it never was at."""
    views = [
        training(0, 6, BUCKET(7), step=7, waiting=True, groups=PAIR),
        training(1, 6, LOSS(7), step=7, waiting=True, groups=PAIR),
    ]
    verdict = judged(*views)
    assert verdict.ranks == (1,)
    assert verdict.sentence == (
        "rank 1 skipped all_reduce 7, gradient bucket 0; rank 0 waits in all_reduce 7, gradient bucket 0"
    )


def test_a_rank_that_went_on_to_the_next_step_skipped_what_others_wait_in():
    views = [
        training(0, 6, BUCKET(7), LOSS(7), STOP(7), step=7, waiting=True, groups=PAIR),
        training(1, 6, BUCKET(7), LOSS(7), BUCKET(8), step=8, waiting=True, groups=PAIR),
    ]
    assert judged(*views).ranks == (1,)
    assert "rank 1 skipped all_reduce 14 in group control" in judged(*views).sentence


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ("stopped", "rank 1 is stopped by a signal in forward of step 7; rank 0 waits in all_reduce 7"),
        ("gone", "rank 1 is gone, last seen in forward of step 7; rank 0 waits in"),
        ("absent", "rank 1 has not begun; rank 0 waits in"),
    ],
)
def test_a_rank_that_is_not_running_is_the_cause(state, words):
    views = [
        training(0, 6, BUCKET(7), step=7, groups=PAIR),
        training(1, 6, step=7, phase="forward", groups=PAIR, state=state),
    ]
    assert judged(*views).sentence.startswith(words)
    assert judged(*views).ranks == (1,)


def test_a_rank_that_is_done_is_not_the_cause():
    views = [training(0, 6, step=6, phase="save", groups=PAIR), training(1, 6, groups=PAIR, state="done")]
    assert judged(*views).ranks == ()
    assert "rank 0 is in save of step 6; rank 1 is done" in judged(*views).sentence


def test_in_two_axes_the_one_that_waits_for_nobody_is_the_cause():
    """Rank 3 computes; 2 waits for it in tp, 1 in dp, and 0 for 1 in tp."""
    groups = {
        0: {"tp a": (0, 1), "dp a": (0, 2)},
        1: {"tp a": (0, 1), "dp b": (1, 3)},
        2: {"tp b": (2, 3), "dp a": (0, 2)},
        3: {"tp b": (2, 3), "dp b": (1, 3)},
    }
    done = {n: [(f"tp {'ab'[n // 2]}", "all_gather", "[4]", 1)] for n in range(4)}
    views = [
        rank(0, *done[0], ("tp a", "all_reduce", "[2]", 1), groups=groups[0], waiting=True, step=1),
        rank(1, *done[1], ("dp b", "all_reduce", "[8]", 1), groups=groups[1], waiting=True, step=1),
        rank(2, *done[2], ("tp b", "all_reduce", "[2]", 1), groups=groups[2], waiting=True, step=1),
        rank(3, *done[3], groups=groups[3], step=1, phase="backward"),
    ]
    verdict = judged(*views)
    assert verdict.ranks == (3,)
    assert verdict.sentence.startswith("rank 3 is in backward of step 1; ")


def test_in_a_pipeline_the_stage_that_computes_is_the_cause():
    """Stage 0 has posted a receive of gradients and sleeps before it sends; stage 1 waits for activations."""
    groups = {"pp:0>1": (0, 1), "pp:1>0": (0, 1)}
    views = [
        rank(0, ("pp:1>0", "recv", "[4]", 1), groups=groups, step=1, phase="data"),
        rank(1, ("pp:0>1", "recv", "[4]", 1), groups=groups, step=1, waiting=True),
    ]
    verdict = judged(*views)
    assert verdict.ranks == (0,)
    assert verdict.sentence.startswith("rank 0 ")


def test_a_send_fits_a_receive_of_the_same_shape_only():
    groups = {"pp:0>1": (0, 1)}
    send = rank(0, ("pp:0>1", "send", "[4]", 1), groups=groups)
    assert HangDiagnosis([send, rank(1, ("pp:0>1", "recv", "[4]", 1), groups=groups)]).mismatch() is None
    assert HangDiagnosis([send, rank(1, ("pp:0>1", "recv", "[5]", 1), groups=groups)]).mismatch() is not None


def test_where_all_wait_in_the_same_the_link_is_suspected():
    views = [training(n, 6, BUCKET(7), waiting=True, groups=PAIR) for n in range(2)]
    sentence = judged(*views).sentence
    assert "look at the link" in sentence
    assert "ranks 0-1 wait in all_reduce 7, gradient bucket 0" in sentence


def test_the_evidence_is_kept(tmp_path):
    views = [training(0, 1, stack="Thread\n"), training(1, 1, state="stopped")]
    failure = conclude(tmp_path, None, views)
    (folder,) = (tmp_path / "postmortem").iterdir()
    assert (
        str(failure) == f"{(folder / 'verdict.txt').read_text()}  hint: stacks and last operations: {folder}"
    )
    assert json.loads((folder / "rank-1.json").read_text())["state"] == "stopped"
    assert (folder / "rank-0.stack.txt").read_text() == "Thread\n"
    assert "stopped" in (folder / "rank-1.stack.txt").read_text()


def test_where_nothing_can_be_written_the_verdict_is_told_all_the_same(tmp_path):
    (tmp_path / "postmortem").write_text("")
    sentence = str(conclude(tmp_path, None, [training(0, 1), training(1, 1, state="stopped")]))
    assert sentence.startswith("rank 1 is stopped by a signal")
    assert "hint: no post-mortem" in sentence


def test_a_killed_rank_is_told_with_its_place_and_the_hint_stays(tmp_path):
    views = [
        training(0, 6, BUCKET(7), step=7, waiting=True, groups=PAIR),
        training(1, 6, step=7, phase="forward", groups=PAIR, state="gone"),
    ]
    told = str(conclude(tmp_path, Failure(1, 0.0, "rank 1 was killed\n  hint: memory"), views))
    waiting = "rank 0 waits in all_reduce 7, gradient bucket 0"
    assert told.startswith(f"rank 1 was killed in forward of step 7; {waiting}\n  hint: memory")


def test_an_error_that_ranks_disagreeing_caused_is_told_as_that(tmp_path):
    views = [training(n, 6, BUCKET(7, f"[{n}]"), step=7, groups=PAIR) for n in range(2)]
    torn = Failure(1, 0.0, "rank 1: RuntimeError: connection closed", "Traceback", secondary=True)
    told = conclude(tmp_path, torn, views)
    assert "issued all_reduce 7 of [" in str(told)
    assert not told.secondary
    assert "Traceback" not in str(told)


@pytest.mark.parametrize(
    "failure",
    [Failure(1, 0.0, "rank 1: bad input", fatal=True), Failure(1, 0.0, "rank 1: ValueError: x", "Traceback")],
)
def test_an_error_of_ones_own_is_told_as_it_is(tmp_path, failure):
    told = conclude(tmp_path, failure, [training(n, 6, step=7, groups=PAIR) for n in range(2)])
    assert str(told).startswith(str(failure))
    assert (tmp_path / "postmortem").exists() is not failure.fatal


def test_hosts_are_named_where_there_are_several(tmp_path):
    hosts = ("north", "north", "south", "south")
    views = [training(n, 6, BUCKET(7), step=7, waiting=True, host=hosts[n]) for n in (0, 1, 2)]
    verdict = judged(*views, training(3, 6, step=7, phase="data", host="south"))
    assert verdict.sentence == (
        "rank 3 on south is in data of step 7; ranks 0-2 wait in all_reduce 7, gradient bucket 0"
    )
    views = [training(n, 6, BUCKET(7), step=7, waiting=True, host=hosts[n]) for n in range(4)]
    assert "look at the link between north and south" in judged(*views).sentence


def test_what_is_saved_in_the_background_has_no_place_in_the_order_of_a_step():
    """Rank 1 is late with the saving that rank 0 has begun; the step it is in came before, last time."""
    groups = {**PAIR, "saving": (0, 1)}
    saved = ("saving", "all_gather", "[1]")
    early = [op for step in (1, 2) for op in (BUCKET(step), (*saved, step))]
    views = [
        rank(0, *early, (*saved, 3), BUCKET(3), groups=groups, step=3, waiting=True),
        rank(1, *early, BUCKET(3), groups=groups, step=3, phase="data"),
    ]
    verdict = judged(*views)
    assert "skipped" not in verdict.sentence
    assert verdict.ranks == (1,)
