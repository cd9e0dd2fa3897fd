"""What keeps a tree from being released is said, step by step."""

from __future__ import annotations

from pathlib import Path

import pytest
import release

FILES = {
    "pyproject.toml": '[project]\nversion = "1.2.0"\n',
    "relax_fusion/__init__.py": '__version__ = "1.2.0"\n',
    "CITATION.cff": "version: 1.2.0\n",
    "CHANGELOG.md": "# Changelog\n\n## 1.2.0 (2026-12-01)\n",
}


def tree(root: Path, changes: dict[str, str]) -> Path:
    for name, text in {**FILES, **changes}.items():
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("relax_fusion/__init__.py", '__version__ = "1.2.0.dev"\n'),
        ("CITATION.cff", "version: 1.1.0\n"),
        ("CHANGELOG.md", "## 1.2.0 (unreleased)\n"),
        ("CHANGELOG.md", "## 1x2.0 (2026-12-01)\n"),
    ],
)
def test_versions_that_differ(tmp_path: Path, name: str, text: str) -> None:
    with pytest.raises(release.Failed, match=f"{name} has no line .* for version 1.2.0"):
        release.check_version(tree(tmp_path, {name: text}))


def test_this_tree_lacks_a_date_at_most() -> None:
    try:
        release.check_version()
    except release.Failed as err:
        assert str(err).startswith("CHANGELOG.md has no line")


WRITTEN = {"PKG-INFO", "setup.cfg", "relax_fusion-1.0.dist-info/RECORD"}


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ({"a.py"}, r"a-1.tar.gz misses 1 file\(s\), the first: b.css"),
        ({"a.py", "b.css", "c.log", "c.so"}, r"has too much: 2 file\(s\), the first: c.log"),
        ({"a.py", "b.css", "d/PKG-INFO"}, "has too much: 1 .* d/PKG-INFO"),
    ],
)
def test_contents_that_are_not_the_tree(found: set[str], message: str) -> None:
    release.check_contents(WRITTEN | {"a.py", "b.css"}, {"a.py", "b.css"}, Path("a-1.tar.gz"))
    with pytest.raises(release.Failed, match=message):
        release.check_contents(WRITTEN | found, {"a.py", "b.css"}, Path("a-1.tar.gz"))


def test_steps_are_told_one_by_one(monkeypatch, capsys) -> None:
    def wrong() -> str:
        raise release.Failed("something is wrong")

    monkeypatch.setattr(release, "STEPS", {"one": wrong, "two": lambda: "fine"})
    assert release.main([]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "one      failed  something is wrong",
        "two      ok      fine",
    ]
    assert release.main(["--only", "two"]) == 0


def test_packages_run_without_the_tree(monkeypatch) -> None:
    seen = []
    monkeypatch.setenv("PYTHONPATH", str(release.ROOT))
    monkeypatch.setattr(release.venv, "create", lambda *_, **__: None)
    monkeypatch.setattr(release, "packages", lambda *_: (Path("a.whl"), Path("a.tar.gz")))
    monkeypatch.setattr(release, "_run", lambda *_, cwd, env: seen.append((cwd, env)))
    release.check_wheel()
    assert len(seen) == 2 * (1 + len(release.SMOKE))
    assert all("PYTHONPATH" not in env and release.ROOT not in cwd.parents for cwd, env in seen)
