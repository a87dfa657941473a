"""The current holder of a device that several tenants use in turns."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple


class Tenant(NamedTuple):
    """A model or an engine that can leave a device and return complete.

    Attributes:
        leave: Frees the device.
        enter: Takes it again.
    """

    leave: Callable[[], None]
    enter: Callable[[], None]


class TenantResidency:
    """Shares one set of devices among tenants in turns. At most one is resident, and it stays until another needs the
    devices.

    A tenant that joins is off the device. If devices are not shared, give each tenant a separate `TenantResidency`.
    """

    def __init__(self) -> None:
        self._tenants: dict[str, Tenant] = {}
        self._resident: str | None = None

    @property
    def resident(self) -> str | None:
        """Name of the tenant on the device."""
        return self._resident

    def join(self, name: str, tenant: Tenant, *, present: bool = False) -> None:
        """Add a tenant. With `present` it is on the device already."""
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
        """Set the resident, after the caller itself has moved the last one out and this one in."""
        self._resident = name
