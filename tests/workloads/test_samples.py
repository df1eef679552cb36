"""The scenarios' scores and moments, and the user's files with everything that can be wrong with them."""

import numpy as np
import pytest

from assay.bench.claim import Task
from assay.errors import InputError
from assay.workloads.samples import Gaussian, LogisticPosterior, Samples, bend, load_draws


def build(seed=0, **options):
    return Samples(**options).build(device="cpu", seed=seed)


def differences(log_density, x, h=1e-5):
    return np.array([(log_density(x + e) - log_density(x - e)) / (2 * h) for e in h * np.eye(x.size)])


@pytest.mark.parametrize("scenario", ["burnin", "temper", "off", "banana"])
def test_scenarios(scenario):
    task = build(scenarios=(scenario,), points=500, size=16)
    assert isinstance(task, Task) and task.settings == (scenario,) and task.limit is None
    a, b, other = task.prepare(scenario, 3), task.prepare(scenario, 3), task.prepare(scenario, 4)
    assert (a.points == b.points).all() and (a.scores == b.scores).all() and a.seed == b.seed
    assert not (a.points == other.points).any() or scenario == "burnin"
    assert a.points.shape == a.scores.shape == (500, 4) and a.size == 16 and a.seed != other.seed
    target = Gaussian.default()
    precision = np.linalg.inv(target.covariance)

    def log_density(x):
        z = x.copy()
        if scenario == "banana":
            z[1] -= x[0] ** 2 / 2
        return -z @ precision @ z / 2

    for i in range(0, 500, 100):
        np.testing.assert_allclose(a.scores[i], differences(log_density, a.points[i]), atol=1e-4)
    # The reference draws have the moments that are given.
    se = np.sqrt(a.variance / len(a.reference))
    assert (np.abs(a.reference.mean(axis=0) - a.mean) < 4.5 * se).all()
    np.testing.assert_allclose(a.reference.var(axis=0), a.variance, rtol=0.25)


def test_the_bias_is_there():
    n = 4000
    target = Gaussian.default()
    temper = build(scenarios=("temper",), points=n).prepare("temper", 0)
    np.testing.assert_allclose(np.cov(temper.points.T), 4 * target.covariance, atol=0.5)
    off = build(scenarios=("off",), points=n).prepare("off", 0)
    assert off.points[:, 0].mean() == pytest.approx(1, abs=0.1)
    chain = build(scenarios=("burnin",), points=n).prepare("burnin", 0)
    assert np.linalg.norm(chain.points[0] - 15) < 3
    rest = chain.points[1000:]
    assert np.abs(rest.mean(axis=0)).max() < 0.5  # and the chain finds the target
    np.testing.assert_allclose(np.diag(np.cov(rest.T)), np.diag(target.covariance), rtol=0.6)
    moved = (np.diff(chain.points, axis=0) != 0).any(axis=1).mean()
    assert 0.5 < moved < 1  # some proposals are rejected
    assert bend(np.ones((1, 4))).tolist() == [[1, 1.5, 1, 1]]


def test_logistic():
    posterior = LogisticPosterior.breast_cancer()
    assert posterior.features.shape == (569, 30)
    rng = np.random.default_rng(0)
    x = rng.normal(size=30) * 0.3
    value, gradient = posterior.log_density(x)
    assert np.isfinite(value)
    np.testing.assert_allclose(gradient, differences(lambda t: posterior.log_density(t)[0], x), rtol=1e-4, atol=1e-3)
    np.testing.assert_allclose(posterior.score(np.stack([x, -x]))[0], gradient, rtol=1e-10)
    mode, hessian = posterior.mode()
    assert np.abs(posterior.log_density(mode)[1]).max() < 1e-6
    assert np.linalg.eigvalsh(hessian)[0] > 0
    chain = posterior.mala(3000, rng)
    moved = (np.diff(chain, axis=0) != 0).any(axis=1).mean()
    assert 0.4 < moved < 0.98
    # The Laplace approximation is near: means within a posterior standard deviation, spreads within a factor of two.
    sd = np.sqrt(np.diag(np.linalg.inv(hessian)))
    assert (np.abs(chain.mean(axis=0) - mode) < sd).all()
    assert (chain.std(axis=0) < 2 * sd).all() and (chain.std(axis=0) > sd / 2).all()


def test_logistic_setting(monkeypatch):
    real = LogisticPosterior.mala
    monkeypatch.setattr(LogisticPosterior, "mala", lambda self, n, rng: real(self, 500, rng))
    task = build(scenarios=("logistic",), points=60, size=8)
    a, b = task.prepare("logistic", 0), task.prepare("logistic", 0)
    assert (a.points == b.points).all() and a.points.shape == (60, 30) and np.isfinite(a.scores).all()
    assert a.reference.shape == (500, 30)


def test_digest():
    base = build(points=256, size=16)
    assert base.digest == build(points=256, size=16).digest
    others = [
        build(points=512, size=16),
        build(points=256, size=32),
        build(points=256, size=16, scenarios=("temper",)),
        build(points=256, size=16, seed=1),
    ]
    assert len({base.digest, *(o.digest for o in others)}) == 5
    assert "256" in base.title


# --- the user's own -----------------------------------------------------------------------------------------------


@pytest.fixture
def own(tmp_path):
    X = 2 * np.random.default_rng(0).normal(size=(400, 3))
    np.savez(tmp_path / "draws.npz", points=X, scores=-X)
    np.save(tmp_path / "x.npy", X)
    np.save(tmp_path / "s.npy", -X)
    np.savetxt(tmp_path / "x.csv", X, delimiter=",")
    np.savetxt(tmp_path / "s.csv", -X, delimiter=",", header="a,b,c", comments="")
    np.save(tmp_path / "r.npy", np.random.default_rng(1).normal(size=(3000, 3)))
    return X, tmp_path


def test_own_files(own):
    X, folder = own
    pairs = [
        ("draws.npz", None),
        ("x.npy", "s.npy"),
        ("x.csv", "s.csv"),
        ("x.npy", "s.csv"),
        ("x.npy", "draws.npz"),
        ("draws.npz", "s.npy"),
    ]
    for samples, scores in pairs:
        points, gradients = load_draws(folder / samples, None if scores is None else folder / scores)
        np.testing.assert_allclose(points, X)
        np.testing.assert_allclose(gradients, -X)
    np.savez(folder / "other.npz", samples=X[:, 0], gradients=-X[:, 0])
    points, _ = load_draws(folder / "other.npz")
    assert points.shape == (400, 1)


def test_own_replicates(own):
    X, folder = own
    task = build(samples=str(folder / "draws.npz"), size=16)
    assert task.settings == ("own",) and task.limit == 5
    seen = np.concatenate([task.prepare("own", r).points for r in range(5)])
    assert seen.shape == (400, 3) and np.unique(seen, axis=0).shape[0] == 400  # every row once
    assert (task.prepare("own", 2).points == X[2::5]).all()
    assert task.prepare("own", 0).mean is None and task.prepare("own", 0).reference is None
    fine = build(samples=str(folder / "draws.npz"), size=16, points=40)
    assert fine.limit == 10 and fine.prepare("own", 0).points.shape == (40, 3)
    with_reference = build(samples=str(folder / "draws.npz"), size=16, reference=str(folder / "r.npy"))
    sample = with_reference.prepare("own", 1)
    assert sample.reference.shape == (2000, 3) and sample.variance == pytest.approx(1, abs=0.15)
    assert len({task.digest, fine.digest, with_reference.digest}) == 3
    same = build(samples=str(folder / "x.npy"), scores=str(folder / "s.npy"), size=16)
    assert same.digest == task.digest  # the data decide, not the file's name
    np.savez(folder / "r.npz", reference=np.random.default_rng(1).normal(size=(3000, 3)))
    again = build(samples=str(folder / "draws.npz"), size=16, reference=str(folder / "r.npz"))
    assert again.digest == with_reference.digest


def test_arviz_file(tmp_path):
    arviz = pytest.importorskip("arviz")
    rng = np.random.default_rng(0)
    posterior = {"mu": rng.normal(size=(2, 60)), "beta": rng.normal(size=(2, 60, 2))}
    data = arviz.from_dict(posterior=posterior)
    data.to_netcdf(str(tmp_path / "none.nc"))
    with pytest.raises(InputError, match="groups posterior and gradients, found: posterior"):
        load_draws(tmp_path / "none.nc")
    data.add_groups({"gradients": arviz.from_dict(posterior={k: -v for k, v in posterior.items()}).posterior})
    data.to_netcdf(str(tmp_path / "draws.nc"))
    points, scores = load_draws(tmp_path / "draws.nc")
    order = [list(data.posterior.data_vars).index(v) for v in ("mu", "beta")]
    assert points.shape == (120, 3) and (scores == -points).all()
    column = 0 if order[0] == 0 else 2
    assert (points[:, column] == posterior["mu"].reshape(-1)).all()
    bad = arviz.from_dict(posterior=posterior)
    bad.add_groups({"gradients": arviz.from_dict(posterior={"mu": posterior["mu"]}).posterior})
    bad.to_netcdf(str(tmp_path / "bad.nc"))
    with pytest.raises(InputError, match="variable 'beta' must be in both groups"):
        load_draws(tmp_path / "bad.nc")
    (tmp_path / "text.nc").write_text("no netCDF")
    with pytest.raises(InputError, match="found: neither"):
        load_draws(tmp_path / "text.nc")


X = np.arange(300.0).reshape(100, 3)


@pytest.mark.parametrize(
    "points, scores, message",
    [
        (X, X[:, :2], r"--scores has shape \(100, 2\), but --samples has shape \(100, 3\)"),
        (X, np.where(X == 7, np.nan, X), "--scores has NaN or infinite values, first in row 2, column 1"),
        (np.where(X == 0, np.inf, X), X, "--samples has NaN or infinite values"),
        (X[:1], X[:1], r"--samples has 1 row\(s\)"),
        (np.ones((100, 3)), X, "all 100 points are equal"),
        (X[None], X[None], "must have shape"),
        (X.astype(str), X, "--samples must hold numbers|could not convert"),
        (X[:50], X[:50], "10 for each of 5 replicates, fewer than --size 16"),
    ],
)
def test_bad_arrays(tmp_path, points, scores, message):
    if points.dtype.kind == "U":
        points = np.full(points.shape, "abc")
    np.savez(tmp_path / "d.npz", points=points, scores=scores)
    with pytest.raises(InputError, match=message):
        build(samples=str(tmp_path / "d.npz"), size=16)


def test_bad_files(own):
    _, folder = own
    file = str(folder / "draws.npz")
    (folder / "broken.npz").write_text("nothing")
    (folder / "broken.npy").write_text("nothing")
    (folder / "words.csv").write_text("a,b\n1,x\n2,3\n")
    (folder / "empty.csv").write_text("")
    (folder / "data.parquet").write_text("")
    np.savez(folder / "named.npz", foo=X)
    np.save(folder / "objects.npy", np.array([{}, 1], dtype=object))
    np.save(folder / "constant.npy", np.ones((50, 3)))
    np.save(folder / "narrow.npy", X[:, :2])
    cases = [
        ({"samples": "missing.npz"}, "--samples missing.npz: no such file"),
        ({"samples": str(folder)}, "no such file"),
        ({"samples": str(folder / "x.npy")}, "has no gradients: give --scores"),
        ({"samples": str(folder / "x.npy"), "scores": "gone.npy"}, "--scores gone.npy: no such file"),
        ({"samples": str(folder / "broken.npz")}, "not a NumPy .npz file"),
        ({"samples": str(folder / "broken.npy"), "scores": str(folder / "s.npy")}, "not a NumPy .npy file"),
        ({"samples": str(folder / "objects.npy"), "scores": str(folder / "s.npy")}, "not a NumPy .npy file"),
        ({"samples": str(folder / "words.csv"), "scores": str(folder / "s.npy")}, "not a table of numbers"),
        ({"samples": str(folder / "empty.csv"), "scores": str(folder / "s.npy")}, "not a table of numbers"),
        ({"samples": str(folder / "data.parquet"), "scores": str(folder / "s.npy")}, "unknown format '.parquet'"),
        ({"samples": str(folder / "named.npz")}, r"holds \['foo'\]; expected an array named points"),
        ({"samples": file, "reference": str(folder / "narrow.npy")}, "--reference has 2 columns"),
        ({"samples": file, "reference": str(folder / "constant.npy")}, "no variance"),
        ({"samples": file, "reference": str(folder / "named.npz")}, "expected an array named reference"),
        ({"samples": file, "scenarios": ("temper",)}, "leave it out"),
        ({"scores": file}, "--scores needs --samples"),
        ({"reference": file}, "--reference needs --samples"),
        ({"scenarios": ("banana", "bananas")}, "--scenarios must name some of"),
        ({"scenarios": ()}, "--scenarios must name some of"),
        ({"scenarios": ("temper", "temper")}, "each once"),
        ({"size": 48}, "--size must be a power of two"),
        ({"size": 1}, "--size must be a whole number of at least 2"),
        ({"points": 2.5}, "--points must be a whole number"),
        ({"points": 32, "size": 64}, "--size 64 exceeds the 32 draws"),
    ]
    for options, message in cases:
        with pytest.raises(InputError, match=message):
            build(**options)
