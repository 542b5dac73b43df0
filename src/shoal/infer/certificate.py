"""The proof of an export: transformers loads the folder and computes what the checkpoint computes."""

from __future__ import annotations

import importlib.util
import math
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.errors import CheckpointError
from shoal.infer.load import load_decoder
from shoal.models.decoder import Decoder
from shoal.runtime.files import hash_file, write_json
from shoal.runtime.log import log
from shoal.scoring import perplexity

LOGITS, LOSS = 5e-6, 1e-5  # the largest differences that rounding makes in fp32; of logits of order 1
_SEQUENCES, _LENGTH = 4, 64


def certify(checkpoint: Path, folder: Path) -> bool:
    """Compare the exported `folder` with its checkpoint and write certificate.json into it.

    Returns whether it was compared: transformers may not be installed. A CheckpointError, with the folder
    left as it is for a look, says that the two differ.
    """
    if importlib.util.find_spec("transformers") is None:
        log.warning("warning: not proven: transformers is not installed (pip install transformers)")
        return False
    decoder, _ = load_decoder(checkpoint, torch.device("cpu"))
    found = _compare(decoder, folder)
    limits = found["limits"]
    proven = found["largest_logit_difference"] <= limits["logits"]
    proven = proven and found["loss_difference"] <= limits["loss"]
    certificate = {
        "checkpoint": checkpoint.name,
        "proven": proven,
        **found,
        "files_xxh3_128": {file.name: hash_file(file) for file in sorted(folder.iterdir())},
        "versions": {name: version(name) for name in ("shoal", "torch", "transformers", "safetensors")},
    }
    write_json(folder / "certificate.json", certificate)
    if not proven:
        raise CheckpointError(
            f"{folder} does not compute the same as {checkpoint}: logits differ by "
            f"{found['largest_logit_difference']:.1e}, the loss by {found['loss_difference']:.1e}",
            hint=f"do not use it; {folder / 'certificate.json'} has the figures",
        )
    return True


@torch.inference_mode()
def _compare(decoder: Decoder, folder: Path) -> dict[str, Any]:
    from transformers import AutoModelForCausalLM

    shape = decoder.shape
    length = min(_LENGTH, shape.max_seq_len)
    rng = np.random.default_rng(0)
    tokens = torch.from_numpy(rng.integers(0, shape.vocab_size, (_SEQUENCES, length)))
    theirs = AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="sdpa", dtype=torch.float32
    ).eval()
    ours_btv = decoder(tokens)[..., : shape.vocab_size]
    theirs_btv = theirs(tokens).logits
    if theirs_btv.shape != ours_btv.shape:
        return {
            "largest_logit_difference": math.inf,
            "loss_difference": math.inf,
            "limits": {"logits": LOGITS, "loss": LOSS},
        }
    difference = (ours_btv - theirs_btv).abs().max().item()
    scale = max(1.0, ours_btv.abs().max().item())
    losses = [_loss(logits_btv, tokens) for logits_btv in (ours_btv, theirs_btv)]
    return {
        "largest_logit_difference": difference,
        "loss_difference": abs(losses[0] - losses[1]),
        "perplexity": {"shoal": perplexity(losses[0]), "transformers": perplexity(losses[1])},
        "limits": {"logits": LOGITS * scale, "loss": LOSS * scale},
        "sequences": {
            "count": _SEQUENCES,
            "tokens": length,
            "drawn": "uniformly from the vocabulary, seed 0",
        },
    }


def _loss(logits_btv: Tensor, tokens_bt: Tensor) -> float:
    picked = logits_btv[:, :-1].double().log_softmax(dim=-1).gather(2, tokens_bt[:, 1:, None])
    return -picked.mean().item()
