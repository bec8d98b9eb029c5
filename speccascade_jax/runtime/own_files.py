"""Files of one's own, imported by path: what `--import` names, under the file's name, for `module.NAME`."""

import importlib
import importlib.util
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import ModuleType

from speccascade_jax.storage.files import expanded

_LOADED: dict[str, Path] = {}


def load(name: str) -> ModuleType:
    """Import a file (`path/my_rules.py` becomes the module `my_rules`) or a module that Python finds.

    The file's folder is searched for its neighbours from then on, behind everything else. A file that was imported is
    not imported again.

    Raises:
        FileNotFoundError: no such file; ValueError: its name is no module's, or another module has it already; whatever
            the file itself raises, with a note that names it.
    """
    path = expanded(name)
    if path.suffix != ".py":
        return _named(name)
    if not path.is_file():
        raise FileNotFoundError(f"--import={name}: there is no such file")
    path, module = path.resolve(), path.stem
    if not module.isidentifier():
        raise ValueError(f"--import={name}: {module!r} can be no module's name: use letters, digits and _ only")
    if _LOADED.get(module) == path:
        return sys.modules[module]
    if module in sys.modules and getattr(sys.modules[module], "__file__", None) != str(path):
        raise ValueError(f"--import={name}: a module {module!r} is there already: rename the file")
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    return _executed(module, path)


def _executed(module: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(module, path)
    assert spec is not None and spec.loader is not None
    imported = sys.modules[module] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(imported)
    except BaseException as error:
        del sys.modules[module]
        error.add_note(f"while importing {path}")
        raise
    _LOADED[module] = path
    return imported


def _named(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        raise ValueError(f"--import={name}: there is no such file, and no module of that name") from error


def loaded() -> dict[str, str]:
    """Module -> file of those that were imported by path, for records."""
    return {module: str(path) for module, path in _LOADED.items()}


def load_again(recorded: Mapping[str, str] | Iterable[str]) -> None:
    """Import what a record, or another process, had imported; of a record's modules those that are not there yet."""
    if isinstance(recorded, Mapping):
        recorded = [path for module, path in recorded.items() if module not in sys.modules]
    for path in recorded:
        load(path)
