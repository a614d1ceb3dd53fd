"""Agents: 16 sessions of 20 turns whose tool outputs are appended to a shared history, in a pool below their needs.

    python benchmarks/agents.py [--sessions 16] [--turns 20] [--pool 0.5] [--json]

Every session sends its whole history each turn: what it sent before, the answer, and a tool's output; the next turn
follows after a short think time. The pool holds ``--pool`` of what all sessions together come to. Each policy runs in
virtual time, through the engine's own scheduler and KV manager; a prompt token that was computed in an earlier turn and
is computed again is *re-prefilled*.
"""

from __future__ import annotations

import argparse
import json
import random
import sys

from foliolm.assemble import Books, build_virtual_engine
from foliolm.core.record import RequestRecord
from foliolm.core.request import EngineRequest
from foliolm.core.resolve import SchedulerConfig
from foliolm.core.sampling import SamplingParams
from foliolm.ledger.accounts import account
from foliolm.ledger.step_cost import step_cost
from foliolm.shape.presets import device_preset, model_preset
from foliolm.simulate.clock import VirtualClock
from foliolm.simulate.run import Arrival, run_arrivals

BLOCK, SYSTEM, ANSWER = 16, 400, 60


def conversation(session: int, turns: int) -> list[tuple[int, ...]]:
    """The prompt of each turn: a system prompt that all share, then answers and tool outputs of 200 to 900 tokens."""
    rng = random.Random(session)
    tokens = list(range(SYSTEM))
    prompts = []
    for turn in range(turns):
        added = rng.randrange(200, 900) + (ANSWER if turn else 0)
        tokens += [10**6 * (session + 1) + len(tokens) + i for i in range(added)]
        prompts.append(tuple(tokens))
    return prompts


def run(policy: str, sessions: int, turns: int, pool: float, think_s: float) -> dict:
    """One policy over the same sessions."""
    talks = [conversation(session, turns) for session in range(sessions)]
    working_set = sum(-(-(len(talk[-1]) + ANSWER) // BLOCK) for talk in talks)
    blocks = int(working_set * pool)
    settings = SchedulerConfig(
        max_model_len=max(len(talk[-1]) for talk in talks) + ANSWER + 1,
        block_size=BLOCK,
        num_blocks=blocks + 1,
        max_num_batched_tokens=2048,
        max_num_seqs=4,
        long_prefill_token_threshold=1 << 30,
        short_prompt_share=0.0,
        enable_prefix_caching=True,
        scheduling_policy=policy,
        age_bound_s=60.0,
    )
    cost = step_cost(account(model_preset("qwen3-8b").shape), device_preset("a100-80g-sxm"))
    clock = VirtualClock()
    engine = build_virtual_engine(settings, Books(cost), clock)

    def arrival(session: int, turn: int, now: int) -> Arrival:
        sampling = SamplingParams(temperature=0.0, max_tokens=ANSWER, ignore_eos=True)
        return Arrival(now, EngineRequest(session * 1000 + turn, talks[session][turn], sampling, arrival_ns=now))

    def following(record: RequestRecord, now: int) -> list[Arrival]:
        session, turn = divmod(record.request_id, 1000)
        return [arrival(session, turn + 1, now + round(think_s * 1e9))] if turn + 1 < turns else []

    done = run_arrivals(engine, clock, [arrival(session, 0, session) for session in range(sessions)], following)
    again = 0
    waits = []
    for record in done.finished:
        session, turn = divmod(record.request_id, 1000)
        # What the turn before had as its prompt might have been found, but for the tail of its last block.
        before = len(talks[session][turn - 1]) // BLOCK * BLOCK if turn else 0
        again += max(0, before - record.stamps.num_cached_tokens)
        waits.append((record.stamps.first_token_ns - record.stamps.arrival_ns) / 1e9)
    prompt_tokens = sum(len(prompt) for talk in talks for prompt in talk)
    waits.sort()
    return {
        "re_prefilled_tokens": again,
        "prompt_tokens": prompt_tokens,
        "hit_share": round(engine.scheduler.stats().prefix_hits / prompt_tokens, 4),
        "makespan_s": round((done.end_ns - done.start_ns) / 1e9, 2),
        "ttft_mean_s": round(sum(waits) / len(waits), 3),
        "ttft_p99_s": round(waits[int(0.99 * len(waits))], 3),
        "pool_blocks": blocks,
        "working_set_blocks": working_set,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=16)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--pool", type=float, default=0.5, help="KV pool over the sessions' needs, 0 to 1")
    parser.add_argument("--think", type=float, default=0.2, help="seconds between an answer and the next turn")
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    args = parser.parse_args()
    report: dict = {}
    for policy in ("fcfs", "prefix"):
        report[policy] = run(policy, args.sessions, args.turns, args.pool, args.think)
        print(f"{policy}: {report[policy]}", file=sys.stderr)
    computed = {policy: max(1, report[policy]["re_prefilled_tokens"]) for policy in report}
    report["re_prefilled_of_fcfs"] = round(computed["prefix"] / computed["fcfs"], 4)
    print(json.dumps(report) if args.json else json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
