"""A small classifier in numpy, with one hidden layer, and an optimizer for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .digits import CLASSES, PIXELS, Samples

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Score:
    """How well a model does on some samples."""

    samples: int = 0
    loss_sum: float = 0.0
    correct: int = 0

    @property
    def loss(self) -> float:
        """Mean cross-entropy."""
        return self.loss_sum / max(1, self.samples)

    @property
    def accuracy(self) -> float:
        """Share of samples whose class was named."""
        return self.correct / max(1, self.samples)


class Classifier:
    """Pictures to classes; all parameters lie in one vector."""

    def __init__(self, hidden: int, parameters: Floats) -> None:
        self.hidden = hidden
        sizes = (PIXELS * hidden, hidden, hidden * CLASSES, CLASSES)
        if parameters.shape != (sum(sizes),) or parameters.dtype != np.float32:
            raise ValueError(
                f"a model with {hidden} hidden units has {sum(sizes)} float32 parameters, not "
                f"{parameters.dtype} of shape {parameters.shape}"
            )
        self.parameters = parameters
        w1, b1, w2, b2 = np.split(parameters, np.cumsum(sizes)[:-1])
        self._w1, self._b1 = w1.reshape(PIXELS, hidden), b1
        self._w2, self._b2 = w2.reshape(hidden, CLASSES), b2

    @classmethod
    def initial(cls, hidden: int, seed: int) -> Classifier:
        """A model that knows nothing, the same for the same seed."""
        rng = np.random.default_rng((seed, 2))
        model = cls(hidden, np.zeros(hidden * (PIXELS + 1 + CLASSES) + CLASSES, np.float32))
        model._w1[:] = rng.standard_normal(model._w1.shape) * np.sqrt(2 / PIXELS)
        model._w2[:] = rng.standard_normal(model._w2.shape) * np.sqrt(1 / hidden)
        return model

    def gradient(self, samples: Samples) -> tuple[Floats, Score]:
        """The sum of the samples' gradients, in the order of the parameters; how well it does."""
        inputs = _normalised(samples.pixels)
        activation, output = self._forward(inputs)
        error = np.exp(output)
        error[np.arange(len(samples)), samples.labels] -= 1
        back = (error @ self._w2.T) * (activation > 0)
        parts = (inputs.T @ back, back.sum(0), activation.T @ error, error.sum(0))
        return np.concatenate([part.ravel() for part in parts]), _score(output, samples.labels)

    def score(self, samples: Samples) -> Score:
        """How well it does."""
        return _score(self._forward(_normalised(samples.pixels))[1], samples.labels)

    def state_dict(self) -> dict[str, Floats]:
        """What has to be saved."""
        return {"parameters": self.parameters}

    def load_state_dict(self, state: Mapping[str, Floats]) -> None:
        """Take over what was saved."""
        self.parameters[:] = state["parameters"]

    def _forward(self, inputs: Floats) -> tuple[Floats, Floats]:
        """The hidden layer, and the logarithm of each class's probability."""
        activation = np.maximum(inputs @ self._w1 + self._b1, 0)
        logits = activation @ self._w2 + self._b2
        logits -= logits.max(1, keepdims=True)
        logits -= np.log(np.exp(logits).sum(1, keepdims=True))
        return activation, logits


class Momentum:
    """Gradient descent that keeps some of its speed from step to step."""

    def __init__(self, model: Classifier, rate: float, kept: float = 0.9) -> None:
        self._model = model
        self._rate, self._kept = np.float32(rate), np.float32(kept)
        self._speed = np.zeros_like(model.parameters)

    def step(self, gradient: Floats) -> None:
        """Change the model's parameters."""
        self._speed *= self._kept
        self._speed += gradient
        self._model.parameters -= self._rate * self._speed

    def state_dict(self) -> dict[str, Floats]:
        """What has to be saved."""
        return {"speed": self._speed}

    def load_state_dict(self, state: Mapping[str, Floats]) -> None:
        """Take over what was saved."""
        self._speed[:] = state["speed"]


def _normalised(pixels: NDArray[np.uint8]) -> Floats:
    return (pixels.astype(np.float32) - np.float32(90)) / np.float32(80)


def _score(log_probabilities: Floats, labels: NDArray[np.int64]) -> Score:
    chosen = log_probabilities[np.arange(len(labels)), labels]
    correct = int((log_probabilities.argmax(1) == labels).sum())
    return Score(len(labels), -float(chosen.sum(dtype=np.float64)), correct)
