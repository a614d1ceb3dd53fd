"""Turns between tenants: who was served the fewest tokens comes first."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from foliolm.scheduler.request import Request

MOST_IDLE = 4096
"""Tenants without a request whose counts are remembered."""


@dataclass(slots=True)
class _Tenant:
    """Tokens served, live requests; and of its decodes how many there are, and the sum of the ticks they joined at."""

    served: int = 0
    live: int = 0
    decodes: int = 0
    joined: int = 0


class ServedTokens:
    """Tokens that each tenant was served: prompt tokens as they are admitted, but for cached ones, and outputs.

    A tenant that comes back after a pause starts level with the least served of those who are there, so that nobody
    saves up turns. (The virtual token counter of Sheng et al., arXiv 2401.00588.) Outputs are counted by the decode
    set's tick: a steady step touches no tenant.
    """

    def __init__(self) -> None:
        self._tenants: dict[str, _Tenant] = {}
        self._floor = 0  # what the last to leave had been served, while nobody is there

    def enter(self, request: Request, tick: int) -> None:
        """A request arrived."""
        name = request.source.tenant
        tenant = self._tenants.setdefault(name, _Tenant())
        if not tenant.live:
            others = [self.served(other, tick) for other, one in self._tenants.items() if one.live]
            tenant.served = max(tenant.served, min(others, default=self._floor))
        tenant.live += 1

    def leave(self, request: Request) -> None:
        """A request ended."""
        tenant = self._tenants[request.source.tenant]
        tenant.live -= 1
        if not tenant.live:
            self._floor = max(self._floor, tenant.served)
        if len(self._tenants) > 2 * MOST_IDLE:
            idle = sorted((name for name, one in self._tenants.items() if not one.live), key=self._settled)
            for name in idle[: len(idle) - MOST_IDLE]:
                del self._tenants[name]

    def charge(self, request: Request, tokens: int) -> None:
        """A request was admitted with so many tokens to compute."""
        self._tenants[request.source.tenant].served += tokens

    def joined(self, request: Request, tick: int) -> None:
        """A request decodes from a tick on."""
        tenant = self._tenants[request.source.tenant]
        tenant.decodes += 1
        tenant.joined += tick

    def left(self, request: Request, tick: int) -> None:
        """It decodes no more."""
        tenant = self._tenants[request.source.tenant]
        tenant.decodes -= 1
        tenant.joined -= request.join_tick
        tenant.served += tick - request.join_tick

    def served(self, name: str, tick: int) -> int:
        """Tokens that a tenant was served up to a tick."""
        tenant = self._tenants[name]
        return tenant.served + tenant.decodes * tick - tenant.joined

    def least(self, names: Iterable[str], tick: int) -> str:
        """Of these tenants the least served; of equals the one with the fewest streams."""
        return min(names, key=lambda name: (self.served(name, tick), self._tenants[name].decodes, name))

    def _settled(self, name: str) -> int:
        return self._tenants[name].served
