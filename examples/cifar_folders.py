"""Write CIFAR as PNG files, one folder per class, to try ``isda compare`` on a folder of images.

    python examples/cifar_folders.py cifar10 folders/cifar10 --images-per-class 1000
    isda compare --data imagefolder:folders/cifar10 --pretrained --download --image-size 96

The script writes the first training and test images of every class.
"""

import argparse
from collections import Counter
from pathlib import Path

from PIL import Image
from torch import Tensor

from isda.experiments.data.arrays import ImageArrays, load_data
from isda.experiments.errors import InputError


def write_images(folder: Path, data: ImageArrays, images: Tensor, target: Tensor, most: int) -> int:
    """Write the first ``most`` images of every class; return how many were written."""
    written: Counter[str] = Counter()
    for pixels, index in zip(images.permute(0, 2, 3, 1).numpy(), target.tolist(), strict=True):
        name = data.class_names[index]
        if written[name] < most:
            (folder / name).mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(folder / name / f"{written[name]:05}.png")
            written[name] += 1
    return written.total()


def main() -> None:
    """Load the data set and write it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", choices=("cifar10", "cifar100"))
    parser.add_argument("folder", type=Path, help="gets train/ and test/")
    parser.add_argument("--images-per-class", type=int, default=5000, help="training images")
    parser.add_argument("--test-images-per-class", type=int, default=1000, help="test images")
    parser.add_argument("--data-root", default="data", help="folder of CIFAR (default: data)")
    parser.add_argument("--download", action="store_true", help="download CIFAR if it is missing")
    given = parser.parse_args()
    try:
        data = load_data(given.data, root=given.data_root, download=given.download)
    except InputError as error:
        parser.error(str(error))
    assert isinstance(data, ImageArrays)
    train = write_images(given.folder / "train", data, data.train_images, data.train_target,
                         given.images_per_class)  # fmt: skip
    test = write_images(given.folder / "test", data, data.test_images, data.test_target,
                        given.test_images_per_class)  # fmt: skip
    print(f"{given.folder}: {train} training and {test} test images")


if __name__ == "__main__":
    main()
