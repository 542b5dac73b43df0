"""Formulas of cost, and the link that explains measured times."""

import pytest

from shoal.plan.link_cost import Cost, Link, all_reduce_cost, fit_link, hierarchical_cost

ETHERNET = Link(latency_s=50e-6, bytes_per_s=1.25e9)


def test_seconds_are_rounds_of_latency_and_bytes_of_bandwidth():
    assert Cost(3, 1_000_000).seconds(Link(0.001, 1_000_000)) == pytest.approx(1.003)


def test_one_rank_needs_nothing():
    assert all_reduce_cost("chunked_ring", 1, 1e6) == Cost(0, 0)


def test_short_tensors_go_by_tree_or_halving_and_long_ones_in_chunks():
    def fastest(num_bytes):
        algorithms = ("ring", "chunked_ring", "tree")
        return min(algorithms, key=lambda a: all_reduce_cost(a, 16, num_bytes).seconds(ETHERNET))

    assert fastest(1_000) == "tree"
    assert fastest(100_000_000) == "chunked_ring"


def test_a_link_is_found_again_from_its_times():
    costs = [all_reduce_cost("chunked_ring", 4, 1 << power) for power in range(10, 28, 2)]
    link = fit_link(costs, [cost.seconds(ETHERNET) for cost in costs])
    assert link.latency_s == pytest.approx(ETHERNET.latency_s)
    assert link.bytes_per_s == pytest.approx(ETHERNET.bytes_per_s)


def test_noise_gives_no_negative_latency():
    link = fit_link([Cost(2, 100), Cost(2, 200)], [0.9e-4, 2.1e-4])
    assert link.latency_s == 0
    assert link.bytes_per_s == pytest.approx(1e6, rel=0.1)


def test_times_that_tell_of_no_bandwidth_give_no_link():
    assert fit_link([Cost(2, 100), Cost(2, 100)], [1.0, 1.1]) is None
    assert fit_link([Cost(2, 100), Cost(2, 10_000)], [1.0, 0.5]) is None


def test_between_hosts_a_tree_inside_and_a_ring_across():
    assert hierarchical_cost(4, 2, 1e6) == Cost(4 + 2, 4e6 + 1e6)
    assert hierarchical_cost(8, 1, 1e6) == all_reduce_cost("tree", 8, 1e6)
    assert hierarchical_cost(1, 8, 1e6) == all_reduce_cost("chunked_ring", 8, 1e6)
