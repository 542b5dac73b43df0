"""lm-evaluation-harness asks our models: its `LM` over a loaded model, and its tasks for `shoal evaluate`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.evaluator import simple_evaluate
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from shoal.errors import InputError, ShoalError, nearest
from shoal.infer.generate import GeneratedRow
from shoal.infer.load import TextModel, load_text_model
from shoal.infer.measure import Found, Measure, score_all
from shoal.infer.sampling import Sampling
from shoal.infer.score import Span
from shoal.infer.text import complete
from shoal.runtime.device import select_device

Request = tuple[tuple[str, str], list[int], list[int]]


@register_model("shoal")
class HarnessModel(TemplateLM):
    """What the harness asks a model: how likely a continuation is, and to write one.

    In a program of your own, after an import of this module:
    `simple_evaluate("shoal", model_args={"checkpoint": "runs/first"}, tasks=[...])`.
    """

    def __init__(
        self,
        checkpoint: str | TextModel,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        device: str | None = None,
    ) -> None:
        """Take a model that is loaded, or load a run, a checkpoint or a Hugging Face folder."""
        super().__init__()
        if not isinstance(checkpoint, TextModel):
            setting: Any = device or "auto"
            checkpoint = load_text_model(Path(checkpoint), select_device(setting, 0, 1).torch_device)
        self._loaded, self._batch_size = checkpoint, int(batch_size or Measure().batch_size)
        self._max_seq_len = checkpoint.model.shape.max_seq_len

    @property
    def eot_token_id(self) -> int:
        """Return the id that ends a document, which stands for an empty context."""
        return self._loaded.eod_id

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Return the ids of a text; nothing is ever added to them."""
        return list(self._loaded.tokenizer.encode(string))

    def _loglikelihood_tokens(self, requests: Sequence[Request], **_: Any) -> list[tuple[float, bool]]:
        spans = []
        for _texts, context, continuation in requests:
            tokens = (context + continuation)[-(self._max_seq_len + 1) :]
            spans.append(Span(tokens, max(1, len(tokens) - len(continuation))))
        return [(-one.loss, one.greedy) for one in score_all(self._loaded, spans, self._batch_size)]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihood of whole texts, in the windows that the harness defines."""
        windows: list[Request] = []
        counts = []
        for request in requests:
            tokens = self.tok_encode(request.args[0])
            parts = get_rolling_token_windows(tokens, self.eot_token_id, self._max_seq_len, context_len=1)
            own = [(("", ""), *make_disjoint_window(part)) for part in parts]
            windows += own
            counts.append(len(own))
        found = iter(self._loglikelihood_tokens(windows))
        return [sum(next(found)[0] for _ in range(count)) for count in counts]

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Return a continuation of each context, up to the first of its stop texts."""
        alike: dict[tuple[Sampling, int], list[int]] = {}
        stops = []
        for number, request in enumerate(requests):
            options = normalize_gen_kwargs(request.args[1])
            temperature = float(options.get("temperature") or 0.0) if options.get("do_sample") else 0.0
            sampling = Sampling(
                temperature, int(options.get("top_k") or 0), float(options.get("top_p") or 1.0)
            )
            alike.setdefault((sampling, int(options["max_gen_toks"])), []).append(number)
            stops.append([stop for stop in options["until"] if stop])
        texts = [""] * len(requests)
        for (sampling, most), numbers in alike.items():
            rows = [self._row(requests[number].args[0], most, number) for number in numbers]
            own_stops = [stops[number] for number in numbers]
            made = complete(self._loaded, rows, sampling, self._batch_size, own_stops)
            for number, one in zip(numbers, made, strict=True):
                texts[number] = one.text
        return texts

    def _row(self, context: str, max_tokens: int, number: int) -> GeneratedRow:
        max_tokens = min(max_tokens, self._max_seq_len - 1)
        tokens = self.tok_encode(context)[-(self._max_seq_len - max_tokens) :] or [self.eot_token_id]
        return GeneratedRow(tokens, max_tokens, prompt=number)


def of_tasks(loaded: TextModel, measure: Measure) -> dict[str, Found]:
    """Return the harness's figures for some of its tasks, or of those in YAML files of a folder.

    Raises:
        InputError: There is no such task.
        ShoalError: A task cannot be run: its data cannot be had, say.
    """
    manager = _manager_of(measure)
    try:
        answer = simple_evaluate(
            HarnessModel(loaded, measure.batch_size),
            tasks=list(measure.tasks),
            task_manager=manager,
            limit=measure.limit or None,
            log_samples=False,
            bootstrap_iters=0,
        )
    except Exception as error:  # whatever a task's own code does
        raise ShoalError(f"lm-evaluation-harness ended: {type(error).__name__}: {error}") from error
    assert answer is not None
    return {f"{name} (lm-eval)": _figures(found, answer, name) for name, found in answer["results"].items()}


def _manager_of(measure: Measure) -> TaskManager:
    """Return what knows all tasks that are wanted; the harness's own thousands only where they are needed."""
    folder = measure.task_folder
    if folder is not None:
        own = TaskManager(include_path=folder, include_defaults=False)
        if set(measure.tasks) <= set(own.all_tasks):
            return own
    manager = TaskManager(include_path=folder)
    for name in measure.tasks:
        if name not in manager.all_tasks:
            raise InputError(
                f"lm-evaluation-harness has no task {name!r}", hint=nearest(name, manager.all_tasks)
            )
    return manager


def _figures(found: dict[str, Any], answer: dict[str, Any], name: str) -> Found:
    """Return the numbers among a task's results, without the name of a filter that is none."""
    figures = {key.removesuffix(",none"): value for key, value in found.items()}
    shots, versions = answer.get("n-shot", {}), answer.get("versions", {})
    told = {"shots": shots.get(name), "version": versions.get(name)}
    return {key: value for key, value in {**figures, **told}.items() if isinstance(value, int | float)}
