"""The commands for models that are trained: write, evaluate, hand over. Arguments and help only."""

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
    greedy: bool = False,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    batch_size: int = 16,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    tp: int = 1,
) -> None:
    """Continue a prompt, a file of prompts, or what is typed (no --prompt, no --input; `stop` alone ends).

    Example: shoal generate runs/first --prompt "def main(" --max-tokens 100 --temperature 0.8 --top-k 50

    Parameters
    ----------
    checkpoint
        A run folder (its newest good checkpoint), a checkpoint, or a Hugging Face folder.
    prompt
        Text to continue; an empty one starts a document.
    input
        JSONL file: one object a line, with the text under "prompt"; other keys are kept.
    output
        Where to write each line of --input with its "completions"; the screen if left out.
    samples
        Continuations of each prompt.
    max_tokens
        New tokens at most; fewer where a document ends. Default: 256, or as many as the positions allow.
    greedy
        Always take the likeliest token.
    temperature
        Below 1 keeps closer to the likely, above 1 strays further.
    top_k
        Choose among the k likeliest tokens only; 0 means all.
    top_p
        Choose among the likeliest tokens that together exceed this probability only; 1 means all.
    seed
        Same seed, prompt number and sample number, same text, whatever else is in the batch.
    batch_size
        Rows computed at once.
    device
        auto takes a CUDA device where there is one.
    tp
        Processes that share the model, each with a part of every layer; the checkpoint may have been saved
        under any layout.
    """
    with loading():
        from shoal.infer.sampling import Sampling
        from shoal.infer.terminal import GenerateOptions, run

    sampling = Sampling(greedy, temperature, top_k, top_p, seed)
    if tp < 1:
        raise InputError(f"--tp {tp}: at least 1 process is needed")
    run(
        checkpoint,
        prompt,
        input,
        output,
        device,
        tp,
        GenerateOptions(sampling, max_tokens, samples, batch_size),
    )


def export(checkpoint: Path, target: Path, /, *, to: Literal["hf"] = "hf", prove: bool = True) -> None:
    """Make a folder that transformers loads without any code of ours, and prove that it computes the same.

    Example: shoal export runs/first exported

    Parameters
    ----------
    checkpoint
        A run folder (its newest good checkpoint) or a checkpoint, saved under any layout; or a Hugging Face
        folder.
    target
        The new folder: weights as safetensors, configuration, tokenizer, model card, certificate.
    to
        hf: GPT2LMHeadModel or LlamaForCausalLM of transformers.
    prove
        Load both, compare logits and loss, and write certificate.json; needs memory for two models.
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
    """Make a checkpoint of another program's: Hugging Face (GPT-2, Llama), nanoGPT, Megatron-LM of 2021.

    Its optimiser's state comes along where the files hold it. Pickles are read without running anything.

    Example: shoal import models/gpt2 imported   (then: shoal generate imported --prompt "Once")

    Example: shoal import checkpoints/gpt2_345m imported --n-heads 16 --vocab-size 50257 --tokenizer files

    Parameters
    ----------
    source
        A Hugging Face folder, nanoGPT's ckpt.pt, or a folder of Megatron's with any number of mp_rank_NN.
    target
        The new checkpoint; `shoal train --init` starts from it, with --init-optimizer as training went on.
    n_heads
        Attention heads, which Megatron's files do not tell.
    vocab_size
        True vocabulary size, which Megatron's files do not tell; the padding after it is dropped.
    iteration
        Which of Megatron's iterations; the latest if left out.
    tokenizer
        A tokenizer.json, a SentencePiece .model, or a folder with one or with vocab.json and merges.txt.
    eod_id
        Id that ends a document; the tokenizer's, the configuration's, or the last one if left out.
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
    """Measure perplexity and bits per byte, WikiText's perplexity by words, LAMBADA's last words.

    Left without a text it takes the validation split of what the model was trained on. Every token is
    scored once, given the tokens before it in its window; the table is written as JSON beside the checkpoint.

    Example: shoal evaluate runs/first

    Example: shoal evaluate runs/first --text held-out.txt --stride 32

    Example: shoal evaluate runs/first --tasks lambada_openai,hellaswag --limit 200

    Example: shoal evaluate runs/first --wikitext wiki.test.tokens --lambada lambada_test.jsonl --nproc 2

    Parameters
    ----------
    checkpoint
        A run folder (its newest good checkpoint), a checkpoint, or a Hugging Face folder.
    text
        A UTF-8 file, taken as one document.
    wikitext
        A file of WikiText; its word cutting is undone, and its own words are counted.
    lambada
        JSON lines with the passage under "text"; the whole last word must be the likeliest.
    data
        A dataset of `shoal prepare` with the model's tokenizer.
    tasks
        Tasks of lm-evaluation-harness, with commas between them; most fetch their data from the network.
    task_folder
        A folder with the YAML files of more such tasks.
    limit
        Examples of each task; all if left out.
    allow_tokenizer_mismatch
        Warn only, where the dataset has another tokenizer of the same size.
    split
        Which split of the dataset.
    seq_len
        Tokens in a window; as many as the model has positions if left out.
    stride
        Tokens between the begins of two windows; a smaller one gives more context and takes longer. As
        many as seq_len if left out.
    batch_size
        Windows computed at once.
    device
        auto takes a CUDA device where there is one.
    tp
        Processes that share the model, each with a part of every layer.
    nproc
        Processes in all, a multiple of tp; the windows are shared out. Figures change by rounding at most.
    json
        Write the figures to this file instead.
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
    """Answer requests for text over HTTP, as OpenAI's completions do, with a page to try the model at /.

    Requests are computed together as they come. Streams, several prompts and samples, stop texts and seeds
    are done; log-probabilities and penalties are refused. Ctrl-C stops.

    Example: shoal serve runs/first   (then open http://127.0.0.1:8000/)

    Example: shoal serve exported --host 0.0.0.0 --token-file token.txt

    Parameters
    ----------
    checkpoint
        A run folder (its newest good checkpoint), a checkpoint, or a Hugging Face folder.
    host
        Address to listen on; any but this machine's own needs a token.
    port
        Port to listen on; 0 takes a free one.
    token_file
        File with the word that clients must send: their API key.
    batch_size
        Texts computed at a time; each takes memory for --max-len tokens.
    max_len
        Tokens of a text, its prompt included; as many as the model has positions if left out.
    max_waiting
        Texts that may wait for that; more are refused for the moment (429).
    time_limit
        Seconds until an answer must be complete, waiting included.
    device
        auto takes a CUDA device where there is one.
    """
    try:
        with loading():
            from shoal.infer.serve.server import Address, Limits, read_token, run
    except ModuleNotFoundError as error:
        raise InputError(f"`shoal serve` needs {error.name}", hint="pip install 'shoal[serve]'") from error

    limits = Limits(batch_size, max_len, max_waiting, request_s=time_limit)
    run(checkpoint, Address(host, port, read_token(token_file)), limits, device)
