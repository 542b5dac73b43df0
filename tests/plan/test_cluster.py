"""Clusters from options and files; what is wrong is told with its line."""

import pytest

from shoal.errors import InputError
from shoal.plan.cluster import Cluster, device_names, load_cluster, parse_link

WHOLE = """
nodes = 4
per_node = 8
across = "400gbit,10us"
[device]
like = "h100"
usd_per_hour = 2.5
"""


def written(tmp_path, text):
    file = tmp_path / "cluster.toml"
    file.write_text(text)
    return file


def test_gpus_without_nodes_are_those_in_all():
    cluster = load_cluster(512, "v100-32")
    assert (cluster.per_node, cluster.nodes, cluster.world_size) == (8, 64, 512)


def test_a_link_without_a_latency_has_that_of_the_device(tmp_path):
    assert load_cluster(8, "h100", nodes=2, link="200gbit").across == parse_link("200gbit,10us")
    assert load_cluster(8, "cpu-8", nodes=2, link="1gbit").across == parse_link("1gbit,100us")
    text = WHOLE.replace("400gbit,10us", "200gbit")
    assert load_cluster(0, "", file=written(tmp_path, text)).across == parse_link("200gbit,10us")


def test_gpus_with_nodes_are_those_of_a_node():
    cluster = load_cluster(4, "h100", nodes=2, link="400gbit,5us")
    assert cluster.world_size == 8
    assert cluster.across == parse_link("400gbit,5us")
    assert cluster.device.flops["bf16"] == 989e12


def test_processes_share_a_cpu():
    one, four = load_cluster(1, "cpu-8"), load_cluster(4, "cpu-8")
    assert four.device.flops["fp32"] == one.device.flops["fp32"] / 4
    assert four.device.memory_bytes == one.device.memory_bytes / 4
    assert four.nodes == 1


@pytest.mark.parametrize("name", device_names())
def test_every_device_of_the_table_makes_a_cluster(name):
    assert isinstance(load_cluster(1, name), Cluster)


def test_an_unknown_device_is_told_the_nearest_name():
    with pytest.raises(InputError, match="unknown device 'h1000'\n  hint: did you mean 'h100'"):
        load_cluster(8, "h1000")


@pytest.mark.parametrize(("gpus", "nodes"), [(0, 1), (-8, 0), (8, -1), (1 << 20, 2)])
def test_impossible_numbers_are_refused(gpus, nodes):
    with pytest.raises(InputError, match="must be 1 to"):
        load_cluster(gpus, "h100", nodes)


def test_a_node_that_would_not_be_full_is_refused():
    with pytest.raises(InputError, match="does not fill nodes of 8"):
        load_cluster(12, "h100")


def test_a_file_takes_from_the_table_what_it_leaves_out(tmp_path):
    cluster = load_cluster(0, "", file=written(tmp_path, WHOLE))
    assert (cluster.world_size, cluster.device.usd_per_hour) == (32, 2.5)
    assert cluster.inside == parse_link("3600gbit,3us")
    assert cluster.across == parse_link("400gbit,10us")


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("nodes = 4", "nodes = -4", "line 2: nodes = -4 must be 1 to"),
        ("nodes = 4", "nodes = 4\nnoodes = 3", "line 3: unknown key noodes\n  hint: did you mean 'nodes'"),
        ("per_node = 8", "per_node = 2000000", "line 3: per_node = 2000000 must be 1 to"),
        ('across = "400gbit,10us"', 'across = "fast"', "line 4: across: 'fast' is not a link rate"),
        ('like = "h100"', 'like = "h10"', "line 6: unknown device 'h10'\n  hint: use h100"),
        ('like = "h100"', "", "is missing"),
        ("usd_per_hour = 2.5", "usd_per_hour = -1", "line 7: usd_per_hour = -1 must be above 0"),
        ("usd_per_hour = 2.5", "memory_gib = nan", "line 7: memory_gib = nan must be above 0"),
        ("usd_per_hour = 2.5", "memory_gib = true", "line 7: memory_gib = True must be above 0"),
        ("usd_per_hour = 2.5", "flops = { fp32 = -1.0 }", "fp32 = -1.0 must be above 0"),
        ("usd_per_hour = 2.5", "kind = 3", "line 7: kind = 3 must be cuda or cpu"),
        ("nodes = 4", "nodes = ", "not valid TOML.*line 2"),
        ("[device]", "[devise]", "unknown key devise"),
    ],
)
def test_what_is_wrong_in_a_file_is_told_with_its_line(tmp_path, old, new, problem):
    file = written(tmp_path, WHOLE.replace(old, new))
    with pytest.raises(InputError, match=problem) as caught:
        load_cluster(0, "", file=file)
    assert str(file) in caught.value.message


def test_a_missing_file_is_told(tmp_path):
    with pytest.raises(InputError, match="cannot be read"):
        load_cluster(0, "", file=tmp_path / "none.toml")
