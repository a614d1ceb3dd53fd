"""Types on the engine's arrows, settings, errors and protocols. Imports nothing of ours."""
