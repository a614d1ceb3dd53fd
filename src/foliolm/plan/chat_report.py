"""How many chat users fit, what binds, and what each lever would give."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from foliolm.core.errors import ConfigError
from foliolm.ledger.accounts import sequence_bytes
from foliolm.plan.chat import Chat, ChatState, Server, Targets, broken_limit, settle, users_fit
from foliolm.plan.checks import MOST_ROWS, real, whole
from foliolm.plan.report import Report, Table, count, rows, sentences, share, span
from foliolm.plan.setting import GIB, MemoryOptions, Setting, memory_of
from foliolm.shape.formats import KV_BITS, kv_dtype


def plan_chat(
    setting: Setting,
    chat: Chat,
    users: int,
    targets: Targets | None = None,
    options: MemoryOptions | None = None,
    host_bytes: int = 64 * GIB,
) -> Report:
    """Multi-turn capacity: residency, hit ratio and latency for ``users`` users, and how many would fit.

    Args:
        setting: model and device.
        chat: how people chat.
        users: at once in the system.
        targets: what each turn must keep; without any, the users that fit are those whose histories all stay resident.
        options: how the device's memory is shared out.
        host_bytes: host memory that the host-tier lever may use.

    Raises:
        ConfigError: a number is out of range, no device was named, or not one conversation fits.
    """
    whole("users", users, 1, MOST_ROWS)
    whole("host_bytes", host_bytes, 0)
    targets = targets or Targets()
    for name, value in (("ttft_target_s", targets.ttft_s), ("itl_target_s", targets.itl_s)):
        if value is not None:
            real(name, value, above=True)
    options = options or MemoryOptions()
    server = _server(setting, options, chat)
    longest = chat.system_tokens + chat.turns * chat.turn_tokens
    if server.pool_tokens < longest:
        raise ConfigError(
            f"turns is {chat.turns}: a conversation grows to {longest} tokens; the pool holds {server.pool_tokens}"
        )
    state = settle(chat, server, users)
    fit = users_fit(chat, server, targets)
    binds = broken_limit(chat, server, targets, fit + 1) or "nothing"
    levers = _levers(setting, options, chat, targets, server, host_bytes)
    numbers: dict[str, Any] = {
        "model": setting.shape.name,
        "device": setting.need_device().id,
        "users": users,
        "pool_tokens": server.pool_tokens,
        "tokens_per_user_by_turn": [turn * chat.turn_tokens for turn in range(1, chat.turns + 1)],
        "working_set_tokens": math.ceil(state.working_set_tokens),
        "resident_share": state.resident_share,
        "hit_ratio": state.hit_ratio,
        "active_sequences": state.active,
        "turns_per_s": state.turns_per_s,
        "users_fit": fit,
        "ttft_s": state.ttft_s,
        "itl_s": state.itl_s,
        "binds": binds,
        "levers": levers,
    }
    verdict = sentences(
        fit_verdict(users, fit, binds, targets),
        residency_verdict(state, server.pool_tokens),
        lever_verdict(levers, fit),
    )
    return Report(numbers, verdict, (_table(numbers, state), _lever_table(levers, fit)))


def fit_verdict(users: int, fit: int, binds: str, targets: Targets) -> str:
    """How many users fit and what keeps out the next."""
    kept = " and ".join(
        f"{name} under {span(value)}" for name, value in (("TTFT", targets.ttft_s), ("gaps", targets.itl_s)) if value
    )
    goal = f"with {kept}" if kept else "with every history resident"
    why = {
        "kv": "KV memory binds",
        "sequences": "the cap on sequences binds",
        "ttft": "time to first token binds: prefill and its queue, not memory",
        "itl": "the gap between tokens binds: too many rows a step",
        "nothing": "nothing binds up to the most that is counted",
    }[binds]
    enough = "so they fit" if users <= fit else f"{count(users - fit)} fewer than asked"
    return f"{count(fit)} users fit {goal}, {enough}; {why}."


def residency_verdict(state: ChatState, pool_tokens: int) -> str:
    """What of the histories is found again."""
    if state.resident_share >= 1.0:
        return (
            f"All histories stay resident ({count(state.working_set_tokens)} of {count(pool_tokens)} tokens): "
            f"{share(state.hit_ratio)} of the prompt tokens hit."
        )
    return (
        f"Histories need {count(state.working_set_tokens)} tokens and the pool holds {count(pool_tokens)}: "
        f"{share(1 - state.resident_share)} of them are gone when their users come back and are prefilled again; "
        f"{share(state.hit_ratio)} of the prompt tokens hit."
    )


def lever_verdict(levers: list[dict[str, Any]], fit: int) -> str | None:
    """Which lever gives most."""
    better = [lever for lever in levers if lever["users_fit"] > fit]
    if not better:
        return "None of the levers lets more users in: it takes a faster device, or more of them."
    best = max(better, key=lambda lever: int(lever["users_fit"]))
    return f"The strongest lever is {best['name'].replace('_', ' ')}: {count(best['users_fit'])} users."


def _server(setting: Setting, options: MemoryOptions, chat: Chat, pool_bytes: int | None = None) -> Server:
    """The pool in tokens: as many conversations of mean length as fit, windows counted, back in tokens."""
    cost = setting.cost
    pool = max(0, memory_of(setting, options).kv_pool if pool_bytes is None else pool_bytes)
    typical = max(1, round(chat.system_tokens + chat.mean_kept))
    tokens = int(pool * typical / sequence_bytes(cost.model, typical, 1))
    blocks = tokens // setting.block_size
    return Server(cost, blocks * setting.block_size, options.max_num_batched_tokens, options.max_num_seqs)


def _levers(
    setting: Setting, options: MemoryOptions, chat: Chat, targets: Targets, server: Server, host_bytes: int
) -> list[dict[str, Any]]:
    device = setting.need_device()
    levers = []
    if KV_BITS[kv_dtype(setting.shape, setting.kv_cache_dtype)] > 8:
        levers.append(("kv_dtype_fp8", chat, _server(setting.with_kv("fp8"), options, chat)))
    pool = memory_of(setting, options).kv_pool
    levers.append(("memory_twice", chat, _server(setting, options, chat, pool + device.memory_bytes)))
    if chat.turns > 1:
        half = replace(chat, turns=-(-chat.turns // 2))
        levers.append(("history_half", half, _server(setting, options, half)))
    if device.host_link is not None and host_bytes:
        host_tokens = host_bytes // server.model.kv_bytes_per_token
        link = device.host_link * setting.coefficients.link
        levers.append(("host_tier", chat, replace(server, host_tokens=host_tokens, host_link=link)))
    return [{"name": name, "users_fit": users_fit(how, which, targets)} for name, how, which in levers]


def _table(numbers: dict[str, Any], state: ChatState) -> Table:
    pairs = [
        ("pool", f"{count(numbers['pool_tokens'])} tokens"),
        ("working set", f"{count(numbers['working_set_tokens'])} tokens"),
        ("histories still resident", share(state.resident_share)),
        ("prompt tokens that hit", share(state.hit_ratio)),
        ("sequences decoding, mean", f"{state.active:.3g} of {state.most_active:,.3g}"),
        ("turns a second", f"{state.turns_per_s:.3g}"),
        ("time to first token, mean", span(state.ttft_s)),
        ("gap between tokens, mean", span(state.itl_s)),
        ("users that fit", count(numbers["users_fit"])),
    ]
    title = f"{count(state.users)} users of {numbers['model']} on {numbers['device']}"
    return Table(title, ("what", "value"), rows(pairs))


def _lever_table(levers: list[dict[str, Any]], fit: int) -> Table:
    names = {
        "kv_dtype_fp8": "8-bit KV",
        "memory_twice": "twice the memory",
        "history_half": "half the turns",
        "host_tier": "a host tier for KV",
    }
    lines = [("as it is", count(fit))] + [(names[one["name"]], count(one["users_fit"])) for one in levers]
    return Table("Levers", ("change", "users that fit"), tuple(lines))
