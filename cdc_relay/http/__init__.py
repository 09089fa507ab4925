"""What a relay serves over HTTP: ``/metrics``, ``/healthz``, ``/readyz`` and the page at ``/``.

Everything is read-only and answered from memory: a request waits for no database and no broker.
Threads of this package look at those in their own time.
"""
