"""``python -m fallback`` is ``cdc-relay compensate``: same options, output and exit codes."""

import sys

from cdc_relay.cli import main

if __name__ == "__main__":
    sys.exit(main(["compensate", *sys.argv[1:]]))
