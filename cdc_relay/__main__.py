"""``python -m cdc_relay``: the same as the command ``cdc-relay``."""

from cdc_relay.cli import main

if __name__ == "__main__":
    main()
