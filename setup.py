"""Adds three folders of the repository to the package that is built; pyproject.toml has everything else.

The recipes, the dashboards and the configuration of Prometheus have one source each, which is outside the package's
folder. A wheel has copies of them inside the package. An editable installation has none: `asyncrl.recipes` then finds
them in the repository.
"""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

SHIPPED = {
    "asyncrl/recipes": ("configs", "*.*"),
    "asyncrl/recipes/agents": ("configs/agents", "*.*"),
    "asyncrl/dashboards": ("dashboards", "*.json"),
    "asyncrl/prometheus": ("deploy/prometheus", "*.yml"),
    "asyncrl/prometheus/rules": ("deploy/prometheus/rules", "*.yml"),
}
"""Maps a folder of the package to a folder of the repository and the pattern of the files that are copied."""
ENDINGS = (".csv", ".json", ".jsonl", ".py", ".yaml", ".yml")
"""Ends of the names of files that are copied. A folder in which a program has run also has others, such as *.pyc."""


def shipped() -> dict[str, str]:
    """Returns the path of each copied file in the package, with its path in the repository.

    Raises FileNotFoundError for a folder without such files: a wheel without its recipes must not be built.
    """
    found: dict[str, str] = {}
    for target, (source, pattern) in SHIPPED.items():
        files = [file for file in sorted(Path(source).glob(pattern)) if file.suffix in ENDINGS]
        if not files:
            raise FileNotFoundError(f"{source}: has no files {pattern}, which the wheel needs")
        found |= {str(Path(target, file.relative_to(source))): str(file) for file in files}
    return found


class BuildWithFolders(build_py):
    """Copies the shipped files beside the modules, except for an editable installation."""

    def run(self) -> None:
        super().run()
        for target, source in ({} if self.editable_mode else shipped()).items():
            copy = Path(self.build_lib, target)
            copy.parent.mkdir(parents=True, exist_ok=True)
            self.copy_file(source, str(copy))

    def get_source_files(self) -> list[str]:
        """Returns the files that a source distribution needs."""
        return [*super().get_source_files(), *shipped().values()]

    def get_output_mapping(self) -> dict[str, str]:
        """Returns each built file with its source. A strict editable installation makes links of them."""
        copies = {str(Path(self.build_lib, target)): source for target, source in shipped().items()}
        return super().get_output_mapping() | copies


setup(cmdclass={"build_py": BuildWithFolders})
