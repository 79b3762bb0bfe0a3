"""When a training stops early, and to which parameters it goes back."""

from helpers.matrices import gaussian

from immunization.data.task import Split, Task, TaskPair
from immunization.methods import Method
from immunization.models import Linear


class Scripted(Method):
    """Scores as they are given, epoch by epoch; theta holds the number of the epoch."""

    def __init__(self, scores: list[float], patience: int) -> None:
        super().__init__(epochs=len(scores), patience=patience)
        self.scores, self.asked = scores, []

    def score(self, model):
        epoch = int(model.extractor.theta[0, 0].item())
        self.asked.append(epoch)
        return self.scores[epoch]


def trained(scores: list[float], patience: int) -> tuple[list[int], int, int]:
    """Epochs after which a score was asked for, the last epoch, and the one whose parameters are kept."""
    x = gaussian(9, 2, seed=0)
    task = Task("any", *(Split(x, x[:, 0]) for _ in range(3)))
    pair = TaskPair("any", task, task)
    model, method = Linear(pair), Scripted(scores, patience)
    method.setup(model, pair)
    for epoch in range(len(scores)):
        model.extractor.theta.data.fill_(epoch)
        if any(callback.epoch_end(model, epoch) for callback in method.callbacks):
            break
    method.finish(model)
    return method.asked, epoch, int(model.extractor.theta[0, 0].item())


def test_ten_scores_within_the_patience():
    asked, last, kept = trained([0.0] * 200, patience=40)
    assert asked == [*range(3, 44, 4)]
    assert (last, kept) == (43, 3)
    assert trained([0.0] * 20, patience=5)[0] == [*range(6)]


def test_a_gain_below_a_thousandth_is_none():
    """Such steps would add up for as long as one waits."""
    slow = [1 + 0.9e-4 * epoch for epoch in range(10)] + [1.0] * 10
    assert trained(slow, patience=3)[1:] == (3, 0)
    fast = [1 + 2e-3 * epoch for epoch in range(6)] + [1.0] * 10
    assert trained(fast, patience=3)[1:] == (8, 5)
