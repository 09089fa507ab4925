"""Reading the binlog as a replica would: connection, positions, layouts, row decoding.

The hot modules may be compiled (see ``setup.py``). The sources beside them run unchanged, and do
so when ``CDC_RELAY_PURE`` is set, and in a checkout when a source is newer than its compiled form:
an edit takes effect at once. An installation has no edits, and its times only tell in which order
the files were unpacked.
"""

import os
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import EXTENSION_SUFFIXES, ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType

_HOT = ("jsonb", "values", "rows", "decoder")
_HERE = Path(__file__).parent
_IN_CHECKOUT = (_HERE.parents[1] / "pyproject.toml").exists()


def compiled() -> bool:
    """Whether the decoder that this process imports is the compiled one."""
    return not _as_source()


def _as_source() -> bool:
    if os.environ.get("CDC_RELAY_PURE"):
        return True
    for name in _HOT:
        built = next((p for s in EXTENSION_SUFFIXES if (p := _HERE / (name + s)).exists()), None)
        if built is None:
            return True
        edited = (_HERE / f"{name}.py").stat().st_mtime > built.stat().st_mtime
        if edited and _IN_CHECKOUT:
            return True
    return False


class _SourceFinder(MetaPathFinder):
    """Finds the hot modules' sources before their compiled forms."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, _, name = fullname.rpartition(".")
        if package != __name__ or name not in _HOT:
            return None
        return spec_from_file_location(fullname, _HERE / f"{name}.py")


if _as_source():
    sys.meta_path.insert(0, _SourceFinder())
