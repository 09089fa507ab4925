"""cdc-relay: the stream relay of a transactional outbox (MySQL or MariaDB to Kafka).

This package imports nothing here on purpose: ``import writer`` reaches the kernel
(``cdc_relay.outbox``, ``cdc_relay.errors``) through it and must stay light.
"""
