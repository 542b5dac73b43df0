"""Imported by processes that others are forked from: makes cheap what each run of a test would pay for anew.

The speed of this machine is measured with small products, as no test looks at the figure. The first picture,
which loads matplotlib's fonts, is drawn here, and the first array made, for which pyarrow loads pandas. The
ranges of a preparation have RANGE_BYTES where that is set, and each process looks itself for the folder of
temporary files. The curve of a run, which is half of a short one's time, is only drawn where CURVES is set.
"""

import os
import tempfile
from io import BytesIO

import pyarrow as pa
from matplotlib.figure import Figure

from shoal.data.prepare import steps
from shoal.runtime import speed
from shoal.train.curve import Curve

usual = steps.range_size
steps.range_size = lambda sources: int(os.environ.get("RANGE_BYTES", 0)) or usual(sources)
draw = Curve.draw
Curve.draw = lambda curve: draw(curve) if "CURVES" in os.environ else bool(curve._train)
speed._SIZE["cpu"], speed._BUDGET_S = 256, 0.0
Figure(layout="constrained").add_subplot(xlabel="x", title="x").figure.savefig(BytesIO())
pa.array([""])
tempfile.tempdir = None
