"""Who may use the server: keys and quotas."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rl_core.errors import ConfigError
from rl_launch.tinker.refusal import RequestRefused

LOCAL = "local"
"""Name of the tenant of a server without keys."""

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


class _TenantEntry(BaseModel):
    """A tenant in the file of keys."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    sha256: str = Field(pattern=r"^[0-9a-fA-F]{64}$")
    models: int | None = Field(default=None, ge=0)
    steps: int | None = Field(default=None, ge=0)
    tokens: int | None = Field(default=None, ge=0)
    storage_gb: float | None = Field(default=None, ge=0)


@dataclass(frozen=True)
class Tenant:
    """Somebody with a key.

    Args:
        name: Name of the tenant.
        quotas: Maximum of `models` at a time, of optimizer `steps` and of `tokens` trained and sampled in total, and of
            bytes of checkpoints (`storage`); what is missing is not limited.
    """

    name: str
    quotas: Mapping[str, float]

    def check(self, quota: str, needed: float) -> None:
        """Check that a quota is sufficient.

        Raises:
            RequestRefused: If it is not.
        """
        limit = self.quotas.get(quota)
        if limit is not None and needed > limit:
            raise RequestRefused(f"the quota of {quota} of this key, {limit:g}, is used up; ask the server's operator")


class Tenants:
    """All tenants, by name.

    Args:
        tenants: Tenants by the SHA-256 of their keys in lower case; empty for one tenant with any key.
    """

    def __init__(self, tenants: Mapping[str, Tenant]) -> None:
        self._by_digest = tenants
        self._by_name = {tenant.name: tenant for tenant in tenants.values()} or {LOCAL: Tenant(LOCAL, {})}

    def __getitem__(self, name: str) -> Tenant:
        # A tenant who was removed from the file may have requests that wait.
        return self._by_name.get(name, Tenant(name, dict.fromkeys(("models", "steps", "tokens", "storage"), 0)))

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_name)

    def of_key(self, key: str) -> Tenant:
        """Return the tenant with a key.

        Raises:
            RequestRefused: If nobody has it.
        """
        if not key:
            raise RequestRefused("the request has no API key; set TINKER_API_KEY", status=401)
        if not self._by_digest:
            return self._by_name[LOCAL]
        found = self._by_digest.get(hashlib.sha256(key.encode(errors="surrogateescape")).hexdigest())
        if found is None:
            raise RequestRefused("the API key is not known here", status=401)
        return found

    @classmethod
    def read(cls, path: str | None) -> Tenants:
        """Read the file of keys.

        Raises:
            ConfigError: If it is not one.
        """
        if path is None:
            return cls({})
        file = Path(path).expanduser()
        try:
            # All scalars as text: a digest of digits only is none of YAML's numbers.
            given = yaml.load(file.read_text(encoding="utf-8"), Loader=yaml.BaseLoader)
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise ConfigError(f"tinker.keys_file: {file} cannot be read as YAML or JSON: {error}") from None
        if not isinstance(given, dict) or not given:
            raise ConfigError(f"tinker.keys_file: {file} must be a mapping from names of tenants to their keys")
        tenants: dict[str, Tenant] = {}
        for name, entry in given.items():
            if not isinstance(name, str) or not _NAME.fullmatch(name):
                raise ConfigError(f"tinker.keys_file: {name!r} cannot be the name of a tenant (letters, digits, _ . -)")
            try:
                read = _TenantEntry.model_validate(entry)
            except ValidationError as error:
                problem = "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors())
                raise ConfigError(
                    f"tinker.keys_file: {name}: {problem}. Allowed: sha256 (required: printf %s KEY | sha256sum), "
                    "models, steps, tokens, storage_gb"
                ) from None
            digest = read.sha256.lower()
            if digest in tenants:
                raise ConfigError(f"tinker.keys_file: {tenants[digest].name} and {name} have the same key")
            quotas = {"models": read.models, "steps": read.steps, "tokens": read.tokens}
            storage = None if read.storage_gb is None else read.storage_gb * 1e9
            limits = {
                quota: float(limit) for quota, limit in {**quotas, "storage": storage}.items() if limit is not None
            }
            tenants[digest] = Tenant(name, limits)
        return cls(tenants)
