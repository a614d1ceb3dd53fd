"""What ``foliolm bench`` shows."""
