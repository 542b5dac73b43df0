"""A description of a network with every kind of layer, for adapters of old programs."""

from __future__ import annotations

EVERY_KIND = """
input = [2, 9, 9]
classes = 3
[[layers]]
kind = "conv"
out = 4
kernel = 3
padding = 1
[[layers]]
kind = "relu"
[[layers]]
kind = "max_pool"
kernel = 3
stride = 2
padding = 1
[[layers]]
kind = "residual"
body = [
  { kind = "relu" },
  { kind = "conv", out = 6, kernel = 3, stride = 2, padding = 1, bias = false },
  { kind = "batch_norm" },
  { kind = "relu" },
]
shortcut = [{ kind = "subsample", out = 6, stride = 2 }]
[[layers]]
kind = "relu"
[[layers]]
kind = "residual"
body = [{ kind = "batch_norm" }, { kind = "sigmoid" }]
[[layers]]
kind = "AVERAGE"
[[layers]]
kind = "linear"
out = 5
[[layers]]
kind = "sigmoid"
[[layers]]
kind = "linear"
out = "classes"
bias = false
"""
WINDOWS = 'kind = "avg_pool"\nkernel = 2\nstride = 2\nceil = true\n[[layers]]\nkind = "AVERAGE"'
ALL = EVERY_KIND.replace('kind = "AVERAGE"', WINDOWS).replace("AVERAGE", "global_avg_pool")
