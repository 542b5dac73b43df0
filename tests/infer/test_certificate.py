"""An export proves itself, and says so where it cannot."""

import json

import pytest
from safetensors.torch import load_file, save_file

from shoal.errors import CheckpointError
from shoal.infer import certificate
from shoal.interop.export import export
from tests import commands


def test_the_command_exports_and_proves(trained_run, tmp_path):
    done = commands.run("export", trained_run, tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert "proven equal to" in done.stdout
    written = json.loads((tmp_path / "out/certificate.json").read_text())
    assert written["proven"] is True
    assert 0 <= written["largest_logit_difference"] <= written["limits"]["logits"] < 1e-4
    assert written["perplexity"]["shoal"] == pytest.approx(written["perplexity"]["transformers"], rel=1e-5)
    assert "model.safetensors" in written["files_xxh3_128"]
    card = (tmp_path / "out/README.md").read_text()
    assert "4 steps" in card
    again = commands.run("export", trained_run, tmp_path / "out")
    assert (again.returncode, "exists already" in again.stderr) == (2, True)


def test_an_export_that_computes_something_else_fails_loudly(trained_run, tmp_path):
    checkpoint = export(trained_run, tmp_path / "out")
    file = tmp_path / "out/model.safetensors"
    tensors = load_file(file)
    tensors[next(name for name in tensors if name.endswith("ln_1.bias"))] += 0.01
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="does not compute the same as"):
        certificate.certify(checkpoint, tmp_path / "out")
    assert json.loads((tmp_path / "out/certificate.json").read_text())["proven"] is False


def test_without_transformers_it_says_that_nothing_was_proven(trained_run, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(certificate.importlib.util, "find_spec", lambda name: None)
    checkpoint = export(trained_run, tmp_path / "out")
    assert certificate.certify(checkpoint, tmp_path / "out") is False
    assert not (tmp_path / "out/certificate.json").exists()
