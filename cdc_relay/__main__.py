"""``python -m cdc_relay``: the same as the command ``cdc-relay``."""

from cdc_relay.cli import entry

if __name__ == "__main__":
    entry()
