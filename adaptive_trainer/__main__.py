"""``python -m adaptive_trainer`` is the command ``adaptive-trainer``."""

import sys

from adaptive_trainer.cli import main

if __name__ == "__main__":
    sys.exit(main())
