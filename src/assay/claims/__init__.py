"""One file per method: what is compared, on what, and what decides.

``CLAIMS`` is the one table of slugs. It is data, so that ``assay list`` imports no claim and no heavy library;
packages elsewhere add claims through the entry point group ``assay.claims`` (see docs/adding-a-method.md).
``COMPARISONS`` are claims of our own about several methods: what ``assay run`` runs when it is given only members.
"""

from __future__ import annotations

CLAIMS: dict[str, tuple[str, str]] = {
    # slug: (family, what it is in one line)
    "cam": ("serving", "Bounded key-value cache that merges the values of evicted tokens into kept ones"),
    "dhel": ("representation", "Contrastive losses that pull and push separately, against collapsing embeddings"),
    "distribution_kernels": (
        "statistics",
        "Kernel machines on bags of points: regression, classes and quantiles of distributions",
    ),
    "kivi": ("serving", "Tuning-free asymmetric 2-bit quantisation of the key-value cache"),
    "normgd": ("statistics", "Gradient steps divided by the largest curvature, for fits that are singular"),
    "pgps": ("statistics", "Particles guided along a path of densities, for targets with far modes"),
    "quest": ("serving", "Query-aware page selection: decode from the part of the cache that matters"),
    "rqr": ("statistics", "Prediction intervals by relaxed quantile regression, narrower on skewed noise"),
    "stein_thinning": ("statistics", "Debiased compression of biased samples with Stein kernels"),
    "switchable": ("serving", "Blocks and tokens that a policy network switches off for each input"),
    "tandem": ("serving", "Small drafter that attends to the large model's states of earlier blocks, losslessly"),
}

COMPARISONS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    # slug: (family, what it is in one line, the methods that it compares)
    "caches": ("serving", "Which key-value cache for my model: all of them at equal memory", ("kivi", "quest", "cam")),
}
