"""Finds the recipes, the dashboards and the configuration of Prometheus, which are not part of the package's code.

A recipe is a complete configuration: a YAML file, with the modules and the data that it needs beside it. In the
repository the three are in the folders `configs`, `dashboards` and `deploy/prometheus`. `setup.py` copies them into the
package when a wheel is built. So the same functions work in a clone and in an installation.

Python imports the modules of recipes as modules of this package, such as `asyncrl.recipes.own_task`.
"""

from pathlib import Path

_PACKAGE = Path(__file__).parents[1]
_REPOSITORY = _PACKAGE.parent


def _folder(name: str, *, in_repository: str, has: str) -> Path:
    """Returns the folder `name` of the package if it has the file `has`, else the folder of the repository."""
    installed = _PACKAGE / name
    return installed if (installed / has).is_file() else _REPOSITORY / in_repository


RECIPES = _folder("recipes", in_repository="configs", has="quickstart.yaml")
DASHBOARDS = _folder("dashboards", in_repository="dashboards", has="overview.json")
PROMETHEUS = _folder("prometheus", in_repository="deploy/prometheus", has="prometheus.yml")

__path__[:] = [str(RECIPES)]  # in a clone, the recipes' modules are not in the folder of this file
