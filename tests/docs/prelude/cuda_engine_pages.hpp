// SPDX-License-Identifier: Apache-2.0
//
// Names that fragments about an engine's tensor on a device may use. Compiled with the host emulation of the tests, as
// the prelude `cuda`. needs: simt
#define KVPOLICY_CUDA_HEAD_DIMS 64
#include <cstddef>
#include <span>

#include <kvpolicy/cuda.hpp>
#include <kvpolicy/kvpolicy.hpp>
// each block
struct Engine {
  kvpolicy::ModelShape shape{.layers = 32, .q_heads = 32, .kv_heads = 8, .head_dim = 64};
  std::size_t block_count = 4096;
  cudaStream_t stream = nullptr;

  void run(std::span<std::byte> device_tensor) { BLOCK }
};
