"""The figures of this machine, as ratios in one run: ``python -m benchmarks --help``.

``place`` starts servers, ``workload`` fills the binlog, ``reader`` is a measured process that only
decodes, ``relay`` the whole relay as one, ``scenarios`` puts them together, ``figures`` shows what
came out.
"""
