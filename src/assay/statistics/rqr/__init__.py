"""Prediction intervals by relaxed quantile regression (RQR): losses, estimators, conformal correction, metrics.

Two levels. Whoever has a scikit-learn pipeline takes :class:`RQRRegressor` (a network) or
:class:`RQRBoostingRegressor` (trees). Whoever has a torch network takes :class:`RQRLoss` and gives the network two
outputs. :func:`fit_stack` trains many small networks at once (all seeds, all penalties) as one stacked model.

``coverage`` is the share of targets that an interval should hold, 0.9 for a 90% interval. It is never the miscoverage
level, which some packages call alpha.

Source: Pouplin, Jeffares, Seedat, van der Schaar, "Relaxed Quantile Regression: Prediction Intervals for Asymmetric
Noise", ICML 2024.
"""

from __future__ import annotations

from assay._lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "ConformalIntervalRegressor": "conformal",
        "IntervalRegressionLoss": "losses",
        "MeanCentredLoss": "losses",
        "PinballPairLoss": "losses",
        "RQRBoostingRegressor": "boosting",
        "RQRLoss": "losses",
        "RQROrthogonalLoss": "losses",
        "RQRRegressor": "regressor",
        "SimultaneousQuantileLoss": "losses",
        "StackedMLP": "stack",
        "WinklerLoss": "losses",
        "apply_correction": "conformal",
        "conformal_correction": "conformal",
        "fit_stack": "stack",
        "interval_report": "metrics",
        "narrowest_quantile_pair": "losses",
        "rqr_grad_hess": "formulas",
        "rqr_loss": "formulas",
        "winkler_score": "metrics",
    },
)
