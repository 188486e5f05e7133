// SPDX-License-Identifier: Apache-2.0
//
// The cache and the engine for NVIDIA GPUs: kvpolicy::gpu. Include this header in a .cu file; it needs
// only the CUDA Toolkit.
//
//   kvpolicy::gpu::KvCache cache{plan, {.max_rollback = 8}, stream};
//   cache.reserve(longest_text, stream);
//   cache.step(layer, q, k, v, out, {}, stream);
//
// cuda/saved_cache.hpp saves and loads caches; cuda/host_copy.hpp copies a cache to and from the host.
#pragma once

#include <kvpolicy/cuda/batch.hpp>
#include <kvpolicy/cuda/engine.hpp>
#include <kvpolicy/cuda/kv_cache.hpp>
#include <kvpolicy/cuda/memory.hpp>
#include <kvpolicy/cuda/memory_of.hpp>
#include <kvpolicy/cuda/options.hpp>
#include <kvpolicy/cuda/pinned_memory.hpp>
#include <kvpolicy/cuda/seated_batch.hpp>
#include <kvpolicy/cuda/swapped_cache.hpp>
#include <kvpolicy/cuda/value_outputs.hpp>
#if defined(__CUDACC__)
#include <kvpolicy/cuda/tensor.hpp>
#endif
