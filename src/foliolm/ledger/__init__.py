"""The books: accounts, step cost, step records, request timelines, calibration, exports."""
