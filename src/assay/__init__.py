"""assay: methods of research papers as parts, and their claims as something that runs.

Two halves, one package:

* **parts** live in their family: ``from assay.serving import KIVICache``,
  ``from assay.statistics import RQRRegressor``. A part needs its host library and nothing else of assay.
* **claims** are run by :func:`run` or by the command ``assay run SLUG``.

``import assay`` loads neither torch nor scikit-learn: what is heavy is imported when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

__version__ = "0.1.0"
__all__ = ["__version__", "list_claims", "run"]

if TYPE_CHECKING:
    from assay.bench.api import list_claims, run


def __getattr__(name: str) -> object:
    if name in ("run", "list_claims"):
        from assay.bench import api

        return getattr(api, name)
    raise AttributeError(f"module 'assay' has no attribute {name!r}")
