"""Random text-to-image pipelines of a few hundred kilobytes, made with diffusers."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKL,
    DDIMScheduler,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
    StableDiffusionPipeline,
    StableDiffusionXLPipeline,
    UNet2DConditionModel,
)
from tokenizers import Tokenizer, models
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    T5Config,
    T5EncoderModel,
    T5TokenizerFast,
)

_LETTERS = [chr(i) for i in range(33, 127)]
_HIDDEN = 32


def stable_diffusion(folder: Path) -> Path:
    """A Stable Diffusion pipeline of the first generation; it makes images of 64 x 64 pixels."""
    pipe = StableDiffusionPipeline(
        vae=_vae(4), text_encoder=CLIPTextModel(_clip()), tokenizer=_clip_tokenizer(folder), unet=_unet(_HIDDEN),
        scheduler=_ddim(),
        safety_checker=None, feature_extractor=None, requires_safety_checker=False,
    )  # fmt: skip
    return _saved(pipe, folder)


def stable_diffusion_xl(folder: Path) -> Path:
    pipe = StableDiffusionXLPipeline(
        vae=_vae(4), text_encoder=CLIPTextModel(_clip()), tokenizer=_clip_tokenizer(folder),
        text_encoder_2=CLIPTextModelWithProjection(_clip()), tokenizer_2=_clip_tokenizer(folder),
        unet=_unet(2 * _HIDDEN, addition_embed_type="text_time", addition_time_embed_dim=8,
                   projection_class_embeddings_input_dim=6 * 8 + _HIDDEN),
        scheduler=_ddim(),
    )  # fmt: skip
    return _saved(pipe, folder)


def stable_diffusion_3(folder: Path) -> Path:
    transformer = SD3Transformer2DModel(
        sample_size=32, patch_size=1, in_channels=4, num_layers=1, attention_head_dim=8, num_attention_heads=4,
        joint_attention_dim=_HIDDEN, caption_projection_dim=32, pooled_projection_dim=2 * _HIDDEN, out_channels=4,
    )  # fmt: skip
    pipe = StableDiffusion3Pipeline(
        transformer=transformer, scheduler=FlowMatchEulerDiscreteScheduler(), vae=_vae(4, shift_factor=0.1),
        text_encoder=CLIPTextModelWithProjection(_clip()), tokenizer=_clip_tokenizer(folder),
        text_encoder_2=CLIPTextModelWithProjection(_clip()), tokenizer_2=_clip_tokenizer(folder),
        text_encoder_3=T5EncoderModel(_t5()), tokenizer_3=_t5_tokenizer(),
    )  # fmt: skip
    return _saved(pipe, folder)


def flux(folder: Path) -> Path:
    transformer = FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=_HIDDEN, pooled_projection_dim=_HIDDEN, axes_dims_rope=(4, 4, 8),
    )  # fmt: skip
    pipe = FluxPipeline(
        transformer=transformer, scheduler=FlowMatchEulerDiscreteScheduler(), vae=_vae(1, shift_factor=0.1),
        text_encoder=CLIPTextModel(_clip()), tokenizer=_clip_tokenizer(folder),
        text_encoder_2=T5EncoderModel(_t5()), tokenizer_2=_t5_tokenizer(),
    )  # fmt: skip
    return _saved(pipe, folder)


KINDS: dict[str, Callable[[Path], Path]] = {
    "StableDiffusionPipeline": stable_diffusion,
    "StableDiffusionXLPipeline": stable_diffusion_xl,
    "StableDiffusion3Pipeline": stable_diffusion_3,
    "FluxPipeline": flux,
}


def _saved(pipe: Any, folder: Path) -> Path:
    pipe.save_pretrained(folder / "pipeline", safe_serialization=True)
    return folder / "pipeline"


def _vae(channels: int, **more: Any) -> AutoencoderKL:
    """A VAE that halves each side."""
    torch.manual_seed(0)
    return AutoencoderKL(
        block_out_channels=(8, 8), norm_num_groups=4, latent_channels=channels, sample_size=64,
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2, **more,
    )  # fmt: skip


def _ddim() -> DDIMScheduler:
    return DDIMScheduler(clip_sample=False, set_alpha_to_one=False, steps_offset=1, beta_schedule="scaled_linear")


def _unet(cross: int, **more: Any) -> UNet2DConditionModel:
    torch.manual_seed(0)
    return UNet2DConditionModel(
        sample_size=32, block_out_channels=(8, 16), layers_per_block=1, norm_num_groups=4, cross_attention_dim=cross,
        attention_head_dim=2, down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"), **more,
    )  # fmt: skip


def _clip() -> CLIPTextConfig:
    torch.manual_seed(0)
    return CLIPTextConfig(
        vocab_size=2 * len(_LETTERS) + 2, hidden_size=_HIDDEN, intermediate_size=37, num_hidden_layers=2,
        num_attention_heads=4, projection_dim=_HIDDEN, bos_token_id=2 * len(_LETTERS),
        eos_token_id=2 * len(_LETTERS) + 1,
    )  # fmt: skip


def _clip_tokenizer(folder: Path) -> CLIPTokenizer:
    """A tokenizer with two tokens per letter: one inside a word, one at its end."""
    pieces = [*_LETTERS, *(f"{letter}</w>" for letter in _LETTERS), "<|startoftext|>", "<|endoftext|>"]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.json").write_text(json.dumps({piece: i for i, piece in enumerate(pieces)}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    return CLIPTokenizer(str(folder / "vocab.json"), str(folder / "merges.txt"), model_max_length=77)


def _t5() -> T5Config:
    torch.manual_seed(0)
    return T5Config(
        vocab_size=len(_LETTERS) + 4,
        d_model=_HIDDEN,
        d_kv=8,
        d_ff=37,
        num_layers=1,
        num_heads=4,
        is_encoder_decoder=False,
    )


def _t5_tokenizer() -> T5TokenizerFast:
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0), *((letter, -3.0) for letter in _LETTERS)]
    return T5TokenizerFast(tokenizer_object=Tokenizer(models.Unigram(pieces, unk_id=2)), extra_ids=0)
