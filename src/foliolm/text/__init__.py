"""Text: tokenising, chat templates, detokenising as tokens come, stop strings."""
