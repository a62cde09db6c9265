"""``python -m isda`` is the command ``isda``."""

import sys

from isda_command import main

if __name__ == "__main__":
    sys.exit(main())
