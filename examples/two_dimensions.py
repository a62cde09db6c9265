# %% [markdown]
# # ISDA in two dimensions
#
# ISDA augments features in the directions in which their class varies. With two features and a
# linear classifier, all of this can be plotted. There are three classes with six training samples
# each; 3,000 more samples of the same distributions are the test set.
#
# This page is the output of `examples/two_dimensions.py`, a script that editors and, with
# Jupytext, Jupyter open as a notebook.

# %%
import math

import matplotlib.pyplot as plt
import torch
from matplotlib.patches import Ellipse
from torch import Tensor, nn
from torch.nn import functional as F

import isda

COLOURS = ("#d1661c", "#2f81f7", "#2da44e")
STEPS = 1000
torch.set_num_threads(1)  # for small tensors, more threads are slower


def draw_samples(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Features (3·count, 2) and classes of three elongated clouds."""
    means = torch.tensor([[-1.6, -0.6], [1.5, -0.9], [0.1, 1.7]])
    tilted, flat = [[1.2, 0.0], [0.9, 0.4]], [[1.3, 0.0], [0.0, 0.4]]
    factors = torch.tensor([tilted, tilted, flat])
    noise = torch.randn(3, count, 2, generator=generator)
    features = means[:, None] + noise @ factors.mT
    return features.flatten(0, 1), torch.arange(3).repeat_interleave(count)


generator = torch.Generator().manual_seed(4)
features, target = draw_samples(6, generator)
test_features, test_target = draw_samples(1000, generator)

# %% [markdown]
# ## Covariances and augmented features
#
# An estimator keeps the count, mean and covariance of each class. The ellipses show one and two
# standard deviations. `isda.sample` draws augmented features of a sample from a normal
# distribution with the covariance of its class (Eq. 1); the dots show 40 of them for one sample of
# each class, with λ = 0.5. Training with ISDA does not draw them: it minimises a bound on the
# expected loss over infinitely many.

# %%
estimator = isda.FullCovariance(2, 3)
estimator.update(features, target)
augmented = isda.sample(
    features, target, estimator.covariance, strength=0.5, num_samples=40, generator=generator
)  # (40, N, 2)


def draw_training_samples(axes: plt.Axes) -> None:
    for label, colour in enumerate(COLOURS):
        own = features[target == label]
        axes.scatter(
            own[:, 0], own[:, 1], color=colour, s=28, edgecolor="white", linewidth=0.8, zorder=3
        )
    axes.set(xlim=(-5, 5), ylim=(-4, 4), aspect="equal", xticks=[], yticks=[])


figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
draw_training_samples(axes)
for label, colour in enumerate(COLOURS):
    variance, direction = torch.linalg.eigh(estimator.class_covariance(label))
    angle = math.degrees(math.atan2(direction[1, 1], direction[0, 1]))
    for deviations in (1, 2):
        width, height = 2 * deviations * variance.clamp(min=0).sqrt().flip(0)
        mean = tuple(estimator.class_mean(label).tolist())
        axes.add_patch(Ellipse(mean, width, height, angle=angle, fill=False, edgecolor=colour))
    cloud = augmented[:, label * 6]
    axes.scatter(cloud[:, 0], cloud[:, 1], color=colour, s=6, alpha=0.6)
axes.set_title("class ellipses, augmented features of three samples", loc="left")
plt.show()

# %% [markdown]
# ## The same classifier, trained with both losses
#
# Straight lines can separate the six samples of each class, so cross entropy keeps increasing the
# weights, and with them the confidence. ISDA raises the logits of the other classes in proportion
# to the variance of their margin, so large weights along the directions in which a class varies
# increase the loss. With a large λ₀, the classifier is less confident than it should be: λ₀ must be
# tuned.


# %%
def train(lambda_0: float) -> nn.Linear:
    torch.manual_seed(0)
    model = nn.Linear(2, 3)
    criterion = isda.attach(model, lambda_0=lambda_0, total_steps=STEPS)  # 0: cross entropy
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    for _ in range(STEPS):
        optimizer.zero_grad()
        criterion(model(features), target).backward()
        optimizer.step()
    return model


def expected_calibration_error(probabilities: Tensor, labels: Tensor, bins: int = 15) -> float:
    confidence, predicted = probabilities.max(1)
    index = (confidence * bins).ceil().long().clamp(1, bins) - 1
    gap = torch.zeros(bins).index_add_(0, index, confidence - (predicted == labels).float())
    return float(gap.abs().sum() / len(labels))


models = {"cross entropy": train(0.0)}
models |= {f"ISDA, λ₀ = {lambda_0:g}": train(lambda_0) for lambda_0 in (0.1, 0.2, 1.0)}
for name, model in models.items():
    with torch.no_grad():
        logits = model(test_features)
    error = (logits.argmax(1) != test_target).float().mean()
    nll = F.cross_entropy(logits, test_target)
    ece = expected_calibration_error(logits.softmax(1), test_target)
    print(f"{name:13} test error {error:.1%}, NLL {nll:.2f}, ECE {ece:.1%}")

# %% [markdown]
# ## Decision boundary and confidence
#
# The lines are the boundaries between the predicted classes. The colour shows the predicted class;
# a stronger colour means a higher predicted probability. The figure shows λ₀ = 0.2 because its
# numbers above are good, so this λ₀ was chosen on the test samples. On real data, choose λ₀ on
# held-out images.

# %%
sides = torch.linspace(-5, 5, 161), torch.linspace(-4, 4, 129)
grid_x, grid_y = torch.meshgrid(*sides, indexing="xy")
grid = torch.stack([grid_x, grid_y], -1)
figure, panels = plt.subplots(1, 2, figsize=(7, 3.1), layout="constrained")
for axes, name in zip(panels, ("cross entropy", "ISDA, λ₀ = 0.2"), strict=True):
    with torch.no_grad():
        probabilities = models[name](grid).softmax(-1)
    confidence, predicted = probabilities.max(-1)
    for label, colour in enumerate(COLOURS):
        inside = torch.where(predicted == label, confidence, torch.nan)
        for level in (0.34, 0.6, 0.8, 0.95):
            axes.contourf(grid_x, grid_y, inside, levels=[level, 1.01], colors=[colour], alpha=0.17)
    for label in range(3):
        inside = predicted == label
        axes.contour(grid_x, grid_y, inside, levels=[0.5], colors="#8b949e", linewidths=1)
    draw_training_samples(axes)
    axes.set_title(name, loc="left")
figure.supxlabel("shades: probability above 0.34, 0.6, 0.8 and 0.95", fontsize=10)
plt.show()

# %% [markdown]
# With cross entropy, the probability is above 0.95 in most of the plane, even where the classes
# overlap. With ISDA, the boundaries follow the shape of the classes, and the region of low
# confidence is wider. [Does it help?](results.md) has the measurements on real data.
