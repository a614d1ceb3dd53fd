"""The arithmetic of serving, at once: closed forms with what binds and what to change."""
