"""What is kept of the checkpoints of a run, in the tests that kill or cut power."""

from __future__ import annotations

ONLY_LAST = {"keep_last": 1}
THINNED = {"keep_last": 1, "keep_every": 1, "keep_every_weights_only": True}
