"""autograd's backward pass, node by node in Python.

torch's own engine asks a CUDA device for its context before anything else. The nodes themselves need none:
each is called with its gradients, which turns them into those of its inputs. What the engine does beside
that, and layouts rely on, is done here: tensor hooks, final callbacks, sums of gradients that meet, and the
check that a gradient is of the tensor's shape, format and device.
"""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

Node = Any
Place = tuple[Node, int]  # a node, and which of its gradients


class WalkedBackward:
    """Stands in for torch's ImperativeEngine."""

    def __init__(self) -> None:
        self._hooks: dict[Place, list[Callable[[Tensor], Tensor | None]]] = defaultdict(list)
        self._callbacks: list[Callable[[], object]] = []
        self.passes = 0

    def queue_callback(self, callback: Callable[[], object]) -> None:
        """Call it when the pass is done."""
        self._callbacks.append(callback)

    def register_hook(self, tensor: Tensor, hook: Callable[[Tensor], Tensor | None]) -> None:
        """Call a hook with the gradient of a tensor."""
        self._hooks[place_of(tensor)].append(hook)

    def is_checkpoint_valid(self) -> bool:
        return True

    @torch.no_grad()
    def run_backward(
        self,
        tensors: Sequence[Tensor],
        gradients: Sequence[Tensor],
        keep_graph: bool = False,
        create_graph: bool = False,
        inputs: Sequence[Tensor] = (),
        allow_unreachable: bool = False,
        accumulate_grad: bool = True,
    ) -> tuple[Tensor | None, ...]:
        """Leave each leaf its gradient, or return those of `inputs` where nothing is to be accumulated."""
        assert not create_graph, "no second derivatives here"
        self.passes += 1
        wanted = [place_of(tensor) for tensor in inputs]
        arrived: dict[Node, dict[int, Tensor]] = defaultdict(dict)
        for tensor, gradient in zip(tensors, gradients, strict=True):
            self._give(arrived, place_of(tensor), gradient)
        with patch.object(torch._C, "_current_graph_task_id", lambda: self.passes):
            found = self._walk(arrived, wanted, accumulate_grad=accumulate_grad)
            while self._callbacks:
                self._callbacks.pop(0)()
        return tuple(found.get(place) for place in wanted)

    def _walk(
        self, arrived: dict[Node, dict[int, Tensor]], wanted: list[Place], *, accumulate_grad: bool
    ) -> dict[Place, Tensor]:
        waiting = _edges_into(list(arrived))
        found: dict[Place, Tensor] = {}
        order = itertools.count()
        ready = [(-node._sequence_nr(), next(order), node) for node in arrived if not waiting[node]]
        heapq.heapify(ready)
        while ready:
            _, _, node = heapq.heappop(ready)
            gradients = self._hooked(node, arrived.pop(node, {}))
            found |= {(node, number): gradient for number, gradient in gradients.items()}
            leaf = hasattr(node, "variable")
            if leaf and (not accumulate_grad or (wanted and (node, 0) not in wanted)):
                continue
            results = _call(node, gradients) if gradients else [None] * len(node.next_functions)
            for (following, number), gradient in zip(node.next_functions, results, strict=True):
                if following is None:
                    continue
                if gradient is not None:
                    self._give(arrived, (following, number), gradient)
                waiting[following] -= 1
                if not waiting[following]:
                    heapq.heappush(ready, (-following._sequence_nr(), next(order), following))
        return {place: found[place] for place in wanted if place in found}

    def _hooked(self, node: Node, gradients: dict[int, Tensor]) -> dict[int, Tensor]:
        for number in gradients:
            for hook in self._hooks.get((node, number), ()):
                changed = hook(gradients[number])
                gradients[number] = gradients[number] if changed is None else changed
        return gradients

    @staticmethod
    def _give(arrived: dict[Node, dict[int, Tensor]], place: Place, gradient: Tensor) -> None:
        node, number = place
        about = node._input_metadata[number]
        assert gradient.device == about.device, f"{node.name()}: {gradient.device} into {about.device}"
        if gradient.shape != tuple(about.shape):
            gradient = gradient.sum_to_size(tuple(about.shape))
        gradient = gradient.to(about.dtype)
        held = arrived[node].get(number)
        arrived[node][number] = gradient if held is None else held + gradient


def place_of(tensor: Tensor) -> Place:
    """Return where the gradient of a tensor arrives."""
    if tensor.grad_fn is not None:
        return tensor.grad_fn, tensor.output_nr
    return torch.autograd.graph.get_gradient_edge(tensor)[:2]


def _edges_into(roots: list[Node]) -> dict[Node, int]:
    """Return how many edges lead to each node from those that are reached."""
    count: dict[Node, int] = dict.fromkeys(roots, 0)
    left, seen = list(roots), set(roots)
    while left:
        for node, _ in left.pop().next_functions:
            if node is None:
                continue
            count[node] = count.get(node, 0) + 1
            if node not in seen:
                seen.add(node)
                left.append(node)
    return count


def _call(node: Node, gradients: dict[int, Tensor]) -> list[Tensor | None]:
    """Return the gradients of a node's inputs, one for each of its edges."""
    given = [gradients.get(number) for number in range(len(node._input_metadata))]
    if not hasattr(node, "_forward_cls"):
        found = node(*given)
        return [] if found is None else list(found) if isinstance(found, tuple) else [found]
    about = node._input_metadata
    filled = [
        torch.zeros(tuple(a.shape), dtype=a.dtype, device=a.device) if g is None else g
        for g, a in zip(given, about, strict=True)
    ]
    found = node.apply(*filled)
    found = found if isinstance(found, tuple) else (found,)
    needed = iter([g for g, needs in zip(found, node.needs_input_grad, strict=True) if needs])
    return [None if edge is None else next(needed) for edge, _ in node.next_functions]


@contextmanager
def walked() -> Iterator[WalkedBackward]:
    """Have every backward pass, and every hook of a tensor, go this way."""
    engine = WalkedBackward()
    plain = Tensor.register_hook

    def register_hook(tensor: Tensor, hook: Callable[[Tensor], Tensor | None]) -> Any:
        engine.register_hook(tensor, hook)
        return plain(tensor, lambda gradient: None)

    with (
        patch.object(torch.autograd.Variable, "_execution_engine", engine),
        patch.object(Tensor, "register_hook", register_hook),
    ):
        yield engine
