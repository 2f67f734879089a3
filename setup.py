"""Copies ``configs/`` into the wheel, as ``pl_fed/configs``; all else is in pyproject.toml."""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

CONFIGS = Path("configs")


class BuildWithConfigs(build_py):
    """Build command that adds the configs; an editable install reads them where they are."""

    def run(self) -> None:
        """Copy the modules, then the configs."""
        super().run()
        for source in [] if self.editable_mode else _config_files():
            target = Path(self.build_lib, "pl_fed", source)
            target.parent.mkdir(parents=True, exist_ok=True)
            self.copy_file(str(source), str(target))

    def get_source_files(self) -> list[str]:
        """Return the files of a source distribution."""
        return [*super().get_source_files(), *map(str, _config_files())]


def _config_files() -> list[Path]:
    """Return the configs in the repository."""
    return sorted(CONFIGS.rglob("*.yaml"))


setup(cmdclass={"build_py": BuildWithConfigs})
