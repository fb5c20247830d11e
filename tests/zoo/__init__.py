"""Models that the tests search, split and run: each a train step that a user might have written.

`MAKERS` maps a name to a `make_*` function; called without arguments it gives a tiny `Case`. All
take `dtype` (float64 wants `jax.enable_x64`). Batches of 24 split by 8 and by 6. `make_small` is for
tests that compile the whole step: one layer of each kind, and an update of few ops.
"""

import functools

import optax

from autoshard.search.ir.graph import Step
from autoshard.search.ir.trace import trace

from .autoencoder import make_autoencoder
from .case import Case
from .dlrm import make_dlrm
from .evoformer import make_evoformer
from .gpt_linen import make_gpt_linen
from .gpt_nnx import make_gpt_nnx, make_gpt_nnx_optimizer
from .gpt_scan import make_gpt_scan
from .llama import LLAMA_3_8B, LLAMA_7B, make_llama
from .lstm import make_lstm
from .megatron import make_megatron
from .message_passing import make_message_passing
from .mixer import make_mixer
from .mlp import make_mlp
from .moe import make_moe
from .resnet import make_resnet
from .t5 import make_t5
from .unet import make_unet
from .vit import make_vit

MAKERS = {
    "mlp": make_mlp,
    "gpt_linen": make_gpt_linen,
    "gpt_nnx": make_gpt_nnx,
    "gpt_nnx_optimizer": make_gpt_nnx_optimizer,
    "gpt_scan": make_gpt_scan,
    "megatron": make_megatron,
    "llama": make_llama,
    "moe": make_moe,
    "t5": make_t5,
    "vit": make_vit,
    "mixer": make_mixer,
    "resnet": make_resnet,
    "autoencoder": make_autoencoder,
    "lstm": make_lstm,
    "dlrm": make_dlrm,
    "evoformer": make_evoformer,
    "unet": make_unet,
    "message_passing": make_message_passing,
}


@functools.cache
def traced(name: str) -> Step:
    """A model's step as its maker makes it, traced once for all test modules."""
    case = MAKERS[name]()
    return trace(case.step, *case.abstract_args())


MOMENTUM = optax.sgd(0.1, momentum=0.9)
"""Adam's update would be a third of what there is to compile."""

SMALL = {
    "gpt_linen": {"num_layers": 1, "optimizer": MOMENTUM},
    "gpt_nnx_optimizer": {"num_layers": 1},
    "gpt_scan": {"optimizer": MOMENTUM},
    "megatron": {"num_layers": 1},
    "llama": {"num_layers": 1, "optimizer": MOMENTUM},
    "moe": {"num_layers": 1, "optimizer": MOMENTUM},
    "t5": {"num_layers": 1},
    "vit": {"num_layers": 1, "optimizer": MOMENTUM},
    "autoencoder": {"optimizer": MOMENTUM},
    "lstm": {"num_layers": 1, "optimizer": MOMENTUM},
    "dlrm": {"table_rows": (512, 64), "top": (32,), "optimizer": "sgd"},
    "resnet": {"stage_features": (16,), "blocks_per_stage": (1,), "stem": (3, 2)},
    "evoformer": {"num_layers": 1, "optimizer": MOMENTUM},
    "message_passing": {"num_layers": 1, "optimizer": MOMENTUM},
}
"""By name, options of its maker."""


def make_small(name: str, **options) -> Case:
    """A model as `SMALL` has it, and with these options."""
    return MAKERS[name](**SMALL.get(name, {}), **options)


__all__ = [
    "LLAMA_3_8B",
    "LLAMA_7B",
    "MAKERS",
    "MOMENTUM",
    "Case",
    "make_autoencoder",
    "make_dlrm",
    "make_evoformer",
    "make_gpt_linen",
    "make_gpt_nnx",
    "make_gpt_nnx_optimizer",
    "make_gpt_scan",
    "make_llama",
    "make_lstm",
    "make_megatron",
    "make_message_passing",
    "make_mixer",
    "make_mlp",
    "make_moe",
    "make_resnet",
    "make_small",
    "make_t5",
    "make_unet",
    "make_vit",
    "traced",
]
