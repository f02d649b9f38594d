"""The import diet on small packages: what is deferred is the real thing as soon as it is used."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from train import startup

ROOT = Path(__file__).resolve().parents[2]

HEAVY = {
    "heavy/__init__.py": "from heavy import inside\nLOADED = True\nclass Thing:\n    def __init__(self, n=0): self.n = n\n",
    "heavy/inside.py": "import heavy\nclass Inner: pass\ndef double(x): return 2 * x\n",
    "bulky/__init__.py": '__version__ = "1.2"\nfrom bulky import base\nTABLE = "slow"\nRAN = True\n',
    "bulky/base.py": "VALUE = 7\n",
    "bulky/models/__init__.py": "TABLE = 'slower'\n",
    "bulky/models/small.py": "from .. import __version__\nfrom ..base import VALUE\nfrom .. import base\n",
    "user.py": """
import heavy.inside
import heavy.known
from heavy import Thing
from heavy.inside import Inner, double
from heavy.known import same

@same
def function(): return 5

def is_thing(x): return isinstance(x, Thing) or issubclass(type(x), Inner)
""",
    "heavy/known.py": "def same(f): raise RuntimeError('compiles')\nOTHER = 3\n",
}


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, text in HEAVY.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(startup, "DEFERRED", {"heavy": {}, "heavy.known": {"same": startup._same}, "nowhere": {}})
    monkeypatch.setattr(startup, "PACKAGES", ("bulky", "bulky.models"))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        del sys.modules[name]


def lean() -> ModuleType:
    with startup.diet():
        import user  # type: ignore[import-not-found]
    module: ModuleType = user
    return module


@pytest.mark.usefixtures("packages")
class TestDeferredModule:
    def test_importing_and_asking_for_types_does_not_load_it(self) -> None:
        user = lean()
        assert not user.is_thing(3)
        assert user.function() == 5
        assert not [name for name in sys.modules if name.startswith("heavy")]

    def test_calling_a_name_taken_from_it_does(self) -> None:
        user = lean()
        assert user.double(4) == 8
        assert user.Thing(3).n == 3
        import heavy  # type: ignore[import-not-found]

        assert heavy.LOADED
        assert user.is_thing(heavy.Thing())
        assert user.is_thing(heavy.inside.Inner())
        assert isinstance(user.Thing(1), heavy.Thing)

    def test_subclassing_and_attributes_do(self) -> None:
        user = lean()

        class Mine(user.Thing):  # type: ignore[misc,name-defined]
            pass

        assert Mine(2).n == 2
        assert user.heavy.inside.double(1) == 2
        assert user.heavy.known.OTHER == 3

    def test_an_ordinary_import_afterwards_finds_the_real_one(self) -> None:
        lean()
        import heavy.inside  # type: ignore[import-not-found]

        assert heavy.inside.double(3) == 6

    def test_use_while_the_diet_is_open_loads_it_then(self) -> None:
        with startup.diet():
            from heavy import Thing

            assert Thing(4).n == 4
            import heavy

            assert heavy.LOADED

    def test_what_does_not_exist_is_an_import_error_when_used(self) -> None:
        with startup.diet():
            from nowhere import nothing  # type: ignore[import-not-found]
        with pytest.raises(ModuleNotFoundError, match="nowhere"):
            nothing()
        with pytest.raises(AttributeError, match="missing"):
            lean().heavy.inside.missing()


@pytest.mark.usefixtures("packages")
class TestPackageStandIn:
    def test_submodules_import_without_running_init(self) -> None:
        with startup.diet():
            from bulky.models import small  # type: ignore[import-not-found]
        assert (small.VALUE, small.__version__, small.base.VALUE) == (7, "1.2", 7)
        assert "RAN" not in vars(sys.modules["bulky"])

    def test_init_runs_when_the_package_is_asked_for_more(self) -> None:
        with startup.diet():
            import bulky.models.small  # type: ignore[import-not-found]
        assert bulky.TABLE == "slow"
        assert bulky.models.TABLE == "slower"
        assert bulky.models.small.VALUE == 7
        with pytest.raises(AttributeError):
            _ = bulky.nothing

    def test_a_package_that_looks_unlike_what_is_known_is_left_alone(self, tmp_path: Path) -> None:
        (tmp_path / "bulky" / "__init__.py").write_text("from bulky.base import VALUE\nRAN = True\n")
        with startup.diet():
            import bulky
        assert vars(bulky)["RAN"]


def test_an_error_inside_leaves_no_trace() -> None:
    finders, collecting = list(sys.meta_path), gc.isenabled()
    with pytest.raises(RuntimeError), startup.diet():
        raise RuntimeError
    assert sys.meta_path == finders
    assert gc.isenabled() == collecting


FAKE_TORCH = """
import sys
if any(type(finder).__name__ == "_Finder" for finder in sys.meta_path):
    raise RuntimeError("no lean imports here")
raise ImportError("libcudart.so.13: cannot open shared object file", name="torch")
"""


def test_failing_lean_imports_start_over_and_failing_plain_ones_are_one_line(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(FAKE_TORCH)
    (tmp_path / "text").write_text("some text " * 100)
    recipe = (ROOT / "tests" / "golden" / "recipe-tiny.json").read_text().replace("{stdlib}/*.py", str(tmp_path / "text"))
    (tmp_path / "recipe.json").write_text(recipe)
    places = [f"--recipe={tmp_path}/recipe.json", f"--run-dir={tmp_path}/run", f"--data-dir={tmp_path}/data"]
    ran = subprocess.run(
        [sys.executable, str(ROOT / "train" / "main.py"), *places],
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 2
    first, second = ran.stderr.splitlines()
    assert first == "train: lean imports failed (RuntimeError: no lean imports here); starting over with plain ones"
    assert second.startswith(
        f"train: {sys.executable}: cannot import torch: libcudart.so.13: cannot open shared object file; expected"
    )
    assert "-m pip install 'r4090c[train]'" in second
