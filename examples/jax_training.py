"""Train a small network with JAX, kill the program, start it again: it ends with the same bits.

    python examples/jax_training.py --folder /tmp/jax-run

What JAX trains are values, not objects: parameters, moments of Adam and the random key lie in
``run.state``, and every step puts new ones there. Kill the program with ``kill -9`` and run the
same command again. It goes on after the last checkpoint, with the next batch and the next random
numbers, and ends with the parameters that it would have had without the interruption.
"""

import argparse
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dtruntime import Run
from dtruntime.telemetry import configure_logging

WIDTH, WAVES = 64, 8
RATE, DECAYS, TINY = 3e-3, (0.9, 0.999), 1e-8

Tree = Any


def first_state(seed: int) -> dict[str, Tree]:
    """Parameters, Adam's moments, and the key that random numbers come from."""
    key, *keys = jax.random.split(jax.random.key(seed), 4)
    sizes = [(2 * WAVES, WIDTH), (WIDTH, WIDTH), (WIDTH, 1)]
    params = [
        {"w": jax.random.normal(key, size) / jnp.sqrt(size[0]), "b": jnp.zeros(size[1])}
        for key, size in zip(keys, sizes, strict=True)
    ]
    zeros = jax.tree.map(jnp.zeros_like, params)
    return {"params": params, "opt": {"m": zeros, "v": zeros, "count": 0}, "key": key}


def predict(params: Tree, x: jax.Array, key: jax.Array | None = None) -> jax.Array:
    """The value at each place in [0, 1); with a key, a tenth of the units drops out."""
    angles = 2 * jnp.pi * x[:, None] * jnp.arange(1, WAVES + 1)
    hidden = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=1)
    for layer in params[:-1]:
        hidden = jax.nn.gelu(hidden @ layer["w"] + layer["b"])
        if key is not None:
            key, drop = jax.random.split(key)
            hidden = hidden * jax.random.bernoulli(drop, 0.9, hidden.shape) / 0.9
    return (hidden @ params[-1]["w"] + params[-1]["b"])[:, 0]


def loss_of(params: Tree, x: jax.Array, key: jax.Array) -> jax.Array:
    wanted = jnp.sign(jnp.sin(6 * jnp.pi * x)) * x
    return jnp.mean((predict(params, x, key) - wanted) ** 2)


@jax.jit
def train_step(state: dict[str, Tree], x: jax.Array) -> tuple[dict[str, Tree], jax.Array]:
    """One step of Adam; returns the state after it, and the loss."""
    key, drop = jax.random.split(state["key"])
    loss, slopes = jax.value_and_grad(loss_of)(state["params"], x, drop)
    count = state["opt"]["count"] + 1
    first, second = DECAYS

    def moment(decay: float, before: Tree, values: Tree) -> Tree:
        return jax.tree.map(lambda b, v: decay * b + (1 - decay) * v, before, values)

    def move(param: jax.Array, m: jax.Array, v: jax.Array) -> jax.Array:
        return param - RATE * (m / (1 - first**count)) / (jnp.sqrt(v / (1 - second**count)) + TINY)

    m = moment(first, state["opt"]["m"], slopes)
    v = moment(second, state["opt"]["v"], jax.tree.map(jnp.square, slopes))
    params = jax.tree.map(move, state["params"], m, v)
    return {"params": params, "opt": {"m": m, "v": v, "count": count}, "key": key}, loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path("jax-run"))
    parser.add_argument("--samples", type=int, default=16_384)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--save-steps", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--step-seconds", type=float, default=0.0, help="make steps this slow")
    options = parser.parse_args()
    configure_logging()

    with Run(
        options.folder / "checkpoints",
        data=options.samples,
        batch_size=options.batch_size,
        epochs=options.epochs,
        save_steps=options.save_steps,
        # Batches of one size only, so that the step is compiled once.
        loader={"output": "jax", "last": "drop"},
        state=first_state(options.seed),
    ) as run:
        print(f"begins after step {run.step}", flush=True)
        for batch in run:
            x = batch["sample"] / options.samples
            state, loss = train_step(run.state, x)
            run.state.update(state)
            run.report(loss=loss)
            if (run.step + 1) % options.save_steps == 0:
                print(f"step {run.step + 1}: loss {loss:.4f}", flush=True)
            time.sleep(options.step_seconds)
    params = jax.tree.leaves(run.state["params"])
    np.save(options.folder / "params.npy", np.concatenate([np.ravel(part) for part in params]))
    print(f"{run.ending} after step {run.step}")


if __name__ == "__main__":
    main()
