"""Which documents of a group are compared, and the clusters that the similar pairs form.

A group holds the documents that share a band. In small groups all pairs are compared, in large ones each
document with the first one of each cluster so far: a group of n documents costs at most 16 n comparisons.
Pairs that are in one cluster already are never compared again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.data.prepare.dedup.verify import PAIR

MAX_ROUNDS = 16

Compare = Callable[[NDArray[Any]], NDArray[Any]]  # PAIR rows -> those that are similar


class Clusters:
    """Connected components of the pairs so far; a cluster's label is its smallest number."""

    def __init__(self) -> None:
        self.numbers, self.labels = np.zeros(0, np.int64), np.zeros(0, np.int64)

    def label(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the label of each document; one that is in no pair is its own."""
        if not len(self.numbers):
            return numbers
        place = np.minimum(np.searchsorted(self.numbers, numbers), len(self.numbers) - 1)
        return np.where(self.numbers[place] == numbers, self.labels[place], numbers)

    def join(self, a: NDArray[np.int64], b: NDArray[np.int64]) -> None:
        """Add pairs."""
        if not len(a):
            return
        from scipy.sparse import coo_array
        from scipy.sparse.csgraph import connected_components

        ends = np.concatenate([self.label(a), self.label(b)])
        old, place = np.unique(ends, return_inverse=True)
        graph = coo_array((np.ones(len(a), np.bool_), (place[: len(a)], place[len(a) :])), (len(old),) * 2)
        _, component = connected_components(graph, directed=False)
        new = old[np.unique(component, return_index=True)[1]][component]  # the smallest label comes first
        numbers = np.union1d(self.numbers, np.concatenate([a, b]))
        labels = self.label(numbers)
        place = np.minimum(np.searchsorted(old, labels), len(old) - 1)
        self.numbers, self.labels = numbers, np.where(old[place] == labels, new[place], labels)


def compare_groups(rows: NDArray[Any], clusters: Clusters, compare: Compare) -> NDArray[Any]:
    """Return the similar pairs of groups (BAND rows, by key and number), and join them in `clusters`."""
    new = np.concatenate([[True], rows["key"][1:] != rows["key"][:-1]])[: len(rows)]
    group, numbers = np.cumsum(new), rows["number"].astype(np.int64)
    large = np.bincount(group)[group] > MAX_ROUNDS
    found = [np.zeros(0, PAIR)]
    for _ in range(MAX_ROUNDS):
        first = np.searchsorted(group, group)  # of each document's group
        labels = clusters.label(numbers)
        open_pairs = np.flatnonzero(labels != labels[first])
        if len(open_pairs):
            pairs = np.zeros(len(open_pairs), PAIR)
            pairs["a"], pairs["b"] = numbers[first[open_pairs]], numbers[open_pairs]
            found.append(compare(pairs))
            clusters.join(found[-1]["a"], found[-1]["b"])
            labels = clusters.label(numbers)
        is_first = first == np.arange(len(first))
        stay = ~is_first & ~(large & (labels == labels[first]))
        group, numbers, large = group[stay], numbers[stay], large[stay]
        if not len(numbers):
            break
    return np.concatenate(found)
