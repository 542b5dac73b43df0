"""What the digests of final weights see, and what the comparison with the record says."""

import json

import pytest

from benchmarks import weights


def write(run, header, body=b"\0\0\0\0", step=6, name="w.safetensors"):
    folder = run / f"checkpoints/step-{step:08d}/model"
    folder.mkdir(parents=True)
    head = json.dumps(header).encode()
    (folder / name).write_bytes(len(head).to_bytes(8, "little") + head + body)
    return weights.digest(run)


def test_a_digest_is_of_the_newest_tensors_whatever_order_their_header_has(tmp_path):
    tensor = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
    expected = write(tmp_path / "a", {"w": tensor, "__metadata__": {}})
    assert write(tmp_path / "b", {"__metadata__": {}, "w": tensor}) == expected
    assert write(tmp_path / "c", {"w": tensor, "__metadata__": {}}, b"\0\0\0\1") != expected
    assert write(tmp_path / "d", {"v": tensor, "__metadata__": {}}) != expected
    assert write(tmp_path / "b", {"w": tensor}, step=3) == expected, "an older step does not count"


@pytest.mark.parametrize(
    ("found", "status", "said"), [("as before", 0, "all as recorded"), ("other", 1, "tp2")]
)
def test_a_changed_digest_is_named(tmp_path, monkeypatch, capsys, found, status, said):
    monkeypatch.setattr(weights, "RECORDS", tmp_path)
    monkeypatch.setattr(weights, "LAYOUTS", ["1", "tp2"])
    monkeypatch.setattr(weights, "STRATEGIES", {})
    digests = {"allreduce under 1": "as before", "allreduce under tp2": "as before"}
    (tmp_path / "weights.json").write_text(json.dumps({"digests": digests}))
    monkeypatch.setattr(weights, "train", lambda layout, *_: found if layout == "tp2" else "as before")
    assert weights.main(["--compare"]) == status
    assert said in capsys.readouterr().out.splitlines()[-1]
