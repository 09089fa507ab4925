"""Compiles the hot modules with mypyc where a C compiler is at hand; everything else is in
pyproject.toml.

The same sources run as plain Python when they are not compiled: a failed build is no error, and
``CDC_RELAY_PURE=1`` skips it. ``cdc-relay version`` says which is active.
"""

import os
import shutil
import sysconfig

from setuptools import Extension, setup

HOT = [f"cdc_relay/binlog/{name}.py" for name in ("jsonb", "values", "rows", "decoder")]


def extensions() -> list[Extension]:
    """The compiled modules; none where they are not wanted or cannot be."""
    compiler = (sysconfig.get_config_var("CC") or "cc").split()[0]
    if os.environ.get("CDC_RELAY_PURE") or not (shutil.which(compiler) or shutil.which("cc")):
        return []
    try:
        from mypyc.build import mypycify
    except ImportError:
        return []
    try:
        made: list[Extension] = mypycify(["--strict", *HOT], opt_level="3", group_name="cdc_relay")
    except SystemExit:  # how mypyc says that it cannot
        return []
    for extension in made:
        extension.optional = True
    return made


setup(ext_modules=extensions())
