"""The text of a quota file: what it says, and what is refused, by name."""

from __future__ import annotations

import pytest

from kvcluster.core import limits
from kvcluster.core.ids import Tenant
from kvcluster.core.quotas import NO_QUOTAS, TenantQuota, TierQuota, over_committed, parse_quotas
from kvcluster.core.tiers import Tier
from kvcluster.errors import ConfigError

RED, BLUE = Tenant("red"), Tenant("blue")
WHOLE_FILE = """
[default]
ram = { limit = "8GiB" }
sequences = 100

[tenants.red]
ram = { floor = "1GiB", limit = "4GiB", weight = 2 }
disk = { limit = 4096 }
requests_per_second = 12.5
bytes_per_second = "1MiB"
pinned = "2KiB"
engines = 3

[tenants."b.lue"]
ram = { floor = 5, limit = "none" }
sequences = "none"
"""


def test_a_file_says_what_each_tenant_is_granted_and_the_default_what_it_does_not_name() -> None:
    quotas = parse_quotas(WHOLE_FILE)
    assert quotas.of(RED) == TenantQuota(
        tiers={Tier.RAM: TierQuota(2**30, 2**32, 2), Tier.DISK: TierQuota(limit=4096)},
        requests_per_second=12.5,
        bytes_per_second=2**20,
        pinned=2048,
        sequences=100,
        engines=3,
    )
    assert quotas.of(Tenant("b.lue")) == TenantQuota({Tier.RAM: TierQuota(floor=5)})
    assert quotas.of(BLUE) == TenantQuota({Tier.RAM: TierQuota(limit=2**33)}, sequences=100)
    assert quotas.of(BLUE).of(Tier.HOST) == TierQuota()


def test_an_empty_file_grants_all_tenants_everything() -> None:
    assert parse_quotas("# nothing\n") == NO_QUOTAS


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[default]\nram = = 3", r"not valid TOML: .*line 2"),
        ("[defaults]\n", r"unknown key defaults; known here: default, tenants"),
        (
            "[tenants.red]\nlimits = 3\n",
            r"unknown key tenants\.red\.limits; known here: gpu, ram, host, disk, requests_",
        ),
        (
            "[tenants.red]\nram = { most = 3 }\n",
            r"unknown key tenants\.red\.ram\.most; known here: floor, limit, weight",
        ),
        ("[tenants.red]\nram = 3\n", r"tenants\.red\.ram must be a table"),
        ("tenants = 3\n", r"tenants must be a table"),
        ('[tenants.red]\nram = { limit = "4 gigs" }\n', r"tenants\.red\.ram\.limit: '4 gigs' is no size"),
        ("[tenants.red]\nram = { limit = -1 }\n", r"tenants\.red\.ram\.limit: -1 is no size"),
        ("[tenants.red]\nram = { limit = true }\n", r"tenants\.red\.ram\.limit: .* is no size"),
        ('[tenants.red]\nram = { limit = "9000TiB" }\n', r"tenants\.red\.ram\.limit must be at most"),
        ("[tenants.red]\nram = { floor = 3, limit = 2 }\n", r"the floor of 3 bytes exceeds the limit of 2; lower the"),
        ("[default]\nram = { limit = 2 }\n[tenants.red]\nram = { floor = 3 }\n", r"tenants\.red\.ram: the floor of 3"),
        ("[tenants.red]\nram = { weight = -1 }\n", r"tenants\.red\.ram\.weight must be a number from 0 to 1000"),
        ("[tenants.red]\nram = { weight = nan }\n", r"tenants\.red\.ram\.weight must be a number"),
        ("[tenants.red]\nsequences = 1.5\n", r"tenants\.red\.sequences must be a whole number"),
        ("[tenants.red]\nengines = true\n", r"tenants\.red\.engines must be a whole number"),
        ("[tenants.red]\nrequests_per_second = inf\n", r"requests_per_second must be a number from 0"),
        ("[tenants.red]\nrequests_per_second = 0\n", r"requests_per_second is 0, which would shut the tenant out"),
        ("[tenants.red]\nbytes_per_second = 0\n", r"bytes_per_second is 0, which would shut the tenant out"),
        ('[tenants."a b"]\n', r"'a b' is no name of a tenant"),
        ("[tenants.-]\n", r"'-' is no name of a tenant"),
    ],
)
def test_what_cannot_be_meant_is_refused_by_its_key(text: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        parse_quotas(text)


def test_more_tenants_than_the_bound_are_refused() -> None:
    tables = "\n".join(f"[tenants.t{number}]" for number in range(limits.QUOTA_TENANTS + 1))
    with pytest.raises(ConfigError, match=r"4097 tenants; at most 4096"):
        parse_quotas(tables)


def test_floors_beyond_a_tier_are_named_and_no_error() -> None:
    quotas = parse_quotas("[tenants.red]\nram = { floor = 60 }\n[tenants.blue]\nram = { floor = 30 }\n")
    assert [*over_committed(quotas, {Tier.RAM: 200, Tier.HOST: 0})] == []
    (why,) = over_committed(quotas, {Tier.RAM: 100})
    assert why.startswith(
        "the floors of the quota file have 90 bytes of the ram tier together, and the shards have 100"
    )


@pytest.mark.parametrize("key", ["sequences = ", "ram = ", "weight = "])
def test_a_number_of_thousands_of_digits_is_refused_in_words(key: str) -> None:
    with pytest.raises(ConfigError):
        parse_quotas(f"[default]\n{key}0x{'F' * 5_000}\n")
