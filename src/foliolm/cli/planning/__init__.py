"""One file a ``foliolm plan`` command."""
