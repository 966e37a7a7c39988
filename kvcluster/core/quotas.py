"""Quotas: what an operator grants each tenant, as a file states it.

    [default]                              # of each tenant without a table of its own, and of what such a table omits
    ram = { limit = "8GiB" }

    [tenants.search]
    ram = { floor = "4GiB", limit = "16GiB", weight = 2 }
    disk = { limit = "none" }              # lifts the limit of [default]
    requests_per_second = 500
    bytes_per_second = "2GiB"
    pinned = "1GiB"
    sequences = 200
    engines = 8

Bytes of a tier are those of the whole cluster, as tenants are charged for them (coordinator/tenant_floors.py): replicas
that the policy made are charged to no tenant. `parse_quotas` is the only way from text to Quotas; it checks everything,
and names the key that is wrong. What the numbers do is decided elsewhere: coordinator/tenant_limits.py for what is
stored, token_bucket.py for rates.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from kvcluster.config import size
from kvcluster.core import limits
from kvcluster.core.ids import TENANT_NAME, Tenant
from kvcluster.core.tiers import Tier
from kvcluster.errors import ConfigError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

NONE = "none"
"""In place of a number: no such bound, whatever [default] says."""

MOST_WEIGHT = 1_000
MOST_RATE = 10**9
MOST_NUMBER = 2**53
"""Larger numbers are a mistake: this many bytes are 8 PiB."""

_TIERS = {tier.name.lower(): tier for tier in Tier}


@dataclass(frozen=True, slots=True)
class TierQuota:
    """What a tenant is granted of one tier, in bytes of the whole cluster.

    `floor`: what it has below this is not evicted for others; None for its part of `coordinator.tenant_floor`.
    `limit`: it stores no more than this; None for no limit.
    `weight`: its part of what other floors leave of `coordinator.tenant_floor`, beside 1 of each tenant without a
    quota; None for 1, or for 0 where it has a `floor`.
    """

    floor: int | None = None
    limit: int | None = None
    weight: float | None = None

    @property
    def parts(self) -> float:
        """The weight that counts."""
        if self.weight is not None:
            return self.weight
        return 1.0 if self.floor is None else 0.0


NO_TIER_QUOTA = TierQuota()


@dataclass(frozen=True, slots=True)
class TenantQuota:
    """What one tenant is granted; None is no bound beside that of all tenants. The rates are those of one server, for
    the coordinator's and each shard's calls, and for the bytes that each shard moves for loads and stores. `pinned` is
    in bytes, `sequences` are open ones, `engines` registered ones."""

    tiers: Mapping[Tier, TierQuota] = field(default_factory=dict)
    requests_per_second: float | None = None
    bytes_per_second: int | None = None
    pinned: int | None = None
    sequences: int | None = None
    engines: int | None = None

    def of(self, tier: Tier) -> TierQuota:
        return self.tiers.get(tier, NO_TIER_QUOTA)


NO_QUOTA = TenantQuota()


@dataclass(frozen=True, slots=True)
class Quotas:
    """The quotas of all tenants. `default` is that of each tenant that `tenants` does not name."""

    default: TenantQuota = NO_QUOTA
    tenants: Mapping[Tenant, TenantQuota] = field(default_factory=dict)

    def of(self, tenant: Tenant) -> TenantQuota:
        return self.tenants.get(tenant, self.default)

    def floors_bytes(self, tier: Tier) -> int:
        """Returns what the floors of the tenants that are named have together in that tier."""
        return sum(quota.of(tier).floor or 0 for quota in self.tenants.values())


NO_QUOTAS = Quotas()


def parse_quotas(text: str) -> Quotas:
    """Parses the text of a quota file. Raises ConfigError that names the line or the key, and what to do."""
    try:
        return _parsed(text)
    except ValueError as error:  # Python writes no number of thousands of digits
        raise ConfigError(f"quota file: a number is too large: {error}") from None


def _parsed(text: str) -> Quotas:
    try:
        values = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"the quota file is not valid TOML: {error}") from None
    for key in values:
        if key not in ("default", "tenants"):
            raise ConfigError(f"quota file: unknown key {key}; known here: default, tenants")
    default = _tenant(_table(values.get("default", {}), "default"), NO_QUOTA, "default")
    tables = _table(values.get("tenants", {}), "tenants")
    if len(tables) > limits.QUOTA_TENANTS:
        raise ConfigError(f"quota file: {len(tables)} tenants; at most {limits.QUOTA_TENANTS} may have a table")
    tenants: dict[Tenant, TenantQuota] = {}
    for name, table in tables.items():
        if not TENANT_NAME.fullmatch(name):
            raise ConfigError(
                f"quota file: {name!r} is no name of a tenant: use up to 64 letters, digits, '.', '_' and '-'; write a "
                "name with dots in quotes"
            )
        where = f"tenants.{name}"
        tenants[Tenant(name)] = _tenant(_table(table, where), default, where)
    return Quotas(default, tenants)


def _tenant(table: Mapping[str, Any], default: TenantQuota, where: str) -> TenantQuota:
    """Returns the quota of one table, which takes from `default` what it does not name."""
    tiers, given = dict(default.tiers), dict[str, Any]()
    for key, value in table.items():
        name = f"{where}.{key}"
        if key in _TIERS:
            tier = _TIERS[key]
            tiers[tier] = _tier(_table(value, name), tiers.get(tier, NO_TIER_QUOTA), name)
        elif key in ("bytes_per_second", "pinned"):
            given[key] = _size(value, name)
        elif key in ("sequences", "engines", "requests_per_second"):
            rate = key == "requests_per_second"
            given[key] = _number(value, name, whole=not rate, most=MOST_RATE if rate else MOST_NUMBER)
        else:
            known = ", ".join((*_TIERS, *(f.name for f in fields(TenantQuota) if f.name != "tiers")))
            raise ConfigError(f"quota file: unknown key {name}; known here: {known}")
    for key in ("requests_per_second", "bytes_per_second"):
        if given.get(key) == 0:
            raise ConfigError(
                f"quota file: {where}.{key} is 0, which would shut the tenant out; remove its token from the token "
                f'file for that, or write "{NONE}" for no bound'
            )
    return replace(default, tiers=tiers, **given)


def _tier(table: Mapping[str, Any], default: TierQuota, where: str) -> TierQuota:
    given: dict[str, Any] = {}
    for key, value in table.items():
        name = f"{where}.{key}"
        if key in ("floor", "limit"):
            given[key] = _size(value, name)
        elif key == "weight":
            given[key] = _number(value, name, whole=False, most=MOST_WEIGHT)
        else:
            raise ConfigError(f"quota file: unknown key {name}; known here: floor, limit, weight")
    quota = replace(default, **given)
    if quota.floor is not None and quota.limit is not None and quota.floor > quota.limit:
        raise ConfigError(
            f"quota file: {where}: the floor of {quota.floor} bytes exceeds the limit of {quota.limit}; lower the "
            f'floor or raise the limit (what a table does not name, it takes from [default]; "{NONE}" lifts it)'
        )
    return quota


def _table(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(f'quota file: {where} must be a table, such as {{ limit = "4GiB" }}, not {value!r:.100}')
    return value


def _size(value: Any, where: str) -> int | None:
    if value == NONE:
        return None
    nbytes = size(value if isinstance(value, (str, int)) else str(value), f"quota file: {where}")
    if nbytes > MOST_NUMBER:
        raise ConfigError(f"quota file: {where} must be at most 8 PiB")
    return nbytes


def _number(value: Any, where: str, *, whole: bool, most: int = MOST_NUMBER) -> Any:
    if value == NONE:
        return None
    if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)) or not 0 <= value <= most:
        kind = "a whole number" if whole else "a number"
        raise ConfigError(f'quota file: {where} must be {kind} from 0 to {most}, or "{NONE}", not {value!r:.100}')
    return value


def over_committed(quotas: Quotas, capacity_bytes: Mapping[Tier, int]) -> Iterator[str]:
    """Yields a sentence for each tier that is smaller than the floors in it together: sizes of clusters change, so that
    this is no error of the file. `capacity_bytes`: of all shards, without tiers that none has."""
    for tier, nbytes in capacity_bytes.items():
        floors = quotas.floors_bytes(tier)
        if floors > nbytes * limits.FLOORS_SHARE:
            yield (
                f"the floors of the quota file have {floors} bytes of the {tier.name.lower()} tier together, and the "
                f"shards have {nbytes}: each floor is scaled down, so that all have {limits.FLOORS_SHARE:.0%}"
            )
