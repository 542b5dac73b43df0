"""What layouts send and hold, counted: the tables of docs/layouts.md, with P parameters and n ranks."""

import gc
import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from shoal.config.layout import parse_layout, settings_of
from shoal.tasks.gpt import Gpt
from shoal.train.step import forward_backward, update
from tests.cases import every
from tests.train.ranks import make_job, result_of, tiny_config

GATHERS = ("all_gather_single", "all_gather_into_tensor", "all_gather")  # names by the version of torch
SCATTERS = ("reduce_scatter_single", "reduce_scatter_tensor", "reduce_scatter")
# Large enough for weights to be nearly all that a rank holds; no dim is odd, so that shards need no padding.
SHAPE = {"d_model": 128, "n_heads": 4, "max_seq_len": 16}


def values_of(data, words, micro_steps=1, n_layers=4, recompute="none"):
    layout = parse_layout(words)
    train = {"micro_batch_size": 16 // layout.dp // micro_steps, "recompute": recompute}
    model = SHAPE | {"n_layers": n_layers}
    return tiny_config(data, model=model, train=train, parallel=settings_of(layout))


def take_step(job, step):
    assert update(job, result_of(job, step))


class Traffic:
    """While it is open, counts the elements of the whole tensors that this rank hands to collectives."""

    def __init__(self, job):
        self.job = job
        self.gathered = self.scattered = self.reduced = 0
        self.honest = {n: getattr(dist, n) for n in (*GATHERS, *SCATTERS, "all_reduce") if hasattr(dist, n)}

    def __enter__(self):
        for name, honest in self.honest.items():
            setattr(dist, name, self._counted(name, honest))
        return self

    def __exit__(self, *failure):
        for name, honest in self.honest.items():
            setattr(dist, name, honest)

    def _counted(self, name, honest):
        def collective(*args, **named):
            if named.get("group") is not self.job.process.control:  # agreements on single numbers
                output = (
                    args[0] if args else next(named[n] for n in ("output_tensor", "output") if n in named)
                )
                inputs = args[1] if len(args) > 1 else named.get("input_tensor", named.get("input"))
                self._count(name, output, inputs)
            return honest(*args, **named)

        return collective

    def _count(self, name, output, inputs):
        if name in GATHERS:
            self.gathered += output.numel()
        elif name in SCATTERS:
            self.scattered += inputs.numel()
        else:
            self.reduced += output.numel()


def traffic_of_a_step(run_dir, values):
    """Return the elements that the second step gathers, scatters and reduces, and those of all parameters."""
    job = make_job(run_dir, values)
    take_step(job, 1)
    parameters = sum(weight.numel() for weight in job.model.named_weights().values())
    with Traffic(job) as traffic:
        take_step(job, 2)
    return traffic.gathered, traffic.scattered, traffic.reduced, parameters


@pytest.mark.parametrize("micro_steps", every(2, [4, 1]))
@pytest.mark.parametrize(
    ("words", "gathers", "scatters", "reduces"),
    [
        ("dp2", lambda k: 0, lambda k: 0, lambda k: 1),
        ("zero1x2", lambda k: 1, lambda k: 1, lambda k: 0),
        ("zero2x2", lambda k: 1, lambda k: k, lambda k: 0),
        ("zero3x2", lambda k: 2 * k, lambda k: k, lambda k: 0),
        # Replicas sum their shards: a half of the parameters.
        ("dp2*zero2x2", lambda k: 1, lambda k: k, lambda k: 0.5),
    ],
)
def test_a_step_sends_what_its_level_of_zero_promises(
    pool, data, tmp_path, words, micro_steps, gathers, scatters, reduces
):
    values = values_of(data, words, micro_steps)
    for *counted, parameters in pool.run(traffic_of_a_step, parse_layout(words).world_size, tmp_path, values):
        expected = (gathers(micro_steps), scatters(micro_steps), reduces(micro_steps))
        assert tuple(n / parameters for n in counted) == expected


@pytest.mark.parametrize("micro_steps", every(2, [2, 1]))
@pytest.mark.parametrize(("words", "exchanges"), [("tp2", (0, 0, 1)), ("tp2+sp", (1, 1, 0))])
def test_tensor_ranks_exchange_each_layers_tokens_four_times(
    pool, data, tmp_path, words, exchanges, micro_steps
):
    """And twice for the ends. A gather and a scatter are together as much as an all-reduce."""
    ranks = pool.run(traffic_of_a_step, 2, tmp_path, values_of(data, words, micro_steps))
    stream = 16 * 16 * SHAPE["d_model"]  # all tokens of the step, whatever the micro-steps
    for *counted, parameters in ranks:
        # The loss gathers two or three numbers a token; sequence parts sum the gradients of norms and biases.
        rest = stream * 0.05 + parameters * 0.02
        for elements, wanted in zip(counted, exchanges, strict=True):
            assert abs(elements - wanted * (4 * 4 + 2) * stream) <= rest


def storages():
    """Return the bytes of every tensor storage that is alive, by address; a shared one once."""
    gc.collect()
    tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
    tensors += [t.grad for t in tensors if t.is_leaf and t.requires_grad and t.grad is not None]
    plain = [t.to_local() if isinstance(t, DTensor) else t for t in tensors]
    found = [t.untyped_storage() for t in plain if t.device.type == "cpu"]
    return {storage.data_ptr(): storage.nbytes() for storage in found}


def held_by_a_rank(run_dir, values):
    """Return what is alive between two micro-steps, and between two steps, as a multiple of all parameters.

    Beside them, the share of the parameters that are outside blocks: their gradients are exchanged last.
    """
    before = storages()

    def held():
        return sum(size for address, size in storages().items() if address not in before)

    seen = []
    honest = Gpt.forward_loss

    def run(self, model, micro, inputs=None):
        seen.append(held())
        return honest(self, model, micro, inputs)

    Gpt.forward_loss = run
    try:
        job = make_job(run_dir, values)
        take_step(job, 1)
        take_step(job, 2)
    finally:
        Gpt.forward_loss = honest
    job.model.forget_gradients()
    sizes = {name: weight.numel() for name, weight in job.model.named_weights().items()}
    unit, last = sum(sizes.values()), sum(n for name, n in sizes.items() if not name.startswith("blocks."))
    return seen[-1] / 4 / unit, held() / 4 / unit, last / unit


@pytest.mark.parametrize(
    ("words", "between_micro_steps", "between_steps"),
    every(
        2,
        [
            ("zero1x2", 3 / 2 + 1 + 1, 3 / 2),
            ("1", 1 + 2 + 1, 1 + 2),
            ("zero2x2", 3 / 2 + 1 + 1 / 2, 3 / 2),
            ("zero3x4", 3 / 4 + 1 / 4, 3 / 4),
            ("dp2", 1 + 2 + 1, 1 + 2 + 1),  # DDP keeps the memory of gradients
            ("dp2*zero2x2", 3 / 2 + 1 + 1 / 2, 3 / 2),
            ("zero3x2", 3 / 2 + 1 / 2, 3 / 2),
        ],
    ),
)
def test_a_rank_holds_what_its_level_of_zero_promises(
    pool, data, tmp_path, words, between_micro_steps, between_steps
):
    """Weights, two moments and gradients as the table has them, to a hundredth.

    Where every micro-step exchanges gradients, torch keeps what it sent last until it sends again.
    """
    layout = parse_layout(words)
    for micro, step, last in pool.run(held_by_a_rank, layout.world_size, tmp_path, values_of(data, words, 2)):
        sent = last if layout.zero > 1 else 0
        assert micro - sent == pytest.approx(between_micro_steps, rel=0.01)
        assert step == pytest.approx(between_steps, rel=0.01)


def kept_by_a_forward_pass(run_dir, values):
    """Return the bytes of activations that are alive when the loss is to be computed."""
    job = make_job(run_dir, values)
    honest, before, seen = job.task._cross_entropy, sum(storages().values()), []

    def note(logits, targets):
        for _ in range(5):  # a finished exchange lets go of its tensors a moment later
            seen.append(sum(storages().values()) - before)
            time.sleep(0.05)
        return honest(logits, targets)

    job.task._cross_entropy = note
    forward_backward(job, job.task.batch(1))
    return min(seen[:5])


@pytest.mark.parametrize(("words", "parts"), every(2, [("tp2+sp", 2), ("tp2", 1)]))
def test_recompute_keeps_a_layers_input_and_sequence_parts_share_it(pool, data, tmp_path, words, parts):
    def run(n_layers):
        values = values_of(data, words, n_layers=n_layers, recompute="full")
        return pool.run(kept_by_a_forward_pass, 2, tmp_path / str(n_layers), values)

    layer_input = 16 * 16 * SHAPE["d_model"] * 4
    for few, many in zip(run(2), run(6), strict=True):
        assert (many - few) / 4 == pytest.approx(layer_input / parts, rel=0.05)
