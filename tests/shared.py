"""The folder of real data that may lie in or beside a checkout, or where SHOAL_SHARED says."""

from __future__ import annotations

import os
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[1]
_PLACES = (_ROOT / "shared", _ROOT.parent / "shared")
SHARED = Path(os.environ.get("SHOAL_SHARED") or next(filter(Path.is_dir, _PLACES), _PLACES[-1]))
