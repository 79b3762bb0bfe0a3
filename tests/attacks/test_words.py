"""What attackers read of texts: tokens of blocks without their padding, and words and characters without a model."""

from types import SimpleNamespace

import pytest
import torch
from helpers.texts import WORDS
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from torch import nn
from torch.testing import assert_close

from immunization.attacks.pooling import of_tokens
from immunization.attacks.words import probe_words, tf_idf, word_fits
from immunization.data.task import SPLITS, Once, Split, Task
from immunization.models.named import Named, mask_of

pytestmark = pytest.mark.trains
RIDGES = (1e-3, 0.1)


def victim(texts: dict[str, list[str]], labels: dict[str, list[int]], known: bool = True) -> SimpleNamespace:
    """One whose task has these texts; `known`: not only their tokens."""
    splits = {s: Split(torch.zeros(len(own), 1), torch.tensor(labels[s])) for s, own in texts.items()}
    return SimpleNamespace(
        task=Task("texts", **splits, classes=1 + max(labels["train"])),
        once=Once(),
        texts=lambda: texts if known else None,
    )


def sentences(seed: int, count: int) -> tuple[list[str], list[int]]:
    """Sentences of three words, of which the second one's first letter says the class, one of three."""
    draw = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % 3
    noise = torch.randint(len(WORDS), (count, 2), generator=draw).tolist()
    return [
        f"{WORDS[a]} {'xyz'[c]}{WORDS[b]} {WORDS[b]}" for (a, b), c in zip(noise, labels.tolist(), strict=True)
    ], labels.tolist()


@pytest.fixture
def spoken():
    made = {split: sentences(i, n) for i, (split, n) in enumerate(zip(SPLITS, (120, 60, 90), strict=True))}
    return {s: texts for s, (texts, _) in made.items()}, {s: labels for s, (_, labels) in made.items()}


def test_pooled_tokens_are_those_of_the_text_alone():
    x, lengths = torch.randn(3, 7, 5, dtype=torch.float64), [4, 7, 1]
    mask = torch.arange(7) < torch.tensor(lengths)[:, None]
    found = of_tokens(mask, x, True, 0)
    assert set(found) == {"average", "class", "maximum", "deviation"}
    for i, n in enumerate(lengths):
        own = x[i, :n]
        assert_close(found["average"][i], own.mean(0))
        assert_close(found["maximum"][i], own.amax(0))
        assert_close(found["deviation"][i], own.std(0, correction=0))
        assert torch.equal(found["class"][i], own[0])
    left = of_tokens(mask.flip(1), x.flip(1), True, 0)  # padded on the left
    assert_close(left["average"], found["average"])
    assert torch.equal(left["class"][0], x[0, 3])
    cut = of_tokens(mask[:, :5], x[:, :4], True, 0)  # the net has left out what pads all
    assert_close(cut["maximum"][0], found["maximum"][0])
    assert of_tokens(mask, x[:, 0], True, 0)["average"].shape == (3, 5)
    assert of_tokens(mask, x[:, :, :, None], True, 0) == {}


class Counted(nn.Module):
    """Says how many tokens it was given."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(9, 4)

    def forward(self, input_ids, attention_mask):
        self.tokens = input_ids.shape[1]
        weight = attention_mask[..., None].float()
        return (self.words(input_ids) * weight).sum(1)


def test_what_pads_all_texts_of_a_batch_is_not_passed():
    net = Named(inner := Counted(), ("input_ids", "attention_mask"))
    mask = torch.arange(8) < torch.tensor([3, 5])[:, None]
    x = torch.stack([torch.randint(9, (2, 8)), mask.long()], 1)
    out = net(x)
    assert inner.tokens == 5
    assert_close(net(x[..., :5]), out)
    assert_close(net(x[:1])[0], out[0])
    assert inner.tokens == 3
    assert torch.equal(mask_of(nn.Sequential(net), x), mask)
    assert mask_of(net, torch.rand(2, 3)) is None


def test_kernels_and_logistic_regression_are_those_of_the_sparse_columns(spoken):
    texts, labels = spoken
    own = victim(texts, labels)
    counts, rows = tf_idf(own), torch.arange(0, 120, 2)
    words = TfidfVectorizer(sublinear_tf=True, ngram_range=(1, 2), token_pattern=r"(?u)\b\w+\b").fit(texts["train"])
    assert_close(counts["test"][:, : len(words.vocabulary_)].toarray(), words.transform(texts["test"]).toarray())
    linear, gaussian, *logistic = word_fits(own.task, counts, rows, RIDGES)
    assert [fit.reading.radial for fit in (linear, gaussian)] == [False, True]
    known = LogisticRegression(C=3.0, max_iter=2000, tol=1e-8).fit(
        counts["train"][rows.numpy()], torch.tensor(labels["train"])[rows]
    )
    assert_close(logistic[0].predicted, torch.from_numpy(known.predict_proba(counts["test"])), atol=5e-3, rtol=0)
    assert min(fit.val for fit in logistic) > 0.9


def test_words_that_say_the_class_are_found_without_a_model(spoken, monkeypatch):
    texts, labels = spoken
    curve = probe_words(victim(texts, labels), torch.arange(120), RIDGES, 0)
    assert curve.final > 0.95
    assert curve.test[0] < curve.final
    assert curve.scores.shape == (len(curve.steps), 90)
    assert curve.steps.max() == 120
    ids = {
        s: torch.tensor([[hash(w) % 997 + 2 for w in text.split()] + [0] for text in own]) for s, own in texts.items()
    }
    packed = {s: torch.stack([x, (x > 0).long()], 1) for s, x in ids.items()}
    monkeypatch.setattr("immunization.attacks.words.images_of", lambda _: packed)
    tokens = probe_words(victim(texts, labels, known=False), torch.arange(120), RIDGES, 0)
    assert tokens.final > 0.95
