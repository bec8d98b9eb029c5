"""Import of the user's own files: names lead to those in the current folder, `--import` gives the paths of others.

Command lines and gin files name their contents `module.NAME`.
"""

import importlib
import importlib.util
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import ModuleType

from speccascade_jax.core import names
from speccascade_jax.storage.files import expanded

_LOADED: dict[str, Path] = {}


def load(name: str) -> ModuleType:
    """Imports a file (`path/my_rules.py` becomes the module `my_rules`) or a module that Python can import.

    The file's folder is added to the end of Python's search path, so that the file can import modules beside it. A file
    is imported only once.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file's name is not a valid module name, another module already has this name, or there is
            neither a file nor a module of this name.
        Exception: any error from the file itself, with a note that names the file.
    """
    path = expanded(name)
    if path.suffix != ".py":
        return _named(name)
    if not path.is_file():
        raise FileNotFoundError(f"--import={name}: there is no such file")
    path, module = path.resolve(), path.stem
    if not module.isidentifier():
        raise ValueError(f"--import={name}: {module!r} is not a valid module name: use letters, digits and _ only")
    if _LOADED.get(module) == path:
        return sys.modules[module]
    if module in sys.modules and getattr(sys.modules[module], "__file__", None) != str(path):
        raise ValueError(f"--import={name}: a module {module!r} is loaded already: rename the file")
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
    """Returns the paths of the files that `load` or a name imported, by module name; records store them."""
    # `load` names a module as its file, so packages and the modules inside them are left out
    files = {name: Path(getattr(module, "__file__", None) or "") for name, module in names.MODULES.items()}
    paths = {name: str(path.resolve()) for name, path in files.items() if path.name == f"{name}.py"}
    return paths | {module: str(path) for module, path in _LOADED.items()}


def load_again(recorded: Mapping[str, str] | Iterable[str]) -> None:
    """Imports the user's files that a stored record lists, or that the command line or another process names.

    Args:
        recorded: paths of the files, all of which are imported, or a dictionary from module names to paths, as records
            hold it. Of a dictionary, two kinds of modules are skipped: those that are already imported, and those whose
            file has moved if Python finds the module by its name.
    """
    if isinstance(recorded, Mapping):
        recorded = [path for module, path in recorded.items() if not _is_importable(module, path)]
    for path in recorded:
        load(path)


def _is_importable(module: str, path: str) -> bool:
    if module in sys.modules:
        return True
    return not Path(path).is_file() and importlib.util.find_spec(module) is not None
