"""Jobs for worker processes of the tests."""

from __future__ import annotations

import os
import sys
import time

from shoal.errors import DataError


class Broken:
    """A job that fails as libraries do when they are loaded."""

    def __init__(self, spec):
        sys.exit("this library is broken")


class Where:
    """A job that tells which node of a Ray cluster did it."""

    def __init__(self, spec):
        self._factor = spec["factor"]

    def run(self, item, check):
        import ray

        check(0)
        if item["value"] < 0:
            raise DataError("a negative value", hint="use others")
        time.sleep(0.2)
        node = ray.get_runtime_context().get_node_id()
        return {"value": item["value"] * self._factor, "node": node}


class Who:
    """A job that tells the process that did it."""

    def __init__(self, spec):
        pass

    def run(self, item, check):
        if item.get("fail"):
            raise DataError("this one fails")
        time.sleep(0.1)  # so that both processes get some
        return {"pid": os.getpid()}
