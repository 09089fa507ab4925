"""The compensator: sends what the stream missed, from another process than all it watches over.

``cdc-relay compensate`` and ``python -m fallback`` run one pass; ``--loop`` stays. It enters the
way of the data at the router, so the same row gives the same bytes as on the stream. It never
reads the binlog. (Imports within this folder are relative: the name is a common one.)
"""

from .compensator import Compensator, Summary
from .run import run

__all__ = ["Compensator", "Summary", "run"]
