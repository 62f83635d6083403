from __future__ import annotations

import pytest

from probes.lib.comm.kernel_names import communication, element_bytes


@pytest.mark.parametrize(
    ("name", "family", "collective"),
    [
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "nccl", "all_reduce"),
        ("ncclKernel_AllReduce_RING_LL_Sum_float(ncclDevComm*, unsigned long, ncclWork*)", "nccl", "all_reduce"),
        ("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(x)", "nccl", "reduce_scatter"),
        ("ncclDevKernel_AllGather_RING_LL(x)", "nccl", "all_gather"),
        ("ncclDevKernel_Broadcast_RING_LL(x)", "nccl", "broadcast"),
        ("ncclDevKernel_SendRecv(x)", "nccl", "send_recv"),
        ("ncclDevKernel_Reduce_Sum_f32_RING_LL(x)", "nccl", "reduce"),
        ("ncclSymkDevKernel_AllReduce_RSxLD_AGxST_sum_bf16(x)", "nccl", "all_reduce"),
        ("ncclDevKernel_Generic_4(x)", "nccl", "unnamed"),
        ("_Z34ncclDevKernel_AllReduce_Sum_f16_RING_LL24ncclDevKernelArgsStorageILm4096EE", "nccl", "all_reduce"),
        ("void vllm::cross_device_reduce_2stage<__nv_bfloat16, 8>(vllm::RankData*)", "custom", "all_reduce"),
        ("void sglang::cross_device_reduce_1stage<__half, 4>(x)", "custom", "all_reduce"),
        ("void flashinfer::trtllm_allreduce_fusion::allreduce_fusion_kernel_oneshot_lamport<1>(x)", "custom", "all_reduce"),
        ("multimem_all_reduce_kernel", "custom", "all_reduce"),
        ("void deep_ep::intranode::dispatch<8, 768>(x)", "custom", "send_recv"),
        ("void tensorrt_llm::kernels::moe_comm::moeA2ADispatchKernel<8, true>(x)", "custom", "all_to_all"),
    ],
)
def test_kernels_that_communicate(name: str, family: str, collective: str) -> None:
    assert communication(name) == (family, collective)


@pytest.mark.parametrize(
    "name",
    [
        "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float> >(x)", "void gemm<ncclThing>(x)", "_scatter_gather_elementwise_kernel",
        "void cub::DeviceReduceKernel<x>(y)", "Memcpy HtoD (Pinned -> Device)", "void at::native::index_elementwise_kernel<1>(x)",
        "void flash::flash_fwd_splitkv_combine_kernel<x>(y)", "triton_red_fused_add_0", "", "<<<", "layer_norm_allreduced_stats",
        "moeA2APrepareDispatchKernel(int*)",
    ],
)  # fmt: skip
def test_kernels_that_compute(name: str) -> None:
    assert communication(name) is None


@pytest.mark.parametrize(
    ("recorded", "collective"),
    [("allreduce", "all_reduce"), ("_allgather_base", "all_gather"), ("_reduce_scatter_base", "reduce_scatter"), ("all_to_allv", "all_to_all"),
     ("_broadcast_oop", "broadcast"), ("send", "send_recv"), ("recv", "send_recv"), ("barrier", "barrier"), ("odd", "unnamed"), (7, "unnamed")],
)  # fmt: skip
def test_what_the_profiler_recorded(recorded: object, collective: str) -> None:
    assert communication("ncclDevKernel_Generic(x)", recorded) == ("nccl", collective)


@pytest.mark.parametrize(
    ("dtype", "size"), [("BFloat16", 2), ("Float", 4), ("torch.float8_e4m3fn", 1), ("Long", 8), ("Odd", None), (None, None), (3, None)]
)
def test_bytes_of_an_element(dtype: object, size: int | None) -> None:
    assert element_bytes(dtype) == size
