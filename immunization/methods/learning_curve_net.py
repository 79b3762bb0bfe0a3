"""Immunization of the learning curve by training a net itself, batch by batch."""

from torch import Tensor

from immunization.checks import Fraction, NonNegative
from immunization.data.task import TaskPair
from immunization.methods.base import Method
from immunization.methods.learning_curve import Horizon, horizons
from immunization.models import Batch, Model
from immunization.theory.learning_curve import excess, residuals


class LearningCurveNet(Method, without=["patience"]):
    """Minimize L(D_P) + weight (lambda_P mean_t excess_P(t) - lambda_H mean_t excess_H(t) + benign_weight random(t)).

    The curves are those of `LearningCurve`, of a probe on the features of one batch. L(D_P) is cross-entropy with label
    smoothing on the model's own head.
    """

    epochs = 3
    batch_size = 64
    horizon: Horizon = 11
    weight: NonNegative = 1.0
    lambda_P: NonNegative = 1.0
    lambda_H: NonNegative = 1.0
    benign_weight: NonNegative = 0.3
    smoothing: Fraction = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        self.grid = horizons(self.horizon)

    def setup(self, model: Model, pair: TaskPair) -> None:
        super().setup(model, pair)
        self.grid = self.grid.to(model.head.weight.device)

    def step(self, model: Model, primary: Batch, harmful: Batch) -> dict[str, Tensor]:
        logits, features = model.outputs(primary)
        loss = self.pair.primary.loss(logits, primary.y, self.smoothing)
        features = model.training_features(primary.x) if features is None else features
        probes = [
            (features.double(), self.pair.primary.targets(primary.y)),
            (model.training_features(harmful.x).double(), self.pair.harmful.targets(harmful.y)),
        ]
        (left_p, random), (left_h, _) = residuals(probes, self.grid)
        excess_p, excess_h = (
            excess(left).mean() / targets.square().sum()
            for left, (_, targets) in zip((left_p, left_h), probes, strict=True)
        )
        random = random.mean()
        curves = self.lambda_P * excess_p - self.lambda_H * excess_h + self.benign_weight * random
        terms = {"excess_primary": excess_p, "excess_harmful": excess_h, "excess_random": random}
        return {"loss": loss + self.weight * curves, "task_loss": loss, **terms}
