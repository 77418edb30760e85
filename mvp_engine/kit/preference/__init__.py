"""Objectives that compare answers or models: functions and references for the engines of recipes, which own the loss.

Preference pairs, labelled rows and reward models (`losses.py`), reference models (`reference.py`), a teacher
(`distil.py`), pairs of views over a whole step (`contrastive.py`).
"""

from typing import TYPE_CHECKING

from mvp_engine.imports import lazy_exports

if TYPE_CHECKING:
    from mvp_engine.kit.preference.contrastive import (
        GradientCache,
        gather_views,
        info_nce,
        retrieval_accuracy,
        siglip,
    )
    from mvp_engine.kit.preference.distil import Head, Teacher, linear_kl
    from mvp_engine.kit.preference.losses import (
        check_last_tokens,
        check_pairs,
        good_answer_nll,
        has_preference,
        is_good,
        log_labelled_rows,
        log_nll_term,
        log_odds,
        log_pairs,
        log_ratios,
        mismatched_kl,
        num_labels,
        pairs_per_token,
        robust_loss,
        sigmoid_loss,
    )
    from mvp_engine.kit.preference.reference import (
        CopyReference,
        Reference,
        frozen_engine,
        frozen_model,
        open_reference,
    )
else:
    __getattr__ = lazy_exports(__name__)

__all__ = [
    "CopyReference",
    "GradientCache",
    "Head",
    "Reference",
    "Teacher",
    "check_last_tokens",
    "check_pairs",
    "frozen_engine",
    "frozen_model",
    "gather_views",
    "good_answer_nll",
    "has_preference",
    "info_nce",
    "is_good",
    "linear_kl",
    "log_labelled_rows",
    "log_nll_term",
    "log_odds",
    "log_pairs",
    "log_ratios",
    "mismatched_kl",
    "num_labels",
    "open_reference",
    "pairs_per_token",
    "retrieval_accuracy",
    "robust_loss",
    "siglip",
    "sigmoid_loss",
]
