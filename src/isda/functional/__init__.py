r"""Every equation of the paper as a pure function in plain torch.

================================  ==================================================================
Sec. 3.1, λ = (t/T) λ₀            :func:`ramped_strength`
Eq. 1, ã ~ N(a, λΣ)               :func:`sample`
Eq. 2, L_M                        :func:`monte_carlo_loss`
Eq. 4, the exponent               :func:`full_quadratic`, :func:`diagonal_quadratic`,
                                  :func:`shared_quadratic`, :func:`identity_quadratic`,
                                  :func:`isda_logits`
Eq. 4, the bound on L_∞ (Eq. 3)   :func:`isda_cross_entropy`, :func:`isda_loss`
the bound for multi-label targets :func:`isda_binary_cross_entropy`
Eq. 9, 10, 11 (Appendix A)        :func:`batch_moments`, :func:`merge_moments`,
                                  :func:`update_moments`
Eq. 12, 13, 14, the gradients     autograd
================================  ==================================================================

All functions are differentiable any number of times with respect to every floating-point tensor,
including covariances. The implementations in ``isda/kernels`` are tested against them.
Shapes use the paper's letters: N samples, C classes, A features.
"""

from isda.functional.augmentation import monte_carlo_loss, sample
from isda.functional.losses import (
    cross_entropy,
    isda_binary_cross_entropy,
    isda_cross_entropy,
    isda_logits,
    isda_loss,
    limit_shift,
    ramped_strength,
)
from isda.functional.moments import Moments, batch_moments, merge_moments, update_moments
from isda.functional.quadratic import (
    diagonal_quadratic,
    full_quadratic,
    identity_quadratic,
    shared_quadratic,
)

__all__ = [
    "Moments",
    "batch_moments",
    "cross_entropy",
    "diagonal_quadratic",
    "full_quadratic",
    "identity_quadratic",
    "isda_binary_cross_entropy",
    "isda_cross_entropy",
    "isda_logits",
    "isda_loss",
    "limit_shift",
    "merge_moments",
    "monte_carlo_loss",
    "ramped_strength",
    "sample",
    "shared_quadratic",
    "update_moments",
]
