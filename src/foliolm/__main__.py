"""``python -m foliolm``."""

from foliolm.cli.main import main

main()
