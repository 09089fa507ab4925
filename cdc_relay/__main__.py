"""``python -m cdc_relay``: the same as the command ``cdc-relay``."""

import sys

from cdc_relay.cli import main

if __name__ == "__main__":
    sys.exit(main())
