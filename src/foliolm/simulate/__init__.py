"""The engine in virtual time: its own loop, scheduler, KV manager and ledger, with a step cost for an executor."""
