"""Imported by processes that others are forked from: makes cheap what each run of a test would pay for anew.

The speed of this machine is measured with small products, as no test looks at the figure. The first picture,
which loads matplotlib's fonts, is drawn here.
"""

from io import BytesIO

from matplotlib.figure import Figure

from shoal.runtime import speed

speed._SIZE["cpu"], speed._BUDGET_S = 256, 0.0
Figure(layout="constrained").add_subplot(xlabel="x", title="x").figure.savefig(BytesIO())
