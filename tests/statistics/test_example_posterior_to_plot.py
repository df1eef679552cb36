"""The page docs/examples/posterior_to_plot.md, executed: its posterior is known by integration over two dimensions."""

import re
from pathlib import Path

import numpy as np
import pytest

PAGE = Path(__file__).parents[2] / "docs" / "examples" / "posterior_to_plot.md"


def exact(y):
    """Log evidence, and mean and sd of mu and tau, on a grid."""
    from scipy import stats
    from scipy.special import logsumexp

    mu, log_tau = np.linspace(-1, 4, 801), np.linspace(-3, 3, 801)
    m, t = np.meshgrid(mu, np.exp(log_tau), indexing="ij")
    logp = stats.norm(0, 10).logpdf(m) + stats.gamma(2).logpdf(t) + np.log(t)
    logp = logp + sum(stats.norm(m, t**-0.5).logpdf(v) for v in y)
    total = logsumexp(logp)
    p = np.exp(logp - total)
    moments = {}
    for name, value in (("mu", m), ("tau", t)):
        mean = (p * value).sum()
        moments[name] = mean, ((p * (value - mean) ** 2).sum()) ** 0.5
    return total + np.log((mu[1] - mu[0]) * (log_tau[1] - log_tau[0])), moments


@pytest.fixture(scope="module")
def example(tmp_path_factory):
    for name in ("arviz", "pymc"):
        pytest.importorskip(name)
    import matplotlib

    matplotlib.use("Agg")
    first, second = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    folder, scope = tmp_path_factory.mktemp("example"), {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        exec(first, scope)
        posterior = dict(scope)
        exec(second, scope)
    return posterior, scope, folder


def test_posterior_means_are_right_within_monte_carlo_error(example):
    posterior, _, _ = example
    evidence, moments = exact(posterior["y"])
    assert posterior["result"].log_evidence == pytest.approx(evidence, abs=0.5)
    full = posterior["pgps"].to_arviz(posterior["result"], posterior["density"]).posterior
    n = posterior["result"].ess
    for name, (mean, sd) in moments.items():
        assert float(full[name].mean()) == pytest.approx(mean, abs=4 * sd / n**0.5)
        assert float(posterior["table"].posterior[name].mean()) == pytest.approx(mean, abs=4 * sd / 64**0.5)
        assert float(full[name].std()) == pytest.approx(sd, rel=0.15)


def test_the_page_says_what_comes_out(example):
    posterior, _, _ = example
    evidence, moments = exact(posterior["y"])
    text = PAGE.read_text(encoding="utf-8").replace("\n", " ")
    said = re.search(
        r"about (-[\d.]+)\).*`mu` has mean ([\d.]+) and sd ([\d.]+), `tau` mean ([\d.]+) and sd ([\d.]+)\.", text
    )
    assert said, "the page gives its numbers"
    numbers = [evidence, *moments["mu"], *moments["tau"]]
    assert np.allclose([float(v) for v in said.groups()], numbers, atol=0.1)


def test_the_thinned_set_is_as_large_as_asked_and_drawn(example):
    posterior, scope, folder = example
    assert len(posterior["kept"]) == 64 and posterior["table"].posterior.sizes == {"chain": 1, "draw": 64}
    assert (posterior["table"].posterior["tau"] > 0).all()
    assert (folder / "posterior.svg").read_text(encoding="utf-8").count("<path") > 5
    assert len(scope["kept"]) == 64 and np.allclose(scope["draws"][scope["kept"].indices].mean(0), 1.0, atol=0.15)
