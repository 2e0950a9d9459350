"""Strata under its product name: the same names and the same modules as `dtruntime`.

`strata.X` is `dtruntime.X`, and `import strata.checkpoint` gives the very module
`dtruntime.checkpoint`, loaded when it is asked for.
"""

import importlib
import importlib.util
import sys
from importlib.abc import InspectLoader, Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dtruntime import *  # noqa: F403
    from dtruntime import __version__ as __version__
else:
    import dtruntime as _dtruntime

    __all__ = _dtruntime.__all__

    def __getattr__(name):
        return getattr(_dtruntime, name)

    def __dir__():
        return sorted({*globals(), *dir(_dtruntime)})


class _AliasFinder(MetaPathFinder, Loader):
    """Resolves `strata.*` to the modules of `dtruntime`, without a second copy of any."""

    def find_spec(
        self, fullname: str, path: "Sequence[str] | None", target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not fullname.startswith("strata."):
            return None
        real = importlib.util.find_spec(_real_name(fullname))
        if real is None:
            return None
        is_package = real.submodule_search_locations is not None
        return ModuleSpec(fullname, self, origin=real.origin, is_package=is_package)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        # A stand-in, because the import system writes to the module it is given; it forwards
        # for the instant in which another thread can see it.
        real = importlib.import_module(_real_name(spec.name))
        stand_in = ModuleType(spec.name)
        stand_in.__getattr__ = lambda name: getattr(real, name)  # type: ignore[method-assign]
        return stand_in

    def exec_module(self, module: ModuleType) -> None:
        sys.modules[module.__name__] = sys.modules[_real_name(module.__name__)]

    def get_code(self, fullname: str) -> CodeType | None:
        """Let `python -m strata.x` run the module `dtruntime.x`."""
        real = importlib.util.find_spec(_real_name(fullname))
        if real is None or not isinstance(real.loader, InspectLoader):
            return None
        return real.loader.get_code(real.name)


def _real_name(alias: str) -> str:
    return "dtruntime" + alias.removeprefix("strata")


# First in line: the path of `strata.checkpoint` is that of `dtruntime.checkpoint`, so the ordinary
# finder would load a second copy of every module in there.
sys.meta_path.insert(0, _AliasFinder())
