"""Workloads played against a live server that speaks OpenAI's API, measured from outside."""
