// SPDX-License-Identifier: Apache-2.0
//
// The engine for NVIDIA GPUs, and the cache that uses it: kvpolicy::cuda. Include it in a .cu file;
// it needs the CUDA Toolkit and nothing else.
//
//   kvpolicy::cuda::KvCache cache{plan, {.max_rollback = 8}, stream};
//   cache.reserve(longest_text, stream);
//   cache.step(layer, q, k, v, out, {}, stream);
//
// cuda/saved_cache.hpp adds files, cuda/host_copy.hpp copies of a cache on the host.
#pragma once

#include <kvpolicy/cuda/engine.hpp>
#include <kvpolicy/cuda/kv_cache.hpp>
#include <kvpolicy/cuda/memory.hpp>
#include <kvpolicy/cuda/memory_of.hpp>
#include <kvpolicy/cuda/options.hpp>
#include <kvpolicy/cuda/pinned_memory.hpp>
#if defined(__CUDACC__)
#include <kvpolicy/cuda/tensor.hpp>
#endif
