// SPDX-License-Identifier: Apache-2.0
//
// The kernels of programs whose rows are bfloat16: the tests of the reference model and the tools, and the benches.
#include <kvpolicy/cuda/instances.hpp>

KVPOLICY_DEFINE_COMMON_KERNELS()
KVPOLICY_DEFINE_KERNELS(kvpolicy::bfloat16, KVPOLICY_CUDA_HEAD_DIMS)
