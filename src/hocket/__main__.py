"""``python -m hocket``."""

from hocket.cli import main

raise SystemExit(main())
