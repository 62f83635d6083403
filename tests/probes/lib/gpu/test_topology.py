from __future__ import annotations

import random

import pytest

from probes.lib.gpu import topology
from tests.support import captures
from tests.support.fake_smi import SENTINELS
from tests.support.smi_topology import dgx, matrix, peers, two_switches

EIGHT = [f"GPU{place}" for place in range(8)]
NICS = [f"NIC{place}" for place in range(8)]
NAMES = [f"mlx5_{place}" for place in range(8)]
NUMA = [place // 4 for place in range(8)]
WITH_NICS = matrix([*EIGHT, *NICS], dgx, numa=NUMA, nics=NAMES)


@captures.needs_captures
@pytest.mark.parametrize("name", captures.names("topo_m__*"))
def test_captures_raw_and_pasted(name: str) -> None:
    text = captures.read(name)
    found = topology.parse_matrix(text)
    assert found.complete
    assert len(found.links) == len(found.devices) * (len(found.devices) - 1)
    assert set(found.cpu_affinity) == set(found.numa_node) == set(found.gpus)
    pasted = text.replace("\x1b[4m", "").replace("\x1b[0m", "").replace("\t", "   ")
    assert topology.parse_matrix(pasted) == found


@captures.needs_captures
def test_a_capture_in_detail() -> None:
    found = topology.parse_matrix(captures.read("topo_m__8xH200-nv18-8nic-rocep.txt"))
    assert found.links["GPU0", "GPU7"] == topology.Link("NV", 18)
    assert found.links["NIC3", "GPU2"].kind == "PIX"
    assert found.cpu_affinity["GPU4"] == "56-111,168-223"
    # The capture ends before the last name.
    assert found.nic_names["NIC6"] == "rocep205s0"
    assert "NIC7" not in found.nic_names


@captures.needs_captures
@pytest.mark.parametrize("name", captures.names("topo_p2p_*"))
def test_captures_of_peers(name: str) -> None:
    found = topology.parse_p2p(captures.read(name))
    assert found.damaged == []
    assert set(found.states.values()) == {"OK"}
    assert len(found.states) == 56


@captures.needs_captures
@pytest.mark.parametrize("name", [name for name in captures.names("*.txt") if "topo" not in name])
def test_other_captures_are_refused_by_name(name: str) -> None:
    with pytest.raises(topology.NotATopology) as caught:
        topology.parse_matrix(captures.read(name))
    assert str(caught.value)


@pytest.mark.parametrize("pasted", [False, True])
def test_generated(pasted: bool) -> None:
    found = topology.parse_matrix(matrix([*EIGHT, *NICS], dgx, numa=NUMA, nics=NAMES, pasted=pasted))
    assert found.complete
    assert found.gpus == tuple(EIGHT)
    assert found.nics == tuple(NICS)
    assert found.nic_names == dict(zip(NICS, NAMES, strict=True))
    assert [found.numa_node[name] for name in EIGHT] == NUMA
    assert topology.groups(found, EIGHT, ("PIX",)) == [(name,) for name in EIGHT]
    assert topology.groups(found, [*EIGHT, *NICS], ("PIX",)) == [
        ("GPU0", "GPU1", "NIC0", "NIC1"), ("GPU2", "GPU3", "NIC2", "NIC3"), ("GPU4", "GPU5", "NIC4", "NIC5"), ("GPU6", "GPU7", "NIC6", "NIC7"),
    ]  # fmt: skip


def test_affinity_that_is_not_available() -> None:
    found = topology.parse_matrix(matrix(EIGHT, two_switches))
    assert found.complete
    assert found.cpu_affinity == {}
    assert found.numa_node == {}


def test_old_words_and_old_names() -> None:
    text = "\tGPU0\tGPU1\tmlx5_0\tCPU Affinity\nGPU0\t X \tSOC\tPHB\t0-7\nGPU1\tSOC\t X \tSOC\t8-15\nmlx5_0\tPHB\tSOC\t X \t\n"
    found = topology.parse_matrix(text)
    assert found.complete
    assert found.links["GPU0", "GPU1"].kind == "SYS"
    assert found.nics == ("mlx5_0",)


def test_prose_and_prompts_around_it() -> None:
    text = f"$ nvidia-smi topo -m\n\nGPU0 is the first one:\n{matrix(EIGHT, two_switches, numa=NUMA)}\ndone\n"
    assert topology.parse_matrix(text).complete


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "empty"),
        ("hello", "no header"),
        ("Failed to run topology matrix\n", "RDMA"),
        ("Failed to initialize NVML: Driver/library version mismatch\n", "driver"),
        ("No devices were found\n", "no GPU"),
        (matrix(EIGHT, two_switches).splitlines()[0], "no rows"),
        (matrix(EIGHT, two_switches) * 2, "2 matrices"),
        ("\tGPU0\tGPU0\tCPU Affinity\nGPU0\t X \t X \t0-7\n", "two columns"),
        ("\t" + "\t".join(f"GPU{place}" for place in range(300)) + "\tCPU Affinity\n", "more than a host has"),
    ],
)
def test_what_is_no_matrix_is_refused_with_the_reason(text: str, words: str) -> None:
    with pytest.raises(topology.NotATopology, match=words):
        topology.parse_matrix(text)


def test_halves_that_disagree_are_both_doubted() -> None:
    text = matrix(EIGHT, lambda a, b: "PIX" if (a, b) == (0, 7) else two_switches(a, b))
    found = topology.parse_matrix(text)
    assert found.asymmetric == [("GPU0", "GPU7", "PIX", "SYS")]
    assert ("GPU0", "GPU7") not in found.links
    assert ("GPU7", "GPU0") not in found.links
    assert not found.complete


def changed(row: int, column: int, cell: str, *, pasted: bool = False) -> str:
    lines = WITH_NICS.splitlines()
    cells = lines[row + 1].split("\t")
    cells[column + 1] = cell
    lines[row + 1] = "\t".join(cells)
    text = "\n".join(lines)
    return text.replace("\t", "   ") if pasted else text


@pytest.mark.parametrize("pasted", [False, True])
@pytest.mark.parametrize("cell", [*SENTINELS, "NV0", "NV180", "nv18", "PIXX", "0: PIX", "X", " X ", "OK", "-1"])
def test_a_cell_that_is_none_is_named_and_costs_no_other_pair(cell: str, pasted: bool) -> None:
    sound = topology.parse_matrix(WITH_NICS)
    for row, column in ((0, 1), (3, 9), (9, 3), (15, 14)):
        found = topology.parse_matrix(changed(row, column, cell, pasted=pasted))
        assert not found.complete
        assert found.damaged
        wrong = {pair for pair, link in found.links.items() if sound.links[pair] != link}
        assert wrong == set()
        if not pasted:
            lost = set(sound.links) - set(found.links)
            assert lost == {(sound.devices[row], sound.devices[column]), (sound.devices[column], sound.devices[row])}


@pytest.mark.parametrize("pasted", [False, True])
def test_no_cut_is_complete_but_at_the_end_of_the_matrix(pasted: bool) -> None:
    text = matrix([*EIGHT, *NICS], dgx, numa=NUMA, nics=NAMES, pasted=pasted)
    sound = topology.parse_matrix(text)
    last = text.index("\n\nLegend")
    needed = text.rstrip().index("X", text.index("\nNIC7"))
    for end in range(0, last, 7):
        try:
            found = topology.parse_matrix(text[:end])
        except topology.NotATopology:
            continue
        assert all(sound.links.get(pair) == link for pair, link in found.links.items()), end
        assert not found.complete or end > needed, end


def test_dropped_lines_and_columns() -> None:
    lines = WITH_NICS.splitlines()
    for place in range(1, 17):
        found = topology.parse_matrix("\n".join(lines[:place] + lines[place + 1 :]))
        assert not found.complete
        assert found.missing_rows() == (found.devices[place - 1],)
    for column in range(1, 17):
        rows = [line.split("\t") for line in lines[:17]]
        text = "\n".join("\t".join(cells[:column] + cells[column + 1 :]) for cells in rows)
        assert not topology.parse_matrix(text).complete


def test_rows_that_come_twice_or_from_nowhere() -> None:
    lines = WITH_NICS.splitlines()
    assert not topology.parse_matrix("\n".join([*lines[:17], lines[3]])).complete
    assert not topology.parse_matrix("\n".join([*lines[:17], lines[3].replace("GPU2", "GPU9")])).complete


def test_labels_glued_to_a_row() -> None:
    lines = WITH_NICS.splitlines()
    for label in ("0: ", "[1,0]<stdout>:", "host: "):
        text = "\n".join([*lines[:4], label + lines[4], *lines[5:]])
        assert not topology.parse_matrix(text).complete


def test_random_damage_makes_nothing_of_nothing() -> None:
    chance = random.Random(5)  # noqa: S311 - the same damage every time
    sound = topology.parse_matrix(WITH_NICS)
    for _ in range(300):
        place = chance.randrange(len(WITH_NICS.partition("\n\nLegend")[0]))
        text = WITH_NICS[:place] + chance.choice("\x00\t xX9N\n\x1b-") + WITH_NICS[place + chance.randrange(3) :]
        try:
            found = topology.parse_matrix(text)
        except topology.NotATopology:
            continue
        if found.complete and found.devices == sound.devices:
            # A digit more or less in an affinity, or another number of the same links both ways, cannot be seen.
            assert {pair: link.kind for pair, link in found.links.items()} == {pair: link.kind for pair, link in sound.links.items()}


# topo -p2p -----------------------------------------------------------------------------------------------------------


def test_peers() -> None:
    found = topology.parse_p2p(peers(4, lambda a, b: "CNS" if a // 2 != b // 2 else "OK"))
    assert found.damaged == []
    assert found.states["GPU0", "GPU1"] == "OK"
    assert found.states["GPU0", "GPU2"] == "CNS"


@pytest.mark.parametrize("word", [*SENTINELS, "YES", "0K", "X"])
def test_words_that_are_none(word: str) -> None:
    found = topology.parse_p2p(peers(4, lambda a, b: word if (a, b) == (1, 2) else "OK"))
    assert ("GPU1", "GPU2") not in found.states
    assert found.damaged
    assert found.states["GPU3", "GPU0"] == "OK"


def test_peers_that_were_cut() -> None:
    text = peers(4)
    assert topology.parse_p2p("\n".join(text.splitlines()[:3])).damaged
    with pytest.raises(topology.NotATopology):
        topology.parse_p2p(text.splitlines()[0])
    with pytest.raises(topology.NotATopology):
        topology.parse_p2p("Failed to run topology matrix")
