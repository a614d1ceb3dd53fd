"""A request's life cycle, the loop that steps it, and the clients that talk to it."""
