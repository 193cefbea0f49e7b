"""XGBoost and LightGBM between the ranks of a run.

The public name of :mod:`horovod_runner.integrations.boosting`.
"""

from horovod_runner.integrations.boosting import lightgbm_ranks, xgboost_ranks

__all__ = ["lightgbm_ranks", "xgboost_ranks"]
