"""Network links of a node and the rates that they promise, read from /sys on the node itself."""

from __future__ import annotations

from pathlib import Path

SYS = Path("/sys")


def ethernet_rate(interface: str, sys: Path = SYS) -> float | None:
    """Return the rate of a network interface in bytes/s; None if it is unknown, as for virtual ones.

    Args:
        interface: Name of the interface, such as `eth0`.
        sys: Root of the files.
    """
    try:
        megabits = int((sys / "class/net" / interface / "speed").read_text())
    except (OSError, ValueError):
        return None
    return megabits * 1e6 / 8 if interface and megabits > 0 else None


def infiniband_rates(sys: Path = SYS) -> dict[str, float]:
    """Return the rate of each active port of InfiniBand or RoCE in bytes/s, by device and port such as `mlx5_0/1`.

    Args:
        sys: Root of the files.
    """
    rates = {}
    for port in sorted((sys / "class/infiniband").glob("*/ports/*")):
        try:
            state, rate = (port / "state").read_text(), (port / "rate").read_text()
            gigabits = float(rate.split()[0])
        except (OSError, ValueError, IndexError):
            continue
        if "ACTIVE" in state:
            rates[f"{port.parent.parent.name}/{port.name}"] = gigabits * 1e9 / 8
    return rates


def inactive_infiniband(sys: Path = SYS) -> list[str]:
    """Return the ports of InfiniBand that have a cable and are not active, such as `mlx5_0/1 (INIT)`.

    Args:
        sys: Root of the files.
    """
    found = []
    for port in sorted((sys / "class/infiniband").glob("*/ports/*")):
        try:
            state, physical = (port / "state").read_text(), (port / "phys_state").read_text()
        except OSError:
            continue
        if "ACTIVE" not in state and "LinkUp" in physical:
            found.append(f"{port.parent.parent.name}/{port.name} ({state.partition(':')[2].strip()})")
    return found
