"""Multi-turn capacity: hand sums where nothing is scarce, a small simulation where something is."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from dataclasses import replace
from random import Random

import pytest

from foliolm.ledger.accounts import account
from foliolm.ledger.step_cost import step_cost
from foliolm.plan.chat import Chat, Server, Targets, broken_limit, settle, users_fit, working_set_tokens
from foliolm.shape.presets import device_preset, model_preset
from support.plan_cli import plan

COST = step_cost(account(model_preset("qwen3-8b").shape), device_preset("h100-sxm"))
CHAT = Chat(system_tokens=1000, user_tokens=200, assistant_tokens=300, turns=8, think_time_s=30)
ROOMY = Server(COST, pool_tokens=10_000_000, max_num_batched_tokens=8192, max_num_seqs=256)
WORDS = (
    *("chat", "--model", "qwen3-8b", "--device", "h100-sxm", "--system-tokens", 1000, "--user-tokens", 200),
    *("--assistant-tokens", 300, "--turns", 8, "--think-time-s", 30),
)


def test_residency_by_turn_with_the_system_prompt_stored_once():
    numbers = plan(*WORDS, "--users", 100)
    assert numbers["tokens_per_user_by_turn"] == [500 * turn for turn in range(1, 9)]
    assert numbers["working_set_tokens"] == 1000 + 100 * sum(range(500, 4001, 500)) / 8
    assert numbers["pool_tokens"] % 16 == 0


def test_with_room_for_all_every_history_hits():
    state = settle(CHAT, ROOMY, 100)
    prompts = [1000 + 500 * turn + 200 for turn in range(8)]
    hits = [1000 + 500 * turn for turn in range(8)]
    assert state.resident_share == 1
    assert state.hit_ratio == pytest.approx(sum(hits) / sum(prompts))


def test_the_fixed_point_obeys_littles_law():
    for users in (1, 50, 400, 900):
        state = settle(CHAT, ROOMY, users)
        cycle = CHAT.think_time_s + state.ttft_s + CHAT.assistant_tokens * state.itl_s
        assert state.turns_per_s * cycle == pytest.approx(users, rel=1e-4)
        assert state.active == pytest.approx(state.turns_per_s * CHAT.assistant_tokens * state.itl_s, rel=1e-4)


def test_when_more_ask_than_run_the_rest_queues():
    few = replace(ROOMY, max_num_seqs=8)
    state = settle(CHAT, few, 500)
    assert state.queued
    assert state.active == 8
    cycle = CHAT.think_time_s + state.ttft_s + CHAT.assistant_tokens * state.itl_s
    assert state.turns_per_s * cycle == pytest.approx(500, rel=1e-6)
    assert broken_limit(CHAT, few, Targets(), 500) == "sequences"


def test_hit_share_of_an_lru_pool_with_random_think_times():
    """A pool that holds part of the histories: the closed form against a simulated LRU of whole conversations."""
    users, history, random = 60, 1500.0, Random(7)
    chat = Chat(0, 200, 300, 1, 30)
    # One turn size for all, so that the simulation's sizes equal the closed form's mean.
    server = replace(ROOMY, pool_tokens=int(0.6 * users * chat.mean_kept))
    closed = settle(chat, server, users).resident_share
    resident: OrderedDict[int, float] = OrderedDict()
    events = [(random.expovariate(1 / 30), user) for user in range(users)]
    heapq.heapify(events)
    hits = turns = 0
    while turns < 30_000:
        now, user = heapq.heappop(events)
        turns += 1
        hits += user in resident
        resident[user] = history
        resident.move_to_end(user)
        while len(resident) > 0.6 * users:
            resident.popitem(last=False)
        heapq.heappush(events, (now + random.expovariate(1 / 30), user))
    assert closed == pytest.approx(hits / turns, abs=0.04)


def test_users_fit_is_the_last_that_breaks_nothing():
    server = replace(ROOMY, pool_tokens=400_000)
    for targets in (Targets(), Targets(ttft_s=0.5, itl_s=0.03)):
        fit = users_fit(CHAT, server, targets)
        assert fit > 0
        assert broken_limit(CHAT, server, targets, fit) is None
        assert broken_limit(CHAT, server, targets, fit + 1) is not None
    assert users_fit(CHAT, server, Targets()) == (400_000 - 1000) // CHAT.mean_kept
    assert working_set_tokens(CHAT, users_fit(CHAT, server, Targets())) <= 400_000


def test_what_binds_turns_with_the_targets():
    def binds(*words: object) -> str:
        return str(plan(*WORDS, "--users", 10, *words)["binds"])

    assert binds() == "kv"
    assert binds("--itl-target-s", 0.009) == "itl"
    assert binds("--itl-target-s", 10, "--max-num-seqs", 2) == "sequences"


def test_time_to_first_token_binds_on_prefill_or_on_missing_histories():
    long_prompts = Chat(0, 8000, 10, 1, 5)
    targets = Targets(ttft_s=1.0)
    fit = users_fit(long_prompts, ROOMY, targets)
    assert settle(long_prompts, ROOMY, fit).ttft_s <= 1.0 < settle(long_prompts, ROOMY, fit + 1).ttft_s
    assert broken_limit(long_prompts, ROOMY, targets, fit + 1) == "ttft"
    # Here the target is lost because histories are: with room for all of them it would be kept.
    tight, long_histories = replace(ROOMY, pool_tokens=200_000), Chat(0, 2000, 200, 16, 60)
    targets = Targets(ttft_s=0.3)
    fit = users_fit(long_histories, tight, targets)
    assert fit > 0
    assert broken_limit(long_histories, tight, targets, fit + 1) == "kv"
    assert broken_limit(long_histories, ROOMY, targets, fit + 1) is None


def test_levers_give_what_they_say():
    numbers = plan(*WORDS, "--users", 500)
    levers = {lever["name"]: lever["users_fit"] for lever in numbers["levers"]}
    assert set(levers) == {"kv_dtype_fp8", "memory_twice", "history_half", "host_tier"}
    assert all(users > numbers["users_fit"] for users in levers.values())
    assert levers["kv_dtype_fp8"] == plan(*WORDS, "--users", 500, "--kv-cache-dtype", "fp8")["users_fit"]
    half = [*WORDS[: WORDS.index("--turns")], "--turns", 4, "--think-time-s", 30]
    assert levers["history_half"] == plan(*half, "--users", 500)["users_fit"]
    assert "strongest lever" in numbers["verdict"]
    again = plan(*WORDS, "--users", 500, "--kv-cache-dtype", "fp8")
    assert "kv_dtype_fp8" not in {lever["name"] for lever in again["levers"]}


def test_more_users_only_make_it_worse():
    server = replace(ROOMY, pool_tokens=300_000)
    states = [settle(CHAT, server, users) for users in (10, 100, 200, 300)]
    for key in ("itl_s", "ttft_s", "active", "working_set_tokens"):
        values = [getattr(state, key) for state in states]
        assert values == sorted(values), key
    assert [state.hit_ratio for state in states] == sorted((state.hit_ratio for state in states), reverse=True)


def test_the_verdict_says_what_is_gone():
    numbers = plan(*WORDS, "--users", 300)
    assert numbers["resident_share"] < 1
    assert "are gone when their users come back and are prefilled again" in numbers["verdict"]
    assert "fewer than asked; KV memory binds" in numbers["verdict"]
    assert "All histories stay resident" in plan(*WORDS, "--users", 10)["verdict"]
