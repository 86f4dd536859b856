"""``python -m flyball_cli`` is ``flyball``."""

import sys

from flyball_cli import main

sys.exit(main())
