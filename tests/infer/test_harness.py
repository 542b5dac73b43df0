"""lm-evaluation-harness gives our models the figures that it gives transformers with the same weights."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from shoal.errors import InputError, ShoalError
from shoal.infer.evaluate import evaluate
from shoal.infer.load import load_text_model
from shoal.infer.measure import Measure
from tests import commands

TASK = """
task: {name}
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: {kind}
{rest}
metadata:
  version: 3.0
"""
TASKS = {
    "rolling": (
        "loglikelihood_rolling",
        """doc_to_text: ""
doc_to_target: "{{text}}"
metric_list:
  - metric: word_perplexity
  - metric: byte_perplexity
  - metric: bits_per_byte
""",
    ),
    "choosing": (
        "multiple_choice",
        """doc_to_text: "{{question}}"
doc_to_target: answer
doc_to_choice: "{{choices}}"
metric_list:
  - metric: acc
  - metric: acc_norm
""",
    ),
    "writing": (
        "generate_until",
        """doc_to_text: "{{question}}"
doc_to_target: "{{choices[0]}}"
generation_kwargs:
  until: ["{stop}"]
  max_gen_toks: 9
  do_sample: false
metric_list:
  - metric: exact_match
""",
    ),
}
FOUND = {
    "rolling": {"word_perplexity", "byte_perplexity", "bits_per_byte"},
    "choosing": {"acc", "acc_norm"},
    "writing": {"exact_match"},
}


@pytest.fixture(scope="module")
def exported(trained_run, tmp_path_factory):
    folder = tmp_path_factory.mktemp("harness") / "exported"
    assert commands.run("export", trained_run, folder, "--no-prove").returncode == 0
    return folder


def their_model(exported):
    """Return the harness's own model of transformers, and its continuation of a prompt."""
    from lm_eval.models.huggingface import HFLM
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = AutoModelForCausalLM.from_pretrained(exported), AutoTokenizer.from_pretrained(exported)
    tokenizer.pad_token = tokenizer.eos_token

    def written(prompt):
        ids = tokenizer(prompt, return_tensors="pt")
        return tokenizer.decode(model.generate(**ids, max_new_tokens=9, do_sample=False)[0, len(prompt) :])

    return HFLM(pretrained=model, tokenizer=tokenizer, device="cpu", batch_size=4), written


def write_tasks(folder, written):
    draw = np.random.default_rng(0)

    def text(length):
        return "".join(map(chr, draw.integers(97, 123, length)))

    questions = [text(3), text(5), text(100), "wxyzwxyz", text(60)]
    stop = written(questions[3])[-1]  # so that some answers end early
    lines = [
        {
            "text": " ".join(text(5) for _ in range(words)),
            "question": question,
            "choices": [written(question).split(stop)[0] if n % 2 else text(4), text(2), text(7)],
            "answer": n % 3,
        }
        for n, (words, question) in enumerate(zip((1, 4, 30, 11, 22), questions, strict=True))
    ]
    data = folder / "data.jsonl"
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    quoted = json.dumps(stop)[1:-1]
    for name, (kind, rest) in TASKS.items():
        words = TASK.format(name=name, data=data, kind=kind, rest=rest.replace("{stop}", quoted))
        (folder / f"{name}.yaml").write_text(words)


@pytest.fixture
def offline(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache/datasets"))


@pytest.mark.proof
def test_tasks_give_the_figures_of_transformers(trained_run, exported, tmp_path, offline):
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.tasks import TaskManager

    import shoal.infer.harness  # noqa: F401  it registers "shoal"

    model, written = their_model(exported)
    (tmp_path / "tasks").mkdir()
    write_tasks(tmp_path / "tasks", written)
    manager = TaskManager(include_path=tmp_path / "tasks", include_defaults=False)
    asked = {"tasks": list(TASKS), "task_manager": manager, "bootstrap_iters": 0}
    theirs = simple_evaluate(model, **asked)["results"]
    by_name = simple_evaluate("shoal", model_args={"checkpoint": str(trained_run)}, **asked)["results"]
    out = tmp_path / "found.json"
    words = ["--tasks", ",".join(TASKS), "--task-folder", tmp_path / "tasks", "--json", out]
    words += ["--batch-size", "2", "--nproc", "2"]
    done = commands.run("evaluate", trained_run, *words)
    assert done.returncode == 0, done.stderr
    ours = json.loads(out.read_text())
    for name, metrics in FOUND.items():
        got = ours[f"{name} (lm-eval)"]
        assert metrics <= set(got)
        assert (got["version"], got["shots"]) == (3.0, 0)
        for metric in metrics:
            for one in (got[metric], by_name[name][f"{metric},none"]):
                assert one == pytest.approx(theirs[name][f"{metric},none"], rel=2e-6), (name, metric)
    assert 0 < ours["writing (lm-eval)"]["exact_match"] < 1


@pytest.mark.proof  # all of the harness's files are read, for a quarter of a minute
def test_a_task_that_there_is_not_is_a_sentence(trained_run):
    loaded = load_text_model(trained_run, torch.device("cpu"))
    with pytest.raises(InputError, match=r"(?s)has no task 'hellaswagg'.*did you mean 'hellaswag'\?"):
        evaluate(loaded, Measure(tasks=("hellaswagg",)))


def test_a_task_that_cannot_be_run_is_a_sentence(trained_run, tmp_path, offline):
    loaded = load_text_model(trained_run, torch.device("cpu"))
    (tmp_path / "gone.yaml").write_text(
        TASK.format(name="gone", data=tmp_path / "none", kind="multiple_choice", rest=TASKS["choosing"][1])
    )
    with pytest.raises(ShoalError, match="lm-evaluation-harness ended: FileNotFoundError"):
        evaluate(loaded, Measure(tasks=("gone",), task_folder=tmp_path))
