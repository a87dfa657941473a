"""The current holder of a device that several tenants use in turns."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class Tenant:
    """Something that can leave a device and come back complete.

    Args:
        leave: Frees the device.
        enter: Takes it again.
    """

    leave: Callable[[], None]
    enter: Callable[[], None]


class Residency:
    """Time-shares one set of devices among tenants; at most one is resident, and it stays until another needs the
    devices.

    A tenant that joins is off the device. If devices are not shared, give each tenant a `Residency` of its own.
    """

    def __init__(self) -> None:
        self._tenants: dict[str, Tenant] = {}
        self._resident: str | None = None

    @property
    def resident(self) -> str | None:
        """Name of the tenant on the device."""
        return self._resident

    def join(self, name: str, tenant: Tenant, *, present: bool = False) -> None:
        """Admit a tenant; `present` says that it is on the device already."""
        assert not present or self._resident is None, f"{self._resident} is on the device"
        self._tenants[name] = tenant
        if present:
            self._resident = name

    @contextmanager
    def hold(self, name: str) -> Iterator[None]:
        """Keep the tenant on the device inside the context; it stays afterwards until another needs the device."""
        if self._resident != name:
            if self._resident is not None:
                self._tenants[self._resident].leave()
                self._resident = None
            self._tenants[name].enter()
            self._resident = name
        yield

    def vacate(self) -> None:
        """Have the resident leave the device."""
        resident, self._resident = self._resident, None
        if resident is not None:
            self._tenants[resident].leave()

    def hand_over(self, name: str) -> None:
        """Note that the caller has brought this tenant in, and the one before out, by itself."""
        self._resident = name
