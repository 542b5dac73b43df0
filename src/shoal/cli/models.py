"""The commands for trained models: generate, evaluate, serve, export, import. Arguments and help only."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Literal

from shoal.errors import InputError
from shoal.runtime.startup import loading


def generate(
    checkpoint: Path,
    /,
    *,
    prompt: str | None = None,
    input: Path | None = None,
    output: Path | None = None,
    samples: int = 1,
    max_tokens: int | None = None,
    max_length_error: bool = False,
    greedy: bool = False,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    batch_size: int = 16,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    tp: int = 1,
) -> None:
    """Generate text from a prompt or a JSONL file, or interactively (type `stop` to quit).

    Example: shoal generate runs/first --prompt "def main(" --temperature 0.8

    Example: shoal generate runs/first --input prompts.jsonl --output out.jsonl

    Parameters
    ----------
    checkpoint
        Run folder (its newest intact checkpoint), checkpoint, or Hugging Face folder.
    prompt
        Text to continue. An empty prompt starts a new document.
    input
        JSONL file with a prompt under "prompt" in each line; other keys are copied to the output.
    output
        JSONL file to write: the lines of --input with their "completions" (default: the screen).
    samples
        Number of samples per prompt.
    max_tokens
        Maximum number of new tokens; fewer if the document ends (default: 256). A text longer than the
        model's positions continues on a sliding window: when that is full, its last half is kept and read
        again.
    max_length_error
        Reject a prompt or length beyond the model's positions, instead of using a sliding window.
    greedy
        Always take the likeliest token; the same as --temperature 0.
    temperature
        Divide the logits by this: below 1 sharpens the distribution, above 1 flattens it; 0 is greedy.
    top_k
        Sample among the K most likely tokens; 0 means all.
    top_p
        Sample among the most likely tokens whose probabilities add up to P; 1 means all.
    seed
        Random seed. Other prompts in the batch change a text only through rounding.
    batch_size
        Number of sequences generated at once.
    device
        Device; auto chooses CUDA if available.
    tp
        Number of processes that share the model by tensor parallelism.
    """
    with loading():
        from shoal.infer.sampling import Sampling
        from shoal.infer.terminal import GenerateOptions, run

    sampling = Sampling(0.0 if greedy else temperature, top_k, top_p, seed)
    if tp < 1:
        raise InputError(f"--tp {tp}: at least 1 process is needed")
    run(
        checkpoint,
        prompt,
        input,
        output,
        device,
        tp,
        GenerateOptions(sampling, max_tokens, samples, batch_size, max_length_error),
    )


def export(checkpoint: Path, target: Path, /, *, to: Literal["hf"] = "hf", prove: bool = True) -> None:
    """Export a model in Hugging Face format, and verify that transformers computes the same logits.

    Example: shoal export runs/first exported

    Parameters
    ----------
    checkpoint
        Run folder (its newest intact checkpoint), checkpoint from any layout, or Hugging Face folder.
    target
        Folder to create, with weights (safetensors), configuration, tokenizer, model card and certificate.
    to
        Format. hf: GPT2LMHeadModel or LlamaForCausalLM of transformers.
    prove
        Load both models, compare logits and loss, and write certificate.json; needs memory for two models.
    """
    with loading():
        from shoal.infer.certificate import certify
        from shoal.interop.export import export as write
        from shoal.interop.importing import as_checkpoint

    scratch = target.with_name(f".{target.name}.imported")
    try:
        source = write(as_checkpoint(checkpoint, scratch), target)
        proven = prove and certify(source, target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    made_from = checkpoint if source.parent == scratch else source
    print(f"{target}: {'proven equal to' if proven else 'made from'} {made_from}")


def import_(
    source: Path,
    target: Path,
    /,
    *,
    n_heads: int = 0,
    vocab_size: int = 0,
    iteration: int = 0,
    tokenizer: Path | None = None,
    eod_id: int | None = None,
) -> None:
    """Import a checkpoint from Hugging Face (GPT-2, Llama), nanoGPT or Megatron-LM (2021).

    Optimiser state is imported if present. Pickle files are read without executing code.

    Example: shoal import models/gpt2 imported

    Example: shoal import gpt2_345m imported --n-heads 16 --vocab-size 50257

    Parameters
    ----------
    source
        Hugging Face folder, nanoGPT's ckpt.pt, or Megatron folder with any number of mp_rank_NN folders.
    target
        Checkpoint to create, for `shoal generate` or `shoal train --init`.
    n_heads
        Number of attention heads (default: that of the source); needed for Megatron, whose files lack it.
    vocab_size
        Vocabulary size without padding (default: that of the source); needed for Megatron.
    iteration
        Megatron iteration to import (default: the latest).
    tokenizer
        A tokenizer.json, a SentencePiece .model, or a folder with one of these or with vocab.json and
        merges.txt.
    eod_id
        Id of the end-of-document token (default: that of the tokenizer or the configuration, else the last
        id).
    """
    with loading():
        from shoal.interop.foreign import Told
        from shoal.interop.importing import Wanted, run

    run(source, target, Wanted(Told(n_heads, vocab_size, iteration), tokenizer, eod_id))


def evaluate(
    checkpoint: Path,
    /,
    *,
    text: Path | None = None,
    wikitext: Path | None = None,
    lambada: Path | None = None,
    data: Path | None = None,
    tasks: str = "",
    task_folder: Path | None = None,
    limit: int = 0,
    allow_tokenizer_mismatch: bool = False,
    split: Literal["train", "validation", "test"] = "validation",
    seq_len: int = 0,
    stride: int = 0,
    batch_size: int = 8,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    tp: int = 1,
    nproc: int = 0,
    json: Path | None = None,
) -> None:
    """Evaluate a model: perplexity and bits per byte, WikiText, LAMBADA, or lm-evaluation-harness tasks.

    Without --text or another source, the validation split of the training data is used. Each token
    is scored once, given the previous tokens of its window. Results are also written as JSON beside the
    checkpoint.

    Example: shoal evaluate runs/first

    Example: shoal evaluate runs/first --text held-out.txt --stride 32

    Example: shoal evaluate runs/first --tasks lambada_openai,hellaswag --limit 200

    Example: shoal evaluate runs/first --wikitext wiki.test.tokens --nproc 2

    Parameters
    ----------
    checkpoint
        Run folder (its newest intact checkpoint), checkpoint, or Hugging Face folder.
    text
        UTF-8 text file, scored as one document.
    wikitext
        WikiText file. It is detokenised; perplexity is per word of the original file.
    lambada
        JSONL file with a passage under "text" in each line; measures how often the last word is predicted.
    data
        Dataset to evaluate on, prepared with the model's tokenizer; see --split.
    tasks
        Tasks of lm-evaluation-harness, separated by commas. Most download their data.
    task_folder
        Folder with YAML files of additional tasks.
    limit
        Number of examples per task (default: all).
    allow_tokenizer_mismatch
        Warn, instead of failing, about a different tokenizer with the same number of ids.
    split
        Split to evaluate: of --data, or of the training data if --data is not given.
    seq_len
        Window length in tokens (default: the model's number of positions).
    stride
        Tokens between the starts of windows (default: --seq-len); fewer give more context and take longer.
    batch_size
        Number of windows computed at once.
    device
        Device; auto chooses CUDA if available.
    tp
        Number of processes that share the model by tensor parallelism.
    nproc
        Total number of processes, a multiple of --tp; the windows are divided among them (default: --tp).
    json
        JSON file to write the results to, instead of the one beside the checkpoint.
    """
    with loading():
        from shoal.infer.evaluate import run
        from shoal.infer.measure import Measure

    wanted = tuple(filter(None, tasks.split(",")))
    windows = (allow_tokenizer_mismatch, split, seq_len, stride, batch_size)
    measure = Measure(text, wikitext, lambada, data, wanted, task_folder, limit, *windows)
    run(checkpoint, measure, device, tp, nproc, json)


def serve(
    checkpoint: Path,
    /,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    token_file: Path | None = None,
    batch_size: int = 16,
    max_len: int = 0,
    max_waiting: int = 256,
    time_limit: float = 120.0,
    device: Literal["auto", "cpu", "cuda"] = "auto",
) -> None:
    """Serve a model over HTTP with OpenAI's completions and chat API, and a web page at /.

    Requests are batched continuously. Streaming, several prompts and samples, stop sequences and seeds are
    supported; log-probabilities, penalties and tools are rejected. Press Ctrl-C to stop.

    Example: shoal serve runs/first   (then open http://127.0.0.1:8000/)

    Example: shoal serve exported --host 0.0.0.0 --token-file token.txt

    Parameters
    ----------
    checkpoint
        Run folder (its newest intact checkpoint), checkpoint, or Hugging Face folder.
    host
        Address to listen on. An address that other hosts can reach needs --token-file.
    port
        Port to listen on; 0 chooses a free one.
    token_file
        File with the API key that clients must send.
    batch_size
        Number of sequences generated at once; each needs memory for --max-len tokens.
    max_len
        Maximum tokens per sequence, prompt included (default: the model's number of positions).
    max_waiting
        Maximum number of waiting sequences; further ones are rejected with status 429.
    time_limit
        Time limit per request in seconds, waiting included.
    device
        Device; auto chooses CUDA if available.
    """
    try:
        with loading():
            from shoal.infer.serve.server import Address, Limits, read_token, run
    except ModuleNotFoundError as error:
        raise InputError(f"`shoal serve` needs {error.name}", hint="pip install 'shoal[serve]'") from error

    limits = Limits(batch_size, max_len, max_waiting, request_s=time_limit)
    run(checkpoint, Address(host, port, read_token(token_file)), limits, device)
