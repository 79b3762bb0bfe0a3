"""Number formats: what rounding leaves of weights and activations, on nets of every library."""

import pytest
import timm
import torch
import torchvision
from torch import nn

from immunization.models.fold import LinearMap, fold_into
from immunization.models.formats import FORMATS, Format, cut, in_format, round_weights

transformers = pytest.importorskip("transformers")


def nets():
    torch.manual_seed(0)
    resnet = timm.create_model("test_resnet", num_classes=4)
    fold_into(resnet, "layer4", torch.randn(resnet.num_features, resnet.num_features, 1, 1))
    shape = {"num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32, "image_size": 32}
    config = transformers.ViTConfig(hidden_size=16, **shape)
    attention = torchvision.models.VisionTransformer(32, 16, 1, 2, 16, 32, num_classes=4)
    nn.init.normal_(attention.heads.head.weight)  # zeros at first
    return {
        "timm": resnet,
        "torchvision": attention,
        "transformers": transformers.ViTForImageClassification(config),
        "Sequential": nn.Sequential(resnet, nn.Linear(4, 4)),
        "transposed": nn.Sequential(
            nn.ConvTranspose2d(3, 6, 4, 4), nn.Flatten(), LinearMap(torch.randn(6 * 128**2, 4))
        ),
    }


def outputs(net, images):
    given = net(images)
    return getattr(given, "logits", given)


@torch.no_grad()
@pytest.mark.parametrize("name", nets())
def test_fewer_bits_are_further_from_the_net_on_every_library(name):
    net, images = nets()[name].eval(), torch.randn(4, 3, 32, 32)
    kept = {key: value.clone() for key, value in net.state_dict().items()}
    exact = outputs(net, images)
    away = {}
    for form in FORMATS:
        copy = in_format(net, form, [images[:2], images[2:]])
        assert type(copy) is type(net)
        given = outputs(copy, images.double() if form == "float64" else images)
        away[form] = ((given - exact).norm() / exact.norm()).item()
    assert all(torch.equal(kept[key], value) for key, value in net.state_dict().items())
    assert away["float64"] < 1e-5
    assert away["float32"] == 0
    assert 0 < away["float16"] < 5e-3
    assert 0 < away["tf32"] < 5e-3
    assert away["float16"] < away["bfloat16"] < 0.05
    assert away["tf32"] < away["int8_weights"] < away["int4"]
    assert away["int8_weights"] < away["int8"] < 0.2


def test_weights_are_rounded_with_a_scale_for_each_channel_tensor_or_group():
    weight = torch.tensor([[7.0, 3.4, -1.6, 0.0], [0.07, 0.034, -0.016, 0.0]])
    exact = torch.tensor([[7.0, 3.0, -2.0, 0.0], [0.07, 0.03, -0.02, 0.0]])
    torch.testing.assert_close(round_weights(weight, 4), exact)
    torch.testing.assert_close(round_weights(weight.T, 4, axis=1), exact.T)
    torch.testing.assert_close(round_weights(weight, 4, "tensor")[1], torch.zeros(4))
    in_pairs = round_weights(weight, 4, 2)
    torch.testing.assert_close(in_pairs[0], torch.tensor([7.0, 3.0, -1.6, 0.0]))
    uneven = round_weights(weight, 4, 3)
    torch.testing.assert_close(uneven[:, :3], exact[:, :3])
    convolution = torch.randn(3, 4, 2, 2, dtype=torch.float64)
    rounded = round_weights(convolution, 3)
    assert rounded.dtype == torch.float64
    assert all(len(channel.unique()) <= 7 for channel in rounded)
    assert torch.equal(round_weights(torch.zeros(2, 2), 8), torch.zeros(2, 2))


def test_integers_may_be_lopsided_and_weights_in_float8():
    signed = round_weights(torch.tensor([[7.5, -7.5, 3.2]]), 4, integers="signed")
    torch.testing.assert_close(signed, torch.tensor([[7.0, -8.0, 3.0]]))
    unsigned = round_weights(torch.tensor([[-1.5, 14.5 - 1, 2.4]]), 4, integers="unsigned")  # steps of 1 from -1.5
    torch.testing.assert_close(unsigned, torch.tensor([[-1.5, 13.5, 2.5]]))
    float8 = round_weights(torch.tensor([[448.0, 17.0, -1.0]]), torch.float8_e4m3fn)
    torch.testing.assert_close(float8, torch.tensor([[448.0, 16.0, -1.0]]))


@torch.no_grad()
def test_activations_are_rounded_over_the_range_of_images_or_of_each_call():
    net, seen = nn.Sequential(nn.ReLU(), nn.Linear(2, 2)), []
    by_images = in_format(net, Format(activations=8), [torch.tensor([[-9.0, 2.55]]), torch.tensor([[1.0, 0.0]])])
    by_call = in_format(net, Format(activations=8))
    for copy in (by_images, by_call):
        copy[1].register_forward_pre_hook(lambda _m, inputs: seen.append(inputs[0]))
        copy(torch.tensor([[0.124, 5.1]]))
    torch.testing.assert_close(seen[0], torch.tensor([[0.12, 2.55]]))  # cut off where no image was
    torch.testing.assert_close(seen[1], torch.tensor([[0.12, 5.1]]))  # in steps of 0.02
    low = in_format(nn.Sequential(nn.Linear(2, 2)), Format(activations=8))
    low[0].register_forward_pre_hook(lambda _m, inputs: seen.append(inputs[0]))
    low(torch.tensor([[-1.0, 1.55]]))
    torch.testing.assert_close(seen[2], torch.tensor([[-1.0, 1.55]]))


@torch.no_grad()
def test_ranges_are_means_or_of_rows_and_pooling_is_rounded_where_they_are_known():
    images, seen = torch.tensor([[[[1.0]]], [[[3.0]]]]), []
    net = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(1, 1, 1))
    for kind in ("mean", "row", "call"):
        copy = in_format(net, Format(activations=8, range=kind), [images])
        assert len(copy[0]._forward_pre_hooks) == (kind == "mean")
        copy[1].register_forward_pre_hook(lambda _m, inputs: seen.append(inputs[0].flatten().tolist()))
        copy(torch.tensor([[[[0.1]]], [[[2.55]]]]))
    assert seen[0] == pytest.approx([26 / 255, 2.0])  # cut off at the mean of 1 and 3, in steps of 2 / 255
    assert seen[1] == pytest.approx([0.1, 2.55])
    assert seen[2] == pytest.approx([0.1, 2.55])
    kept = in_format(net, Format(4, convolutions=False))
    assert torch.equal(kept[1].weight, net[1].weight)


@torch.no_grad()
def test_halves_round_and_overflow_as_torch_does():
    net, images = timm.create_model("test_resnet").eval(), torch.randn(4, 3, 64, 64)
    for form, dtype in (("float16", torch.float16), ("bfloat16", torch.bfloat16)):
        native, ours = net.to(dtype)(images.to(dtype)).float(), in_format(net, form)(images)
        exact = net.float()(images)
        assert (ours - exact).norm() < 1.5 * (native - exact).norm()
        assert (ours - native).norm() < 1.5 * (native - exact).norm()
    net.get_classifier().weight.fill_(6e4)
    assert not torch.isfinite(in_format(net, "float16")(images)).any()


def test_mantissas_are_cut():
    x = torch.tensor([1.0, 1 + 2**-10, 1 + 2**-12, -(1 + 2**-11), 0.0, 3e-39, torch.inf])
    expected = torch.tensor([1.0, 1 + 2**-10, 1.0, -(1 + 2**-10), 0.0, 3e-39, torch.inf])
    torch.testing.assert_close(cut(x, 10), expected, rtol=0, atol=1e-41)


def test_an_unknown_format_is_named():
    with pytest.raises(ValueError, match=r"'int5' is no number format; there are float64, .*int4_groups"):
        in_format(nn.Linear(2, 2), "int5")
