"""A small shop that tells the world about its orders through a transactional outbox.

``model`` holds the tables, ``service`` the business, ``clerk`` is one process of the service,
``ledger`` a consumer. ``naive`` is the same shop with commit-then-send, for comparison, and
``demo`` runs both side by side and kills them.
"""
