// SPDX-License-Identifier: Apache-2.0
#include "tensor16.hpp"

#include <reference_model/cuda/kernels/random.cuh>
#include <reference_model/cuda/tabulate.hpp>

namespace kvpolicy::bench {

void Tensor16::randomize(std::uint64_t seed, cudaStream_t stream) const {
  reference::tabulate(bits(), count_, gpu::llama::RandomNumbers{seed << 32, 1.7320508F}, stream);
}

std::size_t Tensor16::nans(cudaStream_t stream) const {
  return reference::count_of(bits(), count_, gpu::llama::IsNan{}, stream);
}

}  // namespace kvpolicy::bench
