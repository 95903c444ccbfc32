from __future__ import annotations

import numpy as np
import pytest
from scipy import special, stats

from trace_audit.diff.special import beta_quantile, incomplete_beta, normal_cdf, t_quantile


@pytest.mark.parametrize("degrees", [1, 2, 3, 7, 15, 50, 99, 1000, 1_000_000])
@pytest.mark.parametrize("q", [1e-6, 0.001, 0.025, 0.3, 0.49, 0.6, 0.8, 0.975, 0.999999])
def test_t_quantile_agrees_with_scipy(degrees: int, q: float) -> None:
    assert t_quantile(q, degrees) == pytest.approx(stats.t.ppf(q, degrees), rel=1e-8)


def test_t_quantile_of_one_half_is_zero() -> None:
    assert t_quantile(0.5, 4) == 0.0


@pytest.mark.parametrize("a", [0.5, 1.0, 3.0, 19.0, 400.0])
@pytest.mark.parametrize("b", [0.5, 1.0, 10.0, 1000.0, 2e5])
def test_beta_functions_agree_with_scipy(a: float, b: float) -> None:
    for q in (1e-4, 0.025, 0.5, 0.975, 0.9999):
        x = float(stats.beta.ppf(q, a, b))
        assert beta_quantile(q, a, b) == pytest.approx(x, rel=1e-8)
        assert incomplete_beta(a, b, x) == pytest.approx(special.betainc(a, b, x), rel=1e-9)


def test_normal_cdf_keeps_its_tails() -> None:
    x = np.array([-30.0, -8.0, -1.0, 0.0, 2.0, 9.0])
    np.testing.assert_allclose(normal_cdf(x), special.ndtr(x), rtol=1e-12)


@pytest.mark.parametrize("arguments", [(0.0, 3), (1.0, 3), (0.5, 0)])
def test_t_quantile_refuses_what_has_no_quantile(arguments: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="t_quantile"):
        t_quantile(*arguments)


def test_incomplete_beta_refuses_arguments_out_of_range() -> None:
    with pytest.raises(ValueError, match="incomplete_beta"):
        incomplete_beta(1.0, 1.0, 1.5)
