"""What ``foliolm simulate``, ``validate`` and ``bench`` share."""
