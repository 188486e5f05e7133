// SPDX-License-Identifier: Apache-2.0
#include "cuda/compiled/instances.hpp"

KVPOLICY_DEVICE_CACHE(template, kvpolicy::bfloat16)
#ifndef __CUDACC__  // for a device these are objects of their own: cmake/KvpolicyGpuKernels.cmake
#include <kvpolicy/cuda/instances.hpp>

KVPOLICY_DEFINE_KERNELS(kvpolicy::bfloat16, 64)
#endif
