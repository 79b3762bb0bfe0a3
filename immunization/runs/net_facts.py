"""What a file of weights may say about its net: the timm model, its arguments and the image preparation."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from immunization.errors import DataError

Facts = Mapping[str, Any]

_SHAPING = """
    num_classes in_chans global_pool img_size dynamic_img_size dynamic_img_pad strict_img_size always_partition
    drop_rate drop_path_rate drop_block_rate pos_drop_rate patch_drop_rate proj_drop_rate attn_drop_rate
    output_stride embed_dim embed_dims depth depths dim dims width widths layers channels num_heads heads head_dim
    mlp_ratio mlp_ratios patch_size window_size window_sizes kernel_size kernel_sizes num_features stem_size
    stem_type stem_width base_width cardinality groups avg_down aa_layer act_layer norm_layer pad_type qkv_bias
    qk_norm init_values ls_init_value layer_scale_init_value class_token reg_tokens num_reg_tokens pos_embed
    no_embed_class pre_norm final_norm fc_norm use_fc_norm distilled head_hidden_size head_init_scale
    partial_dim img_scale stem_chs head_norm_first zero_init_last weight_init fix_init norm_eps bn_eps bn_momentum
"""
ARGUMENTS = frozenset(_SHAPING.split())
"""Arguments of timm.create_model that shape a net, and neither read a file nor ask the network."""

IMAGES = ("input_size", "interpolation", "mean", "std", "crop_pct", "crop_mode")
"""How a net wants its images: keys of timm's data config."""


def net_of(path: Path, facts: Facts) -> tuple[str, dict[str, Any]]:
    """`architecture` and `arguments` for timm.create_model; raises DataError for any that a file may not choose."""
    import timm

    name, arguments = facts.get("architecture"), facts.get("arguments") or {}
    if not isinstance(name, str) or not timm.is_model(name.partition(".")[0]):
        raise DataError(
            f"{path} names the architecture {name!r}: a file may name models of timm alone (timm.list_models)"
        )
    if not isinstance(arguments, Mapping):
        raise DataError(f"{path}: its arguments of timm.create_model are {arguments!r}, not names with values")
    if refused := [str(key) for key, value in arguments.items() if key not in ARGUMENTS or not _plain(value)]:
        raise DataError(
            f"{path} sets {', '.join(refused)} of timm.create_model: a file may set only what shapes a net "
            f"({', '.join(sorted(ARGUMENTS)[:4])}, ...), in plain values. If you trust it, give the others yourself: "
            "immunization.load(path, net), or model.arguments={...}"
        )
    return name, dict(arguments)


def images_of(path: Path, facts: Facts) -> dict[str, Any]:
    """How the net wants its images, in timm's words; {} where `data_config` says nothing; raises DataError."""
    config = facts.get("data_config") or {}
    if not isinstance(config, Mapping):
        raise DataError(f"{path}: its data_config is {config!r}, not names with values")
    said = {key: config[key] for key in IMAGES if config.get(key) is not None}
    for key, value in said.items():
        numbers = isinstance(value, list | tuple) and all(_number(item) for item in value) and len(value)
        fits = {"input_size": numbers == 3, "mean": numbers, "std": numbers, "crop_pct": _number(value)}
        if not fits.get(key, isinstance(value, str)):
            raise DataError(f"{path}: {key} of its data_config is {value!r}, which is not a valid {key} of images")
    return {key: tuple(value) if isinstance(value, list) else value for key, value in said.items()}


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _plain(value: object) -> bool:
    if isinstance(value, list | tuple):
        return all(_plain(item) for item in value)
    return value is None or isinstance(value, str | int | float | bool)
