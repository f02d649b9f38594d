"""Import torch, DeepSpeed and transformers without the parts this training never runs.

Left out: torch._dynamo, torch._inductor and sympy (only for torch.compile), torch.distributed.tensor (only for tensor
parallelism and FSDP2), the tables of every transformers model, processors of images and sound. Measured:
bench/results/launch-small.md.

How: while `diet()` is open, importing a module of DEFERRED gives a stand-in. Nothing is faked for good: the first
real use of a stand-in, or of a name taken from one, imports the real module and hands over to it. So a version that
uses more than we know is slower, not wrong. When an import fails all the same, main.py starts over with plain imports.
"""

from __future__ import annotations

import functools
import gc
import importlib
import importlib.abc
import importlib.machinery
import re
import sys
import typing
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any

PLAIN_IMPORTS = "R4090C_PLAIN_IMPORTS"
"""Environment: "1" turns the diet off."""


def _same(function: Callable[..., Any] | None = None, *_: object, **__: object) -> Any:
    """Stand in for a decorator of torch._dynamo: where nothing is compiled it changes nothing."""
    return _same if function is None else function


def _nothing(*_: object, **__: object) -> None:
    """Stand in for a call of torch._dynamo that has no effect where nothing is compiled."""


DEFERRED: dict[str, dict[str, Any]] = {
    "torch._dynamo": {"disable": _same, "allow_in_graph": _same, "assume_constant_result": _same, "graph_break": _nothing},
    "torch._dynamo.trace_rules": {"clear_lru_cache": _nothing},
    "torch._inductor": {},
    "torch.distributed.tensor": {},
    "torch.export": {},
    "transformers.distributed.checkpoint": {},
    "transformers.distributed.expert_parallel": {},
    "transformers.distributed.fsdp": {},
    "transformers.distributed.tensor_parallel": {},
    "transformers.processing_utils": {name: getattr(typing, name) for name in ("Unpack",) if hasattr(typing, name)},
}
"""Module -> its names that mean something known in a process that never compiles. What lies below is deferred with it.

torch.optim calls torch._dynamo.disable and graph_break around every step, init_process_group calls clear_lru_cache;
`Unpack` is typing's own. Found with `python -X importtime`. A module that does not exist is never asked for.
"""

KEPT = "torch._dynamo"
"""The one stand-in that stays after the imports: torch.optim imports it in every step."""

PACKAGES = ("transformers", "transformers.models")
"""Packages whose __init__ reads the source of every model; their submodules can be imported without it."""


@contextmanager
def diet() -> Iterator[None]:
    """Within this context imports are lean; afterwards whatever is asked for is the real thing.

    The garbage collector rests meanwhile (0.3 s of passes over modules that stay anyway) and leaves them alone afterwards.
    """
    finder = _Finder()
    sys.meta_path.insert(0, finder)
    gc.disable()
    try:
        for name in PACKAGES:
            _stand_in_for_package(name)
        yield
    finally:
        finder.close()
        sys.meta_path.remove(finder)
        gc.freeze()
        gc.enable()


@contextmanager
def muon_without_compiler() -> Iterator[None]:
    """Within this context import DeepSpeed; at its end its Muon file is imported without all of torch._inductor.

    That file decorates with torch.compile, and DeepSpeed imports it for any optimizer. Meanwhile torch.compile does its work
    when the compiled function is first called: Muon itself works as ever, only its first step is slower.
    """
    torch = importlib.import_module("torch")
    compile_now = torch.compile

    def compile_later(model: Any = None, **options: Any) -> Any:
        if model is None:
            return functools.partial(compile_later, **options)
        compiled: list[Any] = []

        @functools.wraps(model)
        def call(*args: Any, **kwargs: Any) -> Any:
            if not compiled:
                compiled.append(compile_now(model, **options))
            return compiled[0](*args, **kwargs)

        return call

    torch.compile = compile_later  # type: ignore[attr-defined]
    try:
        yield
        with suppress(ImportError):  # other versions have no such file
            importlib.import_module("deepspeed.runtime.zero.muon.original_muon")
    finally:
        torch.compile = compile_now  # type: ignore[attr-defined]


def _root(name: str) -> str | None:
    """Return the first entry of DEFERRED that `name` is or lies below, None when there is none."""
    return next((root for root in DEFERRED if name == root or name.startswith(root + ".")), None)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Answers imports of DEFERRED with stand-ins while `open`."""

    def __init__(self) -> None:
        self.open = True
        self.real: set[str] = set()
        """Roots that were needed after all."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> Any:
        root = _root(name)
        if root is None or root in self.real:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Deferred(spec.name, self)

    def exec_module(self, module: ModuleType) -> None:
        vars(module).pop("__path__", None)  # so that importing a submodule asks __getattr__ below

    def close(self) -> None:
        """From now on imports find the real modules; only torch._dynamo stays, it is called in every step."""
        self.open = False
        for name in [name for name, module in sys.modules.items() if isinstance(module, _Deferred) and name != KEPT]:
            del sys.modules[name]

    def load(self, name: str) -> ModuleType:
        """Import the real module `name`; the stand-ins of the same root make way."""
        root = _root(name)
        if root is not None and root not in self.real:
            self.real.add(root)
            for other in [other for other, module in sys.modules.items() if isinstance(module, _Deferred)]:
                if _root(other) == root:
                    del sys.modules[other]
        return importlib.import_module(name)


class _Deferred(ModuleType):
    """A module that is not imported yet. Names taken from it while the diet is open are `_Name`s."""

    def __init__(self, name: str, finder: _Finder) -> None:
        super().__init__(name)
        self.__dict__["_finder"] = finder

    def __getattr__(self, name: str) -> Any:
        known = DEFERRED.get(self.__name__, {})
        if name in known:
            return known[name]
        if f"{self.__name__}.{name}" in DEFERRED:
            return _Deferred(f"{self.__name__}.{name}", self.__dict__["_finder"])
        if name.startswith("__") and name != "__path__":  # inspect and others look over all modules; that is no use
            raise AttributeError(name)
        finder: _Finder = self.__dict__["_finder"]
        if not finder.open or _root(self.__name__) in finder.real:
            return getattr(finder.load(self.__name__), name)
        if name == "__path__":
            return []
        return _Name(self.__name__, name, finder)


class _Name:
    """A class or function of a module that is not imported yet; any use but naming it imports the module."""

    def __init__(self, module: str, name: str, finder: _Finder) -> None:
        self._module, self._name, self._finder = module, name, finder

    def _real(self) -> Any:
        return getattr(self._finder.load(self._module), self._name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._real()(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # typing and copy look for protocols; they are not a use
            raise AttributeError(name)
        return getattr(self._real(), name)

    def __instancecheck__(self, instance: object) -> bool:
        """Return whether `instance` is one; where the module was never imported, nothing can be."""
        return _root(self._module) in self._finder.real and isinstance(instance, self._real())

    def __subclasscheck__(self, subclass: type) -> bool:
        return _root(self._module) in self._finder.real and issubclass(subclass, self._real())

    def __mro_entries__(self, bases: tuple[object, ...]) -> tuple[Any, ...]:
        return (self._real(),)

    def __getitem__(self, item: Any) -> Any:
        return self._real()[item]

    def __or__(self, other: Any) -> Any:
        return self._real() | other

    def __ror__(self, other: Any) -> Any:
        return other | self._real()


def _stand_in_for_package(name: str) -> None:
    """Put a package into sys.modules whose submodules import as ever, and whose __init__ runs when it is asked for more.

    Leaves everything as it is when the package is loaded already or does not look as known.
    """
    parent, _, child = name.rpartition(".")
    if name in sys.modules or (parent and not isinstance(sys.modules.get(parent), _Package)):
        return
    spec = importlib.machinery.PathFinder.find_spec(name, list(sys.modules[parent].__path__) if parent else None)
    if spec is None or spec.origin is None or not spec.submodule_search_locations:
        return
    package = _Package(name)
    package.__spec__, package.__file__, package.__path__ = spec, spec.origin, list(spec.submodule_search_locations)
    if not parent:
        version = re.search(r'^__version__ = "([^"]+)"$', Path(spec.origin).read_text(encoding="utf-8"), re.MULTILINE)
        if version is None:
            return
        vars(package)["__version__"] = version[1]
    sys.modules[name] = package
    if parent:
        setattr(sys.modules[parent], child, package)


class _Package(ModuleType):
    """A package whose __init__ has not run yet."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if importlib.machinery.PathFinder.find_spec(f"{self.__name__}.{name}", list(self.__path__)):
            return importlib.import_module(f"{self.__name__}.{name}")
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return getattr(importlib.import_module(self.__name__), name)
