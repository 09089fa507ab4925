"""The partition that a Java producer chooses for a key, by its own reference algorithm.

Apache Kafka, ``org.apache.kafka.common.utils.Utils.murmur2`` and ``BuiltInPartitioner``.
"""

from __future__ import annotations

_M = 0x5BD1E995
_SEED = 0x9747B28C
_32_BITS = 0xFFFFFFFF


def murmur2(data: bytes) -> int:
    """The hash as Java's ``int``: 32 bits with a sign."""
    whole = len(data) & ~3
    h = (_SEED ^ len(data)) & _32_BITS
    for at in range(0, whole, 4):
        k = int.from_bytes(data[at : at + 4], "little") * _M & _32_BITS
        k = (k ^ k >> 24) * _M & _32_BITS
        h = h * _M & _32_BITS ^ k
    if len(data) > whole:
        h = (h ^ int.from_bytes(data[whole:], "little")) * _M & _32_BITS
    h = (h ^ h >> 13) * _M & _32_BITS
    h ^= h >> 15
    return h - (1 << 32) if h >> 31 else h


def java_partition(key: bytes, partitions: int) -> int:
    """The partition of ``key`` in a topic of that many."""
    return (murmur2(key) & 0x7FFFFFFF) % partitions
