"""Multi-turn chat in closed form: what stays resident, what has to be prefilled again, and how many users fit."""

from __future__ import annotations

from dataclasses import dataclass, replace

from foliolm.ledger.accounts import ModelAccount
from foliolm.ledger.step_cost import StepCost
from foliolm.ledger.treatments import Running, recompute_seconds
from foliolm.plan.checks import MOST_ROWS, real, whole


@dataclass(frozen=True, slots=True)
class Chat:
    """How people chat.

    Attributes:
        system_tokens: of the system prompt that all share.
        user_tokens, assistant_tokens: of each turn.
        turns: of each conversation; then its KV goes, and a new one begins.
        think_time_s: mean seconds between an answer's end and the next turn, taken as exponential.
    """

    system_tokens: int
    user_tokens: int
    assistant_tokens: int
    turns: int
    think_time_s: float

    def __post_init__(self) -> None:
        whole("system_tokens", self.system_tokens, 0)
        whole("user_tokens", self.user_tokens)
        whole("assistant_tokens", self.assistant_tokens)
        whole("turns", self.turns, 1, 100_000)
        real("think_time_s", self.think_time_s)

    @property
    def turn_tokens(self) -> int:
        """Tokens that a turn adds."""
        return self.user_tokens + self.assistant_tokens

    @property
    def mean_history(self) -> float:
        """Tokens of earlier turns in a prompt, over the turns: ``(T − 1) / 2 · (u + a)``."""
        return (self.turns - 1) / 2 * self.turn_tokens

    @property
    def mean_kept(self) -> float:
        """Private tokens at a turn's end, over the turns: ``(T + 1) / 2 · (u + a)``."""
        return (self.turns + 1) / 2 * self.turn_tokens

    @property
    def mean_prompt(self) -> float:
        """Tokens of a prompt, over the turns."""
        return self.system_tokens + self.mean_history + self.user_tokens


@dataclass(frozen=True, slots=True)
class Targets:
    """What each turn must keep; None: nothing asked."""

    ttft_s: float | None = None
    itl_s: float | None = None


@dataclass(frozen=True, slots=True)
class Server:
    """What serves them.

    Attributes:
        cost: the step cost.
        pool_tokens: KV tokens that the device holds.
        max_num_batched_tokens, max_num_seqs: a step's limits.
        host_tokens: KV tokens that host memory holds besides; misses that it covers are copied, not computed.
        host_link: bytes a second at which they come back; needed with ``host_tokens``.
    """

    cost: StepCost
    pool_tokens: int
    max_num_batched_tokens: int
    max_num_seqs: int
    host_tokens: int = 0
    host_link: float | None = None

    @property
    def model(self) -> ModelAccount:
        """The model's account."""
        return self.cost.model


@dataclass(frozen=True, slots=True)
class ChatState:
    """Where the system settles.

    Attributes:
        users: in the system.
        active: mean decode rows of a step.
        most_active: rows that the pool and the sequence cap allow.
        working_set_tokens: all that would be kept if it fit.
        resident_share: of idle users' histories that is still on the device when they come back.
        hit_ratio: share of prompt tokens found in the cache, on the device.
        ttft_s, itl_s: means over the turns.
        turns_per_s: throughput.
        queued: True if requests wait for room beyond what a step's limits cause.
    """

    users: int
    active: float
    most_active: float
    working_set_tokens: float
    resident_share: float
    hit_ratio: float
    ttft_s: float
    itl_s: float
    turns_per_s: float
    queued: bool


def settle(chat: Chat, server: Server, users: int) -> ChatState:
    """The fixed point of concurrency, gap and residency for ``users`` users.

    With ``c`` rows decoding: a decode step takes t(c); prefills take ρ = X · P of the time (X turns a second, P
    marginal seconds of a mean turn's prefill), so a gap is ``t(c) / (1 − ρ)``; Little's law over decoding,
    ``c = X · a · gap``, gives ``X = c / (a · t(c) + c · P)``. Time to first token is P, half a step, and the M/D/1 wait
    ``ρ · P / (2 (1 − ρ))``. The users that keep c rows busy are ``X · (think + ttft + a · gap)``: it only grows with c,
    so bisection finds it. Idle histories share what the pool has left; for exponential think times under LRU the share
    that hits equals the share kept (Che's approximation, 2002).
    """
    most = _most_active(chat, server)
    if most < 1:
        return _state(chat, server, users, 0.0, most, 0.0, queued=True)
    low, high = 0.0, float(min(users, most))
    if _users_of(chat, server, users, high) <= users and users > most:
        turns_per_s = _flow(chat, server, users, high)[0]
        return _state(chat, server, users, high, most, turns_per_s, queued=True)
    for _ in range(32):
        middle = (low + high) / 2
        if _users_of(chat, server, users, middle) < users:
            low = middle
        else:
            high = middle
    turns_per_s = _flow(chat, server, users, high)[0]
    return _state(chat, server, users, high, most, turns_per_s, queued=False)


def working_set_tokens(chat: Chat, users: int) -> float:
    """Tokens of all conversations: the system prompt once, and each user's turns so far, over the turns."""
    return chat.system_tokens + users * chat.mean_kept


def broken_limit(chat: Chat, server: Server, targets: Targets, users: int) -> str | None:
    """Which limit ``users`` users break: ``kv``, ``sequences``, ``ttft``, ``itl``; None where all hold.

    Without targets every history must stay resident (on the device or, with a host tier, in host memory).
    """
    state = settle(chat, server, users)
    if state.queued:
        return "kv" if state.most_active < server.max_num_seqs else "sequences"
    no_targets = targets.ttft_s is None and targets.itl_s is None
    if no_targets and state.working_set_tokens > server.pool_tokens + server.host_tokens:
        return "kv"
    if targets.itl_s is not None and state.itl_s > targets.itl_s:
        return "itl"
    if targets.ttft_s is not None and state.ttft_s > targets.ttft_s:
        # Prefilling histories again is a lack of KV; what stays with every history resident is not.
        roomy = replace(server, pool_tokens=max(server.pool_tokens, int(2 * state.working_set_tokens) + 1))
        return "ttft" if settle(chat, roomy, users).ttft_s > targets.ttft_s else "kv"
    return None


def users_fit(chat: Chat, server: Server, targets: Targets) -> int:
    """The most users for which no limit breaks (`broken_limit`); each limit only gets tighter with users."""
    if broken_limit(chat, server, targets, 1) is not None:
        return 0
    high = 1
    while high < MOST_ROWS and broken_limit(chat, server, targets, high) is None:
        high *= 2
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        if broken_limit(chat, server, targets, middle) is None:
            low = middle
        else:
            high = middle
    return low


def _most_active(chat: Chat, server: Server) -> float:
    """Conversations that can run at once: each needs its private tokens to the turn's end, in the mean over turns."""
    room = server.pool_tokens - chat.system_tokens
    longest = chat.turns * chat.turn_tokens
    if room < longest:  # the last turn of even one user does not fit
        return 0.0
    return min(server.max_num_seqs, room / chat.mean_kept)


def _resident_share(chat: Chat, server: Server, users: int, active: float) -> float:
    idle = users - active
    left = server.pool_tokens - chat.system_tokens - active * chat.mean_kept
    if idle <= 0 or idle * chat.mean_kept <= left:
        return 1.0
    return max(0.0, left) / (idle * chat.mean_kept)


def _host_share(chat: Chat, server: Server, users: int, active: float, resident: float) -> float:
    """Share of the misses that host memory covers."""
    missing = (users - active) * chat.mean_kept * (1 - resident)
    return 1.0 if missing <= server.host_tokens else server.host_tokens / missing


def _prefill_seconds(chat: Chat, server: Server, users: int, active: float) -> float:
    """Marginal seconds that a mean turn's prefill takes from the steps, hits, misses and copies in their shares."""
    context = chat.mean_prompt + chat.assistant_tokens / 2
    running = Running(active, context, max(server.max_num_batched_tokens, int(active) + 1))
    prompt, cached = round(chat.mean_prompt), round(chat.system_tokens + chat.mean_history)
    hit = recompute_seconds(server.cost, prompt, cached, running)
    resident = _resident_share(chat, server, users, active)
    if resident == 1.0 or chat.mean_history == 0:
        return hit
    miss = recompute_seconds(server.cost, prompt, chat.system_tokens, running)
    if server.host_tokens and server.host_link:
        moved = chat.mean_history * server.model.kv_bytes_per_token / server.host_link
        covered = _host_share(chat, server, users, active, resident)
        miss = covered * min(miss, hit + moved) + (1 - covered) * miss
    return resident * hit + (1 - resident) * miss


def _flow(chat: Chat, server: Server, users: int, active: float) -> tuple[float, float, float]:
    """Turns a second, time to first token and gap with ``active`` rows decoding."""
    step = server.cost.decode_seconds(max(active, 1e-9), chat.mean_prompt + chat.assistant_tokens / 2)
    prefill = _prefill_seconds(chat, server, users, active)
    turns_per_s = active / (chat.assistant_tokens * step + active * prefill)
    busy = turns_per_s * prefill
    ttft = prefill + step / 2 + busy * prefill / (2 * (1 - busy))
    return turns_per_s, ttft, step / (1 - busy)


def _users_of(chat: Chat, server: Server, users: int, active: float) -> float:
    turns_per_s, ttft, gap = _flow(chat, server, users, active)
    return turns_per_s * (chat.think_time_s + ttft + chat.assistant_tokens * gap)


def _state(
    chat: Chat, server: Server, users: int, active: float, most: float, turns_per_s: float, queued: bool
) -> ChatState:
    resident = _resident_share(chat, server, users, active)
    hits = chat.system_tokens + resident * chat.mean_history
    ttft = gap = float("inf")
    if turns_per_s > 0:
        _, ttft, gap = _flow(chat, server, users, active)
        if queued:  # the rest of the users' cycle is spent waiting
            ttft += max(0.0, users / turns_per_s - chat.think_time_s - ttft - chat.assistant_tokens * gap)
    return ChatState(
        users=users,
        active=active,
        most_active=most,
        working_set_tokens=working_set_tokens(chat, users),
        resident_share=resident,
        hit_ratio=hits / chat.mean_prompt,
        ttft_s=ttft,
        itl_s=gap,
        turns_per_s=turns_per_s,
        queued=queued,
    )
