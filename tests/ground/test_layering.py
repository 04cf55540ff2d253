"""Every import of the package, also those inside functions, against the table of floors in CONTRIBUTING.md."""

import ast
import pathlib
import re
import statistics

import pytest
from helpers import TESTS

ROOT = TESTS.parent
PACKAGE = ROOT / "dspark_jax"


def floors(text: str) -> dict[str, tuple[int, set[str]]]:
    """Return room -> (floor, rooms that it may import) of the table under `## Floors`."""
    section = text.split("## Floors", 1)[1].split("\n## ", 1)[0]
    rows = re.findall(r"^\| (\d+) \| ([\w/]+) \|[^|]*\|([^|]*)\|$", section, re.MULTILINE)
    return {room: (int(floor), {name.strip() for name in allowed.split(",")} - {""}) for floor, room, allowed in rows}


TABLE = floors((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"))


def modules(package: pathlib.Path) -> dict[str, pathlib.Path]:
    """Return dotted name -> file."""
    found = {}
    for path in package.rglob("*.py"):
        parts = path.relative_to(package.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def room(name: str, known: dict[str, pathlib.Path]) -> str:
    """Return a module's room: its folder, "ground" for files of the package itself, "package" for its __init__."""
    parts = name.split(".")[1:]
    if not parts:
        return "package"
    return "/".join(parts if known[name].name == "__init__.py" else parts[:-1]) or "ground"


def imports(package: pathlib.Path) -> list[tuple[str, str]]:
    """Return (importer, imported) for every import statement of the package's modules."""
    known, found = modules(package), []
    for name, path in known.items():
        here = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            targets: list[str] = []
            if isinstance(node, ast.Import):
                targets = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                start = here[: len(here) - node.level + 1] if node.level else []
                source = ".".join([*start, *(node.module or "").split(".")]).strip(".")
                targets = [inner if (inner := f"{source}.{a.name}") in known else source for a in node.names]
            found += [(name, target) for target in targets if target.split(".")[0] == package.name]
    return found


def violations(package: pathlib.Path) -> list[str]:
    """Return one sentence per import that the table does not allow."""
    known, wrong = modules(package), []
    for importer, imported in imports(package):
        source, target = room(importer, known), room(imported, known)
        floor, allowed = TABLE[source]
        if source != target and (target not in allowed or TABLE[target][0] >= floor):
            wrong.append(f"{importer} imports {imported}: {source} (floor {floor}) may not import {target}")
    return wrong


def circle(package: pathlib.Path) -> list[str]:
    """Return the modules of an import circle, or nothing."""
    needs: dict[str, set[str]] = {}
    for importer, imported in imports(package):
        if importer != imported:
            needs.setdefault(importer, set()).add(imported)
    done: set[str] = set()

    def walk(name: str, way: list[str]) -> list[str]:
        if name in way:
            return way[way.index(name) :]
        if name not in done:
            for other in sorted(needs.get(name, ())):
                if found := walk(other, [*way, name]):
                    return found
            done.add(name)
        return []

    return next((found for name in sorted(needs) if (found := walk(name, []))), [])


def test_the_table_is_whole():
    known = modules(PACKAGE)
    assert {room(name, known) for name in known} == set(TABLE)
    for name, (floor, allowed) in TABLE.items():
        assert all(TABLE[other][0] < floor for other in allowed), name


def test_nothing_runs_up_and_nothing_in_a_circle():
    assert violations(PACKAGE) == []
    assert circle(PACKAGE) == []


@pytest.mark.parametrize(
    ("module", "line", "words"),
    [
        ("noise.py", "from .drafting import heads", "ground (floor 0) may not import drafting"),
        (
            "kernels/walk.py",
            "def f():\n    from ..config import DraftConfig as c\n    import dspark_jax.drafting.api",
            "may not",
        ),
        ("verification/filter.py", "from dspark_jax.transformer.cache import KVCache", "may not import transformer"),
    ],
)
def test_an_upward_import_is_found(tmp_path, module, line, words):
    for path in PACKAGE.rglob("*.py"):
        copy = tmp_path / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(path.read_bytes())
    changed = tmp_path / "dspark_jax" / module
    changed.write_text(changed.read_text(encoding="utf-8") + "\n" + line + "\n", encoding="utf-8")
    found = violations(tmp_path / "dspark_jax")
    assert len(found) == 1
    assert words in found[0]


def test_a_circle_is_found(tmp_path):
    package = tmp_path / "dspark_jax"
    package.mkdir()
    (package / "__init__.py").write_text("")
    for name, other in (("a", "b"), ("b", "c"), ("c", "a")):
        (package / f"{name}.py").write_text(f"def f():\n    from .{other} import f\n")
    assert sorted(circle(package)) == ["dspark_jax.a", "dspark_jax.b", "dspark_jax.c"]


def lines(path: pathlib.Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def test_files_and_folders_stay_small():
    sizes = {path: lines(path) for path in PACKAGE.rglob("*.py") if path.name != "__init__.py"}
    assert statistics.median(sizes.values()) < 150
    assert {path.name: size for path, size in sizes.items() if size > 300} == {}
    assert {path.name: size for path in TESTS.rglob("test_*.py") if (size := lines(path)) > 450} == {}
    for folder in {path.parent for path in sizes} - {PACKAGE / "cli"}:
        count = sum(path.parent == folder for path in sizes)
        assert count <= 15, folder
