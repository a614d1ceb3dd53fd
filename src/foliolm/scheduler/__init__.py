"""What runs in each step, and why."""
