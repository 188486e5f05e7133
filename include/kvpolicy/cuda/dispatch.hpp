// SPDX-License-Identifier: Apache-2.0
//
// From a head dimension at run time to the kernels that are compiled for it.
#pragma once

#include <cstddef>
#include <string>
#include <utility>

#include <kvpolicy/core/error.hpp>

/// The head dimensions that kernels are compiled for: fewer compile faster. Define it alike in
/// every translation unit of a program.
#ifndef KVPOLICY_CUDA_HEAD_DIMS
#define KVPOLICY_CUDA_HEAD_DIMS 64, 80, 96, 128, 256
#endif

namespace kvpolicy::gpu {

/// Calls `f.template operator()<HeadDim>()`. @throws ConfigError for one that is not compiled.
template <class F>
void dispatch_head_dim(std::size_t head_dim, F f) {
  const auto among = [&]<int... Dims>(std::integer_sequence<int, Dims...>) {
    const bool found =
        ((head_dim == static_cast<std::size_t>(Dims) && (f.template operator()<Dims>(), true)) || ...);
    if (found) return;
    std::string known;
    ((known += (known.empty() ? "" : ", ") + std::to_string(Dims)), ...);
    fail<ConfigError>("gpu::Engine: head_dim is ", head_dim, ", kernels were compiled for ", known,
                      " (KVPOLICY_CUDA_HEAD_DIMS)");
  };
  among(std::integer_sequence<int, KVPOLICY_CUDA_HEAD_DIMS>{});
}

}  // namespace kvpolicy::gpu
