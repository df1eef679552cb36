"""The kernel against first principles: mean zero under the target, derivatives, invariances, the peer's values."""

import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.spatial.distance import pdist
from stein_thinning.kernel import vfk0_imq

from assay.statistics import stein_thinning as stein
from assay.statistics.stein_thinning import _cores

METRIC = np.array([[2.0, 0.5, 0.1], [0.5, 1.0, -0.2], [0.1, -0.2, 0.7]])


def formula(x, y, sx, sy, M, length):
    """The definition, term by term, with the powers written out."""
    diff = x - y
    r2 = diff @ np.linalg.solve(M, diff)
    u = 1 + r2 / length**2
    phi, phi1, phi2 = u**-0.5, -(u**-1.5) / (2 * length**2), 3 * u**-2.5 / (4 * length**4)
    return phi * sx @ M @ sy - 2 * phi1 * (sx - sy) @ diff - 2 * phi1 * x.size - 4 * phi2 * r2


def problem(n=40, d=3, seed=0):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(n, d)), rng.normal(size=(n, d))


@pytest.mark.parametrize("d", [1, 2, 3, 7, 55])
def test_entries_follow_the_definition(d):
    X, S = problem(12, d)
    A = np.random.default_rng(1).normal(size=(d, d))
    M = A @ A.T + np.eye(d)
    kernel = stein.SteinKernel(M, 1.7).fit(X, S)
    wanted = [[formula(X[i], X[j], S[i], S[j], M, 1.7) for j in range(12)] for i in range(12)]
    np.testing.assert_allclose(kernel.matrix(), wanted, rtol=1e-10, atol=1e-10)
    np.testing.assert_allclose(kernel.diag(), np.einsum("ij,jk,ik->i", S, M, S) + d / 1.7**2, rtol=1e-12)
    np.testing.assert_allclose(kernel.diag(), np.diag(kernel.matrix()), rtol=1e-12)


def test_finite_differences_of_the_base_kernel():
    # k_P(x, y) = (s_x + grad_x)' M (s_y + grad_y) k(x, y)
    rng = np.random.default_rng(3)
    length, h = 1.3, 1e-4
    inverse = np.linalg.inv(METRIC)

    def base(x, y):
        return (1 + (x - y) @ inverse @ (x - y) / length**2) ** -0.5

    for _ in range(5):
        x, y, sx, sy = rng.normal(size=(4, 3))
        steps = h * np.eye(3)
        gx = np.array([(base(x + e, y) - base(x - e, y)) / (2 * h) for e in steps])
        gy = np.array([(base(x, y + e) - base(x, y - e)) / (2 * h) for e in steps])
        gxy = np.array(
            [
                [
                    (base(x + e, y + f) - base(x + e, y - f) - base(x - e, y + f) + base(x - e, y - f)) / (4 * h * h)
                    for f in steps
                ]
                for e in steps
            ]
        )
        wanted = sx @ METRIC @ sy * base(x, y) + sx @ METRIC @ gy + gx @ METRIC @ sy + np.trace(METRIC @ gxy)
        got = stein.SteinKernel(METRIC, length).fit([x, y], [sx, sy]).matrix()[0, 1]
        assert got == pytest.approx(wanted, abs=1e-6)


@pytest.mark.parametrize("M", [np.eye(3), METRIC])
def test_mean_zero_under_the_target(M):
    rng = np.random.default_rng(5)
    Y = rng.normal(size=(1_000_000, 3))
    anchors = np.array([[0.0, 0, 0], [1, -1, 0.5], [3, 0, 0]])
    kernel = stein.SteinKernel(M, 1.5).fit(np.vstack([anchors, Y]), -np.vstack([anchors, Y]))
    for i in range(3):
        values = kernel.row(i)[3:]
        assert abs(values.mean()) < 4 * values.std() / 1000


def test_gradient_free_form_has_mean_zero_under_the_target():
    # Target N(0, I); the scores are those of a wider proxy q = N(0, 1.5 I).
    Y = np.random.default_rng(6).normal(size=(400_000, 2))
    log_ratio = -(Y**2).sum(axis=1) / 3 + (Y**2).sum(axis=1) / 2 + 7.0  # q's density is only known up to a constant
    kernel = stein.SteinKernel(lengthscale=1.0).fit(Y, -Y / 1.5, log_ratio=log_ratio)
    values = kernel.row(0)
    weights = 1.0  # draws are from the target itself
    assert abs((weights * values).mean()) < 4 * values.std() / np.sqrt(values.size)
    assert kernel.free


def test_symmetric_and_positive_semidefinite():
    X, S = problem(300, 4, seed=2)
    K = stein.SteinKernel().fit(X, S).matrix()
    assert (K == K.T).all()
    values = np.linalg.eigvalsh(K)
    assert values[0] >= -1e-8 * values[-1]


def test_equals_the_peer_kernel():
    X, S = problem(50, 4, seed=4)
    kernel = stein.SteinKernel().fit(X, S)
    assert kernel.lengthscale_ == pytest.approx(np.median(pdist(X)), rel=1e-12)
    linv = np.eye(4) / kernel.lengthscale_**2
    peer = np.stack([vfk0_imq(X, X[[i]], S, S[[i]], linv) for i in range(50)])
    np.testing.assert_allclose(kernel.matrix(), peer, rtol=1e-9, atol=1e-12)


@settings(max_examples=25, deadline=None)
@given(
    arrays(float, (7, 3), elements=st.floats(-5, 5, width=32)),
    arrays(float, (7, 3), elements=st.floats(-5, 5, width=32)),
    st.integers(0, 1000),
)
def test_rotation_and_scale(X, S, seed):
    Q = np.linalg.qr(np.random.default_rng(seed).normal(size=(3, 3)))[0]
    if np.unique(X, axis=0).shape[0] == 1:
        return
    K = stein.SteinKernel(lengthscale=1.3).fit(X, S).matrix()
    scale = np.abs(K).max()
    turned = stein.SteinKernel(lengthscale=1.3).fit(X @ Q.T, S @ Q.T).matrix()
    np.testing.assert_allclose(turned, K, atol=1e-9 * scale)
    c = 3.7
    shrunk = stein.SteinKernel(lengthscale=1.3 / c).fit(X / c, S * c).matrix()
    np.testing.assert_allclose(shrunk, c**2 * K, atol=1e-9 * scale * c**2)


def test_the_median_scales_with_the_points():
    X, S = problem(60)
    a, b = stein.SteinKernel().fit(X, S), stein.SteinKernel().fit(X / 4, S * 4)
    np.testing.assert_allclose(b.matrix(), 16 * a.matrix(), rtol=1e-9)


def test_affine_invariance_with_the_sample_covariance():
    # x -> Ax, s -> A^-T s, M -> A M A': the kernel does not change.
    X, S = problem(60)
    A = np.array([[2.0, 1, 0], [0, 1, 0.3], [0, 0, 0.5]])
    a = stein.SteinKernel(METRIC).fit(X, S)
    b = stein.SteinKernel(A @ METRIC @ A.T).fit(X @ A.T, S @ np.linalg.inv(A))
    np.testing.assert_allclose(a.matrix(), b.matrix(), rtol=1e-8, atol=1e-10)


def test_preconditioners():
    rng = np.random.default_rng(8)
    C = np.diag([4.0, 1.0, 0.25])
    X = rng.normal(size=(4000, 3)) * np.sqrt(np.diag(C))
    S = -X @ np.linalg.inv(C)
    hess = -np.linalg.inv(C)
    np.testing.assert_allclose(stein.SteinKernel("hessian").fit(X, S, hess=hess).M_, C, rtol=1e-10)
    np.testing.assert_allclose(stein.SteinKernel("hessian").fit(X, S, hess=lambda x: hess).M_, C, rtol=1e-10)
    mode = X[np.argmin(np.linalg.norm(S, axis=1))]
    distance = np.linalg.norm(X - mode, axis=1)
    near = distance <= np.median(distance)
    np.testing.assert_allclose(stein.SteinKernel("score_cov").fit(X, S).M_, np.linalg.inv(np.cov(S[near].T)), rtol=1e-8)
    np.testing.assert_allclose(stein.SteinKernel("sample_cov").fit(X, S).M_, np.cov(X[near].T), rtol=1e-8)
    one = stein.SteinKernel("sample_cov").fit(X[:, :1], S[:, :1])
    assert one.M_.shape == (1, 1)


def test_blocks_threads_and_storage_give_the_same_bits():
    X, S = problem(1500, 5, seed=9)
    kernel = stein.SteinKernel().fit(X, S)
    K = kernel.matrix()
    assert (stein.SteinKernel(n_jobs=2).fit(X, S).matrix() == K).all()
    rows, columns = np.array([3, 700, 1499, 3]), np.arange(5, 1400, 7)
    assert (kernel.matrix(rows, columns) == K[np.ix_(rows, columns)]).all()
    assert (kernel.row(17) == K[17]).all()
    assert (kernel.row(-1) == K[-1]).all()
    stored = kernel.copy().store()
    assert stored.stored and not kernel.stored
    for args in [(None, None), (rows, None), (None, columns), (rows, columns)]:
        assert (stored.matrix(*args) == kernel.matrix(*args)).all()
    out = np.empty(1500)
    for block in (1, 100, 255, 256, 257, 1000):  # a row in pieces
        for lo in range(0, 1500, block):
            hi = min(lo + block, 1500)
            _cores.fill(*kernel.parts()[1:], 3, *kernel.parts()[1:], lo, hi, out[lo:hi])
        assert (out == K[3]).all()


def test_compiled_loops_do_what_their_python_says():
    X, S = problem(37, 3, seed=10)
    kernel = stein.SteinKernel().fit(X, S)
    parts, diagonal = kernel.parts(), kernel.diag()
    stored = kernel.copy().store().parts()
    sequence = np.random.default_rng(0).integers(0, 37, size=20)
    gathered = (parts[0], *(np.ascontiguousarray(a[..., sequence]) for a in parts[1:]))
    w = np.random.default_rng(0).dirichlet(np.ones(37)) * (np.arange(37) % 4 == 0)
    w /= w.sum()
    uniforms = np.random.default_rng(1).random(10)
    tilt = np.random.default_rng(2).normal(size=37)
    calls = [
        (_cores.greedy, lambda p: (*p, diagonal / 2, tilt, 9)),
        (_cores.greedy, lambda p: (*p, diagonal / 2, np.empty(0), 9)),
        (_cores.greedy_parallel, lambda p: (*parts[1:], diagonal / 2, tilt, 9, 40)),
        (_cores.refine, lambda p: (*p, diagonal / 2, sequence)),
        (_cores.weighted_rows, lambda p: (*p, sequence, uniforms.repeat(2), 37)),
        (_cores.swap_line_search, lambda p: (*p, diagonal, w, True)),
        (_cores.swap_line_search, lambda p: (*p, diagonal, np.eye(37)[3], False)),
    ]
    for function, arguments in calls:
        for p in (parts, stored):
            compiled, plain = function(*arguments(p)), function.py_func(*arguments(p))
            for a, b in zip(np.atleast_1d(compiled), np.atleast_1d(plain)):
                np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-14)
    for p in (gathered, stored):
        arguments = (*p, diagonal[sequence], sequence, 0.5, uniforms)
        assert (_cores.halve(*arguments) == _cores.halve.py_func(*arguments)).all()
    for function in (_cores.matrix, _cores.matrix_parallel):
        a, b = np.empty((2, 37, 37))
        function(*parts[1:], *parts[1:], a)
        function.py_func(*parts[1:], *parts[1:], b)
        np.testing.assert_array_equal(a, b)
    row = np.empty(37)
    _cores.fill.py_func(*parts[1:], 3, *parts[1:], 0, 37, row)
    np.testing.assert_allclose(row, kernel.row(3), rtol=1e-13)
    assert (_cores.get_row.py_func(*parts, 3, row) == _cores.get_row.py_func(*stored, 3, row)).all()
    objective = diagonal.copy()
    assert _cores.add_argmin.py_func(objective, 0.5, diagonal) == int(np.argmin(1.5 * diagonal))


def test_float32_and_layout():
    X, S = problem(200, 4)
    X32, S32 = X.astype(np.float32), S.astype(np.float32)
    a = stein.SteinKernel().fit(X32, S32).matrix()
    assert a.dtype == np.float64
    assert (a == stein.SteinKernel().fit(X32.astype(float), S32.astype(float)).matrix()).all()
    wide = np.repeat(X, 2, axis=1)[:, ::2]
    assert not wide.flags.c_contiguous
    assert (
        stein.SteinKernel().fit(wide, np.asfortranarray(S)).matrix() == stein.SteinKernel().fit(X, S).matrix()
    ).all()


def test_repeated_states():
    X = np.repeat(np.arange(4.0), [20, 1, 1, 1])[:, None]  # the median distance is 0, yet not all points are equal
    kernel = stein.SteinKernel().fit(X, -X)
    assert kernel.lengthscale_ == 2.0  # 20 pairs each at distance 1, 2 and 3, and three more among the single points


def test_ksd():
    X, S = problem(50)
    K = stein.SteinKernel().fit(X, S).matrix()
    w = np.random.default_rng(0).dirichlet(np.ones(50))
    assert stein.ksd(X, S, w) == pytest.approx(np.sqrt(w @ K @ w))
    assert stein.ksd(X, S) == pytest.approx(np.sqrt(K.mean()))
    rows = np.array([3, 3, 7])
    assert stein.ksd(X, S, indices=rows) == pytest.approx(np.sqrt(K[np.ix_(rows, rows)].mean()))
    signed = np.array([2.0, -1.5, 0.5])
    assert stein.ksd(X, S, signed, indices=rows) == pytest.approx(np.sqrt(signed @ K[np.ix_(rows, rows)] @ signed))
    fitted = stein.SteinKernel().fit(X, S)
    assert stein.ksd(X, S, w, kernel=fitted) == stein.ksd(X.copy(), S.copy(), w, kernel=fitted)
    other = stein.ksd(X[:20], S[:20], kernel=fitted)
    assert other == stein.ksd(X[:20], S[:20]) and fitted.n == 50
    # Weights that nearly cancel: rounding below zero is no NaN.
    assert stein.ksd(np.array([[0.0], [1.0]]), np.zeros((2, 1)), [1.0, 0.0]) >= 0


BAD = [
    ({"X": np.zeros(5)}, ValueError, "X must have shape"),
    ({"X": np.zeros((5, 0)), "scores": np.zeros((5, 0))}, ValueError, "0 feature"),
    ({"X": np.zeros((1, 2)), "scores": np.zeros((1, 2))}, ValueError, "at least 2 points"),
    ({"scores": np.zeros((5, 3))}, ValueError, r"scores must have the shape of X, \(5, 2\)"),
    ({"X": np.full((5, 2), np.nan)}, ValueError, "X must be finite"),
    ({"scores": np.full((5, 2), np.inf)}, ValueError, "scores must be finite"),
    ({"X": np.ones((5, 2))}, ValueError, "all points are equal"),
    ({"X": np.ones((5, 2)), "lengthscale": 1.0}, ValueError, "all points are equal"),
    ({"X": [["a", "b"]] * 5}, ValueError, "X must hold numbers"),
    ({"X": np.ones((5, 2), complex)}, ValueError, "complex"),
    ({"lengthscale": -1.0}, ValueError, "lengthscale"),
    ({"lengthscale": "mean"}, ValueError, "lengthscale"),
    ({"M": "banana"}, ValueError, "M must be one of"),
    ({"M": np.eye(3)}, ValueError, "M must be a symmetric array"),
    ({"M": -np.eye(2)}, ValueError, "M must be positive definite"),
    ({"M": "hessian"}, ValueError, "hess is needed"),
    ({"M": "hessian", "hess": np.eye(2)}, ValueError, "negative definite"),
    ({"M": "hessian", "hess": np.eye(3)}, ValueError, "hess must give"),
    ({"M": "sample_cov", "X": np.arange(10.0).reshape(5, 2)}, ValueError, "singular"),
    ({"log_ratio": np.zeros(4)}, ValueError, "log_ratio must have shape"),
    ({"scores": np.full((5, 2), 1e200)}, ValueError, "overflow"),
]


@pytest.mark.parametrize("change, error, message", BAD)
def test_bad_input(change, error, message):
    rng = np.random.default_rng(0)
    given_ = {"X": rng.normal(size=(5, 2)), "scores": rng.normal(size=(5, 2))} | change
    fit = {k: given_[k] for k in ("X", "scores", "hess", "log_ratio") if k in given_}
    with pytest.raises(error, match=message), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        stein.SteinKernel(given_.get("M", "identity"), given_.get("lengthscale", "median")).fit(**fit)


def test_bad_input_of_ksd():
    X, S = problem(5)
    with pytest.raises(ValueError, match="sum to 1"):
        stein.ksd(X, S, np.ones(5))
    with pytest.raises(ValueError, match=r"weights must have shape \(5,\)"):
        stein.ksd(X, S, np.ones(4) / 4)
    with pytest.raises(ValueError, match="indices must lie between"):
        stein.ksd(X, S, indices=[0, 5])
    with pytest.raises(ValueError, match="indices must be one dimension"):
        stein.ksd(X, S, indices=[0.5])
    with pytest.raises(TypeError, match="kernel must be a SteinKernel"):
        stein.ksd(X, S, kernel=np.eye(5))
    from scipy.sparse import csr_array

    with pytest.raises(TypeError, match="sparse"):
        stein.ksd(csr_array(X), S)
