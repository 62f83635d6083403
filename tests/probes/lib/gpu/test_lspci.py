from __future__ import annotations

import pytest

from probes.lib.gpu import lspci
from tests.support import captures

VERBOSE = """\
0000:10:08.0 PCI bridge [0604]: Broadcom / LSI PEX890xx PCIe Gen 5 Switch [1000:c030] (rev b0) (prog-if 00 [Normal decode])
\tPhysical Slot: 7-1
\tNUMA node: 1
\tIOMMU group: 33
\tCapabilities: [68] Express (v2) Upstream Port, MSI 00
\t\tLnkCap:\tPort #0, Speed 32GT/s, Width x16, ASPM not supported
\t\tLnkSta:\tSpeed 16GT/s (downgraded), Width x8 (downgraded)
\tCapabilities: [148 v1] Access Control Services
\t\tACSCap:\tSrcValid+ TransBlk+ ReqRedir+ CmpltRedir+ UpstreamFwd+ EgressCtrl+ DirectTrans+
\t\tACSCtl:\tSrcValid+ TransBlk- ReqRedir+ CmpltRedir+ UpstreamFwd+ EgressCtrl- DirectTrans-
\tKernel driver in use: pcieport

0000:01:00.0 3D controller [0302]: NVIDIA Corporation Device [10de:2bb5] (rev ff) (prog-if ff)
\t!!! Unknown header type 7f
\tKernel driver in use: nvidia
"""


def test_details_of_a_bridge() -> None:
    devices, damaged = lspci.parse(VERBOSE)
    assert damaged == []
    bridge = devices["0000:10:08.0"]
    assert (bridge.speed_gts, bridge.width, bridge.speed_max_gts, bridge.width_max) == (16.0, 8, 32.0, 16)
    assert (bridge.slot, bridge.numa_node, bridge.iommu_group, bridge.driver) == ("7-1", 1, 33, "pcieport")
    assert bridge.acs is not None
    assert bridge.acs.flags == ("SrcValid", "ReqRedir", "CmpltRedir", "UpstreamFwd")
    assert bridge.acs.redirects


def test_a_card_that_answers_with_ones_is_lost() -> None:
    devices, _ = lspci.parse(VERBOSE)
    assert devices["0000:01:00.0"].is_gpu
    assert devices["0000:01:00.0"].lost
    assert not devices["0000:10:08.0"].lost


def test_without_root() -> None:
    devices, _ = lspci.parse("0000:10:08.0 PCI bridge [0604]: Vendor Device [1000:c030]\n\tCapabilities: <access denied>\n")
    bridge = devices["0000:10:08.0"]
    assert bridge.denied
    assert bridge.acs is None


def test_damage_is_named() -> None:
    devices, damaged = lspci.parse("0000:01:00.0 3D controller: no ids\n0000:02:00.0 3D controller [0302]: A B [10de:2bb5]\nnonsense\n")
    assert list(devices) == ["0000:02:00.0"]
    assert len(damaged) == 1


@captures.needs_captures
@pytest.mark.parametrize("name", captures.names("lspci_nn__*"))
def test_captures(name: str) -> None:
    text = captures.read(name)
    devices, damaged = lspci.parse(text)
    assert damaged == []
    assert len(devices) == len(text.splitlines())
    assert sum(device.is_gpu for device in devices.values()) == 8
    assert sum(device.is_nvswitch for device in devices.values()) == 6


def space(*capabilities: tuple[int, int, int]) -> bytes:
    """Return a configuration space with extended capabilities: (offset, id, control at +6); each points to the next."""
    config = bytearray(4096)
    for place, (offset, number, control) in enumerate(capabilities):
        following = capabilities[place + 1][0] if place + 1 < len(capabilities) else 0
        config[offset : offset + 4] = (number | 1 << 16 | following << 20).to_bytes(4, "little")
        config[offset + 6 : offset + 8] = control.to_bytes(2, "little")
    return bytes(config)


def test_acs_of_the_configuration_space() -> None:
    acs = lspci.acs_of_config(space((0x100, 0x0001, 0), (0x148, 0x000D, 0b0011101)))
    assert acs is not None
    assert acs.flags == ("SrcValid", "ReqRedir", "CmpltRedir", "UpstreamFwd")
    quiet = lspci.acs_of_config(space((0x100, 0x000D, 0b1)))
    assert quiet is not None
    assert not quiet.redirects


def test_spaces_without_acs() -> None:
    assert lspci.acs_of_config(space((0x100, 0x0001, 0))) is None
    assert lspci.acs_of_config(bytes(4096)) is None
    assert lspci.acs_of_config(b"\xff" * 4096) is None
    assert lspci.acs_of_config(bytes(256)) is None
    with pytest.raises(PermissionError):
        lspci.acs_of_config(bytes(64))


def test_a_list_of_capabilities_that_never_ends() -> None:
    config = bytearray(space((0x100, 0x0001, 0)))
    config[0x100:0x104] = (1 | 1 << 16 | 0x100 << 20).to_bytes(4, "little")
    assert lspci.acs_of_config(bytes(config)) is None
