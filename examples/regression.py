"""A regression with a metric and early stopping: `python regression.py`. A worker is killed, and no bit differs."""

import numpy as np
from torch import nn

import elaswave_spmd as ew


class Surface:
    """Points (x, y, z) and what is to be estimated at each: sin(x) + y z."""

    def __len__(self):
        return 4000

    def __getitem__(self, index):
        point = np.random.default_rng(index).uniform(-2, 2, 3).astype(np.float32)
        return point, np.sin(point[0]) + point[1] * point[2]


class Estimate(ew.LayeredModel):
    def __init__(self, d_model):
        super().__init__(
            {
                "point": nn.Sequential(nn.Linear(3, d_model), nn.GELU()),
                "hidden": nn.Sequential(nn.Linear(d_model, d_model), nn.GELU()),
                "height": nn.Linear(d_model, 1),
            }
        )

    def loss(self, output, batch):
        return (output.squeeze(-1).float() - batch[1]).square().sum()  # a sum over the samples of a micro-batch

    def metrics(self, output, batch):
        return {"absolute error": (output.squeeze(-1) - batch[1]).abs().sum()}


settings = {
    "model.d_model": 32,
    "train.global_batch": 32,
    "train.microbatch_size": 8,
    "train.validate_every": 10,
    "train.stop_patience": 2,
    "train.stop_min_delta": 0.05,
    "optim.lr": 2e-2,
    "optim.warmup_steps": 5,
    "optim.schedule": "constant",
    "timeouts.suspect": 4.0,  # on a busy machine heartbeats are late: nobody is to be lost for that
}
kill = [{"step": 20, "kind": "kill", "rank": 1, "point": "backward"}]
quiet = ew.train(Estimate, Surface, steps=500, settings=settings)
disturbed = ew.train(Estimate, Surface, "dp2_pp2", steps=500, settings={**settings, "chaos.events": kill})

assert (quiet.history.loss == disturbed.history.loss).all()
lost = [event["ranks"] for event in disturbed.events if event["event"] == "fail"]
error = quiet.validation.metrics["absolute error"][-1]
print(f"workers {lost} were lost; both runs ended after step {len(quiet.history.loss)}, absolute error {error:.3f}")
