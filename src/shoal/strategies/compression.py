"""Exchange over a transport with compression and error feedback, in a thread during the backward pass."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from shoal.comm.transport import Transport
from shoal.gradsync.exchange import Bucket, Exchange, Handle
from shoal.runtime.flight_recorder import label
from shoal.strategies.methods import Exact, Method
from shoal.strategies.step_state import StepState


class CompressedExchange(Exchange):
    """Sum buckets by a method, one after the other in a thread.

    What the method leaves out is kept as error feedback and added to the gradients of a later step. Sums are
    exact for the first `warmup_steps`.
    """

    def __init__(
        self,
        name: str,
        transport: Transport,
        method: Method,
        parameters: dict[str, Tensor],
        warmup_steps: int = 0,
    ) -> None:
        """Build from this rank's part of each parameter, by name. Nothing else may use the transport."""
        self.name = name
        self.traffic = transport.traffic
        self._transport = transport
        self._method = method
        self._exact = Exact()
        self._residuals = StepState(
            {f"residual.{name}": torch.zeros_like(part) for name, part in parameters.items()}
            if method.feedback
            else {}
        )
        self._warmup_steps = warmup_steps
        self._step, self._scale = 0, 1.0
        self._thread = _Thread(transport.device)

    def begin(self, step: int, scale: float) -> None:
        self._step, self._scale = step, scale

    def start(self, bucket: Bucket) -> Handle:
        return self._thread.start(lambda: self._add_up(bucket))

    def end(self, *, applied: bool) -> None:
        self._residuals.settle(applied=applied)
        self._method.memory.settle(applied=applied)

    def state(self) -> dict[str, Tensor]:
        return self._residuals.tensors

    def common_state(self) -> dict[str, Tensor]:
        return self._method.memory.tensors

    @torch.no_grad()
    def _add_up(self, bucket: Bucket) -> None:
        label(f"gradient bucket {bucket.number}")
        if self._step <= self._warmup_steps:
            self._exact.add_up(self._transport, bucket)
            return
        names = [f"residual.{name}" for name in bucket.views] if self._method.feedback else []
        for name, view in zip(names, bucket.views.values(), strict=False):
            view.add_(self._residuals.tensors[name], alpha=self._scale * self._method.feedback)
        lost = self._method.add_up(self._transport, bucket)
        if lost is not None:
            lost.div_(self._scale)  # the next step may have another scale
            parts = lost.split([view.numel() for view in bucket.views.values()])
            for name, view, part in zip(names, bucket.views.values(), parts, strict=True):
                stays = self._residuals.tensors[name] * (1 - self._method.feedback)
                self._residuals.write(name, stays.add_(part.view_as(view)))


class _Thread:
    """Run work in order; on a GPU in a stream of its own, which waits for the caller's stream."""

    def __init__(self, device: torch.device) -> None:
        prepare = None
        self._stream = None
        if device.type == "cuda":
            self._stream = stream = torch.cuda.Stream(device)
            prepare = lambda: torch.cuda.set_device(stream.device)  # noqa: E731  (it has an index)
        self._pool = ThreadPoolExecutor(1, "exchange", prepare)

    def start(self, work: Callable[[], None]) -> Handle:
        if self._stream is None:
            return _Done(self._pool.submit(work))
        asked = torch.cuda.current_stream(self._stream.device).record_event()
        return _Done(self._pool.submit(self._in_stream, self._stream, asked, work), self._stream)

    @staticmethod
    def _in_stream(stream: torch.cuda.Stream, asked: torch.cuda.Event, work: Callable[[], None]) -> None:
        with torch.cuda.stream(stream):
            stream.wait_event(asked)
            work()


class _Done:
    def __init__(self, future: Future[None], stream: torch.cuda.Stream | None = None) -> None:
        self._future, self._stream = future, stream

    def wait(self) -> None:
        self._future.result()
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
