"""Kernels by their names: as XLA:GPU, cuBLAS, cuDNN, CUTLASS and NCCL call them."""

import pytest

from autoshard.traces.kernel import TracedKernel
from autoshard.traces.kernel_names import SENDS, class_of

NCCL = "(ncclDevKernelArgsStorage<4096ul>)"

OF_INSTRUCTION = [
    ("all-gather-start.4", f"ncclDevKernel_AllGather_RING_LL{NCCL}", "all-gather"),
    ("all-reduce-start", f"ncclDevKernel_AllReduce_Sum_bf16_RING_LL{NCCL}", "all-reduce"),
    ("all-reduce-start", "one_shot_all_reduce_kernel", "all-reduce"),
    ("all-to-all.2", f"ncclDevKernel_SendRecv{NCCL}", "all-to-all"),
    ("collective-permute-start.1", "MemcpyP2P", "collective-permute"),
    ("ragged-all-to-all-start", "MemcpyP2P", "all-to-all"),
    ("loop_all_gather_fusion", "loop_all_gather_fusion", "elementwise and fused"),
    ("gemm_fusion_dot.3", "gemm_fusion_dot_3", "products"),
    ("custom-call.5", "nvjet_tst_128x256_64x4_2x1_v_bz_TNT", "products"),
    ("dot.1", "dot.1", "products"),
    (
        "cudnn-conv-bw-filter.2",
        "sm80_xmma_wgrad_implicit_gemm_tf32f32_tf32f32_f32_nhwckrsc_nhwc",
        "convolutions",
    ),
    ("custom-call.9", "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_3", "attention"),
    ("wrapped_convert", "wrapped_convert", "elementwise and fused"),
    ("input_reduce_fusion.1", "input_reduce_fusion_1", "elementwise and fused"),
    ("rng-bit-generator.1", "rng_bit_generator_1", "elementwise and fused"),
    ("custom-call.2", "void cusolver_getrf_kernel<float>", "other kernels"),
    ("copy-start.3", "MemcpyD2H", "copies to and from the host"),
    ("copy.7", "MemcpyD2D", "copies on the device"),
]

IN_A_GRAPH = [
    (f"ncclDevKernel_ReduceScatter_Sum_f32_RING_LL{NCCL}", "reduce-scatter"),
    (f"ncclKernel_AllReduce_RING_LL_Sum_float{NCCL}", "all-reduce"),
    (f"ncclDevKernel_SendRecv{NCCL}", SENDS),
    ("void cutlass::Kernel2<cutlass_80_tensorop_s1688gemm_128x128_16x5_nn_align4>", "products"),
    ("loop_add_fusion", "elementwise and fused"),
    ("wrapped_transpose", "elementwise and fused"),
]


@pytest.mark.parametrize(("hlo_op", "name", "kind"), [*OF_INSTRUCTION, *(("", *one) for one in IN_A_GRAPH)])
def test_the_class_of_a_kernel(hlo_op, name, kind):
    assert class_of(TracedKernel("gpu", name, 0.0, 1.0, hlo_op)) == kind
